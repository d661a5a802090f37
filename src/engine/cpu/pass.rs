//! Cuts the new tokens of several sequences into passes of few tokens.

// N tokens of a pass
use std::ops::Range;

use crate::engine::RowTokens;
use crate::model::kv_cache::KvCache;
use crate::model::new_tokens::NewTokens;

/// New tokens of one sequence in a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PassTokens<'s, T = NewTokens> {
    /// The sequence's row of the cache.
    pub(super) row: usize,
    /// Committed tokens of that row.
    pub(super) len: usize,
    /// All new tokens of the sequence.
    pub(super) tokens: &'s T,
    /// Which of them.
    pub(super) nodes: Range<usize>,
    /// Where they are among the N tokens of the pass.
    pub(super) at: Range<usize>,
}

/// Passes of at most `most` tokens each, in order.
pub(super) fn passes<'s>(cache: &KvCache, batch: &[RowTokens<'s>], most: usize) -> Vec<Vec<PassTokens<'s>>> {
    let sequence = |at: &RowTokens<'s>| {
        let len = cache.len(at.row).unsigned_abs() as usize;
        (at.row, len, at.nodes, at.nodes.len().unsigned_abs() as usize)
    };
    cut(batch.iter().map(sequence), most)
}

/// [`passes`] of sequences given by row, committed tokens, new tokens and their number.
fn cut<'s, T>(
    sequences: impl Iterator<Item = (usize, usize, &'s T, usize)>,
    most: usize,
) -> Vec<Vec<PassTokens<'s, T>>> {
    let (mut passes, mut pass, mut filled) = (vec![], vec![], 0);
    for (row, len, tokens, count) in sequences {
        let mut from = 0;
        while from < count {
            let taken = (count - from).min(most - filled);
            pass.push(PassTokens { row, len, tokens, nodes: from..from + taken, at: filled..filled + taken });
            (from, filled) = (from + taken, filled + taken);
            if filled == most {
                passes.push(std::mem::take(&mut pass));
                filled = 0;
            }
        }
    }
    passes.extend((!pass.is_empty()).then_some(pass));
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_are_full_but_the_last_and_hold_every_token_once() {
        let names = ["a", "b", "c", "d"];
        let counts = [3, 7, 1, 5];
        let sequences = || (0..4).map(|row| (row, 10 * row, &names[row], counts[row]));
        for most in 1..=17 {
            let passes = cut(sequences(), most);
            let sizes: Vec<usize> = passes.iter().map(|pass| pass.last().expect("a piece").at.end).collect();
            assert!(sizes[..sizes.len() - 1].iter().all(|&size| size == most) && sizes.iter().sum::<usize>() == 16);
            for pass in &passes {
                assert!(pass.windows(2).all(|two| two[0].at.end == two[1].at.start) && pass[0].at.start == 0);
                assert!(pass.iter().all(|piece| piece.at.len() == piece.nodes.len() && !piece.at.is_empty()));
            }
            let all = passes.iter().flatten().flat_map(|piece| piece.nodes.clone().map(|node| (piece.row, node)));
            let expected: Vec<(usize, usize)> =
                (0..4).flat_map(|row| (0..counts[row]).map(move |node| (row, node))).collect();
            assert_eq!(all.collect::<Vec<_>>(), expected);
        }
    }
}
