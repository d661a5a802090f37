//! How long steps of decoding take on this machine, by the size and depth of the tree: what a tree is chosen by.
//!
//! Measured is what is used: the real loops, plain and Medusa, behind a context of some hundred tokens. Knows trees, not where they
//! come from.

use std::ops::ControlFlow;
use std::time::Instant;

use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::host_loop::HostLoop;
use crate::decode::request::{OnTokens, Request};
use crate::decode::step::Drafting;
use crate::draft::Drafter;
use crate::draft::medusa::drafter::{DraftError, MedusaDrafter};
use crate::draft::medusa::heads::Heads;
use crate::engine::fastest::fastest;
use crate::formats::latency::StepTime;
use crate::model::llama::Llama;
use crate::tree::accept::Acceptance;
use crate::tree::search::SearchError;
use crate::tree::sparse_tree::SparseTree;

mod choice;

pub use choice::{BestTree, Sweep, Timed, sweep, trees_to_time};

/// Times that everything is measured in turn; what the machine does besides falls on all alike.
const ROUNDS: usize = 5;
/// Steps of a turn, if the context has room.
const STEPS: usize = 8;
/// Fewer have no middle one between two others.
const MIN_STEPS: usize = 4;

/// Steps cannot be timed, or no tree chosen by them.
#[derive(Debug, thiserror::Error)]
pub enum LatencyError {
    /// The context is full before there is something to measure.
    #[error(
        "a context of {context} tokens leaves no room for {MIN_STEPS} steps of a tree of depth {depth}: the backbone's is {max_position}; \
         give a smaller --context"
    )]
    NoRoom {
        /// Tokens of the prompt.
        context: usize,
        /// The tree's.
        depth: usize,
        /// `max_position_embeddings`.
        max_position: i64,
    },
    /// Heads and trees do not belong to the backbone.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// Decoding failed.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// There is no tree to time.
    #[error(transparent)]
    Search(#[from] SearchError),
    /// No time is known of any tree.
    #[error(
        "none of the trees that these heads' calibration makes was timed; measure anew, with another --latency FILE"
    )]
    NothingTimed,
}

/// What [`measure`] found.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// A step of plain decoding.
    pub plain_step_ms: f64,
    /// A step with each tree, in their order.
    pub steps: Vec<StepTime>,
}

/// Turns of [`measure`] for so many trees: how often it calls `on_turn`.
pub fn turns(trees: usize) -> usize {
    (ROUNDS + 1) * (trees + 1)
}

/// Times steps of plain decoding and of Medusa decoding with each tree, behind `context` tokens. All are measured in turn, several
/// times; the first time warms up and is thrown away. Of each turn the median step counts, of the turns their median.
///
/// # Errors
/// [`LatencyError::NoRoom`], or what is wrong with heads and trees.
pub fn measure(
    backbone: &Llama,
    heads: &Heads,
    trees: &[SparseTree],
    context: usize,
    on_turn: &mut dyn FnMut(),
) -> Result<Times, LatencyError> {
    let prompt = nonsense(context, backbone.config.vocab_size);
    let mut timed = vec![(steps_within(backbone, context, 0)?, None)];
    for tree in trees {
        let drafter = MedusaDrafter::new(backbone, heads, tree)?;
        timed.push((steps_within(backbone, context, tree.max_depth())?, Some(drafter)));
    }
    let mut turns_ms = vec![Vec::new(); timed.len()];
    for round in 0..=ROUNDS {
        for ((steps, drafter), turns_ms) in timed.iter().zip(&mut turns_ms) {
            let guessing = drafter.as_ref().map(|drafter: &MedusaDrafter| {
                let drafter: Box<dyn Drafter + '_> = Box::new(drafter.clone());
                (drafter, Acceptance::Greedy)
            });
            let mut decoding = HostLoop::new(fastest(backbone), guessing); // one cache at a time: a GPU has no room for all trees'
            let ms = step_ms(&prompt, *steps, |request, on| decoding.decode(Drafting::On, request, on).map(drop))?;
            on_turn();
            turns_ms.extend((round > 0).then_some(ms));
        }
    }
    let mut medians = turns_ms.into_iter().map(median);
    let plain_step_ms = medians.next().expect("plain decoding is measured");
    let of_tree = |(tree, step_ms): (&SparseTree, f64)| StepTime {
        nodes: tree.choices().len(),
        depth: tree.max_depth(),
        step_ms,
    };
    Ok(Times { plain_step_ms, steps: trees.iter().zip(medians).map(of_tree).collect() })
}

/// Steps that fit behind the context even if all guesses are right, [`STEPS`] at most.
fn steps_within(backbone: &Llama, context: usize, depth: usize) -> Result<usize, LatencyError> {
    let max_position = backbone.config.max_position_embeddings;
    let room = usize::try_from(max_position).unwrap_or(0).saturating_sub(context + 1);
    let steps = (room / (depth + 1)).min(STEPS);
    if context == 0 || steps < MIN_STEPS {
        return Err(LatencyError::NoRoom { context, depth, max_position });
    }
    Ok(steps)
}

/// Token ids without sense, spread over the vocabulary.
fn nonsense(context: usize, vocab_size: i64) -> Vec<i64> {
    (0..context as i64).map(|at| (1 + 7919 * at) % vocab_size).collect()
}

/// The median time between two commits of one generation, in milliseconds. The time to the first, which has the prompt in it, is
/// left out.
fn step_ms(
    prompt: &[i64],
    steps: usize,
    decode: impl FnOnce(&Request, &mut OnTokens) -> Result<(), DecodeError>,
) -> Result<f64, DecodeError> {
    // To the context's end: the steps stop before. The text is nonsense and may end at any token; its steps take as long as those of sense.
    let request = Request { ends_at_eos: false, ..Request::greedy(prompt, 1 << 20) };
    let mut commits = Vec::with_capacity(steps);
    decode(&request, &mut |_| {
        commits.push(Instant::now());
        if commits.len() < steps { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(between(&commits))
}

/// The median time from one commit to the next, in milliseconds.
fn between(commits: &[Instant]) -> f64 {
    median(commits.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect())
}

/// 0 of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        length if length % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_median_is_the_middle_whatever_the_order() {
        assert_eq!(median(vec![5.0, 1.0, 900.0]), 5.0);
        assert_eq!(median(vec![4.0, 1.0, 900.0, 2.0]), 3.0);
        assert_eq!(median(vec![]), 0.0);
    }

    #[test]
    fn the_time_until_the_first_commit_does_not_count() {
        let start = Instant::now();
        let commits = [900, 902, 904, 950].map(|ms| start + Duration::from_millis(ms));
        assert_eq!(between(&commits), 2.0);
        let mut heard = 0;
        let decode = |_: &Request, on_tokens: &mut OnTokens| {
            while on_tokens(&[7]).is_continue() {
                heard += 1;
            }
            Ok(())
        };
        step_ms(&[1], 4, decode).unwrap();
        assert_eq!(heard, 3, "stopped at the fourth commit");
    }

    #[test]
    fn nonsense_is_within_the_vocabulary() {
        let ids = nonsense(300, 264);
        assert!(ids.len() == 300 && ids.iter().all(|id| (0..264).contains(id)));
    }
}
