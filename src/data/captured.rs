//! Rows whose hidden states a server captured (`data.hidden_states`): which file belongs to which row, and rows that are made of the files.
//!
//! A file belongs to a row if it has the same token ids: the states depend on nothing else. Names and order of the files do not matter.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use arrow::error::ArrowError;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::cache::{CacheEntry, TokenCache};
use super::chat::LossOn;
use super::error::DataError;
use super::reading;
use super::report::{BadRows, CacheUse, DataFile, FileSummary, LeftOutRow, LoadReport, Tokenised};
use super::rows::{IGNORE, ReadRow, RowForm, TokenRow};
use super::settings::{LoadSettings, ReadProgress};
use super::source::{SourceError, check_name, matches};
use super::store::RowStore;
use super::token_file::{OpenedTokenFile, TokenFileWriter};
use crate::files::checksums::ListedFiles;
use crate::files::{self, check_regular, failed};
use crate::formats::captured_states::{CapturedError, CapturedFile, StateSizes};
use crate::formats::provenance::StampedFiles;
use crate::plural::counted;

/// Files that are opened between two reports of progress.
const FILES_AT_ONCE: usize = 1024;
/// What rows without a file are counted as.
const NO_STATES: &str = "no hidden states";

/// The files of `data.hidden_states`.
#[derive(Debug)]
pub struct CapturedSet {
    /// As the recipe has it.
    entry: String,
    files: Vec<CapturedFile>,
    /// The file of each sequence of token ids, by their hash.
    by_tokens: HashMap<TokensHash, u32>,
    /// Files that are not right, by kind.
    left_out: BTreeMap<&'static str, BadRows>,
    /// Files with the tokens of an earlier one.
    repeated: Option<BadRows>,
}

/// Of token ids.
type TokensHash = [u8; 16];

impl CapturedSet {
    /// Opens the files of a folder (and of the folders in it) or of a pattern, and reads their token ids. With `settings.skip_bad_rows`,
    /// files that are not right are left out; to find those with NaN, all states are read.
    ///
    /// # Errors
    /// No file, or one that is not right.
    pub fn open(entry: &str, hidden_size: usize, settings: &LoadSettings) -> Result<Self, DataError> {
        let paths = find(entry)?;
        let listed = ListedFiles::of(&paths)?;
        paths.par_iter().try_for_each(|path| listed.verify(path))?;
        let sizes = StateSizes { hidden_size, vocab_size: settings.vocab_size };
        let mut set = Self {
            entry: entry.into(),
            files: vec![],
            by_tokens: HashMap::new(),
            left_out: BTreeMap::new(),
            repeated: None,
        };
        for portion in paths.chunks(FILES_AT_ONCE) {
            let opened: Vec<_> = portion.par_iter().map(|path| open(path, sizes, settings.skip_bad_rows)).collect();
            for file in opened {
                let taken = file.and_then(|(file, tokens)| set.take(file, tokens));
                taken.or_else(|error| set.leave_out(error, settings.skip_bad_rows))?;
            }
            set.report_progress(settings, paths.len());
        }
        if set.files.is_empty() {
            let first =
                set.left_out.values().next().map_or_else(String::new, |bad| format!("; the first: {}", bad.first));
            return Err(DataError::NoCapturedFile { entry: entry.into(), first });
        }
        Ok(set)
    }

    /// All files have the same layers and dtype: they come from one server. Of files with the same tokens the first counts.
    fn take(&mut self, file: CapturedFile, tokens: TokensHash) -> Result<(), CapturedError> {
        self.files.first().map_or(Ok(()), |first| file.check_like(first))?;
        match self.by_tokens.entry(tokens) {
            Entry::Vacant(place) => _ = place.insert(self.files.len() as u32),
            Entry::Occupied(earlier) => {
                let earlier = self.files[*earlier.get() as usize].path.display();
                let first = format!("{} has those of {earlier}", file.path.display());
                self.repeated.get_or_insert(BadRows { rows: 0, first }).rows += 1;
            }
        }
        self.files.push(file);
        Ok(())
    }

