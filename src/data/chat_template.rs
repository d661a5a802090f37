//! Renders conversations to text with the backbone's own chat template or another, as transformers does. Knows nothing of tokens.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use minijinja::value::{Serde, Value};
use minijinja::{ErrorKind, context};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::answer_frame::AnswerFrame;
use super::conversation::is_known_role;
pub use super::conversation::{Message, TemplateInputs};
use super::jinja::{self, MARKS, Template};
use super::marked::WrittenText;
use super::shown::shown;
use super::template_abilities::{self, Abilities, names};
use super::tokenize::{SpecialTokens, TokenizeError, read_json, special_tokens};
use crate::bounds::{TEMPLATE_OUTPUT_BYTES, TEMPLATE_STEPS, TEXT_BYTES};
use crate::files;
use crate::gguf::folder;

/// Templates that a recipe can name. Each renders what transformers renders with the template that is published with:
/// Vicuna (FastChat's "vicuna_v1.1"), zephyr-7b-beta, Llama-2-chat, Meta-Llama-3-Instruct, ChatML as transformers
/// documents it, Mistral-7B-Instruct-v0.1.
const BUILT_IN: [BuiltIn; 6] = [
    BuiltIn { name: "vicuna", source: include_str!("chat_templates/vicuna.jinja") },
    BuiltIn { name: "zephyr", source: include_str!("chat_templates/zephyr.jinja") },
    BuiltIn { name: "llama-2", source: include_str!("chat_templates/llama-2.jinja") },
    BuiltIn { name: "llama-3", source: include_str!("chat_templates/llama-3.jinja") },
    BuiltIn { name: "chatml", source: include_str!("chat_templates/chatml.jinja") },
    BuiltIn { name: "mistral", source: include_str!("chat_templates/mistral.jinja") },
];

/// A built-in template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuiltIn {
    name: &'static str,
    source: &'static str,
}

/// `data.chat_template` of a recipe.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TemplateChoice {
    /// The backbone's own.
    #[default]
    Tokenizer,
    /// One that this program brings.
    BuiltIn(BuiltIn),
    /// A file of the user's; its name ends in `.jinja`.
    File(PathBuf),
}

/// Why a chat template cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A file beside the tokenizer that is not right.
    #[error(transparent)]
    Files(#[from] TokenizeError),
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// Something that is no template.
    #[error(
        "{}: chat_template: expected a template, or a list of {{\"name\", \"template\"}} with one named \"default\", \
         got {got}", path.display()
    )]
    Shape {
        /// tokenizer_config.json.
        path: PathBuf,
        got: String,
    },
    /// A template that does not parse.
    #[error(
        "{place}: the chat template cannot be used; correct it, or set data.chat_template to another one: {} or a .jinja file",
        TemplateChoice::built_in_names()
    )]
    Syntax {
        place: String,
        /// Where in it, and why.
        source: minijinja::Error,
    },
    /// A conversation the template refuses, or a fault of the template.
    #[error("{place}: the chat template cannot render this conversation (roles: {})", roles.join(", "))]
    Render {
        place: String,
        roles: Vec<String>,
        /// Where in the template, and why.
        source: minijinja::Error,
    },
    /// A turn that the template does not write.
    #[error(
        "{place}: the chat template writes nothing of turn {turn} (role {role:?}); give it a role that the template writes"
    )]
    NotWritten {
        place: String,
        /// Counted from 1.
        turn: usize,
        role: String,
    },
    /// A role that neither data sets nor the template have.
    #[error(
        "turn {turn}: expected the role system, developer, user, assistant or tool, or one that the chat template names, got {role:?}"
    )]
    UnknownRole {
        /// Counted from 1.
        turn: usize,
        role: String,
    },
    /// A template that does not come to an end.
    #[error(
        "{place}: the chat template did not end within {TEMPLATE_STEPS} steps on a conversation of {turns} turns; does it loop? Set \
         data.chat_template to another one: {} or a .jinja file",
        TemplateChoice::built_in_names()
    )]
    Endless {
        place: String,
        /// How many messages it was given.
        turns: usize,
    },
    /// A conversation of more tokens than any context.
    #[error(
        "a conversation of {turns} turns has {bytes} bytes, and the most that is rendered is {TEXT_BYTES}; divide it"
    )]
    TooLong { turns: usize, bytes: usize },
    /// A template that writes far more than a text of the conversation.
    #[error(
        "{place}: the chat template wrote more than {TEMPLATE_OUTPUT_BYTES} bytes of a conversation of {turns} turns. Set data.chat_template \
         to another one: {} or a .jinja file",
        TemplateChoice::built_in_names()
    )]
    TooMuch {
        place: String,
        /// How many messages it was given.
        turns: usize,
    },
}

