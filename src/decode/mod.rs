//! The decoding loops: who guesses ([`crate::draft`]), who computes ([`crate::engine`]) and who decides ([`crate::tree::accept`]) meet here.
//!
//! One [`step`] proposes a tree of guesses for each text, runs the backbone over all of it in one pass, decides which path is kept, and
//! leaves just that path in the cache. Decisions belong to tree nodes, never to whole candidates, and are made without tensors. What
//! is drawn at random is drawn once a token, in the order of the text.

use std::fmt;

pub mod batch;
pub mod device;
pub mod error;
pub mod generate;
pub mod host_loop;
pub mod likelihood;
pub mod penalty;
pub mod request;
pub mod sequence;
pub mod stats;
pub mod step;
pub mod text;
pub mod transcript;
mod verify;

use self::error::DecodeError;
use self::request::{Generation, OnTokens, Request};
use self::step::Drafting;

/// Decodes one text after the other, such as the turns of a conversation.
pub trait DecodeLoop: fmt::Debug {
    /// Who computes, as `--engine` spells it.
    fn engine_name(&self) -> &'static str;

    /// Decodes; what of the prompt the cache holds is not computed again.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt, or what the device said.
    fn decode(
        &mut self,
        drafting: Drafting,
        request: &Request,
        on_tokens: &mut OnTokens,
    ) -> Result<Generation, DecodeError>;

    /// Empties the cache.
    fn reset(&mut self);
}
