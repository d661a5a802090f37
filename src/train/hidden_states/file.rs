//! The file of cached hidden states, for the thread that reads ahead and the run that fills it.

// M kept positions, H hidden
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use tch::{Device, Kind};

use super::error::HiddenStatesError;
use super::layout::{FILLED, StatesLayout};
use crate::files::lock_file;
use crate::torch::transfer::HostTensor;

/// An open file. Its rows are written once and never change.
#[derive(Debug)]
pub(super) struct StatesFile {
    pub(super) layout: StatesLayout,
    pub(super) path: PathBuf,
    file: File,
    /// Whether each row's states can be read.
    filled: Vec<AtomicBool>,
    hidden_size: i64,
    kind: Kind,
    /// The backbone's.
    device: Device,
}

/// What a file holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct StatesKind {
    pub(super) hidden_size: i64,
    pub(super) kind: Kind,
    /// Where the states are needed.
    pub(super) device: Device,
}

impl StatesFile {
    /// Opens or creates a file; holds its lock until it is complete.
    pub(super) fn open(path: PathBuf, layout: StatesLayout, of: StatesKind) -> Result<Self, HiddenStatesError> {
        let error = |doing, source| layout.error(doing, &path, source);
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = open.map_err(|e| error("open", e))?;
        let is_mine = lock_file(&file);
        if is_mine && file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            let made = file.set_len(layout.file_bytes()).and_then(|()| file.sync_all());
            made.inspect_err(|_| drop(fs::remove_file(&path))).map_err(|e| error("make", e))?;
        }
        let filled = match layout.read_marks(&mut file, &path) {
            Ok(filled) if is_mine || filled.iter().all(|&filled| filled) => filled,
            _ if !is_mine => return Err(HiddenStatesError::InUse { path }), // the other run may not have sized it yet
            marks => marks?,
        };
        let filled = filled.into_iter().map(AtomicBool::new).collect();
        let StatesKind { hidden_size, kind, device } = of;
        Ok(Self { layout, path, file, filled, hidden_size, kind, device })
    }

    /// Lets other runs open the file.
    pub(super) fn unlock(&self) {
        let _ = self.file.unlock(); // else it stays locked until the run ends
    }

    pub(super) fn rows(&self) -> usize {
        self.filled.len()
    }

    /// How many rows can be read.
    pub(super) fn filled(&self) -> usize {
        (0..self.rows()).filter(|&id| self.has(id)).count()
    }

    /// Whether the states of a row can be read.
    pub(super) fn has(&self, id: usize) -> bool {
        self.filled[id].load(Ordering::Acquire)
    }

    /// The states of rows that can be read, one after another: `[M, H]`.
    pub(super) fn read(&self, row_ids: &[usize]) -> Result<HostTensor, HiddenStatesError> {
        let bytes: usize = row_ids.iter().map(|&id| self.layout.bytes_of(id)).sum();
        let size = [(bytes / self.layout.row_bytes) as i64, self.hidden_size];
        let fill = |mut rest: &mut [u8]| {
            for &id in row_ids {
                let (states, later) = rest.split_at_mut(self.layout.bytes_of(id));
                self.file.read_exact_at(states, self.layout.offsets[id])?;
                rest = later;
            }
            io::Result::Ok(())
        };
        HostTensor::filled(&size, self.kind, self.device, fill).map_err(|e| self.layout.error("read", &self.path, e))
    }

    /// Writes a row's states, which can be read from then on.
    pub(super) fn write(&self, id: usize, states: &[u8]) -> io::Result<()> {
        self.file.write_all_at(states, self.layout.offsets[id])?;
        self.filled[id].store(true, Ordering::Release);
        Ok(())
    }

    /// Syncs the states written so far, then marks those of `unmarked`: a crash never marks what is not on the disk.
    pub(super) fn mark(&self, unmarked: &[usize]) -> io::Result<()> {
        self.file.sync_data()?;
        let place = |id: usize| self.layout.states_bytes() + id as u64;
        unmarked.iter().try_for_each(|&id| self.file.write_all_at(&[FILLED], place(id)))
    }

    /// Takes rows back that did not reach the disk.
    pub(super) fn forget(&self, row_ids: &[usize]) {
        row_ids.iter().for_each(|&id| self.filled[id].store(false, Ordering::Release));
    }

    /// Bytes that the file still takes from its disk until it is complete.
    pub(super) fn missing_bytes(&self) -> u64 {
        const BLOCK: u64 = 512; // of stat(2), whatever the file system's
        let taken = self.file.metadata().map_or(0, |metadata| BLOCK * metadata.blocks());
        self.layout.file_bytes().saturating_sub(taken)
    }
}
