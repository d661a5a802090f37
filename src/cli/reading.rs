//! Progress: a bar on a terminal, a line every ten seconds elsewhere.

use std::cell::Cell;
use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::CommonFlags;
use crate::data::{ReadProgress, Watch};

const BAR: &str = "{bar:24} {bytes}/{total_bytes}  {msg}  {left}";
/// Time between progress lines if stderr is no terminal.
pub(super) const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Runs `read` with a progress bar of the files that it reads.
pub(super) fn watched<T>(common: &CommonFlags, read: impl FnOnce(Watch<'_>) -> T) -> T {
    let bar = progress_bar(None, BAR, common);
    let hear = |progress: ReadProgress| show(&bar, progress);
    let read = read(Some(&hear));
    bar.finish_and_clear();
    read
}

fn show(bar: &ProgressBar, progress: ReadProgress) {
    let ReadProgress { path, read, bytes, tokenised } = progress;
    if read < bar.position() {
        bar.reset_eta(); // another file
    }
    bar.set_length(bytes);
    bar.set_position(read);
    let speed = match tokenised.tokens {
        0 => String::new(), // rows of token ids
        _ => format!("  {:.0} tokens/s", tokenised.tokens_per_second()),
    };
    bar.set_message(format!("reading {}{speed}", path.display()));
}

/// Progress through a known number of things, of which an earlier run may have done some.
#[derive(Debug)]
pub(super) struct Counter<'c> {
    pub(super) bar: ProgressBar,
    common: &'c CommonFlags,
    things: &'static str,
    before: u64,
    began: Instant,
    last_line: Cell<Instant>,
}

impl<'c> Counter<'c> {
    pub(super) fn new(total: usize, before: usize, things: &'static str, common: &'c CommonFlags) -> Self {
        let template = format!("{{bar:24}} {{pos}}/{{len}} {things}  {{msg}}  {{left}}");
        let bar = progress_bar(Some(total as u64), &template, common);
        bar.set_position(before as u64);
        bar.reset_eta();
        let now = Instant::now();
        Self { bar, common, things, before: before as u64, began: now, last_line: Cell::new(now) }
    }

    pub(super) fn inc(&self) {
        self.set(self.bar.position() + 1);
    }

    pub(super) fn set(&self, done: u64) {
        self.bar.set_position(done);
        if !io::stderr().is_terminal() && self.last_line.get().elapsed() >= BETWEEN_LINES {
            self.last_line.set(Instant::now());
            let total = self.bar.length().unwrap_or(done);
            let left = time_left(self.began.elapsed(), done - self.before, total.saturating_sub(done));
            self.common.say(format_args!("{done}/{total} {}  {}  {left}", self.things, self.bar.message()));
        }
    }
}

/// Estimated time for `to_make` more, if `made` took `elapsed`.
pub(super) fn time_left(elapsed: Duration, made: u64, to_make: u64) -> String {
    match made {
        _ if to_make == 0 => "done".into(),
        0 => "time left unknown".into(),
        _ => format!("{} left", HumanDuration(elapsed.mul_f64(to_make as f64 / made as f64))),
    }
}

/// A bar on stderr; hidden with `--quiet` or if stderr is no terminal. In templates, `{left}` is the estimated time
/// left.
pub(super) fn progress_bar(total: Option<u64>, template: &str, common: &CommonFlags) -> ProgressBar {
    let target = if common.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let style = style.with_key("left", |state: &ProgressState, out: &mut dyn Write| {
        let left = HumanDuration(state.eta());
        let _ = if state.per_sec() > 0.0 { write!(out, "{left:#} left") } else { Ok(()) }; // a bar takes any text
    });
    ProgressBar::with_draw_target(total, target).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_from_what_is_done() {
        assert_eq!(time_left(Duration::from_secs(10), 5, 60), "2 minutes left");
        assert_eq!(time_left(Duration::ZERO, 0, 60), "time left unknown");
        assert_eq!(time_left(Duration::from_secs(10), 60, 0), "done");
    }
}
