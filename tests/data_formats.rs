//! Promise: data is read in the formats that people have it in; each gives the tokens and the loss mask of the form it stands for.

#![expect(clippy::disallowed_methods, reason = "these tests write the files that users would bring")]

use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, ListArray, RecordBatch, StringArray, StructArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use medusa::data::chat::LossOn;
use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::column_names::ColumnNames;
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, DropReason, IGNORE, LoadSettings};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::data::{BYTE_VOCABULARY, byte_tokenizer};
use crate::small_run::SmallRun;

const X: i32 = IGNORE;

/// A folder for data files, and what rows are read with.
struct World {
    folder: TempDir,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    columns: Option<ColumnNames>,
    loss_on: LossOn,
}

impl World {
    fn new() -> Self {
        let backbone = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
        let choice = TemplateChoice::try_from("zephyr".to_owned()).expect("a built-in template");
        Self {
            folder: tempfile::tempdir().expect("a temporary folder"),
            tokenizer: TextTokenizer::load(&backbone).expect("a tokenizer"),
            template: ChatTemplate::choose(&choice, &backbone).expect("a template that parses").expect("a template"),
            columns: None,
            loss_on: LossOn::Assistant,
        }
    }

    fn named(columns: &str) -> Self {
        Self { columns: Some(columns.parse().expect("columns")), ..Self::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), content).expect("a file of a test");
        self.path(name)
    }

    fn parquet(&self, name: &str, batch: &RecordBatch) -> PathBuf {
        let file = fs::File::create(self.path(name)).expect("a file of a test");
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None).expect("Parquet");
        writer.write(batch).expect("rows");
        writer.close().expect("a footer");
        self.path(name)
    }

    fn load(&self, path: &Path) -> Result<Vec<TokenRow>, String> {
        let settings = LoadSettings {
            tokenizer: Some(&self.tokenizer),
            columns: self.columns.as_ref(),
            template: Some(&self.template),
            loss_on: self.loss_on,
            ..LoadSettings::new(self.tokenizer.vocab_size(), NonZeroUsize::new(4096).expect("not 0"))
        };
        let rows = data::load(&[path.display().to_string()], &settings);
        let (rows, _) = rows.map_err(|error| error.to_string().replace(&path.display().to_string(), "FILE"))?;
        Ok(rows.iter().collect::<Result<_, _>>().expect("rows that were just read"))
    }

    fn rows(&self, name: &str, content: impl AsRef<[u8]>) -> Vec<TokenRow> {
        self.load(&self.write(name, content)).expect("rows")
    }

    fn complaint(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        self.load(&self.write(name, content)).expect_err("these rows are not right")
    }

    fn text(&self, row: &TokenRow) -> (String, String) {
        let learned: Vec<i32> = row.labels.iter().copied().filter(|label| *label != IGNORE).collect();
        let text = |ids: &[i32]| self.tokenizer.decode(ids, false).expect("text");
        (text(&row.input_ids), text(&learned))
    }
}

fn texts(values: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

#[test]
fn a_prompts_completion_carries_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    let max_length = NonZeroUsize::new(16).unwrap();
    let load = |loss_on, name: &str, content: &str| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        let settings =
            LoadSettings { tokenizer: Some(&tokenizer), loss_on, ..LoadSettings::new(BYTE_VOCABULARY, max_length) };
        let (rows, report) = data::load(&[path.display().to_string()], &settings).unwrap();
        (rows.iter().collect::<Result<Vec<_>, _>>().unwrap(), report)
    };
    let input_ids = vec![1, 3, 4, 3, 5, 3, 6, 2]; // <s> ▁a ▁b ▁c </s>, a piece a letter
    let learned = TokenRow { input_ids: input_ids.clone(), labels: vec![X, X, X, X, X, 3, 6, 2] };
    let json = r#"{"prompt": "a b", "completion": " c"}"#;
    let of_json = load(LossOn::Assistant, "pairs.jsonl", json).0;
    assert_eq!(load(LossOn::Assistant, "pairs.csv", "completion,prompt\n\" c\",a b\n").0, of_json);
    assert_eq!(of_json, [learned]);
    assert_eq!(load(LossOn::All, "pairs.jsonl", json).0, [TokenRow { labels: input_ids.clone(), input_ids }]);
    let (rows, report) = load(LossOn::Assistant, "empty.csv", "prompt,completion\na,b\na,\n");
    assert_eq!((rows.len(), report.counts.dropped[&DropReason::EmptyCompletion]), (1, 1));
}

