//! Jinja as transformers sets it up for chat templates. Knows nothing of messages.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use crate::bounds::{QUOTED_CHARACTERS, TEMPLATE_BYTES, TEMPLATE_OUTPUT_BYTES, TEMPLATE_STEPS};
use crate::panics;

/// Names in the context for what is written before and behind a `{% generation %}` block: nothing, unless they are set.
pub(super) const MARKS: [&str; 2] = ["generation_starts_here", "generation_ends_here"];

const GENERATION: &str = "generation";

/// The template's name in errors.
const NAME: &str = "chat_template";

/// Jinja as transformers sets it up, with one template. It is code of whoever made the model: what it may do to the process is in SECURITY.md.
#[derive(Debug)]
pub(super) struct Template(Environment<'static>);

impl Template {
    pub(super) fn new(source: &str) -> Result<Self, Error> {
        if source.len() > TEMPLATE_BYTES {
            return Err(refused(format!("expected at most {TEMPLATE_BYTES} bytes, got {}", source.len())));
        }
        let source = with_marks(&source.replace("\r\n", "\n").replace('\r', "\n")); // Jinja's newline_sequence
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_debug(false); // errors of a debug build would show all variables
        environment.set_fuel(Some(TEMPLATE_STEPS));
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: &str| -> Result<Value, Error> {
            Err(refused(message.chars().take(QUOTED_CHARACTERS).collect()))
        });
        environment.add_function("strftime_now", |format: &str| strftime(format, seconds_now()));
        catch(|| environment.add_template_owned(NAME, source))?;
        Ok(Self(environment))
    }

    /// An output of more than [`TEMPLATE_OUTPUT_BYTES`] is an [`ErrorKind::WriteFailure`].
    pub(super) fn render(&self, context: Value) -> Result<String, Error> {
        let mut text = Limited(Vec::new());
        catch(|| self.0.get_template(NAME)?.render_captured_to(context, &mut text).map(drop))?;
        String::from_utf8(text.0).map_err(|error| refused(error.to_string()))
    }
}

/// Runs minijinja on a user's template; a panic in it becomes an error.
fn catch<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    panics::catch(work).unwrap_or_else(|panic| Err(refused(panic)))
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// `{% generation %}` holds what the assistant says: what it renders stays, between the two marks of the context.
/// Each tag becomes two blocks that always render, so that its whitespace control stays on both sides of the mark.
fn with_marks(source: &str) -> String {
    let mut rendered = String::with_capacity(source.len());
    for piece in Pieces::of(source) {
        match piece {
            Piece::Tag(tag) => {
                let word = word_of(tag);
                let tag = match word {
                    GENERATION => tag.replacen(word, &format!("if true %}}{{{{ {} }}}}{{% if true", MARKS[0]), 1),
                    "endgeneration" => tag.replacen(word, &format!("endif %}}{{{{ {} }}}}{{% endif", MARKS[1]), 1),
                    _ => tag.to_owned(),
                };
                rendered.extend(["{%", &tag, "%}"]);
            }
            Piece::Other(text) => rendered += text,
        }
    }
    rendered
}

/// Whether a template says itself which text is the assistant's.
pub(super) fn marks_generation(source: &str) -> bool {
    Pieces::of(source).any(|piece| matches!(piece, Piece::Tag(tag) if word_of(tag) == GENERATION))
}

fn word_of(tag: &str) -> &str {
    tag.trim_matches(['-', '+']).trim()
}

/// A template's tags `{% … %}`, without their brackets, and all between them as it stands: text, expressions, comments, what is raw.
enum Piece<'s> {
    Tag(&'s str),
    Other(&'s str),
}

struct Pieces<'s> {
    rest: &'s str,
    raw: bool,
}

impl<'s> Pieces<'s> {
    fn of(source: &'s str) -> Self {
        Self { rest: source, raw: false }
    }

