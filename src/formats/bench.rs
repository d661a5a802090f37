//! `bench.json`: what `medusa bench --json` prints, one result, or of a sweep one a line.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::{self, FormatError};

const WHAT: &str = "bench results";
const EXPECTED: &str = "is no result of medusa bench --json; expected what it prints, one object a line: make it again";

/// Plain decoding and decoding with a drafter's guesses, of the same prompts in one setting. Fields with a default are absent in files of earlier versions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchResult {
    /// Of all prompts.
    #[serde(flatten)]
    pub all: DecodingComparison,
    /// Of the prompts of each category.
    #[serde(default)]
    pub categories: BTreeMap<String, DecodingComparison>,
    /// As `--device` spells it.
    pub device: String,
    /// What the backbone computed in.
    pub dtype: String,
    /// Who computed: `tch`, `cpu` or `cuda`.
    #[serde(default)]
    pub engine: String,
    /// Who guessed: `medusa` or `ngram`; empty in files of earlier versions, which knew heads only.
    #[serde(default)]
    pub drafter: String,
    /// Without the root.
    pub tree_nodes: usize,
    /// Passes over all prompts.
    #[serde(default)]
    pub repeats: usize,
    /// Prompts of which a turn was longer than the context.
    #[serde(default)]
    pub too_long: usize,
    /// Tokens a step, whatever was guessed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forced_acceptance_rate: Option<f64>,
    /// The value of a sweep that this is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep: Option<SweptValue>,
}

/// The paper's figures (appendix B.1), in the median repeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DecodingComparison {
    /// Without guesses.
    pub plain: DecodingFigures,
    /// With the drafter's guesses. The key is "medusa" whoever drafts: programs that read these files look it up by that name.
    #[serde(rename = "medusa")]
    pub drafted: DecodingFigures,
    /// Tokens that a step with guesses commits.
    pub acceleration_rate: f64,
    /// A step with guesses ÷ a plain one.
    pub overhead: f64,
    /// `acceleration_rate` ÷ `overhead`.
    pub speedup: f64,
    /// The slowest and the fastest repeat's.
    #[serde(default)]
    pub speedup_range: [f64; 2],
    /// At temperature 0, unless forced: the same tokens. Otherwise they are not expected to be.
    pub identical: Option<bool>,
}

/// One way of decoding, in its median repeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DecodingFigures {
    /// New ones.
    pub tokens: usize,
    /// Of decoding, behind the prompt's own forward pass.
    #[serde(default)]
    pub seconds: f64,
    /// `tokens` ÷ `seconds`.
    pub tokens_per_second: f64,
    /// The slowest and the fastest repeat's.
    #[serde(default)]
    pub tokens_per_second_range: [f64; 2],
    /// The mean.
    pub step_ms: f64,
    /// Forward passes behind the prompt's own.
    #[serde(default)]
    pub steps: usize,
    /// The prompts' own forward passes.
    #[serde(default)]
    pub prefill_seconds: f64,
    /// Above temperature 0: of a new token under the backbone.
    pub mean_log_probability: Option<f64>,
}

/// A setting of a sweep: `nodes` 16.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweptValue {
    /// As `--sweep` spells it.
    pub name: String,
    /// As it was given.
    pub value: serde_json::Number,
}

/// What a model card and `medusa inspect` say of a result: figures that somebody wrote down without the rest are taken, too.
#[derive(Debug, Clone, Deserialize)]
pub struct BenchHeadline {
    pub acceleration_rate: f64,
    pub overhead: Option<f64>,
    pub speedup: f64,
    pub identical: Option<bool>,
    pub device: Option<String>,
    pub dtype: Option<String>,
    pub drafter: Option<String>,
    pub forced_acceptance_rate: Option<f64>,
    pub sweep: Option<SweptValue>,
}

impl BenchResult {
    /// Each category, then all.
    pub fn groups(&self) -> impl Iterator<Item = (&str, &DecodingComparison)> {
        self.categories.iter().map(|(name, group)| (name.as_str(), group)).chain([("all", &self.all)])
    }

    /// Whether heads made the guesses, not prompt lookup.
    pub fn is_of_heads(&self) -> bool {
        self.drafter != "ngram"
    }
}

/// The results in a file, [`BenchResult`]s or [`BenchHeadline`]s; none in an empty one, which a shell makes before `medusa bench` has
/// printed.
///
/// # Errors
/// [`FormatError`] names the file.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, FormatError> {
    error::read_by(path, WHAT, EXPECTED, |text| serde_json::Deserializer::from_str(text).into_iter().collect())
}
