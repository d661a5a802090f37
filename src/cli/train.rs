//! `medusa train RECIPE.toml` and `medusa-train`: train heads from a recipe.

use std::env;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tch::{Device, Kind};

use super::downloads::{observed, report_beside};
use super::reading::watched;
use super::signals::set_last_words;
use super::{CommonFlags, Interrupted, UsageError, interrupted_to_save, print_json, print_line, print_text};
use crate::draft::eagle::file::EagleFile;
use crate::draft::heads::import::HeadsFile;
use crate::draft::heads::import::notices::Notice;
use crate::formats::best::BestEvaluation;
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::formats::run_folder::BEST;
use crate::fused;
use crate::model::device_map::DeviceMap;
use crate::plural::counted;
use crate::recipe::{LoadedRecipe, WrittenRecipe};
use crate::session::opened::OpenedBackbone;
use crate::torch::DeviceChoice;
use crate::torch::collective::OneProcess;
use crate::torch::process_group::ProcessGroup;
use crate::torch::process_group::rendezvous::Rendezvous;
use crate::torch::shared_gpus::SharedGpus;
use crate::train::checked::CheckedRun;
use crate::train::patience::BestSoFar;
use crate::train::plan::TrainPlan;
use crate::train::ranks::Ranks;
use crate::train::run::TrainRun;
use crate::train::run_folder::check_output_dir;
use crate::train::same_run;
use crate::train::training_loop::RunOutcome;

mod nproc;
mod preview;
pub(super) mod progress;

use preview::RunPreview;
use progress::TrainProgress;

const EXAMPLE: &str = "Example:\n  medusa train first.toml --check\n  medusa-train first.toml";

/// Train heads from a recipe.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub struct TrainArgs {
    /// Recipe file. Its paths are relative to the working directory, or Hugging Face Hub ids.
    #[arg(value_name = "RECIPE.toml")]
    pub recipe: PathBuf,
    /// Validate recipe, data and backbone; print the plan, and the defaults of keys that the recipe leaves out; train
    /// nothing.
    #[arg(long)]
    pub check: bool,
    /// Continue from the newest checkpoint in train.output_dir. The recipe may ask for more epochs or max_steps than before.
    #[arg(long)]
    pub resume: bool,
    /// Skip and count malformed rows (broken JSON, wrong types, no known key) instead of stopping at the first. --resume must repeat
    /// this flag.
    #[arg(long)]
    pub skip_bad_rows: bool,
    /// Train with N processes on this machine, which share its GPUs or its cores; with --check, plan for N. Several machines: torchrun or srun
    /// starts the processes.
    #[arg(long, value_name = "N")]
    pub nproc: Option<NonZeroUsize>,
    /// Give up on another process that takes no part in an exchange for so long; saving a checkpoint must be faster.
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_TIMEOUT)]
    pub process_timeout: NonZeroU64,
}

/// That of NCCL in PyTorch.
const DEFAULT_TIMEOUT: NonZeroU64 = NonZeroU64::new(600).expect("a constant above 0");

