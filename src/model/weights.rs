//! safetensors files to tensors and back, and the one table of Hugging Face's weight names.
//!
//! Files are memory-mapped: a tensor of the file's own dtype on the CPU is a view of the mapping, so no second copy of the
//! weights is ever in memory. Every header is validated before a byte of data is looked at.
#![expect(
    unsafe_code,
    reason = "memory maps: the file must not be truncated while the program runs, as with every loader of safetensors"
)]

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::files::{write_atomic, write_json};
use crate::torch::bytes;

/// Hugging Face's names of a Llama's weights.
pub mod names {
    /// `[V, H]`.
    pub const EMBED_TOKENS: &str = "model.embed_tokens.weight";
    /// `[H]`, the final norm.
    pub const NORM: &str = "model.norm.weight";
    /// `[V, H]`, absent when tied.
    pub const LM_HEAD: &str = "lm_head";
    /// `[H]`, before attention.
    pub const INPUT_LAYERNORM: &str = "input_layernorm.weight";
    /// `[H]`, before the MLP.
    pub const POST_ATTENTION_LAYERNORM: &str = "post_attention_layernorm.weight";
    /// Query, key and value projections.
    pub const QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
    /// Output projection of attention.
    pub const O: &str = "self_attn.o_proj";
    /// Gate and up projections.
    pub const GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];
    /// Down projection.
    pub const DOWN: &str = "mlp.down_proj";

    /// The full name of a part of decoder layer `layer`.
    pub fn in_layer(layer: usize, part: &str) -> String {
        format!("model.layers.{layer}.{part}")
    }
}

/// The weights of a Hugging Face folder, where one file holds them.
pub const MODEL_FILE: &str = "model.safetensors";
/// Where several do, which tensor lies in which.
pub const MODEL_INDEX: &str = "model.safetensors.index.json";

/// What makes weights unusable.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A file that cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A folder without weights.
    #[error("{} has neither model.safetensors nor model.safetensors.index.json; weights in other formats must be converted to safetensors", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
    },
    /// The index is no JSON, or has no `weight_map`.
    #[error("{}: {source}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// An index that names files elsewhere.
    #[error("{}: weight_map: expected names of files beside it, got {name:?}", index.display())]
    ShardName {
        /// The index.
        index: PathBuf,
        /// What it names.
        name: String,
    },
    /// A shard that the index names is not there.
    #[error("{} is missing, which {} names; {present} of {expected} shards are there: download the folder again", shard.display(), index.display())]
    MissingShard {
        /// The missing file.
        shard: PathBuf,
        /// The index.
        index: PathBuf,
        /// Shards found.
        present: usize,
        /// Shards named.
        expected: usize,
    },
    /// The header or the size of a file is not safetensors.
    #[error("{}: not a whole safetensors file ({reason}); its {bytes} bytes are damaged or cut off: copy it again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The header's fault.
        reason: SafeTensorError,
        /// Its size.
        bytes: u64,
    },
    /// A tensor that has to be there.
    #[error("{}: no tensor {name:?}", path.display())]
    MissingTensor {
        /// Where it was looked for.
        path: PathBuf,
        /// Its name.
        name: String,
    },
    /// A tensor of another shape.
    #[error("{}: tensor {name:?}: expected shape {expected:?}, got {got:?}; do config.json and the weights belong together?", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// From the config.
        expected: Vec<i64>,
        /// In the file.
        got: Vec<i64>,
    },
    /// A tensor of a dtype that it cannot have.
    #[error("{}: tensor {name:?}: expected {expected}, got {got:?}", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What it can have.
        expected: String,
        /// In the file.
        got: Dtype,
    },
    /// Writing failed.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: SafeTensorError,
    },
}

/// One or more safetensors files, mapped, their headers validated.
#[derive(Debug)]
pub struct WeightFiles {
    files: Vec<MappedFile>,
    /// Tensor name to index in `files`.
    file_of: HashMap<String, usize>,
    source: PathBuf,
}

