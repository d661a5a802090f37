//! The backbone's forward pass as training needs it: kept, whole or as the inputs of its parts only (recompute), until the gradient
//! of its hidden states is known. tch has no hooks and no checkpointing, so parts are differentiated one by one: that of part `p`
//! with output `y` and output gradient `dy` is the gradient of `Σ y·dy`, bit for bit.

// B rows, T tokens of a row, H hidden
use tch::Tensor;

use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::rope::RotationsByKind;
use crate::torch::loss_scale::LossScale;
use crate::torch::wide;

/// Assumptions of a part's loss scale: inputs of products are at most this large on average over the tokens (they are normed), and there
/// are at least so many tokens, so that gradients can grow within a part.
pub const LARGEST_INPUT: f32 = 8.0;
pub const FEWEST_TOKENS: i64 = 2048;

/// What stays in memory between the forward and the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Everything that the backward pass reads.
    Everything,
    /// The input of each decoder layer; the layer is computed again when its turn comes (Chen et al. 2016).
    Inputs,
}

/// A forward pass waiting for its backward pass.
#[derive(Debug)]
pub struct Tape<'l> {
    pass: RowsPass<'l>,
    kept: Vec<KeptPart>,
}

#[derive(Debug)]
struct RowsPass<'l> {
    backbone: &'l Llama,
    rows: RowMask,
    /// Of each stage.
    rotations: Vec<RotationsByKind>,
    adapters: Adapters,
}

#[derive(Debug)]
struct KeptPart {
    index: usize,
    input: Tensor,
    /// With its graph; absent where it is recomputed.
    output: Option<Tensor>,
}

impl Llama {
    /// As [`Llama::hidden_states`], `[B, T, H]` without autograd, and the tape for its backward pass.
    pub fn forward_kept<'l>(
        &'l self,
        tokens_bt: &Tensor,
        rows: RowMask,
        adapters: Adapters,
        keep: Keep,
    ) -> (Tensor, Tape<'l>) {
        let pass = RowsPass { backbone: self, rotations: self.rotations(&rows), rows, adapters };
        let first_trained = (0..self.parts()).find(|&part| !self.trained_in(part).is_empty()).unwrap_or(self.parts());
        let mut x = tokens_bt.shallow_clone();
        let mut kept = vec![];
        for index in 0..self.parts() {
            x = self.borders.forward(&self.stages, index, x);
            if index < first_trained {
                x = tch::no_grad(|| pass.run(index, &x));
                continue;
            }
            let input = if index > first_trained { x.detach().set_requires_grad(true) } else { x };
            let output = match keep {
                Keep::Everything => pass.run(index, &input),
                Keep::Inputs => tch::no_grad(|| pass.run(index, &input)),
            };
            x = output.detach();
            kept.push(KeptPart { index, input, output: (keep == Keep::Everything).then_some(output) });
        }
        (x, Tape { pass, kept })
    }
}

impl Tape<'_> {
    /// Adds the gradients of everything trained, given that of the hidden states: `dhidden_bth` `[B, T, H]`, as [`wide`].
    /// `gradients` are of the masters' dtype, by part as [`Llama::trained_in`]. In float16 every part has a loss scale of its own.
    pub fn backward(self, dhidden_bth: &Tensor, gradients: &[Vec<&Tensor>]) {
        let mut dy = dhidden_bth.shallow_clone();
        let tokens = FEWEST_TOKENS.max(dy.size()[0] * dy.size()[1]);
        for KeptPart { index, input, output } in self.kept.into_iter().rev() {
            let y = output.unwrap_or_else(|| self.pass.run(index, &input));
            let scale = LossScale::for_sums(y.kind(), &[&dy], tokens, &Tensor::from(LARGEST_INPUT));
            let mut inputs: Vec<&Tensor> = self.pass.backbone.trained_in(index).into_iter().map(|(_, t)| t).collect();
            if input.requires_grad() {
                inputs.push(&input);
            }
            let mut by_input =
                Tensor::run_backward(&[(&y * scale.cast(&dy)).sum(wide(y.kind()))], &inputs, false, false);
            if input.requires_grad() {
                dy = scale.undo(by_input.pop().expect("one for each input"));
                dy = self.pass.backbone.borders.backward(&self.pass.backbone.stages, index, dy);
            }
            for (sum, gradient) in gradients[index].iter().zip(by_input) {
                let _ = sum.shallow_clone().g_add_(&scale.undo(gradient).to_kind(sum.kind()));
            }
        }
    }
}

impl RowsPass<'_> {
    fn run(&self, part: usize, x: &Tensor) -> Tensor {
        self.backbone.run_part(part, x, &self.rotations, &self.rows, self.adapters)
    }
}
