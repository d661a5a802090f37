//! NVRTC and cublasLt, opened by their names with the version: first those that pip installs beside libtorch, then those that the loader
//! finds. cudarc would ask the loader for the names without a version first, which may be another toolkit's.
#![expect(unsafe_code, reason = "a library's initialisers run when it is opened, and its functions are C")]

use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::cublaslt::sys as lt;
use cudarc::nvrtc::sys as rtc;
use libloading::Library;

use crate::torch::accelerator::libtorch_folder;

pub(super) const CUBLAS_LT: &str = "libcublasLt.so.13";
pub(super) const NVRTC: &str = "libnvrtc.so.13";
/// NVRTC's other library, followed by NVRTC's minor version.
const NVRTC_BUILTINS: &str = "libnvrtc-builtins.so.13.";

/// Why a library cannot be used: the loader's message.
pub(super) type LoaderMessage = String;

/// Declares a table of C functions that is read from a library.
macro_rules! c_functions {
    ($(#[$doc:meta])* $table:ident { $($field:ident = $name:literal: ($($type:ty),*) $(-> $out:ty)?;)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $table { $(pub(super) $field: unsafe extern "C" fn($($type),*) $(-> $out)?,)* }

        impl $table {
            fn of(library: &Library) -> Result<Self, LoaderMessage> {
                // SAFETY: the types are those of CUDA 13's headers.
                Ok(unsafe { Self { $($field: *library.get($name.as_bytes()).map_err(message)?,)* } })
            }
        }
    };
}

c_functions! {
    /// NVRTC's functions.
    NvrtcFunctions {
        version = "nvrtcVersion": (*mut c_int, *mut c_int) -> rtc::nvrtcResult;
        create = "nvrtcCreateProgram":
            (*mut rtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char)
            -> rtc::nvrtcResult;
        compile = "nvrtcCompileProgram": (rtc::nvrtcProgram, c_int, *const *const c_char) -> rtc::nvrtcResult;
        log_size = "nvrtcGetProgramLogSize": (rtc::nvrtcProgram, *mut usize) -> rtc::nvrtcResult;
        log = "nvrtcGetProgramLog": (rtc::nvrtcProgram, *mut c_char) -> rtc::nvrtcResult;
        cubin_size = "nvrtcGetCUBINSize": (rtc::nvrtcProgram, *mut usize) -> rtc::nvrtcResult;
        cubin = "nvrtcGetCUBIN": (rtc::nvrtcProgram, *mut c_char) -> rtc::nvrtcResult;
        destroy = "nvrtcDestroyProgram": (*mut rtc::nvrtcProgram) -> rtc::nvrtcResult;
    }
}

c_functions! {
    /// cublasLt's functions.
    CublasLtFunctions {
        version = "cublasLtGetVersion": () -> usize;
        create = "cublasLtCreate": (*mut lt::cublasLtHandle_t) -> lt::cublasStatus_t;
        destroy = "cublasLtDestroy": (lt::cublasLtHandle_t) -> lt::cublasStatus_t;
        create_product = "cublasLtMatmulDescCreate":
            (*mut lt::cublasLtMatmulDesc_t, lt::cublasComputeType_t, lt::cudaDataType) -> lt::cublasStatus_t;
        set_product = "cublasLtMatmulDescSetAttribute":
            (lt::cublasLtMatmulDesc_t, lt::cublasLtMatmulDescAttributes_t, *const c_void, usize) -> lt::cublasStatus_t;
        destroy_product = "cublasLtMatmulDescDestroy": (lt::cublasLtMatmulDesc_t) -> lt::cublasStatus_t;
        create_layout = "cublasLtMatrixLayoutCreate":
            (*mut lt::cublasLtMatrixLayout_t, lt::cudaDataType, u64, u64, i64) -> lt::cublasStatus_t;
        destroy_layout = "cublasLtMatrixLayoutDestroy": (lt::cublasLtMatrixLayout_t) -> lt::cublasStatus_t;
        create_preference = "cublasLtMatmulPreferenceCreate":
            (*mut lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
        set_preference = "cublasLtMatmulPreferenceSetAttribute":
            (lt::cublasLtMatmulPreference_t, lt::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize)
            -> lt::cublasStatus_t;
        destroy_preference = "cublasLtMatmulPreferenceDestroy":
            (lt::cublasLtMatmulPreference_t) -> lt::cublasStatus_t;
        heuristic = "cublasLtMatmulAlgoGetHeuristic":
            (lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t,
             lt::cublasLtMatrixLayout_t, lt::cublasLtMatrixLayout_t, lt::cublasLtMatmulPreference_t, c_int,
             *mut lt::cublasLtMatmulHeuristicResult_t, *mut c_int)
            -> lt::cublasStatus_t;
        matmul = "cublasLtMatmul":
            (lt::cublasLtHandle_t, lt::cublasLtMatmulDesc_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t,
             *const c_void, lt::cublasLtMatrixLayout_t, *const c_void, *const c_void, lt::cublasLtMatrixLayout_t,
             *mut c_void, lt::cublasLtMatrixLayout_t, *const lt::cublasLtMatmulAlgo_t, *mut c_void, usize,
             lt::cudaStream_t)
            -> lt::cublasStatus_t;
    }
}

/// NVRTC of CUDA 13.
pub(super) fn nvrtc() -> Result<&'static NvrtcFunctions, &'static LoaderMessage> {
    static FUNCTIONS: OnceLock<Result<NvrtcFunctions, LoaderMessage>> = OnceLock::new();
    let load = || {
        let beside = folder();
        for name in nvrtc_builtins(&beside) {
            open(&beside, &name)?;
        }
        open(&beside, NVRTC).and_then(NvrtcFunctions::of)
    };
    FUNCTIONS.get_or_init(load).as_ref()
}

/// cublasLt of CUDA 13.
pub(super) fn cublas_lt() -> Result<&'static CublasLtFunctions, &'static LoaderMessage> {
    static FUNCTIONS: OnceLock<Result<CublasLtFunctions, LoaderMessage>> = OnceLock::new();
    FUNCTIONS.get_or_init(|| open(&folder(), CUBLAS_LT).and_then(CublasLtFunctions::of)).as_ref()
}

/// The folder that is searched before the loader's own paths.
pub(super) fn folder() -> PathBuf {
    libtorch_folder().unwrap_or_default().join("../../nvidia/cu13/lib")
}

/// File names of NVRTC's built-ins in a folder, whatever their minor version. They are opened before NVRTC, which looks them up by
/// name and not beside itself.
fn nvrtc_builtins(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(NVRTC_BUILTINS)).collect()
}

/// Opens a library for the life of the process: from `folder` if it is there, else where the loader finds it by this name.
fn open(folder: &Path, name: &str) -> Result<&'static Library, LoaderMessage> {
    let beside = folder.join(name);
    let library = load(if beside.exists() { &beside } else { Path::new(name) })?;
    Ok(Box::leak(Box::new(library)))
}

