//! Results on stdout, and numbers of bytes as people read them.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

/// Bytes for people.
pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Bytes as people read many of them.
pub fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// A result for people, on stdout.
///
/// # Errors
/// When stdout cannot be written.
pub fn print_line(line: impl Display) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout(), "{line}")?)
}

/// A result for programs: one JSON object on a line of stdout.
///
/// # Errors
/// When stdout cannot be written.
pub fn print_json(object: &impl Serialize) -> anyhow::Result<()> {
    print_line(serde_json::to_string(object)?)
}
