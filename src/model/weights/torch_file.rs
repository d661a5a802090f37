//! Reads and writes `torch.save` files with a dictionary of tensors: the zip container of PyTorch 1.6 and later, and (only read) the older
//! stream. Nothing that the pickle refers to is ever run (see [`crate::model::weights::pickle`]).

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Cursor, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::pickle::{PickleError, Pickled, StorageRef, TensorRef, Value};
use super::tensor_file::{MappedTensors, Planned, StoredTensor, StoredType, dtype_of, map_file, storage_of};
use crate::files::{FileError, failed, write_atomic};
use crate::gguf::names::Conversion;
use crate::torch::bytes;

/// Why such a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TorchFileError {
    /// It cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    #[error("{}: {source}", path.display())]
    Pickle { path: PathBuf, source: PickleError },
    #[error("{}: not a whole file of torch.save ({reason}); it is damaged or cut off: copy it again, or convert it to safetensors", path.display())]
    Container { path: PathBuf, reason: String },
    /// It holds something else.
    #[error("{}: expected a dictionary of names and tensors (a state_dict), got another object", path.display())]
    NoStateDict { path: PathBuf },
    /// A tensor that reaches beyond its data.
    #[error("{}: tensor {name:?} of shape {shape:?}, strides {strides:?} from element {offset} reaches beyond its {elements} elements; the file is damaged", path.display())]
    OutOfBounds { path: PathBuf, name: String, shape: Vec<i64>, strides: Vec<i64>, offset: i64, elements: usize },
}

/// Key of a storage to its bytes in the file.
type Storages = HashMap<String, Range<usize>>;

/// 0x1950a86a20f9469cfc6c: the first pickle of a stream.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
const PROTOCOL_VERSION: i64 = 1001;
const ARCHIVE: &str = "archive";
/// PyTorch aligns tensors so.
const ALIGNMENT: u16 = 64;

/// Maps a file and checks every tensor in it.
///
/// # Errors
/// [`TorchFileError`] names the file and what is wrong in it.
pub(super) fn open(path: &Path) -> Result<MappedTensors, TorchFileError> {
    let data = map_file(path).map_err(failed("read", path))?;
    let file = StateDictReader { path, data };
    Ok((data, if data.starts_with(b"PK") { file.archive()? } else { file.stream()? }))
}

struct StateDictReader<'f> {
    path: &'f Path,
    data: &'static [u8],
}

