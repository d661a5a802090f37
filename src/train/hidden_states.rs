//! What the heads learn from: the frozen backbone's hidden states, computed for each batch, or kept on disk across epochs and
//! runs (`train.hidden_state_cache`).
//!
//! Kept are the positions from which some head predicts a target; the others are never read. The file holds the states of all
//! sequences one after another, then one byte a sequence: 1 once its states are on the disk. It gets its whole size at once, its
//! states are synced before their bytes, so no end of the process makes it say what is not there. A run holds it locked
//! until all are there.
//!
//! A sequence's states are those of the batch that computed them first, for every run and however often it is broken off. The
//! last bits of a product depend on its other rows; so training equals training without the file bit for bit where a sequence
//! always meets the same others (a micro batch of 1, or no shuffling), and up to those bits elsewhere.

// B rows, T tokens of a row, N = B·T positions, M of them kept, H hidden
use std::borrow::Cow;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};
use tch::{Device, Kind, Tensor};

use crate::data::IGNORE;
use crate::data::cache::CacheError;
use crate::data::loader::Batch;
use crate::data::pack::{Sequence, Sequences};
use crate::files::{hex, lock_file};
use crate::model::attention::RowMask;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::weights;
use crate::torch::{LIBTORCH_VERSION, bytes};

/// Part of every key: raise it when the same input would give another file.
const FORMAT: &str = "medusa hidden states 1";
const FILLED: u8 = 1;

/// Why hidden states cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum HiddenStatesError {
    /// The disk.
    #[error(
        "train.hidden_state_cache: cannot {doing} {}: {source}; it takes {bytes} bytes in all: make room, choose another \
         folder, or train without the key", path.display()
    )]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Size of the whole file.
        bytes: u64,
        /// Why not.
        source: io::Error,
    },
    /// The rows.
    #[error(transparent)]
    Rows(#[from] CacheError),
    /// Another run fills the file now.
    #[error("train.hidden_state_cache: {} is in use by another run on the same rows and backbone: wait for its end, or choose another folder", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A file that is not as it was made.
    #[error("train.hidden_state_cache: {} has {got} bytes, expected {expected}: it was cut off or changed; remove it, and it is made again", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// From the sequences.
        expected: u64,
        /// On the disk.
        got: u64,
    },
}

/// Where the hidden states of training batches come from.
#[derive(Debug)]
pub enum HiddenStates<'r> {
    /// The backbone runs for every batch.
    Computed(&'r Llama),
    /// The backbone runs for what is not kept yet.
    Kept(KeptStates<'r>),
}

/// Hidden states of one micro batch.
#[derive(Debug)]
pub struct BatchStates {
    /// `[N, H]` or, of kept positions, `[M, H]`; in the backbone's dtype, on its device, without autograd.
    pub hidden_nh: Tensor,
    /// Of each of the N positions its row in `hidden_nh`; `None` where that is the position itself.
    row_of: Option<Vec<i64>>,
}

impl HiddenStates<'_> {
    /// The frozen backbone.
    pub fn backbone(&self) -> &Llama {
        match self {
            Self::Computed(backbone) => backbone,
            Self::Kept(kept) => kept.backbone,
        }
    }

    /// The states of a batch.
    ///
    /// # Errors
    /// [`HiddenStatesError`]; computing alone never fails so.
    pub fn of(&mut self, batch: &Batch) -> Result<BatchStates, HiddenStatesError> {
        match self {
            Self::Computed(backbone) => Ok(BatchStates::computed(backbone, batch)),
            Self::Kept(kept) => kept.of(batch),
        }
    }

    /// Makes what was computed so far last: later runs find it.
    ///
    /// # Errors
    /// [`HiddenStatesError::Io`].
    pub fn commit(&mut self) -> Result<(), HiddenStatesError> {
        match self {
            Self::Computed(_) => Ok(()),
            Self::Kept(kept) => kept.commit(),
        }
    }
}

impl BatchStates {
    /// Runs the backbone over a batch.
    pub fn computed(backbone: &Llama, batch: &Batch) -> Self {
        Self::all(compute(backbone, batch))
    }

    /// Of every position, `[N, H]`.
    pub fn all(hidden_nh: Tensor) -> Self {
        Self { hidden_nh, row_of: None }
    }

