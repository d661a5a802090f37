//! How long a run takes, estimated before it starts. A training step, an evaluation and answers are timed with the backbone's first layer and with its
//! first two: the difference is the time of one layer.

use std::iter;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::time::Instant;

use crate::data::DataError;
use crate::data::loader::BatchShare;
use crate::decode::own_answers::{AnswerLimits, RowPrompts, greedy_answers};
use crate::formats::metrics::MetricsSplit;
use crate::model::llama::Llama;
use crate::torch::{guard, memory};
use crate::train::backbone_pass::{StatesSource, TrainingBackbone};
use crate::train::checked::CheckedRun;
use crate::train::error::TrainError;
use crate::train::fed_batch::FedBatch;
use crate::train::loading;
use crate::train::own_answers::{MeasuredTexts, NEW_TOKENS, together};
use crate::train::ranks::Ranks;
use crate::train::state::TrainState;
use crate::train::step::{StepShare, StepWeights, evaluate, train_step};
use crate::train::targets::TargetCounts;

/// Tokens of the answers that are timed.
const TIMED_TOKENS: [usize; 2] = [1, 5];
/// A time is the shortest of so many, behind one that also prepares the products.
const ROUNDS: usize = 2;

/// Seconds that a backbone of one or two layers takes.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassTimes {
    /// Per token of a training step of one micro batch.
    pub training: f64,
    /// Per token of an evaluation.
    pub evaluation: f64,
    /// Prompts that are answered together, and the first tokens of their answers.
    pub prompts: f64,
    /// A further token of each of these answers.
    pub answers: f64,
}

/// Seconds of some work that goes through layers.
#[derive(Debug, Clone, Copy)]
struct LayeredTime {
    layer: f64,
    rest: f64,
}

impl LayeredTime {
    fn of([one, two]: [f64; 2]) -> Self {
        let layer = (two - one).max(0.0);
        Self { layer, rest: (one - layer).max(0.0) }
    }

    /// Of so many layers.
    fn with(self, layers: f64) -> f64 {
        self.rest + layers * self.layer
    }
}

impl CheckedRun {
    /// Tokens of all steps.
    pub fn tokens(&self) -> usize {
        let epochs_tokens = self.pack_report.tokens as u128 * self.total_steps as u128;
        usize::try_from(epochs_tokens / self.steps_per_epoch().max(1) as u128).unwrap_or(usize::MAX)
    }

    /// The backbone's hidden size.
    pub fn hidden_size(&self) -> i64 {
        self.config.hidden_size
    }

    /// The expected seconds of the whole run: steps, evaluations and answers to validation prompts. `None` for a backbone without layers here, or on
    /// several devices.
    ///
    /// # Errors
    /// [`TrainError`], as the run would fail.
    pub fn expected_seconds(&self) -> Result<Option<f64>, TrainError> {
        if !self.has_weights || self.captured.is_some() || self.stages.len() > 1 {
            return Ok(None);
        }
        let prompts = self.validation_prompts()?;
        memory::keep_freed_blocks(); // as a run does
        let first_layers = |layers| guard("timing the first layers", || self.timed(layers, &prompts));
        let timed = [first_layers(1)??, first_layers(self.config.num_hidden_layers.min(2))??];
        Ok(Some(self.seconds_with(timed, &prompts)))
    }

    /// As [`CheckedRun::expected_seconds`], where the first layer and the first two took so long.
    ///
    /// # Errors
    /// A damaged token cache, or as of [`MeasuredTexts::of`].
    pub fn seconds_at(&self, timed: [PassTimes; 2]) -> Result<f64, TrainError> {
        Ok(self.seconds_with(timed, &self.validation_prompts()?))
    }

    fn seconds_with(&self, timed: [PassTimes; 2], prompts: &[Vec<i64>]) -> f64 {
        let of = |part: fn(PassTimes) -> f64| LayeredTime::of(timed.map(part));
        let layers = self.config.num_hidden_layers as f64;
        let training = self.tokens() as f64 * of(|t| t.training).with(layers * self.epochs_with_backbone());
        let steps = self.answer_lengths(prompts).max().unwrap_or_default().saturating_sub(1);
        let batch = of(|t| t.prompts).with(layers) + steps as f64 * of(|t| t.answers).with(layers);
        let batches = prompts.len().div_ceil(self.together(prompts).get());
        training + self.evaluation_seconds(of(|t| t.evaluation), prompts) + batches as f64 * batch
    }

    fn together(&self, prompts: &[Vec<i64>]) -> NonZeroUsize {
        together(&self.plan, prompts.iter().map(Vec::len))
    }

    /// The prompts of the validation rows that the backbone will answer.
    fn validation_prompts(&self) -> Result<Vec<Vec<i64>>, TrainError> {
        let most = MeasuredTexts::of(self)?.and_then(MeasuredTexts::answers);
        let chosen = self.held_out().zip(most).map(|(rows, most)| RowPrompts::of(rows, most));
        let chosen = chosen.transpose().map_err(DataError::from)?.map_or_else(Vec::new, |prompts| prompts.chosen);
        Ok(chosen.into_iter().map(|(_, ids)| ids).collect())
    }

