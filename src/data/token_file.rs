//! Rows of tokens as an Arrow file, which pyarrow and `datasets` read too: written batch by batch, read row by row, so that
//! neither side holds more than a batch. Rows are drawn in shuffled order, and Arrow's own reader decodes a batch of a MiB for each of them: the
//! footer says where each batch ends and how long its rows are, so that a row is two reads of its own bytes.
//!
//! Every byte is under a checksum. Those of a batch stand in the footer and are looked at when the batch is first read; the
//! footer's own is the file's name, so that opening reads nothing else.

use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::{Array, Int32Array, ListArray, RecordBatch};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use arrow::ipc::reader::read_footer_length;
use arrow::ipc::root_as_footer;
use arrow::ipc::writer::FileWriter;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::report::FileSummary;
use super::rows::TokenRow;
use crate::files;

/// Key of the Arrow metadata under which [`FooterFacts`] stand as JSON.
const FACTS: &str = "medusa";
/// A batch is written when it has so many rows, or so many tokens (a MiB): it is read as a whole once, to check it.
const ROWS_A_BATCH: usize = 4096;
const TOKENS_A_BATCH: usize = 1 << 17;
/// The footer's length and the magic word at a file's end.
const TRAILER: usize = 10;
/// Of the end of the batches.
const MARK: usize = 8;
/// Arrow's buffers end at multiples of so many bytes.
const ALIGNMENT: u64 = 64;

/// Why rows cannot be had from a file.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// It is not the one that was written.
    #[error("{0}")]
    Damage(String),
    /// The disk's own words, which say nothing of what the file holds.
    #[error("{0}")]
    Io(io::Error),
}

impl Fault {
    fn cut_off() -> Self {
        Self::Damage("it is cut off".to_owned())
    }

    /// What a message of damage is made of.
    fn damage(how: impl std::fmt::Display) -> Self {
        Self::Damage(how.to_string())
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof { Self::cut_off() } else { Self::Io(error) }
    }
}

/// Where a row stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowPlace {
    pub(super) batch: u32,
    /// Its first token within the batch, and the bit [`GOES_ON`].
    start: u32,
    pub(super) length: u32,
}

/// The bit of [`RowPlace::start`] that marks a row as a later piece of the source row that the row before it comes from. A batch has far fewer
/// tokens.
const GOES_ON: u32 = 1 << 31;

impl RowPlace {
    /// The same where its batches are counted behind so many others.
    pub(super) fn behind(self, batches: u32) -> Self {
        Self { batch: batches + self.batch, ..self }
    }

    fn start(self) -> u32 {
        self.start & !GOES_ON
    }

    /// Whether it is a later piece of the source row that the row before it comes from.
    pub(super) fn goes_on(self) -> bool {
        self.start & GOES_ON != 0
    }
}

/// What the footer says besides what Arrow says.
#[derive(Debug, Default, Serialize, Deserialize)]
struct FooterFacts {
    summary: FileSummary,
    batches: Vec<BatchFacts>,
}

/// What the footer says of a batch.
#[derive(Debug, Serialize, Deserialize)]
struct BatchFacts {
    /// Where the file goes on behind it.
    end: u64,
    /// CRC-32 of the file's bytes from the end of the batch before.
    checksum: u32,
    /// Tokens of each of its rows.
    lengths: Vec<u32>,
    /// Those of its rows that are later pieces of a long source row.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    going_on: Vec<u32>,
}

impl FooterFacts {
    /// Of each batch's checksum, and of one of its rows' lengths.
    fn tokens_sha256(&self) -> String {
        let mut sums = Sha256::new();
        for batch in &self.batches {
            let lengths: Vec<u8> = batch.lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
            sums.update(batch.checksum.to_le_bytes());
            sums.update(crc32fast::hash(&lengths).to_le_bytes());
        }
        files::hex(&sums.finalize())
    }
}

/// Writes rows.
pub(super) struct TokenFileWriter<W: Write> {
    writer: FileWriter<ChecksumWriter<W>>,
    schema: Arc<Schema>,
    waiting: Vec<TokenRow>,
    waiting_tokens: usize,
    /// Those of `waiting` that are later pieces of a long source row.
    going_on: Vec<u32>,
    facts: FooterFacts,
}

