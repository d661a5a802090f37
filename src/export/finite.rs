//! Checks that exported weights produce finite numbers.

// T tokens, V vocabulary
use tch::{Kind, Tensor};

use super::error::ExportError;
use crate::dtype::Dtype;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;

/// Checks that a backbone, with its adapter merged, computes finite logits for a few tokens.
pub(super) fn finite_backbone(backbone: &Llama) -> Result<(), ExportError> {
    let tokens: Vec<i64> = (0..8).map(|t| (t * t * 31 + 1) % backbone.config.vocab_size).collect();
    let rows = backbone.causal_rows(8);
    let hidden = || backbone.hidden_states(&Tensor::from_slice(&tokens).unsqueeze(0), &rows, Adapters::Off);
    let logits_tv = tch::no_grad(|| backbone.logits(&hidden(), Adapters::Off)).to_kind(Kind::Float);
    finite(&logits_tv, Dtype::of(backbone.kind()), || "the backbone, with what was trained of it,".into())
}

/// Checks that all numbers are finite. float16 ends at 65504; larger numbers become infinite both in the file and in
/// the values it is compared with, and a trained NaN stays NaN in both.
pub(super) fn finite(numbers: &Tensor, dtype: Dtype, what: impl FnOnce() -> String) -> Result<(), ExportError> {
    if numbers.isfinite().all().int64_value(&[]) == 1 {
        return Ok(());
    }
    Err(ExportError::NotFinite { what: what(), dtype })
}
