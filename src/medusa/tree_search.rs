//! Greedy search of the sparse tree with the largest expected acceptance length (paper section 2.3.3). No tensors here.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::tree::{MAX_NODES, SparseTree, TreeError};

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
pub struct Found {
    /// Choices in the order they were added.
    pub tree: SparseTree,
    /// The root's token and the sum of all nodes' products.
    pub expected_tokens_per_step: f64,
}

/// A node that may be added next.
#[derive(Debug, PartialEq)]
struct Candidate {
    /// Product of the accuracies along the path.
    product: f64,
    path: Vec<usize>,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    /// The heap gives the largest product; of equals the shallower, then the smaller path.
    fn cmp(&self, other: &Self) -> Ordering {
        let ties = || other.path.len().cmp(&self.path.len()).then_with(|| other.path.cmp(&self.path));
        self.product.total_cmp(&other.product).then_with(ties)
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The best tree of `nodes` nodes, without the root, where `accuracies[h][i]` is the accuracy of guess `i` of head `h`.
///
/// A path is accepted with the product of its accuracies (the paper takes heads as independent), so the expected tokens of a
/// step are 1 (the root) plus the sum of all nodes' products. A child's product is never above its parent's: adding the best
/// node that has its parent, again and again, gives the best tree.
///
/// # Errors
/// [`SearchError`] if there is no tree of that size, or an accuracy is none.
pub fn search(accuracies: &[Vec<f64>], nodes: usize) -> Result<Found, SearchError> {
    check(accuracies, nodes)?;
    let mut candidates = BinaryHeap::new();
    let mut choices = Vec::with_capacity(nodes);
    let mut expected_tokens_per_step = 1.0;
    grow(&mut candidates, accuracies, &Candidate { product: 1.0, path: Vec::new() });
    while choices.len() < nodes {
        let Some(best) = candidates.pop() else { break }; // never: `check` counted them
        grow(&mut candidates, accuracies, &best);
        expected_tokens_per_step += best.product;
        choices.push(best.path);
    }
    Ok(Found { tree: SparseTree::new(choices)?, expected_tokens_per_step })
}

/// Offers the children of a node.
fn grow(candidates: &mut BinaryHeap<Candidate>, accuracies: &[Vec<f64>], parent: &Candidate) {
    let guesses = accuracies.get(parent.path.len()).map_or(&[][..], Vec::as_slice);
    for (child, accuracy) in guesses.iter().enumerate() {
        candidates.push(Candidate { product: parent.product * accuracy, path: [&parent.path[..], &[child]].concat() });
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

    /// The best sum of products over every tree of `nodes` nodes, by trying them all.
    fn best_of_all_trees(accuracies: &[Vec<f64>], nodes: usize) -> f64 {
        let mut all: Vec<Vec<usize>> = vec![vec![]];
        let mut level = all.clone();
        for guesses in accuracies {
            level = level.iter().flat_map(|p| (0..guesses.len()).map(|c| [&p[..], &[c]].concat())).collect();
            all.extend(level.clone());
        }
        let all = &all[1..];
        let product = |path: &Vec<usize>| path.iter().enumerate().map(|(h, &i)| accuracies[h][i]).product::<f64>();
        let subsets = (0u32..1 << all.len()).filter(|bits| bits.count_ones() as usize == nodes);
        let trees = subsets.filter_map(|bits| {
            let chosen: Vec<_> = (0..all.len()).filter(|at| bits >> at & 1 == 1).map(|at| all[at].clone()).collect();
            let sum: f64 = chosen.iter().map(product).sum();
            SparseTree::new(chosen).ok().map(|_| sum)
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
                    let best = best_of_all_trees(&accuracies, nodes);
                    prop_assert!((found.expected_tokens_per_step - best).abs() < 1e-12);
                    prop_assert_eq!(found.tree.choices().len(), nodes);
                }
                Err(error) => prop_assert!(matches!(error, SearchError::TooFewGuesses { .. }), "{error}"),
            }
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
