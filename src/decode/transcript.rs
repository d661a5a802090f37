//! The new tokens of one generation: where they end, and how they fell into steps. No tensors here.

use std::ops::ControlFlow;
use std::time::Instant;

use super::request::{FinishReason, Generation, OnTokens, Request};
use crate::model::llama::Llama;

/// The text so far, and when it ends.
pub(crate) struct Transcript<'a, 'f> {
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
    pub(crate) fn new(backbone: &'a Llama, request: &Request, on_tokens: &'a mut OnTokens<'f>) -> Self {
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

    /// New tokens so far.
    pub(crate) fn len(&self) -> usize {
        self.new_ids.len()
    }

    /// Whether the text ends with this token, whatever comes after it.
    pub(crate) fn ends_with(&mut self, root: i64) -> bool {
        self.first_token.get_or_insert_with(Instant::now);
        self.new_ids.len() + 1 >= self.limit || self.eos_token_ids.contains(&root)
    }

    /// Takes one step's tokens up to the limit and before the first EOS; breaks when the text is complete.
    pub(crate) fn commit(&mut self, tokens: &[i64]) -> ControlFlow<()> {
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

    pub(crate) fn finish(self) -> Generation {
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