    /// Rows of `hidden_nh` for flat positions of the batch, from which a head predicts a target.
    pub fn rows_of<'p>(&self, positions: &'p [i64]) -> Cow<'p, [i64]> {
        match &self.row_of {
            None => positions.into(),
            Some(row_of) => positions.iter().map(|&at| row_of[at as usize]).collect(),
        }
    }
}

/// `[N, H]`, rows flattened; no gradient reaches the backbone.
fn compute(backbone: &Llama, batch: &Batch) -> Tensor {
    let (b, t) = (batch.rows as i64, batch.length as i64);
    let device = backbone.device();
    let tokens_bt = Tensor::from_slice(&batch.input_ids).view([b, t]).to_device(device);
    let rows = RowMask::packed(&batch.segment_lengths, t, &backbone.config, device);
    tch::no_grad(|| backbone.hidden_states(&tokens_bt, &rows, Adapters::Off)).view([b * t, -1])
}

/// Hidden states on disk, filled as training meets its sequences.
#[derive(Debug)]
pub struct KeptStates<'r> {
    backbone: &'r Llama,
    layout: Layout,
    path: PathBuf,
    file: File,
    filled: Vec<bool>,
    /// Filled since the last commit.
    unmarked: Vec<usize>,
    computed_batches: usize,
}

