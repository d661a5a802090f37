//! The targets of the LM head and the Medusa heads in a micro batch.

use tch::Tensor;

use crate::data::loader::{Batch, TargetTokens};
use crate::draft::medusa::loss::Targets;
use crate::train::hidden_states::BatchStates;

/// Targets of the LM head and of every head in one micro batch, on the host.
#[derive(Debug)]
pub struct BatchTargets {
    /// The next token.
    of_lm_head: TargetTokens,
    /// Head `h` (0-based) predicts the token h + 2 positions ahead.
    by_head: Vec<TargetTokens>,
}

impl BatchTargets {
    /// Number of the LM head's targets.
    pub fn lm_head_count(&self) -> usize {
        self.of_lm_head.positions.len()
    }

    /// Number of each head's targets.
    pub fn head_counts(&self) -> impl Iterator<Item = usize> {
        self.by_head.iter().map(|targets| targets.positions.len())
    }

    /// Collects the targets of `num_heads` heads.
    pub fn new(batch: &Batch, num_heads: usize) -> Self {
        let by_head = (0..num_heads).map(|head| batch.targets(head + 2)).collect();
        Self { of_lm_head: batch.targets(1), by_head }
    }

    /// Targets of a head (0-based), as rows of `states` on their device.
    pub fn of_head(&self, head: usize, states: &BatchStates) -> Targets {
        on_device(&self.by_head[head], states)
    }

    /// Targets of the LM head, as rows of `states` on their device.
    pub fn of_lm_head(&self, states: &BatchStates) -> Targets {
        on_device(&self.of_lm_head, states)
    }
}

fn on_device(targets: &TargetTokens, states: &BatchStates) -> Targets {
    let tensor = |ids: &[i64]| Tensor::from_slice(ids).to_device(states.hidden_nh.device());
    Targets { positions_m: tensor(&states.rows_of(&targets.positions)), tokens_m: tensor(&targets.tokens) }
}
