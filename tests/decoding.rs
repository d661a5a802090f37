//! Promise: `medusa generate` and `bench` print their documented output, greedy text with heads equals the text
//! without, and input that cannot be decoded gives one clear error.

use std::io::Write as _;
use std::path::PathBuf;

use assert_cmd::Command;
use medusa::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
use medusa::files::write_atomic;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::weights;
use serde_json::{Value, json};
use tch::{Device, Kind};
use tempfile::TempDir;

use crate::data::{BYTE_VOCABULARY, byte_tokenizer};

use crate::program;
use crate::published::published;

const HIDDEN: i64 = 32;
const CONTEXT: usize = 64;

/// A folder with a tiny random backbone (`b`), heads for it (`h`) and prompts (`p.jsonl`).
pub(crate) struct World {
    folder: TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let world = Self { folder: tempfile::tempdir().expect("a folder") };
        std::fs::create_dir(world.path("b")).expect("a folder");
        world.write(
            "b/config.json",
            &json!({
            "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": BYTE_VOCABULARY,
            "max_position_embeddings": CONTEXT, "eos_token_id": null, "bos_token_id": 1}),
        );
        let config = LlamaConfig::load(&world.path("b")).expect("this config");
        let llama = Llama::random(config, Kind::Float, Device::Cpu, 5);
        weights::save(&world.path("b/model.safetensors"), &llama.weights()).expect("a file of a test");
        byte_tokenizer(&world.path("b"));
        world.heads("h", 3, HIDDEN);
        world.write("p.jsonl", &json!({"prompt_ids": [1, 4, 5, 6]}));
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: &Value) {
        write_atomic(&self.path(name), |out| writeln!(out, "{content}")).expect("a file of a test");
    }

    pub(crate) fn lines(&self, name: &str, lines: &[Value]) {
        let write =
            |out: &mut std::io::BufWriter<std::fs::File>| lines.iter().try_for_each(|line| writeln!(out, "{line}"));
        write_atomic(&self.path(name), write).expect("a file of a test");
    }

    fn heads(&self, name: &str, medusa_num_heads: usize, hidden_size: i64) {
        self.heads_of(HeadsArchitecture::Medusa, name, medusa_num_heads, hidden_size);
    }

    fn heads_of(&self, architecture: HeadsArchitecture, name: &str, medusa_num_heads: usize, hidden_size: i64) {
        let shape = HeadsShape {
            architecture,
            medusa_num_heads,
            medusa_num_layers: 1,
            hidden_size,
            vocab_size: BYTE_VOCABULARY as i64,
            ..HeadsShape::default()
        };
        std::fs::create_dir(self.path(name)).expect("a folder");
        Heads::random(shape, Kind::Float, Device::Cpu, 6).save(&self.path(name)).expect("a file of a test");
    }

    pub(crate) fn medusa(&self, arguments: &[&str]) -> Command {
        let mut command = program::medusa(arguments);
        command.current_dir(self.folder.path());
        command
    }

    /// stdout of a successful run, one JSON value per line.
    pub(crate) fn json(&self, arguments: &[&str]) -> Vec<Value> {
        let output = self.medusa(arguments).arg("--json").assert().success().get_output().clone();
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        text.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line, and nothing else")).collect()
    }

    /// stderr of a run that fails with `status`.
    pub(crate) fn complaint(&self, arguments: &[&str], status: i32) -> String {
        let output = self.medusa(arguments).assert().code(status).get_output().clone();
        assert!(output.stdout.is_empty(), "a failed run has no result");
        String::from_utf8(output.stderr).expect("UTF-8")
    }
}

const PLAIN: [&str; 5] = ["generate", "--backbone", "b", "--prompts", "p.jsonl"];
const MEDUSA: [&str; 9] = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--heads", "h", "--tree", "t.json"];

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn weights_in_float16_decode_in_a_faster_dtype_unless_float16_is_asked_for() {
    let world = World::new();
    let llama = Llama::load(&world.path("b"), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    let halves: Vec<_> = llama.weights().into_iter().map(|(name, weight)| (name, weight.to_kind(Kind::Half))).collect();
    let halves: Vec<_> = halves.iter().map(|(name, weight)| (name.clone(), weight)).collect();
    weights::save(&world.path("b/model.safetensors"), &halves).expect("a file of a test");
    let expected = if cfg!(kernels) { ("bfloat16", "cpu") } else { ("float32", "tch") };
    let run = |more: &[&str]| {
        let arguments = ["bench", "--backbone", "b", "--heads", "h", "--prompts", "p.jsonl", "--max-new-tokens", "4"];
        let output =
            world.medusa(&[&arguments[..], &["--json"], more].concat()).assert().success().get_output().clone();
        let result: Value = serde_json::from_slice(&output.stdout).expect("one object");
        let name = |key: &str| result[key].as_str().expect("a name").to_owned();
        (String::from_utf8(output.stderr).expect("UTF-8"), name("dtype"), name("engine"))
    };
    let (said, dtype, engine) = run(&[]);
    assert_eq!((dtype.as_str(), engine.as_str()), expected);
    let why = if cfg!(kernels) { "; --dtype float32 is more exact" } else { ", which is faster on a CPU" };
    assert!(said.contains(&format!("float16 weights: computing in {dtype}{why}\n")), "{said}");
    world.write("h/config.json", &json!({"backbone_dtype": "float32"}));
    let (said, dtype, _) = run(&[]);
    assert_eq!(dtype, "float32");
    assert!(said.contains("float16 weights: computing in float32, as in the heads' training\n"), "{said}");
    world.write("h/config.json", &json!({"backbone_dtype": "float64"}));
    assert_eq!(run(&[]).1, "float32", "nothing decodes in float64");
    let (said, dtype, engine) = run(&["--dtype", "float16"]);
    assert_eq!((dtype.as_str(), engine.as_str()), ("float16", "tch"));
    assert!(!said.contains("computing in"), "{said}");
}

/// Draws depend on (seed, prompt, turn, sample).
#[test]
fn equal_prompts_and_samples_of_one_prompt_are_drawn_apart() {
    let world = World::new();
    let prompt = json!({"prompt_ids": [1, 4, 5, 6]});
    world.lines("p.jsonl", &[prompt.clone(), prompt]);
    let drawn = |seed: &str| {
        let flags = ["--max-new-tokens", "20", "--temperature", "1", "--num-samples", "2", "--seed", seed];
        let lines = world.json(&[&PLAIN[..], &flags].concat());
        let number = |line: &Value, key: &str| line[key].as_u64().expect("a number");
        let places: Vec<_> = lines.iter().map(|line| (number(line, "index"), number(line, "sample"))).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1)]);
        lines.iter().map(|line| line["new_ids"].to_string()).collect::<Vec<_>>()
    };
    let texts = drawn("3");
    let different: std::collections::HashSet<&String> = texts.iter().collect();
    assert_eq!(different.len(), 4, "{texts:?}");
    assert_eq!(drawn("3"), texts, "the same seed draws the same");
    assert!(drawn("4").iter().all(|text| !texts.contains(text)), "another seed draws others");
}

