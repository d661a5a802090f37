//! The GPU: whether a usable one is present, its context (shared with libtorch), and the stream that launches run on.
#![expect(unsafe_code, reason = "CUDA's libraries are opened at run time, and its functions take raw addresses")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use tch::{Device, Tensor};

use super::error::GpuError;
use super::libraries::{self, CUBLAS_LT, CublasLtFunctions};
use super::nvrtc::Compiler;
use crate::torch::{Accelerator, accelerator, bytes, memory};

/// The oldest driver that runs kernels of CUDA 13, in the driver's own format: 1000 · major + 10 · minor.
const DRIVER: i32 = 13_000;
/// 10 · major + minor of the oldest supported GPU: kernels use asynchronous copies and bfloat16 tensor cores.
const CAPABILITY: i32 = 80;

/// A GPU with the context and the stream of our kernels.
#[derive(Debug)]
pub struct Gpu {
    /// The primary context, shared with libtorch: addresses mean the same to both.
    pub context: Arc<CudaContext>,
    /// Our own stream, since libtorch's default stream cannot be captured.
    pub stream: Arc<CudaStream>,
    pub name: String,
    /// The architecture that kernels are compiled for, such as `sm_90a`.
    pub arch: String,
    /// Whether a kernel may start before the one before it has ended (programmatic dependent launch).
    pub overlaps_kernels: bool,
}

/// Checks whether this machine has a GPU that can decode, without touching it.
///
/// # Errors
/// [`GpuError`] names the reason.
pub fn check() -> Result<(), GpuError> {
    match accelerator::open() {
        Accelerator::Cuda { .. } => {}
        Accelerator::NoDevice => {
            check_driver()?; // libtorch reports a driver that is too old as no driver
            return Err(GpuError::Accelerator { accelerator: Accelerator::NoDevice.to_string() });
        }
        Accelerator::CpuOnly(_) => return Err(GpuError::Accelerator { accelerator: accelerator::open().to_string() }),
    }
    if !is_driver_there() {
        return Err(GpuError::NoDriver);
    }
    cublas_lt()?;
    Compiler::open(None)?;
    check_driver()
}

/// cublasLt's functions.
///
/// # Errors
/// [`GpuError::Library`].
pub(super) fn cublas_lt() -> Result<&'static CublasLtFunctions, GpuError> {
    let missing =
        |why: &String| GpuError::Library { library: CUBLAS_LT, folder: libraries::folder(), why: why.clone() };
    libraries::cublas_lt().map_err(missing)
}

pub(super) fn cublas_lt_version() -> Result<usize, GpuError> {
    // SAFETY: takes nothing and returns an integer.
    Ok(unsafe { (cublas_lt()?.version)() })
}

fn is_driver_there() -> bool {
    // SAFETY: only tries to open a library by its name.
    unsafe { sys::is_culib_present() }
}

/// Checks that the driver is not too old. A missing driver is not an error here.
fn check_driver() -> Result<(), GpuError> {
    if !is_driver_there() {
        return Ok(());
    }
    let driver = driver_version()?;
    if driver < DRIVER {
        return Err(GpuError::Driver { found: format!("{}.{}", driver / 1000, driver % 1000 / 10) });
    }
    Ok(())
}

impl Gpu {
    /// Opens the GPU that holds the backbone.
    ///
    /// # Errors
    /// [`GpuError`] names the reason why it cannot decode.
    pub fn open(device: Device) -> Result<Self, GpuError> {
        check()?;
        let Device::Cuda(index) = device else {
            return Err(GpuError::Elsewhere { device: crate::torch::device_name(device) });
        };
        Self::of(index)
    }

    fn of(index: usize) -> Result<Self, GpuError> {
        let failed = GpuError::failed;
        let context = CudaContext::new(index).map_err(failed("opening its context"))?;
        let name = context.name().map_err(failed("asking for its name"))?;
        let (major, minor) = context.compute_capability().map_err(failed("asking for its capability"))?;
        if 10 * major + minor < CAPABILITY {
            return Err(GpuError::Capability { name, found: format!("{major}.{minor}") });
        }
        // SAFETY: buffers are libtorch's tensors and the engine orders its own work, so there is nothing for cudarc's events to
        // track. They would break a capture.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("making a stream"))?;
        Ok(Self { context, stream, name, arch: arch(major, minor), overlaps_kernels: major >= 9 })
    }

    /// Makes the GPU's context current on this thread. cudarc does so by itself, but raw calls need it, because libtorch leaves
    /// the context of the device that it used last.
    ///
    /// # Errors
    /// [`GpuError::Failed`], also for earlier errors that were not reported yet.
    pub fn enter(&self) -> Result<(), GpuError> {
        self.context.bind_to_thread().map_err(GpuError::failed("entering its context"))
    }

