//! A run's recipe as text: lines to show, and keys to compare.
//!
//! It is not parsed as TOML, which is the job of `recipe`: a resolved recipe has one key per line, and the page shows
//! it unchanged.

use serde::Serialize;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum RecipeLine {
    /// `[stage.medusa2]`
    Table(String),
    /// `rank = 32`
    Pair { key: String, value: String },
    /// A comment, an empty line, or a continuation of the line before.
    Other(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct RecipeText {
    pub(super) lines: Vec<RecipeLine>,
}

/// A key whose values differ between recipes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct RecipeDifference {
    pub(super) key: String,
    /// One per recipe; `None` if it lacks the key.
    pub(super) values: Vec<Option<String>>,
}

impl RecipeText {
    pub(super) fn new(text: &str) -> Self {
        Self { lines: text.lines().map(line).collect() }
    }

    /// Keys prefixed with their tables, and their values as written; a table counts as a key with the value "present".
    pub(super) fn keys(&self) -> Vec<(String, &str)> {
        let mut table = String::new();
        let mut keys = Vec::new();
        for line in &self.lines {
            match line {
                RecipeLine::Table(name) => {
                    name.trim_matches(['[', ']']).clone_into(&mut table);
                    keys.push((table.clone(), "present"));
                }
                RecipeLine::Pair { key, value } => keys.push((format!("{table}.{key}"), value.as_str())),
                RecipeLine::Other(_) => {}
            }
        }
        keys
    }

    /// The value of a key, without quotes.
    pub(super) fn value(&self, key: &str) -> Option<String> {
        let value = self.keys().into_iter().find(|(name, _)| name == key)?.1;
        Some(unquoted(value))
    }
}

fn line(text: &str) -> RecipeLine {
    let trimmed = text.trim();
    if trimmed.starts_with('[') && trimmed.ends_with(']') && !trimmed.contains(['"', ',']) {
        return RecipeLine::Table(trimmed.into());
    }
    let is_key = |key: &str| !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
    match trimmed.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
        Some((key, value)) if is_key(key) => RecipeLine::Pair { key: key.into(), value: value.into() },
        _ => RecipeLine::Other(text.into()),
    }
}

/// Unquotes a string where JSON and TOML agree; returns anything else unchanged.
fn unquoted(value: &str) -> String {
    let literal = value.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\''));
    literal.map_or_else(|| serde_json::from_str(value).unwrap_or_else(|_| value.to_owned()), str::to_owned)
}

/// Keys whose values differ, in the order of the recipes.
pub(super) fn differences(recipes: &[&RecipeText]) -> Vec<RecipeDifference> {
    let all: Vec<Vec<(String, &str)>> = recipes.iter().map(|recipe| recipe.keys()).collect();
    let mut names: Vec<&String> = Vec::new();
    for keys in &all {
        // A key that only this recipe has goes after the key before it.
        let mut at = 0;
        for (name, _) in keys {
            let known = names.iter().position(|known| *known == name);
            at = known.unwrap_or_else(|| {
                names.insert(at, name);
                at
            }) + 1;
        }
    }
    let difference = |name: &String| {
        let value =
            |keys: &Vec<(String, &str)>| keys.iter().find(|(key, _)| key == name).map(|(_, value)| (*value).to_owned());
        RecipeDifference { key: name.clone(), values: all.iter().map(value).collect() }
    };
    names.into_iter().map(difference).filter(|found| found.values.windows(2).any(|two| two[0] != two[1])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "[backbone]\npath = \"a \\\"b\\\"\"\n\n[stage.medusa1]\n\n[data]\ntrain = [\"x = y\"]\n# why\n";

    #[test]
    fn keys_carry_their_tables() {
        let recipe = RecipeText::new(ONE);
        let keys = recipe.keys();
        let names: Vec<&str> = keys.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["backbone", "backbone.path", "stage.medusa1", "data", "data.train"]);
        assert_eq!(recipe.value("backbone.path").as_deref(), Some("a \"b\""));
        assert_eq!(recipe.value("data.train").as_deref(), Some("[\"x = y\"]"));
        assert_eq!((recipe.value("data.validation"), recipe.lines.len()), (None, 8));
        assert_eq!(RecipeText::new("[a]\nb = 'c'\n").value("a.b").as_deref(), Some("c"));
    }

    #[test]
    fn differences_are_keys_of_either() {
        let one = RecipeText::new(ONE);
        let other = RecipeText::new(&ONE.replace("[stage.medusa1]", "[stage.medusa2]\nrank = 2"));
        assert_eq!(differences(&[&one, &one]), []);
        let found = differences(&[&one, &other]);
        let keys: Vec<&str> = found.iter().map(|difference| difference.key.as_str()).collect();
        assert_eq!(keys, ["stage.medusa2", "stage.medusa2.rank", "stage.medusa1"], "before [data]");
        assert_eq!(found[1].values, [None, Some("2".to_owned())]);
    }
}
