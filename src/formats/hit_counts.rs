//! What counts of right guesses must be to each other. A calibration that was damaged or edited is refused before a tree is searched from it.

use std::collections::HashMap;

use super::invalid_field::{InvalidField, invalid_field};

/// Counts above this are no longer exact as floating-point numbers.
const MOST_TARGETS: u64 = 1 << 53;

/// How often each guess of each head was right, and the keys under which the file has that.
pub(super) struct HitCounts<'c> {
    /// `[h][i]`: how often guess i of head h was right.
    pub hits: Vec<&'c [u64]>,
    /// Targets of each head.
    pub totals: Vec<u64>,
    /// The keys of a head, of its counts and of its targets.
    pub names: [&'static str; 3],
}

impl HitCounts<'_> {
    /// Guesses of each head.
    pub(super) fn width(&self) -> usize {
        self.hits.first().map_or(0, |hits| hits.len())
    }

    pub(super) fn check_counts(&self) -> Result<(), InvalidField> {
        let [heads, counts, total] = self.names;
        if self.width() == 0 {
            return invalid_field(heads, "at least one head with one guess", "none");
        }
        for (head, (hits, &targets)) in self.hits.iter().zip(&self.totals).enumerate() {
            let key = |part: &str| {
                if part == heads { format!("{part}[{head}]") } else { format!("{part} of head {}", head + 1) }
            };
            if hits.len() != self.width() {
                return invalid_field(key(counts), format!("{} numbers, as head 1 has", self.width()), hits.len());
            }
            if targets > MOST_TARGETS {
                return invalid_field(key(total), "at most 2^53 targets", targets);
            }
            let right = hits.iter().fold(0u64, |sum, hits| sum.saturating_add(*hits));
            if right > targets {
                let expected = format!("at most {targets} right guesses, one for each target");
                return invalid_field(key(counts), expected, right);
            }
        }
        Ok(())
    }

    pub(super) fn check_paths(
        &self,
        total: u64,
        paths: &[(&[usize], u64)],
        [total_key, paths_key]: [&str; 2],
    ) -> Result<(), InvalidField> {
        let least = self.totals.iter().copied().min().unwrap_or(0);
        if total > least {
            return invalid_field(
                total_key,
                format!("at most {least}, the targets of the head with the fewest"),
                total,
            );
        }
        let mut counts = HashMap::from([(&[][..], total)]);
        for (at, &(path, count)) in paths.iter().enumerate() {
            self.check_path(path, || format!("{paths_key}[{at}].path"))?;
            if path.is_empty() || counts.insert(path, count).is_some() {
                return invalid_field(
                    format!("{paths_key}[{at}].path"),
                    "each path once, of one guess at least",
                    format!("{path:?}"),
                );
            }
        }
        let mut behind: HashMap<&[usize], u64> = HashMap::new();
        let mut right: HashMap<(usize, usize), u64> = HashMap::new();
        for (at, &(path, count)) in paths.iter().enumerate() {
            let (&last, parent) = path.split_last().expect("checked above");
            let Some(&parent_hits) = counts.get(parent) else {
                return invalid_field(
                    format!("{paths_key}[{at}].path"),
                    format!("the path {parent:?} as well"),
                    format!("{path:?}"),
                );
            };
            let head_hits = self.hits[parent.len()][last];
            for (sum, most, what) in [
                (behind.entry(parent).or_default(), parent_hits, "of the path without its last guess"),
                (right.entry((parent.len(), last)).or_default(), head_hits, "of that guess of the head"),
            ] {
                *sum = sum.saturating_add(count);
                if *sum > most {
                    let expected = format!("no more than the {most} {what}, together with paths like it");
                    return invalid_field(format!("{paths_key}[{at}].count"), expected, *sum);
                }
            }
        }
        Ok(())
    }

    fn check_path(&self, path: &[usize], key: impl Fn() -> String) -> Result<(), InvalidField> {
        if path.len() > self.hits.len() || path.iter().any(|guess| *guess >= self.width()) {
            let (heads, width) = (self.hits.len(), self.width());
            return invalid_field(
                key(),
                format!("guesses 0 to {} of at most {heads} heads", width - 1),
                format!("{path:?}"),
            );
        }
        Ok(())
    }

    /// The positions of texts are among those that were counted.
    pub(super) fn check_runs(&self, runs: &[Vec<Vec<usize>>], key: &str) -> Result<(), InvalidField> {
        let mut seen = vec![vec![0u64; self.width()]; self.hits.len()];
        for (at, run) in runs.iter().enumerate() {
            if run.is_empty() {
                return invalid_field(format!("{key}[{at}]"), "a text of one token at least", "none");
            }
            for (token, ranks) in run.iter().enumerate() {
                self.check_path(ranks, || format!("{key}[{at}][{token}]"))?;
                ranks.iter().enumerate().for_each(|(head, &rank)| seen[head][rank] += 1);
            }
        }
        for (head, (seen, hits)) in seen.iter().zip(&self.hits).enumerate() {
            if let Some(guess) = (0..self.width()).find(|&guess| seen[guess] > hits[guess]) {
                let expected = format!("guess {guess} of head {} at most {} times, as counted", head + 1, hits[guess]);
                return invalid_field(key, expected, seen[guess]);
            }
        }
        Ok(())
    }

    pub(super) fn check_dynamic(&self, runs: &[Vec<Vec<Vec<usize>>>], key: &str) -> Result<(), InvalidField> {
        let heads = self.hits.len();
        for (at, run) in runs.iter().enumerate() {
            if run.is_empty() {
                return invalid_field(format!("{key}[{at}]"), "a text of one token at least", "none");
            }
            for (token, levels) in run.iter().enumerate() {
                let fits = |(level, ranks): (usize, &Vec<usize>)| {
                    (1..=heads.saturating_sub(level)).contains(&ranks.len()) && ranks.is_sorted()
                };
                if !levels.iter().enumerate().all(fits) {
                    let expected = format!("ascending ranks of at most {heads} levels, from each level to the last");
                    return invalid_field(format!("{key}[{at}][{token}]"), expected, format!("{levels:?}"));
                }
            }
        }
        Ok(())
    }
}
