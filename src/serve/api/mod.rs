//! The JSON of the server: what clients send, and what they get. Its shapes are those of OpenAI's API reference; `return_token_ids`,
//! `top_k` and `repetition_penalty` are vLLM's, `acceptance` is ours. Knows neither sockets nor tensors.

pub mod answer;
pub mod error;
mod fields;
mod messages;
pub mod models;
mod neutral;
pub mod prompt;
pub mod request;

/// What a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl Endpoint {
    /// What the ids of its answers start with.
    pub fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completions => "cmpl-",
        }
    }

    /// The limit on new tokens of a request that sets none; `None`: what the context holds.
    pub fn default_tokens(self) -> Option<usize> {
        match self {
            Self::Chat => None,
            Self::Completions => Some(16),
        }
    }

    /// The field of the request that holds the prompt.
    pub fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completions => "prompt",
        }
    }
}
