//! Conversations to text, by the backbone's own template, as transformers renders it. Knows nothing of tokens.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fs, io};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::tokenize::{SpecialTokens, TokenizeError, read_json};

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A turn of this role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// What can be wrong with a chat template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A file beside the tokenizer that is not right.
    #[error(transparent)]
    Files(#[from] TokenizeError),
    /// The disk's own words.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something that is no template.
    #[error(
        "{}: chat_template: expected a template, or a list of {{\"name\", \"template\"}} with one named \"default\", \
         got {got}", path.display()
    )]
    Shape {
        /// tokenizer_config.json.
        path: PathBuf,
        /// What stands there.
        got: String,
    },
    /// A template that does not parse.
    #[error("{}: the chat template cannot be parsed", path.display())]
    Syntax {
        /// Where it stands.
        path: PathBuf,
        /// Where in it, and why.
        source: minijinja::Error,
    },
    /// A conversation the template refuses, or a fault of the template.
    #[error("{}: the chat template cannot render this conversation (roles: {})", path.display(), roles.join(", "))]
    Render {
        /// Where it stands.
        path: PathBuf,
        /// The conversation's.
        roles: Vec<String>,
        /// Where in the template, and why.
        source: minijinja::Error,
    },
}

/// A backbone's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    path: PathBuf,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// The template of chat_template.jinja, else of tokenizer_config.json; `None` for a backbone without one.
    ///
    /// # Errors
    /// Files that cannot be read, a template that does not parse.
    pub fn load(folder: &Path) -> Result<Option<Self>, TemplateError> {
        let path = folder.join("chat_template.jinja");
        let special = SpecialTokens::load(folder)?;
        match fs::read_to_string(&path) {
            Ok(source) => return Self::parse(source, special, path).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(TemplateError::Read { path, source }),
        }
        let path = folder.join("tokenizer_config.json");
        let config = read_json(&path)?.unwrap_or_default();
        match &config["chat_template"] {
            serde_json::Value::Null => Ok(None),
            value => {
                let got = || super::jsonl::shown(value);
                let source =
                    default_of(value).ok_or_else(|| TemplateError::Shape { path: path.clone(), got: got() })?;
                Self::parse(source.to_owned(), special, path).map(Some)
            }
        }
    }

    /// A conversation as text, special tokens included; `add_generation_prompt` opens the assistant's next turn.
    ///
    /// # Errors
    /// What the template raises, for example for roles that do not alternate.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TemplateError> {
        let failed = |source| {
            let roles = messages.iter().map(|message| message.role.clone()).collect();
            TemplateError::Render { path: self.path.clone(), roles, source }
        };
        // What transformers passes; it leaves out special tokens that the tokenizer lacks.
        let special = Value::from_pairs(self.special.iter());
        let message = |message: &Message| {
            Value::from_pairs([("role", message.role.clone()), ("content", message.content.clone())])
        };
        let messages: Vec<Value> = messages.iter().map(message).collect();
        let own = context! { messages, add_generation_prompt, tools => (), documents => () };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        template.render(context! { ..own, ..special }).map_err(failed)
    }

    fn parse(source: String, special: SpecialTokens, path: PathBuf) -> Result<Self, TemplateError> {
        match environment(&source) {
            Ok(environment) => Ok(Self { environment, special, path }),
            Err(source) => Err(TemplateError::Syntax { path, source }),
        }
    }
}

/// A template, or the one named "default" of several.
fn default_of(value: &serde_json::Value) -> Option<&str> {
    let named = || value.as_array()?.iter().find(|entry| entry["name"] == "default")?["template"].as_str();
    value.as_str().or_else(named)
}

/// Jinja as transformers sets it up, with one template.
fn environment(template: &str) -> Result<Environment<'static>, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: &str| strftime(format, seconds_now()));
    environment.add_template_owned(NAME, without_generation_tags(template))?;
    Ok(environment)
}

