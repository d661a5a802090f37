//! What this program does with a key of a file that another program wrote: tables of them decide it, so that no key is ignored by forgetting it.
//! docs/compatibility.md lists them (`tests/compatibility.rs`).

use serde_json::{Map, Value};

/// Values of more bytes are not shown.
const SHOWN_BYTES: usize = 40;

/// What the loader does with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyUse {
    /// It is read, and checked where it is read.
    Read,
    /// It must have one of these values (as JSON) or be absent: with others it asks for something that is not done here.
    Only(&'static [&'static str]),
    /// With values (as JSON) other than these it asks for something that is not done here: that is reported.
    Reported(&'static [&'static str]),
    /// It changes nothing, for this reason.
    NoEffect(&'static str),
}

impl KeyUse {
    /// The values of which `value` should have been one.
    pub fn expected(self, value: &Value) -> Option<&'static [&'static str]> {
        match self {
            Self::Only(values) if !values.contains(&value.to_string().as_str()) => Some(values),
            _ => None,
        }
    }
}

/// How a table uses a key; `None` for an unknown key.
pub fn find(keys: &[(&str, KeyUse)], key: &str) -> Option<KeyUse> {
    keys.iter().find(|(name, _)| *name == key).map(|(_, key_use)| *key_use)
}

/// Whether a key with this value can be left out.
pub fn asks_for_nothing(value: &Value) -> bool {
    ["null", "false", "{}", "[]"].contains(&value.to_string().as_str())
}

/// The keys to report, with their values: unknown ones, and those that ask for something which is not done.
pub fn reported(written: &Map<String, Value>, key_use: impl Fn(&str) -> Option<KeyUse>) -> Vec<String> {
    let is_reported = |key: &str, value: &Value| match key_use(key) {
        None => !asks_for_nothing(value),
        Some(KeyUse::Reported(neutral)) => !neutral.contains(&value.to_string().as_str()),
        Some(_) => false,
    };
    let found = written.iter().filter(|(key, value)| is_reported(key, value));
    found.map(|(key, value)| with_value(key, &value.to_string())).collect()
}

fn with_value(key: &str, value: &str) -> String {
    if value.len() > SHOWN_BYTES { key.to_owned() } else { format!("{key} ({value})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_reported_that_ask_for_what_is_not_done() {
        let uses = |key: &str| match key {
            "read" => Some(KeyUse::Read),
            "penalty" => Some(KeyUse::Reported(&["null", "1.0"])),
            "only" => Some(KeyUse::Only(&["1"])),
            "harmless" => Some(KeyUse::NoEffect("a description")),
            _ => None,
        };
        let written = serde_json::json!({"read": 1, "penalty": 1.1, "only": 2, "harmless": 3, "new": 4, "off": false, "long": "x".repeat(99)});
        let found = |written: &Value| reported(written.as_object().unwrap(), uses);
        assert_eq!(found(&written), ["penalty (1.1)", "new (4)", "long"]);
        assert!(found(&serde_json::json!({"penalty": 1.0, "empty": []})).is_empty());
    }
}
