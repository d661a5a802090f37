//! Where the kernels of a step run.

use std::cell::RefCell;
use std::fmt;

use tch::{Device, Tensor};

use super::error::CudaResult;
use super::rule::StepKey;
use crate::nvidia::choices::TimedProduct;
use crate::nvidia::device::Gpu;
use crate::nvidia::gemm::{GemmAlgorithm, Operands, Product, SplitRoom};
use crate::nvidia::graph::GraphCache;
use crate::nvidia::launch::Launch;
use crate::nvidia::launcher::Launcher;

/// A device that runs launches. The default methods suit buffers in host memory and launches that complete at once, as in the
/// emulator.
pub trait LaunchTarget: fmt::Debug {
    /// The device's name.
    fn name(&self) -> &str;

    /// Launches one kernel.
    ///
    /// # Errors
    /// A device error.
    fn launch(&self, launch: &Launch) -> CudaResult;

    /// The available implementations of a product.
    ///
    /// # Errors
    /// A device error.
    fn ways(&self, product: Product) -> CudaResult<Vec<GemmAlgorithm>> {
        Ok(product.own_ways())
    }

    /// The fastest known implementation of a product.
    fn way(&self, product: Product) -> GemmAlgorithm {
        GemmAlgorithm::untimed(product)
    }

    /// Computes a product with one of the available implementations.
    ///
    /// # Errors
    /// A device error.
    fn linear(&self, way: GemmAlgorithm, of: &Operands, room: &SplitRoom) -> CudaResult {
        way.launches(of, room).iter().try_for_each(|launch| self.launch(launch))
    }

    /// The times of the products' implementations.
    fn timed_products(&self) -> Vec<TimedProduct> {
        vec![]
    }

    /// Times those products that were not timed before on this kind of device; each is given with several weights of its shape.
    ///
    /// # Errors
    /// A device error.
    fn time(&mut self, _products: &[Vec<Operands>], _room: &SplitRoom) -> CudaResult {
        Ok(())
    }

    /// Runs a step, or replays it if it was recorded.
    ///
    /// # Errors
    /// An error of the step or of the device.
    fn replay(&self, _key: StepKey, step: &dyn Fn() -> CudaResult) -> CudaResult {
        step()
    }

    /// Invalidates recorded steps: buffers have moved.
    fn moved(&self) {}

    /// Free memory; `None` if the device does not track it.
    ///
    /// # Errors
    /// A device error.
    fn free_bytes(&self) -> CudaResult<Option<u64>> {
        Ok(None)
    }

    /// Copies a CPU tensor to a buffer of the same shape and dtype.
    ///
    /// # Errors
    /// A device error.
    fn upload(&self, to: &Tensor, from: &Tensor) -> CudaResult {
        to.shallow_clone().copy_(from);
        Ok(())
    }

    /// Copies a buffer to the CPU after all pending work is done.
    ///
    /// # Errors
    /// A device error.
    fn download(&self, from: &Tensor) -> CudaResult<Tensor> {
        Ok(from.to_device(Device::Cpu))
    }

    /// Waits until all pending work of libtorch and of the kernels is done.
    ///
    /// # Errors
    /// A device error.
    fn wait(&self) -> CudaResult {
        Ok(())
    }
}

/// An NVIDIA GPU.
#[derive(Debug)]
pub(super) struct GpuTarget {
    /// The first field: graphs must be dropped before the kernels that they launch.
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

    fn ways(&self, product: Product) -> CudaResult<Vec<GemmAlgorithm>> {
        Ok(self.launcher.ways(product)?)
    }

    fn way(&self, product: Product) -> GemmAlgorithm {
        self.launcher.way(product)
    }

    fn linear(&self, way: GemmAlgorithm, of: &Operands, room: &SplitRoom) -> CudaResult {
        Ok(self.launcher.linear(way, of, room)?)
    }

    fn timed_products(&self) -> Vec<TimedProduct> {
        self.launcher.timed_products()
    }

    fn time(&mut self, products: &[Vec<Operands>], room: &SplitRoom) -> CudaResult {
        Ok(self.launcher.time(products, room)?)
    }

    fn replay(&self, key: StepKey, step: &dyn Fn() -> CudaResult) -> CudaResult {
        self.graphs.borrow_mut().run(self.gpu(), key, step)
    }

    /// Waits until libtorch has written the new buffers.
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