/// Sums and counts what is written.
struct ChecksumWriter<W> {
    out: W,
    sum: crc32fast::Hasher,
    count: u64,
}

impl<W: Write> Write for ChecksumWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.sum.update(&bytes[..written]);
        self.count += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl<W: Write> TokenFileWriter<W> {
    pub(super) fn new(out: W) -> Result<Self, ArrowError> {
        let list = || DataType::new_list(DataType::Int32, false);
        let fields = ["input_ids", "labels"].map(|name| Field::new(name, list(), false));
        let schema = Arc::new(Schema::new(fields.to_vec()));
        let writer = FileWriter::try_new(ChecksumWriter { out, sum: crc32fast::Hasher::new(), count: 0 }, &schema)?;
        Ok(Self { writer, schema, waiting: vec![], waiting_tokens: 0, going_on: vec![], facts: FooterFacts::default() })
    }

    /// Adds the pieces of one source row.
    pub(super) fn push_pieces(&mut self, pieces: impl IntoIterator<Item = TokenRow>) -> Result<(), ArrowError> {
        for (at, piece) in pieces.into_iter().enumerate() {
            if at > 0 {
                self.going_on.push(self.waiting.len() as u32);
            }
            self.push(piece)?;
        }
        Ok(())
    }

    pub(super) fn push(&mut self, row: TokenRow) -> Result<(), ArrowError> {
        self.waiting_tokens += row.input_ids.len();
        self.waiting.push(row);
        match self.waiting.len() >= ROWS_A_BATCH || self.waiting_tokens >= TOKENS_A_BATCH {
            true => self.write_batch(),
            false => Ok(()),
        }
    }

    /// Writes what is left and the footer.
    pub(super) fn finish(mut self, summary: FileSummary) -> Result<W, ArrowError> {
        self.write_batch()?;
        self.facts.summary = summary;
        let facts = serde_json::to_string(&self.facts).map_err(|error| ArrowError::JsonError(error.to_string()))?;
        self.writer.write_metadata(FACTS, facts);
        Ok(self.writer.into_inner()?.out)
    }

    fn write_batch(&mut self) -> Result<(), ArrowError> {
        let rows = std::mem::take(&mut self.waiting);
        self.waiting_tokens = 0;
        if rows.is_empty() {
            return Ok(());
        }
        let ids = column(rows.iter().map(|row| &row.input_ids))?;
        let labels = column(rows.iter().map(|row| &row.labels))?;
        let columns: Vec<Arc<dyn Array>> = vec![Arc::new(ids), Arc::new(labels)];
        self.writer.write(&RecordBatch::try_new(self.schema.clone(), columns)?)?;
        let ChecksumWriter { sum, count: end, .. } = self.writer.get_mut();
        let (checksum, lengths) = (std::mem::take(sum).finalize(), rows.iter().map(|row| row.input_ids.len() as u32));
        let going_on = std::mem::take(&mut self.going_on);
        self.facts.batches.push(BatchFacts { end: *end, checksum, lengths: lengths.collect(), going_on });
        Ok(())
    }
}

fn column<'a>(lists: impl Iterator<Item = &'a Vec<i32>> + Clone) -> Result<ListArray, ArrowError> {
    let offsets = OffsetBuffer::from_lengths(lists.clone().map(Vec::len));
    let values: ScalarBuffer<i32> = lists.flatten().copied().collect::<Vec<_>>().into();
    let item = Arc::new(Field::new_list_field(DataType::Int32, false));
    ListArray::try_new(item, offsets, Arc::new(Int32Array::new(values, None)), None)
}

/// Where the bytes are: a file, or memory. Rows come by `read`, not by a memory map: what was read is not the process's memory, and a file
/// that another process cuts is an error, not a signal.
#[derive(Debug)]
pub(super) struct Storage(Mutex<Box<dyn Bytes>>);

/// What bytes are read from.
pub(super) trait Bytes: Read + Seek + Send + std::fmt::Debug {}

impl<B: Read + Seek + Send + std::fmt::Debug> Bytes for B {}

