//! A cache of hidden states on disk, filled during training.
//!
//! It stores the positions that the losses read; all of them for a drafter that reads whole rows. The file is created at full size, and states are
//! synced before their marks: a crash never marks missing data. A run locks the file until it is complete.
//!
//! The states of a data row come from the batch that computed them first, in every run and after every interruption.
//! The last bits of a matrix product depend on its other rows, so training with the cache equals training without it
//! bit for bit if a data row always shares its micro batch with the same others (no shuffling; or no packing and a
//! micro batch of 1), and up to those bits otherwise.
//!
//! A disk with too little space does not end the run: rows that are not stored are computed whenever they are read.

// N positions of a batch, M of them kept, W a token's states (see [`crate::model::taps`])
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tch::{Device, Tensor};

use super::error::HiddenStatesError;
use super::file::{StatesFile, StatesKind};
use super::layout::{StatesLayout, identity, key};
use crate::data::loader::Batch;
use crate::data::pack::Sequences;
use crate::files::{free_bytes, make_folders, parent};
use crate::model::llama::Llama;
use crate::torch::transfer::{HostTensor, wait_for};
use crate::train::target_rule::TargetRule;

/// Bytes of states that may wait for a GPU before they are written. On the CPU none do.
const PENDING_BYTES: usize = 512 << 20;

/// The hidden states of a run's data rows in a file.
#[derive(Debug)]
pub struct KeptStates<'r> {
    pub(super) backbone: &'r Llama,
    file: Arc<StatesFile>,
    /// Written but not marked as filled before the next commit.
    unmarked: Vec<usize>,
    /// Computed, and not written before the device is waited for.
    pending: Vec<PendingRows>,
    /// Free space that is left to checkpoints.
    pub(super) reserved_bytes: u64,
    /// Whether nothing is written any more, because the disk is full.
    disk_is_full: bool,
    notice: Option<HiddenStatesError>,
    computed_batches: usize,
}

/// States on their way to the host.
#[derive(Debug)]
struct PendingRows {
    row_ids: Vec<usize>,
    states: HostTensor,
}

/// Reads states for the run that fills the file, on any thread.
#[derive(Debug, Clone)]
pub struct KeptReader {
    file: Arc<StatesFile>,
}

/// Where a cache is, and what it is for.
#[derive(Debug, Clone, Copy)]
pub struct CacheSettings<'s> {
    pub folder: &'s Path,
    /// The folder that the backbone was loaded from.
    pub backbone_folder: &'s Path,
    pub rule: TargetRule,
    /// Free space to leave to checkpoints.
    pub reserved_bytes: u64,
}

/// A cache file that is not open yet.
#[derive(Debug)]
pub struct StatesPlace {
    path: PathBuf,
    layout: StatesLayout,
    /// Free space to leave to checkpoints.
    reserved_bytes: u64,
}

