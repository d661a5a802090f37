//! Kernels that are loaded on a GPU, and their launch on a stream.
#![expect(unsafe_code, reason = "a kernel is given raw addresses")]

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{CudaFunction, CudaStream, DriverError, sys};
use cudarc::nvrtc::Ptx;

use super::choices::kernels_folder;
use super::device::Gpu;
use super::error::GpuError;
use super::kernels::{KernelDtype, Program};
use super::launch::{Argument, Kernel, Launch};
use super::nvrtc::Compiler;

/// Dynamic shared memory that a kernel may use without raising its limit, which is 48 KiB with the static memory of the kernel.
const FREE_SHARED: u32 = 32 << 10;

/// The kernels of some files.
#[derive(Debug)]
pub struct Functions {
    by_kernel: HashMap<Kernel, CudaFunction>,
    /// Kernels whose shared memory limit was raised: done once, so that no attribute is set while a step is captured.
    raised: Mutex<HashSet<Kernel>>,
    /// Whether the GPU can start a kernel before the one before it has ended (programmatic dependent launch).
    overlaps_kernels: bool,
}

impl Functions {
    /// Loads `programs` for elements of a dtype and attention heads of `head_size`; compiles those that are not cached.
    ///
    /// # Errors
    /// [`GpuError::Compile`], [`GpuError::Failed`].
    pub fn load(gpu: &Gpu, programs: &[Program], element: KernelDtype, head_size: i64) -> Result<Self, GpuError> {
        let compiler = Compiler::open(kernels_folder())?;
        let mut by_kernel = HashMap::new();
        for &program in programs {
            let compiled = compiler.compile(program, element, head_size, &gpu.arch)?;
            let module = gpu
                .context
                .load_module(Ptx::from_binary(compiled.cubin))
                .map_err(GpuError::failed("loading a kernel"))?;
            for name in program.kernels() {
                let function = module.load_function(name).map_err(GpuError::failed("looking for a kernel"))?;
                by_kernel.insert(Kernel { program, name }, function);
            }
        }
        Ok(Self { by_kernel, raised: Mutex::default(), overlaps_kernels: gpu.overlaps_kernels })
    }

    /// The kernel of a launch, allowed to use as much shared memory as it asks for.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub(super) fn prepared(&self, launch: &Launch) -> Result<&CudaFunction, GpuError> {
        let function = &self.by_kernel[&launch.kernel];
        let is_new = || self.raised.lock().unwrap_or_else(PoisonError::into_inner).insert(launch.kernel);
        if launch.shared_bytes > FREE_SHARED && is_new() {
            let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = launch.shared_bytes.cast_signed();
            function.set_attribute(most, bytes).map_err(GpuError::failed("asking for shared memory"))?;
        }
        Ok(function)
    }

    /// Launches one kernel on a stream of the GPU.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn launch(&self, launch: &Launch, stream: &CudaStream) -> Result<(), GpuError> {
        let function = self.prepared(launch)?;
        stream.context().bind_to_thread().map_err(GpuError::failed("entering its context"))?;
        let mut arguments: Vec<*mut c_void> = launch.arguments.iter().map(Argument::address).collect();
        let mut overlap = overlapping();
        let config = self.config(launch, stream, &mut overlap);
        // SAFETY: the arguments were made for this kernel (see the constructors of `Launch`), and the driver copies them and the attribute
        // during the call. Their tensors live as long as the CUDA engine; on libtorch's stream, their memory is given to no other tensor
        // before the kernel has run.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&raw const config, function.cu_function(), arguments.as_mut_ptr(), null_mut())
        };
        // The driver reports an error of an earlier kernel at any later call.
        let failed =
            |error: DriverError| GpuError::Launch { kernel: launch.kernel.name, reason: format!("{:?}", error.0) };
        launched.result().map_err(failed)
    }

    /// The launch in the driver's form. Where the GPU can, a kernel of a step may start before the one before it has ended: these kernels
    /// wait for their inputs by themselves (`await_inputs` in prelude.cu).
    fn config(
        &self,
        launch: &Launch,
        stream: &CudaStream,
        overlap: &mut sys::CUlaunchAttribute,
    ) -> sys::CUlaunchConfig {
        let [x, y, z] = launch.grid;
        let awaits_inputs = Program::OF_STEPS.contains(&launch.kernel.program);
        sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream.cu_stream(),
            attrs: overlap,
            numAttrs: (self.overlaps_kernels && awaits_inputs).into(),
        }
    }
}

/// The attribute that lets a kernel start before the one before it has ended.
fn overlapping() -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}
