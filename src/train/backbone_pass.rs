//! The backbone's pass over a micro batch. A frozen backbone's hidden states are computed or read from the cache. A
//! trained backbone keeps its activations until the losses have produced the gradient of the hidden states, then runs
//! backward.

// B rows, T tokens of a row, N = B·T positions, H hidden, W a token's states (see [`crate::model::taps`]), L = 1 + number of taps
use tch::Tensor;

use crate::draft::loss::fused::{OutputLayer, distillation_loss, level_loss};
use crate::draft::trained::{DrafterBatch, Dropout, LevelTask, Reads, TrainedDrafter};
use crate::dtype::Dtype;
use crate::formats::metrics::MetricsSplit;
use crate::model::attention::RowMask;
use crate::model::backward::Tape;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::wide;
use crate::train::fed_batch::DeviceBatch;
use crate::train::feed::BatchMaker;
use crate::train::hidden_states::{
    CapturedSplits, HiddenStatesError, KeptStates, StatesReader, at_every_position, hidden_states,
};
use crate::train::plan::TrainPlan;
use crate::train::state::TrainState;
use crate::train::target_rule::TargetRule;

/// A backbone and its training plan.
#[derive(Debug)]
pub struct TrainingBackbone<'r> {
    backbone: &'r Llama,
    plan: &'r TrainPlan,
    states: StatesSource<'r>,
}

/// Where the hidden states of a frozen backbone come from.
#[derive(Debug)]
pub enum StatesSource<'r> {
    /// From the backbone, or from caches where a plan has them.
    Backbone(Box<StatesCaches<'r>>),
    /// From a server; the backbone has no decoder layers.
    Captured(CapturedSplits),
}

/// The caches of a frozen backbone's hidden states, if a plan has them.
#[derive(Debug, Default)]
pub struct StatesCaches<'r> {
    /// Of the training rows.
    pub train: Option<KeptStates<'r>>,
    pub validation: ValidationCache<'r>,
}

/// The cache of the validation rows.
#[derive(Debug, Default)]
pub enum ValidationCache<'r> {
    #[default]
    Off,
    /// The validation rows are the training rows: both use one file.
    OfTrain,
    Own(KeptStates<'r>),
}

impl<'r> StatesCaches<'r> {
    fn each(&mut self) -> impl Iterator<Item = (MetricsSplit, &mut KeptStates<'r>)> {
        let validation = match &mut self.validation {
            ValidationCache::Own(kept) => Some((MetricsSplit::Validation, kept)),
            ValidationCache::Off | ValidationCache::OfTrain => None,
        };
        self.train.iter_mut().map(|kept| (MetricsSplit::Train, kept)).chain(validation)
    }

    fn of(&mut self, split: MetricsSplit) -> Option<&mut KeptStates<'r>> {
        match (split, &mut self.validation) {
            (MetricsSplit::Train, _) | (MetricsSplit::Validation, ValidationCache::OfTrain) => self.train.as_mut(),
            (MetricsSplit::Validation, ValidationCache::Own(kept)) => Some(kept),
            (MetricsSplit::Validation, ValidationCache::Off) => None,
        }
    }
}

impl<'r> StatesSource<'r> {
    fn caches(&mut self) -> Option<&mut StatesCaches<'r>> {
        if let Self::Backbone(caches) = self { Some(caches) } else { None }
    }

    fn caches_of_splits(&mut self) -> impl Iterator<Item = (MetricsSplit, &mut KeptStates<'r>)> {
        self.caches().into_iter().flat_map(|caches| caches.each())
    }
}

/// The forward pass of one micro batch.
#[derive(Debug)]
pub struct BackbonePass<'r> {
    backbone: &'r Llama,
    /// Of the drafter, where it is not 0; the seed is that of the pass. `None` at evaluation.
    dropout: Option<Dropout>,
    /// `[N, W]`, or `[M, W]` of the positions that the cache keeps; the input of the drafter. Without autograd.
    pub states_nw: Tensor,
    /// `[N, H]`, the last ones of `states_nw`: the input of the LM head.
    pub hidden_nh: Tensor,
    /// The LM head with the adapters of this pass.
    pub lm_head: OutputLayer<'r>,
    /// `None` if the LM head is frozen.
    lm_target: Option<LmTarget>,
    /// `None` if the backbone is frozen, and at evaluation.
    kept: Option<KeptBackbonePass<'r>>,
}

