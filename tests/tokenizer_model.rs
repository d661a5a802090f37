//! Promise: a `tokenizer.model` gives the ids that sentencepiece, tiktoken and transformers give, and one that cannot be read is
//! refused in a sentence. Many more lines and models: scripts/oracles/check_tokenizers.py, which made the fixtures.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use medusa::data::chat_template::ChatTemplate;
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, LoadSettings};
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

/// What scripts/oracles/check_tokenizers.py wrote.
#[derive(Deserialize)]
struct Expected {
    /// Without special tokens.
    lines: Vec<String>,
    /// sentencepiece's, of each model.
    ids: BTreeMap<String, Vec<Vec<i32>>>,
    /// Lines with special tokens, and transformers' ids of them with BOS.
    marked: Vec<String>,
    #[serde(rename = "legacy true")]
    legacy: Vec<Vec<i32>>,
    #[serde(rename = "legacy false")]
    not_legacy: Vec<Vec<i32>>,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers").join(name)
}

fn expected() -> Expected {
    serde_json::from_slice(&fs::read(fixture("ids.json")).expect("a fixture")).expect("JSON")
}

fn write(folder: &TempDir, name: &str, bytes: impl AsRef<[u8]>) {
    medusa::files::write_atomic(&folder.path().join(name), |out| std::io::Write::write_all(out, bytes.as_ref()))
        .expect("a file");
}

/// A folder with a tokenizer.model and a tokenizer_config.json.
fn folder(model: impl AsRef<[u8]>, config: &Value) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write(&folder, "tokenizer.model", model);
    write(&folder, "tokenizer_config.json", config.to_string());
    folder
}

fn model(name: &str) -> Vec<u8> {
    fs::read(fixture(&format!("{name}.model"))).expect("a fixture")
}

fn load(folder: &TempDir) -> TextTokenizer {
    TextTokenizer::load(folder.path()).expect("a tokenizer")
}

fn refusal(folder: &TempDir) -> String {
    TextTokenizer::load(folder.path()).expect_err("it cannot be read").to_string()
}

#[test]
fn ids_are_those_of_sentencepiece() {
    let Expected { lines, ids, .. } = expected();
    assert!(ids.len() >= 8 && lines.len() >= 200);
    for (name, ids) in ids {
        let tokenizer = load(&folder(model(&name), &json!({})));
        for (line, expected) in lines.iter().zip(ids) {
            let (got, places) = tokenizer.encode_with_places(line).expect("ids");
            assert_eq!(got, expected, "{name}: {line:?}");
            assert_eq!(tokenizer.encode(line, false).expect("ids"), expected, "{name}: {line:?}");
            let within = |place: &std::ops::Range<usize>| line.get(place.clone()).is_some();
            assert!(
                places.iter().all(within) && places.is_sorted_by_key(|place| place.end),
                "{name}: {line:?} {places:?}"
            );
        }
    }
}

#[test]
fn special_tokens_are_those_of_transformers_legacy_or_not() {
    let Expected { marked, legacy, not_legacy, .. } = expected();
    for (legacy, ids) in [(true, legacy), (false, not_legacy)] {
        let tokenizer = load(&folder(model("llama"), &json!({"tokenizer_class": "LlamaTokenizer", "legacy": legacy})));
        for (line, expected) in marked.iter().zip(&ids) {
            // transformers puts BOS before a text that begins with it, too.
            let expected = expected.strip_prefix(&[1]).filter(|rest| rest.starts_with(&[1])).unwrap_or(expected);
            assert_eq!(tokenizer.encode(line, true).expect("ids"), expected, "legacy {legacy}: {line:?}");
        }
    }
}

/// Rows of conversations with their labels, and the text that each row decodes to.
fn rows(folder: &TempDir) -> (Vec<TokenRow>, Vec<String>) {
    let tokenizer = load(folder);
    let choice = "vicuna".to_owned().try_into().expect("a template");
    let template = ChatTemplate::choose(&choice, folder.path()).expect("a template");
    let settings = LoadSettings {
        tokenizer: Some(&tokenizer),
        template: template.as_ref(),
        ..LoadSettings::new(tokenizer.vocab_size(), NonZeroUsize::new(4096).expect("not 0"))
    };
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/data/messages_1k.jsonl");
    let text = fs::read_to_string(data).expect("a fixture");
    let some: String = text.lines().take(40).map(|line| format!("{line}\n")).collect();
    write(folder, "rows.jsonl", some);
    let path = folder.path().join("rows.jsonl").display().to_string();
    let (rows, _) = data::load(&[path], &settings).expect("rows");
    let rows: Vec<TokenRow> = rows.iter().collect::<Result<_, _>>().expect("rows that were just read");
    let streamed = |row: &TokenRow| {
        let mut stream = tokenizer.stream();
        let mut text: String = row.input_ids.iter().filter_map(|&id| stream.push(id).expect("text")).collect();
        text.extend(stream.finish().expect("text"));
        text
    };
    let texts = rows.iter().map(streamed).collect();
    (rows, texts)
}

