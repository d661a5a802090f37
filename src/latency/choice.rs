//! Chooses the tree with the most expected tokens per second. No tensors here.

use super::{LatencyError, TreeToTime};
use crate::formats::latency::{Latency, StepTime};
use crate::formats::tree::DynamicTree;
use crate::tree::expected::ExpectedTokens;
use crate::tree::guess_tree::GuessTree;
use crate::tree::search::{SearchError, SearchedTree};

/// Tree sizes to time; times between them are interpolated.
const SIZES: [usize; 22] = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024];

/// Tree sizes to time for trees without the last heads.
const SIZES_OF_SHALLOW: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// Returns the best tree with this many nodes and at most this many heads.
pub type BestTree<'a> = dyn Fn(usize, usize) -> Result<SearchedTree, SearchError> + 'a;

/// The limits of trees that are chosen at each step, and their tokens per step, by most nodes and levels; `None` if these are not known.
pub type DynamicOf<'a> = dyn Fn(usize, usize) -> Option<(DynamicTree, ExpectedTokens)> + 'a;

/// A tree with its expected tokens per step and step time.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    pub tree: GuessTree,
    pub tokens_per_step: f64,
    /// Of `tokens_per_step` ([`ExpectedTokens::interval`]).
    pub interval: Option<[f64; 2]>,
    /// Measured, or interpolated.
    pub step: StepTime,
}

impl Timed {
    /// Expected tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        1e3 * self.tokens_per_step / self.step.step_ms
    }

    /// From the slowest steps and fewest tokens per step of the ranges to the fastest and most.
    pub fn range_per_second(&self) -> [f64; 2] {
        let ([fewest, most], [fastest, slowest]) =
            (self.interval.unwrap_or([self.tokens_per_step; 2]), self.step.range());
        [1e3 * fewest / slowest, 1e3 * most / fastest]
    }
}

/// The fastest tree of each size.
#[derive(Debug, Clone, PartialEq)]
pub struct Sweep {
    /// Smallest first.
    pub trees: Vec<Timed>,
    /// Index of the fastest tree; among equals the smallest.
    pub fastest: usize,
}

/// The trees to time: the best ones of each size up to `max_nodes`, and, since every head costs time, also those with
/// fewer heads.
///
/// # Errors
/// If there is no tree at all.
pub fn trees_to_time(
    num_heads: usize,
    max_nodes: usize,
    best_tree: &BestTree,
) -> Result<Vec<TreeToTime>, LatencyError> {
    let mut trees: Vec<TreeToTime> = Vec::new();
    for heads in (1..=num_heads).rev() {
        let sizes = if heads == num_heads { &SIZES[..] } else { &SIZES_OF_SHALLOW[..] };
        let with_last = sizes.iter().copied().filter(|&size| size < max_nodes).chain([max_nodes]);
        for nodes in with_last {
            let Some(found) = at_most(best_tree(nodes, heads))? else { continue };
            let is_new = |(tree, _): &TreeToTime| tree.nodes() != nodes || tree.depth() != found.tree.max_depth();
            if trees.iter().all(is_new) {
                trees.push((GuessTree::Static(found.tree), found.expected_tokens_per_step));
            }
        }
    }
    Ok(trees)
}

/// The trees to time that are chosen at each step: of few sizes, with all heads and with fewer.
pub fn dynamic_to_time(num_heads: usize, max_nodes: usize, dynamic_of: &DynamicOf) -> Vec<TreeToTime> {
    let halves = std::iter::successors(Some(num_heads), |heads| Some(heads / 2).filter(|&heads| heads > 0));
    let depths: Vec<usize> = if num_heads <= 4 { (1..=num_heads).rev().collect() } else { halves.collect() };
    let sizes = || SIZES_OF_SHALLOW.into_iter().filter(|&size| size < max_nodes).chain([max_nodes]);
    let depth_trees = |depth: usize| {
        let mut trees: Vec<_> = sizes().filter_map(|nodes| dynamic_of(nodes, depth)).collect();
        trees.dedup_by(|(_, more), (_, tokens_per_step)| more == tokens_per_step); // full levels take no more nodes
        trees
    };
    let candidate = |(limits, expected): (DynamicTree, ExpectedTokens)| (GuessTree::Dynamic(limits), expected.per_step);
    depths.into_iter().flat_map(depth_trees).map(candidate).collect()
}

