//! A conversation is rendered and tokenized as by transformers, and exactly the assistant's text carries loss.

#![expect(clippy::disallowed_methods, reason = "these tests write the files that users would bring")]

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, ListArray, RecordBatch, StringArray, StructArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use medusa::data::cache::TokenCache;
use medusa::data::chat::LossOn;
use medusa::data::chat_template::{ChatTemplate, Message, TemplateChoice, TemplateInputs};
use medusa::data::conversation::read_messages;
use medusa::data::long_rows::LongRows;
use medusa::data::rows::TokenRow;
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, CacheUse, DataError, DropReason, IGNORE, LoadReport, LoadSettings};
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::published::published;

const BUILT_IN: [&str; 6] = ["vicuna", "zephyr", "llama-2", "llama-3", "chatml", "mistral"];

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone")
}

/// A backbone's tokenizer, a template, and a folder for data files.
struct World {
    tokenizer: TextTokenizer,
    template: Option<ChatTemplate>,
    folder: TempDir,
    max_length: usize,
    long_rows: LongRows,
    loss_on: LossOn,
    cache: Option<TokenCache>,
}

impl World {
    fn new(backbone: &Path, template: &str) -> Self {
        let choice = TemplateChoice::try_from(template.to_owned()).expect("a template that can be chosen");
        Self {
            tokenizer: TextTokenizer::load(backbone).expect("the tokenizer of this test"),
            template: ChatTemplate::choose(&choice, backbone).expect("a template that parses"),
            folder: tempfile::tempdir().expect("a temporary folder"),
            max_length: 4096,
            long_rows: LongRows::default(),
            loss_on: LossOn::Assistant,
            cache: None,
        }
    }

    /// The tiny backbone's tokenizer with a template of this source.
    fn with_source(source: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("x.jinja");
        fs::write(&path, source).expect("a template");
        Self::new(&tiny(), &path.display().to_string())
    }

    fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, content).expect("a file of a test");
        path
    }

    fn load(&self, path: &Path) -> Result<(Vec<TokenRow>, LoadReport), DataError> {
        let settings = LoadSettings {
            tokenizer: Some(&self.tokenizer),
            cache: self.cache.as_ref(),
            template: self.template.as_ref(),
            long_rows: self.long_rows,
            loss_on: self.loss_on,
            ..LoadSettings::new(self.tokenizer.vocab_size(), NonZeroUsize::new(self.max_length).expect("not 0"))
        };
        let (rows, report) = data::load(&[path.display().to_string()], &settings)?;
        Ok((rows.iter().collect::<Result<_, _>>().expect("rows that were just read"), report))
    }

    fn lines(&self, rows: &[Value]) -> Result<(Vec<TokenRow>, LoadReport), DataError> {
        let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
        self.load(&self.write("rows.jsonl", &lines.join("\n")))
    }

    /// The spans of text that carry loss in a one-conversation row, and the whole text.
    fn learned(&self, conversation: Value) -> (Vec<String>, String) {
        let (rows, _) = self.lines(&[json!({"messages": conversation})]).expect("a row");
        let TokenRow { input_ids, labels } = &rows[0];
        let spans = labels.chunk_by(|a, b| (*a == IGNORE) == (*b == IGNORE)).filter(|span| span[0] != IGNORE);
        let text = |ids: &[i32]| self.tokenizer.decode(ids, false).expect("known ids");
        (spans.map(text).collect(), text(input_ids))
    }
}

fn messages(value: &Value) -> Vec<Message> {
    read_messages("messages", value).expect("messages of the fixture")
}

fn talk(turns: &[(&str, &str)]) -> Value {
    turns.iter().map(|(role, content)| json!({"role": role, "content": content})).collect()
}

/// `scripts/fixtures/make_chat_fixtures.py` documents how these files were made.
fn fixture_named(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("JSON")
}

fn fixture() -> Value {
    fixture_named("chat.json")
}

/// The fixture's row; `None` if no token carries loss.
fn expected_row(case: &Value) -> Option<TokenRow> {
    let input_ids: Vec<i32> = case["ids"].as_str()?.split(' ').map(|id| id.parse().expect("an id")).collect();
    let mask = case["mask"].as_str()?.bytes();
    let labels: Vec<i32> =
        input_ids.iter().zip(mask).map(|(id, learn)| if learn == b'1' { *id } else { IGNORE }).collect();
    labels.iter().any(|label| *label != IGNORE).then_some(TokenRow { input_ids, labels })
}

