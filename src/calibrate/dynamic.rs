//! Where the right guesses stand among the candidates of trees that are chosen at each step.

use tch::Tensor;

use crate::draft::TextSoFar;
use crate::draft::heads_drafter::{DraftStates, guesser};
use crate::draft::levels::grow;
use crate::draft::medusa::heads::Heads;
use crate::engine::sample::{Chosen, Sampling, Stream};
use crate::formats::calibration::{DynamicRanks, DynamicTrace};
use crate::formats::tree::{DYNAMIC_TOP_K, DynamicTree};
use crate::model::llama::Llama;
use crate::numbers::NonNegative;

/// Largest number of positions whose ranks are written: some 2 MB for eight heads.
const MAX_POSITIONS: usize = 20_000;
/// Positions whose trees grow together.
const TOGETHER: usize = 64;

/// A position where a step could start.
#[derive(Debug)]
pub(super) struct StepStart {
    /// `[1, H]`: what the heads read.
    pub(super) state_1h: Tensor,
    pub(super) root: i64,
    /// The tokens after the root, as far as heads can guess them.
    pub(super) right: Vec<i64>,
}

/// Ranks on some texts.
#[derive(Debug)]
pub(super) struct DynamicCounts<'a> {
    backbone: &'a Llama,
    heads: &'a Heads,
    limits: DynamicTree,
    ranks: DynamicRanks,
    positions: usize,
}

impl<'a> DynamicCounts<'a> {
    /// None yet.
    pub(super) fn new(backbone: &'a Llama, heads: &'a Heads) -> Self {
        let top_k = DYNAMIC_TOP_K.min(heads.draft_vocab_size());
        let limits = DynamicTree { nodes: usize::MAX, depth: heads.num_heads(), top_k };
        Self { backbone, heads, limits, ranks: DynamicRanks { top_k, runs: vec![] }, positions: 0 }
    }

    /// Adds a text, unless there are too many positions.
    pub(super) fn add(&mut self, run: &[StepStart]) {
        if !self.takes_run(run.len()) {
            return;
        }
        let trace: DynamicTrace = run.chunks(TOGETHER).flat_map(|starts| self.ranks_of(starts)).collect();
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

    fn ranks_of(&self, starts: &[StepStart]) -> DynamicTrace {
        let roots: Vec<Chosen> = starts.iter().map(|start| Chosen::on_host(start.root)).collect();
        let mut batch = Vec::with_capacity(starts.len());
        for (start, root) in starts.iter().zip(&roots) {
            let (sampling, stream) = (Sampling::of_temperature(NonNegative::ZERO), Stream::default());
            batch.push(TextSoFar {
                row: batch.len(),
                ids: &[],
                root,
                hidden_1h: &start.state_1h,
                sampling,
                stream,
                may_draw: false,
            });
        }
        let mut guesser = guesser(self.backbone, self.heads, self.limits, DraftStates::OfHeads);
        guesser.begin(&batch);
        let roots: Vec<i64> = starts.iter().map(|start| start.root).collect();
        let trees = grow(&mut *guesser, &roots, self.limits);
        trees.iter().zip(starts).map(|(tree, start)| tree.ranks(&start.right)).collect()
    }

    /// All of them.
    pub(super) fn ranks(self) -> DynamicRanks {
        self.ranks
    }
}