    fn leave_out(&mut self, error: CapturedError, skips: bool) -> Result<(), CapturedError> {
        let Some(kind) = error.kind().filter(|_| skips) else { return Err(error) };
        let first = error.to_string();
        self.left_out.entry(kind).or_insert(BadRows { rows: 0, first }).rows += 1;
        Ok(())
    }

    /// The bytes of files that are not open yet are estimated.
    fn report_progress(&self, settings: &LoadSettings, all: usize) {
        let Some(hear) = settings.watch else { return };
        let left_out: usize = self.left_out.values().map(|bad| bad.rows).sum();
        let (read, opened) = (self.bytes(), (self.files.len() + left_out) as u64);
        let bytes = read / opened.max(1) * all as u64;
        hear(ReadProgress { path: Path::new(&self.entry), read, bytes, tokenised: Tokenised::default() });
    }

    /// As the recipe names it.
    pub fn entry(&self) -> &str {
        &self.entry
    }

    /// The files that can be read.
    pub fn files(&self) -> &[CapturedFile] {
        &self.files
    }

    /// How many layers each file has.
    pub fn layers(&self) -> usize {
        self.files.first().map_or(0, |file| file.layers)
    }

    /// Files that are not right and were left out, by kind; `rows` are files.
    pub fn left_out(&self) -> &BTreeMap<&'static str, BadRows> {
        &self.left_out
    }

    /// Files with the tokens of an earlier one, whose states are taken.
    pub fn repeated(&self) -> Option<&BadRows> {
        self.repeated.as_ref()
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Identifies the files by their names, sizes and times of change: they are too large to hash. Their folder may move.
    pub fn stamp(&self) -> StampedFiles {
        let mut hasher = Sha256::new();
        for file in &self.files {
            let name = file.path.file_name().unwrap_or_default().to_string_lossy();
            hasher.update(format!("{name}\n{} bytes\n{} ns\n", file.bytes, file.modified));
        }
        StampedFiles { files: self.files.len(), bytes: self.bytes(), sha256: files::hex(&hasher.finalize()) }
    }

    /// The file of each row.
    ///
    /// # Errors
    /// [`DataError::Cache`].
    ///
    /// # Panics
    /// If a row has none: see [`CapturedSet::rows_with_states`].
    pub fn files_of(&self, rows: &RowStore) -> Result<Vec<u32>, DataError> {
        let file = |row: Result<TokenRow, _>| Ok(self.file_of(&row?).expect("rows without states were left out"));
        rows.iter().map(file).collect()
    }

    fn file_of(&self, row: &TokenRow) -> Option<u32> {
        self.by_tokens.get(&hash(&row.input_ids)).copied()
    }

    /// Those of `rows` that have a file; with `skips`, others are left out and counted.
    ///
    /// # Errors
    /// A row without a file, or none with one.
    pub fn rows_with_states(
        &self,
        rows: RowStore,
        report: &mut LoadReport,
        skips: bool,
    ) -> Result<RowStore, DataError> {
        let (mut without, mut first) = (vec![], None);
        for (at, row) in rows.iter().enumerate() {
            let row = row?;
            if self.file_of(&row).is_none() {
                without.push(LeftOutRow::new(at, &row));
                first.get_or_insert(row);
            }
        }
        let (Some(row), Some(LeftOutRow { at, .. })) = (first, without.first()) else { return Ok(rows) };
        let source = rows.sources()[*at];
        if !skips || without.len() == rows.len() {
            return Err(self.without_states(source, &row, without.len(), rows.len())?);
        }
        report.skip(NO_STATES, &format!("row {source} of {}", counted(row.input_ids.len(), "token")), &without);
        let mut has_none = vec![false; rows.len()];
        without.iter().for_each(|row| has_none[row.at] = true);
        Ok(rows.partition(&has_none).1)
    }

    /// Why a row has no file; `source` is its number in its files, as speculators names the states of its rows.
    fn without_states(
        &self,
        source: usize,
        row: &TokenRow,
        without: usize,
        rows: usize,
    ) -> Result<DataError, DataError> {
        let name = format!("hs_{source}.safetensors");
        let namesake = self.files.iter().find(|file| file.path.file_name().is_some_and(|found| *found == *name));
        let namesake = match namesake {
            None => String::new(),
            Some(file) => {
                format!("; {} has {}", file.path.display(), difference(&file.token_ids(usize::MAX)?, &row.input_ids))
            }
        };
        let tokens = row.input_ids.iter().copied().take(5).collect();
        let (entry, length) = (self.entry.clone(), row.input_ids.len());
        Ok(DataError::NoStatesOfRow { row: source, tokens, length, entry, namesake, without, rows })
    }

    /// Rows are neither split nor cut: their states are those of whole rows.
    ///
    /// # Errors
    /// [`DataError::LongerThanCaptured`].
    pub fn check_whole(&self, report: &LoadReport) -> Result<(), DataError> {
        if report.counts.split + report.counts.truncated == 0 {
            return Ok(());
        }
        let longest = self.files.iter().map(|file| file.tokens).max().unwrap_or(0);
        Err(DataError::LongerThanCaptured {
            max_length: report.max_length,
            longest,
            rows: report.counts.split + report.counts.truncated,
        })
    }

    /// Rows of the files themselves, in the order of their names. The loss is on the tokens of `loss_mask`, or on all with
    /// `data.loss_on = "all"`.
    ///
    /// # Errors
    /// A file without a mask, or an error of reading.
    pub fn rows(&self, settings: &LoadSettings) -> Result<(RowStore, LoadReport), DataError> {
        let (opened, cache) = self.token_file(settings)?;
        let OpenedTokenFile { file, rows, summary, tokens_sha256 } = opened;
        let path = PathBuf::from(&self.entry);
        let mut report = LoadReport { max_length: settings.max_length.get(), ..LoadReport::default() };
        let (read, left_out) = (summary.counts.read, summary.counts.left_out());
        report.add(summary.counts, &path);
        report.files.push(DataFile { path, sha256: None, tokens_sha256, rows: read, left_out, cache });
        (report.rows_of_entries, report.files_of_entries) = (vec![report.counts.rows], vec![1]);
        if report.counts.rows == 0 {
            return Err(DataError::Empty { files: vec![self.entry.clone()], report: report.into() });
        }
        Ok((RowStore::of(vec![(file, rows)]), report))
    }

    fn token_file(&self, settings: &LoadSettings) -> Result<(OpenedTokenFile, CacheUse), DataError> {
        let encode = |source| DataError::Encode { path: PathBuf::from(&self.entry), source };
        let Some(cache) = settings.cache else {
            let bytes = self.write(settings, Vec::new(), encode)?;
            return Ok((reading::in_memory(bytes).map_err(encode)?, CacheUse::NotUsed));
        };
        let key = settings.cache_key(Path::new(&self.entry), &self.stamp().sha256);
        match cache.read(&key)? {
            CacheEntry::Rows(opened) => Ok((*opened, CacheUse::Read)),
            CacheEntry::Nothing => Ok((self.build(settings, cache, &key)?, CacheUse::Written)),
            CacheEntry::Damaged(how) => Ok((self.build(settings, cache, &key)?, CacheUse::Rebuilt(how))),
        }
    }

    fn build(&self, settings: &LoadSettings, cache: &TokenCache, key: &str) -> Result<OpenedTokenFile, DataError> {
        let new = cache.create(key)?;
        let failed = |error| match error {
            ArrowError::IoError(_, source) => new.error(source).into(),
            source => DataError::Encode { path: PathBuf::from(&self.entry), source },
        };
        self.write(settings, new.writer().map_err(|error| new.error(error))?, failed)?;
        Ok(cache.commit(key, new)?)
    }

    fn write<W: Write>(
        &self,
        settings: &LoadSettings,
        out: W,
        failed: impl Fn(ArrowError) -> DataError,
    ) -> Result<W, DataError> {
        let mut writer = TokenFileWriter::new(out).map_err(&failed)?;
        let (mut summary, fit) = (FileSummary::default(), settings.fit());
        for file in self.files.iter().take(settings.limit.map_or(usize::MAX, NonZeroUsize::get)) {
            let row = ReadRow::new(labelled(file, settings)?, RowForm::Tokens);
            writer.push_pieces(summary.admit(row, &fit)).map_err(&failed)?;
        }
        let mut out = writer.finish(summary).map_err(&failed)?;
        out.flush().map_err(|error| failed(error.into()))?;
        Ok(out)
    }
}