#[cfg(target_os = "linux")]
fn load(path: &Path) -> Result<Library, LoaderMessage> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // SAFETY: runs the initialisers of NVIDIA's own libraries, which do not touch our memory.
    unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }.map(Into::into).map_err(message)
}

#[cfg(not(target_os = "linux"))]
fn load(_: &Path) -> Result<Library, LoaderMessage> {
    Err("CUDA is used on Linux only".into())
}

/// libloading's own message is only "dlopen failed"; the loader's message is its source.
fn message(error: libloading::Error) -> LoaderMessage {
    std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

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

    c_functions! {
        Probe { version = "probe_version": () -> c_int; }
    }

    /// Builds a library of this SONAME whose `probe_version` returns `version`.
    #[cfg(target_os = "linux")]
    fn build(folder: &Path, name: &str, version: i32) {
        let source = folder.join(format!("{version}.cpp"));
        let text = format!("extern \"C\" int probe_version() {{ return {version}; }}\n");
        crate::files::write_atomic(&source, |out| out.write_all(text.as_bytes())).expect("a file of a test");
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
        let mut command = Command::new(compiler);
        command.args(["-shared", "-fPIC", &format!("-Wl,-soname,{name}"), "-o"]).args([&folder.join(name), &source]);
        assert!(command.status().expect("a C++ compiler").success());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_version_in_a_name_decides_whatever_is_open() {
        let folder = tempfile::tempdir().expect("a folder");
        build(folder.path(), "libprobe.so", 12);
        build(folder.path(), "libprobe.so.13", 13);
        let version = |name: &str| {
            let probe = open(folder.path(), name).and_then(Probe::of).expect("a library with the function");
            // SAFETY: the function was just built with this type.
            unsafe { (probe.version)() }
        };
        assert_eq!(["libprobe.so", "libprobe.so.13", "libprobe.so"].map(version), [12, 13, 12]);
        let missing = open(folder.path(), "libprobe.so.14").expect_err("no such file");
        assert!(missing.starts_with("libprobe.so.14: cannot open shared object file"), "{missing}");
        let other = open(folder.path(), "libprobe.so").map(NvrtcFunctions::of).expect("a library");
        assert!(other.expect_err("no NVRTC").contains("undefined symbol: nvrtcVersion"));
    }
}
