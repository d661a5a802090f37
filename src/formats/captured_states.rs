//! Hidden states that a server captured: a safetensors file for each row, with `hidden_states` `[tokens, layers, hidden]` and `token_ids`
//! `[tokens]`. vLLM's hidden-states connector writes them, and speculators' `data_generation_offline.py` names them `hs_<row>.safetensors`.
//! Nothing in a file says which layers these are: the last one is taken for the last decoder layer, before the final norm. Other programs may
//! add a `loss_mask` `[tokens]`.
//!
//! Files are opened whenever they are read: there are too many to keep them open.

use std::fs::{File, Metadata as OfDisk};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use half::{bf16, f16};
use safetensors::Dtype as StoredDtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::dtype::Dtype;
use crate::files::{self, FileError, failed};
use crate::plural::counted;

const STATES: &str = "hidden_states";
const TOKENS: &str = "token_ids";
const MASK: &str = "loss_mask";
/// Of the header's length at the beginning of a file.
const LENGTH_BYTES: usize = 8;

/// Why a file of hidden states cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CapturedError {
    #[error(transparent)]
    File(#[from] FileError),
    /// The header is not that of safetensors.
    #[error("{}: not a safetensors file ({reason}); let the server write it again", path.display())]
    Header { path: PathBuf, reason: String },
    /// The file has another size than its header says.
    #[error("{}: expected {expected} bytes, as its header says, got {got}: it is cut off or still being written; let the server write it again", path.display())]
    Size { path: PathBuf, expected: u64, got: u64 },
    #[error(
        "{}: no tensor {name:?}, only {}; expected \"{STATES}\" [tokens, layers, hidden size] and \"{TOKENS}\" [tokens], as vLLM's \
         hidden-states connector writes them", path.display(), listed(found)
    )]
    MissingTensor { path: PathBuf, name: &'static str, found: Vec<String> },
    #[error("{}: tensor {name:?}: expected shape {expected}, got {got:?}", path.display())]
    Shape {
        path: PathBuf,
        name: &'static str,
        /// The axes, and why they are expected.
        expected: String,
        got: Vec<usize>,
    },
    #[error("{}: tensor {name:?}: expected {expected}, got {got:?}", path.display())]
    Dtype { path: PathBuf, name: &'static str, expected: String, got: StoredDtype },
    #[error(
        "{}: tensor \"{TOKENS}\"[{index}]: expected a token id from 0 to {}, the backbone's vocabulary, got {id}", path.display(), vocab_size - 1
    )]
    Token { path: PathBuf, index: usize, id: i64, vocab_size: usize },
    /// The file is not the one whose header was read.
    #[error(
        "{}: changed since this run opened it: expected {expected}, got {got}; let the server finish, then start again with a new \
         output_dir; this run has used the old contents", path.display()
    )]
    Changed { path: PathBuf, expected: String, got: String },
    /// A state with NaN or infinity in it.
    #[error("{}: tensor \"{STATES}\": expected finite numbers, got {value} in layer {layer} of {layers}, token {token}", path.display())]
    NotFinite {
        path: PathBuf,
        value: f32,
        /// From 1.
        layer: usize,
        layers: usize,
        /// From 0.
        token: usize,
    },
    /// Files of several servers.
    #[error(
        "{}: tensor \"{STATES}\": expected {expected}, as in {}, got {got}; all files must come from one server with the same --target-layer-ids",
        path.display(), first.display()
    )]
    Unlike { path: PathBuf, expected: String, got: String, first: PathBuf },
    /// Nothing says which tokens carry loss.
    #[error(
        "{}: no tensor \"{MASK}\", so nothing says which tokens carry loss: name the rows that the states were computed of in data.train \
         (the folder that speculators' prepare_data.py wrote), or set data.loss_on = \"all\"", path.display()
    )]
    NoMask { path: PathBuf },
}

/// What the backbone's config says about its hidden states.
#[derive(Debug, Clone, Copy)]
pub struct StateSizes {
    pub hidden_size: usize,
    pub vocab_size: usize,
}

/// A file whose header was checked.
#[derive(Debug, Clone)]
pub struct CapturedFile {
    pub path: PathBuf,
    pub tokens: usize,
    pub layers: usize,
    pub dtype: Dtype,
    pub bytes: u64,
    /// Nanoseconds since 1970.
    pub modified: i128,
    hidden_size: usize,
    /// Where each tensor begins in the file.
    states_at: u64,
    ids: IntegersAt,
    mask: Option<IntegersAt>,
}

