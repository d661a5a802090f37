//! Holds out rows for validation: whole conversations, and with each all others that ask the same first.

use std::collections::HashMap;

use super::DataError;
use super::cache::CacheError;
use super::random_stream;
use super::store::RowStore;
use crate::formats::trained_prompts::prompt_hash;
use crate::numbers::Fraction;

/// Rows of which a part is held out, each part in the original order and not empty.
#[derive(Debug)]
pub struct Split {
    pub training: RowStore,
    /// Training rows of each set.
    pub counts: Vec<usize>,
    pub validation: RowStore,
    /// Whether rows that ask the same made it another split than one that draws row by row, as version 0.1.0 did.
    pub is_by_prompt: bool,
}

/// The source rows to draw from. The pieces of a long one are parts of one document or conversation, and stay together.
struct HeldOut<'d> {
    set_of: &'d [usize],
    /// Source rows of each set that are not drawn.
    left: Vec<usize>,
    is_drawn: Vec<bool>,
}

/// Splits the rows of several sets, of which `counts` are the sizes. Source rows with the same question, as `header` ends it
/// ([`question`](super::rows::TokenRow::question)), and equal rows without one are on the same side. No set loses its last row.
///
/// # Errors
/// No rows that can be held out; a damaged token cache.
pub fn split_sets(
    rows: RowStore,
    counts: &[usize],
    fraction: Fraction,
    seed: u64,
    header: &[i32],
) -> Result<Split, DataError> {
    let sources = rows.sources();
    let all = sources.last().map_or(0, |last| last + 1);
    let set_of_row = counts.iter().enumerate().flat_map(|(set, count)| std::iter::repeat_n(set, *count));
    let mut set_of = vec![0; all];
    sources.iter().zip(set_of_row).for_each(|(&source, set)| set_of[source] = set);
    let count = ((all as f64 * fraction.get()).round() as usize).clamp(1, all.max(2) - 1);
    let groups = rows_by_prompt(&rows, &sources, header)?;
    let draw = |groups: &[Vec<usize>]| HeldOut::new(&set_of, counts.len()).draw(groups, count, seed);
    let is_drawn = draw(&groups);
    if !is_drawn.contains(&true) {
        let in_set =
            |set: usize| groups.iter().filter(|group| group.iter().any(|&source| set_of[source] == set)).count();
        return Err(DataError::TooFewToSplit { rows: (0..counts.len()).map(in_set).max().unwrap_or(0) });
    }
    let is_by_prompt = groups.len() < all && is_drawn != draw(&(0..all).map(|source| vec![source]).collect::<Vec<_>>());
    let held_out: Vec<bool> = sources.iter().map(|&source| is_drawn[source]).collect();
    let mut rest = held_out.iter();
    let left = |count: &usize| rest.by_ref().take(*count).filter(|is_held_out| !**is_held_out).count();
    let counts = counts.iter().map(left).collect();
    let (validation, training) = rows.partition(&held_out);
    Ok(Split { training, counts, validation, is_by_prompt })
}

/// The source rows of each prompt, in the order in which the prompts are first met.
fn rows_by_prompt(rows: &RowStore, sources: &[usize], header: &[i32]) -> Result<Vec<Vec<usize>>, CacheError> {
    let (mut groups, mut group_of): (Vec<Vec<usize>>, HashMap<u64, usize>) = (vec![], HashMap::new());
    let firsts = (0..rows.len()).filter(|&row| row == 0 || sources[row] != sources[row - 1]);
    for row in firsts {
        let tokens = rows.row(row)?;
        let hash = prompt_hash(tokens.question_or_whole(header));
        let group = *group_of.entry(hash).or_insert(groups.len());
        if group == groups.len() {
            groups.push(vec![]);
        }
        groups[group].push(sources[row]);
    }
    Ok(groups)
}

impl<'d> HeldOut<'d> {
    fn new(set_of: &'d [usize], sets: usize) -> Self {
        let mut left = vec![0; sets];
        set_of.iter().for_each(|&set| left[set] += 1);
        Self { set_of, left, is_drawn: vec![false; set_of.len()] }
    }

