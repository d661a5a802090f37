//! The conversations in progress: asks their questions, hears the answers, and decides what becomes of a question that is refused.

use std::collections::{HashMap, VecDeque};

use super::DistillSettings;
use super::answer::{Answered, Answerer, Question, WrittenAnswer};
use super::conversation::{Conversation, FinishedConversation};
use super::error::{AnswerError, DistillError};
use super::output::Output;
use super::refusal::{FEW_REFUSED, Refusal};
use super::render::Renderer;
use crate::data::prompts::{Dialogue, PromptError};
use crate::decode::error::DecodeError;

/// The conversations in progress.
pub(super) struct OpenConversations<'a> {
    dialogues: &'a [Dialogue],
    renderer: Option<&'a Renderer<'a>>,
    settings: &'a DistillSettings,
    /// Indices of conversations that have not begun.
    waiting: std::vec::IntoIter<usize>,
    open: HashMap<usize, Conversation<'a>>,
    /// Next turns of open conversations. They go before new ones, so that shards fill in order.
    next_turns: VecDeque<Question>,
    refusals: Refusals,
}

/// What was refused. A server that refuses everything is at fault itself: until it has answered a question, nothing is recorded; nor is a
/// question at which the server fails, until it has answered another one since.
#[derive(Debug)]
struct Refusals {
    /// With those of earlier runs.
    count: usize,
    has_answer: bool,
    /// Not to be recorded yet.
    held: Vec<(Refusal, FinishedConversation)>,
    /// To be recorded.
    settled: Vec<FinishedConversation>,
    /// Since they were last taken.
    new: Vec<(usize, Refusal)>,
}

impl Refusals {
    fn new(count: usize) -> Self {
        Self { count, has_answer: false, held: vec![], settled: vec![], new: vec![] }
    }

    fn note_answer(&mut self) {
        self.has_answer = true;
        self.settled.extend(self.held.drain(..).map(|(_, finished)| finished));
    }

    fn add(&mut self, why: Refusal, finished: FinishedConversation) {
        self.count += 1;
        self.new.push((finished.id, why.clone()));
        if self.has_answer && !why.is_doubtful() {
            self.settled.push(finished);
        } else {
            self.held.push((why, finished));
        }
    }
}

impl<'a> OpenConversations<'a> {
    pub(super) fn new(
        dialogues: &'a [Dialogue],
        renderer: Option<&'a Renderer<'a>>,
        settings: &'a DistillSettings,
        output: &Output,
    ) -> Self {
        let refusals = Refusals::new(output.refused());
        let waiting = output.missing().into_iter();
        let (open, next_turns) = (HashMap::new(), VecDeque::new());
        Self { dialogues, renderer, settings, waiting, open, next_turns, refusals }
    }

    /// Asks as many questions as there is room for.
    pub(super) fn ask(&mut self, answerer: &mut impl Answerer) -> Result<(), DistillError> {
        while answerer.has_room() {
            let Some(question) = self.next_question()? else { break };
            let id = question.conversation;
            answerer.enter(question).map_err(|source| self.unanswered(id, source))?;
        }
        Ok(())
    }

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

