//! One row: token ids with labels, or a text or conversation to be tokenised. Every error names file, row and key.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::chat_template::{TemplateChoice, TemplateError};
use super::column_advice;
use super::conversation::MessageProblem;
use super::shown::shown;
use super::tokenize::{TextTokenizer, TokenizeError};
use crate::bounds::ROW_BYTES;

/// The label of a token that carries no loss, as PyTorch and transformers have it.
pub const IGNORE: i32 = -100;

/// By so many a row without a question is known: more than texts have in common, and few enough to be in a prompt.
const FIRST_TOKENS: usize = 64;

/// Tokens and, for each, the token to learn: the same one, or [`IGNORE`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenRow {
    pub input_ids: Vec<i32>,
    /// As long as `input_ids`. Not shifted: `labels[t]` belongs to `input_ids[t]`, and is a target of the positions before it.
    pub labels: Vec<i32>,
}

/// A row of a file before truncation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadRow {
    pub tokens: TokenRow,
    /// The form that they were made from.
    pub of: RowForm,
    /// Of a conversation that is to be split: the tokens with which its later exchanges begin.
    pub exchanges: Vec<usize>,
    /// Of a conversation: turns of which the template leaves out thoughts, calls or all.
    pub shortened_turns: usize,
    /// Of a conversation: turns whose calls the template does not write, so that they are text.
    pub calls_as_text: usize,
}

impl ReadRow {
    pub(super) fn new(tokens: TokenRow, of: RowForm) -> Self {
        Self { tokens, of, exchanges: vec![], shortened_turns: 0, calls_as_text: 0 }
    }
}

/// How a row is written in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowForm {
    /// As token ids: nothing was tokenised.
    Tokens,
    Text,
    /// As a prompt and its completion.
    Pair,
    /// As a conversation, whose labels this program makes.
    Conversation,
}

/// Where a row stands: a line of JSONL, a row of a JSON array, of Parquet or of CSV (behind its header), counted from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowLocation {
    pub path: PathBuf,
    /// `("line", 3)`; `None` for what is true of the whole file.
    pub row: Option<(&'static str, usize)>,
}

/// A row that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct RowError {
    pub place: RowLocation,
    /// What is wrong with it.
    pub problem: Box<RowProblem>,
}

/// Why a row cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RowProblem {
    /// A line that is no JSON.
    #[error("not valid JSON (one object a line is expected), column {column}: {message}")]
    BrokenJson {
        /// Counted from 1.
        column: usize,
        message: String,
    },
    /// A file that begins as a JSON array.
    #[error("not a valid JSON array of rows, line {line}, column {column}: {message}")]
    BrokenArray {
        /// Counted from 1.
        line: usize,
        /// Counted from 1.
        column: usize,
        message: String,
    },
    /// A row of a JSON array that is none, where the array itself may go on behind it.
    #[error(transparent)]
    BrokenItem(Box<RowProblem>),
    /// A file that claims to be Parquet.
    #[error("not readable as Parquet: {0}")]
    BrokenParquet(String),
    /// A file that claims to be Arrow.
    #[error("not readable as Arrow: {0}")]
    BrokenArrow(String),
    /// A file whose name ends in `.csv` or `.tsv`.
    #[error("not readable as CSV: {0}")]
    BrokenCsv(String),
    /// A record of CSV that may take the rest of the file.
    #[error(
        "this record is longer than {} MiB, the most that a row may have; it may begin with a quote that is never closed",
        ROW_BYTES >> 20
    )]
    LongRecord,
    /// A record of CSV that is no row of its columns.
    #[error(
        "this record has {got} fields, the header {expected}; a field with a comma, a quote or a newline needs quotes around it"
    )]
    FieldCount { expected: usize, got: usize },
    #[error("not UTF-8 text; convert the file to UTF-8")]
    NotUtf8,
    /// A row that no data set means.
    #[error("longer than {} MiB, the most that a row may have", ROW_BYTES >> 20)]
    TooLong,
    /// A value of the wrong type.
    #[error("{key}: expected {expected}, got {got}")]
    Value { key: String, expected: &'static str, got: String },
    /// Labels that do not fit their tokens.
    #[error("{key}: expected {ids} values, one for each of input_ids, got {labels}")]
    LabelsLength {
        /// `labels` or `loss_mask`.
        key: &'static str,
        ids: usize,
        labels: usize,
    },
    /// A token the backbone does not have.
    #[error("{key}[{index}]: expected a token id from 0 to {}, the backbone's vocabulary, got {id}", vocab_size - 1)]
    TokenOutOfRange {
        /// `input_ids` or `labels`.
        key: &'static str,
        /// Where in the list, from 0.
        index: usize,
        id: i64,
        vocab_size: usize,
    },
    /// Nothing that is known as a row.
    #[error(
        "expected a key \"input_ids\", \"messages\", \"conversations\", \"instruction\" (with \"output\"), \"prompt\" (with \
         \"completion\") or \"text\", got {}; {}",
        listed(found),
        column_advice::advice(found)
    )]
    NoKnownKey {
        /// The keys that are there.
        found: Vec<String>,
    },
    /// A row without a column that the recipe names.
    #[error("expected a column \"{column}\", as data.columns or --columns names it, got {}", listed(found))]
    NoNamedColumn {
        column: String,
        /// The keys that are there.
        found: Vec<String>,
    },
    /// A conversation without a chat template.
    #[error(
        "a row of \"{key}\" is a conversation, and the backbone has no chat template; set data.chat_template in the recipe, or \
         --chat-template on the command line, to one of {}, or to the path of a .jinja file",
        TemplateChoice::built_in_names()
    )]
    NeedsTemplate {
        /// `messages`, `conversations` or `instruction`.
        key: &'static str,
    },
    /// A text without a tokenizer.
    #[error(
        "a row of \"{key}\" needs the backbone's tokenizer.json or tokenizer.model; without one, use rows of \"input_ids\""
    )]
    NeedsTokenizer {
        /// `text`, or a conversation's key.
        key: &'static str,
    },
    /// A text that cannot be tokenised.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// A template that never ends.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl From<MessageProblem> for RowProblem {
    fn from(MessageProblem { key, expected, got }: MessageProblem) -> Self {
        Self::Value { key, expected, got: shown(&got) }
    }
}

