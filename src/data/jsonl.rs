//! Rows of JSONL: one object a line.

use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::column_names::ColumnNames;
use super::conversation::{self, TemplateInputs};
use super::opened::UnpackedText;
use super::python_json::PythonRow;
use super::raw_row::RawRow;
use super::rows::{RowLocation, RowProblem};
use super::shown::shown;
use super::source::SourceError;
use crate::bounds::ROW_BYTES;

/// A row as it is written: a line of JSONL, or an item of an array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RowText {
    /// Of the line, or of the row among the items, counted from 1.
    pub(super) number: usize,
    /// Line and column where an array's row begins, counted from 1.
    pub(super) in_array: Option<(usize, usize)>,
    /// Without its end; `None` for a row beyond [`ROW_BYTES`].
    pub(super) text: Option<Vec<u8>>,
}

impl RowText {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.text = self.text.take().filter(|text| text.len() + bytes.len() <= ROW_BYTES);
        if let Some(text) = &mut self.text {
            text.extend_from_slice(bytes);
        }
    }

    pub(super) fn location(&self, path: &Path) -> RowLocation {
        match self.in_array {
            Some(_) => RowLocation::row(path, self.number),
            None => RowLocation::line(path, self.number),
        }
    }
}

/// The lines of a file that are not blank.
#[derive(Debug)]
pub(super) struct JsonLines {
    text: UnpackedText,
    number: usize,
}

impl JsonLines {
    pub(super) fn new(text: UnpackedText) -> Self {
        Self { text, number: 0 }
    }

    /// Bytes of the file read so far.
    pub(super) fn count(&self) -> u64 {
        self.text.count()
    }

    /// The next line; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<RowText>, SourceError> {
        while let Some(mut line) = self.line()? {
            // Windows editors put a byte order mark before the first line.
            let first = line.text.as_ref().filter(|_| line.number == 1);
            if let Some(rest) = first.and_then(|text| text.strip_prefix(b"\xef\xbb\xbf")) {
                line.text = Some(rest.to_vec());
            }
            if line.text.as_ref().is_none_or(|text| !text.trim_ascii().is_empty()) {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }

    /// One line, blank or not. What is beyond the limit is read past, not held.
    pub(super) fn line(&mut self) -> Result<Option<RowText>, SourceError> {
        self.number += 1;
        let mut line = RowText { number: self.number, in_array: None, text: Some(vec![]) };
        let mut is_there = false;
        loop {
            let chunk = self.text.chunk()?;
            if chunk.is_empty() {
                return Ok(is_there.then_some(line));
            }
            is_there = true;
            let end = chunk.iter().position(|&byte| byte == b'\n');
            let part = &chunk[..end.unwrap_or(chunk.len())];
            line.push(part);
            let used = part.len() + usize::from(end.is_some());
            self.text.consume(used);
            if end.is_some() {
                return Ok(Some(line));
            }
        }
    }
}

/// The keys that a row needs, in the order in which forms count.
pub(super) const KNOWN: [&str; 8] =
    ["input_ids", "messages", "conversations", "instruction", "output", "prompt", "completion", "text"];

/// What may be beside them.
const BESIDE: [&str; 5] = ["labels", "loss_mask", "input", "tools", "chat_template_kwargs"];

#[derive(Deserialize)]
struct JsonRow<'l> {
    input_ids: Option<Vec<i64>>,
    /// Looked at beside `input_ids` only: data sets of texts call other things so, too.
    #[serde(borrow)]
    labels: Option<&'l RawValue>,
    /// In place of labels, as speculators writes it; looked at as they are.
    #[serde(borrow)]
    loss_mask: Option<&'l RawValue>,
    messages: Option<Value>,
    conversations: Option<Value>,
    instruction: Option<Value>,
    input: Option<Value>,
    output: Option<Value>,
    prompt: Option<Value>,
    completion: Option<Value>,
    text: Option<Value>,
    tools: Option<Value>,
    chat_template_kwargs: Option<Value>,
}

/// One line's row, of the columns of `names` alone where they are given.
pub(super) fn named_row(line: &[u8], names: Option<&ColumnNames>) -> Result<RawRow, RowProblem> {
    let Some(names) = names else { return any_row(line) };
    let object = object_of(line, |key| names.reads(key))?;
    row_of(&object, Some(names))
}

