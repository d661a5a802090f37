//! The messages and tools of a chat, as a chat template takes them.

use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, kind};
use crate::data::conversation::{self, ChatInput, Message, MessageProblem, TemplateInputs};

/// The conversation with its tools and the template's variables.
pub(super) fn chat(fields: &mut Fields) -> Result<ChatInput, ApiError> {
    let messages = messages(fields)?;
    let without_nulls = |mut value: Value| {
        conversation::drop_nulls(&mut value);
        value
    };
    let kwargs = |value: &Value| without_nulls(value.clone()).as_object().cloned();
    let kwargs = fields.read("chat_template_kwargs", "an object", kwargs)?.unwrap_or_default();
    let tools = tools(fields)?.map(|tools| tools.into_iter().map(without_nulls).collect());
    let inputs = TemplateInputs { tools, kwargs };
    Ok(ChatInput { messages, inputs })
}

fn messages(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let wrong = |got: &str| ApiError::field("messages", "a list of at least one message", got);
    match fields.take("messages") {
        Some(Value::Array(list)) if list.is_empty() => Err(wrong("an empty list")),
        Some(list @ Value::Array(_)) => Ok(conversation::read_messages("messages", &list).map_err(api_error)?),
        Some(other) => Err(wrong(kind(&other))),
        None => Err(wrong("nothing")),
    }
}

/// The functions that the assistant may call; none where `tool_choice` forbids them.
fn tools(fields: &mut Fields) -> Result<Option<Vec<Value>>, ApiError> {
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

/// The error without the message's text, since errors may be logged.
fn api_error(problem: MessageProblem) -> ApiError {
    let MessageProblem { key, expected, got } = problem;
    match got["type"].as_str() {
        Some(other @ ("image_url" | "input_audio" | "file" | "refusal")) => {
            ApiError::invalid(key, format!("this server reads text only, not {other}"))
        }
        _ => ApiError::field(key, expected, kind(&got)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(body: &Value) -> Fields {
        Fields::from_body(body.to_string().as_bytes()).unwrap()
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
            (
                json!(["my secret"]),
                "messages[0]: expected an object with \"role\" and \"content\", or \"from\" and \"value\", got a string",
            ),
            (json!([{"content": "my secret"}]), "messages[0].role: expected a string such as \"user\", got null"),
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
                json!([{"role": "user", "content": [{"my": "secret"}]}]),
                "messages[0].content[0]: expected a part with \"text\", got an object",
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
