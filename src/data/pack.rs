//! Rows to sequences: one row each, or several rows that do not see each other. Which rows go where is decided by their lengths;
//! their tokens are read when a sequence is asked for.

use std::ops::Range;
use std::sync::Arc;

use super::best_fit::decreasing;
use super::cache::CacheError;
use super::random_stream::RandomStream;
use super::regroup::regroup;
use super::rows::TokenRow;
use super::store::RowStore;

/// What one row of a batch holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedSequence {
    /// Token ids of its rows, one after another.
    pub input_ids: Vec<i32>,
    /// As long as `input_ids`.
    pub labels: Vec<i32>,
    /// Lengths of its rows; their sum is the length of `input_ids`. A token sees, and predicts, only its own segment.
    pub segment_lengths: Vec<usize>,
}

/// Which rows each sequence holds: 4 bytes a row, and 4 a sequence, beside those of the [`RowStore`]. Clones share them.
#[derive(Debug, Clone)]
pub struct Sequences {
    rows: Arc<RowStore>,
    /// `None`: each row is a sequence.
    packed: Option<Arc<PackedRows>>,
}

/// The rows of sequence `s` are `members[ends[s - 1]..ends[s]]`, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PackedRows {
    members: Vec<u32>,
    ends: Vec<u32>,
    /// Tokens of the longest sequence; absent if rows stay together.
    capacity: Option<u32>,
}

/// How well rows fill sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackReport {
    /// Rows that went in.
    pub rows: usize,
    /// Sequences that came out.
    pub sequences: usize,
    pub tokens: usize,
    /// Tokens they have room for.
    pub capacity: usize,
}

impl PackReport {
    /// Tokens a place, from 0 to 1.
    pub fn fill_rate(&self) -> f64 {
        self.tokens as f64 / self.capacity.max(1) as f64
    }

    fn of(sequences: &Sequences, max_length: usize) -> Self {
        let rows = &sequences.rows;
        let tokens = (0..rows.len()).map(|row| rows.length(row)).sum();
        let (rows, sequences) = (rows.len(), sequences.len());
        Self { rows, sequences, tokens, capacity: sequences * max_length }
    }
}

