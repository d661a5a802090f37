//! Renders conversations to token ids, and labels the tokens that the backbone wrote.

use std::ops::Range;

use crate::data::IGNORE;
use crate::data::chat_template::ChatTemplate;
use crate::data::conversation::{ChatInput, Message};
use crate::data::prompts::{self, PromptError, PromptInput, Questions};
use crate::data::tokenize::{TextTokenizer, narrow, wide};

/// Replaces the user's text: private-use characters that no template contains.
const PLACEHOLDER: &str = "\u{f8ff}\u{f8fe}";

/// A backbone's tokenizer and template.
#[derive(Debug, Clone, Copy)]
pub struct Renderer<'a> {
    pub tokenizer: &'a TextTokenizer,
    /// The chat template; required for conversations.
    pub template: Option<&'a ChatTemplate>,
}

/// A rendered prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendered {
    /// Empty for a prompt of token ids.
    pub text: String,
    pub ids: Vec<i64>,
}

/// A user turn for the backbone to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenQuestion {
    /// The conversation up to the start of the user's text.
    pub prompt: Rendered,
    /// The tokens that the template puts after the user's text. They end the turn like EOS.
    pub end_mark: Vec<i64>,
}

/// A turn that the backbone wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenTurn {
    /// The text before the turn.
    pub opened: String,
    pub content: String,
    /// The text that ended the turn; empty if the length limit did.
    pub end: String,
}

/// Renders the first question of a conversation and appends its messages to `chat`. Without a renderer only conversations can be asked.
///
/// # Errors
/// A conversation without a template, an error of the template, or ids outside the tokenizer's vocabulary.
pub fn first(
    questions: &Questions,
    renderer: Option<&Renderer>,
    chat: &mut ChatInput,
) -> Result<Rendered, PromptError> {
    let input = match questions {
        Questions::Text(text) => PromptInput::Text(text.clone()),
        Questions::Ids(ids) => PromptInput::Ids(ids.clone()),
        Questions::Turns { opening, user } => {
            chat.clone_from(opening);
            chat.messages.extend(user.first().map(|first| Message::new("user", first)));
            return answer(renderer, chat);
        }
    };
    let Some(renderer) = renderer else { return Err(PromptError::NoTokens) };
    let ids = prompts::to_ids(&input, renderer.tokenizer, renderer.template)?;
    let text = match input {
        PromptInput::Text(text) => text,
        _ => renderer.tokenizer.decode(&ids, true)?,
    };
    chat.messages.push(Message::new("user", &text));
    Ok(Rendered { text, ids: wide(&ids) })
}

/// Renders a conversation up to the start of the assistant's text; nothing without a renderer.
///
/// # Errors
/// No template, or an error of the template.
pub fn answer(renderer: Option<&Renderer>, chat: &ChatInput) -> Result<Rendered, PromptError> {
    renderer.map_or_else(|| Ok(Rendered::default()), |renderer| renderer.answer(chat))
}

