//! The output folder of a distillation: distill.json, write-once shards, and a journal of conversations that are in no
//! shard yet.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::DistillError;
use super::conversation::Finished;
use super::journal::Journal;
use super::shards;
use crate::files;
use crate::formats::provenance::DistillProvenance;
use crate::formats::share::Share;

/// Conversations per shard.
pub const CONVERSATIONS_PER_SHARD: usize = 256;

/// The name of a file of a share, so that several machines can write to one folder.
fn file_of(share: Share, stem: &str, rest: &str) -> String {
    if share == Share::WHOLE {
        format!("{stem}{rest}")
    } else {
        format!("{stem}-{}-of-{}{rest}", share.index(), share.of())
    }
}

/// Whether a file belongs to another machine's share of the same prompts.
fn is_anothers(share: Share, name: &str) -> bool {
    let name = name.strip_prefix('.').unwrap_or(name); // a file being written
    let others = share.all().filter(|&other| other != share);
    others
        .flat_map(|other| ["distill", "journal", "shard"].map(|stem| file_of(other, stem, "")))
        .any(|stem| name.strip_prefix(&stem).is_some_and(|rest| rest.starts_with(['-', '.'])))
}

/// An open output folder.
#[derive(Debug)]
pub struct Output {
    folder: PathBuf,
    share: Share,
    /// Prompts of all shares.
    total: usize,
    provenance: Map<String, Value>,
    journal: Journal,
    /// Finished conversations that are in no shard yet.
    pending: BTreeMap<usize, Finished>,
    /// Shards written so far.
    shards: usize,
    /// Lines of the journal that could not be read.
    damaged: usize,
}

impl Output {
    /// Starts in an empty folder, or resumes one with the same provenance.
    ///
    /// # Errors
    /// A folder that is not empty (without `resume`) or has another provenance.
    pub fn open(
        folder: &Path,
        share: Share,
        provenance: &DistillProvenance,
        resume: bool,
    ) -> Result<Self, DistillError> {
        let begun_with = folder.join(file_of(share, "distill", ".json"));
        fs::create_dir_all(folder).map_err(|source| DistillError::Io { path: folder.into(), source })?;
        let provenance_map = if resume && begun_with.exists() {
            let begun = DistillProvenance::entries(&begun_with)?;
            provenance.check(&begun_with, &begun)?;
            begun
        } else {
            check_is_free(folder, share)?;
            files::write_atomic(&begun_with, |out| out.write_all(provenance.to_json().as_bytes()))
                .map_err(|source| DistillError::Io { path: begun_with, source })?;
            provenance.as_map()
        };
        let shards = shard_files(folder, share).count();
        let total = provenance.conversations;
        let in_shards: Vec<usize> = share.ids(total).take(shards * CONVERSATIONS_PER_SHARD).collect();
        let path = folder.join(file_of(share, "journal", ".jsonl"));
        let (finished, damaged) = Journal::read(&path)?;
        let mut pending: BTreeMap<usize, Finished> =
            finished.into_iter().map(|finished| (finished.id, finished)).collect();
        pending.retain(|id, _| in_shards.binary_search(id).is_err());
        let journal = Journal::start(&path, pending.values())?;
        Ok(Self { folder: folder.into(), share, total, provenance: provenance_map, journal, pending, shards, damaged })
    }

    /// Indices of the unanswered prompts, in order.
    pub fn missing(&self) -> Vec<usize> {
        let after = self.share.ids(self.total).skip(self.shards * CONVERSATIONS_PER_SHARD);
        after.filter(|id| !self.pending.contains_key(id)).collect()
    }

    /// Finished conversations.
    pub fn kept(&self) -> usize {
        (self.shards * CONVERSATIONS_PER_SHARD).min(self.conversations()) + self.pending.len()
    }

    /// Conversations of this share.
    pub fn conversations(&self) -> usize {
        self.share.ids(self.total).count()
    }

    /// Shards written so far.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// Lines of the journal that could not be read: their conversations are among the missing ones.
    pub fn damaged(&self) -> usize {
        self.damaged
    }

