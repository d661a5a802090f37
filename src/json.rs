//! JSON into types, with errors that name the key.

use serde::de::{DeserializeOwned, Error};

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
}
