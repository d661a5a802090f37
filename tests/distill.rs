//! Promise: `medusa distill` writes the backbone's answers as if each conversation ran alone: the files do not depend
//! on batch size, shards or interruptions, and training reads them unchanged.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Int32Type, Int64Type};
use medusa::data::prompts;
use medusa::data::tokenize::TextTokenizer;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::weights;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::data::BYTE_VOCABULARY;
use crate::decoding::World;
use crate::program::on_the_cpu;
use crate::small_run::without_checksum;

const CONTEXT: usize = 160;
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + eos_token }}{% endfor %}\
                        {% if add_generation_prompt %}{{ 'a:' }}{% endif %}";
pub(crate) const DISTILL: [&str; 7] = ["distill", "--backbone", "b", "--prompts", "p.jsonl", "--out", "out"];

/// The folder of decoding.rs with a backbone that produces varied text: large weights, several EOS, a chat template.
pub(crate) fn world() -> World {
    let world = World::new();
    let eos: Vec<usize> = (2..BYTE_VOCABULARY).step_by(11).collect();
    let config = json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": BYTE_VOCABULARY,
        "max_position_embeddings": CONTEXT, "eos_token_id": eos, "bos_token_id": 1});
    world.write("b/config.json", &config);
    world
        .write("b/tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}));
    save_backbone(&world, "b", 5);
    world
}

fn save_backbone(world: &World, folder: &str, seed: u64) {
    let config = LlamaConfig::load(&world.path(folder)).expect("this config");
    let llama = Llama::random(config, Kind::Float, Device::Cpu, seed);
    let loud = |weight: &Tensor| if weight.dim() == 2 { weight * 8.0 } else { weight.shallow_clone() };
    let weights: Vec<(String, Tensor)> = llama.weights().into_iter().map(|(name, w)| (name, loud(w))).collect();
    let borrowed: Vec<(String, &Tensor)> = weights.iter().map(|(name, w)| (name.clone(), w)).collect();
    weights::save(&world.path(folder).join("model.safetensors"), &borrowed).expect("a file of a test");
}

/// Prompts in all formats; every third has several turns.
pub(crate) fn prompts(count: usize) -> Vec<Value> {
    let word = |n: usize| "abc cab bca ".chars().cycle().skip(n % 7).take(3 + n % 11).collect::<String>();
    let prompt = |n: usize| match n % 6 {
        0 => json!({"turns": [word(n), word(n + 1), word(n + 2)], "category": format!("c{}", n % 4)}),
        1 => json!({"prompt": word(n)}),
        2 => json!({"prompt_ids": [1, 4 + n % 3, 5, 6]}),
        3 => json!({"conversations": [{"from": "system", "value": "b"}, {"from": "human", "value": word(n)},
            {"from": "gpt", "value": "never read"}, {"from": "human", "value": word(n + 1)}, {"from": "gpt", "value": "nor this"}]}),
        4 => json!({"messages": [{"role": "user", "content": word(n)}]}),
        _ => json!({"turns": [word(n)]}),
    };
    (0..count).map(prompt).collect()
}

/// A row of a shard.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: Option<String>,
    pub(crate) category: Option<String>,
    pub(crate) said: Vec<(String, String)>,
    pub(crate) input_ids: Vec<i64>,
    pub(crate) labels: Vec<i64>,
    pub(crate) finish_reason: String,
}

/// The rows of all shards of a folder by id; panics at a duplicate.
pub(crate) fn rows(folder: &Path) -> BTreeMap<i64, Row> {
    let mut rows = BTreeMap::new();
    for name in names(folder).iter().filter(|name| name.ends_with(".parquet")) {
        let file = File::open(folder.join(name)).expect("a shard");
        let reader = ParquetRecordBatchReaderBuilder::try_new(file).expect("Parquet").build().expect("Parquet");
        for batch in reader {
            let batch = batch.expect("Parquet");
            let column = |name: &str| batch.column_by_name(name).unwrap_or_else(|| panic!("no column {name}"));
            let ids = |name: &str, row: usize| -> Vec<i64> {
                let list = column(name).as_list::<i32>().value(row);
                list.as_primitive::<Int32Type>().values().iter().map(|&id| i64::from(id)).collect()
            };
            for row in 0..batch.num_rows() {
                let turns = column("conversations").as_list::<i32>().value(row);
                let part = |name: &str| turns.as_struct().column_by_name(name).expect("a field").clone();
                let text = |name: &str, turn: usize| part(name).as_string::<i32>().value(turn).to_owned();
                let category = column("category").as_string::<i32>();
                let id = column("index").as_primitive::<Int64Type>().value(row);
                let name = column("id").as_string::<i32>();
                let made = Row {
                    name: name.is_valid(row).then(|| name.value(row).to_owned()),
                    category: category.is_valid(row).then(|| category.value(row).to_owned()),
                    said: (0..turns.len()).map(|turn| (text("from", turn), text("value", turn))).collect(),
                    input_ids: ids("input_ids", row),
                    labels: ids("labels", row),
                    finish_reason: column("finish_reason").as_string::<i32>().value(row).to_owned(),
                };
                assert!(rows.insert(id, made).is_none(), "conversation {id} is there twice");
            }
        }
    }
    rows
}

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return vec![] };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Names and bytes of all files of a folder.
pub(crate) fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    names(folder).into_iter().map(|name| (name.clone(), fs::read(folder.join(&name)).expect("a file"))).collect()
}

