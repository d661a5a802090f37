//! Lines of input: from a terminal with editing and history, or from a pipe.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use super::restore;
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
                let mut line = Vec::new();
                io::stdin().lock().read_until(b'\n', &mut line).context("cannot read stdin")?;
                if line.is_empty() {
                    return Ok(Input::End);
                }
                Ok(match String::from_utf8(line) {
                    Ok(line) => Input::Line(line.strip_suffix('\n').unwrap_or(&line).trim_end_matches('\r').to_owned()),
                    Err(error) => {
                        Input::NotText(anyhow::Error::from(error.utf8_error()).context("the line is not UTF-8"))
                    }
                })
            }
        }
    }
}