fn labelled(file: &CapturedFile, settings: &LoadSettings) -> Result<TokenRow, CapturedError> {
    let input_ids = file.token_ids(settings.vocab_size)?;
    let labels = match settings.loss_on {
        LossOn::All => input_ids.clone(),
        LossOn::Assistant => {
            let labels = input_ids.iter().zip(file.loss_mask()?);
            labels.map(|(&id, carries)| if carries { id } else { IGNORE }).collect()
        }
    };
    Ok(TokenRow { input_ids, labels })
}

fn open(path: &Path, sizes: StateSizes, reads_all: bool) -> Result<(CapturedFile, TokensHash), CapturedError> {
    let file = CapturedFile::open(path, sizes)?;
    let tokens = hash(&file.token_ids(sizes.vocab_size)?);
    if reads_all {
        let positions: Vec<usize> = (0..file.tokens).collect();
        file.read_states(file.layers - 1, &positions, &mut vec![0; file.tokens * file.state_bytes()])?;
    }
    Ok((file, tokens))
}

fn hash(tokens: &[i32]) -> TokensHash {
    let mut hasher = Sha256::new();
    tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    let [hash, _] = *hasher.finalize().as_chunks().0 else { unreachable!("SHA-256 has 32 bytes") };
    hash
}

/// How the tokens of a file differ from those of a row.
fn difference(file: &[i32], row: &[i32]) -> String {
    match file.iter().zip(row).position(|(one, other)| one != other) {
        Some(at) => format!("token {} at position {at}, the row {}", file[at], row[at]),
        None => format!("{} tokens, the row {}", file.len(), row.len()),
    }
}

