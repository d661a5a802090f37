//! A request for a text, and the generation that it returns.

use std::ops::ControlFlow;
use std::time::Duration;

use super::likelihood::ScoredToken;
use super::stats::{GeneratedTokens, Tally};
use crate::engine::sample::{Sampling, Stream};
use crate::numbers::{Finite, NonNegative, Positive};
use crate::tree::accept::Acceptance;

/// A text to decode.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Token ids, BOS among them.
    pub prompt: &'a [i64],
    /// Stop after this many, or where the context is full.
    pub max_new_tokens: usize,
    pub sampling: Sampling,
    /// Repetition penalty (see [`Penalty`](super::penalty::Penalty)); 1 is off.
    pub repetition_penalty: Positive,
    /// Frequency penalty (as above); 0 is off.
    pub frequency_penalty: Finite,
    /// Presence penalty (as above); 0 is off.
    pub presence_penalty: Finite,
    /// Which guesses are accepted, where a drafter guesses; `None` leaves it to the loop.
    pub acceptance: Option<Acceptance>,
    /// Asks for the log-probability of each new token, beside those of so many of the likeliest at its place. They are the backbone's at
    /// temperature 1, without penalties, top-k and top-p.
    pub logprobs: Option<usize>,
    /// Selects the random numbers.
    pub stream: Stream,
    /// A token sequence that ends the text as an EOS does; empty for none.
    pub end_mark: &'a [i64],
    /// Whether an EOS ends the text; otherwise it is a token like any other.
    pub ends_at_eos: bool,
}

impl<'a> Request<'a> {
    /// The most probable tokens, without a penalty.
    pub fn greedy(prompt: &'a [i64], max_new_tokens: usize) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampling: Sampling::with_temperature(NonNegative::ZERO),
            repetition_penalty: Positive::ONE,
            frequency_penalty: Finite::ZERO,
            presence_penalty: Finite::ZERO,
            acceptance: None,
            logprobs: None,
            stream: Stream::default(),
            end_mark: &[],
            ends_at_eos: true,
        }
    }
}

/// A request that waits.
#[derive(Debug)]
pub(super) struct OwnedRequest {
    prompt: Vec<i64>,
    end_mark: Vec<i64>,
    /// Without its lists.
    settings: Request<'static>,
}

impl OwnedRequest {
    pub(super) fn new(request: &Request) -> Self {
        let Request { prompt, max_new_tokens, sampling, repetition_penalty, frequency_penalty, .. } = *request;
        let Request { presence_penalty, acceptance, logprobs, stream, end_mark, ends_at_eos, .. } = *request;
        let settings = Request {
            sampling,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            acceptance,
            logprobs,
            stream,
            ends_at_eos,
            ..Request::greedy(&[], max_new_tokens)
        };
        Self { prompt: prompt.to_vec(), end_mark: end_mark.to_vec(), settings }
    }

    pub(super) fn borrowed(&self) -> Request<'_> {
        Request { prompt: &self.prompt, end_mark: &self.end_mark, ..self.settings }
    }
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The backbone ended the text, by an EOS or the request's end mark.
    Eos,
    /// `max_new_tokens` were generated, or the context is full.
    Length,
    /// A stop string came (see [`stream_text`](super::text::stream_text)).
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

/// The result of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The new tokens, without the EOS or end mark.
    pub new_ids: Vec<i64>,
    /// The new tokens' log-probabilities, if the request asks for them; else empty.
    pub scored: Vec<ScoredToken>,
    /// Tokens committed by each step.
    pub accept_lengths: Vec<usize>,
    /// Tokens of the prompt that were not computed, because an earlier text in the same batch began with them.
    pub cached: usize,
    /// Guesses that its steps verified, those of a step whose tokens were cut off among them; 0 without a drafter.
    pub proposed: usize,
    pub finish_reason: FinishReason,
    /// The EOS or the end mark that ended it; else empty.
    pub end: Vec<i64>,
    /// Steps that committed nothing but tokens of `end`; 0 where the end was an accepted guess.
    pub end_steps: usize,
    /// Time to the first token.
    pub prefill: Duration,
    /// Time from the first token on.
    pub decoding: Duration,
}

#[cfg(test)]
impl Generation {
    /// One of plain steps that ended at its limit.
    pub(crate) fn from_tokens(new_ids: Vec<i64>) -> Self {
        Self {
            accept_lengths: vec![1; new_ids.len()],
            new_ids,
            scored: vec![],
            cached: 0,
            proposed: 0,
            finish_reason: FinishReason::Length,
            end: vec![],
            end_steps: 0,
            prefill: Duration::ZERO,
            decoding: Duration::ZERO,
        }
    }
}

impl Generation {
    /// All that was generated, the EOS or end mark included.
    pub fn generated(&self) -> GeneratedTokens {
        let (tokens, steps) = (self.new_ids.len() + self.end.len(), self.accept_lengths.len() + self.end_steps);
        GeneratedTokens { tokens, steps }
    }

    /// The first `tokens` of the new tokens, and the steps that committed them.
    pub(super) fn generated_until(&self, tokens: usize) -> GeneratedTokens {
        let mut accept_lengths = self.accept_lengths.clone();
        keep_tokens(&mut accept_lengths, tokens);
        GeneratedTokens { tokens, steps: accept_lengths.len() }
    }

    /// Its counts and times.
    pub fn tally(&self) -> Tally {
        let (tokens, steps) = (self.new_ids.len(), self.accept_lengths.len());
        Tally { tokens, steps, decoding: self.decoding, prefill: self.prefill }
    }
}

/// Cuts the steps to the first `tokens` committed tokens.
pub(super) fn keep_tokens(accept_lengths: &mut Vec<usize>, tokens: usize) {
    let mut left = tokens;
    for length in &mut *accept_lengths {
        *length = left.min(*length);
        left -= *length;
    }
    accept_lengths.retain(|&length| length > 0);
}

/// New tokens of a text that is being decoded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmittedTokens<'t> {
    pub ids: &'t [i64],
    /// Their log-probabilities, if the request asks for them; else empty.
    pub scored: &'t [ScoredToken],
}

/// Receives new tokens as they are chosen; `Break` stops the generation.
pub type OnTokens<'a> = dyn FnMut(&[i64]) -> ControlFlow<()> + 'a;
