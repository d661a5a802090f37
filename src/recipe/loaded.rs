//! A recipe with all files that it names: Hub ids are downloaded, small files first, weights only after all checks.

use std::path::{Path, PathBuf};

use tch::Device;

use super::file_defaults::FileFacts;
use super::located::LocatedToml;
use super::mistakes::Findings;
use super::{Recipe, RecipeError, defaults};
use crate::files::failed;
use crate::formats::provenance::{HubSnapshot, HubSource, Provenance};
use crate::formats::run_folder::{PROVENANCE, RECIPE};
use crate::hub::{DataSplit, Hub, HubError, Observer, Wanted, id};
use crate::train::plan::TrainPlan;

impl Recipe {
    /// Reads a recipe and checks its keys, values and their combinations, the backbone's config, and that all files
    /// exist.
    ///
    /// # Errors
    /// [`RecipeError`] with the position in the file.
    pub fn load(path: &Path) -> Result<Self, RecipeError> {
        let mut loaded = LoadedRecipe::read(path)?;
        loaded.fetch(Device::Cpu, &|_| ())?;
        Ok(loaded.recipe)
    }
}

/// A checked recipe, ready to run.
#[derive(Debug, Clone)]
pub struct LoadedRecipe {
    /// As written, with Hub ids.
    pub recipe: Recipe,
    /// The same recipe with local paths.
    local: Recipe,
    /// That of the run to resume.
    begun: Option<Recipe>,
    /// Of the backbone, if it is from the Hub.
    snapshot: Option<HubSnapshot>,
    /// Of other files from the Hub.
    sources: Vec<HubSource>,
    file: PathBuf,
    /// The recipe's text, for errors that point into it.
    text: String,
}