/// One line's row, of the columns that are known.
fn any_row(line: &[u8]) -> Result<RawRow, RowProblem> {
    let read = row(line);
    let Err(RowProblem::BrokenJson { .. }) = read else { return read };
    let Some(python) = PythonRow::of(line) else { return read };
    let is_known = |key: &str| KNOWN.contains(&key) || BESIDE.contains(&key);
    match row(&python.json) {
        Err(RowProblem::BrokenJson { .. }) => row_of(&python.object(is_known)?, None),
        read => read,
    }
}

/// The row of an object.
pub(super) fn row_of(object: &Map<String, Value>, names: Option<&ColumnNames>) -> Result<RawRow, RowProblem> {
    let text = match names {
        Some(names) => serde_json::to_vec(&names.of_object(object)?),
        None => serde_json::to_vec(object),
    };
    row(&text.expect("an object of JSON is JSON"))
}

/// One line's row. Keys that are not asked for are ignored; of several forms of a row the first counts: tokens, `messages`,
/// `conversations`, `instruction` with `output`, `prompt` with `completion`, `text`. (Data sets keep a conversation beside its text.)
fn row(line: &[u8]) -> Result<RawRow, RowProblem> {
    if !line.trim_ascii_start().starts_with(b"{") {
        object(line)?; // serde would read a list as a struct, key by key
    }
    let row: JsonRow = serde_json::from_slice(line).map_err(|error| explain(line, &error))?;
    let inputs = |tools: Option<Value>, kwargs: Option<Value>| -> Result<_, RowProblem> {
        Ok(TemplateInputs { tools: tools_of(tools)?, kwargs: kwargs_of(kwargs)? })
    };
    let of_messages =
        |key, value, inputs| Ok(RawRow::conversation(key, conversation::of_messages(key, &value)?, inputs));
    match row {
        JsonRow { input_ids: Some(input_ids), labels, loss_mask, .. } => {
            let list = |value: Option<&RawValue>| value.map(|value| serde_json::from_str(value.get())).transpose();
            let explained = |error| explain(line, &error);
            let (labels, mask) = (list(labels).map_err(explained)?, list(loss_mask).map_err(explained)?);
            RawRow::of_tokens(input_ids, labels, mask)
        }
        JsonRow { messages: Some(value), tools, chat_template_kwargs, .. } => {
            of_messages("messages", value, inputs(tools, chat_template_kwargs)?)
        }
        JsonRow { conversations: Some(value), tools, chat_template_kwargs, .. } => {
            of_messages("conversations", value, inputs(tools, chat_template_kwargs)?)
        }
        JsonRow { instruction: Some(instruction), input, output: Some(output), .. } => {
            let input = input.map(|input| string("input", input)).transpose()?;
            let (instruction, output) = (string("instruction", instruction)?, string("output", output)?);
            let turns = conversation::of_alpaca(&instruction, input.as_deref(), &output);
            Ok(RawRow::conversation("instruction", turns, TemplateInputs::default()))
        }
        JsonRow { prompt: Some(prompt), completion: Some(completion), tools, chat_template_kwargs, .. } => {
            pair(prompt, completion, inputs(tools, chat_template_kwargs)?)
        }
        JsonRow { text: Some(text), .. } => string("text", text).map(RawRow::Text),
        _ => Err(no_row(&object(line)?)),
    }
}

/// Why an object is no row: a key that is known is null, or there is none.
fn no_row(object: &Map<String, Value>) -> RowProblem {
    match KNOWN.into_iter().find(|key| object.get(*key).is_some_and(Value::is_null)) {
        Some(key) => RowProblem::null(key),
        None => RowProblem::NoKnownKey { found: object.keys().cloned().collect() },
    }
}

/// TRL's prompt and completion: two strings, or two lists of messages.
fn pair(prompt: Value, completion: Value, inputs: TemplateInputs) -> Result<RawRow, RowProblem> {
    if prompt.is_array() {
        let asked = conversation::of_messages("prompt", &prompt)?;
        return Ok(RawRow::conversation_pair(asked, conversation::of_messages("completion", &completion)?, inputs));
    }
    Ok(RawRow::Pair { prompt: string("prompt", prompt)?, completion: string("completion", completion)? })
}

/// A list of tools, or its JSON as a string: in columns every tool would need the same keys. An empty list is none.
pub(super) fn tools_of(value: Option<Value>) -> Result<Option<Vec<Value>>, RowProblem> {
    let Some(value) = value else { return Ok(None) };
    let tools = match &value {
        Value::Array(tools) => Some(tools.clone()),
        Value::String(json) if json.trim().is_empty() => Some(vec![]),
        Value::String(json) => serde_json::from_str(json).ok(),
        _ => None,
    };
    let expected = "a list of tools, or a string that holds one as JSON";
    let wrong = || RowProblem::Value { key: "tools".to_owned(), expected, got: shown(&value) };
    Ok(Some(tools.ok_or_else(wrong)?).filter(|tools| !tools.is_empty()))
}

