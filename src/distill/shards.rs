//! Parquet shards: `index`, `id`, `category`, `conversations` in ShareGPT's format, `tools` and `chat_template_kwargs` as JSON,
//! `input_ids`, `labels`, `finish_reason`; without `input_ids` and `labels` where a server answered and no backbone was given.

use std::io;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, ListArray, RecordBatch, StringArray, StructArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Fields, Int32Type, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use serde_json::{Map, Value};

use super::DistillError;
use super::conversation::FinishedConversation;

/// The bytes of a shard, which depend only on the conversations and `provenance`.
pub(super) fn encode(
    path: &Path,
    rows: &[&FinishedConversation],
    provenance: &Map<String, Value>,
) -> Result<Vec<u8>, DistillError> {
    let has_tokens = provenance.get("backbone").is_none_or(|backbone| !backbone.is_null());
    let batch = record_batch(rows, if has_tokens { ShardColumns::All } else { ShardColumns::WithoutTokens });
    let encoded = || {
        let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties(provenance)))?;
        writer.write(&batch)?;
        writer.into_inner()
    };
    encoded().map_err(|error| DistillError::Io { path: path.into(), source: io::Error::other(error) })
}

fn properties(provenance: &Map<String, Value>) -> WriterProperties {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let known = provenance.iter().filter(|(_, value)| !value.is_null());
    let metadata = known.map(|(key, value)| KeyValue::new(format!("distill.{key}"), text(value))).collect();
    WriterProperties::builder().set_compression(Compression::SNAPPY).set_key_value_metadata(Some(metadata)).build()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShardColumns {
    All,
    WithoutTokens,
}

/// What a prompt may lack.
const NULLABLE: [&str; 4] = ["id", "category", "tools", "chat_template_kwargs"];

fn record_batch(rows: &[&FinishedConversation], wanted: ShardColumns) -> RecordBatch {
    let indices = Int64Array::from_iter_values(rows.iter().map(|row| row.index.unwrap_or(row.id) as i64));
    let texts = |of: fn(&FinishedConversation) -> Option<&str>| -> ArrayRef {
        Arc::new(rows.iter().map(|row| of(row)).collect::<StringArray>())
    };
    let reasons = StringArray::from_iter_values(rows.iter().map(|row| &row.finish_reason));
    let tokens = |of: fn(&FinishedConversation) -> &[i32]| -> ArrayRef {
        let lists = rows.iter().map(|row| Some(of(row).iter().copied().map(Some)));
        Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists))
    };
    let all: [(&str, ArrayRef); 9] = [
        ("index", Arc::new(indices)),
        ("id", texts(|row| row.prompt_id.as_deref())),
        ("category", texts(|row| row.category.as_deref())),
        ("conversations", conversations(rows)),
        ("tools", texts(|row| row.tools.as_deref())),
        ("chat_template_kwargs", texts(|row| row.chat_template_kwargs.as_deref())),
        ("input_ids", tokens(|row| &row.input_ids)),
        ("labels", tokens(|row| &row.labels)),
        ("finish_reason", Arc::new(reasons)),
    ];
    let is_wanted = |name: &str| wanted == ShardColumns::All || !["input_ids", "labels"].contains(&name);
    let columns: Vec<_> = all.into_iter().filter(|(name, _)| is_wanted(name)).collect();
    let field =
        |(name, column): &(&str, ArrayRef)| Field::new(*name, column.data_type().clone(), NULLABLE.contains(name));
    let schema = Schema::new(columns.iter().map(field).collect::<Vec<_>>());
    let arrays = columns.into_iter().map(|(_, column)| column).collect();
    RecordBatch::try_new(Arc::new(schema), arrays).expect("columns of one length and their own types")
}

/// Lists of `{from, value}`.
fn conversations(rows: &[&FinishedConversation]) -> ArrayRef {
    let said = || rows.iter().flat_map(|row| &row.conversations);
    let from: ArrayRef = Arc::new(StringArray::from_iter_values(said().map(|said| &said.from)));
    let value: ArrayRef = Arc::new(StringArray::from_iter_values(said().map(|said| &said.value)));
    let fields =
        Fields::from(vec![Field::new("from", DataType::Utf8, false), Field::new("value", DataType::Utf8, false)]);
    let turns = StructArray::new(fields.clone(), vec![from, value], None);
    let item = Arc::new(Field::new("item", DataType::Struct(fields), false));
    let lengths = OffsetBuffer::from_lengths(rows.iter().map(|row| row.conversations.len()));
    Arc::new(ListArray::new(item, lengths, Arc::new(turns), None))
}
