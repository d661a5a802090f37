//! What is trained: heads on a frozen backbone (Medusa-1), or heads and backbone together (Medusa-2), and how much the heads' loss
//! counts over the run.

use serde::{Deserialize, Serialize};

use crate::model::lora::LoraConfig;
use crate::numbers::{NonNegative, Positive};

/// Exactly one of the tables `[stage.…]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// Heads on a frozen backbone (paper section 2.2.1).
    Medusa1(Medusa1Config),
    /// Heads and backbone together (paper section 2.2.2).
    Medusa2(Medusa2Config),
}

/// `[stage.medusa1]`: it has no keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Medusa1Config {}

/// `[stage.medusa2]`: the loss is L_LM + λ0(step)·Σ λk·Lk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Medusa2Config {
    /// λ0; its peak, where it is scheduled.
    #[serde(default = "paper_lambda0")]
    pub medusa_heads_coefficient: NonNegative,
    /// λ0 over the run.
    #[serde(default)]
    pub medusa_scheduler: MedusaScheduler,
    /// L_LM is KL(backbone without adapters ‖ with) instead of the cross-entropy of the next token.
    #[serde(default)]
    pub self_distillation: bool,
    /// Adapters to train; absent = the whole backbone trains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
}

/// λ0 of the paper's two-stage recipes (appendix B).
fn paper_lambda0() -> NonNegative {
    NonNegative::new(0.2).expect("a constant")
}

/// Shapes of λ0 over the run; the names are the axolotl fork's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MedusaScheduler {
    /// λ0 from the first step.
    #[default]
    Constant,
    /// A straight line from 0.
    Linear,
    /// A quarter of a sine from 0: the paper's one-stage training.
    Sine,
}

impl Medusa2Config {
    /// `optimizer.medusa_lr_multiplier` of the paper's recipes (appendix B), where a recipe says nothing.
    ///
    /// # Panics
    /// Never.
    pub fn paper_lr_multiplier() -> Positive {
        Positive::new(4.0).expect("a constant")
    }

    /// λ0 of the update made after `step` finished updates out of `total`: λ0, λ0·s/S or λ0·sin(π/2·s/S).
    pub fn lambda0(&self, step: usize, total: usize) -> f64 {
        let (step, total) = (step as f64, total.max(1) as f64);
        self.medusa_heads_coefficient.get()
            * match self.medusa_scheduler {
                MedusaScheduler::Constant => 1.0,
                MedusaScheduler::Linear => step / total,
                MedusaScheduler::Sine => (std::f64::consts::FRAC_PI_2 * step / total).sin(),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(toml: &str) -> Medusa2Config {
        toml::from_str(toml).unwrap()
    }

    #[test]
    fn lambda0_follows_its_schedule() {
        let at = |name: &str| {
            let config = config(&format!("medusa_heads_coefficient = 0.5\nmedusa_scheduler = {name:?}"));
            [0, 5, 10].map(|step| config.lambda0(step, 10))
        };
        assert_eq!(at("constant"), [0.5, 0.5, 0.5]);
        assert_eq!(at("linear"), [0.0, 0.25, 0.5]);
        let [start, middle, end] = at("sine");
        assert!(start == 0.0 && (middle - 0.5 * 0.5f64.sqrt()).abs() < 1e-12 && (end - 0.5).abs() < 1e-12);
    }

    #[test]
    fn the_defaults_are_the_papers() {
        let config = config("");
        assert_eq!((config.medusa_heads_coefficient.get(), config.medusa_scheduler), (0.2, MedusaScheduler::Constant));
        assert!(!config.self_distillation && config.lora.is_none());
    }
}