impl StateDictReader<'_> {
    fn archive(&self) -> Result<BTreeMap<String, StoredTensor>, TorchFileError> {
        let mut archive = ZipArchive::new(Cursor::new(self.data)).map_err(|e| self.container(e))?;
        let (mut pickle, mut storages, mut big_endian) = (None, Storages::new(), false);
        for index in 0..archive.len() {
            let entry = archive.by_index_raw(index).map_err(|e| self.container(e))?;
            let start = usize::try_from(entry.data_start()).map_err(|e| self.container(e))?;
            let size = usize::try_from(entry.size()).map_err(|e| self.container(e))?;
            let end = start.checked_add(size).filter(|&end| end <= self.data.len());
            let range = start..end.ok_or_else(|| self.container(format_args!("{} is cut off", entry.name())))?;
            if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
                return Err(self.container(format_args!("{} is compressed", entry.name())));
            }
            match entry.name().split_once('/') {
                Some((_, "data.pkl")) => pickle = Some(range),
                Some((_, "byteorder")) => big_endian = &self.data[range] == b"big",
                Some((_, name)) => drop(name.strip_prefix("data/").map(|key| storages.insert(key.into(), range))),
                None => {}
            }
        }
        if big_endian {
            return Err(self.container("its numbers are big-endian"));
        }
        let pickle = pickle.ok_or_else(|| self.container("no data.pkl in it"))?;
        let pickled = Pickled::read(&self.data[pickle]).map_err(|e| self.pickle(e))?;
        self.place(&pickled, &storages)
    }

    fn stream(&self) -> Result<BTreeMap<String, StoredTensor>, TorchFileError> {
        let mut at = 0;
        let mut next = || {
            let pickled = Pickled::read(&self.data[at..]).map_err(|e| self.pickle(e))?;
            at += pickled.length;
            Ok::<_, TorchFileError>(pickled)
        };
        if next()?.value != Value::Long(&MAGIC) || next()?.value != Value::Int(PROTOCOL_VERSION) {
            return Err(self.container("it does not begin as one"));
        }
        let system = next()?;
        if !system.says("little_endian") {
            return Err(self.container("its numbers are big-endian"));
        }
        let (pickled, keys) = (next()?, next()?);
        let keys = keys.texts().ok_or_else(|| self.container("no list of storages behind its pickle"))?;
        let kinds: HashMap<&str, Kind> = pickled.storages().iter().map(|s| (s.key, s.kind)).collect();
        let mut storages = Storages::new();
        for key in keys {
            let kind = *kinds.get(key).ok_or_else(|| self.container(format_args!("storage {key:?} is unknown")))?;
            let range = self.next_storage(at, kind).ok_or_else(|| self.container("its data end too soon"))?;
            at = range.end;
            storages.insert(key.into(), range);
        }
        self.place(&pickled, &storages)
    }

    /// A storage of the stream at `at`: the number of its elements, and they.
    fn next_storage(&self, at: usize, kind: Kind) -> Option<Range<usize>> {
        let count = self.data.get(at..at.checked_add(8)?)?.try_into().expect("8 bytes");
        let bytes = usize::try_from(u64::from_le_bytes(count)).ok()?.checked_mul(kind.elt_size_in_bytes())?;
        let start = at + 8;
        let end = start.checked_add(bytes).filter(|&end| end <= self.data.len())?;
        Some(start..end)
    }

    fn place(
        &self,
        pickled: &Pickled<'_>,
        storages: &Storages,
    ) -> Result<BTreeMap<String, StoredTensor>, TorchFileError> {
        let tensors = pickled.tensors().ok_or_else(|| TorchFileError::NoStateDict { path: self.path.into() })?;
        let place = |(name, tensor): (&str, &TensorRef<'_>)| {
            let StorageRef { kind, key } = tensor.storage;
            let data = storages.get(key).ok_or_else(|| self.container(format_args!("no data of storage {key:?}")))?;
            let elements = data.len() / kind.elt_size_in_bytes();
            let window = window(tensor, elements).ok_or_else(|| TorchFileError::OutOfBounds {
                path: self.path.into(),
                name: name.into(),
                shape: tensor.shape.clone(),
                strides: tensor.strides.clone(),
                offset: tensor.offset,
                elements,
            })?;
            let [start, end] = [window.start, window.end].map(|at| data.start + at * kind.elt_size_in_bytes());
            let (dtype, shape, data) = (dtype_of(kind), tensor.shape.clone(), &self.data[start..end]);
            let (dtype, strides) = (StoredType::Number(dtype), unusual_strides(tensor));
            Ok((name.to_owned(), StoredTensor { dtype, shape, strides, conversion: Conversion::Same, data }))
        };
        tensors.into_iter().map(place).collect()
    }

    fn container(&self, reason: impl ToString) -> TorchFileError {
        TorchFileError::Container { path: self.path.into(), reason: reason.to_string() }
    }

    fn pickle(&self, source: PickleError) -> TorchFileError {
        TorchFileError::Pickle { path: self.path.into(), source }
    }
}

/// The elements of a storage that a tensor spans. `None` where it claims more than there is; a shape of more elements than the storage
/// has (an expanded tensor) would claim memory that the file does not hold.
fn window(tensor: &TensorRef<'_>, elements: usize) -> Option<Range<usize>> {
    let size = |number: &i64| usize::try_from(*number).ok();
    let shape = tensor.shape.iter().map(size).collect::<Option<Vec<_>>>()?;
    let strides = tensor.strides.iter().map(size).collect::<Option<Vec<_>>>()?;
    let offset = size(&tensor.offset)?;
    let numel = shape.iter().try_fold(1usize, |product, &d| product.checked_mul(d))?;
    if shape.len() != strides.len() || numel > elements {
        return None;
    }
    if numel == 0 {
        return Some(0..0);
    }
    let last = shape.iter().zip(&strides).try_fold(offset, |at, (d, s)| at.checked_add((d - 1).checked_mul(*s)?))?;
    (last < elements).then_some(offset..last + 1)
}

/// A tensor's strides, where they are not those of a contiguous one.
fn unusual_strides(TensorRef { shape, strides, .. }: &TensorRef<'_>) -> Option<Vec<i64>> {
    let mut packed = 1i64;
    let in_order = shape.iter().zip(strides).rev().all(|(&d, &stride)| {
        let is_next = d == 1 || stride == packed;
        packed = packed.saturating_mul(d.max(1));
        is_next
    });
    (!in_order).then(|| strides.clone())
}

