//! Reads the header of a GGUF file (versions 2 and 3, little-endian): its metadata, and which tensor lies where. What lies is refused before
//! memory is taken for it; no tensor is read.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};

use super::metadata::{MetaValue, Metadata};
use super::types::{self, TensorType};
use crate::bounds::{GGUF_ELEMENTS, GGUF_ENTRIES, GGUF_NAME_BYTES, GGUF_TEXT_BYTES};

const MAGIC: &[u8; 4] = b"GGUF";
/// Without `general.alignment`.
const ALIGNMENT: u64 = 32;
const AXES: u32 = 4;

/// What is wrong with a header.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("not a GGUF file: expected the bytes \"GGUF\" at its beginning, got {0:?}")]
    Magic(String),
    #[error("expected GGUF version 2 or 3, got {0}")]
    Version(u32),
    #[error("a big-endian GGUF file; only little-endian ones are read")]
    BigEndian,
    #[error("cut off in {0}; download the file again")]
    Short(String),
    #[error("{what}: expected at most {most}, got {got}")]
    Bound { what: String, most: u64, got: u64 },
    #[error("{what}: not UTF-8")]
    Text { what: String },
    #[error("{key}: expected {expected}, got {got}")]
    Value { key: String, expected: String, got: String },
    #[error("tensor {name:?}: expected {expected}, got {got}")]
    Tensor { name: String, expected: String, got: String },
    #[error("{what} {name:?} is there twice")]
    Twice { what: &'static str, name: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A tensor as the header describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    /// Slowest axis first, as in torch; the file has them the other way round.
    pub shape: Vec<i64>,
    pub kind: &'static TensorType,
    /// Its first byte in the file.
    pub start: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A header that was checked against the length of its file.
#[derive(Debug)]
pub struct Header {
    pub metadata: Metadata,
    pub tensors: BTreeMap<String, TensorEntry>,
}

impl Header {
    /// Reads the header of a file of `length` bytes.
    ///
    /// # Errors
    /// [`HeaderError`] names the key or the tensor.
    pub fn read(source: impl Read, length: u64) -> Result<Self, HeaderError> {
        let mut reader = HeaderReader { source, at: 0, length };
        let magic = reader.array::<4>(&"the first bytes")?;
        if magic != *MAGIC {
            return Err(HeaderError::Magic(String::from_utf8_lossy(&magic).into_owned()));
        }
        match reader.u32(&"the version")? {
            2 | 3 => {}
            version if [2, 3].contains(&version.swap_bytes()) => return Err(HeaderError::BigEndian),
            version => return Err(HeaderError::Version(version)),
        }
        let [tensors, keys] = [reader.count("tensors")?, reader.count("metadata keys")?];
        let metadata = reader.metadata(keys)?;
        let alignment = alignment(&metadata)?;
        let entries = (0..tensors).map(|_| reader.entry()).collect::<Result<Vec<_>, _>>()?;
        let data = reader.at.next_multiple_of(alignment);
        let tensors = placed(entries, data, alignment, length)?;
        Ok(Self { metadata, tensors })
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, HeaderError> {
    const KEY: &str = "general.alignment";
    let Some(value) = metadata.get(KEY) else { return Ok(ALIGNMENT) };
    let number = value.integer().and_then(|number| u64::try_from(number).ok());
    number.filter(|number| number.is_power_of_two() && (8..=1 << 20).contains(number)).ok_or_else(|| {
        HeaderError::Value {
            key: KEY.into(),
            expected: "a power of two from 8 to 1048576".into(),
            got: value.to_string(),
        }
    })
}

/// The tensors by name. They lie at multiples of the alignment, within the file, and none in another.
fn placed(
    mut entries: Vec<(String, TensorEntry)>,
    data: u64,
    alignment: u64,
    length: u64,
) -> Result<BTreeMap<String, TensorEntry>, HeaderError> {
    entries.sort_by_key(|(_, entry)| entry.start);
    let mut end = 0;
    for (name, TensorEntry { start, bytes, .. }) in &mut entries {
        let wrong = |expected, got: u64| HeaderError::Tensor { name: name.clone(), expected, got: got.to_string() };
        if !start.is_multiple_of(alignment) {
            return Err(wrong(format!("an offset that is a multiple of {alignment}"), *start));
        }
        if *start < end {
            return Err(wrong(format!("an offset behind the tensor before it, which ends at {end}"), *start));
        }
        end = start
            .checked_add(*bytes)
            .filter(|end| data.checked_add(*end).is_some_and(|end| end <= length))
            .ok_or_else(|| {
                wrong(
                    format!("{bytes} bytes within the file's {length}; download the file again"),
                    data.saturating_add(*start),
                )
            })?;
        *start += data;
    }
    let mut tensors = BTreeMap::new();
    for (name, entry) in entries {
        if tensors.insert(name.clone(), entry).is_some() {
            return Err(HeaderError::Twice { what: "tensor", name });
        }
    }
    Ok(tensors)
}

/// Where something that is read belongs, for errors.
type What<'w> = &'w dyn fmt::Display;

struct HeaderReader<R> {
    source: R,
    at: u64,
    length: u64,
}

impl<R: Read> HeaderReader<R> {
    fn array<const N: usize>(&mut self, what: What) -> Result<[u8; N], HeaderError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], what: What) -> Result<(), HeaderError> {
        self.source.read_exact(bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => HeaderError::Short(what.to_string()),
            _ => error.into(),
        })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn u32(&mut self, what: What) -> Result<u32, HeaderError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: What) -> Result<u64, HeaderError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of entries, each of which takes more than a byte.
    fn count(&mut self, what: &'static str) -> Result<u64, HeaderError> {
        let got = self.u64(&what)?;
        let most = GGUF_ENTRIES.min(self.length);
        if got > most {
            return Err(HeaderError::Bound { what: format!("number of {what}"), most, got });
        }
        Ok(got)
    }

    /// Text of at most `most` bytes, and no more than the file has left.
    fn text(&mut self, what: What, most: u64) -> Result<String, HeaderError> {
        let got = self.u64(what)?;
        if got > self.length.saturating_sub(self.at) {
            return Err(HeaderError::Short(what.to_string()));
        }
        if got > most {
            return Err(HeaderError::Bound { what: format!("bytes of {what}"), most, got });
        }
        let mut bytes = vec![0; got as usize];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| HeaderError::Text { what: what.to_string() })
    }

    fn metadata(&mut self, keys: u64) -> Result<Metadata, HeaderError> {
        let mut metadata = Metadata::default();
        for number in 0..keys {
            let key = self.text(&format_args!("metadata key {number}"), GGUF_NAME_BYTES)?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind)?;
            if metadata.insert(key.clone(), value) {
                return Err(HeaderError::Twice { what: "metadata key", name: key });
            }
        }
        Ok(metadata)
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<MetaValue, HeaderError> {
        const ARRAY: u32 = 9;
        if kind != ARRAY {
            return self.scalar(key, kind);
        }
        let kind = self.u32(&key)?;
        let (count, least) = (self.u64(&key)?, least_bytes(kind).ok_or_else(|| unknown(key, kind))?);
        if count > self.length.saturating_sub(self.at) / least {
            return Err(HeaderError::Short(format!("the {count} elements of {key}")));
        }
        if count > GGUF_ELEMENTS {
            return Err(HeaderError::Bound { what: format!("elements of {key}"), most: GGUF_ELEMENTS, got: count });
        }
        (0..count).map(|_| self.scalar(key, kind)).collect::<Result<_, _>>().map(MetaValue::List)
    }

    fn scalar(&mut self, key: &str, kind: u32) -> Result<MetaValue, HeaderError> {
        Ok(match kind {
            0 => MetaValue::Integer(u8::from_le_bytes(self.array(&key)?).into()),
            1 => MetaValue::Integer(i8::from_le_bytes(self.array(&key)?).into()),
            2 => MetaValue::Integer(u16::from_le_bytes(self.array(&key)?).into()),
            3 => MetaValue::Integer(i16::from_le_bytes(self.array(&key)?).into()),
            4 => MetaValue::Integer(u32::from_le_bytes(self.array(&key)?).into()),
            5 => MetaValue::Integer(i32::from_le_bytes(self.array(&key)?).into()),
            6 => finite(key, decimal(f32::from_le_bytes(self.array(&key)?)))?,
            7 => MetaValue::Bool(self.array::<1>(&key)? != [0]),
            8 => MetaValue::Text(self.text(&key, GGUF_TEXT_BYTES)?),
            10 => {
                let number = self.u64(&key)?;
                MetaValue::Integer(i64::try_from(number).map_err(|_| HeaderError::Bound {
                    what: key.to_owned(),
                    most: i64::MAX as u64,
                    got: number,
                })?)
            }
            11 => MetaValue::Integer(i64::from_le_bytes(self.array(&key)?)),
            12 => finite(key, f64::from_le_bytes(self.array(&key)?))?,
            _ => return Err(unknown(key, kind)),
        })
    }

    fn entry(&mut self) -> Result<(String, TensorEntry), HeaderError> {
        let name = self.text(&"the name of a tensor", GGUF_NAME_BYTES)?;
        let wrong = |expected: String, got: String| HeaderError::Tensor { name: name.clone(), expected, got };
        let axes = self.u32(&name)?;
        if !(1..=AXES).contains(&axes) {
            return Err(wrong(format!("1 to {AXES} axes"), axes.to_string()));
        }
        let mut shape: Vec<u64> = (0..axes).map(|_| self.u64(&name)).collect::<Result<_, _>>()?;
        let id = self.u32(&name)?;
        let start = self.u64(&name)?;
        let kind =
            TensorType::find(id).ok_or_else(|| wrong(format!("one of {}", types::names()), types::other_name(id)))?;
        let (numbers, row) = (kind.numbers as u64, shape[0]);
        let numel = shape.iter().try_fold(1u64, |numel, &length| numel.checked_mul(length).filter(|_| length > 0));
        let bytes = numel.and_then(|numel| (numel / numbers).checked_mul(kind.bytes as u64));
        let bytes = bytes.filter(|bytes| *bytes <= self.length);
        let bytes = bytes.ok_or_else(|| wrong("a shape within the file".into(), format!("{shape:?}")))?;
        if !row.is_multiple_of(numbers) {
            return Err(wrong(format!("rows of whole blocks of {numbers} {kind:?} numbers"), format!("rows of {row}")));
        }
        shape.reverse();
        let shape = shape.into_iter().map(u64::cast_signed).collect();
        Ok((name, TensorEntry { shape, kind, start, bytes }))
    }
}

fn unknown(key: &str, kind: u32) -> HeaderError {
    let got = if kind == 9 { "an array in an array".into() } else { format!("type {kind}") };
    HeaderError::Value {
        key: key.to_owned(),
        expected: "a number, a bool, text or an array of one of them".into(),
        got,
    }
}

/// The double whose decimal digits are those of the float: 1e-5 stays 1e-5, as it was before the file was written.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().expect("a float's own digits")
}

/// A number that is one: what a damaged value would stand for is the default of its key.
fn finite(key: &str, number: f64) -> Result<MetaValue, HeaderError> {
    let wrong = || HeaderError::Value { key: key.into(), expected: "a finite number".into(), got: number.to_string() };
    if number.is_finite() { Ok(MetaValue::Float(number)) } else { Err(wrong()) }
}

/// The least bytes of a value of a type that is read.
fn least_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        8 | 10..=12 => Some(8),
        _ => None,
    }
}
