//! The output folder of a distillation: distill.json, write-once shards, refused.jsonl beside them, and a journal of conversations that are
//! in no shard yet.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::DistillError;
use super::conversation::FinishedConversation;
use super::journal::Journal;
use super::refused_file::{self, RefusedQuestion};
use super::shards;
use crate::files::checksums::{self, Checksums};
use crate::files::{self, Claim, ClaimError, OpenPath};
use crate::formats::provenance::DistillProvenance;
use crate::formats::share::Share;

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
        .flat_map(|other| ["distill", "journal", "medusa", "refused", "shard"].map(|stem| file_of(other, stem, "")))
        .any(|stem| name.strip_prefix(&stem).is_some_and(|rest| rest.starts_with(['-', '.'])))
}

/// A share of a folder that no other process writes, as long as this lives.
#[derive(Debug)]
pub struct ClaimedShare {
    folder: PathBuf,
    share: Share,
    _claim: Claim,
}

impl ClaimedShare {
    /// Claims a share before the work; without `resume`, of a folder that holds nothing of it. Makes the folder.
    ///
    /// # Errors
    /// [`DistillError::InUse`], [`DistillError::Occupied`], or an I/O error.
    pub fn new(folder: &Path, share: Share, resume: bool) -> Result<Self, DistillError> {
        let claim = Claim::of(&provenance_file(folder, share)).map_err(|error| match error {
            ClaimError::Io(source) => DistillError::Io { path: folder.into(), source },
            ClaimError::Held(holder) => DistillError::InUse { folder: folder.into(), share, holder },
        })?;
        if !resume {
            check_is_free(folder, share)?;
        }
        Ok(Self { folder: folder.into(), share, _claim: claim })
    }
}

/// An open output folder.
#[derive(Debug)]
pub struct Output {
    folder: PathBuf,
    share: Share,
    _claim: ClaimedShare,
    opened: OpenPath,
    /// Prompts of all shares.
    total: usize,
    provenance: Map<String, Value>,
    journal: Journal,
    /// Finished conversations that are in no shard yet.
    pending: BTreeMap<usize, FinishedConversation>,
    /// Refused questions by their conversations, of shards and of the journal.
    refused: BTreeMap<usize, RefusedQuestion>,
    /// Shards written so far.
    shards: usize,
    /// SHA-256 of each shard by its name.
    sums: BTreeMap<String, String>,
    /// Lines of the journal that could not be read.
    damaged: usize,
}

impl Output {
    /// Starts in an empty folder, or resumes one with the same provenance.
    ///
    /// # Errors
    /// A folder that is not empty (without `resume`) or has another provenance.
    pub fn open(claim: ClaimedShare, provenance: &DistillProvenance, resume: bool) -> Result<Self, DistillError> {
        let (folder, share) = (claim.folder.clone(), claim.share);
        let folder = folder.as_path();
        let begun_with = provenance_file(folder, share);
        let made = files::make_folders(folder).and_then(|()| files::sync_folder(files::parent(folder)));
        let opened = made.and_then(|()| OpenPath::open(folder));
        let opened = opened.map_err(|source| DistillError::Io { path: folder.into(), source })?;
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
        let sums = verified_shards(folder, share, shards)?;
        let total = provenance.conversations;
        let in_shards: Vec<usize> = share.ids(total).take(shards * CONVERSATIONS_PER_SHARD).collect();
        let path = folder.join(file_of(share, "journal", ".jsonl"));
        let (finished, damaged) = Journal::read(&path)?;
        let mut pending: BTreeMap<usize, FinishedConversation> =
            finished.into_iter().map(|finished| (finished.id, finished)).collect();
        pending.retain(|id, _| in_shards.binary_search(id).is_err());
        let journal = Journal::start(&path, pending.values())?;
        let in_shards = refused_in_shards(folder, share, shards)?.into_iter();
        let refused = in_shards.chain(pending.values().filter_map(RefusedQuestion::of));
        let refused = refused.map(|question| (question.conversation, question)).collect();
        let folder = folder.into();
        Ok(Self {
            folder,
            share,
            _claim: claim,
            opened,
            total,
            provenance: provenance_map,
            journal,
            pending,
            refused,
            shards,
            sums,
            damaged,
        })
    }

    /// Refuses to go on with more refused questions than are allowed.
    pub(super) fn check_refused(&self, most: usize) -> Result<(), DistillError> {
        let refused = self.refused();
        if refused <= most {
            return Ok(());
        }
        Err(DistillError::RefusedBefore { folder: self.folder.clone(), refused, most })
    }

