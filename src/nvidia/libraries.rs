//! Preloads NVIDIA's libraries from where pip installs them beside libtorch: cudarc opens libraries by name and finds those that are
//! already loaded.
#![expect(unsafe_code, reason = "a library's initialisers run when it is opened")]

use std::path::PathBuf;

use crate::torch::accelerator::libtorch_folder;

pub(super) const CUBLAS_LT: &str = "libcublasLt.so.13";
pub(super) const NVRTC: &str = "libnvrtc.so.13";
/// Opened before NVRTC, which looks it up by name and not beside itself.
pub(super) const NVRTC_BUILTINS: &str = "libnvrtc-builtins.so.13.0";

/// The folder that is searched before the loader's own paths.
pub(super) fn folder() -> PathBuf {
    libtorch_folder().unwrap_or_default().join("../../nvidia/cu13/lib")
}

/// Opens a library from [`folder`] for the life of the process.
///
/// # Errors
/// The loader's message.
#[cfg(target_os = "linux")]
pub(super) fn preload(name: &str) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // SAFETY: runs the initialisers of NVIDIA's own libraries, which do not touch our memory.
    let library = unsafe { Library::open(Some(folder().join(name)), RTLD_LAZY | RTLD_GLOBAL) };
    let reason =
        |error: libloading::Error| std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
    std::mem::forget(library.map_err(reason)?);
    Ok(())
}

#[cfg(not(target_os = "linux"))]
pub(super) fn preload(_: &str) -> Result<(), String> {
    Err("CUDA is used on Linux only".into())
}
