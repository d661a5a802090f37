//! Trees chosen at each step (EAGLE-2, Li et al. 2024): level by level, the likeliest nodes so far get children; the tree is the likeliest
//! of all nodes, by the product of the probabilities that the drafter gives the guesses on their paths. No tensors here.
//!
//! A child is never likelier than its parent, so the N likeliest nodes form a tree. Which N does not matter to the order of the nodes: the
//! tree of 8 nodes is the beginning of the tree of 63.

use std::cmp::Ordering;

use super::token_tree::TokenTree;
use crate::formats::tree::DynamicTree;

/// A token that a drafter guesses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LikelyToken {
    pub token: i64,
    /// The logarithm of its probability, given that the guesses before it are right.
    pub log_p: f32,
}

impl LikelyToken {
    /// No guess.
    pub const NONE: Self = Self { token: 0, log_p: f32::NEG_INFINITY };
}

/// A node that is to get children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrontierNode {
    /// Its parent's place in the frontier before; 0 for the root.
    pub parent: usize,
    pub token: i64,
}

/// A tree that is being chosen.
#[derive(Debug)]
pub struct GrowingTree {
    limits: DynamicTree,
    /// The root, then the candidates level by level, a parent's children best first.
    nodes: Vec<GrownNode>,
    /// The likeliest candidates, best first, at most as many as the tree may have.
    best: Vec<usize>,
    /// The candidates that get children next, best first.
    frontier: Vec<usize>,
    /// Levels so far.
    depth: usize,
}

#[derive(Debug, Clone, Copy)]
struct GrownNode {
    parent: usize,
    /// Its parent's place in its frontier.
    parent_in_frontier: usize,
    token: i64,
    depth: usize,
    /// Of its whole path.
    log_p: f32,
}

impl GrowingTree {
    /// Only the root.
    pub fn new(root: i64, limits: DynamicTree) -> Self {
        let root = GrownNode { parent: 0, parent_in_frontier: 0, token: root, depth: 0, log_p: 0.0 };
        Self { limits, nodes: vec![root], best: vec![], frontier: vec![0], depth: 0 }
    }

    /// The nodes that get children next, best first; empty when the tree is done.
    pub fn frontier(&self) -> impl ExactSizeIterator<Item = FrontierNode> {
        let grown = |&node: &usize| self.nodes[node];
        self.frontier
            .iter()
            .map(grown)
            .map(|GrownNode { parent_in_frontier, token, .. }| FrontierNode { parent: parent_in_frontier, token })
    }

    /// Adds a level: of each node of the frontier, as many guesses, best first. Those of probability 0 are left out.
    pub fn grow(&mut self, guesses: &[LikelyToken]) {
        let (first, each) = (self.nodes.len(), guesses.len() / self.frontier.len().max(1));
        self.depth += 1;
        for (at, guesses) in guesses.chunks_exact(each.max(1)).enumerate() {
            let parent = self.frontier[at];
            for guess in guesses.iter().filter(|guess| likelihood(guess) > f32::NEG_INFINITY) {
                let log_p = self.nodes[parent].log_p + likelihood(guess);
                if self.is_full() && log_p <= self.least() {
                    break; // and neither are the guesses after it likelier
                }
                let depth = self.depth;
                self.nodes.push(GrownNode { parent, parent_in_frontier: at, token: guess.token, depth, log_p });
            }
        }
        let mut level: Vec<usize> = (first..self.nodes.len()).collect();
        self.sort(&mut level);
        self.keep_best(&level);
        let last = self.best.last().copied();
        let kept = |&node: &usize| last.is_some_and(|last| self.order(node, last).is_le());
        let at_deepest = self.depth == self.limits.depth;
        self.frontier =
            if at_deepest { vec![] } else { level.into_iter().filter(kept).take(self.limits.top_k).collect() };
    }

    fn keep_best(&mut self, level: &[usize]) {
        let mut best = std::mem::take(&mut self.best);
        best.extend(level);
        self.sort(&mut best);
        best.truncate(self.limits.nodes);
        self.best = best;
    }

    fn is_full(&self) -> bool {
        self.best.len() == self.limits.nodes
    }

    /// Of the tree's nodes, the least likely one's.
    fn least(&self) -> f32 {
        self.best.last().map_or(f32::INFINITY, |&node| self.nodes[node].log_p)
    }

    fn sort(&self, nodes: &mut [usize]) {
        nodes.sort_unstable_by(|&a, &b| self.order(a, b));
    }

    /// Likelier nodes first; among equals, parents before children.
    fn order(&self, a: usize, b: usize) -> Ordering {
        self.nodes[b].log_p.total_cmp(&self.nodes[a].log_p).then(a.cmp(&b))
    }

    /// The tree, best guesses first.
    pub fn chosen(&self) -> TokenTree {
        let mut tree = TokenTree::new(self.nodes[0].token);
        let mut places = vec![0; self.nodes.len()];
        for &node in &self.best {
            let GrownNode { parent, token, .. } = self.nodes[node];
            places[node] = tree.add(places[parent], token);
        }
        tree
    }

    /// How many candidates come before each node of a path that starts below the root, by the deepest level that the tree may have: entry
    /// `[d][l]` counts those of levels 1 to d + 1 + l before the node at depth d + 1. The path ends where it leaves the candidates.
    pub fn ranks(&self, path: &[i64]) -> Vec<Vec<usize>> {
        let (mut at, mut ranks) = (0, vec![]);
        for (depth, &token) in (1..).zip(path) {
            let is_next = |node: &&usize| self.nodes[**node].parent == at && self.nodes[**node].token == token;
            let Some(&next) = self.best.iter().find(is_next) else { break };
            let before: Vec<usize> = self.best.iter().copied().take_while(|&node| node != next).collect();
            let up_to = |level| before.iter().filter(|&&node| self.nodes[node].depth <= level).count();
            ranks.push((depth..=self.depth).map(up_to).collect());
            at = next;
        }
        ranks
    }
}

