//! What a template can write, found out by rendering small conversations with it: turns of tools, calls, thoughts. Messages are put into
//! the words that it knows, so that nothing of them is left out.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::conversation::{CALLS, CONTENT, Message, THOUGHTS, arguments_as_strings};
use super::jinja;

/// What a template makes of calls of tools.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Calls {
    /// Writes them, from arguments that are an object.
    Objects,
    /// Writes them, from arguments that are a string of JSON.
    Strings,
    /// Leaves them out: they become part of the content.
    #[default]
    Unwritten,
}

/// What a template can write.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Whether a turn of the role `tool` becomes part of the text. Some templates refuse it, others leave it out.
    tool_turns: bool,
    /// The same of turns with a `tool_call_id` behind calls with ids, without which some templates refuse them.
    tool_results: bool,
    calls: Calls,
    /// Whether the content of a call may be null.
    null_content: bool,
    developer: bool,
    /// The key from which thoughts are read.
    thoughts: Option<&'static str>,
}

impl Abilities {
    /// Those of a template with this source. `render` gives nothing for a conversation that the template refuses.
    ///
    /// # Errors
    /// Those of `render`: a template that does not end.
    pub(super) fn of<E>(source: &str, render: impl Fn(&[Message]) -> Result<String, E>) -> Result<Self, E> {
        const RESULT: &str = "the result of the tool";
        let turns = [("user", "a"), ("assistant", "b"), ("tool", RESULT), ("assistant", "c")];
        let tool_turns = render(&turns.map(|(role, content)| Message::new(role, content)))?.contains(RESULT);
        let arguments = json!({"a": 1});
        let forms = [
            (Calls::Objects, true, arguments.clone()),
            (Calls::Objects, false, arguments.clone()),
            (Calls::Strings, true, arguments.to_string().into()),
            (Calls::Strings, false, arguments.to_string().into()),
        ];
        let mut found = Self { tool_turns, ..Self::default() };
        for (calls, null_content, arguments) in forms {
            let text = render(&call_and_result(&arguments, null_content))?;
            found.tool_results |= text.contains(RESULT_OF_CALL);
            if text.contains(FUNCTION) {
                (found.calls, found.null_content) = (calls, null_content);
                break;
            }
        }
        found.developer = names(source, "developer");
        found.thoughts = THOUGHTS.into_iter().find(|key| names(source, key));
        Ok(found)
    }

    /// Whether the template writes calls, as its model does.
    pub(super) fn writes_calls(&self) -> bool {
        self.calls != Calls::Unwritten
    }

    /// The messages in the template's words. A tool's answer that the template does not show is the user's, and calls that it does not show
    /// are text: they stay in sight.
    pub(super) fn adapt<'m>(&self, messages: &'m [Message]) -> Cow<'m, [Message]> {
        if messages.iter().all(|message| self.takes(message)) {
            return Cow::Borrowed(messages);
        }
        Cow::Owned(messages.iter().map(|message| self.adapted(message)).collect())
    }

    fn takes(&self, message: &Message) -> bool {
        match message.role.as_str() {
            "tool" => self.tool_role(message) == "tool",
            "developer" => self.developer,
            _ => message.more.is_empty(),
        }
    }

    fn tool_role(&self, message: &Message) -> &'static str {
        let has_id = message.more.contains_key("tool_call_id");
        if self.tool_turns || has_id && self.tool_results { "tool" } else { "user" }
    }

    fn adapted(&self, message: &Message) -> Message {
        let mut adapted = message.clone();
        match message.role.as_str() {
            "tool" => self.tool_role(message).clone_into(&mut adapted.role),
            "developer" if !self.developer => "system".clone_into(&mut adapted.role),
            _ => {}
        }
        self.adapt_thoughts(&mut adapted.more);
        match (self.calls, message.calls()) {
            (Calls::Unwritten, Some(calls)) => {
                adapted.content += &calls.as_str().map_or_else(|| calls.to_string(), str::to_owned);
                adapted.more.shift_remove(CALLS);
            }
            (Calls::Strings, Some(_)) => arguments_as_strings(adapted.more.get_mut(CALLS), jinja::python_json),
            _ => {}
        }
        if !self.null_content {
            adapted.more.shift_remove(CONTENT);
        }
        adapted
    }

    /// Thoughts under another key than the template reads.
    fn adapt_thoughts(&self, more: &mut Map<String, Value>) {
        let Some(read) = self.thoughts.filter(|read| !more.contains_key(*read)) else { return };
        let thought = THOUGHTS.into_iter().find_map(|key| more.shift_remove(key).filter(Value::is_string));
        more.extend(thought.map(|thought| (read.to_owned(), thought)));
    }
}

/// Whether a template's source has this word as a string or as a key.
pub(super) fn names(source: &str, word: &str) -> bool {
    let is_named = |(at, _): (usize, &str)| {
        let (before, behind) = (&source[..at], &source[at + word.len()..]);
        let quoted = |quote| before.ends_with(quote) && behind.starts_with(quote);
        let is_key = before.ends_with('.') && !behind.starts_with(|next: char| next.is_alphanumeric() || next == '_');
        is_key || quoted('\'') || quoted('"')
    };
    source.match_indices(word).any(is_named)
}

