//! Rows are read exactly as stored; an error names the file, the row and the key.

#![expect(clippy::disallowed_methods, reason = "these tests write the files that users would bring")]

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arrow::array::{ArrayRef, Int64Array, LargeStringArray, ListArray, RecordBatch};
use arrow::datatypes::Int64Type;
use medusa::data::cache::TokenCache;
use medusa::data::chat::LossOn;
use medusa::data::chat_template::{ChatTemplate, Message};
use medusa::data::column_names::ColumnNames;
use medusa::data::long_rows::LongRows;
use medusa::data::prompts::{self, PromptInput};
use medusa::data::rows::TokenRow;
use medusa::data::split::{self, Split};
use medusa::data::store::RowStore;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, CacheUse, DataError, DropReason, IGNORE, LoadReport, LoadSettings};
use medusa::numbers::Fraction;
use parquet::arrow::ArrowWriter;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::published::published;

fn write(path: &Path, content: &str) -> String {
    fs::write(path, content).expect("a file of a test");
    path.display().to_string()
}

/// A Llama-like tokenizer without merges: `<s>`, `</s>`, a piece per letter, and all 256 byte-fallback pieces.
pub(crate) fn byte_tokenizer(folder: &Path) -> TextTokenizer {
    tokenizer_of(folder, &["▁", "a", "b", "c", "é"])
}

/// [`byte_tokenizer`] with other pieces: their ids start at 3, followed by the 256 bytes.
pub(crate) fn tokenizer_of(folder: &Path, pieces: &[&str]) -> TextTokenizer {
    let pieces = ["<unk>", "<s>", "</s>"].iter().chain(pieces).map(|&piece| piece.to_owned());
    let pieces = pieces.chain((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let vocab: serde_json::Map<String, Value> = pieces.zip(0..).map(|(piece, id)| (piece, json!(id))).collect();
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let tokenizer = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": []},
    });
    write(&folder.join("tokenizer.json"), &tokenizer.to_string());
    write(&folder.join("tokenizer_config.json"), r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#);
    TextTokenizer::load(folder).expect("the tokenizer of this test")
}

pub(crate) const BYTE_VOCABULARY: usize = 8 + 256;

#[test]
fn tokens_around_a_text_that_the_vocabulary_lacks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    tokenizer_of(dir.path(), &["a"]);
    let refused = || TextTokenizer::load(dir.path()).unwrap_err().to_string();
    let config = dir.path().join("tokenizer_config.json");
    write(&config, r#"{"bos_token": "<s>", "eos_token": "<|end|>"}"#);
    let wrong = refused();
    let printed = "tokenizer_config.json: eos_token: expected a token of tokenizer.json, or null, got \"<|end|>\"";
    assert!(wrong.ends_with(printed), "{wrong}");
    write(&config, r#"{"bos_token": null, "eos_token": null}"#);
    write(&dir.path().join("special_tokens_map.json"), r#"{"bos_token": {"content": "<x>"}}"#);
    let wrong = refused();
    assert!(wrong.contains("special_tokens_map.json: bos_token: expected a token of tokenizer.json"), "{wrong}");
    write(&dir.path().join("special_tokens_map.json"), "{}");
    let path = dir.path().join("tokenizer.json");
    let whole = fs::read_to_string(&path).unwrap();
    write(&path, &whole.replace("\"ids\":[1]", "\"ids\":[9999]"));
    let wrong = refused();
    assert!(wrong.ends_with("tokenizer.json: post_processor: expected ids of the vocabulary, got 9999"), "{wrong}");
}

fn settings(tokenizer: Option<&TextTokenizer>) -> LoadSettings<'_> {
    LoadSettings { tokenizer, ..LoadSettings::new(BYTE_VOCABULARY, NonZeroUsize::new(16).expect("not 0")) }
}

fn load(path: &str, settings: &LoadSettings) -> Result<(Vec<TokenRow>, LoadReport), DataError> {
    let (rows, report) = data::load(&[path.to_owned()], settings)?;
    Ok((rows.iter().collect::<Result<_, _>>().expect("rows that were just read"), report))
}

/// The error's whole chain of sources, as the command line prints it.
fn complaint(path: &str, settings: &LoadSettings) -> String {
    load(path, settings).expect_err("these rows are not right").to_string()
}

fn row(ids: &[i32], labels: &[i32]) -> TokenRow {
    TokenRow { input_ids: ids.to_vec(), labels: labels.to_vec() }
}

#[test]
fn token_rows_arrive_untouched_and_in_file_order() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "\u{feff}{\"input_ids\": [1, 5, 6], \"labels\": [-100, -100, 6], \"text\": \"ignored\"}\r\n\n{\"id\": 3, \"input_ids\": [7, 8]}";
    let (rows, report) = load(&write(&dir.path().join("rows.jsonl"), lines), &settings(None)).unwrap();
    assert_eq!(rows, [row(&[1, 5, 6], &[IGNORE, IGNORE, 6]), row(&[7, 8], &[7, 8])]);
    assert_eq!(
        (report.counts.rows, report.counts.tokens, report.counts.truncated, report.counts.without_targets),
        (2, 5, 0, 0)
    );
    assert_eq!(report.files[0].sha256.as_ref().map(String::len), Some(64));
}

#[test]
fn parquet_rows_are_the_same_as_jsonl_rows() {
    let dir = tempfile::tempdir().unwrap();
    let list = |rows: Vec<Option<Vec<Option<i64>>>>| -> ArrayRef {
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows))
    };
    let ids = list(vec![Some(vec![Some(1), Some(5), Some(6)]), None, Some(vec![Some(7), Some(8)])]);
    let labels = list(vec![Some(vec![Some(-100), Some(5), Some(-100)]), None, None]);
    let text: ArrayRef = Arc::new(LargeStringArray::from(vec![None, Some("a b"), Some("ignored")]));
    let other: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let columns = [("id", other), ("input_ids", ids), ("labels", labels), ("text", text)];
    let path = dir.path().join("rows.bin");
    write_parquet(&path, RecordBatch::try_from_iter(columns).unwrap());
    let tokenizer = byte_tokenizer(dir.path());
    let (rows, _) = load(&path.display().to_string(), &settings(Some(&tokenizer))).unwrap();
    let text = row(&[1, 3, 4, 3, 5, 2], &[1, 3, 4, 3, 5, 2]);
    assert_eq!(rows, [row(&[1, 5, 6], &[IGNORE, 5, IGNORE]), text, row(&[7, 8], &[7, 8])]);
}

