//! The dtype that decoding computes in without `--dtype`.

use tch::Device;

use crate::cpu;
use crate::dtype::Dtype;

/// The dtype for weights of dtype `own` on `device`: their own, except for float16 on a CPU. There libtorch computes float16 several times
/// slower than bfloat16 (if the CPU has the kernels) or float32 (if not).
pub fn default_dtype(own: Dtype, device: Device) -> Dtype {
    faster(own, device == Device::Cpu, cpu::available())
}

fn faster(own: Dtype, on_cpu: bool, has_kernels: bool) -> Dtype {
    match own {
        Dtype::Float16 if on_cpu && has_kernels => Dtype::BFloat16,
        Dtype::Float16 if on_cpu => Dtype::Float32,
        _ => own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_float16_on_a_cpu_becomes_another_dtype() {
        for (has_kernels, expected) in [(true, Dtype::BFloat16), (false, Dtype::Float32)] {
            assert_eq!(faster(Dtype::Float16, true, has_kernels), expected);
            assert_eq!(faster(Dtype::Float16, false, has_kernels), Dtype::Float16);
            for own in [Dtype::Float32, Dtype::BFloat16] {
                assert_eq!(faster(own, true, has_kernels), own);
            }
        }
    }
}
