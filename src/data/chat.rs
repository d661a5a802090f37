//! A conversation as tokens with labels. What the template renders decides which tokens carry loss: the text that it
//! writes for a turn, never a search for what was said, so that an answer that repeats an earlier one is no trap.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::chat_template::{ChatTemplate, Marked, Message, TemplateError, TemplateInputs};
use super::conversation::{CALLS, Role, Turn};
use super::long_rows::RowFit;
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

/// With more answers than this in a conversation, what surrounds one of them is looked for around the others: to render the
/// conversation up to each of them takes time that grows with the square of the turns.
const RENDERED_ONE_BY_ONE: usize = 16;

/// A template that needs too many steps, or too much memory, for fewer turns than this loops; with more, the conversation is to blame.
const TURNS_OF_A_TALK: usize = 1000;

const END_OF_THOUGHTS: &str = "</think>";

/// Why a conversation cannot be rendered.
#[derive(Debug)]
enum Refused {
    /// This one has none.
    Conversation(DropReason),
    /// No other would have one.
    Template(TemplateError),
}

impl From<DropReason> for Refused {
    fn from(reason: DropReason) -> Self {
        Self::Conversation(reason)
    }
}

impl From<TemplateError> for Refused {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::Endless { turns, .. } | TemplateError::TooMuch { turns, .. } if turns < TURNS_OF_A_TALK => {
                Self::Template(error)
            }
            other => Self::Conversation(DropReason::TemplateRefuses(other.words())),
        }
    }
}

/// A conversation's text, and the bytes of it that carry loss, in order.
#[derive(Debug, PartialEq, Eq)]
struct MaskedText {
    text: String,
    learned: Vec<Range<usize>>,
}

