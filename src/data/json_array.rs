//! Rows of a JSON array of objects, `[{…}, {…}]`, as ShareGPT's collections come. A file is cut into rows as it is read:
//! one row is held at a time, not the file.
//!
//! serde_json's streaming of `RawValue`s does not do: it holds a row whole before its length can be refused (a missing quote takes the rest of
//! the file into memory), and it cannot go on behind a row that is not JSON, which `--skip-bad-rows` counts. It is the tests' oracle.

use std::path::Path;

use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::error::DataError;
use super::jsonl::RowText;
use super::opened::UnpackedText;
use super::rows::{RowError, RowLocation, RowProblem};

/// The rows of an array, one after another.
#[derive(Debug)]
pub(super) struct ArrayRows {
    text: UnpackedText,
    state: State,
    /// Of the next byte.
    line: usize,
    column: usize,
    item: RowText,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    BeforeArray,
    /// Before a row; `true` where the array may end instead.
    BeforeItem(bool),
    /// Within a row, so many brackets deep.
    Within(usize),
    WithinString {
        depth: usize,
        escaped: bool,
    },
    AfterArray,
}

/// What a byte does.
enum Transition {
    Outside(State),
    Inside(State),
    EndsItem(State),
    Wrong(&'static str),
}

impl ArrayRows {
    pub(super) fn new(text: UnpackedText) -> Self {
        Self { text, state: State::BeforeArray, line: 1, column: 1, item: row_text(1) }
    }

    /// Bytes of the file read so far.
    pub(super) fn count(&self) -> u64 {
        self.text.count()
    }

    /// The next row; `None` behind the array's end.
    pub(super) fn next(&mut self, path: &Path) -> Result<Option<RowText>, DataError> {
        loop {
            let chunk = self.text.chunk()?;
            if chunk.is_empty() {
                return self.end(path).map(|()| None).map_err(DataError::from);
            }
            let (mut used, mut from, mut item) = (0, None, None);
            for &byte in chunk {
                match self.state.step(byte) {
                    Transition::Wrong(message) => {
                        let (line, column, message) = (self.line, self.column, message.to_owned());
                        return Err(RowLocation::file(path)
                            .error(RowProblem::BrokenArray { line, column, message })
                            .into());
                    }
                    Transition::Outside(state) => self.state = state,
                    Transition::Inside(state) => {
                        if matches!(self.state, State::BeforeItem(_)) {
                            self.item.in_array = Some((self.line, self.column));
                        }
                        from.get_or_insert(used);
                        self.state = state;
                    }
                    Transition::EndsItem(state) => {
                        self.state = state;
                        item = Some(row_text(self.item.number + 1));
                    }
                }
                let is_last = item.is_some();
                if is_last {
                    self.item.push(&chunk[from.unwrap_or(used)..used]);
                }
                used += 1;
                (self.line, self.column) =
                    if byte == b'\n' { (self.line + 1, 1) } else { (self.line, self.column + 1) };
                if is_last {
                    break;
                }
            }
            if let (None, Some(from)) = (&item, from) {
                self.item.push(&chunk[from..used]);
            }
            self.text.consume(used);
            if let Some(next) = item {
                return Ok(Some(std::mem::replace(&mut self.item, next)));
            }
        }
    }

    /// What is wrong with a file that ends here, in serde's words.
    fn end(&self, path: &Path) -> Result<(), RowError> {
        if self.state == State::AfterArray {
            return Ok(());
        }
        let here = RowProblem::BrokenArray {
            line: self.line,
            column: self.column.saturating_sub(1),
            message: "EOF while parsing a list".to_owned(),
        };
        let within = matches!(self.state, State::Within(_) | State::WithinString { .. });
        let problem = if within { broken(&self.item).unwrap_or(here) } else { here };
        Err(RowLocation::file(path).error(problem))
    }
}

impl State {
    /// JSON's grammar as far as it decides where a row ends; serde has the rest.
    fn step(self, byte: u8) -> Transition {
        let blank = byte.is_ascii_whitespace();
        match (self, byte) {
            (Self::WithinString { depth, escaped }, byte) => Transition::Inside(match byte {
                b'"' if !escaped => Self::Within(depth),
                byte => Self::WithinString { depth, escaped: byte == b'\\' && !escaped },
            }),
            // The byte order mark that Windows editors write.
            (Self::BeforeArray, 0xef | 0xbb | 0xbf) => Transition::Outside(self),
            (Self::BeforeArray | Self::BeforeItem(_) | Self::AfterArray, _) if blank => Transition::Outside(self),
            (Self::BeforeArray, b'[') => Transition::Outside(Self::BeforeItem(true)),
            (Self::BeforeArray, _) => Transition::Wrong("expected `[`"),
            (Self::AfterArray, _) => Transition::Wrong("trailing characters"),
            (Self::BeforeItem(true), b']') => Transition::Outside(Self::AfterArray),
            (Self::BeforeItem(false), b']') => Transition::Wrong("trailing comma"),
            (Self::BeforeItem(_), b',') => Transition::Wrong("expected value"),
            (Self::Within(0), b',') => Transition::EndsItem(Self::BeforeItem(false)),
            (Self::Within(0), b']') => Transition::EndsItem(Self::AfterArray),
            (Self::BeforeItem(_), byte) => Transition::Inside(Self::Within(0).within(byte)),
            (Self::Within(_), byte) => Transition::Inside(self.within(byte)),
        }
    }

