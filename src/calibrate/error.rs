//! Errors of calibration.

use crate::data::cache::CacheError;
use crate::draft::error::BackboneMismatch;
use crate::torch::TorchPanic;

/// Why heads cannot be calibrated.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// Drafter and backbone do not fit.
    #[error(transparent)]
    Backbone(#[from] BackboneMismatch),
    /// More guesses than tokens, or none.
    #[error("top-k is {top_k}; expected 1 to {vocab_size}, the tokens that the heads can guess")]
    BadTopK { top_k: usize, vocab_size: usize },
    /// A row exceeds the backbone's context.
    #[error("row {row} has {length} tokens, but the backbone's context is {context}; cut the rows")]
    RowTooLong {
        /// 1-based.
        row: usize,
        length: usize,
        /// `max_position_embeddings`.
        context: i64,
    },
    /// A token id outside the vocabulary.
    #[error("row {row}: token id {id} at position {position}; expected 0 to {}", vocab_size - 1)]
    TokenOutOfRange {
        /// 1-based.
        row: usize,
        /// 0-based.
        position: usize,
        id: i32,
        vocab_size: i64,
    },
    /// The logits contain NaN or infinity, so their top guesses are meaningless.
    #[error(
        "row {row}: the logits of head {head} contain NaN or infinity; calibrate in another --dtype, or check \
         the weights of backbone and heads"
    )]
    NotFinite {
        /// 1-based.
        row: usize,
        /// 1-based.
        head: usize,
    },
    #[error(transparent)]
    Torch(#[from] TorchPanic),
    #[error(transparent)]
    Rows(#[from] CacheError),
}
