//! Rows of a JSON array of objects, `[{…}, {…}]`, as ShareGPT's collections come.

use std::fs;
use std::path::Path;

use rayon::prelude::*;
use serde_json::value::RawValue;

use super::rows::{Place, Problem, RawRow, RowError};
use super::source::SourceError;
use super::{DataError, jsonl};

/// Rows that are parsed and tokenised together.
const ROWS_AT_ONCE: usize = 4096;

/// Gives the rows of a file to `take`, portion by portion, each with its number from 1. The file's bytes are held at once,
/// its values are not.
pub(super) fn portions<T: Send>(
    path: &Path,
    read: impl Fn(RawRow) -> Result<T, Problem> + Sync,
    mut take: impl FnMut(Vec<Result<T, RowError>>) -> Result<(), RowError>,
) -> Result<(), DataError> {
    let bytes = fs::read(path).map_err(|source| SourceError::Read { path: path.to_owned(), source })?;
    let rows = items(&bytes, path)?;
    for (portion, first) in rows.chunks(ROWS_AT_ONCE).zip((1..).step_by(ROWS_AT_ONCE)) {
        let row = |(index, row): (usize, &&RawValue)| {
            let raw = jsonl::row(row.get().as_bytes());
            raw.and_then(&read).map_err(|problem| Place::row(path, first + index).error(problem))
        };
        take(portion.par_iter().enumerate().map(row).collect())?;
    }
    Ok(())
}

/// The items of a file's array, as they are written.
pub(super) fn items<'b>(bytes: &'b [u8], path: &Path) -> Result<Vec<&'b RawValue>, RowError> {
    let json = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes); // as Windows editors write it
    serde_json::from_slice(json).map_err(|error| Place::file(path).error(broken(&error)))
}

fn broken(error: &serde_json::Error) -> Problem {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default().to_owned();
    Problem::BrokenArray { line: error.line(), column: error.column(), message }
}
