//! Lines of input: from a terminal with editing and history, or from a pipe.

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use super::restore;
use crate::bounds::{ROW_BYTES, TEXT_BYTES};
use crate::cli::CommonFlags;

const PROMPT: &str = "> ";

/// Input at the prompt.
#[derive(Debug)]
pub(super) enum Input {
    Line(String),
    /// A line that is not UTF-8.
    NotText(anyhow::Error),
    /// Ctrl-C: the line is cleared.
    Cleared,
    /// Ctrl-D, or the end of a file.
    End,
}

/// The source of lines.
#[derive(Debug)]
pub(super) enum InputLines {
    /// stdin and stdout are terminals.
    Terminal {
        editor: Box<DefaultEditor>,
        /// Whether a line is being edited, with the terminal in raw mode.
        is_editing: Arc<AtomicBool>,
    },
    /// A pipe or a file; the prompt is shown if stdin is a terminal nevertheless.
    Plain {
        /// Whether stdin is a terminal.
        is_typed: bool,
    },
}

impl InputLines {
    /// Edits lines if stdin and stdout are terminals and `--json` is not given.
    ///
    /// # Errors
    /// An error of the terminal.
    pub(super) fn open(common: &CommonFlags) -> anyhow::Result<Self> {
        let is_typed = io::stdin().is_terminal();
        if common.json || !is_typed || !io::stdout().is_terminal() {
            return Ok(InputLines::Plain { is_typed });
        }
        let (config, is_editing) = (Config::builder().auto_add_history(true).build(), Arc::default());
        restore::at_signals(Arc::clone(&is_editing)).context("cannot use the terminal")?;
        let editor = DefaultEditor::with_config(config).context("cannot use the terminal")?;
        Ok(InputLines::Terminal { editor: Box::new(editor), is_editing })
    }

    /// Whether a signal that arrives during [`InputLines::next`] may end the program at once: the line editor's terminal has to be
    /// restored first.
    pub(super) fn may_end_at_once(&self) -> bool {
        matches!(self, InputLines::Plain { .. })
    }

    /// The next line, without its newline.
    ///
    /// # Errors
    /// An I/O error.
    pub(super) fn next(&mut self) -> anyhow::Result<Input> {
        match self {
            InputLines::Terminal { editor, is_editing } => {
                is_editing.store(true, Ordering::Relaxed);
                let read = editor.readline(PROMPT);
                is_editing.store(false, Ordering::Relaxed);
                match read {
                    Ok(line) => Ok(Input::Line(line)),
                    // Ctrl-C is a key here; a signal comes from another program.
                    Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => Ok(Input::Cleared),
                    Err(ReadlineError::Eof) => Ok(Input::End),
                    Err(error) => Err(error).context("cannot read from the terminal"),
                }
            }
            InputLines::Plain { is_typed } => {
                if *is_typed {
                    let _ = write!(io::stderr(), "{PROMPT}"); // the prompt is only a convenience
                }
                let line = read_line(&mut io::stdin().lock()).context("cannot read stdin")?;
                Ok(line.map_or(Input::End, input_of))
            }
        }
    }
}

/// A line with its newline, of which what is beyond all that can be tokenised is left out; `None` at the end.
///
/// # Errors
/// A line that has no end within the bytes that a row may have.
fn read_line(input: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    input.by_ref().take(TEXT_BYTES as u64 + 1).read_until(b'\n', &mut line)?;
    let is_cut = line.len() > TEXT_BYTES && !line.ends_with(b"\n");
    if is_cut {
        let mut beyond = Vec::new();
        let mut left = ROW_BYTES - line.len();
        while !beyond.ends_with(b"\n") {
            beyond.clear();
            let read = input.by_ref().take(1 << 16).read_until(b'\n', &mut beyond)?;
            if read == 0 {
                break;
            }
            left = left.checked_sub(read).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, format!("a line of more than {} MiB", ROW_BYTES >> 20))
            })?;
        }
    }
    Ok((!line.is_empty()).then_some(line))
}

fn input_of(line: Vec<u8>) -> Input {
    if line.len() > TEXT_BYTES {
        return Input::Line(String::from_utf8_lossy(&line).into_owned()); // its last character may be cut in two
    }
    match String::from_utf8(line) {
        Ok(line) => Input::Line(line.strip_suffix('\n').unwrap_or(&line).trim_end_matches('\r').to_owned()),
        Err(error) => Input::NotText(anyhow::Error::from(error.utf8_error()).context("the line is not UTF-8")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_end_is_an_error_and_a_long_one_is_cut() {
        let error = read_line(&mut io::BufReader::new(io::repeat(0))).unwrap_err();
        assert_eq!(error.to_string(), "a line of more than 100 MiB");
        let text = [vec![b'a'; TEXT_BYTES + 100_000], b"\nb\n".to_vec()].concat();
        let mut input = text.as_slice();
        assert_eq!(read_line(&mut input).unwrap().unwrap().len(), TEXT_BYTES + 1);
        assert_eq!(read_line(&mut input).unwrap().as_deref(), Some(&b"b\n"[..]));
        assert_eq!(read_line(&mut input).unwrap(), None);
    }
}
