//! Weights of GGUF files that do not lie there as they are: in blocks, with the rows of heads interleaved, or one more than the weight.
#![expect(
    unsafe_code,
    reason = "memory maps: the file must not be truncated while the program runs, as with every loader of safetensors"
)]

use tch::{Kind, Tensor};

use super::tensor_file::{StoredTensor, StoredType};
use crate::gguf::names::{Conversion, interleaved};
use crate::gguf::types::TensorType;
use crate::model::stored::blocks::Blocks;
use crate::torch::bytes;

impl StoredTensor {
    /// The weight, in the dtype of its numbers; of blocks, in float32.
    pub(super) fn decoded(&self, kind: Kind) -> Tensor {
        let numbers = match self.dtype {
            StoredType::Number(_) => Tensor::from_data_size(self.data, &[self.data.len() as i64], Kind::Uint8)
                .view_dtype(kind)
                .view(&*self.shape),
            StoredType::Blocks(of) => dequantized(of, self.data).view(&*self.shape),
        };
        match self.conversion {
            Conversion::Same => numbers,
            Conversion::Interleaved { heads } => numbers.index_select(0, &Tensor::from_slice(&self.rows(heads))),
            Conversion::PlusOne => numbers - 1.0,
        }
    }

    /// The weight as blocks `[O, I]`, if it is stored so: a view of the mapping, or a copy with the rows of heads apart.
    pub(super) fn blocks(&self) -> Option<Blocks> {
        let (StoredType::Blocks(kind), &[outputs, _]) = (self.dtype, self.shape.as_slice()) else { return None };
        let row = (self.data.len() / outputs.unsigned_abs() as usize) as i64;
        // SAFETY: the mapping is never unmapped (see [`super::tensor_file::map_file`]), and codes are never written.
        let codes = unsafe { bytes::view(self.data, &[outputs, row], Kind::Uint8) };
        let codes_ob = match self.conversion {
            Conversion::Same => codes,
            Conversion::Interleaved { heads } => codes.index_select(0, &Tensor::from_slice(&self.rows(heads))),
            Conversion::PlusOne => return None,
        };
        Some(Blocks { kind, codes_ob })
    }

    /// Where each row of the weight is in the file.
    fn rows(&self, heads: i64) -> Vec<i64> {
        let rows = self.shape[0];
        (0..rows).map(|row| interleaved(row, rows, heads)).collect()
    }

    /// The first numbers of the weight, without libtorch.
    pub(super) fn first_numbers(&self, count: usize) -> Vec<f32> {
        let StoredType::Blocks(kind) = self.dtype else { return vec![] };
        let blocks = count.div_ceil(kind.numbers).min(self.data.len() / kind.bytes);
        let mut numbers = vec![0.0; blocks * kind.numbers];
        kind.dequantize(&self.data[..blocks * kind.bytes], &mut numbers);
        numbers.truncate(count);
        numbers
    }
}

/// Blocks as numbers, `[N]` in float32.
fn dequantized(kind: &TensorType, blocks: &[u8]) -> Tensor {
    let count = blocks.len() / kind.bytes;
    bytes::filled(&[(count * kind.numbers) as i64], |numbers| kind.dequantize_in_parallel(blocks, numbers))
}
