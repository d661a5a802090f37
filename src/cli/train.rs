//! `medusa train RECIPE.toml` and `medusa-train`: train heads from a recipe.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tch::{Device, Kind};

use super::downloads::told;
use super::reading::watched;
use super::{CommonFlags, Interrupted, UsageError, interrupted, print_json, print_line, print_text};
use crate::draft::medusa::heads::import::HeadsFile;
use crate::draft::medusa::heads::import::notices::Notice;
use crate::formats::best::BestEvaluation;
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::formats::run_folder::BEST;
use crate::fused;
use crate::plural::counted;
use crate::recipe::{LoadedRecipe, WrittenRecipe};
use crate::train::checked::CheckedRun;
use crate::train::patience::BestSoFar;
use crate::train::plan::TrainPlan;
use crate::train::run::TrainRun;
use crate::train::run_folder::check_output_dir;
use crate::train::training_loop::RunOutcome;

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
}

/// Trains, or with `--check` prints the plan.
///
/// # Errors
/// An error in the recipe, the backbone or the data, a failed run, or [`Interrupted`] with a summary of what was saved.
pub fn run(args: &TrainArgs, common: &CommonFlags) -> anyhow::Result<()> {
    refuse_what_the_recipe_says(common)?;
    let read = if args.resume { WrittenRecipe::read_to_resume } else { WrittenRecipe::read };
    let written = read(&args.recipe)?;
    if !args.check {
        check_output_dir(written.output_dir(), args.resume)?; // before any download
    }
    let device = common.device.resolve()?;
    let loaded = told(common, |tell| written.fetch(device, tell))?;
    let loaded = if args.check { loaded } else { told(common, |tell| loaded.with_weights(tell))? };
    let checked = load(&loaded, device, args, common)?;
    let preview = RunPreview::of(&checked, &loaded.recipe, args.resume)?;
    if args.check {
        let recipe = json!({"recipe": loaded.recipe, "defaults": loaded.default_keys()});
        return match common.json {
            true => print_json(&CheckedPlan { recipe, preview }),
            false => print_text(format_args!("{}\n\n{}", preview.text(), loaded.defaults_by_table())),
        };
    }
    common.say(preview.finished().unwrap_or_else(|| preview.text()));
    let kinds = [Kind::Float, checked.plan.backbone.dtype.kind()];
    if let Some(why) = kinds.into_iter().find_map(|kind| fused::unavailable(device, kind)) {
        common.say(format_args!("libtorch's operations train here, and they are slower than our kernels: {why}"));
    }
    let mut progress = TrainProgress::new(common, checked.total_steps);
    let outcome = TrainRun::load(checked)?.train(args.resume, interrupted(), &mut |event| progress.tell(&event));
    drop(progress);
    report(outcome?, args, common)
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
fn load(loaded: &LoadedRecipe, device: Device, args: &TrainArgs, common: &CommonFlags) -> anyhow::Result<CheckedRun> {
    let plan = TrainPlan { skip_bad_rows: args.skip_bad_rows, ..loaded.plan(device) };
    let heads = plan.heads.init_from.clone();
    let checked = watched(common, |watch| CheckedRun::load(plan, watch))?;
    if let Some(heads) = heads {
        let (notices, quantization) = (HeadsFile::open(&heads)?.notices()?, checked.plan.backbone.quantization);
        let is_same = |notice: &Notice| matches!((notice, quantization), (Notice::Quantized { quantization, .. }, Some(ours)) if *quantization == ours.to_string());
        notices.iter().filter(|notice| !is_same(notice)).for_each(|notice| common.say(notice));
    }
    Ok(checked)
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
