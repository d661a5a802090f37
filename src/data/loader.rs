//! Sequences to batches. What an optimizer step sees is a pure function of its number, so a resumed run needs no state of ours.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::cache::CacheError;
use super::mix::Mix;
use super::pack::{PackedSequence, Sequences};
use super::random_stream::shuffled;
use super::rows::IGNORE;

/// Hands out the micro batches of every optimizer step.
#[derive(Debug)]
pub struct Loader {
    sequences: Sequences,
    /// What each epoch takes of `sequences`; `None`: all of them.
    mix: Option<Mix>,
    micro_batch_size: usize,
    gradient_accumulation_steps: usize,
    shuffle: Option<u64>,
    /// The epoch asked for last.
    epoch: Mutex<Option<Epoch>>,
}

/// The sequences of one epoch, and their order.
#[derive(Debug)]
struct Epoch {
    number: usize,
    sequences: Sequences,
    order: Vec<u32>,
}

/// Which of the micro batches of a step, or of the batches of an evaluation, a process computes: number `i` belongs to the process with rank `i`
/// modulo the number of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShare {
    pub rank: usize,
    /// Not 0.
    pub world_size: usize,
}

impl BatchShare {
    /// All of them.
    pub const WHOLE: Self = Self { rank: 0, world_size: 1 };

    /// The number, among those of all processes, of the `index`-th that this process computes.
    pub fn number(self, index: usize) -> usize {
        index * self.world_size + self.rank
    }
}

/// One forward pass: `rows` sequences, padded on the right to `length`. Everything is flat, row after row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// For each row the data rows in its segments, by their index.
    pub row_ids: Vec<Vec<usize>>,
    /// B.
    pub rows: usize,
    /// T, the longest of them.
    pub length: usize,
    /// `[B, T]`, padded with 0.
    pub input_ids: Vec<i64>,
    /// `[B, T]`, padded with [`IGNORE`].
    pub labels: Vec<i64>,
    /// For each row the lengths of its segments, padding not counted.
    pub segment_lengths: Vec<Vec<usize>>,
}

/// What a head learns from a batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TargetTokens {
    /// Where to predict from: flat positions `row * length + t`, ascending.
    pub positions: Vec<i64>,
    /// The token to predict from each.
    pub tokens: Vec<i64>,
}

impl Loader {
    /// `shuffle`: the seed of every epoch's order, and of which packed rows share a sequence; `None` keeps `sequences` as they are.
    ///
    /// # Panics
    /// Without sequences, or with a batch of none: recipes cannot say that.
    pub fn new(
        sequences: Sequences,
        micro_batch_size: usize,
        gradient_accumulation_steps: usize,
        shuffle: Option<u64>,
    ) -> Self {
        assert!(!sequences.is_empty() && micro_batch_size * gradient_accumulation_steps > 0);
        let epoch = Mutex::new(None);
        Self { sequences, mix: None, micro_batch_size, gradient_accumulation_steps, shuffle, epoch }
    }

    /// Epochs of a mix, each in an order drawn from `seed`.
    ///
    /// # Panics
    /// As [`Loader::new`].
    pub fn mixed(mix: Mix, micro_batch_size: usize, gradient_accumulation_steps: usize, seed: u64) -> Self {
        let all = Self::new(mix.all(), micro_batch_size, gradient_accumulation_steps, Some(seed));
        Self { mix: Some(mix), ..all }
    }

    /// All sequences of the first epoch, of a mix those of all sets. Later epochs have none that is longer than the longest.
    pub fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// The weighted sets, if the recipe mixes them.
    pub fn mix(&self) -> Option<&Mix> {
        self.mix.as_ref()
    }

    pub fn sequences_per_epoch(&self) -> usize {
        self.mix.as_ref().map_or(self.sequences.len(), Mix::len)
    }

    /// Optimizer steps an epoch; the last one takes what is left.
    pub fn steps_per_epoch(&self) -> usize {
        self.sequences_per_epoch().div_ceil(self.step_size())
    }

    /// Sequences of an optimizer step (0-based, over all epochs) ÷ those of the largest: below 1 only in the last step of an epoch, which takes what
    /// is left.
    pub fn fraction_of_step(&self, step: usize) -> f64 {
        let (all, per_step) = (self.sequences_per_epoch(), self.step_size());
        let left = all - step % self.steps_per_epoch() * per_step;
        left.min(per_step) as f64 / all.min(per_step) as f64
    }

    /// The micro batches of an optimizer step, counted from 0 over all epochs.
    ///
    /// # Errors
    /// As [`Sequences::get`].
    pub fn step(&self, step: usize) -> Result<Vec<Batch>, CacheError> {
        self.step_share(step, BatchShare::WHOLE)
    }

