//! A recipe with all files that it names: Hub ids are downloaded, small files first, weights only after all checks.

use std::path::{Path, PathBuf};

use tch::Device;

use super::located::LocatedToml;
use super::{Recipe, RecipeError};
use crate::files::failed;
use crate::formats::provenance::{HubSnapshot, HubSource};
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
        loaded.fetch(&|_| ())?;
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
        let (recipe, _) = Recipe::read(path, &text)?;
        Ok(Self { local: recipe.clone(), recipe, snapshot: None, sources: vec![], file: path.to_owned(), text })
    }

    /// Downloads the Hub repositories that the recipe names, except the backbone's weights, and checks that all files
    /// exist.
    ///
    /// # Errors
    /// [`RecipeError`] with the position in the file.
    pub fn fetch(&mut self, tell: Observer<'_>) -> Result<(), RecipeError> {
        let (file, written) = (self.file.clone(), self.text.clone());
        let text = LocatedToml::parse(&file, &written).expect("it was read before");
        if self.names_the_hub() {
            let hub = Hub::from_env(tell).map_err(|error| at(&text, "backbone.path", error))?;
            self.fetch_backbone(&hub, Wanted::BackboneWithoutWeights, &text)?;
            self.fetch_rest(&hub, &text)?;
        }
        self.local.check_backbone(&text)?;
        self.local.check_files(&text)
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
        let text = LocatedToml::parse(&file, &written).expect("it was read before");
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

    fn names_the_hub(&self) -> bool {
        let Recipe { backbone, heads, data, stage, .. } = &self.recipe;
        let adapter = stage.lora().and_then(|lora| lora.init_from.as_deref());
        let models = [Some(Path::new(&backbone.path)), heads.init_from.as_deref(), adapter];
        models.into_iter().flatten().filter_map(Path::to_str).any(|place| id::model(place).is_some())
            || data.train.iter().chain(&data.validation).any(|entry| id::data(entry).is_some())
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
            ("data.train", &mut data.train, DataSplit::Train),
            ("data.validation", &mut data.validation, DataSplit::Validation),
        ];
        for (key, entries, split) in lists {
            let (files, origins) = hub.fetch_all(entries, split).map_err(|error| at(text, key, error))?;
            *entries = files;
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

fn source(key: &str, snapshot: HubSnapshot) -> HubSource {
    HubSource { key: key.to_owned(), snapshot }
}

fn at(text: &LocatedToml<'_>, key: &'static str, error: HubError) -> RecipeError {
    RecipeError::Hub { place: Box::new(text.value(key)), key, error: Box::new(error) }
}
