//! Where the right guesses stand among the candidates of trees that are chosen at each step.

use crate::draft::levels::grow;
use crate::draft::trained::{KnownText, TrainedDrafter};
use crate::formats::calibration::{DynamicRanks, DynamicTrace};
use crate::formats::tree::{DYNAMIC_TOP_K, DynamicTree};

/// Largest number of positions whose ranks are written: some 2 MB for eight heads.
const MAX_POSITIONS: usize = 20_000;
/// Positions whose trees grow together.
const TOGETHER: usize = 64;

/// A position where a step could start.
#[derive(Debug)]
pub(super) struct StepStart {
    pub(super) position: i64,
    pub(super) root: i64,
    /// The tokens after the root, as far as they can be guessed.
    pub(super) right: Vec<i64>,
}

/// Ranks on some texts.
#[derive(Debug)]
pub(super) struct DynamicCounts {
    limits: DynamicTree,
    ranks: DynamicRanks,
    positions: usize,
}

impl DynamicCounts {
    /// None yet.
    pub(super) fn new(drafter: &dyn TrainedDrafter) -> Self {
        let top_k = DYNAMIC_TOP_K.min(drafter.guessable());
        let limits = DynamicTree { nodes: usize::MAX, depth: drafter.reads().levels, top_k };
        Self { limits, ranks: DynamicRanks { top_k, runs: vec![] }, positions: 0 }
    }

    /// Adds a text, unless there are too many positions.
    pub(super) fn add(&mut self, text: &dyn KnownText, run: &[StepStart]) {
        if !self.takes_run(run.len()) {
            return;
        }
        let trace: DynamicTrace = run.chunks(TOGETHER).flat_map(|starts| self.ranks_of(text, starts)).collect();
        self.ranks.runs.push(trace);
    }

    /// Passes a text of another machine's share: its positions count towards the limit as if they were added here.
    pub(super) fn pass(&mut self, positions: usize) {
        self.takes_run(positions);
    }

    /// Texts so far.
    pub(super) fn runs(&self) -> &[DynamicTrace] {
        &self.ranks.runs
    }

    fn takes_run(&mut self, positions: usize) -> bool {
        let fits = positions > 0 && self.positions + positions <= MAX_POSITIONS;
        self.positions += if fits { positions } else { 0 };
        fits
    }

    fn ranks_of(&self, text: &dyn KnownText, starts: &[StepStart]) -> DynamicTrace {
        let positions: Vec<i64> = starts.iter().map(|start| start.position).collect();
        let roots: Vec<i64> = starts.iter().map(|start| start.root).collect();
        let trees = grow(&mut *text.begin_at(&positions, self.limits), &roots, self.limits);
        trees.iter().zip(starts).map(|(tree, start)| tree.ranks(&start.right)).collect()
    }

    /// All of them.
    pub(super) fn ranks(self) -> DynamicRanks {
        self.ranks
    }
}