#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    map: &'static Mmap,
    tensors: SafeTensors<'static>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Maps the weights of a Hugging Face folder: `model.safetensors`, or the shards of `model.safetensors.index.json`.
    ///
    /// # Errors
    /// [`WeightsError`] for whatever is missing or damaged.
    pub fn open(folder: &Path) -> Result<Self, WeightsError> {
        let index_path = folder.join(MODEL_INDEX);
        let single = folder.join(MODEL_FILE);
        if index_path.exists() {
            return Self::open_shards(folder, &index_path);
        }
        if !single.exists() {
            return Err(WeightsError::NoWeights { folder: folder.into() });
        }
        Self::open_file(&single)
    }

    /// Maps one file.
    ///
    /// # Errors
    /// [`WeightsError::Io`] or [`WeightsError::Damaged`].
    pub fn open_file(path: &Path) -> Result<Self, WeightsError> {
        let file = MappedFile::open(path)?;
        let file_of = file.tensors.names().into_iter().map(|name| (name.to_owned(), 0)).collect();
        Ok(Self { files: vec![file], file_of, source: path.into() })
    }

    fn open_shards(folder: &Path, index_path: &Path) -> Result<Self, WeightsError> {
        let text = read(index_path)?;
        let index: ShardIndex =
            serde_json::from_str(&text).map_err(|source| WeightsError::Index { path: index_path.into(), source })?;
        if let Some(name) = index.weight_map.values().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
            return Err(WeightsError::ShardName { index: index_path.into(), name: name.clone() });
        }
        let mut shards: Vec<PathBuf> = index.weight_map.values().map(|name| folder.join(name)).collect();
        shards.sort();
        shards.dedup();
        let present = shards.iter().filter(|shard| shard.exists()).count();
        if let Some(missing) = shards.iter().find(|shard| !shard.exists()) {
            let expected = shards.len();
            return Err(WeightsError::MissingShard {
                shard: missing.clone(),
                index: index_path.into(),
                present,
                expected,
            });
        }
        let files = shards.iter().map(|shard| MappedFile::open(shard)).collect::<Result<Vec<_>, _>>()?;
        let place = |shard: &String| {
            shards.iter().position(|s| *s == folder.join(shard)).expect("every shard was listed above")
        };
        let file_of = index.weight_map.iter().map(|(name, shard)| (name.clone(), place(shard))).collect();
        Ok(Self { files, file_of, source: index_path.into() })
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.file_of.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.file_of.contains_key(name)
    }

    /// The shape of a tensor as it is in the file.
    ///
    /// # Errors
    /// [`WeightsError::MissingTensor`].
    pub fn shape(&self, name: &str) -> Result<Vec<i64>, WeightsError> {
        Ok(self.find(name)?.1.shape().iter().map(|&d| d as i64).collect())
    }

    /// The dtype of a tensor, if it is one that we read.
    pub fn kind(&self, name: &str) -> Option<Kind> {
        kind_of(self.find(name).ok()?.1.dtype())
    }

    /// The file that holds a tensor.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        self.file_of.get(name).map(|&at| self.files[at].path.as_path())
    }

    /// The tensor as it lies in the file: a view of the mapping, read-only, of the file's dtype.
    ///
    /// # Errors
    /// [`WeightsError`] if it is missing, or of a shape or dtype that is not expected.
    pub fn mapped(&self, name: &str, shape: &[i64]) -> Result<Tensor, WeightsError> {
        self.view(name, shape, tch_is_float, || FLOATS.into())
    }

    /// As [`WeightFiles::mapped`], of a dtype that is known; state has others than weights.
    ///
    /// # Errors
    /// As [`WeightFiles::mapped`].
    pub fn mapped_as(&self, name: &str, shape: &[i64], kind: Kind) -> Result<Tensor, WeightsError> {
        self.view(name, shape, |found| found == kind, || format!("{:?}", dtype_of(kind)))
    }

    /// Whether there is a weight of this name and shape: its header is looked at, its data are not.
    ///
    /// # Errors
    /// As [`WeightFiles::mapped`].
    pub fn check(&self, name: &str, shape: &[i64]) -> Result<(), WeightsError> {
        self.header(name, shape, tch_is_float, || FLOATS.into()).map(|_| ())
    }

    /// What lies where, of a tensor whose shape and dtype are as expected.
    fn header(
        &self,
        name: &str,
        shape: &[i64],
        accepts: impl Fn(Kind) -> bool,
        expected: impl FnOnce() -> String,
    ) -> Result<(safetensors::tensor::TensorView<'static>, Kind), WeightsError> {
        let (file, view) = self.find(name)?;
        let got: Vec<i64> = view.shape().iter().map(|&d| d as i64).collect();
        if got != shape {
            let (path, name) = (file.path.clone(), name.to_owned());
            return Err(WeightsError::Shape { path, name, expected: shape.into(), got });
        }
        let Some(kind) = kind_of(view.dtype()).filter(|&kind| accepts(kind)) else {
            let (path, name) = (file.path.clone(), name.to_owned());
            return Err(WeightsError::Dtype { path, name, expected: expected(), got: view.dtype() });
        };
        Ok((view, kind))
    }

    fn view(
        &self,
        name: &str,
        shape: &[i64],
        accepts: impl Fn(Kind) -> bool,
        expected: impl FnOnce() -> String,
    ) -> Result<Tensor, WeightsError> {
        let (view, kind) = self.header(name, shape, accepts, expected)?;
        let data = view.data();
        if data.as_ptr().addr().is_multiple_of(kind.elt_size_in_bytes()) {
            // SAFETY: the mapping is never unmapped (see `MappedFile::open`), and frozen weights are never written.
            return Ok(unsafe { bytes::view(data, shape, kind) });
        }
        let unaligned = Tensor::from_data_size(data, &[data.len() as i64], Kind::Uint8);
        Ok(unaligned.view_dtype(kind).view(shape))
    }

    /// The tensor in `kind` on `device`: a view of the mapping where that is what the file holds, else converted.
    ///
    /// # Errors
    /// As [`WeightFiles::mapped`].
    pub fn tensor(&self, name: &str, shape: &[i64], kind: Kind, device: Device) -> Result<Tensor, WeightsError> {
        Ok(self.mapped(name, shape)?.to_device(device).to_kind(kind))
    }

    /// Tells the kernel that what was read so far need not stay in memory; views read it again when they need it.
    pub fn release(&self) {
        for file in &self.files {
            // SAFETY: the mapping is a file's, read-only and shared: pages dropped are read again from the file.
            let _ = unsafe { file.map.unchecked_advise(UncheckedAdvice::DontNeed) }; // advice only
        }
    }

    fn find(&self, name: &str) -> Result<(&MappedFile, safetensors::tensor::TensorView<'static>), WeightsError> {
        let missing = |path: &Path| WeightsError::MissingTensor { path: path.into(), name: name.into() };
        let file = self.file_of.get(name).map(|&at| &self.files[at]).ok_or_else(|| missing(&self.source))?;
        let view = file.tensors.tensor(name).map_err(|_| missing(&file.path))?;
        Ok((file, view))
    }
}

