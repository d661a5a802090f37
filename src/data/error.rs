//! Errors of reading data files.

use std::path::PathBuf;

use arrow::error::ArrowError;

use super::cache::CacheError;
use super::chat_template::{TemplateChoice, TemplateError};
use super::report::LoadReport;
use super::rows::RowError;
use super::source::SourceError;

/// Why data files give no rows.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A list of files that is not right.
    #[error(transparent)]
    Source(#[from] SourceError),
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
        "validation_fraction needs at least 2 rows in the files (with data.mix, in one of its entries), one to train on and one to validate \
         on, got {rows}"
    )]
    TooFewToSplit {
        /// Rows of the largest set; the pieces of a long one count once.
        rows: usize,
    },
}