/// The fastest limits of each timed size of trees that are chosen at each step.
pub fn dynamic_sweep(latency: &Latency, num_heads: usize, max_nodes: usize, dynamic_of: &DynamicOf) -> Vec<Timed> {
    let mut sizes: Vec<usize> = latency.steps.iter().filter(|step| step.dynamic).map(|step| step.nodes).collect();
    sizes.retain(|&size| size <= max_nodes);
    sizes.sort_unstable();
    sizes.dedup();
    let timed = |nodes: usize, depth: usize| {
        let step = latency.step(true, nodes, depth)?;
        let (limits, ExpectedTokens { per_step, interval }) = dynamic_of(nodes, depth)?;
        Some(Timed { tree: GuessTree::Dynamic(limits), tokens_per_step: per_step, interval, step })
    };
    let fastest = |nodes: &usize| {
        let all = (1..=num_heads).filter_map(|depth| timed(*nodes, depth));
        all.max_by(|a, b| a.tokens_per_second().total_cmp(&b.tokens_per_second()))
    };
    let mut trees: Vec<Timed> = sizes.iter().filter_map(fastest).collect();
    let is_same = |one: &Timed, other: &Timed| {
        (one.tree.depth(), one.tokens_per_step) == (other.tree.depth(), other.tokens_per_step)
    };
    trees.dedup_by(|larger, smaller| is_same(larger, smaller)); // files of earlier versions time full levels with more nodes
    trees
}

