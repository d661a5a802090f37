//! Files on which a library panics end as any other broken file does: with one error that names the file.

use std::io::Write;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::ipc::writer::FileWriter;
use parquet::arrow::ArrowWriter;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader, ParquetMetaDataWriter};
use serde_json::{Value, json};

use super::small_run::SmallRun;

/// A length that no other number in an Arrow file equals.
const LETTERS: usize = 70_003;

fn one_text(text: &str) -> RecordBatch {
    let texts: ArrayRef = Arc::new(StringArray::from(vec![text]));
    RecordBatch::try_from_iter([("text", texts)]).expect("a batch")
}

/// A Parquet file whose footer gives its one column a negative size.
fn parquet_of_negative_size() -> Vec<u8> {
    let batch = one_text("w1 w2");
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).expect("a writer");
    writer.write(&batch).expect("rows");
    let mut bytes = writer.into_inner().expect("a file");
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(&bytes).expect("a place for it");
    let footer = ParquetMetaDataReader::new().parse_and_finish(&file).expect("a footer");
    let groups = footer.row_groups().iter().map(|group| {
        let columns = group.columns().iter().cloned();
        let broken =
            columns.map(|column| column.into_builder().set_total_compressed_size(-1).build().expect("a column"));
        group.clone().into_builder().set_column_metadata(broken.collect()).build().expect("a row group")
    });
    let broken = ParquetMetaData::new(footer.file_metadata().clone(), groups.collect());
    ParquetMetaDataWriter::new(&mut bytes, &broken).finish().expect("a footer");
    bytes
}

/// An Arrow file that promises more bytes of text than it has.
fn arrow_of_missing_bytes() -> Vec<u8> {
    let batch = one_text(&"w".repeat(LETTERS));
    let mut writer = FileWriter::try_new(Vec::new(), &batch.schema()).expect("a writer");
    writer.write(&batch).expect("rows");
    let mut bytes = writer.into_inner().expect("a file");
    let length = LETTERS.to_le_bytes();
    let at = bytes.windows(8).position(|window| window == length).expect("the length of the texts");
    bytes[at..at + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    bytes
}

/// A tokenizer of the words `w0` to `w47`, but for the parts that are given.
fn tokenizer(parts: Value) -> String {
    let vocabulary: serde_json::Map<String, Value> = (0..48).map(|id| (format!("w{id}"), id.into())).collect();
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    });
    let Value::Object(parts) = parts else { panic!("parts by name") };
    parts.into_iter().for_each(|(name, part)| tokenizer[name] = part);
    tokenizer.to_string()
}

#[test]
fn rows_in_a_broken_columnar_file() {
    for (name, bytes) in [("rows.parquet", parquet_of_negative_size()), ("rows.arrow", arrow_of_missing_bytes())] {
        let small = SmallRun::new();
        small.write("backbone/tokenizer.json", tokenizer(json!({})));
        small.write(name, bytes);
        small.edit("recipe.toml", "rows.jsonl", name);
        for arguments in [&["--check"][..], &["--check", "--skip-bad-rows"]] {
            small.train(arguments).failed(1, &[name]);
        }
    }
}

#[test]
fn a_tokenizer_that_cannot_be_loaded() {
    let small = SmallRun::new();
    let merges = json!({"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "####"});
    small.write("backbone/tokenizer.json", tokenizer(json!({"model": merges})));
    let facts = ["backbone/tokenizer.json: the tokenizers library cannot load it"];
    small.train(&["--check"]).failed(1, &facts);
    small.medusa(&["generate", "--backbone", "backbone", "--prompt", "w1"]).failed(1, &facts);
}

#[test]
fn a_tokenizer_that_fails_on_texts_and_on_tokens() {
    let small = SmallRun::new();
    let generate = |prompt: &str, facts: &[&str]| {
        small.write("prompts.jsonl", prompt);
        let inputs = "generate --backbone backbone --prompts prompts.jsonl --max-new-tokens 4";
        small.medusa(&inputs.split(' ').collect::<Vec<_>>()).failed(1, &[&["backbone/tokenizer.json"], facts].concat());
    };
    // A trie of one unit, which leads to units that are not there.
    let charsmap = json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="});
    small.write("backbone/tokenizer.json", tokenizer(json!({"normalizer": charsmap})));
    generate(r#"{"prompt": "w1 w2"}"#, &["the tokenizers library cannot load it"]);
    // One of 120 units, which has none for "z".
    let charsmap = json!({"type": "Precompiled", "precompiled_charsmap": format!("4AEA{}AA==", "A".repeat(640))});
    small.write("backbone/tokenizer.json", tokenizer(json!({"normalizer": charsmap})));
    generate(r#"{"prompt": "z1 z2"}"#, &["cannot tokenise a text that begins \"z1 z2\""]);
    // Strips more letters than a token has.
    let vocabulary: serde_json::Map<String, Value> = (0..48).map(|id| ("w".repeat(id + 1), id.into())).collect();
    let model = json!({"type": "WordLevel", "vocab": vocabulary, "unk_token": "w"});
    let strip = json!({"type": "Strip", "content": "w", "start": 0, "stop": 100});
    small.write("backbone/tokenizer.json", tokenizer(json!({"model": model, "decoder": strip})));
    generate(r#"{"prompt_ids": [1, 2, 3]}"#, &["cannot turn tokens"]);
}

#[test]
fn a_row_that_the_tokenizer_gives_up_on_is_skipped() {
    let small = SmallRun::new();
    let split = json!({"type": "Split", "pattern": {"Regex": "(x+x+)+[yz]"}, "behavior": "Isolated", "invert": false});
    small.write("backbone/tokenizer.json", tokenizer(json!({"pre_tokenizer": split})));
    let rows = small.read("rows.jsonl");
    small.write("rows.jsonl", format!("{rows}{{\"text\": \"{}\"}}\n", "x".repeat(40)));
    small.train(&["--check"]).failed(1, &["rows.jsonl, line 13", "cannot tokenise a text that begins \"xxxx"]);
    let ended = small.train(&["--check", "--skip-bad-rows"]).succeeded();
    assert!(ended.stdout.contains("a text that cannot be tokenised"), "{ended:?}");
    assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
}