fn write_parquet(path: &Path, batch: RecordBatch) {
    let mut writer =
        ArrowWriter::try_new(fs::File::create(path).expect("a file"), batch.schema(), None).expect("Parquet");
    writer.write(&batch).expect("rows");
    writer.close().expect("a footer");
}

#[test]
fn a_bad_parquet_file_names_its_column_or_row() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let complaint = |column: &'static str, array: ArrayRef| {
        write_parquet(&path, RecordBatch::try_from_iter([(column, array)]).unwrap());
        complaint(&path.display().to_string(), &settings(None)).replace(&path.display().to_string(), "rows.parquet")
    };
    let ids = |rows: Vec<Vec<i64>>| {
        let rows = rows.into_iter().map(|row| Some(row.into_iter().map(Some).collect::<Vec<_>>()));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows))
    };
    assert_eq!(
        complaint("input_ids", Arc::new(Int64Array::from(vec![1]))),
        "rows.parquet: input_ids: expected a column of integer lists, got a column of Int64"
    );
    assert_eq!(
        complaint("input_ids", ids(vec![vec![1, 2], vec![1, 264]])),
        "rows.parquet, row 2: input_ids[1]: expected a token id from 0 to 263, the backbone's vocabulary, got 264"
    );
    assert!(
        complaint("messages", ids(vec![vec![1]])).starts_with("rows.parquet, row 1: messages[0]: expected an object")
    );
    let other = complaint("prompt", ids(vec![vec![1]]));
    assert!(
        other.contains("expected a key \"input_ids\", ")
            && other.contains(", got \"prompt\"; these are prompts without"),
        "{other}"
    );
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let cut = load(&path.display().to_string(), &settings(None)).unwrap_err().to_string();
    assert!(cut.contains("not readable as Parquet"), "{cut}");
}

