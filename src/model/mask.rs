//! Additive attention masks: 0 where a token is seen, -inf elsewhere.

// N queries, S keys
use tch::{Kind, Tensor};

/// libtorch's kernels for NVIDIA GPUs read a mask in blocks of so many numbers, and need rows and the first number at multiples of it.
const ALIGNMENT: i64 = 8;

/// A mask that is true where a token is seen.
pub(super) fn additive(sees: &Tensor, kind: Kind) -> Tensor {
    Tensor::zeros(sees.size(), (kind, sees.device())).masked_fill(&sees.logical_not(), f64::NEG_INFINITY)
}

/// A mask `[…, N, S]` as libtorch's kernels on its device can read it. They crash on a view that begins elsewhere: libtorch checks its
/// strides only. A mask whose rows have another length is copied by libtorch, once a layer.
pub(super) fn readable(mask: &Tensor) -> Tensor {
    if mask.device().is_cuda() { aligned(mask) } else { mask.shallow_clone() }
}

/// A copy with room behind each row.
fn aligned(mask: &Tensor) -> Tensor {
    let mut size = mask.size();
    let keys = size.last_mut().expect("[…, S]");
    let s = *keys;
    *keys = (s + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    let mut copy = Tensor::zeros(size, (mask.kind(), mask.device())).narrow(-1, 0, s);
    copy.copy_(mask);
    copy
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::torch::Generator;

    /// Right-aligned views of a mask, as behind a cache that grows.
    #[test]
    fn aligned_masks_of_every_length_have_aligned_rows_and_the_same_numbers() {
        let mut random = Generator::seeded(1);
        for (kind, bytes) in [(Kind::Float, 4), (Kind::BFloat16, 2)] {
            let mask_ns = additive(&random.normal(&[3, 61], (Kind::Float, Device::Cpu)).gt(0.0), kind);
            for s in 1..=61 {
                let view = mask_ns.narrow(1, 61 - s, s);
                let aligned = aligned(&view);
                assert!(aligned.equal(&view) && aligned.size() == view.size());
                assert_eq!(aligned.data_ptr() as usize % (ALIGNMENT as usize * bytes), 0, "the first number, {s}");
                assert_eq!((aligned.stride()[0] % ALIGNMENT, aligned.stride()[1]), (0, 1), "rows, {s}");
                let whole = aligned.unsqueeze(0).expand([2, 3, s], false);
                assert_eq!(whole.stride()[0] % ALIGNMENT, 0, "expanded over heads, {s}");
            }
        }
    }

    #[test]
    fn on_the_cpu_a_mask_is_read_where_it_is() {
        let mask = Tensor::zeros([4, 9], (Kind::Float, Device::Cpu));
        assert_eq!(readable(&mask.narrow(1, 1, 8)).data_ptr(), mask.narrow(1, 1, 8).data_ptr());
    }
}
