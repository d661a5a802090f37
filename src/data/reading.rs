//! Reads a data file into tokenised rows: one thread reads and unpacks, all cores parse and tokenise, the caller's thread writes. Only a few
//! portions are in flight between them, whatever the size of the file.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use rayon::prelude::*;

use super::csv_rows::{CsvHeader, CsvRecord, CsvRows};
use super::documents::Documents;
use super::error::DataError;
use super::json_array::{self, ArrayRows};
use super::jsonl::{self, JsonLines, RowText};
use super::opened::Opened;
use super::other_keys::OtherKeys;
use super::raw_row::RawRow;
use super::report::{DropReason, FileSummary, Tokenised};
use super::row_keys::OtherKey;
use super::rows::{ReadRow, RowError, RowForm, RowLocation, RowProblem, TokenRow};
use super::settings::{LoadSettings, ReadProgress};
use super::token_file::{OpenedTokenFile, Storage, TokenFile, TokenFileWriter};
use super::{arrow_ipc, columns, parquet};

/// Rows and bytes that are parsed and tokenised together: enough for every core, few enough for memory.
const ROWS_AT_ONCE: usize = 2048;
const BYTES_AT_ONCE: usize = 4 << 20;
/// Portions that wait for the cores, and for the disk.
const WAITING: usize = 1;

/// Rows as they come off the disk.
struct Portion {
    rows: RawRows,
    /// Bytes of the file read by then.
    read: u64,
}

enum RawRows {
    Json(Vec<RowText>),
    Csv(Vec<CsvRecord>, Arc<CsvHeader>),
    Documents(Vec<RowText>),
    /// And the number of the first row, from 1, and the columns that are not read.
    Columns(RecordBatch, usize, Arc<[OtherKey]>),
}

/// Bytes of a row as it is written.
trait RowBytes {
    fn bytes(&self) -> usize;
}

impl RowBytes for RowText {
    fn bytes(&self) -> usize {
        self.text.as_ref().map_or(0, Vec::len)
    }
}

impl RowBytes for CsvRecord {
    fn bytes(&self) -> usize {
        self.fields.as_slice().len()
    }
}

/// The outcome of a row.
type RowOutcome = Result<Result<ReadRow, DropReason>, RowError>;

/// Those of a portion, and the keys that nothing is made of.
struct Outcomes {
    rows: Vec<RowOutcome>,
    others: OtherKeys,
}

/// Reads a file's rows, cut and without those that are left out, into `out`.
pub(super) fn write<W: Write>(
    path: &Path,
    settings: &LoadSettings,
    out: W,
    failed: impl Fn(ArrowError) -> DataError,
) -> Result<(W, Tokenised), DataError> {
    let began = Instant::now();
    let bytes = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    let mut writer = TokenFileWriter::new(out).map_err(&failed)?;
    let (mut summary, mut took, fit) = (FileSummary::default(), Tokenised::default(), settings.fit());
    outcomes(path, settings, |portion, read| {
        summary.counts.others.add(portion.others);
        for outcome in portion.rows {
            match outcome {
                Ok(Ok(row)) => {
                    took.tokens += if row.of == RowForm::Tokens { 0 } else { row.tokens.input_ids.len() };
                    writer.push_pieces(summary.admit(row, &fit)).map_err(&failed)?;
                }
                Ok(Err(reason)) => summary.leave_out(reason),
                Err(error) if settings.skip_bad_rows => summary.skip(error)?,
                Err(error) => return Err(error.into()), // the first one of the file, whichever core met its own first
            }
        }
        took.milliseconds = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if let Some(hear) = settings.watch {
            hear(ReadProgress { path, read, bytes, tokenised: took });
        }
        Ok(())
    })?;
    summary.counts.others.settle(settings.template);
    let mut out = writer.finish(summary).map_err(&failed)?;
    out.flush().map_err(|error| failed(error.into()))?;
    took.milliseconds = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    Ok((out, took))
}

/// Rows that are in memory already, encoded there.
pub(super) fn encode(rows: impl IntoIterator<Item = TokenRow>) -> Result<OpenedTokenFile, ArrowError> {
    let mut writer = TokenFileWriter::new(Vec::new())?;
    rows.into_iter().try_for_each(|row| writer.push(row))?;
    in_memory(writer.finish(FileSummary::default())?)
}

/// What was written to memory, open.
pub(super) fn in_memory(bytes: Vec<u8>) -> Result<OpenedTokenFile, ArrowError> {
    let opened = TokenFile::open(Storage::memory(bytes), Path::new("rows in memory"), None);
    opened.map_err(|fault| ArrowError::IpcError(fault.to_string()))
}

