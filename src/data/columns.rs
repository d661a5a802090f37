//! Rows of columns, as Parquet and Arrow files have them. A row becomes an object, as a line of JSONL is; only lists of tokens stay columns.

use arrow::array::{Array, ArrayData, ArrayRef, AsArray, LargeListArray, RecordBatch};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::compute::cast;
use arrow::datatypes::{
    ArrowNativeType, ArrowPrimitiveType, DataType, Field, FieldRef, Float16Type, Float32Type, Float64Type, Int8Type,
    Int16Type, Int32Type, Int64Type, Schema, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow::error::ArrowError;
use arrow::util::display::array_value_to_string;
use serde_json::{Map, Value};

use super::column_names::ColumnNames;
use super::raw_row::RawRow;
use super::row_keys::{self, OtherKey};
use super::row_object::RowObject;
use super::rows::RowProblem;
use super::token_lists::{INPUT_IDS, LISTS};
use crate::bounds::ROW_BYTES;

/// The canonical name of JSON in strings, as `datasets` stores values of no fixed type.
const JSON: &str = "arrow.json";

#[derive(Debug, Default)]
pub(super) struct FileColumns {
    /// The places of those that rows are made of.
    pub(super) wanted: Vec<usize>,
    /// The other columns, except those of type null.
    pub(super) others: Vec<OtherKey>,
}

impl FileColumns {
    /// What is wrong with a file's columns is reported before its first row.
    pub(super) fn of(schema: &Schema, names: Option<&ColumnNames>) -> Result<Self, RowProblem> {
        check(schema, names)?;
        let has_tokens = schema.column_with_name(INPUT_IDS).is_some();
        let is_wanted = |name: &str| match names {
            Some(names) => names.takes(name),
            None => row_keys::is_read(name) || has_tokens && LISTS.contains(&name),
        };
        let mut columns = Self::default();
        for (place, field) in schema.fields().iter().enumerate() {
            match field.data_type() {
                _ if is_wanted(field.name()) => columns.wanted.push(place),
                DataType::Null => {}
                _ => columns.others.push(row_keys::other_column(field.name())),
            }
        }
        Ok(columns)
    }
}

fn check(schema: &Schema, names: Option<&ColumnNames>) -> Result<(), RowProblem> {
    let has = |key: &str| schema.column_with_name(key).is_some();
    let columns = schema.fields().iter().map(|field| field.name());
    match names {
        Some(names) => return names.check(columns),
        None if [INPUT_IDS, "messages", "conversations", "text"].into_iter().any(has) => {}
        None if has("instruction") && has("output") || has("prompt") && has("completion") => {}
        None => return Err(RowProblem::NoKnownKey { found: columns.cloned().collect() }),
    }
    // Data sets of texts call other things labels, too.
    let lists = schema.fields().iter().filter(|field| has(INPUT_IDS) && LISTS.contains(&field.name().as_str()));
    match lists.into_iter().find(|field| !item_of(field.data_type()).is_some_and(DataType::is_integer)) {
        None => Ok(()),
        Some(field) => {
            let (key, got) = (field.name().clone(), format!("a column of {}", field.data_type()));
            Err(RowProblem::Value { key, expected: "a column of integer lists", got })
        }
    }
}

fn item_of(kind: &DataType) -> Option<&DataType> {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => Some(item.data_type()),
        _ => None,
    }
}

/// A batch's columns.
#[derive(Debug)]
pub(super) struct Columns<'n> {
    /// Of [`LISTS`], as lists of int64.
    lists: Vec<(&'static str, ArrayRef)>,
    others: Vec<(FieldRef, ArrayRef)>,
    names: Option<&'n ColumnNames>,
}

