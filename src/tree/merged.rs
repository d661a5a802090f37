//! Merges the trees of several drafters into one tree of at most N guesses: those that are likeliest by measured hits. No tensors here.
//!
//! A drafter's guess is known by its depth and its rank among the drafter's guesses below the same node. Where the text has gone past a
//! proposal, each guess below the true path was a trial, and the true token a hit, whether the guess was in the merged tree or not. Trials
//! and hits are counted for every combination of a depth with the ranks that the drafters give a token there, since a token that two of
//! them guess is likelier than one that the other drafter does not guess. With h hits in n trials, the probability that such a guess is right
//! when its parent is right is taken to be
//!
//! ```text
//! (h + m·p) / (n + m),  m = 2,  p = 1 - Π (1 - 1 / (2 + rank))
//! ```
//!
//! with the product over the drafters that guess the token, whose ranks count from 0. A path's probability is the product along it. A child is
//! never likelier than its parent, so the N likeliest guesses form a tree. After 128 trials, the counts are halved: they follow a change of
//! texts.

use std::collections::HashMap;

use super::row_times::{RowTimes, StepRows};
use super::token_tree::TokenTree;

/// Weight of the assumed probability, in trials.
const ASSUMED_TRIALS: f64 = 2.0;
/// Trials after which hits and trials are halved.
const REMEMBERED_TRIALS: f64 = 128.0;
/// Depths and ranks from here on are counted together: they take four bits of a [`GuessKind`].
const COUNTED_APART: usize = 14;
/// The most drafters that can be merged.
pub const MAX_DRAFTERS: usize = 15;

/// A drafter's guesses for a text. Node 0 is the root; parents come before their children.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankedTree {
    pub nodes: Vec<RankedGuess>,
}

/// A guess of a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankedGuess {
    /// The root's is itself.
    pub parent: usize,
    pub token: i64,
    /// Among the guesses below its parent, from 0.
    pub rank: usize,
}

/// The drafters' guesses for a text; equal ones share a node.
#[derive(Debug, Clone)]
pub struct MergedTree {
    nodes: Vec<MergedNode>,
}

#[derive(Debug, Clone)]
struct MergedNode {
    parent: usize,
    token: i64,
    depth: usize,
    kind: GuessKind,
    /// The assumed probability that the guess is wrong if its parent is right.
    assumed_wrong: f64,
}

/// What guesses are counted together by: their depth and, for each drafter, their rank or that it does not guess them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct GuessKind(u64);

/// Hits of guesses by depth and ranks.
#[derive(Debug, Clone, Default)]
pub struct MeasuredHits {
    counts: HashMap<GuessKind, Count>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    hits: f64,
    trials: f64,
}

impl GuessKind {
    fn at_depth(depth: usize) -> Self {
        Self(depth.min(COUNTED_APART) as u64)
    }

    fn add(&mut self, drafter: usize, rank: usize) {
        self.0 |= (1 + rank.min(COUNTED_APART) as u64) << (4 * (drafter + 1));
    }
}

impl MergedNode {
    fn new(parent: usize, token: i64, depth: usize) -> Self {
        Self { parent, token, depth, kind: GuessKind::at_depth(depth), assumed_wrong: 1.0 }
    }
}

impl MergedTree {
    /// Of 1 to [`MAX_DRAFTERS`] drafters; all of them have the same root.
    pub fn of(trees: &[RankedTree]) -> Self {
        let mut merged = Self { nodes: vec![MergedNode::new(0, trees[0].nodes[0].token, 0)] };
        let mut places_of = HashMap::new();
        for (drafter, tree) in trees.iter().enumerate() {
            let mut places = vec![0];
            for &RankedGuess { parent, token, rank } in &tree.nodes[1..] {
                let parent = places[parent];
                let place = *places_of.entry((parent, token)).or_insert(merged.nodes.len());
                if place == merged.nodes.len() {
                    merged.nodes.push(MergedNode::new(parent, token, merged.nodes[parent].depth + 1));
                }
                merged.nodes[place].kind.add(drafter, rank);
                merged.nodes[place].assumed_wrong *= 1.0 - 1.0 / (2.0 + rank as f64);
                places.push(place);
            }
        }
        merged
    }