#[test]
fn a_bad_row_is_named_by_file_line_and_key() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let good = r#"{"input_ids": [1, 2]}"#;
    for (bad, expected) in [
        (r#"{"input_ids": [1, 2], "labels": [1]}"#, "labels: expected 2 values, one for each of input_ids, got 1"),
        (r#"{"input_ids": [1, 264]}"#, "input_ids[1]: expected a token id from 0 to 263"),
        (
            r#"{"input_ids": [1, 2], "labels": [1, -101]}"#,
            "labels[1]: expected the token at this place, or -100, got -101",
        ),
        (r#"{"input_ids": [1, "2"]}"#, r#"input_ids[1]: expected an integer, got "2""#),
        (r#"{"input_ids": [1, 2]"#, "not valid JSON (one object a line is expected), column 20"),
        (r#"{"ids": [1, 2]}"#, r#"expected a key "input_ids", "messages", "conversations", "instruction""#),
        (
            r#"{"messages": [{"role": "user", "content": "a"}]}"#,
            r#"a row of "messages" needs the backbone's tokenizer.json or tokenizer.model"#,
        ),
        (r#"{"conversations": [[]]}"#, r#"conversations[0]: expected an object with "role" and "content""#),
        (r#"{"text": "a"}"#, r#"a row of "text" needs the backbone's tokenizer.json or tokenizer.model"#),
    ] {
        let file = write(&path, &[good, "", bad, good].join("\n"));
        let got = complaint(&file, &settings(None));
        assert!(got.starts_with(&format!("{file}, line 3: {expected}")), "{got}");
    }
}

#[test]
fn files_that_are_missing_empty_or_of_another_format_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let complaint = |file: &str| complaint(file, &settings(None));
    assert!(complaint(&at("none.jsonl").display().to_string()).ends_with("none.jsonl does not exist"));
    assert!(complaint(&at("*.jsonl").display().to_string()).ends_with("matches no file"));
    let empty = complaint(&write(&at("empty.jsonl"), "\n\n"));
    assert!(empty.starts_with("no row to use in") && empty.contains("empty.jsonl"), "{empty}");
    let short = complaint(&write(&at("short.jsonl"), "{\"input_ids\": [1]}\n{\"input_ids\": []}"));
    assert!(short.ends_with("2 dropped (fewer than two tokens)"), "{short}");
    let arrow = complaint(&write(&at("rows.arrow"), "ARROW1\0\0"));
    assert!(arrow.contains("rows.arrow: not readable as Arrow"), "{arrow}");
}

#[test]
fn rows_beyond_the_maximal_length_are_cut_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let ids: Vec<i32> = (0..20).collect();
    let late: Vec<i32> = (0..20).map(|at| if at < 18 { IGNORE } else { at }).collect();
    let lines =
        [json!({"input_ids": ids, "labels": late}), json!({"input_ids": [1]}), json!({"input_ids": &ids[..16]})];
    let lines = lines.map(|line| line.to_string()).join("\n");
    let (path, all) = (write(&dir.path().join("rows.jsonl"), &lines), settings(None));
    let (rows, report) = load(&path, &LoadSettings { long_rows: LongRows::Truncate, ..all }).unwrap();
    assert_eq!(rows, [row(&ids[..16], &[IGNORE; 16]), row(&ids[..16], &ids[..16])]);
    assert_eq!(
        (report.counts.rows, report.counts.tokens, report.counts.truncated, report.counts.without_targets),
        (2, 32, 1, 1)
    );
    assert_eq!((report.counts.read, report.counts.tokens_with_loss), (3, 15));
    let expected = "2 rows with 32 tokens (15 with loss) in 1 file, 1 cut to 16 tokens, 1 without a target, 1 dropped (fewer than two tokens), \
                    11.1 % of all tokens lost; data.long_rows = \"split\" (--long-rows split) keeps them";
    assert_eq!(report.to_string(), expected);

    let (rows, report) = load(&path, &all).unwrap();
    let rest = row(&ids[16..], &late[16..]);
    assert_eq!(rows, [row(&ids[..16], &[IGNORE; 16]), rest, row(&ids[..16], &ids[..16])]);
    assert_eq!(
        (report.counts.read, report.counts.split, report.counts.pieces, report.counts.lost_tokens),
        (3, 1, 2, 0)
    );
    assert!(report.to_string().contains("in 1 file, 1 longer than 16 tokens, split into 2, 1 without"), "{report}");

    let (rows, report) = load(&path, &LoadSettings { long_rows: LongRows::Drop, ..all }).unwrap();
    assert_eq!((rows.len(), report.counts.dropped[&DropReason::TooLong], report.counts.lost_tokens), (1, 1, 20));
    assert!(report.to_string().contains("1 dropped (longer than max_length), 55.6 % of all tokens lost"), "{report}");
}

#[test]
fn a_limit_takes_the_first_rows_of_each_entry() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str, from: i32| {
        let rows: Vec<String> = (from..from + 4).map(|id| json!({"input_ids": [id, id]}).to_string()).collect();
        write(&dir.path().join(name), &rows.join("\n"))
    };
    let files = [at("a.jsonl", 0), at("b.jsonl", 10), at("c.jsonl", 20)];
    let first = |limit: usize, entries: &[&[String]]| {
        let settings = LoadSettings { limit: NonZeroUsize::new(limit), ..settings(None) };
        let (rows, report) = data::load_entries(entries, &settings).unwrap();
        let ids: Vec<i32> = rows.iter().map(|row| row.unwrap().input_ids[0]).collect();
        (ids, report.rows_of_entries)
    };
    assert_eq!(first(3, &[&files[..1], &files[1..2]]), (vec![0, 1, 2, 10, 11, 12], vec![3, 3]));
    assert_eq!(first(6, &[&files[..2], &files[2..]]), (vec![0, 1, 2, 3, 10, 11, 20, 21, 22, 23], vec![6, 4]));
    assert_eq!(first(4, &[&files[..2]]), (vec![0, 1, 2, 3], vec![4]), "the second file is not read");
}

#[test]
fn texts_are_tokenised_once_and_a_damaged_cache_is_rebuilt_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    let lines: String = (0..9000).map(|n| format!("{{\"text\": \"a b{}\"}}\n", "c".repeat(n % 3))).collect();
    let file = write(&dir.path().join("rows.jsonl"), &lines);
    let folder = dir.path().join("cache");
    let cache = TokenCache::new(&folder);
    let settings = LoadSettings { cache: Some(&cache), ..settings(Some(&tokenizer)) };
    let (rows, report) = load(&file, &settings).unwrap();
    assert_eq!(rows[1], row(&[1, 3, 4, 3, 5, 6, 2], &[1, 3, 4, 3, 5, 6, 2]));
    assert_eq!(report.files[0].cache, CacheUse::Written);
    let (again, report) = load(&file, &settings).unwrap();
    assert_eq!((&again, &report.files[0].cache), (&rows, &CacheUse::Read));

    let kept = the_cached_file(&folder);
    let mut bytes = fs::read(&kept).unwrap();
    let near_the_end = bytes.len() - 40;
    bytes[near_the_end] ^= 4;
    fs::write(&kept, bytes).unwrap();
    let (again, report) = load(&file, &settings).unwrap();
    assert_eq!(again, rows);
    assert!(matches!(&report.files[0].cache, CacheUse::Rebuilt(how) if how.contains("not the one that was written")));
    assert!(report.to_string().contains("tokenised"));
    assert_eq!(load(&file, &settings).unwrap().1.files[0].cache, CacheUse::Read);

    write(&dir.path().join("rows.jsonl"), "{\"text\": \"a\"}");
    assert_eq!(load(&file, &settings).unwrap().1.files[0].cache, CacheUse::Written);
}

fn the_cached_file(folder: &Path) -> PathBuf {
    let mut files = fs::read_dir(folder).expect("a cache").map(|entry| entry.expect("a file").path());
    files.find(|path| path.extension().is_some_and(|extension| extension == "arrow")).expect("rows")
}

#[test]
fn a_batch_that_is_damaged_is_reported_when_it_is_read_and_made_anew_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cache");
    let cache = TokenCache::new(&folder);
    let lines: String = (0..20_000).map(|n| format!("{{\"input_ids\": [{}, 5, 6, 7, 8]}}\n", n % 200)).collect();
    let file = write(&dir.path().join("rows.jsonl"), &lines);
    let settings = LoadSettings { cache: Some(&cache), ..settings(None) };
    let (rows, report) = load(&file, &settings).unwrap();
    assert_eq!((rows.len(), &report.files[0].cache), (20_000, &CacheUse::Written));
    let kept = the_cached_file(&folder);
    let mut bytes = fs::read(&kept).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&kept, bytes).unwrap();
    let (store, report) = data::load(std::slice::from_ref(&file), &settings).unwrap();
    assert_eq!(report.files[0].cache, CacheUse::Read, "opening reads no tokens");
    assert_eq!(store.row(0).unwrap(), rows[0], "another batch");
    let error = store.iter().find_map(Result::err).unwrap().to_string();
    assert!(error.contains("is damaged (its content is not what was written); it was removed: start again"), "{error}");
    assert_eq!(load(&file, &settings).unwrap().1.files[0].cache, CacheUse::Written);
    assert_eq!(load(&file, &settings).unwrap().0, rows);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_reported_and_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cache");
    let cache = TokenCache::new(&folder);
    let lines: String = (0..9000).map(|n| format!("{{\"input_ids\": [{}, 5, 6]}}\n", n % 200)).collect();
    let file = write(&dir.path().join("rows.jsonl"), &lines);
    let change = |_: data::ReadProgress| {
        let mut rows = fs::File::options().append(true).open(&file).unwrap();
        std::io::Write::write_all(&mut rows, b"{\"input_ids\": [1, 2, 3]}\n").unwrap();
    };
    for cache in [Some(&cache), None] {
        let settings = LoadSettings { cache, watch: Some(&change), ..settings(None) };
        let error = complaint(&file, &settings);
        assert!(error.contains("rows.jsonl changed while it was read; wait until it is written"), "{error}");
    }
    let kept =
        fs::read_dir(&folder).unwrap().filter(|entry| entry.as_ref().unwrap().path().extension().unwrap() == "arrow");
    assert_eq!(kept.count(), 0);
}

