//! Which files hold a folder's weights. Reads indices, and opens no weights.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::WeightsError;
use crate::files::{self, failed};

/// The weights file of a Hugging Face folder.
pub const MODEL_FILE: &str = "model.safetensors";
/// The index of a sharded folder: tensor name to shard.
pub const MODEL_INDEX: &str = "model.safetensors.index.json";
/// [`MODEL_FILE`] of folders without safetensors.
pub const TORCH_FILE: &str = "pytorch_model.bin";
/// See [`MODEL_INDEX`].
pub const TORCH_INDEX: &str = "pytorch_model.bin.index.json";

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// The files with a folder's weights, sorted.
///
/// # Errors
/// As [`WeightFiles::open`](super::WeightFiles::open); the files themselves are not looked into.
pub fn files_of(folder: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    Ok(WeightListing::of(folder)?.paths)
}

/// Which files hold a folder's weights.
pub(super) struct WeightListing {
    /// The index, or the only file.
    pub(super) source: PathBuf,
    /// What the index says.
    pub(super) weight_map: Option<BTreeMap<String, String>>,
    pub(super) paths: Vec<PathBuf>,
}

impl WeightListing {
    pub(super) fn of(folder: &Path) -> Result<Self, WeightsError> {
        for (index, single) in [(MODEL_INDEX, MODEL_FILE), (TORCH_INDEX, TORCH_FILE)] {
            let [index, single] = [index, single].map(|name| folder.join(name));
            if index.exists() {
                return Self::of_index(index);
            }
            if single.exists() {
                return Ok(Self { source: single.clone(), weight_map: None, paths: vec![single] });
            }
        }
        Err(WeightsError::NoWeights { folder: folder.into() })
    }

    pub(super) fn of_index(index: PathBuf) -> Result<Self, WeightsError> {
        let text = fs::read_to_string(&index).map_err(failed("read", &index))?;
        let ShardIndex { weight_map } =
            serde_json::from_str(&text).map_err(|source| WeightsError::Index { path: index.clone(), source })?;
        if let Some(name) = weight_map.values().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
            return Err(WeightsError::ShardName { index, name: name.clone() });
        }
        let mut paths: Vec<PathBuf> = weight_map.values().map(|name| files::parent(&index).join(name)).collect();
        paths.sort();
        paths.dedup();
        let (expected, present) = (paths.len(), paths.iter().filter(|shard| shard.exists()).count());
        match paths.iter().find(|shard| !shard.exists()) {
            Some(shard) => Err(WeightsError::MissingShard { shard: shard.clone(), index, present, expected }),
            None => Ok(Self { source: index, weight_map: Some(weight_map), paths }),
        }
    }
}
