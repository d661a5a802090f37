//! One optimizer step: micro batches through backbone and heads, one update. In Medusa-1 the backbone is frozen, in Medusa-2 it is
//! trained with the heads.

// B rows, T tokens of a row, N = B·T positions, H hidden, K heads
use tch::{Kind, Tensor};

use crate::data::loader::Batch;
use crate::draft::medusa::fused_loss::{HeadSums, Output, TOP, head_loss};
use crate::draft::medusa::heads::Heads;
use crate::draft::medusa::loss::{LossConfig, Targets};
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::optim::adamw::gradient_norm;
use crate::train::hidden_states::{BatchStates, HiddenStates, HiddenStatesError};
use crate::train::joint::{Joint, JointPass};
use crate::train::state::TrainState;

/// Loss and accuracies over some batches. Each head is measured over its own targets.
#[derive(Debug, Clone, PartialEq)]
pub struct StepMetrics {
    /// Σ λk·Lk in Medusa-1, L_LM + λ0·Σ λk·Lk in Medusa-2.
    pub loss: f64,
    /// L_LM; none in Medusa-1.
    pub lm_loss: Option<f64>,
    /// exp of the LM head's cross-entropy; of evaluations in Medusa-2.
    pub perplexity: Option<f64>,
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
    #[error("step {step}: the update made {parameter} infinite or no number; lower optimizer.learning_rate")]
    ParameterNotFinite {
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
    pub metrics: StepMetrics,
    /// Euclidean, over all trained parameters, before clipping.
    pub grad_norm: f64,
}

/// Where the hidden states of training come from.
#[derive(Debug)]
pub enum Source<'r> {
    /// A backbone that stays as it is (Medusa-1).
    Frozen(HiddenStates<'r>),
    /// A backbone that is trained with the heads (Medusa-2).
    Joint(Joint<'r>),
}

impl Source<'_> {
    /// Makes what was computed so far last: later runs find it.
    ///
    /// # Errors
    /// [`HiddenStatesError::Io`].
    pub fn commit(&mut self) -> Result<(), HiddenStatesError> {
        match self {
            Self::Frozen(hidden_states) => hidden_states.commit(),
            Self::Joint(_) => Ok(()),
        }
    }
}

/// What one step weighs its losses and its update with.
#[derive(Debug, Clone, Copy)]
pub struct StepWeights<'c> {
    /// λk.
    pub loss: &'c LossConfig,
    /// λ0 of this step; 1 in Medusa-1.
    pub lambda0: f64,
    /// Learning rate of this step.
    pub rate: f64,
    /// Gradients are clipped to this norm.
    pub max_grad_norm: f64,
}

/// Runs `batches` (the micro batches of one optimizer step) and updates what is trained. A head without a target in them has a zero
/// gradient, and no loss.
///
/// # Errors
/// [`StepError`]; the parameters are as before then.
pub fn train_step(
    source: &mut Source,
    state: &mut TrainState,
    batches: &[Batch],
    weights: &StepWeights,
) -> Result<StepOutcome, StepError> {
    let num_heads = state.heads.num_heads();
    let targets: Vec<BatchTargets> = batches.iter().map(|batch| BatchTargets::new(batch, num_heads)).collect();
    let mut sums = MetricSums::new(num_heads);
    targets.iter().for_each(|of_batch| sums.count(of_batch));
    let mut losses = Losses { state, weights, sums: &mut sums };
    for (micro, (batch, targets)) in batches.iter().zip(&targets).enumerate() {
        match source {
            Source::Frozen(hidden_states) => {
                let states = hidden_states.of(batch)?;
                let output = Output::lm_head(hidden_states.backbone().lm_head(), Adapters::Off);
                losses.add_heads(&states, None, output, targets);
            }
            Source::Joint(joint) => losses.add_joint(joint.forward(batch, state.step, micro), targets),
        }
    }
    let metrics = sums.finish(weights.loss, weights.lambda0, input_tokens(batches));
    let grad_norm = gradient_norm(&state.parameters);
    check_numbers(state.step + 1, &metrics, grad_norm, batches)?;
    // As torch.nn.utils.clip_grad_norm_.
    let clip = (weights.max_grad_norm / (grad_norm + 1e-6)).min(1.0);
    state.optimizer.step(&mut state.parameters, weights.rate, clip);
    state.step += 1;
    state.tokens += metrics.tokens;
    Ok(StepOutcome { metrics, grad_norm })
}

/// Losses and gradients of one optimizer step as they add up.
struct Losses<'s> {
    state: &'s TrainState,
    weights: &'s StepWeights<'s>,
    sums: &'s mut MetricSums,
}

