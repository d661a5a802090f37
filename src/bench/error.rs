//! Why decoding cannot be measured.

use std::num::{NonZeroUsize, TryFromIntError};

use crate::decode::error::DecodeError;
use crate::draft::error::DraftError;
use crate::session::SessionError;

/// Why decoding under load cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error(transparent)]
    Session(Box<SessionError>),
    #[error(transparent)]
    Draft(#[from] DraftError),
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Size(#[from] TryFromIntError),
    #[error("the prompts have no tokens")]
    NoTokens,
    #[error("out of memory: only {fit} fit; lower --concurrency or --max-new-tokens")]
    OutOfMemory { fit: NonZeroUsize },
    #[error("prompt {prompt}")]
    Text {
        /// 1-based.
        prompt: usize,
        source: DecodeError,
    },
}

impl From<SessionError> for BenchError {
    fn from(error: SessionError) -> Self {
        Self::Session(Box::new(error))
    }
}
