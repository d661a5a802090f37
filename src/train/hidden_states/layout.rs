//! The file format of cached hidden states: the states of all data rows one after another, then a mark for each row: the checksum of its
//! states once they are on disk, 0 before. In files of earlier versions a mark is one byte, which is 1 then. Only the positions of
//! [`TargetRule::positions`] are stored. The file's name is a hash of everything that determines them.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};
use tch::Kind;

use super::error::HiddenStatesError;
use crate::data::IGNORE;
use crate::data::cache::CacheError;
use crate::data::pack::{PackedSequence, Sequences};
use crate::files::hex;
use crate::gguf;
use crate::model::block_spec::LayerKinds;
use crate::model::llama::Llama;
use crate::model::weights;
use crate::torch::LIBTORCH_VERSION;
use crate::train::target_rule::TargetRule;

/// The mark of a row whose states are on disk, in a file without checksums.
const FILLED: u32 = 1;

/// What is behind the states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowMarks {
    /// CRC-32 of each row, four bytes little-endian.
    Checksums,
    /// A byte for each row, in files of earlier versions.
    Bytes,
}

impl RowMarks {
    /// Bytes of a mark.
    fn size(self) -> usize {
        match self {
            Self::Checksums => 4,
            Self::Bytes => 1,
        }
    }

    /// The mark of a row with these states.
    pub(super) fn of(self, states: &[u8]) -> u32 {
        match self {
            Self::Checksums => crc32fast::hash(states).max(1), // 0: not on disk
            Self::Bytes => FILLED,
        }
    }

    /// A mark as it is on disk.
    pub(super) fn bytes(self, mark: u32) -> Vec<u8> {
        mark.to_le_bytes()[..self.size()].to_vec()
    }
}

/// Offsets in the file.
#[derive(Debug)]
pub(super) struct StatesLayout {
    pub(super) rule: TargetRule,
    /// Bytes of one position's state.
    pub(super) row_bytes: usize,
    /// Start of each row's states, then the end of the last.
    pub(super) offsets: Vec<u64>,
}

impl StatesLayout {
    pub(super) fn new(rows: &Sequences, rule: TargetRule, width: i64, kind: Kind) -> Result<Self, CacheError> {
        let width = usize::try_from(width).expect("a checked config");
        let row_bytes = width * kind.elt_size_in_bytes();
        let mut offsets = vec![0];
        let mut end = 0;
        for row in rows.iter() {
            end += (positions_in(&row?, rule).len() * row_bytes) as u64;
            offsets.push(end);
        }
        Ok(Self { rule, row_bytes, offsets })
    }

    pub(super) fn rows(&self) -> usize {
        self.offsets.len() - 1
    }

    pub(super) fn states_bytes(&self) -> u64 {
        self.offsets[self.rows()]
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.mark_at(self.rows(), RowMarks::Checksums)
    }

    /// Where a row's mark is.
    pub(super) fn mark_at(&self, id: usize, marks: RowMarks) -> u64 {
        self.states_bytes() + (id * marks.size()) as u64
    }

    pub(super) fn bytes_of(&self, id: usize) -> usize {
        usize::try_from(self.offsets[id + 1] - self.offsets[id]).expect("a row's states fit into memory")
    }

    /// The mark of each row, 0 for one that is not on disk.
    pub(super) fn read_marks(&self, file: &mut File, path: &Path) -> Result<(RowMarks, Vec<u32>), HiddenStatesError> {
        let error = |source| self.error("read", path, source);
        let (expected, got) = (self.file_bytes(), file.metadata().map_err(error)?.len());
        let is_of = |marks: &RowMarks| got == self.mark_at(self.rows(), *marks);
        let marks = [RowMarks::Checksums, RowMarks::Bytes].into_iter().find(is_of);
        let marks = marks.ok_or_else(|| HiddenStatesError::Size { path: path.into(), expected, got })?;
        let mut bytes = vec![0; self.rows() * marks.size()];
        file.seek(SeekFrom::Start(self.states_bytes())).and_then(|_| file.read_exact(&mut bytes)).map_err(error)?;
        let mark = |bytes: &[u8]| bytes.iter().rev().fold(0, |mark, &byte| mark << 8 | u32::from(byte));
        let is_known = |mark: &u32| marks == RowMarks::Checksums || *mark == FILLED;
        let known = |bytes: &[u8]| Some(mark(bytes)).filter(is_known).unwrap_or(0);
        Ok((marks, bytes.chunks_exact(marks.size()).map(known).collect()))
    }

