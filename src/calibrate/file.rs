//! `calibration.json`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::CalibrationError;
use crate::files;
use crate::tree::path_counts::PathCounts;
use crate::tree::replay::{Run, starts};
use crate::tree::search::{self, Found, SearchError};
use crate::tree::sparse_tree::SparseTree;

/// Most positions whose ranks are written: about 2 MB, and the tokens a step of a tree are then known to about 1 in 200.
pub(super) const MAX_POSITIONS: usize = 200_000;

/// `calibration.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// One entry a head.
    pub heads: Vec<HeadAccuracy>,
    /// Which guesses are right together.
    pub joint: Joint,
    /// The backbone, as it was named.
    pub backbone: String,
    /// SHA-256 of heads.safetensors.
    pub heads_sha256: String,
    /// Input tokens read.
    pub tokens: u64,
}

/// One head's guesses, over that head's own targets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadAccuracy {
    /// How often guess 1, 2, … was the target.
    pub counts: Vec<u64>,
    /// Targets of this head.
    pub total: u64,
    /// `counts` ÷ `total`.
    pub accuracy: Vec<f64>,
}

/// Which guesses were right together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Joint {
    /// Positions where every head has a target.
    pub total: u64,
    /// Paths of guesses that were right together there, most frequent first; every prefix of a counted path is counted too.
    pub paths: Vec<JointPath>,
    /// The texts themselves, position by position: what steps of decoding would find there. Kept up to 200,000 positions;
    /// calibrations of before have none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<Run>,
}

/// `[0, 2]`: head 1's best guess and head 2's third guess were both right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JointPath {
    /// 0-based guesses, head 1 first.
    pub path: Vec<usize>,
    /// How often.
    pub count: u64,
}

impl Calibration {
    /// Reads `calibration.json`.
    ///
    /// # Errors
    /// [`CalibrationError`] names the file.
    pub fn load(path: &Path) -> Result<Self, CalibrationError> {
        let text = fs::read_to_string(path).map_err(|source| io_error("read", path, source))?;
        serde_json::from_str(&text).map_err(|source| CalibrationError::Json { path: path.to_owned(), source })
    }

    /// Writes `calibration.json`, whole or not at all.
    ///
    /// # Errors
    /// [`CalibrationError`] names the file.
    pub fn save(&self, path: &Path) -> Result<(), CalibrationError> {
        files::write_atomic(path, |out| {
            serde_json::to_writer(&mut *out, self)?;
            writeln!(out)
        })
        .map_err(|source| io_error("write", path, source))
    }

    /// `[h][i]`: the accuracy of guess i of head h.
    pub fn accuracies(&self) -> Vec<Vec<f64>> {
        self.heads.iter().map(|head| head.accuracy.clone()).collect()
    }

    /// Whether it knows which guesses were right together.
    pub fn knows_joint(&self) -> bool {
        !(self.joint.runs.is_empty() && self.joint.paths.is_empty())
    }

    /// Leaves the accuracies alone: heads are then taken as right independently of each other.
    pub fn forget_joint(&mut self) {
        self.joint = Joint { total: 0, paths: Vec::new(), runs: Vec::new() };
    }

    /// Accuracies alone: heads are right independently of each other.
    pub fn independent(&self) -> PathCounts {
        PathCounts::new(&self.accuracies())
    }

    /// How often paths are right where steps with this tree start; in calibrations of before, over all positions alike.
    pub fn counts_for(&self, tree: &SparseTree) -> PathCounts {
        if self.joint.runs.is_empty() {
            return self.listed(&self.accuracies());
        }
        let mut counts = self.independent();
        for run in &self.joint.runs {
            starts(tree, run).for_each(|start| counts.add(&run[start]));
        }
        counts
    }

    /// The best tree of `nodes` nodes that asks the first `heads` heads at most, by all that the calibration knows: its texts; in
    /// calibrations of before, which have none, its paths.
    ///
    /// # Errors
    /// [`SearchError`] if there is no tree of that size.
    pub fn best_tree(&self, nodes: usize, heads: usize) -> Result<Found, SearchError> {
        let mut accuracies = self.accuracies();
        accuracies.truncate(heads);
        if self.joint.runs.is_empty() {
            return search::search_counted(&self.listed(&accuracies), nodes);
        }
        search::search_replayed(&accuracies, &self.joint.runs, nodes)
    }

    fn listed(&self, accuracies: &[Vec<f64>]) -> PathCounts {
        let paths = self.joint.paths.iter().map(|path| (&path.path[..], path.count));
        PathCounts::listed(accuracies, self.joint.total, paths)
    }
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> CalibrationError {
    CalibrationError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::super::Counts;
    use super::*;

    #[test]
    fn a_saved_calibration_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calibration.json");
        let mut counts = Counts::new(1, 2);
        counts.add(&[&[7, 8]], &[Some(8)]);
        let calibration = counts.sign("tiny".into(), "ab".into()).unwrap();
        calibration.save(&path).unwrap();
        assert_eq!(Calibration::load(&path).unwrap(), calibration);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(r#"{"heads":[{"counts":[0,1],"total":1,"accuracy":[0.0,1.0]}],"joint":{"total":1,"paths":[{"path":[1],"count":1}]},"backbone":"tiny","heads_sha256":"ab","tokens":0}"#), "{text}");
        assert!(Calibration::load(dir.path()).unwrap_err().to_string().starts_with("cannot read the calibration"));
    }
}
