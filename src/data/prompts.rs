//! Prompt files: what to decode from. Raw text, token ids, conversations, or MT-bench's turns.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::chat_template::{ChatTemplate, Message, TemplateError};
use super::conversation::Role;
use super::jsonl;
use super::rows::{Place, Problem, RowError};
use super::tokenize::{TextTokenizer, TokenizeError};

/// What can be wrong with prompts.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The disk's own words.
    #[error("cannot read the prompts of {}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A line that is not right.
    #[error(transparent)]
    Row(#[from] RowError),
    /// No line at all.
    #[error("{} holds no prompt", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// A conversation, and nothing to render it with.
    #[error(
        "a conversation needs the backbone's chat template (chat_template in tokenizer_config.json, or \
         chat_template.jinja); use prompts of \"prompt\" or \"prompt_ids\" with a backbone that has none"
    )]
    NoTemplate,
    /// A template that fails.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A text that cannot be tokenised.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// An id that the tokenizer does not have.
    #[error("prompt_ids[{index}]: expected a token id from 0 to {}, the tokenizer's vocabulary, got {id}", vocab_size - 1)]
    TokenOutOfRange {
        /// Where in the list, from 0.
        index: usize,
        /// What stands there.
        id: i32,
        /// The tokenizer's vocabulary.
        vocab_size: usize,
    },
    /// Nothing to decode from.
    #[error("the prompt has no tokens, not even a BOS")]
    NoTokens,
}

/// Something to decode from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// What kind of task it is: `bench` reports each on its own.
    pub category: Option<String>,
    /// The prompt itself.
    pub input: PromptInput,
}

/// The forms of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptInput {
    /// Raw text; the tokenizer adds its special tokens (BOS) and nothing else is added.
    Text(String),
    /// Token ids as they are.
    Ids(Vec<i32>),
    /// A conversation up to what the assistant shall answer.
    Chat(Vec<Message>),
    /// A user's turns, asked one after another.
    Turns(Vec<String>),
}

/// Reads a prompt file, JSONL. A conversation that ends with the assistant's turn loses it: that turn is what is to be decoded.
///
/// # Errors
/// File, line and key of what is not right; an empty file.
pub fn read(path: &Path) -> Result<Vec<Prompt>, PromptError> {
    let bytes = fs::read(path).map_err(|source| PromptError::Read { path: path.to_owned(), source })?;
    let lines = bytes.split(|&byte| byte == b'\n').zip(1..).filter(|(line, _)| !line.trim_ascii().is_empty());
    let prompt = |(line, number)| prompt(line).map_err(|problem| Place::line(path, number).error(problem));
    let prompts: Vec<Prompt> = lines.map(prompt).collect::<Result<_, _>>()?;
    if prompts.is_empty() {
        return Err(PromptError::Empty { path: path.to_owned() });
    }
    Ok(prompts)
}

