//! Blocks of a few bits per weight as a GGUF file has them: a weight's codes are rows of blocks, dequantised for each product, or multiplied as
//! they are by the CPU's own kernels.

// O outputs, I inputs, b bytes of a row
use tch::{Device, Kind, Tensor};

use super::format::{Codes, StoredFormat};
use super::slices::{SLICE_ON_CPU, ranges};
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::gguf::types::TensorType;
use crate::torch::bytes;

impl StoredFormat for TensorType {
    fn bits(&self) -> u64 {
        (8 * self.bytes / self.numbers) as u64
    }

    fn bytes(&self, [outputs, inputs]: [u64; 2]) -> u64 {
        outputs * (inputs / self.numbers as u64) * self.bytes as u64
    }
}

/// A weight `[O, I]` in blocks.
#[derive(Debug)]
pub struct Blocks {
    pub kind: &'static TensorType,
    /// `[O, b]`, uint8, on the CPU.
    pub codes_ob: Tensor,
}

impl Blocks {
    /// The same blocks.
    #[must_use]
    pub fn shallow_clone(&self) -> Self {
        Self { kind: self.kind, codes_ob: self.codes_ob.shallow_clone() }
    }

    /// `[O, I]` as numbers.
    pub fn size(&self) -> [i64; 2] {
        let size = self.codes_ob.size();
        [size[0], size[1] / self.kind.bytes as i64 * self.kind.numbers as i64]
    }
}

impl Codes for Blocks {
    fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.codes_ob]
    }

    fn dequantize(&self, size_oi: [i64; 2], kind: Kind) -> Tensor {
        let rows_at_a_time = (SLICE_ON_CPU / size_oi[1]).max(1);
        let weight_oi = Tensor::empty(size_oi, (kind, Device::Cpu));
        for (row, rows) in ranges(size_oi[0], rows_at_a_time) {
            let blocks = self.codes_ob.narrow(0, row, rows);
            let numbers = bytes::filled(&[rows, size_oi[1]], |numbers| {
                self.kind.dequantize_in_parallel(bytes::raw(&blocks), numbers);
            });
            weight_oi.narrow(0, row, rows).copy_(&numbers);
        }
        weight_oi
    }

    fn matrix(&self, size_oi: [i64; 2], arena: &mut Arena) -> Option<Matrix> {
        let rows = self.codes_ob.contiguous();
        let shape = size_oi.map(|size| size.unsigned_abs() as usize);
        Matrix::from_blocks((bytes::raw(&rows), self.kind), |_| 1.0, shape, arena)
    }
}

impl Blocks {
    /// Rows of the weight, `[N, I]` in float32.
    pub fn rows(&self, rows: &[i64]) -> Vec<f32> {
        let (codes, row_bytes) = (bytes::raw(&self.codes_ob), self.codes_ob.size()[1].unsigned_abs() as usize);
        let width = row_bytes / self.kind.bytes * self.kind.numbers;
        let mut numbers = vec![0.0; rows.len() * width];
        for (&row, numbers) in rows.iter().zip(numbers.chunks_exact_mut(width)) {
            self.kind.dequantize(&codes[row.unsigned_abs() as usize * row_bytes..][..row_bytes], numbers);
        }
        numbers
    }
}
