//! Backbones in GGUF among the containers of weights: their tensors by the names of transformers, and how their numbers are stored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::error::WeightsError;
use super::tensor_file::{MappedTensors, StoredTensor, StoredType, map_file};
use crate::files::failed;
use crate::gguf::file::{GgufError, GgufFile};
use crate::gguf::header::{Header, HeaderError, TensorEntry};
use crate::gguf::names::Conversion;

/// Maps a file and its shards.
///
/// # Errors
/// [`WeightsError`] names the file and what is wrong in it.
pub(super) fn open(path: &Path) -> Result<Vec<(PathBuf, MappedTensors)>, WeightsError> {
    let file = GgufFile::open(path)?;
    file.shards().iter().map(|(path, header)| Ok((path.clone(), mapped(&file, path, header)?))).collect()
}

/// The files of a backbone in GGUF.
///
/// # Errors
/// [`WeightsError`] names the file and what is wrong in it.
pub(super) fn paths(path: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    Ok(GgufFile::open(path)?.paths().map(Path::to_owned).collect())
}

fn mapped(file: &GgufFile, path: &Path, header: &Header) -> Result<MappedTensors, WeightsError> {
    let wrong = |source| GgufError::Header { path: path.into(), source };
    let map = map_file(path).map_err(failed("read", path))?;
    let mut tensors = BTreeMap::new();
    for (name, TensorEntry { shape, kind, start, bytes }) in &header.tensors {
        let Some((name, conversion)) = file.in_transformers(name).map_err(wrong)? else { continue };
        let length = map.len() as u64;
        let data = usize::try_from(*start).ok().zip(usize::try_from(start + bytes).ok());
        let data = data.and_then(|(start, end)| map.get(start..end)).ok_or_else(|| {
            let expected = format!("{bytes} bytes at {start}");
            wrong(HeaderError::Tensor { name: name.clone(), expected, got: format!("a file of {length}") })
        })?;
        if let Conversion::Interleaved { heads } = conversion
            && shape[0] % (2 * heads) != 0
        {
            let expected = format!("rows of {heads} heads of an even size");
            return Err(wrong(HeaderError::Tensor { name, expected, got: shape[0].to_string() }).into());
        }
        let dtype = match kind.name {
            "F32" => StoredType::Number(Dtype::F32),
            "F16" => StoredType::Number(Dtype::F16),
            "BF16" => StoredType::Number(Dtype::BF16),
            _ => StoredType::Blocks(kind),
        };
        let stored = StoredTensor { dtype, shape: shape.clone(), strides: None, conversion, data };
        if tensors.insert(name.clone(), stored).is_some() {
            return Err(wrong(HeaderError::Twice { what: "tensor", name }).into());
        }
    }
    Ok((map, tensors))
}
