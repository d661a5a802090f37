//! Times decoding steps on this machine by the size and depth of the tree, and chooses the fastest tree.
//!
//! It times the loop that will decode, without a drafter and with each tree: answers as long as those of the calibration, after a context of a
//! few hundred tokens.

use std::ops::ControlFlow;
use std::time::Instant;

use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::request::{OnTokens, Request};
use crate::decode::step::Drafting;
use crate::draft::error::DraftError;
use crate::formats::latency::{Slowdown, StepTime};
use crate::model::llama::Llama;
use crate::tree::guess_tree::GuessTree;
use crate::tree::search::SearchError;
use turns::{Relative, Turns, turns_of_round};

mod batches;
pub mod busy_cores;
mod choice;
mod identity;
pub mod processors;
pub mod products;
mod rows;
mod turns;

pub use batches::{NewEngine, measure_batch};
pub use choice::{BestTree, DynamicOf, Sweep, Timed, dynamic_sweep, dynamic_to_time, sweep, trees_to_time};
pub use identity::backbone_sha256;
pub use rows::{CONTEXT as ROWS_CONTEXT, measure_rows};

/// Whether other programs use the cores: then more steps are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineLoad {
    Quiet,
    Busy,
}

impl MachineLoad {
    /// Rounds in which all trees are timed. All take turns in each, so that other load on the machine affects all alike.
    fn rounds(self) -> usize {
        match self {
            Self::Quiet => 3,
            Self::Busy => 5,
        }
    }

    /// Rounds in which the [`FINALISTS`] are timed again: the fastest of many trees is one whose steps were lucky.
    fn final_rounds(self) -> usize {
        match self {
            Self::Quiet => 15,
            Self::Busy => 45,
        }
    }
}

/// The trees that are timed a second time, those with the most tokens per second.
const FINALISTS: usize = 6;
/// Steps at an answer's beginning that are slow: they read weights that the prompt's own pass has driven out of the caches.
const FIRST_STEPS: usize = 4;
/// Steps per turn, if the answer is as long and the context has room.
const STEPS: usize = FIRST_STEPS + 8;
/// The least number of steps of a turn.
const MIN_STEPS: usize = 4;
/// Tokens of the prompt after which a new loop starts up what it has, untimed, and steps after it.
const WARM_UP: [usize; 2] = [4, 2];

/// Why steps cannot be timed, or no tree chosen.
#[derive(Debug, thiserror::Error)]
pub enum LatencyError {
    /// The context leaves no room for the steps.
    #[error(
        "a context of {context} tokens leaves no room for {MIN_STEPS} steps of a tree of depth {depth}: the backbone's is {max_position}; \
         give a smaller --context"
    )]
    NoRoom {
        /// Tokens of the prompt.
        context: usize,
        /// Depth of the tree.
        depth: usize,
        /// `max_position_embeddings`.
        max_position: i64,
    },
    /// Drafter and trees do not fit the backbone.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The times of two engines cannot be compared.
    #[error(
        "plain decoding runs on engine {plain}, a tree of {nodes} nodes on engine {other}; give a smaller --max-nodes, or --engine {other}"
    )]
    TwoEngines {
        /// Engine of plain decoding.
        plain: &'static str,
        /// Nodes of the tree.
        nodes: usize,
        /// Engine of the tree.
        other: &'static str,
    },
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Search(#[from] SearchError),
    #[error(
        "none of the trees that these heads' calibration makes was timed; measure anew, with another --latency FILE"
    )]
    NothingTimed,
}

/// The result of [`measure`].
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// The engine that decoded, as `--engine` spells it.
    pub engine: &'static str,
    pub slowdown: Option<Slowdown>,
    /// Time of a step of plain decoding.
    pub plain_step_ms: f64,
    /// Time of a step with each tree, in order.
    pub steps: Vec<StepTime>,
}

/// How often [`measure`] calls `on_turn` for this many trees.
pub fn turns(trees: usize, machine: MachineLoad) -> usize {
    let finals = machine.final_rounds() * turns_of_round(trees.min(FINALISTS)).len();
    machine.rounds() * turns_of_round(trees).len() + finals
}

