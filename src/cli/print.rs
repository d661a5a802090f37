//! Prints results to stdout, as text that a terminal shows.

use std::fmt::Display;
use std::io::{self, Write};

use console::Term;
use serde::Serialize;

use super::wrap;

/// A text whose control characters and marks of direction are visible: a name or a key from a file must not give a terminal commands. Each stays one character
/// wide.
pub(super) fn visible(text: &str) -> String {
    let visible = |c: char| match c {
        '\n' | '\t' => c,
        '\u{0}'..='\u{1f}' => char::from_u32(0x2400 + c as u32).unwrap_or(char::REPLACEMENT_CHARACTER),
        '\u{7f}' => '\u{2421}',
        '\u{80}'..='\u{9f}'
        | '\u{61c}'
        | '\u{200e}'..='\u{200f}'
        | '\u{202a}'..='\u{202e}'
        | '\u{2066}'..='\u{2069}' => char::REPLACEMENT_CHARACTER,
        _ => c,
    };
    text.chars().map(visible).collect()
}

/// An error without the middle of a value that it quotes, if that is megabytes long.
pub(super) fn shortened(text: String) -> String {
    const KEPT: usize = 2000; // characters, at each end
    let Some((from, _)) = text.char_indices().nth(KEPT) else { return text };
    match text.char_indices().nth_back(KEPT - 1) {
        Some((to, _)) if to > from => format!("{} … {}", &text[..from], &text[to..]),
        _ => text,
    }
}

/// Prints a line of a result to stdout, never broken: a path, JSON, text of a model.
///
/// # Errors
/// If stdout cannot be written.
pub fn print_line(line: impl Display) -> anyhow::Result<()> {
    write_out(&format!("{line}\n"))
}

/// Writes to stdout at once.
///
/// # Errors
/// [`StdoutClosed`], or the I/O error.
pub(super) fn write_out(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => StdoutClosed.into(),
        _ => error.into(),
    })
}

/// The reader of stdout has ended, as `head` does after its lines: no mistake, and nothing to say.
#[derive(Debug, thiserror::Error)]
#[error("nothing reads stdout any more")]
pub(super) struct StdoutClosed;

/// Prints text for people to stdout, broken between words where stdout is a terminal.
///
/// # Errors
/// If stdout cannot be written.
pub(super) fn print_text(text: impl Display) -> anyhow::Result<()> {
    print_line(wrap::wrapped(&visible(&text.to_string()), wrap::columns(&Term::stdout())))
}

/// Prints a result as one line of JSON to stdout.
///
/// # Errors
/// If stdout cannot be written.
pub fn print_json(object: &impl Serialize) -> anyhow::Result<()> {
    print_line(serde_json::to_string(object)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_middle_of_a_long_error_is_left_out() {
        let (short, long) = ("é".repeat(4000), format!("a.json: {}; expected b", "é".repeat(5_000_000)));
        assert_eq!(shortened(short.clone()), short);
        let kept = shortened(long);
        assert!(kept.starts_with("a.json: é") && kept.ends_with("é; expected b") && kept.chars().count() < 4010);
    }

    #[test]
    fn control_characters_are_shown_and_nothing_else_is_changed() {
        assert_eq!(visible("a\x1b[31mb\r\x07\x7f"), "a␛[31mb␍␇␡");
        assert_eq!(visible("\u{9b}31m\u{202e}x"), "\u{fffd}31m\u{fffd}x");
        for text in ["a\n\tb", "größe €, 日本 🐙"] {
            assert_eq!(visible(text), text);
        }
    }
}
