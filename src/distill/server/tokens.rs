//! Whether server and backbone agree on tokens, and the tokens of an answer.
//!
//! A row holds what the backbone's tokenizer and template make of the conversation: heads are trained on these. Where a server reports the
//! token ids of an answer, these are taken, if the tokenizer turns them into the answer's text. Else the text is encoded behind its prompt: as
//! it was received, or as the template writes it (which may put a space before it), whichever has as many tokens as the server counts.

use std::fmt;

use super::completion::Completion;
use super::settings::ServerSettings;
use crate::data::prompts::{PromptError, PromptInput};
use crate::data::tokenize::wide;
use crate::decode::request::FinishReason;
use crate::distill::answer::{Question, WrittenAnswer};
use crate::distill::error::ServerError;
use crate::distill::render::Renderer;

/// An answer with its tokens, and what is wrong with it.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) answer: WrittenAnswer,
    pub(super) faults: Vec<Disagreement>,
}

/// Something that server and backbone do not agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Disagreement {
    /// The prompt's tokens.
    Prompt { expected: String, got: String },
    /// The answer's tokens.
    Answer { expected: String, got: String },
    /// The model's name.
    Model { expected: String, got: String },
    /// The server reports neither tokens nor their number.
    Unchecked {
        /// Of which text.
        what: &'static str,
    },
}

impl fmt::Display for Disagreement {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prompt { expected, got } => {
                write!(out, "the prompt has {expected} in --backbone, {got} on the server")
            }
            Self::Answer { expected, got } => {
                write!(out, "the answer has {expected} in --backbone, {got} on the server")
            }
            Self::Model { expected, got } => write!(out, "the answer is from model {got:?}, not from {expected:?}"),
            Self::Unchecked { what } => write!(out, "the server tells no tokens of {what}"),
        }
    }
}

impl Disagreement {
    /// With `--strict`.
    pub(super) fn into_error(self) -> ServerError {
        match self {
            Self::Prompt { expected, got } => ServerError::TokensDiffer { what: "the prompt", expected, got },
            Self::Answer { expected, got } => ServerError::TokensDiffer { what: "the answer", expected, got },
            Self::Model { expected, got } => ServerError::OtherModel { expected, got },
            Self::Unchecked { what } => ServerError::TokensDiffer {
                what,
                expected: "usage, or token ids (return_token_ids), to compare with the backbone's tokens".to_owned(),
                got: "neither from the server".to_owned(),
            },
        }
    }
}

/// The backbone's side of the comparison.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenCheck<'a> {
    pub(super) settings: &'a ServerSettings,
    pub(super) renderer: Option<&'a Renderer<'a>>,
}

impl TokenCheck<'_> {
    pub(super) fn answer(&self, question: &Question, completion: Completion) -> Result<Checked, ServerError> {
        let mut faults: Vec<Disagreement> = self.other_model(&completion).into_iter().collect();
        let Some(renderer) = self.renderer else {
            if completion.reasoning.is_some() {
                return Err(ServerError::Reasoning);
            }
            let (new_ids, end) = (vec![], vec![]);
            let answer =
                WrittenAnswer { text: Some(completion.text), new_ids, end, finish_reason: completion.finish_reason };
            return Ok(Checked { answer, faults });
        };
        faults.extend(prompt_fault(question, &completion));
        let writing = Writing { question, completion: &completion, renderer, eos: &self.settings.eos };
        let (written, fault) = writing.tokens()?;
        faults.extend(fault);
        let WrittenTokens { new_ids, end } = written;
        let answer =
            WrittenAnswer { text: Some(completion.text), new_ids, end, finish_reason: completion.finish_reason };
        Ok(Checked { answer, faults })
    }

    fn other_model(&self, completion: &Completion) -> Option<Disagreement> {
        let (expected, got) = (&self.settings.model, completion.model.as_ref()?);
        (got != expected).then(|| Disagreement::Model { expected: expected.clone(), got: got.clone() })
    }
}

/// Compares the prompt's ids, or else their number.
fn prompt_fault(question: &Question, completion: &Completion) -> Option<Disagreement> {
    let own = &question.prompt.ids;
    match (&completion.prompt_ids, completion.prompt_tokens) {
        (Some(ids), _) if ids == own => None,
        (Some(ids), _) => {
            let at = own.iter().zip(ids).take_while(|(a, b)| a == b).count();
            let shown = |ids: &[i64]| match ids.get(at) {
                Some(id) => format!("{} tokens, id {id} at position {at}", ids.len()),
                None => format!("{} tokens", ids.len()),
            };
            Some(Disagreement::Prompt { expected: shown(own), got: shown(ids) })
        }
        (None, Some(count)) if count == own.len() => None,
        (None, Some(count)) => {
            Some(Disagreement::Prompt { expected: format!("{} tokens", own.len()), got: format!("{count} tokens") })
        }
        (None, None) => Some(Disagreement::Unchecked { what: "the prompt" }),
    }
}