#[test]
fn without_a_cache_rows_stay_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir.path().join("rows.jsonl"), r#"{"input_ids": [1, 2]}"#);
    let (rows, report) = load(&file, &settings(None)).unwrap();
    assert_eq!((rows, &report.files[0].cache), (vec![row(&[1, 2], &[1, 2])], &CacheUse::NotUsed));
}

#[test]
fn a_tokenizer_of_another_backbone_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    tokenizer.check_vocabulary(BYTE_VOCABULARY).unwrap();
    let error = tokenizer.check_vocabulary(BYTE_VOCABULARY - 1).unwrap_err().to_string();
    assert!(error.contains(r#"token "<0xFF>" has id 263"#) && error.contains("vocab_size 263"), "{error}");
    let file = write(&dir.path().join("rows.jsonl"), r#"{"text": "a"}"#);
    let error = complaint(&file, &LoadSettings { vocab_size: 100, ..settings(Some(&tokenizer)) });
    assert!(error.contains("line 1") && error.contains("vocab_size 100"), "{error}");
}

#[test]
fn the_validation_split_is_seeded_and_loses_no_row() {
    let rows: Vec<TokenRow> = (0..50).map(|n| row(&[n, n], &[n, n])).collect();
    let split = |fraction, seed| {
        let store = RowStore::in_memory(rows.clone());
        let parts = split::split_sets(store, &[50], Fraction::new(fraction).expect("a fraction"), seed, &[]);
        let Split { training, validation, .. } = parts.expect("enough rows");
        let rows = |store: RowStore| store.iter().collect::<Result<Vec<TokenRow>, _>>().expect("rows in memory");
        (rows(training), rows(validation))
    };
    let (training, validation) = split(0.1, 7);
    assert_eq!((training.len(), validation.len()), (45, 5));
    assert_eq!(split(0.1, 7), (training.clone(), validation.clone()));
    assert_ne!(split(0.1, 8).1, validation);
    let mut all: Vec<TokenRow> = training.into_iter().chain(validation).collect();
    all.sort_by_key(|row| row.input_ids[0]);
    assert_eq!(all, rows);
    assert_eq!(split(0.001, 7).1.len(), 1);
    assert_eq!(split(0.999, 7).0.len(), 1);
    let one = RowStore::in_memory(rows[..1].to_vec());
    assert!(split::split_sets(one, &[1], Fraction::new(0.5).unwrap(), 7, &[]).is_err());
}

#[test]
fn what_decides_rows_decides_which_cache_entry_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, tokenizer) = (TokenCache::new(dir.path().join("cache")), byte_tokenizer(dir.path()));
    let row = json!({"text": "a b", "body": "c", "a,completion=b": "a", "c": "b", "a": "c", "b,completion=c": "a"})
        .to_string();
    let path = write(&dir.path().join("rows.jsonl"), &[row.as_str(), &row].join("\n"));
    let of = |settings: LoadSettings| load(&path, &settings).unwrap().1.files.remove(0).cache;
    let plain = LoadSettings { cache: Some(&cache), ..settings(Some(&tokenizer)) };
    let of_toml = |names: Value| serde_json::from_value::<ColumnNames>(names).unwrap();
    let columns = [
        json!({"text": "text"}),
        json!({"text": "body"}),
        json!({"prompt": "a,completion=b", "completion": "c"}),
        json!({"prompt": "a", "completion": "b,completion=c"}),
    ];
    let columns = columns.map(of_toml);
    let others = dir.path().join("other");
    fs::create_dir(&others).unwrap();
    let other_tokenizer = tokenizer_of(&others, &["▁", "a", "c", "b", "é"]);
    fs::copy(dir.path().join("tokenizer.json"), others.join("tokenizer.json")).unwrap();
    let without_bos = others.join("tokenizer_config.json");
    write(&without_bos, r#"{"eos_token": "</s>"}"#);
    let without_bos = TextTokenizer::load(&others).unwrap();
    assert_eq!(without_bos.bos_id(), None);
    let shorter = NonZeroUsize::new(8).unwrap();
    let others = [
        plain,
        LoadSettings { long_rows: LongRows::Truncate, ..plain },
        LoadSettings { long_rows: LongRows::Drop, ..plain },
        LoadSettings { limit: NonZeroUsize::new(1), ..plain },
        LoadSettings { limit: NonZeroUsize::new(2), ..plain },
        LoadSettings { columns: Some(&columns[0]), ..plain },
        LoadSettings { columns: Some(&columns[1]), ..plain },
        LoadSettings { columns: Some(&columns[2]), ..plain },
        LoadSettings { columns: Some(&columns[3]), ..plain },
        LoadSettings { tokenizer: Some(&other_tokenizer), ..plain },
        LoadSettings { tokenizer: Some(&without_bos), ..plain },
        LoadSettings { max_length: shorter, ..plain },
        LoadSettings { vocab_size: plain.vocab_size + 1, ..plain },
        LoadSettings { loss_on: LossOn::All, ..plain },
        LoadSettings { skip_bad_rows: true, ..plain },
    ];
    for (number, settings) in others.into_iter().enumerate() {
        assert_eq!((of(settings), of(settings)), (CacheUse::Written, CacheUse::Read), "settings {number}");
    }
    for name in ["rows.csv", "rows.tsv", "rows.txt"] {
        let path = write(&dir.path().join(name), "text\nb\n");
        let of = || load(&path, &plain).unwrap().1.files.remove(0).cache;
        assert_eq!((of(), of()), (CacheUse::Written, CacheUse::Read), "{name}");
    }
}

#[test]
fn a_limit_does_not_hash_the_rest_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let (cache, path) = (TokenCache::new(dir.path().join("cache")), dir.path().join("rows.jsonl"));
    let write_at = |first: i32, seconds: u64| {
        write(&path, &format!("{{\"input_ids\": [{first}, 2]}}\n{{\"input_ids\": [3, 4]}}\n"));
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000 + seconds);
        fs::File::options().write(true).open(&path).unwrap().set_modified(at).unwrap();
    };
    let limited = LoadSettings { cache: Some(&cache), limit: NonZeroUsize::new(1), ..settings(None) };
    let read = |settings: &LoadSettings| {
        let (rows, mut report) = load(&path.display().to_string(), settings).unwrap();
        (rows[0].input_ids[0], report.files.remove(0))
    };
    write_at(1, 0);
    let (first, file) = read(&limited);
    assert_eq!((first, &file.sha256, &file.cache), (1, &None, &CacheUse::Written));
    assert_eq!(read(&limited).1.cache, CacheUse::Read);
    assert!(!cache.knows(&path), "its hash was not asked for");
    write_at(5, 1);
    assert_eq!(read(&limited).0, 5);
    fs::write(&path, "{\"input_ids\": [6, 2]}\n").unwrap();
    let (first, file) = read(&limited);
    assert_eq!(
        (first, &file.sha256),
        (6, &None),
        "a file without a stamp is hashed, and resuming does not compare the hash"
    );
    assert!(read(&settings(None)).1.sha256.is_some());
}

