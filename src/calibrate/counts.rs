//! Counts correct guesses per head and per path. No tensors here.

use std::collections::HashMap;

use serde_json::Map;

use super::error::CalibrationError;
use crate::formats::calibration::{Calibration, HeadAccuracy, JointPath, JointStatistics, RankTrace};

/// Maximum number of positions whose ranks are written: about 2 MB; enough to estimate a tree's tokens per step to
/// about 1 in 200.
const MAX_POSITIONS: usize = 200_000;

/// Maximum number of joint paths written.
const MAX_PATHS: usize = 4096;

/// Counts of a calibration, without names and hashes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Counts {
    top_k: usize,
    hits: Vec<Vec<u64>>,
    totals: Vec<u64>,
    paths: HashMap<Vec<usize>, u64>,
    joint_total: u64,
    tokens: u64,
    runs: Vec<RankTrace>,
    /// Positions in `runs`.
    positions: usize,
}

impl Counts {
    pub(super) fn new(num_heads: usize, top_k: usize) -> Self {
        let hits = vec![vec![0; top_k]; num_heads];
        Self { top_k, hits, totals: vec![0; num_heads], ..Self::default() }
    }

    /// Counts one position, given each head's guesses, best first, and its target. Returns the ranks of the right
    /// guesses up to the first head that misses or has no target, as a decoding step from here would find them.
    pub(super) fn add(&mut self, guesses: &[&[i64]], targets: &[Option<i64>]) -> Vec<usize> {
        let mut path = Vec::with_capacity(targets.len());
        let joint = targets.iter().all(Option::is_some);
        let mut unbroken = true;
        self.joint_total += u64::from(joint);
        for (head, target) in targets.iter().enumerate() {
            let rank = target.and_then(|target| guesses[head].iter().position(|&guess| guess == target));
            self.totals[head] += u64::from(target.is_some());
            if let Some(rank) = rank {
                self.hits[head][rank] += 1;
            }
            match rank {
                Some(rank) if unbroken => path.push(rank),
                _ => unbroken = false,
            }
            if unbroken && joint {
                *self.paths.entry(path.clone()).or_default() += 1;
            }
        }
        path
    }

    /// Adds a text's ranks, unless they exceed [`MAX_POSITIONS`].
    pub(super) fn add_run(&mut self, run: RankTrace) {
        if !run.is_empty() && self.positions + run.len() <= MAX_POSITIONS {
            self.positions += run.len();
            self.runs.push(run);
        }
    }

    /// Adds to the number of input tokens.
    pub(super) fn add_tokens(&mut self, tokens: usize) {
        self.tokens += tokens as u64;
    }

    /// Guesses counted per head.
    pub(super) fn top_k(&self) -> usize {
        self.top_k
    }

    /// Builds the calibration.
    ///
    /// # Errors
    /// [`CalibrationError::NoTargets`] if a head never had a target.
    pub fn sign(&self, backbone: String, heads_sha256: String) -> Result<Calibration, CalibrationError> {
        if let Some(head) = self.totals.iter().position(|&total| total == 0) {
            return Err(CalibrationError::NoTargets { head: head + 1 });
        }
        let heads = self.hits.iter().zip(&self.totals).map(|(counts, &total)| HeadAccuracy {
            counts: counts.clone(),
            total,
            accuracy: counts.iter().map(|&hits| hits as f64 / total as f64).collect(),
        });
        let joint =
            JointStatistics { total: self.joint_total, paths: self.most_frequent_paths(), runs: self.runs.clone() };
        Ok(Calibration {
            heads: heads.collect(),
            joint,
            backbone,
            heads_sha256,
            tokens: self.tokens,
            exported_from: None,
            other: Map::new(),
        })
    }

    fn most_frequent_paths(&self) -> Vec<JointPath> {
        let mut paths: Vec<_> =
            self.paths.iter().map(|(path, &count)| JointPath { path: path.clone(), count }).collect();
        paths.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| (a.path.len(), &a.path).cmp(&(b.path.len(), &b.path))));
        paths.truncate(MAX_PATHS);
        paths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_per_head_and_paths_are_cumulated_over_prefixes() {
        let mut counts = Counts::new(2, 2);
        counts.add(&[&[7, 8], &[1, 2]], &[Some(7), Some(2)]); // path [0, 1]
        counts.add(&[&[7, 8], &[1, 2]], &[Some(7), Some(9)]); // path [0], then a miss
        counts.add(&[&[7, 8], &[1, 2]], &[Some(9), Some(1)]); // a miss, then a hit that no path reaches
        counts.add(&[&[7, 8], &[1, 2]], &[Some(8), None]); // head 2 has no target: not joint
        let calibration = counts.sign("b".into(), "00".into()).unwrap();
        assert_eq!(calibration.heads[0].counts, [2, 1]);
        assert_eq!((calibration.heads[0].total, calibration.heads[1].total), (4, 3));
        assert_eq!(calibration.heads[1].accuracy, [1.0 / 3.0, 1.0 / 3.0]);
        let path = |path: &[usize], count| JointPath { path: path.to_vec(), count };
        assert_eq!(
            calibration.joint,
            JointStatistics { total: 3, paths: vec![path(&[0], 2), path(&[0, 1], 1)], runs: Vec::new() }
        );
    }

    #[test]
    fn a_position_tells_what_a_step_would_find() {
        let mut counts = Counts::new(3, 2);
        let guesses: [&[i64]; 3] = [&[7, 8], &[1, 2], &[5, 6]];
        assert_eq!(counts.add(&guesses, &[Some(8), Some(1), Some(6)]), [1, 0, 1]);
        assert_eq!(counts.add(&guesses, &[Some(8), Some(9), Some(6)]), [1], "nothing behind a miss");
        assert_eq!(counts.add(&guesses, &[Some(7), Some(2), None]), [0, 1], "nothing behind the text's end");
        assert_eq!(counts.add(&guesses, &[Some(9), Some(2), Some(5)]), [0; 0]);
    }

    #[test]
    fn runs_beyond_the_limit_are_not_kept() {
        let mut counts = Counts::new(1, 1);
        counts.add(&[&[7]], &[Some(7)]);
        for length in [MAX_POSITIONS - 2, 3, 0, 2, 1] {
            counts.add_run(vec![vec![0]; length]);
        }
        let kept = counts.sign("b".into(), "00".into()).unwrap().joint.runs;
        assert_eq!(kept.iter().map(Vec::len).collect::<Vec<_>>(), [MAX_POSITIONS - 2, 2]);
    }

    #[test]
    fn a_head_that_was_never_asked_is_an_error_and_not_nan() {
        let mut counts = Counts::new(2, 1);
        counts.add(&[&[7], &[1]], &[Some(7), None]);
        let error = counts.sign("b".into(), "00".into()).unwrap_err();
        assert!(error.to_string().starts_with("no row has a target for head 2; it needs rows of at least 4 tokens"));
    }
}
