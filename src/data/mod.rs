//! Text to labelled token rows. No tensors: what leaves this room is plain vectors.

pub mod cache;
pub mod chat;
pub mod chat_template;
mod conversation;
mod jinja;
mod json_array;
mod jsonl;
pub mod loader;
pub mod mask;
pub mod pack;
mod parquet;
pub mod prompts;
pub mod report;
pub mod rows;
pub mod source;
pub mod tokenize;

use std::num::NonZeroUsize;
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::files;
use crate::numbers::Fraction;
use cache::{CacheError, Found, TokenCache};
use chat::LossOn;
use chat_template::{ChatTemplate, TemplateChoice, TemplateError};
use pack::{PackReport, Sequence};
pub use report::{CacheUse, DataFile, DropReason, LoadReport};
use rows::{FileRows, Place, Problem, RawRow, ReadRow, RowError, TokenRow};
use source::{Format, SourceError};
use tokenize::TextTokenizer;

/// `[data]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files or globs, JSONL, JSON arrays or Parquet.
    pub train: Vec<String>,
    /// Files or globs to evaluate on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validation: Vec<String>,
    /// Or: this part of the training rows, taken out before training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<Fraction>,
    /// What renders conversations.
    #[serde(default)]
    pub chat_template: TemplateChoice,
    /// Which tokens of conversations carry loss.
    #[serde(default)]
    pub loss_on: LossOn,
    /// Tokens a sequence.
    pub max_length: NonZeroUsize,
    /// Several rows share one sequence, without seeing each other.
    #[serde(default = "yes")]
    pub packing: bool,
    /// A new seeded order every epoch.
    #[serde(default = "yes")]
    pub shuffle: bool,
}

fn yes() -> bool {
    true
}

/// The label of a token that carries no loss, as PyTorch and transformers have it.
pub const IGNORE: i32 = -100;

/// Why there are no rows.
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
    /// A chat template of other roles, or with a fault.
    #[error(
        "{template} renders none of the {conversations} conversations in {}: {words}; set data.chat_template to one that renders \
         them: {} or a .jinja file", files.join(", "), TemplateChoice::built_in_names()
    )]
    TemplateRefusesAll {
        /// Where the template stands.
        template: String,
        /// What was read.
        files: Vec<String>,
        /// How many conversations were tried.
        conversations: usize,
        /// What the template raises.
        words: String,
    },
    /// Files without one usable row.
    #[error("no row to use in {}: {report}", files.join(", "))]
    Empty {
        /// What was read.
        files: Vec<String>,
        /// What came of it.
        report: Box<LoadReport>,
    },
    /// Too little to split.
    #[error("validation_fraction needs at least 2 rows, one to train on and one to validate on, got {rows}")]
    TooFewToSplit {
        /// All rows.
        rows: usize,
    },
}

/// What rows are read with.
#[derive(Debug, Clone, Copy)]
pub struct LoadSettings<'a> {
    /// The backbone's; rows of `text` and conversations need it.
    pub tokenizer: Option<&'a TextTokenizer>,
    /// The backbone's; ids are checked against it.
    pub vocab_size: usize,
    /// Longer rows are cut.
    pub max_length: NonZeroUsize,
    /// Where tokenised texts are kept; `None` tokenises anew.
    pub cache: Option<&'a TokenCache>,
    /// What renders conversations.
    pub template: Option<&'a ChatTemplate>,
    /// Which tokens of conversations carry loss.
    pub loss_on: LossOn,
}

/// Reads rows from JSONL, JSON arrays and Parquet, in the order of the list.
///
/// # Errors
/// A missing file, a row that is not right (file, line and key are named), a template that renders no conversation, or no
/// row at all.
pub fn load(patterns: &[String], settings: &LoadSettings) -> Result<(Vec<TokenRow>, LoadReport), DataError> {
    let (mut rows, mut report, mut rendered) = (Vec::new(), LoadReport::default(), false);
    for path in source::find(patterns)? {
        let sha256 = files::sha256(&path).map_err(|source| SourceError::Read { path: path.clone(), source })?;
        let (of_file, cache) = read_file(&path, &sha256, settings)?;
        rendered |= of_file.rows.iter().any(|row| row.is_conversation);
        report.files.push(DataFile { path, sha256, rows: of_file.count(), cache });
        rows.extend(report.admit(of_file, settings.max_length.get()));
    }
    let files = || report.files.iter().map(|file| file.path.display().to_string()).collect();
    if let (false, Some((conversations, words)), Some(template)) = (rendered, report.refusals(), settings.template) {
        let template = template.place().to_owned();
        return Err(DataError::TemplateRefusesAll { template, files: files(), conversations, words });
    }
    if rows.is_empty() {
        return Err(DataError::Empty { files: files(), report: report.into() });
    }
    Ok((rows, report))
}

