//! What this program does with a key of a file that another program wrote: tables of them decide it for config.json
//! ([`key_table`](super::config::key_table)) and adapter_config.json ([`peft_keys`](super::peft_keys)), so that no key is ignored by
//! forgetting it.

use serde_json::Value;

/// What the loader does with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyUse {
    /// It is read, and checked where it is read.
    Read,
    /// It must have one of these values (as JSON) or be absent: with others it asks for something that is not done here.
    Only(&'static [&'static str]),
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
