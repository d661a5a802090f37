//! The targets of the LM head and of each level in a micro batch.

use crate::data::IGNORE;
use crate::data::loader::{Batch, TargetTokens};
use crate::draft::token_map::TokenMap;
use crate::train::target_rule::TargetRule;
use crate::tree::rank_counts::{OUTSIDE, RankedPosition};

/// Targets of the LM head and of every level in one micro batch, on the host.
#[derive(Debug)]
pub struct BatchTargets {
    /// The next token.
    pub(super) lm_head: TargetTokens,
    /// Level `l` (0-based) predicts the token l + 2 positions ahead. With a truncated vocabulary, the outputs of these tokens.
    pub(super) by_level: Vec<TargetTokens>,
    /// Positions whose label is outside of the truncated vocabulary, by level.
    outside: Vec<Vec<i64>>,
    /// The tokens that each level reads between a position and its target.
    pub(super) previous: Vec<PreviousTokens>,
}

/// The tokens that a level reads at each of its positions.
#[derive(Debug)]
pub(super) struct PreviousTokens {
    /// Their number per position; may be 0.
    pub(super) width: usize,
    /// Position after position.
    pub(super) tokens: Vec<i64>,
}

/// The number of a level's targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TargetCount {
    /// Those with a label that the drafter can guess.
    pub labels: usize,
    /// Labels outside of a truncated vocabulary: no target, but a miss.
    pub outside: usize,
    pub all: usize,
}

impl TargetCount {
    /// Adds the targets of another micro batch.
    pub fn add(&mut self, other: Self) {
        self.labels += other.labels;
        self.outside += other.outside;
        self.all += other.all;
    }
}

/// The numbers of targets and tokens of some micro batches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetCounts {
    pub by_level: Vec<TargetCount>,
    pub lm_head: usize,
    /// Input tokens.
    pub tokens: u64,
}

impl TargetCounts {
    /// None yet, of `levels` levels.
    pub fn new(levels: usize) -> Self {
        Self { by_level: vec![TargetCount::default(); levels], lm_head: 0, tokens: 0 }
    }

    /// Adds a micro batch.
    pub fn add(&mut self, batch: &Batch, targets: &BatchTargets) {
        self.lm_head += targets.lm_head_count();
        self.by_level.iter_mut().zip(targets.level_counts()).for_each(|(count, level)| count.add(level));
        self.tokens += batch.tokens() as u64;
    }

    /// All numbers in a list, so that processes can sum them.
    pub fn numbers(&self) -> Vec<f64> {
        let by_level = self.by_level.iter().flat_map(|count| [count.labels, count.outside, count.all]);
        by_level.chain([self.lm_head, self.tokens as usize]).map(|number| number as f64).collect()
    }

    /// From a list as [`TargetCounts::numbers`] makes it.
    ///
    /// # Panics
    /// If the list has another length.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "sums of counts, far below 2^52")]
    pub fn from_numbers(numbers: &[f64]) -> Self {
        let numbers: Vec<usize> = numbers.iter().map(|&number| number as usize).collect();
        let (by_level, rest) = numbers.as_chunks();
        let &[lm_head, tokens] = rest else { panic!("a list as `numbers` makes it, got {numbers:?}") };
        let count = |&[labels, outside, all]: &[usize; 3]| TargetCount { labels, outside, all };
        Self { by_level: by_level.iter().map(count).collect(), lm_head, tokens: tokens as u64 }
    }
}

impl BatchTargets {
    /// Number of the LM head's targets.
    pub fn lm_head_count(&self) -> usize {
        self.lm_head.positions.len()
    }

    /// Numbers of each level's targets.
    pub fn level_counts(&self) -> impl Iterator<Item = TargetCount> {
        let labels = |tokens: &[i64]| tokens.iter().filter(|&&token| token != i64::from(IGNORE)).count();
        let count = move |(targets, outside): (&TargetTokens, &Vec<i64>)| TargetCount {
            labels: labels(&targets.tokens),
            outside: outside.len(),
            all: targets.tokens.len(),
        };
        self.by_level.iter().zip(&self.outside).map(count)
    }

    /// Collects the targets of all levels, whose outputs are the tokens of the map, if there is one.
    pub fn new(batch: &Batch, rule: TargetRule, map: Option<&TokenMap>) -> Self {
        let all = (0..rule.reads.levels).map(|level| rule.targets(batch, level + 2));
        let mapped = |targets: TargetTokens| match map {
            Some(map) => outputs_of(&targets, map, rule.soft),
            None => (targets, vec![]),
        };
        let (by_level, outside): (Vec<TargetTokens>, Vec<_>) = all.map(mapped).unzip();
        let previous = |(level, targets): (usize, &TargetTokens)| {
            let width = rule.reads.tokens_of(level);
            PreviousTokens { width, tokens: batch.tokens_after(&targets.positions, width) }
        };
        let previous = by_level.iter().enumerate().map(previous).collect();
        Self { lm_head: batch.targets(1), previous, by_level, outside }
    }

    /// Each data row of `batch`, by its index, and the ranks of its labels. `ranks[level][i]` is the rank of the level's
    /// i-th target.
    pub fn texts(&self, batch: &Batch, ranks: &[Vec<usize>]) -> impl Iterator<Item = (usize, Vec<RankedPosition>)> {
        let empty = RankedPosition { is_step: false, ranks: vec![None; self.by_level.len()] };
        let mut positions = vec![empty; batch.input_ids.len()];
        for &at in &self.lm_head.positions {
            positions[at as usize].is_step = true;
        }
        for (level, (targets, ranks)) in self.by_level.iter().zip(ranks).enumerate() {
            for ((&at, &token), &rank) in targets.positions.iter().zip(&targets.tokens).zip(ranks) {
                positions[at as usize].ranks[level] = (token != i64::from(IGNORE)).then_some(rank);
            }
            for &at in &self.outside[level] {
                positions[at as usize].ranks[level] = Some(OUTSIDE);
            }
        }
        batch.segments().map(move |(row, place)| (row, positions[place].to_vec()))
    }
}

/// The outputs of the tokens of `targets`, and the positions of those that have none. The latter are dropped; if the LM head teaches, they stay
/// as targets without a label.
fn outputs_of(targets: &TargetTokens, map: &TokenMap, soft: bool) -> (TargetTokens, Vec<i64>) {
    let (mut mapped, mut outside) = (TargetTokens::default(), vec![]);
    let ignore = i64::from(IGNORE);
    for (&position, &token) in targets.positions.iter().zip(&targets.tokens) {
        let output = if token == ignore { Some(ignore) } else { map.output_of(token) };
        outside.extend(output.is_none().then_some(position));
        if let Some(output) = output.or(soft.then_some(ignore)) {
            mapped.positions.push(position);
            mapped.tokens.push(output);
        }
    }
    (mapped, outside)
}