pub(crate) fn distill(world: &World, out: &str, arguments: &[&str]) -> Value {
    let all = [&DISTILL[..6], &[out], arguments].concat();
    let lines = world.json(&all);
    assert_eq!(lines.len(), 1, "one line of JSON");
    lines[0].clone()
}

#[test]
fn at_temperature_0_each_conversation_is_what_generate_says() {
    let world = world();
    let asked = prompts(24);
    world.lines("p.jsonl", &asked);
    let flags = ["--max-new-tokens", "20", "--temperature", "0"];
    let printed = distill(&world, "out", &flags);
    assert_eq!((&printed["conversations"], &printed["shards"]), (&json!(24), &json!(1)));
    let all = rows(&world.path("out"));
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), (0..24).collect::<Vec<i64>>());
    let (mut by_eos, mut by_length, mut tokens) = (0, 0, 0);
    for (id, row) in &all {
        let one = &asked[*id as usize];
        let lines = generated(&world, one, "20");
        let ids = |line: &Value, key: &str| -> Vec<i64> { serde_json::from_value(line[key].clone()).expect("ids") };
        let last = lines.last().expect("a turn");
        let (seen, new) = (ids(last, "prompt_ids"), ids(last, "new_ids"));
        let written = [seen.clone(), new.clone()].concat();
        assert_eq!(row.input_ids[..written.len()], written, "prompt {id}");
        let end = &row.input_ids[written.len()..];
        let (reason, ends) = (row.finish_reason.as_str(), end.len());
        assert_eq!(json!(reason), last["finish_reason"]);
        assert!(matches!((reason, ends), ("eos", 1) | ("length", 0)), "{reason} {end:?}");
        assert_eq!(row.labels[seen.len()..], row.input_ids[seen.len()..], "the answer and its EOS carry loss");
        if lines.len() == 1 {
            assert!(row.labels[..seen.len()].iter().all(|&label| label == -100));
        }
        let answers: Vec<&str> =
            row.said.iter().filter(|(from, _)| from == "gpt").map(|(_, value)| value.as_str()).collect();
        assert_eq!(answers, lines.iter().map(|line| line["text"].as_str().expect("text")).collect::<Vec<_>>());
        assert_eq!(json!(row.category), one["category"]);
        by_eos += u32::from(reason == "eos");
        by_length += u32::from(reason == "length");
        tokens += lines.iter().map(|line| ids(line, "new_ids").len()).sum::<usize>();
    }
    assert!(by_eos > 3 && by_length > 3 && tokens > 100, "{by_eos} {by_length} {tokens}");
}

/// Files written with different batch sizes are equal byte by byte.
#[test]
fn the_batch_does_not_change_what_is_said() {
    let world = world();
    world.lines("p.jsonl", &prompts(40));
    let sampled = ["--max-new-tokens", "24", "--temperature", "0.7", "--top-p", "0.9", "--seed", "3"];
    for (size, out) in [("1", "one"), ("5", "five"), ("32", "many")] {
        distill(&world, out, &[&sampled[..], &["--batch-size", size]].concat());
    }
    let one = contents(&world.path("one"));
    assert_eq!(one.keys().collect::<Vec<_>>(), ["distill.json", "medusa.sha256", "shard-00000.parquet"]);
    assert!(contents(&world.path("five")) == one && contents(&world.path("many")) == one);
    distill(&world, "other", &[&sampled[..7], &["4"]].concat());
    let differ = rows(&world.path("other")).iter().filter(|(id, row)| rows(&world.path("one"))[id] != **row).count();
    assert!(differ > 30, "another seed changes {differ} of 40 conversations");
}

/// Prompts of different lengths with a beginning in common, which one conversation can take from another's cache. In bfloat16, other bits in
/// the cache would soon make other texts.
#[test]
fn what_conversations_have_in_common_does_not_change_what_is_said() {
    let world = world();
    let common: Vec<usize> = (0..70).map(|at| 4 + at * at % 50).collect();
    let prompt = |n: usize| json!({"prompt_ids": common.iter().copied().chain((0..1 + n % 23).map(|at| 4 + (n + at) % 60)).collect::<Vec<_>>()});
    world.lines("p.jsonl", &(0..40).map(prompt).collect::<Vec<_>>());
    for engine in ["auto", "tch"] {
        let sampled = ["--max-new-tokens", "40", "--temperature", "1", "--dtype", "bfloat16", "--engine", engine];
        let files = ["1", "7"].map(|size| {
            let out = format!("{engine}-{size}");
            distill(&world, &out, &[&sampled[..], &["--batch-size", size]].concat());
            contents(&world.path(&out))
        });
        assert!(files[0] == files[1], "--engine {engine}");
    }
}

