//! Rows of columns, as Parquet and Arrow files have them: `input_ids` and `labels`, `messages` or `conversations` (lists of
//! structs), `instruction`, `input` and `output`, or `text`.

use arrow::array::{Array, ArrayRef, AsArray, LargeListArray, LargeStringArray, RecordBatch};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use arrow::error::ArrowError;
use arrow::util::display::array_value_to_string;

use super::chat_template::TemplateInputs;
use super::conversation::{self, Role, Turn};
use super::jsonl;
use super::raw_row::RawRow;
use super::rows::{ROW_LIMIT, RowProblem};

const TEXTS: [&str; 4] = ["text", "instruction", "input", "output"];
const CONVERSATIONS: [&str; 2] = ["messages", "conversations"];
const LISTS: [&str; 2] = ["input_ids", "labels"];
const TOOLS: &str = "tools";
/// Names of a turn's parts, OpenAI's and ShareGPT's.
const ROLE: [&str; 2] = ["role", "from"];
const CONTENT: [&str; 2] = ["content", "value"];

/// The places of the columns that rows are made of. What is wrong with a file's columns is told before its first row.
pub(super) fn wanted(schema: &Schema) -> Result<Vec<usize>, RowProblem> {
    check(schema)?;
    let has_tokens = schema.column_with_name("input_ids").is_some();
    let is_wanted = |name: &str| {
        has_tokens && LISTS.contains(&name) || CONVERSATIONS.contains(&name) || TEXTS.contains(&name) || name == TOOLS
    };
    let columns = schema.fields().iter().enumerate();
    Ok(columns.filter(|(_, field)| is_wanted(field.name())).map(|(index, _)| index).collect())
}

