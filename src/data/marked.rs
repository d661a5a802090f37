//! Finds what a template makes of each message: the strings of the messages are rendered a second time, each between two marks. What
//! stands outside of marks was written by the template, whatever the messages say.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value;

use super::conversation::{Message, THOUGHTS};

const END_OF_THOUGHTS: &str = "</think>";
const START_OF_THOUGHTS: &str = "<think>";
/// The most renderings in search of messages whose marks change the text; each takes as long as the conversation.
const MOST_ATTEMPTS: usize = 64;

/// Three characters that no message has, from those that Unicode keeps for a program's own use (noncharacters). A mark is one of the first
/// two, a number, and the third.
#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    start: char,
    end: char,
    stop: char,
}

/// How the content of a message is marked, in the order in which it is tried. Templates trim, cut or compare what was said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marking {
    /// What was said, thoughts and answer apart.
    Parts,
    LastWord,
    Nothing,
}

/// A string of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MarkedString {
    message: usize,
    /// Whether any of it is in the text.
    is_written: bool,
}

/// A rendered text, and where the strings of its messages stand.
#[derive(Debug, Default)]
pub(super) struct WrittenText {
    pub(super) text: String,
    /// Where in the text each mark stands, and the message that it belongs to, in order.
    marks: Vec<(usize, usize)>,
    /// For each of them, whether its string stood in the text before.
    is_repeated: Vec<bool>,
    strings: Vec<MarkedString>,
    /// For each message with strings, its first mark; `None` where the text has none of them.
    first_marks: BTreeMap<usize, Option<usize>>,
}

impl Marks {
    /// Marks for these messages, if any characters are left.
    pub(super) fn free(messages: &[Message]) -> Option<Self> {
        let has = |message: &Message, mark: char| {
            message.content.contains(mark) || message.more.values().any(|value| has_character(value, mark))
        };
        let mut free = ('\u{fdd0}'..='\u{fdef}').filter(|mark| !messages.iter().any(|message| has(message, *mark)));
        Some(Self { start: free.next()?, end: free.next()?, stop: free.next()? })
    }

    /// `said` between marks; blanks at its ends stay outside, where templates may trim them.
    fn around(&self, said: &str, number: usize) -> String {
        let Self { start, end, stop } = self;
        let words = said.trim();
        let lead = said.len() - said.trim_start().len();
        let (before, behind) = (&said[..lead], &said[lead + words.len()..]);
        format!("{before}{start}{number}{stop}{words}{end}{number}{stop}{behind}")
    }
}

fn has_character(value: &Value, character: char) -> bool {
    match value {
        Value::String(text) => text.contains(character),
        Value::Array(items) => items.iter().any(|item| has_character(item, character)),
        Value::Object(pairs) => {
            pairs.iter().any(|(key, value)| key.contains(character) || has_character(value, character))
        }
        _ => false,
    }
}

/// Puts marks into messages and counts them.
struct Marker {
    marks: Marks,
    /// The message of each marked string.
    messages: Vec<usize>,
}

impl Marker {
    fn around(&mut self, said: &str, message: usize) -> String {
        if said.trim().is_empty() {
            return said.to_owned();
        }
        self.messages.push(message);
        self.marks.around(said, self.messages.len() - 1)
    }

    fn message<'m>(&mut self, message: &'m Message, at: usize, marking: Marking) -> Cow<'m, Message> {
        if marking == Marking::Nothing {
            return Cow::Borrowed(message);
        }
        let mut marked = message.clone();
        marked.content = match marking {
            Marking::LastWord => self.last_word(&message.content, at),
            _ if message.is_from_assistant() => self.thoughts_and_answer(&message.content, at),
            _ => self.around(&message.content, at),
        };
        if message.is_from_assistant() {
            for key in THOUGHTS {
                if let Some(Value::String(thought)) = marked.more.get_mut(key) {
                    *thought = self.around(thought, at);
                }
            }
            self.calls(&mut marked, at);
        }
        Cow::Owned(marked)
    }

    fn last_word(&mut self, said: &str, at: usize) -> String {
        let end = said.trim_end().len();
        let begin = said[..end]
            .rfind(char::is_whitespace)
            .map_or(0, |blank| blank + said[blank..].chars().next().map_or(0, char::len_utf8));
        format!("{}{}{}", &said[..begin], self.around(&said[begin..end], at), &said[end..])
    }

    fn thoughts_and_answer(&mut self, said: &str, at: usize) -> String {
        let Some(first_end) = said.find(END_OF_THOUGHTS) else { return self.around(said, at) };
        let last_end = said.rfind(END_OF_THOUGHTS).unwrap_or(first_end) + END_OF_THOUGHTS.len();
        let begin = said[..first_end].find(START_OF_THOUGHTS).map_or(0, |begin| begin + START_OF_THOUGHTS.len());
        let thought = self.around(&said[begin..first_end], at);
        let answer = self.around(&said[last_end..], at);
        format!("{}{thought}{}{answer}", &said[..begin], &said[first_end..last_end])
    }

    /// Names and arguments of calls; ids are compared by templates.
    fn calls(&mut self, message: &mut Message, at: usize) {
        for call in message.more.get_mut(super::conversation::CALLS).and_then(Value::as_array_mut).into_iter().flatten()
        {
            let function = if call["function"].is_object() { &mut call["function"] } else { call };
            for key in ["name", "arguments"] {
                if let Some(value) = function.get_mut(key) {
                    self.strings(value, at);
                }
            }
        }
    }

    fn strings(&mut self, value: &mut Value, at: usize) {
        match value {
            Value::String(text) => *text = self.around(text, at),
            Value::Array(items) => items.iter_mut().for_each(|item| self.strings(item, at)),
            Value::Object(pairs) => pairs.values_mut().for_each(|value| self.strings(value, at)),
            _ => {}
        }
    }
}

