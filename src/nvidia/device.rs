//! The GPU: whether a usable one is present, its context (shared with libtorch), and the stream that launches run on.
#![expect(unsafe_code, reason = "CUDA's libraries are opened at run time, and its functions take raw addresses")]

use std::path::Path;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use tch::{Device, Tensor};

use super::error::GpuError;
use super::libraries::{self, CUBLAS_LT};
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
    let folder = libraries::folder();
    let _ = libraries::preload(CUBLAS_LT); // if this fails and the system has none either, it is reported below
    let missing = |library| GpuError::Library { library, folder: folder.clone() };
    // SAFETY: both only try to open a library by its name.
    let there =
        unsafe { [("libcuda.so.1", sys::is_culib_present()), (CUBLAS_LT, cudarc::cublaslt::sys::is_culib_present())] };
    if let Some((library, _)) = there.into_iter().find(|(_, is_there)| !is_there) {
        return Err(missing(library));
    }
    check_cublas_lt(cublas_lt_version(), &folder)?;
    Compiler::open(None)?;
    check_driver()
}

/// Checks cublasLt's version number, 10,000 · major + 100 · minor + patch. cudarc first asks the loader for the library without a
/// version in its name, which may be another version.
fn check_cublas_lt(version: usize, folder: &Path) -> Result<(), GpuError> {
    if version / 10_000 == 13 {
        return Ok(());
    }
    let found = format!("{}.{}", version / 10_000, version % 10_000 / 100);
    Err(GpuError::CublasLt { found, folder: folder.into() })
}

/// Checks that the driver is not too old. A missing driver is not an error here.
fn check_driver() -> Result<(), GpuError> {
    // SAFETY: only tries to open a library by its name.
    if !unsafe { sys::is_culib_present() } {
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

    /// Tells a profiler that waits for it (`ncu --profile-from-start off`) to record the kernels from here on.
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
        let from = bytes::of(from);
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
            unsafe { result::memcpy_dtoh_async(bytes::of_mut(&mut to), address(from), self.stream.cu_stream()) };
        copied.map_err(GpuError::failed("a copy from it"))?;
        self.wait()?;
        Ok(to)
    }
}

/// Total and free bytes of a GPU, as the driver counts them: the memory of all processes is taken.
///
/// # Errors
/// [`GpuError::Failed`].
pub fn memory_of(index: usize) -> Result<(u64, u64), GpuError> {
    let context = CudaContext::new(index).map_err(GpuError::failed("opening its context"))?;
    let (free, total) = context.mem_get_info().map_err(GpuError::failed("asking for its free memory"))?;
    Ok((total as u64, free as u64))
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
    asked.map_err(GpuError::failed("asking for the driver's version")).map(|()| version)
}

pub(super) fn cublas_lt_version() -> usize {
    // SAFETY: takes nothing and returns an integer.
    unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() }
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
    fn what_is_in_the_way_is_told_with_what_to_do() {
        let library = GpuError::Library { library: CUBLAS_LT, folder: "/x/lib".into() };
        assert_eq!(
            library.to_string(),
            "libcublasLt.so.13 is not in /x/lib and the system has none; `scripts/setup`, or torch installed by pip, brings it"
        );
        assert!(check_cublas_lt(130_100, Path::new("/x/lib")).is_ok());
        let other = check_cublas_lt(120_902, Path::new("/x/lib")).unwrap_err().to_string();
        assert!(other.starts_with("the loader finds cublasLt 12.9 first, and 13 is needed; take"), "{other}");
        let old = GpuError::Driver { found: "12.4".into() };
        assert!(old.to_string().contains("12.4, and the kernels need 13.0"), "{old}");
    }
}
