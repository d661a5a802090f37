//! Losses of a level of guesses. Here are the plain ones, with all logits in memory and libtorch's autograd: the oracle of [`fused`].

// N positions, H hidden, V vocabulary, M targets of one level
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::numbers::Positive;
use crate::torch::wide;

pub mod fused;
pub mod target_weights;

use target_weights::TargetWeights;

/// The `[loss]` table of a recipe.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossConfig {
    /// λk is this to the power of k, for k = 1…K (paper section 2.2.1).
    #[serde(default = "default_decay")]
    pub medusa_decay_coefficient: Positive,
    /// What the heads learn from.
    #[serde(default)]
    pub targets: TargetWeights,
    /// Soft targets also where the labels carry no loss.
    #[serde(default)]
    pub on_unlabelled: bool,
}

fn default_decay() -> Positive {
    Positive::new(0.8).expect("0.8 is positive")
}

impl Default for LossConfig {
    fn default() -> Self {
        Self { medusa_decay_coefficient: default_decay(), targets: TargetWeights::default(), on_unlabelled: false }
    }
}

impl LossConfig {
    /// λk of head `head` (0-based, so k = head + 1). The axolotl fork counts in the same way: exponent 0 is the LM head's.
    pub fn weight(&self, head: usize) -> f64 {
        self.medusa_decay_coefficient.get().powi(i32::try_from(head).unwrap_or(i32::MAX).saturating_add(1))
    }
}

/// The targets of one head (or of the LM head) in a micro batch: positions whose hidden state predicts a token that carries loss.
#[derive(Debug)]
pub struct Targets {
    /// `[M]` int64, indices into the batch's flattened positions.
    pub positions_m: Tensor,
    /// `[M]` int64, the tokens to predict; for heads with a truncated vocabulary, their outputs.
    pub tokens_m: Tensor,
    /// `[M, k+1]` int64, for sequential head k (0-based): the tokens between each position and the one to predict.
    pub previous_mj: Option<Tensor>,
}

/// Targets with the LM head's distribution of each.
#[derive(Debug)]
pub struct SoftTargets {
    /// The token is [`crate::data::IGNORE`] where it carries no loss.
    pub targets: Targets,
    /// `[M]` int64: the positions from which the LM head predicts the same tokens.
    pub teacher_m: Tensor,
}

/// Cross-entropy of logits `[N, V]` summed over targets: a float64 scalar with autograd.
pub fn cross_entropy_of(logits_nv: &Tensor, targets: &Targets) -> Tensor {
    cross_entropy_at(&logits_nv.index_select(0, &targets.positions_m), &targets.tokens_m)
}

/// Cross-entropy of logits `[M, V]` summed over their tokens `[M]`: a float64 scalar with autograd, neither divided nor weighted.
pub fn cross_entropy_at(logits_mv: &Tensor, tokens_m: &Tensor) -> Tensor {
    let target_log_p_m1 = log_probabilities(logits_mv).gather(1, &tokens_m.unsqueeze(1), false);
    -target_log_p_m1.sum(Kind::Double)
}

/// KL(teacher ‖ student) of logits `[N, V]` summed over the positions of the targets: a float64 scalar with autograd.
pub fn divergence_of(student_nv: &Tensor, teacher_nv: &Tensor, targets: &Targets) -> Tensor {
    let [student_mv, teacher_mv] =
        [student_nv, teacher_nv].map(|logits| log_probabilities(&logits.index_select(0, &targets.positions_m)));
    (teacher_mv.exp() * (teacher_mv - student_mv)).sum(Kind::Double)
}

/// The two losses of soft targets, summed, from the head's logits `[M, V]`: the cross-entropy of the labels, and KL(LM head ‖ head). Float64
/// scalars with autograd, which does not reach the teacher. With the tokens of a token map `[N]` the teacher's distribution is that of these
/// tokens alone.
pub fn soft_loss_sums(
    student_mv: &Tensor,
    hidden_nh: &Tensor,
    soft: &SoftTargets,
    backbone: &Llama,
    tokens_n: Option<&Tensor>,
) -> [Tensor; 2] {
    let labelled_m = soft.targets.tokens_m.ge(0).nonzero().squeeze_dim(1);
    let [labelled_mv, tokens] = [student_mv, &soft.targets.tokens_m].map(|x_m| x_m.index_select(0, &labelled_m));
    let teacher_mh = hidden_nh.detach().index_select(0, &soft.teacher_m);
    let teacher_mv = backbone.logits(&teacher_mh, Adapters::On).detach();
    let teacher_mv = tokens_n.map_or(teacher_mv.shallow_clone(), |tokens_n| teacher_mv.index_select(1, tokens_n));
    let teacher_mv = log_probabilities(&teacher_mv);
    let divergence = teacher_mv.exp() * (&teacher_mv - log_probabilities(student_mv));
    [cross_entropy_at(&labelled_mv, &tokens), divergence.sum(Kind::Double)]
}

fn log_probabilities(logits_nv: &Tensor) -> Tensor {
    let kind = wide(logits_nv.kind());
    logits_nv.to_kind(kind).log_softmax(-1, kind)
}