#[test]
fn conversations_and_their_masks_are_those_of_the_tokenizer_json_that_transformers_writes() {
    for legacy in [true, false] {
        let config =
            json!({"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "bos_token": "<s>", "eos_token": "</s>"});
        let native = folder(model("llama"), &config);
        let converted = folder("never read beside tokenizer.json", &config);
        let json = fixture(&format!("llama-legacy-{legacy}.json"));
        write(&converted, "tokenizer.json", fs::read(json).expect("a fixture"));
        let (got, expected) = (rows(&native), rows(&converted));
        assert!(got.0.len() == 40 && got.0.iter().all(|row| row.labels.iter().any(|label| *label >= 0)));
        assert!(got == expected, "legacy {legacy}");
    }
}

#[test]
fn named_tokens_come_from_the_json_files_or_from_the_model() {
    let of = |config: Value| {
        let tokenizer = load(&folder(model("llama"), &config));
        (tokenizer.encode("a", true).expect("ids"), tokenizer.bos_id(), tokenizer.eos_id())
    };
    let plain = of(json!({}));
    let a = plain.0[1..].to_vec();
    assert_eq!(plain, ([vec![1], a.clone()].concat(), Some(1), Some(2)));
    assert_eq!(of(json!({"add_bos_token": false, "add_eos_token": true})).0, [a.clone(), vec![2]].concat());
    assert_eq!(of(json!({"bos_token": null})), (a.clone(), None, Some(2)));
    assert_eq!(of(json!({"bos_token": {"content": "[INST]"}})).0, [vec![3], a].concat());
    let split = load(&folder(model("llama"), &json!({"split_special_tokens": true})));
    assert!(split.encode("</s>", false).expect("ids").len() > 1);
    // The template gets the model's own names, too: "vicuna" ends an answer with EOS.
    let bare = folder(model("llama"), &json!({}));
    let choice = "vicuna".to_owned().try_into().expect("a template");
    let template = ChatTemplate::choose(&choice, bare.path()).expect("a template").expect("a template");
    let turns = ["user", "assistant"].map(|role| data::chat_template::Message::new(role, "x"));
    assert!(template.render(&turns, false).expect("a text").ends_with("x</s>"));
}

#[test]
fn added_tokens_have_the_ids_that_the_json_files_give_them() {
    let size = load(&folder(model("llama"), &json!({}))).vocab_size() as i32;
    let decoder = json!({"added_tokens_decoder": {
        "700": {"content": "<|end|>", "special": true, "rstrip": true, "lstrip": false, "normalized": false},
        "701": {"content": "xyz", "special": false},
    }});
    let tokenizer = load(&folder(model("llama"), &decoder));
    let ids = tokenizer.encode("<|end|>   xyz<|end|>", false).expect("ids");
    assert_eq!(ids, [700, 701, 700]);
    assert_eq!((tokenizer.vocab_size(), tokenizer.decode(&ids, true).expect("a text")), (702, "xyz".to_owned()));
    assert!(tokenizer.is_special(700) && !tokenizer.is_special(701));
    assert!(tokenizer.check_vocabulary(701).expect_err("too small").to_string().contains("\"xyz\" has id 701"));

    let older = folder(model("llama"), &json!({"pad_token": "<pad>"}));
    write(&older, "added_tokens.json", format!("{{\"<new>\": {size}}}"));
    write(&older, "special_tokens_map.json", r#"{"additional_special_tokens": ["<new>"]}"#);
    let tokenizer = load(&older);
    assert_eq!(tokenizer.encode("<new><pad>", false).expect("ids"), [size, size + 1]);
    assert!(tokenizer.is_special(size));
}

#[test]
fn what_decides_ids_changes_the_digest_and_nothing_else_does() {
    let sha256 = |name, config| load(&folder(model(name), &config)).sha256().to_owned();
    let first = sha256("llama", json!({"legacy": true}));
    assert_eq!(sha256("llama", json!({"legacy": true, "chat_template": "x"})), first);
    assert_ne!(sha256("llama", json!({"legacy": false})), first);
    assert_ne!(sha256("unused", json!({"legacy": true})), first);
}

/// Lines of tiktoken: all bytes, then these tokens.
fn ranks(tokens: &[&str]) -> String {
    let bytes = (0..=u8::MAX).map(|byte| vec![byte]);
    let all = bytes.chain(tokens.iter().map(|token| token.as_bytes().to_vec()));
    all.enumerate().map(|(rank, token)| format!("{} {rank}\n", STANDARD.encode(token))).collect()
}

#[test]
fn a_vocabulary_of_tiktoken_is_joined_by_rank() {
    let config = json!({"bos_token": "<|b|>", "added_tokens_decoder": {"300": {"content": "<|b|>", "special": true}}});
    let tokenizer = load(&folder(ranks(&["bc", "ab", "pqr", "é"]), &config));
    let ids = |text: &str| tokenizer.encode(text, false).expect("ids");
    assert_eq!(ids("abc"), [97, 256], "the lower rank first, not the one on the left");
    assert_eq!(
        ids("pqr pqr"),
        [258, 32, 112, 113, 114],
        "no two letters join to it: it is a token only as a whole word"
    );
    assert_eq!(ids("é\u{1}\n<|b|>ab"), [259, 1, 10, 300, 257]);
    assert_eq!((tokenizer.encode("ab", true).expect("ids"), tokenizer.bos_id()), (vec![300, 257], Some(300)));
    let text = "  tabs\tand 你好 👩‍👧 <|b|>\r\n\r\n 1234";
    assert_eq!(tokenizer.decode(&ids(text), false).expect("a text"), text);
}

#[test]
fn llama_3s_vocabulary_brings_its_special_tokens() {
    let words: Vec<String> = (256..128_000).map(|n| format!("word{n}")).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let tokenizer = load(&folder(ranks(&words), &json!({})));
    let text =
        "<|begin_of_text|><|start_header_id|><|eot_id|><|reserved_special_token_3|><|reserved_special_token_247|>";
    let special = [128_000, 128_006, 128_009, 128_011, 128_255];
    assert_eq!(tokenizer.encode(text, false).expect("ids"), special);
    assert_eq!(
        (tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.vocab_size()),
        (Some(128_000), Some(128_001), 128_256)
    );
}

/// A SentencePiece model with another `model_type`: the trainer's fields are written once more, and the last count.
fn of_type(number: u8) -> Vec<u8> {
    let mut bytes = model("llama");
    bytes.extend([0x12, 2, 0x18, number]);
    bytes
}

#[test]
fn a_tokenizer_model_that_cannot_be_read_is_refused_in_a_sentence() {
    let cut = |name| model(name)[..3000].to_vec();
    for (bytes, config, words) in [
        (b"{}".to_vec(), json!({}), &["neither a SentencePiece model", "tiktoken"][..]),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n".to_vec(),
            json!({}),
            &["Git LFS", "git lfs pull"],
        ),
        (Vec::new(), json!({}), &["it has no pieces"]),
        (cut("llama"), json!({}), &["neither a SentencePiece model"]),
        (of_type(3), json!({}), &["model_type", "WORD", "unigram", "BPE"]),
        (of_type(4), json!({}), &["model_type", "CHAR"]),
        (model("llama"), json!({"legacy": "no"}), &["tokenizer_config.json: legacy: expected true or false", "\"no\""]),
        (model("llama"), json!({"tokenizer_class": "XLNetTokenizer"}), &["XLNetTokenizer", "save_pretrained"]),
        (model("llama"), json!({"added_tokens_decoder": {"x": "y"}}), &["added_tokens_decoder"]),
        ("AA== 0\nAQ== 2\n".into(), json!({}), &["line 2", "rank 1", "AQ== 2"]),
        ("AA== 0\nAQ== 1\n".into(), json!({}), &["byte 0x02"]),
    ] {
        let error = refusal(&folder(&bytes, &config));
        assert!(words.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{words:?}: {error}");
    }
}

/// Groups, each of which begins in the one before, overflow the stack of a reader that goes down with them (RUSTSEC-2024-0437).
#[test]
fn a_tokenizer_model_of_groups_in_groups_is_refused() {
    const GROUP: u8 = 15 << 3 | 3;
    let bytes = [model("llama"), vec![GROUP; 1 << 20]].concat();
    let error = refusal(&folder(bytes, &json!({})));
    assert!(error.contains("neither a SentencePiece model") && !error.contains('\n'), "{error}");
}
