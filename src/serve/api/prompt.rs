//! What a text goes on from: a conversation, a text or token ids.

use serde_json::Value;

use super::error::ApiError;
use super::fields::kind;
use crate::data::OtherKeys;
use crate::data::chat_template::{ChatTemplate, TemplateError, TemplateInputs};
use crate::data::conversation::ChatInput;

/// What a text goes on from.
#[derive(Debug, Clone, PartialEq)]
pub enum ClientPrompt {
    /// A conversation, for [`ClientPrompt::rendered`].
    Chat(ChatInput),
    /// Text, to which the tokenizer adds its special tokens.
    Text(String),
    /// Token ids as they are: at least one, none below 0. Whether the vocabulary has them is not checked yet.
    Ids(Vec<i64>),
}

impl ClientPrompt {
    /// The text of a conversation, which opens the assistant's turn.
    ///
    /// # Errors
    /// [`ApiError`]: no template, tools that it does not show, keys that it does not read, and what it raises.
    pub fn rendered(
        chat @ ChatInput { messages, inputs }: &ChatInput,
        template: Option<&ChatTemplate>,
    ) -> Result<String, ApiError> {
        let template = template.ok_or(ApiError::NoTemplate)?;
        let text = template.render_with(messages, inputs, true).map_err(|error| refused(&error))?;
        let without_tools = TemplateInputs { tools: None, ..inputs.clone() };
        let ignores_tools = || template.render_with(messages, &without_tools, true).is_ok_and(|other| other == text);
        if inputs.tools.is_some() && ignores_tools() {
            let problem = "the chat template of this model does not show tools to the model; leave them out";
            return Err(ApiError::invalid("tools", problem));
        }
        let unread = OtherKeys::from_chats([chat], template).not_read;
        let Some(key) = unread.keys().next() else { return Ok(text) };
        let without = chat.without(|key| unread.contains_key(key));
        if template.render_with(&without.messages, &without.inputs, true).is_ok_and(|other| other == text) {
            return Err(ApiError::invalid(key, "the chat template of this model does not read it; leave it out"));
        }
        Ok(text)
    }
}

/// What the template said; where it stands is the server's business.
fn refused(error: &TemplateError) -> ApiError {
    let problem = match error {
        TemplateError::Render { .. } => format!("the chat template refuses the conversation: {}", error.words()),
        TemplateError::TooLong { .. } | TemplateError::UnknownRole { .. } => error.to_string(),
        TemplateError::NotWritten { turn, .. } => {
            format!("turn {turn}: the chat template cannot render it: {}", error.words())
        }
        _ => "the chat template cannot render the conversation".to_owned(),
    };
    ApiError::invalid("messages", problem)
}

/// `prompt` of a completion: a text or token ids, or a list of either.
pub(super) fn prompts(prompt: Option<Value>) -> Result<Vec<ClientPrompt>, ApiError> {
    let expected = "a string, a list of token ids, or a list of either";
    let wrong = |got: &str| ApiError::field("prompt", expected, got);
    match prompt {
        Some(Value::String(text)) => Ok(vec![ClientPrompt::Text(text)]),
        Some(Value::Array(list)) => match list.first() {
            Some(Value::Number(_)) => Ok(vec![ClientPrompt::Ids(ids("prompt", &list)?)]),
            Some(_) => list.into_iter().enumerate().map(|(index, one)| prompt_of_list(index, one)).collect(),
            None => Err(wrong("an empty list")),
        },
        Some(other) => Err(wrong(kind(&other))),
        None => Err(wrong("nothing")),
    }
}

fn prompt_of_list(index: usize, prompt: Value) -> Result<ClientPrompt, ApiError> {
    let param = format!("prompt[{index}]");
    match prompt {
        Value::String(text) => Ok(ClientPrompt::Text(text)),
        Value::Array(list) if !list.is_empty() => Ok(ClientPrompt::Ids(ids(&param, &list)?)),
        Value::Array(_) => Err(ApiError::field(param, "at least one token id", "an empty list")),
        other => Err(ApiError::field(param, "a string or a list of token ids", kind(&other))),
    }
}

