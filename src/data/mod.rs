//! Turns text into labelled token rows. No tensors: the results are plain vectors.

mod answer_frame;
mod answer_places;
mod arrow_ipc;
mod best_fit;
pub mod cache;
pub mod captured;
pub mod chat;
pub mod chat_template;
mod column_advice;
pub mod column_names;
mod columns;
pub mod conversation;
mod csv_rows;
mod described_folder;
mod documents;
mod error;
mod jinja;
mod json_array;
mod jsonl;
pub mod loader;
pub mod long_rows;
mod marked;
pub mod mask;
pub mod mix;
mod opened;
mod other_keys;
pub mod pack;
mod pair;
mod parquet;
pub mod prompts;
mod python_json;
mod random_stream;
mod raw_row;
mod reading;
mod regroup;
pub mod report;
pub mod row_keys;
mod row_object;
pub mod rows;
mod settings;
mod shown;
pub mod source;
pub mod split;
pub mod store;
mod template_abilities;
mod token_file;
mod token_lists;
pub mod tokenize;

use std::num::NonZeroUsize;
use std::path::Path;

use arrow::error::ArrowError;

use crate::files::checksums::ListedFiles;
use crate::files::{self, failed};
use crate::numbers::Positive;
use cache::{CacheEntry, TokenCache};
pub use error::DataError;
use mix::Mix;
pub use other_keys::OtherKeys;
use pack::{PackReport, Sequences};
pub use report::{BadRows, CacheUse, DataFile, DropReason, LoadReport, RowCounts, Tokenised};
pub use rows::IGNORE;
pub use settings::{DataConfig, FetchedData, LoadSettings, ReadProgress, Watch, entries};
use source::SourceError;
use store::RowStore;
use token_file::OpenedTokenFile;

/// Reads rows from data files of any format, in the order of the list. Each item of the list is an entry of its own.
///
/// # Errors
/// As [`load_entries`].
pub fn load(patterns: &[String], settings: &LoadSettings) -> Result<(RowStore, LoadReport), DataError> {
    load_entries(&patterns.iter().map(std::slice::from_ref).collect::<Vec<_>>(), settings)
}

