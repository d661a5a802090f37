//! The file of kept hidden states: the states of all sequences one after another, then one byte a sequence: 1 once its states are on the
//! disk.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use tch::Kind;

use super::error::HiddenStatesError;
use super::positions::predicting_in;
use crate::data::cache::CacheError;
use crate::data::pack::Sequences;

/// The byte of a sequence whose states are on the disk.
pub(super) const FILLED: u8 = 1;

/// What lies where in the file.
#[derive(Debug)]
pub(super) struct StatesLayout {
    pub(super) num_heads: usize,
    /// Bytes of one position's state.
    pub(super) row_bytes: usize,
    /// Where each sequence's states begin, and at last where they all end.
    pub(super) offsets: Vec<u64>,
}

impl StatesLayout {
    pub(super) fn new(
        sequences: &Sequences,
        num_heads: usize,
        hidden_size: i64,
        kind: Kind,
    ) -> Result<Self, CacheError> {
        let hidden_size = usize::try_from(hidden_size).expect("a checked config");
        let row_bytes = hidden_size * kind.elt_size_in_bytes();
        let mut offsets = vec![0];
        let mut end = 0;
        for sequence in sequences.iter() {
            end += (predicting_in(&sequence?, num_heads).len() * row_bytes) as u64;
            offsets.push(end);
        }
        Ok(Self { num_heads, row_bytes, offsets })
    }

    pub(super) fn sequences(&self) -> usize {
        self.offsets.len() - 1
    }

    pub(super) fn states_bytes(&self) -> u64 {
        self.offsets[self.sequences()]
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.states_bytes() + self.sequences() as u64
    }

    pub(super) fn bytes_of(&self, id: usize) -> usize {
        usize::try_from(self.offsets[id + 1] - self.offsets[id]).expect("a sequence's states fit into memory")
    }

    pub(super) fn read_marks(&self, file: &mut File, path: &Path) -> Result<Vec<bool>, HiddenStatesError> {
        let error = |source| self.error("read", path, source);
        let (expected, got) = (self.file_bytes(), file.metadata().map_err(error)?.len());
        if got != expected {
            return Err(HiddenStatesError::Size { path: path.into(), expected, got });
        }
        let mut marks = vec![0; self.sequences()];
        file.seek(SeekFrom::Start(self.states_bytes())).and_then(|_| file.read_exact(&mut marks)).map_err(error)?;
        Ok(marks.into_iter().map(|mark| mark == FILLED).collect())
    }

    pub(super) fn error(&self, doing: &'static str, path: &Path, source: io::Error) -> HiddenStatesError {
        HiddenStatesError::Io { doing, path: path.into(), bytes: self.file_bytes(), source }
    }
}

/// Size of the file that keeps the states of these sequences, of this width and dtype.
///
/// # Errors
/// [`CacheError`]: labels decide which positions are kept, so they are read.
pub fn file_bytes(sequences: &Sequences, num_heads: usize, hidden_size: i64, kind: Kind) -> Result<u64, CacheError> {
    Ok(StatesLayout::new(sequences, num_heads, hidden_size, kind)?.file_bytes())
}
