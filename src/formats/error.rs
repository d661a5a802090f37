//! Errors of reading and writing, and the functions that read and write all formats except the appended ones.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::invalid_field::InvalidField;
use super::sealed::{self, Broken};
use super::share::Share;
use crate::{files, json};

/// Why a file cannot be read or written, or does not fit.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    #[error(transparent)]
    File(#[from] files::FileError),
    #[error("cannot {action} the {what} {}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The file has another format.
    #[error("{} {expected}", path.display())]
    Json {
        path: PathBuf,
        /// The rest of the sentence: the fault and the expected format.
        expected: &'static str,
        source: serde_json::Error,
    },
    /// Its checksum is not that of its text.
    #[error(
        "{} was changed after it was written: expected sha256 {expected}, got {got}; write it anew, or, if you changed it on purpose, remove \
         its key \"checksum\"", path.display()
    )]
    Changed { path: PathBuf, expected: String, got: String },
    /// `nodes` and `choices` of a tree disagree: the file was truncated or edited.
    #[error("{} says \"nodes\": {written}, but lists {listed} choices; write the tree again with `medusa tree`", path.display())]
    NodeCount {
        path: PathBuf,
        /// The value of `nodes`.
        written: usize,
        /// The number of choices.
        listed: usize,
    },
    /// A head without a target in the calibration.
    #[error("{}: head {head} has a total of 0 targets, so no accuracy; calibrate on more or longer rows", path.display())]
    NoTargets {
        path: PathBuf,
        /// 1-based.
        head: usize,
    },
    /// A part of the file that a command needs.
    #[error("{} is share {share} of a calibration; merge all shares: medusa calibrate --merge FILE… --out calibration.json", path.display())]
    IsShare { path: PathBuf, share: Share },
    /// No `prompts.hashes`, or a damaged one.
    #[error(
        "{}: expected the hashes of trained prompts as medusa-train writes them, got another file or a damaged one; copy it again from where the heads \
         come from, or remove it: then nothing says which prompts were trained on",
        path.display()
    )]
    NoPrompts { path: PathBuf },
    /// Numbers that cannot all be right.
    #[error("{}: {key}: expected {expected}, got {got}; the file is damaged: {remedy}", path.display())]
    InvalidField { path: PathBuf, key: String, expected: String, got: String, remedy: &'static str },
    /// A measurement that is not above 0.
    #[error("{}: {what} is {value}; expected a number above 0; remove the file to measure anew", path.display())]
    Damaged { path: PathBuf, what: &'static str, value: f64 },
    /// The latencies were measured under other conditions.
    #[error("{} was measured with {what} {measured}, not with {asked}; give another --latency FILE to measure that", path.display())]
    OtherConditions { path: PathBuf, what: &'static str, measured: String, asked: String },
}

impl FormatError {
    pub(super) fn invalid_field(path: &Path, InvalidField { key, expected, got }: InvalidField) -> Self {
        Self::InvalidField {
            path: path.to_owned(),
            key,
            expected,
            got,
            remedy: "measure it anew with `medusa calibrate`",
        }
    }
}

/// Reads JSON, and checks its checksum if it has one; `what` and `expected` are parts of the error.
pub(super) fn read<T: DeserializeOwned>(
    path: &Path,
    what: &'static str,
    expected: &'static str,
) -> Result<T, FormatError> {
    read_by(path, what, expected, json::from_str)
}

/// As [`read`], with `parse` instead of a JSON parser.
pub(super) fn read_by<T>(
    path: &Path,
    what: &'static str,
    expected: &'static str,
    parse: impl FnOnce(&str) -> serde_json::Result<T>,
) -> Result<T, FormatError> {
    let io = |source| FormatError::Io { action: "read", what, path: path.to_owned(), source };
    let text = files::read_text(path).map_err(io)?;
    sealed::check(&text).map_err(|Broken { expected, got }| FormatError::Changed {
        path: path.to_owned(),
        expected,
        got,
    })?;
    parse(&text).map_err(|source| FormatError::Json { path: path.to_owned(), expected, source })
}

/// Writes a line atomically.
pub(super) fn write(path: &Path, what: &'static str, line: &str) -> Result<(), FormatError> {
    let io = |source| FormatError::Io { action: "write", what, path: path.to_owned(), source };
    files::write_atomic(path, |out| writeln!(out, "{line}")).map_err(io)
}