/// At most 0, so that a child is never likelier than its parent; NaN is as unlikely as can be.
fn likelihood(guess: &LikelyToken) -> f32 {
    if guess.log_p.is_nan() { f32::NEG_INFINITY } else { guess.log_p.min(0.0) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The probabilities of a node's guesses, from a seed and the path: eighths, so that ties and zeros are common.
    fn guesses(seed: u64, path: &[i64], top_k: usize) -> Vec<LikelyToken> {
        let mixed = path.iter().fold(seed, |mixed, &token| (mixed ^ token as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let eighth = |at: usize| (mixed >> (7 * at + 5) & 7) as f32 / 8.0;
        let mut guesses: Vec<LikelyToken> =
            (0..top_k).map(|at| LikelyToken { token: at as i64, log_p: eighth(at).ln() }).collect();
        guesses.sort_by(|a, b| b.log_p.total_cmp(&a.log_p));
        guesses
    }

    fn grown(seed: u64, limits: DynamicTree) -> GrowingTree {
        let mut tree = GrowingTree::new(-1, limits);
        let mut paths: Vec<Vec<i64>> = vec![];
        while tree.frontier().len() > 0 {
            let path_of = |node: FrontierNode| match paths.get(node.parent) {
                Some(parent) => [&parent[..], &[node.token]].concat(),
                None => vec![],
            };
            paths = tree.frontier().map(path_of).collect();
            let all: Vec<LikelyToken> = paths.iter().flat_map(|path| guesses(seed, path, limits.top_k)).collect();
            tree.grow(&all);
        }
        tree
    }

    /// Every candidate with its path, best first: nothing is left out for the size of the tree.
    fn all_candidates(seed: u64, limits: DynamicTree) -> Vec<(f32, Vec<i64>)> {
        let mut frontier = vec![(0.0, vec![])];
        let mut all = vec![];
        for _ in 0..limits.depth {
            let children = |(log_p, path): &(f32, Vec<i64>)| {
                let child = |guess: LikelyToken| (log_p + guess.log_p, [&path[..], &[guess.token]].concat());
                guesses(seed, path, limits.top_k).into_iter().map(child).collect::<Vec<_>>()
            };
            let mut level: Vec<(f32, Vec<i64>)> = frontier.iter().flat_map(children).collect();
            level.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable
            level.retain(|(log_p, _)| *log_p > f32::NEG_INFINITY);
            all.extend(level.iter().cloned());
            level.truncate(limits.top_k);
            frontier = level;
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        all
    }

    /// The paths of a tree, best first.
    fn paths(tree: &GrowingTree) -> Vec<Vec<i64>> {
        let path = |&node: &usize| {
            let up = |&node: &usize| Some(tree.nodes[node].parent).filter(|&parent| parent != 0);
            let mut path: Vec<i64> = std::iter::successors(Some(node), up).map(|node| tree.nodes[node].token).collect();
            path.reverse();
            path
        };
        tree.best.iter().map(path).collect()
    }

    proptest! {
        #[test]
        fn the_tree_is_the_best_of_all_candidates(seed: u64, nodes in 1usize..40, depth in 1usize..5, top_k in 1usize..5) {
            let limits = DynamicTree { nodes, depth, top_k };
            let expected: Vec<_> = all_candidates(seed, limits).into_iter().map(|(_, path)| path).take(nodes).collect();
            let tree = grown(seed, limits);
            prop_assert_eq!(paths(&tree), expected);
            prop_assert_eq!(tree.chosen().guesses(), tree.best.len());
        }

        #[test]
        fn a_rank_says_which_trees_hold_a_node(seed: u64, path in proptest::collection::vec(0i64..4, 4), nodes in 1usize..40, depth in 1usize..5) {
            let whole = DynamicTree { nodes: 1000, depth: 4, top_k: 4 };
            let ranks = grown(seed, whole).ranks(&path);
            let held = paths(&grown(seed, DynamicTree { nodes, depth, ..whole }));
            for length in 1..=4 {
                let rank = ranks.get(length - 1).and_then(|ranks| ranks.get(depth.checked_sub(length)?));
                prop_assert_eq!(held.iter().any(|held| held == &path[..length]), rank.is_some_and(|&rank| rank < nodes));
            }
        }
    }

    #[test]
    fn probabilities_that_are_zero_or_no_number_are_no_nodes_and_none_is_above_its_parent() {
        let mut tree = GrowingTree::new(3, DynamicTree { nodes: 5, depth: 2, top_k: 4 });
        let guess = |token, log_p| LikelyToken { token, log_p };
        tree.grow(&[guess(9, f32::NAN), guess(1, 1e-7), guess(2, -3.0), LikelyToken::NONE]);
        assert_eq!(tree.frontier().map(|node| node.token).collect::<Vec<_>>(), [1, 2]);
        tree.grow(&[guess(4, 0.0), guess(5, -1.0), guess(6, f32::NEG_INFINITY), LikelyToken::NONE].repeat(2));
        assert_eq!(paths(&tree), [vec![1], vec![1, 4], vec![1, 5], vec![2], vec![2, 4]]);
        assert_eq!(tree.frontier().len(), 0);
    }
}
