//! One optimizer step: micro batches through the backbone, losses of the LM head and of every level, backward, one
//! update. A frozen backbone has no loss and no backward pass.

// B rows, T tokens of a row, N = B·T positions, H hidden, K levels
use std::fmt::Display;

use tch::{Kind, Tensor};

use crate::draft::loss::LossConfig;
use crate::draft::loss::fused::{LevelSums, TOP};
use crate::draft::trained::{LevelTargets, LevelTask, TrainedDrafter};
use crate::dtype::Dtype;
use crate::fused::optim::first_not_finite;
use crate::torch::{TorchPanic, guard, rehearsal};
use crate::train::backbone_pass::{BackbonePass, LmEvaluation, TrainingBackbone};
use crate::train::fed_batch::{DeviceBatch, FedBatch};
use crate::train::gathered_texts::EvaluatedTexts;
use crate::train::hidden_states::HiddenStatesError;
use crate::train::ranks::{Ranks, RanksError};
use crate::train::state::TrainState;
use crate::train::targets::{TargetCount, TargetCounts};

/// Losses and accuracies over some batches. Each level is averaged over its own targets.
#[derive(Debug, Clone, PartialEq)]
pub struct StepMetrics {
    /// Σ λk·Lk in Medusa-1, L_LM + λ0·Σ λk·Lk in Medusa-2.
    pub loss: f64,
    /// L_LM; `None` in Medusa-1.
    pub lm_loss: Option<f64>,
    /// Σ λk·Lk, without λ0.
    pub heads_loss: f64,
    /// exp of the LM head's cross-entropy; only of Medusa-2's evaluations.
    pub perplexity: Option<f64>,
    /// Lk: each summed loss ÷ number of its targets, weighted by `loss.targets`; `None` for a level without a target.
    pub level_losses: Vec<Option<f64>>,
    /// For each level the fraction of its labels among the first 1, 2, … 5 guesses; `None` for a level without a label.
    pub level_top: Vec<Option<[f64; TOP]>>,
    /// Tokens per step of a tree on rows that it was not searched on (see [`crate::tree::cross_validation`]); only of evaluations.
    pub tokens_per_step: Option<f64>,
    /// Input tokens.
    pub tokens: u64,
}

/// Why an update was not made or not kept.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The loss or the gradient norm is NaN or infinite.
    #[error(
        "step {step}: {what} is {value}, so the update was skipped; rows {rows:?} of the training data \
         (counted from 0, before shuffling); lower optimizer.learning_rate, or check the weights{}", float16_advice(*dtype)
    )]
    NotFinite {
        /// The skipped step, counted from 1 as in metrics.jsonl.
        step: usize,
        /// The loss or the gradient norm.
        what: &'static str,
        value: f64,
        /// Indices of this step's training rows, of all processes.
        rows: Vec<usize>,
        /// The backbone's.
        dtype: Dtype,
    },
    #[error(transparent)]
    HiddenStates(#[from] HiddenStatesError),
    #[error(transparent)]
    Torch(#[from] TorchPanic),
    /// Another process of the run.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// The update itself overflowed.
    #[error("step {step}: the update made {parameter} NaN or infinite; lower optimizer.learning_rate")]
    ParameterNotFinite {
        /// Counted from 1.
        step: usize,
        /// The first such tensor.
        parameter: String,
    },
    /// The loss on the validation rows is NaN or infinite.
    #[error(
        "after step {step} the loss on the validation rows is {value}; lower optimizer.learning_rate, or check the \
         weights"
    )]
    EvaluationNotFinite {
        /// Counted from 1.
        step: usize,
        value: f64,
    },
}

/// The result of an optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Measured before the update.
    pub metrics: StepMetrics,
    /// Euclidean norm over all trained parameters, before clipping.
    pub grad_norm: f64,
}

/// Weights of the losses, and parameters of the update, for one step.
#[derive(Debug, Clone, Copy)]
pub struct StepWeights<'c> {
    /// Has the weight λk of each level.
    pub loss: &'c LossConfig,
    /// λ0 of this step; 1 in Medusa-1.
    pub lambda0: f64,
    /// Learning rate of this step.
    pub rate: f64,
    /// Gradients are clipped to this norm.
    pub max_grad_norm: f64,
}

/// What a process computes of an optimizer step.
#[derive(Debug, Clone, Copy)]
pub struct StepShare<'b> {
    /// This process's micro batches.
    pub batches: &'b [FedBatch],
    /// Of all processes' micro batches.
    pub counts: &'b TargetCounts,
    pub ranks: Ranks<'b>,
}

