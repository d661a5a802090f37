//! Trees from a calibration.

use super::path_counts::PathCounts;
use super::replay::starts;
use super::search::{self, SearchError, SearchedTree};
use super::sparse_tree::SparseTree;
use crate::formats::calibration::{Calibration, JointStatistics};

impl Calibration {
    /// Leaves the accuracies alone: heads are then taken as right independently of each other.
    pub fn forget_joint(&mut self) {
        self.joint = JointStatistics::default();
    }

    /// Accuracies alone: heads are right independently of each other.
    pub fn independent(&self) -> PathCounts {
        PathCounts::new(&self.accuracies())
    }

    /// How often paths are right where steps with this tree start; in older calibrations, over all positions alike.
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
    /// older calibrations, which have none, its paths.
    ///
    /// # Errors
    /// [`SearchError`] if there is no tree of that size.
    pub fn best_tree(&self, nodes: usize, heads: usize) -> Result<SearchedTree, SearchError> {
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
