//! Reads and writes tensors in safetensors files. In a folder without safetensors, `pytorch_model.bin` or its shards are read; they are never
//! written, and no code in them is run.
//!
//! Files are memory-mapped: a tensor of the file's own dtype on the CPU is a view of the mapping, so no second copy of the
//! weights is ever in memory. Every header is validated before a byte of data is looked at.
#![expect(
    unsafe_code,
    reason = "memory maps: the file must not be truncated while the program runs, as with every loader of safetensors"
)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use memmap2::UncheckedAdvice;
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use crate::files;
use crate::model::stored::blocks::Blocks;
use crate::model::weights::finite::{NonFinite, first_not_finite};
pub use crate::model::weights::tensor_file::{Planned, dtype_of};
use crate::model::weights::tensor_file::{StoredTensor, StoredType, is_float};
use crate::model::weights::weight_file::WeightFile;
use crate::torch::bytes;

mod bits;
mod decoded;
mod error;
mod finite;
mod gguf_file;
mod listing;
pub mod pickle;
mod safetensors_file;
mod save;
mod tensor_file;
pub mod torch_file;
mod weight_file;

pub use error::WeightsError;
use listing::WeightListing;
pub use listing::{MODEL_FILE, MODEL_INDEX, TORCH_FILE, TORCH_INDEX, files_of, files_with};
pub use save::{save, save_each, save_model};

/// One or more files of weights, mapped, their headers validated.
#[derive(Debug)]
pub struct WeightFiles {
    files: Vec<WeightFile>,
    /// Tensor name to index in `files`.
    file_of: HashMap<String, usize>,
    source: PathBuf,
}

/// A tensor as the header of its file describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorHeader {
    pub name: String,
    /// As safetensors calls it.
    pub dtype: String,
    pub shape: Vec<i64>,
    /// Bytes of its elements.
    #[serde(skip)]
    pub bytes: usize,
}

impl WeightFiles {
    /// Maps the weights of a Hugging Face folder: `model.safetensors`, else the shards of `model.safetensors.index.json`; where neither is
    /// there, `pytorch_model.bin` or its shards.
    ///
    /// # Errors
    /// [`WeightsError`] for whatever is missing or damaged.
    pub fn open(folder: &Path) -> Result<Self, WeightsError> {
        Self::from_listing(WeightListing::of(folder)?)
    }

    /// As [`WeightFiles::open`], for these tensors: shards without any of them need not be there.
    ///
    /// # Errors
    /// As [`WeightFiles::open`].
    pub fn open_tensors(folder: &Path, names: &[&str]) -> Result<Self, WeightsError> {
        Self::from_listing(WeightListing::from_tensors(folder, names)?)
    }

    fn from_listing(WeightListing { source, weight_map, paths }: WeightListing) -> Result<Self, WeightsError> {
        let Some(weight_map) = weight_map else { return Self::open_file(&source) };
        let files = paths
            .iter()
            .map(|shard| WeightFile::open(shard))
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        let path = |shard: &String| files::parent(&source).join(shard);
        let place =
            |shard: &String| paths.iter().position(|s| *s == path(shard)).expect("every shard was listed above");
        let file_of = weight_map.iter().map(|(name, shard)| (name.clone(), place(shard))).collect();
        Ok(Self { files, file_of, source })
    }