#[test]
fn a_set_of_a_mix_keeps_a_row_to_train_on() {
    let store = |rows: i32| RowStore::in_memory((0..rows).map(|n| row(&[n, n], &[n, n])));
    let half = Fraction::new(0.5).unwrap();
    for seed in 0..20 {
        let Split { training, counts, validation, .. } =
            split::split_sets(store(11), &[1, 9, 1], half, seed, &[]).unwrap();
        assert_eq!((training.len(), validation.len(), counts), (5, 6, vec![1, 3, 1]), "seed {seed}");
        let plain = split::split_sets(store(11), &[11], half, seed, &[]).unwrap();
        assert_eq!((plain.training.len(), plain.validation.len()), (5, 6));
    }
    let error = split::split_sets(store(3), &[1, 1, 1], half, 7, &[]).unwrap_err().to_string();
    assert!(error.contains("(with data.mix, in one of its entries)") && error.ends_with("got 1"), "{error}");
}

#[test]
fn the_pieces_of_a_long_row_are_held_out_together() {
    let dir = tempfile::tempdir().unwrap();
    let lines: Vec<String> = (0..12).map(|n| json!({"input_ids": vec![n; 40]}).to_string()).collect();
    let path = write(&dir.path().join("rows.jsonl"), &lines.join("\n"));
    let split = |fraction| {
        let (store, report) = data::load(std::slice::from_ref(&path), &settings(None)).unwrap();
        assert_eq!((report.counts.read, report.counts.rows), (12, 36));
        split::split_sets(store, &[36], Fraction::new(fraction).unwrap(), 7, &[]).unwrap()
    };
    let sources = |store: RowStore| -> BTreeSet<i32> { store.iter().map(|row| row.unwrap().input_ids[0]).collect() };
    let Split { training, validation, .. } = split(0.25);
    assert_eq!((training.len(), validation.len()), (27, 9));
    assert!(sources(training).is_disjoint(&sources(validation)));
    let one = write(&dir.path().join("one.jsonl"), &lines[0]);
    let (store, _) = data::load(&[one], &settings(None)).unwrap();
    let split = split::split_sets(store, &[3], Fraction::new(0.5).unwrap(), 7, &[]);
    assert!(split.is_err(), "one source row in three pieces");
}

