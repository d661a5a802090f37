//! Promise: rows are the same in every container, malformed ones can be skipped and are counted, and a second start
//! reads no data.

#![expect(clippy::disallowed_methods, reason = "these tests write the files that users would bring")]

use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use arrow::array::{Array, ArrayRef, ListArray, RecordBatch, StringArray, StructArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Int64Type};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use flate2::Compression as Level;
use flate2::write::GzEncoder;
use medusa::data::cache::TokenCache;
use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, CacheUse, DataError, LoadReport, LoadSettings, ReadProgress, Watch};
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};

use super::embedded_default::tiny;
use super::small_run::SmallRun;

/// Settings to load rows with; the tokenizer is the tiny backbone's.
struct World {
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    cache: Option<TokenCache>,
    max_length: usize,
    skip_bad_rows: bool,
}

impl World {
    fn new() -> Self {
        let tokenizer = TextTokenizer::load(&tiny("backbone")).expect("the tiny tokenizer");
        let chatml = TemplateChoice::try_from("chatml".to_owned()).expect("a built-in template");
        let template = ChatTemplate::choose(&chatml, &tiny("backbone")).expect("a template").expect("one");
        Self { tokenizer, template, cache: None, max_length: 64, skip_bad_rows: false }
    }

    fn watched(&self, path: &Path, watch: Watch) -> Result<(Vec<TokenRow>, LoadReport), DataError> {
        let settings = LoadSettings {
            tokenizer: Some(&self.tokenizer),
            cache: self.cache.as_ref(),
            template: Some(&self.template),
            skip_bad_rows: self.skip_bad_rows,
            watch,
            ..LoadSettings::new(self.tokenizer.vocab_size(), NonZeroUsize::new(self.max_length).expect("not 0"))
        };
        let (rows, report) = data::load(&[path.display().to_string()], &settings)?;
        Ok((rows.iter().collect::<Result<_, _>>().expect("rows that were just read"), report))
    }

    fn load(&self, path: &Path) -> Result<(Vec<TokenRow>, LoadReport), DataError> {
        self.watched(path, Watch::default())
    }

    fn complaint(&self, path: &Path) -> String {
        self.load(path).expect_err("these rows are not right").to_string()
    }
}

const COUNT: usize = 1100;

fn strings(of: impl Fn(usize) -> String) -> ArrayRef {
    Arc::new(StringArray::from_iter_values((0..COUNT).map(of)))
}

/// One conversation of two turns per row, in the columns of Hub data sets.
fn conversations(names: [&str; 2], speakers: [&str; 2]) -> ArrayRef {
    let field = |name: &str| Arc::new(Field::new(name, DataType::Utf8, true));
    let roles: ArrayRef = Arc::new(StringArray::from_iter_values((0..2 * COUNT).map(|turn| speakers[turn % 2])));
    let said: ArrayRef = Arc::new(StringArray::from_iter_values((0..2 * COUNT).map(|turn| said(turn / 2, turn % 2))));
    let structs = StructArray::from(vec![(field(names[0]), roles), (field(names[1]), said)]);
    let item = Arc::new(Field::new_list_field(structs.data_type().clone(), true));
    let offsets = OffsetBuffer::from_lengths(std::iter::repeat_n(2, COUNT));
    Arc::new(ListArray::new(item, offsets, Arc::new(structs), None))
}

fn said(row: usize, turn: usize) -> String {
    if turn == 0 { format!("Sort {row} and \"7\" [é]") } else { format!("7, {row}\n{{done}}, in row {row}") }
}

fn ids(row: usize) -> Vec<i64> {
    (0..2 + row % 90).map(|t| ((row * 7 + t * 3) % 1500) as i64).collect()
}

/// A format of rows: one row as JSON, and all of them as columns.
type Shape = (&'static str, fn(usize) -> Value, fn() -> Vec<(&'static str, ArrayRef)>);

const SHAPES: [Shape; 5] = [
    (
        "sharegpt",
        |row| json!({"id": row, "conversations": [{"from": "human", "value": said(row, 0)}, {"from": "gpt", "value": said(row, 1)}]}),
        || vec![("conversations", conversations(["from", "value"], ["human", "gpt"]))],
    ),
    (
        "openai",
        |row| json!({"messages": [{"role": "user", "content": said(row, 0)}, {"role": "assistant", "content": said(row, 1)}]}),
        || vec![("messages", conversations(["role", "content"], ["user", "assistant"]))],
    ),
    (
        "alpaca",
        |row| json!({"instruction": said(row, 0), "input": "x", "output": said(row, 1)}),
        || {
            vec![
                ("instruction", strings(|row| said(row, 0))),
                ("input", strings(|_| "x".into())),
                ("output", strings(|row| said(row, 1))),
            ]
        },
    ),
    ("text", |row| json!({"text": said(row, 1)}), || vec![("text", strings(|row| said(row, 1)))]),
    (
        "tokens",
        |row| json!({"input_ids": ids(row)}),
        || {
            let rows = (0..COUNT).map(|row| Some(ids(row).into_iter().map(Some).collect::<Vec<_>>()));
            vec![("input_ids", Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows)))]
        },
    ),
];

