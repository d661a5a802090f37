//! Heads as drafters: Medusa heads fill a static tree at once, everything else is filled level by level.

use super::Heads;
use crate::draft::Drafter;
use crate::draft::error::DraftError;
use crate::draft::hydra::levels::HydraLevels;
use crate::draft::levels::{LevelDrafter, LevelGuesser};
use crate::draft::medusa::drafter::MedusaDrafter;
use crate::draft::medusa::levels::MedusaLevels;
use crate::formats::tree::DynamicTree;
use crate::model::llama::Llama;
use crate::tree::guess_tree::GuessTree;

impl Heads {
    /// See [`crate::draft::trained::TrainedDrafter::drafter`].
    pub(super) fn filling<'a>(
        &'a self,
        backbone: &'a Llama,
        tree: &'a GuessTree,
    ) -> Result<Box<dyn Drafter + 'a>, DraftError> {
        self.check_backbone(&backbone.config)?;
        tree.check_fits(self.num_heads(), self.draft_vocab_size())?;
        Ok(match tree {
            GuessTree::Static(tree) if self.architecture().is_sequential() => {
                let guesser = HydraLevels::new(backbone, self, tree.max_depth());
                Box::new(LevelDrafter::for_tree(backbone, Box::new(guesser), tree))
            }
            GuessTree::Static(tree) => Box::new(MedusaDrafter::new(backbone, self, tree)?),
            GuessTree::Dynamic(limits) => {
                Box::new(LevelDrafter::dynamic(backbone, self.guesser(backbone, *limits), *limits))
            }
        })
    }

    fn guesser<'a>(&'a self, backbone: &'a Llama, limits: DynamicTree) -> Box<dyn LevelGuesser + 'a> {
        match self.architecture().is_sequential() {
            false => Box::new(MedusaLevels::new(backbone, self, limits)),
            true => Box::new(HydraLevels::new(backbone, self, limits.depth)),
        }
    }
}
