//! The two ways to decode one prompt: [`plain`], a token a step and the oracle, and [`medusa`], whose greedy text is the same.

// N nodes of a tree, H hidden size, V vocabulary
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use tch::{Kind, Tensor};

use super::accept::{self, Acceptance};
use super::propose::Proposer;
use super::sample::{Sampler, Sampling};
use super::stats::Tally;
use crate::medusa::heads::Heads;
use crate::medusa::tree::{SparseTree, TreeError};
use crate::model::attention::NewTokens;
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::numbers::NonNegative;
use crate::torch::{TorchPanic, guard};

/// A prompt cannot be decoded, or heads and tree do not belong to the backbone.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Nothing to go on from.
    #[error("the prompt has no tokens; expected at least one (a BOS will do)")]
    EmptyPrompt,
    /// No room for an answer.
    #[error(
        "the prompt has {length} tokens, but the backbone's context is {context}, and at least one new token must fit; shorten the prompt"
    )]
    PromptTooLong {
        /// Its tokens.
        length: usize,
        /// `max_position_embeddings`.
        context: i64,
    },
    /// A token id outside of the vocabulary.
    #[error("prompt token {position} is id {id}; expected 0 to {}", vocab_size - 1)]
    TokenOutOfRange {
        /// 0-based.
        position: usize,
        /// The id.
        id: i64,
        /// The backbone's.
        vocab_size: i64,
    },
    /// Heads of another backbone.
    #[error(
        "the heads have {what} {heads}, the backbone has {backbone}; use the backbone that the heads were trained on"
    )]
    Mismatch {
        /// `hidden size` or `vocabulary`.
        what: &'static str,
        /// The heads'.
        heads: i64,
        /// The backbone's.
        backbone: i64,
    },
    /// The tree asks for more than the heads have.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// libtorch gave up.
    #[error(transparent)]
    Torch(#[from] TorchPanic),
}

/// What to decode.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Token ids, BOS among them.
    pub prompt: &'a [i64],
    /// Stop after this many, or where the context is full.
    pub max_new_tokens: usize,
    /// 0 is greedy.
    pub temperature: NonNegative,
    /// Of what is drawn.
    pub seed: u64,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The backbone ended the text.
    Eos,
    /// `max_new_tokens` are made, or the context is full.
    Length,
    /// The caller asked to stop.
    Stopped,
}

impl FinishReason {
    /// As it is written in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Eos => "eos",
            FinishReason::Length => "length",
            FinishReason::Stopped => "stopped",
        }
    }
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The new tokens, without the EOS.
    pub new_ids: Vec<i64>,
    /// Tokens that each step committed.
    pub accept_lengths: Vec<usize>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The EOS that ended it.
    pub eos: Option<i64>,
    /// Time until the first token was known.
    pub prefill: Duration,
    /// Time from then on.
    pub decoding: Duration,
}

impl Generation {
    /// For adding up.
    pub fn tally(&self) -> Tally {
        let (tokens, steps) = (self.new_ids.len(), self.accept_lengths.len());
        Tally { tokens, steps, decoding: self.decoding, prefill: self.prefill }
    }
}

/// Hears the tokens of each step, and may stop the generation.
pub type OnTokens<'a> = dyn FnMut(&[i64]) -> ControlFlow<()> + 'a;

/// Heads, tree and acceptance, ready for one backbone.
#[derive(Debug)]
pub struct Medusa<'a> {
    heads: &'a Heads,
    tree: &'a SparseTree,
    acceptance: Acceptance,
    proposer: Proposer,
    /// Where the nodes stand, and whom they see.
    nodes: NewTokens,
    /// `[N]`: each node's parent; the root's own index for the root.
    parents_n: Tensor,
}

