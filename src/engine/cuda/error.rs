//! Errors of the CUDA engine.

use super::plan::Shortage;
use super::shape::UnsupportedModel;
use crate::nvidia::error::GpuError;
use crate::torch::TorchPanic;

/// The result of an operation on the device.
pub type CudaResult<T = ()> = Result<T, CudaError>;

/// The CUDA engine cannot be built, or failed while decoding.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No kernels support this model or tree.
    #[error(transparent)]
    UnsupportedModel(#[from] UnsupportedModel),
    /// Not enough free memory.
    #[error(transparent)]
    Memory(#[from] Box<Shortage>),
    /// No usable GPU, kernels that cannot be compiled, or an error of the driver.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// libtorch failed, most likely out of memory.
    #[error(transparent)]
    Torch(#[from] TorchPanic),
    /// A drafter other than heads with a static tree.
    #[error(
        "the CUDA engine drafts with Medusa and Hydra heads in static trees, not with {0}; use --engine tch, or --engine cpu on the CPU"
    )]
    Drafter(&'static str),
    /// The engine has no rule for the request.
    #[error("the CUDA engine cannot decode this: {0}; use --engine tch")]
    Request(&'static str),
    /// The cache cannot grow to the length of the text.
    #[error(
        "the text needs a cache of {room} tokens, {needed_bytes} bytes, and {free_bytes} are free on the GPU; ask for fewer tokens \
         (--max-new-tokens), or shorten the context (--max-context)"
    )]
    Growth {
        /// In tokens.
        room: i64,
        /// Size of the larger cache.
        needed_bytes: u64,
        free_bytes: u64,
    },
}
