//! Times decoding steps on this machine by the size and depth of the tree, and chooses the fastest tree.
//!
//! It times the loop that will decode, without a drafter and with each tree, after a context of a few hundred tokens.

use std::ops::ControlFlow;
use std::time::Instant;

use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::request::{OnTokens, Request};
use crate::decode::step::Drafting;
use crate::draft::heads_drafter::HeadsDrafter;
use crate::draft::medusa::drafter::DraftError;
use crate::draft::medusa::heads::Heads;
use crate::formats::latency::{Slowdown, StepTime};
use crate::model::llama::Llama;
use crate::tree::guess_tree::GuessTree;
use crate::tree::search::SearchError;

mod batches;
mod choice;
mod identity;
mod rows;

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
    /// Measured rounds. All trees take turns in each, so that other load on the machine affects all alike.
    fn rounds(self) -> usize {
        match self {
            Self::Quiet => 5,
            Self::Busy => 15,
        }
    }
}

/// The share of a tree's steps that may be faster than its time. Other programs interrupt the longest steps most often: a median would
/// make these several times too long.
const UNDISTURBED: f64 = 0.1;
/// The first steps after a prompt are not timed: they read weights that the prompt's own pass has driven out of the caches. On a small model
/// they take up to 1.6 times as long as later ones, and most steps of an answer are later ones. A short context may have room for fewer.
const WARM_UP: usize = 4;
/// Steps per turn, if the context has room.
const STEPS: usize = WARM_UP + 8;
/// Trees that are timed between two turns of plain decoding.
const TREES_PER_PLAIN: usize = 4;
/// The least number of steps for a useful quantile.
const MIN_STEPS: usize = 4;

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
    /// Heads and trees do not fit the backbone.
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
    machine.rounds() * turns_of_round(trees).len()
}

/// What a round times, in order: 0 is plain decoding, n the n-th tree. Plain decoding comes again before every few trees, since each speedup is
/// relative to it.
fn turns_of_round(trees: usize) -> Vec<usize> {
    let all: Vec<usize> = (1..=trees).collect();
    let with_plain: Vec<usize> = all.chunks(TREES_PER_PLAIN).flat_map(|trees| [&[0], trees].concat()).collect();
    if trees == 0 { vec![0] } else { with_plain }
}

/// Creates the loop that will decode, with or without a drafter.
pub type NewLoop<'l, 'a, E> =
    dyn Fn(Option<(HeadsDrafter<'a>, &'a GuessTree)>) -> Result<Box<dyn DecodeLoop + 'a>, E> + 'l;

/// Times steps of plain decoding and of decoding with each tree after `context` tokens. All take turns in several rounds; the first steps of a
/// turn warm up and are discarded. The result is a low quantile (`UNDISTURBED`) of the steps of all turns.
///
/// # Errors
/// [`LatencyError`], or an error of `new_loop`.
pub fn measure<'a, E: From<LatencyError>>(
    (backbone, heads): (&'a Llama, &'a Heads),
    trees: &'a [GuessTree],
    (context, machine): (usize, MachineLoad),
    new_loop: &NewLoop<'_, 'a, E>,
    on_turn: &mut dyn FnMut(),
) -> Result<Times, E> {
    let mut timed = vec![(steps_within(backbone, context, 0)?, None)];
    for tree in trees {
        timed.push((steps_within(backbone, context, tree.depth())?, Some(tree)));
    }
    let prompt = nonsense(context, backbone.config.vocab_size);
    let mut all_ms = vec![Vec::new(); timed.len()];
    let mut engine = None;
    for _ in 0..machine.rounds() {
        for turn in turns_of_round(trees.len()) {
            let (steps, tree) = timed[turn];
            let drafter = tree.map(|tree| Ok((HeadsDrafter::new(backbone, heads, tree)?, tree)));
            let drafter = drafter.transpose().map_err(|error: DraftError| LatencyError::from(error))?;
            let mut decoding = new_loop(drafter)?; // one cache at a time: a GPU cannot hold those of all trees
            let (plain, other) = (*engine.get_or_insert(decoding.engine_name()), decoding.engine_name());
            if let Some(tree) = tree.filter(|_| other != plain) {
                return Err(LatencyError::TwoEngines { plain, nodes: tree.nodes(), other }.into());
            }
            let depth = tree.map_or(0, GuessTree::depth);
            let ms =
                steps_ms(&prompt, [steps, depth], |request, on| decoding.decode(Drafting::On, request, on).map(drop));
            let ms = ms.map_err(LatencyError::from)?;
            on_turn();
            all_ms[turn].extend(ms);
        }
    }
    let slowdown = slowdown(&all_ms);
    let mut undisturbed = all_ms.into_iter().map(undisturbed);
    let (engine, plain_step_ms) = engine.zip(undisturbed.next()).expect("plain decoding is measured");
    let of_tree = |(tree, step_ms): (&GuessTree, f64)| {
        let (nodes, depth, dynamic) = (tree.nodes(), tree.depth(), tree.as_static().is_none());
        StepTime { nodes, depth, step_ms, dynamic }
    };
    Ok(Times { engine, slowdown, plain_step_ms, steps: trees.iter().zip(undisturbed).map(of_tree).collect() })
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

/// How many of these steps warm up.
fn warm_up(steps: usize) -> usize {
    steps.saturating_sub(MIN_STEPS).min(WARM_UP)
}

/// Token ids spread over the vocabulary; a step's time does not depend on the text.
fn nonsense(context: usize, vocab_size: i64) -> Vec<i64> {
    (0..context as i64).map(|at| (1 + 7919 * at) % vocab_size).collect()
}

/// The times between the commits of one generation, in milliseconds, without the prefill and the steps that warm up. A step commits at
/// most `depth + 1` tokens.
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
    Ok(between(&commits).split_off(warm_up(steps)))
}

