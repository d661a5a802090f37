//! Which positions the heads learn from, and which hidden states that takes.

use crate::data::loader::{Batch, TargetTokens};
use crate::draft::medusa::heads::{HeadsArchitecture, HeadsShape};
use crate::draft::medusa::loss::LossConfig;

/// Which tokens are targets of the heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetRule {
    pub num_heads: usize,
    /// Sequential heads also read the tokens before their target.
    pub architecture: HeadsArchitecture,
    /// The LM head teaches: its hidden states are needed, too.
    pub soft: bool,
    /// Tokens without a label are targets, too.
    pub on_unlabelled: bool,
}

/// Heads that share a cache of hidden states: it holds what this many read, and fewer heads read a part of that.
const HEADS_OF_A_CACHE: usize = 8;

impl TargetRule {
    /// The rule of a run with heads of this shape.
    pub fn new(config: &LossConfig, heads: HeadsShape) -> Self {
        let HeadsShape { medusa_num_heads: num_heads, architecture, .. } = heads;
        Self { num_heads, architecture, soft: config.targets.are_soft(), on_unlabelled: config.on_unlabelled }
    }

    /// The rule of the positions in a cache of hidden states, which runs with other numbers of heads use, too.
    #[must_use]
    pub fn of_cache(self) -> Self {
        Self { num_heads: self.num_heads.next_multiple_of(HEADS_OF_A_CACHE), ..self }
    }

    /// The targets `offset` tokens ahead. A token that carries no loss is [`crate::data::IGNORE`].
    pub fn targets(self, batch: &Batch, offset: usize) -> TargetTokens {
        if self.on_unlabelled { batch.all_targets(offset) } else { batch.targets(offset) }
    }

    /// Positions of a sequence whose hidden states are read, ascending: from which some head predicts a target, or the LM head teaches
    /// one. Head `h` (0-based) at `t` predicts `t + h + 2`; its teacher is the LM head at `t + h + 1`. A prefix layer reads all of them.
    pub fn positions(self, segment_lengths: &[usize], has_label: impl Fn(usize) -> bool) -> Vec<usize> {
        if self.architecture.has_prefix() {
            return (0..segment_lengths.iter().sum()).collect();
        }
        let is_target = |t: usize| self.on_unlabelled || has_label(t);
        let mut positions = vec![];
        let mut start = 0;
        for length in segment_lengths {
            let end = start + length;
            let is_read = |&t: &usize| {
                // No head predicts the second token of a segment, so the LM head at the first teaches none.
                let first = if self.soft && t > start { t + 1 } else { t + 2 };
                (first..end.min(t + 2 + self.num_heads)).any(is_target)
            };
            positions.extend((start..end).filter(is_read));
            start = end;
        }
        positions
    }
}
