//! How a run goes on: a bar on a terminal, now and then a line elsewhere, JSON for programs.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar};

use crate::cli::reading::progress_bar;
use crate::cli::{CommonFlags, gibibytes, print_json};
use crate::formats::metrics::MetricsLine;
use crate::train::training_loop::RunEvent;

/// Where there is no terminal, steps are told no more often than this.
const BETWEEN_LINES: Duration = Duration::from_secs(10);
/// Fewer bytes are read in a moment.
const WORTH_A_LINE: u64 = 1 << 30;
const BAR: &str = "{bar:24} {pos}/{len}  {msg}  {eta} left";

/// Tells the user about a run.
pub(super) struct TrainProgress<'c> {
    common: &'c CommonFlags,
    bar: ProgressBar,
    /// Steps are told by the bar.
    live: bool,
    total: usize,
    /// When this process made its first step, and which it was.
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
                self.line(&format!("reading {} of weights once, to know them again", gibibytes(*bytes)));
            }
            RunEvent::Hashing { .. } => {}
            RunEvent::Resumed(checkpoint) => self.line(&format!("goes on from {}", checkpoint.display())),
            RunEvent::HiddenStates { path, filled, sequences } => {
                self.line(&format!("hidden states of {filled} of {sequences} sequences are in {}", path.display()));
            }
            RunEvent::Stepped(line) => self.stepped(line),
            RunEvent::Evaluated(line) => {
                self.line(&format!("validation after step {}: {}", line.step, quality(line)));
                self.json(line);
            }
            RunEvent::Saved(checkpoint) => self.line(&format!("saved {}", checkpoint.display())),
        }
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn stepped(&mut self, line: &MetricsLine) {
        self.json(line);
        let (began, first) = *self.began.get_or_insert_with(|| {
            self.bar.set_position(line.step as u64); // a resumed run: the time left counts from here
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
            let left = time_left(began.elapsed(), line.step - first, self.total - line.step);
            self.common.say(format!("step {}/{}  {text}  {left}", line.step, self.total));
        }
    }

    /// A line above the bar, or a plain one.
    fn line(&self, text: &str) {
        if self.live { self.bar.suspend(|| self.common.say(text)) } else { self.common.say(text) }
    }

    fn json(&self, line: &MetricsLine) {
        if self.common.json {
            let _ = print_json(line); // the run matters more than a reader that went away
        }
    }
}

fn quality(line: &MetricsLine) -> String {
    let accuracy = line.head_top1.first().copied().flatten();
    let accuracy = accuracy.map_or_else(|| "none".into(), |accuracy| format!("{accuracy:.3}"));
    format!("loss {:.4}  head-1 accuracy {accuracy}", line.loss)
}

pub(in crate::cli) fn time_left(elapsed: Duration, made: usize, to_make: usize) -> String {
    if made == 0 {
        return "time left unknown yet".into();
    }
    let left = elapsed.mul_f64(to_make as f64 / made as f64);
    format!("{} left", HumanDuration(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_from_the_steps_made() {
        assert_eq!(time_left(Duration::from_secs(10), 5, 60), "2 minutes left");
        assert_eq!(time_left(Duration::ZERO, 0, 60), "time left unknown yet");
    }
}
