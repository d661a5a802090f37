//! How a server is asked.

use crate::distill::error::ServerError;
use crate::numbers::{NonNegative, Probability};

/// How a server is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct ServerSettings {
    pub model: String,
    /// 0 is greedy.
    pub temperature: NonNegative,
    /// 1 is all tokens.
    pub top_p: Probability,
    /// Questions at a time.
    pub concurrency: usize,
    /// How often a question is asked again.
    pub retries: u32,
    /// Most tokens of prompt and answer, when the folder was begun.
    pub context: usize,
    /// At most `context`: less if the server has come back with a smaller one.
    pub context_now: usize,
    /// An answer of another model, and one whose tokens are not shown to be the backbone's, is an error.
    pub strict: bool,
    /// The tokens that end the backbone's texts.
    pub eos: Vec<i64>,
}

impl ServerSettings {
    pub(super) fn smaller_context(&self, what: &'static str) -> ServerError {
        ServerError::SmallerContext { now: self.context_now, at_first: self.context, what }
    }
}