impl Sequences {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.packed.as_ref().map_or(self.rows.len(), |packed| packed.ends.len())
    }

    /// The rows that they are made of.
    pub fn store(&self) -> &RowStore {
        &self.rows
    }

    /// Data rows in all of them.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same rows, each its own sequence.
    #[must_use]
    pub fn one_each(&self) -> Self {
        Self { rows: Arc::clone(&self.rows), packed: None }
    }

    /// The same rows in as many sequences, none longer than the longest was. Rows that [`pack`] put together have others beside them in each
    /// epoch after the first, drawn from `seed`.
    #[must_use]
    pub fn for_epoch(&self, epoch: u64, seed: u64) -> Self {
        /// Apart from the streams that order the sequences of each epoch.
        const STREAMS: u64 = 1 << 63;
        let capacity = self.packed.as_ref().and_then(|packed| packed.capacity);
        let Some(capacity) = capacity.filter(|_| epoch > 0) else { return self.clone() };
        let mut draws = RandomStream::new(seed, STREAMS | epoch);
        let lengths = lengths(&self.rows, 0..self.rows.len());
        let Some(packed) = PackedRows::regrouped(&lengths, capacity, self.len(), &mut draws) else {
            return self.clone();
        };
        Self { rows: Arc::clone(&self.rows), packed: Some(Arc::new(packed)) }
    }

    /// Sequences of several sets: of each some, in the order of their numbers in the list.
    pub(super) fn picked<'s>(rows: &Arc<RowStore>, parts: impl IntoIterator<Item = (&'s PackedSet, Vec<u32>)>) -> Self {
        let (mut members, mut ends) = (Vec::new(), Vec::new());
        for (set, chosen) in parts {
            for sequence in chosen {
                members.extend(set.members(sequence as usize));
                ends.push(members.len() as u32);
            }
        }
        Self { rows: Arc::clone(rows), packed: Some(Arc::new(PackedRows { members, ends, capacity: None })) }
    }

    /// Tokens of a sequence, without reading it.
    pub fn length(&self, sequence: usize) -> usize {
        self.members(sequence).map(|row| self.rows.length(row)).sum()
    }

    /// Rows of a sequence.
    pub fn segments(&self, sequence: usize) -> usize {
        self.members(sequence).count()
    }

    /// A sequence's tokens, read from where they lie.
    ///
    /// # Errors
    /// As [`RowStore::row`].
    pub fn get(&self, sequence: usize) -> Result<PackedSequence, CacheError> {
        let rows = self.members(sequence).map(|row| self.rows.row(row)).collect::<Result<_, _>>()?;
        Ok(join(rows))
    }

    /// All sequences, one read after the other.
    pub fn iter(&self) -> impl Iterator<Item = Result<PackedSequence, CacheError>> + '_ {
        (0..self.len()).map(|sequence| self.get(sequence))
    }

    /// Sequences that are in memory, their tokens encoded as they are on disk.
    pub fn in_memory(sequences: Vec<PackedSequence>) -> Self {
        let (mut rows, mut ends) = (Vec::new(), Vec::new());
        for sequence in sequences {
            let mut start = 0;
            for length in sequence.segment_lengths {
                let place = start..start + length;
                let (input_ids, labels) = (sequence.input_ids[place.clone()].to_vec(), sequence.labels[place].to_vec());
                rows.push(TokenRow { input_ids, labels });
                start += length;
            }
            ends.push(rows.len() as u32);
        }
        let members = (0..rows.len() as u32).collect();
        let packed = PackedRows { members, ends, capacity: None };
        Self { rows: Arc::new(RowStore::in_memory(rows)), packed: Some(Arc::new(packed)) }
    }

    /// Indices of a sequence's rows, ascending.
    pub fn members(&self, sequence: usize) -> impl Iterator<Item = usize> + '_ {
        let packed = self.packed.as_ref().map(|packed| packed.members(sequence).iter().map(|&row| row as usize));
        let single = if packed.is_none() { Some(sequence) } else { None };
        packed.into_iter().flatten().chain(single)
    }
}

/// Each row its own sequence, in the order of the rows.
pub fn one_each(rows: RowStore, max_length: usize) -> (Sequences, PackReport) {
    let sequences = Sequences { rows: Arc::new(rows), packed: None };
    let report = PackReport::of(&sequences, max_length);
    (sequences, report)
}

/// Best-fit decreasing: the longest row first, each into the sequence that it fills best. The rows of a sequence, and the
/// sequences (by their first row), keep the order of the rows, so that packing without shuffling stays near the file's order.
///
/// # Panics
/// When a row is longer than `max_length`: whoever loads rows truncates them.
pub fn pack(rows: RowStore, max_length: usize) -> (Sequences, PackReport) {
    let packed = PackedRows::best_fit(&lengths(&rows, 0..rows.len()), max_length);
    let sequences = Sequences { rows: Arc::new(rows), packed: Some(Arc::new(packed)) };
    let report = PackReport::of(&sequences, max_length);
    (sequences, report)
}

/// Consecutive rows as sequences of their own.
#[derive(Debug, Clone)]
pub(super) struct PackedSet {
    rows: Range<usize>,
    /// Rows are counted from the set's first; `None`: each is a sequence.
    packed: Option<Arc<PackedRows>>,
}

impl PackedSet {
    /// Packed up to `max_length`; with `None` each row is a sequence.
    pub(super) fn new(all: &RowStore, rows: Range<usize>, max_length: Option<usize>) -> Self {
        let pack = |max_length| Arc::new(PackedRows::best_fit(&lengths(all, rows.clone()), max_length));
        Self { packed: max_length.map(pack), rows }
    }

