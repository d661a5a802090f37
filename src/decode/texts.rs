//! Several texts, each under a key: decoded together, or one after the other by a loop that has no batches.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use super::DecodeLoop;
use super::error::DecodeError;
use super::request::{EmittedTokens, Generation, OwnedRequest, Request};
use super::step::Drafting;

/// A text's key, and what came of it: [`DecodeError::NotFinite`] where no token could be chosen, [`DecodeError::OutOfMemory`] where it does
/// not fit even alone.
pub type Ended = (usize, Result<Generation, DecodeError>);

/// Receives each text's new tokens after a step, with its key; `Break` ends the text.
pub type OnTokensOf<'a> = dyn FnMut(usize, EmittedTokens) -> ControlFlow<()> + 'a;

/// Decodes several texts, each under a key.
pub trait TextDecoder: fmt::Debug {
    /// Most texts that are decoded together.
    fn size(&self) -> NonZeroUsize;

    /// Whether another text can enter without waiting.
    fn has_room(&self) -> bool;

    /// Whether nothing is left to do.
    fn is_idle(&self) -> bool;

    /// Texts that are decoded now, and texts that wait.
    fn running_and_waiting(&self) -> (usize, usize);

    /// New tokens so far, unfinished texts included.
    fn tokens(&self) -> usize;

    /// Memory of the beginnings of texts.
    fn prefix_bytes(&self) -> usize {
        0
    }

    /// Adds a text; [`TextDecoder::step`] returns its result under `key`. Without room it waits.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt.
    fn enter(&mut self, key: usize, request: &Request) -> Result<(), DecodeError>;

    /// Takes a text out at once, with the tokens that it has; `None` if there is no such text, or it has not begun.
    fn cancel(&mut self, key: usize) -> Option<Result<Generation, DecodeError>>;

    /// Drops all texts. After an error, too, others can enter then.
    fn clear(&mut self);

    /// Runs a step, passes each text's new tokens to `on_tokens`, and returns the texts that ended, in the order of their keys.
    ///
    /// # Errors
    /// [`DecodeError::Torch`].
    fn step_with(&mut self, on_tokens: &mut OnTokensOf) -> Result<Vec<Ended>, DecodeError>;

    /// As [`TextDecoder::step_with`], without listening.
    ///
    /// # Errors
    /// [`DecodeError::Torch`].
    fn step(&mut self) -> Result<Vec<Ended>, DecodeError> {
        self.step_with(&mut |_, _| ControlFlow::Continue(()))
    }
}

/// Decodes one text after the other; a step is a whole text.
#[derive(Debug)]
pub struct SerialDecoder<'a> {
    decoding: Box<dyn DecodeLoop + 'a>,
    /// Empties the cache before each text.
    resets: bool,
    waiting: VecDeque<(usize, OwnedRequest)>,
    tokens: usize,
}

impl<'a> SerialDecoder<'a> {
    /// A text begins with what it has in common with the text before.
    pub fn new(decoding: Box<dyn DecodeLoop + 'a>) -> Self {
        Self { decoding, resets: false, waiting: VecDeque::new(), tokens: 0 }
    }

    /// As [`SerialDecoder::new`], with an empty cache before each text.
    #[must_use]
    pub fn with_resets(self) -> Self {
        Self { resets: true, ..self }
    }
}

impl TextDecoder for SerialDecoder<'_> {
    fn size(&self) -> NonZeroUsize {
        NonZeroUsize::MIN
    }

    fn has_room(&self) -> bool {
        self.waiting.is_empty()
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next step decodes the first text.
    fn running_and_waiting(&self) -> (usize, usize) {
        let running = self.waiting.len().min(1);
        (running, self.waiting.len() - running)
    }

    fn tokens(&self) -> usize {
        self.tokens
    }

    fn enter(&mut self, key: usize, request: &Request) -> Result<(), DecodeError> {
        self.waiting.push_back((key, OwnedRequest::new(request)));
        Ok(())
    }

    fn cancel(&mut self, key: usize) -> Option<Result<Generation, DecodeError>> {
        self.waiting.retain(|(other, _)| *other != key);
        None
    }

    fn clear(&mut self) {
        self.waiting.clear();
    }

    fn step_with(&mut self, on_tokens: &mut OnTokensOf) -> Result<Vec<Ended>, DecodeError> {
        let Some((key, request)) = self.waiting.pop_front() else { return Ok(vec![]) };
        if self.resets {
            self.decoding.reset();
        }
        let mut on_ids = |ids: &[i64]| on_tokens(key, EmittedTokens { ids, scored: &[] });
        let generation = self.decoding.decode(Drafting::On, &request.borrowed(), &mut on_ids);
        self.tokens += generation.as_ref().map_or(0, |generation| generation.new_ids.len());
        Ok(vec![(key, generation)])
    }
}
