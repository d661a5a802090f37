//! What a format of stored weights says of itself, without libtorch, and what its weights can do. A format is one file beside this one, and its
//! variant in the tables of [`crate::model::stored`].

// O outputs, I inputs
use std::fmt;

use tch::{Kind, Tensor};

use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::nvidia::launch::Launch;

/// How the weight `[O, I]` of a linear layer lies in memory.
pub trait StoredFormat {
    /// Bits of a number, without scales.
    fn bits(&self) -> u64;

    /// Bytes of a weight of this size, with its scales.
    fn bytes(&self, size_oi: [u64; 2]) -> u64;
}

/// A format that weights are quantised to while loading.
pub trait QuantizedFormat: StoredFormat {
    /// In recipes, flags and files.
    fn name(&self) -> &'static str;

    /// What `--help` says of it.
    fn help(&self) -> &'static str;
}

/// Quantises a weight `[O, I]` of any floating-point dtype.
pub type Quantize = Box<dyn Fn(&Tensor) -> Box<dyn Codes>>;

/// A quantised weight: codes that stand for its numbers, and their scales.
pub trait Codes: fmt::Debug + Send {
    /// Its own tensors, without tables that weights share. There is at least one, and all are on one device.
    fn tensors(&self) -> Vec<&Tensor>;

    /// `[O, I]` in `kind` by libtorch's calls; computed in float32.
    fn dequantize(&self, size_oi: [i64; 2], kind: Kind) -> Tensor;

    /// The codes as the CPU's own kernels multiply them; `None`: they do not.
    fn matrix(&self, _size_oi: [i64; 2], _arena: &mut Arena) -> Option<Matrix> {
        None
    }

    /// The kernel that does the same on a GPU; `None`: libtorch does it there, too.
    fn kernel(&self) -> Option<DequantizeKernel<'_>> {
        None
    }
}

/// From the tensor that the weight is written to, to the launch that writes it.
pub type DequantizeKernel<'c> = Box<dyn Fn(&Tensor) -> Launch + 'c>;
