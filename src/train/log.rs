//! The log of a run: `metrics.jsonl`, and the same curves as TensorBoard events.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::draft::loss::fused::TOP;
use crate::files::{OpenPath, failed, write_atomic};
use crate::formats::metrics::{MetricsError, MetricsFile, MetricsLine, MetricsSplit};
use crate::formats::run_folder::{METRICS, TENSORBOARD};
use crate::train::step::StepMetrics;
use crate::train::tensorboard::EventFile;

impl MetricsLine {
    /// A line from the metrics of a step or an evaluation.
    pub fn new(split: MetricsSplit, step: usize, epoch: f64, tokens: u64, metrics: &StepMetrics) -> Self {
        let top = |guesses: usize| metrics.level_top.iter().map(|level| level.map(|top| top[guesses - 1])).collect();
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
            head_losses: metrics.level_losses.clone(),
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

/// The folder of a run that is going on, and the logs in it.
#[derive(Debug)]
pub(super) struct LoggedFolder {
    written: [OpenPath; 3],
}

impl LoggedFolder {
    fn open(run: &Path, metrics: &Path, events: &Path) -> Result<Self, MetricsError> {
        let open = |path: &Path| OpenPath::open(path).map_err(failed("open", path));
        Ok(Self { written: [open(run)?, open(metrics)?, open(events)?] })
    }

    /// What is written into a file or folder that was removed is lost, and a checkpoint would make another folder, without recipe and provenance.
    ///
    /// # Errors
    /// [`MetricsError::Gone`], or the disk's own.
    pub(super) fn check(&self) -> Result<(), MetricsError> {
        self.written.iter().try_for_each(|open| match open.is_there().map_err(failed("look for", open.path()))? {
            true => Ok(()),
            false => Err(MetricsError::Gone { path: open.path().to_owned() }),
        })
    }
}

/// Both logs of a run.
#[derive(Debug)]
pub struct RunLog {
    pub(super) folder: Arc<LoggedFolder>,
    path: PathBuf,
    lines: File,
    events: EventFile,
    /// The last step with a line when the log was opened; 0 without one.
    last_step: usize,
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
        kept.iter().try_for_each(|(_, line)| events.append(line.step, &line.curves()))?;
        let folder = Arc::new(LoggedFolder::open(run, &path, events.path())?);
        let last_step = kept.iter().map(|(_, line)| line.step).max().unwrap_or(0);
        Ok(Self { folder, path, lines, events, last_step })
    }

    /// Writes the event file of a finished run again if it is gone: metrics.jsonl has all that it holds.
    ///
    /// # Errors
    /// [`MetricsError`].
    pub(super) fn restore_events(run: &Path) -> Result<(), MetricsError> {
        let folder = run.join(TENSORBOARD);
        if folder.exists() {
            return Ok(());
        }
        let mut events = EventFile::create(&folder)?;
        let lines = MetricsFile::read(&run.join(METRICS))?.lines;
        lines.iter().try_for_each(|(_, line)| events.append(line.step, &line.curves()))?;
        events.sync()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The steps up to `step` that have no line, although every `log_every`-th should have one: the file was moved or changed.
    pub(super) fn gap(&self, step: usize, log_every: NonZeroUsize) -> Option<RangeInclusive<usize>> {
        let due = step / log_every * log_every.get();
        (self.last_step < due).then_some(self.last_step + 1..=step)
    }

    /// Syncs all lines to disk. Call it before a checkpoint: a run resumed from there needs the lines up to it.
    ///
    /// # Errors
    /// [`MetricsError`].
    pub fn sync(&self) -> Result<(), MetricsError> {
        self.folder.check()?;
        self.lines.sync_all().map_err(failed("write", &self.path))?;
        self.events.sync()
    }

    /// Appends a line to both logs.
    ///
    /// # Errors
    /// [`MetricsError`].
    pub fn append(&mut self, line: &MetricsLine) -> Result<(), MetricsError> {
        self.folder.check()?;
        line.append_to(&mut self.lines).map_err(failed("write", &self.path))?;
        self.events.append(line.step, &line.curves())
    }
}
