//! `data.mix`: several sets of rows, of each as many tokens as its weight says. An epoch ends where the first set has been read once; of the
//! other sets it takes a part, the next epoch goes on behind it. What an epoch holds is a pure function of its number and the seed.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::pack::{PackReport, PackedSet, Sequences};
use super::random_stream::shuffled;
use super::store::RowStore;

/// A set of the mix, for people.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MixedShare {
    /// Of the tokens of an epoch, from 0 to 1.
    pub share: f64,
    /// Sequences of an epoch.
    pub sequences: usize,
    /// All sequences of the set.
    pub of: usize,
    /// Tokens of an epoch, on average.
    pub tokens: usize,
}

/// Sets of rows with weights.
#[derive(Debug)]
pub struct Mix {
    rows: Arc<RowStore>,
    sets: Vec<MixedSet>,
}

#[derive(Debug)]
struct MixedSet {
    packed: PackedSet,
    an_epoch: usize,
    tokens: usize,
}

impl Mix {
    /// Packs the rows of each set apart: `counts` are the rows of each, in their order; none of them is 0.
    ///
    /// # Panics
    /// If there are not as many weights as sets.
    pub fn new(rows: RowStore, counts: &[usize], weights: &[f64], max_length: Option<usize>) -> Self {
        assert_eq!(counts.len(), weights.len());
        let mut start = 0;
        let mut pack = |count: &usize| {
            start += count;
            PackedSet::new(&rows, start - count..start, max_length)
        };
        let packed: Vec<PackedSet> = counts.iter().map(&mut pack).collect();
        let tokens = |set: &PackedSet| set.rows().map(|row| rows.length(row)).sum::<usize>();
        let tokens: Vec<usize> = packed.iter().map(tokens).collect();
        // Tokens of an epoch for a weight of 1: the set that is smallest for its weight is read once.
        let unit =
            tokens.iter().zip(weights).map(|(&tokens, weight)| tokens as f64 / weight).fold(f64::INFINITY, f64::min);
        let set = |((packed, tokens), weight): ((PackedSet, usize), &f64)| {
            let part = (weight * unit / tokens as f64).min(1.0);
            let an_epoch = ((packed.len() as f64 * part).round() as usize).clamp(1, packed.len());
            MixedSet { packed, an_epoch, tokens }
        };
        let sets = packed.into_iter().zip(tokens).zip(weights).map(set).collect();
        Self { rows: Arc::new(rows), sets }
    }

    /// Sequences of an epoch.
    pub fn len(&self) -> usize {
        self.sets.iter().map(|set| set.an_epoch).sum()
    }

    /// Whether an epoch has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All sequences of all sets, as in the first pass over each.
    pub fn all(&self) -> Sequences {
        let sets = self.sets.iter().map(|set| (&set.packed, (0..set.packed.len() as u32).collect()));
        Sequences::picked(&self.rows, sets)
    }

    /// The sequences of an epoch, set after set.
    pub(super) fn epoch(&self, number: usize, seed: u64) -> Sequences {
        let mut parts = Vec::new();
        for (index, set) in self.sets.iter().enumerate() {
            let (mut next, mut left) = (number * set.an_epoch, set.an_epoch);
            while left > 0 {
                let (pass, begin) = (next / set.packed.len(), next % set.packed.len());
                let count = left.min(set.packed.len() - begin);
                let pass = EpochPass { seed, set: index as u64, number: pass as u64 };
                parts.push((pass.packed(set, &self.rows), pass.order(set.packed.len())[begin..begin + count].to_vec()));
                (next, left) = (next + count, left - count);
            }
        }
        Sequences::picked(&self.rows, parts.iter().map(|(packed, chosen)| (packed, chosen.clone())))
    }

    /// How full the sequences of an epoch are.
    pub fn report(&self, max_length: usize) -> PackReport {
        let rows = self.sets.iter().map(|set| set.packed.rows().len()).sum();
        let tokens = self.shares().iter().map(|share| share.tokens).sum();
        PackReport { rows, sequences: self.len(), tokens, capacity: self.len() * max_length }
    }

    /// Each set's part in an epoch.
    pub fn shares(&self) -> Vec<MixedShare> {
        let tokens = |set: &MixedSet| set.tokens as f64 * set.an_epoch as f64 / set.packed.len() as f64;
        let all: f64 = self.sets.iter().map(tokens).sum();
        let share = |set: &MixedSet| MixedShare {
            share: tokens(set) / all,
            sequences: set.an_epoch,
            of: set.packed.len(),
            tokens: tokens(set).round() as usize,
        };
        self.sets.iter().map(share).collect()
    }
}

