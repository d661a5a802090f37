//! Tokenised rows on disk, so that a second run starts at once. An Arrow file, which pyarrow and datasets read too.
//!
//! A file's name is `<key>-<sha256 of its content>.arrow`: whatever a crash, a full disk or a stray edit did to it is
//! noticed before Arrow parses a byte.

use std::fs;
use std::io::{self, Cursor, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, AsArray, BooleanArray, Int32Array, ListArray, RecordBatch};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{DataType, Field, Int32Type, Schema};
use arrow::error::ArrowError;
use arrow::ipc::reader::FileReader;
use arrow::ipc::writer::FileWriter;
use sha2::{Digest, Sha256};

use super::LoadSettings;
use super::rows::{FileRows, ReadRow, TokenRow};
use super::tokenize::TextTokenizer;
use crate::files;

/// Part of every key: raise it when the same input would give other rows.
const FORMAT: &str = "medusa tokens 2";

/// Key of the Arrow metadata under which stands how many conversations were left out, and why, as JSON.
const DROPPED: &str = "dropped";

/// Rows an Arrow batch: its offsets are 32 bits wide.
const ROWS_A_BATCH: usize = 8192;

/// A cache that cannot be used. A damaged file is none of these: it is rebuilt, and the report says so.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The disk's own words.
    #[error("cannot use the token cache {}; set MEDUSA_CACHE to a folder that can be written", path.display())]
    Disk {
        /// The cache's folder, or the file in it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Rows that Arrow does not take.
    #[error("cannot encode rows for the token cache")]
    Encode(#[from] ArrowError),
}

/// What the cache had.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// These rows.
    Rows(FileRows),
    /// Nothing for this key.
    Nothing,
    /// A file that is damaged, and how it shows.
    Damaged(String),
}

/// A folder of tokenised files.
#[derive(Debug, Clone)]
pub struct TokenCache {
    folder: PathBuf,
}

impl TokenCache {
    /// A cache in this folder, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// In [`files::user_cache`]; `None` for a user without a home.
    pub fn of_user() -> Option<Self> {
        files::user_cache().map(Self::new)
    }

    /// What decides a file's rows: its content, the tokenizer, what is added around a text, the vocabulary they were
    /// checked against, how a conversation is rendered, and which of its tokens carry loss.
    pub fn key(file_sha256: &str, tokenizer: &TextTokenizer, settings: &LoadSettings) -> String {
        let LoadSettings { vocab_size, template, loss_on, .. } = settings;
        let (eos, template) = (tokenizer.eos_id(), template.map(|template| template.sha256()));
        let tokenizer = tokenizer.sha256();
        let text = format!("{tokenizer}\neos {eos:?}\nvocabulary {vocab_size}");
        let facts = format!("{FORMAT}\n{file_sha256}\n{text}\ntemplate {template:?}\nloss on {loss_on:?}");
        files::hex(&Sha256::digest(facts))[..32].to_owned()
    }

    /// The rows kept under a key.
    ///
    /// # Errors
    /// The disk's own.
    pub fn read(&self, key: &str) -> Result<Found, CacheError> {
        let Some(path) = self.files_of(key)?.pop() else {
            return Ok(Found::Nothing);
        };
        let bytes = fs::read(&path).map_err(|source| CacheError::Disk { path: path.clone(), source })?;
        if path != self.path(key, &bytes) {
            return Ok(Found::Damaged(format!("the content of {} is not what was written", path.display())));
        }
        Ok(match decode(bytes) {
            Ok(rows) => Found::Rows(rows),
            Err(error) => Found::Damaged(format!("{}: {error}", path.display())),
        })
    }

    /// Keeps rows under a key, in place of whatever was there.
    ///
    /// # Errors
    /// The disk's own.
    pub fn write(&self, key: &str, rows: &FileRows) -> Result<(), CacheError> {
        let at_folder = |source| CacheError::Disk { path: self.folder.clone(), source };
        let bytes = encode(rows)?;
        let path = self.path(key, &bytes);
        fs::create_dir_all(&self.folder).map_err(at_folder)?;
        let written = files::write_atomic(&path, |out| out.write_all(&bytes));
        // Another run may have written the same bytes, and renamed them, at the same time.
        if let Err(source) = written
            && !path.exists()
        {
            return Err(CacheError::Disk { path, source });
        }
        for old in self.files_of(key)?.into_iter().filter(|old| *old != path) {
            fs::remove_file(&old).map_err(|source| CacheError::Disk { path: old, source })?;
        }
        Ok(())
    }

    fn path(&self, key: &str, bytes: &[u8]) -> PathBuf {
        let content = files::hex(&Sha256::digest(bytes));
        self.folder.join(format!("{key}-{}.arrow", &content[..32]))
    }

