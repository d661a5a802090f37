//! Measures the top-k accuracy of each level of a drafter's guesses, which the tree search needs (paper section 2.3.3).

use sha2::{Digest, Sha256};
use tch::{Kind, Tensor};

use crate::data::IGNORE;
use crate::data::rows::TokenRow;
use crate::data::store::RowStore;
use crate::draft::loss::fused::ranks;
use crate::draft::trained::{KnownText, TrainedDrafter};
use crate::files;
use crate::formats::calibration::DynamicRanks;
use crate::formats::calibration_share::RanksOfRow;
use crate::formats::share::Share;
use crate::model::llama::Llama;
use crate::torch::{guard, wide};
use crate::tree::rank_counts::{OUTSIDE, RankCounts, RankedPosition};

mod dynamic;
mod error;

use dynamic::{DynamicCounts, StepStart};
pub use error::CalibrationError;

/// Limits the memory of one level's logits: positions are processed in chunks below this size.
const MAX_LOGITS_BYTES: i64 = 64 << 20;

/// The counts of a share of the rows.
#[derive(Debug)]
pub struct CountedRows {
    pub counts: RankCounts,
    pub dynamic: DynamicRanks,
    /// Hash of the tokens and labels of all rows, those of other shares too.
    pub rows_sha256: String,
    /// The runs of `counts` and `dynamic` of each row that has any.
    row_ends: Vec<RowEnd>,
}

/// How many runs there are up to a row.
#[derive(Debug, Clone, Copy)]
struct RowEnd {
    row: usize,
    runs: usize,
    dynamic: usize,
}

impl CountedRows {
    pub fn ranks_by_row(&self) -> Vec<RanksOfRow> {
        let (mut runs, mut dynamic, mut rows) = (0, 0, vec![]);
        for end in &self.row_ends {
            let row_ranks = RanksOfRow {
                row: end.row,
                runs: self.counts.runs()[runs..end.runs].to_vec(),
                dynamic: self.dynamic.runs[dynamic..end.dynamic].to_vec(),
            };
            (runs, dynamic) = (end.runs, end.dynamic);
            rows.push(row_ranks);
        }
        rows.retain(|row| !(row.runs.is_empty() && row.dynamic.is_empty()));
        rows
    }
}

/// Runs a drafter over the share's `rows` and counts which of its `top_k` guesses is the target. Level l (0-based) at position t
/// predicts token t + l + 2, if that token's label is not [`IGNORE`]. Also ranks the targets among the candidates of trees that are chosen at
/// each step: within a limit of positions, of the same rows whatever the shares. `on_row` receives the number of finished rows of the share.
///
/// # Errors
/// [`CalibrationError`], with the fault of the drafter or the rows.
pub fn calibrate(
    backbone: &Llama,
    drafter: &dyn TrainedDrafter,
    rows: &RowStore,
    top_k: usize,
    share: Share,
    mut on_row: impl FnMut(usize),
) -> Result<CountedRows, CalibrationError> {
    check(backbone, drafter, rows, top_k)?;
    let mut counts = RankCounts::new(drafter.reads().levels, top_k);
    let mut dynamic = DynamicCounts::new(drafter);
    let (mut all, mut row_ends) = (Sha256::new(), vec![]);
    for (at, row) in rows.iter().enumerate() {
        let row = row?;
        hash_row(&mut all, &row);
        if !share.has(at) {
            pass_row(&row, drafter.reads().levels, (&mut counts, &mut dynamic));
            continue;
        }
        check_tokens(at + 1, &row, backbone.config.vocab_size)?;
        let counted =
            guard("calibrating", || tch::no_grad(|| count_row(backbone, drafter, &row, (&mut counts, &mut dynamic))))?;
        counted.map_err(|NotFinite { level }| CalibrationError::NotFinite { row: at + 1, head: level + 1 })?;
        row_ends.push(RowEnd { row: at, runs: counts.runs().len(), dynamic: dynamic.runs().len() });
        on_row(row_ends.len());
    }
    Ok(CountedRows { counts, dynamic: dynamic.ranks(), rows_sha256: files::hex(&all.finalize()), row_ends })
}

fn hash_row(all: &mut Sha256, row: &TokenRow) {
    all.update((row.input_ids.len() as u64).to_le_bytes());
    row.input_ids.iter().chain(&row.labels).for_each(|id| all.update(id.to_le_bytes()));
}

/// A row of another share only takes its part of the positions whose ranks are kept.
fn pass_row(row: &TokenRow, levels: usize, (counts, dynamic): (&mut RankCounts, &mut DynamicCounts)) {
    for run in asked_of(row, levels).split(|asked| !asked.is_step) {
        counts.pass_run(run.len());
        dynamic.pass(run.len());
    }
}