impl TemplateError {
    /// Whether the argument is not a template at all.
    pub fn is_no_template(&self) -> bool {
        matches!(self, Self::Shape { .. } | Self::Syntax { .. })
    }

    /// What a template raised, in its own words.
    pub fn words(&self) -> String {
        match self {
            Self::Render { source, .. } => source.detail().map_or_else(|| source.to_string(), str::to_owned),
            Self::NotWritten { role, .. } => format!("it writes nothing of a turn of the role {role:?}"),
            other => other.to_string(),
        }
    }
}

/// A chat template with a backbone's special tokens.
#[derive(Debug)]
pub struct ChatTemplate {
    template: Template,
    source: String,
    special: SpecialTokens,
    place: String,
    sha256: String,
    /// Whether the template marks the assistant's text with `{% generation %}`.
    pub(super) marks_generation: bool,
    abilities: Abilities,
    /// What it writes around an answer; `None` where it refuses or changes short conversations.
    pub(super) frame: Option<AnswerFrame>,
}

/// A rendered conversation, and the bytes of it that were between marks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MarkedText {
    pub(super) text: String,
    pub(super) spans: Vec<Range<usize>>,
}

impl TemplateChoice {
    /// The names of the built-in templates, as an error lists them.
    pub fn built_in_names() -> String {
        BUILT_IN.map(|BuiltIn { name, .. }| format!("{name:?}")).join(", ")
    }
}

impl TryFrom<String> for TemplateChoice {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        if name == "tokenizer" {
            return Ok(Self::Tokenizer);
        }
        if let Some(known) = BUILT_IN.into_iter().find(|known| known.name == name) {
            return Ok(Self::BuiltIn(known));
        }
        if Path::new(&name).extension().is_some_and(|extension| extension == "jinja") {
            return Ok(Self::File(name.into()));
        }
        let names = Self::built_in_names();
        Err(format!("expected \"tokenizer\", one of {names}, or the path of a .jinja file, got {name:?}"))
    }
}

impl From<TemplateChoice> for String {
    fn from(choice: TemplateChoice) -> Self {
        match choice {
            TemplateChoice::Tokenizer => "tokenizer".to_owned(),
            TemplateChoice::BuiltIn(BuiltIn { name, .. }) => name.to_owned(),
            TemplateChoice::File(path) => path.display().to_string(),
        }
    }
}

impl ChatTemplate {
    /// The template of chat_template.jinja, else of tokenizer_config.json; `None` for a backbone without one.
    ///
    /// # Errors
    /// Files that cannot be read, a template that does not parse.
    pub fn load(folder: &Path) -> Result<Option<Self>, TemplateError> {
        match Self::from_file(&folder.join("chat_template.jinja"), folder) {
            Err(TemplateError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            read => return read.map(Some),
        }
        let path = folder.join("tokenizer_config.json");
        let config = read_json(&path)?.unwrap_or_default();
        match &config["chat_template"] {
            serde_json::Value::Null => Ok(None),
            value => {
                let shape = || TemplateError::Shape { path: path.clone(), got: shown(value) };
                let source = default_of(value).ok_or_else(shape)?;
                Self::parse(source, special_tokens(folder)?, path.display().to_string()).map(Some)
            }
        }
    }

    /// The template of a file, with the special tokens of the backbone in `folder`.
    fn from_file(path: &Path, folder: &Path) -> Result<Self, TemplateError> {
        let special = special_tokens(folder)?;
        let unreadable = |source| TemplateError::Read { path: path.to_owned(), source };
        Self::parse(&folder::read_text(path).map_err(unreadable)?, special, path.display().to_string())
    }

    /// The template of a recipe, with the special tokens of the backbone in `folder`; `None` for the choice of the
    /// backbone's own where it has none.
    ///
    /// # Errors
    /// Files that cannot be read, a template that does not parse.
    pub fn choose(choice: &TemplateChoice, folder: &Path) -> Result<Option<Self>, TemplateError> {
        match choice {
            TemplateChoice::Tokenizer => Self::load(folder),
            TemplateChoice::BuiltIn(BuiltIn { name, source }) => {
                Self::parse(source, special_tokens(folder)?, format!("the built-in template {name:?}")).map(Some)
            }
            TemplateChoice::File(path) => Self::from_file(path, folder).map(Some),
        }
    }

    /// A conversation as text, special tokens included; `add_generation_prompt` opens the assistant's next turn.
    ///
    /// # Errors
    /// What the template raises, for example for roles that do not alternate.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TemplateError> {
        self.render_with(messages, &TemplateInputs::default(), add_generation_prompt)
    }