    /// Bytes before the next tag. Jinja itself reports an expression or comment that does not end.
    fn before_tag(&self) -> usize {
        let mut at = 0;
        while let Some(found) = self.rest[at..].find('{') {
            at += found;
            let rest = &self.rest[at..];
            let end = match rest.as_bytes().get(1) {
                Some(b'%')
                    if !self.raw || rest[2..].trim_start_matches(['-', '+']).trim_start().starts_with("endraw") =>
                {
                    return at;
                }
                Some(b'#') if !self.raw => rest.find("#}").map(|end| end + 2),
                Some(b'{') if !self.raw => end_of_code(&rest[2..], "}}").map(|end| end + 4),
                _ => Some(1),
            };
            let Some(end) = end else { break };
            at += end;
        }
        self.rest.len()
    }
}

impl<'s> Iterator for Pieces<'s> {
    type Item = Piece<'s>;

    fn next(&mut self) -> Option<Piece<'s>> {
        let rest = self.rest;
        if rest.is_empty() {
            return None;
        }
        let before = self.before_tag();
        if before > 0 {
            self.rest = &rest[before..];
            return Some(Piece::Other(&rest[..before]));
        }
        let inner = &rest[2..];
        let end = if self.raw { inner.find("%}") } else { end_of_code(inner, "%}") }; // in raw text only the tag that ends it
        let Some(end) = end else {
            self.rest = "";
            return Some(Piece::Other(rest));
        };
        let tag = &inner[..end];
        match word_of(tag) {
            "raw" => self.raw = true,
            "endraw" => self.raw = false,
            _ if self.raw => {
                self.rest = inner; // such as endrawer
                return Some(Piece::Other("{%"));
            }
            _ => {}
        }
        self.rest = &inner[end + 2..];
        Some(Piece::Tag(tag))
    }
}

/// Where code ends: the first `end` that stands in no string and no dict.
fn end_of_code(code: &str, end: &str) -> Option<usize> {
    let (mut quote, mut escaped, mut depth) = (None, false, 0usize);
    for (at, letter) in code.char_indices() {
        match quote {
            None if depth == 0 && code[at..].starts_with(end) => return Some(at),
            None => {
                depth = if letter == '{' { depth + 1 } else { depth.saturating_sub(usize::from(letter == '}')) };
                quote = ['\'', '"'].into_iter().find(|mark| *mark == letter);
            }
            Some(_) if escaped => escaped = false,
            Some(_) if letter == '\\' => escaped = true,
            Some(mark) if mark == letter => quote = None,
            Some(_) => {}
        }
    }
    None
}

/// Python's json.dumps, by default with ensure_ascii=False as in transformers: minijinja's own escapes HTML.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let spaces = " ".repeat(indent.unwrap_or_default());
    let mut json = Limited(Vec::new());
    let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
    let written = match indent {
        Some(_) => value.serialize(&mut Serializer::with_formatter(&mut json, pretty)),
        None => value.serialize(&mut Serializer::with_formatter(&mut json, PythonFormatter)),
    };
    let failed = |error: String| Error::new(ErrorKind::BadSerialization, error);
    written.map_err(|error| failed(error.to_string()))?;
    let json = String::from_utf8(json.0).map_err(|error| failed(error.to_string()))?;
    Ok(if ensure_ascii == Some(true) { in_ascii(&json) } else { json })
}

/// A value as Python's json.dumps writes it, with ensure_ascii=False.
pub(super) fn python_json(value: &serde_json::Value) -> String {
    let mut json = Vec::new();
    let written = value.serialize(&mut Serializer::with_formatter(&mut json, PythonFormatter));
    written.expect("a value of JSON is JSON");
    String::from_utf8(json).expect("JSON is UTF-8")
}

/// Text of a size that a template may write.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEMPLATE_OUTPUT_BYTES {
            return Err(io::Error::other("it is too long"));
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// JSON with escapes for all characters beyond ASCII.
fn in_ascii(json: &str) -> String {
    let escaped = |letter: char| -> String {
        letter.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect()
    };
    json.chars().map(|letter| if letter.is_ascii() { letter.to_string() } else { escaped(letter) }).collect()
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

fn seconds_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed())
}

