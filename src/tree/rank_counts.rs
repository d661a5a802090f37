//! Counts how often each guess of each head was right, per head and per path. No tensors here.

use std::collections::HashMap;

use serde_json::Map;

use crate::formats::calibration::{Calibration, HeadAccuracy, JointPath, JointStatistics, RankTrace};
use crate::formats::calibration_share::{CalibratedWork, CalibrationShare, RanksOfRow};
use crate::formats::share::Share;

/// Maximum number of positions whose ranks are written: about 2 MB; enough to estimate a tree's tokens per step to
/// about 1 in 200.
const MAX_POSITIONS: usize = 200_000;

/// Maximum number of joint paths written.
const MAX_PATHS: usize = 4096;

/// The rank of a target that a head with a truncated vocabulary cannot guess: a miss, however many guesses there are.
pub const OUTSIDE: usize = usize::MAX;

/// One position of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankedPosition {
    /// Whether the next token, a step's root, has a label, so that a decoding step could start here.
    pub is_step: bool,
    /// For each head the 0-based rank of its target among its guesses; `None` if it has no target.
    pub ranks: Vec<Option<usize>>,
}

/// A head never had a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no row has a target for head {head}; it needs rows of at least {} tokens whose labels are not all -100", head + 2)]
pub struct NoTargets {
    /// 1-based.
    pub head: usize,
}

/// Ranks of right guesses on some texts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RankCounts {
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

impl RankCounts {
    /// No counts yet, for `num_heads` heads with `top_k` guesses each.
    pub fn new(num_heads: usize, top_k: usize) -> Self {
        let hits = vec![vec![0; top_k]; num_heads];
        Self { top_k, hits, totals: vec![0; num_heads], ..Self::default() }
    }

    /// Counts all positions of a text, in order. A position where no step could start ends a run.
    pub fn add_text(&mut self, positions: impl IntoIterator<Item = RankedPosition>) {
        let mut run = Vec::new();
        for position in positions {
            let right = self.add(&position.ranks);
            if position.is_step {
                run.push(right);
            } else {
                self.add_run(std::mem::take(&mut run));
            }
        }
        self.add_run(run);
    }

    /// Counts one position. Returns the ranks of the right guesses up to the first head that misses or has no target, as
    /// a decoding step from here would find them.
    fn add(&mut self, ranks: &[Option<usize>]) -> Vec<usize> {
        let mut path = Vec::with_capacity(ranks.len());
        let joint = ranks.iter().all(Option::is_some);
        let mut unbroken = true;
        self.joint_total += u64::from(joint);
        for (head, rank) in ranks.iter().enumerate() {
            self.totals[head] += u64::from(rank.is_some());
            let guess = rank.filter(|&rank| rank < self.top_k);
            if let Some(guess) = guess {
                self.hits[head][guess] += 1;
            }
            match guess {
                Some(guess) if unbroken => path.push(guess),
                _ => unbroken = false,
            }
            if unbroken && joint {
                *self.paths.entry(path.clone()).or_default() += 1;
            }
        }
        path
    }

    /// Adds a text's ranks, unless they exceed [`MAX_POSITIONS`].
    fn add_run(&mut self, run: RankTrace) {
        if self.takes_run(run.len()) {
            self.runs.push(run);
        }
    }

    /// Passes a run of another machine's share: its positions count towards the limit as if they were added here.
    pub fn pass_run(&mut self, positions: usize) {
        self.takes_run(positions);
    }

    fn takes_run(&mut self, positions: usize) -> bool {
        let fits = positions > 0 && self.positions + positions <= MAX_POSITIONS;
        self.positions += if fits { positions } else { 0 };
        fits
    }

    /// Adds what another machine counted, except for its ranks.
    pub fn add_share(&mut self, share: &CalibrationShare) {
        for (hits, more) in self.hits.iter_mut().zip(&share.hits) {
            hits.iter_mut().zip(more).for_each(|(hits, more)| *hits += more);
        }
        self.totals.iter_mut().zip(&share.totals).for_each(|(total, more)| *total += more);
        for JointPath { path, count } in &share.paths {
            *self.paths.entry(path.clone()).or_default() += count;
        }
        self.joint_total += share.joint_total;
        self.tokens += share.tokens;
    }

    /// Adds ranks that were kept within the limit already.
    pub fn add_kept_runs(&mut self, runs: Vec<RankTrace>) {
        self.runs.extend(runs);
    }

    /// The counts of a share, whose ranks are given by row.
    pub fn into_share(self, share: Share, of: CalibratedWork, rows_with_ranks: Vec<RanksOfRow>) -> CalibrationShare {
        let mut paths: Vec<JointPath> = self.paths.into_iter().map(|(path, count)| JointPath { path, count }).collect();
        paths.sort_by(|a, b| a.path.cmp(&b.path));
        let Self { hits, totals, joint_total, tokens, .. } = self;
        CalibrationShare { share, of, tokens, hits, totals, joint_total, paths, rows_with_ranks }
    }

    /// Adds to the number of input tokens.
    pub fn add_tokens(&mut self, tokens: usize) {
        self.tokens += tokens as u64;
    }

    /// Guesses counted per head.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// The texts' ranks.
    pub fn runs(&self) -> &[RankTrace] {
        &self.runs
    }

