//! Launches on a GPU: kernels as they are loaded there, what they need beside a step's buffers, and the fastest way of each product.
#![expect(unsafe_code, reason = "a kernel is given raw addresses")]

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;
use tch::{Device, Tensor};

use super::error::CudaError;
use super::graph::{self, Graphs, Key};
use super::launches::{self, Parts};
use super::plan::Shape;
use crate::nvidia::choices::{Choices, kernels_folder};
use crate::nvidia::device::{Gpu, NoGpu};
use crate::nvidia::gemm::{CublasLt, Product, Way};
use crate::nvidia::kernels::{Argument, Element, Kernel, Launch, Program};
use crate::nvidia::nvrtc::Compiler;

/// Shared memory that a kernel has without asking.
const FREE_SHARED: u32 = 48 << 10;
/// Bytes of the weights of one shape that a product is timed with, one after the other: more than a GPU's cache holds. Small backbones have
/// fewer, of which some stay in the cache while they are timed, as they do while they decode.
const TIMED_BYTES: usize = 256 << 20;
/// Rounds over them.
const TIMED_ROUNDS: usize = 3;

/// A GPU with everything that steps launch.
#[derive(Debug)]
pub struct Launcher {
    /// First: they end before the kernels that they launch.
    graphs: RefCell<Graphs>,
    gpu: Gpu,
    functions: HashMap<Kernel, CudaFunction>,
    /// Those that were allowed more shared memory: asked for once, so that nothing is asked while a step is recorded.
    raised: RefCell<HashSet<Kernel>>,
    between: Between,
    cublas_lt: CublasLt,
    choices: Choices,
}

/// What kernels use among themselves.
#[derive(Debug)]
pub struct Between {
    /// Of attention, for each number of rows.
    parts: Vec<(i64, Parts)>,
    /// Of the heads' guesses.
    guess_parts: Option<Tensor>,
}

impl Between {
    /// For all steps of `shape`.
    pub fn new(shape: &Shape, device: Device) -> Self {
        let config = shape.config;
        let queries = |rows| [rows, config.num_attention_heads, config.head_dim];
        let parts = |rows| (rows, Parts::new(queries(rows), config.num_key_value_heads, device));
        let guess_parts = shape.draft.map(|draft| {
            let size = [draft.tree.max_depth() as i64, config.vocab_size];
            launches::guess_parts(size, shape.guesses() as i64, device)
        });
        Self { parts: shape.rows_of_steps().into_iter().map(parts).collect(), guess_parts }
    }

    /// Where attention of so many rows keeps its parts.
    pub fn parts(&self, rows: i64) -> &Parts {
        let parts = self.parts.iter().find(|(of, _)| *of == rows);
        &parts.expect("a step has one of the shape's numbers of rows").1
    }

    /// Where the heads' guesses are found slice by slice.
    pub fn guess_parts(&self) -> &Tensor {
        self.guess_parts.as_ref().expect("heads guess")
    }
}

/// A product that steps need, with the buffers that it is computed in and several weights of its shape.
#[derive(Debug)]
pub struct Needed {
    /// `[N, K]`.
    pub x_nk: Tensor,
    /// `[M, K]` each.
    pub weights_mk: Vec<Tensor>,
    /// `[N, M]`.
    pub y_nm: Tensor,
}