    /// As [`Loader::step`], a process's share of them: none if the last step of an epoch has fewer micro batches than there are processes.
    ///
    /// # Errors
    /// As [`Sequences::get`].
    pub fn step_share(&self, step: usize, share: BatchShare) -> Result<Vec<Batch>, CacheError> {
        let (epoch, step) = (step / self.steps_per_epoch(), step % self.steps_per_epoch());
        // The epoch is replaced as a whole: after a panic elsewhere it is still consistent.
        let mut known = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match &mut *known {
            Some(known) if known.number == epoch => known,
            known => known.insert(self.epoch(epoch)),
        };
        let first = step * self.step_size();
        let ids = &known.order[first..known.order.len().min(first + self.step_size())];
        let micro_batches = ids.chunks(self.micro_batch_size).skip(share.rank).step_by(share.world_size);
        micro_batches.map(|ids| batch(&known.sequences, ids)).collect()
    }

    /// All sequences once, in the order they were given; one batch is read after the other.
    pub fn eval_batches(&self) -> impl Iterator<Item = Result<Batch, CacheError>> + '_ {
        self.eval_share(BatchShare::WHOLE)
    }

    /// As [`Loader::eval_batches`], a process's share of the batches.
    pub fn eval_share(&self, share: BatchShare) -> impl Iterator<Item = Result<Batch, CacheError>> + '_ {
        let firsts = (0..self.sequences.len()).step_by(self.micro_batch_size);
        firsts.skip(share.rank).step_by(share.world_size).map(|first| {
            let last = self.sequences.len().min(first + self.micro_batch_size);
            batch(&self.sequences, &(first as u32..last as u32).collect::<Vec<_>>())
        })
    }

    fn step_size(&self) -> usize {
        self.micro_batch_size * self.gradient_accumulation_steps
    }

    fn epoch(&self, number: usize) -> Epoch {
        let count = self.sequences_per_epoch();
        let (sequences, order) = match (self.shuffle, &self.mix) {
            (Some(seed), Some(mix)) => (mix.epoch(number, seed), shuffled(count, seed, number as u64)),
            (Some(seed), None) => (self.sequences.for_epoch(number as u64, seed), shuffled(count, seed, number as u64)),
            (None, _) => (self.sequences.clone(), (0..count as u32).collect()),
        };
        Epoch { number, sequences, order }
    }
}

/// Some of the sequences.
fn batch(sequences: &Sequences, ids: &[u32]) -> Result<Batch, CacheError> {
    let ids = || ids.iter().map(|&id| id as usize);
    let row_ids = ids().map(|id| sequences.members(id).collect()).collect();
    Ok(Batch::of(row_ids, ids().map(|id| sequences.get(id)).collect::<Result<_, _>>()?))
}

impl Batch {
    fn of(row_ids: Vec<Vec<usize>>, sequences: Vec<PackedSequence>) -> Self {
        let length = sequences.iter().map(|row| row.input_ids.len()).max().unwrap_or(0);
        Self {
            rows: row_ids.len(),
            row_ids,
            length,
            input_ids: padded(sequences.iter().map(|row| row.input_ids.as_slice()), length, 0),
            labels: padded(sequences.iter().map(|row| row.labels.as_slice()), length, IGNORE),
            segment_lengths: sequences.into_iter().map(|row| row.segment_lengths).collect(),
        }
    }

    /// The targets `offset` tokens ahead: 1 for the LM head, `k + 1` for Medusa head `k` (1-based).
    /// All `t` with `t + offset` in the same segment and a label there.
    pub fn targets(&self, offset: usize) -> TargetTokens {
        self.targets_with(offset, |label| label != i64::from(IGNORE))
    }

    /// As [`Batch::targets`], also where there is no label; the token is then [`IGNORE`].
    pub fn all_targets(&self, offset: usize) -> TargetTokens {
        self.targets_with(offset, |_| true)
    }

    fn targets_with(&self, offset: usize, counts: impl Fn(i64) -> bool) -> TargetTokens {
        let mut targets = TargetTokens::default();
        for (_, place) in self.segments() {
            for target in place.start + offset..place.end {
                if counts(self.labels[target]) {
                    targets.positions.push((target - offset) as i64);
                    targets.tokens.push(self.labels[target]);
                }
            }
        }
        targets
    }

    /// The `count` input tokens after each of `positions` (flat, `row * length + t`), one position after the other. They lie in the same
    /// segment if the position has a target further away than `count`.
    pub fn tokens_after(&self, positions: &[i64], count: usize) -> Vec<i64> {
        let after = |&at: &i64| self.input_ids[at as usize + 1..][..count].iter().copied();
        positions.iter().flat_map(after).collect()
    }

