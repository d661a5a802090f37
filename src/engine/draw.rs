//! Draws a token for each row where the probabilities are, so that only token ids are copied to the host. The rule is that of the host
//! ([`token_at`](super::sample::token_at)): the same random numbers select the same tokens, up to rounding of float64 sums.

// B rows, V vocabulary, K most probable tokens that top-k keeps
use std::num::NonZeroUsize;

use tch::{Kind, Tensor};

use crate::model::llama::NO_TOKEN;

/// The token that each row's number of `uniforms_b` (`[B]`, float64, from 0 to below 1) selects: in id order, each token takes up a share
/// of that range equal to its probability among those that top-k and top-p keep. Returns `[B]`, int64, on the device of the probabilities;
/// [`NO_TOKEN`] where they are NaN.
/// - `p_bv`: `[B, V]`, float32
pub(super) fn draw(p_bv: &Tensor, top_k: Option<NonZeroUsize>, top_p: f64, uniforms_b: &Tensor) -> Tensor {
    let sums_bv = kept(p_bv, top_k, top_p).cumsum(-1, Kind::Double);
    let mass_b1 = last(&sums_bv);
    // Rounding may put the product at the mass, which no sum exceeds.
    let most_b1 = mass_b1.nextafter(&mass_b1.zeros_like());
    let drawn_b1 = (uniforms_b.unsqueeze(1) * &mass_b1).minimum(&most_b1);
    let ids_b1 = drawn_b1.searchsorted(&sums_bv, false, true, "right", None::<&Tensor>);
    let has_mass_b1 = mass_b1.isfinite().logical_and(&mass_b1.gt(0.0));
    ids_b1.masked_fill(&has_mass_b1.logical_not(), NO_TOKEN).squeeze_dim(1)
}

/// Probabilities `[B, V]`, with 0 for tokens that top-k and top-p drop. Of equally probable tokens those with lower ids are kept first.
fn kept(p_bv: &Tensor, top_k: Option<NonZeroUsize>, top_p: f64) -> Tensor {
    let vocabulary = p_bv.size()[1];
    let k = top_k.map_or(vocabulary, |top_k| vocabulary.min(i64::try_from(top_k.get()).unwrap_or(vocabulary)));
    if k == vocabulary && top_p >= 1.0 {
        return p_bv.shallow_clone();
    }
    let (sorted_bv, ids_bv) = p_bv.sort_stable(true, -1, true);
    let sums_bk = sorted_bv.narrow(1, 0, k).cumsum(-1, Kind::Double);
    let least_b1 = if top_p < 1.0 {
        // Top-p is a part of what top-k keeps, whose sum is 1 without it.
        let wanted_b1 = if k < vocabulary { last(&sums_bk) * top_p } else { last(&sums_bk).full_like(top_p) };
        sums_bk.lt_tensor(&wanted_b1).sum_dim_intlist(-1, true, Kind::Int64).clamp_max(k - 1)
    } else {
        last(&ids_bv).full_like(k - 1)
    };
    let (least_p_b1, least_id_b1) = (sorted_bv.gather(1, &least_b1, false), ids_bv.gather(1, &least_b1, false));
    let ids_v = Tensor::arange(vocabulary, (Kind::Int64, p_bv.device()));
    let as_probable_bv = p_bv.eq_tensor(&least_p_b1).logical_and(&ids_v.unsqueeze(0).le_tensor(&least_id_b1));
    p_bv.masked_fill(&p_bv.gt_tensor(&least_p_b1).logical_or(&as_probable_bv).logical_not(), 0.0)
}

/// `[…, N]` to `[…, 1]`.
fn last(x: &Tensor) -> Tensor {
    x.narrow(-1, x.size()[x.dim() - 1] - 1, 1)
}