/// The backbone drafts for itself: every guess is right.
#[test]
fn a_draft_model_makes_the_plain_text_in_fewer_steps() {
    let world = World::new();
    world.lines("p.jsonl", &[json!({"prompt_ids": [1, 4, 5, 6, 4, 5]}), json!({"prompt": "abc abc"})]);
    let flags = ["--dtype", "float32", "--draft-dtype", "float32", "--max-new-tokens", "21"];
    let run = |more: &[&str]| world.json(&[&PLAIN[..], &flags, more].concat());
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    for (more, steps) in [(&[][..], 5), (&["--draft-tokens", "1"], 11), (&["--tree", "t.json"], 7)] {
        let fast = run(&[&["--drafter", "model:b"], more].concat());
        for (plain, fast) in run(&[]).iter().zip(&fast) {
            assert_eq!((&fast["new_ids"], &fast["steps"]), (&plain["new_ids"], &json!(steps)), "{more:?}");
        }
    }
    let drawn = ["--drafter", "model:b", "--temperature", "1", "--acceptance", "rejection"];
    assert_eq!(run(&drawn)[0]["steps"], json!(5));
    let bench = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--drafter", "model:b", "--repeats", "1"];
    let result = &world.json(&[&bench[..], &flags].concat())[0];
    assert_eq!((&result["drafter"], &result["identical"]), (&json!("model"), &json!(true)));
    let compared = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--repeats", "1", "--heads", "h"];
    let compared = [&compared[..], &["--drafters", "medusa,model:b", "--tree", "dynamic:5"], &flags].concat();
    let nodes: Vec<Value> = world.json(&compared).iter().map(|line| line["tree_nodes"].clone()).collect();
    assert_eq!(nodes, [5, 5], "dynamic:N is for heads and draft models");
    for without in [&["--draft-tokens", "3"][..], &["--draft-tokens", "3", "--drafter", "ngram"]] {
        let complaint = world.complaint(&[&PLAIN[..], without].concat(), 2);
        assert!(complaint.contains("needs --drafter model:PATH"), "{complaint}");
    }
    let both = ["--drafter", "model:b", "--tree", "t.json", "--draft-tokens", "3"];
    let complaint = world.complaint(&[&PLAIN[..], &both].concat(), 2);
    assert!(complaint.contains("drop one of them"), "{complaint}");
    let many = world.complaint(&[&PLAIN[..], &["--drafter", "model:b", "--draft-tokens", "1025"]].concat(), 2);
    assert!(many.contains("--draft-tokens 1025: expected at most 1024"), "{many}");
}

