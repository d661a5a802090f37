//! Which positions a drafter learns from, and which hidden states that takes.

use crate::data::loader::{Batch, TargetTokens};
use crate::draft::loss::LossConfig;
use crate::draft::trained::Reads;

/// Which tokens are targets of a drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetRule {
    pub reads: Reads,
    /// The LM head teaches: its hidden states are needed, too.
    pub soft: bool,
    /// Tokens without a label are targets, too.
    pub on_unlabelled: bool,
}

/// Drafters share a cache of hidden states: it holds what this many levels read, and fewer levels read a part of that.
const LEVELS_OF_A_CACHE: usize = 8;

impl TargetRule {
    /// The rule of a run whose drafter reads this.
    pub fn new(config: &LossConfig, reads: Reads) -> Self {
        Self { reads, soft: config.targets.are_soft(), on_unlabelled: config.on_unlabelled }
    }

    /// The rule of the positions in a cache of hidden states, which runs with other numbers of levels use, too.
    #[must_use]
    pub fn for_cache(self) -> Self {
        let levels = self.reads.levels.next_multiple_of(LEVELS_OF_A_CACHE);
        Self { reads: Reads { levels, ..self.reads }, ..self }
    }

    /// The targets `offset` tokens ahead. A token that carries no loss is [`crate::data::IGNORE`].
    pub fn targets(self, batch: &Batch, offset: usize) -> TargetTokens {
        if self.on_unlabelled { batch.all_targets(offset) } else { batch.targets(offset) }
    }

    /// Positions of a sequence whose hidden states are read, ascending: from which some level predicts a target, or the LM head teaches
    /// one. Level `l` (0-based) at `t` predicts `t + l + 2`; its teacher is the LM head at `t + l + 1`.
    pub fn positions(self, segment_lengths: &[usize], has_label: impl Fn(usize) -> bool) -> Vec<usize> {
        if self.reads.whole_rows {
            return (0..segment_lengths.iter().sum()).collect();
        }
        let is_target = |t: usize| self.on_unlabelled || has_label(t);
        let mut positions = vec![];
        let mut start = 0;
        for length in segment_lengths {
            let end = start + length;
            let is_read = |&t: &usize| {
                // No level predicts the second token of a segment, so the LM head at the first teaches none.
                let first = if self.soft && t > start { t + 1 } else { t + 2 };
                (first..end.min(t + 2 + self.reads.levels)).any(is_target)
            };
            positions.extend((start..end).filter(is_read));
            start = end;
        }
        positions
    }
}
