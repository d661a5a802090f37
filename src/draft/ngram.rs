//! Prompt lookup (Saxena 2023; `prompt_lookup_num_tokens` in transformers): finds earlier occurrences of the last tokens in the
//! text and guesses their continuations. Needs no heads and no training, and pays off where a text repeats its prompt: summaries,
//! edits, code. Continuations of several matches share a tree.

use std::cmp::Reverse;

use super::tree_cache::TreeCache;
use super::{Drafter, Proposal, TextSoFar};
use crate::model::llama::Llama;
use crate::tree::token_tree::TokenTree;

/// The longest n-gram that is looked up; shorter matches rank behind longer ones.
const LONGEST_NGRAM: usize = 4;
/// Matching a single token still pays: 2.0 tokens per step instead of 1.8 on retold stories, and 3.3 instead of 3.0 on JSON
/// (benches/results).
const SHORTEST_NGRAM: usize = 1;
/// Tokens guessed after each match.
const CONTINUATION: usize = 8;
/// Largest number of guesses in a tree.
const NODES: usize = 12;

/// Guesses by looking up the last tokens in the text so far.
#[derive(Debug)]
pub struct NgramDrafter<'a> {
    trees: TreeCache<'a>,
}

/// Assumed probability that the i-th token of a continuation is right if those before it are, in texts that repeat themselves. Copied
/// JSON commits 3.7 tokens per step with 12 guesses (docs/decoding.md).
const ASSUMED: f64 = 0.75;

impl<'a> NgramDrafter<'a> {
    /// A drafter for texts of this backbone.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { trees: TreeCache::new(backbone) }
    }

    /// Largest number of guesses in a tree.
    pub const fn max_nodes() -> usize {
        NODES
    }

    /// What is assumed of a text that repeats itself, before any is decoded: the probability that each guess becomes text.
    pub fn assumed() -> impl Iterator<Item = f64> {
        (1..=NODES as i32).map(|guess| ASSUMED.powi(guess))
    }
}

impl Drafter for NgramDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        batch.iter().map(|text| self.trees.proposal(&continuations(text.ids))).collect()
    }
}

/// Continuations of earlier matches of the last tokens, merged into a tree: of the longest matches first; among equally long ones, of the
/// latest first.
fn continuations(ids: &[i64]) -> TokenTree {
    let last = || ids.iter().rev().take(LONGEST_NGRAM);
    let matched = |end: usize| ids[..end].iter().rev().zip(last()).take_while(|(a, b)| a == b).count();
    let matches = (1..ids.len()).rev().map(|end| (matched(end), end));
    let mut ends: Vec<(usize, usize)> = matches.filter(|&(length, _)| length >= SHORTEST_NGRAM).collect();
    ends.sort_by_key(|&(length, _)| Reverse(length)); // stable: keeps the latest first
    let mut tree = TokenTree::new(ids.last().copied().expect("a text has a root"));
    for (_, end) in ends {
        if tree.guesses() >= NODES {
            break;
        }
        // Past the end of the text, the continuation starts over, as in a text that repeats itself.
        insert(&mut tree, ids[end..].iter().copied().cycle().take(CONTINUATION));
    }
    tree
}

/// Adds a continuation until the tree is full. A prefix that it shares with others is stored once.
fn insert(tree: &mut TokenTree, tokens: impl Iterator<Item = i64>) {
    let mut at = 0;
    for token in tokens {
        at = match tree.child(at, token) {
            Some(known) => known,
            None if tree.guesses() >= NODES => return,
            None => tree.add(at, token),
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tree::token_tree::LevelNodes;

    /// The token paths of the guesses, by depth.
    fn guesses(ids: &[i64]) -> Vec<Vec<i64>> {
        let LevelNodes { parents, tokens } = continuations(ids).by_level();
        let mut paths: Vec<Vec<i64>> = vec![vec![]];
        for (parent, token) in parents.into_iter().zip(&tokens[1..]) {
            paths.push([&paths[parent][..], &[*token]].concat());
        }
        paths.split_off(1)
    }

    #[test]
    fn what_followed_the_last_tokens_before_is_guessed() {
        // "1 2" occurs at the start, followed by 3 4 5.
        assert_eq!(
            guesses(&[1, 2, 3, 4, 5, 9, 1, 2]).last().unwrap(),
            &[3, 4, 5, 9, 1, 2, 3, 4],
            "and behind the text's end what was guessed first"
        );
        assert!(guesses(&[1, 2, 3, 4, 5, 9, 1, 7]).is_empty(), "nothing ends in 1 7 before");
        assert!(guesses(&[5]).is_empty());
    }

    #[test]
    fn the_longest_match_comes_first_then_the_latest() {
        // 7 1 2 is followed by 3, and 1 2 by 4 (later). Both are guessed, the longer match's continuation first.
        let found = guesses(&[7, 1, 2, 3, 0, 1, 2, 4, 0, 7, 1, 2]);
        let first: Vec<&[i64]> = found.iter().filter(|path| path.len() == 1).map(|path| &path[..]).collect();
        assert_eq!(first, [[3], [4]]);
    }

    proptest! {
        #[test]
        fn guesses_are_a_tree_that_goes_on_from_the_text(ids in proptest::collection::vec(0i64..4, 1..60)) {
            let found = guesses(&ids);
            prop_assert!(found.len() <= NODES);
            for path in &found {
                // Each guess follows its predecessor somewhere earlier in the text, which includes earlier guesses.
                let text = [&ids[..], path].concat();
                let last = &text[text.len() - SHORTEST_NGRAM - 1..];
                prop_assert!(text[..text.len() - 1].windows(last.len()).any(|window| window == last));
            }
        }
    }
}
