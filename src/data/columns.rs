//! Rows of columns, as Parquet and Arrow files have them: `input_ids` and `labels`, `messages` or `conversations` (lists of
//! structs, or structs of lists), `instruction`, `input` and `output`, `prompt` and `completion`, or `text`.

use std::ops::Range;

use arrow::array::{Array, ArrayData, ArrayRef, AsArray, LargeListArray, LargeStringArray, RecordBatch, StructArray};
use arrow::buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow::compute::cast;
use arrow::datatypes::{ArrowNativeType, DataType, Field, FieldRef, Int64Type, Schema};
use arrow::error::ArrowError;
use arrow::util::display::array_value_to_string;
use serde_json::{Value, json};

use super::chat_template::TemplateInputs;
use super::column_names::ColumnNames;
use super::conversation::{self, Message};
use super::jsonl;
use super::raw_row::RawRow;
use super::rows::RowProblem;
use crate::bounds::ROW_BYTES;
use crate::plural::counted;

const TEXTS: [&str; 6] = ["text", "instruction", "input", "output", "prompt", "completion"];
const CONVERSATIONS: [&str; 2] = ["messages", "conversations"];
/// Of strings, or of lists of messages.
const PAIR: [&str; 2] = ["prompt", "completion"];
const LISTS: [&str; 3] = ["input_ids", "labels", "loss_mask"];
const TOOLS: &str = "tools";
const CALLS: &str = "tool_calls";
/// Names of a turn's parts, OpenAI's and ShareGPT's.
const ROLE: [&str; 2] = ["role", "from"];
const CONTENT: [&str; 2] = ["content", "value"];

/// The places of the columns that rows are made of: those of `names`, or those whose names are known. What is wrong with a file's
/// columns is told before its first row.
pub(super) fn wanted(schema: &Schema, names: Option<&ColumnNames>) -> Result<Vec<usize>, RowProblem> {
    let Some(names) = names else { return known(schema) };
    let (places, fields): (Vec<usize>, Vec<_>) = names.of_schema(schema)?.into_iter().unzip();
    known(&Schema::new(fields))?;
    Ok(places)
}

fn known(schema: &Schema) -> Result<Vec<usize>, RowProblem> {
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
    let has_pair = PAIR.into_iter().all(has);
    if !["input_ids", "messages", "conversations", "text"].into_iter().any(has) && !has_alpaca && !has_pair {
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
                "a column of lists of structs with strings \"role\" and \"content\", or \"from\" and \"value\" (or of structs of such lists)",
            );
        }
        let has_conversations = CONVERSATIONS.into_iter().any(has) && !has("input_ids");
        if name == TOOLS && has_conversations && !is_text(kind) {
            return wrong(field, "a column of strings, each a list of tools as JSON");
        }
        let is_read = name == "text" || (TEXTS[..4].contains(&name) && has_alpaca);
        if is_read && !has("input_ids") && !is_text(kind) {
            return wrong(field, "a column of strings");
        }
    }
    if !has_pair || has("input_ids") || CONVERSATIONS.into_iter().any(has) {
        return Ok(());
    }
    let [prompt, completion] = PAIR.map(|key| schema.field_with_name(key).expect("it has the pair"));
    match (prompt.data_type(), completion.data_type()) {
        (asked, said) if is_text(asked) && is_text(said) || is_conversation(asked) && is_conversation(said) => Ok(()),
        (asked, _) if is_text(asked) => wrong(completion, "a column of strings, as prompt is"),
        (asked, _) if is_conversation(asked) => wrong(completion, "a column of messages, as prompt is"),
        _ => wrong(prompt, "a column of strings, or of lists of structs with strings \"role\" and \"content\""),
    }
}