impl ConversationRenderer<'_> {
    /// The row of a conversation, uncut, or why there is none. The text is tokenised as a whole and nothing is put around
    /// it: the template writes BOS.
    ///
    /// # Errors
    /// The tokenizer's own, and a template that does not end.
    pub(super) fn row(&self, turns: &[Turn]) -> Result<Result<ReadRow, DropReason>, RowProblem> {
        let rendered = match self.render(turns) {
            Ok(rendered) => rendered,
            Err(Refused::Conversation(reason)) => return Ok(Err(reason)),
            Err(Refused::Template(error)) => return Err(error.into()),
        };
        let (input_ids, places) = self.tokenizer.encode_with_places(&rendered.text)?;
        let labels = labels(&input_ids, &places, &rendered.learned);
        let tokens = TokenRow { input_ids, labels };
        let begins = if self.fit.is_split(&tokens) { self.exchanges(turns, &rendered.text) } else { vec![] };
        let token = |begin: usize| places.partition_point(|place| place.start < begin);
        let exchanges = begins.into_iter().map(token).collect();
        Ok(Ok(ReadRow { tokens, of: RowForm::Conversation, exchanges }))
    }

    /// Where in the text exchanges after the first begin: with a question behind an answer. Those that are not found, because the template
    /// writes a turn in another way once others follow, are left out.
    fn exchanges(&self, turns: &[Turn], whole: &str) -> Vec<usize> {
        let is_answer = |turn: &Turn| matches!(turn.role, Role::Assistant | Role::Call | Role::Tool);
        let begins = |at: &usize| turns[*at].role == Role::User && is_answer(&turns[*at - 1]);
        let questions: Vec<usize> = (1..turns.len()).filter(begins).collect();
        let messages: Vec<Message> = turns.iter().map(|turn| self.message(turn)).collect();
        match questions.len() {
            0..=RENDERED_ONE_BY_ONE => {
                questions.into_iter().filter_map(|at| self.begin_of(&messages, at, whole)).collect()
            }
            _ => self.begins_by_frame(&messages, &questions, whole).unwrap_or_default(),
        }
    }

    /// Where the text of a turn begins: behind that of the turns before it.
    fn begin_of(&self, messages: &[Message], at: usize, whole: &str) -> Option<usize> {
        let before = self.text(&messages[..at], false).ok()?;
        whole.starts_with(&before).then_some(before.len())
    }

    /// As [`Self::begin_of`] for many questions, by one rendering with marks around all of them: what the first one stands behind is what
    /// the template writes before a question.
    fn begins_by_frame(&self, messages: &[Message], questions: &[usize], whole: &str) -> Option<Vec<usize>> {
        let spans = self.all_spans(messages, questions, whole)?;
        let lead = &whole[self.begin_of(messages, questions[0], whole)?..spans[0].start];
        let begin = |span: &Range<usize>| whole[..span.start].ends_with(lead).then_some(span.start - lead.len());
        Some(spans.iter().filter_map(begin).collect())
    }

    fn render(&self, turns: &[Turn]) -> Result<MaskedText, Refused> {
        if turns.iter().all(|turn| turn.content.trim().is_empty() && turn.calls().is_none()) {
            return Err(DropReason::EmptyConversation.into());
        }
        if turns.iter().any(|turn| turn.role == Role::Unknown) {
            return Err(DropReason::UnknownRole.into());
        }
        let messages: Vec<Message> = turns.iter().map(|turn| self.message(turn)).collect();
        if self.loss_on == LossOn::All {
            let text = self.text(&messages, false)?;
            return Ok(MaskedText { learned: std::iter::once(0..text.len()).collect(), text });
        }
        let answers: Vec<usize> = (0..turns.len()).filter(|&at| self.is_learned(turns, at)).collect();
        if answers.is_empty() {
            return Err(DropReason::NoAssistantTurn.into());
        }
        if self.template.marks_generation {
            return self.render_generation(turns, &messages);
        }
        let text = self.text(&messages, false)?;
        let learned = self.answers(&messages, &answers, &text).ok_or(DropReason::AnswersNotFound)?;
        Ok(MaskedText { text, learned })
    }

    fn text(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TemplateError> {
        self.template.render_with(messages, self.inputs, add_generation_prompt)
    }

    /// Answers are learned, and calls where the template writes them in the model's own way. Calls that are text are not.
    fn is_learned(&self, turns: &[Turn], at: usize) -> bool {
        let turn = &turns[at];
        at >= self.given && (turn.role == Role::Assistant || turn.calls().is_some() && self.template.takes_calls)
    }

    fn answers(&self, messages: &[Message], answers: &[usize], whole: &str) -> Option<Vec<Range<usize>>> {
        let alone = |at: usize| self.by_prefix(messages, at, whole).or_else(|| self.by_marks(messages, at, whole));
        let example = (answers.len() > RENDERED_ONE_BY_ONE).then(|| alone(answers[1])).flatten();
        let framed = match example {
            Some(example) => self.by_frame(messages, answers, whole, example),
            None => vec![None; answers.len()],
        };
        // A call that is written in another way once others follow has no text of its own to look for: it stays masked.
        let is_call = |at: usize| messages[at].more.contains_key(CALLS);
        let found = framed.into_iter().zip(answers).map(|(known, &at)| match known.or_else(|| alone(at)) {
            None if is_call(at) => Some(None),
            found => found.map(Some),
        });
        let found: Vec<Range<usize>> = found.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect();
        (!found.is_empty()).then_some(found)
    }

    /// Where answers stand in the whole, by one rendering with marks around all of them: an answer that stands between what
    /// the second one (at `example`) stands between is learned like it. The first and the last may be written in another way.
    fn by_frame(
        &self,
        messages: &[Message],
        answers: &[usize],
        whole: &str,
        example: Range<usize>,
    ) -> Vec<Option<Range<usize>>> {
        let Some(spans) = self.all_spans(messages, answers, whole) else { return vec![None; answers.len()] };
        let framed = |span: &Range<usize>| {
            let lead = whole.get(example.start..spans[1].start)?;
            let tail = whole.get(spans[1].end..example.end).filter(|tail| !tail.trim().is_empty())?;
            let found = whole[..span.start].ends_with(lead) && whole[span.end..].starts_with(tail);
            found.then(|| span.start - lead.len()..span.end + tail.len())
        };
        let mut found: Vec<_> = spans.iter().map(framed).collect();
        found[0] = None;
        found[answers.len() - 1] = None;
        found
    }

    /// What was said in each of some turns, as the whole has it.
    fn all_spans(&self, messages: &[Message], turns: &[usize], whole: &str) -> Option<Vec<Range<usize>>> {
        let marks = Marked::marks(messages)?;
        let attempt = |around: fn(&str, [char; 2]) -> String| {
            let mut marked = messages.to_vec();
            for &at in turns {
                marked[at].content = around(&messages[at].content, marks);
            }
            let Marked { text, spans } = Marked::read(&self.text(&marked, false).ok()?, marks)?;
            (text == whole && spans.len() == turns.len()).then_some(spans)
        };
        attempt(marked_with_blanks)
            .or_else(|| attempt(marked_without_blanks))
            .or_else(|| attempt(marked_without_thoughts))
    }

    /// A turn in the template's words. A tool's answer that the template does not show is the user's, and calls that it does not show are
    /// text: they stay in sight.
    fn message(&self, turn: &Turn) -> Message {
        let has_id = turn.more.contains_key("tool_call_id");
        let role = match turn.role {
            Role::System => "system",
            Role::Assistant | Role::Call => "assistant",
            Role::Tool if self.template.takes_tool_turns || has_id && self.template.takes_tool_results => "tool",
            Role::User | Role::Tool | Role::Unknown => "user",
        };
        match turn.calls() {
            Some(calls) if !self.template.takes_calls => Message::new(role, format!("{}{calls}", turn.content)),
            _ => Message { more: turn.more.clone(), ..Message::new(role, &turn.content) },
        }
    }

    /// The template's own `{% generation %}` blocks: one for each of the assistant's turns, less those that call tools.
    fn render_generation(&self, turns: &[Turn], messages: &[Message]) -> Result<MaskedText, Refused> {
        let marked = self.template.render_generation(messages, self.inputs)?;
        let Marked { text, spans } = marked.ok_or(DropReason::AnswersNotFound)?;
        let is_assistants = |at: &usize| matches!(turns[*at].role, Role::Assistant | Role::Call);
        let mut assistants = (0..turns.len()).filter(is_assistants);
        if spans.len() == assistants.clone().count() {
            let learned = spans.into_iter().zip(assistants).filter(|(_, at)| self.is_learned(turns, *at));
            return Ok(MaskedText { text, learned: learned.map(|(span, _)| span).collect() });
        }
        if assistants.any(|at| !self.is_learned(turns, at)) {
            return Err(DropReason::AnswersNotFound.into());
        }
        Ok(MaskedText { text, learned: spans })
    }

    /// The answer is what the template writes between "now the assistant speaks" and the end of its turn. It is learned
    /// without the blanks behind the end of the turn: they belong to the next one. `None` where the conversation up to
    /// here is not how the whole begins, or where something stands between the generation prompt and the answer.
    fn by_prefix(&self, messages: &[Message], at: usize, whole: &str) -> Option<Range<usize>> {
        let before = self.text(&messages[..at], true).ok()?;
        let through = self.text(&messages[..=at], false).ok()?;
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
        let content = &messages[at].content;
        let all = [marked_with_blanks, marked_without_blanks, marked_without_thoughts];
        all.into_iter().find_map(|marked| attempt(marked(content, marks)))
    }

    fn only_span(&self, marked: &[Message], marks: [char; 2]) -> Option<(Range<usize>, String)> {
        let Marked { text, spans } = Marked::read(&self.text(marked, false).ok()?, marks)?;
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

/// Blanks at the ends are part of what was said …
fn marked_with_blanks(content: &str, [start, end]: [char; 2]) -> String {
    format!("{start}{content}{end}")
}

/// … unless the template trims them: then they are outside.
fn marked_without_blanks(content: &str, [start, end]: [char; 2]) -> String {
    let said = content.trim();
    let lead = content.len() - content.trim_start().len();
    format!("{}{start}{said}{end}{}", &content[..lead], &content[lead + said.len()..])
}

/// What a model thought stands before its answer; templates leave it out of earlier turns.
fn marked_without_thoughts(content: &str, marks: [char; 2]) -> String {
    let answer = content.rfind(END_OF_THOUGHTS).map_or(0, |at| at + END_OF_THOUGHTS.len());
    format!("{}{}", &content[..answer], marked_without_blanks(&content[answer..], marks))
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

    use super::super::chat_template::TemplateChoice;
    use super::super::long_rows::LongRows;
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

    /// A conversation of many answers, some with blanks around them, some of them equal.
    fn long_talk() -> Vec<Turn> {
        let said = ["yes", " yes", "a\nb \n", "\t</s> no", "yes", "[/INST] x", "Grüße 🙂 "];
        let turn = |at: usize| {
            Turn::new(if at.is_multiple_of(2) { Role::User } else { Role::Assistant }, said[at % said.len()])
        };
        (0..4 * RENDERED_ONE_BY_ONE).map(turn).collect()
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
            let turns = long_talk();
            let messages: Vec<Message> = turns.iter().map(|turn| chat.message(turn)).collect();
            let answers: Vec<usize> = (1..turns.len()).step_by(2).collect();
            let text = template.render(&messages, false).unwrap();
            let slow: Vec<_> = answers.iter().map(|&at| chat.by_prefix(&messages, at, &text).unwrap()).collect();
            let framed = chat.by_frame(&messages, &answers, &text, slow[1].clone());
            let found = framed.iter().flatten().count();
            assert!(found >= answers.len() / 2, "{name}: {found} of {}", answers.len());
            for (framed, slow) in framed.into_iter().zip(&slow) {
                assert!(framed.is_none_or(|framed| framed == *slow), "{name}");
            }
            assert_eq!(chat.answers(&messages, &answers, &text), Some(slow), "{name}");
            let questions: Vec<usize> = (2..turns.len()).step_by(2).collect();
            let slow: Vec<_> = questions.iter().map(|&at| chat.begin_of(&messages, at, &text).unwrap()).collect();
            assert_eq!(chat.exchanges(&turns, &text), slow, "{name}");
        }
    }

    #[test]
    fn blanks_behind_a_turn_belong_to_the_next_unless_they_end_it() {
        assert_eq!((blanks_behind("</s>\n"), blanks_behind("</s>"), blanks_behind("\n\n")), (1, 0, 0));
    }
}