impl<'n> Columns<'n> {
    pub(super) fn of(batch: &RecordBatch, names: Option<&'n ColumnNames>) -> Result<Self, ArrowError> {
        let as_lists = DataType::new_large_list(DataType::Int64, true);
        let (mut lists, mut others) = (Vec::new(), Vec::new());
        for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
            match LISTS.into_iter().find(|key| names.is_none() && field.name() == key) {
                Some(key) => lists.push((key, cast(&own_lists(column)?, &as_lists)?)),
                None => others.push((field.clone(), column.clone())),
            }
        }
        Ok(Self { lists, others, names })
    }

    /// Of several forms of a row the first that is not null counts, as in JSONL.
    pub(super) fn row(&self, row: usize) -> Result<(RawRow, Vec<OtherKey>), RowProblem> {
        let list =
            |key| self.lists.iter().find(|(known, _)| *known == key).map(|(_, column)| integers(column, key, row));
        let list = |key| Ok(list(key).transpose()?.flatten());
        if let Some(input_ids) = list(INPUT_IDS)? {
            return RowObject::default().row_of_tokens(input_ids, list);
        }
        let mut object = Map::new();
        let mut room = ROW_BYTES;
        for (field, column) in &self.others {
            object.insert(field.name().clone(), value(field, column, row, &mut room)?.unwrap_or_default());
        }
        RowObject::of(object, self.names)?.row()
    }
}

/// A value of a column as JSON has it; `None` for null, and for a number that JSON cannot have. `room` are the bytes that the row may still take.
fn value(field: &Field, array: &dyn Array, at: usize, room: &mut usize) -> Result<Option<Value>, RowProblem> {
    if array.is_null(at) {
        return Ok(None);
    }
    match array.data_type() {
        DataType::Null => Ok(None),
        DataType::Utf8 => text(field, array.as_string::<i32>().value(at), room),
        DataType::LargeUtf8 => text(field, array.as_string::<i64>().value(at), room),
        DataType::Utf8View => text(field, array.as_string_view().value(at), room),
        DataType::Boolean => Ok(Some(array.as_boolean().value(at).into())),
        DataType::List(item) => items(item, &array.as_list::<i32>().value(at), room),
        DataType::LargeList(item) => items(item, &array.as_list::<i64>().value(at), room),
        DataType::FixedSizeList(item, _) => items(item, &array.as_fixed_size_list().value(at), room),
        DataType::ListView(item) => items(item, &array.as_list_view::<i32>().value(at), room),
        DataType::LargeListView(item) => items(item, &array.as_list_view::<i64>().value(at), room),
        DataType::Struct(fields) => {
            let columns = fields.iter().zip(array.as_struct().columns());
            let values = columns.map(|(field, column)| Ok((field.name().clone(), value(field, column, at, room)?)));
            object(values)
        }
        DataType::Map(_, _) => {
            let entries = array.as_map().value(at);
            let (keys, values) = (entries.column(0), entries.column(1));
            let values = (0..entries.len()).map(|at| {
                let key =
                    array_value_to_string(keys, at).map_err(|error| RowProblem::BrokenArrow(error.to_string()))?;
                Ok((key, value(entries.fields()[1].as_ref(), values, at, room)?))
            });
            object(values)
        }
        DataType::Dictionary(_, _) => {
            let array = array.as_any_dictionary();
            let key = number(array.keys(), at).and_then(|key| key.as_u64()).unwrap_or(u64::MAX);
            let key = usize::try_from(key).ok().filter(|key| *key < array.values().len());
            key.map_or(Ok(None), |key| value(field, array.values(), key, room))
        }
        kind if kind.is_integer() || kind.is_floating() => Ok(number(array, at)),
        kind if kind.is_temporal() || kind.is_decimal() => {
            let shown = array_value_to_string(array, at).map_err(|error| RowProblem::BrokenArrow(error.to_string()))?;
            text(field, &shown, room)
        }
        kind => {
            let expected = "text, numbers, lists or structs";
            Err(RowProblem::Value { key: field.name().clone(), expected, got: format!("a column of {kind}") })
        }
    }
}

fn text(field: &Field, text: &str, room: &mut usize) -> Result<Option<Value>, RowProblem> {
    *room = room.checked_sub(text.len()).ok_or(RowProblem::TooLong)?;
    let json = (field.extension_type_name() == Some(JSON)).then(|| serde_json::from_str(text).ok()).flatten();
    Ok(Some(json.unwrap_or_else(|| text.into())))
}

