//! Greedy search of the sparse tree with the largest expected acceptance length (paper section 2.3.3). No tensors here.
//!
//! A step commits its root and one token for each accepted node, so it commits 1 + Σ P(path) on average. A child is never more
//! probable than its parent, so adding the most probable node whose parent is in the tree, again and again, gives the best tree.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::path_counts::{PathCounts, PathNode};
use super::replay::{Replay, starts};
use super::sparse_tree::{SparseTree, TreeError};
use crate::bounds::TREE_NODES;
use crate::formats::calibration::RankTrace;

/// How often texts are replayed to find where steps start. Trees repeat, or change only in their last nodes, long before that.
const MAX_ROUNDS: usize = 6;

/// The requested tree cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SearchError {
    /// Zero nodes, or more than one pass can verify.
    #[error("a tree of {asked} nodes was asked for; expected 1 to {TREE_NODES}")]
    BadNodes { asked: usize },
    /// More nodes than the heads' guesses can fill.
    #[error(
        "a tree of {asked} nodes was asked for, but {num_heads} heads with the calibrated guesses make only {possible}; \
         ask for fewer, or calibrate with a larger --top-k"
    )]
    TooFewGuesses {
        asked: usize,
        num_heads: usize,
        /// Nodes of the full tree.
        possible: usize,
    },
    /// An accuracy outside of 0 to 1.
    #[error("accuracy of guess {guess} of head {head} is {accuracy}; expected 0 to 1")]
    BadAccuracy {
        /// 1-based.
        head: usize,
        /// 1-based.
        guess: usize,
        accuracy: f64,
    },
    /// The search itself built an invalid tree: a bug.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// A tree and its expected tokens per step.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchedTree {
    /// Its choices are in the order in which they were added.
    pub tree: SparseTree,
    /// 1 for the root plus the probabilities of all nodes, or the mean of a replay.
    pub expected_tokens_per_step: f64,
    /// Of other texts, where it is known ([`super::expected::ExpectedTokens::interval`]).
    pub interval: Option<[f64; 2]>,
}

/// A node that may be added next.
#[derive(Debug, PartialEq)]
struct Candidate {
    path: Vec<usize>,
    place: PathNode,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    /// The heap yields the largest probability; ties go to the shallower, then the smaller path.
    fn cmp(&self, other: &Self) -> Ordering {
        let ties = || other.path.len().cmp(&self.path.len()).then_with(|| other.path.cmp(&self.path));
        self.place.probability.total_cmp(&other.place.probability).then_with(ties)
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The best tree of `nodes` nodes, without the root, if heads are independent, as the paper assumes: a path's probability is then
/// the product of its accuracies. `accuracies[h][i]` is the accuracy of guess `i` of head `h`.
///
/// # Errors
/// [`SearchError`] if there is no tree of that size, or an accuracy is not between 0 and 1.
pub fn search(accuracies: &[Vec<f64>], nodes: usize) -> Result<SearchedTree, SearchError> {
    search_counted(&PathCounts::new(accuracies), nodes)
}

/// The best tree of `nodes` nodes, without the root, according to path counts.
///
/// # Errors
/// As [`search`].
pub fn search_counted(counts: &PathCounts, nodes: usize) -> Result<SearchedTree, SearchError> {
    check(counts.accuracies(), nodes)?;
    let mut candidates = BinaryHeap::new();
    let mut choices = Vec::with_capacity(nodes);
    let mut expected_tokens_per_step = 1.0;
    grow(&mut candidates, counts, &Candidate { path: Vec::new(), place: counts.root() });
    while choices.len() < nodes {
        let Some(best) = candidates.pop() else { break }; // never: `check` has counted them
        grow(&mut candidates, counts, &best);
        expected_tokens_per_step += best.place.probability;
        choices.push(best.path);
    }
    Ok(SearchedTree { tree: SparseTree::new(choices)?, expected_tokens_per_step, interval: None })
}

/// The best tree of `nodes` nodes, without the root, for texts like `runs`.
///
/// The value of a tree depends on where its steps start, which in turn depends on the tree. The first search therefore treats
/// every token as a start. Each further round replays the texts with the last tree and searches again on the starts that it
/// found, until a tree repeats. The result is the tree with the fewest steps; its expected tokens per step are those of its
/// replay.
///
/// # Errors
/// As [`search`].
pub fn search_replayed<'r>(
    accuracies: &[Vec<f64>],
    runs: impl IntoIterator<Item = &'r RankTrace> + Clone,
    nodes: usize,
) -> Result<SearchedTree, SearchError> {
    let mut counts = PathCounts::new(accuracies);
    runs.clone().into_iter().flatten().for_each(|right| counts.add(right));
    let mut best = replayed(&counts, runs.clone(), nodes)?;
    let mut last = best.clone();
    for _ in 1..MAX_ROUNDS {
        let mut counts = PathCounts::new(accuracies);
        for run in runs.clone() {
            starts(&last.tree, run).for_each(|start| counts.add(&run[start]));
        }
        let next = replayed(&counts, runs.clone(), nodes)?;
        if next.expected_tokens_per_step > best.expected_tokens_per_step {
            best = next.clone();
        }
        if next.tree.same_nodes(&last.tree) {
            break;
        }
        last = next;
    }
    Ok(best)
}

fn replayed<'r>(
    counts: &PathCounts,
    runs: impl IntoIterator<Item = &'r RankTrace>,
    nodes: usize,
) -> Result<SearchedTree, SearchError> {
    let found = search_counted(counts, nodes)?;
    Ok(SearchedTree { expected_tokens_per_step: Replay::new(&found.tree, runs).tokens_per_step(), ..found })
}