#[test]
fn a_long_completion_is_split_and_a_long_prompt_is_lost_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_tokenizer(dir.path());
    let settings = LoadSettings {
        tokenizer: Some(&tokenizer),
        ..LoadSettings::new(BYTE_VOCABULARY, NonZeroUsize::new(5).unwrap())
    };
    let load = |prompt: &str, completion: &str| {
        let path = dir.path().join("pairs.jsonl");
        fs::write(&path, json!({"prompt": prompt, "completion": completion}).to_string()).unwrap();
        let (rows, report) = data::load(&[path.display().to_string()], &settings).unwrap();
        let rows = rows.iter().map(|row| row.map(|TokenRow { input_ids, labels }| (input_ids, labels)));
        (rows.collect::<Result<Vec<_>, _>>().unwrap(), report.counts)
    };
    // A token is a letter or the "▁" before a word: "a bc b" is <s> ▁ a ▁ b c ▁ b </s>.
    let (rows, counts) = load("a", " bc b");
    let first = (vec![1, 3, 4, 3, 5], vec![X, X, X, 3, 5]);
    assert_eq!(rows, [first, (vec![1, 6, 3, 5, 2], vec![X, 6, 3, 5, 2])]);
    assert_eq!((counts.repeated_tokens, counts.lost_tokens), (1, 0));
    let (rows, counts) = load("a", " bcabc");
    assert_eq!(rows.last().unwrap(), &(vec![1, 2], vec![X, 2]), "the EOS alone is learned behind BOS");
    assert_eq!((rows.len(), counts.tokens, counts.repeated_tokens, counts.lost_tokens), (3, 12, 2, 0));
    let (rows, counts) = load("abcabc", " b");
    assert_eq!(rows, [(vec![1, 4, 5, 6, 3], vec![X, X, X, X, 3]), (vec![1, 5, 2], vec![X, 5, 2])]);
    assert_eq!((counts.lost_tokens, counts.repeated_tokens, counts.lost_fraction()), (5, 2, 5.0 / 11.0));
}

#[test]
fn a_completion_of_messages_is_learned_and_answers_in_the_prompt_are_not() {
    let world = World::new();
    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    let prompt = json!([say("user", "one"), say("assistant", "two"), say("user", "three")]);
    let row = json!({"prompt": prompt, "completion": [say("assistant", "four")]});
    let pair = world.rows("pair.jsonl", row.to_string());
    let (text, learned) = world.text(&pair[0]);
    assert!(text.contains("two") && learned.contains("four") && !learned.contains("two"), "{text} | {learned}");
    let messages = json!({"messages": [say("user", "one"), say("assistant", "two"), say("user", "three"), say("assistant", "four")]});
    assert_eq!(world.rows("messages.jsonl", messages.to_string())[0].input_ids, pair[0].input_ids);

    let column = |turns: &[(&str, &str)]| -> ArrayRef {
        let (roles, contents): (Vec<&str>, Vec<&str>) = turns.iter().copied().unzip();
        list_of_structs(&roles, &contents, &[0, turns.len() as i32])
    };
    let asked = column(&[("user", "one"), ("assistant", "two"), ("user", "three")]);
    let batch = RecordBatch::try_from_iter([("prompt", asked), ("completion", column(&[("assistant", "four")]))]);
    assert_eq!(world.load(&world.parquet("pair.parquet", &batch.unwrap())).unwrap(), pair);

    let mixed = RecordBatch::try_from_iter([("prompt", texts(&["a"])), ("completion", column(&[("assistant", "b")]))]);
    let error = world.load(&world.parquet("mixed.parquet", &mixed.unwrap())).unwrap_err();
    assert!(error.starts_with("FILE, row 1: completion: expected a string, got [{"), "{error}");
    let error = world.complaint("mixed.jsonl", json!({"prompt": prompt, "completion": "four"}).to_string());
    assert_eq!(error, "FILE, line 1: completion: expected a list of messages, got \"four\"");
}

