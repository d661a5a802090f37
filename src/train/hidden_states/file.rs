//! The file of cached hidden states, for the thread that reads ahead and the run that fills it.

// M kept positions, W a token's states (see [`crate::model::taps`])
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use tch::{Device, Kind};

use super::error::HiddenStatesError;
use super::layout::{RowMarks, StatesLayout};
use crate::files::{holder, lock_file, parent, sync_folder};
use crate::torch::transfer::HostTensor;

/// An open file. Its rows are written once and never change.
#[derive(Debug)]
pub(super) struct StatesFile {
    pub(super) layout: StatesLayout,
    pub(super) path: PathBuf,
    file: File,
    marks: RowMarks,
    /// Of each row, 0 if its states cannot be read.
    filled: Vec<AtomicU32>,
    width: i64,
    kind: Kind,
    /// The backbone's.
    device: Device,
}

/// What a file holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct StatesKind {
    pub(super) width: i64,
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
            let made = made.and_then(|()| sync_folder(parent(&path)));
            made.inspect_err(|_| drop(fs::remove_file(&path))).map_err(|e| error("make", e))?;
        }
        let (marks, filled) = match layout.read_marks(&mut file, &path) {
            Ok((marks, filled)) if is_mine || filled.iter().all(|&filled| filled > 0) => (marks, filled),
            _ if !is_mine => {
                let holder = holder(&path);
                return Err(HiddenStatesError::InUse { path, holder }); // the other run may not have sized it yet
            }
            read => read?,
        };
        let filled = filled.into_iter().map(AtomicU32::new).collect();
        let StatesKind { width, kind, device } = of;
        Ok(Self { layout, path, file, marks, filled, width, kind, device })
    }

    /// Lets other runs open the file.
    pub(super) fn unlock(&self) {
        let _ = self.file.unlock(); // else it stays locked until the run ends
    }

    /// Whether this run may write: nobody else does.
    pub(super) fn lock(&self) -> bool {
        lock_file(&self.file)
    }

    pub(super) fn has_checksums(&self) -> bool {
        self.marks == RowMarks::Checksums
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
        self.mark_of(id) > 0
    }

    fn mark_of(&self, id: usize) -> u32 {
        self.filled[id].load(Ordering::Acquire)
    }

    /// The states of rows that can be read, one after another: `[M, H]`.
    pub(super) fn read(&self, row_ids: &[usize]) -> Result<HostTensor, HiddenStatesError> {
        let bytes: usize = row_ids.iter().map(|&id| self.layout.bytes_of(id)).sum();
        let size = [(bytes / self.layout.row_bytes) as i64, self.width];
        let fill = |mut rest: &mut [u8]| {
            for &id in row_ids {
                let (states, later) = rest.split_at_mut(self.layout.bytes_of(id));
                self.file
                    .read_exact_at(states, self.layout.offsets[id])
                    .map_err(|error| self.layout.error("read", &self.path, error))?;
                let (expected, got) = (self.mark_of(id), self.marks.of(states));
                if expected != got {
                    return Err(HiddenStatesError::Damaged { path: self.path.clone(), row: id, expected, got });
                }
                rest = later;
            }
            Ok(())
        };
        HostTensor::filled(&size, self.kind, self.device, fill)
    }

    /// Writes a row's states, which can be read from then on.
    pub(super) fn write(&self, id: usize, states: &[u8]) -> io::Result<()> {
        self.file.write_all_at(states, self.layout.offsets[id])?;
        self.filled[id].store(self.marks.of(states), Ordering::Release);
        Ok(())
    }

    /// Syncs the states written so far, then marks those of `unmarked`: a crash never marks what is not on the disk.
    pub(super) fn mark(&self, unmarked: &[usize]) -> io::Result<()> {
        self.file.sync_data()?;
        unmarked.iter().try_for_each(|&id| {
            self.file.write_all_at(&self.marks.bytes(self.mark_of(id)), self.layout.mark_at(id, self.marks))
        })
    }

    /// Takes rows back that did not reach the disk.
    pub(super) fn forget(&self, row_ids: &[usize]) {
        row_ids.iter().for_each(|&id| self.filled[id].store(0, Ordering::Release));
    }

    /// Bytes that the file still takes from its disk until it is complete.
    pub(super) fn missing_bytes(&self) -> u64 {
        const BLOCK: u64 = 512; // of stat(2), whatever the file system's
        let taken = self.file.metadata().map_or(0, |metadata| BLOCK * metadata.blocks());
        self.layout.file_bytes().saturating_sub(taken)
    }
}