/// Creates the loop that will decode, plainly or with a drafter that fills a tree.
pub type NewLoop<'l, 'a, E> = dyn Fn(Option<&'a GuessTree>) -> Result<Box<dyn DecodeLoop + 'a>, E> + 'l;

/// A tree to time, and its expected tokens per step.
pub type TreeToTime = (GuessTree, f64);

/// What is timed: answers of so many tokens after a context of so many, on a machine that other programs may use.
#[derive(Debug, Clone, Copy)]
pub struct TimedAnswers {
    pub context: usize,
    pub tokens: f64,
    pub machine: MachineLoad,
}

/// Times steps of plain decoding and of decoding with each tree, then again with the trees that give the most tokens per second. All take turns in
/// several rounds.
///
/// # Errors
/// [`LatencyError`], or an error of `new_loop`.
pub fn measure<'a, E: From<LatencyError>>(
    backbone: &'a Llama,
    candidates: &'a [TreeToTime],
    answers: TimedAnswers,
    new_loop: &NewLoop<'_, 'a, E>,
    on_turn: &mut dyn FnMut(),
) -> Result<Times, E> {
    let context = answers.context;
    steps_within(backbone, context, 0)?;
    for (tree, _) in candidates {
        steps_within(backbone, context, tree.depth())?;
    }
    let prompt = nonsense(context, backbone.config.vocab_size);
    let mut engine = None;
    let mut turn = |candidate: Option<&'a TreeToTime>| -> Result<f64, E> {
        let tree = candidate.map(|(tree, _)| tree);
        let depth = tree.map_or(0, GuessTree::depth);
        let all_steps = answers.tokens / candidate.map_or(1.0, |(_, per_step)| *per_step);
        let steps = steps_within(backbone, context, depth)?.min(all_steps as usize).max(MIN_STEPS);
        let mut decoding = new_loop(tree)?; // one cache at a time: a GPU cannot hold those of all trees
        let (plain, other) = (*engine.get_or_insert(decoding.engine_name()), decoding.engine_name());
        if let Some(tree) = tree.filter(|_| other != plain) {
            return Err(LatencyError::TwoEngines { plain, nodes: tree.nodes(), other }.into());
        }
        let mut ms_of = |prompt: &[i64], steps: usize| {
            steps_ms(prompt, [steps, depth], |request, on| decoding.decode(Drafting::On, request, on).map(drop))
        };
        let [warm_up, few] = WARM_UP;
        let ms = ms_of(&prompt[..warm_up.min(context)], few).and_then(|_| ms_of(&prompt, steps));
        on_turn();
        Ok(mean_step(&ms.map_err(LatencyError::from)?, all_steps))
    };
    let all: Vec<usize> = (0..candidates.len()).collect();
    let screening = in_turns(candidates, &all, answers.machine.rounds(), &mut turn)?;
    let mut relative: Vec<Relative> = (1..=all.len()).map(|tree| screening.relative(tree)).collect();
    let finalists = finalists(candidates, &relative);
    let finals = in_turns(candidates, &finalists, answers.machine.final_rounds(), &mut turn)?;
    for (&at, tree) in finalists.iter().zip(1..) {
        relative[at] = finals.relative(tree);
    }
    let plain_step_ms = finals.plain_ms();
    let steps = candidates.iter().zip(relative).map(|((tree, _), of)| of.step_time(tree, plain_step_ms)).collect();
    Ok(Times { engine: engine.expect("plain decoding is timed"), slowdown: finals.slowdown(), plain_step_ms, steps })
}

/// Plain decoding and the candidates at `timed`, in several rounds.
fn in_turns<'a, E>(
    candidates: &'a [TreeToTime],
    timed: &[usize],
    rounds: usize,
    turn: &mut impl FnMut(Option<&'a TreeToTime>) -> Result<f64, E>,
) -> Result<Turns, E> {
    let mut turns = Turns::default();
    for _ in 0..rounds {
        turns.begin_round();
        for who in turns_of_round(timed.len()) {
            turns.push(who, turn(who.checked_sub(1).map(|tree| &candidates[timed[tree]]))?);
        }
    }
    Ok(turns)
}

/// The candidates with the most tokens per second.
fn finalists(candidates: &[TreeToTime], relative: &[Relative]) -> Vec<usize> {
    let per_second = |at: &usize| candidates[*at].1 / relative[*at].step;
    let mut fastest_first: Vec<usize> = (0..candidates.len()).collect();
    fastest_first.sort_by(|one, other| per_second(other).total_cmp(&per_second(one)));
    fastest_first.truncate(FINALISTS);
    fastest_first
}

/// Steps that fit after the context even if all guesses are right, at most [`STEPS`].
fn steps_within(backbone: &Llama, context: usize, depth: usize) -> Result<usize, LatencyError> {
    let max_position = backbone.config.max_position_embeddings;
    let room = usize::try_from(max_position).unwrap_or(0).saturating_sub(context.saturating_add(1));
    let steps = (room / (depth + 1)).min(STEPS);
    if context == 0 || steps < MIN_STEPS {
        return Err(LatencyError::NoRoom { context, depth, max_position });
    }
    Ok(steps)
}

