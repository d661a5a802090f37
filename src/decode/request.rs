//! What can be asked of decoding, what comes of it, and what is refused. No tensors here.

use std::ops::ControlFlow;
use std::time::Duration;

use super::stats::Tally;
use crate::engine::cuda::error::CudaError;
use crate::engine::sample::Sampling;
use crate::model::llama::Llama;
use crate::numbers::{NonNegative, Positive};
use crate::torch::TorchPanic;
use crate::tree::sparse_tree::TreeError;

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
    /// [`Forced`](crate::tree::accept::Acceptance::Forced) that no step can reach.
    #[error(
        "an acceptance rate of {rate} tokens a step cannot be forced; expected 1 to {largest}: the tree's chain of best guesses \
         has {} nodes below the root", largest - 1
    )]
    ForcedRate {
        /// What was asked for.
        rate: f64,
        /// Tokens of the chain and the root.
        largest: usize,
    },
    /// The GPU's own loop cannot, or gave up.
    #[error(transparent)]
    Engine(#[from] CudaError),
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
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What a token that stands in prompt or text loses (see [`Penalty`]); 1 is nothing.
    ///
    /// [`Penalty`]: super::penalty::Penalty
    pub repetition_penalty: Positive,
    /// Of what is drawn.
    pub seed: u64,
}

impl<'a> Request<'a> {
    /// The most probable tokens, without a penalty.
    pub fn greedy(prompt: &'a [i64], max_new_tokens: usize) -> Self {
        let sampling = Sampling::of_temperature(NonNegative::ZERO);
        Self { prompt, max_new_tokens, sampling, repetition_penalty: Positive::ONE, seed: 0 }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The backbone ended the text.
    Eos,
    /// `max_new_tokens` are made, or the context is full.
    Length,
    /// A stop string came (see [`tell`](super::text::tell)).
    Stop,
    /// The caller asked to stop.
    Stopped,
}

impl FinishReason {
    /// As it is written in JSON.
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Eos => "eos",
            FinishReason::Length => "length",
            FinishReason::Stop => "stop",
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

/// Refuses what no backbone can go on from.
pub(crate) fn check_prompt(backbone: &Llama, prompt: &[i64]) -> Result<(), DecodeError> {
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