/// Runs this process's micro batches of one optimizer step, sums the gradients over all processes and updates the trained parameters. A level
/// without a target in the step has a zero gradient and no loss.
///
/// # Errors
/// [`StepError`]; the parameters are then unchanged.
pub fn train_step(
    backbone: &mut TrainingBackbone,
    state: &mut TrainState,
    share: StepShare,
    weights: &StepWeights,
) -> Result<StepOutcome, StepError> {
    let ranks = share.ranks;
    let work = format!("training step {}", state.step + 1);
    let passed = guard(&work, || MetricSums::run_passes(backbone, state, share, weights));
    let passed = passed.map_err(StepError::from).flatten();
    // Also if this process failed: the others wait for it.
    if let Err(lost) = state.reduce_gradients(ranks) {
        return Err(passed.err().unwrap_or_else(|| lost.into())); // an own error says more
    }
    // The only time that a step waits for the device: whether the update is made depends on the norm.
    let read = passed.and_then(|sums| Ok(guard(&work, || sums.read(Some(&state.gradient_norm())))?));
    let read = read.and_then(|read| backbone.settle().map(|()| read).map_err(StepError::from));
    let numbers = read.as_ref().map_or_else(|_| ReadSums::none(state.drafter.reads().levels), ReadSums::numbers);
    let squared_norm = read.as_ref().map_or(0.0, |read| squared_norm(state, read, ranks));
    let (read, numbers) = ranks.agree_and_sum(read, [numbers, vec![squared_norm]].concat())?;
    let (squared_norm, numbers) = numbers.split_last().expect("the squared norm is the last");
    // The square root of a square is not always the number itself.
    let grad_norm = if ranks.is_alone() { read.grad_norm.expect("it was read") } else { squared_norm.sqrt() };
    let metrics = ReadSums::from_numbers(numbers).finish(weights.loss, share.counts, weights.lambda0);
    check_numbers(state.step + 1, &metrics, grad_norm, share, backbone.dtype())?;
    // As in torch.nn.utils.clip_grad_norm_.
    let clip = (weights.max_grad_norm / (grad_norm + 1e-6)).min(1.0);
    let updated = guard(&work, || state.update_own(weights.rate, clip)).map_err(StepError::from);
    ranks.agree(updated)?; // the others would wait for its values, or learn of its end alone
    state.exchange_values(ranks)?;
    state.step += 1;
    state.tokens += metrics.tokens;
    Ok(StepOutcome { metrics, grad_norm })
}

/// Further advice for a dtype with a small range.
pub(super) fn float16_advice(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float16 => ", or set backbone.dtype = \"bfloat16\": float16 ends at 65504",
        Dtype::Float32 | Dtype::BFloat16 | Dtype::Float64 => "",
    }
}

fn check_numbers(
    step: usize,
    metrics: &StepMetrics,
    grad_norm: f64,
    share: StepShare,
    dtype: Dtype,
) -> Result<(), StepError> {
    let numbers = [("the loss", metrics.loss), ("the gradient norm", grad_norm)];
    match numbers.into_iter().find(|(_, value)| !value.is_finite()) {
        Some((what, value)) => Err(StepError::NotFinite { step, what, value, rows: share.rows_of_all()?, dtype }),
        None => Ok(()),
    }
}

impl StepShare<'_> {
    /// The training rows of all processes, in the order of their micro batches. All processes call it: they have the same sums.
    fn rows_of_all(&self) -> Result<Vec<usize>, RanksError> {
        let own: Vec<Vec<usize>> = self.batches.iter().map(|batch| batch.batch.row_ids.concat()).collect();
        let all = self.ranks.gather(&serde_json::to_vec(&own).expect("JSON holds numbers"))?;
        let all = all.iter().map(|rows| serde_json::from_slice(rows).expect("the same program wrote it"));
        let all: Vec<Vec<Vec<usize>>> = all.collect();
        let turns = all.iter().map(Vec::len).max().unwrap_or(0); // the processes took turns
        let at_turn = |turn: usize| all.iter().filter_map(move |values| values.get(turn));
        Ok((0..turns).flat_map(at_turn).flatten().copied().collect())
    }
}

/// Checks all parameters: an update can overflow even if its loss and gradient did not.
///
/// # Errors
/// [`StepError::ParameterNotFinite`], or an error of libtorch.
pub fn check_finite(state: &TrainState) -> Result<(), StepError> {
    let parameters = state.all();
    match guard("the check of the parameters", || first_not_finite(&parameters))? {
        Some(broken) => {
            Err(StepError::ParameterNotFinite { step: state.step, parameter: parameters[broken].name.clone() })
        }
        None => Ok(()),
    }
}