#[test]
fn a_draft_model_with_a_shorter_context_is_reported() {
    let world = World::new();
    std::fs::create_dir(world.path("short")).expect("a folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(world.path("b").join(name), world.path("short").join(name)).expect("a file");
    }
    let config = std::fs::read(world.path("short/config.json")).expect("a file");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["max_position_embeddings"] = json!(16);
    world.write("short/config.json", &config);
    let drafting = |more: &[&str]| {
        let flags = ["--drafter", "model:short", "--dtype", "float32", "--json"];
        let output = world.medusa(&[&PLAIN[..], &flags, more].concat()).assert().success().get_output().clone();
        let text: Value = serde_json::from_slice(&output.stdout).expect("one text");
        (text, String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let (text, said) = drafting(&[]);
    assert!(said.contains("draft model short: its context of 16 tokens is shorter than the backbone's 64"), "{said}");
    let plain = world.json(&[&PLAIN[..], &["--dtype", "float32"]].concat());
    assert_eq!(text["new_ids"], plain[0]["new_ids"]);
    assert!(!drafting(&["--max-context", "16"]).1.contains("is shorter"));
}

#[test]
fn a_draft_model_with_other_tokens_is_refused() {
    let world = World::new();
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/data/tiny/backbone");
    let complaint = world.complaint(&[&PLAIN[..], &["--drafter", &format!("model:{tiny}")]].concat(), 1);
    for words in ["b/tokenizer.json", "data/tiny/backbone/tokenizer.json", "have different vocabularies: token 0 is"] {
        assert!(complaint.contains(words), "{complaint}");
    }
}

#[test]
fn prompt_lookup_needs_no_heads_and_makes_the_plain_text() {
    let world = World::new();
    world.lines("p.jsonl", &[json!({"prompt_ids": [1, 4, 5, 6, 4, 5]}), json!({"prompt": "abc abc"})]);
    let ngram = ["--drafter", "ngram", "--max-new-tokens", "40"];
    let (plain, fast) = (world.json(&[&PLAIN[..], &ngram[2..]].concat()), world.json(&[&PLAIN[..], &ngram].concat()));
    for (plain, fast) in plain.iter().zip(&fast) {
        assert_eq!(fast["new_ids"], plain["new_ids"]);
    }
    let bench = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--drafter", "ngram", "--repeats", "1"];
    let result = &world.json(&bench)[0];
    assert_eq!((&result["drafter"], &result["identical"]), (&json!("ngram"), &json!(true)));
    let complaint = world.complaint(&[&PLAIN[..], &["--drafter", "medusa"]].concat(), 2);
    assert!(complaint.contains("--drafter medusa needs --heads"), "{complaint}");
    world.write("c.json", &json!({}));
    // fails before the backbone is read, which does not exist
    let bench = ["bench", "--backbone", "nowhere", "--prompts", "p.jsonl", "--drafter", "ngram"];
    let sweep = world.complaint(&[&bench[..], &["--sweep", "nodes=1,4", "--calibration", "c.json"]].concat(), 2);
    assert!(sweep.contains("--drafter ngram makes its own at every step"), "{sweep}");
    let forced = world.complaint(&[&bench[..], &["--force-acceptance-rate", "2"]].concat(), 2);
    assert!(forced.contains("--drafter ngram makes a new tree at every step"), "{forced}");
    world.write("t.json", &json!([[0]]));
    let complaint = world.complaint(&[&MEDUSA[..], &["--drafter", "ngram"]].concat(), 2);
    assert!(complaint.contains("drop --tree"), "{complaint}");
}

#[test]
fn drafters_without_training_and_joined_ones_make_the_plain_text() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    let short = ["--max-new-tokens", "30"];
    let plain = &world.json(&[&PLAIN[..], &short].concat())[0];
    let heads = ["--heads", "h", "--tree", "t.json"];
    // Beside the 3 nodes of the heads, as many as the machine's step times allow.
    for (drafter, heads, nodes) in [
        ("recycling", &["--tree", "dynamic:80"][..], 80..=80),
        ("lookahead", &["--tree", "dynamic:28"], 28..=28),
        ("ngram+lookahead", &["--tree", "dynamic:5"], 5..=5),
        ("medusa+ngram", &heads, 3..=3 + 12),
        ("medusa+ngram", &["--heads", "h", "--tree", "dynamic:7"], 7..=7),
        ("ngram+medusa+recycling", &heads, 3..=3 + 12 + 80),
    ] {
        let with = [&PLAIN[..], &short, heads, &["--drafter", drafter]].concat();
        assert_eq!(world.json(&with)[0]["new_ids"], plain["new_ids"], "{drafter}");
        let bench = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--repeats", "1", "--drafter", drafter];
        let result = &world.json(&[&bench[..], &short, heads].concat())[0];
        assert_eq!([&result["drafter"], &result["identical"]], [&json!(drafter), &json!(true)]);
        assert!(nodes.contains(&result["tree_nodes"].as_u64().expect("a number")), "{drafter}: {result}");
    }
}

/// The numbers depend on the machine, the tokens do not.
#[test]
fn drafters_without_weights_are_sized_by_times_that_are_measured_once() {
    let world = World::new();
    let short = ["--max-new-tokens", "30"];
    let plain = &world.json(&[&PLAIN[..], &short].concat())[0];
    let cache = world.path("cache");
    let files = || std::fs::read_dir(cache.join("latency")).map_or(0, |files| files.count());
    for (drafter, most) in [("recycling", 80), ("lookahead", 28), ("ngram", 12), ("ngram+recycling", 80)] {
        let bench =
            ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--repeats", "1", "--json", "--drafter", drafter];
        let output = world.medusa(&[&bench[..], &short].concat()).env("MEDUSA_CACHE", &cache).assert().success();
        let [out, said] =
            [&output.get_output().stdout, &output.get_output().stderr].map(|of| String::from_utf8_lossy(of));
        let result: Value = serde_json::from_str(&out).expect("JSON");
        let nodes = result["tree_nodes"].as_u64().expect("a number");
        assert!(result["identical"] == true && nodes <= most, "{drafter}: {result}");
        let chosen = match nodes {
            0 => "no guesses, because".to_owned(),
            1 => "a tree of at most 1 node, because".to_owned(),
            nodes => format!("a tree of at most {nodes} nodes, because"),
        };
        assert!(said.contains(&format!("--drafter {drafter}: {chosen} on this machine a step of ")), "{said}");
        assert!(files() <= 1, "measured again");
        let mut generate = world.medusa(&[&PLAIN[..], &short, &["--drafter", drafter, "--json", "--quiet"]].concat());
        let output = generate.env("MEDUSA_CACHE", &cache).assert().success().get_output().clone();
        let text: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((&text["new_ids"], output.stderr.is_empty()), (&plain["new_ids"], true), "{drafter}");
    }
}

#[test]
fn sequential_heads_and_trees_chosen_at_each_step_change_no_token() {
    let world = World::new();
    world.heads_of(HeadsArchitecture::Hydra, "s", 4, HIDDEN);
    world.write("t.json", &json!([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]));
    world.write("d.json", &json!({"dynamic": {"nodes": 9, "depth": 2, "top_k": 4}, "nodes": 9}));
    let short = ["--max-new-tokens", "20"];
    let plain = &world.json(&[&PLAIN[..], &short].concat())[0];
    for (heads, tree) in [("h", "dynamic:8"), ("h", "d.json"), ("s", "dynamic:8"), ("s", "d.json"), ("s", "t.json")] {
        let with = [&PLAIN[..], &short, &["--heads", heads, "--tree", tree]].concat();
        assert_eq!(world.json(&with)[0]["new_ids"], plain["new_ids"], "{heads} {tree}");
    }
    let bench =
        ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--repeats", "1", "--heads", "s", "--tree", "dynamic:8"];
    let result = &world.json(&[&bench[..], &short].concat())[0];
    let found = [&result["drafter"], &result["identical"], &result["tree_nodes"]];
    assert_eq!(found, [&json!("hydra"), &json!(true), &json!(8)]);
    let inspected = &world.json(&["inspect", "d.json"])[0];
    assert!(inspected.to_string().contains(r#""dynamic":{"nodes":9,"depth":2,"top_k":4}"#), "{inspected}");
    let with = |tree: &str, status| world.complaint(&[&PLAIN[..], &["--heads", "h", "--tree", tree]].concat(), status);
    for bad in ["dynamic:0", "dynamic:1025", "dynamic:x"] {
        assert!(with(bad, 2).contains(&format!("--tree {bad}: expected a number of nodes, from 1 to 1024")));
    }
    world.write("d.json", &json!({"dynamic": {"nodes": 9, "depth": 4, "top_k": 4}}));
    assert!(with("d.json", 1).contains("chosen at each step has 4 levels; expected 1 to 3 for these heads"));
}

#[test]
fn plain_and_medusa_lines_have_the_same_keys_and_the_same_tokens() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]));
    world
        .lines("p.jsonl", &[json!({"prompt_ids": [1, 4, 5, 6]}), json!({"prompt": "abc cab"}), json!({"prompt": "b"})]);
    let plain = world.json(&[&PLAIN[..], &["--max-new-tokens", "20"]].concat());
    let fast = world.json(&[&MEDUSA[..], &["--max-new-tokens", "20"]].concat());
    assert_eq!((plain.len(), fast.len()), (3, 3));
    for (plain, fast) in plain.iter().zip(&fast) {
        let expected = [
            "prompt_ids",
            "new_ids",
            "text",
            "steps",
            "tokens_per_step",
            "accept_lengths",
            "seconds",
            "finish_reason",
            "engine",
            "index",
            "sample",
        ];
        assert_eq!((keys(plain), keys(fast)), (expected.to_vec(), expected.to_vec()));
        for key in ["prompt_ids", "new_ids", "text", "finish_reason"] {
            assert_eq!(plain[key], fast[key], "{key}");
        }
        assert_eq!((&plain["finish_reason"], &plain["steps"]), (&json!("length"), &json!(20)));
        let lengths: Vec<u64> = serde_json::from_value(fast["accept_lengths"].clone()).unwrap();
        assert_eq!((lengths.iter().sum::<u64>(), json!(lengths.len())), (20, fast["steps"].clone()));
    }
}