/// Marks all messages whose marks leave the text unchanged. Where some of `markings` change it, each half is tried on its own; `first` is the
/// number of the first one.
fn mark_halves(markings: &mut [Marking], first: usize, is_unchanged: &mut impl FnMut(Range<usize>, Marking) -> bool) {
    let all = first..first + markings.len();
    let fitting = if markings.len() == 1 { &[Marking::Parts, Marking::LastWord][..] } else { &[Marking::Parts] };
    if let Some(marking) = fitting.iter().find(|marking| is_unchanged(all.clone(), **marking)) {
        markings.fill(*marking);
    } else if markings.len() > 1 {
        let (left, right) = markings.split_at_mut(markings.len() / 2);
        let second = first + left.len();
        mark_halves(left, first, is_unchanged);
        mark_halves(right, second, is_unchanged);
    }
}

impl WrittenText {
    /// The text that `render` makes of the messages, and where their strings stand in it. Marks that change the text are left out; a message
    /// without any is taken as written. `None` where `render` refuses the messages, with its error.
    pub(super) fn of<E>(messages: &[Message], render: impl Fn(&[Message]) -> Result<String, E>) -> Result<Self, E> {
        let text = render(messages)?;
        let without = |text| Self { text, ..Self::default() };
        let Some(marks) = Marks::free(messages) else { return Ok(without(text)) };
        let attempt = |markings: &[Marking]| {
            let mut marker = Marker { marks, messages: vec![] };
            let turns = messages.iter().zip(markings).enumerate();
            let marked: Vec<Message> =
                turns.map(|(at, (message, marking))| marker.message(message, at, *marking).into_owned()).collect();
            let written = Self::read(&render(&marked).ok()?, marks, &marker.messages)?;
            (written.text == text).then_some(written)
        };
        if let Some(written) = attempt(&vec![Marking::Parts; messages.len()]) {
            return Ok(written);
        }
        let mut markings = vec![Marking::Nothing; messages.len()];
        let mut attempts = MOST_ATTEMPTS;
        let mut is_unchanged = |place: Range<usize>, marking: Marking| {
            let mut only = vec![Marking::Nothing; messages.len()];
            only[place].fill(marking);
            attempts = attempts.saturating_sub(1);
            attempts > 0 && attempt(&only).is_some()
        };
        mark_halves(&mut markings, 0, &mut is_unchanged);
        Ok(attempt(&markings).unwrap_or_else(|| without(text)))
    }

    /// Takes the marks out; `None` where something else stands in one.
    fn read(marked: &str, Marks { start, end, stop }: Marks, messages: &[usize]) -> Option<Self> {
        let mut strings: Vec<MarkedString> =
            messages.iter().map(|&message| MarkedString { message, is_written: false }).collect();
        let (mut text, mut marks, mut rest) = (String::with_capacity(marked.len()), Vec::new(), marked);
        let (mut is_repeated, mut seen) = (Vec::new(), vec![0_usize; messages.len()]);
        let mut first_marks: BTreeMap<usize, Option<usize>> = messages.iter().map(|&message| (message, None)).collect();
        while let Some(at) = rest.find([start, end]) {
            text += &rest[..at];
            let (number, behind) = rest[at..].split_once(stop)?;
            let number: usize = number.trim_start_matches([start, end]).parse().ok()?;
            let string = strings.get_mut(number)?;
            string.is_written = true;
            is_repeated.push(seen[number] > 1);
            seen[number] += 1;
            first_marks.entry(string.message).or_default().get_or_insert(marks.len());
            marks.push((text.len(), string.message));
            rest = behind;
        }
        text += rest;
        Some(Self { text, marks, is_repeated, strings, first_marks })
    }

