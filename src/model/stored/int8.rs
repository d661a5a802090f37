//! int8: 8 bits a weight, scaled by the absmax of its output row, symmetric (the vector-wise scheme of LLM.int8(), Dettmers et al.
//! 2022, arXiv 2208.07339, section 2.1, for weights alone; inputs are not quantised):
//!
//! `q = round(w · (127 / absmax))`, to the nearest and halves to the even, and `w' = q · (absmax / 127)`, in float32.

// O outputs, I inputs
use half::f16;
use tch::{Device, Kind, Tensor};

use super::format::{Codes, DequantizeKernel, Quantize, QuantizedFormat, StoredFormat};
use super::slices::{ranges, slice};
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::fused::dequantize;
use crate::gguf::types::TensorType;
use crate::torch::bytes;

/// 8 bits a number, and a float32 for every output.
#[derive(Debug)]
pub struct Int8Format;

impl StoredFormat for Int8Format {
    fn bits(&self) -> u64 {
        8
    }

    fn bytes(&self, [outputs, inputs]: [u64; 2]) -> u64 {
        outputs * inputs + 4 * outputs
    }
}

impl QuantizedFormat for Int8Format {
    fn name(&self) -> &'static str {
        "int8"
    }

    fn help(&self) -> &'static str {
        "8 bits per weight, one scale per output"
    }
}

/// Quantises weights.
pub(super) fn quantizer() -> Quantize {
    Box::new(|weight_oi| Box::new(Int8::quantize(weight_oi)))
}

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
}

impl Codes for Int8 {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.codes_oi, &self.absmax_o]
    }

    fn dequantize(&self, size_oi: [i64; 2], kind: Kind) -> Tensor {
        let weight_oi = Tensor::empty(size_oi, (kind, self.codes_oi.device()));
        let scale_o1 = (&self.absmax_o / 127.0).unsqueeze(1);
        for (row, rows) in rows_at_a_time(&self.codes_oi) {
            let scaled = self.codes_oi.narrow(0, row, rows).to_kind(Kind::Float).g_mul_(&scale_o1.narrow(0, row, rows));
            weight_oi.narrow(0, row, rows).copy_(&scaled);
        }
        weight_oi
    }

    /// Blocks of Q8_0 with scales of 1, times those of the outputs: the same numbers.
    fn matrix(&self, size_oi: [i64; 2], arena: &mut Arena) -> Option<Matrix> {
        if self.codes_oi.device() != Device::Cpu {
            return None;
        }
        let kind = TensorType::named("Q8_0").expect("a type of GGUF");
        let [outputs, inputs] = size_oi.map(|size| size.unsigned_abs() as usize);
        let mut blocks = Vec::with_capacity(outputs * inputs.div_ceil(kind.numbers) * kind.bytes);
        for codes in bytes::raw(&self.codes_oi).chunks_exact(inputs).flat_map(|row| row.chunks(kind.numbers)) {
            blocks.extend(f16::ONE.to_le_bytes());
            blocks.extend(codes);
            blocks.resize(blocks.len().next_multiple_of(kind.bytes), 0);
        }
        let absmax_o = bytes::numbers(&self.absmax_o);
        Matrix::from_blocks((&blocks, kind), |o| absmax_o[o] / 127.0, [outputs, inputs], arena)
    }

    fn kernel(&self) -> Option<DequantizeKernel<'_>> {
        Some(Box::new(|weight_oi| dequantize::int8(&self.codes_oi, &self.absmax_o, weight_oi)))
    }
}

/// Rows of `[O, I]` in pieces of about a slice.
fn rows_at_a_time(weight_oi: &Tensor) -> impl Iterator<Item = (i64, i64)> + use<> {
    let size = weight_oi.size();
    ranges(size[0], (slice(weight_oi.device()) / size[1]).max(1))
}