    /// Draws whole groups, at most `count` rows; where the drawn groups are all larger, the smallest one.
    fn draw(mut self, groups: &[Vec<usize>], count: usize, seed: u64) -> Vec<bool> {
        /// Apart from every epoch's stream, so that the split and the first order are independent.
        const STREAM: u64 = u64::MAX;
        let mut order = random_stream::shuffled(groups.len(), seed, STREAM);
        let mut rest = count;
        for group in order.iter().map(|&group| &groups[group as usize]) {
            if group.len() <= rest && self.take(group) {
                rest -= group.len();
            }
        }
        if rest == count {
            order.sort_by_key(|&group| groups[group as usize].len());
            let _ = order.iter().any(|&group| self.take(&groups[group as usize]));
        }
        self.is_drawn
    }

    /// Draws a group, unless a set would lose its last row.
    fn take(&mut self, group: &[usize]) -> bool {
        group.iter().for_each(|&source| self.left[self.set_of[source]] -= 1);
        let fits = group.iter().all(|&source| self.left[self.set_of[source]] > 0);
        match fits {
            true => group.iter().for_each(|&source| self.is_drawn[source] = true),
            false => group.iter().for_each(|&source| self.left[self.set_of[source]] += 1),
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::data::rows::{IGNORE, TokenRow};

    fn row(question: i32, answer: i32) -> TokenRow {
        TokenRow { input_ids: vec![1, question, 2, answer], labels: vec![IGNORE, IGNORE, IGNORE, answer] }
    }

    fn split(rows: &[TokenRow], fraction: f64, seed: u64) -> Result<Split, DataError> {
        split_sets(RowStore::in_memory(rows.to_vec()), &[rows.len()], Fraction::new(fraction).unwrap(), seed, &[])
    }

    fn questions(rows: &RowStore) -> BTreeSet<i32> {
        rows.iter().map(|row| row.unwrap().input_ids[1]).collect()
    }

    #[test]
    fn rows_that_ask_the_same_are_on_one_side() {
        let rows: Vec<TokenRow> = (0..60).map(|n| row(n % 20, n)).collect();
        for seed in 0..20 {
            let Split { training, validation, is_by_prompt, .. } = split(&rows, 0.2, seed).unwrap();
            assert_eq!((training.len(), validation.len(), is_by_prompt), (48, 12, true), "seed {seed}");
            assert!(questions(&training).is_disjoint(&questions(&validation)), "seed {seed}");
        }
    }

    #[test]
    fn a_frequent_question_is_held_out_only_where_there_is_no_other() {
        let frequent: Vec<TokenRow> = (0..40).map(|n| row(n.max(29), n)).collect(); // 30 rows ask 29
        for seed in 0..20 {
            let Split { validation, .. } = split(&frequent, 0.1, seed).unwrap();
            assert_eq!(validation.len(), 4, "seed {seed}");
            assert!(!questions(&validation).contains(&29), "seed {seed}");
        }
        let two: Vec<TokenRow> = (0..40).map(|n| row(i32::from(n < 10), n)).collect();
        assert_eq!(split(&two, 0.1, 3).unwrap().validation.len(), 10, "the smaller of two");
        let error = split(&frequent[..30], 0.1, 3).unwrap_err().to_string();
        assert!(error.contains("2 rows with different prompts") && error.ends_with("got 1"), "{error}");
    }

    #[test]
    fn without_rows_that_ask_the_same_the_split_is_that_of_earlier_versions() {
        let rows: Vec<TokenRow> = (0..10).map(|n| row(n, 7)).collect();
        let Split { validation, is_by_prompt, .. } = split(&rows, 0.3, 42).unwrap();
        assert_eq!((questions(&validation), is_by_prompt), (HELD_OUT_BY_0_1_0.into(), false));
        let text: Vec<TokenRow> = (0..10).map(|n| TokenRow { input_ids: vec![n; 5], labels: vec![n; 5] }).collect();
        assert!(!split(&text, 0.3, 42).unwrap().is_by_prompt);
    }

    /// What version 0.1.0 drew of 10 rows with the seed 42.
    const HELD_OUT_BY_0_1_0: [i32; 3] = [0, 1, 9];
}
