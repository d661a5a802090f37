//! Training of heads: what each of them computes in a micro batch, and where its gradients go.

// N positions, M targets of one head, H hidden, K heads
use std::path::Path;

use tch::Tensor;

use super::head_states::HeadStates;
use super::known_text::HeadsText;
use super::{HEADS_FILE, Head, HeadInput, Heads};
use crate::draft::Drafter;
use crate::draft::error::{BackboneMismatch, DraftError};
use crate::draft::loss::fused::{LevelBlocks, LevelGradients, LevelSums, OutputGradients, OutputLayer};
use crate::draft::loss::{Targets, cross_entropy_at};
use crate::draft::token_map::TokenMap;
use crate::draft::trained::{DrafterBatch, DrafterGradients, Dropout, KnownText, Reads, TrainedDrafter};
use crate::engine::cuda::draft::DeviceDraft;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::weights::WeightsError;
use crate::tree::guess_tree::GuessTree;
use crate::tree::sparse_tree::SparseTree;

/// A head, what it reads beside the hidden states, and its dropout in training.
#[derive(Debug, Clone, Copy)]
pub struct HeadPass<'m> {
    pub head: &'m Head,
    /// Has the embeddings.
    pub backbone: &'m Llama,
    pub dropout: Option<Dropout>,
}

impl<'m> HeadPass<'m> {
    /// Without dropout.
    pub fn new(head: &'m Head, backbone: &'m Llama) -> Self {
        Self { head, backbone, dropout: None }
    }

    /// The head's own W2, with its bias if it has one; `None` if the head uses the backbone's lm_head.
    pub fn output(&self) -> Option<OutputLayer<'m>> {
        Some(OutputLayer::plain(self.head.w2()?).with(self.head.w2_bias(), self.head.logit_spec(self.backbone)))
    }
}

impl LevelBlocks for HeadPass<'_> {
    fn parameters(&self) -> Vec<&Tensor> {
        self.head.block_parameters()
    }

    fn forward(&self, selected_mh: &Tensor, targets: &Targets) -> Tensor {
        let input = HeadInput { hidden_nh: selected_mh, previous_nj: targets.previous_mj.as_ref() };
        self.head.hidden_with(&input.rows(self.backbone), self.dropout)
    }
}

impl TrainedDrafter for Heads {
    fn reads(&self) -> Reads {
        self.shape().reads()
    }

    fn token_map(&self) -> Option<&TokenMap> {
        Heads::token_map(self)
    }

    fn set_token_map(&mut self, token_map: TokenMap) {
        self.set_map(token_map);
    }

    fn parameters(&self) -> Vec<(String, &Tensor)> {
        Heads::parameters(self)
    }

    fn num_parameters(&self) -> u64 {
        self.shape().parameters().unsigned_abs()
    }

    fn losses(&self, batch: &DrafterBatch, into: Option<&DrafterGradients>) -> Vec<LevelSums> {
        let states = HeadStates::new(self, batch, into);
        let loss = |k: usize| {
            let dropout = batch.dropout.map(|dropout| dropout.at_level(k));
            let pass = HeadPass { dropout, ..HeadPass::new(self.head(k), batch.backbone) };
            let output = pass.output().unwrap_or(batch.lm_head);
            let gradients = into.map(|into| self.gradients_of(k, into, states.dhidden_nh(into)));
            let fed = (batch, Heads::token_map(self));
            batch.levels[k].loss(&pass, output, fed, states.hidden_nh(batch), gradients.as_ref())
        };
        let sums = (0..self.num_heads()).map(loss).collect();
        if let Some(into) = into {
            states.backward(&into.own[self.shape().places().len()..], into.hidden_nh);
        }
        sums
    }

    fn guessable(&self) -> usize {
        self.draft_vocab_size()
    }

    fn check_backbone(&self, config: &LlamaConfig) -> Result<(), BackboneMismatch> {
        Heads::check_backbone(self, config)
    }

    fn drafter<'a>(&'a self, backbone: &'a Llama, tree: &'a GuessTree) -> Result<Box<dyn Drafter + 'a>, DraftError> {
        self.filling(backbone, tree)
    }

    fn on_device<'a>(&self, tree: &'a SparseTree) -> Option<DeviceDraft<'a>> {
        Some(self.matrices_for(tree))
    }

    fn known_text<'a>(&'a self, backbone: &'a Llama, ids: &[i64]) -> Box<dyn KnownText + 'a> {
        Box::new(HeadsText::new(self, backbone, ids))
    }

    fn described(&self) -> (&'static str, usize) {
        (self.architecture().name(), self.shape().medusa_num_layers)
    }

    fn file_name(&self) -> &'static str {
        HEADS_FILE
    }

    fn save(&self, folder: &Path) -> Result<(), WeightsError> {
        Heads::save(self, folder)
    }
}

impl Heads {
    /// Those of head `head` (0-based); those of a shared W2 sum over the heads.
    fn gradients_of<'g>(
        &self,
        head: usize,
        into: &DrafterGradients<'g>,
        dhidden_nh: Option<&'g Tensor>,
    ) -> LevelGradients<'g> {
        let (shape, places) = (self.shape(), self.shape().places());
        let is_its = |at: &usize| places[*at].head == head || shape.is_shared(places[*at]);
        let mut blocks: Vec<&Tensor> = (0..places.len()).filter(is_its).map(|at| into.own[at]).collect();
        let own = blocks.split_off(self.head(head).block_parameters().len());
        let output = match own[..] {
            [] => into.lm_head,
            _ => OutputGradients { weight_vh: own.first().copied(), bias_v: own.get(1).copied(), adapter: None },
        };
        LevelGradients { blocks, output, hidden_nh: dhidden_nh }
    }
}

/// Cross-entropy of head `head` summed over its targets: a float64 scalar with autograd, neither divided nor weighted.
/// `hidden_nh`: `[N, H]`, hidden states after the final norm, with the rows of the micro batch flattened.
pub fn cross_entropy_sum(
    heads: &Heads,
    head: usize,
    hidden_nh: &Tensor,
    targets: &Targets,
    backbone: &Llama,
) -> Tensor {
    let hidden_mh = hidden_nh.index_select(0, &targets.positions_m);
    let input = HeadInput { hidden_nh: &hidden_mh, previous_nj: targets.previous_mj.as_ref() };
    cross_entropy_at(&heads.logits(head, &input, backbone), &targets.tokens_m)
}
