//! Renders conversations to token ids, and marks those that the backbone wrote.

use std::ops::Range;

use crate::data::IGNORE;
use crate::data::chat_template::{ChatTemplate, Message};
use crate::data::prompts::{self, PromptError, PromptInput, Questions};
use crate::data::tokenize::{TextTokenizer, narrow, wide};

/// Stands where the user's text would: a character of nobody's language, which no template has.
const PLACEHOLDER: &str = "\u{f8ff}\u{f8fe}";

/// A backbone's tokenizer and template.
#[derive(Debug, Clone, Copy)]
pub struct Renderer<'a> {
    /// Its tokenizer.
    pub tokenizer: &'a TextTokenizer,
    /// Its template, if it has one: conversations need it.
    pub template: Option<&'a ChatTemplate>,
}

/// What a backbone goes on from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendered {
    /// Empty for a prompt of ids.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<i64>,
}

/// A user's turn that the backbone shall write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenQuestion {
    /// Up to where the user speaks.
    pub prompt: Rendered,
    /// What the template puts behind the user's text: it ends the turn, as an EOS does.
    pub end_mark: Vec<i64>,
}

/// A turn that the backbone wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenTurn {
    /// All that stood before it.
    pub opened: String,
    /// The turn.
    pub content: String,
    /// What ended it, as text; empty where the length did.
    pub end: String,
}

/// The first question of a conversation; its messages are appended to `messages`.
///
/// # Errors
/// A conversation without a template, or one that the template refuses; ids that the tokenizer does not have.
pub fn first(questions: &Questions, renderer: &Renderer, messages: &mut Vec<Message>) -> Result<Rendered, PromptError> {
    let input = match questions {
        Questions::Text(text) => PromptInput::Text(text.clone()),
        Questions::Ids(ids) => PromptInput::Ids(ids.clone()),
        Questions::Turns { system, user } => {
            messages.extend(system.iter().map(|system| Message::new("system", system)));
            messages.extend(user.first().map(|first| Message::new("user", first)));
            return renderer.answer(messages);
        }
    };
    let ids = prompts::to_ids(&input, renderer.tokenizer, renderer.template)?;
    let text = match input {
        PromptInput::Text(text) => text,
        _ => renderer.tokenizer.decode(&ids, true)?,
    };
    messages.push(Message::new("user", &text));
    Ok(Rendered { text, ids: wide(&ids) })
}

impl Renderer<'_> {
    /// A conversation up to where the assistant speaks.
    ///
    /// # Errors
    /// No template, or what it raises.
    pub fn answer(&self, messages: &[Message]) -> Result<Rendered, PromptError> {
        self.rendered(self.template()?.render(messages, true)?)
    }

    /// A conversation up to where the user speaks; `None` if the template does not show the user's text as it is.
    ///
    /// # Errors
    /// No template, or what it raises.
    pub fn question(&self, messages: &[Message]) -> Result<Option<OpenQuestion>, PromptError> {
        let asked: Vec<Message> = messages.iter().cloned().chain([Message::new("user", PLACEHOLDER)]).collect();
        let whole = self.template()?.render(&asked, true)?;
        let Some((before, behind)) = whole.split_once(PLACEHOLDER) else { return Ok(None) };
        // A space before the first word is part of the word's token, which the backbone writes.
        let prompt = self.rendered(before.trim_end_matches(' ').to_owned())?;
        let mut end_mark = wide(&self.tokenizer.encode(behind.trim(), false)?);
        let is_special = |id: &i64| i32::try_from(*id).is_ok_and(|id| self.tokenizer.is_special(id));
        if end_mark.first().is_some_and(is_special) {
            end_mark.truncate(1); // "<|im_end|>" says it all; what follows is the template's
        }
        Ok(Some(OpenQuestion { prompt, end_mark }))
    }

    /// The text of new tokens, special ones left out.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn text(&self, ids: &[i64]) -> Result<String, PromptError> {
        Ok(self.tokenizer.decode(&narrow(ids), true)?)
    }

    /// The text of what ended a turn.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn end_text(&self, ids: &[i64]) -> Result<String, PromptError> {
        Ok(self.tokenizer.decode(&narrow(ids), false)?)
    }

    /// Labels of a prompt: its own tokens where the backbone wrote them, else [`IGNORE`]. For a prompt that does not begin with
    /// the tokens that the backbone wrote, because a text has other tokens when it is read again, or because the template shows
    /// earlier turns in another way. A turn that does not stand in the prompt as it was written carries no loss.
    ///
    /// # Errors
    /// The tokenizer's own.
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
    /// The bytes of a text that hold this turn and its end, if it stands there as it was written (blanks around it aside).
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
