//! The messages and tools of a chat, as a chat template takes them.

use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::{Fields, kind};
use crate::data::chat_template::Message;

const CALLS: &str = "tool_calls";

/// The conversation.
pub(super) fn messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let wrong = |got: &str| ApiError::field("messages", "a list of at least one message", got);
    match fields.take("messages") {
        Some(Value::Array(list)) if list.is_empty() => Err(wrong("an empty list")),
        Some(Value::Array(list)) => {
            list.into_iter().enumerate().map(|(index, value)| message(&format!("messages[{index}]"), value)).collect()
        }
        Some(other) => Err(wrong(kind(&other))),
        None => Err(wrong("nothing")),
    }
}

/// The functions that the assistant may call; none where `tool_choice` forbids them.
pub(super) fn tools(fields: &mut Fields) -> Result<Option<Vec<Value>>, ApiError> {
    let tools = match fields.take("tools") {
        Some(Value::Array(list)) => list,
        Some(other) => return Err(ApiError::field("tools", "a list of tools", kind(&other))),
        None => Vec::new(),
    };
    if let Some(index) = tools.iter().position(|tool| !is_function(tool)) {
        let expected = r#"{"type": "function", "function": {"name": …}}"#;
        return Err(ApiError::field(format!("tools[{index}]"), expected, "something else"));
    }
    fields.flag("parallel_tool_calls")?; // how many calls it makes is the model's choice
    let wanted = match fields.take("tool_choice") {
        None => true,
        Some(Value::String(choice)) if choice == "auto" => true,
        Some(Value::String(choice)) if choice == "none" => false,
        Some(_) => {
            let problem = "this server cannot force a call; use \"auto\" or \"none\"";
            return Err(ApiError::invalid("tool_choice", problem));
        }
    };
    Ok(Some(tools).filter(|tools| wanted && !tools.is_empty()))
}

fn is_function(tool: &Value) -> bool {
    tool["type"] == "function" && tool["function"]["name"].is_string()
}

fn message(param: &str, value: Value) -> Result<Message, ApiError> {
    let Value::Object(mut more) = value else {
        return Err(ApiError::field(param, "an object with \"role\" and \"content\"", kind(&value)));
    };
    let role = match more.shift_remove("role").unwrap_or_default() {
        Value::String(role) if !role.is_empty() => role,
        other => return Err(ApiError::field(format!("{param}.role"), "a role such as \"user\"", kind(&other))),
    };
    let content = more.shift_remove("content").unwrap_or_default();
    more.retain(|_, value| !is_nothing(value));
    let content_param = format!("{param}.content");
    let content = match content {
        Value::String(text) => text,
        Value::Array(parts) => text_of_parts(&content_param, &parts)?,
        Value::Null if more.contains_key(CALLS) => {
            more.insert("content".to_owned(), Value::Null); // not the same as an empty text to every template
            String::new()
        }
        other => return Err(ApiError::field(content_param, "a string or a list of text parts", kind(&other))),
    };
    with_arguments_read(&mut more);
    Ok(Message { role, content, more })
}

/// Clients send back keys that were null in an answer.
fn is_nothing(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

fn text_of_parts(param: &str, parts: &[Value]) -> Result<String, ApiError> {
    let text = |(index, part): (usize, &Value)| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (Some(other @ ("image_url" | "input_audio" | "file" | "refusal")), _) => {
            Err(ApiError::invalid(format!("{param}[{index}]"), format!("this server reads text only, not {other}")))
        }
        _ => {
            let expected = r#"{"type": "text", "text": …}"#;
            Err(ApiError::field(format!("{param}[{index}]"), expected, "something else"))
        }
    };
    parts.iter().enumerate().map(text).collect()
}