fn streamed(tokenizer: &TextTokenizer, before: &[i32], ids: &[i32]) -> Vec<String> {
    let mut stream = tokenizer.stream_after(before);
    let mut pieces: Vec<String> = ids.iter().filter_map(|&id| stream.push(id).expect("a known id")).collect();
    pieces.extend(stream.finish().expect("known ids"));
    pieces
}

#[test]
fn a_stream_never_splits_a_character() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    for text in ["a b", "é", "日本語 c", "👩‍👩‍👧 a", "aé日b👍c", "  a  b "] {
        let ids = tokenizer.encode(text, true).unwrap();
        let pieces = streamed(&tokenizer, &[], &ids);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    }
    assert_eq!(tokenizer.decode(&[1, 3, 4, 2], true).unwrap(), "a");
    assert_eq!(tokenizer.decode(&[1, 3, 4, 2], false).unwrap(), "<s> a</s>");
}

/// The token of a byte.
fn byte(byte: u8) -> i32 {
    8 + i32::from(byte)
}

#[test]
fn bytes_that_never_become_text_are_reported_as_they_come() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    for invalid in [[0xff, 0xff, 0xff], [0xe6, 0x97, 0xff], [0x97, 0xe6, 0x97]] {
        let mut stream = tokenizer.stream();
        let (mut pending, mut printed) = (0, 0); // each push decodes what is not emitted yet
        for at in 0..3000 {
            let piece = stream.push(byte(invalid[at % 3])).unwrap();
            pending = if piece.is_some() { 0 } else { pending + 1 };
            printed += piece.map_or(0, |piece| piece.chars().count());
            assert!(pending <= 16, "{invalid:x?}: {pending} tokens after {at}");
        }
        assert!(printed > 2500, "{invalid:x?}: {printed}");
        assert!(stream.push(4).unwrap().is_some_and(|piece| piece.ends_with('a')), "{invalid:x?}");
    }
    let mut stream = tokenizer.stream();
    let silent = (0..100).filter_map(|_| stream.push(2).unwrap()).count();
    assert_eq!((silent, stream.push(4).unwrap().as_deref()), (0, Some("a")), "tokens without text");
}

#[test]
fn a_text_beyond_any_context_is_not_tokenised() {
    let dir = tempfile::tempdir().unwrap();
    let text = "a b ".repeat(1_100_000);
    let error = byte_tokenizer(dir.path()).encode(&text, true).unwrap_err().to_string();
    assert!(error.starts_with("a text of 4400000 bytes that begins \"a b a b"), "{error}");
    assert!(error.ends_with("the most is 4194304; divide it"), "{error}");
    let path = write(&dir.path().join("rows.jsonl"), &json!({"text": text}).to_string());
    let tokenizer = byte_tokenizer(dir.path());
    let error = data::load(&[path], &settings(Some(&tokenizer))).unwrap_err();
    let said = format!("{:#}", anyhow::Error::from(error));
    assert!(said.contains("rows.jsonl, line 1") && said.contains("divide it"), "{said}");
}