impl fmt::Display for MixedShare {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { share, sequences, of, .. } = self;
        write!(out, "{:.1} % of the tokens, {sequences} of {of} sequences an epoch", 100.0 * share)
    }
}

/// One reading of a set.
#[derive(Clone, Copy)]
struct EpochPass {
    seed: u64,
    set: u64,
    number: u64,
}

impl EpochPass {
    /// Apart from the streams of epochs, and from those in which rows are packed.
    const ORDERS: u64 = 1 << 62;
    const PACKINGS: u64 = 3 << 62;

    fn stream(self, kind: u64) -> u64 {
        kind | self.set << 40 | self.number
    }

    fn order(self, count: usize) -> Vec<u32> {
        shuffled(count, self.seed, self.stream(Self::ORDERS))
    }

    /// The set's sequences; packed in another way in each pass after the first.
    fn packed(self, set: &MixedSet, rows: &RowStore) -> PackedSet {
        match self.number {
            0 => set.packed.clone(),
            _ => set.packed.packed_anew(rows, self.seed, self.stream(Self::PACKINGS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rows::TokenRow;

    /// Rows of lengths 1 to 5 and so on; the first token of each is its number.
    fn rows(count: usize) -> RowStore {
        RowStore::in_memory((0..count as i32).map(|row| TokenRow {
            input_ids: vec![row; 2 + row as usize % 4],
            labels: vec![row; 2 + row as usize % 4],
        }))
    }

    fn mix(weights: [f64; 2], max_length: Option<usize>) -> Mix {
        Mix::new(rows(140), &[100, 40], &weights, max_length)
    }

    fn rows_of(sequences: &Sequences) -> Vec<usize> {
        (0..sequences.len()).flat_map(|sequence| sequences.members(sequence).collect::<Vec<_>>()).collect()
    }

    #[test]
    fn shares_are_those_of_the_weights() {
        for (weights, expected) in [([1.0, 1.0], 0.5), ([3.0, 1.0], 0.75), ([1.0, 9.0], 0.1)] {
            for max_length in [None, Some(16)] {
                let mix = mix(weights, max_length);
                let share = mix.shares()[0].share;
                assert!((share - expected).abs() < 0.03, "{weights:?}: {share}");
                let tokens = |first: bool, epoch: usize| {
                    let rows = rows_of(&mix.epoch(epoch, 7));
                    let here = rows.into_iter().filter(|&row| (row < 100) == first);
                    here.map(|row| 2 + row % 4).sum::<usize>() as f64
                };
                let all: f64 = (0..10).map(|epoch| tokens(true, epoch)).sum();
                let both: f64 = all + (0..10).map(|epoch| tokens(false, epoch)).sum::<f64>();
                assert!((all / both - expected).abs() < 0.05, "{weights:?}: {}", all / both);
            }
        }
    }

    #[test]
    fn every_row_comes_equally_often() {
        for max_length in [None, Some(16)] {
            let mix = mix([1.0, 1.0], max_length);
            let mut met = vec![0; 140];
            for epoch in 0..20 {
                let sequences = mix.epoch(epoch, 7);
                assert_eq!(sequences.len(), mix.len());
                rows_of(&sequences).into_iter().for_each(|row| met[row] += 1);
            }
            assert!(met[100..].iter().all(|&times| times == 20), "the smaller set is read once an epoch: {met:?}");
            let (least, most) = (met[..100].iter().min().unwrap(), met[..100].iter().max().unwrap());
            assert!(most - least <= 1, "{met:?}");
        }
    }

    #[test]
    fn rows_of_two_sets_share_no_sequence_and_all_are_there() {
        let mix = mix([1.0, 2.0], Some(16));
        let all = mix.all();
        let mut rows = rows_of(&all);
        rows.sort_unstable();
        assert_eq!(rows, (0..140).collect::<Vec<_>>());
        for epoch in [0, 3] {
            let sequences = mix.epoch(epoch, 1);
            for sequence in 0..sequences.len() {
                let from_first = sequences.members(sequence).filter(|&row| row < 100).count();
                assert!(from_first == 0 || from_first == sequences.members(sequence).count());
                assert!(sequences.length(sequence) <= 16);
            }
        }
    }
}
