//! Errors of NVIDIA's driver and libraries.

use std::path::PathBuf;

use cudarc::driver::result::DriverError;

use super::nvrtc::CompileError;

/// Why no GPU can be used here, or what failed on it.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// libtorch sees no GPU.
    #[error("there is no GPU to decode on: {accelerator}; run `medusa doctor` to see what is missing")]
    Accelerator {
        /// What libtorch reports about CUDA.
        accelerator: String,
    },
    /// The backbone is on another device.
    #[error("the backbone computes on the {device}; use --device cuda")]
    Elsewhere {
        /// `cpu`, for example.
        device: String,
    },
    /// The driver is older than the kernels.
    #[error("the NVIDIA driver is for CUDA {found}, and the kernels need 13.0: update the driver (580 or newer)")]
    Driver {
        /// `12.4`, for example.
        found: String,
    },
    /// The driver's library cannot be opened.
    #[error("the loader finds no libcuda.so.1: NVIDIA's driver brings it, and a container gets it with `--gpus all`")]
    NoDriver,
    /// The toolkit's stand-in for the driver's library, with which programs are linked.
    #[error(
        "the loader finds the CUDA toolkit's stub of libcuda.so before the driver's library; take the folder that ends in /stubs \
         out of LD_LIBRARY_PATH"
    )]
    Stub,
    /// A library of CUDA cannot be opened.
    #[error(
        "{library} cannot be opened ({why}); expected it in {}, where `scripts/setup`, or torch installed by pip, puts it, or in a \
         folder that the loader searches", folder.display()
    )]
    Library {
        library: &'static str,
        /// The folder that was searched.
        folder: PathBuf,
        /// The loader's message.
        why: String,
    },
    /// NVRTC is missing or does not compile a kernel.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The GPU is older than the kernels.
    #[error("{name} has compute capability {found}, and the kernels need 8.0 (Ampere) or newer")]
    Capability {
        name: String,
        /// `7.5`, for example.
        found: String,
    },
    /// A kernel cannot be launched, or one before it failed.
    #[error("the GPU failed at {kernel} or at a kernel before it: {reason}")]
    Launch {
        kernel: &'static str,
        /// The driver's error code.
        reason: String,
    },
    /// A call of the driver or of cublasLt failed.
    #[error("{work} failed on the GPU: {reason}")]
    Failed {
        /// The failed operation.
        work: &'static str,
        /// The driver's error code.
        reason: String,
    },
}

impl GpuError {
    /// Wraps a driver error of the operation `work`.
    pub fn failed(work: &'static str) -> impl Fn(DriverError) -> Self {
        move |error| Self::Failed { work, reason: format!("{:?}", error.0) }
    }
}
