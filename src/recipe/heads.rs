//! `[heads]` of a recipe: the drafter to train.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::mistakes::Findings;
use crate::draft::eagle::planned::EagleConfig;
use crate::draft::eagle::weights::default_taps;
use crate::draft::heads::{HeadsArchitecture, HeadsConfig};
use crate::draft::planned::DrafterConfig;
use crate::model::config::LlamaConfig;
use crate::numbers::Fraction;

const TAPS: &str = "heads.tap_layers";
const KEYS_OF_HEADS: [&str; 6] = [
    "heads.medusa_num_heads",
    "heads.medusa_num_layers",
    "heads.shared_lm_head",
    "heads.w2_rank",
    "heads.shared_w2",
    "heads.dropout",
];
/// Steps of a training-time test where a recipe does not say, as EAGLE's authors train.
const TTT_STEPS: usize = 7;

/// The `[heads]` table of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadsTable {
    /// K, the number of heads.
    pub medusa_num_heads: NonZeroUsize,
    /// ResBlocks per head, each with its own weights.
    pub medusa_num_layers: NonZeroUsize,
    /// A trained drafter to start from: a folder or file in any layout that is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
    /// Heads consist of ResBlocks only and use the backbone's lm_head as output layer.
    #[serde(default)]
    pub shared_lm_head: bool,
    /// R: W2 = B·A with an inner width of R.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub w2_rank: Option<NonZeroUsize>,
    /// One W2 for all heads.
    #[serde(default)]
    pub shared_w2: bool,
    /// N: only the N most frequent tokens of the training data are guessed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_vocab_size: Option<NonZeroUsize>,
    /// What drafts.
    #[serde(default)]
    pub architecture: DrafterArchitecture,
    /// EAGLE-3: steps of the training-time test.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttt_steps: Option<NonZeroUsize>,
    /// EAGLE-3: the backbone's layers whose inputs the drafter reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap_layers: Option<Vec<usize>>,
    /// Dropout in training, on the input of every ResBlock and of the output layer.
    #[serde(default = "no_dropout")]
    pub dropout: Fraction,
}

/// `heads.architecture`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DrafterArchitecture {
    #[default]
    Medusa,
    Hydra,
    #[serde(rename = "hydra++")]
    HydraPlusPlus,
    Eagle3,
}

impl DrafterArchitecture {
    /// That of heads; `None` of other drafters.
    pub fn heads(self) -> Option<HeadsArchitecture> {
        match self {
            Self::Medusa => Some(HeadsArchitecture::Medusa),
            Self::Hydra => Some(HeadsArchitecture::Hydra),
            Self::HydraPlusPlus => Some(HeadsArchitecture::HydraPlusPlus),
            Self::Eagle3 => None,
        }
    }
}

fn no_dropout() -> Fraction {
    Fraction::ZERO
}

impl HeadsTable {
    /// The drafter.
    pub fn drafter(&self) -> Arc<dyn DrafterConfig> {
        match self.heads() {
            Some(heads) => Arc::new(heads),
            None => Arc::new(EagleConfig {
                ttt_steps: self.ttt_steps(),
                tap_layers: self.tap_layers.clone(),
                draft_vocab_size: self.draft_vocab_size,
                init_from: self.init_from.clone(),
            }),
        }
    }

    /// How many tokens it guesses one after the other.
    pub fn levels(&self) -> NonZeroUsize {
        if self.is_eagle() { self.ttt_steps() } else { self.medusa_num_heads }
    }

    fn ttt_steps(&self) -> NonZeroUsize {
        self.ttt_steps.unwrap_or(NonZeroUsize::new(TTT_STEPS).expect("above 0"))
    }

    /// Whether it is an EAGLE-3 drafter.
    pub fn is_eagle(&self) -> bool {
        self.architecture == DrafterArchitecture::Eagle3
    }

    /// The heads; `None` of other drafters.
    pub fn heads(&self) -> Option<HeadsConfig> {
        Some(HeadsConfig {
            architecture: self.architecture.heads()?,
            medusa_num_heads: self.medusa_num_heads,
            medusa_num_layers: self.medusa_num_layers,
            init_from: self.init_from.clone(),
            shared_lm_head: self.shared_lm_head,
            w2_rank: self.w2_rank,
            shared_w2: self.shared_w2,
            draft_vocab_size: self.draft_vocab_size,
            dropout: self.dropout,
        })
    }

    /// Removes the keys that [`HeadsTable::check_keys`] would refuse, which have defaults, from a written recipe.
    pub(super) fn leave_out_keys_of_others(&self, recipe: &mut toml::Table) {
        if let (true, Some(heads)) = (self.is_eagle(), recipe.get_mut("heads").and_then(toml::Value::as_table_mut)) {
            KEYS_OF_HEADS.iter().for_each(|key| drop(heads.remove(key.trim_start_matches("heads."))));
        }
    }

    /// Keys of the other architectures.
    pub(super) fn check_keys(&self, findings: &mut Findings<'_>) {
        let (keys, needed): (&[&'static str], _) = match self.is_eagle() {
            true => (
                &KEYS_OF_HEADS,
                "heads.architecture = \"medusa\", \"hydra\" or \"hydra++\": an EAGLE-3 drafter has none",
            ),
            false => (&["heads.ttt_steps", TAPS], "heads.architecture = \"eagle3\""),
        };
        for key in keys {
            if findings.text().key(key).is_some() {
                findings.needs(key, needed);
            }
        }
    }

    /// The layers that an EAGLE-3 drafter reads are those of the backbone.
    pub(super) fn check_taps(&self, findings: &mut Findings<'_>, backbone: &LlamaConfig) {
        let layers = backbone.num_hidden_layers;
        match &self.tap_layers {
            _ if !self.is_eagle() => {}
            None if default_taps(layers).is_none() => {
                findings.clash(
                    TAPS,
                    "none",
                    format!("a list of layers, such as [1, 2]: with {layers} layers there is no default"),
                );
            }
            Some(taps) if taps.is_empty() || !taps.is_sorted_by(|a, b| a < b) || taps.last() > Some(&layers) => {
                findings.clash(
                    TAPS,
                    format!("{taps:?}"),
                    format!("ascending layers up to {layers}, those of the backbone"),
                );
            }
            _ => {}
        }
    }
}
