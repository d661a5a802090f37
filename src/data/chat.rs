//! A conversation as tokens with labels. What the template renders decides which tokens carry loss: the text that it
//! writes for a turn, never a search for what was said, so that an answer that repeats an earlier one is no trap.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::IGNORE;
use super::chat_template::{ChatTemplate, Marked, Message, TemplateError};
use super::conversation::{Role, Turn};
use super::report::DropReason;
use super::rows::TokenRow;
use super::tokenize::{TextTokenizer, TokenizeError};

/// `data.loss_on` of a recipe: which tokens of a conversation carry loss. (Rows of text and of tokens say so themselves.)
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossOn {
    /// What the assistant says, and the end of its turn.
    #[default]
    Assistant,
    /// All tokens.
    All,
}

/// What turns conversations into rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chat<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) tokenizer: &'a TextTokenizer,
    pub(super) loss_on: LossOn,
}

/// A conversation's text, and the bytes of it that carry loss, in order.
#[derive(Debug, PartialEq, Eq)]
struct Rendered {
    text: String,
    learned: Vec<Range<usize>>,
}

impl Chat<'_> {
    /// The row of a conversation, uncut, or why there is none. The text is tokenised as a whole and nothing is put around
    /// it: the template writes BOS.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub(super) fn row(&self, turns: &[Turn]) -> Result<Result<TokenRow, DropReason>, TokenizeError> {
        let rendered = match self.render(turns) {
            Ok(rendered) => rendered,
            Err(reason) => return Ok(Err(reason)),
        };
        let (input_ids, places) = self.tokenizer.encode_with_places(&rendered.text)?;
        let labels = labels(&input_ids, &places, &rendered.learned);
        Ok(Ok(TokenRow { input_ids, labels }))
    }

    fn render(&self, turns: &[Turn]) -> Result<Rendered, DropReason> {
        if turns.iter().all(|turn| turn.content.trim().is_empty()) {
            return Err(DropReason::EmptyConversation);
        }
        if turns.iter().any(|turn| turn.role == Role::Unknown) {
            return Err(DropReason::UnknownRole);
        }
        let messages: Vec<Message> = turns.iter().map(|turn| self.message(turn)).collect();
        if self.loss_on == LossOn::All {
            let text = self.template.render(&messages, false).map_err(|error| refusal(&error))?;
            return Ok(Rendered { learned: std::iter::once(0..text.len()).collect(), text });
        }
        if !turns.iter().any(|turn| turn.role == Role::Assistant) {
            return Err(DropReason::NoAssistantTurn);
        }
        if self.template.marks_generation() {
            return self.render_generation(turns, &messages);
        }
        let text = self.template.render(&messages, false).map_err(|error| refusal(&error))?;
        let answers = (0..turns.len()).filter(|&at| turns[at].role == Role::Assistant);
        let answer = |at| self.by_prefix(&messages, at, &text).or_else(|| self.by_marks(&messages, at, &text));
        let learned = answers.map(answer).collect::<Option<Vec<_>>>().ok_or(DropReason::AnswersNotFound)?;
        Ok(Rendered { text, learned })
    }

    /// A turn in the template's words. A tool's answer that the template does not show is the user's: it stays in sight.
    fn message(&self, turn: &Turn) -> Message {
        let role = match turn.role {
            Role::System => "system",
            Role::Assistant | Role::Call => "assistant",
            Role::Tool if self.template.takes_tool_turns() => "tool",
            Role::User | Role::Tool | Role::Unknown => "user",
        };
        Message::new(role, &turn.content)
    }

    /// The template's own `{% generation %}` blocks: one for each of the assistant's turns, less those that call tools.
    fn render_generation(&self, turns: &[Turn], messages: &[Message]) -> Result<Rendered, DropReason> {
        let marked = self.template.render_generation(messages).map_err(|error| refusal(&error))?;
        let Marked { text, spans } = marked.ok_or(DropReason::AnswersNotFound)?;
        let mut assistants = turns.iter().filter(|turn| matches!(turn.role, Role::Assistant | Role::Call));
        if spans.len() == assistants.clone().count() {
            let learned = spans.into_iter().zip(assistants).filter(|(_, turn)| turn.role == Role::Assistant);
            return Ok(Rendered { text, learned: learned.map(|(span, _)| span).collect() });
        }
        if assistants.any(|turn| turn.role == Role::Call) {
            return Err(DropReason::AnswersNotFound);
        }
        Ok(Rendered { text, learned: spans })
    }

    /// The answer is what the template writes between "now the assistant speaks" and the end of its turn. It is learned
    /// without the blanks behind the end of the turn: they belong to the next one. `None` where the conversation up to
    /// here is not how the whole begins, or where something stands between the generation prompt and the answer.
    fn by_prefix(&self, messages: &[Message], at: usize, whole: &str) -> Option<Range<usize>> {
        let before = self.template.render(&messages[..at], true).ok()?;
        let through = self.template.render(&messages[..=at], false).ok()?;
        let turn = through.strip_prefix(before.as_str()).filter(|_| whole.starts_with(&through))?;
        let ending = turn.trim_start().strip_prefix(messages[at].content.trim())?;
        Some(before.len()..through.len() - blanks_behind(ending))
    }

    /// For templates that write a turn in another way once others follow (they end the text with EOS, or drop what
    /// models thought): the answer with a mark on each side shows where it stands in the whole, and what the template
    /// writes behind it when it is last (or else a special token right behind it) is the end of its turn.
    fn by_marks(&self, messages: &[Message], at: usize, whole: &str) -> Option<Range<usize>> {
        let marks = Marked::marks(messages)?;
        let mut marked = messages.to_vec();
        let mut attempt = |content: String| {
            marked[at].content = content;
            let (span, text) = self.only_span(&marked, marks).filter(|(_, text)| text == whole)?;
            let (last_span, last_text) = self.only_span(&marked[..=at], marks)?;
            let ends = self.ends_within(&text[span.end..], &last_text[last_span.end..])?;
            Some(span.start..span.end + ends)
        };
        let [start, end] = marks;
        let content = &messages[at].content;
        let said = content.trim();
        let lead = content.len() - content.trim_start().len();
        // Blanks at the ends are part of what was said, unless the template trims them: then they are outside.
        attempt(format!("{start}{content}{end}"))
            .or_else(|| attempt(format!("{}{start}{said}{end}{}", &content[..lead], &content[lead + said.len()..])))
    }

    fn only_span(&self, marked: &[Message], marks: [char; 2]) -> Option<(Range<usize>, String)> {
        let Marked { text, spans } = Marked::read(&self.template.render(marked, false).ok()?, marks)?;
        let [span] = spans.as_slice() else { return None };
        Some((span.clone(), text))
    }

    /// How many bytes of what stands behind an answer end its turn, if it is written as when it is the last one.
    fn ends_within(&self, behind: &str, when_last: &str) -> Option<usize> {
        let ending = &when_last[..when_last.len() - blanks_behind(when_last)];
        let as_last = behind.starts_with(ending).then_some(ending.len());
        as_last.or_else(|| self.tokenizer.special_token_at(behind))
    }
}

