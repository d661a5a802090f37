//! Opens libtorch's CUDA half at run time, so that one binary serves machines with and without it.
//!
//! The binary links libtorch_cpu only. libtorch_cuda registers its kernels from static initialisers, so opening it is
//! enough. libtorch caches its first answer about CUDA, so [`open`] has to run before any other call that asks for it.
#![expect(unsafe_code, reason = "opens a shared library, whose initialisers run, and calls C++ functions of libtorch")]

use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Device;

use super::{cuda_runtime, memory};

/// State of libtorch's CUDA half in this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Accelerator {
    /// libtorch_cuda is open and sees this many devices.
    Cuda { devices: usize },
    /// libtorch_cuda is there, but no usable driver or device.
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
        turn_off_cudnn_attention();
        if is_off() {
            return Accelerator::CpuOnly("switched off by MEDUSA_CUDA".into());
        }
        let is_useful = !wish().is_empty() || has_driver();
        state(find(&wish()), is_useful, |path| {
            load(path)?;
            Ok(if tch::Cuda::is_available() { usize::try_from(tch::Cuda::device_count()).unwrap_or(0) } else { 0 })
        })
    })
}

/// Opens libtorch_cuda unless that is useless: without a driver it finds no device, but takes 200 MiB of memory and half a second.
fn state(
    path: Result<PathBuf, String>,
    is_useful: bool,
    open: impl FnOnce(&Path) -> Result<usize, String>,
) -> Accelerator {
    match path.and_then(|path| if is_useful { open(&path) } else { Ok(0) }) {
        Ok(0) => Accelerator::NoDevice,
        Ok(devices) => Accelerator::Cuda { devices },
        Err(why) => Accelerator::CpuOnly(why),
    }
}

/// Resident bytes that opening libtorch_cuda added to this process.
pub fn opened_bytes() -> u64 {
    OPENED_BYTES.load(Ordering::Relaxed)
}

static OPENED_BYTES: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" {
    #[link_name = "_ZN2at13globalContextEv"]
    fn global_context() -> *mut c_void;
    #[link_name = "_ZN2at7Context14setSDPUseCuDNNEb"]
    fn set_cudnn_attention(context: *mut c_void, is_on: bool);
}

/// Leaves scaled dot product attention to libtorch's other kernels. On Hopper libtorch prefers cuDNN's, which builds a plan of tens of
/// milliseconds for each new length of the keys, and a decoding loop has a new length at every step.
fn turn_off_cudnn_attention() {
    // SAFETY: the context lives as long as the process, and the second function is its method.
    unsafe { set_cudnn_attention(global_context(), false) };
}

/// Whether a device is an NVIDIA GPU of compute capability 8.0 (Ampere) or higher.
pub fn is_ampere(device: Device) -> bool {
    matches!(device, Device::Cuda(index) if cuda_runtime::capability(index).is_ok_and(|capability| capability >= (8, 0)))
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

/// Whether the loader finds the NVIDIA driver's library, which libtorch_cuda asks for devices.
#[cfg(target_os = "linux")]
fn has_driver() -> bool {
    use libloading::os::unix::{Library, RTLD_LAZY};
    // SAFETY: runs the driver's own initialisers, as libtorch_cuda does; it stays open.
    unsafe { Library::open(Some("libcuda.so.1"), RTLD_LAZY) }.map(std::mem::forget).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn has_driver() -> bool {
    false
}

#[cfg(target_os = "linux")]
fn load(path: &Path) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    let resident = || memory::process().map_or(0, |memory| memory.resident_bytes);
    let before = resident();
    // SAFETY: runs libtorch's own initialisers, once. RTLD_GLOBAL: libraries that libtorch opens later look symbols up here.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }.map_err(|e| chain(&e))?;
    std::mem::forget(library); // libtorch cannot be unloaded
    OPENED_BYTES.store(resident().saturating_sub(before), Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        #[link_name = "_ZNK2at7Context19userEnabledCuDNNSDPEv"]
        fn is_cudnn_attention_on(context: *const c_void) -> bool;
    }

    #[test]
    fn attention_is_not_cudnns() {
        open();
        // SAFETY: the context lives as long as the process, and the function is its method.
        assert!(!unsafe { is_cudnn_attention_on(global_context()) });
    }

    #[test]
    fn libtorch_cuda_is_opened_only_where_it_may_find_a_device() {
        let path = || Ok(PathBuf::from("libtorch_cuda.so"));
        assert_eq!(state(path(), false, |_| unreachable!("there is no driver")), Accelerator::NoDevice);
        assert_eq!(state(path(), true, |_| Ok(2)), Accelerator::Cuda { devices: 2 });
        assert_eq!(state(path(), true, |_| Ok(0)), Accelerator::NoDevice);
        let broken = |_: &Path| Err("no such symbol".to_owned());
        assert_eq!(state(path(), true, broken), Accelerator::CpuOnly("no such symbol".into()));
        let none = Err("this libtorch has no libtorch_cuda".to_owned());
        assert!(matches!(state(none, false, |_| Ok(1)), Accelerator::CpuOnly(_)));
    }
}