fn ids(param: &str, list: &[Value]) -> Result<Vec<i64>, ApiError> {
    let id = |(index, value): (usize, &Value)| {
        let wrong = || ApiError::field(format!("{param}[{index}]"), "a token id", kind(value));
        value.as_i64().filter(|id| *id >= 0).ok_or_else(wrong)
    };
    list.iter().enumerate().map(id).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::super::fields::Fields;
    use super::super::messages::chat;
    use super::*;

    #[test]
    fn a_prompt_is_texts_or_ids() {
        let prompts =
            |prompt: Value| prompts(Some(prompt).filter(|prompt| !prompt.is_null())).map_err(|error| error.to_string());
        let (text, ids) = (|text: &str| ClientPrompt::Text(text.to_owned()), ClientPrompt::Ids);
        assert_eq!(prompts(json!(["a", ""])).unwrap(), [text("a"), text("")]);
        assert_eq!(prompts(json!([1, 2])).unwrap(), [ids(vec![1, 2])]);
        assert_eq!(prompts(json!([[1, 2], [0]])).unwrap(), [ids(vec![1, 2]), ids(vec![0])]);
        let forms = "prompt: expected a string, a list of token ids, or a list of either";
        let cases = [
            (json!(null), format!("{forms}, got nothing")),
            (json!([]), format!("{forms}, got an empty list")),
            (json!(3), format!("{forms}, got a number")),
            (json!([1, "a"]), "prompt[1]: expected a token id, got a string".to_owned()),
            (json!([[1], [2, -3]]), "prompt[1][1]: expected a token id, got a number".to_owned()),
            (json!([[1], []]), "prompt[1]: expected at least one token id, got an empty list".to_owned()),
            (json!(["a", 1]), "prompt[1]: expected a string or a list of token ids, got a number".to_owned()),
        ];
        for (prompt, message) in cases {
            assert_eq!(prompts(prompt).unwrap_err(), message);
        }
    }

    /// A conversation as a template writes it, with more fields of a request.
    fn rendered(source: &str, more: Value) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        fs::File::create(folder.path().join("tokenizer_config.json"))
            .and_then(|file| serde_json::to_writer(file, &json!({ "chat_template": source })).map_err(Into::into))
            .unwrap();
        let template = ChatTemplate::load(folder.path()).unwrap();
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut fields = Fields::from_body(body.to_string().as_bytes()).unwrap();
        ClientPrompt::rendered(&chat(&mut fields).unwrap(), template.as_ref()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_template_gets_messages_with_all_their_keys_and_tools() {
        let source = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}\
            {% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}\
            {% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.a }}{% endfor %}|{% endfor %}\
            {{ add_generation_prompt }}";
        let call = json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 7}"}}]);
        let messages = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": call},
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ]);
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let shown = "{\"type\": \"function\", \"function\": {\"name\": \"f\"}}\n";
        let conversation = "user:hi|assistant:Nonef7|tool:r1|True";
        let text = rendered(source, json!({"messages": messages, "tools": tools}));
        assert_eq!(text.unwrap(), format!("{shown}{conversation}"));
        let text = rendered(source, json!({"messages": messages, "tools": tools, "tool_choice": "none"}));
        assert_eq!(text.unwrap(), conversation);
    }

    #[test]
    fn keys_that_the_template_does_not_read_are_refused() {
        let unread = |key: &str| format!("{key}: the chat template of this model does not read it; leave it out");
        let content = "{% for m in messages %}{{ m.content }}{% endfor %}";
        let with = |more: &str| format!("{content}{more}");
        let thinking = json!({"chat_template_kwargs": {"enable_thinking": false}});
        let mood = json!({"messages": [{"role": "user", "content": "hi", "mood": "sad", "refusal": null}]});
        assert_eq!(rendered(content, thinking.clone()).unwrap_err(), unread("chat_template_kwargs.enable_thinking"));
        assert_eq!(rendered(content, mood.clone()).unwrap_err(), unread("messages[].mood"));
        let echo = json!({"role": "assistant", "content": "yes", "prefix": false, "annotations": [], "refusal": null,
            "provider_specific_fields": {"refusal": null}, "cache_control": {"type": "ephemeral"}});
        let echoed = json!({"messages": [{"role": "user", "content": "hi"}, echo, {"role": "user", "content": "so"}]});
        assert_eq!(rendered(content, echoed).unwrap(), "hiyesso", "as clients send an answer back");
        assert_eq!(rendered(&with(" {{ enable_thinking or 'off' }}"), thinking).unwrap(), "hi off");
        assert_eq!(rendered(&with(" {{ messages[0].mood }}"), mood.clone()).unwrap(), "hi sad");
        assert!(rendered("{{ messages | tojson }}", mood).unwrap().contains("sad"), "read without its name");
    }

    #[test]
    fn what_a_template_cannot_do_is_reported() {
        let tools = json!({"tools": [{"type": "function", "function": {"name": "f"}}]});
        assert_eq!(
            rendered("{{ messages[0].content }}", tools).unwrap_err(),
            "tools: the chat template of this model does not show tools to the model; leave them out"
        );
        assert_eq!(
            rendered("{{ raise_exception('roles must alternate') }}", json!({})).unwrap_err(),
            "messages: the chat template refuses the conversation: roles must alternate"
        );
        let none = ClientPrompt::rendered(&ChatInput::user("hi"), None);
        assert_eq!(none, Err(ApiError::NoTemplate));
    }
}
