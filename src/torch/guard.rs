//! Turns libtorch's errors (out of memory, a shape clash), which tch raises as panics, into values. Any other panic is a bug in this
//! program: it is printed with its file and line, and unwinds on.

use tch::TchError;

use crate::panics;

/// An error of libtorch caught by [`guard`].
#[derive(Debug, thiserror::Error)]
#[error("{}{work} failed: {reason}", if *.out_of_memory { "out of memory: " } else { "" })]
pub struct TorchPanic {
    pub work: String,
    /// The first line of libtorch's message.
    pub reason: String,
    /// Whether an allocator ran out of memory.
    pub out_of_memory: bool,
}

/// tch unwraps its `Result`s: `called … value: Torch("message\nException raised from …`.
const OF_LIBTORCH: &str = "Torch(\"";
/// Of libtorch's allocator for GPUs, of that for CPUs, and of CUDA's driver, which our kernels call.
const OUT_OF_MEMORY: [&str; 3] = ["out of memory", "can't allocate memory", "CUDA_ERROR_OUT_OF_MEMORY"];

/// Runs `body`; an error of libtorch in it becomes an error that names `work`.
///
/// # Errors
/// [`TorchPanic`] with the first line of libtorch's message (it appends a C++ backtrace, which is dropped).
///
/// # Panics
/// If `body` panics for any other reason.
pub fn guard<T>(work: &str, body: impl FnOnce() -> T) -> Result<T, TorchPanic> {
    panics::expecting(|_, message| message.contains(OF_LIBTORCH), body).map_err(|message| {
        let text = message.split_once(OF_LIBTORCH).map_or("", |(_, text)| text);
        let reason = text.split("\\n").next().unwrap_or_default().to_owned();
        let out_of_memory = OUT_OF_MEMORY.iter().any(|words| text.contains(words));
        TorchPanic { work: work.into(), reason, out_of_memory }
    })
}

/// Raises an error of the device as libtorch's own operations do, for [`guard`] to catch.
///
/// # Panics
/// Always.
pub fn raise(reason: &str) -> ! {
    panic!("{:?}", TchError::Torch(format!("{reason}\n"))) // a message of libtorch's goes on after its first line, too
}

#[cfg(test)]
mod tests {
    use std::panic;

    use tch::{Device, Kind, Tensor};

    use super::*;

    #[test]
    fn a_shape_clash_becomes_one_line() {
        let (a, b) =
            (Tensor::ones([2, 3], (Kind::Float, Device::Cpu)), Tensor::ones([2, 3], (Kind::Float, Device::Cpu)));
        let error = guard("the product", || a.matmul(&b)).unwrap_err();
        assert!(error.reason.starts_with("mat1 and mat2 shapes cannot be multiplied"), "{error}");
        assert!(!error.to_string().contains('\n') && !error.out_of_memory);
    }

    #[test]
    fn running_out_of_memory_is_recognised() {
        let error = guard("a huge tensor", || Tensor::ones([1 << 55], (Kind::Float, Device::Cpu))).unwrap_err();
        assert!(error.out_of_memory, "{error:?}");
    }

    #[test]
    fn an_error_of_a_kernel_is_as_one_of_libtorch() {
        let error = guard("the update", || raise("adamw failed on the GPU: CUDA_ERROR_ILLEGAL_ADDRESS")).unwrap_err();
        assert_eq!(error.to_string(), "the update failed: adamw failed on the GPU: CUDA_ERROR_ILLEGAL_ADDRESS");
        let short = guard("the update", || raise("adamw failed on the GPU: CUDA_ERROR_OUT_OF_MEMORY")).unwrap_err();
        assert!(short.out_of_memory, "{short}");
    }

    #[test]
    fn a_panic_of_our_own_unwinds_on() {
        let panic = panic::catch_unwind(|| guard("the work", || panic!("a bug"))).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"a bug"));
    }
}
