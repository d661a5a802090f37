//! What of a backbone decides how long its steps take.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::files;
use crate::model::config::LlamaConfig;
use crate::model::weights::{WeightFiles, WeightsError};

/// A hash of a backbone's config and of the names, dtypes and shapes of its weights, wherever the folder is. The weights themselves are
/// not read: they do not change a step's time.
///
/// # Errors
/// A folder without readable weights.
pub fn backbone_sha256(folder: &Path, config: &LlamaConfig) -> Result<String, WeightsError> {
    let mut all = Sha256::new();
    all.update(serde_json::to_vec(config).expect("plain data"));
    for tensor in WeightFiles::open(folder)?.tensors() {
        all.update(format!("{} {} {:?}\n", tensor.name, tensor.dtype, tensor.shape));
    }
    Ok(files::hex(&all.finalize()))
}