fn check_template(name: &str, world: &World, fixture: &Value) -> usize {
    let conversations = fixture["conversations"].as_array().expect("a list");
    let cases = fixture["rendered"][name].as_array().expect("a list");
    let template = world.template.as_ref().expect("a template");
    for (conversation, case) in conversations.iter().zip(cases) {
        let rendered = |prompt| template.render(&messages(conversation), prompt).ok();
        assert_eq!(rendered(false).as_deref(), case["text"].as_str(), "{name}: {conversation}");
        assert_eq!(rendered(true).as_deref(), case["prompt"].as_str(), "{name}: {conversation}");
    }
    let rows: Vec<Value> = conversations.iter().map(|conversation| json!({"messages": conversation})).collect();
    let (rows, report) = world.lines(&rows).expect("rows");
    let expected: Vec<TokenRow> = cases.iter().filter_map(expected_row).collect();
    for (row, expected) in rows.iter().zip(&expected) {
        assert_eq!(row, expected, "{name}: {:?}", world.tokenizer.decode(&expected.input_ids, false));
    }
    assert_eq!((rows.len(), report.counts.read), (expected.len(), conversations.len()));
    assert_eq!(report.counts.dropped[&DropReason::NoAssistantTurn], 1);
    expected.len()
}

#[test]
fn built_in_templates_render_tokenise_and_mask_as_transformers_does() {
    let fixture = fixture();
    let counts = BUILT_IN.map(|name| check_template(name, &World::new(&tiny(), name), &fixture));
    assert_eq!(counts, [20, 20, 18, 20, 20, 18]);
}

#[test]
fn generation_tags_mask_as_transformers_does() {
    let fixture = fixture();
    let world = World::with_source(fixture["generation_template"].as_str().unwrap());
    assert_eq!(check_template("generation", &world, &fixture), 20);
}

/// The first 16 hex digits of the SHA-256.
fn digest(text: &str) -> String {
    Sha256::digest(text)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn digest_of_tokens(row: &TokenRow) -> String {
    let ids: Vec<String> = row.input_ids.iter().map(i32::to_string).collect();
    let mask: String = row.labels.iter().map(|label| if *label == IGNORE { '0' } else { '1' }).collect();
    digest(&format!("{}\n{mask}", ids.join(" ")))
}

/// The rows of the fixture's conversations in `tests/fixtures/data`.
fn two_hundred(files: &Value) -> Vec<Value> {
    let rows = |(name, count): (&String, &Value)| -> Vec<Value> {
        let text = fs::read_to_string(published("data").join(name)).expect("a file of tests/fixtures/data");
        let lines = || text.lines().map(serde_json::from_str).collect();
        let rows: Vec<Value> =
            if name.ends_with(".json") { serde_json::from_str(&text) } else { lines() }.expect("JSON");
        rows[..count.as_u64().expect("a number") as usize].to_vec()
    };
    files.as_object().expect("files").iter().flat_map(rows).collect()
}

/// The turns of a row with a template's roles.
fn in_words_of(row: &Value, shows_tools: bool) -> Vec<Message> {
    let text =
        |turn: &Value, names: [&str; 2]| names.iter().find_map(|name| turn[*name].as_str()).expect("text").to_owned();
    let turn = |turn: &Value| {
        let role = match text(turn, ["role", "from"]).as_str() {
            "assistant" | "gpt" | "function_call" => "assistant",
            "observation" if shows_tools => "tool",
            _ => "user",
        };
        Message::new(role, text(turn, ["content", "value"]))
    };
    let turns = row["messages"].as_array().or_else(|| row["conversations"].as_array());
    turns.expect("turns").iter().map(turn).collect()
}

#[test]
fn two_hundred_published_conversations_are_those_of_transformers() {
    let fixture = fixture_named("chat_200.json");
    let rows = two_hundred(&fixture["files"]);
    let source = fixture_named("chat.json")["generation_template"].as_str().expect("a template").to_owned();
    let file = tempfile::tempdir().expect("a temporary folder");
    let generation = file.path().join("generation.jinja");
    fs::write(&generation, source).expect("a template");
    for (name, cases) in fixture["rendered"].as_object().expect("templates") {
        let choice = if name == "generation" { generation.display().to_string() } else { name.clone() };
        let mut world = World::new(&published("models/tokenizer-mistral-v1-32000"), &choice);
        world.max_length = 32768;
        let shows_tools = fixture["shows_tools"].as_array().expect("a list").contains(&json!(name));
        let (loaded, report) = world.lines(&rows).expect("rows");
        assert_eq!((loaded.len(), report.counts.truncated), (200, 0), "{name}: {report}");
        let template = world.template.as_ref().expect("a template");
        for ((row, case), loaded) in rows.iter().zip(cases.as_array().expect("a list")).zip(&loaded) {
            let text = template.render(&in_words_of(row, shows_tools), false).expect("a text");
            assert_eq!(digest(&text), case["text"], "{name}: {text}");
            assert_eq!(digest_of_tokens(loaded), case["tokens"], "{name}: {text}");
        }
    }
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_masked_by_where_the_answers_stand() {
    // Reasoning is kept only in the last answer, and the last answer always has some.
    let thinking = "{% for m in messages %}{{ '<|' + m.role + '|>' }}\
        {% if m.role == 'assistant' and loop.last %}{{ '(thinks)' }}{% endif %}{{ m.content.strip() + eos_token + '\n' }}\
        {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";
    let turns = talk(&[("user", "Hi"), ("assistant", " yes "), ("user", "Hi"), ("assistant", "yes")]);
    let (learned, text) = World::with_source(thinking).learned(turns.clone());
    assert_eq!(learned, ["yes<|end|>", "(thinks)yes<|end|>"]);
    assert!(text.ends_with("<|assistant|>(thinks)yes<|end|>\n"), "{text}");

    // The end of the text is not the end of a turn, and there is no generation prompt.
    let closed = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + eos_token }}{% endfor %}{{ '<|user|>' }}";
    let (learned, _) = World::with_source(closed).learned(turns.clone());
    assert_eq!(learned, [" yes <|end|>", "yes<|end|><|user|>"]);

    let deaf = "{% for m in messages %}{{ m.content | length }} {% endfor %}";
    let error = World::with_source(deaf).lines(&[json!({"messages": turns})]).unwrap_err().to_string();
    assert!(error.ends_with("1 dropped (the chat template changes the answers)"), "{error}");
}

