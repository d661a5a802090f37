//! Optimizers on tensors, with visible, savable state.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::numbers::{Fraction, NonNegative, Positive};

pub mod adamw;
pub mod blockwise;

/// `[optimizer]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Which optimizer.
    #[serde(default)]
    pub name: OptimizerName,
    /// Peak learning rate: the backbone's in Medusa-2, the heads' in Medusa-1.
    pub learning_rate: Positive,
    /// Medusa-2: the heads' learning rate is `learning_rate` times this, biases too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub medusa_lr_multiplier: Option<Positive>,
    /// Exponential decay rates of the two moments.
    #[serde(default = "default_betas")]
    pub betas: [Fraction; 2],
    /// Added to the denominator.
    #[serde(default = "default_eps")]
    pub eps: Positive,
    /// Decoupled weight decay.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: NonNegative,
    /// Gradient norm over all trainable parameters is clipped to this.
    #[serde(default = "default_max_grad_norm")]
    pub max_grad_norm: Positive,
}

/// The optimizers this version has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// AdamW with float32 moments.
    #[default]
    AdamW,
    /// AdamW with moments of 8 bits.
    AdamW8bit,
}

impl OptimizerName {
    /// Bytes of both moments of a tensor of so many numbers.
    pub fn moment_bytes(self, numbers: u64) -> u64 {
        match self {
            Self::AdamW8bit if numbers >= adamw::WORTH_8_BITS as u64 => {
                2 * numbers + 8 * numbers.div_ceil(blockwise::BLOCK.unsigned_abs())
            }
            Self::AdamW | Self::AdamW8bit => 8 * numbers,
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

fn default_betas() -> [Fraction; 2] {
    [0.9, 0.999].map(|b| Fraction::new(b).expect("a constant"))
}

fn default_eps() -> Positive {
    Positive::new(1e-8).expect("a constant")
}

fn default_weight_decay() -> NonNegative {
    NonNegative::new(0.0).expect("a constant")
}

fn default_max_grad_norm() -> Positive {
    Positive::new(1.0).expect("a constant")
}
