//! `metrics.jsonl`, of a run that may still go on.

use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;

use super::ReportError;
use crate::train::log::Split;

/// What a page shows of a line. Unlike the log's own reader it takes lines of earlier versions, which know less.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Logged {
    pub(super) split: Split,
    pub(super) step: usize,
    pub(super) tokens: Option<u64>,
    pub(super) loss: Option<f64>,
    pub(super) lm_loss: Option<f64>,
    pub(super) perplexity: Option<f64>,
    #[serde(default)]
    pub(super) head_losses: Vec<Option<f64>>,
    #[serde(default)]
    pub(super) head_top1: Vec<Option<f64>>,
    #[serde(default)]
    pub(super) head_top5: Vec<Option<f64>>,
    pub(super) lr: Option<f64>,
    pub(super) heads_lr: Option<f64>,
    pub(super) lambda0: Option<f64>,
    pub(super) grad_norm: Option<f64>,
    pub(super) tokens_per_second: Option<f64>,
    pub(super) memory_bytes: Option<f64>,
}

/// All lines of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct Metrics {
    pub(super) train: Vec<Logged>,
    pub(super) validation: Vec<Logged>,
    /// Whether the last line was left out: it is not whole.
    pub(super) torn: bool,
}

impl Metrics {
    /// Reads the file; none at all is a run before its first step. A last line without its end may be torn, no other.
    pub(super) fn read(path: &Path) -> Result<Self, ReportError> {
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            read => read.map_err(|source| ReportError::Io { path: path.to_owned(), source })?,
        };
        let mut metrics = Self::default();
        for (at, line) in bytes.split_inclusive(|&byte| byte == b'\n').enumerate() {
            let text = line.trim_ascii();
            if text.is_empty() {
                continue;
            }
            match serde_json::from_slice::<Logged>(text) {
                Ok(logged) if logged.split == Split::Train => metrics.train.push(logged),
                Ok(logged) => metrics.validation.push(logged),
                Err(_) if !line.ends_with(b"\n") => metrics.torn = true,
                Err(source) => return Err(ReportError::MetricsLine { path: path.to_owned(), line: at + 1, source }),
            }
        }
        Ok(metrics)
    }

    /// Optimizer steps done, as far as they are logged.
    pub(super) fn last_step(&self) -> usize {
        self.train.iter().chain(&self.validation).map(|line| line.step).max().unwrap_or(0)
    }

    /// How many heads the lines speak of.
    pub(super) fn heads(&self) -> usize {
        self.train.iter().chain(&self.validation).map(|line| line.head_losses.len()).max().unwrap_or(0)
    }

    /// Time that the logged steps took: their tokens ÷ their tokens a second. Loading, evaluations and saving are not in it.
    pub(super) fn seconds_of_steps(&self) -> Option<f64> {
        let mut before = 0;
        let mut seconds = 0.0;
        for line in &self.train {
            let tokens = line.tokens?.saturating_sub(before);
            seconds += tokens as f64 / line.tokens_per_second.filter(|&speed| speed > 0.0)?;
            before = line.tokens?;
        }
        (seconds > 0.0).then_some(seconds)
    }
}

/// Step and value of the lines that have one.
pub(super) fn curve(lines: &[Logged], pick: impl Fn(&Logged) -> Option<f64>) -> Vec<(f64, f64)> {
    lines.iter().filter_map(|line| Some((line.step as f64, pick(line).filter(|value| value.is_finite())?))).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(text: &str) -> Result<Metrics, ReportError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        crate::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
        Metrics::read(&path)
    }

    const STEP: &str =
        r#"{"split":"train","step":3,"tokens":100,"loss":2.5,"head_losses":[1.0,null],"tokens_per_second":50.0}"#;

    #[test]
    fn only_a_last_line_without_its_end_may_be_torn() {
        let torn = read(&format!("{STEP}\n{}", &STEP[..20])).unwrap();
        assert_eq!((torn.train.len(), torn.torn, torn.last_step(), torn.heads()), (1, true, 3, 2));
        assert!(!read(&format!("{STEP}\n\n{STEP}")).unwrap().torn, "a whole last line needs no end");
        let error = read(&format!("{STEP}\n{}\n{STEP}\n", &STEP[..20])).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl, line 2: "), "{error}");
        assert!(read(&STEP[..20].repeat(2)).unwrap().torn && read("").unwrap().train.is_empty());
    }

    #[test]
    fn values_that_are_not_there_are_gaps() {
        let metrics = read(&format!("{STEP}\n")).unwrap();
        assert_eq!(curve(&metrics.train, |line| line.loss), [(3.0, 2.5)]);
        assert_eq!(curve(&metrics.train, |line| line.head_losses[1]), []);
        assert_eq!(metrics.seconds_of_steps(), Some(2.0));
        assert_eq!(Metrics::default().seconds_of_steps(), None);
    }
}
