//! Norms over the last axis, and the norms of a decoder layer.

// H hidden
use tch::Tensor;

use crate::model::block_spec::{NormKind, NormSpec};
use crate::torch::wide;

/// A norm over the last axis; statistics in float32, as transformers computes them. On a GPU libtorch launches one kernel for it, and one or two for
/// its gradients, if weight and input have one dtype, as here.
pub(super) fn norm(x: &Tensor, weight_h: &Tensor, NormSpec { kind, eps, .. }: NormSpec) -> Tensor {
    match kind {
        NormKind::Rms if weight_h.kind() == x.kind() => x.rms_norm(weight_h.size(), Some(weight_h), eps),
        NormKind::Rms => x.rms_norm(weight_h.size(), Some(weight_h.to_kind(x.kind())), eps),
        // 1 + weight has more bits than a half precision weight: the product is computed in float32.
        NormKind::RmsPlusOne => {
            let wide = wide(x.kind());
            let weight_h = weight_h.to_kind(wide) + 1.0;
            x.to_kind(wide).rms_norm(weight_h.size(), Some(weight_h), eps).to_kind(x.kind())
        }
    }
}

/// The weights of the norms in a decoder layer's residual stream, `[H]` each; a family has some of them.
#[derive(Debug)]
pub(super) struct LayerNorms {
    pub(super) attention_input: Option<Tensor>,
    pub(super) attention_output: Option<Tensor>,
    pub(super) mlp_input: Option<Tensor>,
    pub(super) mlp_output: Option<Tensor>,
}

/// `x` after the norm, if there is one.
pub(super) fn normed(x: Tensor, weight_h: Option<&Tensor>, spec: NormSpec) -> Tensor {
    match weight_h {
        Some(weight_h) => norm(&x, weight_h, spec),
        None => x,
    }
}
