//! What files of tensors have in common, whoever's format they have: how one is mapped, which dtypes there are, what will be written.
#![expect(
    unsafe_code,
    reason = "memory maps: the file must not be truncated while the program runs, as with every loader of safetensors"
)]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;
use safetensors::Dtype;
use tch::{Kind, Tensor};

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

    /// Bytes of its elements.
    pub(super) fn bytes(&self) -> usize {
        let numel: i64 = self.shape.iter().product();
        usize::try_from(numel).expect("a shape has no negative length") * self.kind.elt_size_in_bytes()
    }
}

/// Maps a whole file, read-only.
pub(super) fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: our own writers replace files by renaming and never change one in place.
    unsafe { Mmap::map(&file) }
}

/// What we write and read.
const DTYPES: [(Dtype, Kind); 10] = [
    (Dtype::F64, Kind::Double),
    (Dtype::F32, Kind::Float),
    (Dtype::BF16, Kind::BFloat16),
    (Dtype::F16, Kind::Half),
    (Dtype::I64, Kind::Int64),
    (Dtype::I32, Kind::Int),
    (Dtype::I16, Kind::Int16),
    (Dtype::I8, Kind::Int8),
    (Dtype::U8, Kind::Uint8),
    (Dtype::BOOL, Kind::Bool),
];

/// The dtype of tensors that safetensors calls so, if it is one that we read.
pub(super) fn kind_of(dtype: Dtype) -> Option<Kind> {
    DTYPES.iter().find(|(d, _)| *d == dtype).map(|(_, kind)| *kind)
}

/// What safetensors calls a dtype that we write.
pub fn dtype_of(kind: Kind) -> Dtype {
    DTYPES.iter().find(|(_, k)| *k == kind).expect("a dtype that we write").0
}

/// Whether weights can be of it.
pub(super) fn is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Double | Kind::Float | Kind::BFloat16 | Kind::Half)
}
