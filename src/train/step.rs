//! One optimizer step of Medusa-1: micro batches through the frozen backbone and the heads, one update.

// B rows, T tokens of a row, N = B·T positions, H hidden, K heads
use tch::{Kind, Tensor};

use crate::data::loader::Batch;
use crate::medusa::fused_loss::{HeadSums, TOP, head_loss};
use crate::medusa::heads::Heads;
use crate::medusa::loss::{LossConfig, Targets};
use crate::model::llama::Llama;
use crate::torch::optim::adamw::gradient_norm;
use crate::train::hidden_states::{BatchStates, HiddenStates, HiddenStatesError};
use crate::train::state::TrainState;

/// Loss and accuracies of every head over some batches. Each head is measured over its own targets.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadMetrics {
    /// Σ λk·Lk.
    pub loss: f64,
    /// Lk: summed cross-entropy ÷ number of targets; `None` for a head without a target.
    pub head_losses: Vec<Option<f64>>,
    /// For each head the part of its targets among the first 1, 2, … 5 guesses; `None` for a head without a target.
    pub head_top: Vec<Option<[f64; TOP]>>,
    /// Input tokens.
    pub tokens: u64,
}

/// An update that must not be made.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The loss or the gradient is no number.
    #[error(
        "step {step}: {what} is {value}, so the update was not made; sequences {sequences:?} of the training data \
         (counted from 0, before shuffling); lower optimizer.learning_rate, or look for broken weights"
    )]
    NotFinite {
        /// The step that was not made, counted from 1 as in metrics.jsonl.
        step: usize,
        /// The loss or the gradient norm.
        what: &'static str,
        /// Its value.
        value: f64,
        /// Indices of the sequences of this step.
        sequences: Vec<usize>,
    },
    /// Kept hidden states.
    #[error(transparent)]
    HiddenStates(#[from] HiddenStatesError),
    /// The update itself overflowed.
    #[error(
        "step {step}: the update made {parameter} of the heads infinite or no number; lower optimizer.learning_rate"
    )]
    HeadsNotFinite {
        /// Counted from 1.
        step: usize,
        /// The first such tensor.
        parameter: String,
    },
    /// The loss on the validation rows is no number.
    #[error(
        "after step {step} the loss on the validation rows is {value}; lower optimizer.learning_rate, or look for broken \
         weights"
    )]
    EvaluationNotFinite {
        /// Counted from 1.
        step: usize,
        /// Its value.
        value: f64,
    },
}

/// What an update did.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Before the update.
    pub metrics: HeadMetrics,
    /// Euclidean, over all trained parameters, before clipping.
    pub grad_norm: f64,
}

/// Runs `batches` (the micro batches of one optimizer step) and updates the heads at learning rate `rate`. A head without a
/// target in them has a zero gradient, and no loss.
///
/// # Errors
/// [`StepError`]; the parameters are as before then.
pub fn train_step(
    hidden_states: &mut HiddenStates,
    state: &mut TrainState,
    batches: &[Batch],
    loss: &LossConfig,
    rate: f64,
    max_grad_norm: f64,
) -> Result<StepOutcome, StepError> {
    let sequences = || batches.iter().flat_map(|batch| batch.sequence_ids.iter().copied()).collect::<Vec<_>>();
    let num_heads = state.heads.num_heads();
    let targets: Vec<BatchTargets> = batches.iter().map(|batch| BatchTargets::new(batch, num_heads)).collect();
    let counts = count_targets(&targets, num_heads);
    let mut sums = MetricSums::new(num_heads, counts);
    for (batch, targets) in batches.iter().zip(&targets) {
        let states = hidden_states.of(batch)?;
        for head in 0..num_heads {
            let scale = loss.weight(head) / sums.counts[head].max(1) as f64;
            let of_head = targets.of_head(head, &states);
            let gradients = state.gradients_of(head);
            let w2 = w2_of(&state.heads, head, hidden_states.backbone());
            let into = Some((&gradients, scale));
            sums.add(head, head_loss(state.heads.head(head), w2, &states.hidden_nh, &of_head, into));
        }
    }
    let metrics = sums.finish(loss, input_tokens(batches));
    let grad_norm = gradient_norm(&state.parameters);
    for (what, value) in [("the loss", metrics.loss), ("the gradient norm", grad_norm)] {
        if !value.is_finite() {
            return Err(StepError::NotFinite { step: state.step + 1, what, value, sequences: sequences() });
        }
    }
    // As torch.nn.utils.clip_grad_norm_.
    let clip = (max_grad_norm / (grad_norm + 1e-6)).min(1.0);
    state.optimizer.step(&mut state.parameters, rate, clip);
    state.step += 1;
    state.tokens += metrics.tokens;
    Ok(StepOutcome { metrics, grad_norm })
}