/// New tokens, and those that end them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WrittenTokens {
    new_ids: Vec<i64>,
    end: Vec<i64>,
}

/// An answer whose tokens are wanted.
struct Writing<'a> {
    question: &'a Question,
    completion: &'a Completion,
    renderer: &'a Renderer<'a>,
    eos: &'a [i64],
}

impl Writing<'_> {
    fn tokens(&self) -> Result<(WrittenTokens, Option<Disagreement>), ServerError> {
        let (lead, end) = self.around()?;
        let end = if self.completion.finish_reason == FinishReason::Eos { end } else { vec![] };
        let received = self.completion.ids.as_deref().map(|ids| self.split(ids, &end));
        if let Some(received) = &received
            && self.is_text_of(&received.new_ids)?
        {
            return Ok((received.clone(), None));
        }
        if self.completion.reasoning.is_some() {
            return Err(ServerError::Reasoning);
        }
        let [first, second] = self.candidates(&lead);
        let first = WrittenTokens { new_ids: self.encoded(&first)?, end: end.clone() };
        if let Some(received) = received {
            let expected = format!("{} tokens for its text", first.new_ids.len());
            let got = format!("{} tokens of another text", received.new_ids.len());
            return Ok((first, Some(Disagreement::Answer { expected, got })));
        }
        let Some(count) = self.completion.completion_tokens else {
            return Ok((first, Some(Disagreement::Unchecked { what: "the answer" })));
        };
        let has_count =
            |written: &WrittenTokens| [0, written.end.len()].iter().any(|end| written.new_ids.len() + end == count);
        if has_count(&first) {
            return Ok((first, None));
        }
        let second = WrittenTokens { new_ids: self.encoded(&second)?, end };
        if has_count(&second) {
            return Ok((second, None));
        }
        let expected = format!("{} tokens", first.new_ids.len() + first.end.len());
        Ok((first, Some(Disagreement::Answer { expected, got: format!("{count} tokens") })))
    }

    /// What may be the answer's text: with what the template puts before it, which some servers cut off, and as it was received. The likelier
    /// one comes first.
    fn candidates(&self, lead: &str) -> [String; 2] {
        let (received, rendered) = (self.completion.text.clone(), format!("{lead}{}", self.completion.text.trim()));
        if received.starts_with(lead) { [received, rendered] } else { [rendered, received] }
    }

    /// The text that the template puts before the answer, and the tokens that end it.
    fn around(&self) -> Result<(String, Vec<i64>), PromptError> {
        let around = match &self.question.input {
            PromptInput::Chat(chat) => self.renderer.around_answer(chat, &self.question.prompt.text)?,
            _ => None,
        };
        let (lead, end) = around.unwrap_or_default();
        let eos = || self.renderer.tokenizer.eos_id().map(i64::from).into_iter().collect();
        Ok((lead, if end.is_empty() { eos() } else { end }))
    }

    /// The server's own ids; the EOS is among them or not.
    fn split(&self, ids: &[i64], end: &[i64]) -> WrittenTokens {
        match ids.split_last() {
            Some((last, new_ids)) if !end.is_empty() && (self.eos.contains(last) || end == [*last]) => {
                WrittenTokens { new_ids: new_ids.to_vec(), end: vec![*last] }
            }
            _ => WrittenTokens { new_ids: ids.to_vec(), end: end.to_vec() },
        }
    }

    /// Whether the backbone's tokenizer turns these ids into the answer. A character that is not whole may be shown or not, and reasoning
    /// that came separately stands before the text.
    fn is_text_of(&self, ids: &[i64]) -> Result<bool, PromptError> {
        let vocabulary = self.renderer.tokenizer.vocab_size();
        if !ids.iter().all(|&id| usize::try_from(id).is_ok_and(|id| id < vocabulary)) {
            return Ok(false);
        }
        let trim = |text: &str| text.trim_end_matches('\u{fffd}').trim().to_owned();
        let (decoded, received) = (trim(&self.renderer.text(ids)?), trim(&self.completion.text));
        Ok(if self.completion.reasoning.is_some() { decoded.ends_with(&received) } else { decoded == received })
    }

    /// The tokens of a text behind the prompt. Where the two have a token in common, the text is encoded on its own.
    fn encoded(&self, text: &str) -> Result<Vec<i64>, PromptError> {
        let (prompt, tokenizer) = (&self.question.prompt, self.renderer.tokenizer);
        let is_raw = matches!(self.question.input, PromptInput::Text(_));
        let all_ids = wide(&tokenizer.encode(&format!("{}{text}", prompt.text), is_raw)?);
        match all_ids.strip_prefix(&prompt.ids[..]) {
            Some(new_ids) => Ok(new_ids.to_vec()),
            None => Ok(wide(&tokenizer.encode(text, false)?)),
        }
    }
}
