//! The shape of a template before it is parsed. Parser and compiler call themselves for each level of brackets, of operators and of blocks, and
//! so does what frees their trees; a template that is deeper than any in use is refused here, while it is only a row of tokens.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Error, ErrorKind};

use crate::bounds::{TEMPLATE_BRANCHES, TEMPLATE_BYTES, TEMPLATE_NESTING, TEMPLATE_OPERATORS, TEMPLATE_VALUE_BYTES};

/// Words that open a block, up to its `end…`.
const BLOCKS: [&str; 9] = ["if", "for", "macro", "call", "filter", "with", "autoescape", "set", "generation"];

#[derive(Default)]
struct TemplateShape {
    /// Of the tag that is open.
    operators: usize,
    brackets: usize,
    /// Whether that tag is `set`.
    sets: bool,
    /// Of the tag that is open, too: the compiler multiplies what is constant.
    constants: Constants,
    /// Of all tags so far.
    blocks: usize,
    branches: usize,
    folded: usize,
}

/// Literals of a tag, and the most that they may become.
#[derive(Default)]
struct Constants {
    bytes: usize,
    /// Above all that its numbers can make.
    factor: usize,
    multiplies: bool,
}

impl Constants {
    fn add(&mut self, token: &Token) {
        match token {
            Token::Str(text) => self.bytes += text.len(),
            Token::String(text) => self.bytes += text.len(),
            Token::Comma => self.bytes += size_of::<Value>(),
            Token::Int(number) => self.number(usize::try_from(*number).unwrap_or(usize::MAX)),
            Token::Int128(_) | Token::Pow => self.number(usize::MAX),
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "saturates; no literal is negative"
            )]
            Token::Float(number) => self.number(number.ceil() as usize),
            Token::Mul => self.multiplies = true,
            _ => {}
        }
    }

    fn number(&mut self, number: usize) {
        self.factor = self.factor.max(1).saturating_mul(number.saturating_add(1));
    }

    fn most(&self) -> usize {
        if self.multiplies { self.bytes.saturating_mul(self.factor) } else { 0 }
    }
}

/// Refuses a template that is too long or too deep. One that cannot be read at all is left to the parser, which says why.
pub(super) fn check(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    within("bytes", source.len(), TEMPLATE_BYTES)?;
    let mut shape = TemplateShape::default();
    let mut word_opens = false;
    for (token, span) in tokenize(source, false, syntax.clone()).map_while(Result::ok) {
        let checked = match (&token, word_opens) {
            (Token::Ident(word), true) => shape.tag(word),
            _ => shape.token(&token),
        };
        checked
            .map_err(|error| failed(&format!("line {}: {}", span.start_line, error.detail().unwrap_or_default())))?;
        word_opens = matches!(token, Token::BlockStart);
    }
    Ok(())
}

impl TemplateShape {
    /// The first word of a `{% … %}`.
    fn tag(&mut self, word: &str) -> Result<(), Error> {
        if word == "elif" {
            self.branches += 1;
        } else if word.starts_with("end") {
            self.blocks = self.blocks.saturating_sub(1);
        } else if word == "block" {
            return Err(failed("a template that stands alone has no {% block %}"));
        } else if BLOCKS.contains(&word) {
            self.blocks += 1;
        }
        self.sets = word == "set";
        within("elif in it", self.branches, TEMPLATE_BRANCHES)?;
        within("blocks within each other", self.blocks, TEMPLATE_NESTING)
    }

