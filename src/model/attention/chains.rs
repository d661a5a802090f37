//! Attention of a training-time test: every token of a row is followed by a chain of guesses of its own.

// B rows, T tokens of a row, H hidden, Q query heads, G key/value heads, D head size
use tch::{Kind, Tensor};

use super::{Attention, KindMask};
use crate::model::block_spec::HeadShape;
use crate::model::lora::Adapters;
use crate::model::rope::Rotation;
use crate::torch::wide;

/// Keys and values of the steps so far, `[B, T, G, D]` each: those of the rows themselves, then those of each step of their chains.
#[derive(Debug, Default)]
pub struct ChainKeys(Vec<[Tensor; 2]>);

impl Attention {
    /// The next step of all chains: `x_bth` `[B, T, H]` to the same shape. In the first step tokens attend to each other, as in
    /// [`Attention::over_rows`]; in the others to the keys of the first step, and to their own chain's.
    pub(in crate::model) fn over_chains(
        &self,
        x_bth: &Tensor,
        rotation: Option<&Rotation>,
        mask: &KindMask,
        keys: &mut ChainKeys,
    ) -> Tensor {
        let HeadShape { q, g, d, .. } = self.shape;
        let (b, t) = (x_bth.size()[0], x_bth.size()[1]);
        let [queries, new_keys, values] = self.qkv.each(x_bth, [q * d, g * d, g * d], Adapters::Off);
        let heads = |x: &Tensor, heads: i64| x.view([b, t, heads, d]);
        let rotated = |x: Tensor| rotation.map_or_else(|| x.shallow_clone(), |rotation| rotation.apply(&x));
        let (q_bthd, v_bthd) = (rotated(heads(&queries, q)), heads(&values, g));
        keys.0.push([rotated(heads(&new_keys, g)), v_bthd]);
        let out_bthd = match &keys.0[..] {
            [[k_bthd, v_bthd]] => self.attend_rows(&[q_bthd, k_bthd.shallow_clone(), v_bthd.shallow_clone()], mask),
            all => self.attend_chains(&q_bthd, all, mask),
        };
        self.o.forward(&out_bthd.reshape([b, t, q * d]), Adapters::Off)
    }

    /// Queries `[B, T, Q, D]` of a later step; returns the same shape.
    fn attend_chains(&self, q_bthd: &Tensor, keys: &[[Tensor; 2]], mask: &KindMask) -> Tensor {
        let by_head = |x_bthd: &Tensor| self.for_each_query_head(&x_bthd.transpose(1, 2));
        let q_bqtd = q_bthd.transpose(1, 2) * self.shape.scale;
        let keys: Vec<[Tensor; 2]> = keys.iter().map(|both| both.each_ref().map(by_head)).collect();
        let (rows, chain) = keys.split_first().expect("the keys of the first step");
        let row_scores_bqtt = q_bqtd.matmul(&rows[0].transpose(-2, -1)) + mask.whole(&q_bqtd);
        let own_scores = chain.iter().map(|[k_bqtd, _]| (&q_bqtd * k_bqtd).sum_dim_intlist(-1, true, None::<Kind>));
        let scores: Vec<Tensor> = std::iter::once(row_scores_bqtt).chain(own_scores).collect();
        let weights = Tensor::cat(&scores, -1).softmax(-1, wide(q_bqtd.kind())).to_kind(q_bqtd.kind());
        let t = q_bqtd.size()[2];
        let from_rows = weights.narrow(-1, 0, t).matmul(&rows[1]);
        let own = (t..).zip(chain).map(|(at, [_, v_bqtd])| weights.narrow(-1, at, 1) * v_bqtd);
        own.fold(from_rows, |sum, part| sum + part).transpose(1, 2)
    }
}