    /// Keeps conversations: a process that is killed after this has not lost them.
    pub(super) fn keep(&mut self, finished: Vec<Finished>) -> Result<(), DistillError> {
        if finished.is_empty() {
            return Ok(());
        }
        self.journal.append(&finished)?;
        self.pending.extend(finished.into_iter().map(|finished| (finished.id, finished)));
        self.write_shards()
    }

    /// What was kept is on the disk when this returns.
    pub(super) fn sync(&mut self) -> Result<(), DistillError> {
        self.journal.sync()
    }

    /// Writes the last shards and removes the journal.
    pub(super) fn finish(&mut self) -> Result<(), DistillError> {
        self.write_shards()?;
        self.journal.remove()
    }

    /// Writes the complete shards, in order.
    fn write_shards(&mut self) -> Result<(), DistillError> {
        let before = self.shards;
        loop {
            let from = self.shards * CONVERSATIONS_PER_SHARD;
            let ids: Vec<usize> = self.share.ids(self.total).skip(from).take(CONVERSATIONS_PER_SHARD).collect();
            let rows: Vec<&Finished> = ids.iter().filter_map(|id| self.pending.get(id)).collect();
            if ids.is_empty() || rows.len() < ids.len() {
                break;
            }
            shards::write(&self.folder.join(shard_name(self.share, self.shards)), &rows, &self.provenance)?;
            self.shards += 1;
            self.pending.retain(|id, _| ids.binary_search(id).is_err());
        }
        if self.shards > before {
            self.journal =
                Journal::start(&self.folder.join(file_of(self.share, "journal", ".jsonl")), self.pending.values())?;
        }
        Ok(())
    }
}

/// The share whose distill.json has this name.
pub(super) fn share_of_provenance(name: &str) -> Option<Share> {
    if name == file_of(Share::WHOLE, "distill", ".json") {
        return Some(Share::WHOLE);
    }
    let numbers = name.strip_prefix("distill-")?.strip_suffix(".json")?;
    let share: Share = numbers.replacen("-of-", "/", 1).parse().ok()?;
    (file_of(share, "distill", ".json") == name).then_some(share)
}

/// A share's shards, in order.
pub(super) fn shard_files(folder: &Path, share: Share) -> impl Iterator<Item = PathBuf> {
    (0..).map(move |number| folder.join(shard_name(share, number))).take_while(|path| path.exists())
}

/// How many conversations of a share are in its journal, and not among the first `in_shards`.
pub(super) fn journalled(folder: &Path, share: Share, in_shards: usize) -> Result<usize, DistillError> {
    let (lines, _) = Journal::read(&folder.join(file_of(share, "journal", ".jsonl")))?;
    let ids: BTreeSet<usize> = lines.iter().map(|line| line.id).collect();
    Ok(ids.iter().filter(|id| **id / share.of() >= in_shards).count())
}

fn shard_name(share: Share, number: usize) -> String {
    file_of(share, "shard", &format!("-{number:05}.parquet"))
}

/// Refuses a folder that holds anything except other machines' shares.
///
/// # Errors
/// [`DistillError::Occupied`], or an I/O error.
pub fn check_is_free(folder: &Path, share: Share) -> Result<(), DistillError> {
    let failed = |source: io::Error| DistillError::Io { path: folder.into(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let found = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        if !is_anothers(share, &found) && !files::is_partial(&found) {
            return Err(DistillError::Occupied { folder: folder.into(), found });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_other_shares_are_anothers() {
        let share: Share = "2/4".parse().unwrap();
        for name in ["shard-1-of-4-00000.parquet", "journal-3-of-4.jsonl", ".distill-4-of-4.json.partial"] {
            assert!(is_anothers(share, name), "{name}");
        }
        for name in ["shard-2-of-4-00000.parquet", "shard-1-of-3-00000.parquet", "shard-00000.parquet", "notes.txt"] {
            assert!(!is_anothers(share, name), "{name}");
        }
        assert!(!is_anothers(Share::WHOLE, "shard-1-of-2-00000.parquet"));
    }
}