fn part(name: &str, kind: DataType) -> Arc<Field> {
    Arc::new(Field::new(name, kind, true))
}

/// Rows of messages as most files have them; `ends` are where each row's messages begin and end.
fn list_of_structs(roles: &[&str], contents: &[&str], ends: &[i32]) -> ArrayRef {
    let fields = [part("role", DataType::Utf8), part("content", DataType::Utf8)];
    let structs = StructArray::from(fields.into_iter().zip([texts(roles), texts(contents)]).collect::<Vec<_>>());
    let item = Arc::new(Field::new_list_field(structs.data_type().clone(), true));
    Arc::new(ListArray::new(item, OffsetBuffer::new(ends.to_vec().into()), Arc::new(structs), None))
}

/// The same as `datasets` stores a `Sequence` of two features.
fn struct_of_lists(roles: (&[&str], &[i32]), contents: (&[&str], &[i32])) -> ArrayRef {
    let lists = |(values, ends): (&[&str], &[i32])| -> ArrayRef {
        let item = Arc::new(Field::new_list_field(DataType::Utf8, true));
        Arc::new(ListArray::new(item, OffsetBuffer::new(ends.to_vec().into()), texts(values), None))
    };
    let columns = [("role", lists(roles)), ("content", lists(contents))];
    let column = |(name, lists): (&str, ArrayRef)| (part(name, lists.data_type().clone()), lists);
    Arc::new(StructArray::from(columns.into_iter().map(column).collect::<Vec<_>>()))
}

#[test]
fn messages_as_a_struct_of_lists_are_those_of_a_list_of_structs() {
    let world = World::new();
    let roles = ["user", "assistant", "user", "assistant", "user", "assistant"];
    let contents = ["a", "b", "c", "d", "e", "f"];
    let load = |name: &str, messages: ArrayRef| {
        world.load(&world.parquet(name, &RecordBatch::try_from_iter([("messages", messages)]).unwrap()))
    };
    let expected = load("lists.parquet", list_of_structs(&roles, &contents, &[0, 2, 6])).unwrap();
    let structs = struct_of_lists((&roles, &[0, 2, 6]), (&contents, &[0, 2, 6]));
    assert_eq!(load("structs.parquet", structs.clone()).unwrap(), expected);
    assert_eq!(load("slice.parquet", structs.slice(1, 1)).unwrap(), expected[1..]);
    let shifted = struct_of_lists((&roles, &[0, 2, 6]), (&contents, &[0, 3, 6]));
    let error = load("shifted.parquet", shifted).unwrap_err();
    assert_eq!(
        error,
        "FILE, row 1: messages: expected lists of the same length, got 2 of \"role\" and 3 of \"content\""
    );
}