/// The LM head's training target.
#[derive(Debug)]
enum LmTarget {
    Tokens,
    /// The distribution of the backbone without adapters, as its hidden states `[N, H]`.
    Teacher(Tensor),
}

/// A forward pass that waits for the gradient of its hidden states.
#[derive(Debug)]
struct KeptBackbonePass<'r> {
    tape: Tape<'r>,
    size_bth: Vec<i64>,
    /// `[N, H]`, as [`wide`]: every loss adds the gradient of the hidden states here.
    dhidden_nh: Tensor,
}

/// Summed losses of the LM head at evaluation, float64 scalars.
#[derive(Debug)]
pub struct LmEvaluation {
    /// The training loss.
    pub loss: Tensor,
    /// Cross-entropy of the next token, summed over the targets; its mean is the logarithm of the perplexity.
    pub cross_entropy: Tensor,
}

impl<'r> TrainingBackbone<'r> {
    /// `backbone` must be loaded for `plan`.
    pub fn new(backbone: &'r Llama, plan: &'r TrainPlan, states: StatesSource<'r>) -> Self {
        Self { backbone, plan, states }
    }

    /// Dtype that it computes in.
    pub fn dtype(&self) -> Dtype {
        Dtype::of(self.backbone.kind())
    }

    /// Makes batches of these rows for this backbone and `drafter`; reads their stored states.
    pub fn batch_maker(&mut self, drafter: &dyn TrainedDrafter, split: MetricsSplit) -> BatchMaker {
        let reader = self.reader(drafter.reads(), split);
        BatchMaker::new(&self.plan.loss, drafter, self.backbone.stages(), self.plan.trained.is_frozen(), reader)
    }

    /// Makes batches of rows that have no stored states.
    pub fn batch_maker_without_states(&self, drafter: &dyn TrainedDrafter) -> BatchMaker {
        BatchMaker::new(&self.plan.loss, drafter, self.backbone.stages(), self.plan.trained.is_frozen(), None)
    }

    fn reader(&mut self, reads: Reads, split: MetricsSplit) -> Option<StatesReader> {
        let (backbone, loss) = (self.backbone, &self.plan.loss);
        match &mut self.states {
            StatesSource::Backbone(caches) => caches.of(split).map(|kept| StatesReader::Kept(kept.reader())),
            StatesSource::Captured(splits) => {
                let rule = TargetRule::new(loss, reads);
                splits.of(split).map(|rows| StatesReader::Captured(rows.reader(rule, backbone)))
            }
        }
    }

