//! Errors of weights.

use std::path::PathBuf;

use safetensors::SafeTensorError;

use crate::files::FileError;
use crate::gguf::file::GgufError;
use crate::model::weights::torch_file::TorchFileError;

/// Why weights cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{} has neither model.safetensors nor model.safetensors.index.json, nor pytorch_model.bin or its index, nor a GGUF file; weights in other formats must be converted to safetensors", folder.display())]
    NoWeights { folder: PathBuf },
    /// The index is no JSON, or has no `weight_map`.
    #[error("{}: {source}", path.display())]
    Index { path: PathBuf, source: serde_json::Error },
    /// An index that names files elsewhere.
    #[error("{}: weight_map: expected names of files beside it, got {name:?}", index.display())]
    ShardName { index: PathBuf, name: String },
    /// A shard that the index names is not there.
    #[error("{} is missing, which {} names; {present} of {expected} shards are there: download the folder again", shard.display(), index.display())]
    MissingShard { shard: PathBuf, index: PathBuf, present: usize, expected: usize },
    /// The header or the size of a file is not safetensors.
    #[error("{}: not a whole safetensors file ({reason}); its {bytes} bytes are damaged or cut off: copy it again", path.display())]
    Damaged { path: PathBuf, reason: SafeTensorError, bytes: u64 },
    #[error(transparent)]
    Torch(Box<TorchFileError>),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor that has to be there.
    #[error("{}: no tensor {name:?}", path.display())]
    MissingTensor {
        /// Where it was looked for.
        path: PathBuf,
        name: String,
    },
    /// A tensor of another shape.
    #[error("{}: tensor {name:?}: expected shape {expected:?}, got {got:?}; do config.json and the weights belong together?", path.display())]
    Shape { path: PathBuf, name: String, expected: Vec<i64>, got: Vec<i64> },
    /// A tensor of a dtype that it cannot have.
    #[error("{}: tensor {name:?}: expected {expected}, got {got}", path.display())]
    Dtype { path: PathBuf, name: String, expected: String, got: String },
    /// A weight with NaN or infinity in it.
    #[error("{}: tensor {name:?}: expected finite numbers, got {value} at {at:?} in {dtype:?}; the file is damaged, or its numbers are too large for this dtype", path.display())]
    NotFinite { path: PathBuf, name: String, value: f64, at: Vec<i64>, dtype: safetensors::Dtype },
}
