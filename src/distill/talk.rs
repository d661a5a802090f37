//! The conversations in progress: asks their questions, hears the answers, and decides what becomes of a question that is refused.

use std::collections::{HashMap, VecDeque};

use super::DistillSettings;
use super::answer::{Answered, Answerer, Question, WrittenAnswer};
use super::conversation::{Conversation, Finished};
use super::error::{AnswerError, DistillError};
use super::output::Output;
use super::refusal::Refusal;
use super::render::Renderer;
use crate::data::prompts::{Dialogue, PromptError};
use crate::decode::error::DecodeError;

/// The conversations in progress.
pub(super) struct Talk<'a> {
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

/// What was refused. A server that refuses everything is at fault itself: until it has answered a question, nothing is recorded.
#[derive(Debug)]
struct Refusals {
    /// With those of earlier runs.
    count: usize,
    has_answer: bool,
    held: Vec<Finished>,
    /// The first one of this run.
    first: Option<(usize, Refusal)>,
}

impl<'a> Talk<'a> {
    pub(super) fn new(
        dialogues: &'a [Dialogue],
        renderer: Option<&'a Renderer<'a>>,
        settings: &'a DistillSettings,
        output: &Output,
    ) -> Self {
        let refusals = Refusals { count: output.refused(), has_answer: false, held: vec![], first: None };
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
        if self.refusals.has_answer {
            finished.append(&mut self.refusals.held);
        }
        output.keep(finished)?;
        outcome
    }

    fn hear_one(
        &mut self,
        id: usize,
        answer: Result<WrittenAnswer, AnswerError>,
    ) -> Result<Option<Finished>, DistillError> {
        let mut conversation = self.open.remove(&id).expect("only open conversations are answered");
        let answer = match answer {
            Ok(answer) => answer,
            Err(AnswerError::Refused(why)) => return self.refused(conversation, id, why).map(|()| None),
            Err(source) => return Err(self.unanswered(id, source)),
        };
        self.refusals.has_answer = true;
        let next = conversation.hear(answer, self.renderer);
        let next = next.and_then(|()| conversation.next_question(self.renderer, self.settings));
        let Some(question) = next.map_err(|source| self.failed(id, source))? else {
            return Ok(Some(conversation.finish()));
        };
        self.next_turns.push_back(question);
        self.open.insert(id, conversation);
        Ok(None)
    }

    /// Holds a refusal, unless it is one too many.
    fn refused(&mut self, conversation: Conversation, id: usize, why: Refusal) -> Result<(), DistillError> {
        let (refusals, most) = (&mut self.refusals, self.settings.max_refused);
        let first = refusals.first.get_or_insert_with(|| (id, why.clone())).clone();
        if refusals.count < most {
            refusals.count += 1;
            refusals.held.push(conversation.refused(&why));
            return Ok(());
        }
        let is_server = !refusals.has_answer && most > 0;
        Err(if is_server { self.nothing_answered(first) } else { self.too_many(id, why) })
    }

    /// All questions are answered or refused.
    ///
    /// # Errors
    /// A server that refused all of them, with no answer of an earlier run; an error of the folder.
    pub(super) fn end(&mut self, output: &mut Output) -> Result<(), DistillError> {
        let is_server = !self.refusals.has_answer && output.rows() == 0;
        if let Some(first) = self.refusals.first.take().filter(|_| is_server) {
            return Err(self.nothing_answered(first));
        }
        output.keep(std::mem::take(&mut self.refusals.held))?;
        output.finish()
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

    fn nothing_answered(&self, (id, source): (usize, Refusal)) -> DistillError {
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