/// A prompt's tokens. Of [`PromptInput::Turns`] the first turn: the others need the answers before them ([`chat_ids`]).
///
/// # Errors
/// A conversation without a template, ids that the tokenizer does not have.
pub fn to_ids(
    input: &PromptInput,
    tokenizer: &TextTokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Vec<i32>, PromptError> {
    let ids = match input {
        PromptInput::Text(text) => tokenizer.encode(text, true)?,
        PromptInput::Ids(ids) => in_vocabulary(ids, tokenizer)?,
        PromptInput::Chat(messages) => chat_ids(messages, tokenizer, template)?,
        PromptInput::Turns(turns) => {
            let first: Vec<Message> = turns.iter().take(1).map(|turn| Message::new("user", turn)).collect();
            chat_ids(&first, tokenizer, template)?
        }
    };
    if ids.is_empty() { Err(PromptError::NoTokens) } else { Ok(ids) }
}

/// A conversation's tokens, the assistant's next turn opened. The template writes BOS, so the tokenizer adds none.
///
/// # Errors
/// No template, or what it raises.
pub fn chat_ids(
    messages: &[Message],
    tokenizer: &TextTokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Vec<i32>, PromptError> {
    let text = template.ok_or(PromptError::NoTemplate)?.render(messages, true)?;
    Ok(tokenizer.encode(&text, false)?)
}

fn in_vocabulary(ids: &[i32], tokenizer: &TextTokenizer) -> Result<Vec<i32>, PromptError> {
    let vocab_size = tokenizer.vocab_size();
    let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab_size);
    match ids.iter().position(|&id| !known(id)) {
        Some(index) => Err(PromptError::TokenOutOfRange { index, id: ids[index], vocab_size }),
        None => Ok(ids.to_vec()),
    }
}

fn prompt(line: &[u8]) -> Result<Prompt, Problem> {
    let object = jsonl::object(line)?;
    let category = match object.get("category") {
        None | Some(Value::Null) => None,
        Some(category) => Some(text("category", category)?),
    };
    Ok(Prompt { category, input: input(&object)? })
}

fn input(object: &Map<String, Value>) -> Result<PromptInput, Problem> {
    let value = |key: &str| object.get(key).filter(|value| !value.is_null());
    if let Some(prompt) = value("prompt") {
        return text("prompt", prompt).map(PromptInput::Text);
    }
    if let Some(ids) = value("prompt_ids") {
        return each("prompt_ids", ids, "a list of token ids", token).map(PromptInput::Ids);
    }
    if let Some(turns) = value("turns") {
        return each("turns", turns, "a list of strings", text).map(PromptInput::Turns);
    }
    for key in ["messages", "conversations"] {
        if let Some(messages) = value(key) {
            let messages = each(key, messages, "a list of messages", message)?;
            return before_the_answer(key, messages).map(PromptInput::Chat);
        }
    }
    let expected = "\"prompt\", \"messages\", \"conversations\", \"turns\" or \"prompt_ids\"";
    let found: Vec<_> = object.keys().map(|key| format!("{key:?}")).collect();
    Err(Problem::Value { key: "the keys".to_owned(), expected, got: found.join(", ") })
}

/// What stands before the answer that is to be decoded.
fn before_the_answer(key: &str, mut messages: Vec<Message>) -> Result<Vec<Message>, Problem> {
    while messages.last().is_some_and(|last| last.role == "assistant") {
        messages.pop();
    }
    if messages.iter().any(|message| message.role != "system") {
        return Ok(messages);
    }
    let got = "none".to_owned();
    Err(Problem::Value { key: key.to_owned(), expected: "a turn for the assistant to answer", got })
}

/// OpenAI's `role` and `content`, or ShareGPT's `from` and `value`.
fn message(key: &str, value: &Value) -> Result<Message, Problem> {
    let part = |names: [&str; 2]| {
        let name = names.into_iter().find(|name| !value[*name].is_null()).unwrap_or(names[0]);
        text(&format!("{key}.{name}"), &value[name])
    };
    let role = part(["role", "from"])?;
    let role = match Role::named(&role) {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Call | Role::Tool | Role::Unknown => role.as_str(), // the template's business
    };
    Ok(Message::new(role, part(["content", "value"])?))
}

fn each<T>(
    key: &str,
    value: &Value,
    expected: &'static str,
    item: impl Fn(&str, &Value) -> Result<T, Problem>,
) -> Result<Vec<T>, Problem> {
    match value.as_array().filter(|items| !items.is_empty()) {
        Some(items) => items.iter().enumerate().map(|(index, value)| item(&format!("{key}[{index}]"), value)).collect(),
        None => Err(Problem::Value { key: key.to_owned(), expected, got: jsonl::shown(value) }),
    }
}

fn text(key: &str, value: &Value) -> Result<String, Problem> {
    let wrong = || Problem::Value { key: key.to_owned(), expected: "a string", got: jsonl::shown(value) };
    value.as_str().map(str::to_owned).ok_or_else(wrong)
}

fn token(key: &str, value: &Value) -> Result<i32, Problem> {
    let wrong = || Problem::Value { key: key.to_owned(), expected: "a token id", got: jsonl::shown(value) };
    value.as_i64().and_then(|id| i32::try_from(id).ok()).filter(|id| *id >= 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_line(line: &str) -> Result<Prompt, String> {
        prompt(line.as_bytes()).map_err(|problem| problem.to_string())
    }

    #[test]
    fn sharegpt_and_openai_name_the_same_conversation() {
        let sharegpt = r#"{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
        let openai = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}"#;
        let expected = PromptInput::Chat(vec![Message::new("system", "s"), Message::new("user", "q")]);
        assert_eq!(read_line(sharegpt).unwrap().input, expected);
        assert_eq!(read_line(openai).unwrap().input, expected);
    }

    #[test]
    fn a_complaint_names_the_key() {
        let complaint = |line| read_line(line).unwrap_err();
        assert_eq!(complaint(r#"{"prompt": 3}"#), "prompt: expected a string, got 3");
        assert_eq!(complaint(r#"{"prompt_ids": [1, -1]}"#), "prompt_ids[1]: expected a token id, got -1");
        assert_eq!(complaint(r#"{"turns": []}"#), "turns: expected a list of strings, got []");
        assert_eq!(
            complaint(r#"{"messages": [{"role": "user"}]}"#),
            "messages[0].content: expected a string, got null"
        );
        assert!(complaint(r#"{"messages": [{"role": "assistant", "content": "a"}]}"#).contains("to answer"));
        assert!(complaint(r#"{"text": "a"}"#).ends_with(r#"got "text""#));
    }
}
