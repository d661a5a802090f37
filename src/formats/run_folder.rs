//! Names in a run's folder: the files of training, and the usual names for the output of other commands.

use std::path::{Path, PathBuf};

/// The recipe with all defaults written out.
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
/// Hashes of the prompts that were trained on, in the run's folder and beside its finished heads.
pub const PROMPTS: &str = "prompts.hashes";
/// The backbone's answers that evaluations measure tokens per step on.
pub const ANSWERS: &str = "validation_answers.json";
/// Output of `medusa calibrate`.
pub const CALIBRATION: &str = "calibration.json";
/// Output of `medusa tree`.
pub const TREE: &str = "tree.json";
/// Output of `medusa tree --latency`.
pub const LATENCY: &str = "latency.json";
/// Output of `medusa bench --json`.
pub const BENCH: &str = "bench.json";
/// Output of `medusa bench --json` with `--concurrency` or `--endpoint`.
pub const LOAD: &str = "load.json";

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

/// Name of a checkpoint's folder that is damaged, such as `step-000100.damaged`: no longer that of a checkpoint.
pub fn damaged(name: &str) -> String {
    format!("{name}.damaged")
}

/// The step of a checkpoint's folder; `None` for any other name.
pub fn step_of(name: &str) -> Option<usize> {
    name.strip_prefix("step-")?.parse().ok()
}

/// The file that a folder lacks to be a run's; `None` for a run. Training writes both files before its first step; exported heads have
/// a copy of the recipe only.
pub fn missing_for_a_run(folder: &Path) -> Option<&'static str> {
    [RECIPE, PROVENANCE].into_iter().find(|name| !folder.join(name).is_file())
}

/// Whether a folder is a run's, finished or not.
pub fn is_run(folder: &Path) -> bool {
    missing_for_a_run(folder).is_none()
}

/// The run's folder, if `folder` is its `final/`, its `best/` or a checkpoint.
pub fn above(folder: &Path) -> Option<PathBuf> {
    let folder = std::fs::canonicalize(folder).ok()?;
    folder.parent().filter(|run| is_run(run)).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_recipe_alone_makes_no_run() {
        let dir = tempfile::tempdir().unwrap();
        let (run, last) = (dir.path(), dir.path().join(FINAL));
        std::fs::create_dir(&last).unwrap();
        let write = |name: &str| crate::files::write_atomic(&run.join(name), |out| out.write_all(b"")).unwrap();
        assert_eq!(missing_for_a_run(run), Some(RECIPE));
        write(RECIPE);
        assert_eq!((missing_for_a_run(run), is_run(run), above(&last)), (Some(PROVENANCE), false, None));
        write(PROVENANCE);
        assert_eq!((missing_for_a_run(run), is_run(run)), (None, true));
        assert_eq!(above(&last), std::fs::canonicalize(run).ok());
    }
}