    /// The first message of which the text has nothing, though it says something, among those for which `counts` is true.
    pub(super) fn unwritten(&self, counts: impl Fn(usize) -> bool) -> Option<usize> {
        let unwritten = self.first_marks.iter().filter(|(_, first)| first.is_none());
        unwritten.map(|(&message, _)| message).find(|&message| counts(message))
    }

    /// How many messages are written without one of their strings.
    pub(super) fn shortened(&self) -> usize {
        let mut shortened: Vec<usize> =
            self.strings.iter().filter(|string| !string.is_written).map(|string| string.message).collect();
        shortened.dedup();
        shortened.len()
    }

    /// Whether any string of a message is in the text.
    pub(super) fn is_marked(&self, message: usize) -> bool {
        self.first_mark(message).is_some()
    }

    /// Whether a message has strings, and none of them is in the text.
    pub(super) fn is_left_out(&self, message: usize) -> bool {
        self.first_marks.get(&message).is_some_and(Option::is_none)
    }

    fn first_mark(&self, message: usize) -> Option<usize> {
        self.first_marks.get(&message).copied().flatten()
    }

    /// The text behind all that was said.
    pub(super) fn after_last(&self) -> &str {
        &self.text[self.end_before(self.marks.len())..]
    }

    /// Where the text of the template around a message stands: from the end of what an earlier message said to the beginning of what
    /// this one says, and from the end of that to the beginning of what a later one says. A message of which nothing is marked has the same
    /// place on both sides.
    pub(super) fn around(&self, message: usize) -> [Range<usize>; 2] {
        let Some(first) = self.first_mark(message) else {
            let next = self.first_marks.range(message..).find_map(|(_, first)| *first).unwrap_or(self.marks.len());
            let place = self.end_before(next)..self.begin_at(next);
            return [place.clone(), place];
        };
        let others = self.marks[first..].iter().position(|&(_, of)| of != message);
        let next = others.map_or(self.marks.len(), |others| first + others);
        [self.end_before(first)..self.marks[first].0, self.marks[next - 1].0..self.begin_at(next)]
    }

    /// The text of the template behind a message up to where it repeats a string of it, if it does: templates write the name of a function
    /// again with its result.
    pub(super) fn before_repeated(&self, message: usize) -> Option<Range<usize>> {
        let first = self.first_mark(message)?;
        let repeated =
            (first..self.marks.len()).find(|&mark| self.marks[mark].1 == message && self.is_repeated[mark])?;
        Some(self.end_before(repeated)..self.begin_at(repeated))
    }

    fn end_before(&self, mark: usize) -> usize {
        mark.checked_sub(1).map_or(0, |before| self.marks[before].0)
    }

