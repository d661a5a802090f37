//! The two loops that decode one text after the other: on libtorch, or the GPU's own. Both make the same texts.

use super::device::DeviceSession;
use super::generate::{DecodeError, Generation, Medusa, OnTokens, Request};
use super::session::Session;

/// Who decodes.
#[derive(Debug)]
pub enum Loop<'a> {
    /// On libtorch, on any device: the oracle.
    Torch(Session<'a>),
    /// On an NVIDIA GPU, with kernels of its own.
    Cuda(Box<DeviceSession<'a>>),
}

impl Loop<'_> {
    /// As `--engine` spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Torch(_) => "tch",
            Self::Cuda(_) => "cuda",
        }
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        match self {
            Self::Torch(session) => session.reset(),
            Self::Cuda(session) => session.reset(),
        }
    }

    /// A token a step, or with heads several. Of the GPU's loop they are the heads that it was made for.
    ///
    /// # Errors
    /// [`DecodeError`] names what is wrong with the prompt, or what the device said.
    pub fn decode(
        &mut self,
        medusa: Option<&Medusa>,
        request: &Request,
        on_tokens: &mut OnTokens,
    ) -> Result<Generation, DecodeError> {
        match (self, medusa) {
            (Self::Torch(session), None) => session.plain(request, on_tokens),
            (Self::Torch(session), Some(medusa)) => session.medusa(medusa, request, on_tokens),
            (Self::Cuda(session), None) => session.plain(request, on_tokens),
            (Self::Cuda(session), Some(_)) => session.medusa(request, on_tokens),
        }
    }
}
