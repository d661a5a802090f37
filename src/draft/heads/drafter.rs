//! Heads with the tree that they fill: Medusa heads fill a static tree at once, everything else is filled level by level.

use super::Heads;
use crate::draft::Drafter;
use crate::draft::hydra::levels::HydraLevels;
use crate::draft::levels::{LevelDrafter, LevelGuesser};
use crate::draft::medusa::drafter::{DraftError, MedusaDrafter};
use crate::draft::medusa::levels::MedusaLevels;
use crate::engine::cuda::draft::DeviceDraft;
use crate::model::llama::Llama;
use crate::tree::guess_tree::GuessTree;
use crate::tree::sparse_tree::SparseTree;

/// A drafter with heads.
#[derive(Debug)]
pub enum HeadsDrafter<'a> {
    /// Medusa heads and a static tree.
    AtOnce(MedusaDrafter<'a>),
    /// Sequential heads and a static tree.
    Sequential { drafter: LevelDrafter<'a>, heads: &'a Heads, tree: &'a SparseTree },
    /// A tree that is chosen at each step.
    Dynamic(LevelDrafter<'a>),
}

impl<'a> HeadsDrafter<'a> {
    /// Checks that heads and tree fit the backbone, and prepares the tree on its device.
    ///
    /// # Errors
    /// [`DraftError`] names what does not fit.
    pub fn new(backbone: &'a Llama, heads: &'a Heads, tree: &'a GuessTree) -> Result<Self, DraftError> {
        heads.check_backbone(&backbone.config)?;
        tree.check_fits(heads.num_heads(), heads.draft_vocab_size())?;
        Ok(match tree {
            GuessTree::Static(tree) if !heads.architecture().is_sequential() => {
                Self::AtOnce(MedusaDrafter::new(backbone, heads, tree)?)
            }
            GuessTree::Static(tree) => {
                let guesser = HydraLevels::new(backbone, heads, tree.max_depth());
                Self::Sequential { drafter: LevelDrafter::of_tree(backbone, Box::new(guesser), tree), heads, tree }
            }
            GuessTree::Dynamic(limits) => {
                let guesser: Box<dyn LevelGuesser> = match heads.architecture().is_sequential() {
                    false => Box::new(MedusaLevels::new(backbone, heads, *limits)),
                    true => Box::new(HydraLevels::new(backbone, heads, limits.depth)),
                };
                Self::Dynamic(LevelDrafter::dynamic(backbone, guesser, *limits))
            }
        })
    }

    /// The drafter for engines that draft on the host.
    pub fn on_host(self) -> Box<dyn Drafter + 'a> {
        match self {
            Self::AtOnce(drafter) => Box::new(drafter),
            Self::Sequential { drafter, .. } | Self::Dynamic(drafter) => Box::new(drafter),
        }
    }

    /// Heads with their tree, for an engine that drafts on the device; `None` for a tree that is chosen at each step.
    pub fn on_device(&self) -> Option<DeviceDraft<'a>> {
        match self {
            Self::AtOnce(drafter) => Some(drafter.on_device()),
            Self::Sequential { heads, tree, .. } => Some(heads.on_device(tree)),
            Self::Dynamic(_) => None,
        }
    }
}