impl<'a> Medusa<'a> {
    /// Checks that they belong together, and lays out the tree on the backbone's device.
    ///
    /// # Errors
    /// [`DecodeError::Mismatch`] and [`DecodeError::Tree`].
    pub fn new(
        backbone: &Llama,
        heads: &'a Heads,
        tree: &'a SparseTree,
        acceptance: Acceptance,
    ) -> Result<Self, DecodeError> {
        let config = &backbone.config;
        let sizes = [
            ("hidden size", heads.hidden_size(), config.hidden_size),
            ("vocabulary", heads.vocab_size(), config.vocab_size),
        ];
        if let Some(&(what, heads, backbone)) = sizes.iter().find(|(_, heads, backbone)| heads != backbone) {
            return Err(DecodeError::Mismatch { what, heads, backbone });
        }
        tree.check_fits(heads.num_heads(), usize::try_from(config.vocab_size).unwrap_or(0))?;
        let offsets: Vec<i64> = (0..tree.len()).map(|node| tree.depth(node) as i64).collect();
        let sees = |query, key| tree.attends(query, key);
        let nodes = NewTokens::pattern(&offsets, sees, config, backbone.kind(), backbone.device());
        let parents: Vec<i64> = (0..tree.len()).map(|node| tree.parent(node).unwrap_or(0) as i64).collect();
        let parents_n = Tensor::from_slice(&parents).to_device(backbone.device());
        Ok(Self { heads, tree, acceptance, proposer: Proposer::new(tree, backbone.device()), nodes, parents_n })
    }
}

/// Decodes a token a step: greedily at temperature 0, else by sampling from the whole distribution.
///
/// # Errors
/// [`DecodeError`] names what is wrong with the prompt.
pub fn plain(backbone: &Llama, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
    check_prompt(backbone, request.prompt)?;
    let mut text = Transcript::new(backbone, request, on_tokens);
    guard("plain decoding", || tch::no_grad(|| plain_steps(backbone, request, &mut text)))?;
    Ok(text.finish())
}

fn plain_steps(backbone: &Llama, request: &Request, text: &mut Transcript) -> KvCache {
    let (mut cache, mut hidden_1h) = prefill(backbone, request.prompt);
    let mut sampler = Sampler::new(Sampling::of_temperature(request.temperature), request.seed);
    let one = NewTokens::chain(1, &backbone.config, backbone.kind(), backbone.device());
    loop {
        let token_1 = sampler.next(&backbone.logits(&hidden_1h, Adapters::Off));
        let token = token_1.int64_value(&[0]);
        if text.commit(&[token]).is_break() {
            return cache;
        }
        hidden_1h = backbone.extend(&token_1, &one, &mut cache);
        cache.commit(1);
    }
}

/// Decodes with Medusa heads. Every step commits the root, which is the LM head's own token, and the accepted path below it.
/// At temperature 0 the text is [`plain`]'s, whatever the heads and the tree; only where two tokens are equally probable up to
/// rounding (rare in float32, less so in 16 bits) may they differ, since a product's last bits depend on its number of rows.
///
/// A node behind the context's end or `max_new_tokens` is computed with the others and never committed.
///
/// # Errors
/// [`DecodeError`] names what is wrong with the prompt.
pub fn medusa(
    backbone: &Llama,
    medusa: &Medusa,
    request: &Request,
    on_tokens: &mut OnTokens,
) -> Result<Generation, DecodeError> {
    check_prompt(backbone, request.prompt)?;
    let mut text = Transcript::new(backbone, request, on_tokens);
    guard("Medusa decoding", || tch::no_grad(|| medusa_steps(backbone, medusa, request, &mut text)))?;
    Ok(text.finish())
}

