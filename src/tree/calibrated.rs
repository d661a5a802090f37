//! Tree search on a calibration.

use rayon::prelude::*;

use super::expected::{ExpectedTokens, MIN_TEXTS};
use super::path_counts::PathCounts;
use super::replay::{Replay, starts};
use super::search::{self, SearchError, SearchedTree};
use super::sparse_tree::SparseTree;
use crate::formats::calibration::{Calibration, DynamicRanks, JointStatistics};
use crate::formats::tree::DynamicTree;

/// Parts of the texts in cross-validation.
const FOLDS: usize = 10;

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

    /// As [`Calibration::best_tree`], with the tokens per step of texts that it was not searched on: each tenth of the texts is replayed with
    /// the tree that is searched on the others. Of older calibrations, which have no texts, and of one or two texts, the expected
    /// tokens per step are those of [`Calibration::best_tree`].
    ///
    /// # Errors
    /// As [`Calibration::best_tree`].
    pub fn cross_validated_tree(&self, nodes: usize, heads: usize) -> Result<SearchedTree, SearchError> {
        let found = self.best_tree(nodes, heads)?;
        let (runs, mut accuracies) = (&self.joint.runs, self.accuracies());
        if runs.len() < MIN_TEXTS {
            return Ok(found);
        }
        accuracies.truncate(heads);
        let folds = FOLDS.min(runs.len());
        let replayed = |fold: usize| {
            // Neighbours may be turns of one conversation: they stay together.
            let [begin, end] = [fold, fold + 1].map(|fold| fold * runs.len() / folds);
            let others = runs[..begin].iter().chain(&runs[end..]);
            let tree = search::search_replayed(&accuracies, others, nodes)?.tree;
            Ok(runs[begin..end].iter().map(|run| Replay::new(&tree, [run])).collect())
        };
        let replays: Vec<Vec<Replay>> = (0..folds).into_par_iter().map(replayed).collect::<Result<_, SearchError>>()?;
        let ExpectedTokens { per_step, interval } = ExpectedTokens::new(&replays.concat(), found.tree.max_depth());
        Ok(SearchedTree { expected_tokens_per_step: per_step, interval, ..found })
    }

    /// The trees of at most `nodes` nodes and `depth` levels that are chosen at each step, with their tokens per step; `None` if the
    /// calibration does not know them.
    pub fn dynamic_tree(&self, nodes: usize, depth: usize) -> Option<(DynamicTree, ExpectedTokens)> {
        let DynamicRanks { top_k, runs } = self.dynamic.as_ref()?;
        let replays: Vec<Replay> =
            runs.iter().map(|run| Replay::dynamic([nodes, depth], std::slice::from_ref(run))).collect();
        Some((DynamicTree { nodes, depth, top_k: *top_k }, ExpectedTokens::new(&replays, depth)))
    }

    fn listed(&self, accuracies: &[Vec<f64>]) -> PathCounts {
        let paths = self.joint.paths.iter().map(|path| (&path.path[..], path.count));
        PathCounts::listed(accuracies, self.joint.total, paths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::calibration::HeadAccuracy;

    /// Texts whose right guesses are, at every third token, guess 0 of head 1 and a guess of head 2 that only this text has.
    fn apart(texts: usize) -> Calibration {
        let guesses = 2 * texts;
        let head = |accuracy: f64| HeadAccuracy { counts: vec![], total: 1, accuracy: vec![accuracy; guesses] };
        let right = |text: usize, at: usize| if at.is_multiple_of(3) { vec![0, texts + text] } else { vec![] };
        let runs = (0..texts).map(|text| (0..30).map(|at| right(text, at)).collect()).collect();
        Calibration {
            heads: vec![head(0.5 / guesses as f64), head(0.5 / guesses as f64)],
            joint: JointStatistics { runs, ..JointStatistics::default() },
            dynamic: None,
            backbone: String::new(),
            heads_sha256: String::new(),
            tokens: 0,
            prompts: None,
            exported_from: None,
            other: serde_json::Map::new(),
        }
    }

    #[test]
    fn a_tree_is_not_judged_on_the_texts_that_it_was_searched_on() {
        let calibration = apart(12);
        let [same, others] =
            [calibration.best_tree(13, 2), calibration.cross_validated_tree(13, 2)].map(Result::unwrap);
        assert_eq!(same.tree, others.tree);
        assert_eq!((same.expected_tokens_per_step, same.interval), (3.0, None));
        assert!(others.expected_tokens_per_step < 2.5, "{}", others.expected_tokens_per_step);
        let [low, high] = others.interval.unwrap();
        assert!(low <= others.expected_tokens_per_step && others.expected_tokens_per_step <= high);
        assert_eq!(apart(2).cross_validated_tree(3, 2).unwrap(), apart(2).best_tree(3, 2).unwrap());
    }
}
