//! Training progress: a bar on a terminal, lines elsewhere, JSON for programs.

use std::io::{self, IsTerminal};
use std::time::Instant;

use indicatif::ProgressBar;

use crate::cli::reading::{BETWEEN_LINES, progress_bar, time_left};
use crate::cli::{CommonFlags, gibibytes, print_json};
use crate::formats::metrics::MetricsLine;
use crate::train::training_loop::RunEvent;

/// Hashing fewer bytes takes only a moment.
const WORTH_A_LINE: u64 = 1 << 30;
const BAR: &str = "{bar:24} {pos}/{len}  {msg}  {left}";

/// Prints the events of a run.
pub(super) struct TrainProgress<'c> {
    common: &'c CommonFlags,
    bar: ProgressBar,
    /// Whether stderr is a terminal, where the bar shows the steps.
    live: bool,
    total: usize,
    /// Time and number of the first step of this process.
    began: Option<(Instant, usize)>,
    last_line: Option<Instant>,
}

impl<'c> TrainProgress<'c> {
    pub(super) fn new(common: &'c CommonFlags, total: usize) -> Self {
        let live = io::stderr().is_terminal() && !common.quiet;
        Self { common, bar: progress_bar(Some(total as u64), BAR, common), live, total, began: None, last_line: None }
    }

    pub(super) fn tell(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Hashing { bytes } if *bytes >= WORTH_A_LINE => {
                self.line(&format!("hashing {} of weights (cached for later runs)", gibibytes(*bytes)));
            }
            RunEvent::Hashing { .. } => {}
            RunEvent::RecipeChanged { keys, total_steps } => self.line(&changed(keys, *total_steps)),
            RunEvent::Resumed(checkpoint) => self.line(&format!("resuming from {}", checkpoint.display())),
            RunEvent::HiddenStates { path, filled, rows } => {
                self.line(&format!("hidden states of {filled} of {rows} rows are cached in {}", path.display()));
            }
            RunEvent::Stepped(line) => self.stepped(line),
            RunEvent::Evaluated(line) => {
                self.line(&format!("validation after step {}: {}", line.step, quality(line)));
                self.json(line);
            }
            RunEvent::Best(best, folder) => self.line(&format!("the best so far; saved {} ({best})", folder.display())),
            RunEvent::Saved(checkpoint) => self.line(&format!("saved {}", checkpoint.display())),
        }
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn stepped(&mut self, line: &MetricsLine) {
        self.json(line);
        let (began, first) = *self.began.get_or_insert_with(|| {
            self.bar.set_position(line.step as u64); // estimates start here in a resumed run
            self.bar.reset_eta();
            (Instant::now(), line.step)
        });
        let speed = line.update.as_ref().map_or(0.0, |update| update.tokens_per_second);
        let text = format!("{}  {speed:.0} tokens/s", quality(line));
        if self.live {
            self.bar.set_position(line.step as u64);
            self.bar.set_message(text);
            return;
        }
        let is_due = self.last_line.is_none_or(|last| last.elapsed() >= BETWEEN_LINES) || line.step == self.total;
        if is_due {
            self.last_line = Some(Instant::now());
            let left = time_left(began.elapsed(), (line.step - first) as u64, (self.total - line.step) as u64);
            self.common.say(format!("step {}/{}  {text}  {left}", line.step, self.total));
        }
    }

    /// Prints a line, above the bar if there is one.
    fn line(&self, text: &str) {
        if self.live { self.bar.suspend(|| self.common.say(text)) } else { self.common.say(text) }
    }

    fn json(&self, line: &MetricsLine) {
        if self.common.json {
            let _ = print_json(line); // a closed stdout must not end the run
        }
    }
}

fn changed(keys: &[String], total_steps: Option<usize>) -> String {
    let schedules = total_steps
        .map(|steps| format!("; from here the learning rate and λ0 follow their schedules over {steps} steps"));
    format!("the recipe changed: {}{}", keys.join(", "), schedules.unwrap_or_default())
}

fn quality(line: &MetricsLine) -> String {
    let accuracy = line.head_top1.first().copied().flatten();
    let accuracy = accuracy.map_or_else(|| "none".into(), |accuracy| format!("{accuracy:.3}"));
    let tokens = line.tokens_per_step.map_or_else(String::new, |tokens| format!("  {tokens:.2} tokens per step"));
    format!("{}  head-1 accuracy {accuracy}{tokens}", line.losses())
}
