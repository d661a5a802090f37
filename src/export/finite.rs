//! That what is written computes numbers.

// T tokens, V vocabulary
use tch::{Kind, Tensor};

use super::error::ExportError;
use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::Dtype;

/// That a backbone computes numbers, with its adapter merged: of a few tokens.
pub(super) fn finite_backbone(backbone: &Llama) -> Result<(), ExportError> {
    finite(&logits(backbone), dtype_for(backbone.kind()), || "the backbone, with what was trained of it,".into())
}

/// `[T, V]`, float32, of a few tokens.
fn logits(llama: &Llama) -> Tensor {
    let tokens: Vec<i64> = (0..8).map(|t| (t * t * 31 + 1) % llama.config.vocab_size).collect();
    let rows = RowMask::causal(8, &llama.config, llama.device());
    let hidden = || llama.hidden_states(&Tensor::from_slice(&tokens).unsqueeze(0), &rows, Adapters::Off);
    tch::no_grad(|| llama.logits(&hidden(), Adapters::Off)).to_kind(Kind::Float)
}

/// That all numbers are finite: float16 ends at 65504, and what does not fit is infinite there, in the file as in what it is compared with;
/// a NaN that was trained stays one.
pub(super) fn finite(numbers: &Tensor, dtype: Dtype, what: impl FnOnce() -> String) -> Result<(), ExportError> {
    if numbers.isfinite().all().int64_value(&[]) == 1 {
        return Ok(());
    }
    Err(ExportError::NotFinite { what: what(), dtype })
}

/// What is written: float64 has no consumer.
pub(super) fn dtype_for(kind: Kind) -> Dtype {
    match kind {
        Kind::BFloat16 => Dtype::BFloat16,
        Kind::Half => Dtype::Float16,
        _ => Dtype::Float32,
    }
}