/// Trains, or with `--check` prints the plan.
///
/// # Errors
/// An error in the recipe, the backbone or the data, a failed run, or [`Interrupted`] with a summary of what was saved.
pub fn run(args: &TrainArgs, common: &CommonFlags) -> anyhow::Result<()> {
    refuse_what_the_recipe_says(common)?;
    let place = Rendezvous::from(&|name| env::var(name).ok()).map_err(|error| UsageError(error.to_string()))?;
    let timeout = Duration::from_secs(args.process_timeout.get());
    let Some(place) = place else {
        let written = read_recipe(args, true)?;
        return match args.nproc.filter(|count| count.get() > 1 && !args.check) {
            Some(count) => nproc::run(count, timeout, common),
            None => {
                let device = common.device.resolve()?;
                let (processes, here) = (args.nproc.map_or(1, NonZeroUsize::get), SharedGpus::alone(device));
                more_than_here(processes, here.gpus).inspect(|warning| common.say(warning));
                let place = RunPlace { ranks: Ranks::new(&OneProcess, device), gpus: planned_gpus(processes, here) };
                run_rank(args, common, &written, &place)
            }
        };
    };
    if args.nproc.is_some() {
        return Err(UsageError(STARTED_BEFORE.into()).into());
    }
    nproc::end_with_starter()?;
    let group = ProcessGroup::join(&place, timeout)?; // first: the others hear of whatever is wrong from here on
    let shared = SharedGpus::for_rank(&group, common.device);
    let ranks = Ranks::new(&group, Device::Cpu);
    let read = || {
        let gpus = shared?; // an error of this process ends the others, too
        let written = read_recipe(args, ranks.is_first())?;
        let device = device_of_process(common.device, gpus, written.device_map())?;
        anyhow::Ok((written, gpus, device))
    };
    let (written, gpus, device) = ranks.agree(read()).map_err(|error| OfRank::wrap(ranks, error))?;
    run_rank(args, common, &written, &RunPlace { ranks: Ranks::new(&group, device), gpus })
}

const STARTED_BEFORE: &str = "--nproc starts processes by itself, but RANK and WORLD_SIZE, or those of srun, say that this is one of several: \
    leave out --nproc, or the variables";

/// Before any download. Rank 0 also checks the run's folder.
fn read_recipe(args: &TrainArgs, is_first: bool) -> anyhow::Result<WrittenRecipe> {
    let read = if args.resume { WrittenRecipe::read_to_resume } else { WrittenRecipe::read };
    let written = read(&args.recipe)?;
    if is_first && !args.check {
        check_output_dir(written.output_dir(), args.resume)?;
    }
    Ok(written)
}

/// A process among those of its run, and of its machine.
struct RunPlace<'c> {
    ranks: Ranks<'c>,
    gpus: SharedGpus,
}

/// The first of the GPUs that this process has for itself, or the CPU.
fn device_of_process(choice: DeviceChoice, gpus: SharedGpus, map: Option<&DeviceMap>) -> anyhow::Result<Device> {
    let stages = map.map_or(1, |map| map.stages(Some(gpus.gpus / gpus.processes)));
    Ok(choice.for_process(gpus, stages)?.resolve()?)
}

/// The GPUs of a process that is alone, or with `--check --nproc` of one of those that it plans for, if there are enough.
fn planned_gpus(processes: usize, alone: SharedGpus) -> SharedGpus {
    if processes <= alone.gpus { SharedGpus { processes, ..alone } } else { alone }
}

/// That `--check` plans for processes which cannot run here; a machine without GPUs plans for others, or for its cores.
fn more_than_here(processes: usize, gpus: usize) -> Option<String> {
    let here = counted(gpus, "GPU");
    let warning = || {
        format!(
            "this machine has {here}: the plan for {processes} processes is for another one, with a GPU for each; here --nproc may be {gpus} at most"
        )
    };
    (gpus > 0 && processes > gpus).then(warning)
}

/// Trains as one of the processes of a run. Only rank 0 prints; an error of one ends all.
fn run_rank(args: &TrainArgs, common: &CommonFlags, written: &WrittenRecipe, place: &RunPlace) -> anyhow::Result<()> {
    let ranks = place.ranks;
    let quiet = CommonFlags { quiet: true, json: false, ..common.clone() };
    let common = if ranks.is_first() { common } else { &quiet };
    train(args, common, written, place).map_err(|error| OfRank::wrap(ranks, error))
}

/// An error of one of several processes.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank}: {error}")]
struct OfRank {
    rank: usize,
    #[source]
    error: anyhow::Error,
}

impl OfRank {
    fn wrap(ranks: Ranks, error: anyhow::Error) -> anyhow::Error {
        let is_unchanged = ranks.is_alone() || error.is::<Interrupted>();
        if is_unchanged { error } else { Self { rank: ranks.rank(), error }.into() }
    }
}

