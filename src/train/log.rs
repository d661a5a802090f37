//! What a run writes down while it trains: `metrics.jsonl`, and the same curves as TensorBoard events.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::Message;
use serde::{Deserialize, Serialize};
use tensorboard_proto::event::Event;
use tensorboard_proto::summary::Summary;
use tensorboard_rs::record_writer::RecordWriter;
use tensorboard_rs::summary::scalar;

use crate::draft::medusa::fused_loss::TOP;
use crate::files::write_atomic;
use crate::train::step::StepMetrics;

/// What can go wrong while writing it down.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The disk.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line that is not ours.
    #[error("{}, line {line}: {source}; the file was changed by hand, or belongs to another run", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// 1-based.
        line: usize,
        /// Where and why.
        source: serde_json::Error,
    },
}

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricsLine {
    /// "train" or "validation".
    pub split: Split,
    /// Optimizer steps finished.
    pub step: usize,
    /// Passes over the data, as a fraction.
    pub epoch: f64,
    /// Input tokens seen by the run so far (validation: tokens evaluated).
    pub tokens: u64,
    /// Σ λk·Lk in Medusa-1, L_LM + λ0·Σ λk·Lk in Medusa-2.
    pub loss: f64,
    /// The LM head's loss; none in Medusa-1.
    pub lm_loss: Option<f64>,
    /// Of the LM head, exp of its cross-entropy: of evaluations in Medusa-2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub perplexity: Option<f64>,
    /// Lk.
    pub head_losses: Vec<Option<f64>>,
    /// Accuracy of the first guess.
    pub head_top1: Vec<Option<f64>>,
    /// Target among the first two guesses.
    pub head_top2: Vec<Option<f64>>,
    /// … three.
    pub head_top3: Vec<Option<f64>>,
    /// … four.
    pub head_top4: Vec<Option<f64>>,
    /// … five.
    pub head_top5: Vec<Option<f64>>,
    /// What only a training step has.
    #[serde(flatten)]
    pub update: Option<UpdateLine>,
}

/// Which rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Rows being trained on, before the update.
    Train,
    /// Held-out rows.
    Validation,
}

/// The update of a training step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UpdateLine {
    /// Learning rate of this step: `optimizer.learning_rate` × the schedule's factor.
    pub lr: f64,
    /// Learning rate of the heads; the same in Medusa-1.
    pub heads_lr: f64,
    /// Factor of the heads' loss; 1 in Medusa-1.
    pub lambda0: f64,
    /// Before clipping.
    pub grad_norm: f64,
    /// Input tokens of the step ÷ its wall time.
    pub tokens_per_second: f64,
    /// Resident memory of the process.
    pub memory_bytes: Option<u64>,
}

impl MetricsLine {
    /// From what a step or an evaluation measured.
    pub fn new(split: Split, step: usize, epoch: f64, tokens: u64, metrics: &StepMetrics) -> Self {
        let top = |guesses: usize| metrics.head_top.iter().map(|head| head.map(|top| top[guesses - 1])).collect();
        Self {
            split,
            step,
            epoch,
            tokens,
            loss: metrics.loss,
            lm_loss: metrics.lm_loss,
            perplexity: metrics.perplexity,
            head_losses: metrics.head_losses.clone(),
            head_top1: top(1),
            head_top2: top(2),
            head_top3: top(3),
            head_top4: top(4),
            head_top5: top(TOP),
            update: None,
        }
    }

    /// Tag and value of every curve.
    fn curves(&self) -> Vec<(String, f64)> {
        let split = match self.split {
            Split::Train => "train",
            Split::Validation => "validation",
        };
        let mut curves = vec![(format!("{split}/loss"), self.loss)];
        let of_lm = [("lm_loss", self.lm_loss), ("perplexity", self.perplexity)];
        curves.extend(of_lm.into_iter().filter_map(|(what, value)| Some((format!("{split}/{what}"), value?))));
        let heads = [("loss", &self.head_losses), ("top1", &self.head_top1), ("top5", &self.head_top5)];
        for (what, values) in heads {
            let present = values.iter().enumerate().filter_map(|(head, value)| Some((head + 1, (*value)?)));
            curves.extend(present.map(|(head, value)| (format!("{split}/head{head}/{what}"), value)));
        }
        if let Some(update) = &self.update {
            let scalars = [
                ("lr", update.lr),
                ("heads_lr", update.heads_lr),
                ("lambda0", update.lambda0),
                ("grad_norm", update.grad_norm),
                ("tokens_per_second", update.tokens_per_second),
            ];
            curves.extend(scalars.map(|(tag, value)| (format!("{split}/{tag}"), value)));
        }
        curves
    }
}

/// Both logs of a run.
#[derive(Debug)]
pub struct RunLog {
    path: PathBuf,
    lines: File,
    events: EventFile,
}

