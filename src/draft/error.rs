//! Errors of drafters with trained weights.

use std::path::PathBuf;

use crate::files::FileError;
use crate::formats::FormatError;
use crate::model::weights::WeightsError;
use crate::tree::sparse_tree::TreeError;

/// A trained drafter cannot be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum DrafterError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "{} holds no heads; expected heads.safetensors (such as a run's final/), medusa_lm_head.safetensors, medusa_lm_head.pt, \
         hydra_lm_head.pt, or model.safetensors with heads in it", folder.display()
    )]
    NoFile { folder: PathBuf },
    /// `config.json` beside the heads.
    #[error(transparent)]
    Config(#[from] FormatError),
    /// Heads with a feature that is not supported.
    #[error("{}: {key} is {got}; expected {expected}", path.display())]
    Unsupported { path: PathBuf, key: String, got: String, expected: &'static str },
    /// The lm_head in a vLLM file is not the backbone's.
    #[error("{}: tensor {name:?} is not the backbone's lm_head; were these heads trained for this backbone?", path.display())]
    OtherLmHead { path: PathBuf, name: String },
    /// The lm_head in a vLLM file does not have the shape `[V, H]`.
    #[error("{}: tensor {name:?}: expected [vocabulary, {hidden}], got {got:?}; the file is damaged: export the heads again", path.display())]
    LmHeadShape {
        path: PathBuf,
        name: String,
        /// H of the heads.
        hidden: i64,
        got: Vec<i64>,
    },
    /// A token map that no heads can have.
    #[error("{}: token_map {what}; expected distinct token ids of the backbone, one for each row of the output layers", path.display())]
    TokenMap { path: PathBuf, what: String },
    /// A tensor name outside of the layout.
    #[error("{}: tensor {name:?} does not belong to Medusa or Hydra heads; expected {{head}}.{{layer}}.linear.weight, .bias and {{head}}.{{layers}}.weight, or the names of FasterDecoding v1.0, vLLM, ModelOpt or zankner/Hydra", path.display())]
    Layout { path: PathBuf, name: String },
    /// A tensor that an EAGLE-3 drafter of one layer does not have.
    #[error("{}: tensor {name:?} does not belong to an EAGLE-3 drafter of one Llama layer without biases", path.display())]
    EagleTensor { path: PathBuf, name: String },
    /// A shared W2 beside one that belongs to a head.
    #[error("{}: tensor {own:?} is the projection of one head, but the file also has {shared:?}, which all heads share; remove one of them", path.display())]
    OwnW2 {
        path: PathBuf,
        /// The name of the shared one.
        shared: String,
        /// The name of the head's.
        own: String,
    },
    /// A tensor that the backbone's kind of decoder layer does not have.
    #[error("{}: the prefix layer of the backbone's kind has no tensor {name:?}; were these heads trained for this backbone?", path.display())]
    PrefixTensor { path: PathBuf, name: String },
    /// The heads' shape does not fit the backbone or recipe.
    #[error("{}: {what}: expected {expected}, got {got}; were these heads trained for this backbone?", path.display())]
    Mismatch {
        path: PathBuf,
        what: &'static str,
        /// The backbone's or recipe's size.
        expected: i64,
        got: i64,
    },
    /// The drafter that training starts from differs in shape from the recipe's.
    #[error("{}: expected {expected}, as in the recipe, got {got}", path.display())]
    OtherShape { path: PathBuf, expected: String, got: String },
}

/// A drafter or a tree that does not fit the backbone.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// A drafter of another backbone.
    #[error(transparent)]
    Backbone(#[from] BackboneMismatch),
    /// A tree that needs more levels or guesses than there are.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// A drafter's sizes differ from the backbone's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the heads have {what} {drafter}, the backbone has {backbone}; use the backbone that the heads were trained on"
)]
pub struct BackboneMismatch {
    /// `hidden size` or `vocabulary`.
    pub what: &'static str,
    pub drafter: i64,
    pub backbone: i64,
}
