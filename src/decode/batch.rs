//! Decodes several texts at a time (continuous batching): a text leaves the batch when it ends, and another one enters. Without a
//! drafter, a step of [`TchEngine::for_batches`](crate::engine::tch::TchEngine::for_batches) reads the weights once for all texts;
//! trees and the CPU's kernels run one text after the other.
//!
//! At temperature 0 each text equals the one that [`HostLoop`](super::host_loop::HostLoop) decodes, up to rounding between equally
//! probable tokens. Sampled texts do not depend on the rest of the batch.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use tch::no_grad;

use super::error::{DecodeError, check_prompt};
use super::request::{Generation, Request};
use super::sequence::Sequence;
use super::step::{Drafting, Stepper};
use crate::draft::Drafter;
use crate::engine::sample::Sampler;
use crate::engine::{Engine, PromptPass};
use crate::torch::{TorchPanic, guard};
use crate::tree::accept::Acceptance;

/// From so many tokens on, a pass on a GPU is bound by arithmetic: with fewer it takes about as long, to read the weights.
const TOKENS_WORTH_A_PASS: usize = 512;
/// One of so many texts of a batch may wait for others, so that their prompts share a pass.
const SHARE_THAT_WAITS: usize = 8;

/// A text's key, and what came of it: [`DecodeError::NotFinite`] where no token could be chosen.
pub type Ended = (usize, Result<Generation, DecodeError>);

