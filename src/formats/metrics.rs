//! `metrics.jsonl`: one line per logged training step or evaluation; the run may still be writing it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use crate::files::{self, FileError, failed};

/// Why metrics.jsonl cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    #[error(transparent)]
    File(#[from] FileError),
    /// The run's folder or one of its logs was removed or moved while the run wrote to it.
    #[error(
        "{} was removed, moved or replaced while the run wrote to it, so the run ends here; put it back and use --resume, or train in another folder",
        path.display()
    )]
    Gone { path: PathBuf },
    /// A malformed line.
    #[error("{}, line {line}: {source}", path.display())]
    Line {
        path: PathBuf,
        /// 1-based.
        line: usize,
        source: serde_json::Error,
    },
}

/// One line of `metrics.jsonl`. Missing numbers are NaN: lines of earlier versions have fewer keys, and JSON has null
/// instead of NaN.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricsLine {
    /// "train" or "validation".
    pub split: MetricsSplit,
    /// Finished optimizer steps.
    pub step: usize,
    /// Passes over the data, as a fraction.
    #[serde(default = "unknown", deserialize_with = "number")]
    pub epoch: f64,
    /// Input tokens that the run has seen; in a validation line, the tokens evaluated.
    pub tokens: Option<u64>,
    /// Σ λk·Lk in Medusa-1, L_LM + λ0·Σ λk·Lk in Medusa-2; evaluations take the peak of λ0.
    #[serde(default = "unknown", deserialize_with = "number")]
    pub loss: f64,
    /// Loss of the LM head; `None` in Medusa-1.
    pub lm_loss: Option<f64>,
    /// Σ λk·Lk, without λ0; `None` in lines of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads_loss: Option<f64>,
    /// exp of the LM head's cross-entropy; only in Medusa-2's evaluations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Tokens per decoding step of trees on rows that they were not searched on; only in evaluations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_step: Option<f64>,
    /// After this evaluation the run stopped: `train.patience` evaluations in a row were no better than the best.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped_early: bool,
    /// Lk of each head.
    #[serde(default)]
    pub head_losses: Vec<Option<f64>>,
    /// Accuracy of the first guess.
    #[serde(default)]
    pub head_top1: Vec<Option<f64>>,
    /// Fraction of targets among the first two guesses.
    #[serde(default)]
    pub head_top2: Vec<Option<f64>>,
    /// Among the first three.
    #[serde(default)]
    pub head_top3: Vec<Option<f64>>,
    /// Among the first four.
    #[serde(default)]
    pub head_top4: Vec<Option<f64>>,
    /// Among the first five.
    #[serde(default)]
    pub head_top5: Vec<Option<f64>>,
    /// Only in training lines. [`MetricsLine::parse`] reads it: serde turns a flattened `Option` into `None` if one of
    /// its values has a wrong type.
    #[serde(flatten, skip_deserializing)]
    pub update: Option<UpdateLine>,
}

/// The rows a measurement was taken on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MetricsSplit {
    /// Training rows, measured before the update.
    Train,
    /// Held-out rows.
    Validation,
}

/// What a training took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrainingCost {
    /// Time of the logged steps: without loading, evaluations and saving.
    pub seconds: f64,
    /// Input tokens.
    pub tokens: u64,
}

/// The update of a training step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UpdateLine {
    /// Learning rate of this step: `optimizer.learning_rate` × the schedule's factor.
    #[serde(default = "unknown", deserialize_with = "number")]
    pub lr: f64,
    /// Learning rate of the heads; the same in Medusa-1.
    #[serde(default = "unknown", deserialize_with = "number")]
    pub heads_lr: f64,
    /// Factor of the heads' loss; 1 in Medusa-1.
    #[serde(default = "unknown", deserialize_with = "number")]
    pub lambda0: f64,
    /// Before clipping.
    #[serde(default = "unknown", deserialize_with = "number")]
    pub grad_norm: f64,
    /// Input tokens of the step ÷ its wall time.
    #[serde(default = "unknown", deserialize_with = "number")]
    pub tokens_per_second: f64,
    /// Resident memory of the process, or the most so far in libtorch's tensors on a GPU.
    pub memory_bytes: Option<u64>,
}

fn unknown() -> f64 {
    f64::NAN
}

fn number<'de, D: Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or(f64::NAN))
}

impl MetricsLine {
    /// Appends the line and a newline.
    ///
    /// # Errors
    /// An I/O error.
    pub fn append_to(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all((serde_json::to_string(self)? + "\n").as_bytes())
    }

    /// The losses in words. Medusa-2's total is not among them: while λ0 rises, the total rises although both of its parts fall.
    pub fn losses(&self) -> String {
        match (self.lm_loss, self.heads_loss) {
            (Some(lm), Some(heads)) => format!("LM loss {lm:.4}, heads loss {heads:.4}"),
            _ => format!("loss {:.4}", self.loss),
        }
    }