/// OpenAI's API has a call's arguments as JSON in a string; in transformers' messages, which templates are written for, they are the
/// object that it holds. A string that holds no object stays.
fn with_arguments_read(more: &mut Map<String, Value>) {
    let calls = more.get_mut(CALLS).and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        if let Some(read) = arguments.as_str().and_then(|json| serde_json::from_str::<Map<String, Value>>(json).ok()) {
            *arguments = read.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(body: &Value) -> Fields {
        Fields::of_body(body.to_string().as_bytes()).unwrap()
    }

    fn read(list: Value) -> Result<Vec<Message>, String> {
        messages(&mut fields(&json!({ "messages": list }))).map_err(|error| error.to_string())
    }

    #[test]
    fn content_is_a_text_or_its_parts() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let read = read(json!([{"role": "user", "content": "a"}, {"role": "x", "content": parts}])).unwrap();
        assert_eq!(read, [Message::new("user", "a"), Message::new("x", "ab")]);
    }

    #[test]
    fn a_message_keeps_its_other_keys_and_none_that_is_empty() {
        let call = |arguments: Value| json!([{"id": "1", "function": {"name": "f", "arguments": arguments}}]);
        let read = read(json!([
            {"role": "assistant", "content": null, "refusal": null, "annotations": [], "tool_calls": call(json!("{\"b\": 1, \"a\": 2}"))},
            {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
            {"role": "assistant", "content": "", "tool_calls": call(json!("none"))},
        ]))
        .unwrap();
        assert_eq!(
            json!(read.iter().map(|message| &message.more).collect::<Vec<_>>()),
            json!([
                {"tool_calls": call(json!({"b": 1, "a": 2})), "content": null},
                {"tool_call_id": "1", "name": "f"},
                {"tool_calls": call(json!("none"))},
            ])
        );
        assert_eq!(read[0].more["tool_calls"][0]["function"]["arguments"].to_string(), r#"{"b":1,"a":2}"#);
    }

    #[test]
    fn a_complaint_names_the_message_and_not_what_was_said() {
        let cases = [
            (json!("my secret"), "messages: expected a list of at least one message, got a string"),
            (json!(null), "messages: expected a list of at least one message, got nothing"),
            (json!([]), "messages: expected a list of at least one message, got an empty list"),
            (json!(["my secret"]), "messages[0]: expected an object with \"role\" and \"content\", got a string"),
            (json!([{"content": "my secret"}]), "messages[0].role: expected a role such as \"user\", got null"),
            (
                json!([{"role": "user", "content": "a"}, {"role": "assistant"}]),
                "messages[1].content: expected a string or a list of text parts, got null",
            ),
            (
                json!([{"role": "user", "content": {"my": "secret"}}]),
                "messages[0].content: expected a string or a list of text parts, got an object",
            ),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "my secret"}}]}]),
                "messages[0].content[0]: this server reads text only, not image_url",
            ),
            (
                json!([{"role": "user", "content": ["my secret"]}]),
                "messages[0].content[0]: expected {\"type\": \"text\", \"text\": …}, got something else",
            ),
        ];
        for (list, message) in cases {
            assert_eq!(read(list).unwrap_err(), message);
        }
    }

    #[test]
    fn tools_are_functions_and_may_be_forbidden() {
        let list = json!([{"type": "function", "function": {"name": "f"}}]);
        let tools = |body: Value| tools(&mut fields(&body)).map_err(|error| error.to_string());
        assert_eq!(tools(json!({})), Ok(None));
        assert_eq!(tools(json!({"tools": []})), Ok(None));
        assert_eq!(tools(json!({"tools": list, "parallel_tool_calls": true})).unwrap(), list.as_array().cloned());
        assert_eq!(tools(json!({"tools": list, "tool_choice": "auto"})).unwrap(), list.as_array().cloned());
        assert_eq!(tools(json!({"tools": list, "tool_choice": "none"})), Ok(None));
        assert!(tools(json!({"tools": list, "tool_choice": "required"})).unwrap_err().starts_with("tool_choice: "));
        assert!(tools(json!({"tools": [{"type": "function"}]})).unwrap_err().starts_with("tools[0]: expected"));
        assert_eq!(tools(json!({"tools": {}})).unwrap_err(), "tools: expected a list of tools, got an object");
    }
}
