//! The loaded kernels of each GPU, and their launch in order with libtorch's own work.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaStream;
use tch::{Device, Kind};

use crate::nvidia::device::Gpu;
use crate::nvidia::error::GpuError;
use crate::nvidia::functions::Functions;
use crate::nvidia::kernels::{KernelDtype, Program};
use crate::nvidia::launch::Launch;
use crate::torch;

/// The kernels of a GPU for one dtype of elements.
#[derive(Debug)]
pub struct TensorKernels {
    functions: Functions,
    /// CUDA's default stream. libtorch launches on it, too, since nothing here gives it another one: kernels are in order with its work, and
    /// memory of a dropped tensor is reused only by what runs later.
    stream: Arc<CudaStream>,
}

type Loaded = Result<TensorKernels, GpuError>;

/// Where single operations run: the kernels for tensors of `kind` on `device`, or `None` where libtorch computes, on a CPU and in dtypes without
/// kernels. Kernels are compiled at the first call.
pub fn kernels(device: Device, kind: Kind) -> Option<&'static TensorKernels> {
    loaded(device, kind)?.as_ref().ok()
}

/// Why a GPU has no kernels for tensors of `kind`, so that libtorch's slower operations run there.
pub fn unavailable(device: Device, kind: Kind) -> Option<&'static GpuError> {
    loaded(device, kind)?.as_ref().err()
}

fn loaded(device: Device, kind: Kind) -> Option<&'static Loaded> {
    static ALL: Mutex<Option<HashMap<(usize, KernelDtype), &'static Loaded>>> = Mutex::new(None);
    let Device::Cuda(index) = device else { return None };
    let element = match kind {
        Kind::Float => KernelDtype::BFloat16, // read and written as float32: the dtype of elements does not matter
        kind => KernelDtype::of(kind)?,
    };
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let load = || &*Box::leak(Box::new(TensorKernels::load(device, element)));
    Some(all.get_or_insert_default().entry((index, element)).or_insert_with(load))
}

impl TensorKernels {
    fn load(device: Device, element: KernelDtype) -> Loaded {
        let gpu = Gpu::open(device)?;
        let functions = Functions::load(&gpu, &Program::OF_TENSORS, element, 0)?; // no size of heads in these files
        Ok(Self { functions, stream: gpu.context.default_stream() })
    }

    /// Launches one kernel.
    ///
    /// # Panics
    /// As libtorch's operations do if the GPU fails: [`torch::guard`] makes an error of it.
    pub fn launch(&self, launch: &Launch) {
        self.functions.launch(launch, &self.stream).unwrap_or_else(|error| torch::raise(&error.to_string()));
    }
}
