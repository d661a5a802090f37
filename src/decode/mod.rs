//! The decoding loops, which connect drafters ([`crate::draft`]), engines ([`crate::engine`]) and acceptance
//! ([`crate::tree::accept`]).
//!
//! One [`step`] proposes a tree of guesses for each text, verifies all nodes in one pass of the backbone, accepts a path, and commits
//! only that path to the cache. Acceptance decides node by node, never between whole candidates, and uses no tensors. Random numbers
//! are drawn in the order of the text: one per token, or several where the guesses were drawn at random, too.

use std::fmt;

pub mod arrivals;
pub mod batch;
pub mod batch_memory;
pub mod device;
pub mod error;
pub mod generate;
pub mod host_loop;
pub mod identity;
pub mod likelihood;
pub mod own_answers;
pub mod penalty;
pub mod request;
pub mod sequence;
pub mod stats;
pub mod step;
pub mod text;
pub mod texts;
pub mod transcript;
mod verify;

use self::error::DecodeError;
use self::request::{Generation, OnTokens, Request};
use self::step::Drafting;

/// Decodes one text after the other, such as the turns of a conversation.
pub trait DecodeLoop: fmt::Debug {
    /// Who computes, as `--engine` spells it.
    fn engine_name(&self) -> &'static str;

    /// Whether [`Request::logprobs`] is answered. Otherwise a request with it is refused.
    fn scores_tokens(&self) -> bool {
        true
    }

    /// Decodes a prompt; a prefix that is in the cache is not computed again.
    ///
    /// # Errors
    /// [`DecodeError`]: the prompt cannot be decoded, or decoding failed.
    fn decode(
        &mut self,
        drafting: Drafting,
        request: &Request,
        on_tokens: &mut OnTokens,
    ) -> Result<Generation, DecodeError>;

    /// Empties the cache.
    fn reset(&mut self);

    /// Lets the drafter forget what the texts so far have taught it.
    fn forget(&mut self) {}
}