    /// The deepest guess's depth.
    pub fn depth(&self) -> usize {
        self.nodes.iter().map(|node| node.depth).max().unwrap_or(0)
    }

    /// The tree of the `count` likeliest guesses, the likeliest first.
    pub fn likeliest(&self, count: usize, hits: &MeasuredHits) -> TokenTree {
        self.tree(self.by_probability(hits).iter().take(count))
    }

    /// The tree of at most `count` of the likeliest guesses that makes the most tokens per second.
    pub fn fastest(&self, count: usize, hits: &MeasuredHits, times: &RowTimes, step: StepRows) -> TokenTree {
        let likeliest = self.by_probability(hits);
        let worth = times.fastest(step, likeliest.iter().take(count).map(|&(_, p)| p));
        self.tree(&likeliest[..worth])
    }

    /// The guesses with the probability that each becomes text, the likeliest first.
    fn by_probability(&self, hits: &MeasuredHits) -> Vec<(usize, f64)> {
        let mut p = vec![1.0];
        for node in &self.nodes[1..] {
            p.push(p[node.parent] * hits.probability(node)); // parents come first
        }
        let mut guesses: Vec<(usize, f64)> = p.into_iter().enumerate().skip(1).collect();
        guesses.sort_by(|(a, p), (b, q)| q.total_cmp(p).then(a.cmp(b)));
        guesses
    }

    /// Of guesses whose parents come before them.
    fn tree<'g>(&self, guesses: impl IntoIterator<Item = &'g (usize, f64)>) -> TokenTree {
        let (mut tree, mut places) = (TokenTree::new(self.nodes[0].token), vec![0; self.nodes.len()]);
        for &(node, _) in guesses {
            places[node] = tree.add(places[self.nodes[node].parent], self.nodes[node].token);
        }
        tree
    }
}

impl MeasuredHits {
    /// Counts the guesses along the tokens that came after the root.
    pub fn count(&mut self, merged: &MergedTree, text: &[i64]) {
        let mut at = Some(0);
        for token in text {
            let Some(parent) = at.take() else { return };
            for (place, node) in merged.nodes.iter().enumerate().skip(1).filter(|(_, node)| node.parent == parent) {
                let hit = node.token == *token;
                self.counts.entry(node.kind).or_default().add(hit);
                at = if hit { Some(place) } else { at };
            }
        }
    }

    /// That a guess is right if its parent is.
    fn probability(&self, node: &MergedNode) -> f64 {
        let Count { hits, trials } = self.counts.get(&node.kind).copied().unwrap_or_default();
        (hits + ASSUMED_TRIALS * (1.0 - node.assumed_wrong)) / (trials + ASSUMED_TRIALS)
    }
}

