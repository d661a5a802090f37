//! Record batches of Arrow files and streams, as pyarrow and Hugging Face `datasets` write them (`.arrow`).

mod claims;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use arrow::ipc::reader::{FileReader, StreamReader};

use super::column_names::ColumnNames;
use super::columns::{self, FileColumns};
use super::opened::CountedFile;
use super::row_keys::OtherKey;
use super::rows::{RowError, RowLocation, RowProblem};
use crate::files;
use crate::panics;

/// A batch may be a whole file: it is handed on in slices of so many rows, and fewer where they are large.
const ROWS_AT_ONCE: usize = 1024;

/// A file's batches.
#[derive(Debug)]
pub(super) struct ArrowBatches {
    reader: ArrowReader,
    /// What is left of the batch read last.
    rest: Option<RecordBatch>,
    /// Rows of a slice of it.
    at_once: usize,
    /// Bytes of the file.
    size: u64,
    /// Columns that are not read.
    pub(super) others: Arc<[OtherKey]>,
}

#[derive(Debug)]
enum ArrowReader {
    File { reader: Box<FileReader<BufReader<File>>>, batches: u64, read: u64 },
    Stream(Box<StreamReader<BufReader<CountedFile>>>),
}

impl ArrowBatches {
    /// The file format: a footer says where its batches are.
    pub(super) fn in_file(file: File, path: &Path, names: Option<&ColumnNames>) -> Result<Self, RowError> {
        let open = || {
            let size = file.metadata()?.len();
            claims::check_file(&file)?;
            let wanted = {
                let reader = FileReader::try_new_buffered(file.try_clone()?, None)?;
                FileColumns::of(&reader.schema(), names)
            };
            Ok(wanted.map(|wanted| (size, wanted)))
        };
        let (size, FileColumns { wanted, others }) =
            as_row_error(path, open)?.map_err(|problem| RowLocation::file(path).error(problem))?;
        let reader = as_row_error(path, || FileReader::try_new_buffered(file, Some(wanted)))?;
        let batches = reader.num_batches() as u64;
        Ok(Self {
            reader: ArrowReader::File { reader: Box::new(reader), batches, read: 0 },
            rest: None,
            at_once: ROWS_AT_ONCE,
            size,
            others: others.into(),
        })
    }

    /// The stream format: batch after batch until the end.
    pub(super) fn in_stream(
        bytes: BufReader<CountedFile>,
        path: &Path,
        names: Option<&ColumnNames>,
    ) -> Result<Self, RowError> {
        let schema = || {
            let file = files::open_regular(path)?;
            claims::check_stream(&file)?;
            Ok(StreamReader::try_new_buffered(file, None)?.schema())
        };
        let columns = FileColumns::of(&*as_row_error(path, schema)?, names);
        let FileColumns { wanted, others } = columns.map_err(|problem| RowLocation::file(path).error(problem))?;
        let reader = as_row_error(path, || StreamReader::try_new(bytes, Some(wanted)))?;
        let (reader, others) = (ArrowReader::Stream(Box::new(reader)), others.into());
        Ok(Self { reader, rest: None, at_once: ROWS_AT_ONCE, size: 0, others })
    }

    pub(super) fn next(&mut self, path: &Path) -> Result<Option<RecordBatch>, RowError> {
        let Some(batch) = self.rest.take().map(|batch| Ok(Some(batch))).unwrap_or_else(|| self.read(path))? else {
            return Ok(None);
        };
        let rows = batch.num_rows().min(self.at_once);
        self.rest = (rows < batch.num_rows()).then(|| batch.slice(rows, batch.num_rows() - rows));
        Ok(Some(batch.slice(0, rows)))
    }

    fn read(&mut self, path: &Path) -> Result<Option<RecordBatch>, RowError> {
        let batch = as_row_error(path, || match &mut self.reader {
            ArrowReader::File { reader, read, .. } => {
                *read += 1;
                reader.next().transpose()
            }
            ArrowReader::Stream(reader) => reader.next().transpose(),
        })?;
        if let Some(batch) = &batch {
            let bytes = as_row_error(path, || Ok(columns::bytes_of(batch)))?;
            self.at_once = columns::rows_at_once(bytes, batch.num_rows() as u64, ROWS_AT_ONCE);
        }
        Ok(batch)
    }

