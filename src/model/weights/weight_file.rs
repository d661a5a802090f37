//! One file of weights, whatever its container.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::error::WeightsError;
use super::tensor_file::{MappedTensors, StoredTensor};
use super::{gguf_file, safetensors_file, torch_file};
use crate::gguf::file::is_gguf;

/// A mapped file, and which tensors lie where in it.
#[derive(Debug)]
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) map: &'static Mmap,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
}

impl WeightFile {
    /// Maps a file and checks every tensor in it; the shards of a GGUF file come with it.
    ///
    /// # Errors
    /// [`WeightsError`] for whatever is missing or damaged.
    pub(super) fn open(path: &Path) -> Result<Vec<Self>, WeightsError> {
        if is_gguf(path) {
            let shards = gguf_file::open(path)?.into_iter();
            return Ok(shards.map(|(path, (map, tensors))| Self { path, map, tensors }).collect());
        }
        let (map, tensors) = container(path)(path)?;
        Ok(vec![Self { path: path.into(), map, tensors }])
    }
}

/// Opens files of one container.
type Container = fn(&Path) -> Result<MappedTensors, WeightsError>;

/// The container that a file's name stands for: that of `torch.save` by its endings, else safetensors.
fn container(path: &Path) -> Container {
    match path.extension().and_then(OsStr::to_str) {
        Some("bin" | "pt" | "pth") => |path| torch_file::open(path).map_err(|error| WeightsError::Torch(error.into())),
        _ => safetensors_file::open,
    }
}
