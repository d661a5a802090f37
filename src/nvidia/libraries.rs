//! Preloads NVIDIA's libraries from where pip installs them beside libtorch: cudarc opens libraries by name and finds those that are
//! already loaded.
#![expect(unsafe_code, reason = "a library's initialisers run when it is opened")]

use std::fs;
use std::path::{Path, PathBuf};

use crate::torch::accelerator::libtorch_folder;

pub(super) const CUBLAS_LT: &str = "libcublasLt.so.13";
pub(super) const NVRTC: &str = "libnvrtc.so.13";
/// NVRTC's other library, followed by NVRTC's minor version.
const NVRTC_BUILTINS: &str = "libnvrtc-builtins.so.13.";

/// The folder that is searched before the loader's own paths.
pub(super) fn folder() -> PathBuf {
    libtorch_folder().unwrap_or_default().join("../../nvidia/cu13/lib")
}

/// File names of NVRTC's built-ins in a folder, whatever their minor version. They are opened before NVRTC, which looks them up by
/// name and not beside itself.
pub(super) fn nvrtc_builtins(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(NVRTC_BUILTINS)).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_ins_of_any_minor_version_are_found() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(nvrtc_builtins(&folder.path().join("absent")), [""; 0]);
        for name in [
            "libnvrtc.so.13",
            "libnvrtc-builtins.so.13.2",
            "libnvrtc-builtins.so.12.8",
            "libnvrtc-builtins.alt.so.13.2",
        ] {
            fs::File::create(folder.path().join(name)).expect("a file of a test");
        }
        assert_eq!(nvrtc_builtins(folder.path()), ["libnvrtc-builtins.so.13.2"]);
    }
}
