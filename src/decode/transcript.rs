//! The tokens of a text that is being decoded, the steps that committed them, and where the text ends.

use std::ops::ControlFlow;
use std::time::Instant;

use super::error::DecodeError;
use super::likelihood::ScoredToken;
use super::request::{EmittedTokens, FinishReason, Generation, Request, keep_tokens};
use crate::model::config::LlamaConfig;
use crate::model::llama::NO_TOKEN;

/// The tokens of a text, the steps that committed them, and where the text ends. A step's root belongs to the text as soon as it is chosen.
#[derive(Debug)]
pub struct Transcript {
    /// Prompt and new tokens; after each step the last one is the next step's root.
    ids: Vec<i64>,
    prompt: usize,
    /// Of the new tokens, if asked for.
    scored: Vec<ScoredToken>,
    /// New tokens that were passed to `on_tokens`.
    emitted: usize,
    accept_lengths: Vec<usize>,
    /// Tokens of the prompt that the prefix cache had.
    cached: usize,
    /// Guesses that were verified.
    proposed: usize,
    /// Most new tokens: `max_new_tokens`, or what fits the context.
    limit: usize,
    eos_token_ids: Vec<i64>,
    end_mark: Vec<i64>,
    finish_reason: Option<FinishReason>,
    /// No token could be chosen.
    is_stuck: bool,
    end: Vec<i64>,
    /// Steps that committed nothing but the end.
    end_steps: usize,
    started: Instant,
    first_token: Option<Instant>,
}

impl Transcript {
    pub(super) fn new(request: &Request, config: &LlamaConfig) -> Self {
        let context = usize::try_from(config.max_position_embeddings).unwrap_or(0);
        Self {
            ids: request.prompt.to_vec(),
            prompt: request.prompt.len(),
            scored: vec![],
            emitted: 0,
            accept_lengths: vec![],
            cached: 0,
            proposed: 0,
            limit: request.max_new_tokens.min(context.saturating_sub(request.prompt.len())),
            eos_token_ids: if request.ends_at_eos { config.eos_token_ids.clone() } else { vec![] },
            end_mark: request.end_mark.to_vec(),
            finish_reason: None,
            is_stuck: false,
            end: vec![],
            end_steps: 0,
            started: Instant::now(),
            first_token: None,
        }
    }

    /// When it was asked for.
    pub(super) fn started(&self) -> Instant {
        self.started
    }

    /// Prompt and new tokens so far.
    pub fn ids(&self) -> &[i64] {
        &self.ids
    }

    /// New tokens so far.
    pub fn new_ids(&self) -> &[i64] {
        &self.ids[self.prompt..]
    }

    /// Whether no more tokens follow: it is finished, or no token could be chosen.
    pub(super) fn has_ended(&self) -> bool {
        self.is_stuck || self.finish_reason.is_some()
    }

    /// Whether no token could be chosen.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// Passes new tokens to `on_tokens`; `Break` if the text has ended or `on_tokens` stops it.
    pub(super) fn emit(&mut self, on_tokens: &mut dyn FnMut(EmittedTokens) -> ControlFlow<()>) -> ControlFlow<()> {
        let scored = self.scored.get(self.emitted..).unwrap_or_default();
        let new = EmittedTokens { ids: &self.ids[self.prompt + self.emitted..], scored };
        self.emitted += new.ids.len();
        if !new.ids.is_empty() && on_tokens(new).is_break() {
            self.finish_reason.get_or_insert(FinishReason::Stopped);
        }
        if self.has_ended() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// The token after the prompt: the first step's root.
    pub(super) fn begin(&mut self, root: i64) {
        self.first_token = Some(Instant::now());
        self.root(root);
    }

    /// A step that verified `proposed` guesses: its accepted tokens below its root, and the token after them, the next step's root.
    pub(super) fn go_on(&mut self, below_root: &[i64], next: i64, proposed: usize) {
        self.proposed += proposed;
        for &token in below_root {
            if self.take(token) {
                *self.accept_lengths.last_mut().expect("a step has a root") += 1;
            }
        }
        self.root(next);
    }

    /// The prefix cache had so many tokens of the prompt, or of a text that had left its row.
    pub(super) fn came_with(&mut self, tokens: usize) {
        self.cached = tokens.min(self.prompt);
    }

    /// The log-probabilities of the tokens that were just added; those behind the text's end are dropped.
    pub(super) fn score(&mut self, scored: Vec<ScoredToken>) {
        self.scored.extend(scored);
        self.scored.truncate(self.new_ids().len());
    }

    /// Appends the root of a new step.
    fn root(&mut self, token: i64) {
        let had_ended = self.has_ended();
        if self.take(token) {
            self.accept_lengths.push(1);
        } else if !had_ended && !self.end.is_empty() {
            self.end_steps = 1;
        }
    }

    /// Appends a token, unless the text has ended or the token ends it.
    fn take(&mut self, token: i64) -> bool {
        self.is_stuck |= token == NO_TOKEN && self.finish_reason.is_none();
        if self.has_ended() {
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

    /// The generation; the end mark is not part of the text.
    ///
    /// # Errors
    /// [`DecodeError::NotFinite`] where no token could be chosen.
    pub(super) fn finish(self) -> Result<Generation, DecodeError> {
        if self.is_stuck {
            return Err(DecodeError::NotFinite { token: self.new_ids().len() + 1 });
        }
        let first_token = self.first_token.unwrap_or(self.started);
        let finish_reason = self.finish_reason.unwrap_or(FinishReason::Stopped);
        let (mut new_ids, mut end) = (self.ids[self.prompt..].to_vec(), self.end);
        if finish_reason == FinishReason::Eos && end.is_empty() {
            end = new_ids.split_off(new_ids.len() - self.end_mark.len());
        }
        let mut accept_lengths = self.accept_lengths;
        let steps = accept_lengths.len() + self.end_steps;
        keep_tokens(&mut accept_lengths, new_ids.len());
        let end_steps = steps - accept_lengths.len();
        let (prefill, decoding) = (first_token - self.started, first_token.elapsed());
        let (mut scored, cached, proposed) = (self.scored, self.cached, self.proposed);
        scored.truncate(new_ids.len());
        Ok(Generation {
            new_ids,
            scored,
            accept_lengths,
            cached,
            proposed,
            finish_reason,
            end,
            end_steps,
            prefill,
            decoding,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_commits_only_the_end_counts_as_one() {
        let config = LlamaConfig { eos_token_ids: vec![2], ..LlamaConfig::tiny() };
        let finished = |commit: fn(&mut Transcript)| {
            let mut text = Transcript::new(&Request::greedy(&[1], 8), &config);
            text.begin(5);
            commit(&mut text);
            let Generation { new_ids, accept_lengths, end, end_steps, .. } = text.finish().unwrap();
            (new_ids, accept_lengths, end, end_steps)
        };
        let alone = finished(|text| text.go_on(&[], 2, 0));
        assert_eq!(alone, (vec![5], vec![1], vec![2], 1), "the root of a step");
        let guessed = finished(|text| text.go_on(&[7, 2], 9, 3));
        assert_eq!(guessed, (vec![5, 7], vec![2], vec![2], 0), "a guess of the step before");
        let later = finished(|text| text.go_on(&[7], 2, 3));
        assert_eq!(later, (vec![5, 7], vec![2], vec![2], 1));
    }
}
