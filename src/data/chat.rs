//! A conversation as tokens with labels. What the model writes carries loss: all that stands between the header of an assistant's turn and
//! its end, end included, thoughts and calls among it. A template with `{% generation %}` says where that is; for the others it is read off
//! the text that they write around what was said, never searched in what was said.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::answer_places::{AnswerPlaces, KnownFrames};
use super::chat_template::{ChatTemplate, MarkedText, TemplateError};
use super::conversation::{Message, TemplateInputs};
use super::long_rows::RowFit;
use super::marked::WrittenText;
use super::report::DropReason;
use super::rows::{IGNORE, ReadRow, RowForm, RowProblem, TokenRow};
use super::tokenize::TextTokenizer;

/// `data.loss_on` in a recipe and `--loss-on`: which tokens of a conversation, or of a prompt with its completion, carry loss.
/// It does not apply to rows of text or token ids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LossOn {
    /// The assistant's turns, with their end-of-turn tokens; of a prompt with its completion, the completion.
    #[default]
    Assistant,
    /// All tokens.
    All,
}

/// Everything needed to turn conversations into rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConversationRenderer<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) inputs: &'a TemplateInputs,
    pub(super) tokenizer: &'a TextTokenizer,
    pub(super) loss_on: LossOn,
    /// So many turns carry no loss, whoever speaks.
    pub(super) given: usize,
    /// Which rows are split.
    pub(super) fit: RowFit,
}

/// With more questions than this in a conversation, none is looked for by a rendering of its own: that takes time that grows with the
/// square of the turns.
const RENDERED_ONE_BY_ONE: usize = 16;

/// A template that needs too many steps, or too much memory, for fewer turns than this loops; with more, the conversation is to blame.
const TURNS_OF_A_TALK: usize = 1000;

/// Why a conversation cannot be rendered.
#[derive(Debug)]
enum ChatError {
    /// This one has none.
    Conversation(DropReason),
    /// No other would have one.
    Template(TemplateError),
}

impl From<DropReason> for ChatError {
    fn from(reason: DropReason) -> Self {
        Self::Conversation(reason)
    }
}

impl From<TemplateError> for ChatError {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::Endless { turns, .. } | TemplateError::TooMuch { turns, .. } if turns < TURNS_OF_A_TALK => {
                Self::Template(error)
            }
            TemplateError::UnknownRole { .. } => Self::Conversation(DropReason::UnknownRole),
            other => Self::Conversation(DropReason::TemplateRefuses(other.words())),
        }
    }
}

/// A conversation's text, and the bytes of it that carry loss, in order.
#[derive(Debug)]
struct MaskedText {
    written: WrittenText,
    learned: Vec<Range<usize>>,
}

