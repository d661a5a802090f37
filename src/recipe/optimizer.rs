//! `[optimizer]` of a recipe.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use crate::numbers::{Fraction, NonNegative, Positive};
use crate::torch::optim::{AdamWConfig, OptimizerName, ZeroStage};

/// The optimizer, its peak learning rates, and the clipping norm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    #[serde(default)]
    pub name: OptimizerName,
    /// Peak learning rate: the backbone's in Medusa-2, the heads' in Medusa-1.
    pub learning_rate: Positive,
    /// Medusa-2: factor on `learning_rate` for the heads, including their biases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub medusa_lr_multiplier: Option<Positive>,
    /// Exponential decay rates of the two moments.
    #[serde(default = "default_betas", deserialize_with = "two")]
    pub betas: [Fraction; 2],
    /// Added to the denominator.
    #[serde(default = "default_eps")]
    pub eps: Positive,
    /// Decoupled weight decay, of matrices only.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: NonNegative,
    /// Gradients are clipped to this norm over all trainable parameters.
    #[serde(default = "default_max_grad_norm")]
    pub max_grad_norm: Positive,
    /// With several processes: 1 gives each a share of the moments (ZeRO-1), 0 all of them.
    #[serde(default)]
    pub zero_stage: ZeroStage,
}

impl OptimizerConfig {
    /// The optimizer's own settings, without learning rates and clipping.
    pub(super) fn adamw(&self) -> AdamWConfig {
        let Self { name, betas, eps, weight_decay, .. } = *self;
        AdamWConfig { name, betas: betas.map(Fraction::get), eps: eps.get(), weight_decay: weight_decay.get() }
    }
}

fn default_betas() -> [Fraction; 2] {
    [0.9, 0.999].map(|b| Fraction::new(b).expect("a constant"))
}

/// An array of serde's takes the first numbers of more.
fn two<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[Fraction; 2], D::Error> {
    let numbers = Vec::deserialize(deserializer)?;
    numbers
        .try_into()
        .map_err(|numbers: Vec<Fraction>| D::Error::invalid_length(numbers.len(), &"two numbers, as in [0.9, 0.999]"))
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
