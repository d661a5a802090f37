//! Training data by self-distillation (paper section 2.3.2): the backbone answers prompts, and what it saw and wrote becomes
//! rows of Parquet that train as they are. Knows nothing of how an answer is decoded.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use crate::data::chat_template::Message;
use crate::data::prompts::{Dialogue, PromptError, Questions};
use crate::data::rows::RowLocation;
use crate::decode::batch::{RowEnded, RowRequest};
use crate::decode::generate::DecodeError;

pub mod answer;
pub mod conversation;
mod journal;
pub mod output;
pub mod provenance;
pub mod render;
mod shards;

use answer::Answerer;
use conversation::{Conversation, Finished};
use output::Output;
use render::Renderer;

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
         shorten the prompt or leave it out"
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
        "--self-talk: the chat template does not show the user's text as it is, so the user's turn cannot be opened; leave \
         --self-talk out"
    )]
    NoPlaceForQuestions,
    /// Somebody's files.
    #[error("{} is not empty: it holds {found:?}; choose another --out, or go on with what was begun there with --resume", folder.display())]
    Occupied {
        /// The output folder.
        folder: PathBuf,
        /// The first file there that is in the way.
        found: String,
    },
    /// Another run's folder.
    #[error("{}: {key}: expected {expected}, got {got}; --resume goes on only with what the folder was begun with: use that, or another --out", path.display())]
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
        "{}, line {line}: the journal is damaged; remove it to make its conversations again (the shards beside it stay)",
        path.display()
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// A distill.json that is none.
    #[error("{} is no valid JSON; it says what the folder was begun with: without it, choose another --out", path.display())]
    NoProvenance {
        /// distill.json.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
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

/// How conversations are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Of one answer.
    pub max_new_tokens: NonZeroUsize,
    /// Answers of a conversation at most.
    pub turns: NonZeroUsize,
    /// The backbone writes the user's turns behind the first one, too.
    pub self_talk: bool,
    /// Of what is drawn.
    pub seed: u64,
    /// The backbone's `max_position_embeddings`.
    pub context: usize,
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Conversations that are kept, those of earlier runs among them.
    pub conversations: usize,
    /// New tokens of this run.
    pub tokens: usize,
}

/// Whether a run came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Every conversation is in a shard.
    Whole,
    /// The caller asked to stop; what is finished is kept.
    Stopped,
}

/// Refuses, before any work is done, a prompt that cannot be rendered or leaves no room for an answer.
///
/// # Errors
/// The first such prompt, by file and line.
pub fn check(dialogues: &[Dialogue], renderer: &Renderer, settings: &Settings) -> Result<(), DistillError> {
    let fault = |dialogue: &Dialogue| check_one(dialogue, renderer, settings).err();
    let first = dialogues.par_iter().find_map_first(fault);
    first.map_or(Ok(()), Err)
}

fn check_one(dialogue: &Dialogue, renderer: &Renderer, settings: &Settings) -> Result<(), DistillError> {
    let place = || dialogue.place.clone();
    let is_raw = !matches!(dialogue.questions, Questions::Turns { .. });
    if settings.self_talk && is_raw {
        return Err(DistillError::SelfTalkOfRawPrompt { place: place() });
    }
    let failed = |source| DistillError::Prompt { place: place(), source: Box::new(source) };
    let mut messages = vec![];
    let first = render::first(&dialogue.questions, renderer, &mut messages).map_err(failed)?;
    let (length, context) = (first.ids.len(), settings.context);
    if length >= context {
        return Err(DistillError::PromptTooLong { place: place(), length, context });
    }
    if settings.self_talk {
        messages.push(Message::new("assistant", "a"));
        renderer.question(&messages).map_err(failed)?.ok_or(DistillError::NoPlaceForQuestions)?;
    }
    Ok(())
}

/// Makes every conversation that the output lacks. `on_step` hears how far it is, and may stop it.
///
/// # Errors
/// What decoding or the disk says; conversations that are finished by then are kept.
pub fn run(
    dialogues: &[Dialogue],
    renderer: &Renderer,
    settings: &Settings,
    mut answerer: Answerer,
    output: &mut Output,
    on_step: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Outcome, DistillError> {
    let waiting = output.missing().into_iter();
    let mut talk = Talk { dialogues, renderer, settings, waiting, open: HashMap::new(), next_turns: VecDeque::new() };
    loop {
        while answerer.has_room() {
            let Some(request) = talk.next_request()? else { break };
            let id = request.key;
            answerer.enter(request).map_err(|source| DistillError::Decode { id, source })?;
        }
        if answerer.is_idle() {
            output.finish()?;
            return Ok(Outcome::Whole);
        }
        output.keep(talk.hear(answerer.step()?)?)?;
        if on_step(Progress { conversations: output.kept(), tokens: answerer.tokens() }).is_break() {
            return Ok(Outcome::Stopped);
        }
    }
}

/// The conversations that are being held.
struct Talk<'a> {
    dialogues: &'a [Dialogue],
    renderer: &'a Renderer<'a>,
    settings: &'a Settings,
    /// Indices of conversations that have not begun.
    waiting: std::vec::IntoIter<usize>,
    open: HashMap<usize, Conversation<'a>>,
    /// Of conversations that have begun: they go first, so that shards are completed in their order.
    next_turns: VecDeque<RowRequest>,
}

impl Talk<'_> {
    fn next_request(&mut self) -> Result<Option<RowRequest>, DistillError> {
        if let Some(request) = self.next_turns.pop_front() {
            return Ok(Some(request));
        }
        let Some(id) = self.waiting.next() else { return Ok(None) };
        let mut conversation = Conversation::new(id, &self.dialogues[id]);
        let first =
            conversation.next_request(self.renderer, self.settings).map_err(|source| self.failed(id, source))?;
        self.open.insert(id, conversation);
        Ok(first)
    }

    /// Returns the conversations that end with what was said.
    fn hear(&mut self, said: Vec<RowEnded>) -> Result<Vec<Finished>, DistillError> {
        let mut finished = vec![];
        for said in said {
            let id = said.key;
            let mut conversation = self.open.remove(&id).expect("only open conversations are answered");
            let next = conversation.hear(said, self.renderer);
            let next = next.and_then(|()| conversation.next_request(self.renderer, self.settings));
            match next.map_err(|source| self.failed(id, source))? {
                Some(request) => {
                    self.next_turns.push_back(request);
                    self.open.insert(id, conversation);
                }
                None => finished.push(conversation.finish()),
            }
        }
        Ok(finished)
    }

    fn failed(&self, id: usize, source: PromptError) -> DistillError {
        DistillError::Prompt { place: self.dialogues[id].place.clone(), source: Box::new(source) }
    }
}