#[test]
fn what_tools_say_stays_and_is_not_learned_and_calls_are() {
    let turns = json!([{"from": "human", "value": "Sum?"}, {"from": "function_call", "value": "add(1, 2)"},
        {"from": "observation", "value": "three"}, {"from": "gpt", "value": "It is 3."}]);
    for name in BUILT_IN.into_iter().chain(["tokenizer"]) {
        let world = World::new(&tiny(), name);
        let (learned, text) = world.learned(turns.clone());
        assert!(learned.len() == 2 && learned[0].trim_start().starts_with("add(1, 2)"), "{name}: {learned:?}");
        assert!(learned[1].trim_start().starts_with("It is 3."), "{name}: {learned:?}");
        assert!(text.contains("Sum?") && text.contains("add(1, 2)") && text.contains("three"), "{name}: {text}");
    }
    let chatml = World::new(&tiny(), "chatml").learned(turns.clone()).1;
    assert!(chatml.contains("<|im_start|>tool\nthree<|im_end|>"), "a role that the template shows stays: {chatml}");
    let marked = World::with_source(fixture()["generation_template"].as_str().unwrap()).learned(turns);
    assert_eq!(marked.0, [" add(1, 2)<|end|>", " It is 3.<|end|>"]); // a token across the border carries loss as a whole
}

#[test]
fn loss_on_all_learns_every_token_of_the_same_text() {
    let rows = [json!({"messages": talk(&[("user", "Hi"), ("assistant", "Hello.")])})];
    let mut world = World::new(&tiny(), "tokenizer");
    let (masked, report) = world.lines(&rows).unwrap();
    assert_eq!(
        (report.counts.tokens_with_loss, masked[0].labels.iter().filter(|label| **label != IGNORE).count()),
        (3, 3)
    );
    world.loss_on = LossOn::All;
    let (all, report) = world.lines(&rows).unwrap();
    assert_eq!((&all[0].labels, &all[0].input_ids), (&masked[0].input_ids, &masked[0].input_ids));
    assert_eq!(report.counts.tokens_with_loss, report.counts.tokens - 1, "the first token is nobody's target");
    assert_eq!(all[0].input_ids.iter().filter(|id| **id == 0).count(), 1, "one BOS, the template's");
}

fn conversation_column(rows: &[Vec<(&str, Option<&str>)>], names: [&str; 2]) -> ArrayRef {
    let turns = || rows.iter().flatten();
    let roles: ArrayRef = Arc::new(StringArray::from_iter_values(turns().map(|(role, _)| role)));
    let contents: ArrayRef = Arc::new(StringArray::from_iter(turns().map(|(_, content)| *content)));
    let other: ArrayRef = Arc::new(StringArray::from_iter_values(turns().map(|_| "ignored")));
    let field = |name: &str| Arc::new(Field::new(name, DataType::Utf8, true));
    let structs = StructArray::from(vec![(field("id"), other), (field(names[0]), roles), (field(names[1]), contents)]);
    let item = Arc::new(Field::new_list_field(structs.data_type().clone(), true));
    Arc::new(ListArray::new(item, OffsetBuffer::from_lengths(rows.iter().map(Vec::len)), Arc::new(structs), None))
}

