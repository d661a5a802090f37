//! Training progress: a bar on a terminal, lines elsewhere, JSON for programs.

use std::io::{self, IsTerminal};

use crate::cli::progress::Progress;
use crate::cli::{CommonFlags, print_json};
use crate::formats::metrics::{MetricsLine, MetricsSplit};
use crate::plural::gibibytes;
use crate::train::checkpoint::DamagedCheckpoint;
use crate::train::divergence::RisenLoss;
use crate::train::hidden_states::HiddenStatesError;
use crate::train::next_tokens::{NextTokens, StatesDoubt};
use crate::train::training_loop::RunEvent;
use crate::tree::cross_validation;

/// Hashing fewer bytes takes only a moment.
const WORTH_A_LINE: u64 = 1 << 30;

/// Prints the events of a run.
pub(super) struct TrainProgress<'c> {
    common: &'c CommonFlags,
    progress: Progress,
    /// Whether stderr is a terminal, where the bar shows the steps.
    live: bool,
    total: usize,
    /// A step of this process was logged.
    has_begun: bool,
}

impl<'c> TrainProgress<'c> {
    pub(super) fn new(common: &'c CommonFlags, total: usize) -> Self {
        let progress = Progress::new(total as u64, 0, "loading", common);
        Self { common, progress, live: io::stderr().is_terminal(), total, has_begun: false }
    }

    pub(super) fn report(&mut self, event: &RunEvent<'_>) {
        match event {
            RunEvent::Hashing { bytes } if *bytes >= WORTH_A_LINE => {
                self.line(&format!("hashing {} of weights (cached for later runs)", gibibytes(*bytes)));
            }
            RunEvent::Hashing { .. } => {}
            RunEvent::RecipeChanged { keys, total_steps, is_joint } => {
                self.line(&changed(keys, *total_steps, *is_joint));
            }
            RunEvent::NoCheckpoint => self.line("no checkpoint yet: starting from step 0"),
            RunEvent::Damaged(DamagedCheckpoint { moved_to, why }) => self.line(&format!(
                "warning: a checkpoint is damaged, so the run goes on from an older one: {why}; its folder is now {}",
                moved_to.display()
            )),
            RunEvent::Resumed { checkpoint, is_verified } => {
                let unverified = if *is_verified { "" } else { ", which has no checksums (written by an earlier version)" };
                self.line(&format!("resuming from {}{unverified}", checkpoint.display()));
            }
            RunEvent::LogLacks { path, steps } => self.line(&format!(
                "warning: {} has no lines of steps {} to {}, so the curves lack them: was it moved or changed?",
                path.display(),
                steps.start(),
                steps.end()
            )),
            RunEvent::HiddenStates { path, filled, rows, are_verified } => {
                let unverified = if *are_verified { "" } else { ", without checksums (written by an earlier version)" };
                let path = path.display();
                self.line(&format!("hidden states of {filled} of {rows} rows are cached in {path}{unverified}"));
            }
            RunEvent::Answering { done, prompts } => {
                self.progress.set(0, format!("answers to validation prompts: {done}/{prompts}"));
            }
            RunEvent::CapturedStates(next_tokens) => self.line(&server_note(next_tokens)),
            RunEvent::CacheIncomplete(path) => self.line(&format!(
                "hidden states are computed, not read: several processes read only a cache with the states of all rows, which {} is not; fill it \
                 with one process",
                path.display()
            )),
            RunEvent::CacheLacks(split, why) => self.line(&cache_lacks(*split, why)),
            RunEvent::Stepped(line) => self.stepped(line),
            RunEvent::LossRisen { loss: RisenLoss { name, first, mean }, step, learning_rate } => self.line(&format!(
                "warning: the {name} rose from {first:.2} to {mean:.2} (mean of the last steps, step {step}), so training \
                 diverges: lower optimizer.learning_rate, now {learning_rate}, or use a longer warm-up ([schedule])"
            )),
            RunEvent::Evaluated(line) => {
                self.line(&format!("validation after step {}: {}", line.step, quality(line)));
                self.json(line);
            }
            RunEvent::Best(best, folder) => self.line(&format!("the best so far; saved {} ({best})", folder.display())),
            RunEvent::Saved(checkpoint) => self.line(&format!("saved {}", checkpoint.display())),
        }
    }

    /// On a terminal the bar shows each step; elsewhere the first and the last one are reported, and others at intervals.
    fn stepped(&mut self, line: &MetricsLine) {
        self.json(line);
        let speed = line.update.as_ref().map_or(0.0, |update| update.tokens_per_second);
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        if is_first {
            self.progress.begin_at(line.step as u64);
        }
        let text = format!("step {}/{}, {}, {speed:.0} tokens/s", line.step, self.total, quality(line));
        self.progress.set(line.step as u64, text);
        if !self.live && (is_first || line.step == self.total) {
            self.progress.say_line();
        }
    }

    fn line(&self, text: &str) {
        self.progress.say(text);
    }

    fn json(&self, line: &MetricsLine) {
        if self.common.json {
            let _ = self.progress.above(|| print_json(line)); // a closed stdout must not end the run
        }
    }
}

fn server_note(next_tokens: &NextTokens) -> String {
    let NextTokens { tokens, accuracy, cross_entropy, by_pairs, doubt } = next_tokens;
    let found = format!(
        "from {tokens} hidden states of the server the LM head predicts {:.1} % of the next tokens (cross-entropy {cross_entropy:.2}; {by_pairs:.2} \
         by a guess from the token before)",
        100.0 * accuracy
    );
    let doubt = match doubt {
        None => return found,
        Some(StatesDoubt::Normalised) => {
            "; they are as after the final norm, which the run applies once more: capture the states before it"
                .to_owned()
        }
        Some(StatesDoubt::NoContext) => {
            ", which is no better than that guess: are these the states of the last layer, and of this backbone?"
                .to_owned()
        }
        Some(StatesDoubt::OtherLayer { layer, layers, cross_entropy }) => format!(
            ", worse than from layer {layer} of {layers} in each file ({cross_entropy:.2}): the last one must be the output of the last decoder layer"
        ),
    };
    format!("warning: {found}{doubt}")
}

fn cache_lacks(split: MetricsSplit, why: &HiddenStatesError) -> String {
    if !why.is_full_disk() {
        return format!("warning: {why}");
    }
    let computed = match split {
        MetricsSplit::Train => "of training rows that are not stored are computed in every epoch",
        MetricsSplit::Validation => "of validation rows that are not stored are computed in every evaluation",
    };
    format!("warning: {why}; until then, states {computed}")
}

fn changed(keys: &[String], total_steps: Option<usize>, is_joint: bool) -> String {
    let scheduled = if is_joint {
        "the learning rate and λ0 follow their schedules"
    } else {
        "the learning rate follows its schedule"
    };
    let schedules = total_steps.map(|steps| format!("; from here {scheduled} over {steps} steps"));
    format!("the recipe changed: {}{}", keys.join(", "), schedules.unwrap_or_default())
}

fn quality(line: &MetricsLine) -> String {
    let accuracy = line.head_top1.first().copied().flatten();
    let accuracy = accuracy.map_or_else(|| "none".into(), |accuracy| format!("{accuracy:.3}"));
    let tokens = cross_validation::in_words(line).map_or_else(String::new, |tokens| format!(", {tokens}"));
    format!("{}, head-1 accuracy {accuracy}{tokens}", line.losses())
}