impl<'r> KeptStates<'r> {
    /// Opens, or makes, the file in `folder` for `backbone` (loaded from `backbone_folder`), `num_heads` heads and these
    /// sequences; batches name sequences by their place among them.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn open(
        folder: &Path,
        backbone: &'r Llama,
        backbone_folder: &Path,
        sequences: &Sequences,
        num_heads: usize,
    ) -> Result<Self, HiddenStatesError> {
        let layout = Layout::new(sequences, num_heads, backbone.config.hidden_size, backbone.kind())?;
        let error = |doing, path: &Path, source| layout.error(doing, path, source);
        let backbone_is = identity(backbone_folder, backbone).map_err(|e| error("read", backbone_folder, e))?;
        let path = folder.join(format!("{}.hidden_states", key(&backbone_is, sequences, num_heads)?));
        fs::create_dir_all(folder).map_err(|e| error("make", folder, e))?;
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = open.map_err(|e| error("open", &path, e))?;
        let is_mine = lock_file(&file);
        if is_mine && file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            let made = file.set_len(layout.file_bytes()).and_then(|()| file.sync_all());
            made.inspect_err(|_| drop(fs::remove_file(&path))).map_err(|e| error("make", &path, e))?;
        }
        let filled = match layout.read_marks(&mut file, &path) {
            Ok(filled) if is_mine || filled.iter().all(|&filled| filled) => filled,
            _ if !is_mine => return Err(HiddenStatesError::InUse { path }), // it may not have its size yet
            marks => marks?,
        };
        let kept = Self { backbone, layout, path, file, filled, unmarked: vec![], computed_batches: 0 };
        kept.let_go_when_full();
        Ok(kept)
    }

    /// A file that nobody fills any more is everybody's.
    fn let_go_when_full(&self) {
        if self.unmarked.is_empty() && self.filled() == self.filled.len() {
            let _ = self.file.unlock(); // else it is let go of at the run's end
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sequences whose states are there.
    pub fn filled(&self) -> usize {
        self.filled.iter().filter(|&&filled| filled).count()
    }

    /// Batches for which the backbone ran.
    pub fn computed_batches(&self) -> usize {
        self.computed_batches
    }

    fn of(&mut self, batch: &Batch) -> Result<BatchStates, HiddenStatesError> {
        let mut positions_m = vec![];
        for (row, lengths) in batch.segment_lengths.iter().enumerate() {
            let labels = &batch.labels[row * batch.length..];
            let of_row = predicting(lengths, self.layout.num_heads, |t| labels[t] != i64::from(IGNORE));
            positions_m.extend(of_row.into_iter().map(|t| (row * batch.length + t) as i64));
        }
        let hidden_mh = match batch.sequence_ids.iter().all(|&id| self.filled[id]) {
            true => self.read(&batch.sequence_ids)?,
            false => self.compute(batch, &positions_m)?,
        };
        let mut row_of = vec![-1; batch.rows * batch.length];
        for (row, &position) in positions_m.iter().enumerate() {
            row_of[position as usize] = row as i64;
        }
        Ok(BatchStates { hidden_nh: hidden_mh, row_of: Some(row_of) })
    }

    fn compute(&mut self, batch: &Batch, positions_m: &[i64]) -> Result<Tensor, HiddenStatesError> {
        self.computed_batches += 1;
        let hidden_nh = compute(self.backbone, batch);
        let hidden_mh = hidden_nh.index_select(0, &Tensor::from_slice(positions_m).to_device(hidden_nh.device()));
        let on_host = hidden_mh.to_device(Device::Cpu).contiguous();
        let mut rest = bytes::of(&on_host);
        let some_are_kept = batch.sequence_ids.iter().any(|&id| self.filled[id]);
        for &id in &batch.sequence_ids {
            let (states, later) = rest.split_at(self.layout.bytes_of(id));
            rest = later;
            if !self.filled[id] {
                self.write(self.layout.offsets[id], states)?;
                self.filled[id] = true;
                self.unmarked.push(id);
            }
        }
        // What is kept counts, not what this batch made of it: a resumed run would read the former.
        if some_are_kept { self.read(&batch.sequence_ids) } else { Ok(hidden_mh) }
    }

    fn read(&mut self, sequence_ids: &[usize]) -> Result<Tensor, HiddenStatesError> {
        let mut bytes = vec![0; sequence_ids.iter().map(|&id| self.layout.bytes_of(id)).sum()];
        let mut rest = bytes.as_mut_slice();
        for &id in sequence_ids {
            let (states, later) = rest.split_at_mut(self.layout.bytes_of(id));
            rest = later;
            let read =
                self.file.seek(SeekFrom::Start(self.layout.offsets[id])).and_then(|_| self.file.read_exact(states));
            read.map_err(|e| self.layout.error("read", &self.path, e))?;
        }
        let size = [(bytes.len() / self.layout.row_bytes) as i64, self.backbone.config.hidden_size];
        Ok(Tensor::from_data_size(&bytes, &size, self.backbone.kind()).to_device(self.backbone.device()))
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), HiddenStatesError> {
        let written = self.file.seek(SeekFrom::Start(at)).and_then(|_| self.file.write_all(bytes));
        written.map_err(|e| self.layout.error("write", &self.path, e))
    }

    fn commit(&mut self) -> Result<(), HiddenStatesError> {
        if self.unmarked.is_empty() {
            return Ok(());
        }
        self.file.sync_data().map_err(|e| self.layout.error("write", &self.path, e))?;
        for id in std::mem::take(&mut self.unmarked) {
            self.write(self.layout.states_bytes() + id as u64, &[FILLED])?;
        }
        self.let_go_when_full();
        Ok(())
    }
}

/// What lies where in the file.
#[derive(Debug)]
struct Layout {
    num_heads: usize,
    /// Bytes of one position's state.
    row_bytes: usize,
    /// Where each sequence's states begin, and at last where they all end.
    offsets: Vec<u64>,
}

impl Layout {
    fn new(sequences: &Sequences, num_heads: usize, hidden_size: i64, kind: Kind) -> Result<Self, CacheError> {
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

    fn sequences(&self) -> usize {
        self.offsets.len() - 1
    }

    fn states_bytes(&self) -> u64 {
        self.offsets[self.sequences()]
    }

    fn file_bytes(&self) -> u64 {
        self.states_bytes() + self.sequences() as u64
    }

    fn bytes_of(&self, id: usize) -> usize {
        usize::try_from(self.offsets[id + 1] - self.offsets[id]).expect("a sequence's states fit into memory")
    }

    fn read_marks(&self, file: &mut File, path: &Path) -> Result<Vec<bool>, HiddenStatesError> {
        let error = |source| self.error("read", path, source);
        let (expected, got) = (self.file_bytes(), file.metadata().map_err(error)?.len());
        if got != expected {
            return Err(HiddenStatesError::Size { path: path.into(), expected, got });
        }
        let mut marks = vec![0; self.sequences()];
        file.seek(SeekFrom::Start(self.states_bytes())).and_then(|_| file.read_exact(&mut marks)).map_err(error)?;
        Ok(marks.into_iter().map(|mark| mark == FILLED).collect())
    }

    fn error(&self, doing: &'static str, path: &Path, source: io::Error) -> HiddenStatesError {
        HiddenStatesError::Io { doing, path: path.into(), bytes: self.file_bytes(), source }
    }
}

/// Size of the file that keeps the states of these sequences, of this width and dtype.
///
/// # Errors
/// [`CacheError`]: labels decide which positions are kept, so they are read.
pub fn file_bytes(sequences: &Sequences, num_heads: usize, hidden_size: i64, kind: Kind) -> Result<u64, CacheError> {
    Ok(Layout::new(sequences, num_heads, hidden_size, kind)?.file_bytes())
}

fn predicting_in(sequence: &Sequence, num_heads: usize) -> Vec<usize> {
    predicting(&sequence.segment_lengths, num_heads, |t| sequence.labels[t] != IGNORE)
}

/// Positions of a sequence from which some head predicts a target, ascending. Head `h` (0-based) at `t` predicts `t + h + 2`.
fn predicting(segment_lengths: &[usize], num_heads: usize, has_label: impl Fn(usize) -> bool) -> Vec<usize> {
    let mut positions = vec![];
    let mut start = 0;
    for length in segment_lengths {
        let end = start + length;
        let has_target = |&t: &usize| (t + 2..end.min(t + 2 + num_heads)).any(&has_label);
        positions.extend((start..end).filter(has_target));
        start = end;
    }
    positions
}

/// Everything that decides a hidden state but the tokens.
fn identity(folder: &Path, backbone: &Llama) -> io::Result<Vec<u8>> {
    let weights = weights::files_of(folder).map_err(io::Error::other)?;
    let on = if backbone.device().is_cuda() { "cuda" } else { "cpu" };
    let mut facts = format!("{FORMAT}\nlibtorch {LIBTORCH_VERSION} on {on}\n{:?}\n", backbone.kind());
    facts.extend(backbone.quantization().map(|quantization| format!("{quantization}\n")));
    for path in weights {
        let metadata = fs::metadata(&path)?;
        let modified = metadata.modified()?.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        facts += &format!("{:?} {} bytes, {modified}\n", path.file_name(), metadata.len());
    }
    Ok([facts.into_bytes(), fs::read(folder.join("config.json"))?].concat())
}

/// The name of the file for a backbone and these sequences.
fn key(identity: &[u8], sequences: &Sequences, num_heads: usize) -> Result<String, CacheError> {
    let mut hasher = Sha256::new();
    hasher.update((identity.len() as u64).to_le_bytes());
    hasher.update(identity);
    hasher.update((num_heads as u64).to_le_bytes());
    for sequence in sequences.iter() {
        let sequence = sequence?;
        hasher.update((sequence.segment_lengths.len() as u64).to_le_bytes());
        sequence.segment_lengths.iter().for_each(|&length| hasher.update((length as u64).to_le_bytes()));
        let tokens = sequence.input_ids.iter().chain(&sequence.labels);
        hasher.update(tokens.flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>());
    }
    Ok(hex(&hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;
    use std::time::{Duration, SystemTime};

    use tch::Kind;
    use tempfile::TempDir;

    use super::*;
    use crate::data::loader::Loader;
    use crate::files::write_atomic;
    use crate::model::config::LlamaConfig;

    const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": true}"#;
    const NUM_HEADS: usize = 2;

    /// A folder with a config and a stand-in for weights, and a backbone of that config.
    fn backbone(kind: Kind) -> (TempDir, Llama) {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("config.json", CONFIG), ("model.safetensors", "weights")] {
            write_atomic(&folder.path().join(name), |out| out.write_all(text.as_bytes())).unwrap();
        }
        let config = LlamaConfig::load(folder.path()).unwrap();
        (folder, Llama::random(config, kind, Device::Cpu, 3))
    }

    /// Seven sequences of two segments; every other one has labels in its second segment only, the last has none.
    fn sequences() -> Vec<Sequence> {
        let sequence = |s: usize| {
            let segment_lengths = vec![3 + s % 3, 6 + s];
            let input_ids: Vec<i32> = (0..9 + s % 3 + s).map(|t| ((s * 7 + t * 5) % 40) as i32).collect();
            let labels = input_ids.iter().enumerate().map(|(t, &id)| {
                let has_loss = s < 6 && (s.is_multiple_of(2) || t >= segment_lengths[0]);
                if has_loss { id } else { IGNORE }
            });
            Sequence { labels: labels.collect(), input_ids, segment_lengths }
        };
        (0..7).map(sequence).collect()
    }

    fn open<'r>(folder: &Path, from: &TempDir, backbone: &'r Llama, sequences: &[Sequence]) -> KeptStates<'r> {
        KeptStates::open(folder, backbone, from.path(), &in_memory(sequences), NUM_HEADS).unwrap()
    }

    fn in_memory(sequences: &[Sequence]) -> Sequences {
        Sequences::in_memory(sequences.to_vec())
    }

    /// What head `head` reads of a batch.
    fn read_by(head: usize, batch: &Batch, states: &BatchStates) -> Tensor {
        let positions = batch.targets(head + 2).positions;
        states.hidden_nh.index_select(0, &Tensor::from_slice(&states.rows_of(&positions)))
    }

    /// Takes an epoch's batches through `kept`; what a head reads is what the backbone says. How often the backbone ran.
    fn epoch(kept: &mut KeptStates, loader: &Loader, epoch: usize) -> usize {
        let before = kept.computed_batches();
        let steps = loader.steps_per_epoch();
        for batch in (epoch * steps..(epoch + 1) * steps).flat_map(|step| loader.step(step).unwrap()) {
            let (expected, got) = (BatchStates::computed(kept.backbone, &batch), kept.of(&batch).unwrap());
            for head in 0..NUM_HEADS {
                let (expected, got) = (read_by(head, &batch, &expected), read_by(head, &batch, &got));
                assert_eq!(got.kind(), expected.kind());
                if batch.rows == 1 {
                    assert_eq!(got, expected);
                } else {
                    assert!(got.allclose(&expected, 1e-5, 1e-5, false), "more than the last bits differ");
                }
            }
        }
        kept.computed_batches() - before
    }

    #[test]
    fn the_backbone_runs_in_the_first_epoch_of_the_first_run_only() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let (from, backbone) = backbone(kind);
            let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
            let loader = Loader::new(in_memory(&sequences), 1, 2, Some(5));
            let mut kept = open(&folder.path().join("new/states"), &from, &backbone, &sequences);
            assert_eq!(epoch(&mut kept, &loader, 0), 7);
            assert_eq!(epoch(&mut kept, &loader, 1), 0);
            kept.commit().unwrap();
            drop(kept);
            let mut again = open(&folder.path().join("new/states"), &from, &backbone, &sequences);
            assert_eq!((again.filled(), epoch(&mut again, &loader, 0)), (7, 0));
        }
    }

    #[test]
    fn states_that_are_kept_do_not_change_in_other_batches() {
        let (from, backbone) = backbone(Kind::Float);
        let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
        let mut kept = open(folder.path(), &from, &backbone, &sequences);
        let pair = &Loader::new(in_memory(&sequences), 2, 1, None).step(0).unwrap()[0];
        let first = kept.of(pair).unwrap();
        let threes = Loader::new(in_memory(&sequences), 3, 1, None);
        let three = &threes.step(0).unwrap()[0];
        for _ in 0..2 {
            let later = kept.of(three).unwrap();
            for head in 0..NUM_HEADS {
                let (first, later) = (read_by(head, pair, &first), read_by(head, three, &later));
                assert_eq!(first, later.narrow(0, 0, first.size()[0]));
            }
        }
        assert_eq!((kept.filled(), kept.computed_batches()), (3, 2));
        assert_eq!(epoch(&mut kept, &threes, 0), 2);
    }

    #[test]
    fn only_what_was_committed_is_there_for_the_next_run() {
        let (from, backbone) = backbone(Kind::Float);
        let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
        let loader = Loader::new(in_memory(&sequences), 1, 1, None);
        let mut kept = open(folder.path(), &from, &backbone, &sequences);
        for at in 0..4 {
            kept.of(&loader.step(at).unwrap()[0]).unwrap();
            if at == 1 {
                kept.commit().unwrap();
            }
        }
        assert_eq!(kept.filled(), 4);
        drop(kept);
        assert_eq!(open(folder.path(), &from, &backbone, &sequences).filled(), 2);
    }

    #[test]
    fn the_file_holds_the_positions_that_predict_and_a_byte_a_sequence() {
        let (from, backbone) = backbone(Kind::BFloat16);
        let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
        let kept = open(folder.path(), &from, &backbone, &sequences);
        let targets = |id: usize| {
            let batch = &Loader::new(in_memory(&sequences[id..=id]), 1, 1, None).step(0).unwrap()[0];
            let mut positions: Vec<i64> = (0..NUM_HEADS).flat_map(|head| batch.targets(head + 2).positions).collect();
            positions.sort_unstable();
            positions.dedup();
            positions
        };
        for (id, sequence) in sequences.iter().enumerate() {
            let ours: Vec<i64> = predicting_in(sequence, NUM_HEADS).into_iter().map(|t| t as i64).collect();
            assert_eq!(ours, targets(id));
        }
        let positions: usize = (0..sequences.len()).map(|id| targets(id).len()).sum();
        let expected = (positions * 16 * 2 + sequences.len()) as u64;
        assert_eq!(fs::metadata(kept.path()).unwrap().len(), expected);
        let bytes = file_bytes(&in_memory(&sequences), NUM_HEADS, backbone.config.hidden_size, backbone.kind());
        assert_eq!(bytes.unwrap(), expected);
    }

    #[test]
    fn whatever_decides_a_state_decides_the_file() {
        let (from, float) = backbone(Kind::Float);
        let (_, half) = backbone(Kind::BFloat16);
        let folder = tempfile::tempdir().unwrap();
        let name = |backbone: &Llama, sequences: &[Sequence], num_heads| {
            let kept =
                KeptStates::open(folder.path(), backbone, from.path(), &in_memory(sequences), num_heads).unwrap();
            kept.path().to_owned()
        };
        let mut names =
            vec![name(&float, &sequences(), 2), name(&half, &sequences(), 2), name(&float, &sequences(), 1)];
        let changes: [fn(&mut Sequence); 3] =
            [|s| s.input_ids[0] += 1, |s| s.labels[2] = IGNORE, |s| s.segment_lengths = vec![2, s.input_ids.len() - 2]];
        for change in changes {
            let mut other = sequences();
            change(&mut other[0]);
            names.push(name(&float, &other, 2));
        }
        let weights = File::options().append(true).open(from.path().join("model.safetensors")).unwrap();
        weights.set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1))).unwrap();
        names.push(name(&float, &sequences(), 2));
        (&weights).write_all(b"!").unwrap();
        names.push(name(&float, &sequences(), 2));
        write_atomic(&from.path().join("training_args.bin"), |out| out.write_all(b"not read")).unwrap();
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
        assert_eq!(name(&float, &sequences(), 2), names[7]);
    }

    #[test]
    fn two_runs_never_fill_one_file() {
        let (from, backbone) = backbone(Kind::Float);
        let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
        let mut first = open(folder.path(), &from, &backbone, &sequences);
        let second = |num_heads| {
            KeptStates::open(folder.path(), &backbone, from.path(), &in_memory(&sequences), num_heads).map(drop)
        };
        let error = second(NUM_HEADS).unwrap_err();
        assert!(error.to_string().contains("is in use by another run"), "{error}");
        second(NUM_HEADS + 1).unwrap(); // a file of its own
        epoch(&mut first, &Loader::new(in_memory(&sequences), 1, 1, None), 0);
        assert!(second(NUM_HEADS).is_err(), "not on the disk yet");
        first.commit().unwrap();
        second(NUM_HEADS).unwrap();
        drop(first);
        second(NUM_HEADS).unwrap();
    }

    #[test]
    fn a_file_of_another_size_is_refused() {
        let (from, backbone) = backbone(Kind::Float);
        let (folder, sequences) = (tempfile::tempdir().unwrap(), sequences());
        let path = open(folder.path(), &from, &backbone, &sequences).path().to_owned();
        let bytes = fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(bytes - 1).unwrap();
        let error =
            KeptStates::open(folder.path(), &backbone, from.path(), &in_memory(&sequences), NUM_HEADS).unwrap_err();
        let expected = format!("has {} bytes, expected {bytes}", bytes - 1);
        assert!(error.to_string().contains(&expected), "{error}");
    }
}
