//! `--backbone`: its config, checked before anything else is read.

use std::path::Path;

use super::print::visible;
use super::{CommonFlags, UsageError};
use crate::data::tokenize::config_keys::reported_tokenizer_keys;
use crate::model::config::LlamaConfig;

/// The config of a backbone on the command line.
///
/// # Errors
/// [`UsageError`], as for the backbone of a recipe: there is no such folder, or it holds no backbone that this program runs.
pub fn backbone_config(folder: &Path) -> Result<LlamaConfig, UsageError> {
    LlamaConfig::load(folder).map_err(|error| {
        let flag = if folder.exists() { "" } else { "--backbone: " };
        UsageError(format!("{flag}{error}"))
    })
}

/// Reports the keys of a backbone's files that are unknown here, or ask for something that is not done: other programs may compute another text.
///
/// # Errors
/// A file that cannot be read.
pub fn report_keys_without_effect(folder: &Path, common: &CommonFlags) -> anyhow::Result<()> {
    let files = [
        ("config.json", LlamaConfig::reported_keys(folder)?),
        ("generation_config.json", LlamaConfig::reported_generation_keys(folder)?),
        ("tokenizer_config.json", reported_tokenizer_keys(folder)?),
    ];
    for (file, keys) in files.iter().filter(|(_, keys)| !keys.is_empty()) {
        let keys = visible(&keys.join(", "));
        common.say(format_args!("{}: keys without effect here: {keys}", folder.join(file).display()));
    }
    Ok(())
}
