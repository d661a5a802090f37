//! A run's memory by purpose, of one device or of several together.

use serde::Serialize;

use crate::torch::optim::ZeroStage;

/// The processes of a run, of which the plan is for one.
#[derive(Debug, Clone, Copy)]
pub struct WorldPlan {
    /// Processes.
    pub size: usize,
    pub zero_stage: ZeroStage,
}

impl WorldPlan {
    /// A run of one process.
    pub const ALONE: Self = Self { size: 1, zero_stage: ZeroStage::Zero };

    /// Whether each process has only its part of the moments.
    pub fn shares_moments(self) -> bool {
        self.size > 1 && self.zero_stage == ZeroStage::One
    }

    /// This process's part of all moments, at most: shares are equal up to a block.
    pub fn share_of(self, bytes: u64) -> u64 {
        if self.shares_moments() { bytes.div_ceil(self.size as u64) } else { bytes }
    }

    /// What each process sends in an optimizer step: (W - 1) / W of all gradients around a ring so that they are summed, and as much again so
    /// that all processes get the sums or, with ZeRO-1, the updated values. gloo, on a CPU, scatters sums only after all processes got them.
    pub fn sent_bytes(self, gradients: u64, on_host: bool) -> u64 {
        let rounds = if on_host && self.zero_stage == ZeroStage::One { 3 } else { 2 };
        rounds * (gradients - gradients / self.size as u64)
    }
}

/// The memory of the parameters of the backbone, the heads or the adapters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryGroup {
    /// `backbone`, `heads` or `adapters`.
    pub name: &'static str,
    pub parameters: u64,
    pub trained: bool,
    /// Weights in their dtype or quantized; master weights of trained parameters.
    pub weight_bytes: u64,
    /// 0 for frozen parameters.
    pub gradient_bytes: u64,
    /// The optimizer's moments.
    pub optimizer_bytes: u64,
}

/// A run's memory at its peak; [`MemoryPlan::peak_bytes`] is the sum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Parameters, gradients and moments.
    pub groups: Vec<MemoryGroup>,
    /// Activations kept between the forward and the backward pass of a micro batch.
    pub activation_bytes: u64,
    /// Hidden states, their gradient, and the teacher's hidden states.
    pub hidden_state_bytes: u64,
    /// The largest temporary: a chunk of logits, a layer's gradients, the embedding's gradient, or what processes gather.
    pub working_bytes: u64,
    /// The program itself; 0 on a device with its own memory.
    pub program_bytes: u64,
    /// Processes that train together. The plan is of one of them.
    pub world_size: usize,
    /// What a process sends in an optimizer step; it receives as much. 0 for one process.
    pub sent_bytes: u64,
}

impl MemoryGroup {
    /// A frozen backbone.
    pub fn frozen(parameters: u64, weight_bytes: u64) -> Self {
        Self { name: "backbone", parameters, trained: false, weight_bytes, gradient_bytes: 0, optimizer_bytes: 0 }
    }

    /// Total bytes of the group.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
    }

    fn add(&mut self, other: &Self) {
        self.parameters += other.parameters;
        self.weight_bytes += other.weight_bytes;
        self.gradient_bytes += other.gradient_bytes;
        self.optimizer_bytes += other.optimizer_bytes;
    }
}

impl MemoryPlan {
    /// The predicted peak on the device.
    pub fn peak_bytes(&self) -> u64 {
        let parameters: u64 = self.groups.iter().map(MemoryGroup::bytes).sum();
        parameters + self.activation_bytes + self.hidden_state_bytes + self.working_bytes + self.program_bytes
    }

    /// With another stage on the same device: their temporaries do not exist at the same time.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        let working_bytes = self.working_bytes.max(other.working_bytes);
        let program_bytes = self.program_bytes.max(other.program_bytes);
        Self { working_bytes, program_bytes, ..self.beside(other) }
    }

    /// With what is on another device.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        // The last stage has all groups, and in order.
        let [mut all, fewer] = if self.groups.len() < other.groups.len() { [other, self] } else { [self, other] };
        for group in &fewer.groups {
            all.groups.iter_mut().filter(|ours| ours.name == group.name).for_each(|ours| ours.add(group));
        }
        all.activation_bytes += fewer.activation_bytes;
        all.hidden_state_bytes += fewer.hidden_state_bytes;
        all.working_bytes += fewer.working_bytes;
        all.program_bytes += fewer.program_bytes;
        all.sent_bytes += fewer.sent_bytes;
        all
    }
}
