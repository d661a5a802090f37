//! Prompt files: raw text, token ids, conversations, or MT-bench's turns.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::chat_template::{ChatTemplate, TemplateChoice, TemplateError};
use super::conversation::{ChatInput, Message, is_nothing};
use super::other_keys::OtherKeys;
use super::row_keys::{self, BESIDE, OtherKey};
use super::row_object::RowObject;
use super::rows::{RowError, RowLocation, RowProblem};
use super::shown::shown;
use super::token_lists::LISTS;
use super::tokenize::{TextTokenizer, TokenizeError};
use super::{json_array, jsonl};
use crate::files;

/// In place of a file: prompts come from stdin.
pub const STDIN: &str = "-";
/// Keys of a prompt's own name, MT-bench's among them.
const IDS: [&str; 3] = ["id", "question_id", "prompt_id"];

/// Why prompts cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error("cannot read the prompts of {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// A line that is not right.
    #[error(transparent)]
    Row(#[from] RowError),
    #[error("{} holds no prompt", path.display())]
    Empty { path: PathBuf },
    /// A conversation, and nothing to render it with.
    #[error(
        "a conversation needs a chat template, and the backbone has none; choose one with --chat-template: {} or a .jinja file",
        TemplateChoice::built_in_names()
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
        id: i32,
        vocab_size: usize,
    },
    /// A text that is refused before it becomes tokens.
    #[error("a text of {bytes} bytes has more tokens than the context of {context} holds; shorten it")]
    BeyondContext { bytes: usize, context: usize },
    /// Nothing to decode from.
    #[error("the prompt has no tokens, not even a BOS")]
    NoTokens,
}

/// A prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Where it stands; `None` for one from the command line.
    pub place: Option<RowLocation>,
    /// Its own name, usually a string or a number.
    pub id: Option<Value>,
    /// What kind of task it is: `bench` reports each on its own.
    pub category: Option<String>,
    pub input: PromptInput,
}

impl Prompt {
    /// A prompt from nowhere.
    pub fn new(input: PromptInput) -> Self {
        Self { place: None, id: None, category: None, input }
    }
}

/// The forms of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptInput {
    /// Raw text; the tokenizer adds its special tokens (BOS) and nothing else is added.
    Text(String),
    /// Token ids as they are.
    Ids(Vec<i32>),
    /// A conversation up to what the assistant shall answer.
    Chat(ChatInput),
    /// A user's turns, asked one after another.
    Turns {
        /// The context before them: a system message, earlier turns, tools, template variables.
        opening: Box<ChatInput>,
        /// At least one.
        user: Vec<String>,
    },
}

impl PromptInput {
    /// Whether a chat template renders it.
    pub fn needs_template(&self) -> bool {
        self.chat().is_some()
    }

    /// What a chat template gets.
    pub fn chat(&self) -> Option<&ChatInput> {
        match self {
            Self::Text(_) | Self::Ids(_) => None,
            Self::Chat(chat) => Some(chat),
            Self::Turns { opening, .. } => Some(opening),
        }
    }

    /// Its fields in a request of OpenAI's API. Of several turns the first is asked.
    pub fn to_openai(&self) -> Map<String, Value> {
        let prompt = |prompt| Map::from_iter([("prompt".to_owned(), prompt)]);
        match self {
            Self::Text(text) => prompt(json!(text)),
            Self::Ids(ids) => prompt(json!(ids)),
            Self::Chat(chat) => chat.to_openai(),
            Self::Turns { opening, user } => opening.followed_by(user.first()).to_openai(),
        }
    }
}

/// A prompt for self-distillation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialogue {
    pub place: RowLocation,
    /// Its index in the file, from 0.
    pub index: usize,
    /// Its own name, usually a string or a number.
    pub id: Option<Value>,
    /// What kind of task it is.
    pub category: Option<String>,
    pub questions: Questions,
}

/// The user's side of a prompt, without answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Questions {
    /// Raw text to go on from.
    Text(String),
    /// Token ids to go on from.
    Ids(Vec<i32>),
    /// All of a user's turns, behind the system's if there is one.
    Turns {
        /// The context before them: a first system or developer message, tools, template variables.
        opening: Box<ChatInput>,
        /// At least one.
        user: Vec<String>,
    },
}

