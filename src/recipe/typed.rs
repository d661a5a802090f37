//! From TOML to a typed recipe, past its mistakes: a key with a mistake is reported and left out, so that those behind it are found too.

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, Deserializer};

use super::defaults::fill_in;
use super::mistakes::{Findings, Mistake};

/// Keys without a default. `data.hidden_states` can stand in place of `data.train`.
const REQUIRED: [(&str, &str); 2] = [
    ("backbone.path", "a folder in Hugging Face layout, or an id of the Hub"),
    ("data.train", "a list of files, globs or ids of the Hub"),
];

/// The recipe, with defaults in place of the keys that have a mistake; `None` if the mistakes leave nothing to read.
pub(super) fn read<T: DeserializeOwned>(findings: &mut Findings<'_>) -> Option<T> {
    let text = findings.text();
    for (place, reason) in text.syntax_errors() {
        findings.add(place.clone(), Mistake::from_parser(None, reason));
    }
    if text.has_gaps() {
        return None;
    }
    let mut table = text.table().clone();
    keep_one_stage(findings, table.get_mut());
    let recipe = deserialize(findings, &mut table);
    for (key, what) in REQUIRED {
        let has_states = key == "data.train" && text.key("data.hidden_states").is_some();
        if text.key(key).is_none() && !has_states && findings.are_as_written(&[key]) {
            findings.add_wrong(key.to_owned(), text.value(key), Mistake::Required { key, what });
        }
    }
    recipe
}

/// Leaves out one key with a mistake after the other.
fn deserialize<T: DeserializeOwned>(findings: &mut Findings<'_>, table: &mut Spanned<DeTable<'_>>) -> Option<T> {
    loop {
        fill_in(table.get_mut(), findings.text().file());
        match T::deserialize(Deserializer::from(table.clone())) {
            Ok(recipe) => return Some(recipe),
            Err(error) => leave_out(findings, table, &error)?,
        }
    }
}

/// Reports the error and removes its key; `None` if it is in no key.
fn leave_out(findings: &mut Findings<'_>, table: &mut Spanned<DeTable<'_>>, error: &toml::de::Error) -> Option<()> {
    let (text, span) = (findings.text(), error.span().unwrap_or(0..0));
    let mistake = Mistake::from_parser(text.key_of_value(&span), error.message());
    let Some(path) = text.path_at(&span).filter(|path| remove(table.get_mut(), path)) else {
        findings.add(text.at(span), mistake);
        return None;
    };
    let is_stage = path.strip_prefix("stage.").is_some_and(|name| !name.contains('.'));
    findings.add_wrong(if is_stage { "stage".into() } else { path }, text.at(span), mistake);
    Some(())
}

fn remove(table: &mut DeTable<'_>, path: &str) -> bool {
    match path.split_once('.') {
        None => table.remove(path).is_some(),
        Some((outer, inner)) => match table.get_mut(outer).map(Spanned::get_mut) {
            Some(toml::de::DeValue::Table(table)) => remove(table, inner),
            _ => false,
        },
    }
}

/// Reports none or several stages: serde's message would be about enums. The last one stays.
fn keep_one_stage(findings: &mut Findings<'_>, table: &mut DeTable<'_>) {
    let text = findings.text();
    let mut stages = text.keys("stage");
    stages.sort_by_key(|stage| text.key(&format!("stage.{stage}")).map(|place| (place.line, place.column)));
    let Some((last, others)) = stages.split_last() else {
        table.remove("stage");
        let found = "none".to_owned();
        return findings.add_wrong("stage".into(), text.value("stage"), Mistake::Stages { found });
    };
    if others.is_empty() {
        return;
    }
    for other in others {
        remove(table, &format!("stage.{other}"));
    }
    let found = stages.iter().map(|stage| format!("[stage.{stage}]")).collect::<Vec<_>>().join(" and ");
    let place = text.key(&format!("stage.{last}")).unwrap_or_else(|| text.value("stage"));
    findings.add_wrong("stage".into(), place, Mistake::Stages { found });
}