    pub(super) fn error(&self, doing: &'static str, path: &Path, source: io::Error) -> HiddenStatesError {
        HiddenStatesError::Io { doing, path: path.into(), bytes: self.file_bytes(), source }
    }
}

/// Size of the file for the rows of `sequences`, states of this width and this dtype.
///
/// # Errors
/// [`CacheError`]: the labels are read, since they decide which positions are stored.
pub fn file_bytes(sequences: &Sequences, rule: TargetRule, width: i64, kind: Kind) -> Result<u64, CacheError> {
    Ok(StatesLayout::new(&sequences.one_each(), rule.for_cache(), width, kind)?.file_bytes())
}

pub(super) fn positions_in(sequence: &PackedSequence, rule: TargetRule) -> Vec<usize> {
    rule.positions(&sequence.segment_lengths, |t| sequence.labels[t] != IGNORE)
}

/// Part of every key. Change it when the same input would produce a different file.
const FORMAT: &str = "medusa hidden states 3";

/// Everything except the tokens that determines a hidden state.
pub(super) fn identity(folder: &Path, backbone: &Llama) -> io::Result<Vec<u8>> {
    let weights = weights::files_of(folder).map_err(io::Error::other)?;
    let on = if backbone.device().is_cuda() { "cuda" } else { "cpu" };
    let mut facts = format!("{FORMAT}\nlibtorch {LIBTORCH_VERSION} on {on}\n{:?}\n", backbone.kind());
    // Rotary embeddings may depend on the context, which is not in the folder.
    facts += &format!("{}\n", layer_facts(&backbone.block().layers, backbone.config.num_hidden_layers));
    if !backbone.taps().is_empty() {
        facts += &format!("taps {:?}\n", backbone.taps().layers());
    }
    facts.extend(backbone.quantization().map(|quantization| format!("{quantization}\n")));
    for path in weights {
        let metadata = fs::metadata(&path)?;
        let modified = metadata.modified()?.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        facts += &format!("{:?} {} bytes, {modified}\n", path.file_name(), metadata.len());
    }
    Ok([facts.into_bytes(), gguf::folder::read(&folder.join("config.json"))?].concat())
}

/// How the layers attend. The text is part of every key: it must stay what it is, whatever fields are called.
pub(super) fn layer_facts(layers: &LayerKinds, count: usize) -> String {
    let by_layer: Vec<usize> = (0..count).map(|layer| layers.kind_of(layer)).collect();
    format!("LayerKinds {{ kinds: {:?}, of_layer: {by_layer:?} }}", layers.kinds())
}

/// The file name for a backbone and these rows, each its own sequence.
pub(super) fn key(identity: &[u8], rows: &Sequences, rule: TargetRule) -> Result<String, CacheError> {
    let mut hasher = Sha256::new();
    hasher.update((identity.len() as u64).to_le_bytes());
    hasher.update(identity);
    hasher.update((rule.reads.levels as u64).to_le_bytes()); // of the cache, not of the run
    if rule.reads.whole_rows {
        hasher.update([2]);
    }
    if rule.soft {
        hasher.update([1, u8::from(rule.on_unlabelled)]);
    }
    for row in rows.iter() {
        let sequence = row?;
        hasher.update((sequence.segment_lengths.len() as u64).to_le_bytes());
        sequence.segment_lengths.iter().for_each(|&length| hasher.update((length as u64).to_le_bytes()));
        let tokens = sequence.input_ids.iter().chain(&sequence.labels);
        hasher.update(tokens.flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>());
    }
    Ok(hex(&hasher.finalize()))
}
