//! Bars on a terminal, nothing elsewhere; among them how far reading and tokenising data is.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::CommonFlags;
use crate::data::{ReadProgress, Watch};

const BAR: &str = "{bar:24} {bytes}/{total_bytes}  {msg}  {eta} left";

/// Runs what reads data, and shows how far it is.
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

/// A bar that only counts.
pub(super) const COUNT: &str = "{wide_bar} {pos}/{len}";

/// Drawn on stderr, if that is a terminal and people read it.
pub(super) fn progress_bar(total: Option<u64>, template: &str, common: &CommonFlags) -> ProgressBar {
    let target = if common.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(total, target).with_style(style)
}