    /// Maps one file: of `torch.save` where its name ends in `.bin`, `.pt` or `.pth`, else safetensors; or the shards that an index
    /// (`.json`) names.
    ///
    /// # Errors
    /// [`WeightsError`] for whatever is missing or damaged.
    pub fn open_file(path: &Path) -> Result<Self, WeightsError> {
        if path.extension().is_some_and(|extension| extension == "json") {
            return Self::from_listing(WeightListing::from_index(path.to_owned())?);
        }
        let files = WeightFile::open(path)?;
        let names = |(at, file): (usize, &WeightFile)| {
            file.tensors.keys().map(move |name| (name.clone(), at)).collect::<Vec<_>>()
        };
        let file_of = files.iter().enumerate().flat_map(names).collect();
        Ok(Self { files, file_of, source: path.into() })
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.file_of.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Every tensor of every file, and its file, also where an index leaves it out or says that it is in another file.
    pub fn in_files(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.files.iter().flat_map(|file| file.tensors.keys().map(|name| (name.as_str(), file.path.as_path())))
    }

    /// Every tensor, sorted by name.
    pub fn tensors(&self) -> Vec<TensorHeader> {
        let header = |name: &str| {
            let tensor = self.find(name).ok()?.1;
            let numel = tensor.shape.iter().product::<i64>().unsigned_abs() as usize; // its data may be more of its storage
            let bytes = match (tensor.dtype, tensor.kind()) {
                (StoredType::Number(_), Some(kind)) => numel * kind.elt_size_in_bytes(),
                _ => tensor.data.len(),
            };
            let (dtype, shape) = (format!("{:?}", tensor.dtype), tensor.shape.clone());
            Some(TensorHeader { name: name.to_owned(), dtype, shape, bytes })
        };
        self.names().into_iter().filter_map(header).collect()
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
        Ok(self.find(name)?.1.shape.clone())
    }

    /// The dtype of a tensor, if it is one that we read.
    pub fn kind(&self, name: &str) -> Option<Kind> {
        self.find(name).ok()?.1.kind()
    }

    /// The file that holds a tensor.
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        self.file_of.get(name).map(|&at| self.files[at].path.as_path())
    }

    /// Whether two names refer to the same memory.
    pub fn same_memory(&self, one: &str, other: &str) -> bool {
        let place = |name: &str| {
            let StoredTensor { data, shape, strides, .. } = self.find(name).ok()?.1;
            (!data.is_empty()).then_some((data.as_ptr_range(), shape, strides))
        };
        place(one).is_some() && place(one) == place(other)
    }

    /// The tensor as it lies in the file: a view of the mapping, read-only, of the file's dtype.
    ///
    /// # Errors
    /// [`WeightsError`] if it is missing, or of a shape or dtype that is not expected.
    pub fn mapped(&self, name: &str, shape: &[i64]) -> Result<Tensor, WeightsError> {
        self.view(name, shape, None)
    }

    /// The weight in the blocks of a GGUF file; `None` where it is stored as numbers.
    ///
    /// # Errors
    /// As [`WeightFiles::mapped`].
    pub fn blocks(&self, name: &str, shape: &[i64]) -> Result<Option<Blocks>, WeightsError> {
        Ok(self.header(name, shape, None)?.0.blocks())
    }

    /// Whether a weight is in blocks.
    pub fn is_in_blocks(&self, name: &str) -> bool {
        self.find(name).is_ok_and(|(_, tensor)| matches!(tensor.dtype, StoredType::Blocks(_)))
    }

    /// As [`WeightFiles::mapped`], of a dtype that is known; state has others than weights.
    ///
    /// # Errors
    /// As [`WeightFiles::mapped`].
    pub fn mapped_as(&self, name: &str, shape: &[i64], kind: Kind) -> Result<Tensor, WeightsError> {
        self.view(name, shape, Some(kind))
    }

    /// Whether there is a weight of this name and shape: its header is looked at, its data are not.
    ///
    /// # Errors
    /// As [`WeightFiles::mapped`].
    pub fn check(&self, name: &str, shape: &[i64]) -> Result<(), WeightsError> {
        self.header(name, shape, None).map(drop)
    }