#[test]
fn nothing_after_the_first_eos_is_printed_or_counted() {
    let world = World::new();
    let endless = world.json(&[&PLAIN[..], &["--max-new-tokens", "30"]].concat());
    let ids: Vec<i64> = serde_json::from_value(endless[0]["new_ids"].clone()).unwrap();
    let eos = ids[ids.len() / 2];
    let mut config: Value = serde_json::from_slice(&std::fs::read(world.path("b/config.json")).unwrap()).unwrap();
    config["eos_token_id"] = json!([99, eos]);
    world.write("b/config.json", &config);
    world.write("t.json", &json!([[0], [0, 0], [1]]));
    let until_eos = &ids[..ids.iter().position(|&id| id == eos).unwrap()];
    for arguments in [&PLAIN[..], &MEDUSA[..]] {
        let line = world.json(&[arguments, &["--max-new-tokens", "30"]].concat()).remove(0);
        assert_eq!((&line["new_ids"], &line["finish_reason"]), (&json!(until_eos), &json!("eos")));
    }
}

#[test]
fn text_for_people_is_the_answer_on_stdout_and_the_rest_on_stderr() {
    let world = World::new();
    let line = world.json(&["generate", "--backbone", "b", "--prompt", "abc", "--max-new-tokens", "12"]).remove(0);
    let output =
        world.medusa(&["generate", "--backbone", "b", "--prompt", "abc", "--max-new-tokens", "12"]).output().unwrap();
    let streamed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(streamed.trim(), line["text"].as_str().unwrap().trim());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("[12 tokens in 12 steps, 1.00 a step, "), "{said}");
}

#[test]
fn turns_are_asked_one_after_another_with_the_answers_in_the_context() {
    let world = World::new();
    world.write("p.jsonl", &json!({"question_id": 1, "category": "c", "turns": ["a", "b"]}));
    let refused = world.complaint(&PLAIN, 2);
    assert!(refused.contains("prompt 1 is a conversation, and b has no chat template"), "{refused}");
    let template = "{% for m in messages %}{{ m.content }}{{ 'c' }}{% endfor %}";
    world
        .write("b/tokenizer_config.json", &json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}));
    let turns = world.json(&[&PLAIN[..], &["--max-new-tokens", "3"]].concat());
    assert_eq!(turns.len(), 2);
    let length = |turn: usize| turns[turn]["prompt_ids"].as_array().unwrap().len();
    assert!(length(1) > length(0) + 1, "the second turn's context has the first answer: {turns:?}");
}

#[test]
fn typical_acceptance_and_sampling_follow_the_seed() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    for arguments in [&PLAIN[..], &MEDUSA[..]] {
        let run = |seed: &str| {
            let flags =
                ["--temperature", "1.5", "--max-new-tokens", "16", "--posterior-threshold", "0.001", "--seed", seed];
            world.json(&[arguments, &flags].concat()).remove(0)["new_ids"].clone()
        };
        assert_eq!(run("1"), run("1"));
        if arguments == PLAIN {
            assert_ne!(run("1"), run("2"));
        }
    }
}