/// Keys without a value are left out: a struct has those of all rows.
fn object(
    values: impl Iterator<Item = Result<(String, Option<Value>), RowProblem>>,
) -> Result<Option<Value>, RowProblem> {
    let values = values.filter_map(|pair| pair.map(|(key, value)| Some((key, value?))).transpose());
    values.collect::<Result<Map<_, _>, RowProblem>>().map(|object| Some(Value::Object(object)))
}

/// The items of a list. Each takes some room even if it is null.
fn items(item: &Field, array: &dyn Array, room: &mut usize) -> Result<Option<Value>, RowProblem> {
    *room = room.checked_sub(array.len()).ok_or(RowProblem::TooLong)?;
    let items = (0..array.len()).map(|at| Ok(value(item, array, at, room)?.unwrap_or_default()));
    items.collect::<Result<Vec<_>, RowProblem>>().map(|items| Some(Value::Array(items)))
}

fn number(array: &dyn Array, at: usize) -> Option<Value> {
    fn at_of<T: ArrowPrimitiveType>(array: &dyn Array, at: usize) -> T::Native {
        array.as_primitive::<T>().value(at)
    }
    let float = |number: f64| serde_json::Number::from_f64(number).map(Value::Number);
    match array.data_type() {
        DataType::Int8 => Some(at_of::<Int8Type>(array, at).into()),
        DataType::Int16 => Some(at_of::<Int16Type>(array, at).into()),
        DataType::Int32 => Some(at_of::<Int32Type>(array, at).into()),
        DataType::Int64 => Some(at_of::<Int64Type>(array, at).into()),
        DataType::UInt8 => Some(at_of::<UInt8Type>(array, at).into()),
        DataType::UInt16 => Some(at_of::<UInt16Type>(array, at).into()),
        DataType::UInt32 => Some(at_of::<UInt32Type>(array, at).into()),
        DataType::UInt64 => Some(at_of::<UInt64Type>(array, at).into()),
        DataType::Float16 => float(at_of::<Float16Type>(array, at).into()),
        DataType::Float32 => float(at_of::<Float32Type>(array, at).into()),
        DataType::Float64 => float(at_of::<Float64Type>(array, at)),
        _ => None,
    }
}

/// A column of lists, with the values of its own rows alone: a slice of a large batch has all of the batch's, and to convert them for every
/// slice would take the square of their number.
fn own_lists(column: &ArrayRef) -> Result<LargeListArray, ArrowError> {
    let (DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _)) = column.data_type()
    else {
        return Err(ArrowError::SchemaError("a list was expected".to_owned()));
    };
    let lists = cast(column, &DataType::LargeList(item.clone()))?.as_list::<i64>().clone();
    let offsets = lists.value_offsets();
    let (first, last) = (offsets[0], offsets[lists.len()]);
    let values = lists.values().slice(first as usize, (last - first) as usize);
    let offsets: ScalarBuffer<i64> = offsets.iter().map(|offset| offset - first).collect();
    LargeListArray::try_new(item.clone(), OffsetBuffer::new(offsets), values, lists.nulls().cloned())
}

/// Bytes of a batch once each row has its own texts: one that is stored once for many rows counts for each of them.
pub(super) fn bytes_of(batch: &RecordBatch) -> u64 {
    batch.columns().iter().map(|column| full_bytes(&column.to_data())).fold(0, u64::saturating_add)
}

/// At most so many bytes are in an array when nothing is shared.
fn full_bytes(array: &ArrayData) -> u64 {
    let all_values = |longest: u64| longest.saturating_mul(array.len() as u64);
    match array.data_type() {
        DataType::Dictionary(_, _) => all_values(array.child_data().first().map_or(0, longest)),
        DataType::Utf8View | DataType::BinaryView => all_values(longest(array)),
        _ if array.child_data().is_empty() => array.get_slice_memory_size().map_or(u64::MAX, |bytes| bytes as u64),
        // A list's own offsets are small beside what they point to.
        _ => array.child_data().iter().map(full_bytes).fold(0, u64::saturating_add),
    }
}