impl RunLog {
    /// Opens the logs of a run that goes on after `step`: lines beyond it are dropped, and the event files are written anew
    /// from the lines that stay, so both hold each step once.
    ///
    /// # Errors
    /// [`LogError`].
    pub fn open(run: &Path, step: usize) -> Result<Self, LogError> {
        let path = run.join("metrics.jsonl");
        let error = |source| LogError::Io { path: path.clone(), source };
        let kept: Vec<_> = read_texts(&path)?.into_iter().filter(|(_, line)| step > 0 && line.step <= step).collect();
        let write_kept =
            |out: &mut BufWriter<File>| kept.iter().try_for_each(|(text, _)| out.write_all(text.as_bytes()));
        write_atomic(&path, write_kept).map_err(error)?;
        let lines = OpenOptions::new().append(true).open(&path).map_err(error)?;
        let mut events = EventFile::create(&run.join("tensorboard"))?;
        kept.iter().try_for_each(|(_, line)| events.append(line))?;
        Ok(Self { path, lines, events })
    }

    /// Waits until the disk has every line. Before a checkpoint: a run that goes on from it needs the lines up to it.
    ///
    /// # Errors
    /// [`LogError`].
    pub fn sync(&self) -> Result<(), LogError> {
        self.lines.sync_all().map_err(|source| LogError::Io { path: self.path.clone(), source })
    }

    /// Appends one line to both.
    ///
    /// # Errors
    /// [`LogError`].
    pub fn append(&mut self, line: &MetricsLine) -> Result<(), LogError> {
        write_line(&mut self.lines, line).map_err(|source| LogError::Io { path: self.path.clone(), source })?;
        self.events.append(line)
    }
}

/// An event file of TensorBoard, one event a line of metrics.jsonl.
struct EventFile {
    path: PathBuf,
    records: RecordWriter<BufWriter<File>>,
}

impl EventFile {
    /// The only file in `folder`, whatever was there.
    fn create(folder: &Path) -> Result<Self, LogError> {
        let error = |path: &Path, source| LogError::Io { path: path.into(), source };
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(|e| error(folder, e))?;
        }
        fs::create_dir_all(folder).map_err(|e| error(folder, e))?;
        let path = folder.join(format!("events.out.tfevents.{:010.0}.medusa-train", now()));
        let file = File::create(&path).map_err(|e| error(&path, e))?;
        let mut events = Self { path, records: RecordWriter::new(BufWriter::new(file)) };
        let mut first = Event::new();
        first.set_file_version("brain.Event:2".into());
        events.write(first)?;
        Ok(events)
    }

    #[expect(clippy::cast_possible_truncation, reason = "TensorBoard keeps float32")]
    fn append(&mut self, line: &MetricsLine) -> Result<(), LogError> {
        let mut summary = Summary::new();
        for (tag, value) in line.curves() {
            summary.mut_value().extend(scalar(&tag, value as f32).take_value());
        }
        let mut event = Event::new();
        event.set_step(line.step as i64);
        event.set_summary(summary);
        self.write(event)
    }

    fn write(&mut self, mut event: Event) -> Result<(), LogError> {
        event.set_wall_time(now());
        let bytes = event.write_to_bytes().map_err(io::Error::from);
        let written = bytes.and_then(|bytes| self.records.write(&bytes)).and_then(|()| self.records.flush());
        written.map_err(|source| LogError::Io { path: self.path.clone(), source })
    }
}

impl std::fmt::Debug for EventFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventFile").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Seconds since 1970, as events carry them.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// All whole lines of a `metrics.jsonl`; a last line cut off by a crash is left out. No file, no lines.
///
/// # Errors
/// [`LogError`].
pub fn read_lines(path: &Path) -> Result<Vec<MetricsLine>, LogError> {
    Ok(read_texts(path)?.into_iter().map(|(_, line)| line).collect())
}

/// As [`read_lines`], each with its text, newline included: reading and writing a number again may change its last digit.
fn read_texts(path: &Path) -> Result<Vec<(String, MetricsLine)>, LogError> {
    let error = |source| LogError::Io { path: path.into(), source };
    let file = match File::open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        other => other.map_err(error)?,
    };
    let mut lines = vec![];
    let mut reader = BufReader::new(file);
    let mut text = String::new();
    while reader.read_line(&mut text).map_err(error)? > 0 && text.ends_with('\n') {
        let parsed = serde_json::from_str(&text);
        let line = parsed.map_err(|source| LogError::Line { path: path.into(), line: lines.len() + 1, source })?;
        lines.push((std::mem::take(&mut text), line));
    }
    Ok(lines)
}

fn write_line(out: &mut impl Write, line: &MetricsLine) -> io::Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    out.write_all(text.as_bytes())
}
