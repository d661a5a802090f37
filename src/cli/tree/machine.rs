//! `medusa tree --latency`: reads or measures the step times, and chooses the fastest tree.

use std::cell::Cell;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use tch::Device;

use super::super::progress::Progress;
use super::super::run_heads::check_calibration;
use super::super::served::QuantizationName;
use super::super::{CommonFlags, UsageError};
use super::args::TreeArgs;
use super::sequences;
use crate::cpu::team::Team;
use crate::decode::request::Request;
use crate::dtype::Dtype;
use crate::files::Claim;
use crate::formats::calibration::Calibration;
use crate::formats::latency::{Latency, LatencyConditions, StepTime};
use crate::hub;
use crate::latency::busy_cores::{CoreWatch, busy_cores, cores, disturb};
use crate::latency::{self, MachineLoad, Sweep, Timed, TimedAnswers, Times};
use crate::model::weights::WeightsError;
use crate::plural::counted;
use crate::session::drafter::plan::DrafterPlan;
use crate::session::drafter::{Drafts, ReadyDrafter};
use crate::session::engine::EngineOptions;
use crate::session::opened::{OpenedBackbone, OpenedHeads};
use crate::session::setup::{ModelSetup, SetupOptions, quantization_name};
use crate::torch::device_name;
use crate::tree::accept::Acceptance;

/// Default of --max-nodes: the paper's tree has 63 nodes.
const MAX_NODES: usize = 64;
/// Long enough to see whether other programs use the cores.
const A_MOMENT: Duration = Duration::from_millis(300);
/// Tokens of an answer if the calibration does not know: so many that the first steps hardly count.
const LONG: f64 = 1024.0;
/// Default of --context, limited to half the backbone's context.
const CONTEXT: usize = 256;

/// Reads the times from the file; if it does not exist, measures and saves them first.
pub(super) fn latency(
    args: &TreeArgs,
    path: &Path,
    calibration: &Calibration,
    common: &CommonFlags,
) -> anyhow::Result<Latency> {
    sequences::check_engine(args)?;
    let setup = setup(args, common)?;
    let asked = asked(args, setup.as_ref(), calibration, common)?;
    if path.exists() {
        drop(Claim::of(path)); // removes what a killed process left, where the folder can be written
        let latency = Latency::load(path)?;
        latency.check(&asked, path)?;
        sequences::check(args, &latency, path)?;
        common.say(format_args!("{}: steps of engine {}", path.display(), latency.engine));
        report_caveat(&latency, path, common);
        return Ok(latency);
    }
    let Some(setup) = setup else {
        return Err(UsageError(format!(
            "--latency {} does not exist; give --backbone and --heads to measure it",
            path.display()
        ))
        .into());
    };
    let latency = measure(args, setup, calibration, common)?;
    latency.save(path)?;
    common.say(format_args!("wrote {}: steps of engine {}", path.display(), latency.engine));
    report_caveat(&latency, path, common);
    Ok(latency)
}

fn report_caveat(latency: &Latency, path: &Path, common: &CommonFlags) {
    if let Some(caveat) = latency.caveat() {
        common.say(format_args!("warning: {}: {caveat}", path.display()));
    }
}

/// The weights to time, where the command line names backbone and heads.
fn setup(args: &TreeArgs, common: &CommonFlags) -> anyhow::Result<Option<ModelSetup>> {
    let (Some(backbone), Some(heads)) = (&args.backbone, &args.heads) else { return Ok(None) };
    let options = SetupOptions { quantization: args.quantization.map(QuantizationName::quantization), template: None };
    let backbone = OpenedBackbone::open(backbone)?;
    Ok(Some(options.resolve(backbone, Some(OpenedHeads::open(heads)?), common)?))
}

