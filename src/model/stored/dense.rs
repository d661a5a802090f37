//! Dense weights: a number of the backbone's dtype for each.

// O outputs, I inputs
use tch::{Device, Kind, Tensor};

use super::format::StoredFormat;
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::cpu::{self, Number};
use crate::dtype::DraftDtype;
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
    let shape = shape_on_cpu(weight_oi)?;
    Matrix::new(bytes::raw(&weight_oi.contiguous()), number, shape, arena)
}

/// As [`matrix_of`], of a drafter's weight.
pub(crate) fn draft_matrix(weight_oi: &Tensor, dtype: DraftDtype, arena: &mut Arena) -> Option<Matrix> {
    let shape = shape_on_cpu(weight_oi).filter(|_| cpu::available())?;
    match dtype {
        DraftDtype::Float32 => matrix_of(&weight_oi.to_kind(Kind::Float), arena),
        DraftDtype::BFloat16 => matrix_of(&weight_oi.to_kind(Kind::BFloat16), arena),
        DraftDtype::Auto | DraftDtype::Int8 => {
            let weight_oi = weight_oi.to_kind(Kind::Float).contiguous();
            Matrix::in_8_bits(bytes::numbers(&weight_oi), shape, arena)
        }
    }
}

/// `[O, I]`.
fn shape_on_cpu(weight_oi: &Tensor) -> Option<[usize; 2]> {
    let size: [i64; 2] = weight_oi.size().try_into().ok()?;
    (weight_oi.device() == Device::Cpu).then(|| size.map(|size| size.unsigned_abs() as usize))
}