#[test]
fn columns_of_other_names_are_read_where_they_are_named() {
    let world = World::named("instruction=question,output=answer");
    let row = json!({"question": "Hi", "answer": "Hello.", "text": "other", "messages": 3});
    let json = world.rows("rows.jsonl", row.to_string());
    let alpaca = World::new().rows("rows.jsonl", json!({"instruction": "Hi", "output": "Hello."}).to_string());
    assert_eq!(json, alpaca);
    assert_eq!(world.rows("rows.csv", "question,text,answer\nHi,other,Hello.\n"), json);
    let columns = [("question", texts(&["Hi"])), ("text", texts(&["other"])), ("answer", texts(&["Hello."]))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    assert_eq!(world.load(&world.parquet("rows.parquet", &batch)).unwrap(), json);

    let column = |values: &[Option<&str>]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let columns = [("answer", column(&[Some("a"), None])), ("question", column(&[Some("q"), Some("r")]))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let null = "answer: expected a value, got null";
    assert_eq!(world.load(&world.parquet("null.parquet", &batch)).unwrap_err(), format!("FILE, row 2: {null}"));
    let row = json!({"question": "Hi", "answer": null}).to_string();
    assert_eq!(world.complaint("null.jsonl", row), format!("FILE, line 1: {null}"));
    let texts_with_null = RecordBatch::try_from_iter([("text", column(&[None]))]).unwrap();
    let error = World::new().load(&world.parquet("texts.parquet", &texts_with_null)).unwrap_err();
    assert_eq!(error, "FILE, row 1: text: expected a value, got null");

    let missing = "expected a column \"answer\", as data.columns or --columns names it, got \"question\"";
    assert_eq!(
        world.complaint("rows.jsonl", json!({"question": "Hi"}).to_string()),
        format!("FILE, line 1: {missing}")
    );
    assert_eq!(world.complaint("rows.csv", "question\nHi\n"), format!("FILE: {missing}"));
    let batch = RecordBatch::try_from_iter([("question", texts(&["Hi"]))]).unwrap();
    assert_eq!(world.load(&world.parquet("rows.parquet", &batch)).unwrap_err(), format!("FILE: {missing}"));
    let unnamed = World::new().complaint("rows.csv", "question,answer\nHi,Hello.\n");
    let advice = "got \"question\", \"answer\"; name the columns to read: --columns prompt=question,completion=answer";
    assert!(unnamed.contains(advice), "{unnamed}");
}

#[test]
fn a_text_file_is_a_document() {
    let world = World::new();
    let row = |text: &str| world.rows("text.jsonl", json!({"text": text}).to_string()).swap_remove(0);
    let expected = [row("Once upon a time\n\nthere was"), row("the end")];
    let text = "Once upon a time\r\n\r\nthere was\r\n<|endoftext|>\r\nthe end\n";
    assert_eq!(world.rows("book.txt", text), expected);
    assert_eq!(world.rows("book.txt.gz", packed(text)), expected);
    assert_eq!(world.rows("rows.txt", json!({"text": "the end"}).to_string()), expected[1..], "JSON in a .txt");
    assert_eq!(world.complaint("book.txt", b"caf\xe9"), "FILE, line 1: not UTF-8 text; convert the file to UTF-8");
    let blank = world.complaint("book.txt", "\n \n");
    assert!(blank.starts_with("no row to use in FILE"), "{blank}");
}

fn packed(text: &str) -> Vec<u8> {
    use std::io::Write;
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(text.as_bytes()).expect("memory");
    packer.finish().expect("memory")
}

#[test]
fn a_folder_is_read_file_by_file() {
    let world = World::new();
    world.write("b.csv", "text\nsecond\n");
    world.write("a.jsonl", r#"{"text": "first"}"#);
    world.write("README.md", "no rows");
    let rows = world.load(world.folder.path()).unwrap();
    let said: Vec<String> = rows.iter().map(|row| world.text(row).0).collect();
    assert!(said.len() == 2 && said[0].contains("first") && said[1].contains("second"), "{said:?}");
    world.write("eval.jsonl", r#"{"text": "third"}"#);
    let error = world.load(world.folder.path()).unwrap_err();
    assert!(error.contains("holds files of several splits (a.jsonl, eval.jsonl)"), "{error}");
}

#[test]
fn a_csv_that_is_not_right_names_its_row() {
    let world = World::new();
    let error = world.complaint("rows.csv", "text\na\nb, c\n");
    assert!(error.starts_with("FILE, row 2: this record has 2 fields, the header 1; a field"), "{error}");
    let value: Value = json!({"text": "a"});
    assert!(world.complaint("rows.csv", value.to_string()).starts_with("FILE: expected a key \"input_ids\""));
}

#[test]
fn a_mix_is_said_before_the_first_step_and_resumes_exactly() {
    let small = SmallRun::new();
    let row = |at: usize| json!({"input_ids": (0..12).map(|t| (at * 7 + t * 3) % 40).collect::<Vec<_>>()}).to_string();
    small.write("more.jsonl", (0..30).map(row).collect::<Vec<_>>().join("\n"));
    small.edit("recipe.toml", "train = [\"rows.jsonl\"]", "train = [\"rows.jsonl\", \"more.jsonl\"]\nmix = [1.0, 1.0]");
    small.edit("recipe.toml", "epochs = 8", "epochs = 3");
    let printed = small.train(&["--check"]).succeeded().stdout;
    let shares: Vec<&str> = printed.lines().filter(|line| line.starts_with("mix  ")).collect();
    assert!(
        shares.len() == 2 && shares[0].contains("rows.jsonl: ") && shares[0].contains("% of the tokens, 6 of 6"),
        "{printed}"
    );
    let straight = small.train(&[]).succeeded();
    assert!(straight.stderr.contains("more.jsonl: "), "{}", straight.stderr);
    let whole = small.bytes("run/final/heads.safetensors");
    for later in ["final", "step-000018"] {
        fs::remove_dir_all(small.path(&format!("run/{later}"))).expect("a folder of a test");
    }
    let resumed = small.train(&["--resume"]).succeeded();
    assert!(resumed.stderr.contains("resuming from run/step-000015"), "{}", resumed.stderr);
    assert!(small.bytes("run/final/heads.safetensors") == whole);
}

#[test]
fn a_mix_with_a_limit_and_a_hold_out_resumes_exactly_and_in_other_micro_batches() {
    let small = SmallRun::new();
    let row = |at: usize| json!({"input_ids": (0..12).map(|t| (at * 7 + t * 3) % 40).collect::<Vec<_>>()}).to_string();
    small.write("more.jsonl", (0..90).map(row).collect::<Vec<_>>().join("\n"));
    small.edit(
        "recipe.toml",
        "train = [\"rows.jsonl\"]",
        "train = [\"rows.jsonl\", \"more.jsonl\"]\nmix = [1.0, 3.0]\nlimit = 40",
    );
    small.edit("recipe.toml", "validation = [\"validation.jsonl\"]", "validation_fraction = 0.2");
    small.edit("recipe.toml", "epochs = 8", "epochs = 3");
    let printed = small.train(&["--check"]).succeeded().stdout;
    let share = |entry: &str| -> f64 {
        let line = printed.lines().find(|line| line.starts_with("mix  ") && line.contains(entry)).expect("a share");
        let (_, share) = line.split_once(&format!("{entry}: ")).expect("a share behind the entry");
        share.split_once(" %").and_then(|(share, _)| share.parse().ok()).expect("a number")
    };
    assert!((share("more.jsonl") - 75.0).abs() < 8.0, "{printed}");
    assert!((share("rows.jsonl") + share("more.jsonl") - 100.0).abs() < 0.2, "{printed}");

    small.train(&[]).succeeded();
    let whole = small.bytes("run/final/heads.safetensors");
    let back = || {
        let steps = fs::read_dir(small.path("run")).expect("a run").map(|entry| entry.expect("a file").file_name());
        let mut steps: Vec<String> =
            steps.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with("step-")).collect();
        steps.sort_unstable();
        assert!(steps.len() > 1, "{steps:?}");
        for later in ["final", &steps[steps.len() - 1]] {
            fs::remove_dir_all(small.path(&format!("run/{later}"))).expect("a folder of a test");
        }
    };
    back();
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == whole);
    back();
    small.edit(
        "recipe.toml",
        "micro_batch_size = 1\ngradient_accumulation_steps = 2",
        "micro_batch_size = 2\ngradient_accumulation_steps = 1",
    );
    let resumed = small.train(&["--resume"]).succeeded();
    assert!(resumed.stderr.contains("resuming from run/step-"), "{}", resumed.stderr);
}

#[test]
fn a_mix_has_a_weight_for_each_entry() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "train = [\"rows.jsonl\"]", "train = [\"rows.jsonl\"]\nmix = [1.0, 0.5]");
    small
        .train(&["--check"])
        .failed(2, &["data.mix = 2 weights: expected 1 weight, one for each entry of data.train", "^"]);
    small.edit("recipe.toml", "mix = [1.0, 0.5]", "mix = [1.0]\nshuffle = false");
    small.train(&["--check"]).failed(2, &["data.mix needs data.shuffle = true"]);
    small.edit("recipe.toml", "shuffle = false", "columns = { prompt = \"question\" }");
    small
        .train(&["--check"])
        .failed(2, &["expected prompt and completion, instruction and output", "got prompt", "columns = {", "^"]);
    small.edit("recipe.toml", "{ prompt = \"question\" }", "{ question = \"prompt\" }");
    small.train(&["--check"]).failed(2, &["unknown key `question`", "^"]);
}

