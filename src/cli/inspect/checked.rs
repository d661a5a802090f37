//! What `medusa inspect --verify` says of a file.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// A file and what its checksum says.
#[derive(Debug, Serialize)]
pub(super) struct CheckedFile {
    pub(super) file: PathBuf,
    #[serde(flatten)]
    pub(super) state: FileState,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub(super) enum FileState {
    /// As it was written.
    Ok,
    Damaged {
        #[serde(flatten)]
        how: Damage,
    },
    /// Nothing says what it must be.
    Unrecorded {
        /// Why there is no checksum.
        #[serde(skip_serializing_if = "Option::is_none")]
        why: Option<&'static str>,
    },
}

/// What is there instead of what was written.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(super) enum Damage {
    Hash { expected: String, got: String },
    Words { how: String },
}

impl FileState {
    pub(super) fn compared(expected: &str, got: &str) -> Self {
        if expected == got {
            return Self::Ok;
        }
        Self::Damaged { how: Damage::Hash { expected: expected.to_owned(), got: got.to_owned() } }
    }

    pub(super) fn damaged(how: impl fmt::Display) -> Self {
        Self::Damaged { how: Damage::Words { how: how.to_string() } }
    }

    pub(super) fn of<E: fmt::Display>(checked: Result<(), E>) -> Self {
        checked.map_or_else(Self::damaged, |()| Self::Ok)
    }
}

impl fmt::Display for CheckedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        match &self.state {
            FileState::Ok => write!(f, "ok          {file}"),
            FileState::Damaged { how: Damage::Hash { expected, got } } => {
                write!(f, "damaged     {file}: expected sha256 {expected}, got {got}")
            }
            FileState::Damaged { how: Damage::Words { how } } => write!(f, "damaged     {file}: {how}"),
            FileState::Unrecorded { why: None } => write!(f, "unrecorded  {file}: no checksum"),
            FileState::Unrecorded { why: Some(why) } => write!(f, "unrecorded  {file}: {why}"),
        }
    }
}