    /// What lies where, of a tensor of this shape and dtype; without one, of any that weights can be.
    fn header(&self, name: &str, shape: &[i64], wanted: Option<Kind>) -> Result<(&StoredTensor, Kind), WeightsError> {
        let (file, tensor) = self.find(name)?;
        let (path, name) = (file.path.clone(), name.to_owned());
        if tensor.shape != shape {
            return Err(WeightsError::Shape { path, name, expected: shape.into(), got: tensor.shape.clone() });
        }
        let fits = |kind: &Kind| wanted.map_or(is_float(*kind), |wanted| *kind == wanted);
        if let Some(kind) = tensor.kind().filter(fits) {
            return Ok((tensor, kind));
        }
        let expected = wanted.map_or(FLOATS.into(), |wanted| format!("{:?}", dtype_of(wanted)));
        Err(WeightsError::Dtype { path, name, expected, got: format!("{:?}", tensor.dtype) })
    }

    fn view(&self, name: &str, shape: &[i64], wanted: Option<Kind>) -> Result<Tensor, WeightsError> {
        let (tensor, kind) = self.header(name, shape, wanted)?;
        if !tensor.is_as_stored() {
            return Ok(tensor.decoded(kind));
        }
        let StoredTensor { data, strides, .. } = tensor;
        if let Some(strides) = strides {
            let elements = (data.len() / kind.elt_size_in_bytes()) as i64;
            return Ok(Tensor::from_data_size(data, &[elements], kind).as_strided(shape, strides, 0).contiguous());
        }
        if data.as_ptr().addr().is_multiple_of(kind.elt_size_in_bytes()) {
            // SAFETY: the mapping is never unmapped (see [`map_file`]), and frozen weights are never written.
            return Ok(unsafe { bytes::view(data, shape, kind) });
        }
        let unaligned = Tensor::from_data_size(data, &[data.len() as i64], Kind::Uint8);
        Ok(unaligned.view_dtype(kind).view(shape))
    }

    /// The tensor in `kind` on `device`: a view of the mapping where that is what the file holds, else converted. All of it is read.
    ///
    /// # Errors
    /// As [`WeightFiles::mapped`], and [`WeightsError::NotFinite`].
    pub fn tensor(&self, name: &str, shape: &[i64], kind: Kind, device: Device) -> Result<Tensor, WeightsError> {
        self.finite(name, self.mapped(name, shape)?.to_device(device).to_kind(kind))
    }

    /// As [`WeightFiles::tensor`], in the dtype of the file.
    ///
    /// # Errors
    /// As [`WeightFiles::tensor`].
    pub fn stored(&self, name: &str, shape: &[i64], device: Device) -> Result<Tensor, WeightsError> {
        self.finite(name, self.mapped(name, shape)?.to_device(device))
    }

    /// The tensor of this name, if all its numbers are finite.
    ///
    /// # Errors
    /// [`WeightsError::NotFinite`].
    pub fn finite(&self, name: &str, tensor: Tensor) -> Result<Tensor, WeightsError> {
        let Some(NonFinite { value, at }) = first_not_finite(&tensor) else { return Ok(tensor) };
        let path = self.file_of(name).unwrap_or(&self.source).to_owned();
        Err(WeightsError::NotFinite { path, name: name.to_owned(), value, at, dtype: dtype_of(tensor.kind()) })
    }

    /// Lets the kernel drop the pages read so far from memory; views read them again on access.
    pub fn release(&self) {
        for file in &self.files {
            // SAFETY: the mapping is a file's, read-only and shared: pages dropped are read again from the file.
            let _ = unsafe { file.map.unchecked_advise(UncheckedAdvice::DontNeed) }; // advice only
        }
    }

    fn find(&self, name: &str) -> Result<(&WeightFile, &StoredTensor), WeightsError> {
        let missing = |path: &Path| WeightsError::MissingTensor { path: path.into(), name: name.into() };
        let file = self.file_of.get(name).map(|&at| &self.files[at]).ok_or_else(|| missing(&self.source))?;
        let tensor = file.tensors.get(name).ok_or_else(|| missing(&file.path))?;
        Ok((file, tensor))
    }
}