/// `{% generation %}` marks the assistant's tokens for training; it renders what it holds.
/// Replaced by a block that always renders, so that its whitespace control stays.
fn without_generation_tags(source: &str) -> String {
    let mut rendered = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        let Some((tag, after)) = tag.split_once("%}") else { break };
        let word = tag.trim_matches(['-', '+']).trim();
        let tag = match word {
            "generation" => tag.replace(word, "if true"),
            "endgeneration" => tag.replace(word, "endif"),
            _ => tag.to_owned(),
        };
        rendered.extend([before, "{%", &tag, "%}"]);
        rest = after;
    }
    rendered + rest
}

/// Python's json.dumps(ensure_ascii=False), which transformers uses: minijinja's own escapes HTML.
fn tojson(value: &Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.assert_all_used()?;
    let spaces = " ".repeat(indent.unwrap_or_default());
    let mut json = Vec::new();
    let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
    let written = match indent {
        Some(_) => value.serialize(&mut Serializer::with_formatter(&mut json, pretty)),
        None => value.serialize(&mut Serializer::with_formatter(&mut json, PythonFormatter)),
    };
    let failed = |error: String| minijinja::Error::new(ErrorKind::BadSerialization, error);
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(json).map_err(|error| failed(error.to_string()))
}

/// A space behind every comma and colon.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The directives that chat templates use (a date, rarely a time), in UTC: the day does not depend on the machine.
fn strftime(format: &str, unix_seconds: u64) -> Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, seconds) = (unix_seconds / 86400, unix_seconds % 86400);
    let (year, month, day) = civil(days);
    let (month_name, day_name) = (MONTHS[month - 1], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let part = match letters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => format!("{:02}", seconds / 3600),
            Some('M') => format!("{:02}", seconds / 60 % 60),
            Some('S') => format!("{:02}", seconds % 60),
            Some('%') => "%".to_owned(),
            other => {
                let got = other.map(String::from).unwrap_or_default();
                let message = format!("strftime_now: expected one of %Y %y %m %d %B %b %A %a %H %M %S %%, got %{got}");
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        text.push_str(&part);
    }
    Ok(text)
}

/// Year, month and day of a day since 1970-01-01: Howard Hinnant's `civil_from_days`, for days not before it.
fn civil(days: u64) -> (u64, usize, u64) {
    let days = days + 719_468; // since 0000-03-01: a leap day ends its year
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    (era * 400 + year_of_era + u64::from(month <= 2), month as usize, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(template: &str, messages: &[Message]) -> Result<String, TemplateError> {
        ChatTemplate::parse(template.to_owned(), SpecialTokens::default(), PathBuf::from("x.jinja"))?
            .render(messages, true)
    }

    #[test]
    fn blocks_on_their_own_lines_leave_no_space() {
        let template = "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m['content'].strip() }}]\n  {% endif %}\n{% endfor %}\n{{ tools is none }}{{ bos_token }}";
        assert_eq!(rendered(template, &[Message::new("user", " hi <&> ")]).unwrap(), "[hi <&>]\nTrue");
    }

    #[test]
    fn json_is_pythons() {
        let template = "{{ {'a': [1, 2], 'b': '<é>'} | tojson }} {{ {'a': []} | tojson(indent=4) }}";
        assert_eq!(rendered(template, &[]).unwrap(), "{\"a\": [1, 2], \"b\": \"<é>\"} {\n    \"a\": []\n}");
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
    fn generation_tags_render_what_they_hold() {
        let template = "a\n{%- generation -%}\n b \n{%- endgeneration -%}\n{% break_ %}";
        assert_eq!(without_generation_tags(template), "a\n{%- if true -%}\n b \n{%- endif -%}\n{% break_ %}");
        assert!(rendered("{% generation %}x{% endgeneration %} {% open", &[]).is_err());
        assert_eq!(rendered("{% generation %}x{% endgeneration %}", &[]).unwrap(), "x");
    }

    #[test]
    fn dates_are_written_as_python_writes_them() {
        let at = |seconds| strftime("%A %d %b %Y %H:%M:%S %m/%y", seconds).unwrap();
        assert_eq!(at(0), "Thursday 01 Jan 1970 00:00:00 01/70");
        assert_eq!(at(951_827_696), "Tuesday 29 Feb 2000 12:34:56 02/00");
        assert_eq!(at(1_735_689_599), "Tuesday 31 Dec 2024 23:59:59 12/24");
        assert!(strftime("%Q", 0).is_err());
    }
}
