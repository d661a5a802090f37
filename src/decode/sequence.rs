//! A text that is being decoded: its tokens, where it ends, and how its tokens are chosen. Knows no engine and no drafter.

// V vocabulary, H hidden size
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use tch::Tensor;

use super::penalty::Penalty;
use super::stats::Tally;
use crate::draft::Drafted;
use crate::engine::sample::{Chosen, Sampler, Sampling, Stream};
use crate::model::config::LlamaConfig;
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
    /// What a token that stands in prompt or text loses (see [`Penalty`]); 1 is nothing.
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

/// A text between two steps.
#[derive(Debug)]
pub struct Sequence {
    text: Text,
    /// Draws its tokens.
    pub(super) sampler: Sampler,
    /// Of tokens in prompt and text.
    pub(super) penalty: Penalty,
    /// The last token, which no engine has seen yet; `None` before the prompt is computed.
    root: Option<Chosen>,
    /// `[1, H]`: the hidden state that the root was chosen from, where a drafter may ask for it.
    hidden_1h: Option<Tensor>,
    /// Steps done.
    pub(super) steps: usize,
}

impl Sequence {
    /// Before its prompt is computed.
    pub(super) fn new(request: &Request, config: &LlamaConfig) -> Self {
        Self {
            text: Text::new(request, config),
            sampler: Sampler::new(request.sampling, request.stream),
            penalty: Penalty::new(request.repetition_penalty, request.prompt),
            root: None,
            hidden_1h: None,
            steps: 0,
        }
    }

    /// The tokens, and where they end.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// As [`Sequence::text`].
    pub fn text_mut(&mut self) -> &mut Text {
        &mut self.text
    }

    /// What came of it.
    pub(super) fn finish(self) -> Generation {
        self.text.finish()
    }

    /// The last token, which no engine has seen yet.
    pub(super) fn root(&self) -> &Chosen {
        self.root.as_ref().expect("the prompt is computed")
    }

    /// The root stands in the text that the next token is chosen after.
    pub(super) fn see_root(&mut self) {
        self.penalty.see(&[self.root().id]);
    }

    /// What a drafter guesses from.
    pub(super) fn drafted(&self) -> Drafted<'_> {
        let hidden_1h = self.hidden_1h.as_ref().expect("a drafted text keeps it");
        Drafted { ids: self.text.ids(), root: self.root(), hidden_1h }
    }

    /// The token after the prompt, chosen from `hidden_1h` `[1, H]`.
    pub(super) fn begin(&mut self, root: Chosen, hidden_1h: Tensor) {
        self.text.begin(root.id);
        (self.root, self.hidden_1h) = (Some(root), Some(hidden_1h));
    }

    /// A step's accepted tokens, root first, and the token after them.
    pub(super) fn go_on(&mut self, accepted: &[i64], next: Chosen, hidden_1h: Option<Tensor>) {
        self.penalty.see(accepted);
        self.steps += 1;
        self.text.go_on(&accepted[1..], next.id);
        (self.root, self.hidden_1h) = (Some(next), hidden_1h);
    }
}

/// The tokens of a text, how they fell into steps, and where they end. A step's root is a token of the text as soon as it is chosen.
#[derive(Debug)]
pub struct Text {
    /// Prompt and new tokens; after each step the last one is the next step's root.
    ids: Vec<i64>,
    prompt: usize,
    /// New tokens that the caller has been told of.
    told: usize,
    accept_lengths: Vec<usize>,
    /// New tokens that may be made: those asked for, as far as the context goes.
    limit: usize,
    eos_token_ids: Vec<i64>,
    end_mark: Vec<i64>,
    finish_reason: Option<FinishReason>,
    end: Vec<i64>,
    started: Instant,
    first_token: Option<Instant>,
}

