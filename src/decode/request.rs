//! What is asked of decoding, and what comes of it.

use std::ops::ControlFlow;
use std::time::Duration;

use super::stats::Tally;
use crate::engine::sample::{Sampling, Stream};
use crate::numbers::{NonNegative, Positive};

/// What to decode.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Token ids, BOS among them.
    pub prompt: &'a [i64],
    /// Stop after this many, or where the context is full.
    pub max_new_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What a token that stands in prompt or text loses (see [`Penalty`](super::penalty::Penalty)); 1 is nothing.
    pub repetition_penalty: Positive,
    /// Of what is drawn.
    pub stream: Stream,
    /// Tokens that end the text as an EOS does; none: only an EOS does.
    pub end_mark: &'a [i64],
    /// Whether an EOS ends the text; without, it is a token like others.
    pub ends_at_eos: bool,
}

impl<'a> Request<'a> {
    /// The most probable tokens, without a penalty.
    pub fn greedy(prompt: &'a [i64], max_new_tokens: usize) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampling: Sampling::of_temperature(NonNegative::ZERO),
            repetition_penalty: Positive::ONE,
            stream: Stream::default(),
            end_mark: &[],
            ends_at_eos: true,
        }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The backbone ended the text, by an EOS or the request's end mark.
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
    /// The new tokens, before what ended them.
    pub new_ids: Vec<i64>,
    /// Tokens that each step committed.
    pub accept_lengths: Vec<usize>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The EOS or the end mark that ended it; else empty.
    pub end: Vec<i64>,
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

/// Hears the new tokens as they are chosen, and may stop the generation.
pub type OnTokens<'a> = dyn FnMut(&[i64]) -> ControlFlow<()> + 'a;