impl Losses<'_> {
    /// Of every head on one micro batch; `dhidden_nh` takes the gradient of the hidden states, where the backbone is trained.
    fn add_heads(
        &mut self,
        states: &BatchStates,
        dhidden_nh: Option<&Tensor>,
        lm_head: Output,
        targets: &BatchTargets,
    ) {
        let heads = &self.state.heads;
        for head in 0..heads.num_heads() {
            let weight = self.weights.lambda0 * self.weights.loss.weight(head);
            let scale = weight / self.sums.counts[head].max(1) as f64;
            let gradients = self.state.gradients_of(head, dhidden_nh);
            let output = output_of(heads, head, lm_head);
            let of_head = targets.of_head(head, states);
            let into = Some((&gradients, scale));
            self.sums.add(head, head_loss(heads.head(head), output, &states.hidden_nh, &of_head, into));
        }
    }

    /// Of the LM head and every head on one micro batch, and through the backbone.
    fn add_joint(&mut self, pass: JointPass, targets: &BatchTargets) {
        let states = BatchStates::all(pass.hidden_nh.shallow_clone());
        self.add_heads(&states, Some(&pass.dhidden_nh), pass.output(), targets);
        let scale = 1.0 / self.sums.lm_count.max(1) as f64;
        self.sums.add_lm(pass.lm_loss(self.state, &targets.of_lm_head(&states), scale));
        pass.backward(self.state);
    }
}

fn check_numbers(step: usize, metrics: &StepMetrics, grad_norm: f64, batches: &[Batch]) -> Result<(), StepError> {
    let numbers = [("the loss", metrics.loss), ("the gradient norm", grad_norm)];
    match numbers.into_iter().find(|(_, value)| !value.is_finite()) {
        Some((what, value)) => {
            let sequences = batches.iter().flat_map(|batch| batch.sequence_ids.iter().copied()).collect();
            Err(StepError::NotFinite { step, what, value, sequences })
        }
        None => Ok(()),
    }
}

/// Whether parameters may be kept: an update can overflow though its loss and gradient did not.
///
/// # Errors
/// [`StepError::ParameterNotFinite`].
pub fn check_finite(state: &TrainState) -> Result<(), StepError> {
    // A float64 sum of float32 numbers is finite exactly where all of them are.
    // Slice by slice: a sum in float64 of a whole W2 would need twice its memory.
    let sum =
        |value: &Tensor| value.view(-1).split(1 << 17, 0).iter().map(|slice| slice.sum(Kind::Double)).sum::<Tensor>();
    let is_finite = |value: &Tensor| tch::no_grad(|| sum(value)).double_value(&[]).is_finite();
    match state.parameters.iter().find(|parameter| !is_finite(&parameter.value)) {
        Some(broken) => Err(StepError::ParameterNotFinite { step: state.step, parameter: broken.name.clone() }),
        None => Ok(()),
    }
}