/// Without a GPU, the CPU's kernels decode where they can.
#[test]
fn the_engine_is_reported_and_recorded() {
    let world = world();
    world.lines("p.jsonl", &prompts(6));
    let fastest = if cfg!(kernels) { "cpu" } else { "tch" };
    for (out, flags, engine) in [
        ("auto", &[][..], fastest),
        ("fastest", &["--engine", fastest], fastest),
        ("tch", &["--engine", "tch"], "tch"),
        ("half", &["--dtype", "float16"], "tch"),
    ] {
        let all = [&DISTILL[..6], &[out, "--max-new-tokens", "4"], flags].concat();
        let printed = world.medusa(&all).assert().success().get_output().stderr.clone();
        let printed = String::from_utf8_lossy(&printed);
        let line = format!("engine {engine}: without heads, conversations are decoded together\n");
        assert_eq!(printed.contains(&line), !flags.contains(&"--engine"), "{flags:?}: {printed}");
        let begun: Value = serde_json::from_slice(&contents(&world.path(out))["distill.json"]).expect("JSON");
        assert_eq!(begun["engine"], json!(engine), "{flags:?}");
    }
    let cuda = [&DISTILL[..], &["--engine", "cuda"]].concat();
    assert!(world.complaint(&cuda, 2).contains("--engine cuda needs --heads, and decodes one conversation at a time"));
}

/// Without a flag as many conversations as fit the memory, and no more than there are.
#[test]
fn the_batch_is_reported_and_a_flag_sets_it() {
    let world = world();
    let size_of = |out: &str, count: usize, arguments: &[&str]| {
        world.lines("p.jsonl", &prompts(count));
        let all = [&DISTILL[..6], &[out, "--max-new-tokens", "4", "--json"], arguments].concat();
        let output = world.medusa(&all).output().expect("medusa");
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        let summary: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {printed}"));
        assert_eq!(summary["batch_size"], summary["batch_size_at_end"]);
        (summary["batch_size"].as_u64().expect("a number"), printed)
    };
    let (size, printed) = size_of("many", 40, &[]);
    assert!(size == 32 && printed.contains("decoding 32 conversations together: "), "{size}: {printed}");
    assert!(printed.contains(" are free, one of at most "), "{printed}");
    assert_eq!(size_of("few", 5, &[]).0, 5);
    let (size, printed) = size_of("flag", 40, &["--batch-size", "7"]);
    assert!(size == 7 && !printed.contains("decoding 7"), "{size}: {printed}");
}