    fn begin_at(&self, mark: usize) -> usize {
        self.marks.get(mark).map_or(self.text.len(), |mark| mark.0)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn written(messages: &[Message], render: impl Fn(&[Message]) -> String) -> WrittenText {
        WrittenText::of::<()>(messages, |messages| Ok(render(messages))).unwrap()
    }

    #[test]
    fn a_character_is_found_in_one_item_of_many() {
        let call = json!([{"id": 1, "arguments": {"a": ["b", "x"], "c": null}}]);
        assert_eq!(
            ['b', 'x', 'c', 'i', 'z'].map(|letter| has_character(&call, letter)),
            [true, true, true, true, false]
        );
    }

    fn around(written: &WrittenText, message: usize) -> [&str; 2] {
        written.around(message).map(|place| &written.text[place])
    }

    fn conversation() -> Vec<Message> {
        [("user", " a] "), ("assistant", "[a] b"), ("user", ""), ("assistant", "b\n")]
            .map(|(r, c)| Message::new(r, c))
            .into()
    }

    #[test]
    fn what_the_template_writes_is_distinguished_from_what_was_said() {
        let chat =
            |messages: &[Message]| messages.iter().map(|m| format!("[{}] {};", m.role, m.content.trim())).collect();
        let written = written(&conversation(), chat);
        assert_eq!(written.text, "[user] a];[assistant] [a] b;[user] ;[assistant] b;");
        assert_eq!(
            (around(&written, 0), around(&written, 1)),
            (["[user] ", ";[assistant] "], [";[assistant] ", ";[user] ;[assistant] "])
        );
        assert_eq!(
            (around(&written, 2), around(&written, 3)),
            ([";[user] ;[assistant] "; 2], [";[user] ;[assistant] ", ";"])
        );
        assert_eq!((written.unwritten(|_| true), written.shortened()), (None, 0));
    }

    #[test]
    fn thoughts_that_a_template_leaves_out_are_counted() {
        let messages = [Message::new("assistant", "<think>\nx\n</think>\n\ny"), Message::new("user", "z")];
        let last = |messages: &[Message]| {
            messages.iter().map(|m| m.content.split("</think>").last().unwrap().trim().to_owned()).collect()
        };
        let written = written(&messages, last);
        assert_eq!((written.text.as_str(), written.shortened(), written.unwritten(|_| true)), ("yz", 1, None));
    }

    #[test]
    fn a_message_that_is_not_written_is_named() {
        let users =
            |messages: &[Message]| messages.iter().filter(|m| m.role == "user").map(|m| m.content.clone()).collect();
        let messages = [Message::new("user", "a"), Message::new("developer", "b"), Message::new("developer", " ")];
        let written = written(&messages, users);
        assert_eq!((written.unwritten(|_| true), written.unwritten(|at| at == 0)), (Some(1), None));
    }

    /// A template that looks at what was said: marks change its text.
    fn shouting(messages: &[Message]) -> String {
        messages.iter().map(|m| if m.content.starts_with("Hi") { "!" } else { &m.content }).collect()
    }

    #[test]
    fn marks_that_change_the_text_are_left_out() {
        let messages = [Message::new("user", "Hi there"), Message::new("user", "b")];
        let written = written(&messages, shouting);
        assert_eq!((written.text.as_str(), around(&written, 1)), ("!b", ["!", ""]));
        assert_eq!(written.unwritten(|_| true), Some(0));
        let counting = |messages: &[Message]| messages.iter().map(|m| m.content.len().to_string()).collect();
        let written = self::written(&messages, counting);
        assert_eq!((written.text.as_str(), written.unwritten(|_| true)), ("81", None));
    }

    #[test]
    fn messages_whose_marks_change_the_text_are_found_by_halves() {
        let said = |at: usize| if [100, 700].contains(&at) { "Hi there".to_owned() } else { format!("<{at}>") };
        let messages: Vec<Message> = (0..1000).map(|at| Message::new("user", said(at))).collect();
        let renderings = std::cell::Cell::new(0);
        let written = written(&messages, |messages| {
            renderings.set(renderings.get() + 1);
            shouting(messages)
        });
        let unmarked: Vec<usize> = (0..1000).filter(|&at| !written.is_marked(at)).collect();
        assert_eq!(unmarked, [100, 700]);
        assert!(renderings.get() < 50, "{} renderings", renderings.get());
    }

    #[test]
    fn a_string_that_is_written_again_is_known() {
        let mut call = Message::new("assistant", "");
        call.more.insert("tool_calls".to_owned(), json!([{"function": {"name": "f", "arguments": {}}}]));
        let name = |message: &Message| message.more["tool_calls"][0]["function"]["name"].as_str().unwrap().to_owned();
        let twice = |messages: &[Message]| {
            format!("to={}<call>result of {}: {}", name(&messages[0]), name(&messages[0]), messages[1].content)
        };
        let written = written(&[call, Message::new("tool", "r")], twice);
        assert_eq!(around(&written, 0), ["to=", ": "]);
        assert_eq!(written.before_repeated(0).map(|place| &written.text[place]), Some("<call>result of "));
        assert_eq!(written.before_repeated(1), None);
    }

    #[test]
    fn calls_are_marked_and_no_character_of_a_message_is_a_mark() {
        let mut call = Message::new("assistant", "\u{fdd0}");
        call.more.insert(
            "tool_calls".to_owned(),
            json!([{"function": {"name": "f", "arguments": {"a": ["x", 1], "b": "\u{fdd2}"}}}]),
        );
        let marks = Marks::free(std::slice::from_ref(&call)).unwrap();
        assert_eq!([marks.start, marks.end, marks.stop], ['\u{fdd1}', '\u{fdd3}', '\u{fdd4}']);
        let json = |messages: &[Message]| format!("{}{}", messages[0].content, messages[0].more["tool_calls"]);
        let written = written(&[call], json);
        assert_eq!(around(&written, 0), ["", "\"}}}]"]);
        assert!(Marks::free(&[Message::new("user", ('\u{fdd0}'..='\u{fded}').collect::<String>())]).is_none());
    }
}
