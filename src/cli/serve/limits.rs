//! Limits of the server: texts, requests, connections.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::cli::numbers::above_zero;
use crate::serve::connections::ConnectionLimits;
use crate::serve::service::RequestLimits;

/// Files that the server opens beside its connections.
const OTHER_FILES: u64 = 64;
/// Most connections, where the limit on open files allows more.
const MOST_CONNECTIONS: u64 = 4096;
/// For a request's headers, and the wait for the next request on a connection.
const HEADER_TIME: Duration = Duration::from_secs(10);
/// For a request's body.
const BODY_TIME: Duration = Duration::from_secs(30);
/// For a client that reads nothing of its answer.
const WRITE_TIME: Duration = Duration::from_secs(30);

/// What the server takes at a time.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits")]
pub(super) struct LimitFlags {
    /// Texts decoded together [default: as many as the free memory holds at full context, at most 32 on a CPU and 256 on a GPU].
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    pub(super) max_texts: Option<NonZeroUsize>,
    /// Texts that may wait for others; a request beyond them gets status 429.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(super) max_queue: usize,
    /// Maximum number of new tokens of a text; a request for more gets status 400 [default: what the context holds].
    #[arg(long, value_name = "N", value_parser = above_zero::<NonZeroUsize>)]
    max_new_tokens: Option<NonZeroUsize>,
    /// Size of a request's body; a larger one gets status 413.
    #[arg(long, value_name = "BYTES", default_value = "4194304", value_parser = above_zero::<NonZeroUsize>)]
    max_body_bytes: NonZeroUsize,
    /// Seconds from a request's headers to the end of its answer, the wait in the queue included; then it gets status 408.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = above_zero::<NonZeroU32>)]
    request_timeout: NonZeroU32,
    /// Seconds that open requests have after SIGTERM or Ctrl-C; then they end with an error.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(super) drain_timeout: u64,
}

impl LimitFlags {
    pub(super) fn request(&self) -> RequestLimits {
        RequestLimits {
            body_bytes: self.max_body_bytes.get(),
            body_time: BODY_TIME,
            new_tokens: self.max_new_tokens,
            time: Duration::from_secs(self.request_timeout.get().into()),
        }
    }

    pub(super) fn connections(&self) -> ConnectionLimits {
        ConnectionLimits {
            connections: most_connections(),
            header_time: HEADER_TIME,
            write_time: WRITE_TIME,
            drain_time: Duration::from_secs(self.drain_timeout),
        }
    }
}

/// As many as files may be open, after the soft limit is raised to the hard one.
fn most_connections() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let files = if raised.is_ok() { maximum } else { current };
    let connections =
        files.map_or(MOST_CONNECTIONS, |files| files.saturating_sub(OTHER_FILES).clamp(1, MOST_CONNECTIONS));
    usize::try_from(connections).unwrap_or(usize::MAX)
}