fn medusa_steps(backbone: &Llama, medusa: &Medusa, request: &Request, text: &mut Transcript) -> KvCache {
    let (mut cache, mut hidden_1h) = prefill(backbone, request.prompt);
    // Greedy at any temperature: the step's first token is unconditionally accepted (paper section 2.3.1).
    let mut root_1 = backbone.logits(&hidden_1h, Adapters::Off).argmax(-1, false);
    let mut root = root_1.int64_value(&[0]);
    loop {
        if text.ends_with(root) {
            let _ = text.commit(&[root]); // the last one: nothing to verify
            return cache;
        }
        let tokens_n = medusa.proposer.candidates(&root_1, &hidden_1h, medusa.heads, backbone);
        let hidden_nh = backbone.extend(&tokens_n, &medusa.nodes, &mut cache);
        let verified =
            verify(medusa, &backbone.logits(&hidden_nh, Adapters::Off), &tokens_n, request.temperature.get());
        cache.commit_path(&verified.path.iter().map(|&node| node as i64).collect::<Vec<_>>());
        if text.commit(&verified.accepted).is_break() {
            return cache;
        }
        let last = verified.path.last().map_or(0, |&node| node as i64);
        hidden_1h = hidden_nh.narrow(0, last, 1);
        root_1 = verified.best_n.narrow(0, last, 1);
        root = verified.next_root;
    }
}

/// What a pass over the tree decided.
struct Verified {
    /// Accepted nodes, root first.
    path: Vec<usize>,
    /// Their tokens.
    accepted: Vec<i64>,
    /// `[N]`: the most probable token after each node.
    best_n: Tensor,
    /// The one after the last accepted node.
    next_root: i64,
}

/// Decides at the nodes; all that the decision needs crosses to the host in one copy.
fn verify(medusa: &Medusa, logits_nv: &Tensor, tokens_n: &Tensor, temperature: f64) -> Verified {
    let best_n = logits_nv.argmax(-1, false);
    let nodes = medusa.tree.len();
    let (path, tokens, best) = match medusa.acceptance {
        Acceptance::Typical(rule) if temperature > 0.0 => {
            let (log_p_n, entropy_n) = posterior(logits_nv, tokens_n, &medusa.parents_n, temperature);
            let rows = [tokens_n.to_kind(Kind::Double), best_n.to_kind(Kind::Double), log_p_n, entropy_n];
            let rows: Vec<f64> = to_host(&Tensor::cat(&rows, 0));
            let path = accept::typical(medusa.tree, &rows[2 * nodes..3 * nodes], &rows[3 * nodes..], rule);
            let (tokens, best) = rows[..2 * nodes].split_at(nodes);
            (path, as_ids(tokens), as_ids(best))
        }
        _ => {
            let rows: Vec<i64> = to_host(&Tensor::cat(&[tokens_n, &best_n], 0));
            let (tokens, best) = rows.split_at(nodes);
            (accept::greedy(medusa.tree, tokens, best), tokens.to_vec(), best.to_vec())
        }
    };
    let accepted: Vec<i64> = path.iter().map(|&node| tokens[node]).collect();
    let next_root = best[path[path.len() - 1]];
    Verified { path, accepted, best_n, next_root }
}

/// Log-probability of each node's token after its parent, and entropy after each node, both `[N]`, float64.
fn posterior(logits_nv: &Tensor, tokens_n: &Tensor, parents_n: &Tensor, temperature: f64) -> (Tensor, Tensor) {
    let log_p_nv = (logits_nv.to_kind(Kind::Float) / temperature).log_softmax(-1, Kind::Float);
    let entropy_n = -(log_p_nv.exp() * &log_p_nv).sum_dim_intlist(-1, false, Kind::Double);
    let at_n = parents_n * log_p_nv.size()[1] + tokens_n;
    (log_p_nv.view([-1]).index_select(0, &at_n).to_kind(Kind::Double), entropy_n)
}

fn to_host<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
    Vec::try_from(tensor).expect("one axis, of the kind that was made")
}

/// Token ids that crossed to the host as float64, which holds them exactly.
#[expect(clippy::cast_possible_truncation, reason = "integers below 2^53")]
fn as_ids(row: &[f64]) -> Vec<i64> {
    row.iter().map(|&id| id as i64).collect()
}