    fn within(self, byte: u8) -> Self {
        let depth = if let Self::Within(depth) = self { depth } else { 0 };
        match byte {
            b'"' => Self::WithinString { depth, escaped: false },
            b'{' | b'[' => Self::Within(depth + 1),
            b'}' | b']' => Self::Within(depth.saturating_sub(1)),
            _ => Self::Within(depth),
        }
    }
}

fn row_text(number: usize) -> RowText {
    RowText { number, in_array: Some((1, 1)), text: Some(vec![]) }
}

/// What JSON's grammar has against a row of an array, counted in the lines of the file.
pub(super) fn broken(row: &RowText) -> Option<RowProblem> {
    let (line, column) = row.in_array?;
    let error = serde_json::from_slice::<IgnoredAny>(row.text.as_deref()?).err()?;
    let column = if error.line() == 1 { column + error.column() - 1 } else { error.column() };
    Some(array_problem(&error, line + error.line() - 1, column))
}

/// The items of a whole array, as they are written.
pub(super) fn items<'b>(bytes: &'b [u8], path: &Path) -> Result<Vec<&'b RawValue>, RowError> {
    let broken = |error: serde_json::Error| array_problem(&error, error.line(), error.column());
    serde_json::from_slice(bytes).map_err(|error| RowLocation::file(path).error(broken(error)))
}

fn array_problem(error: &serde_json::Error, line: usize, column: usize) -> RowProblem {
    let message = error.to_string();
    let message = message.split(" at line ").next().unwrap_or_default().to_owned();
    RowProblem::BrokenArray { line, column, message }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::data::opened::Opened;

    fn cut(bytes: &[u8]) -> Result<Vec<RowText>, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.json");
        crate::files::write_atomic(&path, |out| std::io::Write::write_all(out, bytes)).unwrap();
        let Opened::JsonArray(text) = Opened::open(&path)? else { panic!("no array") };
        let mut items = ArrayRows::new(text);
        std::iter::from_fn(|| items.next(&path).transpose()).collect()
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            r#"[a\\"\[\]{},\n é]{0,8}"#.prop_map(Value::from)
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec(("[a\"\\]{]{0,3}", inner), 0..4)
                    .prop_map(|pairs| Value::Object(pairs.into_iter().collect()))
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// The oracle: serde on the whole file.
        #[test]
        fn a_file_is_cut_where_serde_cuts_it(values in prop::collection::vec(value(), 0..6), pretty: bool) {
            let json = if pretty { serde_json::to_string_pretty(&values) } else { serde_json::to_string(&values) };
            let json = json.unwrap();
            let expected: Vec<Value> = items(json.as_bytes(), Path::new("a")).unwrap().iter()
                .map(|raw| serde_json::from_str(raw.get()).unwrap()).collect();
            let got = cut(json.as_bytes()).unwrap();
            prop_assert!(got.iter().map(|item| item.number).eq(1..=values.len()));
            let got: Vec<Value> = got.iter()
                .map(|item| serde_json::from_slice(item.text.as_ref().unwrap()).unwrap()).collect();
            prop_assert_eq!(got, expected);
        }
    }

    #[test]
    fn what_is_no_array_is_refused_where_serde_refuses_it() {
        for bad in ["[{\"a\": 1},\n {\"b\"", "[{},\n{]", "[{}, ]", "[{}] x", "[", "[{} {}]", "[{\"a\": \"x]"] {
            let serde = items(bad.as_bytes(), Path::new("a")).unwrap_err().problem.to_string();
            let ours = match cut(bad.as_bytes()) {
                Err(DataError::Row(error)) => error.problem.to_string(),
                Ok(items) => items.iter().find_map(broken).unwrap().to_string(),
                Err(other) => panic!("{other}"),
            };
            let place = |words: &str| words.split(": ").next().unwrap().to_owned();
            assert_eq!(place(&ours), place(&serde), "{bad}: {ours} | {serde}");
        }
        let whole = json!([{"a": "\u{feff}"}]).to_string();
        assert_eq!(cut(&[b"\xef\xbb\xbf", whole.as_bytes()].concat()).unwrap().len(), 1);
    }
}