pub(super) fn kwargs_of(value: Option<Value>) -> Result<Map<String, Value>, RowProblem> {
    match value {
        None => Ok(Map::new()),
        Some(Value::Object(kwargs)) => Ok(kwargs),
        Some(other) => {
            let key = "chat_template_kwargs".to_owned();
            Err(RowProblem::Value { key, expected: "an object", got: shown(&other) })
        }
    }
}

fn string(key: &str, value: Value) -> Result<String, RowProblem> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(RowProblem::Value { key: key.to_owned(), expected: "a string", got: shown(&other) }),
    }
}

/// A row's object.
pub(super) fn object(line: &[u8]) -> Result<Map<String, Value>, RowProblem> {
    object_of(line, |_| true)
}

/// A row's object, with null for NaN and Infinity in columns that are not read.
fn object_of(line: &[u8], is_read: impl Fn(&str) -> bool) -> Result<Map<String, Value>, RowProblem> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(RowProblem::Value { key: "the row".to_owned(), expected: "an object", got: shown(&other) }),
        Err(error) => match PythonRow::of(line) {
            Some(python) => python.object(is_read),
            None => Err(RowProblem::broken_json(&error)),
        },
    }
}

/// serde names a column; users look for a key.
fn explain(line: &[u8], error: &serde_json::Error) -> RowProblem {
    if !error.is_data() {
        return RowProblem::broken_json(error);
    }
    let object = match object_of(line, |_| false) {
        Ok(object) => object,
        Err(problem) => return problem,
    };
    let ids = ["input_ids", "labels", "loss_mask"].iter().find_map(|key| bad_integer(key, object.get(*key)?));
    ids.unwrap_or_else(|| RowProblem::broken_json(error)) // a key that is there twice
}