#[test]
fn long_rows_are_split_and_an_older_run_goes_on_as_it_began() {
    let small = SmallRun::new();
    let long = json!({"input_ids": (0..100).map(|t| (t * 3) % 40).collect::<Vec<_>>()}).to_string();
    small.write("rows.jsonl", small.read("rows.jsonl") + &long);
    let printed = small.train(&["--check"]).succeeded().stdout;
    assert!(printed.contains("1 longer than 40 tokens, split into 3") && !printed.contains("lost"), "{printed}");
    small.edit("recipe.toml", "max_length = 40", "max_length = 40\nlong_rows = \"truncate\"");
    let printed = small.train(&["--check"]).succeeded().stdout;
    assert!(
        printed.contains("1 cut to 40 tokens") && printed.contains("% of all tokens lost; data.long_rows"),
        "{printed}"
    );

    small.train(&[]).succeeded();
    let whole = small.bytes("run/final/heads.safetensors");
    fs::remove_dir_all(small.path("run/final")).expect("a folder of a test");
    // Neither the recipe of then nor that of the run had the key.
    small.edit("run/recipe.toml", "long_rows = \"truncate\"\n", "");
    small.edit("recipe.toml", "long_rows = \"truncate\"\n", "");
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == whole);
    fs::remove_dir_all(small.path("run/final")).expect("a folder of a test");
    small.edit("recipe.toml", "max_length = 40", "max_length = 40\nlong_rows = \"split\"");
    small.train(&["--resume"]).failed(1, &["holds another run", "long_rows"]);
}