fn check(
    backbone: &Llama,
    drafter: &dyn TrainedDrafter,
    rows: &RowStore,
    top_k: usize,
) -> Result<(), CalibrationError> {
    let config = &backbone.config;
    drafter.check_backbone(config)?;
    let (vocab_size, context) = (drafter.guessable(), config.max_position_embeddings);
    if top_k == 0 || top_k > vocab_size {
        return Err(CalibrationError::BadTopK { top_k, vocab_size });
    }
    match (0..rows.len()).find(|&row| rows.length(row) as i64 > context) {
        Some(row) => Err(CalibrationError::RowTooLong { row: row + 1, length: rows.length(row), context }),
        None => Ok(()),
    }
}

fn check_tokens(row: usize, tokens: &TokenRow, vocab_size: i64) -> Result<(), CalibrationError> {
    let bad = tokens.input_ids.iter().position(|&id| !(0..vocab_size).contains(&i64::from(id)));
    bad.map_or(Ok(()), |position| {
        Err(CalibrationError::TokenOutOfRange { row, position, id: tokens.input_ids[position], vocab_size })
    })
}

/// A position with its targets.
#[derive(Debug, PartialEq, Eq)]
struct AskedPosition {
    position: usize,
    /// Whether the next token, a step's root, has a label, so that a decoding step could start here.
    is_step: bool,
    /// One per level.
    targets: Vec<Option<i64>>,
}

/// Each level's target at each position, without positions that have none.
fn asked_of(row: &TokenRow, levels: usize) -> Vec<AskedPosition> {
    let target = |at: usize| row.labels.get(at).filter(|&&label| label != IGNORE).map(|&label| i64::from(label));
    let asked = (0..row.input_ids.len()).map(|position| AskedPosition {
        position,
        is_step: target(position + 1).is_some(),
        targets: (0..levels).map(|level| target(position + level + 2)).collect(),
    });
    asked.filter(|asked| asked.is_step || asked.targets.iter().any(Option::is_some)).collect()
}

/// The logits of a level (0-based) contain NaN or infinity.
struct NotFinite {
    level: usize,
}

fn count_row(
    backbone: &Llama,
    drafter: &dyn TrainedDrafter,
    row: &TokenRow,
    (counts, dynamic): (&mut RankCounts, &mut DynamicCounts),
) -> Result<(), NotFinite> {
    counts.add_tokens(row.input_ids.len());
    let asked = asked_of(row, drafter.reads().levels);
    if asked.is_empty() {
        return Ok(());
    }
    let ids: Vec<i64> = row.input_ids.iter().map(|&id| i64::from(id)).collect();
    let text = drafter.known_text(backbone, &ids);
    let chunk = (MAX_LOGITS_BYTES / (4 * backbone.config.vocab_size)).max(1) as usize;
    let ranks = |asked: &[AskedPosition]| ranks_at(drafter, &*text, asked, counts.top_k());
    let positions = asked.chunks(chunk).map(ranks).collect::<Result<Vec<_>, _>>()?;
    counts.add_text(positions.concat());
    for run in asked.split(|asked| !asked.is_step) {
        dynamic.add(&*text, &run.iter().map(|asked| start(asked, &ids)).collect::<Vec<_>>());
    }
    Ok(())
}

/// The ranks of every level's targets among its first `top_k` guesses at the asked positions.
fn ranks_at(
    drafter: &dyn TrainedDrafter,
    text: &dyn KnownText,
    asked: &[AskedPosition],
    top_k: usize,
) -> Result<Vec<RankedPosition>, NotFinite> {
    let positions: Vec<i64> = asked.iter().map(|asked| asked.position as i64).collect();
    let level_ranks = |level: usize| {
        let target = |asked: &AskedPosition| asked.targets[level].map_or(Some(0), |token| output_of(drafter, token));
        let targets: Vec<Option<i64>> = asked.iter().map(target).collect();
        ranks_of(&text.logits(level, &positions), &targets, top_k).ok_or(NotFinite { level })
    };
    let by_level = (0..drafter.reads().levels).map(level_ranks).collect::<Result<Vec<_>, _>>()?;
    let position = |(row, asked): (usize, &AskedPosition)| RankedPosition {
        is_step: asked.is_step,
        ranks: by_level.iter().zip(&asked.targets).map(|(ranks, target)| target.map(|_| ranks[row])).collect(),
    };
    Ok(asked.iter().enumerate().map(position).collect())
}

/// The step that would start at an asked position.
fn start(asked: &AskedPosition, ids: &[i64]) -> StepStart {
    StepStart {
        position: asked.position as i64,
        root: ids[asked.position + 1],
        right: asked.targets.iter().map_while(|target| *target).collect(),
    }
}

/// The output whose logit is that of a token; `None` outside of a truncated vocabulary.
fn output_of(drafter: &dyn TrainedDrafter, token: i64) -> Option<i64> {
    drafter.token_map().map_or(Some(token), |map| map.output_of(token))
}

