//! The rows that a run held out from training: what `medusa calibrate` measures on without `--data` and `--prompts`.

use std::path::Path;

use super::downloads::observed;
use super::reading::watched;
use super::{CommonFlags, UsageError};
use crate::data::store::RowStore;
use crate::formats::provenance::Provenance;
use crate::formats::run_folder::{PROVENANCE, RECIPE, is_run};
use crate::plural::counted;
use crate::recipe::WrittenRecipe;
use crate::torch::shared_gpus::SharedGpus;
use crate::train::checked::CheckedRun;
use crate::train::plan::TrainPlan;

/// The rows that the run of these heads evaluated on, and what to say of them.
///
/// # Errors
/// Heads outside of a run's folder, a run that held out no rows, or data that changed since.
pub(super) fn rows(heads: &Path, common: &CommonFlags) -> anyhow::Result<(RowStore, String)> {
    let give = |why: String| UsageError(format!("{why}; give held-out rows by --data, or prompts by --prompts"));
    let run = heads.parent().filter(|run| is_run(run));
    let run = run.ok_or_else(|| give(format!("{} is not in a run's folder", heads.display())))?;
    let provenance = Provenance::load(&run.join(PROVENANCE))?;
    let device = common.device.resolve()?;
    let written = match &provenance.recipe {
        Some(text) => WrittenRecipe::parse(&run.join(RECIPE), text.clone())?,
        None => WrittenRecipe::read(&run.join(RECIPE))?, // of 0.1.0
    };
    let loaded = observed(common, |watch| written.fetch(device, SharedGpus::alone(device), watch))?;
    let plan = TrainPlan { skip_bad_rows: provenance.skip_bad_rows, ..loaded.plan(device) };
    let checked = watched(common, |watch| CheckedRun::load(plan, watch))?;
    let run = run.display();
    provenance.check_rows(checked.reports()).map_err(|other| give(format!("the data of {run} changed: {other}")))?;
    if provenance.other_split(checked.split_by_prompt).is_some() {
        return Err(
            give(format!("{run} held out rows one by one, although others that it trained on ask the same")).into()
        );
    }
    let rows = checked.held_out().ok_or_else(|| give(format!("{run} held out no rows")))?;
    Ok((rows.clone(), format!("{run} held {} out from training", counted(rows.len(), "row"))))
}
