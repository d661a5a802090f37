//! What passes between the requests and the thread that decodes: a job is one text, and its events are what came of it.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedSender;

use super::api::answer::ShownToken;
use crate::decode::request::{FinishReason, Request};
use crate::decode::stats::GeneratedTokens;
use crate::engine::sample::{Sampling, Stream};
use crate::numbers::{Finite, Positive};
use crate::tree::accept::Acceptance;

/// How the texts of a request are written.
#[derive(Debug, Clone)]
pub struct TextSettings {
    /// At most so many new tokens; fewer where the context is full.
    pub max_new_tokens: usize,
    pub sampling: Sampling,
    pub repetition_penalty: Positive,
    pub frequency_penalty: Finite,
    pub presence_penalty: Finite,
    /// The text ends before the first of these.
    pub stop: Vec<String>,
    /// Log-probabilities of each token and of so many likeliest ones.
    pub logprobs: Option<usize>,
    /// Instead of the server's rule.
    pub acceptance: Option<Acceptance>,
}

/// A text to write.
#[derive(Debug, Clone)]
pub struct WantedText {
    pub prompt: Arc<[i64]>,
    pub settings: Arc<TextSettings>,
    /// Selects its random numbers.
    pub stream: Stream,
}

/// A text to write, and who waits for it.
#[derive(Debug)]
pub struct Job {
    pub text: WantedText,
    /// Its number among the request's texts.
    pub choice: usize,
    /// Hears what comes of it. When the other end is gone, nobody waits for the text any more, and it leaves.
    pub events: UnboundedSender<(usize, TextEvent)>,
    /// When it was handed over.
    pub since: Instant,
    /// Its place in the server, given back when it is dropped.
    pub place: OwnedSemaphorePermit,
}

impl WantedText {
    /// What is decoded.
    pub fn request(&self) -> Request<'_> {
        let settings = &self.settings;
        Request {
            sampling: settings.sampling,
            repetition_penalty: settings.repetition_penalty,
            frequency_penalty: settings.frequency_penalty,
            presence_penalty: settings.presence_penalty,
            acceptance: settings.acceptance,
            logprobs: settings.logprobs,
            stream: self.stream,
            ..Request::greedy(&self.prompt, settings.max_new_tokens)
        }
    }
}

impl Job {
    /// Returns whether somebody hears it.
    pub fn send(&self, event: TextEvent) -> bool {
        self.events.send((self.choice, event)).is_ok()
    }
}

/// What came of a text.
#[derive(Debug, Clone, PartialEq)]
pub enum TextEvent {
    /// More of it.
    Piece(TextPiece),
    /// Its end, with what was held back until then.
    Ended(TextPiece, EndedText),
    /// The engine cannot write what the request asks for.
    Refused(String),
    /// It could not be decoded.
    Failed(String),
}

/// Tokens whose text is known. Nothing of a stop string is among them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TextPiece {
    pub text: String,
    pub ids: Vec<i64>,
    /// Of each token, where the request asks for them.
    pub logprobs: Vec<ShownToken>,
}

impl TextPiece {
    /// Whether there is nothing in it. A part of a token, where the rest may begin a stop string, is text without a token.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.ids.is_empty()
    }
}

/// How a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndedText {
    pub reason: FinishReason,
    /// What ended it included.
    pub generated: GeneratedTokens,
    /// Of the prompt, so many came from the prefix cache.
    pub cached_tokens: usize,
    /// Draft tokens that the backbone verified.
    pub proposed: usize,
}