impl Renderer<'_> {
    /// Renders a conversation up to the start of the assistant's text.
    ///
    /// # Errors
    /// No template, or an error of the template.
    pub fn answer(&self, chat: &ChatInput) -> Result<Rendered, PromptError> {
        self.rendered(self.template()?.render_with(&chat.messages, &chat.inputs, true)?)
    }

    /// Renders a conversation up to the start of the user's text; `None` if the template changes the user's text.
    ///
    /// # Errors
    /// No template, or an error of the template.
    pub fn question(&self, ChatInput { messages, inputs }: &ChatInput) -> Result<Option<OpenQuestion>, PromptError> {
        let asked: Vec<Message> = messages.iter().cloned().chain([Message::new("user", PLACEHOLDER)]).collect();
        let rendered = self.template()?.render_with(&asked, inputs, true)?;
        let Some((before, behind)) = rendered.split_once(PLACEHOLDER) else { return Ok(None) };
        // A space before the first word belongs to the word's token, which the backbone writes.
        let prompt = self.rendered(before.trim_end_matches(' ').to_owned())?;
        Ok(Some(OpenQuestion { prompt, end_mark: self.end_mark(behind)? }))
    }

    /// What the template puts around the assistant's next turn: the text between the `prompt` and the turn's first letter, and the tokens
    /// that end the turn. `None` if the template changes the turn, or renders the conversation in another way than in the prompt.
    ///
    /// # Errors
    /// No template, an error of the template or the tokenizer.
    pub fn around_answer(
        &self,
        ChatInput { messages, inputs }: &ChatInput,
        prompt: &str,
    ) -> Result<Option<(String, Vec<i64>)>, PromptError> {
        let answered: Vec<Message> = messages.iter().cloned().chain([Message::new("assistant", PLACEHOLDER)]).collect();
        let rendered = self.template()?.render_with(&answered, inputs, false)?;
        let Some((before, behind)) = rendered.split_once(PLACEHOLDER) else { return Ok(None) };
        let Some(lead) = before.strip_prefix(prompt) else { return Ok(None) };
        Ok(Some((lead.to_owned(), self.end_mark(behind)?)))
    }

    /// The tokens at the start of what the template puts behind a turn.
    fn end_mark(&self, behind: &str) -> Result<Vec<i64>, PromptError> {
        let mut end_mark = wide(&self.tokenizer.encode(behind.trim(), false)?);
        let is_special = |id: &i64| i32::try_from(*id).is_ok_and(|id| self.tokenizer.is_special(id));
        if end_mark.first().is_some_and(is_special) {
            end_mark.truncate(1); // a special token such as "<|im_end|>" suffices; the rest belongs to the template
        }
        Ok(end_mark)
    }

    /// The text of new tokens without special tokens.
    ///
    /// # Errors
    /// An error of the tokenizer.
    pub fn text(&self, ids: &[i64]) -> Result<String, PromptError> {
        Ok(self.tokenizer.decode(&narrow(ids), true)?)
    }

    /// The text of the tokens that ended a turn.
    ///
    /// # Errors
    /// An error of the tokenizer.
    pub fn end_text(&self, ids: &[i64]) -> Result<String, PromptError> {
        Ok(self.tokenizer.decode(&narrow(ids), false)?)
    }

    /// Labels of a prompt: the tokens that the backbone wrote, [`IGNORE`] for all others. Used for a prompt that does
    /// not begin with the tokens that the backbone wrote, because the tokenizer encodes the same text differently or
    /// the template renders earlier turns differently. A turn that the prompt does not contain as it was written
    /// carries no loss.
    ///
    /// # Errors
    /// An error of the tokenizer.
    pub fn labels(&self, prompt: &Rendered, written: &[WrittenTurn]) -> Result<Vec<i32>, PromptError> {
        let spans: Vec<Range<usize>> = written.iter().filter_map(|turn| turn.span_in(&prompt.text)).collect();
        let wrote = |place: &Range<usize>| {
            spans.iter().any(|span| span.start <= place.start && place.end <= span.end && !place.is_empty())
        };
        let (ids, places) = self.tokenizer.encode_with_places(&prompt.text)?;
        Ok(ids.iter().zip(&places).map(|(&id, place)| if wrote(place) { id } else { IGNORE }).collect())
    }

    fn rendered(&self, text: String) -> Result<Rendered, PromptError> {
        let ids = wide(&self.tokenizer.encode(&text, false)?);
        if ids.is_empty() { Err(PromptError::NoTokens) } else { Ok(Rendered { text, ids }) }
    }

    fn template(&self) -> Result<&ChatTemplate, PromptError> {
        self.template.ok_or(PromptError::NoTemplate)
    }
}

impl WrittenTurn {
    /// The byte range of this turn and its end in `text`, if the text contains it as written (except for surrounding
    /// blanks).
    fn span_in(&self, text: &str) -> Option<Range<usize>> {
        let from = self.opened.len();
        let behind = text.strip_prefix(&self.opened)?;
        let rest = behind.trim_start().strip_prefix(self.content.trim())?;
        let to = text.len() - rest.len();
        let behind_end = rest.trim_start().strip_prefix(self.end.trim()).filter(|_| !self.end.is_empty());
        Some(from..behind_end.map_or(to, |behind| text.len() - behind.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(opened: &str, content: &str, end: &str) -> WrittenTurn {
        WrittenTurn { opened: opened.into(), content: content.into(), end: end.into() }
    }

    #[test]
    fn a_turn_is_found_where_it_was_written_and_not_where_it_is_repeated() {
        let text = "U:yes A: yes</s>U:yes A: no";
        assert_eq!(written("U:yes A:", "yes", "</s>").span_in(text), Some(8..16));
        assert_eq!(&text[8..16], " yes</s>");
        assert_eq!(written("U:yes A:", "yes", "").span_in(text), Some(8..12));
        assert_eq!(written("U:yes A: yes</s>U:yes A:", "no", "</s>").span_in(text), Some(24..27));
        assert_eq!(written("U:yes A:", "yes</s>U:yes", "A:").span_in(text), Some(8..24), "blanks before the end");
        assert_eq!(written("U:yes A:", "no", "").span_in(text), None);
        assert_eq!(
            written("U:no A:", "yes", "").span_in(text),
            None,
            "the template shows an earlier turn in another way"
        );
    }
}
