//! Record batches of Parquet, as the Hugging Face Hub stores data sets.

use std::fs::File;
use std::path::Path;

use arrow::array::RecordBatch;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use super::columns;
use super::rows::{Place, Problem, RowError};

const ROWS_AT_ONCE: usize = 1024;

/// A file's batches, and how many rows it has.
#[derive(Debug)]
pub(super) struct Batches {
    reader: ParquetRecordBatchReader,
    pub(super) rows: u64,
}

impl Batches {
    pub(super) fn open(file: File, path: &Path) -> Result<Self, RowError> {
        Self::of(file).map_err(|problem| Place::file(path).error(problem))
    }

    fn of(file: File) -> Result<Self, Problem> {
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(broken)?;
        let wanted = ProjectionMask::roots(builder.parquet_schema(), columns::wanted(builder.schema())?);
        let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let reader = builder.with_projection(wanted).with_batch_size(ROWS_AT_ONCE).build().map_err(broken)?;
        Ok(Self { reader, rows })
    }

    pub(super) fn next(&mut self, path: &Path) -> Result<Option<RecordBatch>, RowError> {
        self.reader.next().transpose().map_err(|error| Place::file(path).error(broken(error)))
    }
}

fn broken(error: impl std::fmt::Display) -> Problem {
    Problem::BrokenParquet(error.to_string())
}
