//! The operations of a step, run by kernels, by their oracle on tensors on any device, or by both for comparison. All of them
//! write the same buffers.

// Letters as in `oracle`
use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use super::compare::{Comparisons, KernelDistance};
use super::error::CudaResult;
use super::launches;
use super::layout::Nodes;
use super::oracle::{self, Accepted, BlockInput, Draws, HeadInputs, ParentSums, StepPositions};
use super::rule::StepKey;
use super::scratch::Scratch;
use super::shape::Shape;
use super::target::LaunchTarget;
use crate::model::block_spec::BlockSpec;
use crate::model::config::LlamaConfig;
use crate::nvidia::choices::TimedProduct;
use crate::nvidia::gemm::Operands;
use crate::tree::accept::TypicalAcceptance;

/// The implementation of a step's operations.
#[derive(Debug)]
pub enum Ops {
    /// The slow libtorch reference, on the buffers' device.
    Oracle,
    Kernels(Kernels),
    /// Kernels, each compared with its oracle on the same inputs.
    Beside(Kernels, Comparisons),
}

/// The device that runs kernels, and their scratch memory.
#[derive(Debug)]
pub struct Kernels {
    target: Box<dyn LaunchTarget>,
    scratch: Scratch,
}

/// Operations that are a single launch. Each is a function of the same name and arguments in `Ops`, in [`oracle`] and in
/// [`launches`]; `writes` lists the tensors that it writes.
macro_rules! operations {
    ($($name:ident($($argument:ident: $of:ty),*) writes $written:expr;)*) => {
        impl Ops {
            $(pub(super) fn $name(&self, $($argument: $of),*) -> CudaResult {
                self.run(stringify!($name), &$written, || oracle::$name($($argument),*), |kernels| {
                    kernels.target.launch(&launches::$name($($argument),*))
                })
            })*
        }
    };
}

operations! {
    embed(tokens_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) writes [x_nh];
    rms_norm(x_nh: &Tensor, weight_h: &Tensor, eps: f64, y_nh: &Tensor) writes [y_nh];
    res_block(x: BlockInput, w_khh: &Tensor, b_kh: &Tensor, y_kh: &Tensor) writes [y_kh];
    walk(nodes: &Nodes, tokens_n: &Tensor, chosen_n: &Tensor, accepted: Accepted) writes [accepted.path, accepted.state];
    typical(nodes: &Nodes, posterior: [&Tensor; 2], rule: TypicalAcceptance, best_n: &Tensor, accepted: Accepted)
        writes [accepted.path, accepted.state];
    compact(cache_l2gsd: &Tensor, accepted: Accepted) writes [cache_l2gsd];
    advance(accepted: Accepted, tokens_n: &Tensor, results_rt: &Tensor) writes [accepted.state, results_rt];
    fill_tree(nodes: &Nodes, guesses_kp: &Tensor, state: &Tensor, tokens_n: &Tensor) writes [tokens_n];
    embed_nodes(tokens: &Tensor, nodes_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) writes [x_nh];
    first_block(sums_nw: &Tensor, inherited: ParentSums, y_nh: &Tensor) writes [sums_nw, y_nh];
    residual(x_nh: &Tensor, product_nh: &Tensor, bias_h: &Tensor) writes [x_nh];
    fill_level(guesses_np: &Tensor, rows_c: &Tensor, ranks_c: &Tensor, tokens_c: &Tensor) writes [tokens_c];
}

impl Ops {
    /// Kernels that run on `target`, for all steps of `shape`, with buffers on `device`.
    pub fn kernels(target: impl LaunchTarget + 'static, shape: &Shape, device: Device) -> Self {
        Self::Kernels(Kernels { target: Box::new(target), scratch: Scratch::new(shape, device) })
    }

    /// Compares every kernel with its oracle from now on.
    #[must_use]
    pub fn beside_oracle(self) -> Self {
        match self {
            Self::Kernels(kernels) => Self::Beside(kernels, Comparisons::default()),
            other => other,
        }
    }

    /// Distance of each kernel from its oracle so far, if they are compared; matrix products have one entry per implementation.
    pub fn distances(&self) -> BTreeMap<String, KernelDistance> {
        if let Self::Beside(_, compared) = self { compared.by_kernel() } else { BTreeMap::new() }
    }

    fn target(&self) -> Option<&dyn LaunchTarget> {
        match self {
            Self::Oracle => None,
            Self::Kernels(kernels) | Self::Beside(kernels, _) => Some(&*kernels.target),
        }
    }

    fn run(
        &self,
        name: &str,
        written: &[&Tensor],
        oracle: impl FnOnce(),
        kernel: impl FnOnce(&Kernels) -> CudaResult,
    ) -> CudaResult {
        match self {
            Self::Oracle => {
                oracle();
                Ok(())
            }
            Self::Kernels(kernels) => kernel(kernels),
            Self::Beside(kernels, compared) => {
                compared.compare(name, written, &*kernels.target, oracle, || kernel(kernels))
            }
        }
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        self.target().map_or("the kernels' oracle", LaunchTarget::name)
    }

    /// Free device memory; `None` if the target does not track it.
    pub(super) fn free_bytes(&self) -> CudaResult<Option<u64>> {
        self.target().map_or(Ok(None), LaunchTarget::free_bytes)
    }

    /// Waits until new buffers are written, and times the matrix products in them.
    pub(super) fn prepare(&mut self, products: &[Vec<Operands>]) -> CudaResult {
        match self {
            Self::Oracle => Ok(()),
            Self::Kernels(Kernels { target, scratch }) | Self::Beside(Kernels { target, scratch }, _) => {
                target.time(products, scratch.splits())
            }
        }
    }