/// A list of integers or booleans in a file.
#[derive(Debug, Clone, Copy)]
struct IntegersAt {
    at: u64,
    dtype: StoredDtype,
}

impl CapturedFile {
    /// Reads and checks the header, no data.
    ///
    /// # Errors
    /// [`CapturedError`].
    pub fn open(path: &Path, sizes: StateSizes) -> Result<Self, CapturedError> {
        let mut file = files::open_regular(path).map_err(failed("read", path))?;
        if let Some(wrong) = files::wrong_content(&mut file).map_err(failed("read", path))? {
            return Err(CapturedError::Header { path: path.into(), reason: wrong.to_string() });
        }
        let metadata = file.metadata().map_err(failed("read", path))?;
        let (header, data_at) = header(&mut file, path, metadata.len())?;
        let expected = data_at + header.data_len() as u64;
        if expected != metadata.len() {
            return Err(CapturedError::Size { path: path.into(), expected, got: metadata.len() });
        }
        let found = FoundTensors { path, header: &header, data_at };
        let (ids, tokens) = found.token_ids()?;
        let (states_at, layers, dtype) = found.states(tokens, sizes.hidden_size)?;
        Ok(Self {
            path: path.into(),
            tokens,
            layers,
            dtype,
            bytes: metadata.len(),
            modified: modified(&metadata),
            hidden_size: sizes.hidden_size,
            states_at,
            ids,
            mask: found.mask(tokens)?,
        })
    }

    /// The token ids.
    ///
    /// # Errors
    /// An id beyond the vocabulary, or an error of reading.
    pub fn token_ids(&self, vocab_size: usize) -> Result<Vec<i32>, CapturedError> {
        let ids = self.integers(self.ids)?;
        let token = |(index, &id): (usize, &i64)| {
            let is_token = usize::try_from(id).is_ok_and(|id| id < vocab_size);
            let wrong = || CapturedError::Token { path: self.path.clone(), index, id, vocab_size };
            i32::try_from(id).ok().filter(|_| is_token).ok_or_else(wrong)
        };
        ids.iter().enumerate().map(token).collect()
    }

    /// Which tokens carry loss.
    ///
    /// # Errors
    /// [`CapturedError::NoMask`], or an error of reading.
    pub fn loss_mask(&self) -> Result<Vec<bool>, CapturedError> {
        let mask = self.mask.ok_or_else(|| CapturedError::NoMask { path: self.path.clone() })?;
        Ok(self.integers(mask)?.into_iter().map(|carries| carries != 0).collect())
    }

    /// Checks that the file has as many layers as another, of the same dtype.
    ///
    /// # Errors
    /// [`CapturedError::Unlike`].
    pub fn check_like(&self, first: &Self) -> Result<(), CapturedError> {
        let words = |file: &Self| format!("{} of {}", counted(file.layers, "layer"), file.dtype);
        let (expected, got) = (words(first), words(self));
        if expected == got {
            return Ok(());
        }
        Err(CapturedError::Unlike { path: self.path.clone(), expected, got, first: first.path.clone() })
    }

    /// Bytes of the last layer's state of one token.
    pub fn state_bytes(&self) -> usize {
        self.hidden_size * self.dtype.bytes()
    }

    /// Reads a layer's states of `positions` (ascending), one after another, into memory of [`CapturedFile::state_bytes`] for each.
    ///
    /// # Errors
    /// [`CapturedError::NotFinite`], [`CapturedError::Changed`], or an error of reading.
    pub fn read_states(&self, layer: usize, positions: &[usize], into: &mut [u8]) -> Result<(), CapturedError> {
        let (state, token) = (self.state_bytes(), (self.layers * self.state_bytes()) as u64);
        let layer_at = self.states_at + (layer * state) as u64;
        self.read(|file| {
            let mut rest = &mut *into;
            for run in self.runs(positions) {
                let (states, later) = rest.split_at_mut(run.len() * state);
                file.read_exact_at(states, layer_at + run[0] as u64 * token)?;
                rest = later;
            }
            Ok(())
        })?;
        match first_not_finite(into, self.dtype) {
            Some((at, value)) => {
                let token = positions[at / self.hidden_size];
                Err(CapturedError::NotFinite {
                    path: self.path.clone(),
                    value,
                    layer: layer + 1,
                    layers: self.layers,
                    token,
                })
            }
            None => Ok(()),
        }
    }

