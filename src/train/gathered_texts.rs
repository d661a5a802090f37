//! Tokens per step of an evaluation that the processes of a run share: the ranks of their targets go to rank 0, in the order of the batches.

use crate::train::ranks::{Ranks, RanksError};
use crate::tree::cross_validation::{CrossValidation, TOP_K};
use crate::tree::rank_counts::RankedPosition;

/// A head's byte where it has no target.
const NO_TARGET: u8 = u8::MAX;

/// The ranks of right guesses on the texts of an evaluation.
#[derive(Debug)]
pub struct EvaluatedTexts<'c> {
    levels: usize,
    ranks: Ranks<'c>,
    /// All texts so far, in a run of one process.
    counted: CrossValidation,
    /// A run of several processes: this one's batches, to be counted in their order with those of the others.
    own: Vec<Vec<u8>>,
}

impl<'c> EvaluatedTexts<'c> {
    /// No texts yet, of `levels` levels.
    pub fn new(levels: usize, ranks: Ranks<'c>) -> Self {
        Self { levels, ranks, counted: CrossValidation::new(levels), own: vec![] }
    }

    /// Adds the texts of this process's next batch, with the numbers of their rows.
    pub fn add_batch(&mut self, texts: impl Iterator<Item = (usize, Vec<RankedPosition>)>) {
        if self.ranks.is_alone() {
            texts.for_each(|(row, text)| self.counted.fold_of(row).add_text(text));
        } else {
            self.own.push(texts.flat_map(|(row, text)| text_bytes(row, &text)).collect());
        }
    }

    /// The tokens per step on the texts of all processes (see [`CrossValidation::tokens_per_step`]).
    ///
    /// # Errors
    /// [`RanksError::Collective`].
    pub fn tokens_per_step(mut self) -> Result<Option<f64>, RanksError> {
        if self.ranks.is_alone() {
            return Ok(self.counted.tokens_per_step());
        }
        let own: Vec<u8> = self.own.iter().flat_map(|batch| with_length(batch)).collect();
        let all = self.ranks.gather(&own)?;
        let found = self.ranks.is_first().then(|| {
            self.count(&all);
            self.counted.tokens_per_step()
        });
        self.ranks.broadcast(found)
    }

    /// Counts the batches of all processes, which took turns.
    fn count(&mut self, all: &[Vec<u8>]) {
        let mut by_rank: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        for rank in (0..by_rank.len()).cycle() {
            if by_rank[rank].is_empty() {
                return; // the first process that has no more batches ends the last turn
            }
            let mut batch = split_off_counted(&mut by_rank[rank]);
            while !batch.is_empty() {
                let (row, text) = self.text_of(&mut batch);
                self.counted.fold_of(row).add_text(text);
            }
        }
    }

    /// The inverse of [`text_bytes`], at the front of `bytes`.
    fn text_of(&self, bytes: &mut &[u8]) -> (usize, Vec<RankedPosition>) {
        let row = number(split_off(bytes, NUMBER));
        let rank = |&byte: &u8| (byte != NO_TARGET).then_some(usize::from(byte));
        let position =
            |bytes: &[u8]| RankedPosition { is_step: bytes[0] != 0, ranks: bytes[1..].iter().map(rank).collect() };
        (row, split_off_counted(bytes).chunks(1 + self.levels).map(position).collect())
    }
}

/// Bytes of a number.
const NUMBER: usize = size_of::<u64>();

/// A row's number and the bytes of its positions: whether a step can start there, and the rank of each head's target. Those from [`TOP_K`] on
/// are misses, whichever they are.
fn text_bytes(row: usize, text: &[RankedPosition]) -> Vec<u8> {
    let rank = |rank: &Option<usize>| rank.map_or(NO_TARGET, |rank| rank.min(TOP_K) as u8);
    let position = |position: &RankedPosition| {
        [u8::from(position.is_step)].into_iter().chain(position.ranks.iter().map(rank)).collect::<Vec<_>>()
    };
    let positions: Vec<u8> = text.iter().flat_map(position).collect();
    [row.to_le_bytes().to_vec(), with_length(&positions)].concat()
}

fn with_length(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

fn split_off_counted<'b>(bytes: &mut &'b [u8]) -> &'b [u8] {
    let length = number(split_off(bytes, NUMBER));
    split_off(bytes, length)
}

fn split_off<'b>(bytes: &mut &'b [u8], length: usize) -> &'b [u8] {
    let (front, rest) = bytes.split_at(length);
    *bytes = rest;
    front
}

fn number(bytes: &[u8]) -> usize {
    u64::from_le_bytes(bytes.try_into().expect("bytes of a number")) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::rank_counts::OUTSIDE;

    /// Six batches of texts whose heads are right more or less often.
    fn batches() -> Vec<Vec<(usize, Vec<RankedPosition>)>> {
        let rank = |at: usize| {
            [Some(at % 3), (!at.is_multiple_of(5)).then_some(at % 7), Some([1, 12, OUTSIDE][at % 3])].to_vec()
        };
        let position = |at: usize| RankedPosition { is_step: !at.is_multiple_of(11), ranks: rank(at) };
        let text = |row: usize| (row, (row * 5..row * 9 + 4).map(position).collect());
        (0..6).map(|batch| (batch * 2..batch * 2 + 2).map(text).collect()).collect()
    }

    #[test]
    fn batches_of_several_processes_are_counted_in_their_order() {
        let mut alone = EvaluatedTexts::new(3, Ranks::alone());
        batches().into_iter().for_each(|batch| alone.add_batch(batch.into_iter()));
        for world_size in [2, 4, 5, 7] {
            let rank_texts = |rank: usize| {
                let own = batches().into_iter().skip(rank).step_by(world_size);
                let bytes =
                    own.map(|batch| batch.iter().flat_map(|(row, text)| text_bytes(*row, text)).collect::<Vec<_>>());
                bytes.flat_map(|batch| with_length(&batch)).collect::<Vec<u8>>()
            };
            let mut joined = EvaluatedTexts::new(3, Ranks::alone());
            joined.count(&(0..world_size).map(rank_texts).collect::<Vec<_>>());
            assert_eq!(joined.counted, alone.counted, "{world_size} processes");
        }
        let found = alone.tokens_per_step().expect("one process").expect("targets");
        assert!(found > 1.0, "{found}");
    }
}
