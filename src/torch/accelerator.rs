//! Opens libtorch's CUDA half at run time, so that one binary serves machines with and without it.
//!
//! The binary links libtorch_cpu only. libtorch_cuda registers its kernels from static initialisers, so opening it is
//! enough. libtorch caches its first answer about CUDA, so [`open`] has to run before any other call that asks for it.
#![expect(unsafe_code, reason = "opening a shared library runs its initialisers")]

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

/// State of libtorch's CUDA half in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Accelerator {
    /// libtorch_cuda is open and sees this many devices.
    Cuda { devices: usize },
    /// libtorch_cuda is open, but there is no usable driver or device.
    NoDevice,
    /// libtorch_cuda is not open, for this reason.
    CpuOnly(String),
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Accelerator::Cuda { devices } => write!(f, "CUDA with {devices} device(s)"),
            Accelerator::NoDevice => write!(f, "libtorch_cuda is there, but no NVIDIA driver or device answers"),
            Accelerator::CpuOnly(why) => write!(f, "CPU only ({why})"),
        }
    }
}

/// Opens libtorch_cuda if it is in the folder of libtorch_cpu. `MEDUSA_CUDA=off` skips it, `MEDUSA_CUDA=/path` names another file.
pub fn open() -> &'static Accelerator {
    static ACCELERATOR: OnceLock<Accelerator> = OnceLock::new();
    ACCELERATOR.get_or_init(|| {
        if is_off() {
            return Accelerator::CpuOnly("switched off by MEDUSA_CUDA".into());
        }
        match find(&wish()).and_then(|path| load(&path)) {
            Ok(()) if tch::Cuda::is_available() => {
                Accelerator::Cuda { devices: usize::try_from(tch::Cuda::device_count()).unwrap_or(0) }
            }
            Ok(()) => Accelerator::NoDevice,
            Err(why) => Accelerator::CpuOnly(why),
        }
    })
}

/// Whether a device is an NVIDIA GPU of compute capability 8.0 (Ampere) or higher: only those store the product of bfloat16 matrices in
/// float32, which this tries on the first device that it is asked about. A process uses one.
pub fn is_ampere(device: Device) -> bool {
    static IS_AMPERE: OnceLock<bool> = OnceLock::new();
    let stores_float32 = || {
        let matrix = Tensor::zeros([16, 16], (Kind::BFloat16, device));
        matrix.f_mm_dtype(&matrix, Kind::Float).is_ok()
    };
    device.is_cuda() && *IS_AMPERE.get_or_init(stores_float32)
}

/// Whether `MEDUSA_CUDA` switches CUDA off.
pub fn is_off() -> bool {
    matches!(wish().as_str(), "off" | "0")
}

fn wish() -> String {
    std::env::var("MEDUSA_CUDA").unwrap_or_default()
}

/// The folder from which this process loaded libtorch_cpu.
pub fn libtorch_folder() -> Option<PathBuf> {
    let _ = tch::get_num_threads(); // with --as-needed, a program that uses no symbol of libtorch is not linked to it
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mapped = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    mapped
        .filter(|path| path.file_name().is_some_and(|n| n == "libtorch_cpu.so"))
        .find_map(|p| p.parent())
        .map(Into::into)
}

fn find(wish: &str) -> Result<PathBuf, String> {
    if !wish.is_empty() {
        return Ok(wish.into());
    }
    let path = libtorch_folder().ok_or("libtorch_cpu is not mapped from a file")?.join("libtorch_cuda.so");
    if path.exists() { Ok(path) } else { Err("this libtorch has no libtorch_cuda".into()) }
}

#[cfg(target_os = "linux")]
fn load(path: &Path) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // SAFETY: runs libtorch's own initialisers, once. RTLD_GLOBAL: libraries that libtorch opens later look symbols up here.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }.map_err(|e| chain(&e))?;
    std::mem::forget(library); // libtorch cannot be unloaded
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn load(_: &Path) -> Result<(), String> {
    Err("CUDA is used on Linux only".into())
}

/// libloading's own message is only "dlopen failed"; the loader's message is in `source()`.
#[cfg(target_os = "linux")]
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}