    /// Positions whose states lie one behind the other: with several layers each state alone.
    fn runs<'p>(&self, positions: &'p [usize]) -> impl Iterator<Item = &'p [usize]> {
        let is_single = self.layers == 1;
        positions.chunk_by(move |&one, &next| is_single && next == one + 1)
    }

    fn integers(&self, IntegersAt { at, dtype }: IntegersAt) -> Result<Vec<i64>, CapturedError> {
        let size = dtype.bitsize() / 8;
        let mut bytes = vec![0; self.tokens * size];
        self.read(|file| file.read_exact_at(&mut bytes, at))?;
        Ok(bytes.chunks_exact(size).map(|bytes| integer(bytes, dtype)).collect())
    }

    /// Reads from the file, which must still be the one whose header was read when that is done.
    fn read(&self, read: impl FnOnce(&File) -> io::Result<()>) -> Result<(), CapturedError> {
        let file = files::open_regular(&self.path).map_err(failed("read", &self.path))?;
        let done = read(&file);
        let now = file.metadata().map_err(failed("read", &self.path))?;
        let in_words = |bytes: u64, modified: i128| format!("{bytes} bytes of {}", time(modified));
        if (now.len(), modified(&now)) != (self.bytes, self.modified) {
            let (expected, got) = (in_words(self.bytes, self.modified), in_words(now.len(), modified(&now)));
            return Err(CapturedError::Changed { path: self.path.clone(), expected, got });
        }
        Ok(done.map_err(failed("read", &self.path))?)
    }
}

/// When a file was last changed, in nanoseconds since 1970.
fn modified(metadata: &OfDisk) -> i128 {
    i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec())
}

fn time(nanoseconds: i128) -> String {
    let since = u64::try_from(nanoseconds).map_or(Duration::ZERO, Duration::from_nanos);
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + since).to_string()
}

impl CapturedError {
    /// What files with this fault are counted as where they are left out; `None` for a fault that is not the file's.
    pub fn kind(&self) -> Option<&'static str> {
        match self {
            Self::File(_) | Self::NoMask { .. } | Self::Changed { .. } => None,
            Self::Header { .. } | Self::Size { .. } => Some("a damaged file of hidden states"),
            Self::MissingTensor { .. } | Self::Shape { .. } | Self::Dtype { .. } | Self::Unlike { .. } => {
                Some("hidden states of another shape")
            }
            Self::Token { .. } => Some("a token beyond the vocabulary"),
            Self::NotFinite { .. } => Some("hidden states that are not finite"),
        }
    }
}

/// The header, and where the data begin.
fn header(file: &mut File, path: &Path, bytes: u64) -> Result<(Metadata, u64), CapturedError> {
    let wrong = |reason: String| CapturedError::Header { path: path.into(), reason };
    let mut length = [0; LENGTH_BYTES];
    if bytes < LENGTH_BYTES as u64 {
        return Err(wrong(format!("it has {bytes} bytes")));
    }
    file.read_exact(&mut length).map_err(failed("read", path))?;
    let length = u64::from_le_bytes(length);
    let data_at = length.checked_add(LENGTH_BYTES as u64).filter(|&data_at| data_at <= bytes);
    let data_at =
        data_at.ok_or_else(|| wrong(format!("its header would have {length} bytes of the file's {bytes}")))?;
    let mut header = vec![0; (data_at - LENGTH_BYTES as u64) as usize];
    file.read_exact(&mut header).map_err(failed("read", path))?;
    let header = serde_json::from_slice(&header).map_err(|error| wrong(error.to_string()))?; // checks offsets and sizes
    Ok((header, data_at))
}

/// The tensors of a header.
struct FoundTensors<'h> {
    path: &'h Path,
    header: &'h Metadata,
    data_at: u64,
}

