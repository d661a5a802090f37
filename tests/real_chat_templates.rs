//! Promise: the chat templates of today's models render and mask as transformers does, with tools, calls and variables. The templates are
//! their authors', so they are read from a folder: `MEDUSA_PYTHON=python3 MEDUSA_CHAT_TEMPLATES=folder cargo test --test promises real_`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;

use medusa::data::chat_template::{ChatTemplate, Message, TemplateChoice, TemplateInputs};
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, IGNORE, LoadSettings};
use medusa::files::write_atomic;
use serde_json::Value;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone")
}

fn inputs(row: &Value) -> TemplateInputs {
    let kwargs = row["chat_template_kwargs"].as_object().cloned().unwrap_or_default();
    TemplateInputs { tools: row["tools"].as_array().cloned(), kwargs }
}

fn message(value: &Value) -> Message {
    let mut value = value.clone();
    let is_null = value["content"].is_null();
    if is_null {
        value["content"] = "".into();
    }
    let mut message: Message = serde_json::from_value(value).expect("a message");
    message.more.extend(is_null.then(|| ("content".to_owned(), Value::Null)));
    message
}

/// The row as training reads it; `None` where the template refuses it.
fn row_of(row: &Value, template: &ChatTemplate, tokenizer: &TextTokenizer) -> Option<TokenRow> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("row.jsonl");
    write_atomic(&path, |out| std::io::Write::write_all(out, row.to_string().as_bytes())).expect("a file");
    let settings = LoadSettings {
        tokenizer: Some(tokenizer),
        template: Some(template),
        ..LoadSettings::new(tokenizer.vocab_size(), NonZeroUsize::new(1 << 16).expect("not 0"))
    };
    let (rows, _) = data::load(&[path.display().to_string()], &settings).ok()?;
    rows.iter().next().map(|row| row.expect("a row that was just read"))
}

/// What differs between our rendering of a row and transformers'.
fn differences(row: &Value, expected: &Value, template: &ChatTemplate, tokenizer: &TextTokenizer) -> Vec<String> {
    let messages: Vec<Message> = row["messages"].as_array().expect("messages").iter().map(message).collect();
    let mut found = Vec::new();
    for (key, opened) in [("text", false), ("prompt", true)] {
        let ours = template.render_with(&messages, &inputs(row), opened);
        if ours.as_deref().ok() != expected[key].as_str() {
            found.push(format!("{key}\n  ours   {ours:?}\n  theirs {}", expected[key]));
        }
    }
    if let (Some(ids), true) = (expected["ids"].as_array(), found.is_empty()) {
        let ids: Vec<i32> = ids.iter().map(|id| id.as_i64().expect("an id") as i32).collect();
        let mask = expected["mask"].as_str().expect("a mask").bytes();
        let labels = ids.iter().zip(mask).map(|(id, learned)| if learned == b'1' { *id } else { IGNORE }).collect();
        let ours = row_of(row, template, tokenizer);
        let learned = |row: &TokenRow| {
            let spans = row.labels.chunk_by(|a, b| (*a == IGNORE) == (*b == IGNORE)).filter(|span| span[0] != IGNORE);
            spans.map(|span| tokenizer.decode(span, false).expect("known ids")).collect::<Vec<_>>()
        };
        let theirs = TokenRow { input_ids: ids, labels };
        if ours.as_ref() != Some(&theirs) {
            found.push(format!("mask\n  ours   {:?}\n  theirs {:?}", ours.as_ref().map(learned), learned(&theirs)));
        }
    }
    found
}

#[test]
#[cfg_attr(
    not(python),
    ignore = "needs MEDUSA_PYTHON: a Python with transformers 5, and MEDUSA_CHAT_TEMPLATES: a folder"
)]
fn real_templates_render_and_mask_as_transformers_does() {
    let Some(folder) = std::env::var_os("MEDUSA_CHAT_TEMPLATES").map(PathBuf::from) else {
        panic!("set MEDUSA_CHAT_TEMPLATES to a folder of .jinja files, as scripts/real_chat_templates.py describes");
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/real_chat_templates.py");
    let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
    let output = Command::new(python).arg(script).arg(&folder).output().expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let made: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let tokenizer = TextTokenizer::load(&tiny()).expect("a tokenizer");
    let mut found = Vec::new();
    for (name, cases) in made["made"].as_object().expect("templates") {
        let path = folder.join(name).display().to_string();
        let choice = TemplateChoice::try_from(path).expect("a .jinja file");
        let template = ChatTemplate::choose(&choice, &tiny()).expect("a template that parses").expect("one");
        for (at, (row, expected)) in
            made["rows"].as_array().expect("rows").iter().zip(cases.as_array().expect("cases")).enumerate()
        {
            let different = differences(row, expected, &template, &tokenizer);
            found.extend(different.into_iter().map(|difference| format!("{name}, row {at}: {difference}")));
        }
    }
    assert!(found.is_empty(), "{} differences:\n{}", found.len(), found.join("\n"));
}
