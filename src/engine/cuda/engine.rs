//! The CUDA engine: decodes one sequence on a GPU. Its steps run entirely on the device, drafter and acceptance included; the
//! host only reads the tokens that each step accepted.

// N nodes of a step
use tch::{Device, Kind, Tensor};

use super::buffers::RESULTS;
use super::draft::DeviceDraft;
use super::error::{CudaError, CudaResult};
use super::layout::{MAX_NODES, Nodes};
use super::memory::{DeviceMemory, DeviceWeights, int32};
use super::ops::Ops;
use super::plan::DevicePlan;
use super::rule::{Rule, StepKey};
use super::shape::{CHUNKS, Shape};
use super::state;
use super::step::{DecodeStep, products};
use super::target::GpuTarget;
use crate::engine::prefix::cached_prefix;
use crate::engine::sample::Sampler;
use crate::model::llama::Llama;
use crate::nvidia::device::Gpu;
use crate::nvidia::launcher::Launcher;
use crate::torch::guard;

/// Decodes one sequence on a GPU, request after request, such as a conversation. A step commits one token, or several with the
/// drafter that the engine was built for. After an error the content of the cache is undefined: call [`CudaEngine::reset`].
#[derive(Debug)]
pub struct CudaEngine<'a> {
    backbone: &'a Llama,
    shape: Shape<'a>,
    ops: Ops,
    weights: DeviceWeights,
    memory: DeviceMemory,
    nodes: StepNodes,
    /// Tokens in the cache.
    ids: Vec<i64>,
    /// Key of the current sequence's steps.
    key: StepKey,
    /// Steps since tokens were last uploaded.
    steps: i64,
}

/// Nodes of each kind of step.
#[derive(Debug)]
struct StepNodes {
    one: Nodes,
    tree: Option<Nodes>,
    /// In the order of [`CHUNKS`].
    chunks: [Nodes; CHUNKS.len()],
}

/// The result of a step.
#[derive(Debug)]
pub struct DeviceStep {
    /// Tokens that the step added to the cache, starting with its root.
    pub accepted: Vec<i64>,
    /// The token after them, which is the next step's root, or [`NO_TOKEN`](crate::model::llama::NO_TOKEN).
    pub next: i64,
}

impl<'a> CudaEngine<'a> {
    /// An engine for `backbone` and, if given, `draft`, computed by `ops`. The cache starts with one block.
    ///
    /// # Errors
    /// [`CudaError::UnsupportedModel`] names what is not supported.
    pub fn new(backbone: &'a Llama, draft: Option<&DeviceDraft<'a>>, ops: Ops) -> CudaResult<Self> {
        Self::with_room(1, backbone, draft, ops)
    }

    /// Like [`CudaEngine::new`], with a cache for `tokens` tokens.
    fn with_room(tokens: i64, backbone: &'a Llama, draft: Option<&DeviceDraft<'a>>, mut ops: Ops) -> CudaResult<Self> {
        let shape = Shape::of(backbone, draft);
        shape.check_blocks()?;
        shape.check_tree()?;
        let device = backbone.device();
        let weights = tch::no_grad(|| DeviceWeights::new(backbone, draft))?;
        let memory = DeviceMemory::new(&DevicePlan::of(&shape, shape.room(tokens)), &shape, device);
        let nodes = StepNodes {
            one: Nodes::chain(1, device),
            tree: shape.draft.map(|draft| Nodes::for_tree(draft.tree, device)),
            chunks: CHUNKS.map(|rows| Nodes::chain(rows, device)),
        };
        // Last, because it waits until libtorch has written all of the above.
        tch::no_grad(|| ops.prepare(&products(&weights, &memory, &shape)))?;
        let key = StepKey { has_tree: false, then_tree: false, rule: Rule::Greedy };
        Ok(Self { shape, weights, memory, nodes, backbone, ops, ids: vec![], key, steps: 0 })
    }

