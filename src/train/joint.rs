//! The backbone in Medusa-2: its pass over a micro batch, the LM head's loss, and the way back of all gradients.

// B rows, T tokens of a row, N = B·T positions, H hidden
use tch::{Kind, Tensor};

use crate::data::loader::Batch;
use crate::draft::medusa::fused_loss::{Output, distillation_loss, lm_loss};
use crate::draft::medusa::loss::Targets;
use crate::model::attention::RowMask;
use crate::model::backward::{Keep, Tape};
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::train::stage::Medusa2Config;
use crate::train::state::TrainState;

/// The backbone that is trained, and how.
#[derive(Debug, Clone, Copy)]
pub struct Joint<'r> {
    /// Adapters or weights of it require gradients.
    pub backbone: &'r Llama,
    /// The stage.
    pub config: &'r Medusa2Config,
    /// What stays in memory between forward and backward pass.
    pub keep: Keep,
    /// Dropout of every pass is drawn from this, the step and the micro batch.
    pub seed: u64,
}

/// One micro batch between its forward and its backward pass.
#[derive(Debug)]
pub struct JointPass<'r> {
    joint: Joint<'r>,
    adapters: Adapters,
    size_bth: Vec<i64>,
    /// `[N, H]`, without autograd.
    pub hidden_nh: Tensor,
    /// Of the teacher.
    teacher_nh: Option<Tensor>,
    /// `[N, H]` float32: every loss adds the gradient of the hidden states here.
    pub dhidden_nh: Tensor,
    tape: Tape<'r>,
}

impl<'r> Joint<'r> {
    /// Runs the backbone over micro batch `micro` of step `step`, and the teacher where there is one.
    pub fn forward(&self, batch: &Batch, step: usize, micro: usize) -> JointPass<'r> {
        let (tokens_bt, rows) = self.inputs(batch);
        let teacher_nh = self.teacher(&tokens_bt, &rows);
        let adapters = Adapters::Training { seed: self.seed_of(step, micro) };
        let (hidden_bth, tape) = self.backbone.forward_kept(&tokens_bt, rows, adapters, self.keep);
        let size_bth = hidden_bth.size();
        let hidden_nh = hidden_bth.view([-1, size_bth[2]]);
        let dhidden_nh = Tensor::zeros(hidden_nh.size(), (Kind::Float, hidden_nh.device()));
        JointPass { joint: *self, adapters, size_bth, hidden_nh, teacher_nh, dhidden_nh, tape }
    }

    /// Hidden states `[N, H]` as they are served: with adapters, without dropout; and the teacher's.
    pub fn evaluated(&self, batch: &Batch) -> (Tensor, Option<Tensor>) {
        let (tokens_bt, rows) = self.inputs(batch);
        let hidden_bth = tch::no_grad(|| self.backbone.hidden_states(&tokens_bt, &rows, Adapters::On));
        (hidden_bth.view([-1, self.backbone.config.hidden_size]), self.teacher(&tokens_bt, &rows))
    }

    fn inputs(&self, batch: &Batch) -> (Tensor, RowMask) {
        let (b, t) = (batch.rows as i64, batch.length as i64);
        let device = self.backbone.device();
        let tokens_bt = Tensor::from_slice(&batch.input_ids).view([b, t]).to_device(device);
        (tokens_bt, RowMask::packed(&batch.segment_lengths, t, &self.backbone.config, device))
    }

    fn teacher(&self, tokens_bt: &Tensor, rows: &RowMask) -> Option<Tensor> {
        let run = || self.backbone.hidden_states(tokens_bt, rows, Adapters::Off);
        self.config.self_distillation.then(|| tch::no_grad(run).view([-1, self.backbone.config.hidden_size]))
    }

    fn seed_of(&self, step: usize, micro: usize) -> u64 {
        let pass = (step as u64).wrapping_mul(1 << 20).wrapping_add(micro as u64 + 1);
        self.seed ^ pass.wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }

    /// Summed KL(teacher ‖ student) of hidden states `[N, H]`, a float64 scalar, at evaluation.
    pub fn lm_divergence(&self, hidden_nh: &Tensor, teacher_nh: &Tensor, targets: &Targets) -> Tensor {
        distillation_loss(self.output(Adapters::On), [hidden_nh, teacher_nh], targets, None)
    }

    /// Summed cross-entropy of the LM head on hidden states `[N, H]`, a float64 scalar, whatever the stage trains it on: the logarithm of
    /// its perplexity, times the targets.
    pub fn lm_cross_entropy(&self, hidden_nh: &Tensor, targets: &Targets) -> Tensor {
        lm_loss(self.output(Adapters::On), hidden_nh, targets, None).loss
    }

    /// The LM head.
    pub fn output(&self, adapters: Adapters) -> Output<'r> {
        Output::lm_head(self.backbone.lm_head(), adapters)
    }
}

impl<'r> JointPass<'r> {
    /// The LM head, as this pass trains it.
    pub fn output(&self) -> Output<'r> {
        self.joint.output(self.adapters)
    }

    /// Summed loss of the LM head, a float64 scalar; its gradients times `scale` are added.
    pub fn lm_loss(&self, state: &TrainState, targets: &Targets, scale: f64) -> Tensor {
        let gradients = state.lm_gradients(&self.dhidden_nh);
        let into = Some((&gradients, scale));
        match &self.teacher_nh {
            Some(teacher_nh) => distillation_loss(self.output(), [&self.hidden_nh, teacher_nh], targets, into),
            None => lm_loss(self.output(), &self.hidden_nh, targets, into).loss,
        }
    }

    /// Sends what the losses left in `dhidden_nh` back through the backbone.
    pub fn backward(self, state: &TrainState) {
        let dhidden_bth = self.dhidden_nh.to_kind(self.hidden_nh.kind()).view(self.size_bth.as_slice());
        self.tape.backward(&dhidden_bth, &state.backbone_gradients());
    }
}
