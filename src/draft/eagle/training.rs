//! The training-time test: every token of a row is followed by a chain of the drafter's steps, each of which reads the true token and the output of the
//! step before. Step `i` (0-based) at token `t` predicts token `t + i + 2`, as the drafter's guess `i` does.

// B rows, T tokens of a row, N = B·T positions, H hidden
use tch::{Kind, Tensor};

use super::weights::Eagle;
use crate::draft::loss::Targets;
use crate::draft::loss::fused::{LevelBlocks, LevelGradients, LevelSums, OutputGradients, OutputLayer};
use crate::draft::trained::{DrafterBatch, DrafterGradients};
use crate::model::attention::RowMask;
use crate::model::backward::{FEWEST_TOKENS, LARGEST_INPUT};
use crate::model::eagle_layer::{EagleChains, EagleLayer};
use crate::torch::loss_scale::LossScale;
use crate::torch::{upload, wide};

/// The norm before the output layer.
struct OutputNorm<'e>(&'e EagleLayer);

impl LevelBlocks for OutputNorm<'_> {
    fn parameters(&self) -> Vec<&Tensor> {
        vec![self.0.norm_weight()]
    }

    fn forward(&self, selected_mh: &Tensor, _: &Targets) -> Tensor {
        self.0.normed(selected_mh)
    }
}

impl Eagle {
    /// See [`crate::draft::trained::TrainedDrafter::losses`].
    pub(super) fn losses_of_steps(&self, batch: &DrafterBatch, into: Option<&DrafterGradients>) -> Vec<LevelSums> {
        let (b, t) = (batch.rows.rows as i64, batch.rows.length as i64);
        let taps_btl = self.tapped(batch.states_nw).view([b, t, -1]);
        let ids_bt = upload(&batch.rows.input_ids, self.device()).view([b, t]);
        let mask = self.layer.mask(&batch.rows.segment_lengths, t);
        let unroll = || self.unroll(&taps_btl, &ids_bt, &mask, batch);
        let outputs_bth = if into.is_some() { unroll() } else { tch::no_grad(unroll) };
        let gradients: Vec<Tensor> = match into {
            Some(_) => {
                outputs_bth.iter().map(|x| Tensor::zeros([b * t, x.size()[2]], (wide(x.kind()), x.device()))).collect()
            }
            None => vec![],
        };
        let sums = outputs_bth.iter().enumerate().map(|(step, output_bth)| {
            let level = into.map(|into| self.level_gradients(into, &gradients[step]));
            let (output_nh, output) = (output_bth.detach().flatten(0, 1), OutputLayer::plain(self.lm_head_vh()));
            let fed = (batch, self.token_map.as_ref());
            batch.levels[step].loss(&OutputNorm(&self.layer), output, fed, &output_nh, level.as_ref())
        });
        let sums = sums.collect();
        if let Some(into) = into {
            self.backward(&outputs_bth, &gradients, &into.own);
        }
        sums
    }

    /// The layer's outputs of all steps, `[B, T, H]` each, from the taps of rows, `[B, T, L·H]`, and their tokens. With autograd.
    pub(super) fn unroll_rows(
        &self,
        taps_btl: &Tensor,
        embedded: impl Fn(usize) -> Tensor,
        mask: &RowMask,
    ) -> Vec<Tensor> {
        let mut chains = EagleChains::new(mask);
        let mut outputs: Vec<Tensor> = Vec::with_capacity(self.steps);
        for step in 0..self.steps {
            let features = outputs.last().map_or_else(|| self.layer.features(taps_btl), Tensor::shallow_clone);
            outputs.push(self.layer.step(&embedded(step), &features, &mut chains));
        }
        outputs
    }

    fn unroll(&self, taps_btl: &Tensor, ids_bt: &Tensor, mask: &RowMask, batch: &DrafterBatch) -> Vec<Tensor> {
        // What is rolled in from the front of a row stands behind its end, where nothing is predicted.
        let embedded = |step: usize| batch.backbone.embed(&ids_bt.roll([-1 - step as i64], [1])).detach();
        self.unroll_rows(taps_btl, embedded, mask)
    }

    /// Where one step's gradients go: the last two of the parameters are the norm and the output layer.
    fn level_gradients<'g>(&self, into: &DrafterGradients<'g>, doutput_nh: &'g Tensor) -> LevelGradients<'g> {
        let [.., norm_h, lm_head_vh] = into.own[..] else { panic!("a gradient for each parameter") };
        let output = OutputGradients { weight_vh: Some(lm_head_vh), ..OutputGradients::default() };
        LevelGradients { blocks: vec![norm_h], output, hidden_nh: Some(doutput_nh) }
    }

    /// Adds the gradients of the layer's other weights, given those of its outputs, `[N, H]` each.
    fn backward(&self, outputs_bth: &[Tensor], doutputs_nh: &[Tensor], into: &[&Tensor]) {
        let weights = self.layer.parameters();
        let (_, inputs) = weights.split_last().expect("the norm is the last");
        let inputs: Vec<&Tensor> = inputs.iter().map(|(_, weight)| *weight).collect();
        let (kind, tokens) = (outputs_bth[0].kind(), doutputs_nh[0].size()[0]);
        let gradients: Vec<&Tensor> = doutputs_nh.iter().collect();
        let scale = LossScale::for_sums(kind, &gradients, FEWEST_TOKENS.max(tokens), &Tensor::from(LARGEST_INPUT));
        // tch cannot start a backward pass from a given output gradient dx, but the gradient of Σ x·dx with respect to x is dx.
        let product =
            |(output, gradient): (&Tensor, &Tensor)| (output.flatten(0, 1) * scale.cast(gradient)).sum(wide(kind));
        let products: Vec<Tensor> = outputs_bth.iter().zip(doutputs_nh).map(product).collect();
        let sum = Tensor::stack(&products, 0).sum(None::<Kind>);
        let by_input = Tensor::run_backward(&[sum], &inputs, false, false);
        for (sum, gradient) in into.iter().zip(by_input) {
            let _ = sum.shallow_clone().g_add_(&scale.undo(gradient).to_kind(sum.kind()));
        }
    }
}