impl Storage {
    pub(super) fn new(bytes: impl Bytes + 'static) -> Self {
        Self(Mutex::new(Box::new(bytes)))
    }

    pub(super) fn memory(bytes: Vec<u8>) -> Self {
        Self::new(Cursor::new(bytes))
    }

    fn size(&self) -> io::Result<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).seek(SeekFrom::End(0))
    }

    fn read(&self, at: u64, length: usize) -> io::Result<Vec<u8>> {
        // Asked before the disk is: a place that no file can have is an error of seeking, which says nothing of damage.
        let size = self.size()?;
        if at.checked_add(length as u64).is_none_or(|end| end > size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut read = vec![0; length];
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner); // seeks before it reads
        bytes.seek(SeekFrom::Start(at))?;
        bytes.read_exact(&mut read)?;
        Ok(read)
    }
}

/// A file of rows, open.
#[derive(Debug)]
pub(super) struct TokenFile {
    medium: Storage,
    path: PathBuf,
    batches: Vec<TokenBatch>,
}

#[derive(Debug)]
struct TokenBatch {
    /// From the end of the batch before: all that its checksum is of.
    bytes: Range<u64>,
    ids_at: u64,
    labels_at: u64,
    checksum: u32,
    is_checked: AtomicBool,
}

/// A file that was opened, with all that its footer says.
#[derive(Debug)]
pub(super) struct OpenedTokenFile {
    pub(super) file: TokenFile,
    pub(super) rows: Vec<RowPlace>,
    pub(super) summary: FileSummary,
    /// Of the checksums of its batches: the same rows have the same, whatever else the footer says.
    pub(super) tokens_sha256: String,
}

impl TokenFile {
    /// Reads the footer, and where each row stands. `footer_sha256` is the beginning of the hash that the footer must have.
    pub(super) fn open(medium: Storage, path: &Path, footer_sha256: Option<&str>) -> Result<OpenedTokenFile, Fault> {
        let bytes = FooterBytes::read(&medium)?;
        if footer_sha256.is_some_and(|expected| !bytes.sha256().starts_with(expected)) {
            return Err(Fault::damage("its footer is not the one that was written"));
        }
        let footer = root_as_footer(bytes.footer()).map_err(Fault::damage)?;
        let facts = footer.custom_metadata().into_iter().flatten().find(|pair| pair.key() == Some(FACTS));
        let facts = facts.and_then(|pair| pair.value()).unwrap_or_default();
        let facts: FooterFacts = serde_json::from_str(facts).map_err(Fault::damage)?;
        let tokens_sha256 = facts.tokens_sha256();
        let (mut batches, mut rows, mut before) = (Vec::with_capacity(facts.batches.len()), Vec::new(), 0);
        for (number, BatchFacts { end, checksum, lengths, going_on }) in (0..).zip(facts.batches) {
            let (mut start, first) = (0u32, rows.len());
            for &length in &lengths {
                rows.push(RowPlace { batch: number, start, length });
                let next = start.checked_add(length).filter(|&next| next < GOES_ON);
                start = next.ok_or_else(|| Fault::damage("its footer names more tokens than a batch has"))?;
            }
            for row in going_on {
                let place: Option<&mut RowPlace> = first.checked_add(row as usize).and_then(|row| rows.get_mut(row));
                place.ok_or_else(|| Fault::damage("its footer names a row that is not there"))?.start |= GOES_ON;
            }
            let (tokens, offsets) = (aligned(4 * u64::from(start)), aligned(4 * (lengths.len() as u64 + 1)));
            // Arrow ends a batch with the values of `input_ids`, the offsets of `labels` and their values; no null has a bit.
            let ids_at = end.checked_sub(tokens + offsets + tokens).filter(|&at| at >= before);
            let ids_at = ids_at.ok_or_else(|| Fault::damage("its footer names tokens where there are none"))?;
            let (labels_at, is_checked) = (end - tokens, AtomicBool::new(false));
            batches.push(TokenBatch { bytes: before..end, ids_at, labels_at, checksum, is_checked });
            before = end;
        }
        let file = Self { medium, path: path.to_owned(), batches };
        Ok(OpenedTokenFile { file, rows, tokens_sha256, summary: facts.summary })
    }