/// Gives `take` the rows of a file in its order, portion by portion, with the bytes read so far.
fn outcomes(
    path: &Path,
    settings: &LoadSettings,
    mut take: impl FnMut(Outcomes, u64) -> Result<(), DataError>,
) -> Result<(), DataError> {
    thread::scope(|scope| {
        // Each thread ends with the one behind it: its sends fail then.
        let (read_out, read_in) = sync_channel::<Result<Portion, DataError>>(WAITING);
        let (made_out, made_in) = sync_channel(WAITING);
        scope.spawn(move || {
            if let Err(error) = portions(path, settings, &read_out) {
                let _ = read_out.send(Err(error)); // nobody waits for it where an earlier row was wrong
            }
        });
        scope.spawn(move || {
            for portion in read_in {
                let made = portion.and_then(|portion| Ok((portion.rows.outcomes(path, settings)?, portion.read)));
                if made_out.send(made).is_err() {
                    return;
                }
            }
        });
        for made in made_in {
            let (portion, read) = made?;
            take(portion, read)?;
        }
        Ok(())
    })
}

/// Reads a file to its end or the limit of rows, or until the receiver is dropped.
fn portions(
    path: &Path,
    settings: &LoadSettings,
    out: &SyncSender<Result<Portion, DataError>>,
) -> Result<(), DataError> {
    let (names, limit) = (settings.columns, settings.limit.map_or(usize::MAX, NonZeroUsize::get));
    let send = |rows: RawRows, read: u64| out.send(Ok(Portion { rows, read })).is_ok();
    match Opened::open(path)? {
        Opened::Jsonl(text) => {
            let mut lines = JsonLines::new(text);
            in_portions(
                limit,
                || Ok(lines.next()?.map(|line| (line, lines.count()))),
                |rows, read| send(RawRows::Json(rows), read),
            )
        }
        Opened::JsonArray(text) => {
            let mut items = ArrayRows::new(text);
            in_portions(
                limit,
                || Ok(items.next(path)?.map(|item| (item, items.count()))),
                |rows, read| send(RawRows::Json(rows), read),
            )
        }
        Opened::Csv { text, delimiter } => {
            let mut records = CsvRows::open(text, delimiter, path, names)?;
            let header = Arc::clone(&records.header);
            let send = |rows, read| send(RawRows::Csv(rows, Arc::clone(&header)), read);
            in_portions(limit, || Ok(records.next(path)?.map(|record| (record, records.count()))), send)
        }
        Opened::Text(text) => {
            let mut texts = Documents::new(text);
            let send = |rows, read| send(RawRows::Documents(rows), read);
            in_portions(limit, || Ok(texts.next()?.map(|text| (text, texts.count()))), send)
        }
        Opened::Parquet(file) => {
            let bytes = file.metadata().map_or(0, |metadata| metadata.len());
            let mut batches = parquet::ParquetBatches::open(file, path, names)?;
            let (all, others) = (batches.rows.max(1), Arc::clone(&batches.others));
            let read = |rows: usize| (bytes as f64 * rows as f64 / all as f64) as u64;
            let next = || batches.next(path).map(|batch| batch.map(|batch| (batch, 0)));
            record_batches(limit, next, |batch, first, _| {
                let read = read(first - 1 + batch.num_rows());
                send(RawRows::Columns(batch, first, Arc::clone(&others)), read)
            })
        }
        Opened::ArrowFile(file) => arrow(limit, arrow_ipc::ArrowBatches::in_file(file, path, names)?, path, send),
        Opened::ArrowStream(bytes) => arrow(limit, arrow_ipc::ArrowBatches::in_stream(bytes, path, names)?, path, send),
    }
}

fn arrow(
    limit: usize,
    mut batches: arrow_ipc::ArrowBatches,
    path: &Path,
    send: impl Fn(RawRows, u64) -> bool,
) -> Result<(), DataError> {
    let others = Arc::clone(&batches.others);
    let next = || Ok(batches.next(path)?.map(|batch| (batch, batches.count())));
    record_batches(limit, next, |batch, first, read| send(RawRows::Columns(batch, first, Arc::clone(&others)), read))
}

/// Sends batches with the number of their first row and the bytes read by then, up to a limit of rows.
fn record_batches(
    limit: usize,
    mut next: impl FnMut() -> Result<Option<(RecordBatch, u64)>, RowError>,
    send: impl Fn(RecordBatch, usize, u64) -> bool,
) -> Result<(), DataError> {
    let mut before = 0;
    while before < limit
        && let Some((batch, read)) = next()?
    {
        let rows = batch.num_rows().min(limit - before);
        if !send(batch.slice(0, rows), before + 1, read) {
            break;
        }
        before += rows;
    }
    Ok(())
}

/// Sends rows in portions, with the bytes read by then, up to a limit of rows. Rows before a place that cannot be read come before its error: one of
/// them may be wrong, too.
fn in_portions<T: RowBytes>(
    limit: usize,
    mut next: impl FnMut() -> Result<Option<(T, u64)>, DataError>,
    send: impl Fn(Vec<T>, u64) -> bool,
) -> Result<(), DataError> {
    let mut left = limit;
    loop {
        let (mut rows, mut bytes, mut read) = (Vec::new(), 0, 0);
        let ended = loop {
            if left == 0 {
                break Some(Ok(()));
            }
            left -= 1;
            match next() {
                Ok(Some((row, so_far))) => {
                    bytes += row.bytes();
                    read = so_far;
                    rows.push(row);
                }
                Ok(None) => break Some(Ok(())),
                Err(error) => break Some(Err(error)),
            }
            if rows.len() >= ROWS_AT_ONCE || bytes >= BYTES_AT_ONCE {
                break None;
            }
        };
        let is_heard = rows.is_empty() || send(rows, read);
        match ended {
            Some(ended) => return ended,
            None if !is_heard => return Ok(()),
            None => {}
        }
    }
}

