//! Runs launches on a GPU, with the loaded kernels and the fastest kernel of each product.

use cudarc::driver::{CudaEvent, CudaGraph, sys};
use tch::{Device, Kind, Tensor};

use crate::torch::Generator;

use super::choices::{Choices, TimedProduct, TimedWay};
use super::device::Gpu;
use super::error::GpuError;
use super::functions::Functions;
use super::gemm::{CublasLt, Product, Way};
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

/// A product to time: the buffers that it runs on, and several weights of its shape.
#[derive(Debug)]
pub struct ProductBuffers {
    /// `[N, K]`.
    pub x_nk: Tensor,
    /// `[M, K]` each.
    pub weights_mk: Vec<Tensor>,
    /// `[N, M]`.
    pub y_nm: Tensor,
}

impl ProductBuffers {
    /// The product of the first `rows` rows of `x_nk`.
    pub fn of_rows(rows: i64, x_nk: &Tensor, weights_mk: &[Tensor], y_nm: &Tensor) -> Self {
        Self {
            x_nk: x_nk.narrow(0, 0, rows),
            weights_mk: weights_mk.iter().map(Tensor::shallow_clone).collect(),
            y_nm: y_nm.narrow(0, 0, rows),
        }
    }
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

    /// The GPU.
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
    pub fn way(&self, product: Product) -> Way {
        self.choices.way(product)
    }

    /// The available implementations of a product, including as many cublasLt algorithms as there are.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn ways(&self, product: Product) -> Result<Vec<Way>, GpuError> {
        let mut ways = vec![];
        for way in product.ways() {
            let is_there = match way {
                Way::CublasLt { algorithm } => self.cublas_lt.has(product, algorithm)?,
                _ => true,
            };
            ways.extend(is_there.then_some(way));
        }
        Ok(ways)
    }

    /// Computes `y = x·wᵀ` with one of the available implementations.
    ///
    /// # Errors
    /// [`GpuError::Failed`].
    pub fn linear(&self, way: Way, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Result<(), GpuError> {
        match way {
            Way::CublasLt { algorithm } => self.cublas_lt.multiply(x_nk, w_mk, y_nm, algorithm),
            own => self.launch(&own.launch(x_nk, w_mk, y_nm)),
        }
    }

    /// The times of all implementations that were timed on this kind of GPU.
    pub fn timed_products(&self) -> Vec<TimedProduct> {
        self.choices.timed()
    }

    /// Times the implementations of those products that were not timed before on this kind of GPU, and caches their times. Overwrites the inputs with random numbers.
    ///
    /// # Errors
    /// A device error.
    pub fn time(&mut self, needed: &[ProductBuffers]) -> Result<(), GpuError> {
        self.gpu.wait_for_torch();
        let of = |needed: &ProductBuffers| Product::of(&needed.x_nk, &needed.weights_mk[0], &needed.y_nm);
        let mut is_new = false;
        for needed in needed {
            let ways = self.ways(of(needed))?;
            if self.choices.has(of(needed), &ways) {
                continue;
            }
            needed.x_nk.shallow_clone().copy_(&Generator::seeded(0).normal_like(&needed.x_nk));
            self.gpu.wait_for_torch();
            let timed = self.timed_ways(&ways, needed)?;
            self.choices.keep(of(needed), timed);
            is_new = true;
        }
        if is_new {
            self.choices.save();
        }
        Ok(())
    }

    fn timed_ways(&self, ways: &[Way], needed: &ProductBuffers) -> Result<Vec<TimedWay>, GpuError> {
        let timed = ways.iter().filter_map(|&way| match (way, self.timed(way, needed)) {
            (Way::CublasLt { .. }, Err(_)) => None, // recommended by cublasLt, but refused: the own kernels remain
            (_, timed) => Some(timed),
        });
        timed.collect()
    }

    /// Times one implementation in a CUDA graph, like a decoding step, so that the host's launch overhead does not count.
    fn timed(&self, way: Way, needed: &ProductBuffers) -> Result<TimedWay, GpuError> {
        let bytes = needed.weights_mk[0].numel() * needed.weights_mk[0].kind().elt_size_in_bytes();
        let count = (TIMED_BYTES / bytes + 1).min(needed.weights_mk.len());
        let weights = &needed.weights_mk[..count];
        let round = || weights.iter().try_for_each(|w_mk| self.linear(way, &needed.x_nk, w_mk, &needed.y_nm));
        round()?; // what is created on first use cannot be created while a graph is recorded
        let milliseconds = self.median_milliseconds(&graph::record(&self.gpu, round)?)?;
        let microseconds = milliseconds * 1e3 / count as f32;
        Ok(TimedWay { way, microseconds, gigabytes_per_second: bytes as f32 / microseconds / 1e3 })
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