/// Whether heads may be kept: an update can overflow though its loss and gradient did not.
///
/// # Errors
/// [`StepError::HeadsNotFinite`].
pub fn check_finite(state: &TrainState) -> Result<(), StepError> {
    // A float64 sum of float32 numbers is finite exactly where all of them are.
    // Slice by slice: a sum in float64 of a whole W2 would need twice its memory.
    let sum =
        |value: &Tensor| value.view(-1).split(1 << 17, 0).iter().map(|slice| slice.sum(Kind::Double)).sum::<Tensor>();
    let is_finite = |value: &Tensor| tch::no_grad(|| sum(value)).double_value(&[]).is_finite();
    match state.parameters.iter().find(|parameter| !is_finite(&parameter.value)) {
        Some(broken) => Err(StepError::HeadsNotFinite { step: state.step, parameter: broken.name.clone() }),
        None => Ok(()),
    }
}

/// Loss and accuracies over `batches`, no update.
pub fn evaluate(backbone: &Llama, heads: &Heads, batches: &[Batch], loss: &LossConfig) -> HeadMetrics {
    let num_heads = heads.num_heads();
    let mut sums = MetricSums::new(num_heads, vec![0; num_heads]);
    for batch in batches {
        let targets = BatchTargets::new(batch, num_heads);
        let states = BatchStates::computed(backbone, batch);
        for head in 0..num_heads {
            let of_head = targets.of_head(head, &states);
            let w2 = w2_of(heads, head, backbone);
            sums.counts[head] += targets.count(head);
            sums.add(head, head_loss(heads.head(head), w2, &states.hidden_nh, &of_head, None));
        }
    }
    sums.finish(loss, input_tokens(batches))
}

/// The head's own W2, or the backbone's lm_head.
fn w2_of<'m>(heads: &'m Heads, head: usize, backbone: &'m Llama) -> &'m Tensor {
    let own = heads.head(head).w2();
    own.or_else(|| backbone.lm_head_weight()).expect("a backbone loaded for training has a plain lm_head")
}

fn input_tokens(batches: &[Batch]) -> u64 {
    batches.iter().map(|batch| batch.tokens() as u64).sum()
}

fn count_targets(targets: &[BatchTargets], num_heads: usize) -> Vec<usize> {
    (0..num_heads).map(|head| targets.iter().map(|batch| batch.count(head)).sum()).collect()
}

/// Targets of every head in one micro batch, still on the host.
struct BatchTargets {
    by_head: Vec<crate::data::loader::Targets>,
}

impl BatchTargets {
    /// Head `h` (0-based) predicts the token h + 2 further on.
    fn new(batch: &Batch, num_heads: usize) -> Self {
        Self { by_head: (0..num_heads).map(|head| batch.targets(head + 2)).collect() }
    }

    fn count(&self, head: usize) -> usize {
        self.by_head[head].positions.len()
    }

    fn of_head(&self, head: usize, states: &BatchStates) -> Targets {
        let tensor = |ids: &[i64]| Tensor::from_slice(ids).to_device(states.hidden_nh.device());
        let targets = &self.by_head[head];
        Targets { positions_m: tensor(&states.rows_of(&targets.positions)), tokens_m: tensor(&targets.tokens) }
    }
}

/// Sums over micro batches; on the device until [`MetricSums::finish`].
struct MetricSums {
    counts: Vec<usize>,
    by_head: Vec<Option<HeadSums>>,
}

impl MetricSums {
    fn new(num_heads: usize, counts: Vec<usize>) -> Self {
        Self { counts, by_head: (0..num_heads).map(|_| None).collect() }
    }

    fn add(&mut self, head: usize, sums: HeadSums) {
        let slot = &mut self.by_head[head];
        *slot = Some(match slot.take() {
            None => sums,
            Some(before) => HeadSums { loss: before.loss + sums.loss, hits: before.hits + sums.hits },
        });
    }

    fn finish(self, config: &LossConfig, tokens: u64) -> HeadMetrics {
        let Some(by_head) = self.by_head.into_iter().collect::<Option<Vec<_>>>() else {
            return HeadMetrics { loss: 0.0, head_losses: vec![], head_top: vec![], tokens };
        };
        let losses: Vec<f64> = read(&by_head, |sums| sums.loss.unsqueeze(0));
        let hits: Vec<f64> = read(&by_head, |sums| sums.hits.to_kind(Kind::Double));
        let mean = |head: usize, sum: f64| (self.counts[head] > 0).then(|| sum / self.counts[head] as f64);
        let head_losses: Vec<Option<f64>> = losses.iter().enumerate().map(|(head, &sum)| mean(head, sum)).collect();
        let weighted = head_losses.iter().enumerate().map(|(head, l)| config.weight(head) * l.unwrap_or(0.0));
        let top = |(head, hits): (usize, &[f64])| {
            let mut part = [0.0; TOP];
            part.copy_from_slice(hits);
            (self.counts[head] > 0).then(|| part.map(|hits| hits / self.counts[head] as f64))
        };
        HeadMetrics {
            loss: weighted.sum(),
            head_top: hits.chunks(TOP).enumerate().map(top).collect(),
            head_losses,
            tokens,
        }
    }
}

/// One copy to the host for all heads.
fn read(by_head: &[HeadSums], part: impl Fn(&HeadSums) -> Tensor) -> Vec<f64> {
    let all = Tensor::cat(&by_head.iter().map(part).collect::<Vec<_>>(), 0);
    Vec::try_from(&all).expect("a float64 vector")
}
