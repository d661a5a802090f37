//! Promise: the same content gives the same rows, whatever file it is in. `datasets` writes the files of the last test:
//! `MEDUSA_PYTHON=python3 cargo test --test promises containers`.

#![expect(clippy::disallowed_methods, reason = "these tests write the files that users would bring")]

use std::collections::HashMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BooleanArray, Date32Array, Float64Array, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray,
};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, Fields, Schema};
use arrow::ipc::writer::{FileWriter, StreamWriter};
use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, LoadReport, LoadSettings};
use parquet::arrow::ArrowWriter;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// Writes all that a row may have, so that no difference goes unseen.
const TEMPLATE: &str = r#"{%- if tools -%}[tools {{ tools | tojson }}]{%- endif -%}
{%- if shout -%}[shout {{ shout }}]{%- endif -%}
{%- for m in messages -%}
<{{ m.role }}>{% if m.reasoning_content %}[thought {{ m.reasoning_content }}]{% endif %}{{ m.content if m.content is string else '' }}
{%- for c in m.tool_calls or [] %}[call {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}
{%- if m.tool_call_id %}[of {{ m.tool_call_id }}]{% endif %}</s>
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"#;

/// The extension type of JSON in strings, as `datasets` has it for what fits no type.
const JSON: &str = "arrow.json";

struct World {
    folder: TempDir,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
}

impl World {
    fn new() -> Self {
        let backbone = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("all.jinja");
        fs::write(&path, TEMPLATE).expect("a file of a test");
        let choice = TemplateChoice::try_from(path.display().to_string()).expect("a .jinja file");
        Self {
            folder,
            tokenizer: TextTokenizer::load(&backbone).expect("a tokenizer"),
            template: ChatTemplate::choose(&choice, &backbone).expect("a template that parses").expect("a template"),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn load(&self, path: &Path) -> (Vec<TokenRow>, LoadReport) {
        let settings = LoadSettings {
            tokenizer: Some(&self.tokenizer),
            template: Some(&self.template),
            ..LoadSettings::new(self.tokenizer.vocab_size(), NonZeroUsize::new(1 << 16).expect("not 0"))
        };
        let (rows, report) =
            data::load(&[path.display().to_string()], &settings).unwrap_or_else(|error| panic!("{error}"));
        (rows.iter().collect::<Result<_, _>>().expect("rows that were just read"), report)
    }

    fn text(&self, row: &TokenRow) -> String {
        self.tokenizer.decode(&row.input_ids, false).expect("text")
    }

    /// Fails with the first row that is not the same.
    fn compare(&self, path: &Path, expected: &[TokenRow]) {
        let (rows, _) = self.load(path);
        for (at, (got, expected)) in rows.iter().zip(expected).enumerate() {
            assert!(
                got == expected,
                "{}, row {at}:\n{}\nexpected\n{}",
                path.display(),
                self.text(got),
                self.text(expected)
            );
        }
        assert_eq!(rows.len(), expected.len(), "{}", path.display());
    }
}

/// Draws numbers.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }

    fn is(&mut self) -> bool {
        self.below(2) == 0
    }

    fn words(&mut self) -> String {
        const WORDS: [&str; 12] =
            ["rain", " in", " Oslo", "\n", "é", "🙂", "\"quoted\"", " {a: 1}", "[b]", "\t", " null", "\\n"];
        (0..=self.below(6)).map(|_| WORDS[self.below(WORDS.len())]).collect::<String>() + "."
    }
}

/// A conversation with thoughts, calls of tools and their results. The first one has every key: columns have keys in one order.
fn conversation(draw: &mut Draw, at: usize) -> Value {
    let full = at == 0;
    let mut turns = vec![];
    if full || draw.below(4) == 0 {
        turns.push(json!({"role": "system", "content": draw.words()}));
    }
    for turn in 0..=draw.below(3) {
        turns.push(json!({"role": "user", "content": draw.words()}));
        if full || draw.is() {
            let id = format!("call-{at}-{turn}");
            let mut call = json!({"role": "assistant"});
            match draw.below(3) {
                0 if !full => {}
                1 => call["content"] = Value::Null,
                _ => call["content"] = draw.words().into(),
            }
            if full || draw.is() {
                call["reasoning_content"] = draw.words().into();
            }
            let mut arguments = Map::new();
            for key in ["city", "days", "sure"] {
                let value = match key {
                    "city" => json!(draw.words()),
                    "days" => json!(draw.below(9)),
                    _ => json!(draw.is()),
                };
                if full || draw.is() {
                    arguments.insert(key.to_owned(), value);
                }
            }
            let function = json!({"name": "weather", "arguments": arguments});
            call["tool_calls"] = json!([{"id": id, "type": "function", "function": function}]);
            turns.push(call);
            turns.push(json!({"role": "tool", "content": draw.words(), "tool_call_id": id}));
        }
        let mut answer = json!({"role": "assistant", "content": draw.words()});
        if draw.is() {
            answer["reasoning_content"] = draw.words().into();
        }
        turns.push(answer);
    }
    let mut row = json!({"id": at, "messages": turns});
    if full || draw.below(3) == 0 {
        let city = json!({"type": "string", "description": draw.words()});
        let properties =
            if draw.is() && !full { json!({"city": city}) } else { json!({"city": city, "days": {"type": "integer"}}) };
        let parameters = json!({"type": "object", "properties": properties});
        row["tools"] = json!([{"type": "function", "function": {"name": "weather", "parameters": parameters}}]);
    }
    if full || draw.below(5) == 0 {
        row["chat_template_kwargs"] = json!({"shout": draw.words()});
    }
    if full || draw.below(5) == 0 {
        row["system"] = draw.words().into();
    }
    row
}

/// The field that holds all these values: structs have the keys of all of them; values of several types are JSON in strings.
fn field(name: &str, values: &[Option<&Value>]) -> Field {
    let values: Vec<&Value> = values.iter().copied().flatten().filter(|value| !value.is_null()).collect();
    let all = |is: fn(&Value) -> bool| !values.is_empty() && values.iter().all(|value| is(value));
    let kind = match () {
        () if values.is_empty() => DataType::Null,
        () if all(Value::is_string) => DataType::Utf8,
        () if all(Value::is_i64) => DataType::Int64,
        () if all(Value::is_boolean) => DataType::Boolean,
        () if all(Value::is_array) => {
            let items = values.iter().filter_map(|value| value.as_array()).flatten().map(Some);
            DataType::List(Arc::new(field("item", &items.collect::<Vec<_>>())))
        }
        () if all(Value::is_object) => {
            let mut keys: Vec<&String> = vec![];
            for key in values.iter().filter_map(|value| value.as_object()).flat_map(Map::keys) {
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
            let of = |key: &String| field(key, &values.iter().map(|value| value.get(key)).collect::<Vec<_>>());
            DataType::Struct(keys.into_iter().map(of).collect())
        }
        () => {
            let metadata = HashMap::from([("ARROW:extension:name".to_owned(), JSON.to_owned())]);
            return Field::new(name, DataType::Utf8, true).with_metadata(metadata);
        }
    };
    Field::new(name, kind, true)
}

fn column(field: &Field, values: &[Option<&Value>]) -> ArrayRef {
    let valid = || values.iter().map(|value| value.is_some_and(|value| !value.is_null()));
    match field.data_type() {
        DataType::Utf8 if field.metadata().is_empty() => {
            Arc::new(values.iter().map(|value| value.and_then(Value::as_str)).collect::<StringArray>())
        }
        DataType::Utf8 => Arc::new(values.iter().map(|value| value.map(Value::to_string)).collect::<StringArray>()),
        DataType::Int64 => Arc::new(values.iter().map(|value| value.and_then(Value::as_i64)).collect::<Int64Array>()),
        DataType::Boolean => {
            Arc::new(values.iter().map(|value| value.and_then(Value::as_bool)).collect::<BooleanArray>())
        }
        DataType::List(item) => {
            let lists = || values.iter().map(|value| value.and_then(Value::as_array).map_or(&[][..], Vec::as_slice));
            let items: Vec<Option<&Value>> = lists().flatten().map(Some).collect();
            let ends = OffsetBuffer::from_lengths(lists().map(<[Value]>::len));
            let nulls = Some(valid().collect::<NullBuffer>());
            Arc::new(ListArray::new(item.clone(), ends, column(item, &items), nulls))
        }
        DataType::Struct(fields) => {
            let of = |field: &Arc<Field>| {
                let values: Vec<_> =
                    values.iter().map(|value| value.and_then(|value| value.get(field.name()))).collect();
                column(field, &values)
            };
            let nulls = Some(valid().collect::<NullBuffer>());
            Arc::new(StructArray::new(fields.clone(), fields.iter().map(of).collect(), nulls))
        }
        _ => arrow::array::new_null_array(field.data_type(), values.len()),
    }
}

fn batch(rows: &[Value], more: Vec<(&str, ArrayRef)>) -> RecordBatch {
    let rows: Vec<Option<&Value>> = rows.iter().map(Some).collect();
    let DataType::Struct(fields) = field("row", &rows).data_type().clone() else { panic!("rows are objects") };
    let values = |field: &Field| rows.iter().map(|row| row.and_then(|row| row.get(field.name()))).collect::<Vec<_>>();
    let mut columns: Vec<ArrayRef> = fields.iter().map(|field| column(field, &values(field))).collect();
    let more_fields = more.iter().map(|(name, column)| Arc::new(Field::new(*name, column.data_type().clone(), true)));
    let fields: Fields = fields.iter().cloned().chain(more_fields).collect();
    columns.extend(more.into_iter().map(|(_, column)| column));
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).expect("columns of one length")
}

fn write_parquet(path: &Path, batch: &RecordBatch) {
    let mut writer =
        ArrowWriter::try_new(fs::File::create(path).expect("a file"), batch.schema(), None).expect("Parquet");
    writer.write(batch).expect("rows");
    writer.close().expect("a footer");
}

fn write_arrow(world: &World, batch: &RecordBatch) {
    let create = |name: &str| fs::File::create(world.path(name)).expect("a file of a test");
    let mut writer = FileWriter::try_new(create("file.arrow"), &batch.schema()).expect("Arrow");
    writer.write(batch).and_then(|()| writer.finish()).expect("rows");
    let mut writer = StreamWriter::try_new(create("stream.arrow"), &batch.schema()).expect("Arrow");
    writer.write(batch).and_then(|()| writer.finish()).expect("rows");
}

/// Cells that are lists or objects as JSON.
fn csv(rows: &[Value], columns: &[&str]) -> String {
    let cell = |value: &Value| match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let quoted = |text: String| format!("\"{}\"", text.replace('"', "\"\""));
    let line = |row: &Value| columns.iter().map(|name| quoted(cell(&row[*name]))).collect::<Vec<_>>().join(",");
    format!("{}\n{}\n", columns.join(","), rows.iter().map(line).collect::<Vec<_>>().join("\n"))
}

#[test]
fn a_thousand_random_conversations_are_the_same_rows_from_every_container() {
    let world = World::new();
    let mut draw = Draw(7);
    let rows: Vec<Value> = (0..1000).map(|at| conversation(&mut draw, at)).collect();
    let jsonl = rows.iter().map(|row| row.to_string() + "\n").collect::<String>();
    fs::write(world.path("rows.jsonl"), jsonl).expect("a file of a test");
    let (expected, report) = world.load(&world.path("rows.jsonl"));
    assert!(expected.len() == 1000 && report.counts.tokens_with_loss > 1000, "{report}");
    let all = expected.iter().map(|row| world.text(row)).collect::<String>();
    for part in ["[tools [{", "[shout ", "[thought ", "[call call-0-0 weather {", "[of call-0-0]"] {
        assert!(all.contains(part), "{part}");
    }
    fs::write(world.path("rows.json"), json!(rows).to_string()).expect("a file of a test");
    fs::write(world.path("rows.csv"), csv(&rows, &["id", "messages", "tools", "chat_template_kwargs", "system"]))
        .expect("a file of a test");
    // Columns that nobody reads, of types that JSON does not have.
    let dates: ArrayRef = Arc::new(Date32Array::from_iter_values(0..1000));
    let numbers: ArrayRef = Arc::new(Float64Array::from(vec![f64::NAN; 1000]));
    let batch = batch(&rows, vec![("date", dates), ("score", numbers)]);
    write_parquet(&world.path("rows.parquet"), &batch);
    write_arrow(&world, &batch);
    for name in ["rows.json", "rows.csv", "rows.parquet", "file.arrow", "stream.arrow"] {
        world.compare(&world.path(name), &expected);
    }
}

#[test]
fn content_in_parts_and_arguments_of_many_types_are_json_in_columns() {
    let world = World::new();
    let call = |arguments: Value| json!({"role": "assistant", "content": null, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]});
    let parts = json!([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]);
    let row = |content: Value, arguments: Value| {
        let result = json!({"role": "tool", "content": "r", "tool_call_id": "c"});
        json!({"messages": [{"role": "user", "content": content}, call(arguments), result, {"role": "assistant", "content": "a"}]})
    };
    let rows =
        [row(parts, json!({"x": 1})), row(json!("three"), json!({"x": "y"})), row(json!("four"), json!({"x": [true]}))];
    let jsonl = rows.iter().map(|row| row.to_string() + "\n").collect::<String>();
    fs::write(world.path("rows.jsonl"), jsonl).expect("a file of a test");
    let (expected, _) = world.load(&world.path("rows.jsonl"));
    assert!(world.text(&expected[0]).contains("one two") && world.text(&expected[2]).contains("{\"x\": [true]}"));
    let batch = batch(&rows, vec![]);
    write_parquet(&world.path("rows.parquet"), &batch);
    write_arrow(&world, &batch);
    for name in ["rows.parquet", "file.arrow", "stream.arrow"] {
        world.compare(&world.path(name), &expected);
    }
}

#[test]
fn masks_beside_token_ids_are_the_same_in_every_container() {
    let world = World::new();
    let rows = [
        json!({"input_ids": [5, 6, 7, 8], "assistant_masks": [0, 1, 1, 1], "completion_mask": [0, 0, 1, 1]}),
        json!({"input_ids": [5, 6, 7, 8], "completion_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]}),
    ];
    let jsonl = rows.iter().map(|row| row.to_string() + "\n").collect::<String>();
    fs::write(world.path("rows.jsonl"), jsonl).expect("a file of a test");
    let (expected, report) = world.load(&world.path("rows.jsonl"));
    assert_eq!(expected[0], TokenRow { input_ids: vec![5, 6, 7, 8], labels: vec![-100, -100, 7, 8] });
    assert_eq!(expected[1], TokenRow { input_ids: vec![5, 6, 7], labels: vec![-100, 6, 7] });
    assert!(report.counts.others.not_read.is_empty());
    let batch = batch(&rows, vec![]);
    write_parquet(&world.path("rows.parquet"), &batch);
    write_arrow(&world, &batch);
    for name in ["rows.parquet", "file.arrow", "stream.arrow"] {
        world.compare(&world.path(name), &expected);
    }
}

#[test]
fn columns_that_are_not_read_are_reported_with_their_rows() {
    let world = World::new();
    let row = |more: Value| {
        let mut row = json!({"id": 1, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "mood": "joy"}]});
        row.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        row
    };
    let rows = [
        row(json!({"rejected": "c", "images": []})),
        row(json!({"rejected": "d", "own": 1})),
        row(json!({"own": null})),
    ];
    let jsonl = rows.iter().map(|row| row.to_string() + "\n").collect::<String>();
    fs::write(world.path("rows.jsonl"), jsonl).expect("a file of a test");
    let (_, report) = world.load(&world.path("rows.jsonl"));
    let text = report.to_string();
    assert!(text.ends_with("; not read: `messages[].mood` in 3 rows, `own` in 1 row, `rejected` in 2 rows"), "{text}");
    let json = json!(report);
    assert_eq!(json["not_read"], json!({"messages[].mood": 3, "own": 1, "rejected": 2}));
    assert_eq!(json["harmless"], json!({"id": 3}));
    write_parquet(&world.path("rows.parquet"), &batch(&rows, vec![]));
    let (_, report) = world.load(&world.path("rows.parquet"));
    assert_eq!(report.counts.others.not_read["rejected"], 3, "of columns every row counts");
    assert_eq!(report.counts.others.not_read["messages[].mood"], 3);
}

#[test]
fn tools_and_variables_that_the_template_does_not_read_are_reported() {
    let world = World::new();
    let row = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"enable_thinkin": false}});
    fs::write(world.path("rows.jsonl"), row.to_string()).expect("a file of a test");
    let (_, report) = world.load(&world.path("rows.jsonl"));
    let json = json!(report);
    assert_eq!(json["not_read"], json!({"chat_template_kwargs.enable_thinkin": 1}));
    assert_eq!(json["to_template"], json!({"tools": 1}), "the template has a variable of this name");
}

#[test]
#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with datasets")]
fn files_that_datasets_writes_are_the_same_rows() {
    let world = World::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/fixtures/make_containers.py");
    let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
    let output = Command::new(python).arg(script).arg(world.folder.path()).output().expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut compared = 0;
    for set in ["plain", "mixed"] {
        let (expected, _) = world.load(&world.path(set).join("rows.jsonl"));
        assert_eq!(expected.len(), 1000);
        let files = fs::read_dir(world.path(set)).expect("a folder").map(|entry| entry.expect("a file").path());
        for path in files.filter(|path| !path.ends_with("rows.jsonl")) {
            world.compare(&path, &expected);
            compared += 1;
        }
    }
    assert_eq!(compared, 13);
}
