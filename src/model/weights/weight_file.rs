//! One file of weights, whatever its container.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::error::WeightsError;
use super::tensor_file::{MappedTensors, StoredTensor};
use super::{safetensors_file, torch_file};

/// A mapped file, and which tensors lie where in it.
#[derive(Debug)]
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) map: &'static Mmap,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
}

impl WeightFile {
    /// Maps a file and checks every tensor in it.
    ///
    /// # Errors
    /// [`WeightsError`] for whatever is missing or damaged.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
        let (map, tensors) = container(path)(path)?;
        Ok(Self { path: path.into(), map, tensors })
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