/// This process's part of the squared norm of the gradients: of its share, or all of it on rank 0, so that all processes clip alike.
fn squared_norm(state: &TrainState, read: &ReadSums, ranks: Ranks) -> f64 {
    let own = if state.is_shared() || ranks.is_first() { read.grad_norm } else { None };
    own.map_or(0.0, |norm| norm * norm)
}

/// Losses and accuracies over groups of batches, which are taken one at a time, without an update: this process's share of them. `lambda0`
/// weighs the drafter's loss.
///
/// # Errors
/// The error of a group that cannot be read, of the cache of hidden states, or of another process.
pub fn evaluate<E: From<StepError> + From<TorchPanic> + From<RanksError> + Display>(
    backbone: &mut TrainingBackbone,
    drafter: &dyn TrainedDrafter,
    groups: impl Iterator<Item = Result<Vec<FedBatch>, E>>,
    loss: &LossConfig,
    lambda0: f64,
    ranks: Ranks,
) -> Result<StepMetrics, E> {
    let levels = drafter.reads().levels;
    let none = TargetCounts::new(levels);
    let (counted, summed) = (none.numbers().len(), ReadSums::none(levels).len());
    let mut texts = EvaluatedTexts::new(levels, ranks);
    let evaluated = guard("the evaluation", || {
        let mut sums = MetricSums::new(drafter, *loss, none);
        sums.evaluate_all(backbone, drafter, groups, &mut texts)?;
        Ok([sums.counts.numbers(), sums.read(None).numbers()].concat())
    });
    let evaluated = evaluated.map_err(E::from).flatten();
    let numbers = evaluated.as_ref().map_or_else(|_| vec![0.0; counted + summed], Clone::clone);
    let (_, numbers) = ranks.agree_and_sum(evaluated, numbers)?;
    let (counts, numbers) = numbers.split_at(counted);
    let metrics = ReadSums::from_numbers(numbers).finish(loss, &TargetCounts::from_numbers(counts), lambda0);
    Ok(StepMetrics { tokens_per_step: texts.tokens_per_step()?, ..metrics })
}

/// Sums over micro batches; they stay on the device until [`MetricSums::read`].
struct MetricSums {
    config: LossConfig,
    counts: TargetCounts,
    by_level: Vec<LevelSums>,
    /// The training loss of the LM head.
    lm_loss: Option<Tensor>,
    /// Only in evaluations.
    lm_cross_entropy: Option<Tensor>,
}

impl MetricSums {
    fn new(drafter: &dyn TrainedDrafter, config: LossConfig, counts: TargetCounts) -> Self {
        let device = drafter.parameters()[0].1.device();
        let by_level = (0..drafter.reads().levels).map(|_| LevelSums::zero(device)).collect();
        Self { config, counts, by_level, lm_loss: None, lm_cross_entropy: None }
    }

    /// The losses of a process's micro batches, whose gradients are added to those of `state`.
    fn run_passes(
        backbone: &mut TrainingBackbone,
        state: &TrainState,
        share: StepShare,
        weights: &StepWeights,
    ) -> Result<Self, StepError> {
        let mut sums = Self::new(&*state.drafter, *weights.loss, share.counts.clone());
        sums.pass_all(backbone, state, share, weights.lambda0)?;
        state.join_tied_gradients();
        Ok(sums)
    }

    /// Adds the losses and the gradients of a process's micro batches.
    fn pass_all(
        &mut self,
        backbone: &mut TrainingBackbone,
        state: &TrainState,
        StepShare { batches, ranks, .. }: StepShare,
        lambda0: f64,
    ) -> Result<(), StepError> {
        let on_device: Vec<DeviceBatch> = batches.iter().map(FedBatch::on_device).collect();
        for (index, batch) in on_device.iter().enumerate() {
            let pass = backbone.forward(batch, state.step, ranks.share().number(index))?;
            let _ = self.add_levels(&*state.drafter, &pass, batch, Some((state, lambda0)));
            let lm_scale = 1.0 / self.counts.lm_head.max(1) as f64;
            if let Some(loss) = pass.lm_loss(state, batch, lm_scale) {
                add_to(&mut self.lm_loss, loss);
            }
            pass.backward(state);
        }
        Ok(())
    }