/// The conditions that a file must match: those of the command line, and the calibration's heads.
fn asked(
    args: &TreeArgs,
    setup: Option<&ModelSetup>,
    calibration: &Calibration,
    common: &CommonFlags,
) -> anyhow::Result<LatencyConditions> {
    if let Some(heads) = setup.and_then(|setup| setup.heads.as_deref()) {
        check_calibration(calibration, &args.calibration, heads)?;
    }
    let backbone = setup.map(|setup| &setup.backbone);
    Ok(LatencyConditions {
        device: Some(device_name(common.device.resolve()?)),
        engine: Some(args.engine.flag().to_owned()),
        dtype: common.dtype,
        quantization: match (setup, args.quantization) {
            (Some(setup), _) => Some(quantization_name(setup.quantization)),
            (None, typed) => typed.map(|typed| quantization_name(typed.quantization())),
        },
        threads: Some(Team::shared().size()),
        context: args.context.map(Into::into),
        backbone: backbone.map(|backbone| hub::name_of(&backbone.folder)),
        backbone_sha256: backbone.map(sha256).transpose()?,
        heads_sha256: Some(calibration.heads_sha256.clone()),
    })
}

fn sha256(backbone: &OpenedBackbone) -> Result<String, WeightsError> {
    latency::backbone_sha256(&backbone.folder, &backbone.config)
}

/// Looks whether other programs use the cores, and says so.
fn machine_now(common: &CommonFlags) -> MachineLoad {
    let Some(busy) = busy_cores(A_MOMENT).filter(disturbs_threads) else { return MachineLoad::Quiet };
    common.say(format_args!("other programs use {busy:.1} cores: timing three times as many steps"));
    MachineLoad::Busy
}

fn disturbs_threads(busy: &f64) -> bool {
    disturb(*busy, Team::shared().size(), cores())
}

/// Times trees built from the calibration, with the engine that will decode.
fn measure(
    args: &TreeArgs,
    setup: ModelSetup,
    calibration: &Calibration,
    common: &CommonFlags,
) -> anyhow::Result<Latency> {
    let num_heads = calibration.heads.len();
    let max_nodes = args.max_nodes.map_or(MAX_NODES, Into::into);
    let best_tree = |nodes: usize, heads: usize| calibration.best_tree(nodes, heads);
    let mut candidates = latency::trees_to_time(num_heads, max_nodes, &best_tree)?;
    let silent = common.context().silent(); // no notice about a missing --tree
    let engine = EngineOptions { engine: args.engine, max_context: None };
    let plans = setup.heads.clone().map(DrafterPlan::for_heads).transpose()?.into_iter().collect();
    let (backbone, backbone_sha256) = (hub::name_of(&setup.backbone.folder), sha256(&setup.backbone)?);
    let decoder = engine.load(setup, plans, silent)?;
    let heads = decoder.drafter().and_then(|drafter| drafter.heads.as_ref());
    let (heads, _) = heads.ok_or_else(|| UsageError("--latency needs --heads".into()))?;
    if decoder.backbone.device() == Device::Cpu {
        let dynamic_of = |nodes: usize, depth: usize| calibration.dynamic_tree(nodes, depth);
        candidates.extend(latency::dynamic_to_time(num_heads, max_nodes, &dynamic_of));
    }
    let half = usize::try_from(decoder.backbone.config.max_position_embeddings)? / 2;
    let context = args.context.map_or(half.min(CONTEXT), Into::into);
    let on_cpu = decoder.backbone.device() == Device::Cpu;
    let machine = if on_cpu { machine_now(common) } else { MachineLoad::Quiet };
    let watch = CoreWatch::start().filter(|_| on_cpu);
    let (turns, all) = (Cell::new(0), latency::turns(candidates.len(), machine) as u64);
    let text = |done: u64| format!("timing {}: {} %", counted(candidates.len(), "tree"), 100 * done / all);
    let progress = Progress::new(all, 0, text(0), common);
    let request = Request::greedy(&[], 1);
    let acceptance = Acceptance::Greedy;
    let times = latency::measure(
        &decoder.backbone,
        &candidates,
        TimedAnswers { context, tokens: calibration.tokens_per_text().unwrap_or(LONG), machine },
        &|tree| {
            let drafter = tree.map(|tree| ReadyDrafter::trained(&decoder.backbone, &**heads, tree)).transpose()?;
            let drafts = drafter.map(|drafter| Drafts { drafter, acceptance });
            anyhow::Ok(engine.take(&decoder, drafts, &request, silent)?)
        },
        &mut || {
            turns.set(turns.get() + 1);
            progress.set(turns.get(), text(turns.get()));
        },
    )?;
    drop(progress);
    let by_sequences = sequences::measure(args, (&decoder, &**heads), &candidates, context, common)?;
    let Times { engine, slowdown, plain_step_ms, steps } = times;
    Ok(Latency {
        device: device_name(decoder.backbone.device()),
        engine: engine.to_owned(),
        engine_flag: args.engine.flag().to_owned(),
        dtype: Dtype::of(decoder.backbone.kind()),
        quantization: decoder.backbone.quantization().map(|quantization| quantization.to_string()),
        threads: Team::shared().size(),
        context,
        backbone,
        backbone_sha256: Some(backbone_sha256),
        heads_sha256: Some(calibration.heads_sha256.clone()),
        busy_cores: watch.and_then(|watch| watch.others()).filter(disturbs_threads),
        slowdown,
        plain_step_ms,
        steps,
        by_sequences,
    })
}