impl FoundTensors<'_> {
    fn tensor(&self, name: &'static str) -> Result<&TensorInfo, CapturedError> {
        let missing =
            || CapturedError::MissingTensor { path: self.path.into(), name, found: self.header.offset_keys() };
        self.header.info(name).ok_or_else(missing)
    }

    fn at(&self, tensor: &TensorInfo) -> u64 {
        self.data_at + tensor.data_offsets.0 as u64
    }

    fn shape(&self, name: &'static str, expected: String, got: &TensorInfo) -> CapturedError {
        CapturedError::Shape { path: self.path.into(), name, expected, got: got.shape.clone() }
    }

    fn dtype(&self, name: &'static str, expected: &str, got: &TensorInfo) -> CapturedError {
        CapturedError::Dtype { path: self.path.into(), name, expected: expected.into(), got: got.dtype }
    }

    /// Where the ids are, and how many.
    fn token_ids(&self) -> Result<(IntegersAt, usize), CapturedError> {
        let found = self.tensor(TOKENS)?;
        let [tokens] = found.shape[..] else { return Err(self.shape(TOKENS, "[tokens]".into(), found)) };
        if ![StoredDtype::I64, StoredDtype::I32].contains(&found.dtype) {
            return Err(self.dtype(TOKENS, "I64 or I32", found));
        }
        Ok((IntegersAt { at: self.at(found), dtype: found.dtype }, tokens))
    }

    /// Where the states are, their layers and dtype.
    fn states(&self, tokens: usize, hidden_size: usize) -> Result<(u64, usize, Dtype), CapturedError> {
        let found = self.tensor(STATES)?;
        let expected = || {
            format!("[{tokens}, layers, {hidden_size}]: {tokens} token_ids, the backbone's hidden size {hidden_size}")
        };
        let layers = match found.shape[..] {
            [t, layers, h] if t == tokens && h == hidden_size => layers,
            _ => return Err(self.shape(STATES, expected(), found)),
        };
        if layers == 0 {
            return Err(self.shape(STATES, format!("[{tokens}, layers, {hidden_size}] with the last layer"), found));
        }
        let dtypes = [
            (StoredDtype::F32, Dtype::Float32),
            (StoredDtype::BF16, Dtype::BFloat16),
            (StoredDtype::F16, Dtype::Float16),
        ];
        let known = dtypes.into_iter().find(|(stored, _)| *stored == found.dtype);
        let (_, dtype) = known.ok_or_else(|| self.dtype(STATES, "F32, BF16 or F16", found))?;
        Ok((self.at(found), layers, dtype))
    }

    fn mask(&self, tokens: usize) -> Result<Option<IntegersAt>, CapturedError> {
        let Some(found) = self.header.info(MASK) else { return Ok(None) };
        if found.shape != [tokens] {
            return Err(self.shape(MASK, format!("[{tokens}], one value for each of token_ids"), found));
        }
        if ![StoredDtype::I64, StoredDtype::I32, StoredDtype::U8, StoredDtype::BOOL].contains(&found.dtype) {
            return Err(self.dtype(MASK, "I64, I32, U8 or BOOL", found));
        }
        Ok(Some(IntegersAt { at: self.at(found), dtype: found.dtype }))
    }
}

fn integer(bytes: &[u8], dtype: StoredDtype) -> i64 {
    match (dtype, bytes) {
        (StoredDtype::I64, &[a, b, c, d, e, f, g, h]) => i64::from_le_bytes([a, b, c, d, e, f, g, h]),
        (StoredDtype::I32, &[a, b, c, d]) => i64::from(i32::from_le_bytes([a, b, c, d])),
        (_, bytes) => i64::from(bytes[0]),
    }
}

/// The first number that is not finite, and its place among the numbers.
fn first_not_finite(bytes: &[u8], dtype: Dtype) -> Option<(usize, f32)> {
    fn first<const SIZE: usize>(bytes: &[u8], number: impl Fn([u8; SIZE]) -> f32) -> Option<(usize, f32)> {
        let numbers = bytes.as_chunks().0.iter().map(|&bytes| number(bytes));
        numbers.enumerate().find(|(_, number)| !number.is_finite())
    }
    match dtype {
        Dtype::Float32 => first(bytes, f32::from_le_bytes),
        Dtype::BFloat16 => first(bytes, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        Dtype::Float16 => first(bytes, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::Float64 => unreachable!("opening a file refuses it"),
    }
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "none at all".into() } else { names.join(", ") }
}
