//! Recipes and a backbone's config.json.

use std::path::Path;

use medusa::model::config::LlamaConfig;
use medusa::recipe::{Recipe, WrittenRecipe};
use tch::Device;

use super::scratch::{checked, file};

/// The files that a recipe names are not looked at: they could be anything on this machine, or on the Hub.
pub(super) fn recipe(input: &[u8]) {
    let path = Path::new("recipes/fuzzed.toml");
    let Ok(text) = std::str::from_utf8(input) else { return };
    let written = WrittenRecipe::parse(path, text.to_owned());
    if let Some(written) = checked(path, written) {
        let _ = (written.output_dir(), written.device_map());
    }
    if let Some(recipe) = checked(path, Recipe::parse(path, text)) {
        let again = Recipe::parse(path, &recipe.resolved_toml()).expect("a recipe's own TOML is a recipe");
        assert!(again == recipe, "a recipe comes back from its own TOML:\n{}", recipe.resolved_toml());
        let _ = recipe.plan(Device::Cpu);
    }
    let path = file("recipe", "recipe.toml", input);
    let _ = checked(&path, WrittenRecipe::read_to_resume(&path));
}

/// Layers of a backbone whose tensors are listed here: a list of more only takes longer.
const LAYERS: usize = 64;

pub(super) fn config(input: &[u8]) {
    let path = file("config", "config.json", input);
    let Some(config) = checked(&path, LlamaConfig::load(path.parent().expect("a folder"))) else { return };
    let _ = (config.block(), config.layer_kinds(), config.largest_context(), config.rotary_depends_on_context());
    let _ = (config.same_rotary_embeddings([16, 4096]), config.lm_head(), config.query_size(), config.key_value_size());
    if config.num_hidden_layers <= LAYERS {
        assert!(!config.tensors().is_empty());
        assert!(config.parameters() > 0, "a backbone has parameters: {}", config.parameters());
    }
}