impl ConversationRenderer<'_> {
    /// The row of a conversation, uncut, or why there is none. The text is tokenised as a whole and nothing is put around
    /// it: the template writes BOS.
    ///
    /// # Errors
    /// The tokenizer's own, and a template that does not end.
    pub(super) fn row(&self, messages: &[Message]) -> Result<Result<ReadRow, DropReason>, RowProblem> {
        let MaskedText { written, learned } = match self.render(messages) {
            Ok(masked) => masked,
            Err(ChatError::Conversation(reason)) => return Ok(Err(reason)),
            Err(ChatError::Template(error)) => return Err(error.into()),
        };
        let (input_ids, places) = self.tokenizer.encode_with_places(&written.text)?;
        let labels = labels(&input_ids, &places, &learned);
        let tokens = TokenRow { input_ids, labels };
        let begins = if self.fit.is_split(&tokens) { self.exchanges(messages, &written) } else { vec![] };
        let token = |begin: usize| places.partition_point(|place| place.start < begin);
        let exchanges = begins.into_iter().map(token).collect();
        let (shortened_turns, calls_as_text) = (written.shortened(), self.template.calls_as_text(messages));
        Ok(Ok(ReadRow { tokens, of: RowForm::Conversation, exchanges, shortened_turns, calls_as_text }))
    }

    fn render(&self, messages: &[Message]) -> Result<MaskedText, ChatError> {
        if messages.iter().all(Message::is_empty) {
            return Err(DropReason::EmptyConversation.into());
        }
        let written = self.written(messages, false)?;
        if self.loss_on == LossOn::All {
            return Ok(MaskedText { learned: std::iter::once(0..written.text.len()).collect(), written });
        }
        let answers: Vec<usize> = (0..messages.len()).filter(|&at| self.is_learned(messages, at)).collect();
        if answers.is_empty() {
            let has_one = messages.iter().any(Message::is_from_assistant);
            return Err(if has_one { DropReason::NoLearnedTurn } else { DropReason::NoAssistantTurn }.into());
        }
        let learned = match self.template.marks_generation {
            true => self.generation(messages, &written.text)?,
            false => {
                let &Self { template, inputs, tokenizer, .. } = self;
                let known = KnownFrames::default();
                AnswerPlaces { template, inputs, tokenizer, messages, written: &written, known }.of(&answers)
            }
        };
        let learned = learned.filter(|learned| !learned.is_empty()).ok_or(DropReason::AnswersNotFound)?;
        Ok(MaskedText { written, learned })
    }

    pub(super) fn written(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<WrittenText, TemplateError> {
        self.template.written(messages, self.inputs, add_generation_prompt)
    }

    fn is_learned(&self, messages: &[Message], at: usize) -> bool {
        at >= self.given && messages[at].is_from_assistant() && messages[at].learned != Some(false)
    }

    /// The template's own `{% generation %}` blocks: one for each of the assistant's turns.
    fn generation(&self, messages: &[Message], rendered: &str) -> Result<Option<Vec<Range<usize>>>, TemplateError> {
        let marked = self.template.render_generation(messages, self.inputs)?;
        let Some(MarkedText { spans, .. }) = marked.filter(|marked| marked.text == rendered) else { return Ok(None) };
        let mut assistants = (0..messages.len()).filter(|&at| messages[at].is_from_assistant());
        if spans.len() == assistants.clone().count() {
            let learned = spans.into_iter().zip(assistants).filter(|(_, at)| self.is_learned(messages, *at));
            return Ok(Some(learned.map(|(span, _)| span).collect()));
        }
        Ok(assistants.all(|at| self.is_learned(messages, at)).then_some(spans))
    }

    /// Where in the text exchanges after the first begin: with a question behind an answer. Those that are not found, because the template
    /// writes a turn in another way once others follow, are left out.
    fn exchanges(&self, messages: &[Message], written: &WrittenText) -> Vec<usize> {
        let is_answer = |message: &Message| ["assistant", "tool"].contains(&message.role.as_str());
        let begins = |at: &usize| messages[*at].role == "user" && is_answer(&messages[*at - 1]);
        let questions: Vec<usize> = (1..messages.len()).filter(begins).collect();
        let alone = |at: usize| self.begin_of(&messages[..at], &written.text);
        let before = |at: usize| {
            let [before, _] = written.around(at);
            (before.start, written.text[before].trim_end())
        };
        let lead = questions.first().and_then(|&first| {
            let (start, before) = before(first);
            before.get(alone(first)?.checked_sub(start)?..).filter(|lead| !lead.is_empty())
        });
        let by_lead = |at: usize| {
            let (start, before) = before(at);
            before.strip_suffix(lead?).map(|others| start + others.len())
        };
        let few = questions.len() <= RENDERED_ONE_BY_ONE;
        questions.iter().filter_map(|&at| by_lead(at).or_else(|| few.then(|| alone(at))?)).collect()
    }

    /// Where the text of a turn begins: behind that of the turns before it.
    fn begin_of(&self, before: &[Message], rendered: &str) -> Option<usize> {
        let before = self.written(before, false).ok()?.text;
        rendered.starts_with(&before).then_some(before.len())
    }
}

