//! Times steps by the number of tokens in them, for drafters without weights: what their guesses cost is the rows of the pass.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::turns::undisturbed;
use super::{Times, between, nonsense};
use crate::decode::DecodeLoop;
use crate::decode::error::DecodeError;
use crate::decode::request::Request;
use crate::decode::step::Drafting;
use crate::draft::tree_cache::TreeCache;
use crate::draft::{Drafter, Proposal, TextSoFar};
use crate::formats::latency::StepTime;
use crate::model::llama::Llama;
use crate::tree::token_tree::TokenTree;

/// Guesses of the timed steps, in the order in which they are timed: the most informative ones first, in case the time runs out.
const GUESSES: [usize; 7] = [0, 7, 3, 15, 1, 31, 63];
/// Measured rounds, if there is time.
const ROUNDS: usize = 5;
/// Steps per turn, if they are fast.
const STEPS: usize = 8;
/// Steps per turn of a slow model.
const FEW_STEPS: usize = 2;
/// A model with slower steps is slow.
const SLOW_MS: f64 = 20.0;
/// Time limit of the measurement, without the prompt. A step that has begun is finished; the first two sizes are always timed.
const MOST_TIME: Duration = Duration::from_secs(1);
/// Sizes above one whose step takes this many times as long as a plain step are not timed.
const TOO_SLOW: f64 = 8.0;

/// Tokens of the prompt: a short one, which takes little time.
pub const CONTEXT: usize = 32;

/// Proposes as many wrong guesses as are to be timed.
#[derive(Debug)]
struct Padding<'a> {
    guesses: Rc<Cell<usize>>,
    vocabulary: i64,
    trees: TreeCache<'a>,
}

impl Drafter for Padding<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        let (guesses, vocabulary) = (self.guesses.get() as i64, self.vocabulary);
        let tree = |text: &TextSoFar| {
            let mut tree = TokenTree::new(text.root.id);
            (1..=guesses).for_each(|guess| _ = tree.add(0, (text.root.id + guess) % vocabulary));
            tree
        };
        batch.iter().map(|text| self.trees.proposal(&tree(text))).collect()
    }
}

/// Times steps of one text by their guesses, which all stand on one level, for about a second. `new_loop` makes the loop that will decode.
///
/// # Errors
/// [`DecodeError`], or an error of `new_loop`.
#[expect(clippy::needless_lifetimes, reason = "without a name the loop would have to take drafters of any lifetime")]
pub fn measure_rows<'a, E: From<DecodeError>>(
    backbone: &'a Llama,
    new_loop: impl FnOnce(Box<dyn Drafter + 'a>) -> Result<Box<dyn DecodeLoop + 'a>, E>,
) -> Result<Times, E> {
    let (vocabulary, guesses) = (backbone.config.vocab_size, Rc::new(Cell::new(0)));
    let padding = Padding { guesses: guesses.clone(), vocabulary, trees: TreeCache::new(backbone) };
    let mut decoding = new_loop(Box::new(padding))?;
    let prompt = nonsense(CONTEXT, vocabulary);
    let mut all_ms: [Vec<f64>; GUESSES.len()] = Default::default();
    let mut turn = |at: usize, steps: usize| -> Result<Vec<f64>, DecodeError> {
        guesses.set(GUESSES[at]);
        steps_ms(&mut *decoding, if at == 0 { Drafting::Off } else { Drafting::On }, &prompt, steps)
    };
    let warm = turn(0, FEW_STEPS)?.into_iter().fold(f64::INFINITY, f64::min); // with the prompt
    let steps = if warm > SLOW_MS { FEW_STEPS } else { STEPS };
    let (began, mut most) = (Instant::now(), usize::try_from(vocabulary).unwrap_or(usize::MAX).saturating_sub(1));
    for _ in 0..ROUNDS {
        for at in 0..GUESSES.len() {
            let is_needed = at < 2 && all_ms[at].is_empty();
            if GUESSES[at] <= most && (is_needed || began.elapsed() < MOST_TIME) {
                let ms = turn(at, steps)?;
                all_ms[at].extend(ms);
                if undisturbed(all_ms[at].clone()) > TOO_SLOW * undisturbed(all_ms[0].clone()) {
                    most = most.min(GUESSES[at]);
                }
            }
        }
    }
    let engine = decoding.engine_name();
    let [plain, with_guesses @ ..] = all_ms;
    let step = |(&nodes, ms): (&usize, Vec<f64>)| StepTime {
        nodes,
        depth: 1,
        step_ms: undisturbed(ms),
        ..StepTime::default()
    };
    let timed = GUESSES[1..].iter().zip(with_guesses).filter(|(_, ms)| !ms.is_empty());
    let (plain_step_ms, steps) = (undisturbed(plain), timed.map(step).collect());
    Ok(Times { engine, slowdown: None, plain_step_ms, steps })
}

/// The times of this many steps after the prompt, which the loop computes once.
fn steps_ms(
    decoding: &mut dyn DecodeLoop,
    drafting: Drafting,
    prompt: &[i64],
    steps: usize,
) -> Result<Vec<f64>, DecodeError> {
    // A guess may be right: room for two tokens of each step.
    let request = Request { ends_at_eos: false, ..Request::greedy(prompt, 2 * (steps + 1)) };
    let mut commits = Vec::with_capacity(steps + 1);
    decoding.decode(drafting, &request, &mut |_| {
        commits.push(Instant::now());
        if commits.len() <= steps { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(between(&commits))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::decode::host_loop::HostLoop;
    use crate::engine::tch::TchEngine;
    use crate::model::config::LlamaConfig;
    use crate::tree::accept::Acceptance;

    #[test]
    fn steps_are_timed_up_to_the_vocabulary() {
        let config = LlamaConfig { max_position_embeddings: 64, vocab_size: 20, ..LlamaConfig::tiny() };
        let llama = Llama::random(config, Kind::Float, Device::Cpu, 1);
        let new_loop = |drafter| {
            let engine = Box::new(TchEngine::new(&llama));
            Ok::<_, DecodeError>(Box::new(HostLoop::new(engine, Some((drafter, Acceptance::Greedy)))) as Box<_>)
        };
        let times = measure_rows(&llama, new_loop).unwrap();
        let nodes: Vec<usize> = times.steps.iter().map(|step| step.nodes).collect();
        assert_eq!((times.engine, &nodes[..1]), ("tch", &[7][..]));
        assert!(nodes.iter().all(|&nodes| nodes < 20), "as many different tokens are no guesses: {nodes:?}");
        assert!(times.plain_step_ms > 0.0 && times.steps.iter().all(|step| step.step_ms > 0.0));
    }
}
