//! `loss.targets` of a recipe: what the heads learn from.

use serde::{Deserialize, Serialize};

use crate::numbers::Positive;

/// What the heads learn from, and the weight of each loss in Lk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WrittenTargets", into = "WrittenTargets")]
pub enum TargetWeights {
    /// Cross-entropy of the labels.
    #[default]
    Labels,
    /// KL(LM head ‖ head): the target is the LM head's distribution of the same token (soft targets).
    Backbone,
    /// The weighted sum of both.
    Mix(TargetMix),
}

/// The weights of a sum of both losses.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetMix {
    /// Weight of the cross-entropy.
    pub labels: Positive,
    /// Weight of the divergence.
    pub backbone: Positive,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected \"labels\", \"backbone\" or { labels = 0.5, backbone = 0.5 } with two weights above 0"
)]
enum WrittenTargets {
    Word(String),
    Mix(TargetMix),
}

impl TryFrom<WrittenTargets> for TargetWeights {
    type Error = String;

    fn try_from(written: WrittenTargets) -> Result<Self, String> {
        match written {
            WrittenTargets::Mix(mix) => Ok(Self::Mix(mix)),
            WrittenTargets::Word(word) => match word.as_str() {
                "labels" => Ok(Self::Labels),
                "backbone" => Ok(Self::Backbone),
                _ => Err(format!(
                    "expected \"labels\", \"backbone\" or {{ labels = 0.5, backbone = 0.5 }}, got {word:?}"
                )),
            },
        }
    }
}

impl From<TargetWeights> for WrittenTargets {
    fn from(weights: TargetWeights) -> Self {
        match weights {
            TargetWeights::Labels => Self::Word("labels".into()),
            TargetWeights::Backbone => Self::Word("backbone".into()),
            TargetWeights::Mix(mix) => Self::Mix(mix),
        }
    }
}

impl TargetWeights {
    /// Weight of the cross-entropy of the labels.
    pub fn labels(self) -> f64 {
        match self {
            Self::Labels => 1.0,
            Self::Backbone => 0.0,
            Self::Mix(mix) => mix.labels.get(),
        }
    }

    /// Weight of the divergence from the LM head.
    pub fn backbone(self) -> f64 {
        match self {
            Self::Labels => 0.0,
            Self::Backbone => 1.0,
            Self::Mix(mix) => mix.backbone.get(),
        }
    }

    /// Whether the LM head teaches the heads.
    pub fn are_soft(self) -> bool {
        self != Self::Labels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Table {
        targets: TargetWeights,
    }

    fn read(value: &str) -> Result<Table, toml::de::Error> {
        toml::from_str(&format!("targets = {value}"))
    }

    #[test]
    fn targets_are_a_word_or_two_weights() {
        for (text, expected) in
            [("\"labels\"", (1.0, 0.0)), ("\"backbone\"", (0.0, 1.0)), ("{ labels = 0.25, backbone = 2 }", (0.25, 2.0))]
        {
            let table = read(text).unwrap();
            assert_eq!((table.targets.labels(), table.targets.backbone()), expected, "{text}");
            assert_eq!(toml::from_str::<Table>(&toml::to_string(&table).unwrap()).unwrap(), table);
        }
    }

    #[test]
    fn other_targets_are_refused_with_the_accepted_ones() {
        for text in
            ["\"soft\"", "{ labels = 0, backbone = 1 }", "{ labels = 1 }", "{ labels = 1, backbone = 1, x = 1 }", "2"]
        {
            let error = read(text).unwrap_err().message().to_owned();
            assert!(error.contains("\"labels\", \"backbone\" or { labels = 0.5, backbone = 0.5 }"), "{text}: {error}");
        }
    }
}
