//! Text to labelled token rows. No tensors: what leaves this room is plain vectors.

mod arrow_ipc;
pub mod cache;
pub mod chat;
pub mod chat_template;
mod columns;
mod conversation;
mod jinja;
mod json_array;
mod jsonl;
pub mod loader;
pub mod mask;
mod opened;
pub mod pack;
mod parquet;
pub mod prompts;
mod reading;
pub mod report;
pub mod rows;
pub mod source;
pub mod store;
mod token_file;
pub mod tokenize;

use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use arrow::error::ArrowError;
use serde::{Deserialize, Serialize};

use crate::files;
use crate::numbers::Fraction;
use cache::{CacheError, Found, TokenCache};
use chat::LossOn;
use chat_template::{ChatTemplate, TemplateChoice, TemplateError};
use pack::{PackReport, Sequences};
pub use reading::{Progress, Watch};
pub use report::{BadRows, CacheUse, DataFile, DropReason, LoadReport, Tokenised};
use rows::RowError;
use source::SourceError;
use store::RowStore;
use token_file::Whole;
use tokenize::TextTokenizer;

/// `[data]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files or globs: JSONL or JSON arrays (also in gzip or zstd), Parquet, Arrow.
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
    /// Rows that Arrow does not take.
    #[error("cannot encode the rows of {} for the token cache: {source}", path.display())]
    Encode {
        /// Their file.
        path: PathBuf,
        /// Arrow's words.
        source: ArrowError,
    },
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
    /// Where tokenised files are kept, and rows are read from; `None` (a user without a home) keeps all rows in memory.
    pub cache: Option<&'a TokenCache>,
    /// What renders conversations.
    pub template: Option<&'a ChatTemplate>,
    /// Which tokens of conversations carry loss.
    pub loss_on: LossOn,
    /// Rows that are not right are left out and counted, instead of ending the run.
    pub skip_bad_rows: bool,
    /// Who hears how far reading is.
    pub watch: Watch<'a>,
}

/// Reads rows from files of every format, in the order of the list.
///
/// # Errors
/// A missing file, a row that is not right (file, line and key are named), a template that renders no conversation, or no
/// row at all.
pub fn load(patterns: &[String], settings: &LoadSettings) -> Result<(RowStore, LoadReport), DataError> {
    let (mut stores, mut report, mut rendered) = (Vec::new(), LoadReport::default(), false);
    for path in source::find(patterns)? {
        let (file, whole) = read_file(&path, settings, &mut report)?;
        let Whole { file: tokens, rows, summary, tokens_sha256 } = whole;
        rendered |= summary.rendered;
        report.files.push(DataFile { rows: summary.read(), tokens_sha256, ..file });
        report.add(summary, &path);
        stores.push((tokens, rows));
    }
    let files = || report.files.iter().map(|file| file.path.display().to_string()).collect();
    if let (false, Some((conversations, words)), Some(template)) = (rendered, report.refusals(), settings.template) {
        let template = template.place().to_owned();
        return Err(DataError::TemplateRefusesAll { template, files: files(), conversations, words });
    }
    if report.rows == 0 {
        return Err(DataError::Empty { files: files(), report: report.into() });
    }
    Ok((RowStore::of(stores), report))
}

/// Rows to sequences, packed or one each.
pub fn sequences(rows: RowStore, config: &DataConfig) -> (Sequences, PackReport) {
    let max_length = config.max_length.get();
    if config.packing { pack::pack(rows, max_length) } else { pack::one_each(rows, max_length) }
}

/// Takes a part of the rows out for validation: (training, validation), each in the order of the rows and not empty.
///
/// # Errors
/// Fewer than two rows.
pub fn split_validation(rows: RowStore, fraction: Fraction, seed: u64) -> Result<(RowStore, RowStore), DataError> {
    /// Apart from every epoch's stream, so that the split and the first order are independent.
    const STREAM: u64 = u64::MAX;
    if rows.len() < 2 {
        return Err(DataError::TooFewToSplit { rows: rows.len() });
    }
    let count = ((rows.len() as f64 * fraction.get()).round() as usize).clamp(1, rows.len() - 1);
    let mut held_out = vec![false; rows.len()];
    for &row in &loader::shuffled(rows.len(), seed, STREAM)[..count] {
        held_out[row as usize] = true;
    }
    let (validation, training) = rows.partition(&held_out);
    Ok((training, validation))
}