impl Questions {
    /// Whether a chat template renders them.
    pub fn needs_template(&self) -> bool {
        self.opening().is_some()
    }

    /// The context before the user's turns.
    pub fn opening(&self) -> Option<&ChatInput> {
        if let Self::Turns { opening, .. } = self { Some(opening) } else { None }
    }
}

/// The content of a prompt file, or of stdin, which can be read only once.
#[derive(Debug, Clone)]
pub struct PromptFile {
    /// As errors name it.
    name: PathBuf,
    bytes: Vec<u8>,
}

/// Reads a prompt file: JSONL, or a JSON array; `-` is stdin. A final assistant turn of a conversation is removed: it is the text to
/// decode.
///
/// # Errors
/// File, line (of an array: row) and key of what is not right; an empty file.
pub fn read(path: &Path) -> Result<Vec<Prompt>, PromptError> {
    PromptFile::open(path)?.prompts()
}

impl PromptFile {
    /// Reads a file, or stdin for `-`.
    ///
    /// # Errors
    /// The disk's own.
    pub fn open(path: &Path) -> Result<Self, PromptError> {
        let (name, bytes) = match path == Path::new(STDIN) {
            true => {
                let mut bytes = Vec::new();
                (PathBuf::from("stdin"), io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes))
            }
            false => (path.to_owned(), files::read(path)),
        };
        match bytes {
            Ok(bytes) => Ok(Self { name, bytes }),
            Err(source) => Err(PromptError::Read { path: name, source }),
        }
    }

    /// Of its bytes.
    pub fn sha256(&self) -> String {
        files::hex(&Sha256::digest(&self.bytes))
    }

    /// The file's path; `stdin` for stdin.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// The prompts, as [`read`] returns them.
    ///
    /// # Errors
    /// As [`read`].
    pub fn prompts(&self) -> Result<Vec<Prompt>, PromptError> {
        self.each_object(|object, place, _| {
            let (id, category) = (id(object), category(object)?);
            Ok(Prompt { place: Some(place.clone()), id, category, input: input(object)? })
        })
    }

    /// Reads prompts as [`read`] does, but keeps all of a conversation's user turns and drops those of the assistant and of tools.
    ///
    /// # Errors
    /// As [`read`]; a conversation in which the user says nothing.
    pub fn dialogues(&self) -> Result<Vec<Dialogue>, PromptError> {
        self.each_object(|object, place, index| {
            let (id, category) = (id(object), category(object)?);
            Ok(Dialogue { place: place.clone(), index, id, category, questions: questions(object)? })
        })
    }

    /// Counts of the keys that nothing reads; none for a file that cannot be read.
    pub fn other_keys(&self) -> OtherKeys {
        let mut counts = OtherKeys::default();
        let keys = self.each_object(|object, _, _| Ok(other_keys(object))).unwrap_or_default();
        keys.iter().flatten().for_each(|key| counts.count(key, 1));
        counts
    }

    /// The objects, of JSONL or of one array, distinguished by the first character; each with its place and its index from 0.
    fn each_object<T>(
        &self,
        item: impl Fn(&Map<String, Value>, &RowLocation, usize) -> Result<T, RowProblem>,
    ) -> Result<Vec<T>, PromptError> {
        let Self { name, bytes } = self;
        let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes); // Windows editors' byte order mark
        let read = |(index, (json, place)): (usize, (&[u8], RowLocation))| {
            jsonl::object(json).and_then(|object| item(&object, &place, index)).map_err(|problem| place.error(problem))
        };
        let items: Vec<T> = if text.trim_ascii_start().starts_with(b"[") {
            let rows = json_array::items(text, name)?.into_iter().zip(1..);
            let rows = rows.map(|(row, number)| (row.get().as_bytes(), RowLocation::row(name, number)));
            rows.enumerate().map(read).collect::<Result<_, _>>()?
        } else {
            let lines = text.split(|&byte| byte == b'\n').zip(1..).filter(|(line, _)| !line.trim_ascii().is_empty());
            let lines = lines.map(|(line, number)| (line, RowLocation::line(name, number)));
            lines.enumerate().map(read).collect::<Result<_, _>>()?
        };
        if items.is_empty() { Err(PromptError::Empty { path: name.clone() }) } else { Ok(items) }
    }
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
        PromptInput::Chat(chat) => chat_ids(chat, tokenizer, template)?,
        PromptInput::Turns { opening, user } => chat_ids(&opening.followed_by(user.first()), tokenizer, template)?,
    };
    if ids.is_empty() { Err(PromptError::NoTokens) } else { Ok(ids) }
}

