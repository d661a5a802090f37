//! Positions from which some head predicts a target: the others' hidden states are never read.

use crate::data::IGNORE;
use crate::data::pack::PackedSequence;

pub(super) fn predicting_in(sequence: &PackedSequence, num_heads: usize) -> Vec<usize> {
    predicting(&sequence.segment_lengths, num_heads, |t| sequence.labels[t] != IGNORE)
}

/// Positions of a sequence from which some head predicts a target, ascending. Head `h` (0-based) at `t` predicts `t + h + 2`.
pub(super) fn predicting(segment_lengths: &[usize], num_heads: usize, has_label: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut positions = vec![];
    let mut start = 0;
    for length in segment_lengths {
        let end = start + length;
        let has_target = |&t: &usize| (t + 2..end.min(t + 2 + num_heads)).any(&has_label);
        positions.extend((start..end).filter(has_target));
        start = end;
    }
    positions
}
