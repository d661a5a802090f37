//! Errors of NVIDIA's driver and libraries.

use std::path::PathBuf;

use cudarc::driver::result::DriverError;

use super::libraries::CUBLAS_LT;
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
    /// A library of CUDA cannot be opened.
    #[error("{library} is not in {} and the system has none; `scripts/setup`, or torch installed by pip, brings it", folder.display())]
    Library {
        library: &'static str,
        /// The folder that was searched.
        folder: PathBuf,
    },
    /// A version of cublasLt other than 13.
    #[error(
        "the loader finds cublasLt {found} first, and 13 is needed; take that one out of LD_LIBRARY_PATH, or put {CUBLAS_LT} in {} \
         (`scripts/setup`, or torch installed by pip, does)", folder.display()
    )]
    CublasLt {
        /// `12.9`, for example.
        found: String,
        /// Folder that should hold version 13.
        folder: PathBuf,
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