/// The times between consecutive commits, in milliseconds.
fn between(commits: &[Instant]) -> Vec<f64> {
    commits.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect()
}

/// The time of a step that nothing interrupts; 0 if there are no times.
fn undisturbed(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get((times.len() as f64 * UNDISTURBED) as usize).copied().unwrap_or(0.0)
}

/// Of plain decoding, whose steps come first, and of the trees; `None` without trees.
fn slowdown(all_ms: &[Vec<f64>]) -> Option<Slowdown> {
    let of = |ms: &Vec<f64>| ms.iter().sum::<f64>() / ms.len() as f64 / undisturbed(ms.clone());
    let [plain, trees @ ..] = all_ms else { return None };
    let of_trees = trees.iter().map(of).sum::<f64>() / trees.len() as f64;
    (!trees.is_empty()).then(|| Slowdown { plain: of(plain), trees: of_trees })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::draft::medusa::heads::HeadsShape;
    use crate::model::config::LlamaConfig;

    #[test]
    fn interrupted_steps_do_not_make_a_tree_slow() {
        let times = |interrupted: usize| (0..35).map(|at| if at % 10 < interrupted { 12.0 } else { 1.2 }).collect();
        assert_eq!(undisturbed(times(0)), 1.2);
        assert_eq!(undisturbed(times(8)), 1.2, "eight of ten steps");
        let one_too_short = [vec![0.1], times(0)].concat();
        assert_eq!(undisturbed(one_too_short), 1.2, "one clock error");
        assert_eq!(undisturbed(vec![]), 0.0);
        let slowdown = slowdown(&[vec![1.0, 1.0], vec![2.0, 4.0], vec![3.0, 3.0]]);
        assert_eq!(slowdown, Some(Slowdown { plain: 1.0, trees: 1.25 }));
    }

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
        let steps_ms = steps_ms(&[1], [WARM_UP + 4, 2], decode).unwrap();
        assert_eq!((heard, steps_ms.len()), (WARM_UP + 3, 3), "stopped at the fourth commit after the warm-up");
    }

    #[test]
    fn plain_decoding_is_timed_more_often_than_a_tree() {
        assert_eq!(turns_of_round(6), [0, 1, 2, 3, 4, 0, 5, 6]);
        assert_eq!(turns_of_round(0), [0]);
        assert_eq!(turns(6, MachineLoad::Quiet), 40);
    }

    #[test]
    fn a_context_without_room_is_refused_before_it_takes_memory() {
        let backbone = Llama::random(LlamaConfig::tiny(), tch::Kind::Float, tch::Device::Cpu, 1);
        let never =
            |_: Option<(HeadsDrafter, &GuessTree)>| -> Result<Box<dyn DecodeLoop>, LatencyError> { panic!("timed") };
        let heads = Heads::random(HeadsShape::default(), tch::Kind::Float, tch::Device::Cpu, 1);
        for context in [u32::MAX as usize, usize::MAX] {
            let times = measure((&backbone, &heads), &[], (context, MachineLoad::Quiet), &never, &mut || {});
            assert!(matches!(times, Err(LatencyError::NoRoom { .. })), "{times:?}");
        }
    }

    #[test]
    fn nonsense_is_within_the_vocabulary() {
        let ids = nonsense(300, 264);
        assert!(ids.len() == 300 && ids.iter().all(|id| (0..264).contains(id)));
    }
}
