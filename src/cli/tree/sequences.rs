//! `medusa tree --latency --sequences`: times and trees for several texts at a time.

use std::collections::BTreeSet;
use std::path::Path;

use super::super::{CommonFlags, UsageError};
use super::args::TreeArgs;
use crate::draft::trained::TrainedDrafter;
use crate::formats::calibration::Calibration;
use crate::formats::latency::{Latency, StepsOfSequences};
use crate::formats::tree::TreeOfSequences;
use crate::latency::{self, LatencyError, Timed, TreeToTime};
use crate::plural::counted;
use crate::session::Decoder;
use crate::session::engine::{EngineName, EngineOptions};
use crate::tree::guess_tree::GuessTree;

/// Refuses a file without the times that are asked for.
pub(super) fn check(args: &TreeArgs, latency: &Latency, path: &Path) -> anyhow::Result<()> {
    let is_there = |texts: usize| latency.by_sequences.iter().any(|batch| batch.sequences == texts);
    match args.sequences.iter().find(|texts| !is_there(texts.get())) {
        None => Ok(()),
        Some(texts) => Err(UsageError(format!(
            "{} has no times of {} at a time; remove it to measure anew, or give another --latency FILE",
            path.display(),
            counted(texts.get(), "text")
        ))
        .into()),
    }
}

/// Refuses an engine that decodes one text at a time.
pub(super) fn check_engine(args: &TreeArgs) -> Result<(), UsageError> {
    match args.engine {
        EngineName::Cuda if !args.sequences.is_empty() => {
            Err(UsageError("--sequences: engine cuda decodes one text at a time; give --engine tch".into()))
        }
        _ => Ok(()),
    }
}

/// Times steps of each asked number of texts.
pub(super) fn measure(
    args: &TreeArgs,
    (decoder, trained): (&Decoder, &dyn TrainedDrafter),
    candidates: &[TreeToTime],
    context: usize,
    common: &CommonFlags,
) -> anyhow::Result<Vec<StepsOfSequences>> {
    let engine = EngineOptions { engine: args.engine, max_context: None };
    let is_timed = |tree: &&GuessTree| tree.as_static().is_some() && tree.nodes().is_power_of_two();
    let trees: Vec<GuessTree> = candidates.iter().map(|(tree, _)| tree).filter(is_timed).cloned().collect();
    let measure = |texts: usize| {
        common.say(format_args!("timing steps of {} at a time", counted(texts, "text")));
        let new_engine = || anyhow::Ok(engine.for_batches(decoder)?);
        latency::measure_batch((&decoder.backbone, trained), &trees, [context, texts], &new_engine)
    };
    let counts: BTreeSet<usize> = args.sequences.iter().map(|texts| texts.get()).collect();
    counts.into_iter().map(measure).collect()
}

/// The fastest tree for each number of texts; prints them.
pub(super) fn choose(
    latency: &Latency,
    calibration: &Calibration,
    max_nodes: usize,
    common: &CommonFlags,
) -> anyhow::Result<Vec<TreeOfSequences>> {
    latency.by_sequences.iter().map(|batch| choose_one(latency, batch, calibration, max_nodes, common)).collect()
}

fn choose_one(
    latency: &Latency,
    of: &StepsOfSequences,
    calibration: &Calibration,
    max_nodes: usize,
    common: &CommonFlags,
) -> anyhow::Result<TreeOfSequences> {
    let times = Latency { plain_step_ms: of.plain_step_ms, steps: of.steps.clone(), ..latency.clone() };
    let best_tree = |nodes: usize, heads: usize| calibration.cross_validated_tree(nodes, heads);
    let texts = of.sequences as f64;
    let plain = 1e3 * texts / of.plain_step_ms;
    let fastest = match latency::sweep(&times, calibration.heads.len(), max_nodes, &best_tree) {
        Err(LatencyError::NothingTimed) => None,
        sweep => Some(sweep?).map(|mut sweep| sweep.trees.swap_remove(sweep.fastest)),
    };
    let fastest = fastest.filter(|timed: &Timed| timed.tokens_per_second() * texts > plain);
    let slowdown = of.slowdown.unwrap_or_default();
    let plain = plain / slowdown.plain;
    let speed = fastest.as_ref().map_or(plain, |timed| timed.tokens_per_second() * texts / slowdown.trees);
    let chosen = fastest.as_ref().map_or("no guesses".to_owned(), |timed| {
        format!("{} over {}", counted(timed.tree.nodes(), "node"), counted(timed.tree.depth(), "head"))
    });
    common.say(format_args!(
        "{} at a time: {chosen}, {speed:.1} tokens/s against {plain:.1} of plain decoding",
        counted(of.sequences, "text")
    ));
    let tree =
        TreeOfSequences { sequences: of.sequences, expected_tokens_per_second: speed, ..TreeOfSequences::default() };
    Ok(match fastest.map(|timed| timed.tree) {
        Some(GuessTree::Static(found)) => TreeOfSequences { choices: found.choices().to_vec(), ..tree },
        Some(GuessTree::Dynamic(limits)) => TreeOfSequences { dynamic: Some(limits), ..tree },
        None => tree,
    })
}
