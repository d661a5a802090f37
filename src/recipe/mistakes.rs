//! The mistakes of a recipe, each with its place: all of them are reported at once, in the order of the file.

use std::fmt;
use std::path::PathBuf;

use super::located::{LocatedToml, RecipeSpan};
use crate::data::source::SourceError;
use crate::model::config::ConfigError;
use crate::model::weights::WeightsError;

/// A mistake in a recipe.
#[derive(Debug, thiserror::Error)]
pub enum Mistake {
    /// TOML syntax, an unknown or duplicate key, or a value with a wrong type or out of range.
    #[error("{}{reason}", key.as_deref().map(|key| format!("{key}: ")).unwrap_or_default())]
    Value {
        /// The key, if the mistake is in its value.
        key: Option<String>,
        /// The parser's message, with the accepted values.
        reason: String,
    },
    /// No table, or several, under `[stage]`.
    #[error("a recipe has exactly one of [stage.medusa1], [stage.medusa2]; this one has {found}")]
    Stages {
        /// The tables found.
        found: String,
    },
    /// A key without a default.
    #[error("missing key `{key}`: {what}")]
    Required { key: &'static str, what: &'static str },
    /// Two exclusive keys.
    #[error("{first} and {second} exclude each other; keep one of them")]
    Both { first: &'static str, second: &'static str },
    /// A value that conflicts with another one.
    #[error("{key} = {got}: expected {expected}")]
    Clash {
        key: &'static str,
        got: String,
        /// The accepted values, and the reason.
        expected: String,
    },
    /// An invalid or unsupported config.json of the backbone.
    #[error("backbone.path: {0}")]
    Backbone(ConfigError),
    /// Damaged weights of the backbone.
    #[error("backbone.path: {0}")]
    Weights(WeightsError),
    /// A key that requires another one.
    #[error("{key} needs {what}; add it, or remove {key}")]
    Needs { key: &'static str, what: &'static str },
    /// A file or folder in the recipe does not exist.
    #[error("{key}: {} does not exist; {hint}", path.display())]
    Missing {
        key: &'static str,
        /// The path as written in the recipe.
        path: PathBuf,
        /// What to give instead.
        hint: &'static str,
    },
    /// Missing data files.
    #[error("{key}: {error}")]
    Files { key: &'static str, error: SourceError },
}

/// At least one mistake, with their places.
#[derive(Debug)]
pub struct Mistakes(Vec<(RecipeSpan, Mistake)>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(found) = self;
        if let [(first, _), _, ..] = &found[..] {
            write!(f, "{} mistakes in {}:\n\n", found.len(), first.file.display())?;
        }
        for (at, (place, mistake)) in found.iter().enumerate() {
            let gap = if at > 0 { "\n\n" } else { "" };
            write!(f, "{gap}{place}: {mistake}\n{}", place.snippet())?;
        }
        Ok(())
    }
}

/// Collects the mistakes of a recipe.
#[derive(Debug)]
pub(super) struct Findings<'t> {
    text: &'t LocatedToml<'t>,
    found: Vec<(RecipeSpan, Mistake)>,
    /// Keys and tables with a mistake of their own: the recipe has their defaults instead.
    wrong: Vec<String>,
}

impl<'t> Findings<'t> {
    pub(super) fn new(text: &'t LocatedToml<'t>) -> Self {
        Self { text, found: Vec::new(), wrong: Vec::new() }
    }

    pub(super) fn add(&mut self, place: RecipeSpan, mistake: Mistake) {
        self.found.push((place, mistake));
    }

    /// Adds a mistake of the key or table at `path`.
    pub(super) fn add_wrong(&mut self, path: String, place: RecipeSpan, mistake: Mistake) {
        self.add(place, mistake);
        self.wrong.push(path);
    }

    pub(super) fn needs(&mut self, key: &'static str, what: &'static str) {
        self.add(self.text.value(key), Mistake::Needs { key, what });
    }

    pub(super) fn clash(&mut self, key: &'static str, got: impl ToString, expected: String) {
        self.add(self.text.value(key), Mistake::Clash { key, got: got.to_string(), expected });
    }

    /// Two exclusive keys must not both be given.
    pub(super) fn exclusive(&mut self, first: &'static str, second: &'static str) {
        if let (Some(_), Some(place)) = (self.text.key(first), self.text.key(second)) {
            self.add(place, Mistake::Both { first, second });
        }
    }

