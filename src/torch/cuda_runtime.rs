//! What the CUDA runtime that libtorch_cuda has loaded tells about a GPU. libtorch needs neither the driver's library by another name nor
//! NVRTC for it, so it answers wherever libtorch computes.
#![expect(unsafe_code, reason = "C functions of a library that is opened at run time")]

use std::ffi::c_int;

/// `cudaDevAttrComputeCapabilityMajor`, `cudaDevAttrComputeCapabilityMinor`.
const CAPABILITY: [c_int; 2] = [75, 76];

type GetAttribute = unsafe extern "C" fn(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
type SetDevice = unsafe extern "C" fn(device: c_int) -> c_int;
type GetDevice = unsafe extern "C" fn(device: *mut c_int) -> c_int;
type GetMemory = unsafe extern "C" fn(free: *mut usize, total: *mut usize) -> c_int;

/// A function of the CUDA runtime is missing or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{function} of the CUDA runtime {reason}")]
pub struct CudaRuntimeError {
    pub function: &'static str,
    reason: String,
}

/// Total and free bytes of a GPU, as the driver counts them: the memory of all processes is taken.
///
/// # Errors
/// [`CudaRuntimeError`].
pub fn memory(index: usize) -> Result<(u64, u64), CudaRuntimeError> {
    let [set, get] = ["cudaSetDevice", "cudaGetDevice"];
    let (mut before, mut free, mut total) = (0, 0, 0);
    // SAFETY: the types are those of CUDA 13; each call writes the numbers that it is given. The thread's device is restored.
    unsafe {
        let set_device = function::<SetDevice>(set)?;
        check(get, function::<GetDevice>(get)?(&raw mut before))?;
        check(set, set_device(number(index)))?;
        let asked = function::<GetMemory>("cudaMemGetInfo")?(&raw mut free, &raw mut total);
        check(set, set_device(before))?;
        check("cudaMemGetInfo", asked)?;
    }
    Ok((total as u64, free as u64))
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

/// A function of the libraries that are open for all: libtorch_cuda is, and so is the runtime that it needs.
///
/// # Safety
/// `F` is the type of the function.
#[cfg(target_os = "linux")]
unsafe fn function<F: Copy>(name: &'static str) -> Result<F, CudaRuntimeError> {
    let missing =
        |_| CudaRuntimeError { function: name, reason: "is not there: libtorch_cuda is not loaded".to_owned() };
    // SAFETY: by contract; the library stays loaded, as libtorch does.
    unsafe { libloading::os::unix::Library::this().get::<F>(name.as_bytes()) }.map(|found| *found).map_err(missing)
}

#[cfg(not(target_os = "linux"))]
unsafe fn function<F: Copy>(name: &'static str) -> Result<F, CudaRuntimeError> {
    Err(CudaRuntimeError { function: name, reason: "is used on Linux only".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without libtorch_cuda the functions are missing; without a driver they fail.
    #[test]
    fn the_function_that_is_missing_or_fails_is_named() {
        const ABSENT: usize = 1 << 20;
        let [of_capability, of_memory] = [capability(ABSENT).map(drop), memory(ABSENT).map(drop)];
        assert_eq!(of_capability.unwrap_err().function, "cudaDeviceGetAttribute");
        assert!(["cudaSetDevice", "cudaGetDevice"].contains(&of_memory.unwrap_err().function));
    }
}
