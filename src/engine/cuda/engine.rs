//! The fast loop: one text's keys and values on a GPU, decoded by steps that the device runs on its own. The host reads the accepted
//! tokens of each step and nothing else. [`Session`](crate::decode::session::Session) is its oracle: the same requests, the same
//! texts, but for what another rounding turns.

// N nodes of a step
use tch::{Device, Kind, Tensor};

use super::graph::Key;
use super::launcher::Launcher;
use super::layout::{MAX_NODES, Nodes};
use super::memory::{Memory, Weights, int32};
use super::ops::Ops;
use super::plan::{CHUNKS, Plan, RESULTS, Shape, Unfit};
use super::state;
use super::step::{Rule, Step, products};
use crate::decode::medusa::Medusa;
use crate::decode::request::{DecodeError, Generation, OnTokens, Request, check_prompt};
use crate::decode::transcript::Transcript;
use crate::engine::sample::Sampler;
use crate::model::llama::Llama;
use crate::numbers::Positive;
use crate::nvidia::device::{self, Gpu, NoGpu};
use crate::nvidia::nvrtc::CompileError;
use crate::torch::{TorchPanic, guard};
use crate::tree::accept::Acceptance;

/// What can go wrong on a GPU.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// It cannot decode this.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// There is none, or it gave up.
    #[error(transparent)]
    Gpu(#[from] NoGpu),
    /// Its kernels are not there.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// libtorch gave up, most likely on memory.
    #[error(transparent)]
    Torch(#[from] TorchPanic),
    /// NaN or infinity came out of the backbone.
    #[error("the backbone's logits are no numbers; decode in another --dtype")]
    NotNumbers,
    /// It cannot decode as the request asks.
    #[error("the GPU's own loop cannot decode this: {0}; use --engine tch")]
    Request(&'static str),
    /// The text has outgrown the memory.
    #[error(
        "the text needs a cache of {room} tokens, {needed_bytes} bytes, and {free_bytes} are free on the GPU; ask for fewer tokens \
         (--max-new-tokens), or shorten the context (--max-context)"
    )]
    Growth {
        /// Tokens.
        room: i64,
        /// Of the cache.
        needed_bytes: u64,
        /// On the device.
        free_bytes: u64,
    },
}

/// A text that is decoded request after request on a GPU, such as a conversation: as
/// [`Session`](crate::decode::session::Session), plainly or with the heads that it was made for.
#[derive(Debug)]
pub struct Engine<'a> {
    backbone: &'a Llama,
    shape: Shape<'a>,
    acceptance: Option<Acceptance>,
    ops: Ops,
    weights: Weights,
    memory: Memory,
    nodes: StepNodes,
    /// The tokens that the cache holds.
    ids: Vec<i64>,
    /// Since tokens were last put in place.
    steps: i64,
}

/// Nodes of the steps that there are.
#[derive(Debug)]
struct StepNodes {
    one: Nodes,
    tree: Option<Nodes>,
    /// As [`CHUNKS`].
    chunks: [Nodes; CHUNKS.len()],
}

/// What the host reads of a step.
#[derive(Debug)]
struct Outcome {
    accepted: Vec<i64>,
    /// The next root.
    next: i64,
}

impl<'a> Engine<'a> {
    /// For `backbone`, and for `medusa` if there are heads, by `ops`. The cache begins with one block.
    ///
    /// # Errors
    /// [`EngineError::Unfit`] says what cannot be decoded.
    pub fn new(backbone: &'a Llama, medusa: Option<&Medusa<'a>>, ops: Ops) -> Result<Self, EngineError> {
        Self::with_room(1, backbone, medusa, ops)
    }