    fn files_of(&self, key: &str) -> Result<Vec<PathBuf>, CacheError> {
        let at_folder = |source| CacheError::Disk { path: self.folder.clone(), source };
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            Err(error) => return Err(at_folder(error)),
        };
        let paths: Vec<PathBuf> =
            entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>().map_err(at_folder)?;
        Ok(paths.into_iter().filter(|path| name(path).starts_with(key)).collect())
    }
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn encode(file: &FileRows) -> Result<Vec<u8>, ArrowError> {
    let list = || DataType::new_list(DataType::Int32, false);
    let dropped = serde_json::to_string(&file.dropped).map_err(|error| ArrowError::JsonError(error.to_string()))?;
    let schema = Schema::new(vec![
        Field::new("input_ids", list(), false),
        Field::new("labels", list(), false),
        Field::new("is_conversation", DataType::Boolean, false),
    ]);
    let schema = Arc::new(schema.with_metadata([(DROPPED.to_owned(), dropped)]));
    let mut writer = FileWriter::try_new(Vec::new(), &schema)?;
    for rows in file.rows.chunks(ROWS_A_BATCH) {
        let ids = column(rows.iter().map(|row| &row.tokens.input_ids))?;
        let labels = column(rows.iter().map(|row| &row.tokens.labels))?;
        let is_conversation: BooleanArray = rows.iter().map(|row| Some(row.is_conversation)).collect();
        let columns: Vec<Arc<dyn Array>> = vec![Arc::new(ids), Arc::new(labels), Arc::new(is_conversation)];
        writer.write(&RecordBatch::try_new(schema.clone(), columns)?)?;
    }
    writer.into_inner()
}

fn column<'a>(lists: impl Iterator<Item = &'a Vec<i32>> + Clone) -> Result<ListArray, ArrowError> {
    let offsets = OffsetBuffer::from_lengths(lists.clone().map(Vec::len));
    let values: ScalarBuffer<i32> = lists.flatten().copied().collect::<Vec<_>>().into();
    let item = Arc::new(Field::new_list_field(DataType::Int32, false));
    ListArray::try_new(item, offsets, Arc::new(Int32Array::new(values, None)), None)
}

fn decode(bytes: Vec<u8>) -> Result<FileRows, ArrowError> {
    let reader = FileReader::try_new(Cursor::new(bytes), None)?;
    let dropped = reader.schema().metadata().get(DROPPED).cloned().unwrap_or_default();
    let dropped = serde_json::from_str(&dropped).map_err(|error| ArrowError::JsonError(error.to_string()))?;
    let mut rows = Vec::new();
    for batch in reader {
        let batch = batch?;
        let (ids, labels) = (lists(&batch, 0)?, lists(&batch, 1)?);
        let is_conversation = batch.columns().get(2).and_then(|column| column.as_boolean_opt());
        let is_conversation =
            is_conversation.ok_or_else(|| ArrowError::SchemaError("column 2 is no column of booleans".to_owned()))?;
        rows.extend((0..batch.num_rows()).map(|row| ReadRow {
            tokens: TokenRow { input_ids: list(ids, row), labels: list(labels, row) },
            is_conversation: is_conversation.value(row),
        }));
    }
    Ok(FileRows { rows, dropped })
}

fn lists(batch: &RecordBatch, column: usize) -> Result<&ListArray, ArrowError> {
    let lists = batch.columns().get(column).and_then(|column| column.as_list_opt::<i32>());
    let lists = lists.filter(|lists| lists.value_type() == DataType::Int32);
    lists.ok_or_else(|| ArrowError::SchemaError(format!("column {column} is no list of int32")))
}

fn list(column: &ListArray, row: usize) -> Vec<i32> {
    column.value(row).as_primitive::<Int32Type>().values().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::report::DropReason;

    fn rows(count: usize) -> FileRows {
        let tokens = |n: usize| TokenRow { input_ids: vec![n as i32; n % 5], labels: vec![-100; n % 5] };
        let rows = (0..count).map(|n| ReadRow { tokens: tokens(n), is_conversation: n % 3 == 0 }).collect();
        FileRows { rows, dropped: [(DropReason::TemplateRefuses("no \"tools\"".to_owned()), 2)].into() }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let cache = TokenCache::new(dir.path().join("new/cache"));
        assert_eq!(cache.read("key").unwrap(), Found::Nothing);
        let rows = rows(ROWS_A_BATCH + 3);
        cache.write("key", &rows).unwrap();
        assert_eq!(cache.read("key").unwrap(), Found::Rows(rows));
        assert_eq!(cache.read("other").unwrap(), Found::Nothing);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "damages a file of a test")]
    fn any_changed_byte_is_noticed_and_writing_again_heals() {
        let dir = tempfile::tempdir().unwrap();
        let cache = TokenCache::new(dir.path());
        let rows = rows(20);
        cache.write("key", &rows).unwrap();
        let path = cache.files_of("key").unwrap().pop().unwrap();
        let bytes = fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by(7) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert!(matches!(cache.read("key").unwrap(), Found::Damaged(_)), "byte {at}");
        }
        fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        assert!(matches!(cache.read("key").unwrap(), Found::Damaged(_)));
        cache.write("key", &rows).unwrap();
        assert_eq!(cache.read("key").unwrap(), Found::Rows(rows));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
