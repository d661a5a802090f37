//! Text to labelled token rows. No tensors: what leaves this room is plain vectors.

pub mod cache;
pub mod chat_template;
mod jsonl;
pub mod loader;
pub mod pack;
mod parquet;
pub mod prompts;
pub mod rows;
pub mod source;
pub mod tokenize;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::files;
use crate::numbers::Fraction;
use cache::{CacheError, Found, TokenCache};
use pack::{PackReport, Sequence};
use rows::{Place, RowError, TokenRow};
use source::{Format, SourceError};
use tokenize::TextTokenizer;

/// `[data]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files or globs, JSONL or Parquet.
    pub train: Vec<String>,
    /// Files or globs to evaluate on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validation: Vec<String>,
    /// Or: this part of the training rows, taken out before training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<Fraction>,
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
    /// Files without one usable row.
    #[error("no row to use in {}: {report}", files.join(", "))]
    Empty {
        /// What was read.
        files: Vec<String>,
        /// What came of it.
        report: LoadReport,
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
    /// The backbone's; rows of `text` need it.
    pub tokenizer: Option<&'a TextTokenizer>,
    /// The backbone's; ids are checked against it.
    pub vocab_size: usize,
    /// Longer rows are cut.
    pub max_length: NonZeroUsize,
    /// Where tokenised texts are kept; `None` tokenises anew.
    pub cache: Option<&'a TokenCache>,
}

/// Why a row was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DropReason {
    /// One token predicts nothing.
    FewerThanTwoTokens,
}

/// What the cache did for a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheUse {
    /// Its rows are tokens already, or there is no cache.
    NotUsed,
    /// Its texts were tokenised, and kept.
    Written,
    /// Its tokens were there.
    Read,
    /// What was there was damaged (how), so its texts were tokenised anew.
    Rebuilt(String),
}

/// One data file, for provenance.json.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DataFile {
    /// As the recipe, or its glob, names it.
    pub path: PathBuf,
    /// Of its bytes.
    pub sha256: String,
    /// Its rows, dropped ones included.
    pub rows: usize,
    /// Whether it had to be tokenised.
    pub cache: CacheUse,
}

/// What was read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct LoadReport {
    /// The files, in reading order.
    pub files: Vec<DataFile>,
    /// Rows kept.
    pub rows: usize,
    /// Tokens kept.
    pub tokens: usize,
    /// Rows cut to the maximal length.
    pub truncated: usize,
    /// Rows kept although no label of theirs is a target.
    pub without_targets: usize,
    /// Rows left out, and why.
    pub dropped: BTreeMap<DropReason, usize>,
}

