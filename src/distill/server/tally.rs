//! What a server's answers were like.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::tokens::Disagreement;
use crate::http::EndpointError;

/// Counts of a run's answers, while they come.
#[derive(Debug, Default)]
pub struct ServerTally {
    retries: AtomicUsize,
    rate_limited: AtomicUsize,
    prompts_differ: AtomicUsize,
    answers_differ: AtomicUsize,
    unchecked: AtomicUsize,
    other_model: AtomicUsize,
    last_error: Mutex<Option<String>>,
    first_fault: Mutex<Option<String>>,
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
    /// Answers of which the server tells no tokens, not even their number.
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

    /// The first conversation whose tokens or model are others, in words.
    pub fn first_fault(&self) -> Option<String> {
        self.first_fault.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note_retry(&self, error: &EndpointError) {
        self.retries.fetch_add(1, Ordering::Relaxed);
        self.rate_limited.fetch_add(usize::from(error.is_rate_limit()), Ordering::Relaxed);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
    }

    pub(super) fn note(&self, conversation: usize, faults: &[Disagreement]) {
        for fault in faults {
            let counter = match fault {
                Disagreement::Prompt { .. } => &self.prompts_differ,
                Disagreement::Answer { .. } => &self.answers_differ,
                Disagreement::Model { .. } => &self.other_model,
                Disagreement::Unchecked => &self.unchecked,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
        let told = faults.iter().find(|fault| !matches!(fault, Disagreement::Unchecked));
        if let Some(fault) = told {
            let mut first = self.first_fault.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert_with(|| format!("conversation {conversation}: {fault}"));
        }
    }
}