impl Text {
    pub(super) fn new(request: &Request, config: &LlamaConfig) -> Self {
        let context = usize::try_from(config.max_position_embeddings).unwrap_or(0);
        Self {
            ids: request.prompt.to_vec(),
            prompt: request.prompt.len(),
            told: 0,
            accept_lengths: vec![],
            limit: request.max_new_tokens.min(context.saturating_sub(request.prompt.len())),
            eos_token_ids: if request.ends_at_eos { config.eos_token_ids.clone() } else { vec![] },
            end_mark: request.end_mark.to_vec(),
            finish_reason: None,
            end: vec![],
            started: Instant::now(),
            first_token: None,
        }
    }

    /// Prompt and new tokens so far.
    pub fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// New tokens so far.
    pub fn new_ids(&self) -> &[i64] {
        &self.ids[self.prompt..]
    }

    /// Why it ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish_reason
    }

    /// Tells the new tokens since the last call, and whether the text goes on: not where it has ended, or `on_tokens` stops it.
    pub(super) fn tell(&mut self, on_tokens: &mut OnTokens) -> ControlFlow<()> {
        let new = &self.ids[self.prompt + self.told..];
        self.told += new.len();
        if !new.is_empty() && on_tokens(new).is_break() {
            self.finish_reason.get_or_insert(FinishReason::Stopped);
        }
        if self.finish_reason.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// The token after the prompt: the first step's root.
    pub(super) fn begin(&mut self, root: i64) {
        self.first_token = Some(Instant::now());
        self.root(root);
    }

    /// A step's accepted tokens below its root, and the token after them: the next step's root.
    pub(super) fn go_on(&mut self, below_root: &[i64], next: i64) {
        for &token in below_root {
            if self.take(token) {
                *self.accept_lengths.last_mut().expect("a step has a root") += 1;
            }
        }
        self.root(next);
    }

    /// A step begins with this token.
    fn root(&mut self, token: i64) {
        if self.take(token) {
            self.accept_lengths.push(1);
        }
    }

    /// Takes a token unless the text has ended, or ends by it.
    fn take(&mut self, token: i64) -> bool {
        if self.finish_reason.is_some() {
            return false;
        }
        if self.new_ids().len() < self.limit && self.eos_token_ids.contains(&token) {
            self.finish_reason = Some(FinishReason::Eos);
            self.end = vec![token];
            return false;
        }
        let fits = self.new_ids().len() < self.limit;
        if fits {
            self.ids.push(token);
        }
        if !self.end_mark.is_empty() && self.new_ids().ends_with(&self.end_mark) {
            self.finish_reason = Some(FinishReason::Eos);
        } else if self.new_ids().len() == self.limit {
            self.finish_reason = Some(FinishReason::Length);
        }
        fits
    }

    /// What came of it. The end mark is no part of the text.
    pub(super) fn finish(self) -> Generation {
        let first_token = self.first_token.unwrap_or(self.started);
        let finish_reason = self.finish_reason.unwrap_or(FinishReason::Stopped);
        let (mut new_ids, mut end) = (self.ids[self.prompt..].to_vec(), self.end);
        if finish_reason == FinishReason::Eos && end.is_empty() {
            end = new_ids.split_off(new_ids.len() - self.end_mark.len());
        }
        let mut accept_lengths = self.accept_lengths;
        keep_tokens(&mut accept_lengths, new_ids.len());
        let (prefill, decoding) = (first_token - self.started, first_token.elapsed());
        Generation { new_ids, accept_lengths, finish_reason, end, prefill, decoding }
    }
}

/// Of the tokens that steps committed only the first `tokens` stay.
pub(super) fn keep_tokens(accept_lengths: &mut Vec<usize>, tokens: usize) {
    let mut left = tokens;
    for length in &mut *accept_lengths {
        *length = left.min(*length);
        left -= *length;
    }
    accept_lengths.retain(|&length| length > 0);
}

/// Hears the new tokens as they are chosen, and may stop the generation.
pub type OnTokens<'a> = dyn FnMut(&[i64]) -> ControlFlow<()> + 'a;
