//! The backbone's forward pass as training needs it: kept, whole or as the inputs of its parts only (recompute), until the gradient
//! of its hidden states is known. tch has no hooks and no checkpointing, so parts are differentiated one by one: that of part `p`
//! with output `y` and output gradient `dy` is the gradient of `Σ y·dy`, bit for bit.

// B rows, T tokens of a row, H hidden
use tch::{Kind, Tensor};

use crate::model::attention::RowMask;
use crate::model::block_spec::names;
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::peft;
use crate::model::rope::{Rope, Rotation};

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
    rotation: Rotation,
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
    /// The same backbone with float32 weights of its own, all of them trained; it computes in `kind`.
    #[must_use]
    pub fn for_fine_tuning(mut self, kind: Kind) -> Self {
        let own = |tensor: &Tensor| tensor.to_kind(Kind::Float).copy();
        self.embed_tokens_vh = own(&self.embed_tokens_vh);
        self.norm_h = own(&self.norm_h);
        for layer in &mut self.layers {
            layer.norms_h = layer.norms_h.each_ref().map(own);
        }
        self.linears_mut().into_iter().for_each(|(_, linear)| linear.own());
        if self.config.tie_word_embeddings {
            self.lm_head = Linear::dense(self.embed_tokens_vh.shallow_clone(), None);
        }
        self.rope = Rope::new(&self.block.rotary, kind, self.device);
        self.kind = kind;
        for (_, weight) in self.weights() {
            let _ = weight.set_requires_grad(true);
        }
        self
    }

    /// What is trained in a part of a pass (see [`Llama::forward_kept`]), by the name in its file: adapters by PEFT's, weights by
    /// Hugging Face's.
    pub fn trained_in(&self, part: usize) -> Vec<(String, &Tensor)> {
        let all = match part.checked_sub(1) {
            None => vec![(names::EMBED_TOKENS.to_owned(), &self.embed_tokens_vh)],
            Some(layer) if layer < self.layers.len() => self.tensors_of_layer(layer),
            Some(_) => vec![(names::NORM.to_owned(), &self.norm_h)],
        };
        all.into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect()
    }

    /// Weights and adapters of a decoder layer, by the names in their files.
    fn tensors_of_layer(&self, index: usize) -> Vec<(String, &Tensor)> {
        let (layer, linears) = (&self.layers[index], self.block.linears());
        let mut all = layer.weights(&self.block, index);
        for (spec, linear) in linears.all().zip(layer.linears()) {
            all.extend(linear.adapter().into_iter().flat_map(|a| peft::named(&names::in_layer(index, spec.part), a)));
        }
        all
    }

    /// What is trained in the LM head; nothing where it is tied to a trained embedding, which is [`Llama::trained_in`] part 0.
    pub fn trained_in_lm_head(&self) -> Vec<(String, &Tensor)> {
        if let Some(adapter) = self.lm_head.adapter() {
            return peft::named(names::LM_HEAD, adapter).into_iter().filter(|(_, t)| t.requires_grad()).collect();
        }
        let own = self.lm_head.dense_weight().filter(|w| w.requires_grad() && !self.config.tie_word_embeddings);
        own.map(|weight| (format!("{}.weight", names::LM_HEAD), weight)).into_iter().collect()
    }

    /// As [`Llama::hidden_states`], `[B, T, H]` without autograd, and the tape for its backward pass.
    pub fn forward_kept<'l>(
        &'l self,
        tokens_bt: &Tensor,
        rows: RowMask,
        adapters: Adapters,
        keep: Keep,
    ) -> (Tensor, Tape<'l>) {
        let pass = RowsPass { backbone: self, rotation: self.rotation(&rows), rows, adapters };
        let first_trained = (0..self.parts()).find(|&part| !self.trained_in(part).is_empty()).unwrap_or(self.parts());
        let mut x = tokens_bt.shallow_clone();
        let mut kept = vec![];
        for index in 0..self.parts() {
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
    /// Adds the gradients of everything trained, given that of the hidden states: `dhidden_bth` `[B, T, H]` in their dtype.
    /// `gradients` are of the masters' dtype, by part as [`Llama::trained_in`].
    pub fn backward(self, dhidden_bth: &Tensor, gradients: &[Vec<&Tensor>]) {
        let mut dy = dhidden_bth.shallow_clone();
        for KeptPart { index, input, output } in self.kept.into_iter().rev() {
            let y = output.unwrap_or_else(|| self.pass.run(index, &input));
            let mut inputs: Vec<&Tensor> = self.pass.backbone.trained_in(index).into_iter().map(|(_, t)| t).collect();
            if input.requires_grad() {
                inputs.push(&input);
            }
            let mut of_inputs = Tensor::run_backward(&[(&y * &dy).sum(Kind::Float)], &inputs, false, false);
            if input.requires_grad() {
                dy = of_inputs.pop().expect("one for each input");
            }
            for (sum, gradient) in gradients[index].iter().zip(&of_inputs) {
                let _ = sum.shallow_clone().g_add_(&gradient.to_kind(sum.kind()));
            }
        }
    }
}

impl RowsPass<'_> {
    fn run(&self, part: usize, x: &Tensor) -> Tensor {
        self.backbone.run_part(part, x, &self.rotation, &self.rows, self.adapters)
    }
}
