//! Errors of distillation.

use std::io;
use std::path::PathBuf;

use crate::data::prompts::PromptError;
use crate::data::rows::RowLocation;
use crate::decode::error::DecodeError;
use crate::formats::FormatError;

/// Why a distillation stopped.
#[derive(Debug, thiserror::Error)]
pub enum DistillError {
    /// A prompt that cannot be rendered.
    #[error("{place}")]
    Prompt { place: RowLocation, source: Box<PromptError> },
    /// Raw prompts have no turns.
    #[error(
        "{place}: --self-talk needs conversations (\"messages\", \"conversations\" or \"turns\"); this prompt is raw"
    )]
    SelfTalkOfRawPrompt { place: RowLocation },
    /// The template changes the user's text.
    #[error(
        "--self-talk: the chat template changes the user's text, so the model cannot continue a user turn; drop \
         --self-talk"
    )]
    NoPlaceForQuestions,
    /// The output folder is not empty.
    #[error("{} is not empty: it holds {found:?}; choose another --out, or continue that run with --resume", folder.display())]
    Occupied {
        folder: PathBuf,
        /// The first file found there.
        found: String,
    },
    /// The output folder belongs to another run.
    #[error("{}: {key}: expected {expected}, got {got}; --resume must repeat the original settings and files: restore them, or choose another --out", path.display())]
    Changed {
        /// Path of distill.json.
        path: PathBuf,
        key: String,
        /// The value in distill.json.
        expected: String,
        /// This run's value.
        got: String,
    },
    /// A damaged journal line before the last one.
    #[error(
        "{}, line {line}: the journal is damaged; remove it to generate its conversations again (the shards stay)",
        path.display()
    )]
    Damaged {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// An invalid distill.json.
    #[error(transparent)]
    Provenance(#[from] FormatError),
    #[error("cannot read or write {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A prompt that cannot be decoded.
    #[error("{place}: conversation {id}")]
    Decode {
        place: RowLocation,
        /// Index in the prompt file.
        id: usize,
        source: Box<DecodeError>,
    },
    /// `--resume` draws the same numbers and fails again.
    #[error(
        "{place}: conversation {id} cannot be answered; conversations finished before are kept. --resume would end here again: remove \
         this prompt or choose another --dtype, and another --out"
    )]
    NotFinite { place: RowLocation, id: usize, source: Box<DecodeError> },
    /// A step of the whole batch failed.
    #[error(transparent)]
    Step(#[from] DecodeError),
}
