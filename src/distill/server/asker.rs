//! The threads that ask a server, and what becomes of each attempt.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use super::completion::{AnswerFault, Completion, WholeAnswer};
use super::request::{ServerRequest, TokenIds};
use super::tally::ServerTally;
use crate::distill::error::{AnswerError, ServerError};
use crate::distill::refusal::Refusal;
use crate::http::EndpointError;
use crate::http::backoff::{Backoff, pause};
use crate::http::endpoint::EndpointClient;
use crate::panics;

/// A conversation's question, and what came of it.
pub(super) type ReceivedAnswer = (usize, Result<Completion, Unanswered>);

/// Why a question has no answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    Failed(AnswerError),
    /// The run ends: no further attempt was made.
    Ended,
}

/// What an attempt ends with.
enum AttemptError {
    Failed(EndpointError),
    Refused(Refusal),
}

/// What the threads share.
#[derive(Debug)]
pub(super) struct Asker {
    client: EndpointClient,
    retries: u32,
    /// Whether requests have `return_token_ids`, unless the server refuses it.
    wants_token_ids: bool,
    refuses_token_ids: AtomicBool,
    tally: Arc<ServerTally>,
    is_ending: AtomicBool,
}

impl Asker {
    pub(super) fn new(client: EndpointClient, retries: u32, wants_token_ids: bool, tally: Arc<ServerTally>) -> Self {
        let (refuses_token_ids, is_ending) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { client, retries, wants_token_ids, refuses_token_ids, tally, is_ending }
    }

    /// From now on no question is asked again.
    pub(super) fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Asks a question until it is answered, refused or given up.
    pub(super) fn ask(&self, request: &ServerRequest) -> Result<Completion, Unanswered> {
        let mut backoff = Backoff::new(self.retries);
        loop {
            let error = match self.try_once(request) {
                Ok(completion) => return Ok(completion),
                Err(AttemptError::Refused(why)) => return Err(Unanswered::Failed(why.into())),
                Err(AttemptError::Failed(error)) => error,
            };
            let Some(wait) = backoff.next(&error) else {
                return Err(Unanswered::Failed(given_up(error, backoff.attempts())));
            };
            if !self.is_ending() {
                self.tally.note_retry(&error);
                pause(wait, &self.is_ending);
            }
            if self.is_ending() {
                return Err(Unanswered::Ended);
            }
        }
    }

    /// Some servers refuse fields that they do not know: then the request is sent without `return_token_ids`.
    fn try_once(&self, request: &ServerRequest) -> Result<Completion, AttemptError> {
        if !self.wants_token_ids || self.refuses_token_ids.load(Ordering::Relaxed) {
            return self.completion(request, TokenIds::NotAsked);
        }
        let error = match self.completion(request, TokenIds::Asked) {
            Err(AttemptError::Failed(error)) if matches!(error.status(), Some(400 | 422)) => error,
            other => return other,
        };
        let completion = self.completion(request, TokenIds::NotAsked);
        let was_the_field = !matches!(completion, Err(AttemptError::Failed(_)));
        if was_the_field && !self.refuses_token_ids.swap(true, Ordering::Relaxed) {
            self.tally.note_no_token_ids(&error);
        }
        completion
    }

    fn completion(&self, request: &ServerRequest, ids: TokenIds) -> Result<Completion, AttemptError> {
        let answer: WholeAnswer = self.client.json(&request.sent(ids)).map_err(AttemptError::Failed)?;
        let read = Completion::read(answer).map(|completion| self.with_clean_model(request, completion));
        read.map_err(|fault| match fault {
            AnswerFault::Unreadable(problem) => {
                AttemptError::Failed(EndpointError::Unreadable { problem: self.client.clean(&problem) })
            }
            AnswerFault::Refused(Refusal::Words { words }) => {
                AttemptError::Refused(Refusal::Words { words: self.client.clean(&words) })
            }
            AnswerFault::Refused(why) => AttemptError::Refused(why),
        })
    }

    /// The name of another model goes into messages.
    fn with_clean_model(&self, request: &ServerRequest, completion: Completion) -> Completion {
        let clean = |name: String| if request.model() == Some(&name) { name } else { self.client.clean(&name) };
        Completion { model: completion.model.map(clean), ..completion }
    }
}

fn given_up(source: EndpointError, attempts: u32) -> AnswerError {
    match source {
        EndpointError::Refused { status, message, .. } if source.is_of_the_request() => {
            Refusal::Status { status, message }.into()
        }
        source if source.may_be_of_the_request() => Refusal::Failing { words: source.to_string(), attempts }.into(),
        source => ServerError::GaveUp { attempts, source }.into(),
    }
}

/// Asks one question after the other, until there will be no more. A panic is reported like an answer: somebody waits for it.
pub(super) fn work(
    to_ask: &Mutex<Receiver<(usize, ServerRequest)>>,
    sender: &Sender<ReceivedAnswer>,
    ask: impl Fn(&ServerRequest) -> Result<Completion, Unanswered>,
) {
    let next = || to_ask.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok((conversation, request)) = next() {
        let panicked = |message| Err(Unanswered::Failed(ServerError::Panicked { message }.into()));
        let received = panics::catch_worker(|| ask(&request)).unwrap_or_else(panicked);
        if sender.send((conversation, received)).is_err() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::data::prompts::PromptInput;
    use crate::distill::server::request::tests::{question, settings};

    #[test]
    fn a_panic_while_asking_is_reported_and_the_thread_goes_on() {
        let (questions, to_ask) = mpsc::channel();
        let (sender, received) = mpsc::channel();
        for conversation in 0..2 {
            let question = question(PromptInput::Text("a".into()), 1, 1);
            questions.send((conversation, ServerRequest::new(&question, &settings(0.0)))).unwrap();
        }
        drop(questions);
        work(&Mutex::new(to_ask), &sender, |_| panic!("a bug"));
        drop(sender);
        let received: Vec<ReceivedAnswer> = received.into_iter().collect();
        assert_eq!(received.len(), 2);
        for (at, (conversation, answer)) in received.into_iter().enumerate() {
            let Err(Unanswered::Failed(error)) = answer else { panic!("{answer:?}") };
            assert!(conversation == at && error.to_string().contains("panicked: a bug"), "{error}");
        }
    }
}
