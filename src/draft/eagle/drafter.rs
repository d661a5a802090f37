//! An EAGLE-3 drafter as training, calibration and decoding use it.

use std::path::Path;

use tch::Tensor;

use super::known_text::EagleText;
use super::levels::EagleLevels;
use super::weights::{EAGLE3, Eagle, LM_HEAD, reads};
use crate::draft::Drafter;
use crate::draft::error::{BackboneMismatch, DraftError};
use crate::draft::heads::HEADS_FILE;
use crate::draft::levels::LevelDrafter;
use crate::draft::loss::fused::LevelSums;
use crate::draft::token_map::{D2T, TokenMap};
use crate::draft::trained::{DrafterBatch, DrafterGradients, KnownText, Reads, TrainedDrafter};
use crate::model::config::LlamaConfig;
use crate::model::eagle_layer::EagleLayer;
use crate::model::llama::Llama;
use crate::model::weights::{WeightsError, save};
use crate::tree::guess_tree::GuessTree;

impl TrainedDrafter for Eagle {
    fn reads(&self) -> Reads {
        reads(self.steps)
    }

    fn token_map(&self) -> Option<&TokenMap> {
        self.token_map.as_ref()
    }

    fn set_token_map(&mut self, token_map: TokenMap) {
        self.token_map = Some(token_map);
    }

    fn parameters(&self) -> Vec<(String, &Tensor)> {
        self.layer.parameters().into_iter().chain([(LM_HEAD.to_owned(), self.lm_head_vh())]).collect()
    }

    fn num_parameters(&self) -> u64 {
        let weights = EagleLayer::tensors(self.layer.config(), self.taps.layers().len());
        let in_layer: i64 = weights.iter().map(|(_, size)| size.iter().product::<i64>()).sum();
        in_layer.unsigned_abs() + self.guessable() as u64 * self.hidden_size.unsigned_abs()
    }

    fn losses(&self, batch: &DrafterBatch, into: Option<&DrafterGradients>) -> Vec<LevelSums> {
        self.losses_of_steps(batch, into)
    }

    fn guessable(&self) -> usize {
        self.token_map.as_ref().map_or(self.vocab_size as usize, |map| map.tokens().len())
    }

    fn check_backbone(&self, config: &LlamaConfig) -> Result<(), BackboneMismatch> {
        let sizes =
            [("hidden size", self.hidden_size, config.hidden_size), ("vocabulary", self.vocab_size, config.vocab_size)];
        match sizes.into_iter().find(|(_, drafter, backbone)| drafter != backbone) {
            Some((what, drafter, backbone)) => Err(BackboneMismatch { what, drafter, backbone }),
            None => Ok(()),
        }
    }

    fn drafter<'a>(&'a self, backbone: &'a Llama, tree: &'a GuessTree) -> Result<Box<dyn Drafter + 'a>, DraftError> {
        self.check_backbone(&backbone.config)?;
        tree.check_fits(self.steps, self.guessable())?;
        let guesser = Box::new(EagleLevels::new(backbone, self));
        Ok(match tree {
            GuessTree::Static(tree) => Box::new(LevelDrafter::for_tree(backbone, guesser, tree)),
            GuessTree::Dynamic(limits) => Box::new(LevelDrafter::dynamic(backbone, guesser, *limits)),
        })
    }

    fn known_text<'a>(&'a self, backbone: &'a Llama, ids: &[i64]) -> Box<dyn KnownText + 'a> {
        Box::new(EagleText::new(self, backbone, ids))
    }

    fn described(&self) -> (&'static str, usize) {
        (EAGLE3, 1)
    }

    fn file_name(&self) -> &'static str {
        HEADS_FILE
    }

    fn save(&self, folder: &Path) -> Result<(), WeightsError> {
        let d2t = self.token_map.as_ref().map(TokenMap::d2t);
        let tensors = self.parameters().into_iter().chain(d2t.iter().map(|d2t| (D2T.to_owned(), d2t)));
        save(&folder.join(HEADS_FILE), &tensors.collect::<Vec<_>>())
    }
}