/// The rows of a file, cut, from the cache where it has them.
fn read_file(path: &Path, settings: &LoadSettings, report: &mut LoadReport) -> Result<(DataFile, Whole), DataError> {
    let of = |sha256: String, cache: CacheUse| DataFile {
        path: path.to_owned(),
        sha256,
        tokens_sha256: String::new(),
        rows: 0,
        cache,
    };
    let watched = Watched::new(path, settings)?;
    let Some(cache) = settings.cache else {
        let failed = |source| DataError::Encode { path: path.to_owned(), source };
        let (bytes, took) = reading::write(path, settings, Vec::new(), failed)?;
        watched.check()?;
        report.add_time(took);
        let whole = reading::in_memory(bytes).map_err(failed)?;
        return Ok((of(watched.sha256, CacheUse::NotUsed), whole));
    };
    let key = TokenCache::key(&watched.sha256, settings);
    let damaged = match cache.read(&key)? {
        Found::Rows(whole) => return Ok((of(watched.sha256, CacheUse::Read), whole)),
        Found::Nothing => None,
        Found::Damaged(how) => Some(how),
    };
    let whole = build(&watched, &key, cache, settings, report)?;
    Ok((of(watched.sha256, damaged.map_or(CacheUse::Written, CacheUse::Rebuilt)), whole))
}

/// A file that is read twice, for its hash and for its rows: both must be of the same bytes.
struct Watched<'p> {
    path: &'p Path,
    sha256: String,
    /// Before it was hashed.
    stamp: Option<String>,
}

impl<'p> Watched<'p> {
    fn new(path: &'p Path, settings: &LoadSettings) -> Result<Self, SourceError> {
        let unreadable = |source| SourceError::Read { path: path.to_owned(), source };
        let stamp = files::stamp(path).map_err(unreadable)?;
        let sha256 = settings.cache.map_or_else(|| files::sha256(path), |cache| cache.sha256_of(path));
        Ok(Self { path, sha256: sha256.map_err(unreadable)?, stamp })
    }

    /// Of a file that was written a moment ago no stamp tells; it is hashed again.
    fn check(&self) -> Result<(), SourceError> {
        let unreadable = |source| SourceError::Read { path: self.path.to_owned(), source };
        let stamp = files::stamp(self.path).map_err(unreadable)?;
        let is_same =
            stamp.is_some() && stamp == self.stamp || files::sha256(self.path).map_err(unreadable)? == self.sha256;
        if is_same { Ok(()) } else { Err(SourceError::Changed { path: self.path.to_owned() }) }
    }
}

/// Reads and tokenises a file into the cache.
fn build(
    watched: &Watched<'_>,
    key: &str,
    cache: &TokenCache,
    settings: &LoadSettings,
    report: &mut LoadReport,
) -> Result<Whole, DataError> {
    let (path, new) = (watched.path, cache.create(key)?);
    let failed = |error| match error {
        ArrowError::IoError(_, source) => new.error(source).into(),
        source => DataError::Encode { path: path.to_owned(), source },
    };
    let (_, took) = reading::write(path, settings, new.writer().map_err(|error| new.error(error))?, failed)?;
    watched.check()?; // else its rows would be kept as those of its earlier self
    report.add_time(took);
    match cache.commit(key, new)? {
        Found::Rows(whole) => Ok(whole),
        Found::Damaged(how) => Err(cache.error(io::Error::other(how)).into()),
        Found::Nothing => Err(cache.error(io::ErrorKind::NotFound.into()).into()),
    }
}