/// A file of each packing and of each format of columns, in several codecs.
fn binary_files(world: &World) -> Vec<(PathBuf, Vec<u8>)> {
    let text = |row: usize| format!("row {row}: {}", "some words ".repeat(row % 9));
    let jsonl: String = (0..60).map(|row| json!({"text": text(row)}).to_string() + "\n").collect();
    let mut packed = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
    packed.write_all(jsonl.as_bytes()).expect("memory");
    world.write("rows.jsonl.gz", packed.finish().expect("memory"));
    world.write("rows.jsonl.zst", zstd::encode_all(jsonl.as_bytes(), 3).expect("memory"));
    let column: ArrayRef = Arc::new(StringArray::from_iter_values((0..60).map(text)));
    let batch = RecordBatch::try_from_iter([("text", column)]).expect("a batch");
    let codecs = [Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default()), Compression::LZ4_RAW];
    let codecs = codecs.into_iter().chain([Compression::GZIP(GzipLevel::default()), Compression::UNCOMPRESSED]);
    let mut names = vec!["rows.jsonl.gz".to_owned(), "rows.jsonl.zst".to_owned()];
    for (at, codec) in codecs.enumerate() {
        let file = fs::File::create(world.path(&format!("{at}.parquet"))).expect("a file of a test");
        let with = WriterProperties::builder().set_compression(codec).build();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(with)).expect("Parquet");
        writer.write(&batch).expect("rows");
        writer.close().expect("a footer");
        names.push(format!("{at}.parquet"));
    }
    for (at, codec) in [None, Some(CompressionType::ZSTD), Some(CompressionType::LZ4_FRAME)].into_iter().enumerate() {
        let with = || IpcWriteOptions::default().try_with_compression(codec).expect("a codec");
        let (file, stream) = (format!("file-{at}.arrow"), format!("stream-{at}.arrow"));
        let create = |name: &str| fs::File::create(world.path(name)).expect("a file of a test");
        let mut writer = FileWriter::try_new_with_options(create(&file), &batch.schema(), with()).expect("Arrow");
        writer.write(&batch).and_then(|()| writer.finish()).expect("rows");
        let mut writer = StreamWriter::try_new_with_options(create(&stream), &batch.schema(), with()).expect("Arrow");
        writer.write(&batch).and_then(|()| writer.finish()).expect("rows");
        names.extend([file, stream]);
    }
    names.iter().map(|name| (world.path(name), fs::read(world.path(name)).expect("what was written"))).collect()
}

