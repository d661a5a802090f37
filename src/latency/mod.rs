//! How long steps of decoding take on this machine, by the size and depth of the tree: what a tree is chosen by.
//!
//! Measured is what is used: the real loops, plain and Medusa, behind a context of some hundred tokens. Knows trees, not where they
//! come from.

use std::ops::ControlFlow;
use std::time::Instant;

use crate::decode::generate::{self, DecodeError, Medusa, OnTokens, Request};
use crate::draft::medusa::heads::Heads;
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
    backbone: &mut Llama,
    heads: &Heads,
    trees: &[SparseTree],
    context: usize,
    on_turn: &mut dyn FnMut(),
) -> Result<Times, LatencyError> {
    // The text is nonsense and may end at any token; its steps take as long as those of sense.
    let eos_token_ids = std::mem::take(&mut backbone.config.eos_token_ids);
    let times = measure_endless(backbone, heads, trees, context, on_turn);
    backbone.config.eos_token_ids = eos_token_ids;
    times
}

fn measure_endless(
    backbone: &Llama,
    heads: &Heads,
    trees: &[SparseTree],
    context: usize,
    on_turn: &mut dyn FnMut(),
) -> Result<Times, LatencyError> {
    let prompt = nonsense(context, backbone.config.vocab_size);
    let steps: Vec<usize> =
        trees.iter().map(|tree| steps_within(backbone, context, tree.max_depth())).collect::<Result<_, _>>()?;
    let plain_steps = steps_within(backbone, context, 0)?;
    let medusas: Vec<Medusa> =
        trees.iter().map(|tree| Medusa::new(backbone, heads, tree, Acceptance::Greedy)).collect::<Result<_, _>>()?;
    let (mut plain_ms, mut tree_ms) = (Vec::new(), vec![Vec::new(); trees.len()]);
    for round in 0..=ROUNDS {
        let plain = step_ms(&prompt, plain_steps, |request, on| generate::plain(backbone, request, on).map(drop))?;
        on_turn();
        plain_ms.extend((round > 0).then_some(plain));
        for (at, medusa) in medusas.iter().enumerate() {
            let ms =
                step_ms(&prompt, steps[at], |request, on| generate::medusa(backbone, medusa, request, on).map(drop))?;
            on_turn();
            tree_ms[at].extend((round > 0).then_some(ms));
        }
    }
    let of_tree = |(tree, ms): (&SparseTree, Vec<f64>)| StepTime {
        nodes: tree.choices().len(),
        depth: tree.max_depth(),
        step_ms: median(ms),
    };
    Ok(Times { plain_step_ms: median(plain_ms), steps: trees.iter().zip(tree_ms).map(of_tree).collect() })
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
    let request = Request::greedy(prompt, 1 << 20); // to the context's end: the steps stop before
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