/// Runs the prompt; returns its cache and the last token's hidden state, `[1, H]`.
pub(super) fn prefill(backbone: &Llama, prompt: &[i64]) -> (KvCache, Tensor) {
    let length = prompt.len() as i64;
    let mut cache = KvCache::new(&backbone.config, backbone.kind(), backbone.device());
    let chain = NewTokens::chain(length, &backbone.config, backbone.kind(), backbone.device());
    let tokens_n = Tensor::from_slice(prompt).to_device(backbone.device());
    let hidden_nh = backbone.extend(&tokens_n, &chain, &mut cache);
    cache.commit(length);
    (cache, hidden_nh.narrow(0, length - 1, 1))
}

/// Refuses what no backbone can go on from.
pub(super) fn check_prompt(backbone: &Llama, prompt: &[i64]) -> Result<(), DecodeError> {
    let (context, vocab_size) = (backbone.config.max_position_embeddings, backbone.config.vocab_size);
    if prompt.is_empty() {
        return Err(DecodeError::EmptyPrompt);
    }
    if prompt.len() as i64 >= context {
        return Err(DecodeError::PromptTooLong { length: prompt.len(), context });
    }
    match prompt.iter().position(|id| !(0..vocab_size).contains(id)) {
        Some(position) => Err(DecodeError::TokenOutOfRange { position, id: prompt[position], vocab_size }),
        None => Ok(()),
    }
}

/// The text so far, and when it ends. No tensors.
struct Transcript<'a, 'f> {
    new_ids: Vec<i64>,
    accept_lengths: Vec<usize>,
    /// Tokens that may be made: those asked for, as far as the context goes.
    limit: usize,
    eos_token_ids: &'a [i64],
    on_tokens: &'a mut OnTokens<'f>,
    finish_reason: FinishReason,
    eos: Option<i64>,
    started: Instant,
    first_token: Option<Instant>,
}

impl<'a, 'f> Transcript<'a, 'f> {
    fn new(backbone: &'a Llama, request: &Request, on_tokens: &'a mut OnTokens<'f>) -> Self {
        let context = usize::try_from(backbone.config.max_position_embeddings).unwrap_or(0);
        Self {
            new_ids: Vec::new(),
            accept_lengths: Vec::new(),
            limit: request.max_new_tokens.min(context.saturating_sub(request.prompt.len())),
            eos_token_ids: &backbone.config.eos_token_ids,
            on_tokens,
            finish_reason: FinishReason::Length,
            eos: None,
            started: Instant::now(),
            first_token: None,
        }
    }

    /// Whether the text ends with this token, whatever comes after it.
    fn ends_with(&mut self, root: i64) -> bool {
        self.first_token.get_or_insert_with(Instant::now);
        self.new_ids.len() + 1 >= self.limit || self.eos_token_ids.contains(&root)
    }

    /// Takes one step's tokens up to the limit and before the first EOS; breaks when the text is complete.
    fn commit(&mut self, tokens: &[i64]) -> ControlFlow<()> {
        self.first_token.get_or_insert_with(Instant::now);
        let within = &tokens[..tokens.len().min(self.limit - self.new_ids.len())];
        let eos = within.iter().position(|id| self.eos_token_ids.contains(id));
        let kept = &within[..eos.unwrap_or(within.len())];
        self.eos = eos.map(|at| within[at]);
        let mut stopped = ControlFlow::Continue(());
        if !kept.is_empty() {
            self.new_ids.extend(kept);
            self.accept_lengths.push(kept.len());
            stopped = (self.on_tokens)(kept);
        }
        self.finish_reason = match eos {
            Some(_) => FinishReason::Eos,
            None if self.new_ids.len() == self.limit => FinishReason::Length,
            None if stopped.is_break() => FinishReason::Stopped,
            None => return ControlFlow::Continue(()),
        };
        ControlFlow::Break(())
    }

    fn finish(self) -> Generation {
        let first_token = self.first_token.unwrap_or(self.started);
        Generation {
            new_ids: self.new_ids,
            accept_lengths: self.accept_lengths,
            finish_reason: self.finish_reason,
            eos: self.eos,
            prefill: first_token - self.started,
            decoding: first_token.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests;
