//! Counts the columns and keys of rows that are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::chat_template::ChatTemplate;
use super::conversation::{self, ChatInput, is_nothing};
use super::row_keys::{self, ColumnUse, OtherKey};
use super::template_abilities;
use crate::plural::counted;

/// Names of each kind that are counted on their own; further ones are counted together.
const NAMES_KEPT_APART: usize = 64;
const FURTHER: &str = "further names";

/// For each column, and each key of messages (`messages[].name`), the number of rows that have it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherKeys {
    /// May matter, and is not read.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not_read: BTreeMap<String, usize>,
    /// Known not to affect what to train on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub harmless: BTreeMap<String, usize>,
    /// Keys of messages, and variables, that the chat template got.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub to_template: BTreeMap<String, usize>,
}

impl OtherKeys {
    /// Counts a key of some rows.
    pub(super) fn count(&mut self, (usage, name): &OtherKey, rows: usize) {
        let names = match usage {
            ColumnUse::Read => return,
            ColumnUse::NotRead => &mut self.not_read,
            ColumnUse::Harmless => &mut self.harmless,
            ColumnUse::Template => &mut self.to_template,
        };
        add(names, name, rows);
    }

    pub(super) fn add(&mut self, other: Self) {
        let Self { not_read, harmless, to_template } = other;
        for (names, more) in
            [(&mut self.not_read, not_read), (&mut self.harmless, harmless), (&mut self.to_template, to_template)]
        {
            more.iter().for_each(|(name, rows)| add(names, name, *rows));
        }
    }

    /// What the chats have for a template, counted as rows; not read is what it does not name.
    pub fn from_chats<'c>(chats: impl IntoIterator<Item = &'c ChatInput>, template: &ChatTemplate) -> Self {
        let mut keys = Self::default();
        for ChatInput { messages, inputs } in chats {
            let says_something = |(_, value): &(&String, &Value)| !is_nothing(value) && **value != Value::Bool(false);
            let in_messages = messages.iter().flat_map(|message| message.more.iter().filter(says_something));
            let in_messages: BTreeSet<&String> = in_messages.map(|(name, _)| name).collect();
            let in_messages =
                in_messages.into_iter().map(|name| (row_keys::message_use(name), conversation::message_key(name)));
            let variables = inputs.names().map(|name| (ColumnUse::Template, name));
            let for_template = in_messages.chain(variables).filter(|(usage, _)| *usage == ColumnUse::Template);
            for_template.for_each(|key| keys.count(&key, 1));
        }
        keys.settle(Some(template));
        keys
    }

    /// Counts as not read what the template was given and does not name.
    pub(super) fn settle(&mut self, template: Option<&ChatTemplate>) {
        let is_named = |key: &str| {
            template.is_some_and(|template| match key.rsplit_once("[].") {
                Some((_, name)) => template_abilities::names(template.source(), name),
                None => template.reads_variable(key),
            })
        };
        let (named, unnamed) = std::mem::take(&mut self.to_template).into_iter().partition(|(key, _)| is_named(key));
        self.to_template = named;
        self.add(Self { not_read: unnamed, ..Self::default() });
    }
}

fn add(names: &mut BTreeMap<String, usize>, name: &str, rows: usize) {
    if let Some(known) = names.get_mut(name) {
        *known += rows;
    } else if names.len() < NAMES_KEPT_APART {
        names.insert(name.to_owned(), rows);
    } else {
        *names.entry(FURTHER.to_owned()).or_default() += rows;
    }
}

/// What is not read, as a part of a sentence: "`rejected` in 2 rows, `images` in 1 row".
impl fmt::Display for OtherKeys {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |name: &str| if name == FURTHER { name.to_owned() } else { format!("`{name}`") };
        let names = self.not_read.iter().map(|(key, rows)| format!("{} in {}", name(key), counted(*rows, "row")));
        out.write_str(&names.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_with_names_of_their_own_do_not_fill_the_report() {
        let mut keys = OtherKeys::default();
        for row in 0..1000 {
            keys.count(&(ColumnUse::NotRead, format!("column {row}")), 1);
        }
        keys.count(&(ColumnUse::NotRead, "column 3".to_owned()), 2);
        assert_eq!((keys.not_read.len(), keys.not_read["column 3"]), (NAMES_KEPT_APART + 1, 3));
        assert!(keys.to_string().ends_with("further names in 936 rows"), "{keys}");
    }
}