/// Mean number of tokens that a step with `tree` commits, according to `counts`.
pub fn expected_tokens_per_step(tree: &SparseTree, counts: &PathCounts) -> f64 {
    node_probabilities(tree, counts).iter().sum()
}

/// Probability that each node is right, starting with the root, which always is. 0 for guesses without an accuracy.
pub fn node_probabilities(tree: &SparseTree, counts: &PathCounts) -> Vec<f64> {
    let mut places: Vec<Option<PathNode>> = vec![Some(counts.root())];
    for node in 1..tree.len() {
        let parent = tree.parent(node).and_then(|parent| places[parent]);
        places.push(parent.zip(tree.child_index(node)).and_then(|(parent, guess)| counts.children(parent).nth(guess)));
    }
    places.into_iter().map(|place| place.map_or(0.0, |place| place.probability)).collect()
}

/// Adds a node's children to the candidates.
fn grow(candidates: &mut BinaryHeap<Candidate>, counts: &PathCounts, parent: &Candidate) {
    for (child, place) in counts.children(parent.place).enumerate() {
        candidates.push(Candidate { path: [&parent.path[..], &[child]].concat(), place });
    }
}

fn check(accuracies: &[Vec<f64>], nodes: usize) -> Result<(), SearchError> {
    if nodes == 0 || nodes > TREE_NODES {
        return Err(SearchError::BadNodes { asked: nodes });
    }
    for (head, guesses) in accuracies.iter().enumerate() {
        if let Some(guess) = guesses.iter().position(|accuracy| !(0.0..=1.0).contains(accuracy)) {
            let accuracy = guesses[guess];
            return Err(SearchError::BadAccuracy { head: head + 1, guess: guess + 1, accuracy });
        }
    }
    let (_, possible) = accuracies.iter().fold((1usize, 0usize), |(level, all), guesses| {
        let level = level.saturating_mul(guesses.len());
        (level, all.saturating_add(level))
    });
    if nodes > possible {
        return Err(SearchError::TooFewGuesses { asked: nodes, num_heads: accuracies.len(), possible });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::replay::strategy::runs;

    /// The largest sum of probabilities over all trees of `nodes` nodes, by brute force.
    fn best_of_all_trees(counts: &PathCounts, nodes: usize) -> f64 {
        let mut all: Vec<Vec<usize>> = vec![vec![]];
        let mut level = all.clone();
        for guesses in counts.accuracies() {
            level = level.iter().flat_map(|p| (0..guesses.len()).map(|c| [&p[..], &[c]].concat())).collect();
            all.extend(level.clone());
        }
        let all = &all[1..];
        let place = |at: PathNode, &guess: &usize| counts.children(at).nth(guess).unwrap();
        let probability = |path: &Vec<usize>| path.iter().fold(counts.root(), place).probability;
        let probabilities: Vec<f64> = all.iter().map(probability).collect();
        let subsets = (0u32..1 << all.len()).filter(|bits| bits.count_ones() as usize == nodes);
        let trees = subsets.filter_map(|bits| {
            let chosen: Vec<usize> = (0..all.len()).filter(|at| bits >> at & 1 == 1).collect();
            let choices = chosen.iter().map(|&at| all[at].clone()).collect();
            SparseTree::new(choices).ok().map(|_| chosen.iter().map(|&at| probabilities[at]).sum())
        });
        1.0 + trees.fold(0.0, f64::max)
    }

    fn accuracies(heads: usize, top_k: usize) -> impl Strategy<Value = Vec<Vec<f64>>> {
        // Tenths, so that ties, zeros and ones are common.
        let accuracy = (0u8..=10).prop_map(|tenths| f64::from(tenths) / 10.0);
        proptest::collection::vec(proptest::collection::vec(accuracy, 1..=top_k), 1..=heads)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_greedy_tree_is_the_best_of_all_trees(accuracies in accuracies(3, 2), nodes in 1usize..8) {
            match search(&accuracies, nodes) {
                Ok(found) => {
                    let best = best_of_all_trees(&PathCounts::new(&accuracies), nodes);
                    prop_assert!((found.expected_tokens_per_step - best).abs() < 1e-12);
                    prop_assert_eq!(found.tree.choices().len(), nodes);
                }
                Err(error) => prop_assert!(matches!(error, SearchError::TooFewGuesses { .. }), "{error}"),
            }
        }

        #[test]
        fn the_greedy_tree_is_the_best_where_heads_are_right_together(runs in runs(3, 2), nodes in 1usize..8) {
            let mut counts = PathCounts::new(&[vec![0.5, 0.2], vec![0.4, 0.3], vec![0.3, 0.3]]);
            runs.iter().flatten().for_each(|right| counts.add(right));
            let found = search_counted(&counts, nodes).unwrap();
            prop_assert!((found.expected_tokens_per_step - best_of_all_trees(&counts, nodes)).abs() < 1e-12);
            prop_assert!((found.expected_tokens_per_step - expected_tokens_per_step(&found.tree, &counts)).abs() < 1e-12);
        }

        #[test]
        fn the_replayed_tree_is_no_worse_than_the_counted_one(runs in runs(4, 3), nodes in 1usize..30) {
            let accuracies = vec![vec![0.5, 0.2, 0.1]; 4];
            let mut counts = PathCounts::new(&accuracies);
            runs.iter().flatten().for_each(|right| counts.add(right));
            let counted = search_counted(&counts, nodes).unwrap();
            let found = search_replayed(&accuracies, &runs, nodes).unwrap();
            let measured = |tree| Replay::new(tree, &runs).tokens_per_step();
            prop_assert_eq!(found.expected_tokens_per_step, measured(&found.tree));
            prop_assert!(measured(&found.tree) >= measured(&counted.tree));
        }

        #[test]
        fn one_node_more_keeps_the_tree_and_never_loses(accuracies in accuracies(5, 10), nodes in 1usize..64) {
            if let (Ok(small), Ok(large)) = (search(&accuracies, nodes), search(&accuracies, nodes + 1)) {
                prop_assert_eq!(small.tree.choices(), &large.tree.choices()[..nodes]);
                prop_assert!(large.expected_tokens_per_step >= small.expected_tokens_per_step);
            }
        }
    }

    #[test]
    fn ties_are_broken_by_depth_then_path() {
        let found = search(&[vec![0.5, 0.5], vec![1.0, 1.0]], 6).unwrap();
        let expected: [&[usize]; 6] = [&[0], &[1], &[0, 0], &[0, 1], &[1, 0], &[1, 1]];
        assert_eq!(found.tree.choices(), expected);
        assert_eq!(found.expected_tokens_per_step, 1.0 + 6.0 * 0.5);
    }

    /// Guess 1 of both heads is right at every third position, where steps start. In between guess 0 is right, which only a count
    /// over all positions sees.
    #[test]
    fn the_search_looks_where_steps_start() {
        let run: RankTrace = (0..60).map(|at| if at % 3 == 0 { vec![1, 1] } else { vec![0; 2 - at % 3] }).collect();
        let accuracies = vec![vec![0.4, 0.3], vec![0.4, 0.3]];
        let mut counts = PathCounts::new(&accuracies);
        run.iter().for_each(|right| counts.add(right));
        let alike = search_counted(&counts, 2).unwrap();
        let found = search_replayed(&accuracies, &[run], 2).unwrap();
        assert_eq!(alike.tree.choices(), [vec![0], vec![1]]);
        assert_eq!(found.tree.choices(), [vec![1], vec![1, 1]]);
        assert_eq!(found.expected_tokens_per_step, 3.0);
    }

    #[test]
    fn impossible_searches_say_why() {
        let heads = [vec![0.5, 0.2], vec![0.4, 0.1]];
        let error = search(&heads, 7).unwrap_err();
        assert!(error.to_string().contains("2 heads with the calibrated guesses make only 6"), "{error}");
        assert_eq!(search(&heads, 0), Err(SearchError::BadNodes { asked: 0 }));
        assert_eq!(search(&[], 1), Err(SearchError::TooFewGuesses { asked: 1, num_heads: 0, possible: 0 }));
        assert!(matches!(search(&[vec![f64::NAN]], 1), Err(SearchError::BadAccuracy { head: 1, guess: 1, .. })));
    }
}
