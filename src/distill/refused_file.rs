//! refused.jsonl: the refused questions of finished shards, one line each. Until a shard is whole they are in the journal with its
//! conversations.

use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::DistillError;
use super::conversation::FinishedConversation;
use super::refusal::RefusedTurn;
use crate::files;
use crate::formats::sealed::{self, Broken, sealed};

/// A line of refused.jsonl.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RefusedQuestion {
    /// Of the prompt in its file.
    pub(super) index: usize,
    /// The prompt's own name.
    pub(super) id: Option<String>,
    /// Its number among the prompts that fit.
    pub(super) conversation: usize,
    #[serde(flatten)]
    pub(super) refused: RefusedTurn,
}

impl RefusedQuestion {
    /// `None` for a conversation that was not refused.
    pub(super) fn of(finished: &FinishedConversation) -> Option<Self> {
        let refused = finished.refused.clone()?;
        let index = finished.index.unwrap_or(finished.id);
        Some(Self { index, id: finished.prompt_id.clone(), conversation: finished.id, refused })
    }

    /// Whether the conversation has no answer, and so no row.
    pub(super) fn has_no_row(&self) -> bool {
        self.refused.turn == 1
    }
}

/// Writes refused.jsonl atomically.
pub(super) fn write<'r>(path: &Path, refused: impl Iterator<Item = &'r RefusedQuestion>) -> Result<(), DistillError> {
    let line = |question| sealed(&serde_json::to_string(question).expect("strings and numbers become JSON")) + "\n";
    let text: String = refused.map(line).collect();
    let written = files::write_atomic(path, |out| out.write_all(text.as_bytes()));
    written.map_err(|source| DistillError::Io { path: path.into(), source })
}

/// The questions of refused.jsonl; none if there is no such file.
pub(super) fn read(path: &Path) -> Result<Vec<RefusedQuestion>, DistillError> {
    let text = match files::read_text(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(source) => return Err(DistillError::Io { path: path.into(), source }),
    };
    let read = |(at, line): (usize, &str)| {
        let line_number = at + 1;
        sealed::check(line).map_err(|Broken { expected, got }| DistillError::ChangedLine {
            path: path.into(),
            line: line_number,
            expected,
            got,
        })?;
        serde_json::from_str(line).map_err(|source| DistillError::RefusedLine {
            path: path.into(),
            line: line_number,
            source,
        })
    };
    text.lines().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written_and_a_damaged_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("refused.jsonl");
        assert_eq!(read(&path).unwrap(), []);
        let question = |conversation: usize| RefusedQuestion {
            index: conversation + 1,
            id: (conversation == 2).then(|| "q".to_owned()),
            conversation,
            refused: RefusedTurn { turn: conversation as u64, why: "status 400: a \"line\nbreak\"".into() },
        };
        let all = [question(1), question(2)];
        write(&path, all.iter()).unwrap();
        assert_eq!(
            (read(&path).unwrap().as_slice(), all[0].has_no_row(), all[1].has_no_row()),
            (&all[..], true, false)
        );
        let text = fs::read_to_string(&path).unwrap();
        files::write_atomic(&path, |out| out.write_all(&text.as_bytes()[..text.len() - 9])).unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("refused.jsonl, line 2"), "{error}");
        files::write_atomic(&path, |out| out.write_all(text.replacen("status 400", "status 403", 1).as_bytes()))
            .unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("refused.jsonl, line 1 was changed after it was written: expected sha256"), "{error}");
    }
}
