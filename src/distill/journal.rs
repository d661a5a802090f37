//! Finished conversations that are in no shard yet, one line each: a checksum, then JSON. A line is written before the next step, so a killed
//! process loses none, and synced a little later: a machine that loses power loses the last ones. A line that is truncated or damaged
//! is dropped; its conversation is decoded again, with the same result.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::DistillError;
use super::conversation::FinishedConversation;
use crate::files::{self, sync_folder};

/// A sync takes as long as several steps of a small model.
const BETWEEN_SYNCS: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    synced: Instant,
}

impl Journal {
    /// Replaces the journal by `lines` and opens it for appending.
    pub(super) fn start<'f>(
        path: &Path,
        lines: impl Iterator<Item = &'f FinishedConversation>,
    ) -> Result<Self, DistillError> {
        let text: String = lines.map(line).collect();
        let written = files::write_atomic(path, |out| out.write_all(text.as_bytes()));
        let file = written.and_then(|()| OpenOptions::new().append(true).open(path));
        let file = file.map_err(|source| DistillError::Io { path: path.into(), source })?;
        Ok(Self { path: path.into(), file, synced: Instant::now() })
    }

    /// Reads a journal: its whole lines, and the number of damaged ones before the last; empty if there is none.
    pub(super) fn read(path: &Path) -> Result<(Vec<FinishedConversation>, usize), DistillError> {
        let mut lines = Self::lines(path)?;
        lines.pop_if(|last| last.is_none()); // a kill leaves it
        let damaged = lines.iter().filter(|line| line.is_none()).count();
        Ok((lines.into_iter().flatten().collect(), damaged))
    }

    /// Damaged lines of a journal, also the last one, unless it is only cut off.
    pub(super) fn damaged(path: &Path) -> Result<usize, DistillError> {
        let cut_off = usize::from(!files::read(path).is_ok_and(|bytes| bytes.is_empty() || bytes.ends_with(b"\n")));
        let damaged = Self::lines(path)?.iter().filter(|line| line.is_none()).count();
        Ok(damaged.saturating_sub(cut_off))
    }

    /// All lines, `None` for a damaged one.
    fn lines(path: &Path) -> Result<Vec<Option<FinishedConversation>>, DistillError> {
        match files::read(path) {
            Ok(bytes) => Ok(bytes.split_inclusive(|&byte| byte == b'\n').map(parse).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(vec![]),
            Err(source) => Err(DistillError::Io { path: path.into(), source }),
        }
    }

    /// Appends, and syncs if the last time was a while ago.
    pub(super) fn append(&mut self, finished: &[FinishedConversation]) -> Result<(), DistillError> {
        let text: String = finished.iter().map(line).collect();
        self.file.write_all(text.as_bytes()).map_err(|source| self.failed(source))?;
        if self.synced.elapsed() >= BETWEEN_SYNCS { self.sync() } else { Ok(()) }
    }

    /// What was appended is on the disk when this returns.
    pub(super) fn sync(&mut self) -> Result<(), DistillError> {
        self.file.sync_data().map_err(|source| self.failed(source))?;
        self.synced = Instant::now();
        Ok(())
    }

    fn failed(&self, source: io::Error) -> DistillError {
        DistillError::Io { path: self.path.clone(), source }
    }

    pub(super) fn remove(&self) -> Result<(), DistillError> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::remove_file(&self.path).and_then(|()| sync_folder(folder)).map_err(|source| self.failed(source))
    }
}

fn line(finished: &FinishedConversation) -> String {
    let json = serde_json::to_string(finished).expect("strings and numbers become JSON");
    format!("{} {json}\n", checksum(json.as_bytes()))
}

/// `None` if the line is truncated or damaged.
fn parse(line: &[u8]) -> Option<FinishedConversation> {
    let line = line.strip_suffix(b"\n")?;
    let blank = line.iter().position(|&byte| byte == b' ')?;
    let (sum, json) = (&line[..blank], &line[blank + 1..]);
    if sum != checksum(json).as_bytes() {
        return None;
    }
    serde_json::from_slice(json).ok()
}

fn checksum(json: &[u8]) -> String {
    files::hex(&Sha256::digest(json)[..8])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distill::RefusedTurn;
    use crate::distill::conversation::ShareGptMessage;

    fn finished(id: usize) -> FinishedConversation {
        let said = ShareGptMessage { from: "human".into(), value: format!("line\nbreak {id} \u{1f600}") };
        FinishedConversation {
            id,
            index: None,
            prompt_id: None,
            category: (id == 1).then(|| "c".to_owned()),
            conversations: vec![said],
            tools: None,
            chat_template_kwargs: None,
            input_ids: vec![1, 2],
            labels: vec![-100, 2],
            finish_reason: "eos".into(),
            refused: (id == 2).then(|| RefusedTurn { turn: 2, why: "no".into() }),
        }
    }

    #[test]
    fn whatever_is_cut_off_the_end_only_the_last_line_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        assert_eq!(Journal::read(&path).unwrap(), (vec![], 0));
        let mut journal = Journal::start(&path, [finished(0)].iter()).unwrap();
        journal.append(&[finished(1), finished(2)]).unwrap();
        let all = [finished(0), finished(1), finished(2)];
        assert_eq!(Journal::read(&path).unwrap(), (all.to_vec(), 0));
        let whole = fs::metadata(&path).unwrap().len();
        let last_length = line(&all[2]).len() as u64;
        for cut in 1..=last_length {
            journal.file.set_len(whole - cut).unwrap();
            assert_eq!(Journal::read(&path).unwrap(), (all[..2].to_vec(), 0), "{cut} bytes less");
        }
        journal.remove().unwrap();
        assert!(!path.exists());
    }

    /// As a power cut leaves them: what was written before a sync may be lost in any order.
    #[test]
    fn whole_lines_around_damaged_ones_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let all: Vec<FinishedConversation> = (0..6).map(finished).collect();
        Journal::start(&path, all.iter()).unwrap();
        let whole = fs::read(&path).unwrap();
        let [one, three, four] =
            [1, 3, 4].map(|at| all[..at].iter().map(|finished| line(finished).len()).sum::<usize>());
        for (zeros, kept, damaged) in [
            (one + 5..one + 6, vec![0, 2, 3, 4, 5], 1),
            (one + 5..three + 5, vec![0, 4, 5], 1),
            (one + 5..four - 1, vec![0, 4, 5], 1),
            (three + 5..whole.len(), vec![0, 1, 2], 0),
            (0..whole.len(), vec![], 0),
        ] {
            let mut bytes = whole.clone();
            bytes[zeros.clone()].fill(0);
            files::write_atomic(&path, |out| out.write_all(&bytes)).unwrap();
            let kept: Vec<FinishedConversation> = kept.into_iter().map(finished).collect();
            assert_eq!(Journal::read(&path).unwrap(), (kept, damaged), "{zeros:?}");
        }
    }

    #[test]
    fn lines_are_written_at_once_and_synced_a_few_times_a_second() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        let mut journal = Journal::start(&path, [].iter()).unwrap();
        let started = journal.synced;
        journal.append(&[finished(0)]).unwrap();
        assert_eq!(journal.synced, started, "the journal has just been synced");
        assert_eq!(Journal::read(&path).unwrap().0, [finished(0)]);
        journal.synced = started.checked_sub(BETWEEN_SYNCS).expect("a machine that has run for a second");
        journal.append(&[finished(1)]).unwrap();
        assert!(journal.synced >= started, "the last sync was long ago");
    }
}
