//! `bench.json`: the output of `medusa bench --json`: one result, or one per line for several drafters or the values of a sweep.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::{self, FormatError};
use super::metrics::TrainingCost;
use super::trained_prompts::MeasuredPrompts;

/// [`BenchResult::drafter`] of plain decoding.
pub const PLAIN: &str = "plain";
/// Drafters with heads; `hydra++` is split at its plus signs.
const OF_HEADS: [&str; 2] = ["medusa", "hydra"];

const WHAT: &str = "bench results";
const EXPECTED: &str = "is no result of medusa bench --json; expected what it prints, one object a line: make it again";

/// Plain decoding compared with decoding with a drafter, for the same prompts and settings. Fields with a default are
/// absent in files of earlier versions.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchResult {
    /// All prompts together.
    #[serde(flatten)]
    pub all: DecodingComparison,
    /// By category of the prompts.
    #[serde(default)]
    pub categories: BTreeMap<String, DecodingComparison>,
    /// As `--device` spells it.
    pub device: String,
    /// Compute dtype of the backbone.
    pub dtype: String,
    /// `nf4` or `int8`; absent for weights that were not quantised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// Engine: `tch`, `cpu` or `cuda`.
    #[serde(default)]
    pub engine: String,
    /// As `--drafter` spells it, without paths; `plain` for plain decoding's own row. Empty in files of earlier versions, which had only
    /// heads.
    #[serde(default)]
    pub drafter: String,
    /// Paths of the drafter's own weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<String>,
    /// Parameters of the drafter alone; absent in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// Absent if the drafter was not trained, or its run is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingCost>,
    /// Nodes without the root.
    pub tree_nodes: usize,
    /// Passes over all prompts.
    #[serde(default)]
    pub repeats: usize,
    /// Prompts with a turn that exceeds the context.
    #[serde(default)]
    pub too_long: usize,
    /// Absent if the heads do not say what they were trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts: Option<MeasuredPrompts>,
    /// Tokens per step, independent of the guesses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forced_acceptance_rate: Option<f64>,
    /// The swept setting of this result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sweep: Option<SweptValue>,
    /// Only where texts that should be identical are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_difference: Option<FirstDifference>,
}

/// Where a drafter's text first leaves that of plain decoding. All places count from 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FirstDifference {
    pub prompt: usize,
    /// Of a conversation.
    pub turn: u64,
    /// Of the answer.
    pub token: usize,
    pub plain: ChosenToken,
    pub drafted: ChosenToken,
}

/// A token of an answer, and its probability under the backbone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChosenToken {
    /// `None`: the text ends here.
    pub text: Option<String>,
    pub probability: f64,
}

/// The paper's figures (appendix B.1), from the median repeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DecodingComparison {
    pub plain: DecodingFigures,
    /// Decoding with the drafter. The key is "medusa" for every drafter: programs that read these files look it up by
    /// that name.
    #[serde(rename = "medusa")]
    pub drafted: DecodingFigures,
    /// Tokens that a step with guesses commits.
    pub acceleration_rate: f64,
    /// Time of a step with guesses ÷ time of a plain step.
    pub overhead: f64,
    /// `acceleration_rate` ÷ `overhead`.
    pub speedup: f64,
    /// Of the slowest and the fastest repeat.
    #[serde(default)]
    pub speedup_range: [f64; 2],
    /// Whether both decoded the same tokens; `None` above temperature 0 or with a forced acceptance rate, where they
    /// may differ.
    pub identical: Option<bool>,
    /// Difference of the two mean log probabilities, without a sign; only above temperature 0. The texts of a changed distribution may be more
    /// probable or less probable than the backbone's own: neither is better.
    #[serde(default)]
    pub log_probability_distance: Option<f64>,
}

/// Figures of one decoding method in its median repeat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DecodingFigures {
    /// New tokens.
    pub tokens: usize,
    /// Decoding time without the prompts' forward passes.
    #[serde(default)]
    pub seconds: f64,
    /// `tokens` ÷ `seconds`.
    pub tokens_per_second: f64,
    /// Of the slowest and the fastest repeat.
    #[serde(default)]
    pub tokens_per_second_range: [f64; 2],
    /// Mean step time.
    pub step_ms: f64,
    /// Forward passes without the prompts' own.
    #[serde(default)]
    pub steps: usize,
    /// Time of the prompts' forward passes.
    #[serde(default)]
    pub prefill_seconds: f64,
    /// Mean log probability of a new token under the backbone; only above temperature 0. It measures no quality: greedy text has a higher one
    /// than samples of the backbone.
    pub mean_log_probability: Option<f64>,
}

/// A setting of a sweep, such as `nodes` 16.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweptValue {
    /// As `--sweep` spells it.
    pub name: String,
    /// As given on the command line.
    pub value: serde_json::Number,
}

/// The figures that model cards and `medusa inspect` show; files that contain only these are accepted too.
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
    /// Each category, then all prompts.
    pub fn groups(&self) -> impl Iterator<Item = (&str, &DecodingComparison)> {
        self.categories.iter().map(|(name, group)| (name.as_str(), group)).chain([("all", &self.all)])
    }

    /// Whether heads drafted, alone or joined with another drafter.
    pub fn is_of_heads(&self) -> bool {
        self.drafter.is_empty() || self.drafter.split('+').any(|name| OF_HEADS.contains(&name))
    }

    /// The result that stands for a file: the first of heads, else the first of a drafter.
    pub fn headline(results: &[Self]) -> Option<&Self> {
        let with_heads = results.iter().find(|result| result.is_of_heads());
        with_heads.or_else(|| results.iter().find(|result| !result.is_plain())).or(results.first())
    }

    /// What drafted, for people.
    pub fn guesses(&self) -> &str {
        match self.drafter.as_str() {
            _ if self.is_of_heads() => "heads",
            "ngram" => "prompt lookup",
            name => name,
        }
    }

    /// Whether it is the row of plain decoding, which the drafters are compared with.
    pub fn is_plain(&self) -> bool {
        self.drafter == PLAIN
    }
}

/// The results in a file, [`BenchResult`]s or [`BenchHeadline`]s; empty for an empty file, which a shell creates before
/// `medusa bench` prints.
///
/// # Errors
/// [`FormatError`], with the path.
pub fn load<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, FormatError> {
    error::read_by(path, WHAT, EXPECTED, |text| serde_json::Deserializer::from_str(text).into_iter().collect())
}