    /// Bytes of the file read so far.
    pub(super) fn count(&self) -> u64 {
        match &self.reader {
            ArrowReader::File { batches, read, .. } => (self.size * read).checked_div(*batches).unwrap_or(self.size),
            ArrowReader::Stream(reader) => reader.get_ref().get_ref().count(),
        }
    }
}

fn as_row_error<T>(path: &Path, read: impl FnOnce() -> Result<T, ArrowError>) -> Result<T, RowError> {
    let read = panics::catch(|| read().map_err(|error| error.to_string())).flatten();
    read.map_err(|error| RowLocation::file(path).error(RowProblem::BrokenArrow(error)))
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, DictionaryArray, Int32Array, StringArray, StringViewBuilder};
    use arrow::ipc::CompressionType;
    use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
    use std::io::Write;

    use super::*;

    /// Stored once, and in each of many rows: gigabytes if a thousand rows came at once.
    #[test]
    fn a_text_that_is_stored_once_counts_for_each_of_its_rows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.arrow");
        let large = "y".repeat(1 << 20);
        let keys = Int32Array::from(vec![0; 100]);
        let dictionary = DictionaryArray::new(keys, Arc::new(StringArray::from(vec![large.as_str()])));
        let mut views = StringViewBuilder::new().with_deduplicate_strings();
        (0..100).for_each(|_| views.append_value(&large));
        let texts: [ArrayRef; 2] = [Arc::new(dictionary), Arc::new(views.finish())];
        for texts in texts {
            let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
            let mut writer = FileWriter::try_new(File::create(&path).unwrap(), &batch.schema()).unwrap();
            writer.write(&batch).unwrap();
            writer.finish().unwrap();
            assert!(path.metadata().unwrap().len() < 2 << 20);
            let mut batches = ArrowBatches::in_file(File::open(&path).unwrap(), &path, None).unwrap();
            assert_eq!(batches.next(&path).unwrap().unwrap().num_rows(), 4);
        }
    }

    /// A changed byte in what a packed column says of its size.
    #[test]
    fn a_block_that_claims_exabytes_is_an_error_and_no_abort() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.arrow");
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a few words"; 1000]));
        let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
        let packed = IpcWriteOptions::default().try_with_compression(Some(CompressionType::ZSTD)).unwrap();
        let mut file = FileWriter::try_new_with_options(vec![], &batch.schema(), packed.clone()).unwrap();
        file.write(&batch).unwrap();
        let mut stream = StreamWriter::try_new_with_options(vec![], &batch.schema(), packed).unwrap();
        stream.write(&batch).unwrap();
        let size = 11_000_i64.to_le_bytes();
        for (is_file, mut bytes) in [(true, file.into_inner().unwrap()), (false, stream.into_inner().unwrap())] {
            let open = |bytes: &[u8]| {
                crate::files::write_atomic(&path, |out| out.write_all(bytes)).unwrap();
                let file = File::open(&path).unwrap();
                if is_file { claims::check_file(&file) } else { claims::check_stream(&file) }
            };
            open(&bytes).unwrap();
            let at = bytes.windows(8).position(|window| window == size).expect("the texts' size");
            bytes[at + 7] = 0x40;
            let refused = open(&bytes).unwrap_err().to_string();
            assert!(refused.contains("claims to unpack to 46116860184273"), "{refused}");
        }
    }

    #[test]
    fn columns_that_nobody_asked_for_make_no_slice_smaller() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.arrow");
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a few words"; 100]));
        let pictures: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(1 << 19); 100]));
        let batch = RecordBatch::try_from_iter([("text", texts), ("picture", pictures)]).unwrap();
        let mut writer = FileWriter::try_new(File::create(&path).unwrap(), &batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
        let mut batches = ArrowBatches::in_file(File::open(&path).unwrap(), &path, None).unwrap();
        assert_eq!(batches.next(&path).unwrap().unwrap().num_rows(), 100);
    }
}