impl StatesPlace {
    /// The file for `backbone` and the rows of `sequences`, however they are packed.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn new(settings: &CacheSettings, backbone: &Llama, sequences: &Sequences) -> Result<Self, HiddenStatesError> {
        let CacheSettings { folder, backbone_folder, reserved_bytes, .. } = *settings;
        let (rule, rows) = (settings.rule.for_cache(), &sequences.one_each());
        let layout = StatesLayout::new(rows, rule, backbone.states_width(), backbone.kind())?;
        let backbone_is =
            identity(backbone_folder, backbone).map_err(|error| layout.error("read", backbone_folder, error))?;
        let path = folder.join(format!("{}.hidden_states", key(&backbone_is, rows, rule)?));
        Ok(Self { path, layout, reserved_bytes })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file to read the states of all rows; `None` if it lacks some, or another run fills it now. Creates nothing.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn open_if_complete(self, backbone: &Llama) -> Result<Option<KeptStates<'_>>, HiddenStatesError> {
        if !self.path.exists() {
            return Ok(None);
        }
        match self.open(backbone, 0) {
            Ok(kept) => Ok((kept.filled() == kept.rows()).then_some(kept)),
            Err(HiddenStatesError::InUse { .. } | HiddenStatesError::NoSpace { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens or creates the file. Its disk must also have room for the `other_bytes` that other caches of the run still take.
    ///
    /// # Errors
    /// [`HiddenStatesError`]; [`HiddenStatesError::is_full_disk`] says whether training can go on without it.
    pub fn open(self, backbone: &Llama, other_bytes: u64) -> Result<KeptStates<'_>, HiddenStatesError> {
        let Self { path, layout, reserved_bytes } = self;
        let folder = parent(&path);
        make_folders(folder).map_err(|error| layout.error("make", folder, error))?;
        let kind = StatesKind { width: backbone.states_width(), kind: backbone.kind(), device: backbone.device() };
        let file = Arc::new(StatesFile::open(path, layout, kind)?);
        let mut kept = KeptStates {
            backbone,
            file,
            unmarked: vec![],
            pending: vec![],
            reserved_bytes,
            disk_is_full: false,
            notice: None,
            computed_batches: 0,
        };
        kept.unlock_when_complete();
        kept.check_disk(other_bytes)?;
        Ok(kept)
    }
}

impl<'r> KeptStates<'r> {
    /// Checks that the rest of the file fits on its disk. A file without rows is removed; one with rows is read on.
    fn check_disk(&mut self, other_bytes: u64) -> Result<(), HiddenStatesError> {
        if self.filled() < self.rows()
            && let Err(full) = self.check_space(self.missing_bytes() + other_bytes)
        {
            if self.filled() == 0 {
                let _ = fs::remove_file(&self.file.path); // an empty file is of no use
                return Err(full);
            }
            self.stop_writing(full);
        }
        Ok(())
    }

    /// A complete file may be read by other runs.
    fn unlock_when_complete(&self) {
        if self.unmarked.is_empty() && self.filled() == self.rows() {
            self.file.unlock();
        }
    }

    /// Bytes that the file still takes from its disk until it is complete.
    pub fn missing_bytes(&self) -> u64 {
        self.file.missing_bytes()
    }

    /// Path of the file that holds the states.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Rows whose states are stored.
    pub fn filled(&self) -> usize {
        self.file.filled()
    }

    pub fn rows(&self) -> usize {
        self.file.rows()
    }

    /// Whether the states that are read are checked; not in files of earlier versions.
    pub fn has_checksums(&self) -> bool {
        self.file.has_checksums()
    }

    /// Batches for which the backbone ran.
    pub fn computed_batches(&self) -> usize {
        self.computed_batches
    }

    /// Reads the same file.
    pub fn reader(&self) -> KeptReader {
        KeptReader { file: Arc::clone(&self.file) }
    }

    /// Why nothing is written any more, or which row is damaged, the first time that it is asked.
    pub fn take_notice(&mut self) -> Option<HiddenStatesError> {
        self.notice.take()
    }

    /// The states of a batch at its kept positions, `[M, W]` on the backbone's device: read ahead, read from the file, or computed and stored.
    /// `kept_m` are [`super::StatesReader::positions`] on the device; `compute` runs the backbone, for `[N, W]`.
    ///
    /// # Errors
    /// [`HiddenStatesError`].
    pub fn of(
        &mut self,
        batch: &Batch,
        kept_m: &Tensor,
        read_ahead: Option<HostTensor>,
        compute: impl FnOnce() -> Tensor,
    ) -> Result<Tensor, HiddenStatesError> {
        if let Some(states) = read_ahead {
            return Ok(states.on_device());
        }
        let row_ids = batch.row_ids.concat();
        if self.pending.iter().any(|pending| pending.row_ids.iter().any(|id| row_ids.contains(id))) {
            self.settle()?;
        }
        while row_ids.iter().all(|&id| self.file.has(id)) {
            if let Some(states) = self.undamaged(&row_ids)? {
                return Ok(states.on_device());
            }
        }
        self.computed_batches += 1;
        let states_mw = compute().index_select(0, kept_m);
        if !self.disk_is_full {
            self.pending.push(PendingRows { row_ids: row_ids.clone(), states: HostTensor::copied(&states_mw) });
            if self.pending_bytes() > self.most_pending_bytes() {
                self.settle()?;
            }
        }
        // Stored states win over this batch's, since a resumed run would read them.
        let some_are_stored = row_ids.iter().any(|&id| self.file.has(id));
        if some_are_stored { self.with_stored(&row_ids, &states_mw) } else { Ok(states_mw) }
    }

    /// The stored states of rows; `None` if those of one are damaged, which is then no longer stored.
    fn undamaged(&mut self, row_ids: &[usize]) -> Result<Option<HostTensor>, HiddenStatesError> {
        match self.file.read(row_ids) {
            Err(damaged @ HiddenStatesError::Damaged { row, .. }) => {
                self.file.forget(&[row]);
                self.notice = Some(damaged);
                Ok(None)
            }
            read => read.map(Some),
        }
    }

    fn pending_bytes(&self) -> usize {
        self.pending.iter().map(|pending| pending.states.bytes().len()).sum()
    }

    /// The CPU has computed the states when they are there, so nothing is gained by keeping them.
    fn most_pending_bytes(&self) -> usize {
        if self.backbone.device() == Device::Cpu { 0 } else { PENDING_BYTES }
    }

    /// Computed states, with those of stored rows in their place.
    fn with_stored(&mut self, row_ids: &[usize], states_mw: &Tensor) -> Result<Tensor, HiddenStatesError> {
        let states_mw = states_mw.copy();
        let mut from = 0;
        for &id in row_ids {
            let rows = (self.file.layout.bytes_of(id) / self.file.layout.row_bytes) as i64;
            if self.file.has(id)
                && let Some(stored) = self.undamaged(&[id])?
            {
                states_mw.narrow(0, from, rows).copy_(&stored.on_device());
            }
            from += rows;
        }
        Ok(states_mw)
    }

    /// Writes the states that were computed since the last call. Waits for the device: call it where the run waits anyway.
    ///
    /// # Errors
    /// [`HiddenStatesError::Io`], except for a full disk.
    pub fn settle(&mut self) -> Result<(), HiddenStatesError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        wait_for(self.backbone.device());
        for PendingRows { row_ids, states } in std::mem::take(&mut self.pending) {
            let mut rest = states.bytes();
            for id in row_ids {
                let (row_states, later) = rest.split_at(self.file.layout.bytes_of(id));
                rest = later;
                if !self.disk_is_full && !self.file.has(id) && self.file.lock() {
                    self.store(id, row_states)?;
                }
            }
        }
        Ok(())
    }

    fn store(&mut self, id: usize, states: &[u8]) -> Result<(), HiddenStatesError> {
        let written = self.check_space(states.len() as u64).and_then(|()| {
            self.file.write(id, states).map_err(|e| self.file.layout.error("write", &self.file.path, e))
        });
        match written {
            Ok(()) => self.unmarked.push(id),
            Err(full) if full.is_full_disk() => self.stop_writing(full),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Checks that the disk has room for so many more bytes, beside what is left to checkpoints.
    fn check_space(&self, needed: u64) -> Result<(), HiddenStatesError> {
        let (folder, reserved) = (parent(&self.file.path), self.reserved_bytes);
        let free = free_bytes(folder).unwrap_or(u64::MAX); // then the disk is full when a write fails
        if free >= needed.saturating_add(reserved) {
            return Ok(());
        }
        Err(HiddenStatesError::NoSpace { folder: folder.into(), needed, free, reserved })
    }

    fn stop_writing(&mut self, why: HiddenStatesError) {
        self.disk_is_full = true;
        self.notice = Some(why);
    }

    /// Syncs and marks the states computed so far, so that later runs find them.
    ///
    /// # Errors
    /// [`HiddenStatesError::Io`], except for a full disk.
    pub fn commit(&mut self) -> Result<(), HiddenStatesError> {
        self.settle()?;
        if self.unmarked.is_empty() {
            return Ok(());
        }
        let unmarked = std::mem::take(&mut self.unmarked);
        if let Err(source) = self.file.mark(&unmarked) {
            let error = self.file.layout.error("write", &self.file.path, source);
            if !error.is_full_disk() {
                return Err(error);
            }
            self.file.forget(&unmarked);
            self.stop_writing(error);
        }
        self.unlock_when_complete();
        Ok(())
    }
}

impl KeptReader {
    pub(super) fn rule(&self) -> TargetRule {
        self.file.layout.rule
    }

    /// The states of a batch, if all of its rows are stored. A file that cannot be read is left to the run, which reports it.
    pub fn read(&self, row_ids: &[usize]) -> Option<HostTensor> {
        row_ids.iter().all(|&id| self.file.has(id)).then(|| self.file.read(row_ids).ok())?
    }
}
