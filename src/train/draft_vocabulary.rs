//! The tokens that the heads of a run can guess, if its recipe truncates their vocabulary.

use std::fmt;

use serde::Serialize;

use crate::data::IGNORE;
use crate::data::cache::CacheError;
use crate::data::store::RowStore;
use crate::draft::token_map::TokenMap;

/// A truncated vocabulary, and how much of the training labels it holds.
#[derive(Debug, Clone, Serialize)]
pub struct DraftVocabulary {
    /// The token ids.
    #[serde(skip)]
    pub tokens: Vec<i64>,
    pub draft_vocab_size: usize,
    /// V of the backbone.
    pub vocab_size: usize,
    /// The fraction of the labels that are among the tokens.
    pub label_fraction: f64,
}

impl DraftVocabulary {
    /// The `size` most frequent labels of `rows`, or the given tokens.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn of(rows: &RowStore, vocab_size: usize, size: usize, given: Option<Vec<i64>>) -> Result<Self, CacheError> {
        let counts = label_counts(rows, vocab_size)?;
        let tokens = given.unwrap_or_else(|| TokenMap::most_frequent(&counts, size));
        let all: u64 = counts.iter().sum();
        let among: u64 = tokens.iter().map(|&token| counts[token as usize]).sum();
        let label_fraction = among as f64 / all.max(1) as f64;
        Ok(Self { draft_vocab_size: tokens.len(), tokens, vocab_size, label_fraction })
    }
}

/// The smallest power of two so that as many of the most frequent labels are at least this fraction of all labels.
///
/// # Errors
/// [`CacheError`].
pub(super) fn smallest_with(rows: &RowStore, vocab_size: usize, fraction: f64) -> Result<usize, CacheError> {
    let mut counts = label_counts(rows, vocab_size)?;
    counts.sort_unstable_by(|one, other| other.cmp(one));
    let wanted = fraction * counts.iter().sum::<u64>() as f64;
    let mut among = 0;
    let enough = counts.iter().position(|count| {
        among += count;
        among as f64 >= wanted
    });
    Ok((enough.unwrap_or_default() + 1).next_power_of_two())
}

/// How often each token is a label.
fn label_counts(rows: &RowStore, vocab_size: usize) -> Result<Vec<u64>, CacheError> {
    let mut counts = vec![0; vocab_size];
    for row in rows.iter() {
        for &label in row?.labels.iter().filter(|&&label| label != IGNORE) {
            counts[label as usize] += 1;
        }
    }
    Ok(counts)
}

impl fmt::Display for DraftVocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { draft_vocab_size, vocab_size, label_fraction, .. } = self;
        write!(f, "{draft_vocab_size} of {vocab_size} tokens, {:.2} % of the labels", 100.0 * label_fraction)
    }
}