#[test]
fn a_tokenizer_that_makes_texts_grow_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    byte_tokenizer(dir.path());
    let path = dir.path().join("tokenizer.json");
    let plain: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let refusal = |part: &str, rules: Vec<Value>| {
        let mut tokenizer = plain.clone();
        let list = if part == "decoder" { "decoders" } else { "normalizers" };
        tokenizer[part] = json!({"type": "Sequence", list: rules});
        write(&path, &tokenizer.to_string());
        TextTokenizer::load(dir.path()).unwrap_err().to_string()
    };
    let rule = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let tenfold = || rule(json!({"String": "a"}), &"a".repeat(10));
    let error = refusal("normalizer", (0..6).map(|_| tenfold()).collect());
    assert!(
        error.contains("tokenizer.json: normalizer: its Replace rules may make a text 1000000 times as long"),
        "{error}"
    );
    for part in ["normalizer", "decoder"] {
        let error = refusal(part, vec![rule(json!({"Regex": ""}), "a")]);
        assert!(error.contains(&format!("tokenizer.json: {part}: a Replace rule has an empty pattern")), "{error}");
    }
}

#[test]
fn what_follows_a_prompt_keeps_its_space() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    let (space, a, eos) = (3, 4, 2);
    let prompt = tokenizer.encode("a b", true).unwrap();
    assert_eq!(streamed(&tokenizer, &prompt, &[space, a, eos, space, a]).concat(), " a a");
    assert_eq!(streamed(&tokenizer, &[], &[space, a]).concat(), "a");
}

#[test]
fn the_texts_of_tokens_keep_their_space_and_join_to_the_text() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer_of(dir.path(), &["▁", "a", "▁a", "b"]);
    let (bos, eos, a, space_a) = (1, 2, 4, 5);
    let prompt = [bos, a];
    let stream = tokenizer.stream_after(&prompt);
    let text = |id| stream.text_of(id).unwrap();
    assert_eq!([text(a), text(space_a), text(eos)], ["a", " a", "</s>"]);
    let ids = [vec![space_a, a], tokenizer.encode("日 b", false).unwrap(), vec![eos]].concat();
    let mut stream = tokenizer.stream_after(&prompt);
    let texts = ids.iter().map(|&id| {
        let text = stream.text_of(id).unwrap();
        stream.push(id).unwrap();
        text
    });
    assert_eq!(texts.collect::<String>(), format!("{}</s>", streamed(&tokenizer, &prompt, &ids).concat()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_stream_takes_any_ids(ids in prop::collection::vec(0..BYTE_VOCABULARY as i32 + 5, 0..30)) {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = byte_tokenizer(dir.path());
        let pieces = streamed(&tokenizer, &[], &ids);
        prop_assert!(pieces.iter().all(|piece| !piece.is_empty()));
    }

    #[test]
    fn a_text_is_streamed_as_it_was(text in "[abcé日本👍 ]{0,20}") {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = byte_tokenizer(dir.path());
        let ids = tokenizer.encode(&text, true).unwrap();
        prop_assert_eq!(streamed(&tokenizer, &[], &ids).concat(), text);
    }
}

#[test]
fn a_tokenizer_that_is_not_there_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let error = TextTokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("has neither tokenizer.json nor tokenizer.model"), "{error}");
    write(&dir.path().join("tokenizer.json"), "{\"version\": \"1.0\"}");
    assert!(TextTokenizer::load(dir.path()).unwrap_err().to_string().contains("cannot load it"));
}

