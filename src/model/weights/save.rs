//! Tensors to safetensors files: one, or shards and their index. Files are whole or absent, and no two tensors are made at once.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use tch::{Device, Tensor};

use super::{MODEL_FILE, MODEL_INDEX, WeightsError};
use crate::files::{failed, write_atomic, write_json};
use crate::model::weights::tensor_file::{Planned, dtype_of};
use crate::torch::bytes;

/// Writes tensors, in the order given, as one safetensors file, fsynced; each is copied to the CPU when its turn comes.
/// The file appears under its name only when it is whole. (The crate's own `serialize_to_file` makes files that nobody but
/// their owner can read.)
///
/// # Errors
/// [`WeightsError::File`], with the disk's words.
pub fn save(path: &Path, tensors: &[(String, &Tensor)]) -> Result<(), WeightsError> {
    let planned: Vec<Planned> = tensors.iter().map(|(name, tensor)| Planned::of(name.clone(), tensor)).collect();
    save_each(path, &planned, &mut |at| Ok(tensors[at].1.shallow_clone()))
}

/// As [`save`], of tensors that are made when their turn comes, by their place in the plan: no two are in memory.
///
/// # Errors
/// [`WeightsError::File`], with the disk's words or those of `tensor`.
pub fn save_each(
    path: &Path,
    planned: &[Planned],
    tensor: &mut dyn FnMut(usize) -> io::Result<Tensor>,
) -> Result<(), WeightsError> {
    let header = header(planned).map_err(io::Error::other).map_err(failed("write", path))?;
    let written = write_atomic(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (at, plan) in planned.iter().enumerate() {
            let tensor = tensor(at)?.to_device(Device::Cpu).to_kind(plan.kind).contiguous();
            assert_eq!(tensor.size(), plan.shape, "{} as it was planned", plan.name);
            out.write_all(bytes::raw(&tensor))?;
        }
        Ok(())
    });
    Ok(written.map_err(failed("write", path))?)
}

/// Weights of a Hugging Face folder, as [`save_each`]: `model.safetensors`, or shards of at most `shard_bytes` (or one tensor) and their
/// index.
///
/// # Errors
/// As [`save_each`].
pub fn save_model(
    folder: &Path,
    planned: &[Planned],
    shard_bytes: usize,
    tensor: &mut dyn FnMut(usize) -> io::Result<Tensor>,
) -> Result<(), WeightsError> {
    let shards = shards(planned, shard_bytes);
    if shards.len() == 1 {
        return save_each(&folder.join(MODEL_FILE), planned, tensor);
    }
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        weight_map.extend(planned[shard.clone()].iter().map(|plan| (plan.name.clone(), file.clone())));
        save_each(&folder.join(&file), &planned[shard.clone()], &mut |at| tensor(shard.start + at))?;
    }
    let total_size: usize = planned.iter().map(Planned::bytes).sum();
    let index = serde_json::json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
    let path = folder.join(MODEL_INDEX);
    Ok(write_json(&path, &index).map_err(failed("write", &path))?)
}

/// Consecutive tensors of at most `shard_bytes` together; at least one shard.
fn shards(planned: &[Planned], shard_bytes: usize) -> Vec<Range<usize>> {
    let (mut shards, mut start, mut bytes) = (vec![], 0, 0usize);
    for (at, plan) in planned.iter().enumerate() {
        if at > start && bytes + plan.bytes() > shard_bytes {
            shards.push(start..at);
            (start, bytes) = (at, 0);
        }
        bytes += plan.bytes();
    }
    shards.push(start..planned.len());
    shards
}

/// The JSON header, padded so that the data behind it is aligned.
fn header(planned: &[Planned]) -> Result<Vec<u8>, SafeTensorError> {
    let mut end = 0;
    let mut info = |plan: &Planned| {
        let start = end;
        end += plan.bytes();
        let shape = plan.shape.iter().map(|&d| usize::try_from(d).expect("a length is not negative")).collect();
        TensorInfo { dtype: dtype_of(plan.kind), shape, data_offsets: (start, end) }
    };
    let infos = planned.iter().map(|plan| (plan.name.clone(), info(plan))).collect();
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]); // transformers refuses files without it
    let mut header = serde_json::to_vec(&Metadata::new(Some(format), infos)?)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::model::weights::WeightFiles;

    fn planned(sizes: &[i64]) -> Vec<Planned> {
        let plan = |(at, &size): (usize, &i64)| Planned { name: format!("t{at}"), shape: vec![size], kind: Kind::Half };
        sizes.iter().enumerate().map(plan).collect()
    }

    #[test]
    fn shards_hold_what_fits_and_at_least_one_tensor() {
        assert_eq!(shards(&planned(&[4, 4, 4]), 16), [0..2, 2..3]);
        assert_eq!(shards(&planned(&[40, 1, 1]), 16), [0..1, 1..3]);
        assert_eq!(shards(&planned(&[4, 4, 4]), 24).len(), 1);
    }

    #[test]
    fn sharded_weights_come_back_by_their_index() {
        let folder = tempfile::tempdir().unwrap();
        let plan = planned(&[4, 8, 2]);
        save_model(folder.path(), &plan, 16, &mut |at| {
            Ok(Tensor::full(plan[at].shape.as_slice(), at as i64, (Kind::Float, Device::Cpu)))
        })
        .unwrap();
        assert!(folder.path().join("model-00003-of-00003.safetensors").exists());
        let files = WeightFiles::open(folder.path()).unwrap();
        for (at, Planned { name, shape, kind }) in plan.iter().enumerate() {
            let expected = Tensor::full(shape.as_slice(), at as i64, (*kind, Device::Cpu));
            assert_eq!(files.mapped_as(name, shape, *kind).unwrap(), expected);
        }
    }
}
