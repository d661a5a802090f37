//! Decodes several texts at a time (continuous batching): a text leaves the batch when it ends, and another one enters. Each step reads the
//! weights once for all texts, each of which has its own tree, or a single token without a drafter. Prompts are computed in pieces between
//! the steps.
//!
//! At temperature 0, and with lossless acceptance at any, each text equals the one that [`HostLoop`](super::host_loop::HostLoop) decodes: on
//! the CPU's kernels exactly, with libtorch up to rounding between equally probable tokens. Sampled texts do not depend on the rest of
//! the batch. Temperatures, penalties and rules of acceptance may differ between the texts.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use tch::no_grad;

use super::error::{DecodeError, check_prompt};
use super::request::{Generation, Request};
use super::sequence::Sequence;
use super::step::{Drafting, Stepper};
use super::texts::{Ended, OnTokensOf, TextDecoder};
use crate::draft::Drafter;
use crate::engine::sample::Sampler;
use crate::engine::{Engine, PromptPass};
use crate::torch::{TorchPanic, guard};
use crate::tree::accept::Acceptance;

/// From so many tokens on, a pass on a GPU is bound by arithmetic (computed, not measured): with fewer it takes about as long, to read the
/// weights.
const TOKENS_WORTH_A_PASS: usize = 512;
/// One of so many texts of a batch may wait for others, so that their prompts share a pass.
const SHARE_THAT_WAITS: usize = 8;

/// A batch of texts.
#[derive(Debug)]
pub struct SequenceBatch<'a> {
    stepper: Stepper<'a>,
    size: NonZeroUsize,
    /// The size at the start.
    most: NonZeroUsize,
    /// Tokens of a row that the cache is allocated for at once; otherwise it grows with its texts.
    room: Option<NonZeroUsize>,
    /// Tokens of prompts that are computed between two steps.
    prompt_tokens: NonZeroUsize,
    /// In the order of the cache's rows.
    sequences: Vec<Sequence>,
    /// The sequences' keys, in the same order.
    keys: Vec<usize>,
    /// Texts that are not in the cache: new ones, and those that left it when memory ran out.
    waiting: VecDeque<(usize, Sequence)>,
    /// Texts that ended; the next step that succeeds returns them.
    ended: Vec<Ended>,
    /// New tokens of texts that have left.
    left: usize,
}

impl<'a> SequenceBatch<'a> {
    /// A batch of at most `size` texts.
    pub fn new(
        engine: Box<dyn Engine + 'a>,
        drafter: Option<(Box<dyn Drafter + 'a>, Acceptance)>,
        size: NonZeroUsize,
    ) -> Self {
        Self {
            stepper: Stepper::new(engine, drafter),
            size,
            most: size,
            room: None,
            prompt_tokens: NonZeroUsize::MAX,
            sequences: vec![],
            keys: vec![],
            waiting: VecDeque::new(),
            ended: vec![],
            left: 0,
        }
    }

    /// The same batch with a cache that is allocated whole, for `tokens` tokens of each text, before the first step. A cache that grows
    /// takes the memory of two while it is copied.
    #[must_use]
    pub fn with_room(self, tokens: NonZeroUsize) -> Self {
        Self { room: Some(tokens), ..self }
    }

    /// The same batch that computes at most about so many tokens of prompts between two steps: no text waits longer for the prompts of others.
    /// Without this, all prompts are computed before the next step.
    #[must_use]
    pub fn with_prompt_tokens(self, prompt_tokens: NonZeroUsize) -> Self {
        Self { prompt_tokens, ..self }
    }

    /// The same batch with a memory of the beginnings of its texts, of at most so many bytes: what a prompt has in common with an earlier prompt or text
    /// is not computed again. The least recently used beginnings go first. Without effect with a drafter that follows the rows.
    #[must_use]
    pub fn with_prefix_cache(mut self, most_bytes: usize) -> Self {
        self.stepper.keep_prefixes(most_bytes);
        self
    }

    /// Who computes, as `--engine` spells it.
    pub fn engine_name(&self) -> &'static str {
        self.stepper.engine().name()
    }

    /// Tokens of prompts that were not computed, because earlier texts began with them.
    pub fn reused_tokens(&self) -> usize {
        self.stepper.reused()
    }
}

