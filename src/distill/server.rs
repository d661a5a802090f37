//! An OpenAI-compatible server answers: many questions at a time, each asked again after a failure that may pass.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::answer::{Answered, Answerer, Question, WrittenAnswer};
use super::error::{AnswerError, DistillError, ServerError};
use super::refusal::Refusal;
use super::render::Renderer;
use crate::decode::request::FinishReason;
use crate::http::endpoint::EndpointClient;

mod asker;
mod completion;
mod request;
pub mod settings;
pub mod tally;
mod tokens;

use asker::{Asker, ReceivedAnswer, Unanswered, work};
use completion::Completion;
use request::{ServerRequest, most_tokens};
use settings::ServerSettings;
use tally::ServerTally;
use tokens::{Checked, TokenCheck};

/// How long [`Answerer::step`] waits for an answer.
const GLANCE: Duration = Duration::from_millis(100);
/// How long a run that ends with an error waits for the answers under way.
const LAST_ANSWERS: Duration = Duration::from_secs(30);

/// Asks a server. Dropped, it leaves its threads to end with the answers that they wait for.
#[derive(Debug)]
pub struct ServerAnswerer<'a> {
    settings: ServerSettings,
    renderer: Option<&'a Renderer<'a>>,
    questions: Sender<(usize, ServerRequest)>,
    answers: Receiver<ReceivedAnswer>,
    open: HashMap<usize, Question>,
    tokens: usize,
    tally: Arc<ServerTally>,
    asker: Arc<Asker>,
    /// Set when the user asks to stop.
    stop: &'static AtomicBool,
}

impl<'a> ServerAnswerer<'a> {
    /// Starts a thread for each question at a time. Without a renderer answers are text. Once `stop` is set, a question
    /// that is given up is not reported: the user ends the run.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn start(
        client: EndpointClient,
        settings: ServerSettings,
        renderer: Option<&'a Renderer<'a>>,
        stop: &'static AtomicBool,
    ) -> io::Result<Self> {
        let (questions, to_ask) = mpsc::channel();
        let (sender, answers) = mpsc::channel();
        let tally = Arc::new(ServerTally::default());
        let asker = Arc::new(Asker::new(client, settings.retries, renderer.is_some(), Arc::clone(&tally)));
        let to_ask = Arc::new(Mutex::new(to_ask));
        for _ in 0..settings.concurrency {
            let (asker, to_ask, sender) = (Arc::clone(&asker), Arc::clone(&to_ask), sender.clone());
            thread::Builder::new().spawn(move || work(&to_ask, &sender, |request| asker.ask(request)))?;
        }
        Ok(Self { settings, renderer, questions, answers, open: HashMap::new(), tokens: 0, tally, asker, stop })
    }

    /// What the answers are like, counted as they come.
    pub fn tally(&self) -> Arc<ServerTally> {
        Arc::clone(&self.tally)
    }

    /// What comes within `wait`.
    fn heard(&mut self, wait: Duration) -> Vec<Answered> {
        let first = self.answers.recv_timeout(wait).into_iter();
        let received: Vec<ReceivedAnswer> = first.chain(self.answers.try_iter()).collect();
        received.into_iter().filter_map(|received| self.answered(received)).collect()
    }

    /// `None` for a question that the user's wish to stop left without an answer.
    fn answered(&mut self, (conversation, received): ReceivedAnswer) -> Option<Answered> {
        let question = self.open.remove(&conversation).expect("only open questions are answered");
        let answer = match received {
            Ok(completion) => self.checked(&question, completion).map_err(AnswerError::from),
            Err(Unanswered::Failed(
                AnswerError::Server(ServerError::GaveUp { .. }) | AnswerError::Refused(Refusal::Failing { .. }),
            )) if self.is_stopped() => return None,
            Err(Unanswered::Failed(AnswerError::Refused(Refusal::ReasoningAlone))) if self.is_shortened(&question) => {
                Err(self.settings.smaller_context("the answer").into())
            }
            Err(Unanswered::Failed(error)) => Err(error),
            Err(Unanswered::Ended) => return None,
        };
        Some((conversation, answer))
    }

    /// An answer may not be shorter than the server with which the folder was begun could have written it.
    fn check_is_whole(&self, question: &Question, completion: &Completion) -> Result<(), ServerError> {
        let is_cut_early = completion.finish_reason == FinishReason::Length && self.is_shortened(question);
        if is_cut_early { Err(self.settings.smaller_context("the answer")) } else { Ok(()) }
    }

    fn is_shortened(&self, question: &Question) -> bool {
        most_tokens(question, self.settings.context_now) < most_tokens(question, self.settings.context)
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn checked(&mut self, question: &Question, completion: Completion) -> Result<WrittenAnswer, ServerError> {
        self.tokens += completion.new_tokens();
        self.check_is_whole(question, &completion)?;
        let Checked { answer, faults } =
            TokenCheck { settings: &self.settings, renderer: self.renderer }.answer(question, completion)?;
        if let Some(fault) = faults.first().filter(|_| self.settings.strict) {
            return Err(fault.clone().into_error());
        }
        self.tally.note(question.conversation, &faults);
        Ok(answer)
    }
}

impl Answerer for ServerAnswerer<'_> {
    fn has_room(&self) -> bool {
        self.open.len() < self.settings.concurrency
    }

    fn is_idle(&self) -> bool {
        self.open.is_empty()
    }

    fn batch_size(&self) -> usize {
        self.settings.concurrency
    }

    fn tokens(&self) -> usize {
        self.tokens
    }

    fn enter(&mut self, question: Question) -> Result<(), AnswerError> {
        let (tokens, limits) = (question.prompt.ids.len(), &self.settings);
        if tokens >= limits.context_now && tokens < limits.context {
            return Err(limits.smaller_context("the prompt").into());
        }
        let request = ServerRequest::new(&question, limits);
        let conversation = question.conversation;
        self.open.insert(conversation, question);
        self.questions.send((conversation, request)).expect("its threads live as long as this sender");
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Answered>, DistillError> {
        Ok(self.heard(GLANCE))
    }

    fn note_refused(&mut self, conversation: usize, why: &Refusal) {
        self.tally.note_refused(conversation, why);
    }

    fn end(&mut self) {
        self.asker.end();
        if !self.open.is_empty() && !self.is_stopped() {
            self.tally.note_last_answers(self.open.len(), LAST_ANSWERS);
        }
    }

    fn last_answers(&mut self) -> Vec<Answered> {
        let until = Instant::now() + LAST_ANSWERS;
        let mut last = self.heard(Duration::ZERO);
        while !self.open.is_empty() && !self.is_stopped() && Instant::now() < until {
            last.extend(self.heard(GLANCE));
        }
        last
    }
}