impl MappedFile {
    fn open(path: &Path) -> Result<Self, WeightsError> {
        // Leaked on purpose: tensors are views of it and carry no lifetime. It costs address space, not memory, and keeps a removed file's
        // disk space until the process ends.
        let map: &'static Mmap = Box::leak(Box::new(map_file(path).map_err(|source| io_error(path, source))?));
        let tensors = SafeTensors::deserialize(map).map_err(|reason| WeightsError::Damaged {
            path: path.into(),
            reason,
            bytes: map.len() as u64,
        })?;
        Ok(Self { path: path.into(), map, tensors })
    }
}

/// Maps a whole file, read-only.
///
/// # Errors
/// Whatever the system says.
pub fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: our own writers replace files by renaming and never change one in place.
    unsafe { Mmap::map(&file) }
}

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its dtype.
    pub kind: Kind,
}

impl Planned {
    /// A tensor by the name that it will have.
    pub fn of(name: String, tensor: &Tensor) -> Self {
        Self { name, shape: tensor.size(), kind: tensor.kind() }
    }

    fn bytes(&self) -> usize {
        let numel: i64 = self.shape.iter().product();
        usize::try_from(numel).expect("a shape has no negative length") * self.kind.elt_size_in_bytes()
    }
}

/// Writes tensors, in the order given, as one safetensors file, fsynced; each is copied to the CPU when its turn comes.
/// The file appears under its name only when it is whole. (The crate's own `serialize_to_file` makes files that nobody but
/// their owner can read.)
///
/// # Errors
/// [`WeightsError::Write`], with the disk's words.
pub fn save(path: &Path, tensors: &[(String, &Tensor)]) -> Result<(), WeightsError> {
    let planned: Vec<Planned> = tensors.iter().map(|(name, tensor)| Planned::of(name.clone(), tensor)).collect();
    save_each(path, &planned, &mut |at| Ok(tensors[at].1.shallow_clone()))
}

/// As [`save`], of tensors that are made when their turn comes, by their place in the plan: no two are in memory.
///
/// # Errors
/// [`WeightsError::Write`], with the disk's words or those of `tensor`.
pub fn save_each(
    path: &Path,
    planned: &[Planned],
    tensor: &mut dyn FnMut(usize) -> io::Result<Tensor>,
) -> Result<(), WeightsError> {
    let header = header(planned).map_err(|reason| WeightsError::Write { path: path.into(), reason })?;
    let written = write_atomic(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (at, plan) in planned.iter().enumerate() {
            let tensor = tensor(at)?.to_device(Device::Cpu).to_kind(plan.kind).contiguous();
            assert_eq!(tensor.size(), plan.shape, "{} as it was planned", plan.name);
            out.write_all(bytes::of(&tensor))?;
        }
        Ok(())
    });
    written.map_err(|e| WeightsError::Write { path: path.into(), reason: e.into() })
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
    write_json(&path, &index).map_err(|source| io_error(&path, source))
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

/// What we write and read.
const DTYPES: [(Dtype, Kind); 6] = [
    (Dtype::F64, Kind::Double),
    (Dtype::F32, Kind::Float),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::F16, Kind::Half),
    (Dtype::I64, Kind::Int64),
    (Dtype::U8, Kind::Uint8),
];

fn kind_of(dtype: Dtype) -> Option<Kind> {
    DTYPES.iter().find(|(d, _)| *d == dtype).map(|(_, kind)| *kind)
}

/// What safetensors calls a dtype that we write.
pub fn dtype_of(kind: Kind) -> Dtype {
    DTYPES.iter().find(|(_, k)| *k == kind).expect("a dtype that we write").0
}

/// What weights can be.
const FLOATS: &str = "F64, F32, BF16 or F16";

fn tch_is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Double | Kind::Float | Kind::BFloat16 | Kind::Half)
}

fn read(path: &Path) -> Result<String, WeightsError> {
    fs::read_to_string(path).map_err(|source| io_error(path, source))
}

fn io_error(path: &Path, source: io::Error) -> WeightsError {
    WeightsError::Io { path: path.into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

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
