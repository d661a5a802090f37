//! A recipe with all that it names on this machine: what the Hub has is brought here, the smallest first, and weights when the rest is checked.

use std::path::{Path, PathBuf};

use super::place::Text;
use super::{Recipe, RecipeError};
use crate::hub::{Hub, HubError, Observer, Split, Wanted, id};
use crate::train::checked::Job;
use crate::train::run_folder::Snapshot;
use crate::train::stage::Stage;

/// A recipe that is read, checked, and can be run here.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// As it was written, with ids of the Hub where it has them.
    pub recipe: Recipe,
    /// The same with paths of this machine.
    local: Recipe,
    /// Of the backbone, if the Hub has it.
    snapshot: Option<Snapshot>,
}

impl Loaded {
    /// Reads and checks a recipe as [`Recipe::load`] does, and brings here what the Hub has of it. `backbone` says whether with the weights.
    ///
    /// # Errors
    /// [`RecipeError`] with the place in the file.
    pub fn load(path: &Path, backbone: Wanted, tell: Observer<'_>) -> Result<Self, RecipeError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| RecipeError::Unreadable { file: path.to_owned(), source })?;
        let (recipe, text) = Recipe::read(path, &text)?;
        let mut loaded = Self { local: recipe.clone(), recipe, snapshot: None };
        let hub = if loaded.names_the_hub() {
            Some(Hub::from_env(tell).map_err(|error| at(&text, "backbone.path", error))?)
        } else {
            None
        };
        if let Some(hub) = &hub {
            loaded.fetch_backbone(hub, Wanted::BackboneWithoutWeights, &text)?;
            loaded.fetch_rest(hub, &text)?;
        }
        loaded.local.check_backbone(&text)?;
        loaded.local.check_files(&text)?;
        if let Some(hub) = hub.filter(|_| backbone == Wanted::Backbone) {
            loaded.fetch_backbone(&hub, backbone, &text)?;
        }
        Ok(loaded)
    }

    /// The recipe as the training loop takes it.
    pub fn job(&self, device: tch::Device) -> Job {
        let local = self.local.clone();
        Job {
            backbone: local.backbone,
            snapshot: self.snapshot.clone(),
            heads: local.heads,
            stage: local.stage,
            loss: local.loss,
            data: local.data,
            optimizer: local.optimizer,
            schedule: local.schedule,
            train: local.train,
            resolved_recipe: self.recipe.resolved_toml(),
            device,
            skip_bad_rows: false,
        }
    }

    fn names_the_hub(&self) -> bool {
        let Recipe { backbone, heads, data, stage, .. } = &self.recipe;
        let models = [Some(Path::new(&backbone.path)), heads.init_from.as_deref(), adapter(stage)];
        models.into_iter().flatten().filter_map(Path::to_str).any(|place| id::model(place).is_some())
            || data.train.iter().chain(&data.validation).any(|entry| id::data(entry).is_some())
    }

    fn fetch_backbone(&mut self, hub: &Hub<'_>, wanted: Wanted, text: &Text<'_>) -> Result<(), RecipeError> {
        let key = "backbone.path";
        let place = Path::new(&self.recipe.backbone.path);
        if let Some(fetched) = hub.fetch_model(place, wanted).map_err(|error| at(text, key, error))? {
            self.local.backbone.path = fetched.folder.to_string_lossy().into_owned();
            self.snapshot = Some(Snapshot { id: fetched.origin.id, commit: fetched.origin.commit });
        }
        Ok(())
    }

    fn fetch_rest(&mut self, hub: &Hub<'_>, text: &Text<'_>) -> Result<(), RecipeError> {
        let data = &mut self.local.data;
        let lists = [
            ("data.train", &mut data.train, Split::Train),
            ("data.validation", &mut data.validation, Split::Validation),
        ];
        for (key, entries, split) in lists {
            *entries = hub.fetch_all(entries, split).map_err(|error| at(text, key, error))?;
        }
        let lora = match &mut self.local.stage {
            Stage::Medusa2(config) => config.lora.as_mut(),
            Stage::Medusa1(_) => None,
        };
        let adapter = lora.and_then(|lora| lora.init_from.as_mut());
        let starts: [(_, Option<&mut PathBuf>); 2] =
            [("heads.init_from", self.local.heads.init_from.as_mut()), ("stage.medusa2.lora.init_from", adapter)];
        for (key, place) in starts {
            let Some(place) = place else { continue };
            if let Some(fetched) = hub.fetch_model(place, Wanted::Heads).map_err(|error| at(text, key, error))? {
                *place = fetched.folder;
            }
        }
        Ok(())
    }
}

/// Where Medusa-2's adapters start from.
fn adapter(stage: &Stage) -> Option<&Path> {
    match stage {
        Stage::Medusa2(config) => config.lora.as_ref()?.init_from.as_deref(),
        Stage::Medusa1(_) => None,
    }
}

fn at(text: &Text<'_>, key: &'static str, error: HubError) -> RecipeError {
    RecipeError::Hub { place: Box::new(text.value(key)), key, error: Box::new(error) }
}
