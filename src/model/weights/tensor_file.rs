//! What files of tensors have in common, whatever their format: how one is mapped, which dtypes there are, what will be written.
#![expect(
    unsafe_code,
    reason = "memory maps: the file must not be truncated while the program runs, as with every loader of safetensors"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::Path;

use crate::files::{self, WrongContent};
use crate::gguf::names::Conversion;
use crate::gguf::types::TensorType;
use memmap2::Mmap;
use safetensors::Dtype;
use tch::{Kind, Tensor};

/// A tensor that will be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    pub name: String,
    pub shape: Vec<i64>,
    pub kind: Kind,
}

impl Planned {
    /// A tensor by the name that it will have.
    pub fn of(name: String, tensor: &Tensor) -> Self {
        Self { name, shape: tensor.size(), kind: tensor.kind() }
    }

    /// Bytes of its elements.
    pub(super) fn bytes(&self) -> usize {
        let numel: i64 = self.shape.iter().product();
        usize::try_from(numel).expect("a shape has no negative length") * self.kind.elt_size_in_bytes()
    }
}

/// A tensor as it lies in its file.
#[derive(Debug)]
pub(super) struct StoredTensor {
    pub(super) dtype: StoredType,
    pub(super) shape: Vec<i64>,
    /// Where they are not those of a contiguous tensor.
    pub(super) strides: Option<Vec<i64>>,
    /// How its numbers differ from those of the weight.
    pub(super) conversion: Conversion,
    /// From its first element to its last.
    pub(super) data: &'static [u8],
}

impl StoredTensor {
    /// `None`: one that we do not read. Blocks are float32 once they are dequantised.
    pub(super) fn kind(&self) -> Option<Kind> {
        match self.dtype {
            StoredType::Number(of) => DTYPES.iter().find(|(dtype, ..)| *dtype == of).map(|(_, kind, _)| *kind),
            StoredType::Blocks(_) => Some(Kind::Float),
        }
    }

    /// Whether the weight lies in the file as it is.
    pub(super) fn is_as_stored(&self) -> bool {
        matches!(self.dtype, StoredType::Number(_)) && self.conversion == Conversion::Same
    }

    /// The bytes of each element, in the order of a contiguous tensor.
    pub(super) fn elements(&self, kind: Kind) -> impl Iterator<Item = &'static [u8]> {
        let (numel, bytes, data) = (self.shape.iter().product::<i64>(), kind.elt_size_in_bytes(), self.data);
        (0..numel).map(move |index| &data[self.position(index) * bytes..][..bytes])
    }

    /// Where an element of the contiguous tensor is in the data.
    fn position(&self, index: i64) -> usize {
        let Some(strides) = &self.strides else { return index as usize };
        let mut rest = index;
        let axes = self.shape.iter().zip(strides).rev();
        let position: i64 = axes
            .map(|(&d, &stride)| {
                let at = rest % d;
                rest /= d;
                at * stride
            })
            .sum();
        position as usize
    }
}

/// What the elements of a stored tensor are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StoredType {
    Number(Dtype),
    /// GGUF's.
    Blocks(&'static TensorType),
}

impl fmt::Debug for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(dtype) => dtype.fmt(f),
            Self::Blocks(kind) => kind.fmt(f),
        }
    }
}

/// A mapped file, and its tensors by name, all of them checked.
pub(super) type MappedTensors = (&'static Mmap, BTreeMap<String, StoredTensor>);

/// Maps a whole file, read-only. It is leaked on purpose: tensors are views of it and carry no lifetime. That costs address space, not
/// memory, and keeps a removed file's disk space until the process ends.
pub(super) fn map_file(path: &Path) -> io::Result<&'static Mmap> {
    let file = files::open_regular(path)?;
    // SAFETY: our own writers replace files by renaming and never change one in place.
    let map = unsafe { Mmap::map(&file)? };
    WrongContent::in_binary(&map).map_or(Ok(Box::leak(Box::new(map))), |wrong| Err(wrong.into()))
}

/// What we write and read: in safetensors' words, in ours, and torch's class of storages.
pub(super) const DTYPES: [(Dtype, Kind, &str); 10] = [
    (Dtype::F64, Kind::Double, "DoubleStorage"),
    (Dtype::F32, Kind::Float, "FloatStorage"),
    (Dtype::BF16, Kind::BFloat16, "BFloat16Storage"),
    (Dtype::F16, Kind::Half, "HalfStorage"),
    (Dtype::I64, Kind::Int64, "LongStorage"),
    (Dtype::I32, Kind::Int, "IntStorage"),
    (Dtype::I16, Kind::Int16, "ShortStorage"),
    (Dtype::I8, Kind::Int8, "CharStorage"),
    (Dtype::U8, Kind::Uint8, "ByteStorage"),
    (Dtype::BOOL, Kind::Bool, "BoolStorage"),
];

/// The dtype of torch's class of storages, if it is one that we read.
pub(super) fn kind_of_storage(class: &str) -> Option<Kind> {
    DTYPES.iter().find(|(.., storage)| *storage == class).map(|(_, kind, _)| *kind)
}

/// What safetensors calls a dtype that we write.
pub fn dtype_of(kind: Kind) -> Dtype {
    row_of(kind).0
}

/// Torch's class of storages of a dtype that we write.
pub(super) fn storage_of(kind: Kind) -> &'static str {
    row_of(kind).2
}

fn row_of(kind: Kind) -> (Dtype, Kind, &'static str) {
    *DTYPES.iter().find(|(_, k, _)| *k == kind).expect("a dtype that we write")
}

/// Whether weights can be of it.
pub(super) fn is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Double | Kind::Float | Kind::BFloat16 | Kind::Half)
}
