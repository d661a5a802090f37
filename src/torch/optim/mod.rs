//! Optimizers on tensors, with accessible, savable state.

use std::fmt;

use serde::{Deserialize, Serialize};

pub mod adamw;
pub mod blockwise;

/// The constants of AdamW's update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Determines the dtype of the moments.
    pub name: OptimizerName,
    /// Exponential decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay, of matrices only.
    pub weight_decay: f64,
}

/// The optimizers a recipe can name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// AdamW with float32 moments.
    #[default]
    AdamW,
    /// AdamW with 8-bit moments.
    AdamW8bit,
}

impl fmt::Display for OptimizerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AdamW => "adamw",
            Self::AdamW8bit => "adamw8bit",
        })
    }
}
