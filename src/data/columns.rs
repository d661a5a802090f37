//! Rows of columns, as Parquet and Arrow files have them: `input_ids` and `labels`, `messages` or `conversations` (lists of
//! structs), `instruction`, `input` and `output`, or `text`.

use arrow::array::{Array, ArrayRef, AsArray, LargeListArray, LargeStringArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use arrow::error::ArrowError;
use arrow::util::display::array_value_to_string;

use super::conversation::{self, Role, Turn};
use super::rows::{Problem, RawRow};

const TEXTS: [&str; 4] = ["text", "instruction", "input", "output"];
const CONVERSATIONS: [&str; 2] = ["messages", "conversations"];
const LISTS: [&str; 2] = ["input_ids", "labels"];
/// Names of a turn's parts, OpenAI's and ShareGPT's.
const ROLE: [&str; 2] = ["role", "from"];
const CONTENT: [&str; 2] = ["content", "value"];

/// The places of the columns that rows are made of. What is wrong with a file's columns is told before its first row.
pub(super) fn wanted(schema: &Schema) -> Result<Vec<usize>, Problem> {
    check(schema)?;
    let is_wanted = |name: &str| LISTS.contains(&name) || CONVERSATIONS.contains(&name) || TEXTS.contains(&name);
    let columns = schema.fields().iter().enumerate();
    Ok(columns.filter(|(_, field)| is_wanted(field.name())).map(|(index, _)| index).collect())
}

/// What can be told before the first row: which columns there are, and of which type.
fn check(schema: &Schema) -> Result<(), Problem> {
    let has = |key: &str| schema.column_with_name(key).is_some();
    let has_alpaca = has("instruction") && has("output");
    if !["input_ids", "messages", "conversations", "text"].into_iter().any(has) && !has_alpaca {
        return Err(Problem::NoKnownKey { found: schema.fields().iter().map(|field| field.name().clone()).collect() });
    }
    let wrong = |field: &Field, expected| {
        let (key, got) = (field.name().clone(), format!("a column of {}", field.data_type()));
        Err(Problem::Value { key, expected, got })
    };
    for field in schema.fields() {
        let (name, kind) = (field.name().as_str(), field.data_type());
        if LISTS.contains(&name) && !is_integer_list(kind) {
            return wrong(field, "a column of integer lists");
        }
        if CONVERSATIONS.contains(&name) && !has("input_ids") && !is_conversation(kind) {
            return wrong(
                field,
                "a column of lists of structs with strings \"role\" and \"content\", or \"from\" and \"value\"",
            );
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
        let list = |key| batch.column_by_name(key).map(|column| cast(column, &as_lists)).transpose();
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
        })
    }

    /// Of several forms of a row the first that is not null counts, as in JSONL.
    pub(super) fn row(&self, row: usize) -> Result<RawRow, Problem> {
        if let Some(input_ids) = integers(self.ids.as_ref(), "input_ids", row)? {
            return Ok(RawRow::Tokens { input_ids, labels: integers(self.labels.as_ref(), "labels", row)? });
        }
        let conversation = self.conversations.iter().find(|(_, column)| column.lists.is_valid(row));
        if let Some((key, column)) = conversation {
            return Ok(RawRow::Conversation { key, turns: column.turns(key, row)? });
        }
        let [text, instruction, input, output] =
            self.texts.each_ref().map(|column| column.as_ref().filter(|c| c.is_valid(row)).map(|c| c.value(row)));
        if let (Some(instruction), Some(output)) = (instruction, output) {
            let turns = conversation::of_alpaca(instruction, input, output);
            return Ok(RawRow::Conversation { key: "instruction", turns });
        }
        text.map(|text| RawRow::Text(text.to_owned())).ok_or(Problem::NoKnownKey { found: vec![] })
    }
}

impl Conversations {
    fn of(column: &ArrayRef) -> Result<Self, ArrowError> {
        let (DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _)) = column.data_type()
        else {
            return Err(ArrowError::SchemaError("a list was expected".to_owned()));
        };
        let lists = cast(column, &DataType::LargeList(item.clone()))?.as_list::<i64>().clone();
        let structs = lists.values().as_struct();
        let part = |names: [&str; 2]| {
            let column = names.into_iter().find_map(|name| structs.column_by_name(name));
            strings(column.ok_or_else(|| ArrowError::SchemaError(format!("no column {}", names[0])))?)
        };
        let (roles, contents) = (part(ROLE)?, part(CONTENT)?);
        let calls = structs.column_by_name("tool_calls").cloned();
        Ok(Self { lists, roles, contents, calls })
    }

    fn turns(&self, key: &str, row: usize) -> Result<Vec<Turn>, Problem> {
        let [start, end] = [row, row + 1].map(|row| self.lists.value_offsets()[row] as usize);
        let turn = |at: usize| {
            let key = format!("{key}[{}]", at - start);
            if self.roles.is_null(at) {
                let expected = "a role";
                return Err(Problem::Value { key, expected, got: "null".to_owned() });
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

fn strings(column: &ArrayRef) -> Result<LargeStringArray, ArrowError> {
    Ok(cast(column, &DataType::LargeUtf8)?.as_string::<i64>().clone())
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