/// Two gzip members, as from `cat a.gz b.gz`, split within a row.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let (one, two) = bytes.split_at(bytes.len() / 3);
    let member = |part: &[u8]| {
        let mut out = GzEncoder::new(Vec::new(), Level::fast());
        out.write_all(part).and_then(|()| out.finish()).expect("gzip")
    };
    [member(one), member(two)].concat()
}

fn zstd_frames(bytes: &[u8]) -> Vec<u8> {
    let (one, two) = bytes.split_at(bytes.len() / 3);
    [one, two].map(|part| zstd::encode_all(part, 1).expect("zstd")).concat()
}

fn parquet(batch: &RecordBatch, compression: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(compression).set_max_row_group_row_count(Some(700));
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.build())).expect("Parquet");
    writer.write(batch).expect("rows");
    writer.into_inner().expect("a footer")
}

fn arrow_file(batch: &RecordBatch, compression: Option<CompressionType>) -> Vec<u8> {
    let options = IpcWriteOptions::default().try_with_compression(compression).expect("a codec");
    let mut writer = FileWriter::try_new_with_options(Vec::new(), &batch.schema(), options).expect("Arrow");
    writer.write(&batch.slice(0, 10)).and_then(|()| writer.write(&batch.slice(10, COUNT - 10))).expect("rows");
    writer.into_inner().expect("a footer")
}

fn arrow_stream(batch: &RecordBatch) -> Vec<u8> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batch.schema()).expect("Arrow");
    writer.write(&batch.slice(0, 10)).and_then(|()| writer.write(&batch.slice(10, COUNT - 10))).expect("rows");
    writer.into_inner().expect("an end")
}

/// The rows of one format in every container.
fn containers((name, row, columns): Shape) -> Vec<(String, Vec<u8>)> {
    let rows: Vec<String> = (0..COUNT).map(|at| row(at).to_string()).collect();
    let (lines, array) = (rows.join("\n"), format!("\u{feff}[\n{}\n]\n", rows.join(",\n ")));
    let batch = RecordBatch::try_from_iter(columns()).expect("columns of one length");
    let level = (GzipLevel::default(), BrotliLevel::default(), ZstdLevel::default());
    let pages =
        [Compression::GZIP(level.0), Compression::BROTLI(level.1), Compression::LZ4_RAW, Compression::ZSTD(level.2)];
    let mut files = vec![
        ("array".to_owned(), array.clone().into_bytes()),
        ("lines, gzip".to_owned(), gzip(lines.as_bytes())),
        ("lines, zstd".to_owned(), zstd_frames(lines.as_bytes())),
        ("array, gzip".to_owned(), gzip(array.as_bytes())),
        ("array, zstd".to_owned(), zstd_frames(array.as_bytes())),
        ("Arrow file".to_owned(), arrow_file(&batch, None)),
        ("Arrow file, lz4".to_owned(), arrow_file(&batch, Some(CompressionType::LZ4_FRAME))),
        ("Arrow stream".to_owned(), arrow_stream(&batch)),
    ];
    files.extend(pages.into_iter().map(|codec| (format!("Parquet, {codec:?}"), parquet(&batch, codec))));
    files.into_iter().map(|(container, bytes)| (format!("{name} in {container}"), bytes)).collect()
}

#[test]
fn rows_are_the_same_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let (world, path) = (World::new(), dir.path().join("rows"));
    for shape in SHAPES {
        let lines: Vec<String> = (0..COUNT).map(|row| shape.1(row).to_string()).collect();
        fs::write(&path, lines.join("\n")).unwrap();
        let (expected, report) = world.load(&path).unwrap();
        assert!(report.counts.read == COUNT && expected.len() >= COUNT, "{}: {report}", shape.0);
        for (name, bytes) in containers(shape) {
            fs::write(&path, bytes).unwrap();
            let (rows, got) = world.load(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(rows == expected, "{name}");
            assert_eq!(
                (got.counts.tokens, got.counts.tokens_with_loss, got.counts.truncated, got.counts.dropped),
                (
                    report.counts.tokens,
                    report.counts.tokens_with_loss,
                    report.counts.truncated,
                    report.counts.dropped.clone()
                ),
                "{name}"
            );
        }
    }
}

