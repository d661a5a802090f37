//! A recipe as it is written: its keys and values are right, and the files that it names are not looked at yet.

use std::path::{Path, PathBuf};

use tch::Device;

use super::fetched::{FetchedRecipe, names_the_hub};
use super::file_defaults::FileFacts;
use super::located::LocatedToml;
use super::mistakes::Findings;
use super::{LoadedRecipe, Recipe, RecipeError};
use crate::data::DataConfig;
use crate::files::{self, failed};
use crate::formats::provenance::Provenance;
use crate::formats::run_folder::{RECIPE, is_run};
use crate::hub::Observer;
use crate::model::device_map::DeviceMap;
use crate::torch::shared_gpus::SharedGpus;
use crate::train::TrainConfig;

impl Recipe {
    /// Reads a recipe and checks its keys, values and their combinations, the backbone's config, and that all files
    /// exist. Some defaults depend on the device.
    ///
    /// # Errors
    /// [`RecipeError`] with the position in the file.
    pub fn load(path: &Path, device: Device) -> Result<Self, RecipeError> {
        Ok(WrittenRecipe::read(path)?.fetch(device, SharedGpus::alone(device), &|_| ())?.recipe)
    }
}

/// A recipe whose keys and values were checked; [`WrittenRecipe::fetch`] checks the files that it names.
#[derive(Debug, Clone)]
pub struct WrittenRecipe {
    /// With the defaults that hold until the files are known.
    recipe: Recipe,
    /// The recipe of the run to resume.
    begun: Option<Recipe>,
    file: PathBuf,
    text: String,
}

impl WrittenRecipe {
    /// Reads a recipe.
    ///
    /// # Errors
    /// [`RecipeError`] with all mistakes and their positions in the file.
    pub fn read(path: &Path) -> Result<Self, RecipeError> {
        let text = files::read_text(path).map_err(failed("read the recipe", path))?;
        Self::parse(path, text)
    }

    /// As [`WrittenRecipe::read`], to resume the run in `train.output_dir`. If the file is the `recipe.toml` in a run's folder, the run is
    /// that one: the folder may have moved. Where the recipe leaves out a key whose default depends on files, on the device or on the
    /// version that the run began with (`data.long_rows`), it has the run's value.
    ///
    /// # Errors
    /// [`RecipeError`] with all mistakes and their positions in the file.
    pub fn read_to_resume(path: &Path) -> Result<Self, RecipeError> {
        let Self { recipe, file, text, .. } = Self::read(path)?;
        let Recipe { train, data, .. } = recipe;
        let train = TrainConfig { output_dir: run_of(path).unwrap_or(train.output_dir), ..train };
        let begun = Provenance::recipe_of(&train.output_dir).and_then(|text| Recipe::from_run(&text));
        let leaves_out = LocatedToml::parse(&file, &text).key("data.long_rows").is_none();
        let begun_rule = begun.as_ref().filter(|_| leaves_out).map(|run| run.data.long_rows);
        let data = DataConfig { long_rows: begun_rule.unwrap_or(data.long_rows), ..data };
        Ok(Self { recipe: Recipe { train, data, ..recipe }, begun, file, text })
    }

    /// As [`WrittenRecipe::read`], from the text; `path` is for error messages.
    ///
    /// # Errors
    /// [`RecipeError`] with all mistakes and their positions in the text.
    pub fn parse(path: &Path, text: String) -> Result<Self, RecipeError> {
        Ok(Self { recipe: read(path, &text)?, begun: None, file: path.to_owned(), text })
    }

    /// The run's folder.
    pub fn output_dir(&self) -> &Path {
        &self.recipe.train.output_dir
    }

    /// `backbone.device_map`.
    pub fn device_map(&self) -> Option<&DeviceMap> {
        self.recipe.backbone.device_map.as_ref()
    }

    /// Downloads the Hub repositories that the recipe names, except the backbone's weights, checks that all files exist, and sets the
    /// defaults that depend on them and on the device. `gpus`: those that the process shares.
    ///
    /// # Errors
    /// [`RecipeError`] with all mistakes and their positions in the file.
    pub fn fetch(self, device: Device, gpus: SharedGpus, observer: Observer<'_>) -> Result<LoadedRecipe, RecipeError> {
        let (recipe, fetched) = self.checked(device, gpus, observer)?;
        Ok(LoadedRecipe { recipe, fetched, file: self.file, text: self.text })
    }

    fn checked(
        &self,
        device: Device,
        gpus: SharedGpus,
        observer: Observer<'_>,
    ) -> Result<(Recipe, FetchedRecipe), RecipeError> {
        let text = LocatedToml::parse(&self.file, &self.text);
        let fetched = FetchedRecipe::of(&self.recipe, &text, observer)?;
        let mut findings = Findings::new(&text);
        let config = fetched.local.check_backbone(&mut findings);
        fetched.local.check_files(&mut findings);
        fetched.local.check_gpus(&mut findings, gpus.per_process(device));
        fetched.local.check_device(&mut findings, device);
        findings.into_result().map_err(RecipeError::Wrong)?;
        let config = config.expect("a backbone without mistakes");
        let mut findings = Findings::new(&text);
        let facts = match &self.begun {
            Some(run) => FileFacts::from_run(run),
            None => FileFacts::of(&fetched.local, &config, device, &mut findings),
        };
        let recipe = self.recipe.with_defaults_of(&facts, &text);
        recipe.check_lengths(&mut findings); // with the defaults that depend on files
        findings.into_result().map_err(RecipeError::Wrong)?;
        let local = fetched.local.with_defaults_of(&facts, &text);
        Ok((recipe, FetchedRecipe { local, ..fetched }))
    }
}

/// The folder of the run whose `recipe.toml` a file is.
fn run_of(file: &Path) -> Option<PathBuf> {
    let parent = file.parent().filter(|_| file.file_name().is_some_and(|name| name == RECIPE))?;
    let folder = if parent == Path::new("") { Path::new(".") } else { parent };
    is_run(folder).then(|| folder.to_owned())
}

/// Reads a recipe. If it has mistakes and all its files are local, the mistakes in their names are reported too.
fn read(file: &Path, text: &str) -> Result<Recipe, RecipeError> {
    let text = LocatedToml::parse(file, text);
    let mut findings = Findings::new(&text);
    let recipe = Recipe::read(&mut findings);
    if let Some(recipe) = recipe.as_ref().filter(|recipe| !findings.is_empty() && !names_the_hub(recipe)) {
        recipe.check_backbone(&mut findings);
        recipe.check_files(&mut findings);
    }
    findings.into_result().map_err(RecipeError::Wrong)?;
    Ok(recipe.expect("a recipe without mistakes"))
}