fn train(args: &TrainArgs, common: &CommonFlags, written: &WrittenRecipe, place: &RunPlace) -> anyhow::Result<()> {
    let &RunPlace { ranks, gpus } = place;
    set_last_words(match args.check {
        _ if common.quiet || !ranks.is_first() => "",
        true => "interrupted",
        false => "interrupted before the first step",
    });
    let (loaded, checked) = ranks.first_of_machine_first(|| {
        let loaded = observed(common, |watch| written.clone().fetch(ranks.device(), gpus, watch))?;
        let loaded = if args.check { loaded } else { observed(common, |watch| loaded.with_weights(watch))? };
        let checked = load(&loaded, place, args, common)?;
        anyhow::Ok((loaded, checked))
    })?;
    let preview = ranks.is_first().then(|| RunPreview::of(&checked, &loaded.recipe, args.resume));
    let preview = ranks.agree(preview.transpose().map_err(anyhow::Error::from))?;
    if let Some(preview) = preview {
        if args.check {
            return print_check(&loaded, preview, common);
        }
        common.say(preview.finished().unwrap_or_else(|| preview.text()));
    } else if args.check {
        return Ok(());
    }
    let kinds = [Kind::Float, checked.plan.backbone.dtype.kind()];
    if let Some(why) = kinds.into_iter().find_map(|kind| fused::unavailable(ranks.device(), kind)) {
        common.say(format_args!("libtorch's operations train here, and they are slower than our kernels: {why}"));
    }
    let mut progress = TrainProgress::new(common, checked.total_steps);
    let run = ranks.agree_after_long_work(TrainRun::load(checked))?;
    let outcome = run.train(ranks, args.resume, interrupted_to_save(), &mut |event| progress.report(&event));
    drop(progress);
    let outcome = outcome?;
    if ranks.is_first() { report(outcome, args, common) } else { report_of_other(&outcome, ranks) }
}

fn print_check(loaded: &LoadedRecipe, preview: RunPreview, common: &CommonFlags) -> anyhow::Result<()> {
    let recipe = json!({"recipe": loaded.recipe, "defaults": loaded.default_keys()});
    match common.json {
        true => print_json(&CheckedPlan { recipe, preview }),
        false => print_text(format_args!("{}\n\n{}", preview.text(), loaded.defaults_by_table())),
    }
}

/// Of a process that is not rank 0, which reports the rest.
fn report_of_other(outcome: &RunOutcome, ranks: Ranks) -> anyhow::Result<()> {
    match outcome {
        RunOutcome::Interrupted(_) | RunOutcome::InterruptedBefore => {
            Err(Interrupted(format!("rank {}: interrupted", ranks.rank())).into())
        }
        _ => Ok(()),
    }
}

/// What `--check --json` prints.
#[derive(Debug, Serialize)]
struct CheckedPlan {
    #[serde(flatten)]
    recipe: Value,
    #[serde(flatten)]
    preview: RunPreview,
}

/// Reads and checks everything before the backbone's weights are loaded.
fn load(loaded: &LoadedRecipe, place: &RunPlace, args: &TrainArgs, common: &CommonFlags) -> anyhow::Result<CheckedRun> {
    let &RunPlace { ranks, gpus } = place;
    let plan = TrainPlan {
        skip_bad_rows: args.skip_bad_rows,
        world_size: planned_processes(args, ranks),
        gpus,
        ..loaded.plan(ranks.device())
    };
    same_run::check_micro_batches(&plan.train, plan.world_size)?;
    let heads = plan.drafter.init_from().map(Path::to_owned);
    let checked = watched(common, |watch| CheckedRun::load(plan, watch))?;
    let backbone = Path::new(&checked.plan.backbone.path);
    report_beside(backbone, common);
    OpenedBackbone::open(backbone)?.report_keys_without_effect(common)?;
    if let Some(heads) = heads {
        let quantization = checked.plan.backbone.quantization;
        let notices = match EagleFile::is_in(&heads) {
            true => Notice::quantized(EagleFile::open(&heads)?.written_config()).into_iter().collect(),
            false => HeadsFile::open(&heads)?.notices()?,
        };
        let is_same = |notice: &Notice| matches!((notice, quantization), (Notice::Quantized { quantization, .. }, Some(ours)) if *quantization == ours.to_string());
        notices.iter().filter(|notice| !is_same(notice)).for_each(|notice| common.say(notice));
    }
    Ok(checked)
}

