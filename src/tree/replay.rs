//! Replays decoding with a tree on a known text and counts the steps. No tensors here.
//!
//! Greedy decoding commits the backbone's own text whatever the tree, so the text and the heads' guesses at every token determine
//! the steps of any tree. Steps start after a miss, where guessing is harder than elsewhere, so a mean over all tokens
//! overestimates the tokens per step.

use super::sparse_tree::SparseTree;
use crate::formats::calibration::{DynamicTrace, RankTrace};

/// Steps and committed tokens of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replay {
    pub tokens: usize,
    pub steps: usize,
}

impl Replay {
    /// Replays all of `runs` with `tree`.
    pub fn new<'r>(tree: &SparseTree, runs: impl IntoIterator<Item = &'r RankTrace>) -> Self {
        let add = |replay: Self, run: &RankTrace| Self {
            tokens: replay.tokens + run.len(),
            steps: replay.steps + starts(tree, run).count(),
        };
        runs.into_iter().fold(Self::default(), add)
    }

    /// Replays texts with trees of at most `nodes` nodes and `depth` levels that are chosen at each step.
    pub fn dynamic([nodes, depth]: [usize; 2], runs: &[DynamicTrace]) -> Self {
        let mut replay = Self { tokens: runs.iter().map(Vec::len).sum(), steps: 0 };
        for run in runs {
            let mut next = 0;
            while let Some(right) = run.get(next) {
                next += 1 + held(right, [nodes, depth]);
                replay.steps += 1;
            }
        }
        replay
    }

    /// Mean number of tokens that a step commits; 0 without text.
    pub fn tokens_per_step(&self) -> f64 {
        if self.steps == 0 { 0.0 } else { self.tokens as f64 / self.steps as f64 }
    }
}

/// Positions of the tokens that are roots of steps.
pub fn starts<'a>(tree: &'a SparseTree, run: &'a RankTrace) -> impl Iterator<Item = usize> + 'a {
    let mut next = 0;
    std::iter::from_fn(move || {
        let right = run.get(next)?;
        let start = next;
        next += 1 + accepted(tree, right);
        Some(start)
    })
}

/// How many right guesses a tree that is chosen at each step holds.
fn held(right: &[Vec<usize>], [nodes, depth]: [usize; 2]) -> usize {
    let levels = right.iter().take(depth).enumerate();
    let holds = |(level, ranks): (usize, &Vec<usize>)| ranks.get(depth - 1 - level).is_some_and(|&rank| rank < nodes);
    levels.take_while(|&level| holds(level)).count()
}

/// Number of guesses that a step accepts, given the right guess of each head.
fn accepted(tree: &SparseTree, right: &[usize]) -> usize {
    let mut at = 0;
    for &rank in right {
        match tree.children(at).find(|&child| tree.child_index(child) == Some(rank)) {
            Some(child) => at = child,
            None => break,
        }
    }
    tree.depth(at)
}

#[cfg(test)]
pub(crate) mod strategy {
    use proptest::prelude::*;

    use crate::formats::calibration::RankTrace;

    /// Texts with random ranks, which never reach past the end of their text.
    pub(crate) fn runs(heads: usize, top_k: usize) -> impl Strategy<Value = Vec<RankTrace>> {
        let right = proptest::collection::vec(0..top_k, 0..=heads);
        let run = proptest::collection::vec(right, 1..40).prop_map(|mut run: RankTrace| {
            let length = run.len();
            run.iter_mut().enumerate().for_each(|(at, right)| right.truncate(length - 1 - at));
            run
        });
        proptest::collection::vec(run, 1..8)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::sparse_tree::strategy::trees;

    #[test]
    fn a_step_starts_behind_the_last_accepted_guess() {
        let tree = SparseTree::new(vec![vec![0], vec![1], vec![1, 0]]).unwrap();
        let run: RankTrace = vec![vec![1, 0], vec![0], vec![0], vec![2, 0], vec![0, 1], vec![0], vec![]];
        assert_eq!(starts(&tree, &run).collect::<Vec<_>>(), [0, 3, 4, 6]);
        let replay = Replay::new(&tree, &[run.clone(), run]);
        assert_eq!((replay, replay.tokens_per_step()), (Replay { tokens: 14, steps: 8 }, 1.75));
        assert_eq!(Replay::new(&tree, &[]).tokens_per_step(), 0.0);
    }

    #[test]
    fn a_tree_chosen_at_each_step_holds_the_guesses_before_its_size() {
        // Ranks with 1, 2 and 3 levels of the right guesses of levels 1, 2 and 3.
        let run: DynamicTrace = vec![vec![vec![0, 1, 1], vec![3, 5], vec![9]], vec![], vec![vec![0, 0, 0]], vec![]];
        let steps = |nodes, depth| Replay::dynamic([nodes, depth], std::slice::from_ref(&run)).steps;
        assert_eq!(
            [steps(1, 1), steps(1, 2), steps(2, 2), steps(4, 2), steps(5, 3), steps(6, 3), steps(10, 3)],
            [2, 3, 2, 2, 2, 2, 1]
        );
        assert_eq!(Replay::dynamic([10, 3], &[run.clone(), run]).tokens_per_step(), 4.0);
    }

    proptest! {
        #[test]
        fn the_steps_share_out_the_text(runs in strategy::runs(4, 3), tree in trees(20, 4, 3)) {
            for run in &runs {
                let committed: usize = starts(&tree, run).map(|start| 1 + accepted(&tree, &run[start])).sum();
                prop_assert_eq!(committed, run.len());
            }
        }
    }
}
