//! JSON into types, with errors that name the key.

use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// As [`serde_json::from_slice`]; an error names the key of a wrong value: `rope_scaling.factor: invalid type: …`.
///
/// # Errors
/// Broken JSON, or a value of another type.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let read = serde_path_to_error::deserialize(&mut reader).map_err(|error| match error.path().iter().next() {
        Some(_) => serde_json::Error::custom(error),
        None => error.into_inner(),
    })?;
    reader.end().map(|()| read)
}

/// As [`from_slice`].
///
/// # Errors
/// As [`from_slice`].
pub fn from_str<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    from_slice(text.as_bytes())
}

/// A value in which no object has a key twice: programs differ in which of the two they would take.
#[derive(Debug)]
pub struct UniqueKeys(pub Value);

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueKeysVisitor).map(Self)
    }
}

struct UniqueKeysVisitor;

impl<'de> Visitor<'de> for UniqueKeysVisitor {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(UniqueKeys(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let UniqueKeys(value) = entries.next_value()?;
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("the key {key:?} is there twice")));
            }
            object.insert(key, value);
        }
        Ok(object.into())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn an_error_names_the_key_and_the_place() {
        let read = |text: &str| from_str::<BTreeMap<String, Vec<i64>>>(text).map_err(|error| error.to_string());
        let wrong = read("{\"a\": [1],\n \"b\": [2, true]}").unwrap_err();
        assert_eq!(wrong, "b[1]: invalid type: boolean `true`, expected i64 at line 2 column 14");
        assert_eq!(read("[]").unwrap_err(), "invalid type: sequence, expected a map at line 1 column 0");
        assert!(read("{} x").unwrap_err().starts_with("trailing characters"));
        assert_eq!(read("{\"a\": []}"), Ok(BTreeMap::from([("a".to_owned(), vec![])])));
    }

    #[test]
    fn a_key_that_is_there_twice_is_an_error_at_every_depth() {
        let text = r#"{"a": [null, true, -1, 18446744073709551615, 1.5e3, "b", {"a": {}}], "b": []}"#;
        assert_eq!(from_str::<UniqueKeys>(text).unwrap().0, serde_json::from_str::<Value>(text).unwrap());
        for twice in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"a": 1, "c": 2, "a": null}}]"#] {
            let error = from_str::<UniqueKeys>(twice).unwrap_err().to_string();
            assert!(error.contains("the key \"a\" is there twice at line 1 column"), "{error}");
        }
        assert!(from_str::<UniqueKeys>(&"[".repeat(100_000)).unwrap_err().to_string().contains("recursion limit"));
    }
}