#[test]
fn a_file_that_is_cut_off_is_one_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let (world, path) = (World::new(), dir.path().join("rows"));
    for (name, bytes) in containers(SHAPES[3]) {
        if name.ends_with("array") {
            continue; // truncated, it is JSON that ends too early, like lines: see tests/data.rs
        }
        fs::write(&path, &bytes[..bytes.len() * 2 / 3]).unwrap();
        for skip_bad_rows in [false, true] {
            let error = World { skip_bad_rows, ..World::new() }.complaint(&path);
            let words = match name.as_str() {
                name if name.contains("gzip") => "as gzip",
                name if name.contains("zstd") => "as zstd",
                name if name.contains("Arrow") => "not readable as Arrow",
                _ => "not readable as Parquet",
            };
            assert!(error.contains(words) && error.contains("rows"), "{name}: {error}");
        }
    }
    let columns = RecordBatch::try_from_iter([("text", SHAPES[4].2().remove(0).1)]).unwrap();
    for bytes in [arrow_file(&columns, None), arrow_stream(&columns), parquet(&columns, Compression::SNAPPY)] {
        fs::write(&path, bytes).unwrap();
        let error = world.complaint(&path);
        assert!(error.contains("rows, row 1: text: expected a string, got ["), "{error}");
    }
}

