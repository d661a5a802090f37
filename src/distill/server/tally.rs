//! What a server's answers were like.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::tokens::Disagreement;
use crate::distill::refusal::Refusal;
use crate::http::EndpointError;
use crate::plural::counted;

/// Counts of a run's answers, while they come.
#[derive(Debug, Default)]
pub struct ServerTally {
    retries: AtomicUsize,
    rate_limited: AtomicUsize,
    prompts_differ: AtomicUsize,
    answers_differ: AtomicUsize,
    unchecked: AtomicUsize,
    other_model: AtomicUsize,
    refused: AtomicUsize,
    last_error: Mutex<Option<String>>,
    first_fault: Mutex<Option<String>>,
    news: Mutex<Vec<String>>,
}

/// [`ServerTally`] at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ServerCounts {
    /// Requests that were sent again.
    pub retries: usize,
    /// Of these, because of a rate limit (status 429).
    pub rate_limited: usize,
    /// Prompts that have other tokens on the server than the backbone's tokenizer and template make.
    pub prompts_differ: usize,
    /// Answers whose tokens are not those that the backbone's tokenizer makes of their text.
    pub answers_differ: usize,
    /// Answers of which, or of whose prompts, the server tells no tokens, not even their number.
    pub unchecked: usize,
    /// Answers that name another model than the one that was asked.
    pub other_model: usize,
}

impl ServerTally {
    /// The counts so far.
    pub fn counts(&self) -> ServerCounts {
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        ServerCounts {
            retries: count(&self.retries),
            rate_limited: count(&self.rate_limited),
            prompts_differ: count(&self.prompts_differ),
            answers_differ: count(&self.answers_differ),
            unchecked: count(&self.unchecked),
            other_model: count(&self.other_model),
        }
    }

    /// Why a request was last sent again.
    pub fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Questions of this run that are refused.
    pub fn refused(&self) -> usize {
        self.refused.load(Ordering::Relaxed)
    }

    /// What happened for the first time since the last call and the user should know at once.
    pub fn news(&self) -> Vec<String> {
        std::mem::take(&mut *self.news.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn tell(&self, line: String) {
        self.news.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    /// The first conversation whose tokens or model are others, in words.
    pub fn first_fault(&self) -> Option<String> {
        self.first_fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note_retry(&self, error: &EndpointError) {
        self.retries.fetch_add(1, Ordering::Relaxed);
        self.rate_limited.fetch_add(usize::from(error.is_rate_limit()), Ordering::Relaxed);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
    }

    pub(super) fn note_refused(&self, conversation: usize, why: &Refusal) {
        if self.refused.fetch_add(1, Ordering::Relaxed) == 0 {
            self.tell(format!(
                "conversation {conversation} is refused: {why}; the run goes on and counts (--strict makes this an error)"
            ));
        }
    }

    pub(super) fn note_last_answers(&self, open: usize, wait: Duration) {
        let (answers, seconds) = (counted(open, "answer"), wait.as_secs());
        self.tell(format!("the run ends; waiting up to {seconds} s for {answers} under way: Ctrl-C ends it now"));
    }

    pub(super) fn note_no_token_ids(&self, error: &EndpointError) {
        self.tell(format!(
            "the server refuses return_token_ids ({error}): from now on the tokens of answers are made of their text"
        ));
    }

    pub(super) fn note(&self, conversation: usize, faults: &[Disagreement]) {
        let is_unchecked = |fault: &Disagreement| matches!(fault, Disagreement::Unchecked { .. });
        for fault in faults {
            let counter = match fault {
                Disagreement::Prompt { .. } => &self.prompts_differ,
                Disagreement::Answer { .. } => &self.answers_differ,
                Disagreement::Model { .. } => &self.other_model,
                Disagreement::Unchecked { .. } => continue,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self.unchecked.fetch_add(usize::from(faults.iter().any(is_unchecked)), Ordering::Relaxed);
        if let Some(fault) = faults.iter().find(|fault| !is_unchecked(fault)) {
            self.note_fault(format!("conversation {conversation}: {fault}"));
        }
    }

    fn note_fault(&self, fault: String) {
        let mut first = self.first_fault.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_none() {
            self.tell(format!("{fault}; the run goes on and counts (--strict makes this an error)"));
            *first = Some(fault);
        }
    }
}
