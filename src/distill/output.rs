//! The output folder of a distillation: distill.json, write-once shards, and a journal of conversations that are in no
//! shard yet.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde_json::{Map, Value};

use super::DistillError;
use super::conversation::Finished;
use super::journal::Journal;
use super::shards;
use crate::files;
use crate::formats::provenance::DistillProvenance;

/// Conversations per shard.
pub const CONVERSATIONS_PER_SHARD: usize = 256;

/// The part of the prompts that one machine answers: indices with the remainder `index` - 1 modulo `of`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Counted from 1.
    index: usize,
    of: usize,
}

impl Share {
    /// All prompts.
    pub const WHOLE: Self = Self { index: 1, of: 1 };

    /// Indices of this share among `total` prompts.
    fn ids(self, total: usize) -> impl Iterator<Item = usize> {
        (self.index - 1..total).step_by(self.of)
    }

    /// The name of a file of this share, so that several machines can write to one folder.
    fn file(self, stem: &str, rest: &str) -> String {
        if self == Self::WHOLE {
            format!("{stem}{rest}")
        } else {
            format!("{stem}-{}-of-{}{rest}", self.index, self.of)
        }
    }

    /// Whether a file belongs to another machine's share of the same prompts.
    fn is_anothers(self, name: &str) -> bool {
        let name = name.strip_prefix('.').unwrap_or(name); // a file being written
        let others = (1..=self.of).filter(|&index| index != self.index).map(|index| Self { index, ..self });
        others
            .flat_map(|other| ["distill", "journal", "shard"].map(|stem| other.file(stem, "")))
            .any(|stem| name.strip_prefix(&stem).is_some_and(|rest| rest.starts_with(['-', '.'])))
    }
}

impl std::fmt::Display for Share {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').and_then(|(index, of)| Some((index.parse().ok()?, of.parse().ok()?)));
        match parts {
            Some((index, of)) if (1..=of).contains(&index) => Ok(Self { index, of }),
            _ => Err(format!("expected i/n with i from 1 to n, such as 2/4, got {text:?}")),
        }
    }
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
}

impl Output {
    /// Starts in an empty folder, or resumes one with the same provenance.
    ///
    /// # Errors
    /// A folder that is not empty (without `resume`) or has another provenance, or a damaged journal.
    pub fn open(
        folder: &Path,
        share: Share,
        provenance: &DistillProvenance,
        resume: bool,
    ) -> Result<Self, DistillError> {
        let begun_with = folder.join(share.file("distill", ".json"));
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
        let shard = |number: usize| folder.join(shard_name(share, number));
        let shards = (0..).find(|&number| !shard(number).exists()).expect("a folder has a last file");
        let total = provenance.conversations;
        let in_shards: Vec<usize> = share.ids(total).take(shards * CONVERSATIONS_PER_SHARD).collect();
        let path = folder.join(share.file("journal", ".jsonl"));
        let mut pending: BTreeMap<usize, Finished> =
            Journal::read(&path)?.into_iter().map(|finished| (finished.id, finished)).collect();
        pending.retain(|id, _| in_shards.binary_search(id).is_err());
        let journal = Journal::start(&path, pending.values())?;
        Ok(Self { folder: folder.into(), share, total, provenance: provenance_map, journal, pending, shards })
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

    /// Keeps conversations; they are on disk when this returns.
    pub(super) fn keep(&mut self, finished: Vec<Finished>) -> Result<(), DistillError> {
        if finished.is_empty() {
            return Ok(());
        }
        self.journal.append(&finished)?;
        self.pending.extend(finished.into_iter().map(|finished| (finished.id, finished)));
        self.write_shards()
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
                Journal::start(&self.folder.join(self.share.file("journal", ".jsonl")), self.pending.values())?;
        }
        Ok(())
    }
}

fn shard_name(share: Share, number: usize) -> String {
    share.file("shard", &format!("-{number:05}.parquet"))
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
        if !share.is_anothers(&found) && !files::is_partial(&found) {
            return Err(DistillError::Occupied { folder: folder.into(), found });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_disjoint_and_together_the_whole() {
        let mut all: Vec<usize> = (1..=4).flat_map(|index| Share { index, of: 4 }.ids(10)).collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<_>>());
        assert_eq!("2/4".parse::<Share>().unwrap().ids(10).collect::<Vec<_>>(), [1, 5, 9]);
        for wrong in ["0/4", "5/4", "4", "a/b", "1/0", "-1/2"] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_files_of_other_shares_are_anothers() {
        let share = Share { index: 2, of: 4 };
        for name in ["shard-1-of-4-00000.parquet", "journal-3-of-4.jsonl", ".distill-4-of-4.json.partial"] {
            assert!(share.is_anothers(name), "{name}");
        }
        for name in ["shard-2-of-4-00000.parquet", "shard-1-of-3-00000.parquet", "shard-00000.parquet", "notes.txt"] {
            assert!(!share.is_anothers(name), "{name}");
        }
        assert!(!Share::WHOLE.is_anothers("shard-1-of-2-00000.parquet"));
    }
}
