//! Rows of JSONL: one object a line.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::column_names::ColumnNames;
use super::conversation::is_nothing;
use super::opened::UnpackedText;
use super::python_json::PythonRow;
use super::raw_row::RawRow;
use super::row_keys::{self, OtherKey};
use super::row_object::RowObject;
use super::rows::{RowLocation, RowProblem};
use super::shown::shown;
use super::source::SourceError;
use super::token_lists::{INPUT_IDS, LISTS};
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

/// A line's row as it is read: the lists beside `input_ids` stay text until it is known that they are lists.
struct JsonRow<'l> {
    input_ids: Option<Vec<i64>>,
    /// Data sets of texts call other things so, too.
    lists: Vec<(&'static str, &'l RawValue)>,
    object: RowObject,
}

#[derive(Deserialize)]
struct Key<'l>(#[serde(borrow)] Cow<'l, str>);

struct JsonRowVisitor;

impl<'de> Visitor<'de> for JsonRowVisitor {
    type Value = JsonRow<'de>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut keys: A) -> Result<JsonRow<'de>, A::Error> {
        let mut row = JsonRow { input_ids: None, lists: vec![], object: RowObject::default() };
        let twice = |key: &str| A::Error::custom(format_args!("duplicate field `{key}`"));
        while let Some(Key(key)) = keys.next_key()? {
            let JsonRow { input_ids, lists, object } = &mut row;
            if key == INPUT_IDS {
                if input_ids.is_some() {
                    return Err(twice(&key));
                }
                *input_ids = keys.next_value()?;
            } else if row_keys::is_read(&key) {
                if object.columns.insert(key.to_string(), keys.next_value()?).is_some() {
                    return Err(twice(&key));
                }
            } else {
                let value = keys.next_value::<&RawValue>()?;
                let list = LISTS.into_iter().find(|list| *list == key);
                match list.filter(|_| value.get() != "null") {
                    Some(list) if lists.iter().any(|(known, _)| *known == list) => return Err(twice(list)),
                    Some(list) => lists.push((list, value)),
                    None if is_nothing_raw(value) => {}
                    None => object.others.push(row_keys::other_column(&key)),
                }
            }
        }
        Ok(row)
    }
}

/// As [`is_nothing`], of JSON that is not parsed: a value of many bytes is something.
fn is_nothing_raw(value: &RawValue) -> bool {
    const BLANKS: usize = 64;
    value.get().len() <= BLANKS && serde_json::from_str(value.get()).is_ok_and(|value| is_nothing(&value))
}

/// One line's row, and the keys that it is not made of; of the columns of `names` alone where they are given. Of several forms of a row the
/// first counts: tokens, `messages`, `conversations`, `instruction` with `output`, `prompt` with `completion`, `text`.
pub(super) fn row(line: &[u8], names: Option<&ColumnNames>) -> Result<(RawRow, Vec<OtherKey>), RowProblem> {
    if names.is_some() || !line.trim_ascii_start().starts_with(b"{") {
        let object = object_of(line, |key| names.is_none_or(|names| names.takes(key)))?;
        return RowObject::of(object, names)?.row();
    }
    let read = json_row(line);
    let Err(RowProblem::BrokenJson { .. }) = read else { return read };
    let Some(python) = PythonRow::of(line) else { return read };
    let is_read = |key: &str| row_keys::is_read(key) || LISTS.contains(&key);
    match json_row(&python.json) {
        Err(RowProblem::BrokenJson { .. }) => RowObject::of(python.object(is_read)?, None)?.row(),
        read => read,
    }
}

/// One line's row of the columns that are known.
fn json_row(line: &[u8]) -> Result<(RawRow, Vec<OtherKey>), RowProblem> {
    let mut json = serde_json::Deserializer::from_slice(line);
    let read = json.deserialize_map(JsonRowVisitor).and_then(|row| json.end().map(|()| row));
    let JsonRow { input_ids, lists, mut object } = read.map_err(|error| explain(line, &error))?;
    match input_ids {
        Some(input_ids) => {
            let list = |key| {
                let json = lists.iter().find(|(list, _)| *list == key).map(|(_, json)| json.get());
                json.map(serde_json::from_str).transpose().map_err(|error| explain(line, &error))
            };
            object.row_of_tokens(input_ids, list)
        }
        None => {
            object.others.extend(lists.iter().map(|(list, _)| row_keys::other_column(list)));
            object.row().map_err(|problem| with_all_keys(problem, line))
        }
    }
}

/// Where no column is known, all of the row are named.
fn with_all_keys(problem: RowProblem, line: &[u8]) -> RowProblem {
    match (problem, object(line)) {
        (RowProblem::NoKnownKey { .. }, Ok(object)) => {
            RowProblem::NoKnownKey { found: object.keys().cloned().collect() }
        }
        (problem, _) => problem,
    }
}

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
    let ids = LISTS.iter().find_map(|key| bad_integer(key, object.get(*key)?));
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
    use crate::data::conversation::{self, TemplateInputs};

    fn row(line: &[u8]) -> Result<RawRow, RowProblem> {
        super::row(line, None).map(|(row, _)| row)
    }

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
        let turns = conversation::from_alpaca("Add.", Some("1 2"), "3");
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
    fn a_complaint_names_the_key_and_what_stands_there() {
        assert_eq!(complaint(r#"{"input_ids": "1 2"}"#), r#"input_ids: expected a list of integers, got "1 2""#);
        assert_eq!(complaint(r#"{"input_ids": [1, 2.5]}"#), "input_ids[1]: expected an integer, got 2.5");
        assert_eq!(complaint(r#"{"input_ids": [1], "labels": [[1]]}"#), "labels[0]: expected an integer, got [1]");
        assert_eq!(complaint(r#"{"text": ["a"]}"#), r#"text: expected a string, got ["a"]"#);
        assert_eq!(complaint("[1, 2]"), "the row: expected an object, got [1,2]");
        let known = r#"expected a key "input_ids", "messages", "conversations", "instruction" (with "output"), "prompt" (with "completion") or "text""#;
        let complained = complaint(r#"{"prompt": "x", "input": "y"}"#);
        assert_eq!(complained, format!(r#"{known}, got "prompt", "input"; {}"#, column_advice::NO_ANSWERS));
        assert_eq!(complaint("{}"), format!("{known}, got no key at all; {}", column_advice::advice(&[])));
        assert_eq!(complaint(r#"{"prompt": "x", "completion": null}"#), "completion: expected a value, got null");
        assert_eq!(complaint(r#"{"text": null, "id": 1}"#), "text: expected a value, got null");
        assert_eq!(complaint(r#"{"instruction": 1, "output": "a"}"#), "instruction: expected a string, got 1");
        assert!(complaint(r#"{"text": "a", "text": "b"}"#).contains("duplicate field `text`"));
        let cut = complaint(r#"{"text": "a"#);
        assert_eq!(cut, "not valid JSON (one object a line is expected), column 11: EOF while parsing a string");
    }
}
