//! A cache of hidden states on disk, filled during training.
//!
//! It stores the positions that the losses read; all of them if the heads have a prefix layer. The file is created at full size, and states are
//! synced before their marks: a crash never marks missing data. A run locks the file until it is complete.
//!
//! The states of a data row come from the batch that computed them first, in every run and after every interruption.
//! The last bits of a matrix product depend on its other rows, so training with the cache equals training without it
//! bit for bit if a data row always shares its micro batch with the same others (no shuffling; or no packing and a
//! micro batch of 1), and up to those bits otherwise.

// N positions of a batch, M of them kept, H hidden
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tch::{Device, Tensor};

use super::batch::BatchStates;
use super::error::HiddenStatesError;
use super::layout::{FILLED, StatesLayout, identity, key};
use crate::data::IGNORE;
use crate::data::loader::Batch;
use crate::data::pack::Sequences;
use crate::files::lock_file;
use crate::model::llama::Llama;
use crate::torch::bytes;
use crate::train::target_rule::TargetRule;

/// The hidden states of a run's data rows in a file.
#[derive(Debug)]
pub struct KeptStates<'r> {
    pub(super) backbone: &'r Llama,
    layout: StatesLayout,
    path: PathBuf,
    file: File,
    filled: Vec<bool>,
    /// Written but not marked as filled before the next commit.
    unmarked: Vec<usize>,
    computed_batches: usize,
}

impl<'r> KeptStates<'r> {
    /// Opens or creates the file in `folder` for `backbone` (loaded from `backbone_folder`), the targets of
    /// `rule` and the rows of `sequences`, however they are packed.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn open(
        folder: &Path,
        backbone: &'r Llama,
        backbone_folder: &Path,
        sequences: &Sequences,
        rule: TargetRule,
    ) -> Result<Self, HiddenStatesError> {
        let rows = &sequences.one_each();
        let layout = StatesLayout::new(rows, rule, backbone.config.hidden_size, backbone.kind())?;
        let error = |doing, path: &Path, source| layout.error(doing, path, source);
        let backbone_is = identity(backbone_folder, backbone).map_err(|e| error("read", backbone_folder, e))?;
        let path = folder.join(format!("{}.hidden_states", key(&backbone_is, rows, rule)?));
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
            _ if !is_mine => return Err(HiddenStatesError::InUse { path }), // the other run may not have sized it yet
            marks => marks?,
        };
        let kept = Self { backbone, layout, path, file, filled, unmarked: vec![], computed_batches: 0 };
        kept.let_go_when_full();
        Ok(kept)
    }

    /// Unlocks a complete file, which other runs may read.
    fn let_go_when_full(&self) {
        if self.unmarked.is_empty() && self.filled() == self.filled.len() {
            let _ = self.file.unlock(); // else it stays locked until the run ends
        }
    }

    /// Path of the file that holds the states.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sequences whose states are stored.
    pub fn filled(&self) -> usize {
        self.filled.iter().filter(|&&filled| filled).count()
    }

    /// All rows.
    pub fn rows(&self) -> usize {
        self.filled.len()
    }

    /// Batches for which the backbone ran.
    pub fn computed_batches(&self) -> usize {
        self.computed_batches
    }

    /// The states of a batch: read from the file, or computed and stored.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn of(&mut self, batch: &Batch) -> Result<BatchStates, HiddenStatesError> {
        let mut positions_m = vec![];
        for (row, lengths) in batch.segment_lengths.iter().enumerate() {
            let labels = &batch.labels[row * batch.length..];
            let of_row = self.layout.rule.positions(lengths, |t| labels[t] != i64::from(IGNORE));
            positions_m.extend(of_row.into_iter().map(|t| (row * batch.length + t) as i64));
        }
        let row_ids = batch.row_ids.concat();
        let hidden_mh = match row_ids.iter().all(|&id| self.filled[id]) {
            true => self.read(&row_ids)?,
            false => self.compute(batch, &row_ids, &positions_m)?,
        };
        Ok(BatchStates::of_positions(hidden_mh, &positions_m, batch.rows * batch.length))
    }

    fn compute(&mut self, batch: &Batch, row_ids: &[usize], positions_m: &[i64]) -> Result<Tensor, HiddenStatesError> {
        self.computed_batches += 1;
        let BatchStates { hidden_nh, .. } = BatchStates::computed(self.backbone, batch);
        let hidden_mh = hidden_nh.index_select(0, &Tensor::from_slice(positions_m).to_device(hidden_nh.device()));
        let on_host = hidden_mh.to_device(Device::Cpu).contiguous();
        let mut rest = bytes::of(&on_host);
        let some_are_kept = row_ids.iter().any(|&id| self.filled[id]);
        for &id in row_ids {
            let (states, later) = rest.split_at(self.layout.bytes_of(id));
            rest = later;
            if !self.filled[id] {
                self.write(self.layout.offsets[id], states)?;
                self.filled[id] = true;
                self.unmarked.push(id);
            }
        }
        // Stored states win over this batch's, since a resumed run would read them.
        if some_are_kept { self.read(row_ids) } else { Ok(hidden_mh) }
    }

    fn read(&mut self, row_ids: &[usize]) -> Result<Tensor, HiddenStatesError> {
        let mut bytes = vec![0; row_ids.iter().map(|&id| self.layout.bytes_of(id)).sum()];
        let mut rest = bytes.as_mut_slice();
        for &id in row_ids {
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

    /// Syncs and marks the states computed so far, so that later runs find them.
    ///
    /// # Errors
    /// [`HiddenStatesError::Io`].
    pub fn commit(&mut self) -> Result<(), HiddenStatesError> {
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