/// A conversation's tokens, the assistant's next turn opened. The template writes BOS, so the tokenizer adds none.
///
/// # Errors
/// No template, or what it raises.
pub fn chat_ids(
    ChatInput { messages, inputs }: &ChatInput,
    tokenizer: &TextTokenizer,
    template: Option<&ChatTemplate>,
) -> Result<Vec<i32>, PromptError> {
    let text = template.ok_or(PromptError::NoTemplate)?.render_with(messages, inputs, true)?;
    Ok(tokenizer.encode(&text, false)?)
}

/// The tokens with which a template opens each answer, whatever was asked; none without a template, or where it opens them with a single character.
pub fn answer_header(tokenizer: Option<&TextTokenizer>, template: Option<&ChatTemplate>) -> Vec<i32> {
    let asked = |question: &str| chat_ids(&ChatInput::user(question), tokenizer?, template).ok();
    let (Some(one), Some(other)) = (asked("a"), asked("7")) else { return vec![] };
    let common = one.iter().rev().zip(other.iter().rev()).take_while(|(one, other)| one == other).count();
    let header = one[one.len() - common..].to_vec();
    let is_sign = header.len() > 1 || header.iter().any(|id| tokenizer.is_some_and(|known| known.is_special(*id)));
    if is_sign { header } else { vec![] }
}

fn in_vocabulary(ids: &[i32], tokenizer: &TextTokenizer) -> Result<Vec<i32>, PromptError> {
    let vocab_size = tokenizer.vocab_size();
    let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab_size);
    match ids.iter().position(|&id| !known(id)) {
        Some(index) => Err(PromptError::TokenOutOfRange { index, id: ids[index], vocab_size }),
        None => Ok(ids.to_vec()),
    }
}

fn category(object: &Map<String, Value>) -> Result<Option<String>, RowProblem> {
    match object.get("category") {
        None | Some(Value::Null) => Ok(None),
        Some(category) => text("category", category).map(Some),
    }
}

/// Passed on as it is: a name that is no string and no number is no reason to refuse the prompt.
fn id(object: &Map<String, Value>) -> Option<Value> {
    IDS.into_iter().find_map(|key| object.get(key).filter(|value| !value.is_null()).cloned())
}

fn input(object: &Map<String, Value>) -> Result<PromptInput, RowProblem> {
    match asked(object)? {
        (key, PromptInput::Chat(chat)) => before_the_answer(key, chat).map(PromptInput::Chat),
        (_, input) => Ok(input),
    }
}

fn questions(object: &Map<String, Value>) -> Result<Questions, RowProblem> {
    match asked(object)? {
        (_, PromptInput::Text(prompt)) => Ok(Questions::Text(prompt)),
        (_, PromptInput::Ids(ids)) => Ok(Questions::Ids(ids)),
        (key, PromptInput::Turns { opening, user }) => user_questions(key, opening.followed_by(&user)),
        (key, PromptInput::Chat(chat)) => user_questions(key, chat),
    }
}

/// The first known key that an object has, and the prompt that it holds.
fn asked(object: &Map<String, Value>) -> Result<(&'static str, PromptInput), RowProblem> {
    for key in ["prompt", "prompt_ids", "turns", "messages", "conversations"] {
        let Some(value) = object.get(key).filter(|value| !value.is_null()) else { continue };
        let input = match key {
            "prompt" if !value.is_array() => PromptInput::Text(text(key, value)?),
            "prompt_ids" => PromptInput::Ids(each(key, value, "a list of token ids", token)?),
            "turns" => {
                let user = each(key, value, "a list of strings", text)?;
                PromptInput::Turns { opening: Box::new(row_object(object).opening()?), user }
            }
            _ => PromptInput::Chat(chat(key, object)?.0),
        };
        return Ok((key, input));
    }
    let expected = "\"prompt\", \"messages\", \"conversations\", \"turns\" or \"prompt_ids\"";
    let found: Vec<_> = object.keys().map(|key| format!("{key:?}")).collect();
    Err(RowProblem::Value { key: "the keys".to_owned(), expected, got: found.join(", ") })
}