    /// Runs the backbone over micro batch `micro` of step `step`, and the teacher if there is one.
    ///
    /// # Errors
    /// [`HiddenStatesError`] if the cache fails.
    pub fn forward(
        &mut self,
        batch: &DeviceBatch,
        step: usize,
        micro: usize,
    ) -> Result<BackbonePass<'r>, HiddenStatesError> {
        if self.plan.trained.is_frozen() {
            let states_nw = self.frozen_states(batch, MetricsSplit::Train)?;
            return Ok(BackbonePass { dropout: self.dropout(step, micro), ..self.pass(states_nw, Adapters::Off) });
        }
        let inputs = inputs(self.backbone, batch);
        let lm_target = Some(self.lm_target(&inputs));
        let (adapters, (tokens_bt, rows)) = (Adapters::Training { seed: self.seed_of(step, micro) }, inputs);
        let (hidden_bth, tape) = self.backbone.forward_kept(&tokens_bt, rows, adapters, self.plan.keep());
        let size_bth = hidden_bth.size();
        let hidden_nh = hidden_bth.view([-1, size_bth[2]]);
        let dhidden_nh = Tensor::zeros(hidden_nh.size(), (wide(hidden_nh.kind()), hidden_nh.device()));
        let kept = Some(KeptBackbonePass { tape, size_bth, dhidden_nh });
        let dropout = self.dropout(step, micro);
        Ok(BackbonePass { dropout, lm_target, kept, ..self.pass(hidden_nh, adapters) })
    }

    /// Evaluates a batch with adapters and without dropout; keeps nothing for a backward pass.
    ///
    /// # Errors
    /// [`HiddenStatesError`] if the cache fails.
    pub fn evaluate(&mut self, batch: &DeviceBatch) -> Result<BackbonePass<'r>, HiddenStatesError> {
        if self.plan.trained.is_frozen() {
            let states_nw = self.frozen_states(batch, MetricsSplit::Validation)?;
            return Ok(self.pass(states_nw, Adapters::Off));
        }
        let inputs = inputs(self.backbone, batch);
        let states_nw = hidden_states(self.backbone, &inputs, Adapters::On);
        Ok(BackbonePass { lm_target: Some(self.lm_target(&inputs)), ..self.pass(states_nw, Adapters::On) })
    }

    /// Writes the hidden states of the last batches to the cache. Waits for the device: call it where the run waits anyway.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn settle(&mut self) -> Result<(), HiddenStatesError> {
        self.states.caches_of_splits().try_for_each(|(_, kept)| kept.settle())
    }

    /// Which cache stores nothing more, and why, the first time that it is asked.
    pub fn take_notice(&mut self) -> Option<(MetricsSplit, HiddenStatesError)> {
        self.states.caches_of_splits().find_map(|(split, kept)| Some((split, kept.take_notice()?)))
    }

    /// Commits the hidden states computed so far, so that later runs find them.
    ///
    /// # Errors
    /// [`HiddenStatesError::Io`].
    pub fn commit(&mut self) -> Result<(), HiddenStatesError> {
        self.states.caches_of_splits().try_for_each(|(_, kept)| kept.commit())
    }

    /// The hidden states of a frozen backbone, computed or from the cache.
    fn frozen_states(&mut self, batch: &DeviceBatch, split: MetricsSplit) -> Result<Tensor, HiddenStatesError> {
        let backbone = self.backbone;
        let compute = || hidden_states(backbone, &inputs(backbone, batch), Adapters::Off);
        let Some(kept_m) = batch.kept_m() else { return Ok(compute()) };
        let states_mw = match &mut self.states {
            StatesSource::Captured(_) => {
                let layers_lmh = batch.read_ahead()?.expect("states of every batch that was fed");
                tch::no_grad(|| normed(backbone, &layers_lmh.on_device()))
            }
            StatesSource::Backbone(caches) => {
                let Some(kept) = caches.of(split) else { return Ok(compute()) };
                kept.of(&batch.fed.batch, &kept_m, batch.read_ahead()?, compute)?
            }
        };
        let whole_rows = self.plan.drafter.reads().whole_rows;
        let n = batch.fed.batch.input_ids.len() as i64;
        Ok(if whole_rows { at_every_position(&states_mw, &kept_m, n) } else { states_mw })
    }

    /// The pass of a frozen backbone.
    fn pass(&self, states_nw: Tensor, adapters: Adapters) -> BackbonePass<'r> {
        let lm_head = OutputLayer::lm_head(self.backbone, adapters);
        let hidden_nh = self.backbone.last_of(&states_nw);
        BackbonePass {
            backbone: self.backbone,
            dropout: None,
            states_nw,
            hidden_nh,
            lm_head,
            lm_target: None,
            kept: None,
        }
    }

    fn lm_target(&self, inputs: &(Tensor, RowMask)) -> LmTarget {
        if !self.plan.trained.has_teacher() {
            return LmTarget::Tokens;
        }
        LmTarget::Teacher(self.backbone.last_of(&hidden_states(self.backbone, inputs, Adapters::Off)))
    }

    fn dropout(&self, step: usize, micro: usize) -> Option<Dropout> {
        let p = self.plan.drafter.dropout();
        (p > 0.0).then(|| Dropout { p, seed: self.seed_of(step, micro) })
    }

    /// Seeds the dropout of a pass from the run's seed, the step and the micro batch.
    fn seed_of(&self, step: usize, micro: usize) -> u64 {
        let pass = (step as u64).wrapping_mul(1 << 20).wrapping_add(micro as u64 + 1);
        self.plan.train.seed ^ pass.wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }
}

