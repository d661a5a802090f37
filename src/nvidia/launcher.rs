//! Runs launches on a GPU, with the loaded kernels and the fastest kernel of each product.

use cudarc::driver::{CudaEvent, CudaGraph, sys};
use tch::{Device, Kind};

use crate::torch::Generator;

use super::choices::{Choices, RejectedAlgorithm, TimedAlgorithm, TimedProduct};
use super::cublas_lt::CublasLt;
use super::device::Gpu;
use super::error::GpuError;
use super::functions::Functions;
use super::gemm::{GemmAlgorithm, Operands, Product, SplitRoom};
use super::graph;
use super::kernels::{KernelDtype, Program};
use super::launch::Launch;

/// Bytes of weights of one shape that a product is timed with, one weight after the other: more than a GPU's cache holds. Small
/// backbones have fewer, part of which stays in the cache during timing, as it does during decoding.
const TIMED_BYTES: usize = 256 << 20;
/// Timed rounds over these weights; their median counts.
const SAMPLES: usize = 7;

/// A GPU with its kernels loaded and its products timed.
#[derive(Debug)]
pub struct Launcher {
    gpu: Gpu,
    functions: Functions,
    cublas_lt: CublasLt,
    choices: Choices,
}

impl Launcher {
    /// Loads the kernels for weights of `kind` and attention heads of `head_size`; compiles those that are not cached.
    ///
    /// # Errors
    /// [`GpuError::Compile`], [`GpuError::Failed`].
    ///
    /// # Panics
    /// For a dtype without kernels.
    pub fn new(gpu: Gpu, kind: Kind, head_size: i64, device: Device) -> Result<Self, GpuError> {
        let element = KernelDtype::of(kind).expect("checked before");
        let functions = Functions::load(&gpu, &Program::OF_STEPS, element, head_size)?;
        let cublas_lt = CublasLt::new(gpu.stream.clone(), kind, device)?;
        let choices = Choices::of(&gpu, element)?;
        Ok(Self { functions, cublas_lt, choices, gpu })
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Launches one kernel.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn launch(&self, launch: &Launch) -> Result<(), GpuError> {
        self.functions.launch(launch, &self.gpu.stream)
    }

    /// The fastest known implementation of a product.
    pub fn way(&self, product: Product) -> GemmAlgorithm {
        self.choices.way(product)
    }

    /// The available implementations of a product, including as many cublasLt algorithms as there are.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn ways(&self, product: Product) -> Result<Vec<GemmAlgorithm>, GpuError> {
        let algorithms = self.cublas_lt.algorithms(product.bare())?;
        let is_there =
            |way: &GemmAlgorithm| !matches!(way, GemmAlgorithm::CublasLt { algorithm } if *algorithm >= algorithms);
        Ok(product.ways().into_iter().filter(is_there).collect())
    }

    /// Computes a product with one of the available implementations.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn linear(&self, way: GemmAlgorithm, of: &Operands, room: &SplitRoom) -> Result<(), GpuError> {
        let GemmAlgorithm::CublasLt { algorithm } = way else {
            return way.launches(of, room).iter().try_for_each(|launch| self.launch(launch));
        };
        let ((before, x_nk), (y_nm, after)) = (of.norm_before(), of.gate_after());
        before.iter().try_for_each(|launch| self.launch(launch))?;
        self.cublas_lt.multiply(of.product().bare(), [x_nk, &of.w_mk, y_nm], algorithm)?;
        after.iter().try_for_each(|launch| self.launch(launch))
    }

    /// The times of all implementations that were timed on this kind of GPU.
    pub fn timed_products(&self) -> Vec<TimedProduct> {
        self.choices.timed()
    }

    /// Times the implementations of those products that were not timed before on this kind of GPU, and caches their times. Overwrites the inputs with random numbers.
    ///
    /// # Errors
    /// A device error.
    pub fn time(&mut self, needed: &[Vec<Operands>], room: &SplitRoom) -> Result<(), GpuError> {
        self.gpu.wait_for_torch();
        let mut is_new = false;
        for needed in needed {
            let (product, x_nk) = (needed[0].product(), &needed[0].x_nk);
            let ways = self.ways(product)?;
            if self.choices.has(product, &ways) {
                continue;
            }
            x_nk.shallow_clone().copy_(&Generator::seeded(0).normal_like(x_nk));
            self.gpu.wait_for_torch();
            let timed = self.timed_ways(&ways, needed, room)?;
            self.choices.keep(timed);
            is_new = true;
        }
        if is_new {
            self.choices.save();
        }
        Ok(())
    }

    fn timed_ways(
        &self,
        ways: &[GemmAlgorithm],
        needed: &[Operands],
        room: &SplitRoom,
    ) -> Result<TimedProduct, GpuError> {
        let mut timed = TimedProduct { product: needed[0].product(), ways: vec![], refused: vec![] };
        for &way in ways {
            match (way, self.timed(way, needed, room)) {
                // Recommended by cublasLt, but refused: the own kernels remain.
                (GemmAlgorithm::CublasLt { .. }, Err(error)) => {
                    timed.refused.push(RejectedAlgorithm { way, reason: error.to_string() });
                }
                (_, one) => timed.ways.push(one?),
            }
        }
        Ok(timed)
    }

    /// Times one implementation in a CUDA graph, like a decoding step, so that the host's launch overhead does not count.
    fn timed(&self, way: GemmAlgorithm, needed: &[Operands], room: &SplitRoom) -> Result<TimedAlgorithm, GpuError> {
        let bytes = needed[0].w_mk.numel() * needed[0].w_mk.kind().elt_size_in_bytes();
        let count = (TIMED_BYTES / bytes + 1).min(needed.len());
        let round = || needed[..count].iter().try_for_each(|of| self.linear(way, of, room));
        round()?; // what is created on first use cannot be created while a graph is recorded
        let milliseconds = self.median_milliseconds(&graph::record(&self.gpu, round)?)?;
        let microseconds = milliseconds * 1e3 / count as f32;
        Ok(TimedAlgorithm { way, microseconds, gigabytes_per_second: bytes as f32 / microseconds / 1e3 })
    }

    /// The median time of [`SAMPLES`] launches of a graph, after one that is not timed. All are queued at once, so that none waits for
    /// the host.
    fn median_milliseconds(&self, recorded: &CudaGraph) -> Result<f32, GpuError> {
        let failed = || GpuError::failed("timing a product");
        let events = (0..=SAMPLES).map(|_| {
            recorded.launch()?;
            self.gpu.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT))
        });
        let events: Vec<CudaEvent> = events.collect::<Result<_, _>>().map_err(failed())?;
        self.gpu.wait()?;
        let times = events.windows(2).map(|pair| pair[0].elapsed_ms(&pair[1]));
        let mut times: Vec<f32> = times.collect::<Result<_, _>>().map_err(failed())?;
        times.sort_by(f32::total_cmp);
        Ok(times[SAMPLES / 2])
    }
}