/// Bytes changed, cut off, left out or doubled, at places that `seed` determines.
fn damaged(whole: &[u8], seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below.max(1)
    };
    let mut bytes = whole.to_vec();
    match draw(8) {
        0 => bytes.truncate(draw(whole.len())),
        1 => drop(bytes.drain(draw(whole.len())..).take(draw(40)).collect::<Vec<_>>()),
        2 => {
            let from = draw(whole.len());
            let piece = whole[from..(from + draw(40)).min(whole.len())].to_vec();
            let at = draw(whole.len());
            drop(bytes.splice(at..at, piece));
        }
        _ => (0..=draw(6)).for_each(|_| {
            // Sizes and counts are where files of columns begin and end.
            let at = if draw(2) == 0 { draw(whole.len()) } else { whole.len() - 1 - draw(400.min(whole.len())) };
            bytes[at] = [0, 0x7f, 0x80, 0xff, bytes[at].wrapping_add(1), bytes[at] ^ 1 << draw(8)][draw(6)];
        }),
    }
    bytes
}

fn random_damage(seeds: std::ops::Range<u64>) {
    let world = World::new();
    let (mut refused, mut read) = (0, 0);
    for (path, whole) in binary_files(&world) {
        assert_eq!(world.load(&path).expect("rows").len(), 60, "{path:?}");
        for seed in seeds.clone() {
            fs::write(&path, damaged(&whole, seed)).expect("a file of a test");
            match world.load(&path) {
                Ok(_) => read += 1, // bytes that say nothing of the rows, or other letters in them
                Err(error) => {
                    assert!(error.contains("FILE") && !error.contains("panicked"), "{path:?}, seed {seed}: {error}");
                    refused += 1;
                }
            }
        }
        fs::remove_file(&path).expect("a file of a test");
    }
    assert!(refused > read, "most damages are noticed: {refused} of {}", refused + read);
}

#[test]
fn a_damaged_file_is_an_error_that_names_it() {
    random_damage(0..60);
}

#[test]
#[ignore = "minutes: cargo test --test promises a_file_that_is_damaged_anyhow -- --ignored"]
fn a_file_that_is_damaged_anyhow_is_an_error_that_names_it() {
    random_damage(60..5_000);
}
