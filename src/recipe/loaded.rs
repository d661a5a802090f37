//! A recipe whose files were fetched and checked: ready to run.

use std::path::{Path, PathBuf};

use tch::Device;

use super::fetched::FetchedRecipe;
use super::located::LocatedToml;
use super::{Recipe, RecipeError, defaults};
use crate::hub::Observer;
use crate::train::plan::TrainPlan;

/// A checked recipe; [`super::WrittenRecipe::fetch`] makes it.
#[derive(Debug, Clone)]
pub struct LoadedRecipe {
    /// As written, with Hub ids, and with every default.
    pub recipe: Recipe,
    /// The same recipe with local paths.
    pub(super) fetched: FetchedRecipe,
    pub(super) file: PathBuf,
    /// The recipe's text, for errors that point into it.
    pub(super) text: String,
}

impl LoadedRecipe {
    /// The defaults of keys that the file leaves out, a line for each table; with the reason if a default depends on another key.
    pub fn defaults_by_table(&self) -> String {
        let text = LocatedToml::parse(&self.file, &self.text);
        let mut tables: Vec<(String, Vec<String>)> = vec![];
        for (line, key) in self.resolved_lines() {
            let Some(key) = key else { continue };
            let reason = defaults::reason(&key, &text).map_or_else(String::new, |reason| format!(" ({reason})"));
            let table = key.rsplit_once('.').map_or("", |(table, _)| table);
            match tables.last_mut() {
                Some((name, keys)) if name == table => keys.push(line + &reason),
                _ => tables.push((table.to_owned(), vec![line + &reason])),
            }
        }
        let lines = tables.iter().map(|(table, keys)| format!("  {table:<20}  {}", keys.join(", ")));
        let head = format!("defaults of keys that {} leaves out", self.file.display());
        [head].into_iter().chain(lines).collect::<Vec<_>>().join("\n")
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
    pub fn with_weights(self, observer: Observer<'_>) -> Result<Self, RecipeError> {
        let Self { recipe, fetched, file, text } = self;
        let place = Path::new(&recipe.backbone.path);
        let fetched = fetched.with_weights(place, &LocatedToml::parse(&file, &text), observer)?;
        Ok(Self { recipe, fetched, file, text })
    }

    /// The plan of this recipe on `device`.
    pub fn plan(&self, device: Device) -> TrainPlan {
        let FetchedRecipe { local, snapshot, sources } = &self.fetched;
        TrainPlan {
            resolved_recipe: self.recipe.resolved_toml(),
            snapshot: snapshot.clone(),
            sources: sources.clone(),
            ..local.plan(device)
        }
    }
}
