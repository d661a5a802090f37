//! What results say about a drafter.

use crate::formats::metrics::{MetricsFile, MetricsLine, TrainingCost};
use crate::formats::run_folder::{self, METRICS};
use crate::formats::trained_prompts::MeasuredPrompts;
use crate::session::drafter::plan::DrafterPlan;

/// What the results say about a drafter, whatever its setting.
#[derive(Debug, Clone, Default)]
pub struct DrafterFacts {
    /// As `--drafter` spells it, without paths.
    pub name: String,
    pub weights: Vec<String>,
    /// Known when it is loaded.
    pub parameters: u64,
    pub training: Option<TrainingCost>,
    /// Known when the prompts are.
    pub prompts: Option<MeasuredPrompts>,
}

impl DrafterFacts {
    /// The facts of a drafter before it is loaded; the cost of its training is in the metrics of its run.
    pub fn of(plan: &DrafterPlan) -> Self {
        let heads = plan.heads.as_deref();
        let run = heads.and_then(|heads| run_folder::above(heads.folder()));
        let lines = run.map(|run| MetricsFile::read_what_is_whole(&run.join(METRICS)).lines).unwrap_or_default();
        let own = plan.spec.parts().iter().filter_map(|part| part.path.as_deref());
        let heads = heads.map(|heads| heads.path.as_path());
        let weights = heads.into_iter().chain(own.filter(|path| heads != Some(path)));
        Self {
            name: plan.spec.name(),
            weights: weights.map(|path| path.display().to_string()).collect(),
            parameters: 0,
            prompts: None,
            training: MetricsLine::training_cost(lines.iter().map(|(_, line)| line)),
        }
    }
}