#[test]
fn rejection_is_plain_decodings_own_text_and_a_penalty_changes_both_alike() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]));
    let ids = |arguments: &[&str], flags: &[&str]| {
        world.json(&[arguments, &["--max-new-tokens", "24"], flags].concat()).remove(0)["new_ids"].clone()
    };
    for flags in [
        &["--temperature", "1", "--acceptance", "rejection"][..],
        &["--temperature", "0.7", "--top-p", "0.5", "--repetition-penalty", "1.3", "--acceptance", "rejection"],
        &["--repetition-penalty", "1.5"],
        &["--frequency-penalty", "0.7", "--presence-penalty", "-0.5"],
        &["--acceptance", "nucleus"], // temperature 0 is greedy
    ] {
        assert_eq!(ids(&PLAIN, flags), ids(&MEDUSA, flags), "{flags:?}");
    }
    assert_ne!(ids(&PLAIN, &["--repetition-penalty", "1.5"]), ids(&PLAIN, &[]));
    let hot = ["--temperature", "1.5"];
    assert_eq!(ids(&PLAIN, &[&hot[..], &["--top-p", "0.0001"]].concat()), ids(&PLAIN, &[]), "a nucleus of one token");
    let [nucleus, narrow] = ["0.9", "0.0001"]
        .map(|top_p| ids(&MEDUSA, &[&hot[..], &["--acceptance", "nucleus", "--top-p", top_p]].concat()));
    assert!(nucleus != narrow && narrow == ids(&PLAIN, &[]), "{nucleus} {narrow}");
}

#[test]
fn a_full_context_ends_a_text_and_a_prompt_beyond_it_is_named() {
    let world = World::new();
    world.write("t.json", &json!([[0], [0, 0]]));
    world.lines("p.jsonl", &[json!({"prompt_ids": vec![4; CONTEXT - 5]}), json!({"prompt_ids": [4]})]);
    for arguments in [&PLAIN[..], &MEDUSA[..]] {
        let line = world.json(&[arguments, &["--max-new-tokens", "1000"]].concat()).remove(0);
        assert_eq!((line["new_ids"].as_array().map(Vec::len), &line["finish_reason"]), (Some(5), &json!("length")));
    }
    world.lines("p.jsonl", &[json!({"prompt_ids": vec![4; CONTEXT + 1]}), json!({"prompt_ids": [4]})]);
    for arguments in [&PLAIN[..], &MEDUSA[..]] {
        let line = world.json(&[arguments, &["--max-new-tokens", "2"]].concat());
        assert_eq!((line.len(), &line[0]["index"]), (1, &json!(1)), "the first one is skipped");
        let said = world.complaint(&[arguments, &["--strict"]].concat(), 1);
        let expected = "error: cannot decode 1 of 2 prompts: too long for the context of 64 tokens, which needs room for a new token (the \
                        first: p.jsonl, line 1, 65 tokens)";
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn what_the_template_does_not_read_of_a_conversation_is_reported() {
    let world = World::new();
    let asked = json!([{"role": "user", "content": "a", "mood": "sad"}]);
    let chat = json!({"messages": asked, "chat_template_kwargs": {"enable_thinking": false}});
    let turns = json!({"turns": ["a"], "tools": [{"type": "function", "function": {"name": "f"}}]});
    world.lines("p.jsonl", &[chat, turns, json!({"prompt": "a"})]);
    let command =
        world.medusa(&[&PLAIN[..], &["--max-new-tokens", "1", "--chat-template", "vicuna"]].concat()).assert();
    let stderr = String::from_utf8_lossy(&command.success().get_output().stderr).into_owned();
    let unread = "`chat_template_kwargs.enable_thinking` in 1 row, `messages[].mood` in 1 row, `tools` in 1 row";
    assert!(stderr.contains(&format!("the chat template does not read: {unread}\n")), "{stderr}");
}

#[test]
fn a_message_is_rendered_as_a_conversation_of_one_turn_is() {
    let world = World::new();
    world.lines("p.jsonl", &[json!({"messages": [{"role": "user", "content": "a"}]})]);
    write_atomic(&world.path("t.jinja"), |out| out.write_all(b"{% for m in messages %}{{ m.content }}b{% endfor %}"))
        .expect("a file");
    let more = ["--max-new-tokens", "3", "--chat-template", "t.jinja"];
    let of_file = world.json(&[&PLAIN[..], &more].concat()).remove(0);
    let without_file: Vec<&str> =
        PLAIN.iter().copied().filter(|part| !["--prompts", "p.jsonl"].contains(part)).collect();
    let message = world.json(&[&without_file[..], &more, &["--message", "a"]].concat()).remove(0);
    assert_eq!((&message["prompt_ids"], &message["new_ids"]), (&of_file["prompt_ids"], &of_file["new_ids"]));
    let both = world.complaint(&[&without_file[..], &["--message", "a", "--prompt", "a"]].concat(), 2);
    assert!(both.contains("cannot be used with"), "{both}");
}

#[test]
fn a_turn_that_does_not_fit_ends_its_conversation() {
    let world = World::new();
    let turns = json!({"turns": ["a", "b".repeat(CONTEXT)], "question_id": 81, "category": "writing"});
    world.lines("p.jsonl", &[turns, json!({"prompt": "c", "id": "last"})]);
    let source = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}";
    medusa::files::write_atomic(&world.path("all.jinja"), |out| std::io::Write::write_all(out, source.as_bytes()))
        .unwrap();
    let flags = ["--max-new-tokens", "2", "--chat-template", "all.jinja"];
    let lines = world.json(&[&PLAIN[..], &flags].concat());
    let names: Vec<_> =
        lines.iter().map(|line| ["index", "id", "category", "turn"].map(|key| line[key].clone())).collect();
    assert_eq!(
        names,
        [[json!(0), json!(81), json!("writing"), json!(0)], [json!(1), json!("last"), json!(null), json!(null)]]
    );
    let samples = [&PLAIN[..], &flags, &["--num-samples", "3"]].concat();
    let said = world.medusa(&samples).assert().success().get_output().stderr.clone();
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("1 conversation ended before a turn that does not fit"), "{said}");
    assert!(said.contains("--num-samples: the samples of a prompt are equal"), "{said}");
    let mut strict = world.medusa(&[&PLAIN[..], &flags, &["--strict"]].concat());
    let strict = strict.assert().code(1).get_output().stderr.clone();
    let strict = String::from_utf8(strict).unwrap();
    assert!(strict.contains("prompt 1 of 2") && strict.contains("turn 2"), "{strict}");
}