impl RawRows {
    /// Parses and tokenises on all cores.
    fn outcomes(self, path: &Path, settings: &LoadSettings) -> Result<Outcomes, DataError> {
        let names = settings.columns;
        Ok(match self {
            Self::Json(rows) => Outcomes::of(&rows, |row| json_outcome(row, path, settings)),
            Self::Csv(records, header) => Outcomes::of(&records, |record| {
                let place = || RowLocation::row(path, record.number);
                outcome(header.row(record, names), settings, |problem| place().error(problem))
            }),
            Self::Documents(texts) => Outcomes::of(&texts, |text| {
                let row = document(text).map(|row| (row, vec![]));
                outcome(row, settings, |problem| text.location(path).error(problem))
            }),
            Self::Columns(batch, first, others) => {
                let columns = columns::Columns::of(&batch, names)
                    .map_err(|error| RowLocation::row(path, first).error(RowProblem::BrokenArrow(error.to_string())))?;
                let rows: Vec<usize> = (0..batch.num_rows()).collect();
                let mut read = Outcomes::of(&rows, |row| {
                    let place = || RowLocation::row(path, first + row);
                    outcome(columns.row(*row), settings, |problem| place().error(problem))
                });
                others.iter().for_each(|key| read.others.count(key, rows.len()));
                read
            }
        })
    }
}

impl Outcomes {
    fn of<T: Sync>(rows: &[T], outcome: impl Fn(&T) -> (RowOutcome, Vec<OtherKey>) + Sync + Send) -> Self {
        let (rows, keys): (Vec<RowOutcome>, Vec<Vec<OtherKey>>) = rows.par_iter().map(outcome).unzip();
        let mut others = OtherKeys::default();
        keys.iter().flatten().for_each(|key| others.count(key, 1));
        Self { rows, others }
    }
}

fn outcome(
    row: Result<(RawRow, Vec<OtherKey>), RowProblem>,
    settings: &LoadSettings,
    placed: impl Fn(RowProblem) -> RowError,
) -> (RowOutcome, Vec<OtherKey>) {
    match row {
        Ok((row, others)) => (row.read(settings).map_err(placed), others),
        Err(problem) => (Err(placed(problem)), vec![]),
    }
}

fn document(text: &RowText) -> Result<RawRow, RowProblem> {
    let bytes = text.text.as_deref().ok_or(RowProblem::TooLong)?;
    Ok(RawRow::Text(str::from_utf8(bytes).map_err(|_| RowProblem::NotUtf8)?.to_owned()))
}

/// What is no JSON in an array is reported as a place in the file: its rows have no line of their own.
fn json_outcome(row: &RowText, path: &Path, settings: &LoadSettings) -> (RowOutcome, Vec<OtherKey>) {
    let in_array = |problem: &RowProblem| match problem {
        RowProblem::BrokenJson { .. } if !settings.skip_bad_rows => json_array::broken(row),
        _ => None,
    };
    let text = row.text.as_deref().ok_or(RowProblem::TooLong);
    outcome(text.and_then(|text| jsonl::row(text, settings.columns)), settings, |problem| match in_array(&problem) {
        Some(broken) => RowLocation::file(path).error(RowProblem::BrokenItem(broken.into())),
        None => row.location(path).error(problem),
    })
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int32Array};

    use super::*;

    #[test]
    fn no_row_beyond_the_limit_is_read() {
        let (mut asked, sent) = (0, std::cell::Cell::new(0));
        let next = || {
            asked += 1;
            Ok(Some((RowText { number: asked, in_array: None, text: Some(vec![]) }, 0)))
        };
        let send = |rows: Vec<RowText>, _| {
            sent.set(sent.get() + rows.len());
            true
        };
        in_portions(ROWS_AT_ONCE + 3, next, send).unwrap();
        assert_eq!((asked, sent.get()), (ROWS_AT_ONCE + 3, ROWS_AT_ONCE + 3));

        let (mut asked, sent) = (0, std::cell::RefCell::new(vec![]));
        let next = || {
            asked += 1;
            let column: ArrayRef = Arc::new(Int32Array::from(vec![1; 10]));
            Ok(Some((RecordBatch::try_from_iter([("a", column)]).unwrap(), 0)))
        };
        let send = |batch: RecordBatch, first, _| {
            sent.borrow_mut().push((first, batch.num_rows()));
            true
        };
        record_batches(13, next, send).unwrap();
        assert_eq!((asked, sent.take()), (2, vec![(1, 10), (11, 3)]));
    }
}
