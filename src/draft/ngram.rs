//! Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` in transformers): finds earlier occurrences of the last tokens in the
//! text and guesses their continuations. Needs no heads and no training, and pays off where a text repeats its prompt: summaries,
//! edits, code. Continuations of several matches share a tree.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::rc::Rc;

use tch::Tensor;

use super::{Drafter, PreparedTree, Proposal, TextSoFar};
use crate::model::llama::Llama;
use crate::tree::sparse_tree::SparseTree;

/// The longest n-gram that is looked up; shorter matches rank behind longer ones.
const LONGEST_NGRAM: usize = 4;
/// Matching a single token still pays: 2.0 tokens per step instead of 1.8 on retold stories, and 3.3 instead of 3.0 on JSON
/// (benches/results).
const SHORTEST_NGRAM: usize = 1;
/// Tokens guessed after each match.
const CONTINUATION: usize = 8;
/// Largest number of guesses in a tree.
const NODES: usize = 12;
/// Number of prepared trees that are kept. Each has a mask over the context: 7 MB for 32k tokens and 8 query heads per group in
/// 16 bits.
const KEPT_SHAPES: usize = 32;

/// Guesses by looking up the last tokens in the text so far.
#[derive(Debug)]
pub struct NgramDrafter<'a> {
    backbone: &'a Llama,
    /// Prepared trees by their choices.
    shapes: HashMap<Vec<Vec<usize>>, Rc<PreparedTree>>,
}

impl<'a> NgramDrafter<'a> {
    /// A drafter for texts of this backbone.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { backbone, shapes: HashMap::new() }
    }

    /// Largest number of guesses in a tree.
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
        Proposal { tree, tokens_n: Tensor::from_slice(&tokens).to_device(backbone.device()), drawn: None }
    }
}

impl Drafter for NgramDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        batch.iter().map(|text| self.proposal(text.ids)).collect()
    }
}

/// Continuations of earlier matches of the last tokens, merged into a tree: each node's path and token.
#[derive(Debug, Default)]
struct Continuations {
    paths: Vec<(Vec<usize>, i64)>,
}

impl Continuations {
    /// Longest matches first; among equally long ones, the latest first.
    fn of(ids: &[i64]) -> Self {
        let last = || ids.iter().rev().take(LONGEST_NGRAM);
        let matched = |end: usize| ids[..end].iter().rev().zip(last()).take_while(|(a, b)| a == b).count();
        let mut ends: Vec<(usize, usize)> = (1..ids.len()).rev().map(|end| (matched(end), end)).collect();
        ends.retain(|&(length, _)| length >= SHORTEST_NGRAM);
        ends.sort_by_key(|&(length, _)| Reverse(length)); // stable: keeps the latest first
        let mut tree = Self::default();
        for (_, end) in ends {
            if tree.paths.len() >= NODES {
                break;
            }
            // Past the end of the text, the continuation starts over, as in a text that repeats itself.
            let continuation: Vec<i64> = ids[end..].iter().copied().cycle().take(CONTINUATION).collect();
            tree.insert(&continuation);
        }
        tree
    }

    /// Adds a continuation until the tree is full. A prefix that it shares with others is stored once.
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

    /// Tokens of a path's children, in the order of their child indices.
    fn children(&self, path: &[usize]) -> impl Iterator<Item = i64> {
        let below = |of: &[usize]| of.len() == path.len() + 1 && of.starts_with(path);
        self.paths.iter().filter(move |(of, _)| below(of)).map(|&(_, token)| token)
    }

    /// The token at a path; `root` for the empty path.
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
        // "1 2" occurs at the start, followed by 3 4 5.
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
        // 7 1 2 is followed by 3, and 1 2 by 4 (later). Both are guessed, the longer match's continuation first.
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
                // Each guess follows its predecessor somewhere earlier in the text, which includes earlier guesses.
                let along: Vec<i64> = (1..=path.len()).map(|n| Continuations { paths: found.clone() }.token(&path[..n], -1)).collect();
                let text = [&ids[..], &along[..]].concat();
                let last = &text[text.len() - SHORTEST_NGRAM - 1..];
                prop_assert!(text[..text.len() - 1].windows(last.len()).any(|window| window == last));
            }
        }
    }
}
