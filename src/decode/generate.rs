//! The two ways to decode one prompt: [`plain`], a token a step and the oracle, and [`medusa`], whose greedy text is the same.
//! Each call is a [`Session`] of its own; several requests on one text share a session.

pub use super::medusa::Medusa;
pub use super::request::{DecodeError, FinishReason, Generation, OnTokens, Request};
use super::session::Session;
use crate::model::llama::Llama;

/// [`Session::plain`] in a new session.
///
/// # Errors
/// [`DecodeError`] names what is wrong with the prompt.
pub fn plain(backbone: &Llama, request: &Request, on_tokens: &mut OnTokens) -> Result<Generation, DecodeError> {
    Session::new(backbone).plain(request, on_tokens)
}

/// [`Session::medusa`] in a new session.
///
/// # Errors
/// [`DecodeError`] names what is wrong with the prompt.
pub fn medusa(
    backbone: &Llama,
    medusa: &Medusa,
    request: &Request,
    on_tokens: &mut OnTokens,
) -> Result<Generation, DecodeError> {
    Session::new(backbone).medusa(medusa, request, on_tokens)
}

#[cfg(test)]
pub(super) mod tests;
