//! The access log on stdout, written by a thread of its own: a reader that stops reading stops no request.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::cli::print_line;
use crate::serve::record::LogSink;

/// Lines that wait to be written; those that come while so many wait are lost.
const MOST_WAITING: usize = 1 << 16;
/// Time to write the last lines, which a reader that stopped reading never takes.
const LAST_LINES: Duration = Duration::from_secs(2);

/// The log of a server.
#[derive(Debug)]
pub(super) struct AccessLog {
    lines: SyncSender<String>,
    /// Receives once all is written.
    written: Receiver<()>,
}

pub(super) fn start() -> AccessLog {
    let (lines, waiting) = sync_channel(MOST_WAITING);
    let (done, written) = sync_channel(1);
    thread::spawn(move || {
        write(&waiting);
        done.send(())
    });
    AccessLog { lines, written }
}

impl AccessLog {
    /// Takes lines without waiting.
    pub(super) fn sink(&self) -> LogSink {
        let lines = self.lines.clone();
        Arc::new(move |line: &Value| {
            let _ = lines.try_send(one_line(line)); // a log that nobody reads is no reason to refuse an answer
        })
    }

    /// Writes what is left, as far as it is read. All sinks must be gone.
    pub(super) fn finish(self) {
        drop(self.lines);
        let _ = self.written.recv_timeout(LAST_LINES); // the server ends, whoever reads its log
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

/// JSON in one line, without characters that a terminal obeys or a reader takes for a line's end: serde escapes only those below U+0020.
fn one_line(value: &Value) -> String {
    let is_harmful = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let text = value.to_string();
    if !text.contains(is_harmful) {
        return text;
    }
    text.chars().fold(String::with_capacity(text.len() + 16), |mut line, c| {
        if is_harmful(c) {
            line.push_str(&format!("\\u{:04x}", u32::from(c)))
        } else {
            line.push(c)
        }
        line
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_of_the_log_is_one_line_and_no_terminal_obeys_it() {
        let value = json!({"peer": "a\u{9b}31m\u{7f}b\u{2028}c\u{85}d\ne\u{1b}[2Jf", "text": "wie schön \u{1f44b}"});
        let line = one_line(&value);
        assert!(!line.contains(|c: char| c.is_control() || c == '\u{2028}'), "{line}");
        assert!(line.contains("wie schön \u{1f44b}") && line.contains(r"\u009b31m"), "{line}");
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), value);
    }
}
