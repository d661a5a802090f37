//! `--backbone`: its config, checked before anything else is read.

use std::path::Path;

use super::UsageError;
use crate::model::config::LlamaConfig;

/// The config of `--backbone`.
///
/// # Errors
/// [`UsageError`] if there is no such folder; else what is wrong with it.
pub fn backbone_config(folder: &Path) -> anyhow::Result<LlamaConfig> {
    match LlamaConfig::load(folder) {
        Err(error) if !folder.exists() => Err(UsageError(format!("--backbone: {error}")).into()),
        loaded => Ok(loaded?),
    }
}