/// What an evaluation runs: the backbone as it is, or as Medusa-2 trains it, with this λ0.
#[derive(Debug, Clone, Copy)]
pub enum Evaluated<'r> {
    /// Medusa-1.
    Frozen(&'r Llama),
    /// Medusa-2.
    Joint(Joint<'r>, f64),
}

/// Loss and accuracies over `batches`, which are read one after the other, no update.
///
/// # Errors
/// That of a batch that cannot be read.
pub fn evaluate<E>(
    what: Evaluated,
    heads: &Heads,
    batches: impl Iterator<Item = Result<Batch, E>>,
    loss: &LossConfig,
) -> Result<StepMetrics, E> {
    let num_heads = heads.num_heads();
    let mut sums = MetricSums::new(num_heads);
    let mut tokens = 0;
    for batch in batches {
        let batch = &batch?;
        tokens += batch.tokens() as u64;
        let targets = BatchTargets::new(batch, num_heads);
        sums.count(&targets);
        let (states, lm_head) = match what {
            Evaluated::Frozen(backbone) => {
                (BatchStates::computed(backbone, batch), Output::lm_head(backbone.lm_head(), Adapters::Off))
            }
            Evaluated::Joint(joint, _) => (sums.add_lm_evaluation(joint, batch, &targets), joint.output(Adapters::On)),
        };
        for head in 0..num_heads {
            let of_head = targets.of_head(head, &states);
            let output = output_of(heads, head, lm_head);
            sums.add(head, head_loss(heads.head(head), output, &states.hidden_nh, &of_head, None));
        }
    }
    let lambda0 = if let Evaluated::Joint(_, lambda0) = what { lambda0 } else { 1.0 };
    Ok(sums.finish(loss, lambda0, tokens))
}

/// The head's own W2, or the LM head.
fn output_of<'m>(heads: &'m Heads, head: usize, lm_head: Output<'m>) -> Output<'m> {
    heads.head(head).w2().map_or(lm_head, Output::plain)
}

fn input_tokens(batches: &[Batch]) -> u64 {
    batches.iter().map(|batch| batch.tokens() as u64).sum()
}

/// Targets of the LM head and of every head in one micro batch, still on the host.
struct BatchTargets {
    /// The token that follows.
    of_lm_head: crate::data::loader::TargetTokens,
    /// Head `h` (0-based) predicts the token h + 2 further on.
    by_head: Vec<crate::data::loader::TargetTokens>,
}

impl BatchTargets {
    fn new(batch: &Batch, num_heads: usize) -> Self {
        let by_head = (0..num_heads).map(|head| batch.targets(head + 2)).collect();
        Self { of_lm_head: batch.targets(1), by_head }
    }

    fn of_head(&self, head: usize, states: &BatchStates) -> Targets {
        on_device(&self.by_head[head], states)
    }

    fn of_lm_head(&self, states: &BatchStates) -> Targets {
        on_device(&self.of_lm_head, states)
    }
}

fn on_device(targets: &crate::data::loader::TargetTokens, states: &BatchStates) -> Targets {
    let tensor = |ids: &[i64]| Tensor::from_slice(ids).to_device(states.hidden_nh.device());
    Targets { positions_m: tensor(&states.rows_of(&targets.positions)), tokens_m: tensor(&targets.tokens) }
}

/// Sums over micro batches; on the device until [`MetricSums::finish`].
struct MetricSums {
    counts: Vec<usize>,
    by_head: Vec<Option<HeadSums>>,
    lm_count: usize,
    /// Of what the stage trains the LM head on.
    lm_loss: Option<Tensor>,
    /// Of evaluations.
    lm_cross_entropy: Option<Tensor>,
}

impl MetricSums {
    fn new(num_heads: usize) -> Self {
        let by_head = (0..num_heads).map(|_| None).collect();
        Self { counts: vec![0; num_heads], by_head, lm_count: 0, lm_loss: None, lm_cross_entropy: None }
    }

    fn count(&mut self, targets: &BatchTargets) {
        self.lm_count += targets.of_lm_head.positions.len();
        for (count, of_head) in self.counts.iter_mut().zip(&targets.by_head) {
            *count += of_head.positions.len();
        }
    }

    fn add(&mut self, head: usize, sums: HeadSums) {
        let slot = &mut self.by_head[head];
        *slot = Some(match slot.take() {
            None => sums,
            Some(before) => HeadSums { loss: before.loss + sums.loss, hits: before.hits + sums.hits },
        });
    }

    fn add_lm(&mut self, loss: Tensor) {
        add_to(&mut self.lm_loss, loss);
    }

    /// Runs the backbone over an evaluation batch and measures its LM head.
    fn add_lm_evaluation(&mut self, joint: Joint, batch: &Batch, targets: &BatchTargets) -> BatchStates {
        let (hidden_nh, teacher_nh) = joint.evaluated(batch);
        let states = BatchStates::all(hidden_nh);
        let targets = targets.of_lm_head(&states);
        let cross_entropy = joint.lm_cross_entropy(&states.hidden_nh, &targets);
        let divergence = |teacher_nh: &Tensor| joint.lm_divergence(&states.hidden_nh, teacher_nh, &targets);
        self.add_lm(teacher_nh.as_ref().map_or_else(|| cross_entropy.shallow_clone(), divergence));
        add_to(&mut self.lm_cross_entropy, cross_entropy);
        states
    }

    fn finish(self, config: &LossConfig, lambda0: f64, tokens: u64) -> StepMetrics {
        let mean = |sum: f64, count: usize| (count > 0).then(|| sum / count as f64);
        let of_lm = |sum: &Option<Tensor>| sum.as_ref().and_then(|sum| mean(sum.double_value(&[]), self.lm_count));
        let (lm_loss, cross_entropy) = (of_lm(&self.lm_loss), of_lm(&self.lm_cross_entropy));
        let by_head: Vec<HeadSums> = self.by_head.into_iter().flatten().collect();
        let losses: Vec<f64> = read(&by_head, |sums| sums.loss.unsqueeze(0));
        let hits: Vec<f64> = read(&by_head, |sums| sums.hits.to_kind(Kind::Double));
        let of_heads = || losses.iter().zip(&self.counts).map(|(&sum, &count)| mean(sum, count));
        let weighted: f64 = of_heads().enumerate().map(|(head, l)| config.weight(head) * l.unwrap_or(0.0)).sum();
        let top = |(hits, &count): (&[f64], &usize)| {
            let mut part = [0.0; TOP];
            part.copy_from_slice(hits);
            (count > 0).then(|| part.map(|hits| hits / count as f64))
        };
        StepMetrics {
            loss: lm_loss.unwrap_or(0.0) + lambda0 * weighted,
            lm_loss,
            perplexity: cross_entropy.map(f64::exp),
            head_losses: of_heads().collect(),
            head_top: hits.chunks(TOP).zip(&self.counts).map(top).collect(),
            tokens,
        }
    }
}

fn add_to(sum: &mut Option<Tensor>, loss: Tensor) {
    *sum = Some(match sum.take() {
        None => loss,
        Some(before) => before + loss,
    });
}

/// One copy to the host for all heads.
fn read(by_head: &[HeadSums], part: impl Fn(&HeadSums) -> Tensor) -> Vec<f64> {
    if by_head.is_empty() {
        return vec![];
    }
    let all = Tensor::cat(&by_head.iter().map(part).collect::<Vec<_>>(), 0);
    Vec::try_from(&all).expect("a float64 vector")
}
