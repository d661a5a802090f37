//! int8: 8 bits a weight, scaled by the absmax of its output row, symmetric (the vector-wise scheme of LLM.int8(), Dettmers et al.
//! 2022, arXiv 2208.07339, section 2.1, for weights alone; inputs are not quantised):
//!
//! `q = round(w · (127 / absmax))`, to the nearest and halves to the even, and `w' = q · (absmax / 127)`, in float32.

// O outputs, I inputs
use tch::{Kind, Tensor};

use super::slices::{ranges, slice};

/// A quantised `[O, I]`.
#[derive(Debug)]
pub struct Int8 {
    /// `[O, I]`, int8.
    pub codes_oi: Tensor,
    /// `[O]`, float32.
    pub absmax_o: Tensor,
}

impl Int8 {
    /// Of a weight of any floating-point dtype.
    pub fn quantize(weight_oi: &Tensor) -> Self {
        let codes_oi = Tensor::empty(weight_oi.size(), (Kind::Int8, weight_oi.device()));
        let absmax_o = weight_oi.abs().amax([1], false).to_kind(Kind::Float);
        // In a row of zeros 0 by infinity would be NaN.
        let scale_o1 = (absmax_o.clamp_min(1e-30).reciprocal() * 127.0).unsqueeze(1);
        for (row, rows) in rows_at_a_time(weight_oi) {
            let scaled = weight_oi.narrow(0, row, rows).to_kind(Kind::Float) * scale_o1.narrow(0, row, rows);
            codes_oi.narrow(0, row, rows).copy_(&scaled.round());
        }
        Self { codes_oi, absmax_o }
    }

    /// `[O, I]` in `kind`.
    pub fn dequantize(&self, kind: Kind) -> Tensor {
        let weight_oi = Tensor::empty(self.codes_oi.size(), (kind, self.codes_oi.device()));
        let scale_o1 = (&self.absmax_o / 127.0).unsqueeze(1);
        for (row, rows) in rows_at_a_time(&self.codes_oi) {
            let scaled = self.codes_oi.narrow(0, row, rows).to_kind(Kind::Float).g_mul_(&scale_o1.narrow(0, row, rows));
            weight_oi.narrow(0, row, rows).copy_(&scaled);
        }
        weight_oi
    }

    pub(super) fn tensors(&self) -> [&Tensor; 2] {
        [&self.codes_oi, &self.absmax_o]
    }
}

/// Rows of `[O, I]` in pieces of about a slice.
fn rows_at_a_time(weight_oi: &Tensor) -> impl Iterator<Item = (i64, i64)> + use<> {
    let size = weight_oi.size();
    ranges(size[0], (slice(weight_oi.device()) / size[1]).max(1))
}
