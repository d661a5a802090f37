//! Text to labelled token rows. No tensors: what leaves this room is plain vectors.

pub mod tokenize;

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use crate::numbers::Fraction;

/// `[data]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files or globs, JSONL or Parquet.
    pub train: Vec<String>,
    /// Files or globs to evaluate on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validation: Vec<String>,
    /// Or: this part of the training rows, taken out before training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<Fraction>,
    /// Tokens a sequence.
    pub max_length: NonZeroUsize,
    /// Several rows share one sequence, without seeing each other.
    #[serde(default = "yes")]
    pub packing: bool,
    /// A new seeded order every epoch.
    #[serde(default = "yes")]
    pub shuffle: bool,
}

fn yes() -> bool {
    true
}

/// The label of a token that carries no loss, as PyTorch and transformers have it.
pub const IGNORE: i32 = -100;
