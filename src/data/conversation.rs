//! Conversations as data sets have them: ShareGPT's `from` and `value`, OpenAI's `role` and `content`, Alpaca's
//! `instruction`, `input` and `output`. Knows nothing of templates.

use serde_json::Value;

use super::rows::RowProblem;
use super::shown::shown;

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
        Self { role, content: content.into() }
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
    let turn = match &message[said] {
        Value::String(content) => Turn::new(role, content),
        Value::Array(parts) => Turn::new(role, text_of_parts(&key, parts)?),
        Value::Null => Turn::without_content(&key, role)?,
        other => return wrong(&key, "a string or a list of text parts", other),
    };
    Ok(with_calls(turn, &message["tool_calls"]))
}

/// OpenAI's content in parts: `[{"type": "text", "text": "…"}]`.
fn text_of_parts(key: &str, parts: &[Value]) -> Result<String, RowProblem> {
    let part = |(index, part): (usize, &Value)| match part["text"].as_str().or_else(|| part.as_str()) {
        Some(text) => Ok(text.to_owned()),
        None => wrong(&format!("{key}[{index}]"), "a part with \"text\"", part),
    };
    parts.iter().enumerate().map(part).collect()
}

/// OpenAI's calls stand beside the content.
fn with_calls(turn: Turn, calls: &Value) -> Turn {
    match calls.as_array().filter(|calls| !calls.is_empty()) {
        Some(_) => Turn::new(Role::Call, format!("{}{calls}", turn.content)),
        None => turn,
    }
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
    fn an_assistants_call_stays_and_is_not_learned() {
        let calls = json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]},
            {"role": "assistant", "content": null}, {"role": "assistant", "content": "a", "tool_calls": []}]);
        let expected =
            [Turn::new(Role::Call, r#"[{"id":"1"}]"#), Turn::new(Role::Call, ""), Turn::new(Role::Assistant, "a")];
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
