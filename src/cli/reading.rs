//! Data files of the command line: whether they are there, and the progress of reading them.

use super::progress::Progress;
use super::{CommonFlags, UsageError};
use crate::data::{ReadProgress, Watch, source};
use crate::hub::id;
use crate::plural::mebibytes;

/// Refuses entries that are no Hub ids and for which there is no file.
///
/// # Errors
/// [`UsageError`], which begins with `place`.
pub(super) fn check_data(place: &str, entries: &[String]) -> Result<(), UsageError> {
    let local: Vec<String> = entries.iter().filter(|entry| id::data(entry).is_none()).cloned().collect();
    source::find(&local).map(drop).map_err(|error| UsageError(format!("{place}{error}")))
}

/// Runs `read`, which reports the files that it reads.
pub(super) fn watched<T>(common: &CommonFlags, read: impl FnOnce(Watch<'_>) -> T) -> T {
    let progress = Progress::new(0, 0, "reading", common);
    let hear = |read: ReadProgress| {
        progress.set_total(read.bytes);
        progress.set(read.read, text(&read));
    };
    read(Some(&hear))
}

fn text(progress: &ReadProgress) -> String {
    let ReadProgress { path, read, bytes, tokenised } = progress;
    let speed = match tokenised.tokens {
        0 => String::new(), // rows of token ids
        _ => format!(", {:.0} tokens/s", tokenised.tokens_per_second()),
    };
    format!("reading {}: {} of {}{speed}", path.display(), mebibytes(*read), mebibytes(*bytes))
}
