//! Errors of distillation.

use std::io;
use std::path::PathBuf;

use crate::data::prompts::PromptError;
use crate::data::rows::RowLocation;
use crate::decode::error::DecodeError;
use crate::formats::FormatError;

/// What can stop a distillation.
#[derive(Debug, thiserror::Error)]
pub enum DistillError {
    /// A prompt that cannot be rendered.
    #[error("{place}")]
    Prompt {
        /// Where it stands.
        place: RowLocation,
        /// What is wrong with it.
        source: Box<PromptError>,
    },
    /// No room for an answer.
    #[error(
        "{place}: the prompt has {length} tokens, but the backbone's context is {context}, and at least one new token must fit; \
         shorten or remove the prompt"
    )]
    PromptTooLong {
        /// Where it stands.
        place: RowLocation,
        /// Its tokens.
        length: usize,
        /// The backbone's.
        context: usize,
    },
    /// A raw prompt has no turns.
    #[error(
        "{place}: --self-talk needs conversations (\"messages\", \"conversations\" or \"turns\"); this prompt is raw"
    )]
    SelfTalkOfRawPrompt {
        /// Where it stands.
        place: RowLocation,
    },
    /// A template that hides what the user says.
    #[error(
        "--self-talk: the chat template changes the user's text, so the model cannot continue a user turn; drop \
         --self-talk"
    )]
    NoPlaceForQuestions,
    /// Somebody's files.
    #[error("{} is not empty: it holds {found:?}; choose another --out, or continue that run with --resume", folder.display())]
    Occupied {
        /// The output folder.
        folder: PathBuf,
        /// The first file there that is in the way.
        found: String,
    },
    /// Another run's folder.
    #[error("{}: {key}: expected {expected}, got {got}; --resume must repeat the original settings and files: restore them, or choose another --out", path.display())]
    Changed {
        /// distill.json.
        path: PathBuf,
        /// What differs.
        key: String,
        /// What stands there.
        expected: String,
        /// What this run has.
        got: String,
    },
    /// A journal line that is neither whole nor the last one.
    #[error(
        "{}, line {line}: the journal is damaged; remove it to generate its conversations again (the shards stay)",
        path.display()
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// distill.json.
    #[error(transparent)]
    Provenance(#[from] FormatError),
    /// The disk's own words.
    #[error("cannot read or write {}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A prompt that cannot be decoded.
    #[error("conversation {id}")]
    Decode {
        /// Its index in the prompt file.
        id: usize,
        /// Why.
        source: DecodeError,
    },
    /// A step of all rows failed.
    #[error(transparent)]
    Step(#[from] DecodeError),
}
