//! Conversations as data sets have them: ShareGPT's `from` and `value`, OpenAI's `role` and `content`, Alpaca's
//! `instruction`, `input` and `output`. Knows nothing of templates.

use serde_json::{Map, Value};

use super::rows::RowProblem;
use super::shown::shown;

/// The key of an assistant's calls in OpenAI's messages.
pub(super) const CALLS: &str = "tool_calls";

/// Who speaks, whatever a data set calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    System,
    User,
    Assistant,
    /// The assistant calls a tool: context, not something to learn, because every model writes calls in its own way.
    Call,
    /// What a tool answered.
    Tool,
    Unknown,
}

/// One turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) role: Role,
    pub(super) content: String,
    /// The other keys of the message, for templates that read them: `tool_calls`, `tool_call_id`, `reasoning_content`.
    pub(super) more: Map<String, Value>,
}

impl Role {
    /// The role behind the names that ShareGPT's collections and OpenAI's formats use.
    pub(super) fn named(name: &str) -> Self {
        match name.trim().to_lowercase().as_str() {
            "system" | "developer" => Self::System,
            "user" | "human" => Self::User,
            "assistant" | "gpt" | "chatgpt" | "gpt4" | "gpt-4" | "bing" | "bard" | "claude" | "model" | "bot" => {
                Self::Assistant
            }
            "function_call" | "tool_call" => Self::Call,
            "tool" | "function" | "observation" | "function_response" | "tool_response" | "tool_result" | "ipython" => {
                Self::Tool
            }
            _ => Self::Unknown,
        }
    }
}

impl Turn {
    pub(super) fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), more: Map::new() }
    }

    /// The calls of tools as the message has them. Calls that are text are part of the content.
    pub(super) fn calls(&self) -> Option<&Value> {
        self.more.get(CALLS)
    }

    /// A turn of an assistant that says nothing is a call of a tool, kept elsewhere; of others it is a mistake.
    pub(super) fn without_content(key: &str, role: Role) -> Result<Self, RowProblem> {
        match role {
            Role::Assistant | Role::Call => Ok(Self::new(Role::Call, "")),
            _ => Err(RowProblem::Value { key: key.to_owned(), expected: "a string", got: "null".to_owned() }),
        }
    }
}

/// The turns of `messages` or `conversations`.
pub(super) fn of_messages(key: &str, value: &Value) -> Result<Vec<Turn>, RowProblem> {
    let Some(messages) = value.as_array() else {
        return wrong(key, "a list of messages", value);
    };
    messages.iter().enumerate().map(|(index, message)| turn(&format!("{key}[{index}]"), message)).collect()
}

/// One user turn, the instruction and (if there is one) a blank line and the input; one assistant turn, the output.
/// Alpaca's own prompt ("Below is an instruction …") is left out: the chat template is the model's prompt.
pub(super) fn of_alpaca(instruction: &str, input: Option<&str>, output: &str) -> Vec<Turn> {
    let asked = match input.filter(|input| !input.trim().is_empty()) {
        Some(input) => format!("{instruction}\n\n{input}"),
        None => instruction.to_owned(),
    };
    vec![Turn::new(Role::User, asked), Turn::new(Role::Assistant, output)]
}