/// Whether a template has a variable: its name is a word of its own there.
pub(super) fn has_variable(source: &str, name: &str) -> bool {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    let is_word =
        |(at, _): (usize, &str)| !source[..at].ends_with(is_part) && !source[at + name.len()..].starts_with(is_part);
    source.match_indices(name).any(is_word)
}

const FUNCTION: &str = "name_of_the_function";
const RESULT_OF_CALL: &str = "result_of_the_call";

fn call_and_result(arguments: &Value, null_content: bool) -> [Message; 4] {
    const ID: &str = "abcdefghi"; // Mistral's have nine characters
    let call = json!([{"id": ID, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}}]);
    let with =
        |message: Message, more: Value| Message { more: more.as_object().cloned().unwrap_or_default(), ..message };
    let mut asks = json!({CALLS: call});
    if null_content {
        asks[CONTENT] = Value::Null;
    }
    [
        Message::new("user", "a"),
        with(Message::new("assistant", ""), asks),
        with(Message::new("tool", RESULT_OF_CALL), json!({"name": FUNCTION, "tool_call_id": ID})),
        Message::new("assistant", "b"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Abilities of a template that is a function.
    fn of(source: &str, render: impl Fn(&Message) -> String) -> Abilities {
        Abilities::of::<()>(source, |messages| Ok(messages.iter().map(&render).collect())).unwrap()
    }

    #[test]
    fn a_variable_is_a_word_of_its_own() {
        let source = "{% if tools and enable_thinking is defined %}{{ message.documents }}{% endif %}";
        assert!(has_variable(source, "tools") && has_variable(source, "enable_thinking"));
        assert!(!has_variable(source, "enable_thinkin") && !has_variable(source, "tool"));
    }

    #[test]
    fn a_tool_turn_is_taken_only_if_it_is_shown() {
        let result = [Message::new("tool", "3")];
        assert_eq!(of("", |m| m.content.clone()).adapt(&result)[0].role, "tool");
        assert_eq!(
            of("", |m| if m.role == "tool" { String::new() } else { m.content.clone() }).adapt(&result)[0].role,
            "user"
        );
    }

    #[test]
    fn calls_are_written_in_the_words_of_the_template_or_become_text() {
        let mut call = Message::new("assistant", "Wait. ");
        let function = json!([{"function": {"name": "f", "arguments": {"a": "b", "c": 1}}}]);
        call.more.extend([(CALLS.to_owned(), function.clone())]);
        let calls = [call];
        let deaf = of("", |m| m.content.clone()).adapt(&calls)[0].clone();
        assert_eq!((deaf.content, deaf.more.len()), (format!("Wait. {function}"), 0));
        let written = |m: &Message| m.calls().map(|calls| calls[0].to_string()).unwrap_or_default();
        assert_eq!(of("", written).adapt(&calls)[0], calls[0]);
        let string_calls = |m: &Message| match m.calls() {
            Some(calls) if calls[0]["function"]["arguments"].is_string() => calls[0].to_string(),
            _ => String::new(),
        };
        let arguments = of("", string_calls).adapt(&calls)[0].calls().unwrap()[0]["function"]["arguments"].clone();
        assert_eq!(arguments, r#"{"a": "b", "c": 1}"#);
    }

    #[test]
    fn a_content_of_null_is_empty_for_a_template_that_refuses_it() {
        let null = Message {
            more: json!({CONTENT: null, CALLS: [1]}).as_object().cloned().unwrap(),
            ..Message::new("assistant", "")
        };
        let strict = |m: &Message| {
            if m.more.contains_key(CONTENT) {
                String::new()
            } else {
                m.calls().map(Value::to_string).unwrap_or_default()
            }
        };
        assert!(!of("", strict).adapt(std::slice::from_ref(&null))[0].more.contains_key(CONTENT));
        let lax = |m: &Message| m.calls().map(Value::to_string).unwrap_or_default();
        assert!(of("", lax).adapt(&[null])[0].more.contains_key(CONTENT));
    }

    #[test]
    fn other_words_for_developers_and_thoughts_are_translated() {
        let plain = of("{{ m.reasoning_content }}", |m| m.content.clone());
        let thought = |key: &str| {
            let mut message = Message::new("assistant", "a");
            message.more.insert(key.to_owned(), "t".into());
            message
        };
        assert_eq!(
            plain.adapt(&[Message::new("developer", "d"), thought("reasoning")])[..],
            [Message::new("system", "d"), thought("reasoning_content")]
        );
        let harmony = of("m.role == 'developer'", |m| m.content.clone());
        assert_eq!(
            harmony.adapt(&[Message::new("developer", "d"), thought("reasoning")])[..],
            [Message::new("developer", "d"), thought("reasoning")]
        );
    }
}