/// The directives that chat templates use (a date, rarely a time), in UTC: the day does not depend on the machine.
fn strftime(format: &str, unix_seconds: i64) -> Result<String, Error> {
    let mut letters = format.chars();
    while letters.any(|letter| letter == '%') {
        let got = letters.next().map(String::from).unwrap_or_default();
        if got.is_empty() || !"YymdBbAaHMS%".contains(&got) {
            let message = format!("strftime_now: expected one of %Y %y %m %d %B %b %A %a %H %M %S %%, got %{got}");
            return Err(refused(message));
        }
    }
    Ok(DateTime::from_timestamp(unix_seconds, 0).unwrap_or_default().format(format).to_string())
}

#[cfg(test)]
mod tests {
    use minijinja::context;

    use super::*;

    fn rendered(source: &str) -> Result<String, Error> {
        Template::new(source)?.render(context! { tools => () })
    }

    #[test]
    fn a_template_with_windows_lines_renders_unix_lines() {
        assert_eq!(rendered("a\r\n{% if true %}\r\nb\r\n{% endif %}").unwrap(), "a\nb\n");
    }

    #[test]
    fn json_is_pythons() {
        let template = "{{ {'a': [1, 2], 'b': '<é>'} | tojson }} {{ {'a': []} | tojson(indent=4) }}";
        assert_eq!(rendered(template).unwrap(), "{\"a\": [1, 2], \"b\": \"<é>\"} {\n    \"a\": []\n}");
        let ascii = "{{ 'é🙂<' | tojson(ensure_ascii=true) }} {{ 'é' | tojson(ensure_ascii=false) }}";
        assert_eq!(rendered(ascii).unwrap(), "\"\\u00e9\\ud83d\\ude42<\" \"é\"");
    }

    #[test]
    fn steps_output_and_source_are_bounded() {
        let endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
        assert_eq!(rendered(endless).unwrap_err().kind(), ErrorKind::OutOfFuel);
        let long = format!("{{% for i in range(1000) %}}{}{{% endfor %}}", "a".repeat(TEMPLATE_BYTES / 2));
        assert_eq!(rendered(&long).unwrap_err().kind(), ErrorKind::WriteFailure);
        let error = rendered(&"a".repeat(TEMPLATE_BYTES + 1)).unwrap_err();
        assert_eq!(error.detail().unwrap(), "expected at most 1048576 bytes, got 1048577");
    }

    #[test]
    fn generation_tags_render_what_they_hold_between_marks() {
        let template =
            "a\n{%- generation -%}\n b \n{%- endgeneration -%}\nc {% generation %}\nd\n{% endgeneration %}\n";
        let marked = |start: &str, end: &str| {
            let context = Value::from_pairs([(MARKS[0], start), (MARKS[1], end)]);
            Template::new(template).unwrap().render(context).unwrap()
        };
        assert_eq!(marked("<", ">"), "a<b>c <d\n>");
        assert_eq!((rendered(template).unwrap(), marked("", "")), ("abc d\n".to_owned(), "abc d\n".to_owned()));
        assert!(marks_generation(template) && !marks_generation("{% if generation %}{{ '{%- x' }}{% endif %}"));
        assert!(rendered("{% generation %}x{% endgeneration %} {% open").is_err());
    }

    #[test]
    fn what_only_looks_like_a_generation_tag_is_none() {
        for (template, expected) in [
            ("a{# {% generation %} as transformers has it #}b", "ab"),
            ("{{ '{% generation %}' }}", "{% generation %}"),
            ("{{ \"it's {% generation %} }}\" }}!", "it's {% generation %} }}!"),
            ("{% raw %}{% generation %}{% endraw %}", "{% generation %}"),
            ("{% set x = '%}{% generation %}' %}{{ x }}", "%}{% generation %}"),
            ("{% set x = 'it\\'s {% generation %}' %}{{ x }}", "it's {% generation %}"),
            ("{{ [{'a': {'b': 1}}, '{% generation %}'][1] }}", "{% generation %}"),
            ("{ {# x", ""),
        ] {
            assert!(!marks_generation(template), "{template}");
            match expected {
                "" => assert!(rendered(template).is_err(), "{template}"),
                text => assert_eq!(rendered(template).unwrap(), text, "{template}"),
            }
        }
        let both = "{# {% generation %} #}{{ '{#' }}{% generation %}x{% endgeneration %}";
        assert!(marks_generation(both));
        assert_eq!(rendered(both).unwrap(), "{#x");
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