/// Rows to sequences, packed or one each.
pub fn sequences(rows: Vec<TokenRow>, config: &DataConfig) -> (Vec<Sequence>, PackReport) {
    let max_length = config.max_length.get();
    if config.packing { pack::pack(rows, max_length) } else { pack::one_each(rows, max_length) }
}

/// Takes a part of the rows out for validation: (training, validation), each in the order of the rows and not empty.
///
/// # Errors
/// Fewer than two rows.
pub fn split_validation(
    rows: Vec<TokenRow>,
    fraction: Fraction,
    seed: u64,
) -> Result<(Vec<TokenRow>, Vec<TokenRow>), DataError> {
    /// Apart from every epoch's stream, so that the split and the first order are independent.
    const STREAM: u64 = u64::MAX;
    if rows.len() < 2 {
        return Err(DataError::TooFewToSplit { rows: rows.len() });
    }
    let count = ((rows.len() as f64 * fraction.get()).round() as usize).clamp(1, rows.len() - 1);
    let mut held_out = vec![false; rows.len()];
    for &row in &loader::shuffled(rows.len(), seed, STREAM)[..count] {
        held_out[row] = true;
    }
    let (validation, training): (Vec<_>, Vec<_>) = rows.into_iter().zip(held_out).partition(|(_, held_out)| *held_out);
    let rows = |rows: Vec<(TokenRow, bool)>| rows.into_iter().map(|(row, _)| row).collect();
    Ok((rows(training), rows(validation)))
}

/// All rows of a file, uncut, from the cache where it has them.
fn read_file(path: &Path, sha256: &str, settings: &LoadSettings) -> Result<(FileRows, CacheUse), DataError> {
    let (Some(cache), Some(tokenizer)) = (settings.cache, settings.tokenizer) else {
        return Ok((parse(path, settings)?.file, CacheUse::NotUsed));
    };
    let key = TokenCache::key(sha256, tokenizer, settings);
    let found = cache.read(&key)?;
    if let Found::Rows(rows) = found {
        return Ok((rows, CacheUse::Read));
    }
    let Parsed { file, tokenised } = parse(path, settings)?;
    if !tokenised {
        return Ok((file, CacheUse::NotUsed));
    }
    cache.write(&key, &file)?;
    let cache_use = if let Found::Damaged(how) = found { CacheUse::Rebuilt(how) } else { CacheUse::Written };
    Ok((file, cache_use))
}

#[derive(Default)]
struct Parsed {
    file: FileRows,
    /// Whether any row was a text or a conversation.
    tokenised: bool,
}

/// What became of a row, and whether it had to be tokenised.
type Outcome = (Result<ReadRow, DropReason>, bool);

/// Parses and tokenises a file, portion by portion, on all cores.
fn parse(path: &Path, settings: &LoadSettings) -> Result<Parsed, DataError> {
    let unreadable = |source| SourceError::Read { path: path.to_owned(), source };
    let read = |raw: RawRow| outcome(raw, settings);
    let mut parsed = Parsed::default();
    match Format::of(path)? {
        Format::Jsonl => {
            for portion in jsonl::portions(path).map_err(unreadable)? {
                let row = |(line, text): &jsonl::Line| {
                    jsonl::row(text).and_then(read).map_err(|p| Place::line(path, *line).error(p))
                };
                parsed.add(portion.map_err(unreadable)?.par_iter().map(row).collect())?;
            }
        }
        Format::JsonArray => json_array::portions(path, read, |portion| parsed.add(portion))?,
        Format::Parquet => {
            for portion in parquet::portions(path)? {
                let first = parsed.file.count() + 1;
                let row =
                    |(index, raw): (usize, RawRow)| read(raw).map_err(|p| Place::row(path, first + index).error(p));
                parsed.add(portion?.into_par_iter().enumerate().map(row).collect())?;
            }
        }
    }
    Ok(parsed)
}

fn outcome(raw: RawRow, settings: &LoadSettings) -> Result<Outcome, Problem> {
    let is_tokens = matches!(raw, RawRow::Tokens { .. });
    Ok((raw.read(settings)?, !is_tokens))
}

impl Parsed {
    /// Stops at the first bad row of the file, whichever core met its own first.
    fn add(&mut self, portion: Vec<Result<Outcome, RowError>>) -> Result<(), RowError> {
        for row in portion {
            let (row, tokenised) = row?;
            self.tokenised |= tokenised;
            match row {
                Ok(row) => self.file.rows.push(row),
                Err(reason) => report::leave_out(&mut self.file.dropped, reason, 1),
            }
        }
        Ok(())
    }
}
