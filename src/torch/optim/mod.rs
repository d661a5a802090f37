//! Optimizers on tensors, with accessible, savable state.

use std::fmt;

use serde::{Deserialize, Serialize};

pub mod adamw;
pub mod blockwise;
pub mod flat_gradients;

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

/// What the processes of a run share of the optimizer, in the words of ZeRO (Rajbhandari et al. 2020). A recipe has its number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u8", try_from = "u8")]
pub enum ZeroStage {
    /// Nothing: each has all moments.
    #[default]
    Zero,
    /// The moments: each has a share of them, and updates that share of the parameters.
    One,
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> Self {
        match stage {
            ZeroStage::Zero => 0,
            ZeroStage::One => 1,
        }
    }
}

impl TryFrom<u8> for ZeroStage {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        match number {
            0 => Ok(Self::Zero),
            1 => Ok(Self::One),
            other => Err(format!("expected 0 or 1, got {other}")),
        }
    }
}

impl fmt::Display for OptimizerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AdamW => "adamw",
            Self::AdamW8bit => "adamw8bit",
        })
    }
}