    /// Free memory, after returning what libtorch caches to the device.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn free_bytes(&self) -> Result<u64, GpuError> {
        memory::release_cached(Device::Cuda(self.context.ordinal()));
        let (free, _) = self.context.mem_get_info().map_err(GpuError::failed("asking for its free memory"))?;
        Ok(free as u64)
    }

    /// Waits for libtorch's pending work on the GPU; its tensors are complete afterwards.
    pub fn wait_for_torch(&self) {
        tch::Cuda::synchronize(self.context.ordinal() as i64);
    }

    /// Waits for the engine's own stream.
    ///
    /// # Errors
    /// [`GpuError::Failed`], also for errors of earlier kernels.
    pub fn wait(&self) -> Result<(), GpuError> {
        self.stream.synchronize().map_err(GpuError::failed("a step"))
    }

    /// Makes a profiler that waits for it (`ncu --profile-from-start off`) record the kernels from here on.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn start_profiler(&self) -> Result<(), GpuError> {
        self.enter()?;
        // SAFETY: it takes no arguments; the context is current.
        unsafe { sys::cuProfilerStart() }.result().map_err(GpuError::failed("starting its profiler"))
    }

    /// Ends what [`Gpu::start_profiler`] began, after all pending work is done.
    ///
    /// # Errors
    /// [`GpuError::Failed`], also for errors of earlier kernels.
    pub fn stop_profiler(&self) -> Result<(), GpuError> {
        self.wait_for_torch();
        self.wait()?;
        // SAFETY: it takes no arguments; the context is current.
        unsafe { sys::cuProfilerStop() }.result().map_err(GpuError::failed("stopping its profiler"))
    }

    /// Copies a host tensor to a device tensor of the same number of bytes.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn upload(&self, to: &Tensor, from: &Tensor) -> Result<(), GpuError> {
        let from = bytes::raw(from);
        assert_eq!(from.len(), bytes_of(to), "both sides of a copy have one size");
        self.enter()?;
        // SAFETY: `to` is device memory of that many bytes, and the stream is waited for while `from` is borrowed.
        let copied = unsafe { result::memcpy_htod_async(address(to), from, self.stream.cu_stream()) };
        copied.map_err(GpuError::failed("a copy to it"))?;
        self.wait()
    }

    /// Copies a tensor to the host after all pending work on the stream is done.
    ///
    /// # Errors
    /// [`GpuError::Failed`], also for errors of earlier kernels.
    pub fn download(&self, from: &Tensor) -> Result<Tensor, GpuError> {
        let mut to = Tensor::empty(from.size().as_slice(), (from.kind(), Device::Cpu));
        assert!(from.is_contiguous(), "a copy is of memory in one piece");
        self.enter()?;
        // SAFETY: `from` is device memory of as many bytes as `to`, a new tensor that lives until the stream is waited for.
        let copied =
            unsafe { result::memcpy_dtoh_async(bytes::raw_mut(&mut to), address(from), self.stream.cu_stream()) };
        copied.map_err(GpuError::failed("a copy from it"))?;
        self.wait()?;
        Ok(to)
    }
}

/// A tensor's address on the device.
pub(super) fn address(tensor: &Tensor) -> u64 {
    debug_assert!(tensor.device().is_cuda() && tensor.is_contiguous(), "kernels read memory of the GPU in one piece");
    tensor.data_ptr() as u64
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// The architecture to compile for. On Hopper it allows instructions that no other GPU has.
fn arch(major: i32, minor: i32) -> String {
    let own = if (major, minor) == (9, 0) { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

pub(super) fn driver_version() -> Result<i32, GpuError> {
    let mut version = 0;
    // SAFETY: writes one integer.
    let asked = unsafe { sys::cuDriverGetVersion(&raw mut version) }.result();
    asked.map(|()| version).map_err(version_error)
}

/// The first call of the driver: the toolkit's stub answers every call with this error.
fn version_error(error: DriverError) -> GpuError {
    match error.0 {
        sys::cudaError_enum::CUDA_ERROR_STUB_LIBRARY => GpuError::Stub,
        _ => GpuError::failed("asking for the driver's version")(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_compiled_for_the_gpu_that_is_there() {
        assert_eq!(
            [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)].map(|(major, minor)| arch(major, minor)),
            ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"]
        );
    }

    #[test]
    fn what_is_in_the_way_is_reported_with_what_to_do() {
        let library = GpuError::Library { library: CUBLAS_LT, folder: "/x/lib".into(), why: "no such file".into() };
        assert_eq!(
            library.to_string(),
            "libcublasLt.so.13 cannot be opened (no such file); expected it in /x/lib, where `scripts/setup`, or torch installed by pip, puts \
             it, or in a folder that the loader searches"
        );
        let stub = version_error(DriverError(sys::cudaError_enum::CUDA_ERROR_STUB_LIBRARY)).to_string();
        assert!(stub.contains("take the folder that ends in /stubs out of LD_LIBRARY_PATH"), "{stub}");
        let old = GpuError::Driver { found: "12.4".into() };
        assert!(old.to_string().contains("12.4, and the kernels need 13.0"), "{old}");
    }
}
