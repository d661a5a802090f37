//! Rows to sequences: one row each, or several rows that do not see each other. Knows nothing of files or batches.

use std::collections::BTreeMap;

use super::rows::TokenRow;

/// What one row of a batch holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// Token ids of its rows, one after another.
    pub input_ids: Vec<i32>,
    /// As long as `input_ids`.
    pub labels: Vec<i32>,
    /// Lengths of its rows; their sum is the length of `input_ids`. A token sees, and predicts, only its own segment.
    pub segment_lengths: Vec<usize>,
}

/// How well rows fill sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackReport {
    /// Rows that went in.
    pub rows: usize,
    /// Sequences that came out.
    pub sequences: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Tokens they have room for.
    pub capacity: usize,
}

impl PackReport {
    /// Tokens a place, from 0 to 1.
    pub fn fill_rate(&self) -> f64 {
        self.tokens as f64 / self.capacity.max(1) as f64
    }

    fn of(rows: usize, sequences: &[Sequence], max_length: usize) -> Self {
        let tokens = sequences.iter().map(|sequence| sequence.input_ids.len()).sum();
        Self { rows, sequences: sequences.len(), tokens, capacity: sequences.len() * max_length }
    }
}

/// Each row its own sequence, in the order of the rows.
pub fn one_each(rows: Vec<TokenRow>, max_length: usize) -> (Vec<Sequence>, PackReport) {
    let count = rows.len();
    let sequences: Vec<Sequence> = rows.into_iter().map(|row| join(vec![row])).collect();
    let report = PackReport::of(count, &sequences, max_length);
    (sequences, report)
}

/// Best-fit decreasing: the longest row first, each into the sequence that it fills best. The rows of a sequence, and the
/// sequences (by their first row), keep the order of the rows, so that packing without shuffling stays near the file's order.
///
/// # Panics
/// When a row is longer than `max_length`: whoever loads rows truncates them.
pub fn pack(rows: Vec<TokenRow>, max_length: usize) -> (Vec<Sequence>, PackReport) {
    let count = rows.len();
    let mut members = best_fit_decreasing(&rows, max_length);
    for rows in &mut members {
        rows.sort_unstable();
    }
    members.sort_unstable();
    let mut rows: Vec<Option<TokenRow>> = rows.into_iter().map(Some).collect();
    let mut take = |row: usize| rows[row].take();
    let sequences: Vec<Sequence> =
        members.into_iter().map(|members| join(members.into_iter().filter_map(&mut take).collect())).collect();
    let report = PackReport::of(count, &sequences, max_length);
    (sequences, report)
}

/// For each sequence, the rows that it holds.
fn best_fit_decreasing(rows: &[TokenRow], max_length: usize) -> Vec<Vec<usize>> {
    let length = |row: usize| rows[row].input_ids.len();
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&row| std::cmp::Reverse(length(row))); // stable: equal rows stay in order
    let mut sequences: Vec<Vec<usize>> = Vec::new();
    let mut by_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new(); // room left -> sequences
    for row in order {
        let length = length(row);
        assert!(length <= max_length, "row {row} has {length} tokens, more than max_length {max_length}");
        let (sequence, room) = take_tightest(&mut by_room, length).unwrap_or_else(|| {
            sequences.push(vec![]);
            (sequences.len() - 1, max_length)
        });
        sequences[sequence].push(row);
        by_room.entry(room - length).or_default().push(sequence);
    }
    sequences
}

/// The sequence with the least room that still takes `length` tokens, and its room.
fn take_tightest(by_room: &mut BTreeMap<usize, Vec<usize>>, length: usize) -> Option<(usize, usize)> {
    let (&room, sequences) = by_room.range_mut(length..).next()?;
    let sequence = sequences.pop()?;
    if sequences.is_empty() {
        by_room.remove(&room);
    }
    Some((sequence, room))
}

fn join(rows: Vec<TokenRow>) -> Sequence {
    let mut rows = rows.into_iter();
    let first = rows.next().unwrap_or(TokenRow { input_ids: vec![], labels: vec![] });
    let mut sequence =
        Sequence { segment_lengths: vec![first.input_ids.len()], input_ids: first.input_ids, labels: first.labels };
    for row in rows {
        sequence.segment_lengths.push(row.input_ids.len());
        sequence.input_ids.extend(row.input_ids);
        sequence.labels.extend(row.labels);
    }
    sequence
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(lengths: &[usize]) -> Vec<TokenRow> {
        let mut next = 0..;
        lengths
            .iter()
            .map(|&length| {
                let input_ids: Vec<i32> = next.by_ref().take(length).collect();
                TokenRow { labels: input_ids.iter().map(|id| -id).collect(), input_ids }
            })
            .collect()
    }

    proptest! {
        #[test]
        fn every_row_is_kept_once_and_whole(lengths in prop::collection::vec(1_usize..=20, 0..80)) {
            let (sequences, report) = pack(rows(&lengths), 20);
            let mut found = Vec::new();
            for sequence in &sequences {
                prop_assert!(sequence.input_ids.len() <= 20);
                prop_assert_eq!(sequence.segment_lengths.iter().sum::<usize>(), sequence.input_ids.len());
                let mut start = 0;
                for length in &sequence.segment_lengths {
                    let place = start..start + length;
                    found.push(TokenRow {
                        input_ids: sequence.input_ids[place.clone()].to_vec(),
                        labels: sequence.labels[place].to_vec(),
                    });
                    start += length;
                }
            }
            found.sort_by_key(|row| row.input_ids[0]);
            prop_assert_eq!(found, rows(&lengths));
            prop_assert_eq!(report.tokens, lengths.iter().sum::<usize>());
            // Best fit never leaves two sequences that would fit into one.
            let mut filled: Vec<usize> = sequences.iter().map(|sequence| sequence.input_ids.len()).collect();
            filled.sort_unstable();
            prop_assert!(filled.len() < 2 || filled[0] + filled[1] > 20);
        }
    }

    #[test]
    fn sequences_keep_the_order_of_the_rows() {
        let (sequences, report) = pack(rows(&[3, 9, 6, 1, 4]), 10);
        let lengths: Vec<_> = sequences.iter().map(|sequence| sequence.segment_lengths.clone()).collect();
        assert_eq!(lengths, [vec![3], vec![9, 1], vec![6, 4]]);
        assert_eq!((report.sequences, report.tokens, report.capacity), (3, 23, 30));
        let (single, _) = one_each(rows(&[3, 9]), 10);
        assert_eq!(single.iter().map(|sequence| sequence.input_ids.len()).collect::<Vec<_>>(), [3, 9]);
    }
}
