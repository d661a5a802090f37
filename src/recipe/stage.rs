//! `[stage.…]` of a recipe: heads on a frozen backbone (Medusa-1), or heads and backbone together (Medusa-2).

use serde::{Deserialize, Serialize};

use crate::model::lora::LoraConfig;
use crate::numbers::NonNegative;
use crate::train::plan::BackboneTraining;
use crate::train::schedule::{HeadsCoefficient, MedusaScheduler};

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
    /// λ0, or its peak with a scheduler.
    #[serde(default = "paper_lambda0")]
    pub medusa_heads_coefficient: NonNegative,
    /// λ0 over the run.
    #[serde(default)]
    pub medusa_scheduler: MedusaScheduler,
    /// L_LM is KL(backbone without adapters ‖ with adapters) instead of the cross-entropy of the next token.
    #[serde(default)]
    pub self_distillation: bool,
    /// Adapters to train; absent: the whole backbone is trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
}

/// λ0 of the paper's two-stage recipes (appendix B).
fn paper_lambda0() -> NonNegative {
    NonNegative::new(0.2).expect("a constant")
}

impl Stage {
    /// The trained part of the backbone. The recipe must be checked, so that self-distillation has adapters.
    pub fn trained(&self) -> BackboneTraining {
        match self {
            Self::Medusa1(_) => BackboneTraining::Frozen,
            Self::Medusa2(Medusa2Config { lora: None, .. }) => BackboneTraining::Full,
            Self::Medusa2(Medusa2Config { lora: Some(lora), self_distillation, .. }) => {
                BackboneTraining::Lora { lora: lora.clone(), self_distillation: *self_distillation }
            }
        }
    }

    /// λ0; always 1 in Medusa-1, where the heads' loss is the whole loss.
    pub(super) fn heads_coefficient(&self) -> HeadsCoefficient {
        match self {
            Self::Medusa1(_) => HeadsCoefficient { peak: 1.0, scheduler: MedusaScheduler::Constant },
            Self::Medusa2(config) => {
                HeadsCoefficient { peak: config.medusa_heads_coefficient.get(), scheduler: config.medusa_scheduler }
            }
        }
    }

    /// Whether the backbone without its adapters is the teacher.
    pub(super) fn distils_itself(&self) -> bool {
        matches!(self, Self::Medusa2(config) if config.self_distillation)
    }

    /// `[stage.medusa2.lora]`.
    pub(super) fn lora(&self) -> Option<&LoraConfig> {
        if let Self::Medusa2(config) = self { config.lora.as_ref() } else { None }
    }

    pub(super) fn lora_mut(&mut self) -> Option<&mut LoraConfig> {
        if let Self::Medusa2(config) = self { config.lora.as_mut() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_the_papers() {
        let config: Medusa2Config = toml::from_str("").unwrap();
        assert_eq!((config.medusa_heads_coefficient.get(), config.medusa_scheduler), (0.2, MedusaScheduler::Constant));
        assert!(!config.self_distillation && config.lora.is_none());
    }
}
