//! Heads with the tree that they fill: Medusa heads fill a static tree at once, everything else is filled level by level.

use super::hydra::levels::HydraLevels;
use super::levels::{LevelDrafter, LevelGuesser};
use super::medusa::drafter::{DraftError, MedusaDrafter};
use super::medusa::heads::Heads;
use super::medusa::levels::MedusaLevels;
use super::{CommittedTokens, Drafter, Proposal, TextSoFar};
use crate::formats::tree::DynamicTree;
use crate::model::llama::Llama;
use crate::tree::guess_tree::GuessTree;

/// A drafter with heads.
#[derive(Debug)]
pub enum HeadsDrafter<'a> {
    /// Medusa heads and a static tree.
    AtOnce(MedusaDrafter<'a>),
    /// Sequential heads, or a tree that is chosen at each step.
    ByLevel(LevelDrafter<'a>),
}

impl<'a> HeadsDrafter<'a> {
    /// Checks that heads and tree fit the backbone, and prepares the tree on its device.
    ///
    /// # Errors
    /// [`DraftError`] names what does not fit.
    pub fn new(backbone: &'a Llama, heads: &'a Heads, tree: &'a GuessTree) -> Result<Self, DraftError> {
        heads.check_backbone(&backbone.config)?;
        tree.check_fits(heads.num_heads(), usize::try_from(backbone.config.vocab_size).unwrap_or(0))?;
        Ok(match tree {
            GuessTree::Static(tree) if !heads.architecture().is_sequential() => {
                Self::AtOnce(MedusaDrafter::new(backbone, heads, tree)?)
            }
            GuessTree::Static(tree) => {
                let guesser = HydraLevels::new(backbone, heads, tree.max_depth());
                Self::ByLevel(LevelDrafter::of_tree(backbone, Box::new(guesser), tree))
            }
            GuessTree::Dynamic(limits) => {
                Self::ByLevel(LevelDrafter::dynamic(backbone, guesser(backbone, heads, *limits), *limits))
            }
        })
    }
}

/// The guesses of heads for trees within these limits, below texts whose hidden states are those that the heads read, after any prefix
/// layer.
pub fn guesser_of_states<'a>(backbone: &'a Llama, heads: &'a Heads, limits: DynamicTree) -> Box<dyn LevelGuesser + 'a> {
    if heads.architecture().is_sequential() {
        Box::new(HydraLevels::of_states(backbone, heads, limits.depth))
    } else {
        Box::new(MedusaLevels::new(backbone, heads, limits))
    }
}

/// The guesses of heads for trees within these limits.
pub fn guesser<'a>(backbone: &'a Llama, heads: &'a Heads, limits: DynamicTree) -> Box<dyn LevelGuesser + 'a> {
    if heads.architecture().is_sequential() {
        Box::new(HydraLevels::new(backbone, heads, limits.depth))
    } else {
        Box::new(MedusaLevels::new(backbone, heads, limits))
    }
}

impl<'a> HeadsDrafter<'a> {
    fn drafter(&mut self) -> &mut (dyn Drafter + 'a) {
        match self {
            Self::AtOnce(drafter) => drafter,
            Self::ByLevel(drafter) => drafter,
        }
    }
}

impl Drafter for HeadsDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        self.drafter().propose(batch)
    }

    fn follows(&self) -> bool {
        matches!(self, Self::ByLevel(drafter) if drafter.follows())
    }

    fn push_row(&mut self) {
        self.drafter().push_row();
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.drafter().committed(row, tokens);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.drafter().truncate(row, tokens);
    }

    fn swap_remove(&mut self, row: usize) {
        self.drafter().swap_remove(row);
    }
}