/// A batch of texts.
#[derive(Debug)]
pub struct SequenceBatch<'a> {
    stepper: Stepper<'a>,
    size: NonZeroUsize,
    /// Tokens of a row that the cache is allocated for at once; otherwise it grows with its texts.
    room: Option<NonZeroUsize>,
    /// In the order of the cache's rows.
    sequences: Vec<Sequence>,
    /// The sequences' keys, in the same order.
    keys: Vec<usize>,
    /// Texts that are not in the cache: new ones, and those that left it when memory ran out.
    waiting: VecDeque<(usize, Sequence)>,
    /// Texts that ended with their first token; the next step returns them.
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
            room: None,
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

    /// Most texts that are decoded together. Smaller than at the start where memory ran out.
    pub fn size(&self) -> NonZeroUsize {
        self.size
    }

    /// Whether another text can enter.
    pub fn has_room(&self) -> bool {
        self.sequences.len() + self.waiting.len() + self.ended.len() < self.size.get()
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.waiting.is_empty() && self.ended.is_empty()
    }

    /// New tokens so far, unfinished texts included.
    pub fn tokens(&self) -> usize {
        let open = self.sequences.iter().chain(self.waiting.iter().map(|(_, sequence)| sequence));
        self.left + open.map(|sequence| sequence.text.new_ids().len()).sum::<usize>()
    }

    /// Adds a text to the batch; [`SequenceBatch::step`] runs its prompt, and returns its result under `key`.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt.
    pub fn enter(&mut self, key: usize, request: &Request) -> Result<(), DecodeError> {
        let config = &self.stepper.engine().backbone().config;
        check_prompt(config, request.prompt)?;
        self.waiting.push_back((key, Sequence::new(request, config)));
        Ok(())
    }

    /// Runs the prompts of new texts. Then it returns the texts that ended with their first token; if there are none, it runs one step for every
    /// text and returns the texts that ended, in the order of their keys. They leave the batch.
    ///
    /// Where memory runs out, it halves the size of the batch instead, and the next steps go on with all texts; without a drafter only.
    ///
    /// # Errors
    /// [`DecodeError::Torch`].
    pub fn step(&mut self) -> Result<Vec<Ended>, DecodeError> {
        match self.begin_waiting().and_then(|()| self.step_all()) {
            Err(panic) if panic.out_of_memory && !self.stepper.drafts() && self.halve() => Ok(vec![]),
            done => {
                let mut ended = done?;
                ended.sort_by_key(|(key, _)| *key);
                Ok(ended)
            }
        }
    }

    /// Runs what the cache lacks of waiting texts, as many as it has rows for.
    fn begin_waiting(&mut self) -> Result<(), TorchPanic> {
        if self.more_will_wait() {
            return Ok(());
        }
        while !self.waiting.is_empty() && self.sequences.len() < self.size.get() {
            let first = self.sequences.len();
            let count = self.waiting.len().min(self.size.get() - first);
            let (keys, sequences): (Vec<_>, Vec<_>) = self.waiting.drain(..count).unzip();
            self.keys.extend(keys);
            self.sequences.extend(sequences);
            if let Err(panic) = self.begin(first) {
                self.stepper.truncate_rows(first);
                let back = self.keys.drain(first..).zip(self.sequences.drain(first..));
                back.rev().for_each(|text| self.waiting.push_front(text));
                return Err(panic);
            }
            // Last row first: see below.
            for row in (first..self.sequences.len()).rev() {
                if self.sequences[row].text.has_ended() {
                    let ended = self.leave(row);
                    self.ended.push(ended);
                }
            }
        }
        Ok(())
    }

    /// Whether so few tokens wait that a pass over them would take as long as one over more, and others will join them: a batch without room
    /// has a caller with more texts. Meanwhile at most one row of [`SHARE_THAT_WAITS`] is empty.
    fn more_will_wait(&self) -> bool {
        let is_several = matches!(self.stepper.engine().prompt_pass(), PromptPass::OfSeveral { .. });
        let few = self.waiting.len() * SHARE_THAT_WAITS < self.size.get();
        let tokens: usize = self.waiting.iter().map(|(_, sequence)| sequence.computed().len()).sum();
        is_several && few && tokens < TOKENS_WORTH_A_PASS && !self.sequences.is_empty() && !self.has_room()
    }

    /// Runs the sequences from `first` on, which have no rows yet.
    fn begin(&mut self, first: usize) -> Result<(), TorchPanic> {
        let (sequences, size, stepper) = (&mut self.sequences[first..], self.size.get(), &mut self.stepper);
        let samplers: Vec<Sampler> = sequences.iter().map(|sequence| sequence.sampler.clone()).collect();
        let begun = guard("the pass over prompts", || {
            if let Some(tokens) = self.room {
                stepper.reserve(size, tokens.get());
            }
            sequences.iter().for_each(|_| stepper.push_row());
            no_grad(|| stepper.begin_all(sequences, first));
        });
        if begun.is_err() {
            // What was drawn for a token that was not chosen is drawn again.
            let lost = sequences.iter_mut().zip(samplers).filter(|(sequence, _)| !sequence.has_begun());
            lost.for_each(|(sequence, sampler)| sequence.sampler = sampler);
        }
        begun
    }

    fn step_all(&mut self) -> Result<Vec<Ended>, TorchPanic> {
        let mut ended = std::mem::take(&mut self.ended);
        if self.sequences.is_empty() || !ended.is_empty() {
            return Ok(ended); // a step that fails would lose them
        }
        let samplers: Vec<Sampler> = self.sequences.iter().map(|sequence| sequence.sampler.clone()).collect();
        let done = guard("decoding a batch", || no_grad(|| self.stepper.step(&mut self.sequences, Drafting::On)));
        if let Err(panic) = done {
            self.sequences.iter_mut().zip(samplers).for_each(|(sequence, sampler)| sequence.sampler = sampler);
            return Err(panic);
        }
        // Last row first: `swap_remove` then only moves rows that were already checked.
        for row in (0..self.sequences.len()).rev() {
            if self.sequences[row].text.has_ended() {
                ended.push(self.leave(row));
            }
        }
        Ok(ended)
    }

    /// Empties the cache, and halves the number of texts that share it; all texts wait to enter it again. Returns whether that was possible.
    fn halve(&mut self) -> bool {
        let tried = (self.sequences.len() + self.waiting.len()).min(self.size.get());
        let Some(size) = NonZeroUsize::new(tried / 2) else { return false };
        self.size = size;
        self.stepper.drop_rows();
        let back = self.keys.drain(..).zip(self.sequences.drain(..));
        back.rev().for_each(|text| self.waiting.push_front(text));
        true
    }

    fn leave(&mut self, row: usize) -> Ended {
        self.stepper.swap_remove(row);
        let generation = self.sequences.swap_remove(row).finish();
        self.left += generation.as_ref().map_or(0, |text| text.new_ids.len() + text.end.len());
        (self.keys.swap_remove(row), generation)
    }
}

#[cfg(test)]
mod tests;