    /// As [`Engine::new`], with a cache for texts of so many tokens.
    fn with_room(
        tokens: i64,
        backbone: &'a Llama,
        medusa: Option<&Medusa<'a>>,
        mut ops: Ops,
    ) -> Result<Self, EngineError> {
        let shape = shape_of(backbone, medusa);
        shape.check_tree()?;
        let plan = shape.plan(shape.room(tokens));
        let heads = medusa.map(|medusa| (medusa.heads(), medusa.tree().max_depth()));
        let device = backbone.device();
        let weights = tch::no_grad(|| Weights::new(backbone, heads))?;
        let memory = Memory::new(&plan, &shape, device);
        let nodes = StepNodes {
            one: Nodes::chain(1, device),
            tree: medusa.map(|medusa| Nodes::of_tree(medusa.tree(), device)),
            chunks: CHUNKS.map(|rows| Nodes::chain(rows, device)),
        };
        // Last: it waits until libtorch has written all of these.
        tch::no_grad(|| ops.prepare(|| products(&weights, &memory, &shape)))?;
        let acceptance = medusa.map(Medusa::acceptance);
        Ok(Self { shape, acceptance, weights, memory, nodes, backbone, ops, ids: vec![], steps: 0 })
    }

    /// On the GPU where the backbone lies, for requests such as `request`, with a cache for texts of so many `tokens` to begin with.
    ///
    /// # Errors
    /// [`EngineError`] says why there is no such engine, or what does not fit.
    pub fn on_gpu(
        backbone: &'a Llama,
        medusa: Option<&Medusa<'a>>,
        request: &Request,
        tokens: i64,
    ) -> Result<Self, EngineError> {
        device::check()?;
        rule_of(request, medusa.map(Medusa::acceptance)).map_err(EngineError::Request)?;
        let ready = || Self::with_room(tokens, backbone, medusa, Self::kernels(backbone, medusa, tokens)?);
        guard("preparing the GPU's own loop", ready)?
    }

    /// The kernels on the GPU where the backbone lies. Memory is asked for once it is known that all of the engine's is there.
    ///
    /// # Errors
    /// [`EngineError`] says why there are none, or what does not fit.
    pub fn kernels(backbone: &Llama, medusa: Option<&Medusa>, tokens: i64) -> Result<Ops, EngineError> {
        let gpu = Gpu::open(backbone.device())?;
        let shape = shape_of(backbone, medusa);
        shape.check_kernels()?;
        shape.check_tree()?;
        shape.plan(shape.room(tokens)).check_fits(gpu.free_bytes()?)?;
        Ok(Ops::Cuda(Box::new(Launcher::new(gpu, &shape, backbone.device())?)))
    }

    /// Where it decodes, and what that takes, in a line.
    pub fn told(&self) -> String {
        format!("{}; {}", self.ops.name(), self.plan())
    }

    /// What it takes of the device's memory now.
    pub fn plan(&self) -> Plan {
        self.shape.plan(self.memory.room())
    }