/// Tokens from the first to the last that shares a byte with a span, as transformers' assistant mask has it: a token
/// across the border is learned whole.
pub(super) fn labels(input_ids: &[i32], places: &[Range<usize>], learned: &[Range<usize>]) -> Vec<i32> {
    let mut labels = vec![IGNORE; input_ids.len()];
    for span in learned {
        let touches = |place: &Range<usize>| match place.is_empty() {
            true => span.start < place.start && place.end < span.end, // a piece without text of its own
            false => place.start < span.end && place.end > span.start,
        };
        // Tokens stand in the order of their text: those that can touch are neighbours.
        let near = places.partition_point(|place| place.end < span.start)
            ..places.partition_point(|place| place.start <= span.end);
        let nearby = &places[near.clone()];
        let (Some(first), Some(last)) = (nearby.iter().position(touches), nearby.iter().rposition(touches)) else {
            continue;
        };
        let learned = near.start + first..=near.start + last;
        labels[learned.clone()].copy_from_slice(&input_ids[learned]);
    }
    labels
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::answer_frame::ending;
    use super::super::chat_template::TemplateChoice;
    use super::super::long_rows::LongRows;
    use super::*;

    const X: i32 = IGNORE;

    #[test]
    fn a_token_across_the_border_is_learned_whole() {
        let labelled = |spans: &[Range<usize>]| labels(&[1, 2, 3, 4], &[0..2, 2..5, 5..6, 6..9], spans);
        assert_eq!(labelled(&[4..7, 9..9]), [X, 2, 3, 4]);
        assert_eq!(labelled(&[2..5, 9..9]), [X, 2, X, X]);
        assert_eq!(labelled(&[0..1, 6..9]), [1, X, X, 4]);
        assert_eq!(labelled(&[]), [X; 4]);
    }

    #[test]
    fn a_token_whose_blanks_are_not_placed_is_learned_where_it_stands() {
        // As byte-level tokenizers that trim offsets place blanks: [1..1] stands for byte 0, [5..5] for bytes 3 and 4.
        let places = [1..1, 1..3, 5..5, 5..6, 6..6];
        let labelled = |span: Range<usize>| labels(&[1, 2, 3, 4, 5], &places, std::slice::from_ref(&span));
        assert_eq!(labelled(0..6), [1, 2, 3, 4, X]);
        assert_eq!(labelled(3..6), [X, X, 3, 4, X]);
        assert_eq!(labelled(1..3), [X, 2, X, X, X]);
    }

    /// A conversation of many answers, some with blanks around them, some of them equal.
    fn long_talk() -> Vec<Message> {
        let said = ["yes", " yes", "a\nb \n", "\t</s> no", "yes", "[/INST] x", "Grüße 🙂 "];
        let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
        (0..4 * RENDERED_ONE_BY_ONE).map(|at| Message::new(role(at), said[at % said.len()])).collect()
    }

    /// The slow way for templates that write every turn in the same way: an answer is what the template adds to the text that lets the
    /// assistant speak.
    fn by_prefix(chat: &ConversationRenderer, messages: &[Message], at: usize) -> Range<usize> {
        let before = chat.written(&messages[..at], true).unwrap().text;
        let through = chat.written(&messages[..=at], false).unwrap().text;
        let turn = through.strip_prefix(&before).unwrap();
        let behind = turn.trim_start().strip_prefix(messages[at].content.trim()).unwrap();
        before.len()..through.len() - (behind.len() - ending(behind).len())
    }

    #[test]
    fn many_answers_are_found_where_rendering_one_by_one_finds_them() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
        let tokenizer = TextTokenizer::load(&folder).unwrap();
        for name in ["vicuna", "zephyr", "llama-2", "llama-3", "chatml", "mistral", "tokenizer"] {
            let choice = TemplateChoice::try_from(name.to_owned()).unwrap();
            let template = ChatTemplate::choose(&choice, &folder).unwrap().unwrap();
            let (inputs, loss_on) = (TemplateInputs::default(), LossOn::Assistant);
            let fit = RowFit { max_length: 64, long_rows: LongRows::Split, bos: None };
            let (template, tokenizer) = (&template, &tokenizer);
            let chat = ConversationRenderer { template, inputs: &inputs, tokenizer, loss_on, given: 0, fit };
            let messages = long_talk();
            let answers: Vec<usize> = (1..messages.len()).step_by(2).collect();
            let slow: Vec<_> = answers.iter().map(|&at| by_prefix(&chat, &messages, at)).collect();
            let MaskedText { written, learned } = chat.render(&messages).unwrap();
            assert_eq!(learned, slow, "{name}");
            let questions = (2..messages.len()).step_by(2);
            let slow: Vec<_> = questions.map(|at| chat.begin_of(&messages[..at], &written.text).unwrap()).collect();
            assert_eq!(chat.exchanges(&messages, &written), slow, "{name}");
        }
    }
}
