//! Rows of Parquet, as the Hugging Face Hub stores data sets: columns `input_ids` and `labels`, or `text`.

use std::fs::File;
use std::path::Path;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};

use super::rows::{Place, Problem, RawRow, RowError};

const ROWS_AT_ONCE: usize = 4096;
const COLUMNS: [&str; 3] = ["input_ids", "labels", "text"];

/// The rows of a file, in portions.
pub(super) fn portions(path: &Path) -> Result<impl Iterator<Item = Result<Vec<RawRow>, RowError>>, RowError> {
    let mut first = 1;
    let batches = open(path).map_err(|problem| Place::file(path).error(problem))?;
    Ok(batches.map(move |batch| {
        let batch = batch.map_err(|error| Place::file(path).error(broken(error)))?;
        let rows = rows(&batch).map_err(|(row, problem)| Place::row(path, first + row).error(problem))?;
        first += batch.num_rows();
        Ok(rows)
    }))
}

fn open(path: &Path) -> Result<ParquetRecordBatchReader, Problem> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).map_err(broken)?).map_err(broken)?;
    check(builder.schema())?;
    let columns = builder.schema().fields().iter().enumerate();
    let wanted = columns.filter(|(_, field)| COLUMNS.contains(&field.name().as_str())).map(|(index, _)| index);
    let wanted = ProjectionMask::roots(builder.parquet_schema(), wanted.collect::<Vec<_>>());
    builder.with_projection(wanted).with_batch_size(ROWS_AT_ONCE).build().map_err(broken)
}

/// What can be told before the first row: which columns there are, and of which type.
fn check(schema: &Schema) -> Result<(), Problem> {
    let has = |key: &str| schema.column_with_name(key).is_some();
    if !has("input_ids") && !has("text") {
        let conversation = ["messages", "conversations"].into_iter().find(|key| has(key));
        let found = schema.fields().iter().map(|field| field.name().clone()).collect();
        return Err(conversation.map_or(Problem::NoKnownKey { found }, |key| Problem::Conversation { key }));
    }
    let wrong = |field: &Field, expected| {
        let (key, got) = (field.name().clone(), format!("a column of {}", field.data_type()));
        Err(Problem::Value { key, expected, got })
    };
    for field in schema.fields() {
        match field.name().as_str() {
            "input_ids" | "labels" if !is_integer_list(field.data_type()) => {
                return wrong(field, "a column of integer lists");
            }
            "text" if !is_text(field.data_type()) && !has("input_ids") => return wrong(field, "a column of strings"),
            _ => {}
        }
    }
    Ok(())
}

fn is_integer_list(kind: &DataType) -> bool {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            item.data_type().is_integer()
        }
        _ => false,
    }
}

fn is_text(kind: &DataType) -> bool {
    matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

type BadRow = (usize, Problem);

fn rows(batch: &RecordBatch) -> Result<Vec<RawRow>, BadRow> {
    let as_lists = DataType::new_large_list(DataType::Int64, true);
    let column = |key, kind: &DataType| -> Result<Option<ArrayRef>, BadRow> {
        batch.column_by_name(key).map(|column| cast(column, kind)).transpose().map_err(|error| (0, broken(error)))
    };
    let ids = column("input_ids", &as_lists)?;
    let labels = column("labels", &as_lists)?;
    let has_text = batch.schema().column_with_name("text").is_some_and(|(_, field)| is_text(field.data_type()));
    let text = if has_text { column("text", &DataType::LargeUtf8)? } else { None };
    let row = |row| match integers(ids.as_ref(), "input_ids", row)? {
        Some(input_ids) => Ok(RawRow::Tokens { input_ids, labels: integers(labels.as_ref(), "labels", row)? }),
        None => match text.as_ref().filter(|text| text.is_valid(row)) {
            Some(text) => Ok(RawRow::Text(text.as_string::<i64>().value(row).to_owned())),
            None => Err(Problem::NoKnownKey { found: vec![] }),
        },
    };
    (0..batch.num_rows()).map(|index| row(index).map_err(|problem| (index, problem))).collect()
}

/// A row's list, `None` where it is null.
fn integers(column: Option<&ArrayRef>, key: &str, row: usize) -> Result<Option<Vec<i64>>, Problem> {
    let Some(column) = column.filter(|column| column.is_valid(row)) else {
        return Ok(None);
    };
    let values = column.as_list::<i64>().value(row);
    let values = values.as_primitive::<Int64Type>();
    match (0..values.len()).find(|&index| values.is_null(index)) {
        Some(index) => {
            Err(Problem::Value { key: format!("{key}[{index}]"), expected: "an integer", got: "null".to_owned() })
        }
        None => Ok(Some(values.values().to_vec())),
    }
}

fn broken(error: impl std::fmt::Display) -> Problem {
    Problem::BrokenParquet(error.to_string())
}