    /// An engine on the backbone's GPU, with a cache that starts with room for `tokens` tokens.
    ///
    /// # Errors
    /// [`CudaError`]: no GPU, no kernels, or too little memory.
    pub fn on_gpu(backbone: &'a Llama, draft: Option<&DeviceDraft<'a>>, tokens: i64) -> CudaResult<Self> {
        let ready = || Self::with_room(tokens, backbone, draft, Self::kernels(backbone, draft, tokens)?);
        guard("preparing the GPU's own loop", ready)?
    }

    /// The kernels for the backbone's GPU. Checks that the engine's memory fits before anything is allocated.
    ///
    /// # Errors
    /// [`CudaError`]: no GPU, no kernels, or too little memory.
    pub fn kernels(backbone: &Llama, draft: Option<&DeviceDraft>, tokens: i64) -> CudaResult<Ops> {
        Self::kernels_of(Gpu::open(backbone.device())?, backbone, draft, tokens)
    }

    /// As [`CudaEngine::kernels`], of an open GPU: the backbone's.
    ///
    /// # Errors
    /// [`CudaError`]: no kernels, or too little memory.
    pub fn kernels_of(gpu: Gpu, backbone: &Llama, draft: Option<&DeviceDraft>, tokens: i64) -> CudaResult<Ops> {
        let shape = Shape::of(backbone, draft);
        shape.check_kernels()?;
        shape.check_blocks()?;
        shape.check_tree()?;
        DevicePlan::of(&shape, shape.room(tokens)).check_fits(gpu.free_bytes()?)?;
        let (device, head_size) = (backbone.device(), shape.config.head_dim);
        let launcher = Launcher::new(gpu, shape.kind, head_size, device)?;
        Ok(Ops::kernels(GpuTarget::new(launcher), &shape, device))
    }

    /// The device and its memory plan, in one line.
    pub fn describe(&self) -> String {
        format!("{}; {}", self.ops.name(), self.plan())
    }

    /// The device memory in use.
    pub fn plan(&self) -> DevicePlan {
        DevicePlan::of(&self.shape, self.memory.room())
    }

    /// The operations' implementation.
    pub fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Tokens in the cache: the prompt and those new tokens that were run.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Truncates the cache to its first `tokens`.
    pub fn keep(&mut self, tokens: usize) {
        self.ids.truncate(tokens);
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.keep(0);
    }

    /// Begins a sequence: runs the part of the prompt that is not cached, with the last token in a step of its own, and returns
    /// the token after it. Reserves room for `max_new_tokens` more. [`CudaEngine::step`] continues, with the tree or one token
    /// per step. A rule that draws takes its random numbers from `draws`, one per position.
    ///
    /// # Errors
    /// [`CudaError::Growth`], or a device error.
    ///
    /// # Panics
    /// For an empty prompt, or a tree without a drafter.
    pub fn start(
        &mut self,
        prompt: &[i64],
        max_new_tokens: usize,
        with_tree: bool,
        rule: Rule,
        draws: &mut Sampler,
    ) -> CudaResult<i64> {
        let (last, before) = prompt.split_last().expect("a prompt is not empty");
        self.keep(cached_prefix(&self.ids, prompt));
        self.reserve(prompt.len().saturating_add(max_new_tokens))?;
        for piece in before[self.ids.len()..].chunks(MAX_NODES) {
            self.prefill(piece)?;
        }
        if let Rule::Draw { .. } = rule {
            self.upload_draws(prompt.len(), max_new_tokens, draws)?;
        }
        self.place(&[*last])?;
        self.key = StepKey { has_tree: with_tree, then_tree: with_tree, rule };
        self.replay(StepKey { has_tree: false, ..self.key })?;
        let next = self.read()?.next;
        self.ids.push(*last);
        Ok(next)
    }

    /// Runs the next step of the current sequence, which commits the root and the accepted guesses.
    ///
    /// # Errors
    /// A device error.
    pub fn step(&mut self) -> CudaResult<DeviceStep> {
        self.replay(self.key)?;
        let step = self.read()?;
        self.ids.extend(&step.accepted);
        Ok(step)
    }

