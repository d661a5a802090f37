//! An OpenAI-compatible server answers: many questions at a time, each asked again after a failure that may pass.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::answer::{Answered, Answerer, Question};
use super::error::{AnswerError, DistillError, ServerError};
use super::render::Renderer;
use crate::http::EndpointError;
use crate::http::backoff::{Backoff, pause};
use crate::http::endpoint::EndpointClient;

mod completion;
mod request;
pub mod settings;
pub mod tally;
mod tokens;

use completion::Completion;
use request::{ServerRequest, TokenIds};
use settings::ServerSettings;
use tally::ServerTally;
use tokens::{Checked, TokenCheck};

/// How long [`Answerer::step`] waits for an answer.
const GLANCE: Duration = Duration::from_millis(100);

/// Asks a server. Dropped, it leaves its threads to end with the answers that they wait for.
#[derive(Debug)]
pub struct ServerAnswerer<'a> {
    settings: ServerSettings,
    renderer: Option<&'a Renderer<'a>>,
    questions: Sender<(usize, ServerRequest)>,
    answers: Receiver<(usize, Result<Completion, ServerError>)>,
    open: HashMap<usize, Question>,
    tokens: usize,
    tally: Arc<ServerTally>,
}

impl<'a> ServerAnswerer<'a> {
    /// Starts a thread for each question at a time. Without a renderer answers are text. `stop` ends the waits between attempts.
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
        let (tell, answers) = mpsc::channel();
        let tally = Arc::new(ServerTally::default());
        let asker = Arc::new(Asker {
            client,
            retries: settings.retries,
            wants_token_ids: renderer.is_some(),
            refuses_token_ids: AtomicBool::new(false),
            tally: Arc::clone(&tally),
            stop,
        });
        let to_ask = Arc::new(Mutex::new(to_ask));
        for _ in 0..settings.concurrency {
            let (asker, to_ask, tell) = (Arc::clone(&asker), Arc::clone(&to_ask), tell.clone());
            thread::Builder::new().spawn(move || asker.work(&to_ask, &tell))?;
        }
        Ok(Self { settings, renderer, questions, answers, open: HashMap::new(), tokens: 0, tally })
    }

    /// What the answers are like, counted as they come.
    pub fn tally(&self) -> Arc<ServerTally> {
        Arc::clone(&self.tally)
    }

    fn answered(&mut self, conversation: usize, completion: Result<Completion, ServerError>) -> Answered {
        let question = self.open.remove(&conversation).expect("only open questions are answered");
        let answer = completion.and_then(|completion| self.checked(&question, completion));
        (conversation, answer.map_err(AnswerError::from))
    }

    fn checked(&mut self, question: &Question, completion: Completion) -> Result<super::WrittenAnswer, ServerError> {
        self.tokens += completion.new_tokens();
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
        let request = ServerRequest::new(&question, &self.settings);
        let conversation = question.conversation;
        self.open.insert(conversation, question);
        self.questions.send((conversation, request)).expect("its threads live as long as this sender");
        Ok(())
    }

    fn step(&mut self) -> Result<Vec<Answered>, DistillError> {
        let first = self.answers.recv_timeout(GLANCE).into_iter();
        let told: Vec<_> = first.chain(self.answers.try_iter()).collect();
        Ok(told.into_iter().map(|(conversation, told)| self.answered(conversation, told)).collect())
    }
}

/// What the threads share.
#[derive(Debug)]
struct Asker {
    client: EndpointClient,
    retries: u32,
    /// Whether requests have `return_token_ids`, unless the server refuses it.
    wants_token_ids: bool,
    refuses_token_ids: AtomicBool,
    tally: Arc<ServerTally>,
    stop: &'static AtomicBool,
}

impl Asker {
    /// Asks one question after the other, until there will be no more.
    fn work(
        &self,
        to_ask: &Mutex<Receiver<(usize, ServerRequest)>>,
        tell: &Sender<(usize, Result<Completion, ServerError>)>,
    ) {
        let next = || to_ask.lock().unwrap_or_else(PoisonError::into_inner).recv();
        while let Ok((conversation, request)) = next() {
            if tell.send((conversation, self.ask(&request))).is_err() {
                break;
            }
        }
    }

    fn ask(&self, request: &ServerRequest) -> Result<Completion, ServerError> {
        let mut backoff = Backoff::new(self.retries);
        loop {
            let error = match self.try_once(request) {
                Ok(completion) => return Ok(completion),
                Err(error) => error,
            };
            match backoff.next(&error).filter(|_| !self.stop.load(Ordering::Relaxed)) {
                Some(wait) => {
                    self.tally.note_retry(&error);
                    pause(wait, self.stop);
                }
                None => return Err(ServerError::GaveUp { attempts: backoff.attempts(), source: error }),
            }
        }
    }

    /// Some servers refuse fields that they do not know: then the request is sent without `return_token_ids`.
    fn try_once(&self, request: &ServerRequest) -> Result<Completion, EndpointError> {
        if !self.wants_token_ids || self.refuses_token_ids.load(Ordering::Relaxed) {
            return self.completion(request, TokenIds::NotAsked);
        }
        match self.completion(request, TokenIds::Asked) {
            Err(error) if matches!(error.status(), Some(400 | 422)) => {
                let completion = self.completion(request, TokenIds::NotAsked)?;
                self.refuses_token_ids.store(true, Ordering::Relaxed);
                Ok(completion)
            }
            other => other,
        }
    }

    fn completion(&self, request: &ServerRequest, ids: TokenIds) -> Result<Completion, EndpointError> {
        let json = self.client.json(&request.sent(ids))?;
        Completion::read(json).map_err(|problem| EndpointError::Unreadable { problem: self.client.clean(&problem) })
    }
}