fn refusal(error: &TemplateError) -> DropReason {
    DropReason::TemplateRefuses(error.words())
}

/// How many bytes of blanks end this, unless it is nothing else: then they are how a turn ends.
fn blanks_behind(ending: &str) -> usize {
    match ending.trim_end() {
        "" => 0,
        written => ending.len() - written.len(),
    }
}

/// Tokens from the first to the last that shares a byte with a span, as transformers' assistant mask has it: a token
/// across the border is learned whole.
fn labels(input_ids: &[i32], places: &[Range<usize>], learned: &[Range<usize>]) -> Vec<i32> {
    let mut labels = vec![IGNORE; input_ids.len()];
    for span in learned {
        let touches = |place: &Range<usize>| match place.is_empty() {
            true => span.start < place.start && place.end < span.end, // a piece without text of its own
            false => place.start < span.end && place.end > span.start,
        };
        let (Some(first), Some(last)) = (places.iter().position(touches), places.iter().rposition(touches)) else {
            continue;
        };
        labels[first..=last].copy_from_slice(&input_ids[first..=last]);
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: i32 = IGNORE;

    #[test]
    fn a_token_across_the_border_is_learned_whole() {
        let of = |spans: &[Range<usize>]| labels(&[1, 2, 3, 4], &[0..2, 2..5, 5..6, 6..9], spans);
        assert_eq!(of(&[4..7, 9..9]), [X, 2, 3, 4]);
        assert_eq!(of(&[2..5, 9..9]), [X, 2, X, X]);
        assert_eq!(of(&[0..1, 6..9]), [1, X, X, 4]);
        assert_eq!(of(&[]), [X; 4]);
    }

    #[test]
    fn a_token_whose_blanks_are_not_placed_is_learned_where_it_stands() {
        // As byte-level tokenizers that trim offsets place blanks: [1..1] stands for byte 0, [5..5] for bytes 3 and 4.
        let places = [1..1, 1..3, 5..5, 5..6, 6..6];
        let of = |span: Range<usize>| labels(&[1, 2, 3, 4, 5], &places, std::slice::from_ref(&span));
        assert_eq!(of(0..6), [1, 2, 3, 4, X]);
        assert_eq!(of(3..6), [X, X, 3, 4, X]);
        assert_eq!(of(1..3), [X, 2, X, X, X]);
    }

    #[test]
    fn blanks_behind_a_turn_belong_to_the_next_unless_they_end_it() {
        assert_eq!((blanks_behind("</s>\n"), blanks_behind("</s>"), blanks_behind("\n\n")), (1, 0, 0));
    }
}
