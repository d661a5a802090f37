//! What the heads read in a micro batch: the backbone's hidden states, or the output of the heads' prefix layer over them.

// B rows, T tokens of a row, N = B·T positions, H hidden
use tch::Tensor;

use super::Heads;
use crate::draft::trained::{DrafterBatch, DrafterGradients};
use crate::model::prefix_layer::PrefixPass;
use crate::torch::wide;

/// The heads' inputs in a micro batch.
#[derive(Debug)]
pub(super) struct HeadStates<'p> {
    /// `[N, H]`, the prefix layer's output; `None` if the heads read the backbone's hidden states.
    prefix_nh: Option<Tensor>,
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
    /// For training, keeps what [`HeadStates::backward`] needs.
    pub(super) fn new(heads: &'p Heads, batch: &DrafterBatch, into: Option<&DrafterGradients>) -> Self {
        match into {
            Some(into) => Self::trained(heads, batch, into),
            None => Self::evaluated(heads, batch),
        }
    }

    fn trained(heads: &'p Heads, batch: &DrafterBatch, into: &DrafterGradients) -> Self {
        let Some(prefix) = heads.prefix() else { return Self { prefix_nh: None, kept: None } };
        let hidden_bth = rows_of(batch);
        let rows = prefix.mask(&batch.rows.segment_lengths, batch.rows.length as i64);
        let pass = prefix.forward_kept(&hidden_bth, &rows, into.hidden_nh.is_some());
        let (size_bth, output_nh) = (hidden_bth.size(), pass.output().flatten(0, 1));
        let doutput_nh = Tensor::zeros(output_nh.size(), (wide(output_nh.kind()), output_nh.device()));
        Self { prefix_nh: Some(output_nh), kept: Some(KeptPrefixPass { pass, size_bth, doutput_nh }) }
    }

    fn evaluated(heads: &'p Heads, batch: &DrafterBatch) -> Self {
        let row_states = || tch::no_grad(|| heads.states_of_rows(&rows_of(batch), &batch.rows.segment_lengths));
        Self { prefix_nh: heads.prefix().map(|_| row_states().flatten(0, 1)), kept: None }
    }

    /// `[N, H]`; rows as in `batch.hidden_nh`.
    pub(super) fn hidden_nh<'s>(&'s self, batch: &DrafterBatch<'s>) -> &'s Tensor {
        self.prefix_nh.as_ref().unwrap_or(batch.hidden_nh)
    }

    /// Receives the gradient of [`HeadStates::hidden_nh`]; `None` if nothing before the heads is trained.
    pub(super) fn dhidden_nh<'s>(&'s self, into: &DrafterGradients<'s>) -> Option<&'s Tensor> {
        self.kept.as_ref().map(|kept| &kept.doutput_nh).or(into.hidden_nh)
    }

    /// Propagates the gradient through the prefix layer, whose gradients are `prefix_gradients`, to the hidden states if these are trained.
    pub(super) fn backward(self, prefix_gradients: &[&Tensor], dhidden_nh: Option<&Tensor>) {
        let Some(KeptPrefixPass { pass, size_bth, doutput_nh }) = self.kept else { return };
        let to_hidden = pass.backward(&doutput_nh.view(size_bth.as_slice()), prefix_gradients);
        if let (Some(sum), Some(gradient)) = (dhidden_nh, to_hidden) {
            let _ = sum.shallow_clone().g_add_(&gradient.view_as(sum).to_kind(sum.kind()));
        }
    }
}

/// The hidden states as `[B, T, H]`.
fn rows_of(batch: &DrafterBatch) -> Tensor {
    batch.hidden_nh.view([batch.rows.rows as i64, batch.rows.length as i64, -1])
}
