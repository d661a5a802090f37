//! Record batches of Parquet, as the Hugging Face Hub stores data sets.

use std::fs::File;
use std::path::Path;

use arrow::array::RecordBatch;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};

use super::column_names::ColumnNames;
use super::columns;
use super::rows::{RowError, RowLocation, RowProblem};
use crate::panics;

/// And fewer where they are large.
const ROWS_AT_ONCE: usize = 1024;

/// A file's batches, and how many rows it has.
#[derive(Debug)]
pub(super) struct ParquetBatches {
    reader: ParquetRecordBatchReader,
    pub(super) rows: u64,
}

impl ParquetBatches {
    pub(super) fn open(file: File, path: &Path, names: Option<&ColumnNames>) -> Result<Self, RowError> {
        panics::of_library(|| Self::of(file, names))
            .unwrap_or_else(|panic| Err(broken(panic)))
            .map_err(|problem| RowLocation::file(path).error(problem))
    }

    fn of(file: File, names: Option<&ColumnNames>) -> Result<Self, RowProblem> {
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(broken)?;
        let wanted = ProjectionMask::roots(builder.parquet_schema(), columns::wanted(builder.schema(), names)?);
        let groups = builder.metadata().row_groups().iter();
        let at_once = groups.map(|group| rows_at_once(group, &wanted)).min().unwrap_or(ROWS_AT_ONCE);
        let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let reader = builder.with_projection(wanted).with_batch_size(at_once).build().map_err(broken)?;
        Ok(Self { reader, rows })
    }

    pub(super) fn next(&mut self, path: &Path) -> Result<Option<RecordBatch>, RowError> {
        let batch = panics::of_library(|| self.reader.next().transpose().map_err(broken));
        batch.unwrap_or_else(|panic| Err(broken(panic))).map_err(|problem| RowLocation::file(path).error(problem))
    }
}

/// By the wanted columns of a row group; texts that are there once for many rows count for each, where the file says how many.
fn rows_at_once(group: &RowGroupMetaData, wanted: &ProjectionMask) -> usize {
    let columns = group.columns().iter().enumerate().filter(|(leaf, _)| wanted.leaf_included(*leaf));
    let bytes = |column: &ColumnChunkMetaData| {
        column.uncompressed_size().max(column.unencoded_byte_array_data_bytes().unwrap_or(0)).try_into().unwrap_or(0u64)
    };
    let bytes = columns.fold(0, |sum: u64, (_, column)| sum.saturating_add(bytes(column)));
    columns::rows_at_once(bytes, group.num_rows().try_into().unwrap_or(0), ROWS_AT_ONCE)
}

fn broken(error: impl std::fmt::Display) -> RowProblem {
    RowProblem::BrokenParquet(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, StringArray};
    use parquet::arrow::ArrowWriter;

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

    #[test]
    fn large_rows_come_a_few_at_a_time() {
        let large = |row: usize| format!("{row}{}", "y".repeat(1 << 20));
        assert_eq!(rows_of_batches((0..8).map(large).collect()), [3, 3, 2]);
        assert_eq!(rows_of_batches(vec![large(0); 8]).iter().max(), Some(&3), "one text for all rows");
        assert_eq!(rows_of_batches((0..40).map(|row| row.to_string()).collect()), [40]);
    }
}
