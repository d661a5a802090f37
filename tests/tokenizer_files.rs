//! Promise: where tokenizer.json and the files beside it name different tokens, a text has the ids that transformers 5 gives it, or the
//! tokenizer is refused in a sentence that names both files. Made by scripts/fixtures/make_two_source_tokenizers.py.

use std::fs;
use std::path::Path;

use medusa::data::tokenize::TextTokenizer;
use serde::Deserialize;
use serde_json::{Map, Value};
use tempfile::TempDir;

#[derive(Deserialize)]
struct Fixture {
    texts: Vec<String>,
    cases: Vec<Case>,
}

/// Changes of the tiny tokenizer, and what transformers makes of it.
#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(default)]
    tokenizer: Value,
    #[serde(default)]
    config: Value,
    #[serde(flatten)]
    files: Map<String, Value>,
    /// `None`: it cannot load the files.
    transformers: Option<Expected>,
}

#[derive(Deserialize)]
struct Expected {
    ids: Vec<Vec<i32>>,
    /// Without special tokens.
    decoded: Vec<String>,
    tokens: usize,
    bos: Option<i32>,
    eos: Option<i32>,
}

/// Folders that transformers reads (but gives random ids, or other ids than a file says), and what is said of them here.
const REFUSED: [(&str, &str); 9] = [
    (
        "dropout",
        "tokenizer.json: model.dropout: expected null or 0, since dropout gives a text other tokens each time, got 1",
    ),
    (
        "another token at an id",
        "tokenizer_config.json: \"<|x|>\" has id 3, but with tokenizer.json it is 1536 (3 is \"<|assistant|>\")",
    ),
    (
        "two tokens with each other's ids",
        "tokenizer_config.json: \"<|assistant|>\" has id 2, but with tokenizer.json it is 3 (2 is \"<|user|>\")",
    ),
    (
        "an id beyond the next",
        "tokenizer_config.json: \"<|x|>\" has id 1600, but with tokenizer.json it is 1536; copy both",
    ),
    (
        "an id of the vocabulary",
        "tokenizer_config.json: \"<|x|>\" has id 700, but with tokenizer.json it is 1536 (700 is",
    ),
    (
        "a token of the vocabulary with another id",
        "tokenizer_config.json: \"x\" has id 92, but with tokenizer.json it is 91 (92 is \"y\")",
    ),
    (
        "added_tokens.json with an id of tokenizer.json",
        "added_tokens.json: \"<|x|>\" has id 3, but with tokenizer.json it is 1536 (3 is \"<|assistant|>\")",
    ),
    ("an unknown EOS", "tokenizer_config.json: eos_token: expected a token of tokenizer.json, or null, got \"<|x|>\""),
    (
        "an unknown EOS in special_tokens_map.json",
        "special_tokens_map.json: eos_token: expected a token of tokenizer.json, or null, got \"<|x|>\"",
    ),
];

fn fixture() -> Fixture {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers/two_sources.json");
    serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON")
}

/// A JSON merge patch (RFC 7386).
fn merge(value: &mut Value, change: &Value) {
    let Some(parts) = change.as_object() else { return *value = change.clone() };
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    let object = value.as_object_mut().expect("just made");
    for (key, part) in parts {
        if part.is_null() {
            object.remove(key);
        } else {
            merge(object.entry(key.as_str()).or_insert(Value::Null), part);
        }
    }
}

/// The tiny tokenizer with a case's changes.
fn folder(case: &Case) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, content: &Value| {
        medusa::files::write_atomic(&folder.path().join(name), |out| Ok(serde_json::to_writer(out, content)?))
            .expect("a file");
    };
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    for (name, change) in [("tokenizer.json", &case.tokenizer), ("tokenizer_config.json", &case.config)] {
        let mut content: Value = serde_json::from_slice(&fs::read(tiny.join(name)).expect("a file")).expect("JSON");
        if !change.is_null() {
            merge(&mut content, change);
        }
        write(name, &content);
    }
    case.files.iter().for_each(|(name, content)| write(name, content));
    folder
}

#[test]
fn tokens_of_two_files_are_those_of_transformers_or_refused() {
    let Fixture { texts, cases } = fixture();
    let is_refused = |case: &&Case| REFUSED.iter().any(|(name, _)| *name == case.name);
    let (refused, read): (Vec<&Case>, Vec<&Case>) = cases.iter().partition(is_refused);
    assert_eq!((refused.len(), read.len()), (REFUSED.len(), 40));
    for case in read {
        let Some(expected) = &case.transformers else { continue };
        let tokenizer = TextTokenizer::load(folder(case).path()).expect(&case.name);
        let ids: Vec<Vec<i32>> = texts.iter().map(|text| tokenizer.encode(text, true).expect("ids")).collect();
        assert_eq!(ids, expected.ids, "{}", case.name);
        let decoded: Vec<String> = ids.iter().map(|ids| tokenizer.decode(ids, true).expect("a text")).collect();
        assert_eq!(decoded, expected.decoded, "{}", case.name);
        let found = (tokenizer.vocab_size(), tokenizer.bos_id(), tokenizer.eos_id());
        assert_eq!(found, (expected.tokens, expected.bos, expected.eos), "{}", case.name);
    }
    for case in refused {
        let folder = folder(case);
        let error = TextTokenizer::load(folder.path()).expect_err(&case.name).to_string();
        let error = error.replace(&format!("{}/", folder.path().display()), "");
        let (_, words) = REFUSED.into_iter().find(|(name, _)| *name == case.name).expect("one of them");
        assert!(error.starts_with(words), "{}: {error}", case.name);
    }
}

#[test]
fn what_the_files_beside_it_change_is_part_of_the_digest() {
    let Fixture { cases, .. } = fixture();
    let load = |name: &str| {
        let case = cases.iter().find(|case| case.name == name).expect("a case");
        TextTokenizer::load(folder(case).path()).expect("a tokenizer")
    };
    let plain = load("no change");
    assert_eq!(load("the config lacks a token").sha256(), plain.sha256());
    for name in ["lstrip in the config", "a new token", "additional_special_tokens", "split_special_tokens"] {
        assert_ne!(load(name).sha256(), plain.sha256(), "{name}");
    }
    let error = load("a new token").check_vocabulary(1536).expect_err("the model has no row for it").to_string();
    assert!(error.contains("tokenizer_config.json: token \"<|x|>\" has id 1536"), "{error}");
}