impl RowError {
    /// Whether the columns of the whole file are others than those that are read, judged by its first row.
    pub fn is_of_the_columns(&self) -> bool {
        let is_first = self.place.row.is_none_or(|(_, number)| number == 1);
        is_first && matches!(*self.problem, RowProblem::NoKnownKey { .. } | RowProblem::NoNamedColumn { .. })
    }
}

impl RowProblem {
    pub(super) fn broken_json(error: &serde_json::Error) -> Self {
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default().to_owned();
        Self::BrokenJson { column: error.column(), message }
    }

    pub(super) fn null(key: &str) -> Self {
        Self::Value { key: key.to_owned(), expected: "a value", got: "null".to_owned() }
    }

    /// What rows with this problem are counted as where bad rows are left out. `None` where it is not the row's fault: the file
    /// is damaged, or the backbone's folder or the recipe lacks something.
    pub fn kind(&self) -> Option<&'static str> {
        match self {
            Self::BrokenJson { .. } | Self::BrokenItem(_) => Some("not valid JSON"),
            Self::TooLong | Self::Tokenize(TokenizeError::TooLong { .. }) => Some("too long"),
            Self::Value { .. } => Some("a value of the wrong type"),
            Self::LabelsLength { .. } => Some("labels of another length"),
            Self::TokenOutOfRange { .. } => Some("a token beyond the vocabulary"),
            Self::NoKnownKey { .. } | Self::NoNamedColumn { .. } => Some("no known key"),
            Self::FieldCount { .. } => Some("another number of fields than the header"),
            Self::NotUtf8 => Some("not UTF-8"),
            Self::Tokenize(TokenizeError::Encode { .. }) => Some("a text that cannot be tokenised"),
            Self::BrokenArray { .. } | Self::BrokenParquet(_) | Self::BrokenArrow(_) | Self::BrokenCsv(_) => None,
            Self::LongRecord => None,
            Self::NeedsTemplate { .. } | Self::NeedsTokenizer { .. } | Self::Tokenize(_) | Self::Template(_) => None,
        }
    }
}