    /// The cost of the training that wrote these lines: each line's tokens divided by its tokens per second.
    pub fn training_cost<'l>(lines: impl Iterator<Item = &'l Self>) -> Option<TrainingCost> {
        let (mut seconds, mut before) = (0.0, 0);
        for line in lines.filter(|line| line.split == MetricsSplit::Train) {
            let tokens = line.tokens?;
            let speed = line.update.as_ref()?.tokens_per_second;
            seconds += tokens.saturating_sub(before) as f64 / Some(speed).filter(|&speed| speed > 0.0)?;
            before = tokens;
        }
        (seconds > 0.0).then_some(TrainingCost { seconds, tokens: before })
    }

    /// Parses one line.
    ///
    /// # Errors
    /// Position in the line, and cause.
    pub fn parse(text: &[u8]) -> Result<Self, serde_json::Error> {
        let line: Self = serde_json::from_slice(text)?;
        let is_train = line.split == MetricsSplit::Train;
        Ok(Self { update: is_train.then(|| serde_json::from_slice(text)).transpose()?, ..line })
    }
}

/// The contents of metrics.jsonl.
#[derive(Debug, Default)]
pub struct MetricsFile {
    /// Each line with its text, including the newline if it has one. The text is kept because writing a parsed number
    /// again may change its last digit.
    pub lines: Vec<(Vec<u8>, MetricsLine)>,
    /// The last line was incomplete and is omitted: the run is still writing it, or was killed.
    pub torn: bool,
}

impl MetricsFile {
    /// Reads the file; if it is missing, there are no lines yet. Only a last line without a newline may be incomplete.
    ///
    /// # Errors
    /// [`MetricsError`], with the line.
    pub fn read(path: &Path) -> Result<Self, MetricsError> {
        let bytes = match files::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            read => read.map_err(failed("read", path))?,
        };
        let mut file = Self::default();
        for (at, text) in texts(&bytes).enumerate().filter(|(_, text)| !text.trim_ascii().is_empty()) {
            match MetricsLine::parse(text) {
                Ok(line) => file.lines.push((text.to_owned(), line)),
                Err(_) if !text.ends_with(b"\n") => file.torn = true,
                Err(source) => return Err(MetricsError::Line { path: path.to_owned(), line: at + 1, source }),
            }
        }
        Ok(file)
    }

    /// As [`MetricsFile::read`], but skips malformed lines and returns nothing for an unreadable file: for an overview.
    pub fn read_what_is_whole(path: &Path) -> Self {
        let line = |text: &[u8]| MetricsLine::parse(text).ok().map(|line| (text.to_owned(), line));
        Self { lines: texts(&files::read(path).unwrap_or_default()).filter_map(line).collect(), torn: false }
    }
}

fn texts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split_inclusive(|&byte| byte == b'\n')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<MetricsFile, MetricsError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        crate::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
        MetricsFile::read(&path)
    }

    const STEP: &str =
        r#"{"split":"train","step":3,"tokens":100,"loss":2.5,"head_losses":[1.0,null],"tokens_per_second":50.0}"#;

    #[test]
    fn only_a_last_line_without_its_end_may_be_torn_and_other_broken_lines_are_named() {
        let torn = read(&format!("{STEP}\n{}", &STEP[..20])).unwrap();
        assert_eq!((torn.lines.len(), torn.torn, torn.lines[0].1.step), (1, true, 3));
        assert!(!read(&format!("{STEP}\n\n{STEP}")).unwrap().torn, "a whole last line needs no end");
        let error = read(&format!("{STEP}\n{}\n{STEP}\n", &STEP[..20])).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl, line 2: "), "{error}");
        let wrong_type = STEP.replace("50.0", "\"fast\"");
        let error = read(&format!("{STEP}\n{wrong_type}\n{STEP}\n")).unwrap_err().to_string();
        assert!(error.contains("metrics.jsonl, line 2: invalid type: string \"fast\""), "{error}");
        assert!(read(&STEP[..20].repeat(2)).unwrap().torn && read("").unwrap().lines.is_empty());
    }

    #[test]
    fn lines_of_earlier_versions_know_less_and_validation_updates_nothing() {
        let line = read(STEP).unwrap().lines.remove(0).1;
        let cost = TrainingCost { seconds: 2.0, tokens: 100 };
        assert_eq!(MetricsLine::training_cost([&line].into_iter()), Some(cost));
        assert_eq!(MetricsLine::training_cost([].into_iter()), None);
        let update = line.update.unwrap();
        assert!(line.epoch.is_nan() && update.lr.is_nan() && update.memory_bytes.is_none());
        assert_eq!((line.loss, line.head_losses, update.tokens_per_second), (2.5, vec![Some(1.0), None], 50.0));
        assert_eq!(read(STEP).unwrap().lines[0].1.losses(), "loss 2.5000");
        let validation = STEP.replace("train", "validation").replace("2.5", "null");
        let line = read(&validation).unwrap().lines.remove(0).1;
        assert!(line.update.is_none() && line.loss.is_nan());
    }

    #[test]
    fn losses_of_two_parts_are_distinguished() {
        let joint = STEP.replace("\"loss\":2.5", "\"loss\":0.11,\"lm_loss\":0.01,\"heads_loss\":4.56789");
        let line = read(&joint).unwrap().lines.remove(0).1;
        assert_eq!(line.losses(), "LM loss 0.0100, heads loss 4.5679");
        let without_targets = joint.replace("0.01,", "null,");
        assert_eq!(read(&without_targets).unwrap().lines[0].1.losses(), "loss 0.1100");
    }
}
