//! Tree search on a calibration.

use super::path_counts::PathCounts;
use super::replay::{Replay, starts};
use super::search::{self, SearchError, SearchedTree};
use super::sparse_tree::SparseTree;
use crate::formats::calibration::{Calibration, DynamicRanks, JointStatistics};
use crate::formats::tree::DynamicTree;

impl Calibration {
    /// Drops the joint statistics, so that heads count as independent.
    pub fn forget_joint(&mut self) {
        self.joint = JointStatistics::default();
    }

    /// Accuracies only: heads count as independent.
    pub fn independent(&self) -> PathCounts {
        PathCounts::new(&self.accuracies())
    }

    /// How often paths are right at the positions where steps with this tree start. Older calibrations lack the texts; their
    /// counts are over all positions.
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

    /// The best tree of `nodes` nodes that uses at most the first `heads` heads, searched on the calibration's texts. Older
    /// calibrations have no texts; their path counts are used instead.
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

    /// The trees of at most `nodes` nodes and `depth` levels that are chosen at each step, with their tokens per step; `None` if the
    /// calibration does not know them.
    pub fn dynamic_tree(&self, nodes: usize, depth: usize) -> Option<(DynamicTree, f64)> {
        let DynamicRanks { top_k, runs } = self.dynamic.as_ref()?;
        let replay = Replay::dynamic([nodes, depth], runs);
        Some((DynamicTree { nodes, depth, top_k: *top_k }, replay.tokens_per_step()))
    }

    fn listed(&self, accuracies: &[Vec<f64>]) -> PathCounts {
        let paths = self.joint.paths.iter().map(|path| (&path.path[..], path.count));
        PathCounts::listed(accuracies, self.joint.total, paths)
    }
}
