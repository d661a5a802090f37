//! Recipes: one TOML file describes one run. The only module that reads TOML and sees every config.
//!
//! [`WrittenRecipe`] has checked keys and values, and [`LoadedRecipe`] also files: it finds every mistake that can be found before
//! expensive work, and later code relies on it. Relative paths in a recipe are relative to the working directory.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::data::DataConfig;
use crate::data::long_rows::LongRows;
use crate::draft::loss::LossConfig;
use crate::files::FileError;
use crate::formats::run_folder::RECIPE;
use crate::gguf::file::GgufError;
use crate::hub::HubError;
use crate::model::BackboneConfig;
use crate::numbers::Positive;
use crate::torch::shared_gpus::SharedGpus;
use crate::train::TrainConfig;
use crate::train::plan::TrainPlan;
use crate::train::schedule::ScheduleConfig;

mod checks;
mod defaults;
pub mod expectation;
mod fetched;
mod file_defaults;
pub mod heads;
mod loaded;
mod located;
mod mistakes;
mod named_files;
mod optimizer;
mod stage;
pub mod starter;
mod typed;
mod written;

use heads::HeadsTable;
pub use loaded::LoadedRecipe;
use located::LocatedToml;
pub use located::RecipeSpan;
use mistakes::Findings;
pub use mistakes::{Mistake, Mistakes};
pub use optimizer::OptimizerConfig;
pub use stage::{Medusa1Config, Medusa2Config, Stage};
pub use written::WrittenRecipe;

/// A recipe, with every default filled in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The model that the heads are for.
    pub backbone: BackboneConfig,
    pub heads: HeadsTable,
    /// Which parameters are trained, and how.
    pub stage: Stage,
    /// Weights of the heads' losses.
    #[serde(default)]
    pub loss: LossConfig,
    pub data: DataConfig,
    pub optimizer: OptimizerConfig,
    /// The learning rate over the run.
    pub schedule: ScheduleConfig,
    /// Steps, batches and folders of the run.
    pub train: TrainConfig,
}

/// Why a recipe cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file is missing or unreadable.
    #[error(transparent)]
    Unreadable(#[from] FileError),
    /// A Hub repository that the recipe names cannot be fetched.
    #[error("{place}: {key}: {error}\n{}", place.snippet())]
    Hub { place: Box<RecipeSpan>, key: &'static str, error: Box<HubError> },
    /// A folder with several GGUF files.
    #[error("backbone.path: {0}")]
    Gguf(#[from] Box<GgufError>),
    #[error("{0}")]
    Wrong(Mistakes),
}

impl Recipe {
    /// Parses a recipe without checking the files that it names, so defaults that depend on them are those without files: `float32`, and
    /// rows of 2048 tokens. `file` is for error messages, and names the default folder of the run.
    ///
    /// # Errors
    /// [`RecipeError`] with all mistakes and their positions in the text.
    pub fn parse(file: &Path, text: &str) -> Result<Self, RecipeError> {
        let text = LocatedToml::parse(file, text);
        let mut findings = Findings::new(&text);
        let recipe = Self::read(&mut findings);
        findings.into_result().map_err(RecipeError::Wrong)?;
        Ok(recipe.expect("a recipe without mistakes"))
    }

    /// Parses the recipe.toml of a run. Versions without `data.long_rows` cut long rows.
    fn from_run(text: &str) -> Option<Self> {
        let file = Path::new(RECIPE);
        let mut recipe = Self::parse(file, text).ok()?;
        if LocatedToml::parse(file, text).key("data.long_rows").is_none() {
            recipe.data.long_rows = LongRows::Truncate;
        }
        Some(recipe)
    }

    /// The recipe with defaults in place of what is wrong; `None` if the mistakes leave nothing to read.
    fn read(findings: &mut Findings<'_>) -> Option<Self> {
        let recipe: Self = typed::read(findings)?;
        recipe.check_values(findings);
        Some(recipe)
    }

    /// The recipe as TOML with all defaults written out. Parses to an equal recipe.
    ///
    /// # Panics
    /// Never: every recipe that loads can be serialized.
    pub fn resolved_toml(&self) -> String {
        if !self.heads.is_eagle() {
            return toml::to_string(self).expect("a recipe holds only what TOML can say");
        }
        let mut table = toml::Table::try_from(self).expect("a recipe holds only what TOML can say");
        self.heads.leave_out_keys_of_others(&mut table);
        toml::to_string(&table).expect("a table")
    }

    /// The plan of this recipe on `device`; the recipe must have local paths.
    pub fn plan(&self, device: Device) -> TrainPlan {
        let Self { backbone, heads, stage, loss, data, optimizer, schedule, train } = self.clone();
        TrainPlan {
            backbone,
            trained: stage.trained(),
            drafter: heads.drafter(),
            loss,
            heads_coefficient: stage.heads_coefficient(),
            optimizer: optimizer.adamw(),
            learning_rate: optimizer.learning_rate.get(),
            heads_rate_factor: optimizer.medusa_lr_multiplier.map_or(1.0, Positive::get),
            schedule,
            max_grad_norm: optimizer.max_grad_norm.get(),
            zero_stage: optimizer.zero_stage,
            data,
            train,
            device,
            gpus: SharedGpus::alone(device),
            world_size: 1,
            skip_bad_rows: false,
            resolved_recipe: self.resolved_toml(),
            resolve: |text| Some(Self::from_run(text)?.resolved_toml()),
            snapshot: None,
            sources: vec![],
        }
    }
}
