//! Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` in transformers): finds earlier occurrences of the last tokens in the text
//! and guesses their continuations. Needs no heads and no training, and pays off where a text repeats its prompt: summaries, edits,
//! code. Continuations of several matches share a tree.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::rc::Rc;

use tch::Tensor;

use super::{Drafter, PreparedTree, Proposal, TextSoFar};
use crate::model::llama::Llama;
use crate::tree::sparse_tree::SparseTree;

/// Last tokens that are looked up: first so many, then one less, and so on.
const LONGEST_NGRAM: usize = 4;
/// A single token says little of what comes next, but more than nothing: 2.0 against 1.8 and 3.3 against 3.0 tokens a step on retold
/// stories and on JSON (benches/results).
const SHORTEST_NGRAM: usize = 1;
/// Tokens that are guessed after a match.
const CONTINUATION: usize = 8;
/// Guesses of a tree.
const NODES: usize = 12;
/// Shapes that are kept laid out. Each has a mask over the context: 7 MB for 32k tokens and 8 query heads a group in 16 bits.
const KEPT_SHAPES: usize = 32;

/// Guesses by looking the last tokens up in the text so far.
#[derive(Debug)]
pub struct NgramDrafter<'a> {
    backbone: &'a Llama,
    /// Laid out trees by their choices.
    shapes: HashMap<Vec<Vec<usize>>, Rc<PreparedTree>>,
}

impl<'a> NgramDrafter<'a> {
    /// For texts of this backbone.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { backbone, shapes: HashMap::new() }
    }

    /// Guesses of a tree at most.
    pub const fn max_nodes() -> usize {
        NODES
    }

    fn proposal(&mut self, ids: &[i64]) -> Proposal {
        let guesses = Continuations::of(ids);
        let choices: Vec<Vec<usize>> = guesses.paths.iter().map(|(path, _)| path.clone()).collect();
        if self.shapes.len() >= KEPT_SHAPES && !self.shapes.contains_key(&choices) {
            self.shapes.clear();
        }
        let backbone = self.backbone;
        let prepare = |choices: &Vec<Vec<usize>>| {
            let tree = match choices.is_empty() {
                true => SparseTree::root(),
                false => SparseTree::new(choices.clone()).expect("continuations share their beginnings"),
            };
            Rc::new(PreparedTree::new(tree, backbone))
        };
        let tree = self.shapes.entry(choices).or_insert_with_key(prepare).clone();
        let root = ids.last().copied().expect("a text has a root");
        let tokens: Vec<i64> = (0..tree.tree.len()).map(|node| guesses.token(tree.tree.path(node), root)).collect();
        Proposal { tree, tokens_n: Tensor::from_slice(&tokens).to_device(backbone.device()) }
    }
}

impl Drafter for NgramDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        batch.iter().map(|text| self.proposal(text.ids)).collect()
    }
}

/// What followed earlier matches of a text's last tokens, as a tree: each node's path and token.
#[derive(Debug, Default)]
struct Continuations {
    paths: Vec<(Vec<usize>, i64)>,
}

impl Continuations {
    /// Of the longest match first; of equally long ones, of the latest.
    fn of(ids: &[i64]) -> Self {
        let last = || ids.iter().rev().take(LONGEST_NGRAM);
        let matched = |end: usize| ids[..end].iter().rev().zip(last()).take_while(|(a, b)| a == b).count();
        let mut ends: Vec<(usize, usize)> = (1..ids.len()).rev().map(|end| (matched(end), end)).collect();
        ends.retain(|&(length, _)| length >= SHORTEST_NGRAM);
        ends.sort_by_key(|&(length, _)| Reverse(length)); // stable: the latest first
        let mut tree = Self::default();
        for (_, end) in ends {
            if tree.paths.len() >= NODES {
                break;
            }
            // What follows a match at the text's end goes on with what is guessed here: a text that repeats itself.
            let continuation: Vec<i64> = ids[end..].iter().copied().cycle().take(CONTINUATION).collect();
            tree.insert(&continuation);
        }
        tree
    }

    /// Adds a continuation as far as there is room; what it shares with others is there once.
    fn insert(&mut self, tokens: &[i64]) {
        let mut path = vec![];
        for &token in tokens {
            let children: Vec<i64> = self.children(&path).collect();
            let known = children.iter().position(|&child| child == token);
            if known.is_none() && self.paths.len() >= NODES {
                return;
            }
            path.push(known.unwrap_or(children.len()));
            if known.is_none() {
                self.paths.push((path.clone(), token));
            }
        }
    }

    /// Tokens right below a path, in the order of their child indices.
    fn children(&self, path: &[usize]) -> impl Iterator<Item = i64> {
        let below = |of: &[usize]| of.len() == path.len() + 1 && of.starts_with(path);
        self.paths.iter().filter(move |(of, _)| below(of)).map(|&(_, token)| token)
    }

    /// The token at a path; the root's at the empty one.
    fn token(&self, path: &[usize], root: i64) -> i64 {
        self.paths.iter().find(|(of, _)| of == path).map_or(root, |&(_, token)| token)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn guesses(ids: &[i64]) -> Vec<(Vec<usize>, i64)> {
        Continuations::of(ids).paths
    }

    #[test]
    fn what_followed_the_last_tokens_before_is_guessed() {
        // "1 2" stands at the beginning, followed by 3 4 5.
        assert_eq!(
            guesses(&[1, 2, 3, 4, 5, 9, 1, 2]).iter().map(|(_, token)| *token).collect::<Vec<_>>(),
            [3, 4, 5, 9, 1, 2, 3, 4],
            "and behind the text's end what was guessed first"
        );
        assert!(guesses(&[1, 2, 3, 4, 5, 9, 1, 7]).is_empty(), "nothing ends in 1 7 before");
        assert!(guesses(&[5]).is_empty() && guesses(&[]).is_empty());
    }

    #[test]
    fn the_longest_match_comes_first_then_the_latest() {
        // 7 1 2 → 3; 1 2 → 4 (later); both are guessed, the longer match's first.
        let found = guesses(&[7, 1, 2, 3, 0, 1, 2, 4, 0, 7, 1, 2]);
        let first: Vec<i64> = found.iter().filter(|(path, _)| path.len() == 1).map(|(_, token)| *token).collect();
        assert_eq!(first, [3, 4]);
    }

    proptest! {
        #[test]
        fn guesses_are_a_tree_that_goes_on_from_the_text(ids in proptest::collection::vec(0i64..4, 0..60)) {
            let found = guesses(&ids);
            prop_assert!(found.len() <= NODES);
            if !found.is_empty() {
                let tree = SparseTree::new(found.iter().map(|(path, _)| path.clone()).collect());
                prop_assert!(tree.is_ok(), "{:?}", tree);
            }
            for (path, _) in &found {
                // Each guess stands behind its predecessors, guessed ones among them, somewhere before.
                let along: Vec<i64> = (1..=path.len()).map(|n| Continuations { paths: found.clone() }.token(&path[..n], -1)).collect();
                let text = [&ids[..], &along[..]].concat();
                let last = &text[text.len() - SHORTEST_NGRAM - 1..];
                prop_assert!(text[..text.len() - 1].windows(last.len()).any(|window| window == last));
            }
        }
    }
}