const BAD_LINES: [(&str, &str); 9] = [
    (r#"{"text": "cut"#, "not valid JSON"),
    (r#"{"text": "\ud800"}"#, "not valid JSON"),
    ("no JSON", "not valid JSON"),
    (r#"{"text": 3}"#, "a value of the wrong type"),
    (r#"{"messages": [{"role": "user", "content": 3}]}"#, "a value of the wrong type"),
    ("[1]", "a value of the wrong type"),
    (r#"{"prompt": "a"}"#, "no known key"),
    (r#"{"input_ids": [1, 2], "labels": [1]}"#, "labels of another length"),
    (r#"{"input_ids": [1, 99999]}"#, "a token beyond the vocabulary"),
];

#[test]
fn bad_rows_are_left_out_and_counted_where_that_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (mut world, path) = (World::new(), dir.path().join("rows.jsonl"));
    world.cache = Some(TokenCache::new(dir.path().join("cache")));
    let good = r#"{"text": "Sort 7, 8"}"#;
    for (bad, _) in BAD_LINES {
        fs::write(&path, [good, bad].join("\n")).unwrap();
        assert!(world.complaint(&path).contains("rows.jsonl, line 2: "), "{bad}");
    }
    let talk = r#"{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]}"#;
    let lines: Vec<&str> = [good].into_iter().chain(BAD_LINES.map(|(bad, _)| bad)).chain([talk, good]).collect();
    fs::write(&path, lines.join("\n")).unwrap();
    world.skip_bad_rows = true;
    let (rows, report) = world.load(&path).unwrap();
    assert_eq!((rows.len(), report.counts.read, report.counts.rows), (2, 12, 2));
    let counts: Vec<(&str, usize)> =
        report.counts.bad_rows.iter().map(|(kind, bad)| (kind.as_str(), bad.rows)).collect();
    let expected = [
        ("a token beyond the vocabulary", 1),
        ("a value of the wrong type", 3),
        ("labels of another length", 1),
        ("no known key", 1),
        ("not valid JSON", 3),
    ];
    assert_eq!(counts, expected);
    let first = &report.counts.bad_rows["a value of the wrong type"].first;
    assert!(first.ends_with("rows.jsonl, line 5: text: expected a string, got 3"), "{first}");
    assert!(report.to_string().contains("3 skipped (not valid JSON; first"), "{report}");
    assert!(report.to_string().contains("1 dropped (empty conversation)"), "{report}");
    let (again, cached) = world.load(&path).unwrap();
    assert_eq!(
        (again, cached.counts.bad_rows, &cached.files[0].cache),
        (rows, report.counts.bad_rows, &CacheUse::Read)
    );
    fs::write(&path, format!("[{good}, {{\"text\": 3}}, {{\"text\" 3}}, {good}]")).unwrap();
    let (rows, report) = world.load(&path).unwrap();
    assert_eq!((rows.len(), report.counts.bad_rows.len()), (2, 2));
    assert!(report.counts.bad_rows["not valid JSON"].first.contains("rows.jsonl, row 3: "), "{report}");
}

#[test]
fn a_run_keeps_to_leaving_bad_rows_out() {
    let small = SmallRun::new();
    let rows = small.read("rows.jsonl");
    small.write("rows.jsonl", format!("{rows}{{\"input_ids\": \"1 2\"}}\n"));
    small
        .train(&["--check"])
        .failed(1, &["rows.jsonl, line 13: input_ids: expected a list of integers", "--skip-bad-rows"]);
    let plan: Value =
        serde_json::from_str(&small.train(&["--check", "--json", "--skip-bad-rows"]).succeeded().stdout).unwrap();
    assert_eq!(plan["data"]["bad_rows"]["a value of the wrong type"]["rows"], 1);
    let ended = small.train(&["--skip-bad-rows"]).succeeded();
    assert!(
        ended.stderr.contains("1 skipped (a value of the wrong type; first rows.jsonl, line 13"),
        "{}",
        ended.stderr
    );
    let provenance: Value = serde_json::from_str(&small.read("run/provenance.json")).unwrap();
    assert_eq!((&provenance["skip_bad_rows"], &provenance["rows"][0]["rows"]), (&json!(true), &json!(12)));
    small.train(&["--resume", "--skip-bad-rows"]).succeeded();
    small.write("rows.jsonl", rows);
    small.train(&["--resume"]).failed(1, &["began with --skip-bad-rows", "resume it with the flag"]);
}

#[test]
fn a_second_start_reads_no_data() {
    let dir = tempfile::tempdir().unwrap();
    let (mut world, path) = (World::new(), dir.path().join("rows.jsonl"));
    world.cache = Some(TokenCache::new(dir.path().join("cache")));
    let settle = || {
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)).unwrap();
    };
    let lines: String = (0..COUNT).map(|row| format!("{}\n", SHAPES[0].1(row))).collect();
    fs::write(&path, &lines).unwrap();
    settle();
    let heard = AtomicU64::new(0);
    let hear = |progress: ReadProgress| {
        assert!(progress.read <= progress.bytes);
        heard.fetch_max(progress.read, Ordering::Relaxed);
    };
    let (rows, report) = world.watched(&path, Some(&hear)).unwrap();
    assert_eq!(heard.into_inner(), lines.len() as u64);
    assert!(report.tokenised.is_some_and(|took| took.tokens >= report.counts.tokens));
    // The content is no longer valid, but size, time and path are unchanged.
    fs::write(&path, "#".repeat(lines.len())).unwrap();
    settle();
    let (again, report) = world.load(&path).unwrap();
    assert!(again == rows);
    assert_eq!((&report.files[0].cache, report.tokenised), (&CacheUse::Read, None));
}

#[test]
fn a_huge_row_is_split_and_one_beyond_the_limit_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (mut world, path) = (World::new(), dir.path().join("rows.jsonl"));
    let ids = "7, ".repeat(3_500_000);
    fs::write(&path, format!("{{\"input_ids\": [{ids}7]}}\n{{\"text\": \"Sort 7\"}}")).unwrap();
    let (rows, report) = world.load(&path).unwrap();
    let pieces = 3_500_001_usize.div_ceil(64);
    assert_eq!((rows[0].input_ids.len(), rows.len(), report.counts.pieces), (64, pieces + 1, pieces));
    assert!(report.counts.tokens + report.counts.lost_tokens >= 3_500_001, "{report}");
    let talk: Vec<Value> = (0..4000)
        .map(|turn| json!({"role": (["user", "assistant"][turn % 2]), "content": said(turn, turn % 2)}))
        .collect();
    fs::write(&path, json!({"messages": talk}).to_string()).unwrap();
    assert_eq!(world.load(&path).unwrap().0[0].input_ids.len(), 64);
    let long = format!("{{\"text\": \"Sort 7\"}}\n{}\n{{\"text\": \"Sort 8\"}}", "x".repeat((100 << 20) + 1));
    fs::write(&path, zstd::encode_all(long.as_bytes(), 1).unwrap()).unwrap();
    let error = world.complaint(&path);
    assert!(error.ends_with("rows.jsonl, line 2: longer than 100 MiB, the most that a row may have"), "{error}");
    world.skip_bad_rows = true;
    let (rows, report) = world.load(&path).unwrap();
    assert_eq!((rows.len(), report.counts.bad_rows["too long"].rows), (2, 1));
    let texts: ArrayRef =
        Arc::new(StringArray::from(vec!["Sort 7".to_owned(), "x".repeat((100 << 20) + 1), "Sort 8".to_owned()]));
    let batch = RecordBatch::try_from_iter([("text", texts)]).expect("a column");
    fs::write(&path, parquet(&batch, Compression::ZSTD(ZstdLevel::default()))).unwrap();
    let (rows, report) = world.load(&path).unwrap();
    assert_eq!((rows.len(), report.counts.bad_rows["too long"].rows), (2, 1));
}
