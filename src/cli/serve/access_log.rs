//! The access log on stdout, written by a thread of its own: a reader that stops reading stops no request.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use serde_json::Value;

use crate::cli::print_line;
use crate::serve::record::LogSink;

/// Lines that wait to be written; those that come while so many wait are lost.
const MOST_WAITING: usize = 1 << 16;

/// The log of a server.
#[derive(Debug)]
pub(super) struct AccessLog {
    lines: SyncSender<String>,
    writer: JoinHandle<()>,
}

/// Starts the log.
pub(super) fn start() -> AccessLog {
    let (lines, waiting) = sync_channel(MOST_WAITING);
    AccessLog { lines, writer: thread::spawn(move || write(&waiting)) }
}

impl AccessLog {
    /// Takes lines without waiting.
    pub(super) fn sink(&self) -> LogSink {
        let lines = self.lines.clone();
        Arc::new(move |line: &Value| {
            let _ = lines.try_send(line.to_string()); // a log that nobody reads is no reason to refuse an answer
        })
    }

    /// Writes what is left. All sinks must be gone.
    pub(super) fn finish(self) {
        drop(self.lines);
        let _ = self.writer.join();
    }
}

/// Until all senders are gone, or stdout is closed.
fn write(lines: &Receiver<String>) {
    for line in lines {
        if print_line(line).is_err() {
            return;
        }
    }
}