/// Writes tensors as `torch.save` writes an `OrderedDict` of them; `torch.load(weights_only=True)` reads it. Whole or absent. Each is made
/// when its turn comes, by its place in the plan: no two are in memory.
///
/// # Errors
/// [`TorchFileError::File`], with the disk's words or those of `tensor`.
pub fn save(
    path: &Path,
    planned: &[Planned],
    tensor: &mut dyn FnMut(usize) -> io::Result<Tensor>,
) -> Result<(), TorchFileError> {
    let written = write_atomic(path, |out| {
        let mut archive = ZipWriter::new(out);
        let options = |bytes: usize| {
            let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
            stored.with_alignment(ALIGNMENT).large_file(u32::try_from(bytes).is_err())
        };
        let pickle = state_dict(planned);
        for (name, data) in [("data.pkl", pickle.as_slice()), ("byteorder", b"little"), ("version", b"3\n")] {
            archive.start_file(format!("{ARCHIVE}/{name}"), options(data.len()))?;
            archive.write_all(data)?;
        }
        for (key, plan) in planned.iter().enumerate() {
            let tensor = tensor(key)?.to_device(Device::Cpu).to_kind(plan.kind).contiguous();
            assert_eq!(tensor.size(), plan.shape, "{} as it was planned", plan.name);
            let data = bytes::raw(&tensor);
            archive.start_file(format!("{ARCHIVE}/data/{key}"), options(data.len()))?;
            archive.write_all(data)?;
        }
        archive.finish().map(drop).map_err(io::Error::from)
    });
    Ok(written.map_err(failed("write", path))?)
}

/// The pickle of an `OrderedDict` of tensors, protocol 2, storages numbered in order.
fn state_dict(planned: &[Planned]) -> Vec<u8> {
    let mut out = b"\x80\x02ccollections\nOrderedDict\n)R(".to_vec();
    for (key, Planned { name, shape, kind }) in planned.iter().enumerate() {
        let storage = storage_of(*kind);
        push_text(&mut out, name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        push_text(&mut out, "storage");
        out.extend(format!("ctorch\n{storage}\n").as_bytes());
        push_text(&mut out, &key.to_string());
        push_text(&mut out, "cpu");
        push_int(&mut out, shape.iter().product());
        out.extend(b"tQ");
        push_int(&mut out, 0);
        let stride = |axis: usize| shape[axis + 1..].iter().product();
        for numbers in [shape.clone(), (0..shape.len()).map(stride).collect()] {
            out.push(b'(');
            numbers.into_iter().for_each(|number| push_int(&mut out, number));
            out.push(b't');
        }
        out.extend(b"\x89ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.");
    out
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend(u32::try_from(text.len()).expect("a short name").to_le_bytes());
    out.extend(text.as_bytes());
}

fn push_int(out: &mut Vec<u8>, number: i64) {
    out.extend([0x8a, 8]);
    out.extend(number.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORAGE: StorageRef<'static> = StorageRef { kind: Kind::Float, key: "0" };

    fn claims(offset: i64, shape: &[i64], strides: &[i64]) -> Option<Range<usize>> {
        window(&TensorRef { storage: STORAGE, offset, shape: shape.into(), strides: strides.into() }, 6)
    }

    #[test]
    fn a_tensor_may_span_its_storage_and_no_more() {
        assert_eq!(claims(0, &[2, 3], &[3, 1]), Some(0..6));
        assert_eq!(claims(1, &[2, 2], &[3, 1]), Some(1..6));
        assert_eq!(claims(0, &[3, 2], &[1, 3]), Some(0..6), "transposed");
        assert_eq!(claims(5, &[], &[]), Some(5..6), "a scalar");
        assert_eq!(claims(0, &[0, 9], &[9, 1]), Some(0..0), "empty");
        for (offset, shape, strides) in [
            (1, &[2, 3][..], &[3, 1][..]),
            (6, &[], &[]),
            (-1, &[2], &[1]),
            (0, &[-1], &[1]),
            (0, &[2], &[-1]),
            (0, &[2, 3], &[1]),
            (0, &[1 << 40], &[0]),
            (0, &[i64::MAX, i64::MAX], &[1, 1]),
            (0, &[2], &[i64::MAX]),
            (i64::MAX, &[2], &[i64::MAX]),
        ] {
            assert_eq!(claims(offset, shape, strides), None, "{offset} {shape:?} {strides:?}");
        }
    }

    #[test]
    fn strides_of_an_empty_tensor_may_be_more_than_can_be_counted() {
        let strides = |shape: &[i64], strides: &[i64]| {
            unusual_strides(&TensorRef { storage: STORAGE, offset: 0, shape: shape.into(), strides: strides.into() })
        };
        let huge = 1 << 62;
        assert_eq!(strides(&[0, huge, huge], &[1, huge, 1]), Some(vec![1, huge, 1]));
        assert_eq!(strides(&[2, 3], &[3, 1]), None);
    }
}
