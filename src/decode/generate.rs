//! Decodes one text: plain, which is the oracle, or with a drafter. Requests that continue each other share a [`HostLoop`] instead.

use super::DecodeLoop;
use super::error::DecodeError;
use super::host_loop::HostLoop;
use super::request::{Generation, OnTokens, Request};
use super::step::Drafting;
use crate::draft::Drafter;
use crate::engine::fastest::fastest;
use crate::model::llama::Llama;
use crate::tree::accept::Acceptance;

/// Plain decoding: one token per step.
///
/// # Errors
/// [`DecodeError`] names what is wrong with the prompt.
pub fn plain(backbone: &Llama, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
    HostLoop::new(fastest(backbone), None).decode(Drafting::Off, request, on_tokens)
}

/// Decodes with guesses. At temperature 0 the text is [`plain`]'s, whatever is guessed; only where two tokens are equally probable up
/// to rounding (rare in float32, less so in 16 bits) may they differ, since a product's last bits depend on its number of rows.
///
/// # Errors
/// [`DecodeError`] names what is wrong with the prompt.
pub fn drafted<'a>(
    backbone: &'a Llama,
    drafter: impl Drafter + 'a,
    acceptance: Acceptance,
    request: &Request,
    on_tokens: &mut OnTokens,
) -> Result<Generation, DecodeError> {
    let drafter: Box<dyn Drafter + 'a> = Box::new(drafter);
    HostLoop::new(fastest(backbone), Some((drafter, acceptance))).decode(Drafting::On, request, on_tokens)
}

#[cfg(test)]
pub(super) mod tests;