#[test]
fn calls_beside_the_content_are_learned_from_columns_too() {
    let turns = [("user", "Sum?"), ("assistant", "Let me see."), ("tool", "3"), ("assistant", "It is 3.")];
    let column = |part: fn(&(&'static str, &'static str)) -> &'static str| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(turns.iter().map(part)))
    };
    let calls: ArrayRef = Arc::new(StringArray::from(vec![None, Some("[add(1, 2)]"), Some("[]"), Some("")]));
    let field = |name: &str| Arc::new(Field::new(name, DataType::Utf8, true));
    let columns = vec![
        (field("role"), column(|turn| turn.0)),
        (field("content"), column(|turn| turn.1)),
        (field("tool_calls"), calls),
    ];
    let one_row = |values: ArrayRef| {
        let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
        ListArray::new(item, OffsetBuffer::from_lengths([values.len()]), values, None)
    };
    let lists = columns.iter().map(|(field, values)| {
        let list: ArrayRef = Arc::new(one_row(values.clone()));
        (Arc::new(Field::new(field.name(), list.data_type().clone(), true)), list)
    });
    let struct_of_lists = StructArray::from(lists.collect::<Vec<_>>());
    let list = one_row(Arc::new(StructArray::from(columns)));
    let world = World::new(&tiny(), "zephyr");
    let path = world.folder.path().join("rows.parquet");
    write_parquet(&path, vec![("messages", Arc::new(list))]);
    let (rows, _) = world.load(&path).expect("a row");
    write_parquet(&path, vec![("messages", Arc::new(struct_of_lists))]);
    assert_eq!(world.load(&path).expect("a row").0, rows);
    let learned: Vec<i32> = rows[0].labels.iter().copied().filter(|label| *label != IGNORE).collect();
    let text = |ids: &[i32]| world.tokenizer.decode(ids, false).expect("known ids");
    assert_eq!(text(&learned), "Let me see.[add(1, 2)]<|end|>It is 3.<|end|>");
    assert!(text(&rows[0].input_ids).contains("Let me see.[add(1, 2)]"), "{}", text(&rows[0].input_ids));
}

fn write_parquet(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true)));
    let batch = batch.expect("columns of one length");
    let mut writer =
        ArrowWriter::try_new(fs::File::create(path).expect("a file"), batch.schema(), None).expect("Parquet");
    writer.write(&batch).expect("rows");
    writer.close().expect("a footer");
}

#[test]
fn every_format_gives_the_same_rows() {
    let world = World::new(&tiny(), "zephyr");
    let turns =
        [vec![("user", "Hi"), ("assistant", "Hello.")], vec![("system", "s"), ("user", "q"), ("assistant", "a é")]];
    let openai: Vec<Value> = turns.iter().map(|turns| json!({"messages": talk(turns), "id": 3})).collect();
    let (expected, _) = world.lines(&openai).unwrap();
    assert_eq!(expected.len(), 2);

    let name = |role: &str| {
        match role {
            "user" => "human",
            "assistant" => "gpt",
            other => other,
        }
        .to_owned()
    };
    let renamed = |turns: &Vec<(&str, &str)>| {
        let turns: Value =
            turns.iter().map(|(role, said)| json!({"from": name(role), "value": said, "weight": null})).collect();
        json!({"conversations": turns})
    };
    let sharegpt: Vec<Value> = turns.iter().map(renamed).collect();
    assert_eq!(world.lines(&sharegpt).unwrap().0, expected);
    let array = |rows: &[Value]| format!("\u{feff}\n{}\n", serde_json::to_string_pretty(rows).unwrap());
    assert_eq!(world.load(&world.write("rows.json", &array(&sharegpt))).unwrap().0, expected);
    assert_eq!(world.load(&world.write("rows.json", &array(&openai))).unwrap().0, expected);

    let path = world.folder.path().join("rows.parquet");
    let column: Vec<Vec<_>> =
        turns.iter().map(|t| t.iter().map(|(role, said)| (*role, Some(*said))).collect()).collect();
    write_parquet(&path, vec![("messages", conversation_column(&column, ["role", "content"]))]);
    assert_eq!(world.load(&path).unwrap().0, expected);
    write_parquet(&path, vec![("conversations", conversation_column(&column, ["from", "value"]))]);
    assert_eq!(world.load(&path).unwrap().0, expected);
}

#[test]
fn alpaca_rows_are_a_question_and_an_answer() {
    let world = World::new(&tiny(), "zephyr");
    let asked = |text: &str| json!({"messages": talk(&[("user", text), ("assistant", "3")])});
    let (expected, _) = world.lines(&[asked("Add.\n\n1 2"), asked("Add.")]).unwrap();
    let rows = [
        json!({"instruction": "Add.", "input": "1 2", "output": "3"}),
        json!({"instruction": "Add.", "input": "", "output": "3"}),
    ];
    assert_eq!(world.lines(&rows).unwrap().0, expected);
    let path = world.folder.path().join("rows.parquet");
    let text = |rows: [Option<&str>; 2]| -> ArrayRef { Arc::new(StringArray::from(rows.to_vec())) };
    let (instruction, output) = (text([Some("Add."); 2]), text([Some("3"); 2]));
    let columns = vec![
        ("instruction", instruction),
        ("input", text([Some("1 2"), None])),
        ("output", output),
        ("text", text([Some("x"); 2])),
    ];
    write_parquet(&path, columns);
    assert_eq!(world.load(&path).unwrap().0, expected);
}

