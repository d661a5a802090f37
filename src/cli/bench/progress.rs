//! Progress of a bench: the prompts of the present pass, with the time left for all passes.

use std::cell::Cell;
use std::num::NonZeroUsize;

use super::setting::BenchSetting;
use crate::cli::CommonFlags;
use crate::cli::progress::Progress;

/// Passes over the prompts: `repeats` for each setting.
#[derive(Debug, Clone, Copy)]
struct Passes<'s> {
    settings: &'s [BenchSetting],
    repeats: NonZeroUsize,
    prompts: usize,
}

/// Counts the prompts that are done.
#[derive(Debug)]
pub(super) struct BenchProgress<'s> {
    passes: Passes<'s>,
    done: Cell<usize>,
    pub(super) progress: Progress,
}

impl<'s> BenchProgress<'s> {
    pub(super) fn new(
        settings: &'s [BenchSetting],
        repeats: NonZeroUsize,
        prompts: usize,
        common: &CommonFlags,
    ) -> Self {
        let passes = Passes { settings, repeats, prompts };
        let progress = Progress::new(passes.all() as u64, 0, passes.text(0), common);
        Self { passes, done: Cell::new(0), progress }
    }

    /// Whether any prompt is done.
    pub(super) fn has_begun(&self) -> bool {
        self.done.get() > 0
    }

    /// One more prompt is done.
    pub(super) fn inc(&self) {
        self.done.set(self.done.get() + 1);
        self.progress.set(self.done.get() as u64, self.passes.text(self.done.get()));
    }
}

impl Passes<'_> {
    fn all(&self) -> usize {
        self.settings.len() * self.repeats.get() * self.prompts
    }

    /// Which prompt of which pass comes after `done` prompts of all passes.
    fn text(&self, done: usize) -> String {
        let pass = done.saturating_sub(1) / self.prompts.max(1); // a whole pass is shown as such
        let (setting, repeat) = (pass / self.repeats, pass % self.repeats + 1);
        let mut text = format!("{}/{} prompts", done - pass * self.prompts, self.prompts);
        if self.repeats.get() > 1 {
            text += &format!(", repeat {repeat} of {}", self.repeats);
        }
        match self.settings.get(setting).map(BenchSetting::label) {
            Some(label) if !label.is_empty() => {
                format!("{text}, {label} ({} of {})", setting + 1, self.settings.len())
            }
            _ => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::setting::examples::sweep;
    use super::*;

    #[test]
    fn prompts_are_counted_within_a_pass() {
        let one = sweep(&[]);
        let passes = Passes { settings: &one, repeats: NonZeroUsize::MIN, prompts: 20 };
        assert_eq!(passes.text(0), "0/20 prompts");
        assert_eq!(passes.text(20), "20/20 prompts");
        let (two, repeats) = (sweep(&["--sweep", "temperature=0,1"]), NonZeroUsize::new(3).expect("above 0"));
        let passes = Passes { settings: &two, repeats, prompts: 20 };
        assert_eq!(passes.text(7), "7/20 prompts, repeat 1 of 3, temperature 0.0 (1 of 2)");
        assert_eq!(passes.text(60), "20/20 prompts, repeat 3 of 3, temperature 0.0 (1 of 2)");
        assert_eq!(passes.text(81), "1/20 prompts, repeat 2 of 3, temperature 1.0 (2 of 2)");
        assert_eq!(passes.all(), 120);
    }
}
