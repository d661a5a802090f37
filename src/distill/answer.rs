//! Questions, answers, and the door to whoever answers: the backbone in this process, or a server.

use std::num::NonZeroUsize;

use super::error::{AnswerError, DistillError};
use super::refusal::Refusal;
use super::render::Rendered;
use crate::data::prompts::PromptInput;
use crate::decode::request::FinishReason;
use crate::engine::sample::Stream;

/// A prompt whose continuation is a turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Index of the conversation.
    pub conversation: usize,
    /// The conversation so far, before a template renders it; or raw text or ids.
    pub input: PromptInput,
    /// Token ids, including BOS; empty where the backbone is not known.
    pub prompt: Rendered,
    /// Stops after this many tokens, or when the context is full.
    pub max_new_tokens: NonZeroUsize,
    /// Tokens that end the answer like EOS; if empty, only EOS does.
    pub end_mark: Vec<i64>,
    /// Random stream of the samples.
    pub stream: Stream,
}

/// A turn, as it was written for a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenAnswer {
    /// As a server sent it; `None`: the text of `new_ids`.
    pub text: Option<String>,
    /// The new tokens, without the end; empty where the backbone is not known.
    pub new_ids: Vec<i64>,
    /// The EOS or the end mark that ended it; else empty.
    pub end: Vec<i64>,
    pub finish_reason: FinishReason,
}

/// The conversation of a question, and what came of it.
pub type Answered = (usize, Result<WrittenAnswer, AnswerError>);

/// Takes questions and returns answers, in any order.
pub trait Answerer {
    /// Whether it takes another question now.
    fn has_room(&self) -> bool;

    /// Whether all its questions are answered.
    fn is_idle(&self) -> bool;

    /// Most conversations that are answered together.
    fn batch_size(&self) -> usize;

    /// New tokens so far.
    fn tokens(&self) -> usize;

    /// Takes a question.
    ///
    /// # Errors
    /// The question's fault.
    fn enter(&mut self, question: Question) -> Result<(), AnswerError>;

    /// Works for a moment, and returns what was answered by then.
    ///
    /// # Errors
    /// A fault that is none of a single question.
    fn step(&mut self) -> Result<Vec<Answered>, DistillError>;

    /// The run goes on without an answer to this conversation's question.
    fn note_refused(&mut self, _conversation: usize, _why: &Refusal) {}

    /// The run ends: from now on no question is asked again.
    fn end(&mut self) {}

    /// After [`end`](Self::end): what is answered by now, and what comes within a moment.
    fn last_answers(&mut self) -> Vec<Answered>;
}
