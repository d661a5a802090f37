//! The loss of soft targets: a head learns the LM head's distribution of the same token, and its label where it has one. The oracle is
//! [`crate::draft::loss::soft_loss_sums`].

// N positions, M targets of one head, C targets of one chunk, H hidden, V vocabulary, R rank of the LM head's adapter
use tch::{Kind, Tensor};

use super::{
    CastWeights, Chunk, Divergence, Labels, LevelBlocks, LevelGradients, LevelSums, OutputLayer, Projection, TOP,
    exact_ranks, hits, padded,
};
use crate::draft::loss::SoftTargets;
use crate::model::logits::slope_of;
use crate::model::lora::Adapters;

/// The teacher of a head, and the weights of the two losses in their sum; not both are 0.
#[derive(Debug, Clone, Copy)]
pub struct SoftObjective<'t> {
    /// The teacher; it has no dropout.
    pub lm_head: OutputLayer<'t>,
    /// `[N, H]`, its hidden states, in the backbone's dtype.
    pub teacher_nh: &'t Tensor,
    /// Weight of the cross-entropy of the labels.
    pub labels: f64,
    /// Weight of the divergence from the teacher.
    pub backbone: f64,
}

impl SoftObjective<'_> {
    fn total(&self) -> f64 {
        self.labels + self.backbone
    }
}

/// The divergence KL(LM head ‖ head) at temperature 1, the cross-entropy of the labels, and their hits. If `gradients` is given, adds
/// the gradients of the weighted sum, multiplied by its scale. No gradient reaches the LM head or its hidden states as teacher.
/// `output` and `hidden_nh` are as for [`super::level_loss`].
pub fn soft_level_loss(
    blocks: &dyn LevelBlocks,
    output: OutputLayer,
    hidden_nh: &Tensor,
    soft: &SoftTargets,
    objective: SoftObjective,
    gradients: Option<(&LevelGradients, f64)>,
) -> LevelSums {
    let projection = Projection::new(Some(blocks), output, hidden_nh, &soft.targets, gradients);
    let sums = tch::no_grad(|| projection.soft_losses(soft, &SoftTeacher::new(objective), gradients));
    projection.backward(&blocks.parameters(), gradients);
    sums
}

/// The LM head on the positions that teach.
struct SoftTeacher<'t> {
    objective: SoftObjective<'t>,
    weights: CastWeights,
}

impl<'t> SoftTeacher<'t> {
    fn new(objective: SoftObjective<'t>) -> Self {
        let adapter = objective.lm_head.adapter.map(|(adapter, _)| (adapter, Adapters::On));
        let lm_head = OutputLayer { adapter, ..objective.lm_head };
        let weights = CastWeights::new(&lm_head, objective.teacher_nh.kind());
        Self { objective: SoftObjective { lm_head, ..objective }, weights }
    }

    /// `[C, V]` from rows `[C]` of the hidden states.
    fn logits(&self, rows_c: &Tensor) -> Tensor {
        let SoftObjective { lm_head, teacher_nh, .. } = self.objective;
        let x_ch = teacher_nh.index_select(0, rows_c);
        let down_cr = lm_head.adapter.map(|(adapter, adapters)| adapter.down(&x_ch, adapters));
        lm_head.logits(&self.weights, &x_ch, down_cr.as_ref())
    }
}

impl Projection<'_> {
    fn soft_losses(
        &self,
        soft: &SoftTargets,
        teacher: &SoftTeacher,
        gradients: Option<(&LevelGradients, f64)>,
    ) -> LevelSums {
        let (mut sums, mut ranks) = (LevelSums::zero(self.x_mh.device()), vec![]);
        let [teacher_m, tokens_m] = [&soft.teacher_m, &soft.targets.tokens_m].map(padded);
        let top = exact_ranks(gradients.is_some());
        self.for_each_chunk(|chunk, weights| {
            let logits_cv = chunk.logits(weights);
            let slope = gradients.map(|_| slope_of(&logits_cv, self.output.logits));
            let teacher_cv = teacher.logits(&chunk.rows(&teacher_m));
            let losses = SoftLosses::new(logits_cv, teacher_cv, &chunk.rows(&tokens_m), top);
            let chunk_sums = losses.sums(chunk);
            sums.add(&chunk_sums);
            ranks.push(chunk_sums.ranks_m);
            if let (Some((gradients, scale)), Some(slope)) = (gradients, slope) {
                let dlogits_cv = slope.times(losses.dlogits(&teacher.objective));
                chunk.backward(&dlogits_cv, weights, &gradients.output, scale * teacher.objective.total());
            }
        });
        if !ranks.is_empty() {
            sums.ranks_m = Tensor::cat(&ranks, 0);
        }
        sums
    }
}

/// Both losses of one chunk.
struct SoftLosses {
    divergence: Divergence,
    /// The token is 0 where there is no label.
    labels: Labels,
    /// `[C, 1]`, in the logits' dtype: 1 where there is a label, else 0.
    is_labelled_c1: Tensor,
}

impl SoftLosses {
    fn new(logits_cv: Tensor, teacher_cv: Tensor, tokens_c: &Tensor, top: usize) -> Self {
        let tokens_c1 = tokens_c.unsqueeze(1);
        let is_labelled_c1 = tokens_c1.ge(0).to_kind(logits_cv.kind());
        let labels = Labels::new(&logits_cv, &tokens_c1.clamp_min(0), top);
        Self { divergence: Divergence::new(logits_cv, teacher_cv), labels, is_labelled_c1 }
    }

    fn sums(&self, chunk: &Chunk) -> LevelSums {
        let losses_c1 = self.labels.losses(&self.divergence.student_log_sum_c1) * &self.is_labelled_c1;
        let is_unlabelled_c = 1 - self.is_labelled_c1.squeeze_dim(1);
        let hits_c = &self.labels.rank_c + is_unlabelled_c * TOP as f64;
        LevelSums {
            loss: chunk.counted(&losses_c1).sum(Kind::Double),
            divergence: chunk.counted(&self.divergence.losses_c).sum(Kind::Double),
            hits: hits(&chunk.counted(&hits_c)),
            ranks_m: chunk.counted(&self.labels.rank_c),
        }
    }

    /// The gradient of the weighted sum of both losses with respect to the logits, divided by the sum of the weights, so that float16
    /// can hold it.
    fn dlogits(self, objective: &SoftObjective) -> Tensor {
        let label_weight_c1 = self.is_labelled_c1 * (objective.labels / objective.total());
        let teacher_weight = objective.backbone / objective.total();
        let Divergence { mut student_cv, mut teacher_cv, .. } = self.divergence;
        let _ = student_cv.g_mul_(&(&label_weight_c1 + teacher_weight));
        student_cv -= teacher_cv.g_mul_scalar_(teacher_weight);
        student_cv.scatter_add_(1, &self.labels.tokens_c1, &-label_weight_c1)
    }
}
