//! Errors of reading data files.

use std::path::PathBuf;

use arrow::error::ArrowError;

use super::cache::CacheError;
use super::chat_template::{TemplateChoice, TemplateError};
use super::report::LoadReport;
use super::rows::RowError;
use super::source::SourceError;
use crate::files::checksums::ChecksumError;
use crate::formats::captured_states::CapturedError;
use crate::plural::counted;

/// Why data files give no rows.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A list of files that is not right.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A file that is not as it was written.
    #[error(transparent)]
    Checksum(#[from] ChecksumError),
    /// A row that is not right.
    #[error(transparent)]
    Row(#[from] RowError),
    /// A cache that is not usable.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A chat template that is not right.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// Rows that Arrow does not take.
    #[error("cannot encode the rows of {} for the token cache: {source}", path.display())]
    Encode { path: PathBuf, source: ArrowError },
    /// A chat template of other roles, or with a fault.
    #[error(
        "{template} renders none of the {conversations} conversations in {}: {words}; set data.chat_template (--chat-template) to one that renders \
         them: {} or a .jinja file", files.join(", "), TemplateChoice::built_in_names()
    )]
    TemplateRefusesAll {
        template: String,
        files: Vec<String>,
        /// How many conversations were tried.
        conversations: usize,
        /// What the template raises.
        words: String,
    },
    /// A file of hidden states that is not right.
    #[error("data.hidden_states: {0}")]
    Captured(#[from] CapturedError),
    #[error("data.hidden_states = {entry:?}: no file of hidden states (.safetensors) that can be read{first}")]
    NoCapturedFile {
        entry: String,
        /// The first that cannot be read, as the end of the sentence.
        first: String,
    },
    /// A row of `data.train` or `data.validation` without a file.
    #[error(
        "{} {} no hidden states in {entry}: the first is row {row} (counted from 0) of {length} tokens ({}, …), and no file has these token_ids{namesake}; let \
         the server capture them, or leave such rows out with --skip-bad-rows; with data.hidden_states alone, rows are those of the files",
        some_of(*without, *rows), if *without == 1 { "has" } else { "have" }, numbers(tokens)
    )]
    NoStatesOfRow {
        row: usize,
        /// Its first tokens.
        tokens: Vec<i32>,
        length: usize,
        entry: String,
        /// How the file of this number differs, if there is one.
        namesake: String,
        /// Rows without a file.
        without: usize,
        rows: usize,
    },
    /// Rows that the server saw whole.
    #[error(
        "{} longer than data.max_length = {max_length}, and rows with hidden states of a server are neither split nor cut: raise data.max_length (the longest \
         file has {longest} tokens), or leave such rows out with data.long_rows = \"drop\"", are(*rows)
    )]
    LongerThanCaptured { max_length: usize, longest: usize, rows: usize },
    /// A set of `data.mix` that cannot have a share.
    #[error("data.mix: no row to use in {entry}, so it cannot have a share; remove it from data.train and data.mix")]
    EmptySet {
        /// As `data.train` has it.
        entry: String,
    },
    /// Files without one usable row.
    #[error("no row to use in {}: {report}{}", files.join(", "), report.no_answers().map(|why| format!("; {why}")).unwrap_or_default())]
    Empty { files: Vec<String>, report: Box<LoadReport> },
    /// Too little to split.
    #[error(
        "validation_fraction needs at least 2 rows with different prompts in the files (with data.mix, in one of its entries), to train on and to \
         validate on, got {rows}"
    )]
    TooFewToSplit {
        /// Rows with different prompts in the largest set; the pieces of a long one count once.
        rows: usize,
    },
}

fn some_of(some: usize, all: usize) -> String {
    format!("{some} of {}", counted(all, "row"))
}

fn are(rows: usize) -> String {
    format!("{} {}", counted(rows, "row"), if rows == 1 { "is" } else { "are" })
}

fn numbers(tokens: &[i32]) -> String {
    tokens.iter().map(i32::to_string).collect::<Vec<_>>().join(", ")
}
