//! Drafters with trained weights, as training and calibration know them: levels of guesses.
//!
//! Level `l` (0-based) at position `t` predicts token `t + l + 2`; token `t + 1` is the backbone's own.

// N positions, M targets of a level, H hidden, W a token's states
use std::fmt;
use std::path::Path;

use tch::Tensor;

use super::Drafter;
use super::error::{BackboneMismatch, DraftError};
use super::levels::LevelGuesser;
use super::loss::fused::{
    LevelBlocks, LevelGradients, LevelSums, OutputGradients, OutputLayer, SoftObjective, level_loss, soft_level_loss,
};
use super::loss::{SoftTargets, Targets};
use super::token_map::TokenMap;
use crate::data::loader::Batch;
use crate::engine::cuda::draft::DeviceDraft;
use crate::formats::tree::DynamicTree;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::weights::WeightsError;
use crate::tree::guess_tree::GuessTree;
use crate::tree::sparse_tree::SparseTree;

/// What a drafter reads of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reads {
    pub levels: usize,
    /// Each level reads the tokens between its position and its target, too.
    pub tokens: bool,
    /// Every position is read, also one that no level predicts a target from.
    pub whole_rows: bool,
}

impl Reads {
    /// How many tokens after a position level `level` (0-based) reads beside the hidden state.
    pub fn tokens_of(self, level: usize) -> usize {
        if self.tokens { level + 1 } else { 0 }
    }
}

/// A drafter whose weights are trained.
pub trait TrainedDrafter: fmt::Debug {
    fn reads(&self) -> Reads;

    /// The tokens that it can guess; `None` for all.
    fn token_map(&self) -> Option<&TokenMap>;

    /// Replaces the token map by that of a checkpoint.
    fn set_token_map(&mut self, token_map: TokenMap);

    /// Every trained tensor with its name in the file.
    fn parameters(&self) -> Vec<(String, &Tensor)>;

    /// How many weights its levels have.
    fn num_parameters(&self) -> u64;

    /// Losses and hits of each level in a micro batch. Adds the gradients, each level's multiplied by its scale, to `into`.
    fn losses(&self, batch: &DrafterBatch, into: Option<&DrafterGradients>) -> Vec<LevelSums>;

    /// How many tokens it can guess: the backbone's vocabulary, or a part of it.
    fn guessable(&self) -> usize;

    /// Checks that it fits a backbone.
    ///
    /// # Errors
    /// [`BackboneMismatch`] names the size that differs.
    fn check_backbone(&self, config: &LlamaConfig) -> Result<(), BackboneMismatch>;

    /// The drafter that fills `tree`, for engines that draft on the host.
    ///
    /// # Errors
    /// [`DraftError`] names what does not fit.
    fn drafter<'a>(&'a self, backbone: &'a Llama, tree: &'a GuessTree) -> Result<Box<dyn Drafter + 'a>, DraftError>;

    /// The drafter that fills `tree` as plain matrices, for an engine that drafts on the device; `None` if none can.
    fn on_device<'a>(&self, _tree: &'a SparseTree) -> Option<DeviceDraft<'a>> {
        None
    }

    /// Runs the backbone over a text whose tokens are known.
    fn known_text<'a>(&'a self, backbone: &'a Llama, ids: &[i64]) -> Box<dyn KnownText + 'a>;

    /// Its name in config.json, and its number of layers there.
    fn described(&self) -> (&'static str, usize);

    /// The name of its file in a checkpoint.
    fn file_name(&self) -> &'static str;

    /// Writes its file into `folder`.
    ///
    /// # Errors
    /// [`WeightsError::File`].
    fn save(&self, folder: &Path) -> Result<(), WeightsError>;
}

/// A text whose tokens are known, as calibration asks a drafter about it.
pub trait KnownText {
    /// Logits of level `level` (0-based) at these positions, `[N, V]` or of the token map, given the text's own tokens up to its target.
    fn logits(&self, level: usize, positions: &[i64]) -> Tensor;

    /// A guesser that has begun with one text for each of these positions, whose root is the token after it.
    fn begin_at(&self, positions: &[i64], limits: DynamicTree) -> Box<dyn LevelGuesser + '_>;
}

/// A micro batch on the device, as a drafter's losses read it.
#[derive(Debug)]
pub struct DrafterBatch<'b> {
    /// Its rows on the host.
    pub rows: &'b Batch,
    pub backbone: &'b Llama,
    /// The LM head of this pass.
    pub lm_head: OutputLayer<'b>,
    /// `[N, W]`, or `[M, W]` of the positions that the cache keeps: the tokens' states (see [`crate::model::taps`]), without autograd.
    pub states_nw: &'b Tensor,
    /// `[N, H]`, the hidden states after the final norm among them.
    pub hidden_nh: &'b Tensor,
    /// `None` at evaluation.
    pub dropout: Option<Dropout>,
    /// What each level learns.
    pub levels: Vec<LevelTask>,
}

/// What a level learns in a micro batch.
#[derive(Debug)]
pub struct LevelTask {
    pub targets: LevelTargets,
    /// Of the gradients: the level's weight, with [`LevelTargets::Labels`] divided by the targets of the whole optimizer step.
    pub scale: f64,
}

/// The targets of a level.
#[derive(Debug)]
pub enum LevelTargets {
    /// The labels alone.
    Labels(Targets),
    /// Labels and the LM head's distribution, with the weights of both in the loss, each divided by the targets of the whole optimizer step.
    Soft { targets: SoftTargets, labels: f64, backbone: f64 },
}

impl LevelTask {
    /// Loss and hits of a level that computes `blocks` and `output` from the states `hidden_nh`.
    pub fn loss(
        &self,
        blocks: &dyn LevelBlocks,
        output: OutputLayer,
        (batch, token_map): (&DrafterBatch, Option<&TokenMap>),
        hidden_nh: &Tensor,
        into: Option<&LevelGradients>,
    ) -> LevelSums {
        let into = into.map(|gradients| (gradients, self.scale));
        match &self.targets {
            LevelTargets::Labels(targets) => level_loss(Some(blocks), output, hidden_nh, targets, into),
            LevelTargets::Soft { targets, labels, backbone } => {
                let lm_head = batch.lm_head.with_tokens(token_map.map(TokenMap::tokens_n));
                let objective =
                    SoftObjective { lm_head, teacher_nh: batch.hidden_nh, labels: *labels, backbone: *backbone };
                soft_level_loss(blocks, output, hidden_nh, targets, objective, into)
            }
        }
    }
}

/// Accumulators for the gradients of a drafter's losses.
#[derive(Debug)]
pub struct DrafterGradients<'g> {
    /// In the order of [`TrainedDrafter::parameters`].
    pub own: Vec<&'g Tensor>,
    /// The LM head's, for levels that use it.
    pub lm_head: OutputGradients<'g>,
    /// `[N, H]`, as [`wide`](crate::torch::wide): of the hidden states; `None` if nothing before them is trained.
    pub hidden_nh: Option<&'g Tensor>,
}

/// Dropout of a pass.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// The fraction of the inputs that is dropped.
    pub p: f64,
    /// Determines the masks.
    pub seed: u64,
}

impl Dropout {
    /// With masks of its own for level `level` (0-based).
    #[must_use]
    pub fn at_level(self, level: usize) -> Self {
        Self { seed: self.seed ^ (level as u64 + 1).wrapping_mul(0xA076_1D64_78BD_642F), ..self }
    }
}