/// The files of a folder and of the folders in it, or of a pattern, by name; numbers in names count as numbers.
///
/// # Errors
/// A path or pattern without a file.
pub fn find(entry: &str) -> Result<Vec<PathBuf>, SourceError> {
    let path = Path::new(entry);
    let mut paths = if path.is_dir() {
        let pattern = format!("{}/**/*.safetensors", glob::Pattern::escape(entry.trim_end_matches('/')));
        matches(&pattern)?
    } else if path.exists() {
        check_regular(path).map_err(failed("read", path))?;
        vec![path.to_owned()]
    } else if entry.contains(['*', '?', '[']) {
        matches(entry)?
    } else {
        return Err(SourceError::Missing { path: path.to_owned() });
    };
    paths.iter().try_for_each(|path| check_name(path))?;
    paths.sort_by_cached_key(|path| by_number(path));
    Ok(paths)
}

/// `hs_2` before `hs_10`.
fn by_number(path: &Path) -> (PathBuf, String, u64, PathBuf) {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let name = stem.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = stem[name.len()..].parse().unwrap_or(0);
    (files::parent(path).to_owned(), name.to_owned(), number, path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_in_the_order_of_their_numbers() {
        let mut paths = ["b/hs_0", "a/hs_10", "a/hs_9", "a/cmpl-1", "a/hs_x"]
            .map(|name| Path::new(name).with_extension("safetensors"));
        paths.sort_by_cached_key(|path| by_number(path));
        let names = paths.map(|path| path.with_extension("").display().to_string());
        assert_eq!(names, ["a/cmpl-1", "a/hs_9", "a/hs_10", "a/hs_x", "b/hs_0"]);
    }

    #[test]
    fn a_difference_is_the_first_token_or_the_length() {
        assert_eq!(difference(&[1, 2, 3], &[1, 4, 3, 5]), "token 2 at position 1, the row 4");
        assert_eq!(difference(&[1, 2], &[1, 2, 3]), "2 tokens, the row 3");
    }
}