/// The rank of each target among the logits of its row, [`OUTSIDE`] of a target that the drafter cannot guess; `None` if a logit is NaN or
/// infinite.
fn ranks_of(logits_nv: &Tensor, targets: &[Option<i64>], top_k: usize) -> Option<Vec<usize>> {
    // max keeps NaN.
    if !logits_nv.max().double_value(&[]).is_finite() {
        return None;
    }
    let logits_nv = logits_nv.to_kind(wide(logits_nv.kind()));
    let outputs: Vec<i64> = targets.iter().map(|target| target.unwrap_or(0)).collect();
    let targets_n1 = Tensor::from_slice(&outputs).unsqueeze(1).to_device(logits_nv.device());
    let ranks_n = ranks(&logits_nv, &logits_nv.gather(1, &targets_n1, false), &targets_n1, top_k);
    let ranks: Vec<i64> = Vec::try_from(&ranks_n.to_kind(Kind::Int64)).expect("an int64 vector");
    let rank = |(rank, target): (i64, &Option<i64>)| if target.is_some() { rank as usize } else { OUTSIDE };
    Some(ranks.into_iter().zip(targets).map(rank).collect())
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use tch::Device;

    use super::*;
    use crate::decode::DecodeLoop;
    use crate::decode::host_loop::HostLoop;
    use crate::decode::own_answers::own_answer;
    use crate::decode::request::Request;
    use crate::decode::step::Drafting;
    use crate::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
    use crate::engine::fastest::fastest;
    use crate::formats::tree::DynamicTree;
    use crate::model::config::LlamaConfig;
    use crate::tree::accept::Acceptance;
    use crate::tree::guess_tree::GuessTree;
    use crate::tree::replay::Replay;

    /// Replaying the ranks gives the very steps that decoding takes, whatever the size and depth of the trees.
    #[test]
    fn replayed_trees_that_are_chosen_at_each_step_take_the_steps_of_decoding() {
        tch::set_num_threads(1);
        let config = LlamaConfig { eos_token_ids: vec![], ..LlamaConfig::tiny() };
        let llama = Llama::random(config, Kind::Double, Device::Cpu, 3);
        for (_, weight) in llama.weights().iter().filter(|(_, weight)| weight.dim() == 2) {
            let _ = weight.shallow_clone().g_mul_scalar_(8.0);
        }
        let mut several = 0;
        for architecture in [HeadsArchitecture::Medusa, HeadsArchitecture::Hydra, HeadsArchitecture::HydraPlusPlus] {
            let shape = HeadsShape {
                architecture,
                medusa_num_heads: 4,
                medusa_num_layers: 1,
                hidden_size: 32,
                vocab_size: 50,
                ..HeadsShape::default()
            };
            // The guesses of untrained heads are those of the LM head: often right in a text that repeats itself.
            let heads = Heads::random(shape, Kind::Double, Device::Cpu, 5).with_new_prefix(&llama, 5);
            let prompts: Vec<Vec<i64>> =
                (0..3).map(|text| (0..5 + text).map(|i| (i * 7 + text) % 50).collect()).collect();
            let rows = prompts.iter().map(|prompt| own_answer(&llama, &Request::greedy(prompt, 24)).unwrap());
            let rows = RowStore::in_memory(rows.collect::<Vec<_>>());
            let CountedRows { dynamic, .. } = calibrate(&llama, &heads, &rows, 10, Share::WHOLE, |_| ()).unwrap();
            for (nodes, depth) in [(8, 2), (100, 3), (300, 4)] {
                let tree = GuessTree::Dynamic(DynamicTree { nodes, depth, top_k: 10 });
                let steps = |prompt: &Vec<i64>| {
                    let drafter = heads.drafter(&llama, &tree).unwrap();
                    let go_on = &mut |_: &[i64]| ControlFlow::Continue(());
                    let request = Request::greedy(prompt, 24);
                    let drafts = Some((drafter, Acceptance::Greedy));
                    HostLoop::new(fastest(&llama), drafts)
                        .decode(Drafting::On, &request, go_on)
                        .unwrap()
                        .accept_lengths
                        .len()
                };
                let decoded: usize = prompts.iter().map(steps).sum();
                let replay = Replay::dynamic([nodes, depth], &dynamic.runs);
                assert_eq!(
                    (replay.steps, replay.tokens),
                    (decoded, 3 * 24),
                    "{architecture:?}, {nodes} nodes, {depth} levels"
                );
                several += usize::from(decoded < 3 * 24);
            }
        }
        assert!(several >= 6, "the guesses are hardly ever right: {several}");
    }

    #[test]
    fn targets_lie_two_tokens_on_and_ignored_labels_ask_nobody() {
        let row = TokenRow { input_ids: vec![1, 2, 3, 4, 5], labels: vec![IGNORE, 2, IGNORE, 4, 5] };
        let asked = |position, is_step, targets: [Option<i64>; 2]| AskedPosition {
            position,
            is_step,
            targets: targets.to_vec(),
        };
        let expected = [
            asked(0, true, [None, Some(4)]),
            asked(1, false, [Some(4), Some(5)]),
            asked(2, true, [Some(5), None]),
            asked(3, true, [None, None]),
        ];
        assert_eq!(asked_of(&row, 2), expected);
    }
}
