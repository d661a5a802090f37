//! The best evaluation so far, and how many came after it: what `best/` is kept for, and when a run stops early.

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use crate::formats::best::BestEvaluation;

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestSoFar {
    pub best: BestEvaluation,
    /// Evaluations after it, none of them better.
    pub evaluations_since: usize,
}

impl BestSoFar {
    /// Adds an evaluation. If it is the best so far, `evaluations_since` of the result is 0.
    #[must_use]
    pub fn after(so_far: Option<Self>, evaluation: BestEvaluation) -> Self {
        match so_far {
            Some(Self { best, evaluations_since }) if !evaluation.is_better_than(&best) => {
                Self { best, evaluations_since: evaluations_since + 1 }
            }
            _ => Self { best: evaluation, evaluations_since: 0 },
        }
    }

    /// Whether `train.patience` evaluations in a row were no better.
    pub fn exhausts(&self, patience: Option<NonZeroUsize>) -> bool {
        patience.is_some_and(|patience| self.evaluations_since >= patience.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::best::BestBy;

    /// The step of the best and the evaluations since then, after each evaluation.
    fn judged(by: BestBy, values: &[f64]) -> Vec<(usize, usize)> {
        let mut so_far = None;
        let judge = |(step, &value): (usize, &f64)| {
            let after = BestSoFar::after(so_far, BestEvaluation { step, by, value });
            so_far = Some(after);
            (after.best.step, after.evaluations_since)
        };
        values.iter().enumerate().map(judge).collect()
    }

    #[test]
    fn more_tokens_and_less_loss_are_better_and_equal_values_are_not() {
        let values = [2.0, 2.5, 2.5, 1.0, 2.25, 3.0];
        assert_eq!(judged(BestBy::TokensPerStep, &values), [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (5, 0)]);
        assert_eq!(judged(BestBy::Loss, &values), [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2)]);
    }

    #[test]
    fn patience_counts_evaluations_since_the_best() {
        let best = BestEvaluation { step: 7, by: BestBy::Loss, value: 1.0 };
        let exhausts =
            |evaluations_since, patience| BestSoFar { best, evaluations_since }.exhausts(NonZeroUsize::new(patience));
        assert!(!exhausts(2, 3) && exhausts(3, 3) && exhausts(4, 3));
        assert!(!exhausts(100, 0), "without train.patience a run never stops early");
    }
}
