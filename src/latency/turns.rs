//! The step times of turns that plain decoding and trees took, and what they say of each tree. No tensors here.

use crate::formats::latency::{Slowdown, StepTime};
use crate::tree::guess_tree::GuessTree;

/// The share of plain steps that may be faster than a step that nothing interrupts.
const UNDISTURBED: f64 = 0.1;
/// Nine of ten rounds are within a tree's range.
const RANGE: [f64; 2] = [0.05, 0.95];
/// Trees that are timed between two turns of plain decoding.
const TREES_PER_PLAIN: usize = 2;

/// What a round times, in order: 0 is plain decoding, n the n-th tree. Plain decoding comes again before every few trees, since each tree's time
/// is relative to it.
pub(super) fn turns_of_round(trees: usize) -> Vec<usize> {
    let all: Vec<usize> = (1..=trees).collect();
    let with_plain: Vec<usize> = all.chunks(TREES_PER_PLAIN).flat_map(|trees| [&[0], trees].concat()).collect();
    if trees == 0 { vec![0] } else { with_plain }
}

/// Who took a turn, as in [`turns_of_round`], and the mean step of its answer, in milliseconds.
type Turn = (usize, f64);

/// The turns of all rounds, in order.
#[derive(Debug, Default)]
pub(super) struct Turns {
    rounds: Vec<Vec<Turn>>,
}

/// Step times of a tree ÷ those of plain decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Relative {
    /// The median over the rounds.
    pub(super) step: f64,
    /// Of nine of ten rounds.
    range: [f64; 2],
}

impl Relative {
    pub(super) fn step_time(self, tree: &GuessTree, plain_ms: f64) -> StepTime {
        let (nodes, depth, dynamic) = (tree.nodes(), tree.depth(), tree.as_static().is_none());
        let range = Some(self.range.map(|end| end * plain_ms));
        StepTime { nodes, depth, step_ms: self.step * plain_ms, step_ms_range: range, dynamic }
    }
}

impl Turns {
    pub(super) fn begin_round(&mut self) {
        self.rounds.push(vec![]);
    }

    pub(super) fn push(&mut self, who: usize, ms: f64) {
        self.rounds.last_mut().expect("a round has begun").push((who, ms));
    }

    fn steps_of(&self, who: usize) -> impl Iterator<Item = f64> {
        self.rounds.iter().flatten().filter(move |(other, _)| *other == who).map(|(_, ms)| *ms)
    }

    /// A plain step that nothing interrupts.
    pub(super) fn plain_ms(&self) -> f64 {
        undisturbed(self.steps_of(0).collect())
    }

    /// The n-th tree's steps, counted from 1. Each turn is divided by the turns of plain decoding next to it, since a machine's speed changes
    /// within seconds.
    pub(super) fn relative(&self, tree: usize) -> Relative {
        let ratios: Vec<f64> = self.rounds.iter().filter_map(|round| ratio(round, tree)).collect();
        Relative { step: quantile(ratios.clone(), 0.5), range: RANGE.map(|share| quantile(ratios.clone(), share)) }
    }

    /// Of plain decoding and of the trees, each relative to its step time; `None` without trees.
    pub(super) fn slowdown(&self) -> Option<Slowdown> {
        let trees = self.rounds.iter().flatten().map(|(who, _)| *who).max().filter(|&trees| trees > 0)?;
        let plain_ms = self.plain_ms();
        let tree_slowdown = |tree: usize| mean(self.steps_of(tree)) / (self.relative(tree).step * plain_ms);
        Some(Slowdown { plain: mean(self.steps_of(0)) / plain_ms, trees: mean((1..=trees).map(tree_slowdown)) })
    }
}

/// A tree's step ÷ that of plain decoding before and after it.
fn ratio(round: &[Turn], tree: usize) -> Option<f64> {
    let at = round.iter().position(|(who, _)| *who == tree)?;
    let (before, after) = round.split_at(at);
    let is_plain = |turn: &&Turn| turn.0 == 0;
    let next_to_it = before.iter().rfind(is_plain).into_iter().chain(after.iter().find(is_plain));
    Some(after[0].1 / mean(next_to_it.map(|(_, ms)| *ms)))
}

/// The time of a step that nothing interrupts; 0 if there are no times.
pub(super) fn undisturbed(times: Vec<f64>) -> f64 {
    quantile(times, UNDISTURBED)
}

/// The number that this share of the others is below; 0 of none.
fn quantile(mut numbers: Vec<f64>, share: f64) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get((numbers.len() as f64 * share) as usize).copied().unwrap_or(0.0)
}

fn mean(numbers: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = numbers.fold((0.0, 0.0), |(sum, count), number| (sum + number, count + 1.0));
    sum / count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_decoding_is_timed_more_often_than_a_tree() {
        assert_eq!(turns_of_round(5), [0, 1, 2, 0, 3, 4, 0, 5]);
        assert_eq!(turns_of_round(0), [0]);
    }

    #[test]
    fn interrupted_steps_do_not_make_plain_decoding_slow() {
        let times = |interrupted: usize| (0..35).map(|at| if at % 10 < interrupted { 12.0 } else { 1.2 }).collect();
        assert_eq!(undisturbed(times(0)), 1.2);
        assert_eq!(undisturbed(times(8)), 1.2, "eight of ten steps");
        let one_too_short = [vec![0.1], times(0)].concat();
        assert_eq!(undisturbed(one_too_short), 1.2, "one clock error");
        assert_eq!(undisturbed(vec![]), 0.0);
    }

    #[test]
    fn a_machine_that_slows_down_and_recovers_changes_no_ratio() {
        let mut turns = Turns::default();
        for (round, slow) in [1.0, 1.5, 1.0, 3.0, 2.0].into_iter().enumerate() {
            turns.begin_round();
            for (at, who) in turns_of_round(3).into_iter().enumerate() {
                let interrupted = if (round, at) == (3, 1) { 11.0 } else { 0.0 };
                turns.push(who, [1.0, 2.0, 2.5, 4.0][who] * slow + interrupted);
            }
        }
        let steps: Vec<f64> = (1..=3).map(|tree| turns.relative(tree).step).collect();
        assert_eq!((turns.plain_ms(), steps), (1.0, vec![2.0, 2.5, 4.0]));
        assert!(
            turns.relative(1).range[1] > 5.0 && turns.relative(2).range == [2.5, 2.5],
            "one turn of 5 was interrupted"
        );
        let Slowdown { plain, trees } = turns.slowdown().unwrap();
        assert!((plain - 1.7).abs() < 1e-9 && trees > plain, "the interrupted turn counts: {plain} {trees}");
    }

    #[test]
    fn the_range_has_what_the_rounds_differed_by() {
        let mut turns = Turns::default();
        for ms in [3.0, 2.0, 2.5, 2.25, 8.0] {
            turns.begin_round();
            turns.push(0, 1.0);
            turns.push(1, ms);
        }
        assert_eq!(turns.relative(1), Relative { step: 2.5, range: [2.0, 8.0] });
        assert!(Turns::default().slowdown().is_none());
    }
}
