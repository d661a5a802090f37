//! `tree.json`: the choices of a tree, and the speed that its search expected.

use std::path::Path;

use serde::de::Error as _;
use serde::{Deserialize, Serialize};

use super::error::{self, FormatError};
use super::sealed::sealed;
use crate::json;

const WHAT: &str = "tree file";
const EXPECTED: &str = "is no tree file; expected {\"choices\":[[0],[0,0],[1]], …} or {\"dynamic\":{\"nodes\":…,\"depth\":…,\"top_k\":…}, …} as `medusa tree` writes it, or a bare list of paths";

/// `tree.json`: the choices and their origin; a bare list of paths has only the choices. A tree that is chosen at each step has limits
/// instead of choices.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TreeFile {
    /// Of a tree that is chosen at each step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<DynamicTree>,
    /// Of a static tree: paths of 0-based guesses, head 1 first, in the order in which the search added them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<Vec<usize>>,
    /// Expected tokens per step, including the root's.
    #[serde(default)]
    pub expected_tokens_per_step: Option<f64>,
    /// The interval of the tokens per step on other texts; missing where the texts were too few, and in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_interval: Option<[f64; 2]>,
    /// Number of choices, or most nodes of a step.
    #[serde(default)]
    pub nodes: Option<usize>,
    /// SHA-256 of the calibration that the tree was searched from.
    #[serde(default)]
    pub calibration_sha256: Option<String>,
    /// Expected tokens per second, if the tree was chosen for a machine: by mean step times, as `bench` measures them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_tokens_per_second: Option<f64>,
    /// SHA-256 of the latencies that it was chosen by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_sha256: Option<String>,
    /// The trees for several texts at a time, if they were chosen for a machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_sequences: Vec<TreeOfSequences>,
}

/// The tree for a number of texts that are decoded together; with neither limits nor choices, plain decoding is the fastest.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeOfSequences {
    /// Texts.
    pub sequences: usize,
    /// As [`TreeFile::dynamic`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<DynamicTree>,
    /// As [`TreeFile::choices`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<Vec<usize>>,
    /// Of all texts together, as [`TreeFile::expected_tokens_per_second`].
    pub expected_tokens_per_second: f64,
}

/// [`DynamicTree::top_k`] by default, as in EAGLE-2.
pub const DYNAMIC_TOP_K: usize = 10;

/// A tree that is chosen at each step: the likeliest nodes by the drafter's own probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicTree {
    /// Most nodes without the root.
    pub nodes: usize,
    /// Most levels below the root: the number of heads.
    pub depth: usize,
    /// Guesses of each node that gets children, and most nodes of a level that get them.
    pub top_k: usize,
}

impl TreeFile {
    /// Choices with the expected tokens per step.
    pub fn new(choices: Vec<Vec<usize>>, expected_tokens_per_step: f64) -> Self {
        let nodes = Some(choices.len());
        Self { choices, nodes, expected_tokens_per_step: Some(expected_tokens_per_step), ..Self::default() }
    }

    /// The limits of a tree that is chosen at each step.
    pub fn chosen_at_each_step(limits: DynamicTree) -> Self {
        Self { dynamic: Some(limits), nodes: Some(limits.nodes), ..Self::default() }
    }

    /// Reads `tree.json`, or a bare JSON list of paths as in published trees. Does not check that the choices form a
    /// tree.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        let file = error::read_by(path, WHAT, EXPECTED, parse)?;
        match (file.nodes, file.dynamic.map_or(file.choices.len(), |limits| limits.nodes)) {
            (Some(written), listed) if written != listed => {
                return Err(FormatError::NodeCount { path: path.to_owned(), written, listed });
            }
            _ => {}
        }
        match file.invalid_field() {
            Some((key, expected, got)) => Err(FormatError::InvalidField {
                path: path.to_owned(),
                key: key.to_owned(),
                expected,
                got,
                remedy: "write it anew with `medusa tree`",
            }),
            None => Ok(file),
        }
    }

    /// The first number that the tree cannot have, what it could be, and what it is.
    fn invalid_field(&self) -> Option<(&'static str, String, String)> {
        let depth = self.dynamic.map_or(self.choices.iter().map(Vec::len).max().unwrap_or(0), |limits| limits.depth);
        let most = 1.0 + depth as f64; // each level and the root's token
        if let Some(tokens) = self.expected_tokens_per_step.filter(|tokens| !(1.0..=most + 1e-6).contains(tokens)) {
            return Some((
                "expected_tokens_per_step",
                format!("1 to {most} tokens of {depth} levels"),
                tokens.to_string(),
            ));
        }
        let is_interval = |[low, high]: &[f64; 2]| 1.0 <= *low && low <= high && *high <= most + 1e-6;
        if let Some([low, high]) = self.expected_interval.filter(|interval| !is_interval(interval)) {
            let expected = format!("two rising numbers of 1 to {most} tokens");
            return Some(("expected_interval", expected, format!("{low} and {high}")));
        }
        let more_speeds = self.by_sequences.iter().map(|batch| batch.expected_tokens_per_second);
        let mut speeds = self.expected_tokens_per_second.into_iter().chain(more_speeds);
        if let Some(speed) = speeds.find(|speed| !(speed.is_finite() && *speed > 0.0)) {
            return Some(("expected_tokens_per_second", "a number above 0".to_owned(), speed.to_string()));
        }
        super::twice(self.by_sequences.iter().map(|batch| batch.sequences))
            .map(|twice| ("by_sequences", "each number of sequences once".to_owned(), format!("{twice} twice")))
    }

    /// `tree.json` as one line of JSON.
    pub fn to_json(&self) -> String {
        sealed(&serde_json::to_string(self).expect("numbers, lists and texts are JSON"))
    }

    /// Writes `tree.json` atomically.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn save(&self, path: &Path) -> Result<(), FormatError> {
        error::write(path, WHAT, &self.to_json())
    }
}