    /// As [`ChatTemplate::render`], with tools and variables.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_with(
        &self,
        messages: &[Message],
        inputs: &TemplateInputs,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        Ok(self.written(messages, inputs, add_generation_prompt)?.text)
    }

    /// Renders a conversation, and finds where in the text each message stands.
    ///
    /// # Errors
    /// An error of the template; a turn that it does not write, other than the assistant's.
    pub(super) fn written(
        &self,
        messages: &[Message],
        inputs: &TemplateInputs,
        add_generation_prompt: bool,
    ) -> Result<WrittenText, TemplateError> {
        let is_unknown = |role: &str| !is_known_role(role) && !names(&self.source, role);
        if let Some(at) = messages.iter().position(|message| is_unknown(&message.role)) {
            return Err(TemplateError::UnknownRole { turn: at + 1, role: messages[at].role.clone() });
        }
        let render = |messages: &[Message]| self.render_between(messages, inputs, add_generation_prompt, ["", ""]);
        let written = WrittenText::of(&self.abilities.adapt(messages), render)?;
        match written.unwritten(|at| !messages[at].is_from_assistant()) {
            Some(at) => {
                let (place, role) = (self.place.clone(), messages[at].role.clone());
                Err(TemplateError::NotWritten { place, turn: at + 1, role })
            }
            None => Ok(written),
        }
    }

    /// How many messages have calls that the template does not write.
    pub(super) fn calls_as_text(&self, messages: &[Message]) -> usize {
        match self.abilities.writes_calls() {
            true => 0,
            false => messages.iter().filter(|message| message.calls().is_some()).count(),
        }
    }

    /// What decides a rendered text: the template and the special tokens.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// The text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template reads a variable that [`TemplateInputs::names`] has.
    pub fn reads_variable(&self, name: &str) -> bool {
        template_abilities::has_variable(&self.source, name.rsplit('.').next().unwrap_or(name))
    }

    /// Where the template stands.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// A whole conversation, and what of it stands in `{% generation %}` blocks.
    pub(super) fn render_generation(
        &self,
        messages: &[Message],
        inputs: &TemplateInputs,
    ) -> Result<Option<MarkedText>, TemplateError> {
        let Some([start, end]) = MarkedText::marks(messages) else { return Ok(None) };
        let marks = [start, end].map(String::from);
        let messages = self.abilities.adapt(messages);
        let text = self.render_between(&messages, inputs, false, [&marks[0], &marks[1]])?;
        Ok(MarkedText::read(&text, [start, end]))
    }

    fn render_between(
        &self,
        messages: &[Message],
        inputs: &TemplateInputs,
        add_generation_prompt: bool,
        marks: [&str; 2],
    ) -> Result<String, TemplateError> {
        let failed = |source: minijinja::Error| {
            let (place, turns) = (self.place.clone(), messages.len());
            let roles = messages.iter().map(|message| message.role.clone()).collect();
            match source.kind() {
                ErrorKind::OutOfFuel => TemplateError::Endless { place, turns },
                ErrorKind::WriteFailure => TemplateError::TooMuch { place, turns },
                _ => TemplateError::Render { place, roles, source },
            }
        };
        let input = messages.iter().map(Message::size).sum::<usize>() + inputs.size();
        if input > TEXT_BYTES {
            return Err(TemplateError::TooLong { turns: messages.len(), bytes: input });
        }
        // What transformers passes; it leaves out special tokens that the tokenizer lacks.
        let special = Value::from_pairs(self.special.iter());
        let marks = Value::from_pairs(MARKS.into_iter().zip(marks));
        let kwargs = Value::from(Serde(&inputs.kwargs));
        let messages: Vec<Value> = messages.iter().map(Message::value).collect();
        let own = context! { messages, add_generation_prompt, tools => Serde(&inputs.tools), documents => () };
        self.template.render(context! { ..own, ..kwargs, ..special, ..marks }).map_err(failed)
    }

    fn parse(source: &str, special: SpecialTokens, place: String) -> Result<Self, TemplateError> {
        let broken = |source| TemplateError::Syntax { place: place.clone(), source };
        let template = Template::new(source).map_err(broken)?;
        let marks_generation = jinja::marks_generation(source);
        let sha256 = files::hex(&Sha256::digest(format!("{special:?}\n{source}")));
        let source = source.to_owned();
        let mut template = Self {
            template,
            source,
            special,
            place,
            sha256,
            marks_generation,
            abilities: Abilities::default(), // found out below, with it
            frame: None,
        };
        template.abilities = Abilities::of(&template.source, |messages| template.tried(messages))?;
        template.frame = AnswerFrame::of(|messages, opened| {
            let render =
                |messages: &[Message]| template.render_between(messages, &TemplateInputs::default(), opened, ["", ""]);
            WrittenText::of(messages, render).ok()
        });
        Ok(template)
    }

    /// What the template makes of a conversation, which it may refuse.
    fn tried(&self, messages: &[Message]) -> Result<String, TemplateError> {
        match self.render_between(messages, &TemplateInputs::default(), false, ["", ""]) {
            Err(error @ (TemplateError::Endless { .. } | TemplateError::TooMuch { .. })) => Err(error),
            rendered => Ok(rendered.unwrap_or_default()),
        }
    }
}