impl TextDecoder for SequenceBatch<'_> {
    /// Smaller than at the start where memory ran out, until a text has ended because of that.
    fn size(&self) -> NonZeroUsize {
        self.size
    }

    fn has_room(&self) -> bool {
        self.sequences.len() + self.waiting.len() + self.ended.len() < self.size.get()
    }

    fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.waiting.is_empty() && self.ended.is_empty()
    }

    /// Texts in the cache, and texts that wait for a place in it.
    fn running_and_waiting(&self) -> (usize, usize) {
        (self.sequences.len(), self.waiting.len())
    }

    fn prefix_bytes(&self) -> usize {
        self.stepper.prefix_bytes()
    }

    fn tokens(&self) -> usize {
        let open = self.sequences.iter().chain(self.waiting.iter().map(|(_, sequence)| sequence));
        self.left + open.map(|sequence| sequence.text.new_ids().len()).sum::<usize>()
    }

    /// A step runs its prompt.
    fn enter(&mut self, key: usize, request: &Request) -> Result<(), DecodeError> {
        let config = &self.stepper.engine().backbone().config;
        check_prompt(config, request.prompt)?;
        self.waiting.push_back((key, Sequence::new(request, config)));
        Ok(())
    }

    fn cancel(&mut self, key: usize) -> Option<Result<Generation, DecodeError>> {
        if let Some(row) = self.keys.iter().position(|&other| other == key) {
            return Some(self.leave(row).1);
        }
        if let Some(at) = self.waiting.iter().position(|(other, _)| *other == key) {
            let (_, sequence) = self.waiting.remove(at)?;
            return Some(self.finish(sequence));
        }
        let at = self.ended.iter().position(|(other, _)| *other == key)?;
        Some(self.ended.remove(at).1)
    }

    /// Drops all texts, and the beginnings that are kept. After an error, too, others can enter then.
    fn clear(&mut self) {
        self.empty();
        self.waiting.clear();
        self.ended.clear();
    }

    /// Computes prompts, then runs one step for every text whose prompt is computed. Emits each text's new tokens, and returns the texts
    /// that ended, in the order of their keys. They leave the batch.
    ///
    /// Where memory runs out, the next steps go on with all texts after the cache is emptied and the beginnings of earlier texts are dropped. If
    /// that was not enough, or there were none, the size of the batch is halved. A text that does not fit alone ends with
    /// [`DecodeError::OutOfMemory`], and the batch has its first size again.
    ///
    /// # Errors
    /// [`DecodeError::Torch`], for other reasons than memory. No text is lost: another step tries again.
    fn step_with(&mut self, on_tokens: &mut OnTokensOf) -> Result<Vec<Ended>, DecodeError> {
        let stepped = self.advance();
        let tried = (self.sequences.len() + self.waiting.len()).min(self.size.get());
        let first = self.keys.first().copied().or_else(|| self.waiting.front().map(|(key, _)| *key));
        self.emit(on_tokens);
        if let Err(panic) = stepped {
            self.recover(panic, tried, first)?;
        }
        let mut ended = std::mem::take(&mut self.ended);
        ended.sort_by_key(|(key, _)| *key);
        Ok(ended)
    }
}

impl<'a> SequenceBatch<'a> {
    /// After a step of `tried` texts that failed, the first of them under the key `first`. The cache may hold part of the step.
    fn recover(&mut self, panic: TorchPanic, tried: usize, first: Option<usize>) -> Result<(), DecodeError> {
        // What is held besides the texts' tokens: earlier texts, or rows of texts that have left.
        let held_more = self.stepper.prefix_bytes() > 0 || (tried == 1 && !self.stepper.is_bare());
        self.empty();
        match NonZeroUsize::new(tried / 2) {
            _ if !panic.out_of_memory => return Err(panic.into()),
            _ if held_more => {}
            Some(half) => self.size = half,
            None => self.end_first(first, panic),
        }
        Ok(())
    }

    /// Ends a text that does not fit alone, unless it has left meanwhile. The others may be as many as at the start again.
    fn end_first(&mut self, first: Option<usize>, source: TorchPanic) {
        self.size = self.most;
        let at = self.waiting.iter().position(|(key, _)| Some(*key) == first);
        if let Some((key, sequence)) = at.and_then(|at| self.waiting.remove(at)) {
            self.left += sequence.text.new_ids().len();
            let tokens = sequence.text.ids().len();
            self.ended.push((key, Err(DecodeError::OutOfMemory { tokens, source })));
        }
    }

