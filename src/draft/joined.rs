//! Several drafters whose guesses share one tree: the likeliest of all, by measured hits ([`crate::tree::merged`]). Guesses are accepted as
//! if none had been drawn at random, which is lossless whatever they are.

use std::collections::VecDeque;

use super::tree_cache::{TreeCache, WindowTokens};
use super::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::model::llama::Llama;
use crate::tree::merged::{MAX_DRAFTERS, MeasuredHits, Merged, RankedGuess, RankedTree};

/// Proposes the likeliest guesses of several drafters, or of one.
#[derive(Debug)]
pub struct JoinedDrafter<'a> {
    parts: Vec<Box<dyn Drafter + 'a>>,
    /// Most guesses in a tree.
    nodes: usize,
    trees: TreeCache<'a>,
    hits: MeasuredHits,
    /// Of each row, the guesses that the text has not gone past yet.
    guessed: Vec<VecDeque<Guessed>>,
}

/// Guesses below the last of so many tokens.
#[derive(Debug)]
struct Guessed {
    tokens: usize,
    merged: Merged,
}

impl<'a> JoinedDrafter<'a> {
    /// Of 1 to [`MAX_DRAFTERS`] drafters, at most one of which has a window; trees of up to `nodes` guesses.
    pub fn new(backbone: &'a Llama, parts: Vec<Box<dyn Drafter + 'a>>, nodes: usize) -> Self {
        assert!((1..=MAX_DRAFTERS).contains(&parts.len()), "1 to {MAX_DRAFTERS} drafters");
        Self { parts, nodes, trees: TreeCache::new(backbone), hits: MeasuredHits::default(), guessed: vec![] }
    }

    fn merge(&mut self, row: usize, ids: &[i64], proposals: &[Proposal]) -> Proposal {
        let merged = Merged::of(&proposals.iter().map(guesses).collect::<Vec<_>>());
        let tree = merged.likeliest(self.nodes, &self.hits);
        self.guessed[row].push_back(Guessed { tokens: ids.len(), merged });
        let window = proposals.iter().find_map(window_tokens);
        self.trees.with_window(&tree, window)
    }

    /// Counts the guesses that a text has gone past.
    fn count_hits(&mut self, row: usize, ids: &[i64]) {
        let guessed = &mut self.guessed[row];
        while let Some(Guessed { tokens, merged }) = guessed.front()
            && tokens + merged.depth() <= ids.len()
        {
            self.hits.count(merged, &ids[*tokens..]);
            guessed.pop_front();
        }
    }

    fn followers(&mut self) -> impl Iterator<Item = &mut Box<dyn Drafter + 'a>> {
        self.parts.iter_mut().filter(|part| part.follows())
    }
}

impl Drafter for JoinedDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        let mut of_parts: Vec<_> = self.parts.iter_mut().map(|part| part.propose(batch).into_iter()).collect();
        let mut join = |(row, text): (usize, &TextSoFar)| {
            let proposals: Vec<Proposal> = of_parts.iter_mut().filter_map(Iterator::next).collect();
            self.count_hits(row, text.ids);
            self.merge(row, text.ids, &proposals)
        };
        batch.iter().enumerate().map(&mut join).collect()
    }

    fn follows(&self) -> bool {
        true
    }

    fn push_row(&mut self) {
        self.guessed.push(VecDeque::new());
        self.parts.iter_mut().for_each(|part| part.push_row());
    }

    /// Nothing is counted along these tokens, which the backbone did not choose.
    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.guessed[row].clear();
        self.followers().for_each(|part| part.committed(row, tokens));
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.followers().for_each(|part| part.verified(row, verified));
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.guessed[row].clear();
        self.parts.iter_mut().for_each(|part| part.truncate(row, tokens));
    }

    fn swap_remove(&mut self, row: usize) {
        self.guessed.swap_remove(row);
        self.parts.iter_mut().for_each(|part| part.swap_remove(row));
    }
}

/// A proposal's guesses on the host.
fn guesses(proposal: &Proposal) -> RankedTree {
    let tree = &proposal.tree.tree;
    let tokens = host(proposal);
    let node = |node: usize| RankedGuess {
        parent: tree.parent(node).unwrap_or(0),
        token: tokens[node],
        rank: tree.child_index(node).unwrap_or(0),
    };
    RankedTree { nodes: (0..tree.len()).map(node).collect() }
}

fn window_tokens(proposal: &Proposal) -> Option<WindowTokens> {
    let window = proposal.tree.window.clone()?;
    Some(WindowTokens { window, tokens: host(proposal).split_off(proposal.tree.tree.len()) })
}

fn host(proposal: &Proposal) -> Vec<i64> {
    Vec::try_from(&proposal.tokens_n).expect("one axis of int64")
}
