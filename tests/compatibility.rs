//! Promise: docs/compatibility.md lists every key of other programs' files that is known, and what is done with it. `MEDUSA_WRITE_PAGES=1` writes
//! the page anew.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use medusa::data::tokenize::config_keys;
use medusa::key_use::KeyUse;
use medusa::model::config::{generation_keys, key_table};
use medusa::model::peft_keys;
use serde::Deserialize;

use super::backbone::write;

const START: &str = "# Compatibility: keys of other programs' files

What is done with each key of the JSON files of a model that other programs wrote. The tables are those of the program; `tests/compatibility.rs` compares
this page with them, and them with transformers 5.24 and PEFT 0.21.

- **read**: it is used, and checked.
- **refused unless**: any other value is an error that names file and key.
- **reported unless**: with any other value, the commands that load a backbone name the key as one without effect here.
- **no effect**: with the reason.

A key that no table has is reported in config.json, generation_config.json and tokenizer_config.json, and refused in adapter_config.json, unless its value is null,
false or empty. Fields of requests that `medusa serve` does not know [are errors](serving.md); columns of data sets that are not read [are reported](data.md).
";

fn what(key_use: KeyUse) -> String {
    let list = |values: &[&str]| values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    match key_use {
        KeyUse::Read => "read".to_owned(),
        KeyUse::Only(values) => format!("refused unless {}", list(values)),
        KeyUse::Reported(values) => format!("reported unless {}", list(values)),
        KeyUse::NoEffect(reason) => format!("no effect: {reason}"),
    }
}

fn table(page: &mut String, file: &str, keys: impl Iterator<Item = (&'static str, KeyUse)>) {
    write!(page, "\n## {file}\n\n| key | what is done |\n| --- | --- |\n").expect("a string");
    keys.for_each(|(key, key_use)| writeln!(page, "| `{key}` | {} |", what(key_use)).expect("a string"));
}

fn page() -> String {
    let mut page = START.to_owned();
    page += "\n## config.json\n\n| key | families | what is done |\n| --- | --- | --- |\n";
    for (key, families, key_use) in key_table::rows() {
        let named: Vec<String> = families.iter().map(|family| format!("`{family}`")).collect();
        let rows = key_table::rows().iter().filter(|(other, ..)| other == key).count();
        let families = match named.is_empty() {
            true if rows > 1 => "all others".to_owned(),
            true => "all".to_owned(),
            false => named.join(", "),
        };
        writeln!(page, "| `{key}` | {families} | {} |", what(*key_use)).expect("a string");
    }
    table(&mut page, "generation_config.json", generation_keys::KEYS.iter().copied());
    table(&mut page, "tokenizer_config.json", config_keys::KEYS.iter().copied());
    page += "\n`bos_token`, `eos_token` and every other key that ends in `_token` is read.\n";
    table(&mut page, "adapter_config.json", peft_keys::KEYS.iter().copied());
    page
}

#[test]
fn the_page_lists_every_known_key() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/compatibility.md");
    let page = page();
    if std::env::var_os("MEDUSA_WRITE_PAGES").is_some() {
        write(&path, page.as_bytes());
    }
    assert_eq!(fs::read_to_string(path).expect("docs/compatibility.md"), page, "MEDUSA_WRITE_PAGES=1 writes it anew");
}

/// What scripts/fixtures/make_config_fixtures.py writes.
#[derive(Deserialize)]
struct OtherKeys {
    generation: Vec<String>,
    tokenizer: Vec<String>,
}

#[test]
fn keys_of_generation_configs_and_tokenizers_are_known() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/configs/other_keys.json");
    let listed: OtherKeys = serde_json::from_slice(&fs::read(path).expect("the fixture")).expect("two lists");
    let unknown = listed.generation.iter().find(|key| generation_keys::key_use(key).is_none());
    assert_eq!(unknown, None, "generation_config.json");
    let unknown = listed.tokenizer.iter().find(|key| config_keys::key_use(key).is_none());
    assert_eq!(unknown, None, "tokenizer_config.json");
    assert!(listed.generation.len() > 60 && listed.tokenizer.len() > 30);
    assert!(generation_keys::key_use("new_penalty").is_none() && config_keys::key_use("new_switch").is_none());
}