#[test]
fn what_is_left_out_is_counted_with_the_reason_also_from_the_cache() {
    let mut world = World::new(&tiny(), "llama-2");
    world.cache = Some(TokenCache::new(world.folder.path().join("cache")));
    let long = "word ".repeat(100);
    let rows = [
        json!({"messages": []}),
        json!({"messages": talk(&[("user", " "), ("assistant", "")])}),
        json!({"messages": talk(&[("user", "Hi")])}),
        json!({"messages": talk(&[("user", "Hi"), ("moderator", "x"), ("assistant", "a")])}),
        json!({"messages": talk(&[("assistant", "Hi"), ("user", "Hi"), ("assistant", "a")])}),
        json!({"messages": talk(&[("user", &long), ("assistant", "a")])}),
        json!({"messages": talk(&[("user", "Hi"), ("assistant", &long)])}),
        json!({"messages": talk(&[("user", "Hi"), ("assistant", "a")])}),
    ];
    (world.max_length, world.long_rows) = (40, LongRows::Truncate);
    let (kept, report) = world.lines(&rows).unwrap();
    assert_eq!((report.counts.read, report.counts.rows, report.counts.truncated, kept.len()), (8, 2, 1, 2));
    let refusal = "conversation roles must alternate user/assistant/user/assistant/... after an optional system turn";
    let expected = [
        (DropReason::EmptyConversation, 2),
        (DropReason::NoAssistantTurn, 1),
        (DropReason::UnknownRole, 1),
        (DropReason::TemplateRefuses(refusal.to_owned()), 1),
        (DropReason::NoLabelLeft, 1),
    ];
    assert_eq!(report.counts.dropped, expected.into());
    assert_eq!(report.files[0].rows, 8);
    assert!(report.to_string().contains(&format!("1 dropped (the chat template refuses it: {refusal})")), "{report}");
    assert_eq!(report.files[0].cache, CacheUse::Written);
    let (again, mut from_cache) = world.lines(&rows).unwrap();
    assert_eq!(from_cache.files[0].cache, CacheUse::Read);
    from_cache.files[0].cache = CacheUse::Written;
    assert!(report.tokenised.is_some() && from_cache.tokenised.is_none());
    from_cache.tokenised = report.tokenised;
    assert_eq!((again, from_cache), (kept, report));
}

#[test]
fn another_template_or_loss_is_another_cache_entry() {
    let cache = TokenCache::new(tempfile::tempdir().unwrap().path());
    let rows = [json!({"messages": talk(&[("user", "Hi"), ("assistant", "a")])})];
    let mut seen = Vec::new();
    for (template, loss_on) in [("chatml", LossOn::Assistant), ("zephyr", LossOn::Assistant), ("zephyr", LossOn::All)] {
        let world = World { cache: Some(cache.clone()), loss_on, ..World::new(&tiny(), template) };
        let (row, report) = world.lines(&rows).unwrap();
        assert_eq!(report.files[0].cache, CacheUse::Written, "{template}");
        assert!(!seen.contains(&row));
        seen.push(row);
    }
}

