//! The targets of the LM head and the heads in a micro batch.

use tch::Tensor;

use crate::data::loader::{Batch, TargetTokens};
use crate::draft::medusa::heads::HeadsShape;
use crate::draft::medusa::loss::Targets;
use crate::train::hidden_states::BatchStates;
use crate::tree::rank_counts::RankedPosition;

/// Targets of the LM head and of every head in one micro batch, on the host.
#[derive(Debug)]
pub struct BatchTargets {
    /// The next token.
    of_lm_head: TargetTokens,
    /// Head `h` (0-based) predicts the token h + 2 positions ahead.
    by_head: Vec<TargetTokens>,
    /// For each sequential head the tokens between each position and the one to predict, flat.
    previous: Vec<Vec<i64>>,
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

    /// Collects the targets of heads of this shape.
    pub fn new(batch: &Batch, heads: HeadsShape) -> Self {
        let by_head: Vec<TargetTokens> = (0..heads.medusa_num_heads).map(|head| batch.targets(head + 2)).collect();
        let previous = |(head, targets): (usize, &TargetTokens)| {
            batch.tokens_after(&targets.positions, heads.architecture.previous_tokens(head))
        };
        Self { of_lm_head: batch.targets(1), previous: by_head.iter().enumerate().map(previous).collect(), by_head }
    }

    /// Each data row of `batch`, by its index, and the ranks of its targets. `ranks[head][i]` is the rank of the head's
    /// i-th target.
    pub fn texts(&self, batch: &Batch, ranks: &[Vec<usize>]) -> impl Iterator<Item = (usize, Vec<RankedPosition>)> {
        let empty = RankedPosition { is_step: false, ranks: vec![None; self.by_head.len()] };
        let mut positions = vec![empty; batch.input_ids.len()];
        for &at in &self.of_lm_head.positions {
            positions[at as usize].is_step = true;
        }
        for (head, (targets, ranks)) in self.by_head.iter().zip(ranks).enumerate() {
            for (&at, &rank) in targets.positions.iter().zip(ranks) {
                positions[at as usize].ranks[head] = Some(rank);
            }
        }
        batch.segments().map(move |(row, place)| (row, positions[place].to_vec()))
    }

    /// Targets of a head (0-based), as rows of `states` on their device.
    pub fn of_head(&self, head: usize, states: &BatchStates) -> Targets {
        let (previous, count) = (&self.previous[head], self.by_head[head].positions.len() as i64);
        let on_device_mj = || Tensor::from_slice(previous).view([count, -1]).to_device(states.hidden_nh.device());
        let previous_mj = (!previous.is_empty()).then(on_device_mj);
        Targets { previous_mj, ..on_device(&self.by_head[head], states) }
    }

    /// Targets of the LM head, as rows of `states` on their device.
    pub fn of_lm_head(&self, states: &BatchStates) -> Targets {
        on_device(&self.of_lm_head, states)
    }
}

fn on_device(targets: &TargetTokens, states: &BatchStates) -> Targets {
    let tensor = |ids: &[i64]| Tensor::from_slice(ids).to_device(states.hidden_nh.device());
    let positions_m = tensor(&states.rows_of(&targets.positions));
    Targets { positions_m, tokens_m: tensor(&targets.tokens), previous_mj: None }
}