/// Those of the run, or with `--check` those that it is planned for.
fn planned_processes(args: &TrainArgs, ranks: Ranks) -> usize {
    args.nproc.filter(|_| ranks.is_alone()).map_or(ranks.world_size(), NonZeroUsize::get)
}

/// Rejects flags that would override the recipe.
fn refuse_what_the_recipe_says(common: &CommonFlags) -> Result<(), UsageError> {
    let refuse = |flag, key| Err(UsageError(format!("{flag} does not apply to training: set {key} in the recipe")));
    match common {
        CommonFlags { dtype: Some(_), .. } => refuse("--dtype", "backbone.dtype"),
        CommonFlags { seed_was_given: true, .. } => refuse("--seed", "train.seed"),
        _ => Ok(()),
    }
}

fn report(outcome: RunOutcome, args: &TrainArgs, common: &CommonFlags) -> anyhow::Result<()> {
    let heads = match outcome {
        RunOutcome::Interrupted(checkpoint) => {
            let (checkpoint, recipe) = (checkpoint.display(), args.recipe.display());
            let skip = if args.skip_bad_rows { " --skip-bad-rows" } else { "" };
            let text = format!("interrupted; saved {checkpoint}; continue with: medusa-train {recipe} --resume{skip}");
            return Err(Interrupted(text).into());
        }
        RunOutcome::InterruptedBefore => {
            let text = "interrupted before the first step: nothing was trained; continue with --resume";
            return Err(Interrupted(text.into()).into());
        }
        RunOutcome::FinishedBefore(heads) | RunOutcome::Finished(heads) => heads,
        RunOutcome::StoppedEarly { heads, step, so_far: BestSoFar { best, evaluations_since } } => {
            let evaluations = counted(evaluations_since, "evaluation");
            common.say(format_args!("stopped early after step {step}: no better {} in {evaluations}", best.by));
            heads
        }
    };
    let best = heads.parent().and_then(|run| Some((PublishedHeadsConfig::best_of_run(run)?, run.join(BEST))));
    if let Some((evaluation, folder)) = &best {
        common.say(format_args!("the best heads are in {}: {evaluation}", folder.display()));
    }
    if let Some(run) = heads.parent() {
        common.say(format_args!("for an HTML report: medusa report {}", run.display()));
    }
    if common.json { print_json(&summary(&heads, best)) } else { print_line(heads.display()) }
}

fn summary(heads: &Path, best: Option<(BestEvaluation, PathBuf)>) -> Value {
    let mut summary = json!({ "final": heads });
    if let Some((evaluation, folder)) = best {
        summary["best"] =
            json!({"heads": folder, "step": evaluation.step, evaluation.by.to_string(): evaluation.value});
    }
    summary
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_for_more_processes_than_gpus_is_for_another_machine() {
        let warning = more_than_here(9, 8).expect("a warning");
        assert!(
            warning.starts_with("this machine has 8 GPUs: the plan for 9 processes is for another one"),
            "{warning}"
        );
        assert!(more_than_here(2, 1).expect("a warning").starts_with("this machine has 1 GPU:"));
        assert_eq!(
            [(8, 8), (1, 1), (64, 0)].map(|(processes, gpus)| more_than_here(processes, gpus)),
            [None, None, None]
        );
    }
}