#[test]
fn conversations_without_a_template_say_what_to_do() {
    let backbone = tempfile::tempdir().unwrap();
    fs::copy(tiny().join("tokenizer.json"), backbone.path().join("tokenizer.json")).unwrap();
    let world = World::new(backbone.path(), "tokenizer");
    let error = world.lines(&[json!({"instruction": "a", "output": "b"})]).unwrap_err().to_string();
    let expected = "line 1: a row of \"instruction\" is a conversation, and the backbone has no chat template; \
        set data.chat_template in the recipe, or --chat-template on the command line, to one of \"vicuna\", \"zephyr\", \"llama-2\", \"llama-3\", \"chatml\", \"mistral\", or to \
        the path of a .jinja file";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_template_that_fails_on_every_row_is_an_error() {
    let row = |first| json!({"messages": talk(&[(first, "Hi"), ("assistant", "a")])});
    let broken = World::with_source("{{ messages[0].content.nothing.more }}{{ raise_exception('never') }}");
    let error = broken.lines(&[row("user"), row("user")]).unwrap_err().to_string();
    assert!(
        error.contains("x.jinja renders none of the 2 conversations in") && error.contains("rows.jsonl"),
        "{error}"
    );
    assert!(
        error.contains("set data.chat_template (--chat-template) to one that renders them: \"vicuna\", "),
        "{error}"
    );
    let without_eos = tempfile::tempdir().unwrap();
    fs::copy(tiny().join("tokenizer.json"), without_eos.path().join("tokenizer.json")).unwrap();
    let error = World::new(without_eos.path(), "zephyr").lines(&[row("user")]).unwrap_err().to_string();
    assert!(error.contains("the built-in template \"zephyr\" renders none of the 1 conversations"), "{error}");
    World::new(&tiny(), "tokenizer").lines(&[row("user"), row("system")]).expect("one is enough");
}

#[test]
fn a_template_that_loops_for_ever_ends_with_an_error() {
    let endless = "{% if messages[0].content == 'Hi' %}{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}\
                   {% endfor %}{% endif %}"; // one that always loops is refused before it sees a row
    let row = json!({"messages": talk(&[("user", "Hi"), ("assistant", "a")])});
    let error = World::with_source(endless).lines(&[row]).unwrap_err().to_string();
    assert!(
        error.contains("rows.jsonl, line 1: ") && error.contains("x.jinja: the chat template did not end"),
        "{error}"
    );
    assert!(error.contains("on a conversation of 2 turns; does it loop? Set data.chat_template to another"), "{error}");
}

#[test]
fn a_conversation_of_thousands_of_turns_is_a_row_like_any_other() {
    let turn = |at: usize| if at.is_multiple_of(2) { ("user", "And now?") } else { ("assistant", "Now it is later.") };
    let turns: Vec<(&str, &str)> = (0..6000).map(turn).collect();
    let mut world = World::new(&tiny(), "zephyr");
    world.max_length = 1 << 20;
    let (rows, report) = world.lines(&[json!({"messages": talk(&turns)})]).expect("a row");
    let spans = rows[0].labels.split(|label| *label == IGNORE).filter(|span| !span.is_empty()).count();
    assert_eq!((rows.len(), spans, report.counts.truncated), (1, 3000, 0));
}

#[test]
fn a_broken_array_or_row_is_named_by_its_place() {
    let world = World::new(&tiny(), "tokenizer");
    let complaint = |content: &str| {
        let error = world.load(&world.write("rows.json", content)).unwrap_err().to_string();
        error.split_once("rows.json").expect("the file").1.to_owned()
    };
    assert_eq!(
        complaint("[\n  {\"text\": \"a\"},\n  {\"text\": \"b\"\n]"),
        ": not a valid JSON array of rows, line 4, column 1: expected `,` or `}`"
    );
    assert!(complaint("[{\"text\": \"a\"}] x").contains("line 1, column 17: trailing characters"));
    assert!(complaint("[{\"text\": \"a\"}").contains("EOF while parsing a list"));
    assert_eq!(complaint("[{\"text\": \"a\"}, [3]]"), ", row 2: the row: expected an object, got [3]");
    assert_eq!(
        complaint(r#"[{"messages": [{"role": "user", "content": 3}]}]"#),
        ", row 1: messages[0].content: expected a string or a list of text parts, got 3"
    );
    let path = world.folder.path().join("rows.parquet");
    write_parquet(
        &path,
        vec![("messages", conversation_column(&[vec![("user", Some("a")), ("user", None)]], ["role", "content"]))],
    );
    let error = world.load(&path).unwrap_err().to_string();
    assert!(
        error
            .ends_with("rows.parquet, row 1: messages[1].content: expected a string or a list of text parts, got null"),
        "{error}"
    );
    write_parquet(&path, vec![("messages", conversation_column(&[vec![("user", Some("a"))]], ["role", "text"]))]);
    let error = world.load(&path).unwrap_err().to_string();
    assert!(error.contains("messages[0].content: expected a string or a list of text parts, got null"), "{error}");
}

#[test]
fn published_conversations_are_read() {
    let backbone = published("models/tokenizer-mistral-v1-32000");
    let files = ["sharegpt_500.json", "sharegpt_toolcall_300.json", "messages_1k.jsonl"]
        .map(|file| published("data").join(file));
    let (answers, kept) = ([1000, 957, 1100], [500, 299, 1000]);
    // Tokens and tokens with loss, as counted by transformers when it renders turn by turn.
    let vicuna = [(44_180, 16_836), (137_240, 93_606), (91_587, 34_820)];
    let chatml = [(55_960, 22_646), (153_381, 98_804), (90_620, 40_821)];
    let too_long: BTreeMap<_, _> = [(DropReason::NoLabelLeft, 1)].into(); // 6,293 Chinese characters before the only answer
    for (template, tokens) in [("vicuna", vicuna), ("chatml", chatml)] {
        let mut world = World { long_rows: LongRows::Truncate, ..World::new(&backbone, template) };
        let loaded = files.each_ref().map(|path| world.load(path).unwrap());
        assert_eq!(loaded.each_ref().map(|(_, report)| report.counts.read), [500, 300, 1000], "{template}");
        assert_eq!(loaded.each_ref().map(|(rows, _)| rows.len()), kept, "{template}");
        assert_eq!(loaded.each_ref().map(|(_, report)| &report.counts.dropped), [&[].into(), &too_long, &[].into()]);
        assert_eq!(
            loaded.each_ref().map(|(_, report)| (report.counts.tokens, report.counts.tokens_with_loss)),
            tokens,
            "{template}"
        );
        for (rows, report) in &loaded {
            let with_loss = rows.iter().flat_map(|row| &row.labels).filter(|label| **label != IGNORE).count();
            assert_eq!(
                (report.counts.tokens_with_loss, report.counts.without_targets),
                (with_loss, 0),
                "{template}: {report}"
            );
            let bos = |row: &TokenRow| row.input_ids.iter().filter(|id| **id == 1).count();
            assert!(rows.iter().all(|row| bos(row) == usize::from(template == "vicuna")), "{template}");
        }
        world.max_length = 32768;
        let spans = |path| {
            let (rows, _) = world.load(path).unwrap();
            rows.iter()
                .map(|row| row.labels.split(|label| *label == IGNORE).filter(|s| !s.is_empty()).count())
                .sum::<usize>()
        };
        assert_eq!(files.each_ref().map(|path| spans(path)), answers, "{template}: one span an answer");
        if template == "vicuna" {
            let own = World { long_rows: LongRows::Truncate, ..World::new(&backbone, "tokenizer") };
            assert_eq!(
                (own.load(&files[0]).unwrap(), own.load(&files[2]).unwrap()),
                (loaded[0].clone(), loaded[2].clone())
            );
        }
    }
    let world = World { long_rows: LongRows::Truncate, ..World::new(&backbone, "llama-2") };
    let (rows, report) = world.load(&files[1]).unwrap();
    assert_eq!((rows.len(), report.counts.dropped), (299, too_long), "tools alternate with the assistant as users do");
}

/// Of the templates of today's models: tools as indented JSON, calls with arguments, results by id, thoughts that earlier turns lose.
const WITH_TOOLS: &str = "{%- if tools is not none %}
    {{- '[tools]' }}
    {%- for tool in tools %}
        {{- tool.function | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<' + message.role + '>' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + '(' }}
        {%- for name, value in call.function.arguments | items %}
            {{- name + '=' + value | tojson + ',' }}
        {%- endfor %}
        {{- ')' }}
    {%- endfor %}
    {%- if message.role == 'tool' and message.tool_call_id | length != 9 %}
        {{- raise_exception('an id has nine characters') }}
    {%- endif %}
    {{- '</s>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}";

fn with_a_call() -> Value {
    json!([
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"z": "<é>", "a": 1}}}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "look"},
        {"role": "assistant", "content": "It is sunny."},
    ])
}

#[test]
fn tools_and_calls_go_to_the_template_and_calls_in_the_models_own_way_are_learned() {
    let world = World::with_source(WITH_TOOLS);
    let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {}}}]);
    let learned = |row: Value| {
        let (rows, _) = world.lines(&[row]).expect("a row");
        let TokenRow { input_ids, labels } = &rows[0];
        let spans = labels.chunk_by(|a, b| (*a == IGNORE) == (*b == IGNORE)).filter(|span| span[0] != IGNORE);
        let text = |ids: &[i32]| world.tokenizer.decode(ids, false).expect("known ids");
        (spans.map(text).collect::<Vec<_>>(), text(input_ids))
    };
    let text = "[tools]{\n  \"name\": \"look\",\n  \"parameters\": {}\n}<user>weather?</s>\
                <assistant>look(z=\"<é>\",a=1,)</s><tool>sunny</s><assistant>It is sunny.</s>";
    let spans = vec!["look(z=\"<é>\",a=1,)</s>".to_owned(), "It is sunny.</s>".to_owned()];
    let row = json!({"messages": with_a_call(), "tools": tools});
    assert_eq!(learned(row), (spans.clone(), text.to_owned()));
    let as_text = json!({"messages": with_a_call(), "tools": tools.to_string()});
    assert_eq!(learned(as_text), (spans.clone(), text.to_owned()), "as in columns");
    let (_, without) = learned(json!({"messages": with_a_call(), "tools": []}));
    assert_eq!(without, text.split_once("}<user>").map(|(_, rest)| format!("<user>{rest}")).unwrap());
    let wrong = world.lines(&[json!({"messages": with_a_call(), "tools": "look"})]).unwrap_err();
    let cause = std::error::Error::source(&wrong).map_or_else(|| wrong.to_string(), ToString::to_string);
    assert!(format!("{wrong} {cause}").contains("tools: expected a list of tools"), "{wrong}: {cause}");
}

