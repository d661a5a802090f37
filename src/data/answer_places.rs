//! Where in a rendered conversation the model's answers stand: each from the end of its turn's header to the end of the turn.

use std::collections::BTreeSet;
use std::ops::Range;

use super::answer_frame::{ending, header_of};
use super::chat_template::ChatTemplate;
use super::conversation::{Message, TemplateInputs};
use super::marked::WrittenText;
use super::tokenize::TextTokenizer;

/// Finds the answers of a conversation. Headers and ends that took a rendering of their own are kept for the later answers: each rendering
/// takes as long as the conversation.
pub(super) struct AnswerPlaces<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) inputs: &'a TemplateInputs,
    pub(super) tokenizer: &'a TextTokenizer,
    pub(super) messages: &'a [Message],
    pub(super) written: &'a WrittenText,
    pub(super) known: KnownFrames,
}

/// Headers and ends of answers that were found.
#[derive(Default)]
pub(super) struct KnownFrames {
    headers: BTreeSet<String>,
    ends: BTreeSet<String>,
}

impl AnswerPlaces<'_> {
    /// What the model writes in each of these turns. `None` where one is in the text and cannot be found in it. Turns that the template leaves
    /// out have no place.
    pub(super) fn of(&mut self, answers: &[usize]) -> Option<Vec<Range<usize>>> {
        let mut found = Vec::with_capacity(answers.len());
        for &at in answers.iter().filter(|at| !self.written.is_left_out(**at)) {
            if !self.written.is_marked(at) && !self.messages[at].is_empty() {
                return None;
            }
            found.push(self.place(at)?);
        }
        Some(found)
    }

    fn place(&mut self, at: usize) -> Option<Range<usize>> {
        let [before, behind] = self.written.around(at);
        let begin = before.start + self.header_end(at, &self.written.text[before])?;
        let place = self.end_behind(at, begin, behind);
        Some(begin..place.or_else(|| self.end_behind(at, begin, self.written.before_repeated(at)?))?)
    }

    fn end_behind(&mut self, at: usize, begin: usize, behind: Range<usize>) -> Option<usize> {
        let said = behind.start.max(begin);
        Some(said + self.turn_end(at, self.written.text.get(said..behind.end)?)?)
    }

    /// Where the header of a turn ends in the text of the template before it.
    fn header_end(&mut self, at: usize, before: &str) -> Option<usize> {
        let frame = self.template.frame.as_ref();
        let others = self.answers_without_place_before(at)?;
        if let Some(usual) = frame.and_then(|frame| frame.header_end(before, others)) {
            return Some(usual);
        }
        if let Some(header) = self.known.headers.iter().find(|header| before.starts_with(header.as_str())) {
            return Some(header.len());
        }
        self.opened_header(at, before).or_else(|| frame?.sign_in(before))
    }

    /// Behind others than the user's turns, the header is what the template writes to let the assistant speak.
    fn opened_header(&mut self, at: usize, before: &str) -> Option<usize> {
        let opened = self.template.written(&self.messages[..at], self.inputs, true).ok()?;
        let header = header_of(opened.after_last(), before);
        let frame = self.template.frame.as_ref();
        let end = frame.map_or(header.len(), |frame| frame.without_thoughts(header));
        if end > 0 {
            self.known.headers.insert(before[..end].to_owned());
        }
        Some(end)
    }

    /// How many answers without a place in the text stand between this message and the last one before it that has one. `None` where a
    /// message between them says what a header is: it could not be distinguished from one.
    fn answers_without_place_before(&self, at: usize) -> Option<usize> {
        let mut answers = 0;
        for earlier in (0..at).rev().take_while(|&earlier| !self.written.is_marked(earlier)) {
            if self.template.frame.as_ref().is_some_and(|frame| frame.is_said_in(&self.messages[earlier].content)) {
                return None;
            }
            answers += usize::from(self.messages[earlier].is_from_assistant());
        }
        Some(answers)
    }

    /// How much of the text of the template behind an answer ends its turn. Templates may end the last turn in a way of its own, or the whole
    /// text with EOS.
    fn turn_end(&mut self, at: usize, behind: &str) -> Option<usize> {
        if at + 1 == self.messages.len() {
            return Some(ending(behind).len());
        }
        let special = |text: &str| self.tokenizer.special_token_at(text);
        if let Some(usual) = self.template.frame.as_ref().and_then(|frame| frame.end_in(behind, special)) {
            return Some(usual);
        }
        if let Some(end) = self.known.ends.iter().find(|end| behind.starts_with(end.as_str())) {
            return Some(end.len());
        }
        self.end_as_last(at, behind).or_else(|| special(behind))
    }

    /// The end of the turn where it is the last one, if the turn ends so here, too.
    fn end_as_last(&mut self, at: usize, behind: &str) -> Option<usize> {
        let alone = self.template.written(&self.messages[..=at], self.inputs, false).ok()?;
        let end = ending(alone.after_last());
        if end.is_empty() || !behind.starts_with(end) {
            return None;
        }
        self.known.ends.insert(end.to_owned());
        Some(end.len())
    }
}
