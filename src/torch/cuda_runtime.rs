//! What the CUDA runtime that libtorch_cuda has loaded reports about a GPU. libtorch needs neither the driver's library by another name nor
//! NVRTC for it, so it answers wherever libtorch computes.
#![expect(unsafe_code, reason = "C functions of a library that is opened at run time")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

/// `cudaDevAttrComputeCapabilityMajor`, `cudaDevAttrComputeCapabilityMinor`.
const CAPABILITY: [c_int; 2] = [75, 76];

/// `cudaErrorNotReady`.
const NOT_READY: c_int = 600;

/// cudaDeviceGetPCIBusId needs 13 bytes; some more for longer domains.
const PCI_ADDRESS_BYTES: usize = 32;

type GetAttribute = unsafe extern "C" fn(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
type SetDevice = unsafe extern "C" fn(device: c_int) -> c_int;
type GetDevice = unsafe extern "C" fn(device: *mut c_int) -> c_int;
type StreamQuery = unsafe extern "C" fn(stream: *mut c_void) -> c_int;
type GetPciAddress = unsafe extern "C" fn(text: *mut c_char, length: c_int, device: c_int) -> c_int;
type GetMemory = unsafe extern "C" fn(free: *mut usize, total: *mut usize) -> c_int;

/// A function of the CUDA runtime is missing or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{function} of the CUDA runtime {reason}")]
pub struct CudaRuntimeError {
    pub function: &'static str,
    reason: String,
}

/// The functions with which something is queued on a GPU and waited for, looked up once.
#[derive(Debug, Clone, Copy)]
pub(super) struct CudaFunctions {
    set_device: SetDevice,
    get_device: GetDevice,
    stream_query: StreamQuery,
}

impl CudaFunctions {
    /// Those of the CUDA runtime that libtorch_cuda has loaded.
    ///
    /// # Errors
    /// [`CudaRuntimeError`] names the one that is missing.
    pub(super) fn load() -> Result<Self, CudaRuntimeError> {
        // SAFETY: the types are those of CUDA 13.
        unsafe {
            Ok(Self {
                set_device: function("cudaSetDevice")?,
                get_device: function("cudaGetDevice")?,
                stream_query: function("cudaStreamQuery")?,
            })
        }
    }

    /// Calls `body` while a GPU is the thread's device, which is restored.
    ///
    /// # Errors
    /// [`CudaRuntimeError`] if the device cannot be set.
    pub(super) fn on_device<T>(&self, index: usize, body: impl FnOnce() -> T) -> Result<T, CudaRuntimeError> {
        let ([set, get], mut before) = (["cudaSetDevice", "cudaGetDevice"], 0);
        // SAFETY: the first call writes the number.
        unsafe {
            check(get, (self.get_device)(&raw mut before))?;
            check(set, (self.set_device)(number(index)))?;
            let done = body();
            check(set, (self.set_device)(before))?;
            Ok(done)
        }
    }

    /// Whether all that was queued on a GPU's legacy default stream, where libtorch computes, is done.
    ///
    /// # Errors
    /// [`CudaRuntimeError`], also of what was queued.
    pub(super) fn default_stream_is_done(&self, index: usize) -> Result<bool, CudaRuntimeError> {
        // SAFETY: a null stream is the default one.
        let status = self.on_device(index, || unsafe { (self.stream_query)(ptr::null_mut()) })?;
        if status == NOT_READY { Ok(false) } else { check("cudaStreamQuery", status).map(|()| true) }
    }
}

/// Total and free bytes of a GPU, as the driver counts them: the memory of all processes is taken.
///
/// # Errors
/// [`CudaRuntimeError`].
pub fn memory(index: usize) -> Result<(u64, u64), CudaRuntimeError> {
    let (mut free, mut total) = (0, 0);
    let functions = CudaFunctions::load()?;
    // SAFETY: the type is that of CUDA 13; the call writes both numbers.
    let asked = unsafe {
        let get = function::<GetMemory>("cudaMemGetInfo")?;
        functions.on_device(index, || get(&raw mut free, &raw mut total))?
    };
    check("cudaMemGetInfo", asked)?;
    Ok((total as u64, free as u64))
}

/// The address of a GPU on the PCI bus, such as `0000:65:00.0`: the same in all processes of a machine, whatever number the GPU has there.
///
/// # Errors
/// [`CudaRuntimeError`].
pub(super) fn pci_address(index: usize) -> Result<String, CudaRuntimeError> {
    let (name, mut text) = ("cudaDeviceGetPCIBusId", [0; PCI_ADDRESS_BYTES]);
    // SAFETY: the type is that of CUDA 13; the call writes at most as many bytes as it is given, the last of them 0.
    let address = unsafe {
        let get = function::<GetPciAddress>(name)?;
        check(name, get(text.as_mut_ptr(), PCI_ADDRESS_BYTES as c_int, number(index)))?;
        CStr::from_ptr(text.as_ptr())
    };
    Ok(address.to_string_lossy().into_owned())
}

/// The compute capability of a GPU, major and minor number.
///
/// # Errors
/// [`CudaRuntimeError`].
pub fn capability(index: usize) -> Result<(i32, i32), CudaRuntimeError> {
    let name = "cudaDeviceGetAttribute";
    let [mut major, mut minor] = [0, 0];
    // SAFETY: the type is that of CUDA 13; each call writes one number.
    unsafe {
        let get = function::<GetAttribute>(name)?;
        check(name, get(&raw mut major, CAPABILITY[0], number(index)))?;
        check(name, get(&raw mut minor, CAPABILITY[1], number(index)))?;
    }
    Ok((major, minor))
}

fn number(index: usize) -> c_int {
    c_int::try_from(index).unwrap_or(c_int::MAX) // no such device: the runtime says so
}

fn check(function: &'static str, status: c_int) -> Result<(), CudaRuntimeError> {
    match status {
        0 => Ok(()),
        _ => Err(CudaRuntimeError { function, reason: format!("failed with error {status}") }),
    }
}

/// A function of the libraries that are open for all: libtorch_cuda is, and so are the runtime and NCCL, which it needs.
///
/// # Safety
/// `F` is the type of the function.
#[cfg(target_os = "linux")]
pub(super) unsafe fn function<F: Copy>(name: &'static str) -> Result<F, CudaRuntimeError> {
    let missing =
        |_| CudaRuntimeError { function: name, reason: "is not there: libtorch_cuda is not loaded".to_owned() };
    // SAFETY: by contract; the library stays loaded, as libtorch does.
    unsafe { libloading::os::unix::Library::this().get::<F>(name.as_bytes()) }.map(|found| *found).map_err(missing)
}

/// The CUDA runtime is used on Linux only.
///
/// # Safety
/// As on Linux.
#[cfg(not(target_os = "linux"))]
pub(super) unsafe fn function<F: Copy>(name: &'static str) -> Result<F, CudaRuntimeError> {
    Err(CudaRuntimeError { function: name, reason: "is used on Linux only".to_owned() })
}

#[cfg(test)]
impl CudaFunctions {
    /// Those of a test.
    pub(super) fn fake(set_device: SetDevice, get_device: GetDevice, stream_query: StreamQuery) -> Self {
        Self { set_device, get_device, stream_query }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without libtorch_cuda the functions are missing; without a driver they fail.
    #[test]
    fn the_function_that_is_missing_or_fails_is_named() {
        const ABSENT: usize = 1 << 20;
        assert_eq!(pci_address(ABSENT).unwrap_err().function, "cudaDeviceGetPCIBusId");
        let [no_capability, no_memory] = [capability(ABSENT).map(drop), memory(ABSENT).map(drop)];
        assert_eq!(no_capability.unwrap_err().function, "cudaDeviceGetAttribute");
        assert!(["cudaSetDevice", "cudaGetDevice"].contains(&no_memory.unwrap_err().function));
    }
}
