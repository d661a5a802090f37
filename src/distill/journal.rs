//! Finished conversations that are in no shard yet, one line each: a checksum, then JSON. Lines are synced before the
//! next step, so a killed process loses none; a truncated last line is dropped.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::DistillError;
use super::conversation::Finished;
use crate::files;

#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Replaces the journal by `lines` and opens it for appending.
    pub(super) fn start<'f>(path: &Path, lines: impl Iterator<Item = &'f Finished>) -> Result<Self, DistillError> {
        let text: String = lines.map(line).collect();
        let written = files::write_atomic(path, |out| out.write_all(text.as_bytes()));
        let file = written.and_then(|()| OpenOptions::new().append(true).open(path));
        let file = file.map_err(|source| DistillError::Io { path: path.into(), source })?;
        Ok(Self { path: path.into(), file })
    }

    /// Reads a journal; empty if there is none.
    pub(super) fn read(path: &Path) -> Result<Vec<Finished>, DistillError> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            Err(source) => return Err(DistillError::Io { path: path.into(), source }),
        };
        let lines: Vec<Option<Finished>> = bytes.split_inclusive(|&byte| byte == b'\n').map(parse).collect();
        let broken = lines.iter().position(Option::is_none).filter(|at| at + 1 < lines.len());
        match broken {
            Some(at) => Err(DistillError::Damaged { path: path.into(), line: at + 1 }),
            None => Ok(lines.into_iter().flatten().collect()),
        }
    }

    /// Appends and syncs.
    pub(super) fn append(&mut self, finished: &[Finished]) -> Result<(), DistillError> {
        let text: String = finished.iter().map(line).collect();
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|source| DistillError::Io { path: self.path.clone(), source })
    }

    pub(super) fn remove(&self) -> Result<(), DistillError> {
        fs::remove_file(&self.path).map_err(|source| DistillError::Io { path: self.path.clone(), source })
    }
}

fn line(finished: &Finished) -> String {
    let json = serde_json::to_string(finished).expect("strings and numbers become JSON");
    format!("{} {json}\n", checksum(json.as_bytes()))
}

/// `None` if the line is truncated or damaged.
fn parse(line: &[u8]) -> Option<Finished> {
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
    use crate::distill::conversation::Said;

    fn finished(id: usize) -> Finished {
        let said = Said { from: "human".into(), value: format!("line\nbreak {id} \u{1f600}") };
        Finished {
            id,
            index: None,
            prompt_id: None,
            category: (id == 1).then(|| "c".to_owned()),
            conversations: vec![said],
            input_ids: vec![1, 2],
            labels: vec![-100, 2],
            finish_reason: "eos".into(),
        }
    }

    #[test]
    fn whatever_is_cut_off_the_end_only_the_last_line_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        assert_eq!(Journal::read(&path).unwrap(), []);
        let mut journal = Journal::start(&path, [finished(0)].iter()).unwrap();
        journal.append(&[finished(1), finished(2)]).unwrap();
        let all = [finished(0), finished(1), finished(2)];
        assert_eq!(Journal::read(&path).unwrap(), all);
        let whole = fs::metadata(&path).unwrap().len();
        let of_last = line(&all[2]).len() as u64;
        for cut in 1..=of_last {
            journal.file.set_len(whole - cut).unwrap();
            assert_eq!(Journal::read(&path).unwrap(), all[..2], "{cut} bytes less");
        }
        journal.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_damaged_line_in_the_middle_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.jsonl");
        Journal::start(&path, [finished(0), finished(1)].iter()).unwrap();
        let text = fs::read_to_string(&path).unwrap().replacen("break 0", "break 7", 1);
        files::write_atomic(&path, |out| out.write_all(text.as_bytes())).unwrap();
        let error = Journal::read(&path).unwrap_err().to_string();
        assert!(error.contains("journal.jsonl, line 1: the journal is damaged"), "{error}");
    }
}
