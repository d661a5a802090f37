//! Reads the header of a safetensors file.

use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::error::WeightsError;
use super::tensor_file::{MappedTensors, StoredTensor, StoredType, map_file};
use crate::files::failed;
use crate::gguf::names::Conversion;

/// Maps a file and checks every tensor in it.
///
/// # Errors
/// [`WeightsError`] names the file and what is wrong in it.
pub(super) fn open(path: &Path) -> Result<MappedTensors, WeightsError> {
    let map = map_file(path).map_err(failed("read", path))?;
    let damaged = |reason| WeightsError::Damaged { path: path.into(), reason, bytes: map.len() as u64 };
    let tensors = SafeTensors::deserialize(map).map_err(damaged)?.tensors();
    Ok((map, tensors.into_iter().map(|(name, view)| (name, stored(&view))).collect()))
}

fn stored(view: &TensorView<'static>) -> StoredTensor {
    let shape = view.shape().iter().map(|&d| d as i64).collect();
    let dtype = StoredType::Number(view.dtype());
    StoredTensor { dtype, shape, strides: None, conversion: Conversion::Same, data: view.data() }
}
