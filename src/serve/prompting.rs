//! Turns what a client asks into the tokens of a prompt.

use std::sync::Arc;

use super::api::Endpoint;
use super::api::error::ApiError;
use super::api::prompt::ClientPrompt;
use crate::data::chat_template::ChatTemplate;
use crate::data::tokenize::{TextTokenizer, wide};

/// The backbone's words: its tokenizer and chat template.
#[derive(Debug, Clone)]
pub struct Prompting {
    pub tokenizer: Arc<TextTokenizer>,
    pub template: Option<Arc<ChatTemplate>>,
    /// Most tokens of prompt and text.
    pub context: usize,
}

impl Prompting {
    /// The tokens of a prompt, which leave room for a new one.
    ///
    /// # Errors
    /// A conversation that the template refuses, ids outside of the vocabulary, a prompt that fills the context.
    pub fn tokens(&self, prompt: &ClientPrompt) -> Result<Vec<i64>, ApiError> {
        let ids = match prompt {
            ClientPrompt::Chat(chat) => {
                let text = ClientPrompt::rendered(chat, self.template.as_deref())?;
                self.encoded(&text, false, "messages")?
            }
            ClientPrompt::Text(text) => self.encoded(text, true, "prompt")?,
            ClientPrompt::Ids(ids) => self.in_vocabulary(ids)?,
        };
        match ids.len() {
            0 => Err(ApiError::field(param_of(prompt), "at least one token", "none")),
            prompt_tokens if prompt_tokens >= self.context => {
                Err(ApiError::PromptTooLong { param: param_of(prompt), prompt_tokens, context: self.context })
            }
            _ => Ok(ids),
        }
    }

    fn encoded(&self, text: &str, add_special: bool, param: &'static str) -> Result<Vec<i64>, ApiError> {
        if self.tokenizer.is_beyond(text, self.context) {
            return Err(ApiError::TextTooLong { param, bytes: text.len(), context: self.context });
        }
        let ids = self.tokenizer.encode(text, add_special);
        ids.map(|ids| wide(&ids)).map_err(|error| ApiError::invalid(param, error.to_string()))
    }

    fn in_vocabulary(&self, ids: &[i64]) -> Result<Vec<i64>, ApiError> {
        let vocab_size = self.tokenizer.vocab_size();
        let is_known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < vocab_size);
        match ids.iter().find(|id| !is_known(id)) {
            Some(id) => {
                Err(ApiError::field("prompt", format!("token ids from 0 to {}", vocab_size - 1), id.to_string()))
            }
            None => Ok(ids.to_vec()),
        }
    }
}

/// The field that holds a prompt.
fn param_of(prompt: &ClientPrompt) -> &'static str {
    match prompt {
        ClientPrompt::Chat(_) => Endpoint::Chat.prompt_field(),
        ClientPrompt::Text(_) | ClientPrompt::Ids(_) => Endpoint::Completions.prompt_field(),
    }
}
