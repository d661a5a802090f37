//! The history of a chat as token ids. No terminal here.

use super::super::UsageError;
use crate::data::conversation::{ChatInput, Message};
use crate::data::prompts::{self, PromptError};
use crate::data::tokenize::wide;
use crate::decode::text::FinishedText;
use crate::session::Decoder;

/// A conversation through the backbone's chat template or, without one, a text that grows with each input and answer.
#[derive(Debug)]
pub(super) struct ChatHistory<'a> {
    decoder: &'a Decoder,
    system: Option<String>,
    said: ChatContext,
}

#[derive(Debug)]
enum ChatContext {
    Turns(Vec<Message>),
    Text(Vec<i64>),
}

impl<'a> ChatHistory<'a> {
    /// A conversation with only the system prompt.
    ///
    /// # Errors
    /// [`UsageError`] if the backbone has no template, or one without system turns.
    pub(super) fn new(decoder: &'a Decoder, system: Option<&str>) -> Result<Self, UsageError> {
        let conversation = Self { decoder, system: system.map(str::to_owned), said: beginning(decoder, system) };
        if system.is_some() {
            let refused = |why| UsageError(format!("--system cannot be used here: {:#}", anyhow::Error::from(why)));
            conversation.prompt("x").map_err(refused)?;
        }
        Ok(conversation)
    }

    /// Whether turns go through a template.
    pub(super) fn has_turns(&self) -> bool {
        matches!(self.said, ChatContext::Turns(_))
    }

    /// The prompt after another user turn.
    ///
    /// # Errors
    /// An error of the template or the tokenizer.
    pub(super) fn prompt(&self, words: &str) -> Result<Vec<i64>, PromptError> {
        let Decoder { tokenizer, template, backbone, .. } = self.decoder;
        let context = usize::try_from(backbone.config.max_position_embeddings).unwrap_or(usize::MAX);
        if tokenizer.is_beyond(words, context) {
            return Err(PromptError::BeyondContext { bytes: words.len(), context });
        }
        match &self.said {
            ChatContext::Turns(turns) => {
                let messages = turns.iter().cloned().chain([Message::new("user", words)]).collect();
                let chat = ChatInput { messages, ..ChatInput::default() };
                Ok(wide(&prompts::chat_ids(&chat, tokenizer, template.as_deref())?))
            }
            ChatContext::Text(ids) if ids.is_empty() => Ok(wide(&tokenizer.encode(words, true)?)),
            ChatContext::Text(ids) if words.is_empty() => Ok(ids.clone()),
            ChatContext::Text(ids) => Ok([&ids[..], &wide(&tokenizer.encode(words, false)?)].concat()),
        }
    }

    /// Adds a user turn and its answer; `prompt` is the prompt made from `words`.
    pub(super) fn add(&mut self, words: &str, prompt: Vec<i64>, answer: &FinishedText) {
        match &mut self.said {
            ChatContext::Turns(turns) => {
                turns.extend([Message::new("user", words), Message::new("assistant", &answer.text_alone)]);
            }
            ChatContext::Text(ids) => *ids = [&prompt[..], &answer.generation.new_ids].concat(),
        }
    }

    /// Removes everything except the system prompt.
    pub(super) fn reset(&mut self) {
        self.said = beginning(self.decoder, self.system.as_deref());
    }
}

fn beginning(decoder: &Decoder, system: Option<&str>) -> ChatContext {
    // A system prompt needs turns. Without a template, rendering it reports the missing template.
    match (decoder.template.is_some(), system) {
        (false, None) => ChatContext::Text(Vec::new()),
        (_, system) => ChatContext::Turns(system.map(|words| Message::new("system", words)).into_iter().collect()),
    }
}