#[test]
fn a_chat_template_is_a_string_one_of_several_or_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("tokenizer_config.json");
    let hello = [Message::new("user", "hi")];
    let render =
        || ChatTemplate::load(dir.path()).map(|template| template.expect("one").render(&hello, true).expect("text"));
    assert!(ChatTemplate::load(dir.path()).unwrap().is_none());
    write(
        &config,
        r#"{"bos_token": "<s>", "chat_template": "{{ bos_token }}1{{ messages[0].content }}{{ eos_token }}"}"#,
    );
    assert_eq!(render().unwrap(), "<s>1hi");
    let named = json!({"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "2{{ messages[0].content }}"}]});
    write(&config, &named.to_string());
    assert_eq!(render().unwrap(), "2hi");
    write(&config, r#"{"chat_template": [{"name": "rag", "template": "no"}]}"#);
    assert!(render().unwrap_err().to_string().contains("one named \"default\""));
    write(&config, r#"{"chat_template": "{% if %}"}"#);
    assert!(render().unwrap_err().to_string().contains("cannot be used"));
    write(&dir.path().join("chat_template.jinja"), "3{{ messages[0].content }}");
    assert_eq!(render().unwrap(), "3hi");
}

#[test]
fn prompts_are_text_ids_conversations_or_turns() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    let lines = r#"{"prompt": "a b", "category": "letters"}
{"prompt_ids": [4, 5]}
{"messages": [{"role": "user", "content": "a"}]}
{"question_id": 81, "category": "writing", "turns": ["a", "b"]}"#;
    let file = dir.path().join("prompts.jsonl");
    write(&file, lines);
    let read = prompts::read(&file).unwrap();
    assert_eq!(read[0].category.as_deref(), Some("letters"));
    write(&dir.path().join("chat_template.jinja"), "{{ bos_token }}{{ messages[0].content }}");
    let template = ChatTemplate::load(dir.path()).unwrap();
    let ids = |at: usize| prompts::to_ids(&read[at].input, &tokenizer, template.as_ref());
    assert_eq!(ids(0).unwrap(), [1, 3, 4, 3, 5]);
    assert_eq!(ids(1).unwrap(), [4, 5]);
    assert_eq!(ids(2).unwrap(), [1, 3, 4], "one BOS, the template's");
    assert_eq!(ids(3).unwrap(), [1, 3, 4], "the first turn");
    let error = prompts::to_ids(&read[2].input, &tokenizer, None).unwrap_err().to_string();
    assert!(error.contains("needs a chat template"), "{error}");
    let error = prompts::to_ids(&PromptInput::Ids(vec![1, 264]), &tokenizer, None).unwrap_err().to_string();
    assert!(error.contains("prompt_ids[1]") && error.contains("got 264"), "{error}");

    write(&file, "{\"prompt\": \"a\"}\n{\"turns\": [3]}");
    let error = prompts::read(&file).unwrap_err().to_string();
    assert!(error.ends_with("prompts.jsonl, line 2: turns[0]: expected a string, got 3"), "{error}");
    write(&file, "\n");
    assert!(prompts::read(&file).unwrap_err().to_string().contains("holds no prompt"));
}

#[test]
fn stories260k_tokenises_as_transformers_does() {
    let tokenizer = TextTokenizer::load(&published("models/stories260K")).unwrap();
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.vocab_size()), (Some(1), Some(2), 512));
    let reference: Value = serde_json::from_slice(&fs::read(published("reference/stories260K.json")).unwrap()).unwrap();
    let cases = reference["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 5);
    for case in cases {
        let ids: Vec<i32> = serde_json::from_value(case["input_ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(case["prompt"].as_str().unwrap(), true).unwrap(), ids);
        let new: Vec<i32> = serde_json::from_value(case["greedy_new_ids"].clone()).unwrap();
        let whole = [ids.as_slice(), new.as_slice()].concat();
        let text = tokenizer.decode(&whole, true).unwrap();
        assert_eq!(text, case["greedy_text"].as_str().unwrap());
        let printed = tokenizer.decode(&ids, true).unwrap() + &streamed(&tokenizer, &ids, &new).concat();
        assert_eq!(printed, text);
    }
}

#[test]
fn published_rows_and_prompts_are_read() {
    let stories = published("data/stories_eval.jsonl").display().to_string();
    let max_length = NonZeroUsize::new(512).unwrap();
    let settings = LoadSettings { vocab_size: 512, max_length, ..settings(None) };
    let (rows, report) = load(&stories, &settings).unwrap();
    assert_eq!((rows.len(), report.counts.tokens, report.counts.truncated), (200, 50_707, 0));
    let (sequences, packed) = medusa::data::pack::pack(RowStore::in_memory(rows), 512);
    assert!(packed.fill_rate() > 0.95, "{packed:?} {}", sequences.len());

    let folder = published("models/tokenizer-mistral-v1-32000");
    let tokenizer = TextTokenizer::load(&folder).unwrap();
    let template = ChatTemplate::load(&folder).unwrap();
    let chat = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/chat");
    let files =
        [chat.join("mt_bench.jsonl"), published("data/vicuna_bench.jsonl"), published("data/messages_1k.jsonl")];
    for (file, count) in files.iter().zip([80, 80, 1000]) {
        let prompts = prompts::read(file).unwrap();
        assert_eq!(prompts.len(), count);
        for prompt in &prompts {
            let ids = prompts::to_ids(&prompt.input, &tokenizer, template.as_ref()).unwrap();
            assert_eq!(ids.iter().filter(|id| **id == 1).count(), 1, "one BOS");
        }
    }
}

#[test]
fn vicunas_template_renders_as_fastchat_writes_it() {
    let template = ChatTemplate::load(&published("models/tokenizer-mistral-v1-32000")).unwrap().unwrap();
    let turns = [Message::new("user", "Hi <b>!"), Message::new("assistant", "Hello."), Message::new("user", "Bye")];
    let system = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, \
                  detailed, and polite answers to the user's questions.";
    let expected = format!("<s>{system} USER: Hi <b>! ASSISTANT: Hello.</s>USER: Bye ASSISTANT:");
    assert_eq!(template.render(&turns, true).unwrap(), expected);
    let own_system = [Message::new("system", "Be brief."), Message::new("user", "Hi")];
    assert_eq!(template.render(&own_system, false).unwrap(), "<s>Be brief. USER: Hi ");
}