/// Bytes of the longest text of an array.
fn longest(array: &ArrayData) -> u64 {
    fn longest_step<T: ArrowNativeType + Into<i64>>(offsets: &[T], length: usize) -> i64 {
        let steps = offsets.windows(2).take(length).map(|pair| pair[1].into() - pair[0].into());
        steps.max().unwrap_or(0)
    }
    let buffers = array.buffers();
    match array.data_type() {
        DataType::Utf8 | DataType::Binary => longest_step(array.buffer::<i32>(0), array.len()).unsigned_abs(),
        DataType::LargeUtf8 | DataType::LargeBinary => longest_step(array.buffer::<i64>(0), array.len()).unsigned_abs(),
        DataType::Utf8View | DataType::BinaryView => {
            let views = buffers.first().map_or(&[][..], |views| views.typed_data::<u128>());
            views.iter().skip(array.offset()).take(array.len()).map(|view| u64::from(*view as u32)).max().unwrap_or(0)
        }
        _ => full_bytes(array),
    }
}

/// Rows that are read together: about so many bytes, at most `most` rows, at least one.
pub(super) fn rows_at_once(bytes: u64, rows: u64, most: usize) -> usize {
    const BYTES_AT_ONCE: u64 = 4 << 20;
    let fit = BYTES_AT_ONCE.saturating_mul(rows.max(1)) / bytes.max(1);
    usize::try_from(fit).unwrap_or(most).clamp(1, most)
}

/// A row's list, `None` where it is null.
fn integers(column: &ArrayRef, key: &str, row: usize) -> Result<Option<Vec<i64>>, RowProblem> {
    if column.is_null(row) {
        return Ok(None);
    }
    let list = column.as_list::<i64>();
    if list.value_length(row) as usize > ROW_BYTES / size_of::<i64>() {
        return Err(RowProblem::TooLong);
    }
    let values = list.value(row);
    let values = values.as_primitive::<Int64Type>();
    match (0..values.len()).find(|&index| values.is_null(index)) {
        Some(index) => {
            Err(RowProblem::Value { key: format!("{key}[{index}]"), expected: "an integer", got: "null".to_owned() })
        }
        None => Ok(Some(values.values().to_vec())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{LargeListBuilder, ListArray, StringArray, StringViewBuilder};

    use super::*;
    use crate::data::row_keys::ColumnUse;

    #[test]
    fn a_slice_of_lists_holds_its_own_values() {
        let mut views = LargeListBuilder::new(StringViewBuilder::new());
        let rows = (0..100).map(|row| Some(vec![Some(row); 3]));
        for row in 0..100 {
            views.append_value((0..3).map(|_| Some(format!("a text too long to stand within its view: {row}"))));
        }
        let numbers: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows));
        for column in [Arc::new(views.finish()) as ArrayRef, numbers.clone()] {
            let all = own_lists(&column).unwrap();
            let part = own_lists(&column.slice(40, 10)).unwrap();
            assert_eq!((all.values().len(), part.values().len()), (300, 30));
            assert_eq!(part.value(9).as_ref(), all.value(49).as_ref());
        }
        let batch = RecordBatch::try_from_iter([("input_ids", numbers.slice(40, 10))]).unwrap();
        let (row, _) = Columns::of(&batch, None).unwrap().row(2).unwrap();
        assert_eq!(row, RawRow::Tokens { input_ids: vec![42; 3], labels: None });
    }

    #[test]
    fn labels_without_tokens_are_somebody_elses() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let batch = RecordBatch::try_from_iter([("labels", texts.clone()), ("text", texts.clone())]).unwrap();
        let columns = FileColumns::of(&batch.schema(), None).unwrap();
        assert_eq!((columns.wanted, columns.others), (vec![1], vec![(ColumnUse::NotRead, "labels".to_owned())]));
        let tokens = RecordBatch::try_from_iter([("labels", texts.clone()), ("input_ids", texts)]).unwrap();
        assert!(FileColumns::of(&tokens.schema(), None).is_err());
    }

    #[test]
    fn rows_are_taken_by_their_bytes() {
        assert_eq!(rows_at_once(1 << 20, 1 << 10, 1024), 1024);
        assert_eq!(rows_at_once(1 << 30, 1 << 10, 1024), 4);
        assert_eq!(rows_at_once(u64::MAX, 2, 1024), 1);
        assert_eq!(rows_at_once(0, 0, 1024), 1024);
    }
}