    /// Who computes.
    pub fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Tokens in the cache: the last prompt, and those new tokens that were computed (the last one may not be).
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.ids.clear();
    }

    /// As [`Session::plain`](crate::decode::session::Session::plain).
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt, or what the device said.
    pub fn plain(&mut self, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
        let rule = rule_of(request, None).map_err(EngineError::Request)?;
        self.run(request, on_tokens, |engine, text| engine.plain_steps(request, rule, text))
    }

    /// As [`Session::medusa`](crate::decode::session::Session::medusa), with the heads, the tree and the acceptance that the engine was
    /// made for.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt, or what the device said.
    pub fn medusa(&mut self, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
        let acceptance = self.acceptance.ok_or(EngineError::Request("it was made without heads"))?;
        let rule = rule_of(request, Some(acceptance)).map_err(EngineError::Request)?;
        self.run(request, on_tokens, |engine, text| engine.tree_steps(request, rule, text))
    }

    fn run(
        &mut self,
        request: &Request,
        on_tokens: &mut OnTokens,
        steps: impl FnOnce(&mut Self, &mut Transcript) -> Result<(), EngineError>,
    ) -> Result<Generation, DecodeError> {
        check_prompt(self.backbone, request.prompt)?;
        let mut text = Transcript::new(self.backbone, request, on_tokens);
        let done = guard("decoding on the GPU", || tch::no_grad(|| steps(self, &mut text)));
        if let Err(failure) = done.map_err(DecodeError::from).and_then(|done| Ok(done?)) {
            self.reset(); // nobody knows how far the step came
            return Err(failure);
        }
        self.ids.truncate(request.prompt.len() + text.len());
        Ok(text.finish())
    }

    fn plain_steps(&mut self, request: &Request, rule: Rule, text: &mut Transcript) -> Result<(), EngineError> {
        let mut token = self.start(request, rule, false)?;
        while text.commit(&[token]).is_continue() {
            token = self.step(rule, false)?.next;
        }
        Ok(())
    }

    fn tree_steps(&mut self, request: &Request, rule: Rule, text: &mut Transcript) -> Result<(), EngineError> {
        let mut root = self.start(request, rule, true)?;
        while !text.ends_with(root) {
            let Outcome { accepted, next } = self.step(rule, true)?;
            if text.commit(&accepted).is_break() {
                return Ok(());
            }
            root = next;
        }
        let _ = text.commit(&[root]); // the last one: nothing to verify
        Ok(())
    }

    /// Computes what of the prompt is not cached, its last token in any case, as a step of its own: the token after it is returned,
    /// and the next step's are in place.
    fn start(&mut self, request: &Request, rule: Rule, with_tree: bool) -> Result<i64, EngineError> {
        let prompt = request.prompt;
        let shared = self.ids.iter().zip(prompt).take_while(|(cached, wanted)| cached == wanted).count();
        self.ids.truncate(shared.min(prompt.len() - 1));
        self.reserve(request)?;
        let (last, before) = prompt.split_last().expect("a prompt is not empty");
        for piece in before[self.ids.len()..].chunks(MAX_NODES) {
            self.prefill(piece)?;
        }
        if let Rule::Draw { .. } = rule {
            self.upload_draws(request)?;
        }
        self.place(&[*last])?;
        let next = if with_tree { self.tree() } else { &self.nodes.one };
        let key = Key { has_tree: false, then_tree: with_tree, rule };
        self.ops.replayed(key, || self.on(&self.nodes.one).run(rule, next))?;
        let next = self.read()?.next;
        self.ids.push(*last);
        Ok(next)
    }

    /// Runs a piece of a prompt behind the cache. The rows that fill the piece up are not seen by it, and the next piece is written
    /// over them.
    fn prefill(&mut self, piece: &[i64]) -> Result<(), EngineError> {
        let size = CHUNKS.iter().position(|&rows| rows >= piece.len()).expect("a piece is not longer than the longest");
        let mut tokens = piece.to_vec();
        tokens.resize(CHUNKS[size], 0);
        self.place(&tokens)?;
        self.on(&self.nodes.chunks[size]).layers()?;
        self.ids.extend(piece);
        Ok(())
    }

    /// The device knows how much the cache holds, and the tokens behind it.
    fn place(&mut self, tokens: &[i64]) -> Result<(), EngineError> {
        self.steps = 0;
        let buffers = &self.memory.buffers;
        self.ops.upload(&buffers.state, &state::before_first(self.ids.len() as i64, 0, 0, Device::Cpu))?;
        self.ops.upload(&buffers.tokens_n.narrow(0, 0, tokens.len() as i64), &int32(tokens))
    }

    /// The numbers that the tokens behind a prompt are drawn with, each where the token will stand.
    fn upload_draws(&self, request: &Request) -> Result<(), EngineError> {
        let from = request.prompt.len();
        let all = self.memory.uniforms_u.size()[0].unsigned_abs() as usize;
        let count = (request.max_new_tokens.saturating_add(MAX_NODES)).min(all - from);
        let drawn = Sampler::new(request.sampling, request.seed).uniforms(count);
        self.ops.upload(&self.memory.uniforms_u.narrow(0, from as i64, count as i64), &Tensor::from_slice(&drawn))
    }

    /// A step whose tokens are in place.
    fn step(&mut self, rule: Rule, with_tree: bool) -> Result<Outcome, EngineError> {
        let nodes = if with_tree { self.tree() } else { &self.nodes.one };
        let key = Key { has_tree: with_tree, then_tree: with_tree, rule };
        self.ops.replayed(key, || self.on(nodes).run(rule, nodes))?;
        let outcome = self.read()?;
        self.ids.extend(&outcome.accepted);
        Ok(outcome)
    }

    /// What the last step came to.
    fn read(&mut self) -> Result<Outcome, EngineError> {
        let row = self.memory.buffers.results_rt.narrow(0, self.steps % RESULTS, 1);
        self.steps += 1;
        let row: Vec<i64> =
            Vec::try_from(self.ops.download(&row)?.to_kind(Kind::Int64).reshape([-1])).expect("one axis of int64");
        let [step, accepted, next, tokens @ ..] = &row[..] else { panic!("a row of results, got {row:?}") };
        assert_eq!(*step, self.steps, "the device has done another step than this one");
        if *next < 0 {
            return Err(EngineError::NotNumbers);
        }
        Ok(Outcome { accepted: tokens[..accepted.unsigned_abs() as usize].to_vec(), next: *next })
    }

    fn on<'s>(&'s self, nodes: &'s Nodes) -> Step<'s> {
        let (ops, config) = (&self.ops, &self.backbone.config);
        Step { ops, config, weights: &self.weights, memory: &self.memory, nodes }
    }

    fn tree(&self) -> &Nodes {
        self.nodes.tree.as_ref().expect("an acceptance comes with a tree")
    }

    /// Makes room for the whole text, so that it does not fail in the middle.
    fn reserve(&mut self, request: &Request) -> Result<(), EngineError> {
        let tokens = request.prompt.len().saturating_add(request.max_new_tokens);
        let context = self.backbone.config.max_position_embeddings;
        let room = self.shape.room(i64::try_from(tokens).map_or(context, |tokens| tokens.min(context)));
        if room <= self.memory.room() {
            return Ok(());
        }
        let needed_bytes = self.shape.plan(room).cache_l2gsd.bytes();
        if let Some(free_bytes) = self.ops.free_bytes()?
            && free_bytes < needed_bytes
        {
            return Err(EngineError::Growth { room, needed_bytes, free_bytes });
        }
        self.memory.grow(room, self.ids.len() as i64);
        self.ops.moved();
        Ok(())
    }
}

