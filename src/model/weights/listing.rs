//! Which files hold a folder's weights. Reads indices, and opens no weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::WeightsError;
use super::gguf_file;
use crate::bounds::JSON_FILE_BYTES;
use crate::files::{self, failed, is_file};
use crate::gguf::file::is_gguf;

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

/// The files that hold some tensors of a folder, sorted; others need not be there.
///
/// # Errors
/// As [`WeightFiles::open_tensors`](super::WeightFiles::open_tensors); the files themselves are not looked into.
pub fn files_with(folder: &Path, names: &[&str]) -> Result<Vec<PathBuf>, WeightsError> {
    Ok(WeightListing::from_tensors(folder, names)?.paths)
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
        Self::from_folder(folder)?.complete()
    }

    /// Without the shards that hold none of these tensors, which need not be in the folder.
    pub(super) fn from_tensors(folder: &Path, names: &[&str]) -> Result<Self, WeightsError> {
        Self::from_folder(folder)?.only(names).complete()
    }

    pub(super) fn from_index(index: PathBuf) -> Result<Self, WeightsError> {
        Self::named_by(index)?.complete()
    }

    /// Its shards may be absent.
    fn from_folder(folder: &Path) -> Result<Self, WeightsError> {
        if is_gguf(folder) && !folder.is_dir() {
            return Ok(Self { source: folder.into(), weight_map: None, paths: gguf_file::paths(folder)? });
        }
        for (index, single) in [(MODEL_INDEX, MODEL_FILE), (TORCH_INDEX, TORCH_FILE)] {
            let [index, single] = [index, single].map(|name| folder.join(name));
            // Where both are there, transformers reads the single file.
            if is_file(&single)? {
                return Ok(Self { source: single.clone(), weight_map: None, paths: vec![single] });
            }
            if is_file(&index)? {
                return Self::named_by(index);
            }
        }
        Err(WeightsError::NoWeights { folder: folder.into() })
    }

    fn named_by(index: PathBuf) -> Result<Self, WeightsError> {
        let text = files::read_at_most(&index, JSON_FILE_BYTES).map_err(failed("read", &index))?;
        let ShardIndex { weight_map } =
            serde_json::from_slice(&text).map_err(|source| WeightsError::Index { path: index.clone(), source })?;
        if let Some(name) = weight_map.values().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
            return Err(WeightsError::ShardName { index, name: name.clone() });
        }
        Ok(Self { paths: paths_of(&index, &weight_map), source: index, weight_map: Some(weight_map) })
    }

    fn only(self, names: &[&str]) -> Self {
        let Some(mut weight_map) = self.weight_map else { return self };
        weight_map.retain(|name, _| names.contains(&name.as_str()));
        Self { paths: paths_of(&self.source, &weight_map), weight_map: Some(weight_map), ..self }
    }

    fn complete(self) -> Result<Self, WeightsError> {
        let (expected, present) = (self.paths.len(), self.paths.iter().filter(|shard| shard.exists()).count());
        match self.paths.iter().find(|shard| !shard.exists()) {
            Some(shard) if self.weight_map.is_some() => {
                Err(WeightsError::MissingShard { shard: shard.clone(), index: self.source, present, expected })
            }
            _ => Ok(self),
        }
    }
}

/// The shards, sorted.
fn paths_of(index: &Path, weight_map: &BTreeMap<String, String>) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = weight_map.values().map(|name| files::parent(index).join(name)).collect();
    paths.sort();
    paths.dedup();
    paths
}