    /// Counts groups of batches and adds their losses.
    fn evaluate_all<E: From<StepError>>(
        &mut self,
        backbone: &mut TrainingBackbone,
        drafter: &dyn TrainedDrafter,
        groups: impl Iterator<Item = Result<Vec<FedBatch>, E>>,
        texts: &mut EvaluatedTexts,
    ) -> Result<(), E> {
        for group in groups {
            for batch in &group? {
                self.counts.add(&batch.batch, &batch.targets);
                let guesses = self.evaluate(backbone, drafter, &batch.on_device()).map_err(StepError::from)?;
                texts.add_batch(batch.targets.texts(&batch.batch, &guesses));
            }
        }
        Ok(())
    }

    /// Adds the losses of a batch; returns the ranks of each level's targets.
    fn evaluate(
        &mut self,
        backbone: &mut TrainingBackbone,
        drafter: &dyn TrainedDrafter,
        batch: &DeviceBatch,
    ) -> Result<Vec<Vec<usize>>, HiddenStatesError> {
        let pass = backbone.evaluate(batch)?;
        if let Some(LmEvaluation { loss, cross_entropy }) = pass.lm_evaluation(batch) {
            add_to(&mut self.lm_loss, loss);
            add_to(&mut self.lm_cross_entropy, cross_entropy);
        }
        let ranks = on_host(&self.add_levels(drafter, &pass, batch, None));
        backbone.settle()?;
        Ok(ranks)
    }

    /// Adds every level's loss and hits on one micro batch; in training also their gradients. Returns the ranks of each
    /// level's targets, `[M]`.
    fn add_levels(
        &mut self,
        drafter: &dyn TrainedDrafter,
        pass: &BackbonePass,
        batch: &DeviceBatch,
        training: Option<(&TrainState, f64)>,
    ) -> Vec<Tensor> {
        let lambda0 = training.map_or(1.0, |(_, lambda0)| lambda0);
        let tasks = (0..self.by_level.len()).map(|level| self.task(level, batch, lambda0)).collect();
        let gradients = training.map(|(state, _)| state.drafter_gradients(pass.dhidden_nh()));
        let in_batch = drafter.losses(&pass.drafter_batch(batch, tasks), gradients.as_ref());
        self.by_level.iter_mut().zip(&in_batch).for_each(|(sums, more)| sums.add(more));
        in_batch.into_iter().map(|level| level.ranks_m).collect()
    }

    /// What a level (0-based) learns from a micro batch. A weight is divided by the number of targets of the whole optimizer step.
    fn task(&self, level: usize, batch: &DeviceBatch, lambda0: f64) -> LevelTask {
        let (count, of) = (self.counts.by_level[level], self.config.targets);
        let weight = lambda0 * self.config.weight(level);
        let [labels, all] = [count.labels, count.all].map(|targets| targets.max(1) as f64);
        match of.are_soft() {
            true => LevelTask {
                targets: LevelTargets::Soft {
                    targets: batch.soft_of_level(level),
                    labels: of.labels() / labels,
                    backbone: of.backbone() / all,
                },
                scale: weight,
            },
            false => LevelTask { targets: LevelTargets::Labels(batch.level_targets(level)), scale: weight / labels },
        }
    }
}

/// The sums on the host.
struct ReadSums {
    cross_entropies: Vec<f64>,
    divergences: Vec<f64>,
    hits: Vec<[f64; TOP]>,
    lm_loss: Option<f64>,
    lm_cross_entropy: Option<f64>,
    grad_norm: Option<f64>,
}

/// How many of [`ReadSums::numbers`] are of the LM head.
const OF_LM: usize = 4;

impl ReadSums {
    /// All sums but the norm in a list, so that processes can add them.
    fn numbers(&self) -> Vec<f64> {
        // Whether there is an LM loss at all: a process without a micro batch has none.
        let present = |sum: Option<f64>| [sum.map_or(0.0, |_| 1.0), sum.unwrap_or(0.0)];
        let lm_numbers = [present(self.lm_loss), present(self.lm_cross_entropy)].concat();
        [&lm_numbers, &self.cross_entropies, &self.divergences, self.hits.as_flattened()].concat()
    }

    /// From a list as [`ReadSums::numbers`] makes it.
    fn from_numbers(numbers: &[f64]) -> Self {
        let (lm_numbers, rest) = numbers.split_at(OF_LM);
        let levels = rest.len() / (2 + TOP);
        let lm_sum = |at: usize| (lm_numbers[at] > 0.0).then_some(lm_numbers[at + 1]);
        let (losses, hits) = rest.split_at(2 * levels);
        let (cross_entropies, divergences) = losses.split_at(levels);
        Self {
            cross_entropies: cross_entropies.to_vec(),
            divergences: divergences.to_vec(),
            hits: hits.as_chunks().0.to_vec(),
            lm_loss: lm_sum(0),
            lm_cross_entropy: lm_sum(2),
            grad_norm: None,
        }
    }

