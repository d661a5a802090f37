//! A recipe with local paths: the Hub repositories that it names are downloaded, the backbone's weights only after all checks.

use std::path::{Path, PathBuf};

use super::located::LocatedToml;
use super::{Recipe, RecipeError};
use crate::formats::provenance::{HubSnapshot, HubSource};
use crate::gguf;
use crate::hub::{DataSplit, Hub, HubError, Observer, Wanted, id};
use crate::train::plan::output_part;

const BACKBONE: &str = "backbone.path";

/// A recipe with local paths, and where they come from.
#[derive(Debug, Clone)]
pub(super) struct FetchedRecipe {
    pub(super) local: Recipe,
    /// Of the backbone, if it is from the Hub.
    pub(super) snapshot: Option<HubSnapshot>,
    /// Of other files from the Hub.
    pub(super) sources: Vec<HubSource>,
}

impl FetchedRecipe {
    /// Downloads everything but the backbone's weights.
    ///
    /// # Errors
    /// [`RecipeError::Hub`].
    pub(super) fn of(recipe: &Recipe, text: &LocatedToml<'_>, observer: Observer<'_>) -> Result<Self, RecipeError> {
        let mut fetched = Self { local: recipe.clone(), snapshot: None, sources: vec![] };
        if names_the_hub(recipe) {
            let hub = Hub::from_env(observer).map_err(|error| at(text, BACKBONE, error))?;
            fetched.fetch_backbone(&hub, Path::new(&recipe.backbone.path), Wanted::BackboneWithoutWeights, text)?;
            fetched.fetch_data(&hub, text)?;
            fetched.fetch_starts(&hub, text)?;
        }
        let in_folder = gguf::file::in_folder(Path::new(&fetched.local.backbone.path)).map_err(Box::new)?;
        if let Some(file) = in_folder {
            fetched.local.backbone.path = file.to_string_lossy().into_owned();
        }
        Ok(fetched)
    }

    /// Downloads the backbone's weights, if it is on the Hub; `place` is its path in the recipe.
    ///
    /// # Errors
    /// [`RecipeError::Hub`].
    pub(super) fn with_weights(
        mut self,
        place: &Path,
        text: &LocatedToml<'_>,
        observer: Observer<'_>,
    ) -> Result<Self, RecipeError> {
        if self.snapshot.is_some() {
            let hub = Hub::from_env(observer).map_err(|error| at(text, BACKBONE, error))?;
            let wanted = match output_part(&self.local.data, &*self.local.heads.drafter()) {
                None => Wanted::Backbone,
                Some(part) => Wanted::BackboneOutput(part),
            };
            self.fetch_backbone(&hub, place, wanted, text)?;
        }
        Ok(self)
    }

    fn fetch_backbone(
        &mut self,
        hub: &Hub<'_>,
        place: &Path,
        wanted: Wanted,
        text: &LocatedToml<'_>,
    ) -> Result<(), RecipeError> {
        if let Some(fetched) = hub.fetch_model(place, wanted).map_err(|error| at(text, BACKBONE, error))? {
            self.local.backbone.path = fetched.model().to_string_lossy().into_owned();
            self.snapshot = Some(fetched.origin);
        }
        Ok(())
    }

    fn fetch_data(&mut self, hub: &Hub<'_>, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
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
        Ok(())
    }

    /// Downloads what training starts from (`init_from`).
    fn fetch_starts(&mut self, hub: &Hub<'_>, text: &LocatedToml<'_>) -> Result<(), RecipeError> {
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

pub(super) fn names_the_hub(recipe: &Recipe) -> bool {
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
