//! Turns text into labelled token rows. No tensors: the results are plain vectors.

mod arrow_ipc;
mod best_fit;
pub mod cache;
pub mod chat;
pub mod chat_template;
mod columns;
mod conversation;
mod error;
mod jinja;
mod json_array;
mod jsonl;
pub mod loader;
pub mod mask;
mod opened;
pub mod pack;
mod parquet;
pub mod prompts;
mod random_stream;
mod raw_row;
mod reading;
mod regroup;
pub mod report;
pub mod rows;
mod settings;
mod shown;
pub mod source;
pub mod store;
mod token_file;
pub mod tokenize;

use std::path::Path;

use arrow::error::ArrowError;

use crate::files::{self, failed};
use crate::numbers::Fraction;
use cache::{CacheEntry, TokenCache};
pub use error::DataError;
use pack::{PackReport, Sequences};
pub use report::{BadRows, CacheUse, DataFile, DropReason, LoadReport, RowCounts, Tokenised};
pub use rows::IGNORE;
pub use settings::{DataConfig, LoadSettings, ReadProgress, Watch};
use source::SourceError;
use store::RowStore;
use token_file::Whole;

/// Reads rows from data files of any format, in the order of the list.
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
        report.files.push(DataFile { rows: summary.counts.read, tokens_sha256, ..file });
        report.add(summary.counts, &path);
        stores.push((tokens, rows));
    }
    let files = || report.files.iter().map(|file| file.path.display().to_string()).collect();
    if let (false, Some((conversations, words)), Some(template)) = (rendered, report.refusals(), settings.template) {
        let template = template.place().to_owned();
        return Err(DataError::TemplateRefusesAll { template, files: files(), conversations, words });
    }
    if report.counts.rows == 0 {
        return Err(DataError::Empty { files: files(), report: report.into() });
    }
    Ok((RowStore::of(stores), report))
}

/// Rows to sequences, packed or one each.
pub fn sequences(rows: RowStore, config: &DataConfig) -> (Sequences, PackReport) {
    let max_length = config.max_length.get();
    if config.packing { pack::pack(rows, max_length) } else { pack::one_each(rows, max_length) }
}

/// Splits the rows into (training, validation), each in the original order and not empty.
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
    let key = settings.cache_key(&watched.sha256);
    let damaged = match cache.read(&key)? {
        CacheEntry::Rows(whole) => return Ok((of(watched.sha256, CacheUse::Read), whole)),
        CacheEntry::Nothing => None,
        CacheEntry::Damaged(how) => Some(how),
    };
    let whole = build(&watched, &key, cache, settings, report)?;
    Ok((of(watched.sha256, damaged.map_or(CacheUse::Written, CacheUse::Rebuilt)), whole))
}

/// A file that is read twice, for its hash and for its rows; it must not change in between.
struct Watched<'p> {
    path: &'p Path,
    sha256: String,
    /// Before it was hashed.
    stamp: Option<String>,
}

impl<'p> Watched<'p> {
    fn new(path: &'p Path, settings: &LoadSettings) -> Result<Self, SourceError> {
        let stamp = files::stamp(path).map_err(failed("read", path))?;
        let sha256 = settings.cache.map_or_else(|| files::sha256(path), |cache| cache.sha256_of(path));
        Ok(Self { path, sha256: sha256.map_err(failed("read", path))?, stamp })
    }

    /// Of a file that was written a moment ago no stamp tells; it is hashed again.
    fn check(&self) -> Result<(), SourceError> {
        let stamp = files::stamp(self.path).map_err(failed("read", self.path))?;
        let sha256 = || files::sha256(self.path).map_err(failed("read", self.path));
        let is_same = stamp.is_some() && stamp == self.stamp || sha256()? == self.sha256;
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
    Ok(cache.commit(key, new)?)
}
