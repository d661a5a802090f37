//! Positions of keys and values in a recipe's text, for error messages.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

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
    table: DeTable<'t>,
}

impl<'t> LocatedToml<'t> {
    pub(super) fn parse(file: &'t Path, text: &'t str) -> Result<Self, (RecipeSpan, String)> {
        match DeTable::parse(text) {
            Ok(table) => Ok(Self { file, text, table: table.into_inner() }),
            Err(error) => Err((RecipeSpan::new(file, text, error.span().unwrap_or(0..0)), error.message().to_owned())),
        }
    }

    pub(super) fn at(&self, span: Range<usize>) -> RecipeSpan {
        RecipeSpan::new(self.file, self.text, span)
    }

    /// The position of a key, `None` if the recipe lacks it. `path` is `table.key`.
    pub(super) fn key(&self, path: &str) -> Option<RecipeSpan> {
        self.find(path).map(|(key, _, _)| self.at(key))
    }

    /// The position of a key's value, or of its table if the recipe lacks the key.
    pub(super) fn value(&self, path: &str) -> RecipeSpan {
        let table = || path.rsplit_once('.').and_then(|(table, _)| self.find(table));
        self.at(self.find(path).or_else(table).map_or(0..0, |(_, value, _)| value))
    }

    /// Keys of a table; empty if there is no such table.
    pub(super) fn keys(&self, path: &str) -> Vec<&str> {
        let table = self.find(path).and_then(|(_, _, value)| value.as_table());
        table.map_or_else(Vec::new, |table| table.iter().map(|(key, _)| key.get_ref().as_ref()).collect())
    }

    fn find(&self, path: &str) -> Option<(Range<usize>, Range<usize>, &DeValue<'t>)> {
        let (table, key) = match path.rsplit_once('.') {
            Some((table, key)) => (self.find(table)?.2.as_table()?, key),
            None => (&self.table, path),
        };
        let (key, value) = table.iter().find(|(name, _)| name.get_ref() == key)?;
        Some((key.span(), value.span(), value.get_ref()))
    }

    /// The key whose value has exactly this span.
    pub(super) fn key_of_value(&self, span: &Range<usize>) -> Option<String> {
        key_of_value(&self.table, span, "")
    }
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
        let located = LocatedToml::parse(Path::new("r.toml"), text).unwrap();
        let place = located.value("b.c");
        assert_eq!((place.line, place.column), (2, 11));
        assert_eq!(place.snippet(), "  |\n2 | b = { c = \"äöü\" }\n  |           ^^^^^");
        assert_eq!(place.to_string(), "r.toml: line 2, column 11");
    }

    #[test]
    fn a_missing_key_is_placed_at_its_table() {
        let located = LocatedToml::parse(Path::new("r.toml"), "x = 1\n[train]\nseed = 1\n").unwrap();
        assert_eq!(located.value("train.epochs").line, 2);
        assert_eq!(located.key("train.epochs"), None);
        assert_eq!(located.keys("train"), ["seed"]);
    }
}
