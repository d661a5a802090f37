//! `tree.json`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::sparse_tree::{SparseTree, TreeError};
use crate::files;

/// A tree file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TreeFileError {
    /// The disk said no.
    #[error("cannot {action} the tree file {}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The disk's words.
        source: io::Error,
    },
    /// Not a tree file.
    #[error(
        "{} is no tree file; expected {{\"choices\":[[0],[0,0],[1]], …}} as `medusa tree` writes it, or a bare list of paths",
        path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and what.
        source: serde_json::Error,
    },
    /// Its choices are no tree.
    #[error("{}: {source}", path.display())]
    Tree {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: TreeError,
    },
    /// `nodes` and `choices` disagree: the file was cut or edited.
    #[error("{} says \"nodes\": {written}, but lists {listed} choices; write the tree again with `medusa tree`", path.display())]
    NodeCount {
        /// The file.
        path: PathBuf,
        /// What `nodes` says.
        written: usize,
        /// Choices in it.
        listed: usize,
    },
}

/// `tree.json`: a tree and where it comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeFile {
    /// The tree.
    pub tree: SparseTree,
    /// Where it comes from.
    pub origin: Origin,
}

/// What a search expected of its tree, and from what; a bare list of paths has nothing of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Origin {
    /// Tokens that a step commits, the root's among them.
    pub expected_tokens_per_step: Option<f64>,
    /// SHA-256 of the calibration it was searched from.
    pub calibration_sha256: Option<String>,
    /// Tokens ÷ seconds of decoding, where the tree was chosen for a machine.
    pub expected_tokens_per_second: Option<f64>,
    /// SHA-256 of the latencies it was chosen by.
    pub latency_sha256: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct WrittenTree {
    choices: Vec<Vec<usize>>,
    #[serde(default)]
    expected_tokens_per_step: Option<f64>,
    #[serde(default)]
    nodes: Option<usize>,
    #[serde(default)]
    calibration_sha256: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expected_tokens_per_second: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    latency_sha256: Option<String>,
}

impl WrittenTree {
    fn new(choices: Vec<Vec<usize>>, nodes: Option<usize>, origin: Origin) -> Self {
        let Origin { expected_tokens_per_step, calibration_sha256, expected_tokens_per_second, latency_sha256 } =
            origin;
        Self {
            choices,
            expected_tokens_per_step,
            nodes,
            calibration_sha256,
            expected_tokens_per_second,
            latency_sha256,
        }
    }

    fn origin(self) -> Origin {
        Origin {
            expected_tokens_per_step: self.expected_tokens_per_step,
            calibration_sha256: self.calibration_sha256,
            expected_tokens_per_second: self.expected_tokens_per_second,
            latency_sha256: self.latency_sha256,
        }
    }
}

impl TreeFile {
    /// Reads `tree.json`, or a bare JSON list of paths as trees are published.
    ///
    /// # Errors
    /// [`TreeFileError`] names the file.
    pub fn load(path: &Path) -> Result<Self, TreeFileError> {
        let named = || path.to_owned();
        let text =
            fs::read_to_string(path).map_err(|source| TreeFileError::Io { action: "read", path: named(), source })?;
        let written = parse(&text).map_err(|source| TreeFileError::Json { path: named(), source })?;
        let listed = written.choices.len();
        if let Some(count) = written.nodes.filter(|&count| count != listed) {
            return Err(TreeFileError::NodeCount { path: named(), written: count, listed });
        }
        let tree =
            SparseTree::new(written.choices.clone()).map_err(|source| TreeFileError::Tree { path: named(), source })?;
        Ok(Self { tree, origin: written.origin() })
    }

    /// The text of `tree.json`.
    pub fn to_json(&self) -> String {
        let choices = self.tree.choices();
        let written = WrittenTree::new(choices.to_vec(), Some(choices.len()), self.origin.clone());
        serde_json::to_string(&written).expect("numbers, lists and texts are JSON")
    }

    /// Writes `tree.json`, whole or not at all.
    ///
    /// # Errors
    /// [`TreeFileError`] names the file.
    pub fn save(&self, path: &Path) -> Result<(), TreeFileError> {
        files::write_atomic(path, |out| writeln!(out, "{}", self.to_json())).map_err(|source| TreeFileError::Io {
            action: "write",
            path: path.to_owned(),
            source,
        })
    }
}

fn parse(text: &str) -> Result<WrittenTree, serde_json::Error> {
    if text.trim_start().starts_with('[') {
        return Ok(WrittenTree::new(serde_json::from_str(text)?, None, Origin::default()));
    }
    serde_json::from_str(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_tree_comes_back_in_the_order_of_the_search() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tree.json");
        let tree = SparseTree::new(vec![vec![0], vec![0, 0], vec![1], vec![0, 1]]).unwrap();
        let origin = Origin {
            expected_tokens_per_step: Some(1.75),
            calibration_sha256: Some("ab".repeat(32)),
            expected_tokens_per_second: Some(80.5),
            latency_sha256: Some("cd".repeat(32)),
        };
        let file = TreeFile { tree, origin };
        file.save(&path).unwrap();
        assert_eq!(TreeFile::load(&path).unwrap(), file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(r#"{"choices":[[0],[0,0],[1],[0,1]],"expected_tokens_per_step":1.75,"nodes":4,"#));
    }

    #[test]
    fn bare_lists_load_and_broken_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let load = |text: &str| {
            let path = dir.path().join("t.json");
            files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
            TreeFile::load(&path)
        };
        assert_eq!(load(" [[0],[0,0]]").unwrap().tree, SparseTree::chain(2).unwrap());
        let named = |text: &str| load(text).unwrap_err().to_string();
        assert!(named("{\"choices\":[[0],[2,0]]}").contains("t.json: tree choice [2, 0] has no parent [2]"));
        assert!(named("{\"choices\":[[0]],\"nodes\":2}").contains("says \"nodes\": 2, but lists 1"));
        assert!(named("{\"choises\":[[0]]}").contains("t.json is no tree file"));
        assert!(named("[[0],[-1]]").contains("t.json is no tree file"));
        assert!(TreeFile::load(&dir.path().join("no.json")).unwrap_err().to_string().contains("cannot read"));
    }
}
