//! The plain loss of Medusa heads: every logit materialised, libtorch's own autograd. The oracle of `fused_loss`.

use serde::{Deserialize, Serialize};

use crate::numbers::Positive;

/// `[loss]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossConfig {
    /// λk = this to the power k, k = 1…K (paper section 2.2.1).
    #[serde(default = "default_decay")]
    pub medusa_decay_coefficient: Positive,
}

fn default_decay() -> Positive {
    Positive::new(0.8).expect("0.8 is positive")
}

impl Default for LossConfig {
    fn default() -> Self {
        Self { medusa_decay_coefficient: default_decay() }
    }
}
