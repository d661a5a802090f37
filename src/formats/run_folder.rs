//! Names in a run's folder: what training writes there, and what the other commands lay beside it.

use std::path::{Path, PathBuf};

/// The recipe with every default written out: a folder that has it is a run's.
pub const RECIPE: &str = "recipe.toml";
/// Where the run's numbers come from.
pub const PROVENANCE: &str = "provenance.json";
/// A line a logged step and a line an evaluation.
pub const METRICS: &str = "metrics.jsonl";
/// The same curves as events.
pub const TENSORBOARD: &str = "tensorboard";
/// The folder of finished heads.
pub const FINAL: &str = "final";
/// In `final/`: a backbone that was trained as a whole, as a Hugging Face folder.
pub const BACKBONE: &str = "backbone";
/// What `medusa calibrate` writes.
pub const CALIBRATION: &str = "calibration.json";
/// What `medusa tree` writes.
pub const TREE: &str = "tree.json";
/// What `medusa tree --latency` writes.
pub const LATENCY: &str = "latency.json";
/// What `medusa bench --json` prints.
pub const BENCH: &str = "bench.json";

/// The folder of a checkpoint.
pub fn step_folder(step: usize) -> String {
    format!("step-{step:06}")
}

/// The step of a checkpoint's folder; `None` for any other name.
pub fn step_of(name: &str) -> Option<usize> {
    name.strip_prefix("step-")?.parse().ok()
}

/// The run's folder, if `folder` is its `final/` or a checkpoint. Both names are asked for: a recipe.toml beside exported heads is any
/// run's.
pub fn above(folder: &Path) -> Option<PathBuf> {
    let folder = std::fs::canonicalize(folder).ok()?;
    let run = folder.parent()?;
    [RECIPE, PROVENANCE].iter().all(|name| run.join(name).is_file()).then(|| run.to_owned())
}
