//! The log of a run: `metrics.jsonl`, and the same curves as TensorBoard events.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::Message;
use tensorboard_proto::event::Event;
use tensorboard_proto::summary::Summary;
use tensorboard_rs::record_writer::RecordWriter;
use tensorboard_rs::summary::scalar;

use crate::draft::medusa::fused_loss::TOP;
use crate::files::{failed, write_atomic};
use crate::formats::metrics::{MetricsError, MetricsFile, MetricsLine, MetricsSplit};
use crate::formats::run_folder::{METRICS, TENSORBOARD};
use crate::train::step::StepMetrics;

impl MetricsLine {
    /// A line from the metrics of a step or an evaluation.
    pub fn new(split: MetricsSplit, step: usize, epoch: f64, tokens: u64, metrics: &StepMetrics) -> Self {
        let top = |guesses: usize| metrics.head_top.iter().map(|head| head.map(|top| top[guesses - 1])).collect();
        Self {
            split,
            step,
            epoch,
            tokens: Some(tokens),
            loss: metrics.loss,
            lm_loss: metrics.lm_loss,
            heads_loss: Some(metrics.heads_loss),
            perplexity: metrics.perplexity,
            tokens_per_step: metrics.tokens_per_step,
            stopped_early: false,
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
            MetricsSplit::Train => "train",
            MetricsSplit::Validation => "validation",
        };
        let mut curves = vec![(format!("{split}/loss"), self.loss)];
        let optional = [
            ("lm_loss", self.lm_loss),
            ("heads_loss", self.heads_loss),
            ("perplexity", self.perplexity),
            ("tokens_per_step", self.tokens_per_step),
        ];
        curves.extend(optional.into_iter().filter_map(|(what, value)| Some((format!("{split}/{what}"), value?))));
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
    /// Opens the logs of a run that continues after `step`. Drops later lines and rewrites the event files from the
    /// kept lines, so that both logs have each step once.
    ///
    /// # Errors
    /// [`MetricsError`].
    pub fn open(run: &Path, step: usize) -> Result<Self, MetricsError> {
        let path = run.join(METRICS);
        let mut kept = MetricsFile::read(&path)?.lines;
        kept.retain(|(text, line)| text.ends_with(b"\n") && step > 0 && line.step <= step);
        let write_kept = |out: &mut BufWriter<File>| kept.iter().try_for_each(|(text, _)| out.write_all(text));
        write_atomic(&path, write_kept).map_err(failed("write", &path))?;
        let lines = OpenOptions::new().append(true).open(&path).map_err(failed("write", &path))?;
        let mut events = EventFile::create(&run.join(TENSORBOARD))?;
        kept.iter().try_for_each(|(_, line)| events.append(line))?;
        Ok(Self { path, lines, events })
    }

    /// Syncs all lines to disk. Call it before a checkpoint: a run resumed from there needs the lines up to it.
    ///
    /// # Errors
    /// [`MetricsError`].
    pub fn sync(&self) -> Result<(), MetricsError> {
        Ok(self.lines.sync_all().map_err(failed("write", &self.path))?)
    }

    /// Appends a line to both logs.
    ///
    /// # Errors
    /// [`MetricsError`].
    pub fn append(&mut self, line: &MetricsLine) -> Result<(), MetricsError> {
        line.append_to(&mut self.lines).map_err(failed("write", &self.path))?;
        self.events.append(line)
    }
}

/// An event file of TensorBoard with one event per line of metrics.jsonl.
struct EventFile {
    path: PathBuf,
    records: RecordWriter<BufWriter<File>>,
}

impl EventFile {
    /// Creates the only file in `folder` and removes all others.
    fn create(folder: &Path) -> Result<Self, MetricsError> {
        if folder.exists() {
            fs::remove_dir_all(folder).map_err(failed("remove", folder))?;
        }
        fs::create_dir_all(folder).map_err(failed("make", folder))?;
        let path = folder.join(format!("events.out.tfevents.{:010.0}.medusa-train", now()));
        let file = File::create(&path).map_err(failed("write", &path))?;
        let mut events = Self { path, records: RecordWriter::new(BufWriter::new(file)) };
        let mut first = Event::new();
        first.set_file_version("brain.Event:2".into());
        events.write(first)?;
        Ok(events)
    }

    #[expect(clippy::cast_possible_truncation, reason = "TensorBoard keeps float32")]
    fn append(&mut self, line: &MetricsLine) -> Result<(), MetricsError> {
        let mut summary = Summary::new();
        for (tag, value) in line.curves() {
            summary.mut_value().extend(scalar(&tag, value as f32).take_value());
        }
        let mut event = Event::new();
        event.set_step(line.step as i64);
        event.set_summary(summary);
        self.write(event)
    }

    fn write(&mut self, mut event: Event) -> Result<(), MetricsError> {
        event.set_wall_time(now());
        let bytes = event.write_to_bytes().map_err(io::Error::from);
        let written = bytes.and_then(|bytes| self.records.write(&bytes)).and_then(|()| self.records.flush());
        Ok(written.map_err(failed("write", &self.path))?)
    }
}

impl std::fmt::Debug for EventFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventFile").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Seconds since 1970, the unit of event times.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