/// Whether two weights are the same but for the dtypes that they were rounded to: bfloat16 keeps 8 bits.
pub fn same_up_to_rounding(a: &Tensor, b: &Tensor) -> bool {
    const ROWS: usize = 4096; // at a time: float32 copies of a whole lm_head take a gigabyte
    let float = |tensor: &Tensor, at: i64| {
        let rows = (tensor.size()[0] - at).min(ROWS as i64);
        tensor.narrow(0, at, rows).to_device(Device::Cpu).to_kind(Kind::Float)
    };
    let close = |at: i64| float(a, at).allclose(&float(b, at), 0.01, 1e-6, false);
    a.size() == b.size() && (0..a.size()[0]).step_by(ROWS).all(close)
}

/// What weights can be.
const FLOATS: &str = "F64, F32, BF16 or F16";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::tensor_file::DTYPES;

    #[test]
    fn what_torch_file_writes_comes_back_in_every_dtype() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("heads.pt");
        for (_, kind, _) in DTYPES {
            let tensors = [
                Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([2, 3]),
                Tensor::ones([], (Kind::Int64, Device::Cpu)),
            ];
            let tensors = tensors.map(|tensor| tensor.to_kind(kind));
            let tensors = [tensors[0].tr(), tensors[1].shallow_clone()];
            let planned = [Planned::of("a".into(), &tensors[0]), Planned::of("b".into(), &tensors[1])];
            torch_file::save(&path, &planned, &mut |at| Ok(tensors[at].shallow_clone())).unwrap();
            let file = WeightFiles::open_file(&path).unwrap();
            assert_eq!(file.names(), ["a", "b"]);
            assert_eq!(file.mapped_as("a", &[3, 2], kind).unwrap(), tensors[0]);
            assert_eq!(file.mapped_as("b", &[], kind).unwrap(), tensors[1]);
            assert!(file.same_memory("a", "a") && !file.same_memory("a", "b"));
        }
    }

    #[test]
    fn a_matrix_its_transpose_and_empty_tensors_are_not_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights.safetensors");
        let [matrix, empty] = [[2i64, 2], [0, 2]].map(|shape| Tensor::ones(shape, (Kind::Float, Device::Cpu)));
        save(&path, &[("matrix".into(), &matrix), ("empty".into(), &empty), ("other".into(), &empty)]).unwrap();
        let mut file = WeightFiles::open_file(&path).unwrap();
        let &StoredTensor { dtype, conversion, data, .. } = file.find("matrix").unwrap().1;
        let shape = vec![2, 2];
        for (name, strides) in [("again", None), ("transposed", Some(vec![1, 2]))] {
            file.file_of.insert(name.into(), 0);
            let stored = StoredTensor { dtype, conversion, shape: shape.clone(), strides, data };
            file.files[0].tensors.insert(name.into(), stored);
        }
        assert!(file.same_memory("matrix", "again") && !file.same_memory("matrix", "transposed"));
        assert!(!file.same_memory("empty", "other") && !file.same_memory("absent", "absent"));
    }

    #[test]
    fn an_index_is_read_itself_whatever_lies_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let shard = |name: &str, tensor: &str| {
            save(&folder.path().join(name), &[(tensor.into(), &Tensor::ones([2], (Kind::Float, Device::Cpu)))])
                .unwrap();
        };
        shard(MODEL_FILE, "beside");
        shard("part.safetensors", "listed");
        let opened = |name: &str, text: &str| {
            let path = folder.path().join(name);
            files::write_atomic(&path, |out| std::io::Write::write_all(out, text.as_bytes())).unwrap();
            WeightFiles::open_file(&path)
        };
        let index = opened(TORCH_INDEX, r#"{"weight_map":{"listed":"part.safetensors"}}"#).unwrap();
        assert_eq!(index.names(), ["listed"]);
        let error = opened("config.json", r#"{"hidden_size":2}"#).unwrap_err().to_string();
        assert!(error.contains("config.json: missing field `weight_map`"), "{error}");
    }
}