    /// Each data row of the batch, by its index, and its flat positions.
    pub fn segments(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let rows = self.row_ids.iter().zip(&self.segment_lengths).enumerate();
        rows.flat_map(|(row, (ids, lengths))| {
            let mut start = row * self.length;
            ids.iter().zip(lengths).map(move |(&id, length)| {
                start += length;
                (id, start - length..start)
            })
        })
    }

    /// Its tokens, padding not counted.
    pub fn tokens(&self) -> usize {
        self.segment_lengths.iter().flatten().sum()
    }
}

fn padded<'a>(rows: impl Iterator<Item = &'a [i32]>, length: usize, padding: i32) -> Vec<i64> {
    rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(padding, length - row.len())))
        .map(i64::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::pack::pack;
    use crate::data::random_stream::RandomStream;
    use crate::data::rows::TokenRow;
    use crate::data::store::RowStore;

    /// Segments of (token, labelled) to a sequence.
    fn sequence(segments: Vec<Vec<(i32, bool)>>) -> PackedSequence {
        let tokens = || segments.iter().flatten();
        PackedSequence {
            input_ids: tokens().map(|(token, _)| *token).collect(),
            labels: tokens().map(|&(token, labelled)| if labelled { token } else { IGNORE }).collect(),
            segment_lengths: segments.iter().map(Vec::len).collect(),
        }
    }

    fn sequences() -> impl Strategy<Value = Vec<PackedSequence>> {
        let segment = prop::collection::vec((0..500, any::<bool>()), 1..8);
        prop::collection::vec(prop::collection::vec(segment, 1..4).prop_map(sequence), 1..20)
    }

    /// The oracle: looks up the segment of each position and of its target.
    fn naive_targets(batch: &Batch, offset: usize, all: bool) -> TargetTokens {
        let mut targets = TargetTokens::default();
        for (row, lengths) in batch.segment_lengths.iter().enumerate() {
            let segment_of: Vec<usize> = lengths.iter().enumerate().flat_map(|(s, &n)| vec![s; n]).collect();
            for t in 0..batch.length {
                let Some(target) = segment_of.get(t + offset) else { continue };
                let label = batch.labels[row * batch.length + t + offset];
                if segment_of[t] == *target && (all || label != -100) {
                    targets.positions.push((row * batch.length + t) as i64);
                    targets.tokens.push(label);
                }
            }
        }
        targets
    }

    /// The sequence of each row of a batch. Rows of sequences in memory are numbered one after another.
    fn sequence_ids(sequences: &[PackedSequence], batch: &Batch) -> Vec<usize> {
        let rows: Vec<usize> =
            sequences.iter().enumerate().flat_map(|(id, s)| vec![id; s.segment_lengths.len()]).collect();
        batch.row_ids.iter().map(|ids| rows[ids[0]]).collect()
    }

    fn rows_of(sequences: &[PackedSequence], id: usize) -> Vec<usize> {
        let first = sequences[..id].iter().map(|s| s.segment_lengths.len()).sum::<usize>();
        (first..first + sequences[id].segment_lengths.len()).collect()
    }

    /// The oracle: a batch made of sequences in memory, place by place.
    fn naive_batch(sequences: &[PackedSequence], ids: &[usize]) -> Batch {
        let length = ids.iter().map(|&id| sequences[id].input_ids.len()).max().unwrap_or(0);
        let place = |of: fn(&PackedSequence) -> &Vec<i32>, padding: i32| {
            let row = |&id: &usize| (0..length).map(move |t| of(&sequences[id]).get(t).map_or(padding, |&token| token));
            ids.iter().flat_map(row).map(i64::from).collect()
        };
        Batch {
            row_ids: ids.iter().map(|&id| rows_of(sequences, id)).collect(),
            rows: ids.len(),
            length,
            input_ids: place(|sequence| &sequence.input_ids, 0),
            labels: place(|sequence| &sequence.labels, IGNORE),
            segment_lengths: ids.iter().map(|&id| sequences[id].segment_lengths.clone()).collect(),
        }
    }

    proptest! {
        #[test]
        fn batches_are_those_of_sequences_in_memory(sequences in sequences(), size in 1_usize..5, seed: u64) {
            let loader = Loader::new(Sequences::in_memory(sequences.clone()), size, 2, Some(seed));
            for batch in loader.step(0).unwrap() {
                let expected = naive_batch(&sequences, &sequence_ids(&sequences, &batch));
                prop_assert_eq!(batch, expected);
            }
        }

        #[test]
        fn targets_are_those_of_a_naive_search(sequences in sequences(), offset in 1_usize..7, size in 1_usize..5) {
            for batch in Loader::new(Sequences::in_memory(sequences), size, 1, None).eval_batches() {
                let batch = batch.unwrap();
                prop_assert_eq!(batch.targets(offset), naive_targets(&batch, offset, false));
                prop_assert_eq!(batch.all_targets(offset), naive_targets(&batch, offset, true));
            }
        }

        #[test]
        fn tokens_before_a_target_are_those_of_its_segment(sequences in sequences(), offset in 2_usize..7) {
            for batch in Loader::new(Sequences::in_memory(sequences), 3, 1, None).eval_batches() {
                let batch = batch.unwrap();
                let mut segments = vec![];
                for (row, lengths) in batch.segment_lengths.iter().enumerate() {
                    let mut start = row * batch.length;
                    for length in lengths {
                        segments.push(start..start + length);
                        start += length;
                    }
                }
                let positions = batch.targets(offset).positions;
                for (at, tokens) in positions.iter().zip(batch.tokens_after(&positions, offset - 1).chunks(offset - 1)) {
                    let segment = segments.iter().find(|segment| segment.contains(&(*at as usize))).unwrap();
                    let rest = &batch.input_ids[*at as usize..segment.end];
                    prop_assert_eq!(tokens, &rest[1..offset]);
                }
            }
        }

        #[test]
        fn every_epoch_gives_each_sequence_once(
            sequences in sequences(), size in 1_usize..4, accumulation in 1_usize..4, seed: u64,
        ) {
            let count = sequences.len();
            let loader = Loader::new(Sequences::in_memory(sequences.clone()), size, accumulation, Some(seed));
            for epoch in 0..3 {
                let steps = (0..loader.steps_per_epoch()).map(|step| loader.step(epoch * loader.steps_per_epoch() + step).unwrap());
                let mut seen = Vec::new();
                for batches in steps {
                    prop_assert!(!batches.is_empty() && batches.len() <= accumulation);
                    for batch in batches {
                        prop_assert!(batch.rows <= size);
                        for (row, &id) in sequence_ids(&sequences, &batch).iter().enumerate() {
                            let sequence = &sequences[id];
                            let ids = &batch.input_ids[row * batch.length..][..batch.length];
                            let (kept, padding) = ids.split_at(sequence.input_ids.len());
                            prop_assert!(kept.iter().zip(&sequence.input_ids).all(|(a, b)| *a == i64::from(*b)));
                            prop_assert!(padding.iter().all(|id| *id == 0));
                        }
                        seen.extend(sequence_ids(&sequences, &batch));
                    }
                }
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..count).collect::<Vec<_>>());
            }
        }

        #[test]
        fn processes_share_the_batches_of_steps_and_evaluations(
            sequences in sequences(), size in 1_usize..4, accumulation in 1_usize..5, world_size in 1_usize..6, seed: u64,
        ) {
            let loader = Loader::new(Sequences::in_memory(sequences), size, accumulation, Some(seed));
            let shares = || (0..world_size).map(|rank| BatchShare { rank, world_size });
            // The batches of all processes by their number.
            let joined = |of: &dyn Fn(BatchShare) -> Vec<Batch>| {
                let numbered = |share: BatchShare| of(share).into_iter().enumerate().map(move |(i, batch)| (share.number(i), batch));
                shares().flat_map(numbered).collect::<std::collections::BTreeMap<_, _>>().into_iter().collect::<Vec<_>>()
            };
            for step in 0..2 * loader.steps_per_epoch() {
                let whole: Vec<_> = loader.step(step).unwrap().into_iter().enumerate().collect();
                prop_assert_eq!(joined(&|share| loader.step_share(step, share).unwrap()), whole);
            }
            let whole: Vec<_> = loader.eval_batches().map(Result::unwrap).enumerate().collect();
            prop_assert_eq!(joined(&|share| loader.eval_share(share).map(Result::unwrap).collect()), whole);
        }

        #[test]
        fn a_step_is_the_same_whatever_was_asked_before(sequences in sequences(), seed: u64, steps in prop::collection::vec(0_usize..60, 1..9)) {
            let used = Loader::new(Sequences::in_memory(sequences.clone()), 2, 2, Some(seed));
            for step in steps {
                let fresh = Loader::new(Sequences::in_memory(sequences.clone()), 2, 2, Some(seed));
                prop_assert_eq!(used.step(step).unwrap(), fresh.step(step).unwrap());
            }
        }
    }

    #[test]
    fn a_step_of_a_mix_is_a_function_of_its_number_and_the_seed() {
        let row = |row: i32| TokenRow { input_ids: vec![row; 3], labels: vec![row; 3] };
        let mix = || Mix::new(RowStore::in_memory((0..140).map(row)), &[100, 40], &[1.0, 1.0], Some(7));
        let loader = |seed| Loader::mixed(mix(), 2, 2, seed);
        let (straight, resumed) = (loader(3), loader(3));
        let steps = straight.steps_per_epoch();
        assert_eq!((straight.sequences_per_epoch(), straight.sequences().len(), steps), (40, 70, 10));
        let straight: Vec<_> = (0..3 * steps).map(|step| straight.step(step).unwrap()).collect();
        for step in (steps + 1..3 * steps).chain([0]) {
            assert_eq!(resumed.step(step).unwrap(), straight[step], "step {step}");
        }
        assert_ne!(loader(4).step(0).unwrap(), straight[0]);
        let rows = |step: &[Batch]| step.iter().flat_map(|batch| batch.row_ids.clone()).collect::<Vec<_>>();
        let (whole, single) = (Loader::mixed(mix(), 4, 1, 3), Loader::mixed(mix(), 1, 4, 3));
        for (step, straight) in straight.iter().enumerate().skip(steps) {
            let [whole, single] = [&whole, &single].map(|loader| rows(&loader.step(step).unwrap()));
            assert_eq!((&whole, &single), (&rows(straight), &whole), "micro batches do not decide step {step}");
        }
    }

    #[test]
    fn packed_rows_have_other_neighbours_in_every_shuffled_epoch() {
        let mut draws = RandomStream::new(7, 0);
        let row = |length| TokenRow { input_ids: vec![1; length], labels: vec![1; length] };
        let rows = RowStore::in_memory((0..600).map(|_| row(3 + draws.below(200))));
        let sequences = pack(rows, 512).0;
        let groups = |shuffle, epoch: usize| {
            let loader = Loader::new(sequences.clone(), 1, 1, shuffle);
            let steps = epoch * loader.steps_per_epoch()..(epoch + 1) * loader.steps_per_epoch();
            steps.map(|step| loader.step(step).unwrap().remove(0).row_ids.concat()).collect::<Vec<_>>()
        };
        let pairs = |groups: Vec<Vec<usize>>| {
            let pairs = |rows: Vec<usize>| {
                rows.iter().flat_map(|&a| rows.iter().map(move |&b| (a, b)).filter(|(a, b)| a < b)).collect::<Vec<_>>()
            };
            groups.into_iter().flat_map(pairs).collect::<std::collections::BTreeSet<_>>()
        };
        for (one, other) in [(0, 1), (1, 2), (0, 2)] {
            let (one, other) = (pairs(groups(Some(5), one)), pairs(groups(Some(5), other)));
            let shared = one.intersection(&other).count();
            assert!(4 * shared < one.len(), "{shared} of {} pairs are together again", one.len());
        }
        assert_eq!(groups(Some(5), 3), groups(Some(5), 3));
        assert_ne!(pairs(groups(Some(5), 3)), pairs(groups(Some(6), 3)));
        assert_eq!(groups(None, 0), groups(None, 1));
    }

    #[test]
    fn epochs_and_seeds_differ_and_the_stream_never_changes() {
        assert_eq!(shuffled(8, 42, 0), STREAM);
        assert_ne!(shuffled(8, 42, 1), STREAM);
        assert_ne!(shuffled(8, 43, 0), STREAM);
    }

    /// Written down once: a run resumed with another version must go on with the same rows.
    const STREAM: [u32; 8] = [4, 7, 0, 1, 3, 2, 6, 5];

    #[test]
    fn without_shuffling_rows_come_in_order_and_the_last_step_is_smaller() {
        let sequences = (0..5).map(|token| sequence(vec![vec![(token, true); 2]])).collect();
        let loader = Loader::new(Sequences::in_memory(sequences), 2, 2, None);
        let ids = |step| loader.step(step).unwrap().into_iter().map(|batch| batch.row_ids.concat()).collect::<Vec<_>>();
        assert_eq!(loader.steps_per_epoch(), 2);
        assert_eq!(ids(0), [vec![0, 1], vec![2, 3]]);
        assert_eq!(ids(1), [vec![4]]);
        assert_eq!(ids(2), ids(0));
        assert_eq!([0, 1, 2, 3].map(|step| loader.fraction_of_step(step)), [1.0, 0.25, 1.0, 0.25]);
        let few = Loader::new(loader.sequences().clone(), 2, 9, None);
        assert_eq!(few.fraction_of_step(1), 1.0, "each step has all rows");
    }
}
