//! Progress of reading data files.

use super::progress::Progress;
use super::{CommonFlags, mebibytes};
use crate::data::{ReadProgress, Watch};

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