/// The states `[M, W]` of captured layers `[L, M, H]`, the last one first.
fn normed(backbone: &Llama, layers_lmh: &Tensor) -> Tensor {
    let mut layers = layers_lmh.unbind(0);
    layers[0] = backbone.final_norm(&layers[0]);
    let same_kind = layers.iter().map(|layer_mh| layer_mh.to_kind(backbone.kind()));
    if let [last_mh] = &layers[..] { last_mh.shallow_clone() } else { Tensor::cat(&same_kind.collect::<Vec<_>>(), -1) }
}

/// Tokens `[B, T]` on the device of the backbone's embedding, and their attention mask.
fn inputs(backbone: &Llama, batch: &DeviceBatch) -> (Tensor, RowMask) {
    let (tokens_bt, of) = (batch.tokens_bt(), &batch.fed.batch);
    (tokens_bt, backbone.packed_rows(&of.segment_lengths, of.length as i64))
}

impl BackbonePass<'_> {
    /// What a drafter reads of this pass over `batch`, and what its levels learn.
    pub fn drafter_batch<'b>(&'b self, batch: &'b DeviceBatch, levels: Vec<LevelTask>) -> DrafterBatch<'b> {
        DrafterBatch {
            rows: &batch.fed.batch,
            backbone: self.backbone,
            lm_head: self.lm_head,
            states_nw: &self.states_nw,
            hidden_nh: &self.hidden_nh,
            dropout: self.dropout,
            levels,
        }
    }

    /// The sum of the hidden states' gradients, `[N, H]`, as [`wide`]; `None` if nothing before them is trained.
    pub fn dhidden_nh(&self) -> Option<&Tensor> {
        self.kept.as_ref().map(|kept| &kept.dhidden_nh)
    }

    /// Summed loss of the LM head, a float64 scalar; adds its gradients times `scale`. `None` if the LM head is frozen.
    pub fn lm_loss(&self, state: &TrainState, batch: &DeviceBatch, scale: f64) -> Option<Tensor> {
        let (lm_target, gradients) = (self.lm_target.as_ref()?, state.lm_gradients(self.dhidden_nh()?));
        let (hidden_nh, targets, into) = (&self.hidden_nh, batch.lm_head_targets(), Some((&gradients, scale)));
        Some(match lm_target {
            LmTarget::Tokens => level_loss(None, self.lm_head, hidden_nh, &targets, into).loss,
            LmTarget::Teacher(teacher_nh) => distillation_loss(self.lm_head, [hidden_nh, teacher_nh], &targets, into),
        })
    }

    /// The losses of the LM head without gradients; `None` if it is frozen.
    pub fn lm_evaluation(&self, batch: &DeviceBatch) -> Option<LmEvaluation> {
        let (lm_target, hidden_nh) = (self.lm_target.as_ref()?, &self.hidden_nh);
        let targets = batch.lm_head_targets();
        let cross_entropy = level_loss(None, self.lm_head, hidden_nh, &targets, None).loss;
        let loss = match lm_target {
            LmTarget::Tokens => cross_entropy.shallow_clone(),
            LmTarget::Teacher(teacher_nh) => distillation_loss(self.lm_head, [hidden_nh, teacher_nh], &targets, None),
        };
        Some(LmEvaluation { loss, cross_entropy })
    }

    /// Propagates the gradient in [`BackbonePass::dhidden_nh`] back through the backbone.
    pub fn backward(self, state: &TrainState) {
        let Some(KeptBackbonePass { tape, size_bth, dhidden_nh }) = self.kept else { return };
        tape.backward(&dhidden_nh.view(size_bth.as_slice()), &state.backbone_gradients());
    }
}
