//! Record batches of Parquet, as the Hugging Face Hub stores data sets.

mod thrift;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::Type;
use parquet::column::page::{Page, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::serialized_reader::SerializedPageReader;

use super::column_names::ColumnNames;
use super::columns;
use super::row_keys::OtherKey;
use super::rows::{RowError, RowLocation, RowProblem};
use crate::panics;

/// And fewer where they are large.
const ROWS_AT_ONCE: usize = 1024;

/// A file's batches, and how many rows it has.
#[derive(Debug)]
pub(super) struct ParquetBatches {
    reader: ParquetRecordBatchReader,
    pub(super) rows: u64,
    /// Columns that are not read.
    pub(super) others: Arc<[OtherKey]>,
}

impl ParquetBatches {
    pub(super) fn open(file: File, path: &Path, names: Option<&ColumnNames>) -> Result<Self, RowError> {
        panics::catch(|| Self::of(file, names))
            .unwrap_or_else(|panic| Err(broken(panic)))
            .map_err(|problem| RowLocation::file(path).error(problem))
    }

    fn of(file: File, names: Option<&ColumnNames>) -> Result<Self, RowProblem> {
        let pages = Arc::new(file.try_clone().map_err(broken)?);
        if !thrift::is_footer_bounded(&file).map_err(broken)? {
            return Err(broken("its footer counts more items than it has bytes"));
        }
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(broken)?;
        let columns::FileColumns { wanted, others } = columns::FileColumns::of(builder.schema(), names)?;
        let wanted = ProjectionMask::roots(builder.parquet_schema(), wanted);
        let mut at_once = ROWS_AT_ONCE;
        for group in builder.metadata().row_groups() {
            check_page_headers(&pages, group, &wanted)?;
            at_once = at_once.min(rows_at_once(&pages, group, &wanted).map_err(broken)?);
        }
        let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let reader = builder.with_projection(wanted).with_batch_size(at_once).build().map_err(broken)?;
        Ok(Self { reader, rows, others: others.into() })
    }

    pub(super) fn next(&mut self, path: &Path) -> Result<Option<RecordBatch>, RowError> {
        let batch = panics::catch(|| self.reader.next().transpose().map_err(broken));
        batch.unwrap_or_else(|panic| Err(broken(panic))).map_err(|problem| RowLocation::file(path).error(problem))
    }
}

fn check_page_headers(file: &File, group: &RowGroupMetaData, wanted: &ProjectionMask) -> Result<(), RowProblem> {
    for (_, column) in group.columns().iter().enumerate().filter(|(leaf, _)| wanted.leaf_included(*leaf)) {
        let (start, length) = column.byte_range();
        if !thrift::are_page_headers_bounded(file, start..start.saturating_add(length)).map_err(broken)? {
            return Err(broken("a page header has too many bytes, or counts more items than it has bytes"));
        }
    }
    Ok(())
}

/// By the wanted columns of a row group. A text of the dictionary may stand in every row: a few bytes of a file can be gigabytes of rows.
fn rows_at_once(file: &Arc<File>, group: &RowGroupMetaData, wanted: &ProjectionMask) -> Result<usize, ParquetError> {
    let rows = group.num_rows().try_into().unwrap_or(0u64);
    let mut bytes = 0u64;
    for (_, column) in group.columns().iter().enumerate().filter(|(leaf, _)| wanted.leaf_included(*leaf)) {
        let stored = column.uncompressed_size().max(column.unencoded_byte_array_data_bytes().unwrap_or(0));
        let values = rows.max(column.num_values().try_into().unwrap_or(0));
        let dictionary_bytes = longest_of_dictionary(file, column, rows)?.saturating_mul(values);
        bytes = bytes.saturating_add(dictionary_bytes.max(stored.try_into().unwrap_or(0)));
    }
    Ok(columns::rows_at_once(bytes, rows, ROWS_AT_ONCE))
}

/// Bytes of the longest text in a column's dictionary, which is its first page; 0 without one.
fn longest_of_dictionary(file: &Arc<File>, column: &ColumnChunkMetaData, rows: u64) -> Result<u64, ParquetError> {
    if column.column_type() != Type::BYTE_ARRAY {
        return Ok(0);
    }
    let rows = usize::try_from(rows).unwrap_or(usize::MAX);
    let mut pages = SerializedPageReader::new(Arc::clone(file), column, rows, None)?;
    if !pages.peek_next_page()?.is_some_and(|page| page.is_dict) {
        return Ok(0); // a page of rows is not unpacked here
    }
    let Some(Page::DictionaryPage { buf, .. }) = pages.get_next_page()? else { return Ok(0) };
    let (mut rest, mut longest) = (&buf[..], 0);
    while let Some((length, behind)) = rest.split_first_chunk() {
        let length = u32::from_le_bytes(*length);
        longest = longest.max(length);
        rest = behind.get(length as usize..).unwrap_or_default(); // a damaged one is reported when it is read
    }
    Ok(longest.into())
}

fn broken(error: impl std::fmt::Display) -> RowProblem {
    RowProblem::BrokenParquet(error.to_string())
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, DictionaryArray, Int32Array, StringArray};
    use parquet::arrow::ArrowWriter;
    use parquet::arrow::arrow_writer::ArrowWriterOptions;
    use parquet::basic::{Compression, ZstdLevel};
    use parquet::file::properties::WriterProperties;
    use std::io::{Seek, SeekFrom};

    use super::*;

    fn rows_of_batches(texts: Vec<String>) -> Vec<usize> {
        let others: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(1 << 19); texts.len()]));
        let texts: ArrayRef = Arc::new(StringArray::from(texts));
        let batch = RecordBatch::try_from_iter([("text", texts), ("image", others)]).unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut writer = ArrowWriter::try_new(file.try_clone().unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        let mut batches = ParquetBatches::open(file, Path::new("rows.parquet"), None).unwrap();
        std::iter::from_fn(|| batches.next(Path::new("rows.parquet")).unwrap())
            .map(|batch| {
                assert_eq!(batch.num_columns(), 1);
                batch.num_rows()
            })
            .collect()
    }

    /// A few kilobytes that say "one megabyte of text" in each of many rows.
    #[test]
    fn a_text_that_stands_in_every_row_comes_a_few_rows_at_a_time_whatever_the_file_says() {
        let text = StringArray::from(vec!["y".repeat(1 << 20)]);
        let texts: ArrayRef = Arc::new(DictionaryArray::new(Int32Array::from(vec![0; 200]), Arc::new(text)));
        let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let compressed = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
        let plain = ArrowWriterOptions::new().with_properties(compressed).with_skip_arrow_metadata(true); // a column of strings
        let mut writer = ArrowWriter::try_new_with_options(file.try_clone().unwrap(), batch.schema(), plain).unwrap();
        writer.write(&batch).unwrap();
        let metadata = writer.close().unwrap();
        assert!(file.seek(SeekFrom::End(0)).unwrap() < 100_000);
        let pages = Arc::new(file.try_clone().unwrap());
        let column = metadata.row_group(0).column(0).clone().into_builder().set_unencoded_byte_array_data_bytes(None);
        let column = column.build().unwrap();
        assert_eq!(longest_of_dictionary(&pages, &column, 200).unwrap(), 1 << 20);
        let mut batches = ParquetBatches::open(file, Path::new("rows.parquet"), None).unwrap();
        assert_eq!(batches.next(Path::new("rows.parquet")).unwrap().unwrap().num_rows(), 4);
    }

    #[test]
    fn large_rows_come_a_few_at_a_time() {
        let large = |row: usize| format!("{row}{}", "y".repeat(1 << 20));
        assert_eq!(rows_of_batches((0..8).map(large).collect()), [3, 3, 2]);
        assert_eq!(rows_of_batches(vec![large(0); 8]).iter().max(), Some(&3), "one text for all rows");
        assert_eq!(rows_of_batches((0..40).map(|row| row.to_string()).collect()), [40]);
    }
}