#[test]
fn calls_that_a_template_leaves_out_are_text_and_counted() {
    let world = World::new(&tiny(), "chatml");
    let (learned, text) = world.learned(with_a_call());
    assert!(learned[0].contains(r#""name":"look""#) && learned[1] == "It is sunny.<|im_end|>", "{learned:?}");
    assert!(text.contains("sunny"), "{text}");
    let (_, report) = world.lines(&[json!({"messages": with_a_call()})]).expect("a row");
    assert!(report.to_string().contains("1 answer with calls as text"), "{report}");
}

#[test]
fn thoughts_that_a_template_drops_from_earlier_turns_do_not_drop_the_conversation() {
    let world = World::with_source(WITH_TOOLS);
    let talk = talk(&[
        ("user", "hi"),
        ("assistant", "<think>\nhm\n</think>\n\nHello."),
        ("user", "again"),
        ("assistant", "Yes."),
    ]);
    let (learned, text) = world.learned(talk.clone());
    assert_eq!(text, "<user>hi</s><assistant>Hello.</s><user>again</s><assistant>Yes.</s>");
    assert_eq!(learned, ["Hello.</s>", "Yes.</s>"]);
    let (_, report) = world.lines(&[json!({"messages": talk})]).expect("a row");
    assert_eq!(report.counts.shortened_turns, 1);
    assert!(report.to_string().contains("1 answer shortened by the chat template"), "{report}");
}

#[test]
fn empty_answers_are_distinguished_from_the_turns_behind_them() {
    let world = World::new(&tiny(), "chatml");
    let of = |turns: Value| world.learned(turns).0;
    let turns = |turns: &[(&str, &str)]| talk(turns);
    let between = turns(&[("user", "q"), ("assistant", ""), ("user", " "), ("assistant", "a")]);
    assert_eq!(of(between.clone()), ["<|im_end|>", "a<|im_end|>"]);
    let mut without_loss = between;
    without_loss[1]["weight"] = json!(0);
    assert_eq!(of(without_loss), ["a<|im_end|>"]);
    assert_eq!(
        of(turns(&[("user", "q"), ("assistant", "a"), ("user", ""), ("assistant", "")])),
        ["a<|im_end|>", "<|im_end|>"]
    );
}

#[test]
fn a_conversation_whose_answers_carry_no_loss_is_counted_as_such() {
    let world = World::new(&tiny(), "chatml");
    let mut silent = talk(&[("user", "q"), ("assistant", "a")]);
    silent[1]["weight"] = json!(0);
    let learned = talk(&[("user", "q"), ("assistant", "b")]);
    let rows = [json!({ "messages": silent }), json!({ "messages": learned })];
    let (_, report) = world.lines(&rows).expect("a row");
    assert_eq!(report.counts.dropped, [(DropReason::NoLearnedTurn, 1)].into());
}

/// The texts of the rows that conversations become, without special tokens.
fn said(world: &World, conversation: Value) -> (Vec<String>, LoadReport) {
    let (rows, report) = world.lines(&[json!({"messages": conversation})]).expect("rows");
    assert!(rows.iter().all(|row| row.input_ids.len() <= world.max_length));
    let text = |row: &TokenRow| world.tokenizer.decode(&row.input_ids, false).expect("known ids");
    (rows.iter().map(text).collect(), report)
}

#[test]
fn a_long_conversation_is_split_between_exchanges() {
    for template in ["vicuna", "zephyr", "llama-2", "llama-3", "chatml", "mistral", "tokenizer"] {
        for (exchanges, loss_on) in [(8, LossOn::Assistant), (8, LossOn::All), (40, LossOn::All)] {
            let mut world = World { loss_on, ..World::new(&tiny(), template) };
            let turns: Vec<(String, String)> =
                (0..exchanges).map(|n| (format!("why {n}?"), format!("so {n}!"))).collect();
            let turns: Vec<(&str, &str)> =
                turns.iter().flat_map(|(q, a)| [("user", q.as_str()), ("assistant", a.as_str())]).collect();
            world.max_length = said(&world, talk(&turns)).1.counts.tokens / 2;
            let (texts, report) = said(&world, talk(&turns));
            assert!(texts.len() > 1 && report.counts.lost_tokens == 0, "{template}: {report}");
            for text in &texts {
                let is_first =
                    |part: &str| text.find(part).is_some_and(|at| text.find("so ").is_some_and(|so| at < so));
                assert!(is_first("why "), "{template}, {loss_on:?}: it begins with a question: {text}");
                assert_eq!(text.matches("why ").count(), text.matches("so ").count(), "{template}: {text}");
                let bos = text.matches("<s>").count();
                assert!(bos <= 1 || template == "llama-2" && bos == text.matches("why ").count(), "{template}: {text}");
            }
        }
    }
}

#[test]
fn an_exchange_with_a_call_stays_whole() {
    let mut world = World::with_source(WITH_TOOLS);
    let whole = said(&world, with_a_call()).1.counts.tokens;
    let three: Vec<Value> = (0..3).flat_map(|_| with_a_call().as_array().cloned().expect("a list")).collect();
    for loss_on in [LossOn::Assistant, LossOn::All] {
        world = World { max_length: whole + whole / 2, loss_on, ..world };
        let (texts, report) = said(&world, Value::from(three.clone()));
        assert_eq!((report.counts.split, report.counts.pieces), (1, texts.len()));
        for text in &texts {
            let found =
                ["<user>weather?", "look(", "<tool>sunny", "It is sunny."].map(|part| text.matches(part).count());
            assert!(found[0] > 0 && found.iter().all(|count| *count == found[0]), "{loss_on:?}: {text}");
        }
    }
}

#[test]
fn variables_of_a_row_reach_the_template() {
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ suffix }}{% endfor %}";
    let world = World::with_source(source);
    let row = json!({"messages": talk(&[("user", "a"), ("assistant", "b")]), "chat_template_kwargs": {"suffix": "!"}});
    let (rows, _) = world.lines(&[row]).expect("a row");
    assert_eq!(world.tokenizer.decode(&rows[0].input_ids, false).expect("known ids"), "user: a!assistant: b!");
    let inputs = |thinking: Value| TemplateInputs {
        kwargs: json!({"enable_thinking": thinking}).as_object().cloned().expect("an object"),
        ..TemplateInputs::default()
    };
    let world = World::with_source(WITH_TOOLS);
    let template = world.template.as_ref().expect("a template");
    let opened =
        |thinking| template.render_with(&[Message::new("user", "a")], &inputs(thinking), true).expect("a text");
    assert_eq!(opened(json!(false)), "<user>a</s><assistant><think></think>");
    assert_eq!(opened(json!(true)), "<user>a</s><assistant>");
}
