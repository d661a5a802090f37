//! `--backbone`: its config, checked before anything else is read.

use std::path::Path;

use super::UsageError;
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
