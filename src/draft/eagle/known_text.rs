//! What an EAGLE-3 drafter guesses in a text whose tokens are known.

// T tokens of the text, N positions, H hidden, W a token's states
use tch::Tensor;

use super::levels::EagleLevels;
use super::weights::Eagle;
use crate::draft::levels::LevelGuesser;
use crate::draft::trained::KnownText;
use crate::formats::tree::DynamicTree;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::upload;

/// A text, and the layer's outputs at its positions.
#[derive(Debug)]
pub(super) struct EagleText<'a> {
    backbone: &'a Llama,
    eagle: &'a Eagle,
    ids: Vec<i64>,
    states_tw: Tensor,
    /// Of each step, `[T, H]`.
    outputs_th: Vec<Tensor>,
}

impl<'a> EagleText<'a> {
    pub(super) fn new(eagle: &'a Eagle, backbone: &'a Llama, ids: &[i64]) -> Self {
        let (t, tokens_t) = (ids.len() as i64, upload(ids, backbone.stages().first()));
        let mask = backbone.causal_rows(t);
        let states_1tw = backbone.hidden_states(&tokens_t.unsqueeze(0), &mask, Adapters::Off);
        let own_mask = eagle.layer.mask(&[vec![ids.len()]], t);
        let embedded = |step: usize| backbone.embed(&tokens_t.roll([-1 - step as i64], [0])).unsqueeze(0);
        let outputs = tch::no_grad(|| eagle.unroll_rows(&eagle.tapped(&states_1tw), embedded, &own_mask));
        let outputs_th = outputs.iter().map(|output_1th| output_1th.squeeze_dim(0)).collect();
        Self { backbone, eagle, ids: ids.to_vec(), states_tw: states_1tw.squeeze_dim(0), outputs_th }
    }
}

impl KnownText for EagleText<'_> {
    fn logits(&self, level: usize, positions: &[i64]) -> Tensor {
        let outputs_nh = self.outputs_th[level].index_select(0, &upload(positions, self.eagle.device()));
        tch::no_grad(|| self.eagle.logits(&outputs_nh))
    }

    fn begin_at(&self, positions: &[i64], _: DynamicTree) -> Box<dyn LevelGuesser + '_> {
        let text = (&self.ids[..], &self.states_tw);
        Box::new(EagleLevels::in_text(self.backbone, self.eagle, text, positions))
    }
}