    /// Whether no mistake is at these keys or the tables around them. A check that read a default instead of what is written would
    /// report mistakes that are not there.
    pub(super) fn are_as_written(&self, keys: &[&str]) -> bool {
        let is_within = |key: &str, table: &str| {
            key.strip_prefix(table).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        !self.wrong.iter().any(|wrong| keys.iter().any(|key| is_within(key, wrong)))
    }

    /// The text that the mistakes are in.
    pub(super) fn text(&self) -> &'t LocatedToml<'t> {
        self.text
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// # Errors
    /// [`Mistakes`] in the order of the file, if there are any.
    pub(super) fn into_result(mut self) -> Result<(), Mistakes> {
        self.found.sort_by_key(|(place, _)| (place.line, place.column));
        if self.found.is_empty() { Ok(()) } else { Err(Mistakes(self.found)) }
    }
}

impl Mistake {
    /// A message of the TOML parser or of serde, in the words of recipes.
    pub(super) fn from_parser(key: Option<String>, reason: &str) -> Self {
        const WORDS: [(&str, &str); 7] = [
            ("unknown field", "unknown key"),
            ("unknown variant", "unknown value"),
            ("there are no fields", "this table has no keys"),
            ("a nonzero usize", "a whole number above 0"),
            ("expected usize", "expected a whole number of at least 0"),
            ("expected u64", "expected a whole number of at least 0"),
            ("expected f64", "expected a number"),
        ];
        let reason = WORDS.iter().fold(reason.to_owned(), |reason, (from, to)| reason.replace(from, to));
        Self::Value { key, reason: with_suggestion(reason) }
    }
}

/// Adds the closest of the known names to "unknown key `a`, expected one of `b`, `c`".
fn with_suggestion(reason: String) -> String {
    let Some((unknown, known)) = reason.split_once(", expected ").filter(|_| reason.starts_with("unknown ")) else {
        return reason;
    };
    let names = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let (Some(written), known_names) = (names(unknown).pop(), names(known)) else { return reason };
    match meant(&written, &known_names).or_else(|| closest(&written, &known_names)) {
        Some(name) => format!("{unknown}, did you mean `{name}`? Expected {known}"),
        None => reason,
    }
}

/// Names of the same thing in other trainers.
const SYNONYMS: [(&str, &str); 8] = [
    ("lr", "learning_rate"),
    ("grad_accum_steps", "gradient_accumulation_steps"),
    ("seq_len", "max_length"),
    ("sequence_len", "max_length"),
    ("max_seq_length", "max_length"),
    ("model", "path"),
    ("eval", "validation"),
    ("optim", "name"),
];

/// The name that has `written` among its words or is among those of `written`, or that is a synonym; the shortest if there are several.
fn meant<'n>(written: &str, names: &'n [String]) -> Option<&'n String> {
    let has_words = |name: &str, words: &str| format!("_{name}_").contains(&format!("_{words}_"));
    let is_meant = |name: &&String| {
        has_words(name, written) || has_words(written, name) || SYNONYMS.contains(&(written, name.as_str()))
    };
    names.iter().filter(is_meant).min_by_key(|name| name.len())
}

/// The name that the fewest edits lead to, if these are at most a third of its letters.
fn closest<'n>(written: &str, names: &'n [String]) -> Option<&'n String> {
    let edits = |name: &&String| edit_distance(written, name);
    names.iter().min_by_key(edits).filter(|name| 3 * edits(name) <= name.chars().count())
}

/// The fewest insertions, deletions and replacements of a character and swaps of neighbours (optimal string alignment).
fn edit_distance(from: &str, to: &str) -> usize {
    let [from, to] = [from, to].map(|text| text.chars().collect::<Vec<_>>());
    let mut rows: Vec<Vec<usize>> = vec![(0..=to.len()).collect()];
    for (i, letter) in from.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, other) in to.iter().enumerate() {
            let replaced = rows[i][j] + usize::from(letter != other);
            let mut edits = replaced.min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *letter == to[j - 1] && from[i - 1] == *other {
                edits = edits.min(rows[i - 1][j - 1] + 1);
            }
            row.push(edits);
        }
        rows.push(row);
    }
    rows[from.len()][to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_is_corrected_and_another_one_is_not() {
        let names = ["learning_rate", "betas", "eps"].map(str::to_owned);
        let closest = |written| closest(written, &names).map(String::as_str);
        assert_eq!(closest("learning_rat"), Some("learning_rate"));
        assert_eq!(closest("lerning-rate"), Some("learning_rate"));
        assert_eq!(closest("beta"), Some("betas"));
        assert_eq!((closest("momentum"), closest("lr")), (None, None));
    }

    #[test]
    fn a_name_that_other_trainers_use_is_known() {
        let names = ["learning_rate", "epochs", "max_steps", "gradient_accumulation_steps", "micro_batch_size"];
        let names = names.map(str::to_owned);
        let meant = |written| meant(written, &names).map(String::as_str);
        assert_eq!(
            ["steps", "batch_size", "num_train_epochs", "lr"].map(meant),
            [Some("max_steps"), Some("micro_batch_size"), Some("epochs"), Some("learning_rate")]
        );
        assert_eq!(["momentum", "step", ""].map(meant), [None; 3]);
    }

    #[test]
    fn edits_are_counted() {
        assert_eq!(["kitten", "", "abc", "istting"].map(|word| edit_distance(word, "sitting")), [3, 7, 7, 1]);
    }

    #[test]
    fn the_suggestion_comes_before_the_accepted_names() {
        let message = |reason: &str| Mistake::from_parser(None, reason).to_string();
        assert_eq!(
            message("unknown field `epoch`, expected `epochs` or `max_steps`"),
            "unknown key `epoch`, did you mean `epochs`? Expected `epochs` or `max_steps`"
        );
        assert_eq!(message("unknown field `x`, expected `epochs`"), "unknown key `x`, expected `epochs`");
        assert_eq!(
            message("invalid type: a, expected usize"),
            "invalid type: a, expected a whole number of at least 0"
        );
    }
}
