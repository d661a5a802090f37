//! Reads `metrics.jsonl`, also of a running training.

use std::path::Path;

use super::ReportError;
use crate::formats::metrics::{MetricsFile, MetricsLine, MetricsSplit, TrainingCost, UpdateLine};

/// All lines of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct Metrics {
    pub(super) train: Vec<MetricsLine>,
    pub(super) validation: Vec<MetricsLine>,
    /// The last line is incomplete and was skipped.
    pub(super) torn: bool,
}

impl Metrics {
    pub(super) fn read(path: &Path) -> Result<Self, ReportError> {
        let file = MetricsFile::read(path)?;
        let lines = file.lines.into_iter().map(|(_, line)| line);
        let (train, validation) = lines.partition(|line| line.split == MetricsSplit::Train);
        Ok(Self { train, validation, torn: file.torn })
    }

    /// The last logged optimizer step.
    pub(super) fn last_step(&self) -> usize {
        self.train.iter().chain(&self.validation).map(|line| line.step).max().unwrap_or(0)
    }

    pub(super) fn heads(&self) -> usize {
        self.train.iter().chain(&self.validation).map(|line| line.head_losses.len()).max().unwrap_or(0)
    }

    /// What the logged steps took.
    pub(super) fn cost(&self) -> Option<TrainingCost> {
        MetricsLine::training_cost(self.train.iter())
    }
}

/// A figure of the line's update; `None` for evaluations.
pub(super) fn updated(line: &MetricsLine, pick: impl Fn(&UpdateLine) -> f64) -> Option<f64> {
    line.update.as_ref().map(pick)
}

pub(super) fn memory_bytes(line: &MetricsLine) -> Option<f64> {
    line.update.as_ref()?.memory_bytes.map(|bytes| bytes as f64)
}

/// Step and value of the lines that have a finite value.
pub(super) fn curve(lines: &[MetricsLine], pick: impl Fn(&MetricsLine) -> Option<f64>) -> Vec<(f64, f64)> {
    lines.iter().filter_map(|line| Some((line.step as f64, pick(line).filter(|value| value.is_finite())?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_are_not_there_are_gaps() {
        let step =
            br#"{"split":"train","step":3,"tokens":100,"loss":2.5,"head_losses":[1.0,null],"tokens_per_second":50.0}"#;
        let metrics = Metrics { train: vec![MetricsLine::parse(step).unwrap()], ..Metrics::default() };
        assert_eq!((metrics.last_step(), metrics.heads()), (3, 2));
        assert_eq!(curve(&metrics.train, |line| Some(line.loss)), [(3.0, 2.5)]);
        assert_eq!(curve(&metrics.train, |line| line.head_losses[1]), []);
        assert_eq!(metrics.cost().map(|cost| cost.seconds), Some(2.0));
        assert_eq!(Metrics::default().cost(), None);
    }
}
