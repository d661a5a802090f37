//! NaN, Infinity and -Infinity, which Python writes as JSON though JSON has no such numbers (pandas: a value that is missing).

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::rows::RowProblem;

const NUMBERS: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];
/// In their place: serde steps over it where nobody reads the value, and refuses it where somebody does.
const TOO_LARGE: &[u8] = b"9e999";

/// A row with such numbers.
pub(super) struct PythonRow {
    pub(super) json: Vec<u8>,
    /// Where in it each replaced number ends, and by how many bytes `json` is longer than the row up to there.
    longer: Vec<(usize, isize)>,
}

impl PythonRow {
    /// `None` for a row that has none.
    pub(super) fn of(row: &[u8]) -> Option<Self> {
        let (mut json, mut at, mut is_string) = (Vec::with_capacity(row.len()), 0, false);
        let mut longer = Vec::new();
        while let Some(&byte) = row.get(at) {
            let number = NUMBERS.into_iter().find(|number| !is_string && row[at..].starts_with(number));
            let taken = match (byte, number) {
                (_, Some(number)) => number.len(),
                (b'\\', _) if is_string => 2.min(row.len() - at),
                _ => 1,
            };
            is_string ^= byte == b'"';
            json.extend_from_slice(if number.is_some() { TOO_LARGE } else { &row[at..at + taken] });
            at += taken;
            if number.is_some() {
                longer.push((json.len(), json.len() as isize - at as isize));
            }
        }
        (!longer.is_empty()).then_some(Self { json, longer })
    }

    /// A problem of `json` as one of the row.
    fn broken(&self, error: &serde_json::Error) -> RowProblem {
        match RowProblem::broken_json(error) {
            RowProblem::BrokenJson { column, message } => {
                let before = self.longer.partition_point(|(end, _)| *end <= column);
                let longer = before.checked_sub(1).map_or(0, |last| self.longer[last].1);
                RowProblem::BrokenJson { column: column.saturating_add_signed(-longer), message }
            }
            other => other,
        }
    }

    /// The row's object, with null for a column that has such a number anywhere.
    ///
    /// # Errors
    /// A column that is read has one; broken JSON.
    pub(super) fn object(&self, is_read: impl Fn(&str) -> bool) -> Result<Map<String, Value>, RowProblem> {
        let columns: BTreeMap<String, &RawValue> =
            serde_json::from_slice(&self.json).map_err(|error| self.broken(&error))?;
        let column = |(key, json): (String, &RawValue)| match serde_json::from_str(json.get()) {
            Err(_) if is_read(&key) => Err(not_a_number(key)),
            value => Ok((key, value.unwrap_or_default())),
        };
        columns.into_iter().map(column).collect()
    }
}

fn not_a_number(key: String) -> RowProblem {
    RowProblem::Value { key, expected: "JSON", got: "NaN or Infinity, which JSON does not have".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_outside_of_strings_are_replaced() {
        let json = |row: &str| PythonRow::of(row.as_bytes()).map(|row| String::from_utf8(row.json).unwrap());
        let row = r#"{"a": NaN, "NaN": [-Infinity,Infinity], "b": "NaN \" NaN", "c": "\\"}"#;
        let replaced = r#"{"a": 9e999, "NaN": [9e999,9e999], "b": "NaN \" NaN", "c": "\\"}"#;
        assert_eq!(json(row).unwrap(), replaced);
        for row in [r#"{"a": "NaN"}"#, r#"{"a": 1e999}"#, "{", "\"\\", ""] {
            assert_eq!(json(row), None);
        }
    }

    #[test]
    fn broken_json_is_reported_at_its_column_of_the_row() {
        for (row, column) in [(r#"{"a": NaN, "b": }"#, 17), (r#"{"a": -Infinity, "c": NaN, "b": }"#, 33)] {
            let row = PythonRow::of(row.as_bytes()).unwrap();
            let error = row.object(|_| false).unwrap_err();
            assert!(matches!(error, RowProblem::BrokenJson { column: at, .. } if at == column), "{error}");
        }
    }

    #[test]
    fn a_column_is_null_or_an_error_if_it_is_read() {
        let row = PythonRow::of(br#"{"a": NaN, "b": [1, {"c": Infinity}], "d": 1}"#).unwrap();
        assert_eq!(Value::from(row.object(|key| key == "d").unwrap()).to_string(), r#"{"a":null,"b":null,"d":1}"#);
        let error = row.object(|key| key == "b").unwrap_err().to_string();
        assert_eq!(error, "b: expected JSON, got NaN or Infinity, which JSON does not have");
    }
}