/// Read as a training row's conversation is; with the keys of its messages that are not read.
fn chat(key: &'static str, object: &Map<String, Value>) -> Result<(ChatInput, Vec<OtherKey>), RowProblem> {
    let mut row = row_object(object);
    let chat = row.conversation(key)?;
    let none = || RowProblem::Value { key: key.to_owned(), expected: "a list of messages", got: shown(&object[key]) };
    Ok((chat.filter(|chat| !chat.messages.is_empty()).ok_or_else(none)?, row.others))
}

fn row_object(object: &Map<String, Value>) -> RowObject {
    RowObject { columns: object.clone(), others: vec![] }
}

/// The keys of a prompt that are not read. Those of a training row, whose answer is to be decoded, are no loss. Text and token ids stand
/// alone: nothing beside them reaches a template.
fn other_keys(object: &Map<String, Value>) -> Vec<OtherKey> {
    let asked = asked(object).ok();
    let is_bare = matches!(asked, Some((_, PromptInput::Text(_) | PromptInput::Ids(_))));
    let is_known = |key: &str| {
        let is_column = row_keys::is_read(key) && !(is_bare && BESIDE.contains(&key));
        is_column || LISTS.contains(&key) || IDS.contains(&key) || ["turns", "prompt_ids"].contains(&key)
    };
    let others = object.iter().filter(|(key, value)| !is_known(key) && !is_nothing(value));
    let others = others.map(|(key, _)| row_keys::other_column(key));
    let in_messages = match asked {
        Some((key, PromptInput::Chat(_))) => chat(key, object).map(|(_, others)| others).unwrap_or_default(),
        _ => vec![],
    };
    others.chain(in_messages).collect()
}

fn user_questions(key: &str, ChatInput { messages, inputs }: ChatInput) -> Result<Questions, RowProblem> {
    let system = messages.first().filter(|first| first.is_from_system()).cloned();
    let opening = Box::new(ChatInput { messages: system.into_iter().collect(), inputs });
    for (at, message) in messages.iter().enumerate() {
        let is_kept_or_dropped = ["user", "assistant", "tool"].contains(&message.role.as_str());
        if !is_kept_or_dropped && (at > 0 || !message.is_from_system()) {
            let expected = "user, assistant or tool: the questions are asked anew, behind a first turn of the system";
            let (key, got) = (format!("{key}[{at}].role"), format!("{:?}", message.role));
            return Err(RowProblem::Value { key, expected, got });
        }
    }
    let user: Vec<String> =
        messages.into_iter().filter(|message| message.role == "user").map(|message| message.content).collect();
    if user.is_empty() {
        let got = "none".to_owned();
        return Err(RowProblem::Value { key: key.to_owned(), expected: "a turn of the user", got });
    }
    Ok(Questions::Turns { opening, user })
}

/// What stands before the answer that is to be decoded.
fn before_the_answer(key: &str, mut chat: ChatInput) -> Result<ChatInput, RowProblem> {
    while chat.messages.last().is_some_and(Message::is_from_assistant) {
        chat.messages.pop();
    }
    if chat.messages.iter().any(|message| !message.is_from_system()) {
        return Ok(chat);
    }
    let got = "none".to_owned();
    Err(RowProblem::Value { key: key.to_owned(), expected: "a turn for the assistant to answer", got })
}

fn each<T>(
    key: &str,
    value: &Value,
    expected: &'static str,
    item: impl Fn(&str, &Value) -> Result<T, RowProblem>,
) -> Result<Vec<T>, RowProblem> {
    match value.as_array().filter(|items| !items.is_empty()) {
        Some(items) => items.iter().enumerate().map(|(index, value)| item(&format!("{key}[{index}]"), value)).collect(),
        None => Err(RowProblem::Value { key: key.to_owned(), expected, got: shown(value) }),
    }
}

