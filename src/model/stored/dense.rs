//! Dense weights: a number of the backbone's dtype for each.

// O outputs, I inputs
use tch::{Device, Kind, Tensor};

use super::format::StoredFormat;
use crate::cpu::Number;
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::torch::bytes;

/// Numbers of so many bytes.
#[derive(Debug, Clone, Copy)]
pub struct Dense(pub u64);

impl StoredFormat for Dense {
    fn bits(&self) -> u64 {
        8 * self.0
    }

    fn bytes(&self, [outputs, inputs]: [u64; 2]) -> u64 {
        outputs * inputs * self.0
    }
}

/// A weight `[O, I]` for the CPU's own kernels, if they can.
pub(crate) fn matrix_of(weight_oi: &Tensor, arena: &mut Arena) -> Option<Matrix> {
    let number = match weight_oi.kind() {
        Kind::Float => Number::Float32,
        Kind::BFloat16 => Number::BFloat16,
        _ => return None,
    };
    let shape = weight_oi.size().iter().map(|&size| size.unsigned_abs() as usize).collect::<Vec<_>>();
    let [outputs, inputs] = shape[..] else { return None };
    (weight_oi.device() == Device::Cpu)
        .then(|| Matrix::new(bytes::raw(&weight_oi.contiguous()), number, [outputs, inputs], arena))?
}