impl TokenRow {
    /// A text: special tokens around it and, as transformers pretrains, an EOS behind it. Loss on all tokens.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn from_text(text: &str, tokenizer: &TextTokenizer) -> Result<Self, TokenizeError> {
        let mut input_ids = tokenizer.encode(text, true)?;
        if let Some(eos) = tokenizer.eos_id()
            && input_ids.last() != Some(&eos)
        {
            input_ids.push(eos);
        }
        Ok(Self { labels: input_ids.clone(), input_ids })
    }

    /// Its first tokens.
    pub(super) fn truncated(mut self, max_length: usize) -> Self {
        self.input_ids.truncate(max_length);
        self.labels.truncate(max_length);
        self
    }

    /// What the model is asked: the tokens before the first that carries loss, or, where loss begins at once (behind a BOS at most), those up to the first
    /// `header` of an answer. `None` without either.
    pub fn question(&self, header: &[i32]) -> Option<&[i32]> {
        let learned = self.labels.iter().position(|&label| label != IGNORE).unwrap_or(self.labels.len());
        if learned > 1 {
            return Some(&self.input_ids[..learned]);
        }
        let place = (!header.is_empty()).then(|| self.input_ids.windows(header.len()).position(|ids| ids == header));
        place.flatten().map(|at| &self.input_ids[..at + header.len()])
    }

    /// [`TokenRow::question`], or the whole of a row without one: rows with the same stay on one side of a split.
    pub fn question_or_whole(&self, header: &[i32]) -> &[i32] {
        self.question(header).unwrap_or(&self.input_ids)
    }

    /// What the row is known by where it is met again: its question, or of a row without one its first tokens.
    pub fn prompt(&self, header: &[i32]) -> &[i32] {
        self.question(header).unwrap_or(&self.input_ids[..self.input_ids.len().min(FIRST_TOKENS)])
    }

    /// Whether any position of the row has a target.
    pub fn has_target(&self) -> bool {
        self.labels.iter().skip(1).any(|&label| label != IGNORE)
    }

    pub(super) fn checked(ids: &[i64], labels: Option<&[i64]>, vocab_size: usize) -> Result<Self, RowProblem> {
        let input_ids = in_vocabulary("input_ids", ids, vocab_size, None)?;
        let Some(labels) = labels else {
            return Ok(Self { labels: input_ids.clone(), input_ids });
        };
        if labels.len() != ids.len() {
            return Err(RowProblem::LabelsLength { key: "labels", ids: ids.len(), labels: labels.len() });
        }
        Ok(Self { input_ids, labels: in_vocabulary("labels", labels, vocab_size, Some(IGNORE))? })
    }
}

fn in_vocabulary(
    key: &'static str,
    values: &[i64],
    vocab_size: usize,
    besides: Option<i32>,
) -> Result<Vec<i32>, RowProblem> {
    let token = |(index, &id): (usize, &i64)| match i32::try_from(id) {
        Ok(token) if usize::try_from(token).is_ok_and(|token| token < vocab_size) || Some(token) == besides => {
            Ok(token)
        }
        _ => Err(RowProblem::TokenOutOfRange { key, index, id, vocab_size }),
    };
    values.iter().enumerate().map(token).collect()
}

impl RowLocation {
    pub(super) fn line(path: &Path, line: usize) -> Self {
        Self { path: path.to_owned(), row: Some(("line", line)) }
    }

    pub(super) fn row(path: &Path, row: usize) -> Self {
        Self { path: path.to_owned(), row: Some(("row", row)) }
    }

    pub(super) fn file(path: &Path) -> Self {
        Self { path: path.to_owned(), row: None }
    }

    pub(super) fn error(self, problem: impl Into<RowProblem>) -> RowError {
        RowError { place: self, problem: Box::new(problem.into()) }
    }
}

impl fmt::Display for RowLocation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.path.display())?;
        self.row.map_or(Ok(()), |(kind, number)| write!(out, ", {kind} {number}"))
    }
}

fn listed(keys: &[String]) -> String {
    match keys {
        [] => "no key at all".to_owned(),
        _ => keys.iter().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_a_token_or_ignore() {
        let row = TokenRow::checked(&[1, 2, 3], Some(&[-100, 2, 3]), 4).unwrap();
        assert_eq!(row, TokenRow { input_ids: vec![1, 2, 3], labels: vec![IGNORE, 2, 3] });
        let wrong = |ids: &[i64], labels: &[i64]| TokenRow::checked(ids, Some(labels), 4).unwrap_err().to_string();
        assert_eq!(
            wrong(&[1, 4], &[1, 1]),
            "input_ids[1]: expected a token id from 0 to 3, the backbone's vocabulary, got 4"
        );
        assert!(wrong(&[1, -100], &[1, 1]).contains("got -100"));
        assert!(wrong(&[1, 2], &[1, -1]).starts_with("labels[1]"));
        assert!(wrong(&[1, 1 << 40], &[1, 1]).contains("1099511627776"));
        assert_eq!(wrong(&[1, 2], &[1]), "labels: expected 2 values, one for each of input_ids, got 1");
    }

    #[test]
    fn a_prompt_ends_where_loss_begins_and_a_text_is_known_by_its_first_tokens() {
        let row = |labels: Vec<i32>| TokenRow { input_ids: (5..5 + labels.len() as i32).collect(), labels };
        assert_eq!(row(vec![IGNORE, IGNORE, 7, IGNORE, 9]).prompt(&[8, 9]), [5, 6]);
        assert_eq!(row(vec![IGNORE, 6, 7]).prompt(&[]), [5, 6, 7], "a BOS asks nothing");
        assert_eq!(row(vec![5, 6, 7, 8]).prompt(&[6, 7]), [5, 6, 7]);
        assert_eq!(row(vec![1; 2 * FIRST_TOKENS]).prompt(&[7, 7]).len(), FIRST_TOKENS);
    }

    #[test]
    fn the_first_label_is_nobodys_target() {
        let row = TokenRow { input_ids: vec![1, 2], labels: vec![1, IGNORE] };
        assert!(!row.has_target());
    }
}