/// Reads the rows of entries, each of which is a list of files, folders and globs.
///
/// # Errors
/// A missing file, a row that is not right (file, line and key are named), a template that renders no conversation, or no
/// row at all.
pub fn load_entries(entries: &[&[String]], settings: &LoadSettings) -> Result<(RowStore, LoadReport), DataError> {
    let mut stores = Vec::new();
    let mut report = LoadReport { max_length: settings.max_length.get(), ..LoadReport::default() };
    for entry in entries {
        let (before, files_before) = (report.counts.rows, report.files.len());
        let mut limit = settings.limit.map(NonZeroUsize::get);
        let found = source::find(entry)?;
        report.texts_left_out.extend(found.texts_left_out);
        report.splits_left_out.extend(found.splits_left_out);
        let listed = ListedFiles::of(&found.files)?;
        for path in found.files {
            if limit == Some(0) {
                break;
            }
            let rest = LoadSettings { limit: limit.and_then(NonZeroUsize::new), ..*settings };
            let (file, opened) = read_file(&path, &rest, &mut report)?;
            file.sha256.as_ref().map_or(Ok(()), |sha256| listed.compare(&path, sha256))?;
            let OpenedTokenFile { file: tokens, rows, summary, tokens_sha256 } = opened;
            report.has_conversations |= summary.rendered;
            limit = limit.map(|limit| limit.saturating_sub(summary.counts.read));
            let (rows_read, left_out) = (summary.counts.read, summary.counts.left_out());
            report.files.push(DataFile { rows: rows_read, left_out, tokens_sha256, ..file });
            report.add(summary.counts, &path);
            stores.push((tokens, rows));
        }
        report.rows_of_entries.push(report.counts.rows - before);
        report.files_of_entries.push(report.files.len() - files_before);
    }
    let files = || report.files.iter().map(|file| file.path.display().to_string()).collect();
    if let (false, Some((conversations, words)), Some(template)) =
        (report.has_conversations, report.refusals(), settings.template)
    {
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

/// The rows of sets with weights, each set packed up to a length, or one row a sequence. `counts` are the rows of each set.
///
/// # Errors
/// A set without rows; `entries` name them.
pub fn mixed(
    rows: RowStore,
    counts: &[usize],
    weights: &[Positive],
    entries: &[String],
    pack_to: Option<usize>,
) -> Result<Mix, DataError> {
    if let Some(empty) = counts.iter().position(|count| *count == 0) {
        return Err(DataError::EmptySet { entry: entries[empty].clone() });
    }
    let weights: Vec<f64> = weights.iter().map(|weight| weight.get()).collect();
    Ok(Mix::new(rows, counts, &weights, pack_to))
}

/// The rows of a file, cut, from the cache where it has them.
fn read_file(
    path: &Path,
    settings: &LoadSettings,
    report: &mut LoadReport,
) -> Result<(DataFile, OpenedTokenFile), DataError> {
    let data_file = |sha256: Option<String>, cache: CacheUse| DataFile {
        path: path.to_owned(),
        sha256: sha256.filter(|_| settings.limit.is_none()), // also of a file that has no stamp yet
        tokens_sha256: String::new(),
        rows: 0,
        left_out: 0,
        cache,
    };
    let watched = Watched::new(path, settings)?;
    let Some(cache) = settings.cache else {
        let failed = |source| DataError::Encode { path: path.to_owned(), source };
        let (bytes, took) = reading::write(path, settings, Vec::new(), failed)?;
        watched.check()?;
        report.add_time(took);
        let opened = reading::in_memory(bytes).map_err(failed)?;
        return Ok((data_file(watched.sha256, CacheUse::NotUsed), opened));
    };
    let key = settings.cache_key(path, watched.version());
    let damaged = match cache.read(&key)? {
        CacheEntry::Rows(opened) => return Ok((data_file(watched.sha256, CacheUse::Read), *opened)),
        CacheEntry::Nothing => None,
        CacheEntry::Damaged(how) => Some(how),
    };
    let opened = build(&watched, &key, cache, settings, report)?;
    Ok((data_file(watched.sha256, damaged.map_or(CacheUse::Written, CacheUse::Rebuilt)), opened))
}

/// A file that is read twice, for its hash and for its rows; it must not change in between. With `data.limit` the stamp stands for the hash,
/// where there is one: to hash a file reads all of it.
struct Watched<'p> {
    path: &'p Path,
    sha256: Option<String>,
    /// Before it was hashed.
    stamp: Option<String>,
}

impl<'p> Watched<'p> {
    fn new(path: &'p Path, settings: &LoadSettings) -> Result<Self, SourceError> {
        let stamp = files::stamp(path).map_err(failed("read", path))?;
        if settings.limit.is_some() && stamp.is_some() {
            return Ok(Self { path, sha256: None, stamp });
        }
        let sha256 = settings.cache.map_or_else(|| files::sha256(path), |cache| cache.sha256_of(path));
        Ok(Self { path, sha256: Some(sha256.map_err(failed("read", path))?), stamp })
    }

    /// Distinguishes its content from that of other files.
    fn version(&self) -> &str {
        self.sha256.as_deref().or(self.stamp.as_deref()).expect("a file has a hash or a stamp")
    }

    /// A file that was written a moment ago has no stamp; it is hashed again.
    fn check(&self) -> Result<(), SourceError> {
        let stamp = files::stamp(self.path).map_err(failed("read", self.path))?;
        let sha256 = || files::sha256(self.path).map_err(failed("read", self.path));
        let is_same = stamp.is_some() && stamp == self.stamp || self.sha256.is_some() && Some(sha256()?) == self.sha256;
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
) -> Result<OpenedTokenFile, DataError> {
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
