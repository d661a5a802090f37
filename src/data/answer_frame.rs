//! What a template writes around an answer: the header of the assistant's turn and its end. All between them is what the model writes, and
//! carries loss. Knows nothing of tokens.

use super::conversation::Message;
use super::marked::WrittenText;

/// Shortest suffix of a header that identifies one, in bytes.
const SHORTEST_SIGN: usize = 3;

/// What a template writes around an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AnswerFrame {
    /// From the end of what the user said to where the model goes on.
    header: String,
    /// Behind the answer, where it is the last one.
    behind_last: String,
    /// Behind the answer, up to what is said next.
    behind_inner: String,
}

impl AnswerFrame {
    /// Derives the frame from three renderings of a short conversation. The header is what all of them have, the one that opens the assistant's
    /// turn among them: templates open thoughts behind it.
    pub(super) fn of(render: impl Fn(&[Message], bool) -> Option<WrittenText>) -> Option<Self> {
        let turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")];
        let turns = turns.map(|(role, content)| Message::new(role, content));
        let (opened, short, long) = (render(&turns[..1], true)?, render(&turns[..2], false)?, render(&turns, false)?);
        let [_, before_opened] = around(&opened, 0);
        let [before_short, behind_last] = around(&short, 1);
        let ([before_first, behind_inner], [before_second, _]) = (around(&long, 1), around(&long, 3));
        let header = header_of(before_opened, before_short);
        let in_all = common(common(header, before_first), before_second);
        let header = if in_all.trim().is_empty() { header } else { in_all };
        let frame = Self {
            header: header.to_owned(),
            behind_last: behind_last.to_owned(),
            behind_inner: behind_inner.to_owned(),
        };
        (!header.trim().is_empty()).then_some(frame)
    }

    /// Where in `before`, the template's text before an answer, its header ends, if it is the header behind a user's turn. `others` is the
    /// number of answers in `before`, none of which has a string there; the template may leave some of them out.
    pub(super) fn header_end(&self, before: &str, others: usize) -> Option<usize> {
        before.match_indices(&self.header).take(others + 1).last().map(|(at, header)| at + header.len())
    }

    /// Length of the turn's header within `header`: up to the longest suffix of the usual header. The rest opens thoughts.
    pub(super) fn without_thoughts(&self, header: &str) -> usize {
        self.sign_in(header).unwrap_or(header.len())
    }

    /// Whether a message says what looks like the header.
    pub(super) fn is_said_in(&self, content: &str) -> bool {
        content.contains(self.header.trim())
    }

    /// Where in `before` the longest end of the header that it has ends.
    pub(super) fn sign_in(&self, before: &str) -> Option<usize> {
        let ends = self.header.char_indices().map(|(at, _)| &self.header[at..]);
        let long = ends.filter(|end| end.trim().len() >= SHORTEST_SIGN);
        long.filter_map(|end| before.rfind(end).map(|at| at + end.len())).next()
    }

    /// Where in `behind`, the template's text behind an answer that others follow, the end of its turn ends. `special` gives the length of the
    /// special token that a text begins with.
    pub(super) fn end_in(&self, behind: &str, special: impl Fn(&str) -> Option<usize>) -> Option<usize> {
        let as_last = ending(&self.behind_last);
        let end = if !as_last.is_empty() && self.behind_inner.starts_with(as_last) {
            as_last
        } else {
            let inner = self.behind_inner.trim_start();
            &inner[..special(inner)?]
        };
        let end = if end.trim().is_empty() { end } else { end.trim_start() };
        behind.find(end).map(|at| at + end.len())
    }
}

/// What stands behind a turn without the blanks at its end, which belong to the next one, unless they are how it ends.
pub(super) fn ending(behind: &str) -> &str {
    match behind.trim_end() {
        "" => behind,
        written => written,
    }
}

/// How much of `before`, the template's text before an answer, is the header of its turn: what `opened` has, the text that lets the assistant
/// speak. One of the two may go on with thoughts. Where both go on the template opens no turn, and all is the header.
pub(super) fn header_of<'t>(opened: &str, before: &'t str) -> &'t str {
    let both = common(before, opened);
    if both.len() == opened.len() { both } else { before }
}

/// What two texts begin with.
fn common<'t>(a: &'t str, b: &str) -> &'t str {
    let differs = a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b).map(|((at, _), _)| at);
    &a[..differs.unwrap_or(a.len().min(b.len()))]
}

fn around(written: &WrittenText, message: usize) -> [&str; 2] {
    written.around(message).map(|place| &written.text[place])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(chat: impl Fn(&Message, bool) -> String, opening: &str) -> AnswerFrame {
        let render = |messages: &[Message], opened: bool| {
            let render = |messages: &[Message]| -> Result<String, ()> {
                let text: String = messages
                    .iter()
                    .zip(1..)
                    .map(|(message, at)| chat(message, at == messages.len() && !opened))
                    .collect();
                Ok(if opened { text + opening } else { text })
            };
            WrittenText::of(messages, render).ok()
        };
        AnswerFrame::of(render).unwrap()
    }

    #[test]
    fn thoughts_that_a_template_opens_are_behind_the_header() {
        let chatml = |m: &Message, is_last: bool| {
            let thoughts = if m.role == "assistant" && is_last { "<think>\n\n</think>\n\n" } else { "" };
            format!("<s>{}\n{thoughts}{}<e>\n", m.role, m.content)
        };
        for opening in ["<s>assistant\n", "<s>assistant\n<think>\n"] {
            let frame = of(chatml, opening);
            assert_eq!(frame.header, "<e>\n<s>assistant\n");
            assert_eq!(frame.header_end(" <e>\n<s>assistant\n<think>\n", 0), Some(18));
            assert_eq!(frame.without_thoughts("</r><e>\n<s>assistant\n<think>\n"), 21);
            assert_eq!(frame.sign_in("<s>assistant\n"), Some(13));
            assert_eq!(frame.end_in("}</call><e>\n<s>", |_| None), Some(11));
        }
    }

    #[test]
    fn an_end_of_the_text_is_not_the_end_of_a_turn() {
        let closed = |m: &Message, is_last: bool| {
            format!("<{}> {}<e>{}", m.role, m.content, if is_last { "\n<eos>" } else { "" })
        };
        let frame = of(closed, "<assistant>");
        assert_eq!(frame.header, "<e><assistant>");
        assert_eq!(frame.end_in(" <e><user>", |text| text.starts_with("<e>").then_some(3)), Some(4));
        assert_eq!(frame.end_in(" <e><user>", |_| None), None);
    }

    #[test]
    fn blanks_end_a_turn_only_where_nothing_else_does() {
        assert_eq!((ending("</s>\n"), ending("</s>"), ending("\n\n"), ending("")), ("</s>", "</s>", "\n\n", ""));
        assert_eq!((common("äb", "äc"), common("a", "ab"), common("", "a")), ("ä", "a", ""));
    }
}
