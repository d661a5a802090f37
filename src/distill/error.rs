//! Errors of distillation.

use std::io;
use std::path::PathBuf;

use super::refusal::Refusal;
use crate::data::prompts::PromptError;
use crate::data::rows::RowLocation;
use crate::decode::error::DecodeError;
use crate::files::checksums::ChecksumError;
use crate::files::{FileError, in_words};
use crate::formats::FormatError;
use crate::formats::share::Share;
use crate::http::EndpointError;

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
    /// Another process writes this share of the folder.
    #[error("{}: share {share} is in use by another process{}: wait for it to end, or choose another --out", folder.display(), in_words(*holder))]
    InUse { folder: PathBuf, share: Share, holder: Option<u32> },
    #[error(
        "{} was removed, moved or replaced while conversations were written to it; put it back and use --resume, or choose another --out",
        folder.display()
    )]
    FolderGone { folder: PathBuf },
    /// A list of checksums that is damaged or cannot be read or written.
    #[error(transparent)]
    Checksum(#[from] ChecksumError),
    #[error("{0}, or remove it: --resume makes it anew, and all shards behind it")]
    DamagedShard(ChecksumError),
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
    #[error(transparent)]
    File(#[from] FileError),
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
    /// A question that the server does not answer as it should.
    #[error("{place}: conversation {id} is not answered; conversations finished before are kept")]
    Server { place: RowLocation, id: usize, source: Box<ServerError> },
    /// One refused question too many.
    #[error(
        "{place}: conversation {id} is refused, and {}; finished conversations are kept, and --resume asks this question again{advice}",
        allowed(*most)
    )]
    Refused { place: RowLocation, id: usize, most: usize, advice: &'static str, source: Box<Refusal> },
    /// The fault is not one of single questions.
    #[error(
        "{place}: conversation {id} is refused, and the server has answered no other since; this is not recorded, and --resume asks again{advice}"
    )]
    NothingAnswered { place: RowLocation, id: usize, advice: &'static str, source: Box<Refusal> },
    /// A resumed folder has more refused questions than are allowed now.
    #[error("{}: the server has refused {refused} of its questions, and {}; raise --max-refused, or leave out --strict", folder.display(), allowed(*most))]
    RefusedBefore { folder: PathBuf, refused: usize, most: usize },
    /// A damaged refused.jsonl.
    #[error("{}, line {line}: expected a refused question, as medusa distill writes it", path.display())]
    RefusedLine { path: PathBuf, line: usize, source: serde_json::Error },
    #[error(
        "{}, line {line} was changed after it was written: expected sha256 {expected}, got {got}; put back a copy (if you changed it on purpose, \
         remove its key \"checksum\")", path.display()
    )]
    ChangedLine { path: PathBuf, line: usize, expected: String, got: String },
    #[error("{} damaged: --resume decodes their conversations again", if *lines == 1 { "1 line is".to_owned() } else { format!("{lines} lines are") })]
    DamagedLines { lines: usize },
    /// A folder whose files are of several distillations.
    #[error("{}: {key}: expected {expected} as in {}, got {got}; a folder holds the shares of one distillation", path.display(), first.display())]
    OtherDistillation { path: PathBuf, first: PathBuf, key: String, expected: String, got: String },
    /// A conversation in two shards.
    #[error("conversation {index} is there twice: {} and {}", first.display(), second.display())]
    DoubleConversation {
        /// Of its prompt in the prompt file.
        index: i64,
        first: PathBuf,
        second: PathBuf,
    },
    /// A shard that is no Parquet file of this program.
    #[error("{} is no shard of medusa distill: {problem}", path.display())]
    Shard { path: PathBuf, problem: String },
    /// Raw prompts are no conversations: training reads only their tokens.
    #[error(
        "{place}: a prompt without messages or turns; its answer is kept as tokens, which --endpoint makes only with --backbone B, the \
         folder or Hub id of the server's model"
    )]
    RawPromptWithoutBackbone { place: RowLocation },
    /// A step of the whole batch failed.
    #[error(transparent)]
    Step(#[from] DecodeError),
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The backbone cannot decode it.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The server does not answer as it should.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The server answers others, and not this one.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// What is wrong with a server's answer.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No further attempt would help, or all failed.
    #[error("{}", given_up(*attempts, source))]
    GaveUp {
        /// How often the question was asked.
        attempts: u32,
        source: EndpointError,
    },
    /// A reasoning parser took a part of the text away.
    #[error(
        "the server tells the model's reasoning apart from its answer (reasoning_content), and no token ids (return_token_ids) that would \
         tell how both were written; start it without a reasoning parser, so that the reasoning is a part of the text, or use a server \
         with return_token_ids and give --backbone"
    )]
    Reasoning,
    /// More would be cut off than by the server that the folder was begun with.
    #[error(
        "the server's context (max_model_len) is {now} tokens, and was {at_first} when --out was begun: {what} does not fit; start the server \
         with {at_first} again, and continue with --resume"
    )]
    SmallerContext {
        now: usize,
        at_first: usize,
        /// What does not fit.
        what: &'static str,
    },
    /// Only with `--strict`.
    #[error("--strict: {what}: expected {expected}, got {got}")]
    TokensDiffer {
        /// Of which text.
        what: &'static str,
        /// Of the backbone's tokenizer.
        expected: String,
        /// Of the server.
        got: String,
    },
    /// Only with `--strict`.
    #[error("--strict: the answer is from model {got:?}, not from {expected:?}")]
    OtherModel { expected: String, got: String },
    /// A fault of this program.
    #[error(
        "the thread that asked the server panicked: {message}; this is a bug of medusa-train: please report it; continue with --resume"
    )]
    Panicked { message: String },
    /// The tokenizer or the template fails.
    #[error(transparent)]
    Tokens(#[from] PromptError),
}

fn allowed(most: usize) -> String {
    match most {
        0 => "--strict or --max-refused 0 allows none".to_owned(),
        _ => format!("--max-refused allows {most}"),
    }
}

/// What can be done about it.
fn given_up(attempts: u32, error: &EndpointError) -> String {
    let advice = match error.status() {
        Some(401 | 403) => "; the server refuses the API key: set MEDUSA_API_KEY, or give --api-key-file",
        Some(404 | 405) => "; --endpoint is the address up to /v1, and --model a name that the server lists",
        _ => "; continue with --resume",
    };
    match attempts {
        1 => format!("{error}{advice}"),
        _ => format!("{error}, after {attempts} attempts{advice}"),
    }
}
