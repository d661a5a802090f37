//! Times steps of several texts at a time, each with its tree.

use std::num::NonZeroUsize;
use std::time::Instant;

use super::turns::{Turns, turns_of_round};
use super::{FIRST_STEPS, LatencyError, MIN_STEPS, nonsense, steps_within};
use crate::decode::batch::SequenceBatch;
use crate::decode::error::DecodeError;
use crate::decode::request::Request;
use crate::decode::texts::TextDecoder;
use crate::draft::Drafter;
use crate::draft::trained::TrainedDrafter;
use crate::engine::Engine;
use crate::formats::latency::StepsOfSequences;
use crate::model::llama::Llama;
use crate::tree::accept::Acceptance;
use crate::tree::guess_tree::GuessTree;

/// Measured rounds.
const ROUNDS: usize = 3;
/// Steps with more rows are not timed: on a CPU, where products of so many rows are bound by arithmetic, no tree pays for them.
const MOST_ROWS: usize = 512;
/// More than the prompt takes: it is computed once for all texts.
const PROMPT_BYTES: usize = 1 << 32;

/// Creates the engine that will decode.
pub type NewEngine<'l, 'a, E> = dyn Fn() -> Result<Box<dyn Engine + 'a>, E> + 'l;

/// Times steps of so many texts at a time after `context` tokens, without a drafter and with each of the trees that is small enough. All take
/// turns in several rounds; the result is the time of a step that nothing interrupts, and how much longer the steps took.
///
/// # Errors
/// [`LatencyError`], or an error of `new_engine`.
pub fn measure_batch<'a, E: From<LatencyError>>(
    (backbone, trained): (&'a Llama, &'a dyn TrainedDrafter),
    trees: &'a [GuessTree],
    [context, sequences]: [usize; 2],
    new_engine: &NewEngine<'_, 'a, E>,
) -> Result<StepsOfSequences, E> {
    steps_within(backbone, context, 0)?;
    let prompt = nonsense(context, backbone.config.vocab_size);
    let fits = |tree: &&GuessTree| sequences * (tree.nodes() + 1) <= MOST_ROWS;
    let timed: Vec<Option<&GuessTree>> = [None].into_iter().chain(trees.iter().filter(fits).map(Some)).collect();
    let mut turns = Turns::default();
    for _ in 0..ROUNDS {
        turns.begin_round();
        for turn in turns_of_round(timed.len() - 1) {
            let tree = timed[turn];
            let drafter = tree.map(|tree| trained.drafter(backbone, tree)).transpose().map_err(LatencyError::from)?;
            let depth = tree.map_or(0, GuessTree::depth);
            let steps = steps_within(backbone, context, depth)?;
            let request = Request { ends_at_eos: false, ..Request::greedy(&prompt, steps * (depth + 1)) };
            let ms = steps_ms(new_engine()?, drafter, &request, [sequences, steps]).map_err(LatencyError::from)?;
            turns.push(turn, ms.iter().sum::<f64>() / ms.len() as f64);
        }
    }
    let (slowdown, plain_step_ms) = (turns.slowdown(), turns.plain_ms());
    let step = |(tree, at): (&&GuessTree, usize)| turns.relative(at).step_time(tree, plain_step_ms);
    let steps = timed.iter().flatten().zip(1..).map(step).collect();
    Ok(StepsOfSequences { sequences, plain_step_ms, steps, slowdown })
}

/// The times of the steps of texts with the same request, without the step that runs the prompts and the slow ones after it: texts begin at
/// different times.
fn steps_ms<'a>(
    engine: Box<dyn Engine + 'a>,
    drafter: Option<Box<dyn Drafter + 'a>>,
    request: &Request,
    [sequences, steps]: [usize; 2],
) -> Result<Vec<f64>, DecodeError> {
    let size = NonZeroUsize::new(sequences).unwrap_or(NonZeroUsize::MIN);
    let drafter = drafter.map(|drafter| (drafter, Acceptance::Greedy));
    let mut batch = SequenceBatch::new(engine, drafter, size).with_prefix_cache(PROMPT_BYTES);
    for key in 0..size.get() {
        batch.enter(key, request)?;
    }
    batch.step()?;
    let mut times = vec![];
    // The request has room for so many steps, of which the first one is done; without guesses, the token after the prompt takes the place of one.
    for _ in 2..steps {
        let began = Instant::now();
        batch.step()?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times.split_off(steps.saturating_sub(MIN_STEPS).min(FIRST_STEPS).min(times.len())))
}
