//! Greedy search of the sparse tree with the largest expected acceptance length (paper section 2.3.3). No tensors here.
//!
//! A step commits its root and one token for each node whose path is right, so it commits 1 + Σ P(path) on average. A child is never
//! more probable than its parent: adding the most probable node that has its parent, again and again, gives the best tree.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::path_counts::{PathCounts, PathNode};
use super::replay::{Replay, starts};
use super::sparse_tree::{MAX_NODES, SparseTree, TreeError};
use crate::formats::calibration::RankTrace;

/// Times that texts are replayed to see where steps start. Trees repeat, or change in their last nodes, long before that.
const MAX_ROUNDS: usize = 6;

/// There is no such tree.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SearchError {
    /// Zero, or more than one pass verifies.
    #[error("a tree of {asked} nodes was asked for; expected 1 to {MAX_NODES}")]
    BadNodes {
        /// Nodes asked for.
        asked: usize,
    },
    /// The heads do not make so many guesses.
    #[error(
        "a tree of {asked} nodes was asked for, but {num_heads} heads with the calibrated guesses make only {possible}; \
         ask for fewer, or calibrate with a larger --top-k"
    )]
    TooFewGuesses {
        /// Nodes asked for.
        asked: usize,
        /// Heads there are.
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
        /// What was found.
        accuracy: f64,
    },
    /// Our own search made no tree.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// A tree and what it promises.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchedTree {
    /// Choices in the order they were added.
    pub tree: SparseTree,
    /// The root's token, and all nodes' probabilities or what a replay says.
    pub expected_tokens_per_step: f64,
}

/// A node that may be added next.
#[derive(Debug, PartialEq)]
struct Candidate {
    path: Vec<usize>,
    place: PathNode,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    /// The heap gives the largest probability; of equals the shallower, then the smaller path.
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

/// The best tree of `nodes` nodes, without the root, where `accuracies[h][i]` is the accuracy of guess `i` of head `h` and heads are
/// right independently of each other, as the paper takes them: a path's probability is the product of its accuracies.
///
/// # Errors
/// [`SearchError`] if there is no tree of that size, or an accuracy is none.
pub fn search(accuracies: &[Vec<f64>], nodes: usize) -> Result<SearchedTree, SearchError> {
    search_counted(&PathCounts::new(accuracies), nodes)
}

/// The best tree of `nodes` nodes, without the root, by how often paths were right.
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
        let Some(best) = candidates.pop() else { break }; // never: `check` counted them
        grow(&mut candidates, counts, &best);
        expected_tokens_per_step += best.place.probability;
        choices.push(best.path);
    }
    Ok(SearchedTree { tree: SparseTree::new(choices)?, expected_tokens_per_step })
}

/// The best tree of `nodes` nodes, without the root, for texts like `runs`.
///
/// A tree is right where its steps start, and where they start depends on the tree. So the first tree is searched as if steps
/// started at all tokens alike; then the texts are replayed with it and a tree is searched for the steps that this finds, until
/// trees repeat. Of all these trees the one that needs the fewest steps is taken; what it is expected to commit is what it does there.
///
/// # Errors
/// As [`search`].
pub fn search_replayed(accuracies: &[Vec<f64>], runs: &[RankTrace], nodes: usize) -> Result<SearchedTree, SearchError> {
    let mut counts = PathCounts::new(accuracies);
    runs.iter().flatten().for_each(|right| counts.add(right));
    let mut best = replayed(&counts, runs, nodes)?;
    let mut last = best.clone();
    for _ in 1..MAX_ROUNDS {
        let mut counts = PathCounts::new(accuracies);
        for run in runs {
            starts(&last.tree, run).for_each(|start| counts.add(&run[start]));
        }
        let next = replayed(&counts, runs, nodes)?;
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

fn replayed(counts: &PathCounts, runs: &[RankTrace], nodes: usize) -> Result<SearchedTree, SearchError> {
    let found = search_counted(counts, nodes)?;
    Ok(SearchedTree { expected_tokens_per_step: Replay::new(&found.tree, runs).tokens_per_step(), ..found })
}

/// Tokens that a step commits with a tree, if these counts are all that is known.
pub fn expected_tokens_per_step(tree: &SparseTree, counts: &PathCounts) -> f64 {
    node_probabilities(tree, counts).iter().sum()
}

/// How probable it is that each node is right, the root, which always is, first. 0 for guesses without an accuracy.
pub fn node_probabilities(tree: &SparseTree, counts: &PathCounts) -> Vec<f64> {
    let mut places: Vec<Option<PathNode>> = vec![Some(counts.root())];
    for node in 1..tree.len() {
        let parent = tree.parent(node).and_then(|parent| places[parent]);
        places.push(parent.zip(tree.child_index(node)).and_then(|(parent, guess)| counts.children(parent).nth(guess)));
    }
    places.into_iter().map(|place| place.map_or(0.0, |place| place.probability)).collect()
}

/// Offers the children of a node.
fn grow(candidates: &mut BinaryHeap<Candidate>, counts: &PathCounts, parent: &Candidate) {
    for (child, place) in counts.children(parent.place).enumerate() {
        candidates.push(Candidate { path: [&parent.path[..], &[child]].concat(), place });
    }
}

fn check(accuracies: &[Vec<f64>], nodes: usize) -> Result<(), SearchError> {
    if nodes == 0 || nodes > MAX_NODES {
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

    /// The best sum of probabilities over every tree of `nodes` nodes, by trying them all.
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

    /// Behind every accepted guess two more are right, and no guess is right there where steps do not start.
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