    /// As [`ReadSums::numbers`], of a process that failed.
    fn none(levels: usize) -> Vec<f64> {
        vec![0.0; OF_LM + levels * (2 + TOP)]
    }

    fn finish(&self, config: &LossConfig, counts: &TargetCounts, lambda0: f64) -> StepMetrics {
        let mean = |sum: f64, count: usize| (count > 0).then(|| sum / count as f64);
        let lm_mean = |sum: Option<f64>| sum.and_then(|sum| mean(sum, counts.lm_head));
        let (lm_loss, cross_entropy) = (lm_mean(self.lm_loss), lm_mean(self.lm_cross_entropy));
        let losses = self.level_losses(config, counts);
        let weighted: f64 = losses.iter().enumerate().map(|(level, l)| config.weight(level) * l.unwrap_or(0.0)).sum();
        let top = |(hits, count): (&[f64; TOP], &TargetCount)| {
            let labels = count.labels + count.outside;
            (labels > 0).then(|| hits.map(|hits| hits / labels as f64))
        };
        StepMetrics {
            loss: lm_loss.unwrap_or(0.0) + lambda0 * weighted,
            lm_loss,
            heads_loss: weighted,
            perplexity: cross_entropy.map(f64::exp),
            level_top: self.hits.iter().zip(&counts.by_level).map(top).collect(),
            tokens_per_step: None,
            level_losses: losses,
            tokens: counts.tokens,
        }
    }

    /// Lk of each level; `None` without a target.
    fn level_losses(&self, config: &LossConfig, counts: &TargetCounts) -> Vec<Option<f64>> {
        let targets = config.targets;
        let loss = |(level, count): (usize, &TargetCount)| {
            let from_labels = targets.labels() * self.cross_entropies[level] / count.labels.max(1) as f64;
            let from_backbone = targets.backbone() * self.divergences[level] / count.all.max(1) as f64;
            (count.all > 0).then_some(from_labels + from_backbone)
        };
        counts.by_level.iter().enumerate().map(loss).collect()
    }
}

impl MetricSums {
    /// Copies all sums, and the norm of the gradients, to the host in one transfer.
    fn read(&self, grad_norm: Option<&Tensor>) -> ReadSums {
        let levels = || self.by_level.iter();
        let scalars = levels().map(|level| &level.loss).chain(levels().map(|level| &level.divergence));
        let scalars: Vec<&Tensor> = scalars.chain(&self.lm_loss).chain(&self.lm_cross_entropy).collect();
        let hits = Tensor::cat(&levels().map(|level| &level.hits).collect::<Vec<_>>(), 0).to_kind(Kind::Double);
        let all =
            Tensor::cat(&[&Tensor::stack(&scalars, 0), &hits].into_iter().chain(grad_norm).collect::<Vec<_>>(), 0);
        let all: Vec<f64> = rehearsal::in_place_of(&["read"], || Vec::try_from(&all)).expect("a float64 vector");
        let (scalars, rest) = all.split_at(scalars.len());
        let (hits, grad_norm) = rest.as_chunks();
        let mut scalars = scalars.iter().copied();
        let mut next_levels = || scalars.by_ref().take(self.by_level.len()).collect();
        let (cross_entropies, divergences) = (next_levels(), next_levels());
        let lm_loss = self.lm_loss.as_ref().and_then(|_| scalars.next());
        let lm_cross_entropy = self.lm_cross_entropy.as_ref().and_then(|_| scalars.next());
        let (hits, grad_norm) = (hits.to_vec(), grad_norm.first().copied());
        ReadSums { cross_entropies, divergences, hits, lm_loss, lm_cross_entropy, grad_norm }
    }
}

fn add_to(sum: &mut Option<Tensor>, loss: Tensor) {
    *sum = Some(match sum.take() {
        None => loss,
        Some(before) => before + loss,
    });
}

/// Copies the ranks of all levels' targets to the host, in one transfer.
fn on_host(ranks: &[Tensor]) -> Vec<Vec<usize>> {
    let all: Vec<i64> = Vec::try_from(Tensor::cat(ranks, 0).to_kind(Kind::Int64)).expect("an int64 vector");
    let mut all = all.into_iter().map(|rank| rank as usize);
    ranks.iter().map(|ranks_m| all.by_ref().take(ranks_m.numel()).collect()).collect()
}