impl MarkedText {
    /// Two characters that stand in no message: from those that Unicode keeps for a program's own use (noncharacters).
    pub(super) fn marks(messages: &[Message]) -> Option<[char; 2]> {
        let mut free =
            ('\u{fdd0}'..='\u{fdef}').filter(|mark| !messages.iter().any(|message| message.content.contains(*mark)));
        Some([free.next()?, free.next()?])
    }

    /// Takes the marks out; `None` where they do not come in pairs.
    pub(super) fn read(marked: &str, [start, end]: [char; 2]) -> Option<Self> {
        let (mut text, mut spans, mut open) = (String::with_capacity(marked.len()), Vec::new(), None);
        for letter in marked.chars() {
            if letter == start {
                if open.replace(text.len()).is_some() {
                    return None;
                }
            } else if letter == end {
                spans.push(open.take()?..text.len());
            } else {
                text.push(letter);
            }
        }
        open.is_none().then_some(Self { text, spans })
    }
}

/// A template, or the one named "default" of several.
fn default_of(value: &serde_json::Value) -> Option<&str> {
    let named = || value.as_array()?.iter().find(|entry| entry["name"] == "default")?["template"].as_str();
    value.as_str().or_else(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(template: &str, messages: &[Message]) -> Result<String, TemplateError> {
        ChatTemplate::parse(template, SpecialTokens::default(), "x.jinja".to_owned())?.render(messages, true)
    }

    #[test]
    fn blocks_on_their_own_lines_leave_no_space() {
        let template = "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m['content'].strip() }}]\n  {% endif %}\n{% endfor %}\n{{ tools is none }}{{ bos_token }}";
        assert_eq!(rendered(template, &[Message::new("user", " hi <&> ")]).unwrap(), "[hi <&>]\nTrue");
    }

    #[test]
    fn what_a_template_raises_reaches_the_user() {
        let template = "{{ raise_exception('Conversation roles must alternate') }}";
        let error = rendered(template, &[Message::new("user", "a"), Message::new("user", "b")]).unwrap_err();
        assert!(error.to_string().contains("x.jinja") && error.to_string().contains("user, user"), "{error}");
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("roles must alternate"), "{cause}");
    }

    #[test]
    fn marks_are_read_in_pairs_and_never_taken_from_a_message() {
        let spans = |text| MarkedText::read(text, ['<', '>']).map(|marked| (marked.text, marked.spans));
        assert_eq!(spans("é<ab>c<>"), Some(("éabc".to_owned(), vec![2..4, 5..5])));
        assert_eq!((spans("<a"), spans("a>"), spans("<<a>>")), (None, None, None));
        let taken = [Message::new("user", "\u{fdd0} \u{fdd2}")];
        assert_eq!(MarkedText::marks(&taken), Some(['\u{fdd1}', '\u{fdd3}']));
        assert_eq!(MarkedText::marks(&[Message::new("user", ('\u{fdd0}'..='\u{fdee}').collect::<String>())]), None);
    }

    #[test]
    fn every_built_in_template_parses() {
        let folder = Path::new("of no backbone");
        for BuiltIn { name, .. } in BUILT_IN {
            let choice = TemplateChoice::try_from(name.to_owned()).unwrap();
            assert_eq!(String::from(choice.clone()), name);
            assert!(ChatTemplate::choose(&choice, folder).unwrap().is_some(), "{name}");
        }
    }
}
