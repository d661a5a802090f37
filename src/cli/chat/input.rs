//! Lines of input: from a terminal with editing and history, or from a pipe.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use crate::cli::CommonFlags;

const PROMPT: &str = "> ";

/// Input at the prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    Line(String),
    /// Ctrl-C: the line is cleared.
    Cleared,
    /// Ctrl-D, or the end of a file.
    End,
}

/// The source of lines.
#[derive(Debug)]
pub(super) enum InputLines {
    /// stdin and stdout are terminals.
    Terminal(Box<DefaultEditor>),
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
        let config = Config::builder().auto_add_history(true).build();
        Ok(InputLines::Terminal(Box::new(DefaultEditor::with_config(config).context("cannot use the terminal")?)))
    }

    /// The next line, without its newline.
    ///
    /// # Errors
    /// An I/O error.
    pub(super) fn next(&mut self) -> anyhow::Result<Input> {
        match self {
            InputLines::Terminal(editor) => match editor.readline(PROMPT) {
                Ok(line) => Ok(Input::Line(line)),
                // Ctrl-C is a key here; a signal comes from another program.
                Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => Ok(Input::Cleared),
                Err(ReadlineError::Eof) => Ok(Input::End),
                Err(error) => Err(error).context("cannot read from the terminal"),
            },
            InputLines::Plain { is_typed } => {
                if *is_typed {
                    let _ = write!(io::stderr(), "{PROMPT}"); // the prompt is only a convenience
                }
                let mut line = String::new();
                let bytes = io::stdin().lock().read_line(&mut line).context("cannot read stdin")?;
                let line = line.strip_suffix('\n').unwrap_or(&line);
                Ok(if bytes == 0 { Input::End } else { Input::Line(line.trim_end_matches('\r').into()) })
            }
        }
    }
}