/// The mean step of an answer of `all` steps, of which these are the first.
fn mean_step(ms: &[f64], all: f64) -> f64 {
    let (first, later) = ms.split_at(FIRST_STEPS.min(ms.len().saturating_sub(1)));
    let sum = |ms: &[f64]| ms.iter().sum::<f64>();
    let all = all.max(ms.len() as f64);
    (sum(first) + sum(later) / later.len() as f64 * (all - first.len() as f64)) / all
}

/// Token ids spread over the vocabulary; a step's time does not depend on the text.
fn nonsense(context: usize, vocab_size: i64) -> Vec<i64> {
    (0..context as i64).map(|at| (1 + 7919 * at) % vocab_size).collect()
}

/// The times between the commits of one generation, in milliseconds, without the prefill. A step commits at most `depth + 1` tokens.
fn steps_ms(
    prompt: &[i64],
    [steps, depth]: [usize; 2],
    decode: impl FnOnce(&Request, &mut OnTokens) -> Result<(), DecodeError>,
) -> Result<Vec<f64>, DecodeError> {
    let request = Request { ends_at_eos: false, ..Request::greedy(prompt, steps * (depth + 1)) };
    let mut commits = Vec::with_capacity(steps);
    decode(&request, &mut |_| {
        commits.push(Instant::now());
        if commits.len() < steps { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(between(&commits))
}

/// The times between consecutive commits, in milliseconds.
fn between(commits: &[Instant]) -> Vec<f64> {
    commits.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::formats::tree::DynamicTree;
    use crate::model::config::LlamaConfig;

    #[test]
    fn the_time_until_the_first_commit_does_not_count() {
        let start = Instant::now();
        let commits = [900, 902, 904, 950].map(|ms| start + Duration::from_millis(ms));
        assert_eq!(between(&commits), [2.0, 2.0, 46.0]);
        let mut heard = 0;
        let decode = |_: &Request, on_tokens: &mut OnTokens| {
            while on_tokens(&[7]).is_continue() {
                heard += 1;
            }
            Ok(())
        };
        let steps_ms = steps_ms(&[1], [4, 2], decode).unwrap();
        assert_eq!((heard, steps_ms.len()), (3, 3), "stopped at the fourth commit");
    }

    #[test]
    fn the_slow_first_steps_count_once_an_answer() {
        let ms = [9.0, 3.0, 3.0, 1.0, 2.0, 4.0];
        assert_eq!(mean_step(&ms, 6.0), 22.0 / 6.0, "the answer itself");
        assert_eq!(mean_step(&ms, 16.0), (16.0 + 12.0 * 3.0) / 16.0, "twelve steps like the last two");
        assert_eq!(mean_step(&ms, 2.0), 22.0 / 6.0, "no fewer than were timed");
        assert_eq!(mean_step(&[5.0, 1.0, 1.0], 100.0), (6.0 + 98.0) / 100.0, "few steps: the last one is not slow");
    }

    #[test]
    fn the_finalists_have_the_most_tokens_per_second() {
        let tree = |nodes: usize| GuessTree::Dynamic(DynamicTree { nodes, depth: 1, top_k: 10 });
        let candidates: Vec<TreeToTime> = (1..=8).map(|nodes| (tree(nodes), nodes as f64)).collect();
        let mut turns = Turns::default();
        turns.begin_round();
        for who in turns_of_round(8) {
            turns.push(who, [1.0, 1.0, 9.0, 2.0, 2.0, 9.0, 2.0, 2.0, 2.0][who]);
        }
        let relative: Vec<Relative> = (1..=8).map(|tree| turns.relative(tree)).collect();
        assert_eq!(
            finalists(&candidates, &relative),
            [7, 6, 5, 3, 2, 0],
            "4, 3.5, 3, 2, 1.5 and 1 against 2/9 and 5/9"
        );
        assert_eq!(super::turns(8, MachineLoad::Quiet), 3 * 12 + 15 * 9);
    }

    #[test]
    fn a_context_without_room_is_refused_before_it_takes_memory() {
        let backbone = Llama::random(LlamaConfig::tiny(), tch::Kind::Float, tch::Device::Cpu, 1);
        let never = |_: Option<&GuessTree>| -> Result<Box<dyn DecodeLoop>, LatencyError> { panic!("timed") };
        for context in [u32::MAX as usize, usize::MAX] {
            let answers = TimedAnswers { context, tokens: 99.0, machine: MachineLoad::Quiet };
            let times = measure(&backbone, &[], answers, &never, &mut || {});
            assert!(matches!(times, Err(LatencyError::NoRoom { .. })), "{times:?}");
        }
    }

    #[test]
    fn nonsense_is_within_the_vocabulary() {
        let ids = nonsense(300, 264);
        assert!(ids.len() == 300 && ids.iter().all(|id| (0..264).contains(id)));
    }
}