    /// Its path, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn batches(&self) -> usize {
        self.batches.len()
    }

    /// A row's tokens; its batch is checked when it is first read.
    pub(super) fn row(&self, place: RowPlace) -> Result<TokenRow, Fault> {
        let batch = &self.batches[place.batch as usize];
        if !batch.is_checked.load(Ordering::Relaxed) {
            batch.check(&self.medium)?;
        }
        let read = |column: u64| {
            let bytes = self.medium.read(column + 4 * u64::from(place.start()), 4 * place.length as usize)?;
            let (tokens, _) = bytes.as_chunks();
            Ok::<_, Fault>(tokens.iter().map(|&token| i32::from_le_bytes(token)).collect())
        };
        Ok(TokenRow { input_ids: read(batch.ids_at)?, labels: read(batch.labels_at)? })
    }

    /// Checks all batches.
    pub(super) fn check(&self) -> Result<(), Fault> {
        self.batches.iter().try_for_each(|batch| batch.check(&self.medium))
    }

    /// The same file where its disk refuses to be read.
    #[cfg(test)]
    pub(super) fn on(self, medium: Storage) -> Self {
        Self { medium, ..self }
    }

    /// Batches that were checked: those that any row was read of.
    #[cfg(test)]
    pub(super) fn checked(&self) -> usize {
        self.batches.iter().filter(|batch| batch.is_checked.load(Ordering::Relaxed)).count()
    }
}

/// Bytes of a buffer with those that fill it up.
fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