    /// The times of the matrix products' implementations; empty on a target that does not time them.
    pub fn timed_products(&self) -> Vec<TimedProduct> {
        self.target().map_or(vec![], LaunchTarget::timed_products)
    }

    /// Invalidates recorded steps after buffers have moved.
    pub(super) fn moved(&self) {
        if let Some(target) = self.target() {
            target.moved();
        }
    }

    /// Runs a step, or replays it if it was recorded.
    pub(super) fn replay(&self, key: StepKey, step: impl Fn() -> CudaResult) -> CudaResult {
        match self {
            Self::Oracle | Self::Beside(..) => step(),
            Self::Kernels(kernels) => kernels.target.replay(key, &step),
        }
    }

    /// Copies a CPU tensor to a buffer of the same shape and dtype.
    pub(super) fn upload(&self, to: &Tensor, from: &Tensor) -> CudaResult {
        match self.target() {
            Some(target) => target.upload(to, from),
            None => {
                to.shallow_clone().copy_(from);
                Ok(())
            }
        }
    }

    /// Copies a buffer to the host after all pending work is done.
    pub(super) fn download(&self, from: &Tensor) -> CudaResult<Tensor> {
        self.target().map_or_else(|| Ok(from.to_device(Device::Cpu)), |target| target.download(from))
    }

    pub(super) fn linear(&self, of: &Operands) -> CudaResult {
        let (product, oracle) = (of.product(), || oracle::linear(of));
        let Self::Beside(Kernels { target, scratch }, compared) = self else {
            let kernel =
                |Kernels { target, scratch }: &Kernels| target.linear(target.way(product), of, scratch.splits());
            return self.run("linear", &[&of.y_nm], oracle, kernel);
        };
        let before = of.y_nm.copy();
        target.ways(product)?.into_iter().try_for_each(|way| {
            of.y_nm.shallow_clone().copy_(&before); // each implementation adds to the same y
            let kernel = || target.linear(way, of, scratch.splits());
            compared.compare(&format!("linear {way}"), &[&of.y_nm], &**target, oracle, kernel)
        })
    }

    pub(super) fn attention(
        &self,
        inputs: HeadInputs,
        places: StepPositions,
        kv_2gsd: &Tensor,
        config: &LlamaConfig,
        attended_nqd: &Tensor,
    ) -> CudaResult {
        let BlockSpec { heads, layers, .. } = config.block();
        let window = layers.only().expect("check_blocks refuses other backbones").window;
        let how = (heads.scale, window);
        let oracle = || oracle::attention(inputs, places, kv_2gsd, how, attended_nqd);
        let written = self.written_by_attention(places, kv_2gsd, attended_nqd);
        self.run("attention", &written.iter().collect::<Vec<_>>(), oracle, |Kernels { target, scratch }| {
            let parts = scratch.parts(places.nodes.len());
            target.launch(&launches::attention(inputs, places, kv_2gsd, how, parts, attended_nqd))
        })
    }

    /// What is compared of attention: its output and the new keys and values by distance, each by itself, and as integers, whose
    /// differences count, the bits of what was in the cache.
    fn written_by_attention(&self, places: StepPositions, kv_2gsd: &Tensor, attended_nqd: &Tensor) -> Vec<Tensor> {
        let Self::Beside(..) = self else { return vec![] };
        let (context, n) = (places.context(), places.nodes.len());
        let committed = kv_2gsd.narrow(2, 0, context).view_dtype(Kind::Int16);
        vec![attended_nqd.shallow_clone(), kv_2gsd.narrow(2, context, n), committed]
    }

    pub(super) fn best(&self, logits_nv: &Tensor, best_n: &Tensor) -> CudaResult {
        let oracle = || oracle::best(logits_nv, best_n);
        self.run("best", &[best_n], oracle, |Kernels { target, scratch }| {
            target.launch(&launches::best(logits_nv, scratch.slices(), best_n))
        })
    }

    pub(super) fn posterior(
        &self,
        logits_nv: &Tensor,
        tokens_n: &Tensor,
        nodes: &Nodes,
        temperature: f64,
        numbers: [&Tensor; 2],
    ) -> CudaResult {
        let oracle = || oracle::posterior(logits_nv, tokens_n, nodes, temperature, numbers);
        self.run("posterior", &numbers, oracle, |Kernels { target, scratch }| {
            let slices = scratch.slices();
            target.launch(&launches::posterior(logits_nv, slices, tokens_n, nodes, temperature, numbers))
        })
    }

    pub(super) fn draw(&self, logits_nv: &Tensor, places: StepPositions, draws: Draws, drawn_n: &Tensor) -> CudaResult {
        let oracle = || oracle::draw(logits_nv, places, draws, drawn_n);
        self.run("draw", &[drawn_n], oracle, |Kernels { target, scratch }| {
            let both = launches::draw(logits_nv, scratch.slices(), places, draws, drawn_n);
            both.iter().try_for_each(|launch| target.launch(launch))
        })
    }

    pub(super) fn top_guesses(&self, logits_kv: &Tensor, bias_v: Option<&Tensor>, guesses_kp: &Tensor) -> CudaResult {
        let oracle = || oracle::top_guesses(logits_kv, bias_v, guesses_kp);
        self.run("top_guesses", &[guesses_kp], oracle, |Kernels { target, scratch }| {
            let both = launches::top_guesses(logits_kv, bias_v, scratch.guess_parts(), guesses_kp);
            both.iter().try_for_each(|launch| target.launch(launch))
        })
    }
}