impl Launcher {
    /// Compiles the kernels, or finds them compiled, and loads them.
    ///
    /// # Errors
    /// [`CudaError`] says what failed.
    pub fn new(gpu: Gpu, shape: &Shape, device: Device) -> Result<Self, CudaError> {
        let element = Element::of(shape.kind).expect("checked before");
        let compiler = Compiler::open(kernels_folder())?;
        let mut functions = HashMap::new();
        for program in Program::ALL {
            let compiled = compiler.compile(program, element, shape.config.head_dim, &gpu.arch)?;
            let module =
                gpu.context.load_module(Ptx::from_binary(compiled.cubin)).map_err(NoGpu::failed("loading a kernel"))?;
            for name in program.kernels() {
                let function = module.load_function(name).map_err(NoGpu::failed("looking for a kernel"))?;
                functions.insert(Kernel { program, name }, function);
            }
        }
        let cublas_lt = CublasLt::new(gpu.stream.clone(), shape.kind, device)?;
        let choices = Choices::of(&gpu, element)?;
        Ok(Self {
            graphs: RefCell::default(),
            functions,
            raised: RefCell::default(),
            between: Between::new(shape, device),
            cublas_lt,
            choices,
            gpu,
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Runs a step, from its record if there is one.
    ///
    /// # Errors
    /// What the device says.
    pub fn replayed(&self, key: Key, step: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        self.graphs.borrow_mut().run(&self.gpu, key, step)
    }

    /// Buffers have moved: what libtorch writes to the new ones is waited for, and steps are recorded again.
    pub fn moved(&self) {
        self.gpu.wait_for_torch();
        self.graphs.borrow_mut().forget();
    }

    /// Asks for one kernel.
    ///
    /// # Errors
    /// [`NoGpu::Failed`].
    pub fn launch(&self, launch: &Launch) -> Result<(), CudaError> {
        let function = &self.functions[&launch.kernel];
        if launch.shared_bytes > FREE_SHARED && self.raised.borrow_mut().insert(launch.kernel) {
            let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = launch.shared_bytes.cast_signed();
            function.set_attribute(most, bytes).map_err(NoGpu::failed("asking for shared memory"))?;
        }
        let mut builder = self.gpu.stream.launch_builder(function);
        for argument in &launch.arguments {
            match argument {
                Argument::Pointer(number) => builder.arg(number),
                Argument::Int(number) => builder.arg(number),
                Argument::Float(number) => builder.arg(number),
                Argument::Double(number) => builder.arg(number),
            };
        }
        let [x, y, z] = launch.grid;
        let config = LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (launch.threads, 1, 1),
            shared_mem_bytes: launch.shared_bytes,
        };
        // SAFETY: the arguments are of the kernel's own launch (see `launches`), whose tensors live as long as the engine.
        let launched = unsafe { builder.launch(config) };
        Ok(launched.map(|_| ()).map_err(NoGpu::failed(launch.kernel.name))?)
    }

    /// `y = x·wᵀ`, by the fastest way.
    ///
    /// # Errors
    /// [`NoGpu::Failed`].
    pub fn linear(&self, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Result<(), CudaError> {
        let way = self.choices.way(Product::of(x_nk, w_mk, y_nm));
        self.linear_by(way, x_nk, w_mk, y_nm)
    }

    /// The ways of a product that there are here: of cublasLt's, as many as it has.
    ///
    /// # Errors
    /// [`NoGpu::Failed`].
    pub fn ways(&self, product: Product) -> Result<Vec<Way>, CudaError> {
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

    /// `y = x·wᵀ`, by one of the ways that there are.
    ///
    /// # Errors
    /// [`NoGpu::Failed`].
    pub fn linear_by(&self, way: Way, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Result<(), CudaError> {
        match way {
            Way::CublasLt { algorithm } => Ok(self.cublas_lt.multiply(x_nk, w_mk, y_nm, algorithm)?),
            own => self.launch(&launches::linear(own, x_nk, w_mk, y_nm)),
        }
    }

    /// What kernels use among themselves.
    pub fn between(&self) -> &Between {
        &self.between
    }

    /// Times the ways of those products that were not timed before on such a GPU, and keeps the fastest of each. The inputs get random
    /// numbers.
    ///
    /// # Errors
    /// What the device says.
    pub fn time(&mut self, needed: &[Needed]) -> Result<(), CudaError> {
        self.gpu.wait_for_torch();
        let of = |needed: &Needed| Product::of(&needed.x_nk, &needed.weights_mk[0], &needed.y_nm);
        let mut is_new = false;
        for needed in needed {
            let ways = self.ways(of(needed))?;
            if self.choices.has(of(needed), &ways) {
                continue;
            }
            let _ = needed.x_nk.shallow_clone().normal_(0.0, 1.0);
            self.gpu.wait_for_torch();
            let way = self.fastest(&ways, needed)?;
            self.choices.keep(of(needed), way);
            is_new = true;
        }
        if is_new {
            self.choices.save();
        }
        Ok(())
    }

    fn fastest(&self, ways: &[Way], needed: &Needed) -> Result<Way, CudaError> {
        let mut best = (f32::INFINITY, ways[0]);
        for &way in ways {
            let milliseconds = match (way, self.milliseconds(way, needed)) {
                (Way::CublasLt { .. }, Err(_)) => continue, // recommended, and refused: there are the own kernels
                (_, timed) => timed?,
            };
            if milliseconds < best.0 {
                best = (milliseconds, way);
            }
        }
        Ok(best.1)
    }

    /// Of all rounds, from a record as steps are: what a launch costs the host does not count. One round before is not timed.
    fn milliseconds(&self, way: Way, needed: &Needed) -> Result<f32, CudaError> {
        let failed = || NoGpu::failed("timing a product");
        let bytes = |w_mk: &Tensor| w_mk.numel() * w_mk.kind().elt_size_in_bytes();
        let count = (TIMED_BYTES / bytes(&needed.weights_mk[0]) + 1).min(needed.weights_mk.len());
        let weights = &needed.weights_mk[..count];
        let round = || weights.iter().try_for_each(|w_mk| self.linear_by(way, &needed.x_nk, w_mk, &needed.y_nm));
        round()?;
        let recorded = graph::record(&self.gpu, round)?;
        let event = || self.gpu.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed());
        let from = event()?;
        (0..TIMED_ROUNDS).try_for_each(|_| recorded.launch()).map_err(failed())?;
        let to = event()?;
        self.gpu.wait()?;
        Ok(from.elapsed_ms(&to).map_err(failed())?)
    }
}
