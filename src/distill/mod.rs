//! Training data by self-distillation (paper section 2.3.2): the backbone answers prompts, and the conversations become
//! Parquet rows ready for training. This module does not know how an answer is decoded.

use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;

use rayon::iter::{IntoParallelRefIterator, ParallelIterator};

use crate::data::chat_template::Message;
use crate::data::prompts::{Dialogue, PromptError, Questions};
use crate::decode::batch::Ended;

pub mod answer;
pub mod conversation;
mod error;
mod journal;
pub mod output;
pub mod provenance;
pub mod render;
mod shards;

use answer::{Answerer, Question};
pub use conversation::DistillSettings;
use conversation::{Conversation, Finished};
pub use error::DistillError;
use output::Output;
use render::Renderer;

/// Progress of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DistillProgress {
    /// Finished conversations, including those of earlier runs.
    pub conversations: usize,
    /// New tokens of this run.
    pub tokens: usize,
}

/// How a distillation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DistillEnd {
    /// Every conversation is in a shard.
    Whole,
    /// The caller stopped the run; finished conversations are kept.
    Stopped,
}

/// Checks before any work that every prompt can be rendered and leaves room for an answer.
///
/// # Errors
/// The first invalid prompt, with file and line.
pub fn check(dialogues: &[Dialogue], renderer: &Renderer, settings: &DistillSettings) -> Result<(), DistillError> {
    let fault = |dialogue: &Dialogue| check_one(dialogue, renderer, settings).err();
    let first = dialogues.par_iter().find_map_first(fault);
    first.map_or(Ok(()), Err)
}

fn check_one(dialogue: &Dialogue, renderer: &Renderer, settings: &DistillSettings) -> Result<(), DistillError> {
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

/// Answers every prompt that the output lacks. `on_step` receives the progress and may stop the run.
///
/// # Errors
/// A decoding or I/O error; conversations finished by then are kept.
pub fn run(
    dialogues: &[Dialogue],
    renderer: &Renderer,
    settings: &DistillSettings,
    mut answerer: Answerer,
    output: &mut Output,
    on_step: &mut dyn FnMut(DistillProgress) -> ControlFlow<()>,
) -> Result<DistillEnd, DistillError> {
    let waiting = output.missing().into_iter();
    let mut talk = Talk { dialogues, renderer, settings, waiting, open: HashMap::new(), next_turns: VecDeque::new() };
    loop {
        while answerer.has_room() {
            let Some(question) = talk.next_question()? else { break };
            let id = question.conversation;
            answerer.enter(&question).map_err(|source| DistillError::Decode { id, source })?;
        }
        if answerer.is_idle() {
            output.finish()?;
            return Ok(DistillEnd::Whole);
        }
        output.keep(talk.hear(answerer.step()?)?)?;
        if on_step(DistillProgress { conversations: output.kept(), tokens: answerer.tokens() }).is_break() {
            return Ok(DistillEnd::Stopped);
        }
    }
}

/// The conversations in progress.
struct Talk<'a> {
    dialogues: &'a [Dialogue],
    renderer: &'a Renderer<'a>,
    settings: &'a DistillSettings,
    /// Indices of conversations that have not begun.
    waiting: std::vec::IntoIter<usize>,
    open: HashMap<usize, Conversation<'a>>,
    /// Next turns of open conversations. They go before new ones, so that shards fill in order.
    next_turns: VecDeque<Question>,
}

impl Talk<'_> {
    fn next_question(&mut self) -> Result<Option<Question>, DistillError> {
        if let Some(question) = self.next_turns.pop_front() {
            return Ok(Some(question));
        }
        let Some(id) = self.waiting.next() else { return Ok(None) };
        let mut conversation = Conversation::new(id, &self.dialogues[id]);
        let first =
            conversation.next_question(self.renderer, self.settings).map_err(|source| self.failed(id, source))?;
        self.open.insert(id, conversation);
        Ok(first)
    }

    /// Takes answers and returns the conversations that they finish.
    fn hear(&mut self, answers: Vec<Ended>) -> Result<Vec<Finished>, DistillError> {
        let mut finished = vec![];
        for (id, answer) in answers {
            let mut conversation = self.open.remove(&id).expect("only open conversations are answered");
            let answer = answer.map_err(|source| DistillError::Decode { id, source })?;
            let next = conversation.hear(answer, self.renderer);
            let next = next.and_then(|()| conversation.next_question(self.renderer, self.settings));
            match next.map_err(|source| self.failed(id, source))? {
                Some(question) => {
                    self.next_turns.push_back(question);
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