impl TokenBatch {
    fn check(&self, medium: &Storage) -> Result<(), Fault> {
        const AT_ONCE: u64 = 1 << 18;
        let mut sum = crc32fast::Hasher::new();
        for start in self.bytes.clone().step_by(AT_ONCE as usize) {
            sum.update(&medium.read(start, AT_ONCE.min(self.bytes.end - start) as usize)?);
        }
        if sum.finalize() != self.checksum {
            return Err(Fault::damage("its content is not what was written"));
        }
        self.is_checked.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// All behind the last batch: the mark of its end, the footer, the footer's length.
struct FooterBytes(Vec<u8>);

impl FooterBytes {
    fn read(medium: &Storage) -> Result<Self, Fault> {
        let trailer_at = medium.size()?.checked_sub(TRAILER as u64).ok_or_else(Fault::cut_off)?;
        let trailer = medium.read(trailer_at, TRAILER)?.try_into().map_err(|_| Fault::cut_off())?;
        let length = MARK + read_footer_length(trailer).map_err(Fault::damage)?;
        let start = trailer_at.checked_sub(length as u64).ok_or_else(Fault::cut_off)?;
        Ok(Self(medium.read(start, length + TRAILER)?))
    }

    fn footer(&self) -> &[u8] {
        &self.0[MARK..self.0.len() - TRAILER]
    }

    fn sha256(&self) -> String {
        files::hex(&Sha256::digest(&self.0))
    }
}

/// The hash that a file's name says.
pub(super) fn footer_sha256(medium: &Storage) -> Result<String, Fault> {
    Ok(FooterBytes::read(medium)?.sha256())
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::File;

    use arrow::array::AsArray;
    use arrow::datatypes::Int32Type;
    use arrow::ipc::reader::FileReader;

    use super::*;

    pub(in crate::data) fn rows(count: usize) -> Vec<TokenRow> {
        let row = |n: usize| TokenRow { input_ids: vec![n as i32; n % 50], labels: vec![-(n as i32); n % 50] };
        (0..count).map(row).collect()
    }

    pub(in crate::data) fn written(rows: &[TokenRow]) -> Vec<u8> {
        let mut writer = TokenFileWriter::new(Vec::new()).unwrap();
        rows.iter().for_each(|row| writer.push(row.clone()).unwrap());
        writer.finish(FileSummary::default()).unwrap()
    }

    fn opened(bytes: Vec<u8>, sha256: Option<&str>) -> Result<OpenedTokenFile, Fault> {
        TokenFile::open(Storage::memory(bytes), Path::new("rows.arrow"), sha256)
    }

    #[test]
    fn what_is_written_is_read_here_and_by_arrow() {
        let rows = rows(9000);
        let bytes = written(&rows);
        let OpenedTokenFile { file, rows: places, .. } = opened(bytes.clone(), None).unwrap();
        assert!(file.batches() > 2 && places.len() == rows.len());
        assert_eq!(file.checked(), 0, "opening reads no tokens");
        for at in (0..rows.len()).rev() {
            assert_eq!(file.row(places[at]).unwrap(), rows[at]);
        }
        assert_eq!(file.checked(), file.batches());
        let batches = FileReader::try_new(io::Cursor::new(bytes), None).unwrap();
        let mut ids = Vec::new();
        for batch in batches {
            let batch = batch.unwrap();
            let lists = batch.column(0).as_list::<i32>().clone();
            ids.extend(lists.iter().map(|list| list.unwrap().as_primitive::<Int32Type>().values().to_vec()));
        }
        assert!(ids.iter().eq(rows.iter().map(|row| &row.input_ids)));
        assert!(opened(written(&[]), None).unwrap().rows.is_empty());
    }

    #[test]
    fn a_disk_that_cannot_be_read_is_no_damage() {
        let dir = tempfile::tempdir().unwrap();
        let for_writing = || Storage::new(File::options().write(true).open(dir.path().join("rows.arrow")).unwrap());
        files::write_atomic(&dir.path().join("rows.arrow"), |out| out.write_all(&written(&rows(60)))).unwrap();
        let refused = TokenFile::open(for_writing(), Path::new("rows.arrow"), None);
        assert!(matches!(refused, Err(Fault::Io(_))), "{refused:?}");
        assert!(matches!(opened(vec![], None), Err(Fault::Damage(_))));
        let OpenedTokenFile { file, rows, .. } = opened(written(&rows(60)), None).unwrap();
        let unread = file.on(for_writing()).row(rows[9]);
        assert!(matches!(unread, Err(Fault::Io(_))), "{unread:?}");
    }

    /// An offset with a high bit changed is a place to which no disk seeks.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of a test, thousands of times")]
    fn damage_on_a_disk_is_damage_whichever_bit_it_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.arrow");
        let bytes = written(&rows(60));
        let sha256 = footer_sha256(&Storage::memory(bytes.clone())).unwrap();
        for at in 0..bytes.len().min(3000) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            std::fs::write(&path, &damaged).unwrap();
            let whole = TokenFile::open(Storage::new(File::open(&path).unwrap()), &path, Some(&sha256));
            let fault = whole.and_then(|whole| whole.rows.iter().try_for_each(|&row| whole.file.row(row).map(drop)));
            assert!(!matches!(fault, Err(Fault::Io(_))), "byte {at}: {fault:?}");
        }
    }

    #[test]
    fn the_hash_of_the_tokens_is_of_nothing_else() {
        let tokens_hash = |rows: &[TokenRow], rendered: bool| {
            let mut writer = TokenFileWriter::new(Vec::new()).unwrap();
            rows.iter().for_each(|row| writer.push(row.clone()).unwrap());
            let summary = FileSummary { rendered, ..FileSummary::default() };
            opened(writer.finish(summary).unwrap(), None).unwrap().tokens_sha256
        };
        assert_eq!(tokens_hash(&rows(60), true), tokens_hash(&rows(60), false));
        assert_ne!(tokens_hash(&rows(60), true), tokens_hash(&rows(61), true));
    }

    #[test]
    fn any_changed_byte_is_noticed_at_the_latest_when_its_row_is_read() {
        let rows = rows(60);
        let bytes = written(&rows);
        let sha256 = footer_sha256(&Storage::memory(bytes.clone())).unwrap();
        let is_noticed = |bytes: Vec<u8>| match opened(bytes, Some(&sha256)) {
            Ok(OpenedTokenFile { file, rows, .. }) => rows.iter().any(|&place| file.row(place).is_err()),
            Err(_) => true,
        };
        assert!(!is_noticed(bytes.clone()));
        for at in (0..bytes.len()).step_by(3) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(is_noticed(damaged), "byte {at}");
        }
        assert!(is_noticed(bytes[..bytes.len() / 2].to_vec()) && is_noticed(vec![]));
    }
}