impl Count {
    fn add(&mut self, hit: bool) {
        self.hits += f64::from(u8::from(hit));
        self.trials += 1.0;
        if self.trials >= REMEMBERED_TRIALS {
            *self = Self { hits: self.hits / 2.0, trials: self.trials / 2.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::tree::token_tree::LevelNodes;

    /// Token paths of all nodes but the root, sorted.
    fn paths(parents: &[usize], tokens: &[i64]) -> Vec<Vec<i64>> {
        let mut paths: Vec<Vec<i64>> = vec![vec![]];
        for (&parent, &token) in parents.iter().zip(&tokens[1..]) {
            paths.push([&paths[parent][..], &[token]].concat());
        }
        paths.remove(0);
        paths.sort();
        paths
    }

    fn paths_of(tree: &TokenTree) -> Vec<Vec<i64>> {
        let LevelNodes { parents, tokens } = tree.by_level();
        paths(&parents, &tokens)
    }

    fn paths_of_guesses(tree: &RankedTree) -> Vec<Vec<i64>> {
        let parents: Vec<usize> = tree.nodes[1..].iter().map(|node| node.parent).collect();
        paths(&parents, &tree.nodes.iter().map(|node| node.token).collect::<Vec<_>>())
    }

    /// Random trees below token 0, whose siblings have different tokens of few.
    fn ranked_trees() -> impl Strategy<Value = RankedTree> {
        proptest::collection::vec((any::<Index>(), 0..4i64), 0..20).prop_map(|grown| {
            let mut tree = RankedTree { nodes: vec![RankedGuess { parent: 0, token: 0, rank: 0 }] };
            for (parent, token) in grown {
                let parent = parent.index(tree.nodes.len());
                let siblings = || tree.nodes.iter().skip(1).filter(|node| node.parent == parent);
                let rank = siblings().count();
                if siblings().all(|node| node.token != token) {
                    tree.nodes.push(RankedGuess { parent, token, rank });
                }
            }
            tree
        })
    }

    proptest! {
        #[test]
        fn the_merged_tree_holds_each_guess_once_within_its_budget(
            trees in proptest::collection::vec(ranked_trees(), 1..4),
            texts in proptest::collection::vec(proptest::collection::vec(0..4i64, 0..6), 0..9),
            count in 0..40usize,
        ) {
            let merged = MergedTree::of(&trees);
            let mut hits = MeasuredHits::default();
            texts.iter().for_each(|text| hits.count(&merged, text));
            let mut all: Vec<Vec<i64>> = trees.iter().flat_map(paths_of_guesses).collect();
            all.sort();
            all.dedup();
            prop_assert_eq!(&paths_of(&merged.likeliest(usize::MAX, &hits)), &all);
            let chosen = paths_of(&merged.likeliest(count, &hits));
            prop_assert_eq!(chosen.len(), count.min(all.len()));
            prop_assert!(chosen.iter().all(|path| all.contains(path)));
            // A smaller budget takes the beginning of what a larger one takes.
            let fewer = paths_of(&merged.likeliest(count / 2, &hits));
            prop_assert!(fewer.iter().all(|path| chosen.contains(path)));
        }
    }

    fn chain(tokens: &[i64], rank: usize) -> RankedTree {
        let root = RankedGuess { parent: 0, token: 0, rank: 0 };
        let node = |(parent, &token): (usize, &i64)| RankedGuess { parent, token, rank };
        RankedTree { nodes: [root].into_iter().chain(tokens.iter().enumerate().map(node)).collect() }
    }

    #[test]
    fn probabilities_are_the_counts_of_the_same_depth_and_ranks() {
        let mut hits = MeasuredHits::default();
        let p = |merged: &MergedTree, place: usize, hits: &MeasuredHits| hits.probability(&merged.nodes[place]);
        let apart = MergedTree::of(&[chain(&[5, 6], 0), chain(&[7], 1)]);
        let assumed = 1.0 - (1.0 - 1.0 / 3.0); // rounded as in the code
        assert_eq!([1, 2, 3].map(|place| p(&apart, place, &hits)), [1.0 / 2.0, 1.0 / 2.0, assumed]);
        // Three texts: 5 comes twice, and then 6 once.
        [[5, 6], [5, 1], [2, 2]].iter().for_each(|text| hits.count(&apart, text));
        assert_eq!(
            [1, 2, 3].map(|place| p(&apart, place, &hits)),
            [(2.0 + 1.0) / 5.0, (1.0 + 1.0) / 4.0, (0.0 + 2.0 * assumed) / 5.0]
        );
        let shared = MergedTree::of(&[chain(&[5], 0), chain(&[5], 1)]);
        assert_eq!(
            (shared.nodes.len(), p(&shared, 1, &hits)),
            (2, 1.0 - 1.0 / 2.0 * (1.0 - 1.0 / 3.0)),
            "counted apart"
        );
    }

    #[test]
    fn counts_follow_a_change_of_texts() {
        let (mut hits, merged) = (MeasuredHits::default(), MergedTree::of(&[chain(&[5], 0)]));
        (0..5000).for_each(|_| hits.count(&merged, &[5]));
        assert!(hits.probability(&merged.nodes[1]) > 0.98);
        (0..1500).for_each(|_| hits.count(&merged, &[6]));
        assert!(hits.probability(&merged.nodes[1]) < 0.1);
    }

    /// A drafter that guesses the text with known probabilities: `widths[d]` guesses below each node of depth d, of which the first is right
    /// with probability `right`, and each other one with half the probability of the one before it.
    struct Simulated {
        widths: Vec<usize>,
    }

    impl Simulated {
        fn guess(&self, text: &[i64], right: f64, rng: &mut ChaCha8Rng) -> RankedTree {
            let mut tree = RankedTree { nodes: vec![RankedGuess { parent: 0, token: -1, rank: 0 }] };
            let mut level = vec![(0, true)];
            for (&width, &token) in self.widths.iter().zip(text) {
                let mut below = vec![];
                for (parent, on_path) in level {
                    let mut draw: f64 = rng.random();
                    let mut p = right;
                    for rank in 0..width {
                        let hit = on_path && (0.0..p).contains(&draw);
                        draw -= p;
                        p /= 2.0;
                        let wrong = 1_000_000 + rng.random_range(0..1_000_000);
                        let token = if hit { token } else { wrong };
                        below.push((tree.nodes.len(), hit));
                        tree.nodes.push(RankedGuess { parent, token, rank });
                    }
                }
                level = below;
            }
            tree
        }
    }

    fn accepted(tree: &TokenTree, text: &[i64]) -> usize {
        let mut at = 0;
        text.iter().map_while(|&token| tree.child(at, token).inspect(|&child| at = child)).count()
    }

    /// Tokens a step of the first drafter alone, the second alone, and both, at the same budget.
    fn tokens_per_step(right: [f64; 2], steps: usize, hits: &mut MeasuredHits, rng: &mut ChaCha8Rng) -> [f64; 3] {
        let drafters = [Simulated { widths: vec![4, 2, 2, 1] }, Simulated { widths: vec![2, 1, 1, 1, 1, 1, 1, 1] }];
        let nodes = 4 + 8 + 16 + 16;
        let mut tokens = [0; 3];
        for _ in 0..steps {
            let text: Vec<i64> = (0..8).map(|_| rng.random_range(0..1000)).collect();
            let trees = [0, 1].map(|drafter| drafters[drafter].guess(&text, right[drafter], rng));
            let merged = MergedTree::of(&trees);
            let all_of = |tree: &RankedTree| {
                MergedTree::of(std::slice::from_ref(tree)).likeliest(nodes, &MeasuredHits::default())
            };
            tokens[0] += 1 + accepted(&all_of(&trees[0]), &text);
            tokens[1] += 1 + accepted(&all_of(&trees[1]), &text);
            tokens[2] += 1 + accepted(&merged.likeliest(nodes, hits), &text);
            hits.count(&merged, &text);
        }
        tokens.map(|tokens| tokens as f64 / steps as f64)
    }

    /// Texts of three kinds, one after the other: both drafters are right at times, then only one, then only the other.
    #[test]
    fn the_merged_tree_is_not_behind_the_better_drafter_at_the_same_budget() {
        let (mut hits, mut rng) = (MeasuredHits::default(), ChaCha8Rng::seed_from_u64(4));
        let mut gains = vec![];
        for right in [[0.5, 0.5], [0.55, 0.0], [0.5, 0.02], [0.1, 0.9], [0.0, 0.8], [0.55, 0.3]] {
            let [first, second, both] = tokens_per_step(right, 1500, &mut hits, &mut rng);
            assert!(both >= 0.98 * first.max(second), "{right:?}: {first:.3} and {second:.3} alone, {both:.3} merged");
            gains.push(both / first.max(second));
        }
        assert!(gains[0] > 1.1, "drafters that are right at different places add up: {gains:?}");
    }
}