fn turn(key: &str, message: &Value) -> Result<Turn, RowProblem> {
    if !message.is_object() {
        return wrong(key, "an object with \"role\" and \"content\", or \"from\" and \"value\"", message);
    }
    let name = |names: [&'static str; 2]| names.into_iter().find(|name| !message[*name].is_null()).unwrap_or(names[0]);
    let (speaker, said) = (name(["role", "from"]), name(["content", "value"]));
    let Some(role) = message[speaker].as_str().map(Role::named) else {
        return wrong(&format!("{key}.{speaker}"), "a string", &message[speaker]);
    };
    let key = format!("{key}.{said}");
    let mut turn = match &message[said] {
        Value::String(content) => Turn::new(role, content),
        Value::Array(parts) => Turn::new(role, text_of_parts(&key, parts)?),
        Value::Null => Turn::without_content(&key, role)?,
        other => return wrong(&key, "a string or a list of text parts", other),
    };
    turn.more = other_keys(message, [speaker, said]);
    if turn.calls().is_some() {
        turn.role = Role::Call;
    }
    if message[said].is_null() {
        turn.more.insert("content".to_owned(), Value::Null); // not the same as an empty text to every template
    }
    Ok(turn)
}

/// OpenAI's content in parts: `[{"type": "text", "text": "…"}]`.
fn text_of_parts(key: &str, parts: &[Value]) -> Result<String, RowProblem> {
    let part = |(index, part): (usize, &Value)| match part["text"].as_str().or_else(|| part.as_str()) {
        Some(text) => Ok(text.to_owned()),
        None => wrong(&format!("{key}[{index}]"), "a part with \"text\"", part),
    };
    parts.iter().enumerate().map(part).collect()
}

/// The keys of a message besides those that were read. Without values of nothing: columns have them for every message.
fn other_keys(message: &Value, read: [&str; 2]) -> Map<String, Value> {
    let is_nothing = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    let keys = message.as_object().into_iter().flatten();
    keys.filter(|(key, value)| !read.contains(&key.as_str()) && !is_nothing(value))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

fn wrong<T>(key: &str, expected: &'static str, got: &Value) -> Result<T, RowProblem> {
    Err(RowProblem::Value { key: key.to_owned(), expected, got: shown(got) })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sharegpt_and_openai_name_the_same_turns() {
        let sharegpt = json!([{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "function_call", "value": "c"},
            {"from": "observation", "value": "o"}, {"from": "GPT", "value": "a"}, {"from": "moderator", "value": "x"}]);
        let roles = [Role::System, Role::User, Role::Call, Role::Tool, Role::Assistant, Role::Unknown];
        let turns: Vec<Turn> =
            roles.into_iter().zip(["s", "q", "c", "o", "a", "x"]).map(|(r, c)| Turn::new(r, c)).collect();
        assert_eq!(of_messages("conversations", &sharegpt).unwrap(), turns);
        let openai = json!([{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": "c"}, {"role": "tool", "content": "o", "tool_call_id": "1"}]);
        let read = of_messages("messages", &openai).unwrap();
        assert_eq!(
            (read[0].role, &read[1], read[2].role, read[3].role),
            (Role::System, &turns[1], Role::Assistant, Role::Tool)
        );
    }

    #[test]
    fn a_message_keeps_its_other_keys_and_none_that_is_empty() {
        let calls = json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}], "name": null},
            {"role": "assistant", "content": null}, {"role": "assistant", "content": "a", "tool_calls": []},
            {"role": "tool", "content": "r", "tool_call_id": "1"}]);
        let with = |turn: Turn, more: Value| Turn { more: more.as_object().cloned().unwrap(), ..turn };
        let expected = [
            with(Turn::new(Role::Call, ""), json!({"tool_calls": [{"id": "1"}], "content": null})),
            with(Turn::new(Role::Call, ""), json!({"content": null})),
            Turn::new(Role::Assistant, "a"),
            with(Turn::new(Role::Tool, "r"), json!({"tool_call_id": "1"})),
        ];
        assert_eq!(of_messages("messages", &calls).unwrap(), expected);
    }

    #[test]
    fn a_complaint_names_the_turn() {
        let complaint = |value| of_messages("messages", &value).unwrap_err().to_string();
        assert_eq!(complaint(json!("hi")), "messages: expected a list of messages, got \"hi\"");
        assert_eq!(complaint(json!([{"content": "a"}])), "messages[0].role: expected a string, got null");
        assert_eq!(complaint(json!([{"role": "user"}])), "messages[0].content: expected a string, got null");
        assert!(
            complaint(json!([{"role": "user", "content": 3}])).starts_with("messages[0].content: expected a string or")
        );
        assert!(complaint(json!([["user", "a"]])).starts_with("messages[0]: expected an object with"));
        let image = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]);
        assert!(complaint(image).starts_with("messages[0].content[1]: expected a part with \"text\""));
    }

    #[test]
    fn an_alpaca_row_is_one_question_and_one_answer() {
        let asked = |input| of_alpaca("Add.", input, "3").swap_remove(0).content;
        assert_eq!(
            (asked(Some("1 2")), asked(Some(" ")), asked(None)),
            ("Add.\n\n1 2".into(), "Add.".into(), "Add.".into())
        );
        assert_eq!(of_alpaca("Add.", None, "3")[1], Turn::new(Role::Assistant, "3"));
    }
}
