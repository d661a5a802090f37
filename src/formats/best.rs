//! The best evaluation of a run so far, which `best/` is kept for.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::metrics::MetricsLine;

/// `train.keep_best`: what makes an evaluation better than another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BestBy {
    /// More tokens per decoding step.
    TokensPerStep,
    /// A lower loss.
    Loss,
}

/// An evaluation and the figure that it is judged by.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    /// Finished optimizer steps.
    pub step: usize,
    pub by: BestBy,
    pub value: f64,
}

impl BestBy {
    /// The figure of an evaluation; `None` if it lacks it.
    pub fn judged(self, line: &MetricsLine) -> Option<BestEvaluation> {
        let value = match self {
            Self::TokensPerStep => line.tokens_per_step,
            Self::Loss => Some(line.loss),
        };
        value.map(|value| BestEvaluation { step: line.step, by: self, value })
    }
}

impl fmt::Display for BestBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TokensPerStep => "tokens_per_step",
            Self::Loss => "loss",
        })
    }
}

impl BestEvaluation {
    /// Whether its figure is better than another's; equal ones are not.
    pub fn is_better_than(&self, other: &Self) -> bool {
        match self.by {
            BestBy::TokensPerStep => self.value > other.value,
            BestBy::Loss => self.value < other.value,
        }
    }
}

impl fmt::Display for BestEvaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, by, value } = self;
        match by {
            BestBy::TokensPerStep => write!(f, "{value:.2} tokens per step after step {step}"),
            BestBy::Loss => write!(f, "validation loss {value:.4} after step {step}"),
        }
    }
}
