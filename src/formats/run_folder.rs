//! Names in a run's folder: the files of training, and the usual names for the output of other commands.

use std::path::{Path, PathBuf};

/// The recipe with all defaults written out; marks a folder as a run's.
pub const RECIPE: &str = "recipe.toml";
/// The origin of the run's results.
pub const PROVENANCE: &str = "provenance.json";
/// One line per logged step and per evaluation.
pub const METRICS: &str = "metrics.jsonl";
/// The same curves as TensorBoard events.
pub const TENSORBOARD: &str = "tensorboard";
/// The folder of finished heads.
pub const FINAL: &str = "final";
/// Starts the name of the folder of the heads of an earlier end, see [`finished_at`].
const FINAL_OF: &str = "final-";
/// The folder of the heads with the best evaluation (`train.keep_best`).
pub const BEST: &str = "best";
/// In `final/`: a fully trained backbone, as a Hugging Face folder.
pub const BACKBONE: &str = "backbone";
/// Output of `medusa calibrate`.
pub const CALIBRATION: &str = "calibration.json";
/// Output of `medusa tree`.
pub const TREE: &str = "tree.json";
/// Output of `medusa tree --latency`.
pub const LATENCY: &str = "latency.json";
/// Output of `medusa bench --json`.
pub const BENCH: &str = "bench.json";

/// Name of the checkpoint folder of a step, such as `step-000100`.
pub fn step_folder(step: usize) -> String {
    format!("step-{step:06}")
}

/// Name of the folder with the finished heads of a run that goes on after this step, such as `final-000100`. There until the run has
/// finished again.
pub fn finished_at(step: usize) -> String {
    format!("{FINAL_OF}{step:06}")
}

/// Whether a name is one of [`finished_at`].
pub fn is_finished_at(name: &str) -> bool {
    name.strip_prefix(FINAL_OF).is_some_and(|step| step.parse::<usize>().is_ok())
}

/// The step of a checkpoint's folder; `None` for any other name.
pub fn step_of(name: &str) -> Option<usize> {
    name.strip_prefix("step-")?.parse().ok()
}

/// The run's folder, if `folder` is its `final/`, its `best/` or a checkpoint. Both names are required, since exported heads have a
/// copy of recipe.toml in their folder.
pub fn above(folder: &Path) -> Option<PathBuf> {
    let folder = std::fs::canonicalize(folder).ok()?;
    let run = folder.parent()?;
    [RECIPE, PROVENANCE].iter().all(|name| run.join(name).is_file()).then(|| run.to_owned())
}
