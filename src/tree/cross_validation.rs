//! Tokens per step on texts that the tree was not searched on, by two-fold cross-validation. No tensors here.

use super::rank_counts::RankCounts;
use super::replay::Replay;
use super::search::search_replayed;
use super::sparse_tree::SparseTree;
use crate::formats::metrics::MetricsLine;
use crate::plural::counted;

/// Nodes of the trees, unless the heads' guesses make fewer.
const NODES: usize = 63;

/// Guesses of each head that a tree may use, as in `medusa calibrate`.
pub const TOP_K: usize = 10;

/// The counts of each half of the rows.
#[derive(Debug, PartialEq)]
pub struct CrossValidation {
    folds: [RankCounts; 2],
}

/// The half (0 or 1) that a row (0-based) belongs to: rows take turns.
pub fn half_of(row: usize) -> usize {
    row % 2
}

impl CrossValidation {
    /// No counts yet, for `num_heads` heads.
    pub fn new(num_heads: usize) -> Self {
        Self { folds: [(); 2].map(|()| RankCounts::new(num_heads, TOP_K)) }
    }

    /// The counts of the half that a row (0-based) belongs to.
    pub fn fold_of(&mut self, row: usize) -> &mut RankCounts {
        &mut self.folds[half_of(row)]
    }

    /// The tree of each half is replayed on the other half: labelled tokens of all rows ÷ steps of both replays. `None` if
    /// head 1 has no target in one of the halves.
    pub fn tokens_per_step(&self) -> Option<f64> {
        let [first, second] = &self.folds;
        let [first_tree, second_tree] = [best_tree(first)?, best_tree(second)?];
        let replays = [Replay::new(&first_tree, second.runs()), Replay::new(&second_tree, first.runs())];
        let joined =
            Replay { tokens: replays.map(|r| r.tokens).iter().sum(), steps: replays.map(|r| r.steps).iter().sum() };
        Some(joined.tokens_per_step())
    }
}

/// The tokens per step of an evaluation, with the size of their trees; `None` if it has none.
pub fn in_words(line: &MetricsLine) -> Option<String> {
    let nodes = counted(nodes(line.head_top1.len()), "node");
    line.tokens_per_step.map(|tokens| format!("{tokens:.2} tokens per step with the best tree of {nodes}"))
}

/// Nodes of the best trees of this many heads.
fn nodes(num_heads: usize) -> usize {
    let levels = std::iter::successors(Some(TOP_K), |level| Some(level.saturating_mul(TOP_K))).take(num_heads);
    NODES.min(levels.fold(0, usize::saturating_add))
}

/// `None` if head 1 never had a target.
fn best_tree(counts: &RankCounts) -> Option<SparseTree> {
    let accuracies = counts.accuracies();
    let nodes = nodes(accuracies.len());
    (nodes > 0).then(|| search_replayed(&accuracies, counts.runs(), nodes).expect("a tree of possible size").tree)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::rank_counts::RankedPosition;
    use super::*;
    use crate::tree::replay::strategy::runs;

    fn text(run: &[Vec<usize>], heads: usize) -> Vec<RankedPosition> {
        let ranks = |at: usize, right: &Vec<usize>| {
            let miss = |head: usize| (at + head + 1 < run.len()).then_some(TOP_K);
            (0..heads).map(|head| right.get(head).copied().or_else(|| miss(head))).collect()
        };
        run.iter().enumerate().map(|(at, right)| RankedPosition { is_step: true, ranks: ranks(at, right) }).collect()
    }

    fn judged(runs: &[Vec<Vec<usize>>], heads: usize) -> Option<f64> {
        let mut rows = CrossValidation::new(heads);
        runs.iter().enumerate().for_each(|(row, run)| rows.fold_of(row).add_text(text(run, heads)));
        rows.tokens_per_step()
    }

    #[test]
    fn the_tree_is_not_judged_on_the_rows_that_it_was_searched_on() {
        // With one head every tree has all 10 guesses: 2 tokens a step, except the one at a text's end.
        let always = vec![vec![0], vec![0], vec![0], vec![]];
        assert_eq!(judged(&[always.clone(), always.clone()], 1), Some(2.0));
        // Two heads, whose right paths differ between the halves: 63 of 110 nodes do not cover what the other half needs.
        let path = |second: usize| -> Vec<Vec<usize>> {
            let right = |at: usize| if at.is_multiple_of(3) { vec![9, second] } else { vec![] };
            (0..300).map(right).collect()
        };
        let apart = judged(&[path(8), path(9)], 2).unwrap();
        let alike = judged(&[path(9), path(9)], 2).unwrap();
        assert_eq!(alike, 3.0);
        assert!(apart < 2.0, "{apart}");
    }

    #[test]
    fn without_a_target_in_both_halves_there_is_no_number() {
        assert_eq!(judged(&[], 2), None);
        let row = vec![vec![0], vec![]];
        assert_eq!(judged(std::slice::from_ref(&row), 1), None);
        assert_eq!(judged(&[row.clone(), vec![vec![]]], 1), None, "a row of one token has no target");
        assert_eq!(judged(&[row.clone(), row], 4), Some(2.0), "heads 2 to 4 have no target");
    }

    proptest! {
        #[test]
        fn a_step_commits_one_token_to_one_more_than_the_heads(runs in runs(3, 3)) {
            if let Some(tokens) = judged(&runs, 3) {
                prop_assert!((1.0..=4.0).contains(&tokens));
            }
        }
    }

    #[test]
    fn the_size_of_the_tree_is_reported() {
        let words = |heads: usize| {
            let top1 = vec!["0.1"; heads].join(",");
            let line = format!(
                r#"{{"split":"validation","step":1,"tokens_per_step":1.484,"head_top1":[{top1}],"head_top5":[]}}"#
            );
            in_words(&serde_json::from_str(&line).unwrap()).unwrap()
        };
        assert_eq!(words(3), "1.48 tokens per step with the best tree of 63 nodes");
        assert_eq!(words(1), "1.48 tokens per step with the best tree of 10 nodes");
    }
}