    /// Emits new tokens; texts that have ended leave.
    fn emit(&mut self, on_tokens: &mut OnTokensOf) {
        // Last row first: `swap_remove` then only moves rows that were already emitted.
        for row in (0..self.sequences.len()).rev() {
            let key = self.keys[row];
            if self.sequences[row].text.emit(&mut |new| on_tokens(key, new)).is_break() {
                let ended = self.leave(row);
                self.ended.push(ended);
            }
        }
    }

    fn advance(&mut self) -> Result<(), TorchPanic> {
        self.admit()?;
        let prompt_tokens = self.prompt_tokens.get();
        self.run("the pass over prompts", |stepper, sequences| stepper.run_prompts(sequences, prompt_tokens))?;
        self.run("decoding a batch", |stepper, sequences| stepper.step(sequences, Drafting::On))
    }

    /// What was drawn for a token that was not chosen is drawn again after an error.
    fn run(&mut self, what: &str, run: impl FnOnce(&mut Stepper<'a>, &mut [Sequence])) -> Result<(), TorchPanic> {
        let state = |sequence: &Sequence| (sequence.has_begun(), sequence.steps);
        let before: Vec<((bool, usize), Sampler)> =
            self.sequences.iter().map(|sequence| (state(sequence), sequence.sampler.clone())).collect();
        let done = guard(what, || no_grad(|| run(&mut self.stepper, &mut self.sequences)));
        if done.is_err() {
            let all = self.sequences.iter_mut().zip(before);
            let unchanged = all.filter(|(sequence, (before, _))| state(sequence) == *before);
            unchanged.for_each(|(sequence, (_, sampler))| sequence.sampler = sampler);
        }
        done
    }

    /// Gives rows of the cache to waiting texts.
    fn admit(&mut self) -> Result<(), TorchPanic> {
        if self.waits_for_more() {
            return Ok(());
        }
        if let Some(tokens) = self.room.filter(|_| !self.waiting.is_empty()) {
            let (most, texts) = (self.size.get(), self.sequences.len() + self.waiting.len());
            let rows = if self.stepper.is_bare() { texts.min(most) } else { most };
            guard("allocating the cache", || self.stepper.reserve(rows, tokens.get()))?;
        }
        while self.sequences.len() < self.size.get()
            && let Some((key, sequence)) = self.waiting.pop_front()
        {
            if let Err(panic) = guard("allocating the cache", || self.stepper.enter(&sequence)) {
                self.waiting.push_front((key, sequence));
                return Err(panic);
            }
            self.keys.push(key);
            self.sequences.push(sequence);
        }
        Ok(())
    }

    /// Whether waiting texts stay out of the cache for now. Where prompts run together, a pass over few tokens takes as long as one over more. So few
    /// texts with short prompts wait for others, as long as a batch without room shows that its caller has more. Meanwhile at most one row of
    /// [`SHARE_THAT_WAITS`] is empty.
    fn waits_for_more(&self) -> bool {
        let is_several = matches!(self.stepper.engine().prompt_pass(), PromptPass::OfSeveral { .. });
        let few = self.waiting.len() * SHARE_THAT_WAITS < self.size.get();
        let tokens: usize = self.waiting.iter().map(|(_, sequence)| sequence.computed().len()).sum();
        is_several && few && tokens < TOKENS_WORTH_A_PASS && !self.sequences.is_empty() && !self.has_room()
    }

    /// Empties the cache and drops the beginnings of earlier texts; all texts wait to enter again.
    fn empty(&mut self) {
        self.stepper.drop_rows();
        let back = self.keys.drain(..).zip(self.sequences.drain(..));
        back.rev().for_each(|text| self.waiting.push_front(text));
    }

    fn leave(&mut self, row: usize) -> Ended {
        if self.sequences[row].has_begun() && !self.sequences[row].text.is_stuck() {
            self.stepper.keep_prefix(row, self.sequences[row].text.ids());
        }
        self.stepper.swap_remove(row);
        let sequence = self.sequences.swap_remove(row);
        (self.keys.swap_remove(row), self.finish(sequence))
    }

    fn finish(&mut self, sequence: Sequence) -> Result<Generation, DecodeError> {
        let generation = sequence.finish();
        self.left += generation.as_ref().map_or(0, |text| text.new_ids.len() + text.end.len());
        generation
    }
}

#[cfg(test)]
mod tests;