fn parse(text: &str) -> Result<TreeFile, serde_json::Error> {
    if text.trim_start().starts_with('[') {
        return Ok(TreeFile { choices: serde_json::from_str(text)?, ..TreeFile::default() });
    }
    let file: TreeFile = json::from_str(text)?;
    match (file.dynamic, file.choices.is_empty()) {
        (None, false) | (Some(_), true) => Ok(file),
        (None, true) => Err(serde_json::Error::custom("it has neither \"choices\" nor \"dynamic\"")),
        (Some(_), false) => Err(serde_json::Error::custom("it has both \"choices\" and \"dynamic\"")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_saved_tree_comes_back_in_the_order_of_the_search() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tree.json");
        let file = TreeFile {
            calibration_sha256: Some("ab".repeat(32)),
            expected_tokens_per_second: Some(80.5),
            latency_sha256: Some("cd".repeat(32)),
            ..TreeFile::new(vec![vec![0], vec![0, 0], vec![1], vec![0, 1]], 1.75)
        };
        file.save(&path).unwrap();
        assert_eq!(TreeFile::load(&path).unwrap(), file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(r#"{"choices":[[0],[0,0],[1],[0,1]],"expected_tokens_per_step":1.75,"nodes":4,"#));
    }

    #[test]
    fn bare_lists_load_and_broken_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let load = |text: &str| {
            let path = dir.path().join("t.json");
            crate::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
            TreeFile::load(&path)
        };
        assert_eq!(load(" [[0],[0,0]]").unwrap().choices, [vec![0], vec![0, 0]]);
        let named = |text: &str| load(text).unwrap_err().to_string();
        assert!(named("{\"choices\":[[0]],\"nodes\":2}").contains("says \"nodes\": 2, but lists 1"));
        assert!(named("{\"choises\":[[0]]}").contains("t.json is no tree file"));
        assert!(named("[[0],[-1]]").contains("t.json is no tree file"));
        let dynamic = r#"{"dynamic":{"nodes":8,"depth":4,"top_k":10},"nodes":8}"#;
        assert_eq!(load(dynamic).unwrap().dynamic, Some(DynamicTree { nodes: 8, depth: 4, top_k: 10 }));
        assert!(named(&dynamic.replace("\"nodes\":8}", "\"nodes\":9}")).contains("says \"nodes\": 9, but lists 8"));
        assert!(named(&dynamic.replace("top_k", "top")).contains("t.json is no tree file"));
        assert!(
            named(r#"{"dynamic":{"nodes":1,"depth":1,"top_k":1},"choices":[[0]]}"#).contains("t.json is no tree file")
        );
        assert!(TreeFile::load(&dir.path().join("no.json")).unwrap_err().to_string().contains("cannot read"));
    }

    #[test]
    fn numbers_that_the_tree_cannot_have_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tree.json");
        let error = |text: &str| {
            crate::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
            TreeFile::load(&path).err().map(|error| error.to_string())
        };
        let json = |numbers: &str| format!("{{\"choices\": [[0], [0, 1]], {numbers}}}");
        assert_eq!(error(&json("\"expected_tokens_per_step\": 3.0, \"expected_tokens_per_second\": 9")), None);
        for (numbers, expected) in [
            (
                "\"expected_tokens_per_step\": 0.5",
                "tree.json: expected_tokens_per_step: expected 1 to 3 tokens of 2 levels, got 0.5",
            ),
            (
                "\"expected_tokens_per_step\": 5214135690593349",
                "got 5214135690593349; the file is damaged: write it anew",
            ),
            ("\"expected_tokens_per_second\": -1", "expected_tokens_per_second: expected a number above 0, got -1"),
            (
                "\"by_sequences\": [{\"sequences\": 4, \"expected_tokens_per_second\": 1}, {\"sequences\": 4, \"expected_tokens_per_second\": 1}]",
                "by_sequences: expected each number of sequences once, got 4 twice",
            ),
        ] {
            let error = error(&json(numbers)).unwrap_or_else(|| panic!("{numbers} is accepted"));
            assert!(error.contains(expected), "{error}");
        }
    }
}