#[test]
fn logprobs_are_of_the_new_tokens_and_of_the_likeliest() {
    let world = World::new();
    world.lines("p.jsonl", &[json!({"prompt": "a"})]);
    let greedy = world.json(&[&PLAIN[..], &["--max-new-tokens", "4", "--logprobs", "2"]].concat()).remove(0);
    let logprobs = greedy["logprobs"].as_array().expect("a list").clone();
    assert_eq!(logprobs.len(), greedy["new_ids"].as_array().unwrap().len());
    for (token, id) in logprobs.iter().zip(greedy["new_ids"].as_array().unwrap()) {
        let best = &token["top_logprobs"][0];
        assert_eq!(
            (&token["id"], &best["id"], &best["logprob"]),
            (id, id, &token["logprob"]),
            "greedy takes the likeliest"
        );
        assert!(
            token["logprob"].as_f64() >= token["top_logprobs"][1]["logprob"].as_f64() && token["token"].is_string()
        );
    }
    let tokens: String = logprobs.iter().map(|token| token["token"].as_str().unwrap()).collect();
    let text = greedy["text"].as_str().unwrap();
    let whole = text.trim_end_matches('\u{fffd}'); // bytes that never became a character
    assert_eq!(tokens.replace("</s>", "").trim_start(), whole.trim_start(), "of {text:?}");
    let of_one = ["--temperature", "1.5", "--top-k", "1", "--acceptance", "rejection", "--max-new-tokens", "4"];
    let hot = world.json(&[&PLAIN[..], &of_one, &["--logprobs", "0"]].concat()).remove(0);
    assert_eq!(hot["new_ids"], greedy["new_ids"], "the likeliest token alone");
    let raw = |line: &Value| {
        line["logprobs"].as_array().unwrap().iter().map(|token| token["logprob"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(raw(&hot), raw(&greedy), "before temperature and top-k");
    assert_eq!(hot["logprobs"][0]["top_logprobs"], json!([]));
    assert!(world.complaint(&[&PLAIN[..], &["--logprobs", "2"]].concat(), 2).contains("add --json"));
    assert!(world.complaint(&[&PLAIN[..], &["--top-k", "0"]].concat(), 2).contains("--top-k"));
    let many = world.complaint(&[&PLAIN[..], &["--logprobs", "21", "--json"]].concat(), 2);
    assert!(many.contains("expected a whole number from 0 to 20"), "{many}");
}

#[test]
fn top_k_draws_all_of_the_most_probable_tokens_and_no_others() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    let hot = ["--temperature", "3", "--acceptance", "rejection", "--max-new-tokens", "12", "--num-samples", "6"];
    // The places of the drawn tokens among the likeliest, 20 for those beyond.
    let places = |arguments: &[&str], more: &[&str]| -> std::collections::BTreeSet<usize> {
        let lines = world.json(&[arguments, &hot, &["--logprobs", "20"], more].concat());
        let tokens = lines.iter().flat_map(|line| line["logprobs"].as_array().expect("a list"));
        let place = |token: &Value| {
            let likeliest = token["top_logprobs"].as_array().expect("a list");
            likeliest.iter().position(|one| one["id"] == token["id"]).unwrap_or(likeliest.len())
        };
        tokens.map(place).collect()
    };
    for arguments in [&PLAIN[..], &MEDUSA[..]] {
        assert_eq!(places(arguments, &["--top-k", "3"]), [0, 1, 2].into(), "{arguments:?}");
        assert!(places(arguments, &[]).contains(&20), "{arguments:?}");
    }
}

#[test]
fn top_k_without_an_effect_gives_a_notice() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    let notice = |arguments: &[&str], more: &[&str]| {
        let all = [arguments, &["--top-k", "3", "--max-new-tokens", "2"], more].concat();
        let said = world.medusa(&all).assert().success().get_output().stderr.clone();
        String::from_utf8(said).expect("UTF-8").lines().find(|line| line.contains("no effect")).map(str::to_owned)
    };
    let greedy = "--top-k has no effect at --temperature 0, which is greedy";
    let typical =
        "--top-k has no effect with --acceptance typical, which does not sample; use --acceptance rejection or nucleus";
    assert_eq!(notice(&PLAIN, &[]).as_deref(), Some(greedy));
    assert_eq!(notice(&PLAIN, &["--temperature", "1"]), None);
    assert_eq!(notice(&MEDUSA, &["--temperature", "1"]).as_deref(), Some(typical));
    let bench = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--heads", "h", "--repeats", "1"];
    assert_eq!(notice(&bench, &["--temperature", "1"]).as_deref(), Some(typical));
    assert_eq!(notice(&bench, &["--acceptance", "rejection", "--sweep", "temperature=0,1"]), None);
}

/// On a terminal nothing else would say that the program waits.
#[test]
#[cfg(unix)]
fn prompts_that_are_typed_are_asked_for() {
    use std::fs::File;
    use std::process::Stdio;

    use nix::pty::openpty;

    let world = World::new();
    let pty = openpty(None, None).expect("a terminal");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_medusa"));
    program::on_the_cpu(&mut command).args(["generate", "--backbone", "b", "--prompts", "-", "--max-new-tokens", "2"]);
    command.current_dir(world.path("")).stdin(Stdio::from(pty.slave)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let generate = command.spawn().expect("it runs");
    let mut keyboard = File::from(pty.master);
    keyboard.write_all(b"{\"prompt\": \"a\"}\n\x04").expect("it is read");
    let output = generate.wait_with_output().expect("it ends");
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(output.status.success(), "{said}");
    assert!(said.starts_with("reading prompts from stdin, one JSON object per line; end with Ctrl-D\n"), "{said}");
}

#[test]
fn prompts_come_from_stdin() {
    let world = World::new();
    world.lines("p.jsonl", &[json!({"prompt": "a"}), json!({"prompt": "b"})]);
    let from_file = world.json(&[&PLAIN[..], &["--max-new-tokens", "3"]].concat());
    let arguments: Vec<&str> =
        PLAIN.iter().map(|argument| if *argument == "p.jsonl" { "-" } else { argument }).collect();
    let text = std::fs::read_to_string(world.path("p.jsonl")).unwrap();
    let mut command = world.medusa(&[&arguments[..], &["--max-new-tokens", "3", "--json"]].concat());
    let output = command.write_stdin(text).assert().success().get_output().stdout.clone();
    let ids = |line: &Value| line["new_ids"].clone();
    let lines: Vec<Value> =
        String::from_utf8(output).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(ids).collect::<Vec<_>>(), from_file.iter().map(ids).collect::<Vec<_>>());
    let mut command = world.medusa(&arguments);
    let error = command.write_stdin("{\"prompt\": 3}").assert().code(1).get_output().stderr.clone();
    assert!(String::from_utf8_lossy(&error).contains("stdin, line 1: prompt: expected a string, got 3"));
}

#[test]
fn bench_compares_per_category_and_says_whether_the_tokens_are_identical() {
    let world = World::new();
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    let prompt = |text: &str, category: &str| json!({"prompt": text, "category": category});
    world.lines("p.jsonl", &[prompt("ab", "x"), prompt("ba", "y"), prompt("cc", "x"), json!({"prompt": "c"})]);
    let arguments = ["bench", "--backbone", "b", "--heads", "h", "--tree", "t.json", "--prompts", "p.jsonl"];
    let report = world.json(&[&arguments[..], &["--max-new-tokens", "10"]].concat()).remove(0);
    assert_eq!(report["identical"], json!(true));
    assert_eq!(
        (&report["tree_nodes"], &report["dtype"], &report["device"]),
        (&json!(3), &json!("float32"), &json!("cpu"))
    );
    assert_eq!((&report["plain"]["tokens"], &report["medusa"]["tokens"]), (&json!(40), &json!(40)));
    assert_eq!(
        (&report["categories"]["x"]["plain"]["tokens"], &report["categories"]["y"]["medusa"]["tokens"]),
        (&json!(20), &json!(10))
    );
    let number = |key: &str| report[key].as_f64().unwrap();
    let steps = report["medusa"]["steps"].as_f64().unwrap();
    assert!((number("acceleration_rate") - 40.0 / steps).abs() < 1e-9);
    assert!((number("speedup") - number("acceleration_rate") / number("overhead")).abs() < 1e-9);
    for side in ["plain", "medusa"] {
        for key in ["tokens", "seconds", "tokens_per_second", "step_ms"] {
            assert!(report[side][key].as_f64().unwrap() > 0.0, "{side}.{key}");
        }
    }
    let warm = world.json(&[&arguments[..], &["--max-new-tokens", "4", "--temperature", "1"]].concat()).remove(0);
    assert_eq!(warm["identical"], Value::Null, "samples are not expected to be identical");
}

#[test]
fn without_a_tree_the_heads_best_guesses_are_a_chain_and_that_is_said() {
    let world = World::new();
    let output = world
        .medusa(&["generate", "--backbone", "b", "--heads", "h", "--prompt", "a", "--max-new-tokens", "4"])
        .output();
    let stderr = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(stderr.starts_with("no --tree: using a chain of the best guesses of 3 heads"), "{stderr}");
}

#[test]
fn what_the_command_line_cannot_mean_is_status_2() {
    let world = World::new();
    let plain = ["generate", "--backbone", "b", "--prompt", "a"];
    let refused = |more: &[&str]| world.complaint(&[&plain[..], more].concat(), 2);
    let all_guesses = refused(&["--acceptance", "nucleus", "--top-p", "1"]);
    assert!(
        all_guesses.starts_with("error: --acceptance nucleus with --top-p 1 would accept every guess"),
        "{all_guesses}"
    );
    assert!(refused(&["--acceptance", "lucky"]).contains("[possible values: greedy, typical, nucleus, rejection]"));
    for flag in ["--top-p", "--posterior-threshold"] {
        for value in ["0", "-0.1", "1.01", "NaN"] {
            let said = refused(&[flag, value]);
            assert!(
                said.contains(flag) && said.contains("expected a number that is above 0 and at most 1, got"),
                "{said}"
            );
        }
    }
    for flag in ["--frequency-penalty", "--presence-penalty"] {
        let said = refused(&[flag, "NaN"]);
        assert!(said.contains(flag) && said.contains("expected a number that is finite, got NaN"), "{said}");
    }
    for flag in ["--posterior-alpha", "--repetition-penalty"] {
        for value in ["0", "-1", "inf"] {
            let said = refused(&[flag, value]);
            assert!(
                said.contains(flag) && said.contains("expected a number that is finite and above 0, got"),
                "{said}"
            );
        }
    }
    world.write("t.json", &json!([[0]]));
    assert!(refused(&["--tree", "t.json"]).contains("--heads"));
    assert!(refused(&["--temperature", "-1"]).contains("at least 0"));
    assert!(refused(&["--prompts", "p.jsonl"]).contains("cannot be used with"));
    assert!(world.complaint(&["generate", "--backbone", "b"], 2).contains("--prompt"));
}

#[test]
fn what_does_not_fit_is_one_clear_error() {
    let world = World::new();
    world.heads("narrow", 2, HIDDEN / 2);
    world.write("deep.json", &json!([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]));
    world.write("orphan.json", &json!([[0], [1, 0]]));
    let with =
        |heads: &str, tree: &str| world.complaint(&[&PLAIN[..], &["--heads", heads, "--tree", tree]].concat(), 1);
    assert!(with("h", "deep.json").contains("tree choice [0, 0, 0, 0] needs 4 heads, but there are 3"));
    assert!(with("h", "orphan.json").starts_with("error: orphan.json: tree choice [1, 0] has no parent [1]"));
    assert!(with("narrow", "deep.json").contains("hidden size: expected 32, got 16"));
    let shape = HeadsShape {
        medusa_num_heads: 2,
        medusa_num_layers: 1,
        hidden_size: HIDDEN,
        vocab_size: 99,
        ..HeadsShape::default()
    };
    std::fs::create_dir(world.path("foreign")).unwrap();
    Heads::random(shape, Kind::Float, Device::Cpu, 7).save(&world.path("foreign")).unwrap();
    let foreign = with("foreign", "deep.json");
    assert!(
        foreign.contains(
            "foreign/heads.safetensors: vocabulary: expected 264, got 99; were these heads trained for this backbone?"
        ),
        "{foreign}"
    );
    world.write("p.jsonl", &json!({"prompt_ids": [1, BYTE_VOCABULARY]}));
    assert!(world.complaint(&PLAIN, 1).contains(&format!("{BYTE_VOCABULARY}")));
    world.write("p.jsonl", &json!({"prompt_ids": vec![4; CONTEXT]}));
    let too_long = world.complaint(&PLAIN, 1);
    assert!(too_long.contains("the prompt has 64 tokens, but the backbone's context is 64"), "{too_long}");
    assert!(too_long.contains("p.jsonl, line 1"), "{too_long}");
    assert!(
        world
            .complaint(&["generate", "--backbone", "none", "--prompt", "a"], 2)
            .contains("--backbone: cannot read none/config.json")
    );
}

#[test]
fn on_a_real_model_heads_change_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let heads = folder.path().join("heads.safetensors");
    std::fs::copy(published("reference/losses/medusa1_heads_final.safetensors"), &heads).unwrap();
    let rows = std::fs::read_to_string(published("data/stories_eval.jsonl")).unwrap();
    let prompt = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        json!({"prompt_ids": row["input_ids"].as_array().unwrap()[..8]})
    };
    let world = World::new();
    world.lines("p.jsonl", &rows.lines().take(6).map(prompt).collect::<Vec<_>>());
    world.write("t.json", &json!([[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [0, 0, 0, 0]]));
    let backbone = published("models/stories260K").display().to_string();
    let heads = heads.display().to_string();
    let arguments = ["generate", "--backbone", &backbone, "--prompts", "p.jsonl", "--max-new-tokens", "100"];
    let plain = world.json(&arguments);
    let fast = world.json(&[&arguments[..], &["--heads", &heads, "--tree", "t.json"]].concat());
    for (plain, fast) in plain.iter().zip(&fast) {
        assert_eq!(plain["new_ids"], fast["new_ids"]);
    }
}

