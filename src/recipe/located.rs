//! Positions of keys and values in a recipe's text, for error messages.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// A span of a recipe's text. Displays as `file: line 3, column 5`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecipeSpan {
    pub file: PathBuf,
    /// Counted from 1.
    pub line: usize,
    /// Counted from 1, in characters.
    pub column: usize,
    text: String,
    width: usize,
}

impl fmt::Display for RecipeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: line {}, column {}", self.file.display(), self.line, self.column)
    }
}

impl RecipeSpan {
    /// The line with carets under the span, as in TOML's own errors.
    pub fn snippet(&self) -> String {
        let margin = self.line.to_string().len();
        let (bar, indent, carets) = (" ".repeat(margin), " ".repeat(self.column - 1), "^".repeat(self.width));
        format!("{bar} |\n{} | {}\n{bar} | {indent}{carets}", self.line, self.text)
    }

    fn new(file: &Path, text: &str, span: Range<usize>) -> Self {
        let span = span.start.min(text.len())..span.end.min(text.len());
        let start_of_line = text[..span.start].rfind('\n').map_or(0, |at| at + 1);
        let line_text = text[start_of_line..].lines().next().unwrap_or_default();
        let stretch = text[span.clone()].lines().next().unwrap_or_default();
        Self {
            file: file.to_owned(),
            line: text[..span.start].matches('\n').count() + 1,
            column: text[start_of_line..span.start].chars().count() + 1,
            text: line_text.to_owned(),
            width: stretch.chars().count().max(1),
        }
    }
}

/// A recipe's text with the position of every key and value.
#[derive(Debug)]
pub(super) struct LocatedToml<'t> {
    file: &'t Path,
    text: &'t str,
    table: Spanned<DeTable<'t>>,
    errors: Vec<(RecipeSpan, String)>,
}

/// The parser's message about a key that is there twice: the only error after which no key is lost.
const DUPLICATE: &str = "duplicate key";

impl<'t> LocatedToml<'t> {
    /// Parses the text, past its errors.
    pub(super) fn parse(file: &'t Path, text: &'t str) -> Self {
        let (table, errors) = DeTable::parse_recoverable(text);
        let place = |error: &toml::de::Error| RecipeSpan::new(file, text, error.span().unwrap_or(0..0));
        let mut errors: Vec<_> = errors.iter().map(|error| (place(error), error.message().to_owned())).collect();
        errors.dedup_by_key(|(place, _)| place.line); // what follows an error in its line comes of it
        Self { file, text, table, errors }
    }

    pub(super) fn syntax_errors(&self) -> &[(RecipeSpan, String)] {
        &self.errors
    }

    /// Whether errors of the syntax may hide keys.
    pub(super) fn has_gaps(&self) -> bool {
        self.errors.iter().any(|(_, reason)| reason != DUPLICATE)
    }

    pub(super) fn file(&self) -> &'t Path {
        self.file
    }

    pub(super) fn table(&self) -> &Spanned<DeTable<'t>> {
        &self.table
    }

    pub(super) fn at(&self, span: Range<usize>) -> RecipeSpan {
        RecipeSpan::new(self.file, self.text, span)
    }

    /// The position of a key, `None` if the recipe lacks it. `path` is `table.key`.
    pub(super) fn key(&self, path: &str) -> Option<RecipeSpan> {
        find(self.table.get_ref(), path).map(|(key, _)| self.at(key.span()))
    }

    /// The position of a key's value, or of its table if the recipe lacks the key.
    pub(super) fn value(&self, path: &str) -> RecipeSpan {
        let find = |path| find(self.table.get_ref(), path);
        let table = || path.rsplit_once('.').and_then(|(table, _)| find(table));
        self.at(find(path).or_else(table).map_or(0..0, |(_, value)| value.span()))
    }

    /// Keys of a table; empty if there is no such table.
    pub(super) fn keys(&self, path: &str) -> Vec<&str> {
        let table = find(self.table.get_ref(), path).and_then(|(_, value)| value.get_ref().as_table());
        table.map_or_else(Vec::new, |table| table.iter().map(|(key, _)| key.get_ref().as_ref()).collect())
    }

    /// The key whose value has exactly this span.
    pub(super) fn key_of_value(&self, span: &Range<usize>) -> Option<String> {
        key_of_value(self.table.get_ref(), span, "")
    }

    /// The innermost key or table that this span is in.
    pub(super) fn path_at(&self, span: &Range<usize>) -> Option<String> {
        path_at(self.table.get_ref(), span, "")
    }
}

/// A key and its value. `path` is `table.key`.
pub(super) fn find<'p, 't>(
    table: &'p DeTable<'t>,
    path: &str,
) -> Option<(&'p Spanned<DeString<'t>>, &'p Spanned<DeValue<'t>>)> {
    let (table, key) = match path.rsplit_once('.') {
        Some((outer, key)) => (find(table, outer)?.1.get_ref().as_table()?, key),
        None => (table, path),
    };
    table.iter().find(|(name, _)| name.get_ref() == key)
}

fn path_at(table: &DeTable<'_>, span: &Range<usize>, prefix: &str) -> Option<String> {
    let is_in = |outer: Range<usize>| outer.start <= span.start && span.end <= outer.end && !span.is_empty();
    table.iter().find_map(|(key, value)| {
        let path = format!("{prefix}{}", key.get_ref());
        let inner = value.get_ref().as_table().and_then(|inner| path_at(inner, span, &format!("{path}.")));
        inner.or_else(|| (is_in(key.span()) || is_in(value.span())).then_some(path))
    })
}

fn key_of_value(table: &DeTable<'_>, span: &Range<usize>, prefix: &str) -> Option<String> {
    table.iter().find_map(|(key, value)| {
        let path = format!("{prefix}{}", key.get_ref());
        if let Some(inner) = value.get_ref().as_table() {
            return key_of_value(inner, span, &format!("{path}."));
        }
        (value.span() == *span).then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caret_counts_characters_not_bytes() {
        let text = "a = \"ä\"\nb = { c = \"äöü\" }\n";
        let located = LocatedToml::parse(Path::new("r.toml"), text);
        let place = located.value("b.c");
        assert_eq!((place.line, place.column), (2, 11));
        assert_eq!(place.snippet(), "  |\n2 | b = { c = \"äöü\" }\n  |           ^^^^^");
        assert_eq!(place.to_string(), "r.toml: line 2, column 11");
    }

    #[test]
    fn a_missing_key_is_placed_at_its_table() {
        let located = LocatedToml::parse(Path::new("r.toml"), "x = 1\n[train]\nseed = 1\n");
        assert_eq!(located.value("train.epochs").line, 2);
        assert_eq!(located.key("train.epochs"), None);
        assert_eq!(located.keys("train"), ["seed"]);
    }

    #[test]
    fn a_span_is_in_the_innermost_key_around_it() {
        let text = "[loss]\nmix = { a = [1, 2] }\n[train]\nseed = 1\n";
        let located = LocatedToml::parse(Path::new("r.toml"), text);
        let path_at = |piece: &str| {
            let start = text.find(piece).unwrap();
            located.path_at(&(start..start + piece.len()))
        };
        let paths = ["2", "a", "mix", "seed", "1\n"].map(path_at);
        let expected = [Some("loss.mix.a"), Some("loss.mix.a"), Some("loss.mix"), Some("train.seed"), None];
        assert_eq!(paths.each_ref().map(Option::as_deref), expected);
        assert_eq!(located.path_at(&(0..0)), None);
    }
}