    /// The most tokens of each answer.
    fn answer_lengths(&self, prompts: &[Vec<i64>]) -> impl Iterator<Item = usize> {
        let length = self.plan.data.max_length.get();
        prompts.iter().map(move |prompt| NEW_TOKENS.min(length.saturating_sub(prompt.len())))
    }

    /// The part of the epochs in which the backbone's layers run: only the first where hidden states are cached.
    fn epochs_with_backbone(&self) -> f64 {
        match self.plan.train.hidden_state_cache {
            Some(_) => (self.steps_per_epoch() as f64 / self.total_steps as f64).min(1.0),
            None => 1.0,
        }
    }

    /// The states of validation rows are cached as those of training, the states of answers are not.
    fn evaluation_seconds(&self, token: LayeredTime, prompts: &[Vec<i64>]) -> f64 {
        let Some(validation) = &self.validation else { return 0.0 };
        let every = self.plan.train.eval_every.map_or(self.total_steps, |every| every.get());
        let baseline = usize::from(!self.plan.trained.is_frozen());
        let evaluations = (self.total_steps.div_ceil(every) + baseline) as f64;
        let is_cached = self.plan.train.hidden_state_cache.is_some();
        let sequences = validation.sequences();
        let rows: usize = (0..sequences.len()).map(|id| sequences.length(id)).sum();
        let answers = prompts.iter().map(Vec::len).chain(self.answer_lengths(prompts)).sum::<usize>();
        let layers = self.config.num_hidden_layers as f64;
        let rows_with_layers = rows as f64 * if is_cached { 1.0 } else { evaluations };
        evaluations * (rows + answers) as f64 * token.rest
            + (rows_with_layers + evaluations * answers as f64) * layers * token.layer
    }

    /// Trains, evaluates and answers prompts with the backbone's first layers.
    fn timed(&self, layers: usize, prompts: &[Vec<i64>]) -> Result<PassTimes, TrainError> {
        let backbone = loading::backbone(self, Some(layers))?;
        let [training, evaluation] = self.timed_tokens(&backbone)?;
        let times = PassTimes { training, evaluation, ..PassTimes::default() };
        if prompts.is_empty() {
            return Ok(times);
        }
        let answering = loading::answering(self, Some(layers))?;
        let backbone = answering.as_ref().unwrap_or(&backbone);
        let (together, length) = (self.together(prompts), self.plan.data.max_length.get());
        let batch: Vec<&[i64]> = prompts.iter().take(together.get()).map(Vec::as_slice).collect();
        let answered = |new_tokens| {
            let limits = AnswerLimits { together, new_tokens, length };
            shortest(|| Ok(greedy_answers(backbone, &batch, limits, &mut |_| ControlFlow::Continue(())).map(drop)?))
        };
        let [prompts, all] = [answered(TIMED_TOKENS[0])?, answered(TIMED_TOKENS[1])?];
        let answers = (all - prompts).max(0.0) / (TIMED_TOKENS[1] - TIMED_TOKENS[0]) as f64;
        Ok(PassTimes { prompts, answers, ..times })
    }

    /// Seconds per token of a training step, and of an evaluation, of the first micro batch.
    fn timed_tokens(&self, backbone: &Llama) -> Result<[f64; 2], TrainError> {
        let plan = &self.plan;
        let guessed = self.draft_vocabulary.as_ref().map(|vocabulary| &vocabulary.tokens[..]);
        let mut state = TrainState::new(self.drafter.build(backbone, guessed, plan.train.seed)?, backbone, plan);
        let mut training = TrainingBackbone::new(backbone, plan, StatesSource::Backbone(Box::default()));
        let maker = training.batch_maker(&*state.drafter, MetricsSplit::Train);
        let batch = self.batches(0, BatchShare::WHOLE)?.swap_remove(0);
        let tokens = batch.tokens() as f64;
        let made = || maker.make(batch.clone());
        let lambda0 = plan.heads_coefficient.peak;
        let weights =
            StepWeights { loss: &plan.loss, lambda0, rate: plan.learning_rate, max_grad_norm: plan.max_grad_norm };
        let batches = [made()];
        let counts = counts(&batches[0], state.drafter.reads().levels);
        let share = StepShare { batches: &batches, counts: &counts, ranks: Ranks::alone() };
        let step = shortest(|| Ok(train_step(&mut training, &mut state, share, &weights).map(drop)?))?;
        let evaluation = shortest(|| {
            let groups = iter::once(Ok(vec![made()]));
            evaluate::<TrainError>(&mut training, &*state.drafter, groups, &plan.loss, lambda0, Ranks::alone())
                .map(drop)
        })?;
        Ok([step / tokens, evaluation / tokens])
    }
}

fn counts(batch: &FedBatch, levels: usize) -> TargetCounts {
    let mut counts = TargetCounts::new(levels);
    counts.add(&batch.batch, &batch.targets);
    counts
}

/// The shortest time of some rounds.
fn shortest(mut work: impl FnMut() -> Result<(), TrainError>) -> Result<f64, TrainError> {
    work()?;
    let mut seconds = f64::INFINITY;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        work()?;
        seconds = seconds.min(began.elapsed().as_secs_f64());
    }
    Ok(seconds)
}