fn bad_integer(key: &str, value: &Value) -> Option<RowProblem> {
    let wrong = |key, expected, got| Some(RowProblem::Value { key, expected, got: shown(got) });
    let values = match value {
        Value::Null => return None,
        Value::Array(values) => values,
        other => return wrong(key.to_owned(), "a list of integers", other),
    };
    let index = values.iter().position(|value| !value.is_i64())?;
    wrong(format!("{key}[{index}]"), "an integer", &values[index])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::column_advice;

    fn complaint(line: &str) -> String {
        row(line.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn text_is_ignored_where_there_are_tokens() {
        let tokens = RawRow::Tokens { input_ids: vec![1, 2], labels: None };
        assert_eq!(row(br#"{"input_ids": [1, 2], "text": 3, "labels": null, "id": 7}"#).unwrap(), tokens);
        assert_eq!(row(br#"{"text": "x", "input_ids": null}"#).unwrap(), RawRow::Text("x".to_owned()));
    }

    #[test]
    fn labels_are_read_beside_tokens_only() {
        let text = RawRow::Text("x".to_owned());
        for labels in ["3", "\"joy\"", "[\"a\", \"b\"]", "{}", "null"] {
            assert_eq!(row(format!(r#"{{"text": "x", "labels": {labels}}}"#).as_bytes()).unwrap(), text);
        }
        let tokens = RawRow::Tokens { input_ids: vec![1, 2], labels: Some(vec![-100, 2]) };
        assert_eq!(row(br#"{"labels": [-100, 2], "input_ids": [1, 2]}"#).unwrap(), tokens);
    }

    #[test]
    fn a_conversation_counts_before_its_text() {
        let alpaca = br#"{"instruction": "Add.", "input": "1 2", "output": "3", "text": "Instruction: Add."}"#;
        let turns = conversation::of_alpaca("Add.", Some("1 2"), "3");
        assert_eq!(row(alpaca).unwrap(), RawRow::conversation("instruction", turns, TemplateInputs::default()));
        let no_answer = br#"{"instruction": "Add.", "text": "x"}"#;
        assert_eq!(row(no_answer).unwrap(), RawRow::Text("x".to_owned()));
        let empty = br#"{"messages": null, "conversations": [], "text": "x"}"#;
        let none = RawRow::conversation("conversations", vec![], TemplateInputs::default());
        assert_eq!(row(empty).unwrap(), none);
    }

    #[test]
    fn a_prompt_and_its_completion_are_strings_or_messages() {
        let strings = br#"{"prompt": "The sky is", "completion": " blue.", "text": "x"}"#;
        let pair = RawRow::Pair { prompt: "The sky is".to_owned(), completion: " blue.".to_owned() };
        assert_eq!(row(strings).unwrap(), pair);
        let messages =
            br#"{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}"#;
        let turn = |role, content: &str| conversation::Message::new(role, content);
        let (asked, said) = (turn("user", "q"), turn("assistant", "a"));
        let expected = RawRow::conversation_pair(vec![asked], vec![said], TemplateInputs::default());
        assert_eq!(row(messages).unwrap(), expected);
        let mixed = r#"{"prompt": [{"role": "user", "content": "q"}], "completion": "a"}"#;
        assert_eq!(complaint(mixed), "completion: expected a list of messages, got \"a\"");
        assert_eq!(complaint(r#"{"prompt": "q", "completion": 3}"#), "completion: expected a string, got 3");
    }

    #[test]
    fn pythons_nan_is_null_unless_it_is_read() {
        let read = |line: &str, names: Option<&str>| {
            let names = names.map(|names| names.parse().unwrap());
            named_row(line.as_bytes(), names.as_ref()).map_err(|problem| problem.to_string())
        };
        let text = Ok(RawRow::Text("NaN".to_owned()));
        for line in
            [r#"{"text": "NaN", "score": NaN, "labels": [Infinity]}"#, r#"{"more": {"a": [-Infinity]}, "text": "NaN"}"#]
        {
            assert_eq!(read(line, None), text);
            assert_eq!(read(line, Some("text=text")), text);
        }
        let of_key = |key: &str| Err(format!("{key}: expected JSON, got NaN or Infinity, which JSON does not have"));
        assert_eq!(read(r#"{"id": NaN, "text": NaN}"#, None), of_key("text"));
        assert_eq!(read(r#"{"input_ids": [1], "labels": [NaN]}"#, None), of_key("labels"));
        assert_eq!(read(r#"{"instruction": "a", "input": NaN, "output": "b"}"#, None), of_key("input"));
        assert_eq!(read(r#"{"messages": [{"role": "user", "content": NaN}]}"#, None), of_key("messages"));
        assert_eq!(read(r#"{"a": NaN, "text": "x"}"#, Some("text=a")), of_key("a"));
        let wrong = read(r#"{"input_ids": "1 2", "score": NaN}"#, None).unwrap_err();
        assert_eq!(wrong, r#"input_ids: expected a list of integers, got "1 2""#);
        assert!(read(r#"{"score": NaN}"#, None).unwrap_err().contains(r#"got "score""#));
        assert!(read(r#"{"text": nan}"#, None).unwrap_err().contains("not valid JSON"));
    }

    #[test]
    fn a_complaint_names_the_key_and_what_stands_there() {
        assert_eq!(complaint(r#"{"input_ids": "1 2"}"#), r#"input_ids: expected a list of integers, got "1 2""#);
        assert_eq!(complaint(r#"{"input_ids": [1, 2.5]}"#), "input_ids[1]: expected an integer, got 2.5");
        assert_eq!(complaint(r#"{"input_ids": [1], "labels": [[1]]}"#), "labels[0]: expected an integer, got [1]");
        assert_eq!(complaint(r#"{"text": ["a"]}"#), r#"text: expected a string, got ["a"]"#);
        assert_eq!(complaint("[1, 2]"), "the row: expected an object, got [1,2]");
        let known = r#"expected a key "input_ids", "messages", "conversations", "instruction" (with "output"), "prompt" (with "completion") or "text""#;
        let of_prompt = complaint(r#"{"prompt": "x", "input": "y"}"#);
        assert_eq!(of_prompt, format!(r#"{known}, got "prompt", "input"; {}"#, column_advice::NO_ANSWERS));
        assert_eq!(complaint("{}"), format!("{known}, got no key at all; {}", column_advice::advice(&[])));
        assert_eq!(complaint(r#"{"prompt": "x", "completion": null}"#), "completion: expected a value, got null");
        assert_eq!(complaint(r#"{"text": null, "id": 1}"#), "text: expected a value, got null");
        assert_eq!(complaint(r#"{"instruction": 1, "output": "a"}"#), "instruction: expected a string, got 1");
        assert!(complaint(r#"{"text": "a", "text": "b"}"#).contains("duplicate field `text`"));
        let cut = complaint(r#"{"text": "a"#);
        assert_eq!(cut, "not valid JSON (one object a line is expected), column 11: EOF while parsing a string");
    }
}