    /// The same rows in as many sequences, with others beside them.
    pub(super) fn packed_anew(&self, all: &RowStore, seed: u64, stream: u64) -> Self {
        let capacity = self.packed.as_ref().and_then(|packed| packed.capacity);
        let anew = capacity.and_then(|capacity| {
            let mut draws = RandomStream::new(seed, stream);
            PackedRows::regrouped(&lengths(all, self.rows()), capacity, self.len(), &mut draws)
        });
        Self { rows: self.rows(), packed: anew.map(Arc::new).or_else(|| self.packed.clone()) }
    }

    /// Sequences of it.
    pub(super) fn len(&self) -> usize {
        self.packed.as_ref().map_or(self.rows.len(), |packed| packed.ends.len())
    }

    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// The rows of a sequence, counted over all sets.
    fn members(&self, sequence: usize) -> Vec<u32> {
        let first = self.rows.start as u32;
        match &self.packed {
            Some(packed) => packed.members(sequence).iter().map(|row| first + row).collect(),
            None => vec![first + sequence as u32],
        }
    }
}

impl PackedRows {
    /// Best-fit decreasing.
    fn best_fit(lengths: &[u32], max_length: usize) -> Self {
        let packed = Self::of(&decreasing(lengths, max_length));
        Self { capacity: packed.longest(lengths), ..packed }
    }

    /// In another way, but in `count` sequences; `None` if none is found.
    fn regrouped(lengths: &[u32], capacity: u32, count: usize, draws: &mut RandomStream) -> Option<Self> {
        let sequence_of = regroup(lengths, capacity as usize, count, draws)?;
        Some(Self { capacity: Some(capacity), ..Self::of(&sequence_of) })
    }

    /// The rows of a sequence.
    fn members(&self, sequence: usize) -> &[u32] {
        let start = sequence.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.members[start as usize..self.ends[sequence] as usize]
    }

    /// From the sequence of each row. Sequences get their numbers in the order in which the rows meet them.
    fn of(sequence_of: &[u32]) -> Self {
        const NOT_MET: u32 = u32::MAX;
        let opened = sequence_of.iter().max().map_or(0, |last| *last as usize + 1);
        let (mut number_of, mut ends) = (vec![NOT_MET; opened], Vec::<u32>::with_capacity(opened));
        for &sequence in sequence_of {
            let number = &mut number_of[sequence as usize];
            if *number == NOT_MET {
                *number = ends.len() as u32;
                ends.push(0);
            }
            ends[*number as usize] += 1;
        }
        let mut start = 0;
        for end in &mut ends {
            start += *end;
            *end = start - *end; // where the next row of it goes; its end when all are there
        }
        let mut members = vec![0; sequence_of.len()];
        for (row, &sequence) in sequence_of.iter().enumerate() {
            let next = &mut ends[number_of[sequence as usize] as usize];
            members[*next as usize] = row as u32;
            *next += 1;
        }
        Self { members, ends, capacity: None }
    }

    /// Tokens of the longest sequence.
    fn longest(&self, lengths: &[u32]) -> Option<u32> {
        let mut tokens = vec![0; self.ends.len()];
        self.sequence_of().iter().zip(lengths).for_each(|(&sequence, length)| tokens[sequence as usize] += length);
        tokens.into_iter().max()
    }

    /// The sequence of each row.
    fn sequence_of(&self) -> Vec<u32> {
        let (mut sequence_of, mut start) = (vec![0; self.members.len()], 0);
        for (sequence, &end) in (0..).zip(&self.ends) {
            self.members[start..end as usize].iter().for_each(|&row| sequence_of[row as usize] = sequence);
            start = end as usize;
        }
        sequence_of
    }
}

/// Tokens of each row.
fn lengths(all: &RowStore, rows: Range<usize>) -> Vec<u32> {
    rows.map(|row| all.length(row) as u32).collect()
}