    /// Runs a piece of a prompt. Its tokens do not attend to the rows that pad it, and the next piece overwrites these rows.
    fn prefill(&mut self, piece: &[i64]) -> CudaResult {
        let size = CHUNKS.iter().position(|&rows| rows >= piece.len()).expect("a piece is not longer than the longest");
        let mut tokens = piece.to_vec();
        tokens.resize(CHUNKS[size], 0);
        self.place(&tokens)?;
        self.on(&self.nodes.chunks[size]).layers()?;
        self.ids.extend(piece);
        Ok(())
    }

    /// Uploads the length of the cache and the tokens that follow it.
    fn place(&mut self, tokens: &[i64]) -> CudaResult {
        self.steps = 0;
        let buffers = &self.memory.buffers;
        self.ops.upload(&buffers.state, &state::before_first(self.ids.len() as i64, 0, 0, Device::Cpu))?;
        self.ops.upload(&buffers.tokens_n.narrow(0, 0, tokens.len() as i64), &int32(tokens))
    }

    /// Uploads the random numbers for the tokens after a prompt, each at its token's position.
    fn upload_draws(&self, from: usize, max_new_tokens: usize, draws: &mut Sampler) -> CudaResult {
        let all = self.memory.uniforms_u.size()[0].unsigned_abs() as usize;
        let count = (max_new_tokens.saturating_add(MAX_NODES)).min(all - from);
        let drawn = Tensor::from_slice(&draws.uniforms(count));
        self.ops.upload(&self.memory.uniforms_u.narrow(0, from as i64, count as i64), &drawn)
    }

    /// Runs a step whose tokens are already on the device.
    fn replay(&self, key: StepKey) -> CudaResult {
        let [nodes, next] = [key.has_tree, key.then_tree].map(|tree| if tree { self.tree() } else { &self.nodes.one });
        self.ops.replay(key, || self.on(nodes).run(key.rule, next))
    }

    /// The result of the last step.
    fn read(&mut self) -> CudaResult<DeviceStep> {
        let row = self.memory.buffers.results_rt.narrow(0, self.steps % RESULTS, 1);
        self.steps += 1;
        let row: Vec<i64> =
            Vec::try_from(self.ops.download(&row)?.to_kind(Kind::Int64).reshape([-1])).expect("one axis of int64");
        let [step, accepted, next, tokens @ ..] = &row[..] else { panic!("a row of results, got {row:?}") };
        assert_eq!(*step, self.steps, "the device has done another step than this one");
        Ok(DeviceStep { accepted: tokens[..accepted.unsigned_abs() as usize].to_vec(), next: *next })
    }

    fn on<'s>(&'s self, nodes: &'s Nodes) -> DecodeStep<'s> {
        let (ops, config) = (&self.ops, &self.backbone.config);
        DecodeStep { ops, config, weights: &self.weights, memory: &self.memory, nodes }
    }

    fn tree(&self) -> &Nodes {
        self.nodes.tree.as_ref().expect("a tree comes with a drafter")
    }

    /// Grows the cache for the whole sequence, so that decoding does not fail in the middle.
    fn reserve(&mut self, tokens: usize) -> CudaResult {
        let context = self.backbone.config.max_position_embeddings;
        let room = self.shape.room(i64::try_from(tokens).map_or(context, |tokens| tokens.min(context)));
        if room <= self.memory.room() {
            return Ok(());
        }
        let needed_bytes = DevicePlan::of(&self.shape, room).cache_l2gsd.bytes();
        if let Some(free_bytes) = self.ops.free_bytes()?
            && free_bytes < needed_bytes
        {
            return Err(CudaError::Growth { room, needed_bytes, free_bytes });
        }
        self.memory.grow(room, self.ids.len() as i64);
        self.ops.moved();
        Ok(())
    }
}