/// The columns and their types, known before the first row.
fn check(schema: &Schema) -> Result<(), RowProblem> {
    let has = |key: &str| schema.column_with_name(key).is_some();
    let has_alpaca = has("instruction") && has("output");
    if !["input_ids", "messages", "conversations", "text"].into_iter().any(has) && !has_alpaca {
        return Err(RowProblem::NoKnownKey {
            found: schema.fields().iter().map(|field| field.name().clone()).collect(),
        });
    }
    let wrong = |field: &Field, expected| {
        let (key, got) = (field.name().clone(), format!("a column of {}", field.data_type()));
        Err(RowProblem::Value { key, expected, got })
    };
    for field in schema.fields() {
        let (name, kind) = (field.name().as_str(), field.data_type());
        // Data sets of texts call other things labels, too.
        if LISTS.contains(&name) && has("input_ids") && !is_integer_list(kind) {
            return wrong(field, "a column of integer lists");
        }
        if CONVERSATIONS.contains(&name) && !has("input_ids") && !is_conversation(kind) {
            return wrong(
                field,
                "a column of lists of structs with strings \"role\" and \"content\", or \"from\" and \"value\"",
            );
        }
        let has_conversations = CONVERSATIONS.into_iter().any(has) && !has("input_ids");
        if name == TOOLS && has_conversations && !is_text(kind) {
            return wrong(field, "a column of strings, each a list of tools as JSON");
        }
        let is_read = name == "text" || (TEXTS.contains(&name) && has_alpaca);
        if is_read && !has("input_ids") && !is_text(kind) {
            return wrong(field, "a column of strings");
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
    match kind {
        DataType::Dictionary(_, value) => is_text(value),
        kind => matches!(kind, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View),
    }
}

fn is_conversation(kind: &DataType) -> bool {
    let (DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _)) = kind else {
        return false;
    };
    let DataType::Struct(fields) = item.data_type() else { return false };
    let has = |names: [&str; 2]| {
        fields.iter().any(|field| names.contains(&field.name().as_str()) && is_text(field.data_type()))
    };
    has(ROLE) && has(CONTENT)
}

/// A batch's columns, those of a type that rows can be made of.
#[derive(Debug)]
pub(super) struct Columns {
    ids: Option<ArrayRef>,
    labels: Option<ArrayRef>,
    conversations: Vec<(&'static str, Conversations)>,
    /// In the order of [`TEXTS`].
    texts: [Option<LargeStringArray>; 4],
    /// Lists of tools as JSON.
    tools: Option<LargeStringArray>,
}

/// A column of conversations: lists over two columns of strings.
#[derive(Debug)]
struct Conversations {
    lists: LargeListArray,
    roles: LargeStringArray,
    contents: LargeStringArray,
    /// OpenAI's calls of tools, beside the content.
    calls: Option<ArrayRef>,
}

impl Columns {
    pub(super) fn of(batch: &RecordBatch) -> Result<Self, ArrowError> {
        let as_lists = DataType::new_large_list(DataType::Int64, true);
        let list = |key| batch.column_by_name(key).map(|column| cast(&lists(column)?, &as_lists)).transpose();
        let text = |key| {
            let column = batch.column_by_name(key).filter(|column| is_text(column.data_type()));
            column.map(strings).transpose()
        };
        let named = |key: &'static str| {
            let column = batch.column_by_name(key).filter(|column| is_conversation(column.data_type()))?;
            Some(Conversations::of(column).map(|column| (key, column)))
        };
        Ok(Self {
            ids: list("input_ids")?,
            labels: list("labels")?,
            conversations: CONVERSATIONS.into_iter().filter_map(named).collect::<Result<_, _>>()?,
            texts: [text(TEXTS[0])?, text(TEXTS[1])?, text(TEXTS[2])?, text(TEXTS[3])?],
            tools: text(TOOLS)?,
        })
    }

    /// Of several forms of a row the first that is not null counts, as in JSONL.
    pub(super) fn row(&self, row: usize) -> Result<RawRow, RowProblem> {
        if let Some(input_ids) = integers(self.ids.as_ref(), "input_ids", row)? {
            return Ok(RawRow::Tokens { input_ids, labels: integers(self.labels.as_ref(), "labels", row)? });
        }
        if self.bytes(row) > ROW_LIMIT {
            return Err(RowProblem::TooLong);
        }
        let conversation = self.conversations.iter().find(|(_, column)| column.lists.is_valid(row));
        if let Some((key, column)) = conversation {
            let tools = self.tools.as_ref().filter(|tools| tools.is_valid(row)).map(|tools| tools.value(row).into());
            let inputs = TemplateInputs { tools: jsonl::tools_of(tools)?, ..TemplateInputs::default() };
            return Ok(RawRow::Conversation { key, turns: column.turns(key, row)?, inputs });
        }
        let [text, instruction, input, output] =
            self.texts.each_ref().map(|column| column.as_ref().filter(|c| c.is_valid(row)).map(|c| c.value(row)));
        if let (Some(instruction), Some(output)) = (instruction, output) {
            let turns = conversation::of_alpaca(instruction, input, output);
            return Ok(RawRow::Conversation { key: "instruction", turns, inputs: TemplateInputs::default() });
        }
        text.map(|text| RawRow::Text(text.to_owned())).ok_or(RowProblem::NoKnownKey { found: vec![] })
    }

    /// Of a row's texts.
    fn bytes(&self, row: usize) -> usize {
        let texts = self.texts.iter().flatten().map(|column| column.value_length(row) as usize);
        let said = self.conversations.iter().map(|(_, column)| column.bytes(row));
        texts.chain(said).sum()
    }
}

impl Conversations {
    fn of(column: &ArrayRef) -> Result<Self, ArrowError> {
        let lists = lists(column)?;
        let structs = lists.values().as_struct();
        let part = |names: [&str; 2]| {
            let column = names.into_iter().find_map(|name| structs.column_by_name(name));
            strings(column.ok_or_else(|| ArrowError::SchemaError(format!("no column {}", names[0])))?)
        };
        let (roles, contents) = (part(ROLE)?, part(CONTENT)?);
        let calls = structs.column_by_name("tool_calls").cloned();
        Ok(Self { lists, roles, contents, calls })
    }

    /// Of a row's contents.
    fn bytes(&self, row: usize) -> usize {
        let [start, end] = [row, row + 1].map(|row| self.lists.value_offsets()[row] as usize);
        let offsets = self.contents.value_offsets();
        (offsets[end] - offsets[start]) as usize
    }

    fn turns(&self, key: &str, row: usize) -> Result<Vec<Turn>, RowProblem> {
        let [start, end] = [row, row + 1].map(|row| self.lists.value_offsets()[row] as usize);
        let turn = |at: usize| {
            let key = format!("{key}[{}]", at - start);
            if self.roles.is_null(at) {
                let expected = "a role";
                return Err(RowProblem::Value { key, expected, got: "null".to_owned() });
            }
            let role = Role::named(self.roles.value(at));
            let turn = match self.contents.is_null(at) {
                true => Turn::without_content(&key, role)?,
                false => Turn::new(role, self.contents.value(at)),
            };
            Ok(match self.calls_at(at) {
                Some(calls) => Turn::new(Role::Call, format!("{}{calls}", turn.content)),
                None => turn,
            })
        };
        (start..end).map(turn).collect()
    }

    /// The calls of a turn as Arrow writes them (not as JSON): context, as everywhere, and not learned.
    fn calls_at(&self, at: usize) -> Option<String> {
        let calls = self.calls.as_ref().filter(|calls| calls.is_valid(at))?;
        let text = array_value_to_string(calls, at).ok()?;
        (!["", "[]"].contains(&text.trim())).then_some(text)
    }
}

/// A column of lists, with the values of its own rows alone: a slice of a large batch has all of the batch's, and to convert them for every
/// slice would take the square of their number.
fn lists(column: &ArrayRef) -> Result<LargeListArray, ArrowError> {
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

/// Rows that are read together: about so many bytes, at most `most` rows, at least one.
pub(super) fn rows_at_once(bytes: u64, rows: u64, most: usize) -> usize {
    const BYTES_AT_ONCE: u64 = 4 << 20;
    let fit = BYTES_AT_ONCE.saturating_mul(rows.max(1)) / bytes.max(1);
    usize::try_from(fit).unwrap_or(most).clamp(1, most)
}

fn strings(column: &ArrayRef) -> Result<LargeStringArray, ArrowError> {
    Ok(cast(column, &DataType::LargeUtf8)?.as_string::<i64>().clone())
}

/// A row's list, `None` where it is null.
fn integers(column: Option<&ArrayRef>, key: &str, row: usize) -> Result<Option<Vec<i64>>, RowProblem> {
    let Some(column) = column.filter(|column| column.is_valid(row)) else {
        return Ok(None);
    };
    let list = column.as_list::<i64>();
    if list.value_length(row) as usize > ROW_LIMIT / size_of::<i64>() {
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

    #[test]
    fn a_slice_of_lists_holds_its_own_values() {
        let mut views = LargeListBuilder::new(StringViewBuilder::new());
        let rows = (0..100).map(|row| Some(vec![Some(row); 3]));
        for row in 0..100 {
            views.append_value((0..3).map(|_| Some(format!("a text too long to stand within its view: {row}"))));
        }
        let numbers: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows));
        for column in [Arc::new(views.finish()) as ArrayRef, numbers.clone()] {
            let all = lists(&column).unwrap();
            let part = lists(&column.slice(40, 10)).unwrap();
            assert_eq!((all.values().len(), part.values().len()), (300, 30));
            assert_eq!(part.value(9).as_ref(), all.value(49).as_ref());
        }
        let batch = RecordBatch::try_from_iter([("input_ids", numbers.slice(40, 10))]).unwrap();
        let row = Columns::of(&batch).unwrap().row(2).unwrap();
        assert_eq!(row, RawRow::Tokens { input_ids: vec![42; 3], labels: None });
    }

    #[test]
    fn labels_without_tokens_are_somebody_elses() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let batch = RecordBatch::try_from_iter([("labels", texts.clone()), ("text", texts.clone())]).unwrap();
        assert_eq!(wanted(&batch.schema()).unwrap(), [1]);
        let tokens = RecordBatch::try_from_iter([("labels", texts.clone()), ("input_ids", texts)]).unwrap();
        assert!(wanted(&tokens.schema()).is_err());
    }

    #[test]
    fn rows_are_taken_by_their_bytes() {
        assert_eq!(rows_at_once(1 << 20, 1 << 10, 1024), 1024);
        assert_eq!(rows_at_once(1 << 30, 1 << 10, 1024), 4);
        assert_eq!(rows_at_once(u64::MAX, 2, 1024), 1);
        assert_eq!(rows_at_once(0, 0, 1024), 1024);
    }
}