/// The fastest tree with its tokens per step and per second; prints all sizes compared.
pub(super) fn choose(
    args: &TreeArgs,
    latency: &Latency,
    calibration: &Calibration,
    common: &CommonFlags,
) -> anyhow::Result<Timed> {
    let max_nodes = args.max_nodes.map_or(usize::MAX, Into::into);
    let mut sweep = latency::sweep(latency, calibration.heads.len(), max_nodes, &|nodes, heads| {
        calibration.cross_validated_tree(nodes, heads)
    })?;
    let dynamic_of = |nodes: usize, depth: usize| calibration.dynamic_tree(nodes, depth);
    let fastest_static = sweep.trees[sweep.fastest].clone();
    sweep.trees.extend(latency::dynamic_sweep(latency, calibration.heads.len(), max_nodes, &dynamic_of));
    let faster = |at: usize, than: usize| sweep.trees[at].tokens_per_second() > sweep.trees[than].tokens_per_second();
    sweep.fastest = (0..sweep.trees.len()).fold(sweep.fastest, |best, at| if faster(at, best) { at } else { best });
    common.say(table(&sweep, latency));
    let chosen = sweep.trees.swap_remove(sweep.fastest);
    if chosen.tree.as_static().is_none() {
        let gain = chosen.tokens_per_second() / fastest_static.tokens_per_second();
        common.say(format_args!(
            "trees chosen at each step are expected to be {gain:.2} times as fast as the best static tree"
        ));
    }
    let (tokens_per_second, plain) = (chosen.tokens_per_second(), 1e3 / latency.plain_step_ms);
    common.say(in_words(&chosen, latency));
    if tokens_per_second <= plain {
        common.say(format_args!(
            "plain decoding is expected to be faster than any tree: {plain:.1} tokens/s against {tokens_per_second:.1}"
        ));
    }
    Ok(chosen)
}

/// What to expect of the chosen tree: tokens/s by mean step times, as `bench` reports them, and the speedup with its range.
fn in_words(chosen: &Timed, latency: &Latency) -> String {
    let per_second = chosen.tokens_per_second();
    let [low, high] = chosen.range_per_second();
    let plain = 1e3 / latency.plain_step_ms;
    let [low, speedup, high] = [low, per_second, high].map(|per_second| per_second / plain);
    let as_busy = per_second / latency.slowdown.unwrap_or_default().trees;
    format!("expected: {as_busy:.0} tokens/s, {speedup:.2} times plain decoding ({low:.2} to {high:.2})")
}

/// One line per size, with the fastest marked.
fn table(sweep: &Sweep, latency: &Latency) -> String {
    let (plain_ms, plain) = (latency.plain_step_ms, 1e3 / latency.plain_step_ms);
    let mut text = String::from("nodes   depth   tokens/step   step ms   tokens/s   speedup   tree\n");
    let _ = write!(text, "plain {:>7} {:>13.3} {plain_ms:>9.3} {plain:>10.1} {:>9.2}", "-", 1.0, 1.0); // writing to a String cannot fail
    for (at, timed) in sweep.trees.iter().enumerate() {
        let Timed { tree, tokens_per_step, step: StepTime { step_ms, .. }, .. } = timed;
        let _ = write!(
            text,
            "\n{:>5} {:>7} {tokens_per_step:>13.3} {step_ms:>9.3} {:>10.1} {:>9.2}   {}{}",
            tree.nodes(),
            tree.depth(),
            timed.tokens_per_second(),
            timed.tokens_per_second() / plain,
            if tree.as_static().is_some() { "static" } else { "dynamic" },
            if at == sweep.fastest { "  <- fastest" } else { "" },
        ); // as above
    }
    text
}