impl LoadedRecipe {
    /// Reads a recipe and checks its keys and values; [`LoadedRecipe::fetch`] checks the files that it names.
    ///
    /// # Errors
    /// [`RecipeError`] with the position in the file.
    pub fn read(path: &Path) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path).map_err(failed("read the recipe", path))?;
        Self::parse(path, text)
    }

    /// As [`LoadedRecipe::read`], from the text; `path` is for error messages.
    ///
    /// # Errors
    /// [`RecipeError`] with all mistakes and their positions in the text.
    pub fn parse(path: &Path, text: String) -> Result<Self, RecipeError> {
        let recipe = read(path, &text)?;
        Ok(Self {
            local: recipe.clone(),
            recipe,
            begun: None,
            snapshot: None,
            sources: vec![],
            file: path.to_owned(),
            text,
        })
    }

    /// Downloads the Hub repositories that the recipe names, except the backbone's weights, checks that all files exist, and sets the
    /// defaults that depend on them and on the device.
    ///
    /// # Errors
    /// [`RecipeError`] with all mistakes and their positions in the file.
    pub fn fetch(&mut self, device: Device, tell: Observer<'_>) -> Result<(), RecipeError> {
        let (file, written) = (self.file.clone(), self.text.clone());
        let text = LocatedToml::parse(&file, &written);
        if names_the_hub(&self.recipe) {
            let hub = Hub::from_env(tell).map_err(|error| at(&text, "backbone.path", error))?;
            self.fetch_backbone(&hub, Wanted::BackboneWithoutWeights, &text)?;
            self.fetch_rest(&hub, &text)?;
        }
        let mut findings = Findings::new(&text);
        let config = self.local.check_backbone(&mut findings);
        self.local.check_files(&mut findings);
        findings.into_result().map_err(RecipeError::Wrong)?;
        let config = config.expect("a backbone without mistakes");
        let mut findings = Findings::new(&text);
        let facts = match &self.begun {
            Some(run) => FileFacts::of_run(run),
            None => FileFacts::of(&self.local, &config, device, &mut findings),
        };
        [&mut self.recipe, &mut self.local].into_iter().for_each(|recipe| recipe.fit_to(&facts, &text));
        self.recipe.check_lengths(&mut findings); // with the defaults that depend on files
        findings.into_result().map_err(RecipeError::Wrong)
    }

    /// If the recipe is the `recipe.toml` in a run's folder, the run's folder is that one: it may have moved.
    pub fn stay_in_its_run(&mut self) {
        let folder = self.file.parent().filter(|_| self.file.file_name().is_some_and(|name| name == RECIPE));
        if let Some(run) = folder.filter(|folder| folder.join(PROVENANCE).is_file()) {
            for recipe in [&mut self.recipe, &mut self.local] {
                recipe.train.output_dir = if run == Path::new("") { ".".into() } else { run.to_owned() };
            }
        }
    }

    /// Prepares to resume the run in `train.output_dir`: where this recipe leaves out a key whose default depends on files, on the device or
    /// on the version that the run began with (`data.long_rows`), it has the run's value. Without such a run nothing changes.
    pub fn keep_defaults_of_its_run(&mut self) {
        let is_set = LocatedToml::parse(&self.file, &self.text).key("data.long_rows").is_some();
        self.begun = Provenance::recipe_of(&self.recipe.train.output_dir).and_then(|text| Recipe::of_run(&text));
        if let (false, Some(begun)) = (is_set, &self.begun) {
            for recipe in [&mut self.recipe, &mut self.local] {
                recipe.data.long_rows = begun.data.long_rows;
            }
        }
    }

    /// The recipe with every default written out, each marked by a comment: `# default`, with the reason if it depends on another key.
    pub fn marked_toml(&self) -> String {
        let text = LocatedToml::parse(&self.file, &self.text);
        let line = |(line, default): (String, Option<String>)| match default {
            Some(key) => match defaults::reason(&key, &text) {
                Some(reason) => format!("{line:<40}  # default, because {reason}"),
                None => format!("{line:<40}  # default"),
            },
            None => line,
        };
        self.resolved_lines().into_iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// Keys that the file leaves out and that have a value.
    pub fn default_keys(&self) -> Vec<String> {
        self.resolved_lines().into_iter().filter_map(|(_, default)| default).collect()
    }

    /// The lines of the resolved recipe, each with its key if that is a default.
    fn resolved_lines(&self) -> Vec<(String, Option<String>)> {
        let text = LocatedToml::parse(&self.file, &self.text);
        let mut table = String::new();
        let mut lines = Vec::new();
        for line in self.recipe.resolved_toml().trim_end().lines() {
            if let Some(header) = line.strip_prefix('[') {
                table = header.trim_end_matches(']').to_owned();
            }
            let key = line.split_once(" = ").map(|(key, _)| format!("{table}.{key}"));
            lines.push((line.to_owned(), key.filter(|key| text.key(key).is_none())));
        }
        lines
    }

    /// Downloads the backbone's weights, if it is on the Hub.
    ///
    /// # Errors
    /// [`RecipeError`] with the position in the file.
    pub fn fetch_weights(&mut self, tell: Observer<'_>) -> Result<(), RecipeError> {
        if self.snapshot.is_none() {
            return Ok(());
        }
        let (file, written) = (self.file.clone(), self.text.clone());
        let text = LocatedToml::parse(&file, &written);
        let hub = Hub::from_env(tell).map_err(|error| at(&text, "backbone.path", error))?;
        self.fetch_backbone(&hub, Wanted::Backbone, &text)
    }

    /// The plan of this recipe on `device`.
    pub fn plan(&self, device: Device) -> TrainPlan {
        TrainPlan {
            resolved_recipe: self.recipe.resolved_toml(),
            snapshot: self.snapshot.clone(),
            sources: self.sources.clone(),
            ..self.local.plan(device)
        }
    }

    fn fetch_backbone(&mut self, hub: &Hub<'_>, wanted: Wanted, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let key = "backbone.path";
        let place = Path::new(&self.recipe.backbone.path);
        if let Some(fetched) = hub.fetch_model(place, wanted).map_err(|error| at(text, key, error))? {
            self.local.backbone.path = fetched.folder.to_string_lossy().into_owned();
            self.snapshot = Some(fetched.origin);
        }
        Ok(())
    }

    fn fetch_rest(&mut self, hub: &Hub<'_>, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
        let data = &mut self.local.data;
        let lists = [
            ("data.train", &mut data.train, &mut data.fetched.train, DataSplit::Train),
            ("data.validation", &mut data.validation, &mut data.fetched.validation, DataSplit::Validation),
        ];
        for (key, entries, fetched, split) in lists {
            let (files, origins) = hub.fetch_all(entries, split).map_err(|error| at(text, key, error))?;
            *entries = files.concat();
            *fetched = files;
            self.sources.extend(origins.into_iter().map(|origin| source(key, origin)));
        }
        let adapter = self.local.stage.lora_mut().and_then(|lora| lora.init_from.as_mut());
        let starts: [(_, Option<&mut PathBuf>); 2] =
            [("heads.init_from", self.local.heads.init_from.as_mut()), ("stage.medusa2.lora.init_from", adapter)];
        for (key, place) in starts {
            let Some(place) = place else { continue };
            if let Some(fetched) = hub.fetch_model(place, Wanted::Heads).map_err(|error| at(text, key, error))? {
                *place = fetched.folder;
                self.sources.push(source(key, fetched.origin));
            }
        }
        Ok(())
    }
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

fn names_the_hub(recipe: &Recipe) -> bool {
    let Recipe { backbone, heads, data, stage, .. } = recipe;
    let adapter = stage.lora().and_then(|lora| lora.init_from.as_deref());
    let models = [Some(Path::new(&backbone.path)), heads.init_from.as_deref(), adapter];
    models.into_iter().flatten().filter_map(Path::to_str).any(|place| id::model(place).is_some())
        || data.train.iter().chain(&data.validation).any(|entry| id::data(entry).is_some())
}

fn source(key: &str, snapshot: HubSnapshot) -> HubSource {
    HubSource { key: key.to_owned(), snapshot }
}

fn at(text: &LocatedToml<'_>, key: &'static str, error: HubError) -> RecipeError {
    RecipeError::Hub { place: Box::new(text.value(key)), key, error: Box::new(error) }
}
