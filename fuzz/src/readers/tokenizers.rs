//! Tokenizers, the JSON files beside them, and chat templates.

use std::fs;
use std::path::Path;

use medusa::data::chat_template::{ChatTemplate, Message, TemplateInputs};
use medusa::data::tokenize::{TextTokenizer, files_of};
use serde_json::{Value, json};

use super::scratch::{checked, choice, folder, write};

/// A SentencePiece model of a few pieces.
const MODEL: &[u8] = include_bytes!("../../../tests/fixtures/tokenizers/suffix.model");
/// Letters of one to four bytes, blanks of all kinds, and special tokens.
const TEXT: &str = " The  <s>é\u{301}日本\t\n</s>\u{1f600} 12,345.6 \u{a0}naïve\u{2581}x";
/// Files of a folder with a tokenizer.
const FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
];

/// A folder with these files and none of the others.
fn with(reader: &str, files: &[(&str, &[u8])]) -> std::path::PathBuf {
    let folder = folder(reader);
    for name in FILES {
        match files.iter().find(|(file, _)| *file == name) {
            Some((_, bytes)) => write(&folder.join(name), bytes),
            None => drop(fs::remove_file(folder.join(name))),
        }
    }
    folder
}

/// What is done with a tokenizer.
fn used(folder: &Path) {
    let Some(tokenizer) = checked(folder, TextTokenizer::load(folder)) else { return };
    let _ = (tokenizer.vocab_size(), tokenizer.longest_token(), tokenizer.bos_id(), tokenizer.eos_id());
    let _ = (checked(folder, tokenizer.check_vocabulary(100)), tokenizer.special_token_at(TEXT));
    let _ = (checked(folder, tokenizer.encode_around(TEXT)), tokenizer.sha256().len(), files_of(folder).len());
    if let Some((ids, places)) = checked(folder, tokenizer.encode_with_places(TEXT)) {
        assert_eq!(ids.len(), places.len());
    }
    let Some(ids) = checked(folder, tokenizer.encode(TEXT, true)) else { return };
    let _ = checked(folder, tokenizer.decode(&ids, true));
    let mut stream = tokenizer.stream();
    for &id in ids.iter().chain(&[0, 1, -1, i32::MAX]) {
        let _ = (tokenizer.is_special(id), stream.is_special(id), checked(folder, stream.text_of(id)));
        let _ = checked(folder, stream.push(id));
    }
    for id in (0..256).chain(200..256) {
        let _ = checked(folder, stream.push(id)); // bytes, in a tokenizer that has them: few are a character
    }
    let _ = checked(folder, stream.finish());
}

/// tokenizer.json: whole, or parts of one in a skeleton that is right.
pub(super) fn json(input: &[u8]) {
    let bytes = match serde_json::from_slice::<Value>(input) {
        Ok(Value::Object(parts)) if !parts.contains_key("version") => skeleton(parts).to_string().into_bytes(),
        _ => input.to_vec(),
    };
    used(&with("tokenizer_json", &[("tokenizer.json", &bytes)]));
}

/// A tokenizer that is whole but for the parts that are given.
fn skeleton(parts: serde_json::Map<String, Value>) -> Value {
    let mut whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
    });
    if let Some(whole) = whole.as_object_mut() {
        whole.extend(parts);
    }
    whole
}

pub(super) fn model(input: &[u8]) {
    used(&with("tokenizer_model", &[("tokenizer.model", input)]));
}

/// The JSON files beside tokenizer.model; the first byte says which of them the others are.
pub(super) fn config(input: &[u8]) {
    let (which, rest) = choice(input);
    let name = match which {
        b'm' => "special_tokens_map.json",
        b'a' => "added_tokens.json",
        _ => "tokenizer_config.json",
    };
    let bytes = if [b'm', b'a'].contains(&which) { rest } else { input };
    let folder = with("tokenizer_config", &[("tokenizer.model", MODEL), (name, bytes)]);
    used(&folder);
    let _ = checked(&folder, ChatTemplate::load(&folder));
}

/// A template over conversations of all forms. Large numbers, with which it may take all memory, are left out (SECURITY.md).
pub(super) fn chat_template(input: &[u8]) {
    let has_large_number = input.split(|byte| !byte.is_ascii_digit()).any(|digits| digits.len() > 4);
    if has_large_number || input.windows(2).any(|pair| pair == b"**") {
        return;
    }
    const CONFIG: &[u8] = br#"{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}"#;
    let folder = with("chat_template", &[("tokenizer_config.json", CONFIG), ("chat_template.jinja", input)]);
    let Some(Some(template)) = checked(&folder, ChatTemplate::load(&folder)) else { return };
    let turns = [("system", "Be brief."), ("user", " Hi \u{e9}\n"), ("assistant", "Hello."), ("user", "Bye")];
    let messages: Vec<Message> = turns.iter().map(|(role, content)| Message::new(*role, *content)).collect();
    let mut called = Message::new("assistant", "");
    let call = json!([{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, null]}}}]);
    called.more.insert("tool_calls".into(), call);
    let with_call = [messages[1].clone(), called, Message::new("tool", "{\"y\": 1}")];
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let inputs = TemplateInputs { tools: Some(vec![tool]), ..TemplateInputs::default() };
    let _ = checked(&folder, template.render(&messages, false));
    let _ = checked(&folder, template.render(&messages[1..2], true));
    let _ = checked(&folder, template.render_with(&with_call, &inputs, true));
    let _ = (template.sha256().len(), template.source().len());
}