    /// Indices of the unanswered prompts, in order.
    pub fn missing(&self) -> Vec<usize> {
        let after = self.share.ids(self.total).skip(self.shards * CONVERSATIONS_PER_SHARD);
        after.filter(|id| !self.pending.contains_key(id)).collect()
    }

    /// Finished and refused conversations.
    pub fn kept(&self) -> usize {
        (self.shards * CONVERSATIONS_PER_SHARD).min(self.conversations()) + self.pending.len()
    }

    /// Conversations with an answer.
    pub fn rows(&self) -> usize {
        self.kept() - self.refused.values().filter(|question| question.has_no_row()).count()
    }

    /// Refused questions.
    pub fn refused(&self) -> usize {
        self.refused.len()
    }

    /// Says which questions were refused, and why; only once they are in shards.
    pub fn refused_file(&self) -> PathBuf {
        refused_path(&self.folder, self.share)
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
    pub(super) fn keep(&mut self, finished: Vec<FinishedConversation>) -> Result<(), DistillError> {
        if finished.is_empty() {
            return Ok(());
        }
        self.check_folder()?;
        self.journal.append(&finished)?;
        let refused = finished.iter().filter_map(RefusedQuestion::of);
        self.refused.extend(refused.map(|question| (question.conversation, question)));
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
        self.journal.remove()?;
        self.check_folder()
    }

    /// What is written to a folder that was removed is lost, and a file that is replaced makes another folder, without what came before.
    fn check_folder(&self) -> Result<(), DistillError> {
        let there = self.opened.is_there().map_err(|source| DistillError::Io { path: self.folder.clone(), source })?;
        if there { Ok(()) } else { Err(DistillError::FolderGone { folder: self.folder.clone() }) }
    }

    /// Writes the complete shards, in order, each after the refused questions among its conversations.
    fn write_shards(&mut self) -> Result<(), DistillError> {
        let before = self.shards;
        loop {
            let from = self.shards * CONVERSATIONS_PER_SHARD;
            let ids: Vec<usize> = self.share.ids(self.total).skip(from).take(CONVERSATIONS_PER_SHARD).collect();
            let mut rows: Vec<&FinishedConversation> = ids.iter().filter_map(|id| self.pending.get(id)).collect();
            if ids.is_empty() || rows.len() < ids.len() {
                break;
            }
            self.write_refused(&ids)?;
            rows.retain(|finished| finished.is_row());
            let name = shard_name(self.share, self.shards);
            let bytes = shards::encode(&self.folder.join(&name), &rows, &self.provenance)?;
            self.write_shard(name, &bytes)?;
            self.shards += 1;
            self.pending.retain(|id, _| ids.binary_search(id).is_err());
        }
        if self.shards > before {
            self.journal =
                Journal::start(&self.folder.join(file_of(self.share, "journal", ".jsonl")), self.pending.values())?;
        }
        Ok(())
    }

    /// Writes a shard, its checksum first: so that none is ever without one.
    fn write_shard(&mut self, name: String, bytes: &[u8]) -> Result<(), DistillError> {
        let (path, list) = (self.folder.join(&name), sums_path(&self.folder, self.share));
        self.sums.insert(name, files::hex(&Sha256::digest(bytes)));
        checksums::write_list(&list, &self.sums)
            .map_err(|error| DistillError::Io { path: list, source: io::Error::other(error) })?;
        files::write_atomic(&path, |out| out.write_all(bytes)).map_err(|source| DistillError::Io { path, source })
    }

    /// Writes refused.jsonl, if any of the next shard's conversations were refused, or an earlier run may have left lines of that shard.
    fn write_refused(&self, ids: &[usize]) -> Result<(), DistillError> {
        if !self.refused_file().exists() && !ids.iter().any(|id| self.refused.contains_key(id)) {
            return Ok(());
        }
        let is_sharded = |question: &&RefusedQuestion| is_in_shards(question.conversation, self.share, self.shards + 1);
        refused_file::write(&self.refused_file(), self.refused.values().filter(is_sharded))
    }
}

/// The distill.json of a folder that was begun; `None` if it was not.
///
/// # Errors
/// A file that cannot be read.
pub fn begun_with(folder: &Path, share: Share) -> Result<Option<Map<String, Value>>, DistillError> {
    let path = provenance_file(folder, share);
    Ok(if path.exists() { Some(DistillProvenance::entries(&path)?) } else { None })
}

fn provenance_file(folder: &Path, share: Share) -> PathBuf {
    folder.join(file_of(share, "distill", ".json"))
}

fn refused_path(folder: &Path, share: Share) -> PathBuf {
    folder.join(file_of(share, "refused", ".jsonl"))
}

/// Refused questions of a share's first `shards` shards. A run that is cut short may leave those of a shard that it has not written.
pub(super) fn refused_in_shards(
    folder: &Path,
    share: Share,
    shards: usize,
) -> Result<Vec<RefusedQuestion>, DistillError> {
    let mut refused = refused_file::read(&refused_path(folder, share))?;
    refused.retain(|question| is_in_shards(question.conversation, share, shards));
    Ok(refused)
}

fn is_in_shards(conversation: usize, share: Share, shards: usize) -> bool {
    conversation / share.of() < shards * CONVERSATIONS_PER_SHARD
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

/// The checksums of a share's first shards, which are verified. Shards of earlier versions have none.
fn verified_shards(folder: &Path, share: Share, shards: usize) -> Result<BTreeMap<String, String>, DistillError> {
    let list = sums_path(folder, share);
    let mut sums = if list.exists() { checksums::read_list(&list)? } else { BTreeMap::new() };
    let names: Vec<String> = (0..shards).map(|number| shard_name(share, number)).collect();
    sums.retain(|name, _| names.contains(name)); // a run that was killed may have left the checksum of the next one
    let listed = Checksums::of(folder, &list, &sums);
    names.par_iter().try_for_each(|name| listed.verify_file(name)).map_err(DistillError::DamagedShard)?;
    Ok(sums)
}

/// The list of a share's checksums.
fn sums_path(folder: &Path, share: Share) -> PathBuf {
    folder.join(file_of(share, "medusa", ".sha256"))
}

/// The first shard of a share that is not written yet.
pub(super) fn next_shard(folder: &Path, share: Share) -> PathBuf {
    folder.join(shard_name(share, shard_files(folder, share).count()))
}

/// Whether the journal has rows of [`next_shard`].
pub(super) fn holds_next_shard(folder: &Path, share: Share) -> bool {
    let next = shard_files(folder, share).count();
    let rows_behind = |shards| journalled(folder, share, shards).map_or(0, |rows| rows.len());
    rows_behind(next) > rows_behind(next + 1)
}

/// The conversations of a share that are in its journal, and in none of its first `shards` shards.
pub(super) fn journalled(
    folder: &Path,
    share: Share,
    shards: usize,
) -> Result<Vec<FinishedConversation>, DistillError> {
    let (lines, _) = Journal::read(&folder.join(file_of(share, "journal", ".jsonl")))?;
    let later = lines.into_iter().filter(|line| !is_in_shards(line.id, share, shards));
    Ok(later.map(|line| (line.id, line)).collect::<BTreeMap<_, _>>().into_values().collect())
}

fn shard_name(share: Share, number: usize) -> String {
    file_of(share, "shard", &format!("-{number:05}.parquet"))
}

/// Refuses a folder that holds anything except other machines' shares.
///
/// # Errors
/// [`DistillError::Occupied`], or an I/O error.
fn check_is_free(folder: &Path, share: Share) -> Result<(), DistillError> {
    let failed = |source: io::Error| DistillError::Io { path: folder.into(), source };
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    let mut names = entries.map(name).collect::<io::Result<Vec<_>>>().map_err(failed)?;
    names.retain(|name| !is_anothers(share, name) && !files::is_partial(name));
    match names.into_iter().min() {
        None => Ok(()),
        Some(found) => Err(DistillError::Occupied { folder: folder.into(), found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distill::RefusedTurn;

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

    /// A power cut may take a shard and the journal, and leave the lines written before: these questions are asked again.
    #[test]
    fn refused_questions_of_a_shard_that_is_not_written_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let share: Share = "2/2".parse().unwrap();
        let refused = |conversation: usize| RefusedQuestion {
            index: conversation,
            id: None,
            conversation,
            refused: RefusedTurn { turn: 1, why: "no".into() },
        };
        let all = [1, 511, 513].map(refused);
        refused_file::write(&refused_path(dir.path(), share), all.iter()).unwrap();
        assert_eq!(refused_in_shards(dir.path(), share, 1).unwrap(), all[..2]);
        assert_eq!(refused_in_shards(dir.path(), share, 0).unwrap(), []);
        assert_eq!(refused_in_shards(dir.path(), "1/2".parse().unwrap(), 1).unwrap(), []);
    }
}