/// The fastest tree of each timed size, and the fastest of all. The sizes next to the fastest timed one are tried too.
///
/// # Errors
/// [`LatencyError::NothingTimed`], or an error of the search.
pub fn sweep(
    latency: &Latency,
    num_heads: usize,
    max_nodes: usize,
    best_tree: &BestTree,
) -> Result<Sweep, LatencyError> {
    let static_sizes = latency.steps.iter().filter(|step| !step.dynamic).map(|step| step.nodes);
    let mut sizes: Vec<usize> = static_sizes.filter(|&size| size <= max_nodes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let fastest_of = |nodes: usize| fastest_of_size(latency, num_heads, nodes, best_tree);
    let mut trees: Vec<Timed> =
        sizes.into_iter().filter_map(|nodes| fastest_of(nodes).transpose()).collect::<Result<_, _>>()?;
    let Some(around) = fastest(&trees) else { return Err(LatencyError::NothingTimed) };
    let size = |at: usize| trees[at].tree.nodes();
    let between = size(around.saturating_sub(1)) + 1..size((around + 1).min(trees.len() - 1));
    let middle = size(around);
    for nodes in between.filter(|&nodes| nodes != middle) {
        trees.extend(fastest_of(nodes)?);
    }
    trees.sort_by_key(|timed| timed.tree.nodes());
    let fastest = fastest(&trees).unwrap_or(0); // never empty: it has `around`
    Ok(Sweep { trees, fastest })
}

/// The fastest tree with `nodes` nodes and any number of heads.
fn fastest_of_size(
    latency: &Latency,
    num_heads: usize,
    nodes: usize,
    best_tree: &BestTree,
) -> Result<Option<Timed>, LatencyError> {
    let mut best: Option<Timed> = None;
    for heads in 1..=num_heads {
        let Some(found) = at_most(best_tree(nodes, heads))? else { continue };
        let Some(step) = latency.step(false, nodes, found.tree.max_depth()) else { continue };
        let SearchedTree { tree, expected_tokens_per_step: tokens_per_step, interval } = found;
        let timed = Timed { tree: GuessTree::Static(tree), tokens_per_step, interval, step };
        if best.as_ref().is_none_or(|best| timed.tokens_per_second() > best.tokens_per_second()) {
            best = Some(timed);
        }
    }
    Ok(best)
}

fn fastest(trees: &[Timed]) -> Option<usize> {
    let faster =
        |a: &usize, b: &usize| trees[*a].tokens_per_second().total_cmp(&trees[*b].tokens_per_second()).then(b.cmp(a));
    (0..trees.len()).max_by(faster)
}

/// `None` if the heads' guesses cannot fill a tree of this size.
fn at_most(found: Result<SearchedTree, SearchError>) -> Result<Option<SearchedTree>, SearchError> {
    match found {
        Err(SearchError::TooFewGuesses { .. }) => Ok(None),
        found => found.map(Some),
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::formats::latency::StepTime;
    use crate::formats::latency::examples::latency;
    use crate::tree::search::search;

    fn best_tree(nodes: usize, heads: usize) -> Result<SearchedTree, SearchError> {
        search(&vec![vec![0.6, 0.2, 0.1]; heads], nodes)
    }

    #[test]
    fn trees_of_all_sizes_and_depths_are_timed_once() {
        let trees = trees_to_time(3, 30, &best_tree).unwrap();
        let sizes: Vec<(usize, usize)> = trees.iter().map(|(tree, _)| (tree.nodes(), tree.depth())).collect();
        let all_heads = [1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 30];
        assert_eq!(sizes[..12].iter().map(|&(nodes, _)| nodes).collect::<Vec<_>>(), all_heads);
        assert!(sizes.contains(&(8, 2)) && sizes.contains(&(2, 1)), "with fewer heads: {sizes:?}");
        assert!(!sizes.contains(&(16, 2)), "2 heads of 3 guesses make 12");
        let mut once = sizes.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), sizes.len());
        assert!(trees_to_time(3, 0, &best_tree).is_err());
    }

    /// Compares the choice with trying all sizes and depths one by one.
    #[test]
    fn the_choice_is_that_of_trying_everything() {
        for (node_ms, head_ms) in [(0.0, 0.0), (0.02, 0.0), (0.05, 0.3), (0.4, 0.01), (2.0, 2.0)] {
            let ms = |nodes: usize, depth: usize| 1.0 + node_ms * nodes as f64 + head_ms * depth as f64;
            let times: Vec<_> = trees_to_time(3, 30, &best_tree)
                .unwrap()
                .iter()
                .map(|(tree, _)| (tree.nodes(), tree.depth()))
                .map(|(nodes, depth)| (nodes, depth, ms(nodes, depth)))
                .collect();
            let sweep = sweep(&latency(&times), 3, 30, &best_tree).unwrap();
            let chosen = &sweep.trees[sweep.fastest];
            let all = (1..=30).flat_map(|nodes| (1..=3).map(move |heads| (nodes, heads)));
            let speeds = all.filter_map(|(nodes, heads)| {
                let found = best_tree(nodes, heads).ok()?;
                Some(1e3 * found.expected_tokens_per_step / ms(nodes, found.tree.max_depth()))
            });
            let best = speeds.fold(0.0, f64::max);
            assert!(
                (chosen.tokens_per_second() / best - 1.0).abs() < 1e-9,
                "{node_ms} {head_ms}: {} of {best}",
                chosen.tokens_per_second()
            );
            assert!(sweep.trees.is_sorted_by_key(|timed| timed.tree.nodes()));
        }
    }

    #[test]
    fn the_range_is_of_both_the_steps_and_the_tokens() {
        let step = StepTime { step_ms: 2.0, step_ms_range: Some([1.0, 4.0]), ..StepTime::default() };
        let tree = GuessTree::Dynamic(DynamicTree { nodes: 3, depth: 3, top_k: 10 });
        let timed = Timed { tree, tokens_per_step: 4.0, interval: Some([3.0, 5.0]), step };
        assert_eq!((timed.tokens_per_second(), timed.range_per_second()), (2000.0, [750.0, 5000.0]));
        let few_texts = Timed { interval: None, step: StepTime { step_ms_range: None, ..step }, ..timed };
        assert_eq!(few_texts.range_per_second(), [2000.0; 2], "nothing is known of either");
    }

    #[test]
    fn trees_chosen_at_each_step_are_compared_by_their_own_times() {
        let dynamic_of = |nodes: usize, depth: usize| {
            let per_step = 1.0 + (nodes.min(8) * depth) as f64 / 10.0;
            Some((DynamicTree { nodes, depth, top_k: 10 }, ExpectedTokens { per_step, interval: None }))
        };
        let to_time = dynamic_to_time(8, 20, &dynamic_of);
        let depths: Vec<usize> =
            to_time.iter().filter(|(tree, _)| tree.nodes() == 8).map(|(tree, _)| tree.depth()).collect();
        assert_eq!(depths, [8, 4, 2, 1]);
        assert!(to_time.iter().all(|(tree, _)| tree.nodes() <= 8), "more nodes commit no more tokens: {to_time:?}");
        let grows = |nodes: usize, depth: usize| {
            dynamic_of(nodes, depth)
                .map(|(limits, _)| (limits, ExpectedTokens { per_step: nodes as f64, interval: None }))
        };
        assert!(dynamic_to_time(8, 20, &grows).iter().any(|(tree, _)| tree.nodes() == 20));
        let mut file = latency(&[(8, 2, 0.001)]);
        for (nodes, depth, step_ms) in [(8, 2, 1.0), (8, 1, 2.0), (16, 2, 1.5)] {
            file.steps.push(StepTime { nodes, depth, step_ms, dynamic: true, ..StepTime::default() });
        }
        let sweep = dynamic_sweep(&file, 8, 100, &dynamic_of);
        let found: Vec<_> =
            sweep.iter().map(|timed| (timed.tree.nodes(), timed.tree.depth(), timed.step.step_ms)).collect();
        assert_eq!(found, [(8, 2, 1.0)], "16 nodes commit no more tokens");
    }

    #[test]
    fn trees_without_a_time_are_no_choice() {
        let nothing = sweep(&latency(&[(3, 7, 1.0)]), 3, 30, &best_tree);
        assert!(matches!(nothing, Err(LatencyError::NothingTimed)));
        let small = sweep(&latency(&[(1, 1, 9.0), (2, 1, 1.0), (8, 3, 0.1)]), 3, 4, &best_tree).unwrap();
        assert!(small.trees.iter().all(|timed| timed.tree.nodes() <= 4), "{small:?}");
    }
}
