//! What makes heads unusable.

use std::path::PathBuf;

use crate::files::FileError;
use crate::formats::FormatError;
use crate::model::weights::WeightsError;

/// What makes heads unusable.
#[derive(Debug, thiserror::Error)]
pub enum HeadsError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{} holds no heads; expected heads.safetensors (such as a run's final/), medusa_lm_head.safetensors, medusa_lm_head.pt, or \
         model.safetensors with heads in it", folder.display()
    )]
    NoFile { folder: PathBuf },
    /// `config.json` beside the heads.
    #[error(transparent)]
    Config(#[from] FormatError),
    /// Heads that compute what this program does not.
    #[error("{}: {key} is {got}; expected {expected}", path.display())]
    Unsupported { path: PathBuf, key: String, got: String, expected: &'static str },
    /// vLLM's file of heads that share an lm_head, which is another backbone's.
    #[error("{}: tensor {name:?} is not the backbone's lm_head; were these heads trained for this backbone?", path.display())]
    OtherLmHead { path: PathBuf, name: String },
    /// vLLM's lm_head of all heads, of no shape that one has.
    #[error("{}: tensor {name:?}: expected [vocabulary, {hidden}], got {got:?}; the file is damaged: export the heads again", path.display())]
    LmHeadShape {
        path: PathBuf,
        name: String,
        /// H of the heads.
        hidden: i64,
        got: Vec<i64>,
    },
    /// A tensor whose name is not of the layout.
    #[error("{}: tensor {name:?} does not belong to Medusa heads; expected {{head}}.{{layer}}.linear.weight, .bias and {{head}}.{{layers}}.weight, or the names of FasterDecoding v1.0, vLLM or ModelOpt", path.display())]
    Layout { path: PathBuf, name: String },
    /// Heads of another shape than they are used for.
    #[error("{}: {what}: expected {expected}, got {got}; were these heads trained for this backbone?", path.display())]
    Mismatch {
        path: PathBuf,
        what: &'static str,
        /// What the backbone or recipe has.
        expected: i64,
        got: i64,
    },
}

/// Heads of another backbone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the heads have {what} {heads}, the backbone has {backbone}; use the backbone that the heads were trained on")]
pub struct HeadsMismatch {
    /// `hidden size` or `vocabulary`.
    pub what: &'static str,
    pub heads: i64,
    pub backbone: i64,
}
