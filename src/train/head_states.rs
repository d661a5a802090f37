//! What the heads read in a micro batch: the backbone's hidden states, or the output of the heads' prefix layer over them.

// B rows, T tokens of a row, N = B·T positions, H hidden
use tch::Tensor;

use crate::data::loader::Batch;
use crate::draft::medusa::heads::Heads;
use crate::model::prefix_layer::PrefixPass;
use crate::torch::wide;
use crate::train::backbone_pass::BackbonePass;
use crate::train::state::TrainState;

/// The heads' inputs in a micro batch.
#[derive(Debug)]
pub struct HeadStates<'p> {
    /// `[N, H]`, the prefix layer's output; `None` if the heads read the backbone's hidden states.
    of_prefix: Option<Tensor>,
    kept: Option<KeptPrefixPass<'p>>,
}

/// The prefix layer's forward pass, waiting for the gradient of its output.
#[derive(Debug)]
struct KeptPrefixPass<'p> {
    pass: PrefixPass<'p>,
    size_bth: Vec<i64>,
    /// `[N, H]`, as [`wide`]: every head adds the gradient of its inputs here.
    doutput_nh: Tensor,
}

impl<'p> HeadStates<'p> {
    /// For training: keeps what [`HeadStates::backward`] needs.
    pub fn trained(heads: &'p Heads, pass: &BackbonePass, batch: &Batch) -> Self {
        let Some(prefix) = heads.prefix() else { return Self { of_prefix: None, kept: None } };
        let hidden_bth = rows_of(pass, batch);
        let rows = prefix.mask(&batch.segment_lengths, batch.length as i64);
        let pass = prefix.forward_kept(&hidden_bth, &rows, pass.dhidden_nh().is_some());
        let (size_bth, output_nh) = (hidden_bth.size(), pass.output().flatten(0, 1));
        let doutput_nh = Tensor::zeros(output_nh.size(), (wide(output_nh.kind()), output_nh.device()));
        Self { of_prefix: Some(output_nh), kept: Some(KeptPrefixPass { pass, size_bth, doutput_nh }) }
    }

    /// For an evaluation.
    pub fn evaluated(heads: &'p Heads, pass: &BackbonePass, batch: &Batch) -> Self {
        let of_rows = || tch::no_grad(|| heads.states_of_rows(&rows_of(pass, batch), &batch.segment_lengths));
        Self { of_prefix: heads.prefix().map(|_| of_rows().flatten(0, 1)), kept: None }
    }

    /// `[N, H]`; rows as in `pass.hidden_nh`.
    pub fn hidden_nh<'s>(&'s self, pass: &'s BackbonePass) -> &'s Tensor {
        self.of_prefix.as_ref().unwrap_or(&pass.hidden_nh)
    }

    /// Receives the gradient of [`HeadStates::hidden_nh`]; `None` if nothing before the heads is trained.
    pub fn dhidden_nh<'s>(&'s self, pass: &'s BackbonePass) -> Option<&'s Tensor> {
        self.kept.as_ref().map(|kept| &kept.doutput_nh).or_else(|| pass.dhidden_nh())
    }

    /// Propagates the gradient back through the prefix layer, to the hidden states of `pass` if these are trained.
    pub fn backward(self, pass: &BackbonePass, state: &TrainState) {
        let Some(KeptPrefixPass { pass: of_prefix, size_bth, doutput_nh }) = self.kept else { return };
        let to_hidden = of_prefix.backward(&doutput_nh.view(size_bth.as_slice()), &state.prefix_gradients());
        if let (Some(sum), Some(gradient)) = (pass.dhidden_nh(), to_hidden) {
            let _ = sum.shallow_clone().g_add_(&gradient.view_as(sum).to_kind(sum.kind()));
        }
    }
}

/// The hidden states as `[B, T, H]`.
fn rows_of(pass: &BackbonePass, batch: &Batch) -> Tensor {
    pass.hidden_nh.view([batch.rows as i64, batch.length as i64, -1])
}