#[test]
fn the_shares_of_several_machines_are_the_whole() {
    let world = world();
    world.lines("p.jsonl", &prompts(20));
    let flags = ["--max-new-tokens", "12", "--temperature", "0.7"];
    distill(&world, "whole", &flags);
    for share in ["2/3", "1/3", "3/3"] {
        let printed = distill(&world, "shares", &[&flags[..], &["--shard", share]].concat());
        assert_eq!(printed["conversations"], json!(if share == "3/3" { 6 } else { 7 }));
    }
    assert_eq!(rows(&world.path("shares")), rows(&world.path("whole")));
    let files = names(&world.path("shares"));
    assert_eq!(files[..3], ["distill-1-of-3.json", "distill-2-of-3.json", "distill-3-of-3.json"]);
    let lists = ["medusa-1-of-3.sha256", "medusa-2-of-3.sha256", "medusa-3-of-3.sha256"];
    assert_eq!((&files[3..6], files[6].as_str()), (&lists.map(str::to_owned)[..], "shard-1-of-3-00000.parquet"));
    let inspected = |folder: &str| world.json(&["inspect", folder]).remove(0);
    let states = |folder: &str| {
        inspected(folder)["shares"]
            .as_array()
            .expect("shares")
            .iter()
            .map(|share| share["state"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!((states("shares"), inspected("shares")["kept"].clone()), (vec![json!("whole"); 3], json!(20)));
    fs::remove_file(world.path("shares/distill-1-of-3.json")).expect("a file");
    fs::remove_file(world.path("shares/shard-3-of-3-00000.parquet")).expect("a file");
    assert_eq!(states("shares"), [json!("missing"), json!("whole"), json!("unfinished")]);
    fs::copy(world.path("shares/shard-2-of-3-00000.parquet"), world.path("shares/shard-3-of-3-00000.parquet"))
        .expect("a copy");
    assert!(world.complaint(&["inspect", "shares"], 1).contains("conversation 1 is there twice: "));
    fs::copy(world.path("whole/distill.json"), world.path("shares/distill.json")).expect("a copy");
    assert!(
        world
            .complaint(&["inspect", "shares"], 1)
            .contains("number of shares: expected 1 as in shares/distill.json, got 3")
    );
    fs::remove_file(world.path("shares/distill.json")).expect("a file");
    let again = [&DISTILL[..6], &["shares", "--shard", "2/3"]].concat();
    assert!(world.complaint(&again, 1).contains("is not empty: it holds \"distill-2-of-3.json\""));
}

#[test]
fn heads_say_the_same_at_temperature_0() {
    let world = world();
    world.write("t.json", &json!([[0], [1], [0, 0], [0, 1], [0, 0, 0]]));
    world.lines("p.jsonl", &prompts(12));
    let flags = ["--max-new-tokens", "16", "--temperature", "0"];
    distill(&world, "plain", &flags);
    distill(&world, "fast", &[&flags[..], &["--heads", "h", "--tree", "t.json"]].concat());
    assert_eq!(rows(&world.path("fast")), rows(&world.path("plain")));
    let said = world.medusa(&[&DISTILL[..6], &["told", "--heads", "h", "--max-new-tokens", "4"]].concat());
    let said = { said }.assert().success().get_output().stderr.clone();
    assert!(String::from_utf8_lossy(&said).contains("each conversation has its tree of guesses, sampled without loss"));
}

/// Guesses that are not drawn are accepted where they equal what is drawn.
#[test]
fn heads_draw_the_same_by_the_same_seed() {
    let world = world();
    world.write("t.json", &json!([[0], [1], [2], [0, 0], [0, 1]]));
    world.lines("p.jsonl", &prompts(12));
    let flags = ["--max-new-tokens", "16", "--temperature", "0.7", "--top-p", "0.9"];
    distill(&world, "plain", &flags);
    let with_heads = |out: &str, more: &[&str]| {
        distill(&world, out, &[&flags[..], &["--heads", "h", "--tree", "t.json"], more].concat())
    };
    with_heads("fast", &[]);
    assert_eq!(rows(&world.path("fast")), rows(&world.path("plain")));
    with_heads("few", &["--batch-size", "5"]);
    assert_eq!(contents(&world.path("few")), contents(&world.path("fast")));
}

/// The answers of `medusa generate` to each question of a prompt; one run per question if it is a conversation.
fn generated(world: &World, prompt: &Value, max_new_tokens: &str) -> Vec<Value> {
    let generate = |prompt: &Value| {
        world.lines("one.jsonl", std::slice::from_ref(prompt));
        world.json(&["generate", "--backbone", "b", "--prompts", "one.jsonl", "--max-new-tokens", max_new_tokens])
    };
    let Some(conversation) = prompt["conversations"].as_array() else { return generate(prompt) };
    let (mut messages, mut lines) = (vec![], vec![]);
    for message in conversation.iter().filter(|message| message["from"] != "gpt") {
        messages.push(message.clone());
        if message["from"] == "human" {
            let line = generate(&json!({"conversations": messages})).remove(0);
            messages.push(json!({"from": "gpt", "value": line["text"]}));
            lines.push(line);
        }
    }
    lines
}

/// Starts the same command as a child process that can be killed.
pub(crate) fn start(world: &World, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa"));
    on_the_cpu(&mut command).args([&DISTILL[..], arguments, &["--quiet"]].concat()).current_dir(world.path(""));
    command.env("OMP_NUM_THREADS", "1").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts")
}

/// Conversations that a folder keeps, as far as its files can be read while they are written.
pub(crate) fn kept(folder: &Path) -> usize {
    let shards = names(folder).iter().filter(|name| name.starts_with("shard-")).count();
    let journal = fs::read(folder.join("journal.jsonl")).unwrap_or_default();
    let journal = String::from_utf8_lossy(&journal); // its last line may end within a character
    let id = |line: &str| line.split(&[':', ','][..]).nth(1).and_then(|id| id.parse::<usize>().ok());
    shards * 256 + journal.lines().filter_map(id).filter(|id| *id >= shards * 256).count()
}

/// Runs until `count` more conversations are kept, then calls `end`. Also returns whether the child was still running.
pub(crate) fn end_after(
    world: &World,
    arguments: &[&str],
    count: usize,
    end: impl Fn(&mut Child),
) -> (bool, Option<i32>, String) {
    let before = kept(&world.path("out"));
    let mut child = start(world, arguments);
    let mut was_running = true;
    while kept(&world.path("out")) < before + count {
        if child.try_wait().expect("a child").is_some() {
            was_running = false;
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    end(&mut child);
    let output = child.wait_with_output().expect("a child");
    (was_running, output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn killed_twenty_times_it_ends_with_the_same_files() {
    let world = world();
    world.lines("p.jsonl", &prompts(640));
    let flags = ["--max-new-tokens", "10", "--temperature", "0.7", "--batch-size", "8"];
    distill(&world, "unbroken", &flags);
    let resumed = [&flags[..], &["--resume"]].concat();
    let mut kills = 0;
    for kill in 0..20 {
        // 0: kills it during start-up, before the first conversation.
        let wait_for = [0, 3, 17, 1, 22, 9][kill % 6];
        let (was_running, _, errors) = end_after(&world, &resumed, wait_for, |child| {
            if wait_for == 0 {
                std::thread::sleep(Duration::from_millis(20 * kill as u64));
            }
            child.kill().expect("a child");
        });
        assert!(errors.is_empty(), "{errors}");
        kills += usize::from(was_running);
    }
    assert!(kills >= 18, "{kills}");
    assert!(kept(&world.path("out")) < 640, "the last kill came before the end");
    let printed = distill(&world, "out", &resumed);
    assert_eq!((&printed["conversations"], &printed["shards"]), (&json!(640), &json!(3)));
    assert!(printed["resumed"].as_u64().expect("a number") > 50);
    assert_eq!(rows(&world.path("out")).len(), 640);
    assert!(contents(&world.path("out")) == contents(&world.path("unbroken")), "the same files, byte by byte");
    let again = distill(&world, "out", &resumed);
    assert_eq!((&again["conversations"], &again["tokens"]), (&json!(640), &json!(0)));
}

#[test]
fn ctrl_c_keeps_what_is_finished_and_says_how_to_go_on() {
    let world = world();
    world.lines("p.jsonl", &prompts(200));
    let flags = ["--max-new-tokens", "30", "--temperature", "0.5"];
    distill(&world, "unbroken", &flags);
    let interrupt = |child: &mut Child| {
        let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
        assert!(sent.success());
    };
    let (was_running, status, _) = end_after(&world, &flags, 5, interrupt);
    assert!(was_running && status == Some(130), "{status:?}");
    assert!((5..200).contains(&kept(&world.path("out"))));
    distill(&world, "out", &[&flags[..], &["--resume"]].concat());
    assert!(contents(&world.path("out")) == contents(&world.path("unbroken")));
}

#[test]
fn a_folder_that_goes_ends_the_distillation() {
    let world = world();
    world.lines("p.jsonl", &prompts(600));
    let away = |_: &mut Child| fs::rename(world.path("out"), world.path("away")).expect("another name");
    let (was_running, status, errors) = end_after(&world, &["--max-new-tokens", "30"], 5, away);
    assert!(was_running && status == Some(1), "{status:?}: {errors}");
    assert!(errors.contains("out was removed, moved or replaced while conversations were written to it"), "{errors}");
    assert!(!world.path("out").exists());
}

fn tiny(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/tiny").join(name).display().to_string()
}

/// The turn and role of each token of a conversation of data/tiny, by its role tokens; `None` for the template's
/// tokens.
fn speakers(ids: &[i64]) -> Vec<Option<(usize, i64)>> {
    let (mut turn, mut role) = (0, None);
    let of = |&id: &i64| match id {
        0 => None,
        2 | 3 => {
            turn += 1;
            role = Some((turn, id));
            None
        }
        _ => role,
    };
    ids.iter().map(of).collect()
}

#[test]
fn turns_are_answered_one_after_another_and_the_backbones_own_carry_loss() {
    let world = World::new();
    let question = |text: &str| json!({"role": "user", "content": text});
    let answer = json!({"role": "assistant", "content": "not this one"});
    world.lines(
        "p.jsonl",
        &[
            json!({"messages": [question("How do I make omelette for 4 people?"), answer, question("How do I make pancakes for 2 people?")]}),
            json!({"turns": ["Sort these numbers from smallest to largest: 24, 12, 1.", "Count from 3 to 6.", "Hello"]}),
        ],
    );
    let backbone = tiny("backbone");
    let flags = ["--backbone", &backbone, "--max-new-tokens", "120", "--temperature", "0", "--dtype", "float32"];
    let tokenizer = TextTokenizer::load(Path::new(&backbone)).expect("the tiny tokenizer");
    let run = |out: &str, more: &[&str]| {
        let arguments = [&["distill", "--prompts", "p.jsonl", "--out", out][..], &flags, more].concat();
        // Waiting threads would take most of the time when tests run in parallel.
        world.medusa(&arguments).env("OMP_NUM_THREADS", "1").assert().success();
        rows(&world.path(out))
    };
    for (out, more, user_talks) in
        [("own", &["--turns", "2"][..], false), ("self", &["--turns", "3", "--self-talk"], true)]
    {
        let mut answers = 0;
        for row in run(out, more).values() {
            let roles: Vec<&str> = row.said.iter().map(|(from, _)| from.as_str()).collect();
            assert_eq!(roles, ["human", "gpt"].repeat(roles.len() / 2));
            answers += roles.len() / 2;
            assert!(!user_talks && roles.len() == 4 || user_talks && (2..=6).contains(&roles.len()), "{row:?}");
            assert!(row.said.iter().all(|(_, value)| value != "not this one"));
            for ((&id, &label), speaker) in row.input_ids.iter().zip(&row.labels).zip(speakers(&row.input_ids)) {
                let wrote = speaker.is_some_and(|(turn, role)| role == 3 || user_talks && turn > 1);
                assert_eq!(label, if wrote { id } else { -100 }, "{row:?}");
            }
            let ids: Vec<i32> = row.input_ids.iter().map(|&id| i32::try_from(id).expect("an id")).collect();
            let text: String = row
                .said
                .iter()
                .map(|(from, value)| format!("<|{}|>{value}<|end|>", if from == "gpt" { "assistant" } else { "user" }))
                .collect();
            let seen = tokenizer.decode(&ids, false).expect("text");
            let cut = if row.finish_reason == "eos" { text.as_str() } else { text.trim_end_matches("<|end|>") };
            assert_eq!(seen, format!("<|bos|>{cut}"));
        }
        assert!(answers >= 4, "{out}: {answers} answers");
    }
}

/// Random bytes are not valid text: encoding the decoded text gives other tokens.
#[test]
fn a_turn_that_is_read_again_as_other_tokens_carries_no_wrong_loss() {
    let world = world();
    let too_long_later = json!({"turns": ["a", "b".repeat(CONTEXT)], "category": "last"});
    world.lines("p.jsonl", &[prompts(60), vec![too_long_later]].concat());
    distill(&world, "out", &["--max-new-tokens", "15", "--temperature", "0.9"]);
    let mut made = rows(&world.path("out"));
    let last = made.remove(&60).expect("the last row");
    assert_eq!((last.said.len(), last.finish_reason.as_str()), (2, "length"), "{last:?}");
    let (mut several, mut labelled_before) = (0, 0);
    for (id, row) in made {
        assert_eq!(row.labels.len(), row.input_ids.len());
        let loss = |at: usize| row.labels[at] != -100;
        assert!((0..row.labels.len()).filter(|&at| loss(at)).all(|at| row.labels[at] == row.input_ids[at]));
        assert!(row.input_ids.len() <= CONTEXT && (loss(row.labels.len() - 1)), "prompt {id}: {row:?}");
        let answers = row.said.iter().filter(|(from, _)| from == "gpt").count();
        several += usize::from(answers > 1);
        let asked = [3, 1, 1, 2, 1, 1][id as usize % 6];
        assert!(answers == asked || row.finish_reason == "length", "prompt {id}: a turn that does not fit");
        let spans = (1..row.labels.len()).filter(|&at| loss(at) && !loss(at - 1)).count();
        labelled_before += usize::from(spans > 1);
    }
    assert!(several > 10 && labelled_before > 5, "{several} {labelled_before}");
}

#[test]
fn all_user_turns_of_published_conversations_are_asked() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let counts = |file: &str| {
        let file = prompts::PromptFile::open(&root.join(file));
        let dialogues = file.and_then(|file| file.dialogues()).expect("readable prompts");
        let turns = |dialogue: &prompts::Dialogue| match &dialogue.questions {
            prompts::Questions::Turns { user, .. } => user.len(),
            other => panic!("{other:?}"),
        };
        (dialogues.len(), dialogues.iter().map(turns).sum::<usize>())
    };
    assert_eq!(counts("tests/fixtures/data/sharegpt_500.json"), (500, 1000));
    assert_eq!(counts("tests/fixtures/data/sharegpt_toolcall_300.json"), (300, 746));
    assert_eq!(counts("tests/fixtures/data/messages_1k.jsonl"), (1000, 1100));
    assert_eq!(counts("data/chat/mt_bench.jsonl"), (80, 160));
}

#[test]
fn a_backbone_without_a_template_takes_one() {
    let world = world();
    world.lines("p.jsonl", &prompts(5));
    distill(&world, "own", &["--max-new-tokens", "6"]);
    let template = |out: &mut std::io::BufWriter<File>| std::io::Write::write_all(out, TEMPLATE.as_bytes());
    medusa::files::write_atomic(&world.path("t.jinja"), template).expect("a file of a test");
    world.write("b/tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "</s>"}));
    distill(&world, "given", &["--max-new-tokens", "6", "--chat-template", "t.jinja"]);
    assert_eq!(rows(&world.path("given")), rows(&world.path("own")));
    world.lines("p.jsonl", &[json!({"turns": ["a"], "chat_template_kwargs": {"enable_thinking": false}})]);
    let unread = [&DISTILL[..6], &["unread", "--max-new-tokens", "1", "--chat-template", "t.jinja"]].concat();
    let stderr = world.medusa(&unread).assert().success().get_output().stderr.clone();
    let expected = "the chat template does not read: `chat_template_kwargs.enable_thinking` in 1 row";
    assert!(String::from_utf8_lossy(&stderr).contains(expected));
    let other = ["given", "--max-new-tokens", "6", "--chat-template", "chatml", "--resume"];
    let error = world.complaint(&[&DISTILL[..6], &other].concat(), 1);
    assert!(error.contains("chat_template_sha256: expected"), "{error}");
}

#[test]
fn the_shards_train_as_they_are() {
    let world = world();
    world.lines("p.jsonl", &prompts(30));
    distill(&world, "out", &["--max-new-tokens", "12"]);
    let recipe = r#"[backbone]
path = "b"
dtype = "float32"
[heads]
medusa_num_heads = 2
medusa_num_layers = 1
[stage.medusa1]
[data]
train = ["out/*.parquet"]
max_length = 64
long_rows = "truncate"
[optimizer]
learning_rate = 1e-3
[schedule]
name = "constant"
[train]
output_dir = "run"
epochs = 1
micro_batch_size = 2
"#;
    medusa::files::write_atomic(&world.path("r.toml"), |out| std::io::Write::write_all(out, recipe.as_bytes()))
        .expect("a file of a test");
    let printed = world.medusa(&["train", "r.toml"]).assert().success().get_output().stderr.clone();
    let printed = String::from_utf8_lossy(&printed);
    assert!(printed.contains("30 rows"), "{printed}");
    assert!(world.path("run/final/heads.safetensors").exists());
}

#[test]
fn shards_and_distill_json_say_what_made_them() {
    let world = world();
    world.lines("p.jsonl", &prompts(3));
    distill(&world, "out", &["--max-new-tokens", "5", "--top-p", "0.8"]);
    let begun: Value = serde_json::from_slice(&contents(&world.path("out"))["distill.json"]).expect("JSON");
    let file = File::open(world.path("out/shard-00000.parquet")).expect("a shard");
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).expect("Parquet");
    let metadata = reader.metadata().file_metadata().key_value_metadata().expect("metadata").clone();
    let value = |key: &str| {
        let found = metadata.iter().find(|pair| pair.key == format!("distill.{key}"));
        found.and_then(|pair| pair.value.clone()).unwrap_or_else(|| panic!("no {key}"))
    };
    for key in ["backbone", "backbone_sha256", "prompts_sha256", "program_version"] {
        assert_eq!(json!(value(key)), begun[key]);
    }
    assert_eq!((value("temperature"), value("top_p"), value("seed")), ("0.3".into(), "0.8".into(), "42".into()));
    assert_eq!(json!(medusa::files::sha256(&world.path("p.jsonl")).expect("a file")), begun["prompts_sha256"]);
}

#[test]
fn a_folder_is_gone_on_with_only_as_it_was_begun() {
    let world = world();
    world.lines("p.jsonl", &prompts(10));
    distill(&world, "out", &["--max-new-tokens", "5"]);
    let before = contents(&world.path("out"));
    let complaint = |arguments: &[&str]| world.complaint(&[&DISTILL[..], arguments].concat(), 1);
    let occupied = complaint(&["--max-new-tokens", "5"]);
    assert!(occupied.contains("out is not empty: it holds") && occupied.contains("--resume"), "{occupied}");
    let resume = |arguments: &[&str]| complaint(&[&["--resume", "--max-new-tokens", "5"], arguments].concat());
    assert!(complaint(&["--resume"]).contains("out/distill.json: max_new_tokens: expected 5, got 1024"));
    assert!(resume(&["--temperature", "0.5"]).contains("temperature: expected 0.3, got 0.5"));
    assert!(resume(&["--seed", "7"]).contains("seed: expected 42, got 7"));
    assert!(resume(&["--max-context", "150"]).contains("max_context: expected null, got 150"));
    assert!(resume(&["--self-talk", "--turns", "2"]).contains("p.jsonl, line 2: --self-talk needs conversations"));
    assert!(resume(&["--shard", "1/2"]).contains("out is not empty"));
    let sealed = fs::read_to_string(world.path("out/distill.json")).expect("a file");
    let begun = without_checksum(&sealed);
    let old = begun.replace("  \"shard_format\": 3,\n", "");
    assert_ne!(old, begun);
    let write = |text: &str| {
        let written = medusa::files::write_atomic(&world.path("out/distill.json"), |out| {
            std::io::Write::write_all(out, text.as_bytes())
        });
        written.expect("a file of a test");
    };
    write(&old);
    assert!(resume(&[]).contains("shard_format: expected null, got 3"), "its shards have other columns");
    let engine = if cfg!(kernels) { "cpu" } else { "tch" };
    write(&begun.replace(&format!("\"engine\": \"{engine}\""), "\"engine\": \"cuda\""));
    assert!(resume(&[]).contains(&format!("engine: expected \"cuda\", got \"{engine}\"")));
    write(&sealed);
    world.lines("p.jsonl", &prompts(11));
    assert!(resume(&[]).contains("prompts_sha256: expected \""));
    world.lines("p.jsonl", &prompts(10));
    save_backbone(&world, "b", 6);
    assert!(resume(&[]).contains("backbone_sha256: expected \""));
    assert!(contents(&world.path("out")) == before, "nothing is lost");
}

#[test]
fn a_prompt_that_does_not_fit_is_skipped_and_the_others_keep_their_index() {
    let world = world();
    let named = |id: &str, prompt: &str| json!({"prompt": prompt, "id": id});
    let long = json!({"prompt_ids": vec![5; CONTEXT], "id": "long"});
    world.lines("p.jsonl", &[named("x", "a"), json!({"prompt": "b", "question_id": 7}), named("z", "c")]);
    distill(&world, "all", &["--max-new-tokens", "4", "--temperature", "0.9"]);
    let all = rows(&world.path("all"));
    world.lines("p.jsonl", &[named("x", "a"), long, named("z", "c")]);
    let some = [&DISTILL[..5], &["--out", "some", "--max-new-tokens", "4", "--temperature", "0.9", "--json"]].concat();
    let output = world.medusa(&some).assert().success().get_output().clone();
    let printed = String::from_utf8_lossy(&output.stderr);
    let summary: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let mut begun: Value = serde_json::from_slice(&std::fs::read(world.path("some/distill.json")).unwrap()).unwrap();
    assert_eq!([&summary["too_long"], &begun["too_long"]], [1, 1].map(|one| json!(one)).each_ref());
    assert!(
        printed.contains("skipping 1 of 3 prompts") && printed.contains("p.jsonl, line 2, 160 tokens"),
        "{printed}"
    );
    let mut expected = all;
    assert_eq!(expected.remove(&1).expect("the second row").name.as_deref(), Some("7"));
    assert_eq!(rows(&world.path("some")), expected, "draws depend on the index in the file");
    for key in ["too_long", "engine", "checksum"] {
        begun.as_object_mut().expect("an object").remove(key); // folders of earlier versions
    }
    world.write("some/distill.json", &begun);
    world.medusa(&[&some[..], &["--resume"]].concat()).assert().success();
}

#[test]
fn what_cannot_be_distilled_is_one_clear_error_and_no_folder() {
    let world = world();
    let complaint = |prompts: &[Value], arguments: &[&str], status: i32| {
        world.lines("p.jsonl", prompts);
        let printed = world.complaint(&[&DISTILL[..], arguments].concat(), status);
        assert!(!world.path("out").exists(), "{printed}");
        assert!(!printed.contains("panicked"), "{printed}");
        printed
    };
    let good = json!({"prompt": "a"});
    let long = json!({"prompt_ids": vec![5; CONTEXT]});
    let printed = complaint(&[good.clone(), long.clone()], &["--strict"], 1);
    let expected = "cannot decode 1 of 2 prompts: too long for the context of 160 tokens, which needs room for a new token (the first: \
                    p.jsonl, line 2, 160 tokens)";
    assert!(printed.contains(expected), "{printed}");
    assert!(complaint(&[long.clone(), long], &[], 1).contains("cannot decode 2 of 2 prompts"));
    let late = json!({"turns": ["a", "a".repeat(4 * CONTEXT)]});
    let unknown = complaint(&[good.clone(), json!({"prompt_ids": [300]})], &[], 1);
    assert!(unknown.contains("p.jsonl, line 2") && unknown.contains("expected a token id from 0 to 263"), "{unknown}");
    let silent = json!({"messages": [{"role": "assistant", "content": "a"}]});
    assert!(complaint(&[silent], &[], 1).contains("p.jsonl, line 1: messages: expected a turn of the user, got none"));
    assert!(
        complaint(std::slice::from_ref(&good), &["--self-talk"], 1).contains("line 1: --self-talk needs conversations")
    );
    for (arguments, fact) in [
        (&["--shard", "3/2"][..], "expected i/n with i from 1 to n"),
        (&["--top-p", "0"], "above 0 and at most 1"),
        (&["--temperature", "-1"], "at least 0"),
        (&["--batch-size", "0"], "--batch-size"),
        (&["--max-new-tokens", "0"], "--max-new-tokens"),
        (&["--tree", "t.json"], "--heads"),
    ] {
        let printed = complaint(std::slice::from_ref(&good), arguments, 2);
        assert!(printed.contains(fact), "{arguments:?}: {printed}");
    }
    fs::remove_file(world.path("b/tokenizer_config.json")).expect("a file of a test");
    let no_template = complaint(&[good.clone(), late], &[], 2);
    assert!(no_template.contains("prompt 2 is a conversation, and b has no chat template"), "{no_template}");
    fs::remove_file(world.path("p.jsonl")).expect("a file of a test");
    assert!(world.complaint(&DISTILL, 2).contains("--prompts p.jsonl does not exist"));
}
