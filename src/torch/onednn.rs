//! oneDNN's linear layer with weights packed once, for products of few rows on the CPU, where libtorch's own linear
//! reads memory at a fraction of its speed. The operators are libtorch's (`mkldnn::_reorder_linear_weight`,
//! `mkldnn::_linear_pointwise`), called through the C functions that it exports for compiled models.
#![expect(unsafe_code, reason = "calls C functions of libtorch_cpu with tensor handles")]

use std::ffi::c_char;
use std::ptr;

use tch::{Device, Kind, Tensor};

use super::dispatcher::{self, Handle, Operand};
use super::guard::raise;

unsafe extern "C" {
    #[allow(clippy::too_many_arguments)] // libtorch's signature
    fn aoti_torch_cpu__linear_pointwise(
        input: Handle,
        weight: Handle,
        bias: *const Handle,
        attribute: *const c_char,
        scalars: *const *const f64,
        scalar_count: i64,
        algorithm: *const *const c_char,
        output: *mut Handle,
    ) -> i32;
}

/// A weight `[O, I]` in oneDNN's own layout. Its numbers cannot be read back.
#[derive(Debug)]
pub struct PackedWeight {
    packed: Tensor,
}

impl PackedWeight {
    /// Packs a CPU weight `[O, I]` of float32 or bfloat16. `None` if oneDNN is missing or does not support the dtype;
    /// then use libtorch's linear.
    pub fn pack(weight_oi: &Tensor) -> Option<Self> {
        if !can(weight_oi) || weight_oi.kind() == Kind::BFloat16 && !packs_bfloat16() {
            return None;
        }
        // The batch size is absent.
        let arguments = [Operand::Tensor(weight_oi), Operand::None];
        // SAFETY: the operator takes (Tensor, int?) and returns a tensor.
        let packed = unsafe { dispatcher::call(c"mkldnn::_reorder_linear_weight", &arguments) };
        packed.map(|[packed]| Self { packed })
    }

    /// `x·Wᵀ + b`: `[N, I]` to `[N, O]`; `x` of the weight's dtype, contiguous.
    ///
    /// # Panics
    /// If oneDNN refuses the product, because the shapes do not match.
    pub fn linear(&self, x_ni: &Tensor, bias_o: Option<&Tensor>) -> Tensor {
        pointwise_linear(x_ni, &self.packed, bias_o)
    }
}

/// `x·Wᵀ` for many rows: `[N, I]` to `[N, O]`. Uses oneDNN if it supports the operands, because its float32 product is
/// about 1.4 times as fast as libtorch's own (MKL's) on CPUs with AVX-512; else libtorch's linear.
pub fn linear(x_ni: &Tensor, weight_oi: &Tensor) -> Tensor {
    if can(x_ni) && can(weight_oi) {
        pointwise_linear(x_ni, weight_oi, None)
    } else {
        x_ni.linear::<Tensor>(weight_oi, None)
    }
}

fn can(tensor: &Tensor) -> bool {
    let has_kind = tensor.kind() == Kind::Float || tensor.kind() == Kind::BFloat16 && packs_bfloat16();
    tensor.device() == Device::Cpu && has_kind && tch::utils::has_mkldnn()
}

/// Whether oneDNN has products in bfloat16 on this CPU; elsewhere they fail, and libtorch prints the stack about every weight to pack.
#[cfg(target_arch = "x86_64")]
fn packs_bfloat16() -> bool {
    let has_avx512 = is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq");
    has_avx512 || is_x86_feature_detected!("avxneconvert")
}

/// Other processors are asked by libtorch.
#[cfg(not(target_arch = "x86_64"))]
fn packs_bfloat16() -> bool {
    true
}

/// `weight` may be plain or packed.
fn pointwise_linear(x_ni: &Tensor, weight: &Tensor, bias_o: Option<&Tensor>) -> Tensor {
    let bias: Handle = bias_o.map_or(ptr::null_mut(), |b| b.as_ptr().cast_mut().cast());
    let bias_pointer = if bias.is_null() { ptr::null() } else { &raw const bias };
    let mut output: Handle = ptr::null_mut();
    // SAFETY: all handles are at::Tensor* borrowed for the call; "none" takes no scalars and no algorithm.
    let status = unsafe {
        aoti_torch_cpu__linear_pointwise(
            x_ni.as_ptr().cast_mut().cast(),
            weight.as_ptr().cast_mut().cast(),
            bias_pointer,
            c"none".as_ptr(),
            ptr::null(),
            0,
            &c"".as_ptr(),
            &raw mut output,
        )
    };
    if status != 0 {
        raise(&format!("oneDNN has no memory for a product of {x_ni:?}, or cannot compute it")); // the status says no more
    }
    // SAFETY: on success the output is an owned at::Tensor*.
    unsafe { Tensor::from_ptr(output.cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::Generator;

    #[test]
    fn packed_equals_libtorch_linear() {
        for (rows, inputs, outputs) in [(1, 64, 96), (5, 512, 1376), (64, 512, 512)] {
            let mut generator = Generator::seeded(1);
            let mut normal = |shape: &[i64]| generator.normal(shape, (Kind::Float, Device::Cpu));
            let x = normal(&[rows, inputs]);
            let weight = normal(&[outputs, inputs]);
            let bias = normal(&[outputs]);
            let Some(packed) = PackedWeight::pack(&weight) else { panic!("this libtorch has no oneDNN") };
            for bias in [None, Some(&bias)] {
                let difference = (packed.linear(&x, bias) - x.linear(&weight, bias)).abs().max().double_value(&[]);
                assert!(difference < 1e-3, "{rows}x{inputs}x{outputs}: {difference}");
            }
        }
    }

    #[test]
    fn what_cannot_be_packed_is_left_to_libtorch() {
        assert!(PackedWeight::pack(&Tensor::zeros([4, 4], (Kind::Double, Device::Cpu))).is_none());
        let bfloat16 = PackedWeight::pack(&Tensor::zeros([64, 64], (Kind::BFloat16, Device::Cpu)));
        assert!(bfloat16.is_some() == packs_bfloat16() || !cfg!(target_arch = "x86_64"));
    }
}