fn text(key: &str, value: &Value) -> Result<String, RowProblem> {
    let wrong = || RowProblem::Value { key: key.to_owned(), expected: "a string", got: shown(value) };
    value.as_str().map(str::to_owned).ok_or_else(wrong)
}

fn token(key: &str, value: &Value) -> Result<i32, RowProblem> {
    let wrong = || RowProblem::Value { key: key.to_owned(), expected: "a token id", got: shown(value) };
    value.as_i64().and_then(|id| i32::try_from(id).ok()).filter(|id| *id >= 0).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_line(line: &str) -> Result<Prompt, String> {
        let object = jsonl::object(line.as_bytes()).map_err(|problem| problem.to_string())?;
        let input = input(&object).map_err(|problem| problem.to_string())?;
        Ok(Prompt::new(input))
    }

    #[test]
    fn a_prompt_has_a_name_and_a_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prompts.jsonl");
        let write = |text: &str| {
            crate::files::write_atomic(&path, |out| std::io::Write::write_all(out, text.as_bytes())).unwrap();
            read(&path)
        };
        let prompts = write(
            "\n{\"prompt\": \"a\", \"id\": \"x\"}\n{\"question_id\": 81, \"turns\": [\"b\"]}\n{\"prompt\": \"c\"}\n{\"prompt\": \"d\", \"id\": [1]}",
        )
        .unwrap();
        let ids: Vec<Option<Value>> = prompts.iter().map(|prompt| prompt.id.clone()).collect();
        assert_eq!(ids, [Some("x".into()), Some(81.into()), None, Some(serde_json::json!([1]))]);
        assert_eq!(prompts[1].place.as_ref().unwrap().row, Some(("line", 3)));
        let file = PromptFile { name: "stdin".into(), bytes: b"{\"prompt\": 3}".to_vec() };
        let error = file.dialogues().unwrap_err().to_string();
        assert_eq!(error, "stdin, line 1: prompt: expected a string, got 3");
    }

    #[test]
    fn a_prompt_of_messages_is_a_conversation() {
        let line = r#"{"prompt": [{"role": "user", "content": "q"}]}"#;
        assert_eq!(read_line(line).unwrap().input, PromptInput::Chat(ChatInput::user("q")));
    }

    #[test]
    fn a_dialogue_has_all_that_the_user_says_and_no_answer() {
        let parsed = |line: &str| questions(&jsonl::object(line.as_bytes()).unwrap());
        let line = r#"{"conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "hello"},
            {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "observation", "value": "o"},
            {"from": "human", "value": "r"}, {"from": "gpt", "value": "b"}]}"#;
        let user = vec!["q".to_owned(), "r".to_owned()];
        let opening = Box::new(ChatInput { messages: vec![Message::new("system", "s")], ..ChatInput::default() });
        assert_eq!(parsed(line).unwrap(), Questions::Turns { opening, user: user.clone() });
        assert_eq!(parsed(r#"{"turns": ["q", "r"]}"#).unwrap(), Questions::Turns { opening: Box::default(), user });
        let complaint = parsed(r#"{"messages": [{"role": "assistant", "content": "a"}]}"#).unwrap_err().to_string();
        assert_eq!(complaint, "messages: expected a turn of the user, got none");
    }

    #[test]
    fn an_array_holds_the_same_prompts_as_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prompts");
        let read_text = |text: &str| {
            crate::files::write_atomic(&path, |out| std::io::Write::write_all(out, text.as_bytes())).unwrap();
            read(&path).map_err(|error| error.to_string().replace(&path.display().to_string(), "FILE"))
        };
        let lines = read_text("{\"prompt\": \"a\"}\n\n{\"prompt_ids\": [3], \"category\": \"c\"}\n").unwrap();
        let array = "\u{feff}\n[ {\"prompt\": \"a\"},\n {\"prompt_ids\": [3], \"category\": \"c\"}\n]";
        let inputs = |prompts: &[Prompt]| prompts.iter().map(|prompt| prompt.input.clone()).collect::<Vec<_>>();
        assert_eq!(inputs(&read_text(array).unwrap()), inputs(&lines));
        assert_eq!(read_text("[{\"prompt\": 1}]").unwrap_err(), "FILE, row 1: prompt: expected a string, got 1");
        assert!(read_text("[{\"prompt\": \"a\"},\n 3 4]").unwrap_err().contains("line 2, column 4"));
        assert_eq!(
            read_text("[{\"prompt\": \"a\"}, 3]").unwrap_err(),
            "FILE, row 2: the row: expected an object, got 3"
        );
        assert_eq!(read_text("[]").unwrap_err(), "FILE holds no prompt");
    }

    #[test]
    fn sharegpt_and_openai_name_the_same_conversation() {
        let sharegpt = r#"{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
        let openai = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]}"#;
        let expected = PromptInput::Chat(ChatInput {
            messages: vec![Message::new("system", "s"), Message::new("user", "q")],
            ..ChatInput::default()
        });
        assert_eq!(read_line(sharegpt).unwrap().input, expected);
        assert_eq!(read_line(openai).unwrap().input, expected);
    }

    #[test]
    fn what_stands_beside_a_conversation_is_read_and_other_keys_are_counted() {
        let line = r#"{"conversations": [{"from": "human", "value": "r"}, {"from": "gpt", "value": "a"}], "system": "s",
            "history": [["q", "b"]], "tools": "[]", "id": 1, "temperature": 2, "labels": [1]}"#;
        let Prompt { input: PromptInput::Chat(chat), .. } = read_line(line).unwrap() else { panic!("a conversation") };
        let turns = [("system", "s"), ("user", "q"), ("assistant", "b"), ("user", "r")];
        assert_eq!(chat.messages, turns.map(|(role, content)| Message::new(role, content)));
        let keys = other_keys(&jsonl::object(line.as_bytes()).unwrap());
        assert_eq!(keys, [(row_keys::ColumnUse::NotRead, "temperature".to_owned())]);
    }

    #[test]
    fn turns_are_asked_in_their_context_and_text_has_none() {
        let beside = r#""system": "s", "chat_template_kwargs": {"enable_thinking": false}, "images": []"#;
        let object = |line: String| jsonl::object(line.as_bytes()).unwrap();
        let turns = object(format!(r#"{{"turns": ["q", "r"], {beside}}}"#));
        let Questions::Turns { opening, user } = questions(&turns).unwrap() else { panic!("turns") };
        assert_eq!((&opening.messages[..], user), (&[Message::new("system", "s")][..], vec!["q".into(), "r".into()]));
        assert_eq!(Value::from(opening.inputs.kwargs.clone()), json!({"enable_thinking": false}));
        let first = input(&turns).unwrap().to_openai();
        assert_eq!(first["messages"], json!([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]));
        assert_eq!(other_keys(&turns), []);
        for alone in [r#""prompt": "a""#, r#""prompt_ids": [1]"#] {
            let names = other_keys(&object(format!("{{{alone}, {beside}}}"))).into_iter().map(|(_, name)| name);
            assert_eq!(names.collect::<Vec<_>>(), ["system", "chat_template_kwargs"], "{alone}");
        }
    }

    #[test]
    fn a_complaint_names_the_key() {
        let complaint = |line| read_line(line).unwrap_err();
        assert_eq!(complaint(r#"{"prompt": 3}"#), "prompt: expected a string, got 3");
        assert_eq!(complaint(r#"{"prompt_ids": [1, -1]}"#), "prompt_ids[1]: expected a token id, got -1");
        assert_eq!(complaint(r#"{"turns": []}"#), "turns: expected a list of strings, got []");
        assert_eq!(
            complaint(r#"{"messages": [{"role": "user"}]}"#),
            "messages[0].content: expected a string or a list of text parts, got null"
        );
        assert!(complaint(r#"{"messages": [{"role": "assistant", "content": "a"}]}"#).contains("to answer"));
        assert!(complaint(r#"{"text": "a"}"#).ends_with(r#"got "text""#));
    }
}