/// Reads rows from JSONL and Parquet files, in the order of the list.
///
/// # Errors
/// A missing file, a row that is not right (file, line and key are named), or no row at all.
pub fn load(patterns: &[String], settings: &LoadSettings) -> Result<(Vec<TokenRow>, LoadReport), DataError> {
    let (mut rows, mut report) = (Vec::new(), LoadReport::default());
    for path in source::find(patterns)? {
        let sha256 = files::sha256(&path).map_err(|source| SourceError::Read { path: path.clone(), source })?;
        let (of_file, cache) = read_file(&path, &sha256, settings)?;
        report.files.push(DataFile { path, sha256, rows: of_file.len(), cache });
        rows.extend(of_file.into_iter().filter_map(|row| report.admit(row, settings.max_length.get())));
    }
    if rows.is_empty() {
        let files = report.files.iter().map(|file| file.path.display().to_string()).collect();
        return Err(DataError::Empty { files, report });
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
fn read_file(path: &Path, sha256: &str, settings: &LoadSettings) -> Result<(Vec<TokenRow>, CacheUse), DataError> {
    let (Some(cache), Some(tokenizer)) = (settings.cache, settings.tokenizer) else {
        return Ok((parse(path, settings)?.rows, CacheUse::NotUsed));
    };
    let key = TokenCache::key(sha256, tokenizer, settings.vocab_size);
    let found = cache.read(&key)?;
    if let Found::Rows(rows) = found {
        return Ok((rows, CacheUse::Read));
    }
    let parsed = parse(path, settings)?;
    if !parsed.has_text {
        return Ok((parsed.rows, CacheUse::NotUsed));
    }
    cache.write(&key, &parsed.rows)?;
    let cache_use = if let Found::Damaged(how) = found { CacheUse::Rebuilt(how) } else { CacheUse::Written };
    Ok((parsed.rows, cache_use))
}

#[derive(Default)]
struct Parsed {
    rows: Vec<TokenRow>,
    has_text: bool,
}

/// Parses and tokenises a file, portion by portion, on all cores.
fn parse(path: &Path, settings: &LoadSettings) -> Result<Parsed, DataError> {
    let unreadable = |source| SourceError::Read { path: path.to_owned(), source };
    let mut parsed = Parsed::default();
    match Format::of(path)? {
        Format::Jsonl => {
            for portion in jsonl::portions(path).map_err(unreadable)? {
                let row = |(line, text): &jsonl::Line| {
                    let raw = jsonl::row(text);
                    raw.and_then(|raw| Parsed::row(raw, settings)).map_err(|p| Place::line(path, *line).error(p))
                };
                parsed.add(portion.map_err(unreadable)?.par_iter().map(row).collect())?;
            }
        }
        Format::Parquet => {
            for portion in parquet::portions(path)? {
                let first = parsed.rows.len() + 1;
                let row = |(index, raw): (usize, rows::RawRow)| {
                    Parsed::row(raw, settings).map_err(|p| Place::row(path, first + index).error(p))
                };
                parsed.add(portion?.into_par_iter().enumerate().map(row).collect())?;
            }
        }
    }
    Ok(parsed)
}

impl Parsed {
    /// A row, and whether it was text.
    fn row(raw: rows::RawRow, settings: &LoadSettings) -> Result<(TokenRow, bool), rows::Problem> {
        let is_text = matches!(raw, rows::RawRow::Text(_));
        Ok((raw.tokens(settings.tokenizer, settings.vocab_size)?, is_text))
    }

    /// Stops at the first bad row of the file, whichever core met its own first.
    fn add(&mut self, portion: Vec<Result<(TokenRow, bool), RowError>>) -> Result<(), RowError> {
        for row in portion {
            let (row, is_text) = row?;
            self.rows.push(row);
            self.has_text |= is_text;
        }
        Ok(())
    }
}

impl LoadReport {
    /// Cuts and counts a row, or leaves it out.
    fn admit(&mut self, mut row: TokenRow, max_length: usize) -> Option<TokenRow> {
        if row.input_ids.len() > max_length {
            row.input_ids.truncate(max_length);
            row.labels.truncate(max_length);
            self.truncated += 1;
        }
        if row.input_ids.len() < 2 {
            *self.dropped.entry(DropReason::FewerThanTwoTokens).or_default() += 1;
            return None;
        }
        self.rows += 1;
        self.tokens += row.input_ids.len();
        self.without_targets += usize::from(!row.has_target());
        Some(row)
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} rows with {} tokens in {} files", self.rows, self.tokens, self.files.len())?;
        let mut also = |count: usize, what: &str| if count > 0 { write!(out, ", {count} {what}") } else { Ok(()) };
        also(self.truncated, "cut to max_length")?;
        also(self.without_targets, "without a target")?;
        for (reason, count) in &self.dropped {
            also(*count, &format!("dropped ({reason})"))?;
        }
        for file in &self.files {
            if let CacheUse::Rebuilt(how) = &file.cache {
                write!(out, "; tokenised {} again: {how}", file.path.display())?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FewerThanTwoTokens => out.write_str("fewer than two tokens"),
        }
    }
}
