//! Promise: what the model writes is learned, with every template: training finds the mask that transformers finds with `{% generation %}`
//! tags, though they are taken out, and renders the same text. Conversations are random, with thoughts, calls and results. Templates of
//! authors are read from a folder: `MEDUSA_PYTHON=python3 MEDUSA_CHAT_TEMPLATES=folder cargo test --test promises real_`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;

use medusa::data::chat_template::{ChatTemplate, TemplateChoice, TemplateInputs};
use medusa::data::conversation;
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, IGNORE, LoadSettings};
use medusa::files::write_atomic;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn tiny() -> PathBuf {
    root().join("data/tiny/backbone")
}

/// The source of a template without its tags: they stand alone, with no dashes and no line of their own.
fn without_tags(source: &str) -> String {
    source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
}

fn template(source: &str) -> ChatTemplate {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x.jinja");
    write_atomic(&path, |out| std::io::Write::write_all(out, source.as_bytes())).expect("a file");
    let choice = TemplateChoice::try_from(path.display().to_string()).expect("a .jinja file");
    ChatTemplate::choose(&choice, &tiny()).expect("a template that parses").expect("one")
}

/// The rows as training reads them, all of which it has to keep.
fn rows_of(rows: &[&Value], template: &ChatTemplate, tokenizer: &TextTokenizer) -> Vec<TokenRow> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("rows.jsonl");
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    write_atomic(&path, |out| std::io::Write::write_all(out, lines.as_bytes())).expect("a file");
    let settings = LoadSettings {
        tokenizer: Some(tokenizer),
        template: Some(template),
        ..LoadSettings::new(tokenizer.vocab_size(), NonZeroUsize::new(1 << 16).expect("not 0"))
    };
    let (loaded, report) = data::load(&[path.display().to_string()], &settings).expect("rows");
    assert_eq!(loaded.len(), rows.len(), "{report}");
    loaded.iter().map(|row| row.expect("a row that was just read")).collect()
}

fn text_of(row: &Value, template: &ChatTemplate, opened: bool) -> String {
    let messages = conversation::read_messages("messages", &row["messages"]).expect("messages");
    let kwargs = row["chat_template_kwargs"].as_object().cloned().unwrap_or_default();
    let inputs = TemplateInputs { tools: row["tools"].as_array().cloned(), kwargs };
    template.render_with(&messages, &inputs, opened).unwrap_or_else(|error| error.to_string())
}

fn mask_of(row: &TokenRow) -> String {
    row.labels.iter().map(|label| if *label == IGNORE { '0' } else { '1' }).collect()
}

fn digest(text: &str) -> String {
    Sha256::digest(text)[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How many rows a template was compared on.
fn check(name: &str, source: &str, rows: &[Value], expected: &[Value], tokenizer: &TextTokenizer) -> usize {
    let template = template(source);
    let pairs: Vec<(&Value, &Value)> = rows.iter().zip(expected).filter(|(_, expected)| !expected.is_null()).collect();
    let written: Vec<&Value> = pairs.iter().map(|(row, _)| *row).collect();
    if written.is_empty() {
        return 0;
    }
    for ((row, expected), loaded) in pairs.iter().zip(rows_of(&written, &template, tokenizer)) {
        let (text, mask) = (text_of(row, &template, false), mask_of(&loaded));
        match expected.as_str() {
            Some(hash) => assert_eq!(digest(&format!("{text}\n{mask}")), *hash, "{name}: {row}\n{text}\n{mask}"),
            None => {
                assert_eq!(
                    (text.as_str(), text_of(row, &template, true).as_str()),
                    (expected["text"].as_str().expect("a text"), expected["prompt"].as_str().expect("a text")),
                    "{name}: {row}"
                );
                assert_eq!(mask, expected["mask"].as_str().expect("a mask"), "{name}: {row}\n{text}");
            }
        }
    }
    written.len()
}

#[test]
fn what_the_model_writes_is_learned_with_every_template() {
    let fixture = std::fs::read(root().join("tests/fixtures/chat_masks.json")).expect("a fixture");
    let fixture: Value = serde_json::from_slice(&fixture).expect("JSON");
    let tokenizer = TextTokenizer::load(&tiny()).expect("a tokenizer");
    let rows = fixture["rows"].as_array().expect("rows");
    for (name, expected) in fixture["made"].as_object().expect("templates") {
        let source = std::fs::read_to_string(root().join(format!("tests/fixtures/chat_templates/{name}.jinja")))
            .expect("a template");
        let expected = expected.as_array().expect("hashes");
        assert!(source.contains("{% generation %}"), "{name}");
        let counts =
            [source.clone(), without_tags(&source)].map(|source| check(name, &source, rows, expected, &tokenizer));
        assert!(counts[0] >= rows.len() / 2 && counts[0] == counts[1], "{name}: {counts:?}");
    }
}

#[test]
#[cfg_attr(
    not(python),
    ignore = "needs MEDUSA_PYTHON: a Python with transformers 5, and MEDUSA_CHAT_TEMPLATES: a folder"
)]
fn real_templates_render_and_mask_as_transformers_does() {
    let Some(folder) = std::env::var_os("MEDUSA_CHAT_TEMPLATES").map(PathBuf::from) else {
        panic!(
            "set MEDUSA_CHAT_TEMPLATES to a folder of .jinja files, as scripts/oracles/real_chat_templates.py describes"
        );
    };
    let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
    let output = Command::new(python).arg(root().join("scripts/oracles/real_chat_templates.py")).arg(&folder).output();
    let output = output.expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let made: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let tokenizer = TextTokenizer::load(&tiny()).expect("a tokenizer");
    let rows = made["rows"].as_array().expect("rows");
    for (name, expected) in made["made"].as_object().expect("templates") {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("a template");
        check(name, &without_tags(&source), rows, expected.as_array().expect("cases"), &tokenizer);
    }
}
