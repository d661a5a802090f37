//! How far reading and tokenising data is: a bar on a terminal, nothing elsewhere.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::CommonFlags;
use crate::data::ReadProgress;

const BAR: &str = "{bar:24} {bytes}/{total_bytes}  {msg}  {eta} left";

/// The bar of the file that is read.
pub(super) struct ReadingBar(ProgressBar);

impl ReadingBar {
    pub(super) fn new(common: &CommonFlags) -> Self {
        let bar = ProgressBar::with_draw_target(None, draw_target(common));
        Self(bar.with_style(ProgressStyle::with_template(BAR).unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    pub(super) fn hear(&self, progress: ReadProgress) {
        let ReadProgress { path, read, bytes, tokenised } = progress;
        if read < self.0.position() {
            self.0.reset_eta(); // another file
        }
        self.0.set_length(bytes);
        self.0.set_position(read);
        let speed = match tokenised.tokens {
            0 => String::new(), // rows of token ids
            _ => format!("  {:.0} tokens/s", tokenised.tokens_per_second()),
        };
        self.0.set_message(format!("reading {}{speed}", path.display()));
    }

    pub(super) fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// Where a progress bar is drawn: stderr, if that is a terminal and people read it.
pub(super) fn draw_target(common: &CommonFlags) -> ProgressDrawTarget {
    if common.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() }
}
