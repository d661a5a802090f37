//! Decodes one text after the other on an [`Engine`], such as the turns of a conversation. The prefix that a prompt shares with the
//! previous text is taken from the cache.

use tch::no_grad;

use super::DecodeLoop;
use super::error::{DecodeError, check_prompt};
use super::request::{Generation, OnTokens, Request};
use super::sequence::Sequence;
use super::step::{Drafting, Stepper};
use crate::draft::Drafter;
use crate::engine::Engine;
use crate::engine::prefix::cached_prefix;
use crate::torch::guard;
use crate::tree::accept::Acceptance;

/// A [`DecodeLoop`] on any [`Engine`]. A text does not depend on earlier requests, up to rounding: the cache only saves time.
#[derive(Debug)]
pub struct HostLoop<'a> {
    stepper: Stepper<'a>,
    /// The tokens that the cache's one row holds.
    cached: Vec<i64>,
}

impl<'a> HostLoop<'a> {
    /// A loop with an empty cache.
    pub fn new(engine: Box<dyn Engine + 'a>, drafter: Option<(Box<dyn Drafter + 'a>, Acceptance)>) -> Self {
        let mut stepper = Stepper::new(engine, drafter);
        let _ = stepper.push_row();
        Self { stepper, cached: vec![] }
    }

    /// The tokens in the cache: the last prompt, and those new tokens that were computed (the last one may not be).
    pub fn cached(&self) -> &[i64] {
        &self.cached
    }

    /// Truncates the cache to its first `tokens`.
    fn keep(&mut self, tokens: usize) {
        self.cached.truncate(tokens);
        self.stepper.truncate(0, self.cached.len());
    }
}

impl DecodeLoop for HostLoop<'_> {
    fn engine_name(&self) -> &'static str {
        self.stepper.engine().name()
    }

    fn reset(&mut self) {
        self.keep(0);
    }

    fn forget(&mut self) {
        self.stepper.forget();
    }

    fn decode(
        &mut self,
        drafting: Drafting,
        request: &Request,
        on_tokens: &mut OnTokens,
    ) -> Result<Generation, DecodeError> {
        let config = &self.stepper.engine().backbone().config;
        check_prompt(config, request.prompt)?;
        let mut sequence = Sequence::new(request, config);
        self.keep(cached_prefix(&self.cached, request.prompt));
        let decoded = guard("decoding", || {
            no_grad(|| {
                self.stepper.begin(&mut sequence, 0, drafting);
                while sequence.text.emit(&mut |new| on_tokens(new.ids)).is_continue() {
                    self.stepper.step(std::slice::from_mut(&mut sequence), drafting);
                }
            });
        });
        let ids = sequence.text.ids().to_vec();
        let done = decoded.map_err(DecodeError::from).and_then(|()| sequence.finish());
        if done.is_err() {
            self.reset(); // the cache may hold part of a step, or NaN
            return done;
        }
        self.cached = ids;
        self.keep(self.stepper.cache().len(0).unsigned_abs() as usize);
        done
    }
}

#[cfg(test)]
mod tests;
