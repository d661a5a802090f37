//! JSON objects with a checksum of their own: the last key, `"checksum":"sha256:…"`, is the hash of the text before its comma. Whoever changes
//! such a file on purpose removes the key.

use sha2::{Digest, Sha256};

use crate::files::hex;

/// The last key.
pub const CHECKSUM: &str = "checksum";
/// As it is written.
const KEY: &str = "\"checksum\"";
const ALGORITHM: &str = "\"sha256:";

/// Another text than the one that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    pub expected: String,
    pub got: String,
}

/// Whether a text has a checksum, which is then right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SealState {
    Right,
    /// Written by an earlier version, by hand or by another program.
    None,
}

/// Adds its checksum to an object that has keys.
pub fn sealed(object: &str) -> String {
    let body = object.trim_end().strip_suffix('}').map_or(object, str::trim_end);
    let [before, between, behind] = if body.contains('\n') { ["\n  ", " ", "\n"] } else { [""; 3] };
    format!("{body},{before}{KEY}:{between}{ALGORITHM}{}\"{behind}}}", sum(&[body]))
}

/// Compares a text with its checksum, if it has one.
///
/// # Errors
/// [`Broken`] says both hashes.
pub fn check(text: &str) -> Result<SealState, Broken> {
    let Some((body, expected, behind)) = parts(text) else { return Ok(SealState::None) };
    let got = if behind.trim() == "}" { sum(&[body]) } else { sum(&[body, behind]) };
    if got == expected { Ok(SealState::Right) } else { Err(Broken { expected: expected.to_owned(), got }) }
}

/// What is hashed, the hash, and the rest.
fn parts(text: &str) -> Option<(&str, &str, &str)> {
    let (body, value) = text.rsplit_once(KEY)?;
    let value = value.trim_start().strip_prefix(':')?.trim_start().strip_prefix(ALGORITHM)?;
    let (expected, behind) = value.split_once('"')?;
    Some((body.trim_end().strip_suffix(',')?.trim_end(), expected, behind))
}

fn sum(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    parts.iter().for_each(|part| hasher.update(part));
    hex(&hasher.finalize())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_sealed_object_is_the_same_with_one_more_key_and_every_other_change_is_noticed() {
        let object = json!({"a": [1, 2.5], "text": "a \"checksum\": \"sha256:\" of words", "b": {"c": null}});
        for text in [object.to_string(), format!("{object:#}\n")] {
            let sealed = sealed(&text);
            assert_eq!(check(&sealed), Ok(SealState::Right));
            let mut read: Value = serde_json::from_str(&sealed).unwrap();
            let checksum = read.as_object_mut().unwrap().shift_remove("checksum").unwrap();
            assert_eq!(read, object);
            assert_eq!(checksum, format!("sha256:{}", sum(&[text.trim_end().strip_suffix('}').unwrap().trim_end()])));
            for at in 0..sealed.len() {
                let mut bytes = sealed.clone().into_bytes();
                bytes[at] ^= 1;
                let changed = String::from_utf8(bytes).unwrap();
                let is_noticed = check(&changed).is_err() || serde_json::from_str::<Value>(&changed).is_err();
                let is_of_the_key = at >= sealed.rfind(KEY).unwrap(); // then it seems to have no checksum, and its content is whole
                assert!(is_noticed || is_of_the_key, "byte {at}: {changed}");
            }
        }
    }

    #[test]
    fn texts_without_a_checksum_of_ours_are_as_they_may_be() {
        for text in ["[[0],[1]]", "{}", r#"{"checksum":"md5:1"}"#, r#"{"a":1,"checksum":2}"#] {
            assert_eq!(check(text), Ok(SealState::None), "{text}");
        }
        let appended = sealed(r#"{"a":1}"#).replace("\"}", "\",\"b\":2}");
        assert!(check(&appended).is_err(), "a key behind it is not under it: {appended}");
    }
}
