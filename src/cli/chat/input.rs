//! Lines of input: from a terminal with editing and history, or from a pipe.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use crate::cli::CommonFlags;

const PROMPT: &str = "> ";

/// What a user may do at the prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// A line.
    Line(String),
    /// Ctrl-C: the line is cleared.
    Cleared,
    /// Ctrl-D, or the end of a file.
    End,
}

/// The source of lines.
#[derive(Debug)]
pub(super) enum InputLines {
    /// A terminal on both sides.
    Terminal(Box<DefaultEditor>),
    /// A pipe or a file; the prompt is shown if someone types all the same.
    Plain {
        /// Whether stdin is a terminal.
        is_typed: bool,
    },
}

impl InputLines {
    /// Lines can be edited where stdout is free for it: on a terminal, and not with `--json`.
    ///
    /// # Errors
    /// What the terminal says.
    pub(super) fn open(common: &CommonFlags) -> anyhow::Result<Self> {
        let is_typed = io::stdin().is_terminal();
        if common.json || !is_typed || !io::stdout().is_terminal() {
            return Ok(InputLines::Plain { is_typed });
        }
        let config = Config::builder().auto_add_history(true).build();
        Ok(InputLines::Terminal(Box::new(DefaultEditor::with_config(config).context("cannot use the terminal")?)))
    }

    /// The next line, without its end.
    ///
    /// # Errors
    /// When there is no reading on.
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
                    let _ = write!(io::stderr(), "{PROMPT}"); // nobody looks
                }
                let mut line = String::new();
                let bytes = io::stdin().lock().read_line(&mut line).context("cannot read stdin")?;
                let line = line.strip_suffix('\n').unwrap_or(&line);
                Ok(if bytes == 0 { Input::End } else { Input::Line(line.trim_end_matches('\r').into()) })
            }
        }
    }
}