/// The columns that a row cannot do without, under the names that the file has.
fn needed(batch: &RecordBatch, names: Option<&ColumnNames>) -> Result<Vec<(String, ArrayRef)>, ArrowError> {
    let schema = batch.schema();
    let keys: Vec<(usize, FieldRef)> = match names {
        Some(names) => names.of_schema(&schema).map_err(|problem| ArrowError::SchemaError(problem.to_string()))?,
        None => schema.fields().iter().cloned().enumerate().collect(),
    };
    let keys = keys.into_iter().filter(|(_, field)| jsonl::KNOWN.contains(&field.name().as_str()));
    Ok(keys.map(|(place, _)| (schema.field(place).name().clone(), batch.column(place).clone())).collect())
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

/// Lists of structs with a role and a content, or a struct of such lists, as `datasets` stores a `Sequence` of several features.
fn is_conversation(kind: &DataType) -> bool {
    let has = |kind: &DataType, names: [&str; 2], is_part: fn(&DataType) -> bool| match kind {
        DataType::Struct(fields) => {
            fields.iter().any(|field| names.contains(&field.name().as_str()) && is_part(field.data_type()))
        }
        _ => false,
    };
    let lists_of_text = |kind: &DataType| item_of(kind).is_some_and(is_text);
    match item_of(kind) {
        Some(item) => has(item, ROLE, is_text) && has(item, CONTENT, is_text),
        None => has(kind, ROLE, lists_of_text) && has(kind, CONTENT, lists_of_text),
    }
}

fn item_of(kind: &DataType) -> Option<&DataType> {
    match kind {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => Some(item.data_type()),
        _ => None,
    }
}

/// A batch's columns, those of a type that rows can be made of.
#[derive(Debug)]
pub(super) struct Columns {
    ids: Option<ArrayRef>,
    labels: Option<ArrayRef>,
    /// In place of labels.
    loss_mask: Option<ArrayRef>,
    conversations: Vec<(&'static str, Conversations)>,
    /// Prompts and completions that are messages.
    pair: Option<[Conversations; 2]>,
    /// In the order of [`TEXTS`].
    texts: [Option<LargeStringArray>; 6],
    /// Lists of tools as JSON.
    tools: Option<LargeStringArray>,
    /// What a row cannot do without, under the names that the file has.
    needed: Vec<(String, ArrayRef)>,
}

/// A column of conversations: for each row a list of roles and one of contents.
#[derive(Debug)]
struct Conversations {
    roles: TextLists,
    contents: TextLists,
    /// OpenAI's calls of tools, beside the content.
    calls: Option<CallLists>,
    nulls: Option<NullBuffer>,
}

/// For each row a list with the calls of each turn, of whatever type.
#[derive(Debug)]
struct CallLists {
    ends: OffsetBuffer<i64>,
    calls: ArrayRef,
}

/// A list of strings for each row.
#[derive(Debug)]
struct TextLists {
    ends: OffsetBuffer<i64>,
    texts: LargeStringArray,
}

impl Columns {
    pub(super) fn of(batch: &RecordBatch, names: Option<&ColumnNames>) -> Result<Self, ArrowError> {
        let columns = match names {
            Some(names) => Self::of_known(&names.of_batch(batch)?)?,
            None => Self::of_known(batch)?,
        };
        Ok(Self { needed: needed(batch, names)?, ..columns })
    }

    fn of_known(batch: &RecordBatch) -> Result<Self, ArrowError> {
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
        let messages = |key| named(key).transpose().map(|found| found.map(|(_, column)| column));
        let [asked, said] = PAIR.map(messages);
        let [a, b, c, d, e, f] = TEXTS.map(text);
        Ok(Self {
            ids: list("input_ids")?,
            labels: list("labels")?,
            loss_mask: list("loss_mask")?,
            conversations: CONVERSATIONS.into_iter().filter_map(named).collect::<Result<_, _>>()?,
            pair: asked?.zip(said?).map(<[Conversations; 2]>::from),
            texts: [a?, b?, c?, d?, e?, f?],
            tools: text(TOOLS)?,
            needed: vec![],
        })
    }

    /// Of several forms of a row the first that is not null counts, as in JSONL.
    pub(super) fn row(&self, row: usize) -> Result<RawRow, RowProblem> {
        if let Some(input_ids) = integers(self.ids.as_ref(), "input_ids", row)? {
            let list = |column: &Option<ArrayRef>, key| integers(column.as_ref(), key, row);
            return RawRow::of_tokens(input_ids, list(&self.labels, "labels")?, list(&self.loss_mask, "loss_mask")?);
        }
        if self.bytes(row) > ROW_BYTES {
            return Err(RowProblem::TooLong);
        }
        let conversation = self.conversations.iter().find(|(_, column)| column.is_valid(row));
        if let Some((key, column)) = conversation {
            return Ok(RawRow::conversation(key, column.turns(key, row)?, self.inputs(row)?));
        }
        let [text, instruction, input, output, prompt, completion] =
            self.texts.each_ref().map(|column| column.as_ref().filter(|c| c.is_valid(row)).map(|c| c.value(row)));
        if let (Some(instruction), Some(output)) = (instruction, output) {
            let turns = conversation::of_alpaca(instruction, input, output);
            return Ok(RawRow::conversation("instruction", turns, TemplateInputs::default()));
        }
        if let (Some(prompt), Some(completion)) = (prompt, completion) {
            return Ok(RawRow::Pair { prompt: prompt.to_owned(), completion: completion.to_owned() });
        }
        if let Some([prompt, completion]) = self.pair.as_ref().filter(|pair| pair.iter().all(|c| c.is_valid(row))) {
            let (asked, said) = (prompt.turns(PAIR[0], row)?, completion.turns(PAIR[1], row)?);
            return Ok(RawRow::conversation_pair(asked, said, self.inputs(row)?));
        }
        text.map(|text| RawRow::Text(text.to_owned())).ok_or_else(|| self.no_row(row))
    }

    /// Why there is no row: the first column that is null. Without any, a column has a type that no row is made of.
    fn no_row(&self, row: usize) -> RowProblem {
        match self.needed.iter().find(|(_, column)| column.is_null(row)) {
            Some((name, _)) => RowProblem::null(name),
            None => RowProblem::NoKnownKey { found: self.needed.iter().map(|(name, _)| name.clone()).collect() },
        }
    }

    fn inputs(&self, row: usize) -> Result<TemplateInputs, RowProblem> {
        let tools = self.tools.as_ref().filter(|tools| tools.is_valid(row)).map(|tools| tools.value(row).into());
        Ok(TemplateInputs { tools: jsonl::tools_of(tools)?, ..TemplateInputs::default() })
    }

    /// Of a row's texts.
    fn bytes(&self, row: usize) -> usize {
        let texts = self.texts.iter().flatten().map(|column| column.value_length(row) as usize);
        let said = self.conversations.iter().map(|(_, column)| column).chain(self.pair.iter().flatten());
        texts.chain(said.map(|column| column.contents.bytes(row))).sum()
    }
}

impl TextLists {
    fn of(lists: &LargeListArray, texts: &ArrayRef) -> Result<Self, ArrowError> {
        Ok(Self { ends: lists.offsets().clone(), texts: strings(texts)? })
    }

    fn places(&self, row: usize) -> Range<usize> {
        self.ends[row] as usize..self.ends[row + 1] as usize
    }

    /// Of a row's texts.
    fn bytes(&self, row: usize) -> usize {
        let (places, offsets) = (self.places(row), self.texts.value_offsets());
        (offsets[places.end] - offsets[places.start]) as usize
    }
}

impl Conversations {
    fn of(column: &ArrayRef) -> Result<Self, ArrowError> {
        match column.data_type() {
            DataType::Struct(_) => Self::of_struct(column.as_struct()),
            _ => Self::of_lists(&lists(column)?),
        }
    }

    fn of_lists(lists: &LargeListArray) -> Result<Self, ArrowError> {
        let structs = lists.values().as_struct();
        let part = |names| TextLists::of(lists, part_of(structs, names)?);
        let calls = structs.column_by_name(CALLS);
        let calls = calls.map(|calls| CallLists { ends: lists.offsets().clone(), calls: calls.clone() });
        Ok(Self { roles: part(ROLE)?, contents: part(CONTENT)?, calls, nulls: lists.nulls().cloned() })
    }

    fn of_struct(structs: &StructArray) -> Result<Self, ArrowError> {
        let part = |names| {
            let lists = lists(part_of(structs, names)?)?;
            let texts = TextLists::of(&lists, lists.values())?;
            Ok::<_, ArrowError>((texts, lists.nulls().cloned()))
        };
        let ((roles, without_roles), (contents, _)) = (part(ROLE)?, part(CONTENT)?);
        let nulls = NullBuffer::union(structs.nulls(), without_roles.as_ref());
        let calls = structs.column_by_name(CALLS).filter(|calls| *calls.data_type() != DataType::Null);
        let calls = calls.map(lists).transpose()?;
        let calls = calls.map(|calls| CallLists { ends: calls.offsets().clone(), calls: calls.values().clone() });
        Ok(Self { roles, contents, calls, nulls })
    }

    fn is_valid(&self, row: usize) -> bool {
        self.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(row))
    }

    fn turns(&self, key: &str, row: usize) -> Result<Vec<Message>, RowProblem> {
        let (roles, contents) = (self.roles.places(row), self.contents.places(row));
        if roles.len() != contents.len() {
            let got = format!("{} and {}", counted(roles.len(), "role"), counted(contents.len(), "content"));
            return Err(RowProblem::Value { key: key.to_owned(), expected: "as many roles as contents", got });
        }
        let calls = self.calls.as_ref().map_or(0..0, |calls| calls.ends[row] as usize..calls.ends[row + 1] as usize);
        if !calls.is_empty() && calls.len() != roles.len() {
            let got = format!("{} and {}", counted(roles.len(), "role"), counted(calls.len(), "list of calls"));
            return Err(RowProblem::Value { key: key.to_owned(), expected: "a list of tool_calls for each role", got });
        }
        let text = |texts: &LargeStringArray, at: usize| texts.is_valid(at).then(|| texts.value(at).to_owned());
        let turn = |(index, (role, content)): (usize, (usize, usize))| {
            let calls = calls.clone().nth(index).and_then(|place| self.calls_at(place));
            json!({"role": text(&self.roles.texts, role), "content": text(&self.contents.texts, content), "tool_calls": calls})
        };
        let turns: Value = roles.zip(contents).enumerate().map(turn).collect();
        Ok(conversation::of_messages(key, &turns)?)
    }

    /// The calls of a turn as Arrow writes them (not as JSON): context, as everywhere, and not learned.
    fn calls_at(&self, at: usize) -> Option<String> {
        let calls = self.calls.as_ref().map(|lists| &lists.calls).filter(|calls| calls.is_valid(at))?;
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

/// Bytes of a batch once each row has its own texts: one that is stored once for many rows counts for each of them.
pub(super) fn bytes_of(batch: &RecordBatch) -> u64 {
    batch.columns().iter().map(|column| full_bytes(&column.to_data())).fold(0, u64::saturating_add)
}

/// At most so many bytes are in an array when nothing is shared.
fn full_bytes(array: &ArrayData) -> u64 {
    let of_each = |longest: u64| longest.saturating_mul(array.len() as u64);
    match array.data_type() {
        DataType::Dictionary(_, _) => of_each(array.child_data().first().map_or(0, longest)),
        DataType::Utf8View | DataType::BinaryView => of_each(longest(array)),
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

/// The column of a struct that has one of these names.
fn part_of<'s>(structs: &'s StructArray, names: [&str; 2]) -> Result<&'s ArrayRef, ArrowError> {
    let column = names.into_iter().find_map(|name| structs.column_by_name(name));
    column.ok_or_else(|| ArrowError::SchemaError(format!("no column {}", names[0])))
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
        let row = Columns::of(&batch, None).unwrap().row(2).unwrap();
        assert_eq!(row, RawRow::Tokens { input_ids: vec![42; 3], labels: None });
    }

    #[test]
    fn labels_without_tokens_are_somebody_elses() {
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b"]));
        let batch = RecordBatch::try_from_iter([("labels", texts.clone()), ("text", texts.clone())]).unwrap();
        assert_eq!(wanted(&batch.schema(), None).unwrap(), [1]);
        let tokens = RecordBatch::try_from_iter([("labels", texts.clone()), ("input_ids", texts)]).unwrap();
        assert!(wanted(&tokens.schema(), None).is_err());
    }

    #[test]
    fn rows_are_taken_by_their_bytes() {
        assert_eq!(rows_at_once(1 << 20, 1 << 10, 1024), 1024);
        assert_eq!(rows_at_once(1 << 30, 1 << 10, 1024), 4);
        assert_eq!(rows_at_once(u64::MAX, 2, 1024), 1);
        assert_eq!(rows_at_once(0, 0, 1024), 1024);
    }
}