/// What is to be decoded.
pub(super) fn shape_of<'a>(backbone: &'a Llama, medusa: Option<&Medusa<'a>>) -> Shape<'a> {
    let medusa = medusa.map(|medusa| (medusa.heads().shape(), medusa.tree()));
    Shape { config: &backbone.config, kind: backbone.kind(), medusa }
}

/// The rule that the device follows; why not, where it has none. Without an acceptance: plain decoding.
pub(super) fn rule_of(request: &Request, acceptance: Option<Acceptance>) -> Result<Rule, &'static str> {
    let temperature = request.sampling.temperature.get();
    let draw = Rule::Draw { temperature, top_p: request.sampling.top_p.get() };
    if request.repetition_penalty != Positive::ONE {
        return Err("a repetition penalty changes logits with every token");
    }
    match acceptance {
        Some(Acceptance::Forced { .. }) => Err("a forced acceptance rate follows no rule of its own"),
        _ if temperature == 0.0 => Ok(Rule::Greedy),
        None | Some(Acceptance::Rejection) => Ok(draw),
        Some(Acceptance::Greedy) => Ok(Rule::Greedy),
        Some(Acceptance::Typical(rule)) => Ok(Rule::Typical { rule, temperature }),
        Some(Acceptance::Nucleus) => Err("nucleus acceptance above temperature 0 has no kernel"),
    }
}