#[test]
fn answers_to_several_prompts_have_a_line_above_them() {
    let world = World::new();
    world.lines(
        "p.jsonl",
        &[json!({"prompt": "a  b\nc", "id": 7}), json!({"prompt_ids": [1, 4, 5], "question_id": "x"})],
    );
    let more = ["--num-samples", "2", "--max-new-tokens", "1", "--temperature", "1"];
    let output = world.medusa(&[&PLAIN[..], &more].concat()).assert().success().get_output().clone();
    let (mut text, said) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    for heading in [
        "[1 of 2, id 7, sample 1] a b c\n",
        "[1 of 2, id 7, sample 2] a b c\n",
        "[2 of 2, id \"x\", sample 1] 3 tokens\n",
        "[2 of 2, id \"x\", sample 2] 3 tokens\n",
    ] {
        let (_, rest) = text.split_once(heading).unwrap_or_else(|| panic!("{heading}: {text}"));
        text = rest.to_owned();
    }
    assert_eq!(said.matches("ended by length]").count(), 4, "{said}");
}

#[test]
fn a_reader_that_ends_first_is_no_error() {
    use std::process::Stdio;

    let world = World::new();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_medusa"));
    program::on_the_cpu(&mut command).args(PLAIN).args(["--quiet", "--max-new-tokens", "2"]);
    let mut generate =
        command.current_dir(world.path("")).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    drop(generate.stdout.take());
    let output = generate.wait_with_output().expect("it ends");
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(141), ""));
}

#[test]
fn a_raw_prompt_on_a_model_with_a_chat_template_is_said_to_be_raw() {
    let world = World::new();
    let said = |more: &[&str]| {
        let prompt = ["generate", "--backbone", "b", "--prompt", "a", "--max-new-tokens", "1"];
        let output = world.medusa(&[&prompt[..], more].concat()).assert().success().get_output().clone();
        String::from_utf8(output.stderr).unwrap().matches("--prompt is continued as raw text").count()
    };
    assert_eq!((said(&["--chat-template", "zephyr"]), said(&[]), said(&["--quiet"])), (1, 0, 0), "b has no template");
}