fn join(rows: Vec<TokenRow>) -> PackedSequence {
    let mut rows = rows.into_iter();
    let first = rows.next().unwrap_or(TokenRow { input_ids: vec![], labels: vec![] });
    let mut sequence = PackedSequence {
        segment_lengths: vec![first.input_ids.len()],
        input_ids: first.input_ids,
        labels: first.labels,
    };
    for row in rows {
        sequence.segment_lengths.push(row.input_ids.len());
        sequence.input_ids.extend(row.input_ids);
        sequence.labels.extend(row.labels);
    }
    sequence
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::data::best_fit::take_tightest;

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

    /// The oracle: rows in memory, sequences as lists of rows, every list sorted.
    fn pack_lists(rows: &[TokenRow], max_length: usize) -> Vec<PackedSequence> {
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&row| std::cmp::Reverse(rows[row].input_ids.len()));
        let mut sequences: Vec<Vec<usize>> = Vec::new();
        let mut by_room: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for row in order {
            let length = rows[row].input_ids.len();
            let (sequence, room) = take_tightest(&mut by_room, length).unwrap_or_else(|| {
                sequences.push(vec![]);
                (sequences.len() as u32 - 1, max_length)
            });
            sequences[sequence as usize].push(row);
            by_room.entry(room - length).or_default().push(sequence);
        }
        sequences.iter_mut().for_each(|rows| rows.sort_unstable());
        sequences.sort_unstable();
        sequences.into_iter().map(|members| join(members.into_iter().map(|row| rows[row].clone()).collect())).collect()
    }

    fn all(sequences: &Sequences) -> Vec<PackedSequence> {
        sequences.iter().collect::<Result<_, _>>().unwrap()
    }

    proptest! {
        #[test]
        fn sequences_are_those_of_lists_in_memory(lengths in prop::collection::vec(1_usize..=20, 0..80)) {
            let rows = rows(&lengths);
            let (sequences, report) = pack(RowStore::in_memory(rows.clone()), 20);
            let expected = pack_lists(&rows, 20);
            prop_assert_eq!(all(&sequences), expected.clone());
            for (id, sequence) in expected.iter().enumerate() {
                let measured = (sequences.length(id), sequences.segments(id));
                prop_assert_eq!(measured, (sequence.input_ids.len(), sequence.segment_lengths.len()));
            }
            prop_assert_eq!((report.sequences, report.rows), (expected.len(), rows.len()));
            prop_assert_eq!(all(&Sequences::in_memory(expected.clone())), expected);
        }

        #[test]
        fn every_epoch_has_each_row_once_in_as_many_sequences(
            lengths in prop::collection::vec(1_usize..=20, 1..80), epoch in 1_u64..9, seed: u64,
        ) {
            let (first, _) = pack(RowStore::in_memory(rows(&lengths)), 20);
            let later = first.for_epoch(epoch, seed);
            let members = |sequences: &Sequences| (0..sequences.len()).map(|id| sequences.members(id).collect()).collect::<Vec<Vec<_>>>();
            let mut found = members(&later).concat();
            found.sort_unstable();
            prop_assert_eq!(found, (0..lengths.len()).collect::<Vec<_>>());
            prop_assert_eq!(later.len(), first.len());
            let longest = |sequences: &Sequences| (0..sequences.len()).map(|id| sequences.length(id)).max();
            prop_assert!(longest(&later) <= longest(&first));
            prop_assert_eq!(members(&later), members(&first.for_epoch(epoch, seed)));
        }

        #[test]
        fn every_row_is_kept_once_and_whole(lengths in prop::collection::vec(1_usize..=20, 0..80)) {
            let (sequences, report) = pack(RowStore::in_memory(rows(&lengths)), 20);
            let sequences = all(&sequences);
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
        let (sequences, report) = pack(RowStore::in_memory(rows(&[3, 9, 6, 1, 4])), 10);
        let lengths: Vec<_> = all(&sequences).into_iter().map(|sequence| sequence.segment_lengths).collect();
        assert_eq!(lengths, [vec![3], vec![9, 1], vec![6, 4]]);
        assert_eq!((report.sequences, report.tokens, report.capacity), (3, 23, 30));
        let (single, _) = one_each(RowStore::in_memory(rows(&[3, 9])), 10);
        assert_eq!((single.len(), single.length(0), single.length(1), single.segments(1)), (2, 3, 9, 1));
    }
}
