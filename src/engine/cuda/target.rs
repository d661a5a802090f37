//! Where the kernels of a step run.

use std::cell::RefCell;
use std::fmt;

use tch::{Device, Tensor};

use super::error::CudaResult;
use super::rule::StepKey;
use crate::nvidia::device::Gpu;
use crate::nvidia::gemm::{Product, Way};
use crate::nvidia::graph::GraphCache;
use crate::nvidia::launch::Launch;
use crate::nvidia::launcher::{Launcher, ProductBuffers};

/// A device that runs launches. The default methods suit buffers in host memory and launches that complete at once, as the emulator's.
pub trait LaunchTarget: fmt::Debug {
    /// As the device calls itself.
    fn name(&self) -> &str;

    /// Asks for one kernel.
    ///
    /// # Errors
    /// What the device says.
    fn launch(&self, launch: &Launch) -> CudaResult;

    /// The ways of a product that there are.
    ///
    /// # Errors
    /// What the device says.
    fn ways(&self, product: Product) -> CudaResult<Vec<Way>> {
        Ok(product.own_ways())
    }

    /// The fastest of them, as far as is known.
    fn way(&self, product: Product) -> Way {
        Way::untimed(product)
    }

    /// `y = x·wᵀ`, by one of the ways that there are.
    ///
    /// # Errors
    /// What the device says.
    fn linear(&self, way: Way, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> CudaResult {
        self.launch(&way.launch(x_nk, w_mk, y_nm))
    }

    /// Times these products, the first time that they are seen on such a device.
    ///
    /// # Errors
    /// What the device says.
    fn time(&mut self, _products: &[ProductBuffers]) -> CudaResult {
        Ok(())
    }

    /// Runs a step, from its record where there is one.
    ///
    /// # Errors
    /// What the step or the device says.
    fn replay(&self, _key: StepKey, step: &dyn Fn() -> CudaResult) -> CudaResult {
        step()
    }

    /// Buffers have moved: records of steps are void.
    fn moved(&self) {}

    /// Free memory; `None` where nobody counts it.
    ///
    /// # Errors
    /// What the device says.
    fn free_bytes(&self) -> CudaResult<Option<u64>> {
        Ok(None)
    }

    /// Copies a tensor of the CPU to a buffer of the same shape and dtype.
    ///
    /// # Errors
    /// What the device says.
    fn upload(&self, to: &Tensor, from: &Tensor) -> CudaResult {
        to.shallow_clone().copy_(from);
        Ok(())
    }

    /// Copies a buffer to the CPU, when all that was asked for before is done.
    ///
    /// # Errors
    /// What the device says.
    fn download(&self, from: &Tensor) -> CudaResult<Tensor> {
        Ok(from.to_device(Device::Cpu))
    }

    /// Waits until all that was asked for is done, by libtorch and by kernels.
    ///
    /// # Errors
    /// What the device says.
    fn wait(&self) -> CudaResult {
        Ok(())
    }
}

/// An NVIDIA GPU.
#[derive(Debug)]
pub(super) struct GpuTarget {
    /// First: they end before the kernels that they launch.
    graphs: RefCell<GraphCache<StepKey>>,
    launcher: Launcher,
}

impl GpuTarget {
    pub(super) fn new(launcher: Launcher) -> Self {
        Self { graphs: RefCell::default(), launcher }
    }

    fn gpu(&self) -> &Gpu {
        self.launcher.gpu()
    }
}

impl LaunchTarget for GpuTarget {
    fn name(&self) -> &str {
        &self.gpu().name
    }

    fn launch(&self, launch: &Launch) -> CudaResult {
        Ok(self.launcher.launch(launch)?)
    }

    fn ways(&self, product: Product) -> CudaResult<Vec<Way>> {
        Ok(self.launcher.ways(product)?)
    }

    fn way(&self, product: Product) -> Way {
        self.launcher.way(product)
    }

    fn linear(&self, way: Way, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> CudaResult {
        Ok(self.launcher.linear(way, x_nk, w_mk, y_nm)?)
    }

    fn time(&mut self, products: &[ProductBuffers]) -> CudaResult {
        Ok(self.launcher.time(products)?)
    }

    fn replay(&self, key: StepKey, step: &dyn Fn() -> CudaResult) -> CudaResult {
        self.graphs.borrow_mut().run(self.gpu(), key, step)
    }

    /// Waits for what libtorch writes to the new buffers.
    fn moved(&self) {
        self.gpu().wait_for_torch();
        self.graphs.borrow_mut().forget();
    }

    fn free_bytes(&self) -> CudaResult<Option<u64>> {
        Ok(Some(self.gpu().free_bytes()?))
    }

    fn upload(&self, to: &Tensor, from: &Tensor) -> CudaResult {
        Ok(self.gpu().upload(to, from)?)
    }

    fn download(&self, from: &Tensor) -> CudaResult<Tensor> {
        Ok(self.gpu().download(from)?)
    }

    fn wait(&self) -> CudaResult {
        self.gpu().wait_for_torch();
        Ok(self.gpu().wait()?)
    }
}
