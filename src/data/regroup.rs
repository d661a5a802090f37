//! Packs rows in another way than best-fit decreasing does, but into as many sequences, so that all epochs have the same number of steps.

use super::best_fit::best_fit;
use super::random_stream::RandomStream;

/// A length of 1 in sort keys.
const ONE: usize = 1 << 20;

/// The sequence of each row, of `count` sequences of up to `capacity` tokens. Rows are packed by decreasing length, but each length counts
/// up to half more than it is, at random. That nearly always takes `count` sequences; else the lengths are changed less, and `None` is
/// returned if nothing helps.
pub(super) fn regroup(lengths: &[u32], capacity: usize, count: usize, draws: &mut RandomStream) -> Option<Vec<u32>> {
    (1..8)
        .map(|halvings| packed(lengths, capacity, ONE >> halvings, draws))
        .find_map(|sequence_of| filled_up(sequence_of, count))
}

fn packed(lengths: &[u32], capacity: usize, most: usize, draws: &mut RandomStream) -> Vec<u32> {
    let keys: Vec<u64> = lengths.iter().map(|&length| u64::from(length) * (ONE + draws.below(most)) as u64).collect();
    let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
    order.sort_by_key(|&row| std::cmp::Reverse(keys[row as usize]));
    best_fit(&order, lengths, capacity)
}

/// With exactly `count` sequences: rows that share one get their own as long as there are fewer. `None` if there are more.
fn filled_up(mut sequence_of: Vec<u32>, count: usize) -> Option<Vec<u32>> {
    let mut opened = sequence_of.iter().max().map_or(0, |last| *last as usize + 1);
    let mut is_met = vec![false; opened];
    for sequence in &mut sequence_of {
        let is_shared = std::mem::replace(&mut is_met[*sequence as usize], true);
        if is_shared && opened < count {
            *sequence = opened as u32;
            opened += 1;
        }
    }
    (opened == count).then_some(sequence_of)
}
