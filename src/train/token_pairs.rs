//! How well each token predicts the next one, by their counts in the training rows: what a language model must do better than.

use std::collections::HashMap;

use crate::data::cache::CacheError;
use crate::data::pack::PackedSequence;

/// Tokens after which no more are counted.
const ENOUGH_TOKENS: usize = 1 << 20;
/// How many pairs the counts of single tokens weigh beside those of pairs.
const SINGLE_TOKENS: f64 = 4.0;

/// A token and the one after it.
pub type TokenPair = (i64, i64);

/// Counts of tokens, and of pairs of them.
#[derive(Debug, Default)]
pub struct TokenPairs {
    vocab_size: usize,
    all: u64,
    firsts: HashMap<i64, u64>,
    seconds: HashMap<i64, u64>,
    pairs: HashMap<TokenPair, u64>,
}

impl TokenPairs {
    /// Of the first of `rows`.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn of(
        rows: impl Iterator<Item = Result<PackedSequence, CacheError>>,
        vocab_size: usize,
    ) -> Result<Self, CacheError> {
        let (mut counts, mut tokens) = (Self { vocab_size, ..Self::default() }, 0);
        for row in rows {
            let PackedSequence { input_ids, segment_lengths, .. } = row?;
            let mut rest = &input_ids[..];
            for length in segment_lengths {
                let (segment, later) = rest.split_at(length);
                segment.windows(2).for_each(|pair| counts.add((pair[0].into(), pair[1].into())));
                rest = later;
            }
            tokens += input_ids.len();
            if tokens >= ENOUGH_TOKENS {
                break;
            }
        }
        Ok(counts)
    }

    fn add(&mut self, pair: TokenPair) {
        self.all += 1;
        *self.firsts.entry(pair.0).or_default() += 1;
        *self.seconds.entry(pair.1).or_default() += 1;
        *self.pairs.entry(pair).or_default() += 1;
    }

    /// The mean cross-entropy of second tokens, each guessed from the counts of all other pairs.
    pub fn cross_entropy(&self, pairs: &[TokenPair]) -> f64 {
        pairs.iter().map(|pair| -self.probability(*pair).ln()).sum::<f64>() / pairs.len() as f64
    }

    fn probability(&self, pair: TokenPair) -> f64 {
        let without_this = |count: Option<&u64>| count.map_or(0, |count| count.saturating_sub(1)) as f64;
        let single = (without_this(self.seconds.get(&pair.1)) + 1.0)
            / (self.all.saturating_sub(1) as f64 + self.vocab_size as f64);
        (without_this(self.pairs.get(&pair)) + SINGLE_TOKENS * single)
            / (without_this(self.firsts.get(&pair.0)) + SINGLE_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(rows: &[&[i32]]) -> TokenPairs {
        let row = |ids: &&[i32]| {
            let segment_lengths = vec![ids.len() / 2, ids.len() - ids.len() / 2];
            Ok(PackedSequence { input_ids: ids.to_vec(), labels: ids.to_vec(), segment_lengths })
        };
        TokenPairs::of(rows.iter().map(row), 8).unwrap()
    }

    #[test]
    fn a_pair_is_guessed_from_the_others_of_its_segment() {
        let counts = counted(&[&[1, 2, 1, 2], &[1, 2, 3, 4]]);
        assert_eq!((counts.all, counts.pairs.get(&(1, 2)), counts.pairs.get(&(2, 1))), (4, Some(&3), None));
        // 2 others of 3 + 8 tokens, and 2 of 2 pairs.
        let single = (2.0 + 1.0) / (3.0 + 8.0);
        assert!((counts.probability((1, 2)) - (2.0 + 4.0 * single) / (2.0 + 4.0)).abs() < 1e-12);
        // A pair that was seen once is guessed as if it had not been.
        let single = 1.0 / (3.0 + 8.0);
        assert!((counts.cross_entropy(&[(3, 4)]) + f64::ln(single)).abs() < 1e-12);
    }

    #[test]
    fn the_guesses_after_a_token_sum_to_1() {
        let counts = counted(&[&[1, 2, 1, 3, 1, 2], &[5, 6, 7, 0]]);
        let unseen = (0..8).filter(|second| !counts.pairs.contains_key(&(4, *second)));
        let sum: f64 = unseen.map(|second| counts.probability((4, second))).sum();
        assert!(sum <= 1.0 && sum > 0.5, "{sum}"); // each leaves one pair out
    }
}
