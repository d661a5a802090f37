//! The fields of a JSON object, taken one by one: whoever takes one says what it must be, and what nobody took is unknown.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;
use crate::json::UniqueKeys;

/// What is left of an object.
#[derive(Debug)]
pub(super) struct Fields {
    /// Before a field's name in errors: nothing, or `stream_options.`.
    prefix: String,
    object: Map<String, Value>,
}

impl Fields {
    /// A body. serde_json bounds how deeply it may be nested.
    pub(super) fn from_body(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(UniqueKeys(Value::Object(object))) => Ok(Self { prefix: String::new(), object }),
            Ok(UniqueKeys(other)) => Err(ApiError::Json { why: format!("expected an object, got {}", kind(&other)) }),
            Err(error) => Err(ApiError::Json { why: error.to_string() }),
        }
    }

    /// A field with fields of its own.
    pub(super) fn inner(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let prefix = format!("{}{name}.", self.prefix);
        let object = self.read(name, "an object", |value| value.as_object().cloned())?;
        Ok(object.map(|object| Self { prefix, object }))
    }

    /// A field; null is none.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.object.remove(name).filter(|value| !value.is_null())
    }

    /// A field that `of` understands, or an error that says what is expected.
    pub(super) fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        of: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let wrong = || ApiError::field(format!("{}{name}", self.prefix), expected, described(&value));
        of(&value).ok_or_else(wrong).map(Some)
    }

    pub(super) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.read(name, &expected, |value| value.as_f64().filter(|number| range.contains(number)))
    }

    pub(super) fn whole(&mut self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ApiError> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
        self.read(name, &expected, |value| number(value).filter(|number| range.contains(number)))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.read(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// Takes a field that has no effect here, and so must be what asks for none.
    pub(super) fn without_effect(
        &mut self,
        name: &str,
        asks_for_none: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !asks_for_none(&value) => {
                Err(ApiError::invalid(format!("{}{name}", self.prefix), "not supported by this server; leave it out"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what is left.
    pub(super) fn end(self) -> Result<(), ApiError> {
        match self.object.keys().next() {
            Some(name) => Err(ApiError::UnknownField { param: format!("{}{name}", self.prefix) }),
            None => Ok(()),
        }
    }
}

/// What a value is, without its text, which may be what a user said.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A setting's value; a long one by its kind.
fn described(value: &Value) -> String {
    match value {
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::String(text) if text.len() <= 40 => value.to_string(),
        other => kind(other).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields {
        Fields::from_body(body.as_bytes()).unwrap()
    }

    #[test]
    fn a_body_that_is_no_object_is_reported_with_its_place() {
        let deep = "[".repeat(100_000);
        let bodies: [(&[u8], &str); 11] = [
            (b"", "EOF while parsing a value at line 1 column 0"),
            (b"hello", "expected value at line 1 column 1"),
            (b"{\"a\": 1,\n  b}", "key must be a string at line 2 column 3"),
            (b"{\"a\": 1", "EOF while parsing an object at line 1 column 7"),
            (b"{\"a\": 1} {}", "trailing characters at line 1 column 10"),
            (b"{\"a\": \"\xff\xfe\"}", "invalid unicode code point at line 1 column"),
            (b"{\"a\": \"\\ud800\"}", "hex escape at line 1 column"),
            (b"{\"a\": 1e999}", "number out of range at line 1 column"),
            (b"[1]", "expected an object, got a list"),
            (b"{\"a\": 1, \"a\": 1}", "the key \"a\" is there twice at line 1 column"),
            (deep.as_bytes(), "recursion limit exceeded at line 1 column 128"),
        ];
        for (body, why) in bodies {
            let error = Fields::from_body(body).unwrap_err();
            assert!(matches!(&error, ApiError::Json { .. }) && error.to_string().contains(why), "{why}: {error}");
        }
    }

    #[test]
    fn a_value_that_is_not_as_expected_is_reported() {
        let read = |body: &str| {
            let mut fields = fields(body);
            let error = fields.number("t", 0.0..=2.0).err().or(fields.whole("n", 1..=16).err());
            let error = error.or(fields.flag("stream").err()).or(fields.text("model").err());
            error.or(fields.inner("o").err()).map(|error| error.to_string())
        };
        let cases = [
            (r#"{"t": 2.1}"#, "t: expected a number from 0 to 2, got 2.1"),
            (r#"{"t": "hot"}"#, "t: expected a number from 0 to 2, got \"hot\""),
            (r#"{"n": 0}"#, "n: expected a whole number from 1 to 16, got 0"),
            (r#"{"n": 1.5}"#, "n: expected a whole number from 1 to 16, got 1.5"),
            (r#"{"n": -1}"#, "n: expected a whole number from 1 to 16, got -1"),
            (r#"{"n": 99999999999999999999}"#, "n: expected a whole number from 1 to 16, got 1e+20"),
            (r#"{"stream": "yes"}"#, "stream: expected true or false, got \"yes\""),
            (r#"{"model": ["m"]}"#, "model: expected a string, got a list"),
            (r#"{"o": 1}"#, "o: expected an object, got 1"),
        ];
        for (body, message) in cases {
            assert_eq!(read(body).as_deref(), Some(message), "{body}");
        }
        assert_eq!(read(r#"{"t": 2, "n": 16, "stream": true, "model": "m", "o": {}}"#), None);
        assert_eq!(read(r#"{"t": null, "n": null, "stream": null, "model": null, "o": null}"#), None);
        let long = format!(r#"{{"t": "{}"}}"#, "secret ".repeat(10));
        assert_eq!(read(&long).unwrap(), "t: expected a number from 0 to 2, got a string");
    }

    #[test]
    fn what_nobody_takes_is_unknown() {
        let mut outer = fields(r#"{"o": {"foo": null}}"#);
        let inner = outer.inner("o").unwrap().unwrap();
        assert_eq!(inner.end(), Err(ApiError::UnknownField { param: "o.foo".to_owned() }));
        assert_eq!(outer.end(), Ok(()));
    }
}