    /// `[h][i]`: the accuracy of guess i of head h, for all heads before the first one without a target.
    pub fn accuracies(&self) -> Vec<Vec<f64>> {
        let asked = self.hits.iter().zip(&self.totals).take_while(|(_, total)| **total > 0);
        asked.map(|(hits, total)| accuracy(hits, *total)).collect()
    }

    /// Builds the calibration.
    ///
    /// # Errors
    /// [`NoTargets`] names a head that never had a target.
    pub fn sign(&self, backbone: String, heads_sha256: String) -> Result<Calibration, NoTargets> {
        if let Some(head) = self.totals.iter().position(|&total| total == 0) {
            return Err(NoTargets { head: head + 1 });
        }
        let heads = self.hits.iter().zip(&self.totals).map(|(counts, &total)| HeadAccuracy {
            counts: counts.clone(),
            total,
            accuracy: accuracy(counts, total),
        });
        let joint =
            JointStatistics { total: self.joint_total, paths: self.most_frequent_paths(), runs: self.runs.clone() };
        Ok(Calibration {
            heads: heads.collect(),
            joint,
            dynamic: None,
            backbone,
            heads_sha256,
            tokens: self.tokens,
            prompts: None,
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

fn accuracy(hits: &[u64], total: u64) -> Vec<f64> {
    hits.iter().map(|&hits| hits as f64 / total as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_per_head_and_paths_are_cumulated_over_prefixes() {
        let mut counts = RankCounts::new(2, 2);
        counts.add(&[Some(0), Some(1)]); // path [0, 1]
        counts.add(&[Some(0), Some(2)]); // path [0], then a miss
        counts.add(&[Some(9), Some(0)]); // a miss, then a hit that no path reaches
        counts.add(&[Some(1), None]); // head 2 has no target: not joint
        let calibration = counts.sign("b".into(), "00".into()).unwrap();
        assert_eq!(calibration.heads[0].counts, [2, 1]);
        assert_eq!((calibration.heads[0].total, calibration.heads[1].total), (4, 3));
        assert_eq!(calibration.heads[1].accuracy, [1.0 / 3.0, 1.0 / 3.0]);
        assert_eq!(counts.accuracies(), calibration.accuracies());
        let path = |path: &[usize], count| JointPath { path: path.to_vec(), count };
        assert_eq!(
            calibration.joint,
            JointStatistics { total: 3, paths: vec![path(&[0], 2), path(&[0, 1], 1)], runs: Vec::new() }
        );
    }

    #[test]
    fn a_position_has_what_a_step_would_find() {
        let mut counts = RankCounts::new(3, 2);
        assert_eq!(counts.add(&[Some(1), Some(0), Some(1)]), [1, 0, 1]);
        assert_eq!(counts.add(&[Some(1), Some(2), Some(1)]), [1], "nothing behind a miss");
        assert_eq!(counts.add(&[Some(0), Some(1), None]), [0, 1], "nothing behind the text's end");
        assert_eq!(counts.add(&[Some(7), Some(1), Some(0)]), [0; 0]);
    }

    #[test]
    fn a_text_is_cut_where_no_step_can_start() {
        let mut counts = RankCounts::new(1, 2);
        let position = |is_step, rank| RankedPosition { is_step, ranks: vec![rank] };
        counts.add_text([
            position(true, Some(0)),
            position(true, None),
            position(false, Some(1)),
            position(false, None),
            position(true, Some(5)),
        ]);
        assert_eq!(counts.runs(), [vec![vec![0], vec![]], vec![vec![]]]);
        assert_eq!(counts.accuracies(), [[1.0 / 3.0, 1.0 / 3.0]]);
    }

    #[test]
    fn runs_beyond_the_limit_are_not_kept() {
        let mut counts = RankCounts::new(1, 1);
        for length in [MAX_POSITIONS - 2, 3, 0, 2, 1] {
            counts.add_run(vec![vec![0]; length]);
        }
        assert_eq!(counts.runs().iter().map(Vec::len).collect::<Vec<_>>(), [MAX_POSITIONS - 2, 2]);
    }

    /// Which runs are kept does not depend on the machine that adds them.
    #[test]
    fn runs_of_other_shares_count_towards_the_limit() {
        let lengths = [MAX_POSITIONS - 2, 3, 0, 2, 1];
        for other in 0..lengths.len() {
            let mut counts = RankCounts::new(1, 1);
            for (at, length) in lengths.into_iter().enumerate() {
                if at == other { counts.pass_run(length) } else { counts.add_run(vec![vec![0]; length]) }
            }
            let kept: Vec<usize> = [0, 3].into_iter().filter(|at| *at != other).map(|at| lengths[at]).collect();
            assert_eq!(counts.runs().iter().map(Vec::len).collect::<Vec<_>>(), kept, "{other}");
        }
    }

    #[test]
    fn a_head_that_was_never_asked_is_named_and_has_no_accuracy() {
        let mut counts = RankCounts::new(2, 1);
        counts.add(&[Some(0), None]);
        assert_eq!(counts.sign("b".into(), "00".into()), Err(NoTargets { head: 2 }));
        assert_eq!(counts.accuracies(), [[1.0]]);
    }
}
