//! A drafter whose tree depends on how many texts are decoded together, down to no guesses at all.

use super::tree_cache::TreeCache;
use super::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::model::llama::Llama;
use crate::tree::by_load::ByLoad;
use crate::tree::token_tree::TokenTree;

/// Lets one of several drafters with heads propose, by the number of texts of the step. Those that follow the rows are all told of them.
#[derive(Debug)]
pub struct LoadDrafter<'a> {
    parts: ByLoad<Box<dyn Drafter + 'a>>,
    roots: TreeCache<'a>,
}

impl<'a> LoadDrafter<'a> {
    /// Where there is no drafter, a text's root is proposed alone.
    pub fn new(backbone: &'a Llama, parts: ByLoad<Box<dyn Drafter + 'a>>) -> Self {
        Self { parts, roots: TreeCache::new(backbone) }
    }

    fn each(&mut self, mut tell: impl FnMut(&mut dyn Drafter)) {
        self.parts.trees_mut().for_each(|part| tell(&mut **part));
    }

    fn followers(&mut self, mut tell: impl FnMut(&mut dyn Drafter)) {
        self.each(|part| {
            if part.follows() {
                tell(part);
            }
        });
    }
}

impl Drafter for LoadDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        match self.parts.at_mut(batch.len()) {
            Some(part) => part.propose(batch),
            None => batch.iter().map(|text| self.roots.proposal(&TokenTree::new(text.root.id))).collect(),
        }
    }

    fn follows(&self) -> bool {
        self.parts.choices().iter().filter_map(|choice| choice.tree.as_ref()).any(|part| part.follows())
    }

    fn push_row(&mut self) {
        self.each(|part| part.push_row());
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.followers(|part| part.committed(row, tokens));
    }

    /// Another one may have proposed the tree: they are told of its accepted tokens only.
    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.committed(row, &verified.accepted);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.each(|part| part.truncate(row, tokens));
    }

    fn swap_remove(&mut self, row: usize) {
        self.each(|part| part.swap_remove(row));
    }
}
