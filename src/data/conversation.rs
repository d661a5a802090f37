//! Conversations as data sets, prompt files and clients of the server have them: OpenAI's `role` and `content`, ShareGPT's `from` and
//! `value`, Alpaca's `instruction`, `input` and `output`. Every command reads them here. Knows nothing of templates.

use minijinja::value::{Serde, Value as TemplateValue};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// The key of an assistant's calls in OpenAI's messages.
pub(super) const CALLS: &str = "tool_calls";
/// Keys under which a message has what its model thought, apart from what it said.
pub(super) const THOUGHTS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];
/// Keys that say whether a turn carries loss: OpenAI's, axolotl's, ms-swift's.
const LOSS: [&str; 3] = ["weight", "train", "loss"];
pub(super) const CONTENT: &str = "content";

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant`, `tool`, or another name that a template may know.
    pub role: String,
    /// What was said.
    pub content: String,
    /// The other keys of the message, for templates that read them: `tool_calls`, `tool_call_id`, `reasoning_content`; `content`
    /// where it is null.
    #[serde(flatten)]
    pub more: Map<String, Value>,
    /// Whether training puts loss on the turn, where the row says so.
    #[serde(skip)]
    pub learned: Option<bool>,
}

/// The inputs of a template besides the messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateInputs {
    /// The functions that the assistant may call, as JSON schemas.
    pub tools: Option<Vec<Value>>,
    /// Variables of the template by name, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
}

impl TemplateInputs {
    /// `tools`, and `chat_template_kwargs.NAME` for each variable.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let tools = self.tools.iter().map(|_| TOOLS.to_owned());
        tools.chain(self.kwargs.keys().map(|name| kwarg(name)))
    }
}

const TOOLS: &str = "tools";

/// A variable's name in reports.
fn kwarg(name: &str) -> String {
    format!("chat_template_kwargs.{name}")
}

/// The name in reports of a key of messages.
pub(super) fn message_key(name: &str) -> String {
    format!("messages[].{name}")
}

/// A conversation with what a template takes beside it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatInput {
    pub messages: Vec<Message>,
    pub inputs: TemplateInputs,
}

/// A value of a message that cannot be used.
#[derive(Debug, Clone, PartialEq)]
pub struct MessageProblem {
    /// Such as `messages[2].content`.
    pub key: String,
    pub expected: &'static str,
    pub got: Value,
}

impl Message {
    /// A turn of this role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), more: Map::new(), learned: None }
    }

    pub(super) fn is_from_assistant(&self) -> bool {
        self.role == "assistant"
    }

    pub(super) fn is_from_system(&self) -> bool {
        ["system", "developer"].contains(&self.role.as_str())
    }

    /// The calls of tools.
    pub(super) fn calls(&self) -> Option<&Value> {
        self.more.get(CALLS)
    }

    /// Whether nothing was said, thought or called.
    pub(super) fn is_empty(&self) -> bool {
        let is_thought = |key: &&str| self.more.get(*key).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
        self.content.trim().is_empty() && self.calls().is_none() && !THOUGHTS.iter().any(is_thought)
    }

    /// Its approximate number of bytes.
    pub(super) fn size(&self) -> usize {
        let more: usize = self.more.iter().map(|(key, value)| key.len() + json_size(value)).sum();
        self.role.len() + self.content.len() + more + OF_VALUE
    }

    /// As OpenAI's API takes it: arguments of calls are JSON in a string.
    pub fn to_openai(&self) -> Value {
        let mut message = json!(self);
        arguments_as_strings(message.get_mut(CALLS), Value::to_string);
        message
    }

    /// As transformers passes it to a template.
    pub(super) fn value(&self) -> TemplateValue {
        let content = if self.content.is_empty() { self.more.get(CONTENT) } else { None };
        let content =
            content.map_or_else(|| TemplateValue::from(&self.content), |null| TemplateValue::from(Serde(null)));
        let own = [("role", TemplateValue::from(&self.role)), (CONTENT, content)];
        let more = self.more.iter().filter(|(key, _)| *key != CONTENT);
        let more = more.map(|(key, value)| (key.as_str(), TemplateValue::from(Serde(value))));
        TemplateValue::from_pairs(own.into_iter().chain(more))
    }
}

impl ChatInput {
    /// What a user says, without tools and variables.
    pub fn user(content: impl Into<String>) -> Self {
        Self { messages: vec![Message::new("user", content)], inputs: TemplateInputs::default() }
    }

    /// Without the keys of messages and the variables for whose names in reports `is_left_out` holds.
    #[must_use]
    pub fn without(&self, is_left_out: impl Fn(&str) -> bool) -> Self {
        let mut chat = self.clone();
        for message in &mut chat.messages {
            message.more.retain(|key, _| !is_left_out(&message_key(key)));
        }
        chat.inputs.kwargs.retain(|name, _| !is_left_out(&kwarg(name)));
        chat
    }

    /// With these turns of the user at the end.
    #[must_use]
    pub fn followed_by<'t>(&self, turns: impl IntoIterator<Item = &'t String>) -> Self {
        let mut chat = self.clone();
        chat.messages.extend(turns.into_iter().map(|turn| Message::new("user", turn)));
        chat
    }

    /// Its fields in a request of OpenAI's API, those of vLLM and SGLang among them.
    pub fn to_openai(&self) -> Map<String, Value> {
        let TemplateInputs { tools, kwargs } = &self.inputs;
        let messages = self.messages.iter().map(Message::to_openai).collect();
        let tools = tools.as_ref().map(|tools| (TOOLS.to_owned(), json!(tools)));
        let kwargs = (!kwargs.is_empty()).then(|| ("chat_template_kwargs".to_owned(), json!(kwargs)));
        [("messages".to_owned(), messages)].into_iter().chain(tools).chain(kwargs).collect()
    }
}

impl TemplateInputs {
    /// Their approximate number of bytes.
    pub(super) fn size(&self) -> usize {
        let kwargs = self.kwargs.iter().map(|(key, value)| key.len() + json_size(value));
        self.tools.iter().flatten().map(json_size).chain(kwargs).sum()
    }
}

/// Bytes of a value without its text.
const OF_VALUE: usize = 64;

fn json_size(value: &Value) -> usize {
    let parts: usize = match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(json_size).sum(),
        Value::Object(pairs) => pairs.iter().map(|(key, value)| key.len() + json_size(value)).sum(),
        _ => 0,
    };
    parts + OF_VALUE
}

/// The arguments of calls as JSON in strings, as `write` writes it.
pub(super) fn arguments_as_strings(calls: Option<&mut Value>, write: impl Fn(&Value) -> String) {
    for call in calls.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(arguments) = call.pointer_mut("/function/arguments").filter(|arguments| arguments.is_object()) {
            *arguments = write(arguments).into();
        }
    }
}

/// The role behind the names that ShareGPT's collections and OpenAI's formats use; another name stays as it is.
fn role_named(name: &str) -> &str {
    match name.trim().to_lowercase().as_str() {
        "system" => "system",
        "developer" => "developer",
        "user" | "human" => "user",
        "assistant" | "gpt" | "chatgpt" | "gpt4" | "gpt-4" | "bing" | "bard" | "claude" | "model" | "bot"
        | "function_call" | "tool_call" => "assistant",
        "tool" | "function" | "observation" | "function_response" | "tool_response" | "tool_result" | "ipython" => {
            "tool"
        }
        _ => name,
    }
}

/// Whether a role is one of those that every data set has.
pub(super) fn is_known_role(role: &str) -> bool {
    ["system", "developer", "user", "assistant", "tool"].contains(&role)
}

/// The turns of `messages` or `conversations`.
///
/// # Errors
/// The first value that is not valid in a conversation.
pub fn read_messages(key: &str, value: &Value) -> Result<Vec<Message>, MessageProblem> {
    let Some(messages) = value.as_array() else {
        return wrong(key, "a list of messages", value);
    };
    messages.iter().enumerate().map(|(index, value)| message(&format!("{key}[{index}]"), value)).collect()
}

/// One user turn, the instruction and (if there is one) a blank line and the input; one assistant turn, the output.
/// Alpaca's own prompt ("Below is an instruction …") is left out: the chat template is the model's prompt.
pub(super) fn from_alpaca(instruction: &str, input: Option<&str>, output: &str) -> Vec<Message> {
    let asked = match input.filter(|input| !input.trim().is_empty()) {
        Some(input) => format!("{instruction}\n\n{input}"),
        None => instruction.to_owned(),
    };
    vec![Message::new("user", asked), Message::new("assistant", output)]
}

fn message(key: &str, value: &Value) -> Result<Message, MessageProblem> {
    let Value::Object(object) = value else {
        return wrong(key, "an object with \"role\" and \"content\", or \"from\" and \"value\"", value);
    };
    let name = |names: [&'static str; 2]| names.into_iter().find(|name| !value[*name].is_null()).unwrap_or(names[0]);
    let (speaker, said) = (name(["role", "from"]), name([CONTENT, "value"]));
    let Some(role) = value[speaker].as_str().filter(|role| !role.is_empty()) else {
        return wrong(&format!("{key}.{speaker}"), "a string such as \"user\"", &value[speaker]);
    };
    let mut message = Message { more: other_keys(object, [speaker, said]), ..Message::new(role_named(role), "") };
    message.learned = learned(key, &mut message)?;
    with_calls_read(&mut message.more);
    let key = format!("{key}.{said}");
    match &value[said] {
        Value::String(content) => message.content.clone_from(content),
        Value::Array(parts) => read_parts(&key, parts, &mut message)?,
        Value::Null if message.is_from_assistant() && !message.is_empty() => {
            message.more.insert(CONTENT.to_owned(), Value::Null); // not the same as an empty text to every template
        }
        other => return wrong(&key, "a string or a list of text parts", other),
    }
    Ok(message)
}

/// OpenAI's content in parts: `[{"type": "text", "text": "…"}]`. A part of thoughts becomes `reasoning_content`.
fn read_parts(key: &str, parts: &[Value], message: &mut Message) -> Result<(), MessageProblem> {
    let mut thoughts = String::new();
    for (index, part) in parts.iter().enumerate() {
        let kind = part["type"].as_str().unwrap_or("text");
        match (kind, part["text"].as_str().or_else(|| part.as_str()), part[kind].as_str()) {
            ("text" | "input_text" | "output_text", Some(text), _) => message.content += text,
            ("thinking" | "reasoning", _, Some(thought)) => thoughts += thought,
            _ => return wrong(&format!("{key}[{index}]"), "a part with \"text\"", part),
        }
    }
    if !thoughts.is_empty() {
        if let Some(known) = message.more.get(THOUGHTS[0]).filter(|known| **known != thoughts) {
            return wrong(key, "thoughts in parts or in reasoning_content, not in both", known);
        }
        message.more.insert(THOUGHTS[0].to_owned(), thoughts.into());
    }
    Ok(())
}

/// Whether the turn carries loss, by the keys that say so, which no template reads.
fn learned(key: &str, message: &mut Message) -> Result<Option<bool>, MessageProblem> {
    let mut learned = None;
    for name in LOSS {
        let Some(value) = message.more.shift_remove(name) else { continue };
        let says = match &value {
            Value::Bool(says) => *says,
            Value::Number(weight) if weight.as_f64() == Some(0.0) => false,
            Value::Number(weight) if weight.as_f64() == Some(1.0) => true,
            _ => return wrong(&format!("{key}.{name}"), "true, false, 0 or 1", &value),
        };
        let is_train_on_prompt = says && name == "train" && !message.is_from_assistant();
        if is_train_on_prompt || learned.is_some_and(|learned| learned != says) {
            let expected = if is_train_on_prompt {
                "false: only turns of the assistant carry loss"
            } else {
                "what the turn's other key says"
            };
            return wrong(&format!("{key}.{name}"), expected, &value);
        }
        learned = Some(says);
    }
    Ok(learned)
}

/// The keys of a message besides those that were read. Without values of nothing: columns have them for every message.
fn other_keys(message: &Map<String, Value>, read: [&str; 2]) -> Map<String, Value> {
    let is_empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    let others = message.iter().filter(|(key, value)| !read.contains(&key.as_str()) && !is_empty(value));
    others.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Calls as transformers' templates take them. OpenAI's older `function_call` is a list of one call. OpenAI's API has the arguments as
/// JSON in a string; templates are written for the object that it holds. A string that holds no object stays.
fn with_calls_read(more: &mut Map<String, Value>) {
    if let (Some(call), None) = (more.get("function_call").filter(|call| call["name"].is_string()), more.get(CALLS)) {
        let calls = json!([{"type": "function", "function": call}]);
        more.shift_remove("function_call");
        more.insert(CALLS.to_owned(), calls);
    }
    if let Some(Value::String(text)) = more.get(CALLS)
        && let Ok(calls @ Value::Array(_)) = serde_json::from_str(text)
    {
        more.insert(CALLS.to_owned(), calls); // a cell of CSV or Parquet
    }
    more.values_mut().for_each(drop_nulls);
    for call in more.get_mut(CALLS).and_then(Value::as_array_mut).into_iter().flatten() {
        for arguments in ["/function/arguments", "/arguments"] {
            let Some(arguments) = call.pointer_mut(arguments) else { continue };
            let object = arguments.as_str().and_then(|json| serde_json::from_str::<Map<String, Value>>(json).ok());
            if let Some(object) = object {
                *arguments = object.into();
            }
        }
    }
}

/// A key with the value null is as good as absent: where one object of a data set has a key, `datasets` gives it to all of them.
pub fn drop_nulls(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        Value::Object(keys) => {
            keys.retain(|_, value| !value.is_null());
            keys.values_mut().for_each(drop_nulls);
        }
        _ => {}
    }
}

/// Whether a value is empty. Columns hold one for every row, and structs one for every key.
pub(super) fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(keys) => keys.is_empty(),
        _ => false,
    }
}

fn wrong<T>(key: &str, expected: &'static str, got: &Value) -> Result<T, MessageProblem> {
    Err(MessageProblem { key: key.to_owned(), expected, got: got.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rows::RowProblem;

    fn read(value: Value) -> Vec<Message> {
        read_messages("messages", &value).unwrap()
    }

    #[test]
    fn sharegpt_and_openai_name_the_same_turns() {
        let sharegpt = json!([{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "function_call", "value": "c"},
            {"from": "observation", "value": "o"}, {"from": "GPT", "value": "a"}, {"from": "moderator", "value": "x"}]);
        let roles = ["system", "user", "assistant", "tool", "assistant", "moderator"];
        let turns = roles.into_iter().zip(["s", "q", "c", "o", "a", "x"]).map(|(role, said)| Message::new(role, said));
        assert_eq!(read(sharegpt), turns.collect::<Vec<_>>());
        let openai = read(
            json!([{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}, "r"]},
            {"role": "assistant", "content": "c"}, {"role": "function", "content": "o", "name": "f"}]),
        );
        assert_eq!(
            openai[..3],
            [Message::new("developer", "s"), Message::new("user", "qr"), Message::new("assistant", "c")]
        );
        assert_eq!((openai[3].role.as_str(), &openai[3].more["name"]), ("tool", &json!("f")));
    }

    #[test]
    fn a_message_keeps_its_other_keys_and_none_that_is_empty() {
        let messages = json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}], "name": null},
            {"role": "assistant", "content": "a", "tool_calls": []}, {"role": "tool", "content": "r", "tool_call_id": "1"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]}]);
        let with = |message: Message, more: Value| Message { more: more.as_object().cloned().unwrap(), ..message };
        let expected = [
            with(Message::new("assistant", ""), json!({"tool_calls": [{"id": "1"}], "content": null})),
            Message::new("assistant", "a"),
            with(Message::new("tool", "r"), json!({"tool_call_id": "1"})),
            with(Message::new("assistant", "a"), json!({"reasoning_content": "hm"})),
        ];
        assert_eq!(read(messages), expected);
    }

    #[test]
    fn every_spelling_of_a_call_is_one() {
        let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]);
        let text = "{\"b\": 1, \"a\": 2}";
        let spellings = [
            json!({"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": text}}]}),
            json!({"tool_calls": call.to_string()}),
            json!({"function_call": {"name": "f", "arguments": text}}),
        ];
        for mut spelling in spellings {
            spelling["role"] = "assistant".into();
            let read = read(json!([spelling]));
            assert_eq!((&read[0].more["tool_calls"], read[0].more.len()), (&call, 2), "{spelling}");
            assert_eq!(read[0].calls().unwrap()[0]["function"]["arguments"].to_string(), r#"{"b":1,"a":2}"#);
        }
        let none = json!([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "none"}}]}]);
        assert_eq!(read(none)[0].calls().unwrap()[0]["function"]["arguments"], "none");
    }

    #[test]
    fn a_turn_says_whether_it_is_learned() {
        let parsed = |more: Value| {
            let mut message = json!({"role": "assistant", "content": "a"});
            message.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
            read_messages("messages", &json!([message])).map(|read| (read[0].learned, read[0].more.len()))
        };
        assert_eq!(parsed(json!({})).unwrap(), (None, 0));
        for no in
            [json!({"weight": 0}), json!({"weight": 0.0}), json!({"train": false}), json!({"loss": 0, "weight": 0})]
        {
            assert_eq!(parsed(no).unwrap(), (Some(false), 0));
        }
        assert_eq!(parsed(json!({"weight": 1, "train": true})).unwrap(), (Some(true), 0));
        let complaint = |more| RowProblem::from(parsed(more).unwrap_err()).to_string();
        assert_eq!(complaint(json!({"weight": 0.5})), "messages[0].weight: expected true, false, 0 or 1, got 0.5");
        let two = "messages[0].train: expected what the turn's other key says, got true";
        assert_eq!(complaint(json!({"weight": 0, "train": true})), two);
        let user = json!([{"role": "user", "content": "a", "train": true}]);
        assert_eq!(
            read_messages("messages", &user).unwrap_err().expected,
            "false: only turns of the assistant carry loss"
        );
    }

    #[test]
    fn a_complaint_names_the_turn() {
        let complaint = |value| RowProblem::from(read_messages("messages", &value).unwrap_err()).to_string();
        assert_eq!(complaint(json!("hi")), "messages: expected a list of messages, got \"hi\"");
        assert_eq!(
            complaint(json!([{"content": "a"}])),
            "messages[0].role: expected a string such as \"user\", got null"
        );
        for role in ["user", "assistant"] {
            let text = "messages[0].content: expected a string or a list of text parts, got null";
            assert_eq!(complaint(json!([{"role": role}])), text);
        }
        assert!(
            complaint(json!([{"role": "user", "content": 3}])).starts_with("messages[0].content: expected a string or")
        );
        assert!(complaint(json!([["user", "a"]])).starts_with("messages[0]: expected an object with"));
        let image = json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]);
        assert!(complaint(image).starts_with("messages[0].content[1]: expected a part with \"text\""));
    }

    #[test]
    fn an_alpaca_row_is_one_question_and_one_answer() {
        let asked = |input| from_alpaca("Add.", input, "3").swap_remove(0).content;
        assert_eq!(
            (asked(Some("1 2")), asked(Some(" ")), asked(None)),
            ("Add.\n\n1 2".into(), "Add.".into(), "Add.".into())
        );
        assert_eq!(from_alpaca("Add.", None, "3")[1], Message::new("assistant", "3"));
    }
}
