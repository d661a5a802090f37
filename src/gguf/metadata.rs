//! The metadata of a GGUF file: values by key.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum MetaValue {
    Integer(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    /// Values of one type.
    List(Vec<MetaValue>),
}

impl MetaValue {
    /// The number, if it is a whole one.
    pub fn integer(&self) -> Option<i64> {
        match self {
            Self::Integer(number) => Some(*number),
            _ => None,
        }
    }

    /// The number.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Integer(number) => Some(*number as f64),
            Self::Float(number) => Some(*number),
            _ => None,
        }
    }

    pub fn bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn list(&self) -> Option<&[Self]> {
        match self {
            Self::List(values) => Some(values),
            _ => None,
        }
    }

    /// As JSON has it.
    pub fn json(&self) -> Value {
        match self {
            Self::Integer(number) => (*number).into(),
            Self::Float(number) => (*number).into(),
            Self::Bool(value) => (*value).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(values) => values.iter().map(Self::json).collect(),
        }
    }
}

impl fmt::Display for MetaValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 80;
        match self {
            Self::List(values) => write!(f, "an array of {}", values.len()),
            Self::Text(text) if text.chars().count() > SHOWN => {
                write!(f, "{:?}…", text.chars().take(SHOWN).collect::<String>())
            }
            value => write!(f, "{}", value.json()),
        }
    }
}

/// The metadata of a file.
#[derive(Debug, Default)]
pub struct Metadata(BTreeMap<String, MetaValue>);

impl Metadata {
    /// Adds a value; whether the key was there before.
    pub(super) fn insert(&mut self, key: String, value: MetaValue) -> bool {
        self.0.insert(key, value).is_some()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&MetaValue> {
        self.0.get(key)
    }

    /// Keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &MetaValue)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }
}