    /// Takes answers and keeps the conversations that they finish.
    ///
    /// # Errors
    /// The first error among the answers, after all the others were kept; an error of the folder.
    pub(super) fn hear(&mut self, answers: Vec<Answered>, output: &mut Output) -> Result<(), DistillError> {
        let (mut finished, mut outcome) = (vec![], Ok(()));
        for (id, answer) in answers {
            match self.hear_one(id, answer) {
                Ok(conversation) => finished.extend(conversation),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        finished.append(&mut self.refusals.settled);
        output.keep(finished)?;
        outcome
    }

    fn hear_one(
        &mut self,
        id: usize,
        answer: Result<WrittenAnswer, AnswerError>,
    ) -> Result<Option<FinishedConversation>, DistillError> {
        let mut conversation = self.open.remove(&id).expect("only open conversations are answered");
        let answer = match answer {
            Ok(answer) => answer,
            Err(AnswerError::Refused(why)) => return self.refused(conversation, id, why).map(|()| None),
            Err(source) => return Err(self.unanswered(id, source)),
        };
        self.refusals.note_answer();
        let next = conversation.hear(answer, self.renderer);
        let next = next.and_then(|()| conversation.next_question(self.renderer, self.settings));
        let Some(question) = next.map_err(|source| self.failed(id, source))? else {
            return Ok(Some(conversation.finish()));
        };
        self.next_turns.push_back(question);
        self.open.insert(id, conversation);
        Ok(None)
    }

    /// Takes a refusal, unless it is one too many.
    fn refused(&mut self, conversation: Conversation, id: usize, why: Refusal) -> Result<(), DistillError> {
        if self.refusals.count >= self.settings.max_refused {
            return Err(self.too_many(id, why));
        }
        let finished = conversation.refused(&why);
        self.refusals.add(why, finished);
        Ok(())
    }

    /// Refusals with which the run went on since the last call.
    pub(super) fn new_refusals(&mut self) -> Vec<(usize, Refusal)> {
        std::mem::take(&mut self.refusals.new)
    }

    /// Whether the server has answered a question, in this run or an earlier one.
    fn has_answers(&self, output: &Output) -> bool {
        self.refusals.has_answer || output.rows() > 0
    }

    /// All questions are answered or refused. Behind the last answer only a few may be refused.
    ///
    /// # Errors
    /// A server that refused all questions of the folder, or many since its last answer; an error of the folder.
    pub(super) fn end(&mut self, output: &mut Output) -> Result<(), DistillError> {
        let held = std::mem::take(&mut self.refusals.held);
        match held.first() {
            Some((why, first)) if held.len() > FEW_REFUSED || !self.has_answers(output) => {
                return Err(self.nothing_answered(first.id, why.clone()));
            }
            _ => {}
        }
        output.keep(held.into_iter().map(|(_, finished)| finished).collect())?;
        output.finish()
    }

    /// The error of a run that has heard its last answers: if there are none at all, one refusal too many is the server's fault.
    pub(super) fn known_better(&self, error: DistillError, output: &Output) -> DistillError {
        match (error, self.refusals.held.first()) {
            (DistillError::Refused { .. }, Some((why, first))) if !self.has_answers(output) => {
                self.nothing_answered(first.id, why.clone())
            }
            (error, _) => error,
        }
    }

    /// The run ends early: keeps what is answered by now, and what comes within a moment. Faults of these answers are left to `--resume`.
    ///
    /// # Errors
    /// An error of the folder.
    pub(super) fn take_last(&mut self, answerer: &mut impl Answerer, output: &mut Output) -> Result<(), DistillError> {
        match self.hear(answerer.last_answers(), output) {
            Err(error @ DistillError::Io { .. }) => Err(error),
            _ => Ok(()),
        }
    }

    fn too_many(&self, id: usize, source: Refusal) -> DistillError {
        let (place, most) = (self.dialogues[id].place.clone(), self.settings.max_refused);
        DistillError::Refused { place, id, most, advice: source.advice(), source: Box::new(source) }
    }

    fn nothing_answered(&self, id: usize, source: Refusal) -> DistillError {
        let place = self.dialogues[id].place.clone();
        DistillError::NothingAnswered { place, id, advice: source.advice(), source: Box::new(source) }
    }

    fn unanswered(&self, id: usize, source: AnswerError) -> DistillError {
        let place = self.dialogues[id].place.clone();
        match source {
            AnswerError::Decode(source @ DecodeError::NotFinite { .. }) => {
                DistillError::NotFinite { place, id, source: Box::new(source) }
            }
            AnswerError::Decode(source) => DistillError::Decode { place, id, source: Box::new(source) },
            AnswerError::Server(source) => DistillError::Server { place, id, source: Box::new(source) },
            AnswerError::Refused(source) => self.too_many(id, source),
        }
    }

    fn failed(&self, id: usize, source: PromptError) -> DistillError {
        DistillError::Prompt { place: self.dialogues[id].place.clone(), source: Box::new(source) }
    }
}
