//! The positions of a micro batch whose hidden states are read.

use std::ops::Range;

use crate::data::IGNORE;
use crate::data::loader::Batch;
use crate::train::target_rule::TargetRule;

/// A data row and its positions whose states are read, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowPositions {
    pub id: usize,
    pub positions: Vec<usize>,
}

/// The positions of a batch that `rule` reads, flat and ascending.
pub(super) fn read_positions(rule: TargetRule, batch: &Batch) -> Vec<i64> {
    let mut positions_m = vec![];
    for (row, lengths) in batch.segment_lengths.iter().enumerate() {
        let labels = &batch.labels[row * batch.length..];
        let row_positions = rule.positions(lengths, |t| labels[t] != i64::from(IGNORE));
        positions_m.extend(row_positions.into_iter().map(|t| (row * batch.length + t) as i64));
    }
    positions_m
}

/// Flat positions by data row.
pub(super) fn by_row(batch: &Batch, positions_m: &[i64]) -> Vec<RowPositions> {
    let mut rest = positions_m.iter().map(|&position| position as usize).peekable();
    let row = |(id, place): (usize, Range<usize>)| {
        let positions = std::iter::from_fn(|| rest.next_if(|position| place.contains(position)));
        RowPositions { id, positions: positions.map(|position| position - place.start).collect() }
    };
    batch.segments().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_packed_rows_are_counted_in_each_row() {
        let batch = Batch {
            row_ids: vec![vec![7, 2], vec![5]],
            rows: 2,
            length: 5,
            input_ids: vec![0; 10],
            labels: vec![0; 10],
            segment_lengths: vec![vec![2, 3], vec![4]],
        };
        let row = |id, positions: &[usize]| RowPositions { id, positions: positions.to_vec() };
        assert_eq!(by_row(&batch, &[1, 2, 4, 5, 8]), [row(7, &[1]), row(2, &[0, 2]), row(5, &[0, 3])]);
    }
}
