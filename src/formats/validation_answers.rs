//! What evaluations of a run measure tokens per step on.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::{self, FormatError};
use super::sealed::sealed;

const WHAT: &str = "the backbone's answers";
const EXPECTED: &str = "the answers of a run; remove the file, and the run makes it again";

/// `validation_answers.json`: the backbone's answers to prompts of the validation rows, as rows `R` of token ids and labels.
#[derive(Debug, Serialize, Deserialize)]
pub struct ValidationAnswers<R> {
    pub rows: Vec<R>,
}

impl<R: Serialize + DeserializeOwned> ValidationAnswers<R> {
    /// Reads the file, and compares its checksum.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        error::read(path, WHAT, EXPECTED)
    }

    /// Writes the file atomically, with its checksum.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        error::write(path, WHAT, &sealed(&serde_json::to_string(self).expect("plain data")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_is_loaded_and_a_changed_byte_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("answers.json");
        ValidationAnswers { rows: vec![(1, vec![2, 3])] }.save(&path).unwrap();
        let rows = || ValidationAnswers::<(i32, Vec<i32>)>::load(&path).map(|answers| answers.rows);
        assert_eq!(rows().unwrap(), [(1, vec![2, 3])]);
        let changed = std::fs::read_to_string(&path).unwrap().replacen('3', "4", 1);
        crate::files::write_atomic(&path, |out| std::io::Write::write_all(out, changed.as_bytes())).unwrap();
        assert!(matches!(rows(), Err(FormatError::Changed { .. })));
    }
}
