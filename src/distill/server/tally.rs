//! What a server's answers were like.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::tokens::Disagreement;
use crate::distill::refusal::Refusal;
use crate::http::EndpointError;
use crate::plural::counted;

/// What is known of a run's answers, while they come.
#[derive(Debug, Default)]
pub struct ServerTally(Mutex<AnswersSoFar>);

#[derive(Debug, Default)]
struct AnswersSoFar {
    counts: ServerCounts,
    refused: usize,
    last_error: Option<String>,
    first_fault: Option<String>,
    news: Vec<String>,
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
    /// Answers of which, or of whose prompts, the server reports no tokens, not even their number.
    pub unchecked: usize,
    /// Answers that name another model than the one that was asked.
    pub other_model: usize,
}

impl ServerTally {
    fn so_far(&self) -> MutexGuard<'_, AnswersSoFar> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counts so far.
    pub fn counts(&self) -> ServerCounts {
        self.so_far().counts.clone()
    }

    /// Why a request was last sent again.
    pub fn last_error(&self) -> Option<String> {
        self.so_far().last_error.clone()
    }

    /// Questions of this run that are refused.
    pub fn refused(&self) -> usize {
        self.so_far().refused
    }

    /// What happened for the first time since the last call and the user should know at once.
    pub fn news(&self) -> Vec<String> {
        std::mem::take(&mut self.so_far().news)
    }

    /// The first conversation whose tokens or model are others, in words.
    pub fn first_fault(&self) -> Option<String> {
        self.so_far().first_fault.clone()
    }

    pub(super) fn note_retry(&self, error: &EndpointError) {
        let mut so_far = self.so_far();
        so_far.counts.retries += 1;
        so_far.counts.rate_limited += usize::from(error.is_rate_limit());
        so_far.last_error = Some(error.to_string());
    }

    pub(super) fn note_refused(&self, conversation: usize, why: &Refusal) {
        let mut so_far = self.so_far();
        so_far.refused += 1;
        if so_far.refused == 1 {
            so_far.news.push(format!(
                "conversation {conversation} is refused: {why}; the run goes on and counts (--strict makes this an error)"
            ));
        }
    }

    pub(super) fn note_last_answers(&self, open: usize, wait: Duration) {
        let (answers, seconds) = (counted(open, "answer"), wait.as_secs());
        let news = format!("the run ends; waiting up to {seconds} s for {answers} under way: Ctrl-C ends it now");
        self.so_far().news.push(news);
    }

    pub(super) fn note_no_token_ids(&self, error: &EndpointError) {
        self.so_far().news.push(format!(
            "the server refuses return_token_ids ({error}): from now on the tokens of answers are made of their text"
        ));
    }

    pub(super) fn note(&self, conversation: usize, faults: &[Disagreement]) {
        let is_unchecked = |fault: &Disagreement| matches!(fault, Disagreement::Unchecked { .. });
        let mut so_far = self.so_far();
        let counts = &mut so_far.counts;
        for fault in faults {
            match fault {
                Disagreement::Prompt { .. } => counts.prompts_differ += 1,
                Disagreement::Answer { .. } => counts.answers_differ += 1,
                Disagreement::Model { .. } => counts.other_model += 1,
                Disagreement::Unchecked { .. } => {}
            }
        }
        counts.unchecked += usize::from(faults.iter().any(is_unchecked));
        if let Some(fault) = faults.iter().find(|fault| !is_unchecked(fault)) {
            so_far.note_fault(format!("conversation {conversation}: {fault}"));
        }
    }
}

impl AnswersSoFar {
    fn note_fault(&mut self, fault: String) {
        if self.first_fault.is_none() {
            self.news.push(format!("{fault}; the run goes on and counts (--strict makes this an error)"));
            self.first_fault = Some(fault);
        }
    }
}