    fn token(&mut self, token: &Token) -> Result<(), Error> {
        self.constants.add(token);
        match token {
            Token::VariableStart | Token::BlockStart => {
                (self.operators, self.brackets, self.constants) = (0, 0, Constants::default());
            }
            Token::VariableEnd | Token::BlockEnd => {
                self.folded = self.folded.saturating_add(self.constants.most());
                within("bytes of repeated constants", self.folded, TEMPLATE_VALUE_BYTES)?;
            }
            Token::Assign if self.sets && self.brackets == 0 => self.blocks = self.blocks.saturating_sub(1), // `set x = …` has no end
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => {
                self.operators += 1;
                self.brackets += 1;
            }
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                self.brackets = self.brackets.saturating_sub(1)
            }
            Token::Ident("not" | "and" | "or" | "in" | "is" | "if" | "else") => self.operators += 1,
            Token::Plus | Token::Minus | Token::Mul | Token::Div | Token::FloorDiv | Token::Pow | Token::Mod => {
                self.operators += 1;
            }
            Token::Dot | Token::Tilde | Token::Pipe => self.operators += 1,
            Token::Eq | Token::Ne | Token::Gt | Token::Gte | Token::Lt | Token::Lte => self.operators += 1,
            _ => {}
        }
        within("brackets within each other", self.brackets, TEMPLATE_NESTING)?;
        within("operators, dots, brackets and filters in one tag", self.operators, TEMPLATE_OPERATORS)
    }
}

fn within(what: &str, got: usize, most: usize) -> Result<(), Error> {
    if got <= most { Ok(()) } else { Err(failed(&format!("more than {most} {what}"))) }
}

fn failed(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(source: &str) -> Option<String> {
        check(source, &SyntaxConfig::default()).err().map(|error| error.detail().unwrap_or_default().to_owned())
    }

    #[test]
    fn what_would_be_deep_is_refused_with_its_line() {
        let most = TEMPLATE_OPERATORS;
        assert_eq!(
            refusal(&format!("\n{{{{ 1{} }}}}", "+1".repeat(most + 1))).unwrap(),
            format!("line 2: more than {most} operators, dots, brackets and filters in one tag")
        );
        for chained in ["not ", "a.", "a|", "a[0][", "a-", "a if a else "] {
            assert!(refusal(&format!("{{{{ {}a }}}}", chained.repeat(most + 1))).is_some(), "{chained}");
        }
        let nested = TEMPLATE_NESTING + 1;
        assert!(
            refusal(&format!("{{{{ {} }}}}", "[".repeat(nested))).unwrap().ends_with("100 brackets within each other")
        );
        for opening in ["{% if a %}", "{% with a = 1 %}", "{% set a %}"] {
            assert!(refusal(&opening.repeat(nested)).unwrap().ends_with("100 blocks within each other"), "{opening}");
        }
        assert_eq!(refusal(&"{% set a = 1 %}{% with a = 1 %}{% endwith %}".repeat(nested)), None);
        assert!(refusal(&"{% set a %}".repeat(nested)).is_some());
        assert!(refusal("{% block a %}{{ self.a() }}{% endblock %}").unwrap().ends_with("has no {% block %}"));
        assert!(refusal(&"{% elif a %}".repeat(TEMPLATE_BRANCHES + 1)).unwrap().ends_with("1000 elif in it"));
        for folded in [
            "'ab' * 3000000",
            "3000000 * 'ab'",
            "(1, 2) * 300000",
            "'a' * 10 ** 8",
            "'a' * (9999 + 9) * 999",
            "'a' * 1e9",
        ] {
            assert!(
                refusal(&format!("{{{{ {folded} }}}}")).unwrap().ends_with("bytes of repeated constants"),
                "{folded}"
            );
        }
        assert_eq!(refusal(&"x".repeat(TEMPLATE_BYTES + 1)).unwrap(), "more than 1048576 bytes");
    }

    #[test]
    fn long_templates_of_short_tags_are_taken() {
        for source in [
            "{% set a = 1 %}".repeat(10_000),
            "{% if a %}{% for b in [1, 2] %}{{ f(b == 1) }}{% endfor %}{% elif b.c.d %}{% endif %}".repeat(900),
            "{% set a %}{{ {'x': (1)} }}{% endset %}".repeat(10_000),
            "{{ a + b }}".repeat(10_000),
            "{{ '-' * 80 ~ (n * 100) | round(2) }}".to_owned(),
        ] {
            assert_eq!(refusal(&source), None, "{}", &source[..40]);
        }
        assert_eq!(refusal("{{ 'open"), None, "the parser tells");
    }
}
