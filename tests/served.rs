//! Promise: what is measured is what is served. Heads remember the quantisation and the chat template that they were trained with, and
//! every verb that decodes uses them unless a flag says otherwise.

use std::fs;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;

use medusa::data::chat_template::{ChatTemplate, Message, TemplateChoice};
use medusa::data::tokenize::TextTokenizer;
use medusa::decode::generate::plain;
use medusa::decode::request::Request;
use medusa::files::write_atomic;
use medusa::model::attention::RowMask;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::stored::Quantization;
use medusa::model::weights;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::decoding::World;

mod context;
mod exports;
#[cfg(target_os = "linux")]
mod opened;

const TREE: [&str; 4] = ["--heads", "h", "--tree", "t.json"];
const PROMPT: [i64; 4] = [1, 4, 5, 6];

/// Random weights, so large that few bits change the text. All are numbers of float16, in which bitsandbytes quantises to int8.
fn save_large_weights(folder: &Path) {
    let config = LlamaConfig::load(folder).expect("a config");
    let backbone = Llama::random(config, Kind::Float, Device::Cpu, 5);
    let large: Vec<(String, Tensor)> = backbone
        .weights()
        .into_iter()
        .map(|(name, weight)| (name, (weight * 8.0).to_kind(Kind::Half).to_kind(Kind::Float)))
        .collect();
    let large: Vec<(String, &Tensor)> = large.iter().map(|(name, weight)| (name.clone(), weight)).collect();
    weights::save(&folder.join("model.safetensors"), &large).expect("a file of a test");
}

/// A world whose heads were trained on a backbone of these bits, says their config.
fn quantised_world(quantization: &str) -> World {
    let world = World::new();
    save_large_weights(&world.path("b"));
    world.write("h/config.json", &json!({"backbone_dtype": "float32", "quantization": quantization}));
    world.write("t.json", &json!([[0], [1], [0, 0]]));
    world
}

fn ids(of: &Value) -> Vec<i64> {
    serde_json::from_value(of.clone()).expect("token ids")
}

/// On libtorch: the CPU's kernels round activations to 8 bits beside quantised weights.
fn generated(world: &World, more: &[&str]) -> Value {
    generated_on("tch", world, more)
}

fn generated_on(engine: &str, world: &World, more: &[&str]) -> Value {
    let flags = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "24", "--engine", engine];
    world.json(&[&flags[..], more].concat()).remove(0)
}

fn stderr(world: &World, arguments: &[&str]) -> String {
    let output = world.medusa(arguments).assert().success().get_output().clone();
    String::from_utf8(output.stderr).expect("UTF-8")
}

/// Plain decoding by the library, on weights of these bits.
fn greedy(world: &World, quantization: Option<Quantization>) -> Vec<i64> {
    let (folder, purpose) = (world.path("b"), Purpose::Training);
    let backbone = Llama::load_quantized(&folder, Kind::Float, Device::Cpu, purpose, quantization).expect("a backbone");
    let request = Request::greedy(&PROMPT, 24);
    plain(&backbone, &request, &mut |_| ControlFlow::Continue(())).expect("a text").new_ids
}

#[test]
fn heads_decode_on_the_quantised_weights_that_they_were_trained_on() {
    for (name, quantization) in [("nf4", Quantization::Nf4), ("int8", Quantization::Int8)] {
        let world = quantised_world(name);
        let expected = greedy(&world, Some(quantization));
        assert_ne!(expected, greedy(&world, None), "{name} changes the text");
        let with_tree = generated(&world, &TREE);
        assert_eq!((ids(&with_tree["new_ids"]), &with_tree["engine"]), (expected.clone(), &json!("tch")), "{name}");
        let without_heads = generated(&world, &["--quantization", name]);
        assert_eq!(ids(&without_heads["new_ids"]), expected, "{name}");
        let by_kernels = generated_on("auto", &world, &TREE);
        assert_eq!(by_kernels["engine"], if medusa::cpu::available() { "cpu" } else { "tch" }, "{name}");
        let plain = generated_on("auto", &world, &["--quantization", name]);
        assert_eq!(by_kernels["new_ids"], plain["new_ids"], "{name}");
        if medusa::cpu::available() {
            assert_eq!(generated_on("cpu", &world, &TREE)["new_ids"], plain["new_ids"], "{name}: asked for by name");
        }
        assert_eq!(ids(&generated(&world, &["--quantization", "none"])["new_ids"]), greedy(&world, None));
        assert_eq!(ids(&generated(&world, &[])["new_ids"]), greedy(&world, None), "none without heads");

        let bench = ["bench", "--backbone", "b", "--prompts", "p.jsonl", "--repeats", "1", "--max-new-tokens", "16"];
        let bench = world.json(&[&bench[..], &TREE].concat()).remove(0);
        assert_eq!((&bench["identical"], &bench["quantization"]), (&json!(true), &json!(name)), "{bench}");
    }
}

#[test]
fn heads_notice_another_backbone_of_the_same_shape() {
    let world = World::new();
    let trained_on =
        weights::WeightFiles::open(&world.path("b")).and_then(|files| files.fingerprint()).expect("weights");
    let config =
        json!({"base_model_name_or_path": "org/base", "backbone_dtype": "float32", "backbone_fingerprint": trained_on});
    world.write("h/config.json", &config);
    let notice = "the heads were trained on org/base, and b has other weights: their guesses may be much worse";
    let generate = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--heads", "h", "--max-new-tokens", "2"];
    let times = || stderr(&world, &generate).matches(notice).count();
    assert_eq!(times(), 0);
    save_large_weights(&world.path("b"));
    assert_eq!(times(), 1);
}

#[test]
fn calibrate_distill_and_the_times_of_steps_are_of_the_same_weights() {
    let world = quantised_world("nf4");
    let expected = ids(&generated_on("auto", &world, &["--quantization", "nf4"])["new_ids"]);
    let distill =
        ["distill", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "24", "--temperature", "0"];
    let provenance = |folder: &str| -> Value {
        serde_json::from_slice(&fs::read(world.path(folder).join("distill.json")).expect("a file")).expect("JSON")
    };
    world.json(&[&distill[..], &["--out", "with"], &TREE].concat());
    world.json(&[&distill[..], &["--out", "without", "--quantization", "nf4"]].concat());
    assert_eq!([&provenance("with")["quantization"], &provenance("without")["quantization"]], [&json!("nf4"); 2]);
    let other = world.complaint(&[&distill[..], &["--out", "without", "--resume"]].concat(), 1);
    assert!(other.contains("quantization: expected"), "{other}");

    let calibrate = ["calibrate", "--backbone", "b", "--heads", "h", "--top-k", "3"];
    let rows: Vec<i64> = PROMPT.iter().chain(&expected).copied().collect();
    let labels: Vec<i64> = [vec![-100; PROMPT.len()], expected].concat();
    world.write("rows.jsonl", &json!({"input_ids": rows, "labels": labels}));
    let counts = |out: &str, more: &[&str]| {
        let said = stderr(&world, &[&calibrate[..], more, &["--out", out]].concat());
        let file: Value = serde_json::from_slice(&fs::read(world.path(out)).expect("a file")).expect("JSON");
        (file["heads"].clone(), said)
    };
    let (of_prompts, said) = counts("c.json", &["--prompts", "p.jsonl", "--max-new-tokens", "24"]);
    assert!(!said.contains("quantised to"), "{said}");
    assert_eq!(
        counts("d.json", &["--data", "rows.jsonl"]).0,
        of_prompts,
        "measured on the same text by the same weights"
    );

    let tree = ["tree", "--calibration", "c.json", "--latency", "l.json", "--max-nodes", "2", "--context", "16"];
    let timed = ["--backbone", "b", "--heads", "h", "--out", "best.json"];
    world.medusa(&[&tree[..], &timed].concat()).assert().success();
    let refused = world.complaint(&[&tree[..], &timed, &["--quantization", "none"]].concat(), 1);
    assert!(refused.contains("quantization nf4, not with none"), "{refused}");
}

#[test]
fn another_choice_than_the_heads_is_reported_once_and_dense_engines_refuse_quantised_weights() {
    let world = quantised_world("nf4");
    let generate = |more: &[&str]| {
        let flags = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--max-new-tokens", "4"];
        [&flags[..], &TREE, more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let said = |more: &[&str]| stderr(&world, &generate(more).iter().map(String::as_str).collect::<Vec<_>>());
    let refused = |more: &[&str]| world.complaint(&generate(more).iter().map(String::as_str).collect::<Vec<_>>(), 2);
    let trained = "the heads were trained on a backbone";
    for (flag, words) in [("none", "quantised to nf4"), ("int8", "quantised to nf4")] {
        let printed = said(&["--quantization", flag]);
        assert_eq!(printed.matches(&format!("--quantization {flag}: {trained} {words}")).count(), 1, "{printed}");
    }
    let same = said(&["--quantization", "nf4"]);
    let on_libtorch = same.matches("nf4 weights decode on libtorch").count();
    assert!(!same.contains(trained) && on_libtorch == usize::from(!medusa::cpu::available()), "{same}");
    let error = refused(&["--engine", "cuda"]);
    assert_eq!(error.matches("error: ").count(), 1);
    for fact in ["--engine cuda: nf4 weights decode on libtorch", "--engine tch", "--quantization none"] {
        assert!(error.contains(fact), "{fact}: {error}");
    }
    world.write("h/config.json", &json!({"backbone_dtype": "float32"}));
    let printed = said(&["--quantization", "nf4"]);
    assert!(printed.contains(&format!("--quantization nf4: {trained} that was not quantised")), "{printed}");
    world.write("h/config.json", &json!({"quantization": "awq"}));
    let unknown = refused(&[]);
    assert!(
        unknown.contains(
            "config.json: quantization: expected \"nf4\" or \"q4_0\" or \"q4_k\" or \"int8\" or \"q8_0\", got \"awq\""
        ),
        "{unknown}"
    );
    said(&["--quantization", "none"]);
}

#[test]
#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with torch, transformers and bitsandbytes")]
fn logits_are_those_of_transformers_on_bitsandbytes_weights() {
    const TOLERANCE: f64 = 1e-3; // of logits up to about 10
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/oracles/quantized_logits.py");
    for (name, quantization) in [("nf4", Quantization::Nf4), ("int8", Quantization::Int8)] {
        let world = World::new();
        // bitsandbytes' CPU kernels dequantise nf4 wrongly where rows are no multiple of its blocks of 64.
        let config = json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 64});
        world.write("b/config.json", &config);
        save_large_weights(&world.path("b"));
        let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
        let ids = PROMPT.map(|id| id.to_string());
        let output =
            Command::new(python).arg(&script).arg(world.path("b")).arg(name).args(ids).output().expect("Python");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let rows: Vec<Vec<f64>> = serde_json::from_slice(&output.stdout).expect("logits as JSON");
        let theirs = Tensor::from_slice(&rows.concat()).view([1, PROMPT.len() as i64, -1]);
        let purpose = Purpose::Batches;
        let backbone = Llama::load_quantized(&world.path("b"), Kind::Float, Device::Cpu, purpose, Some(quantization));
        let backbone = backbone.expect("a backbone");
        let mask = RowMask::causal(PROMPT.len() as i64, &backbone.config, Device::Cpu);
        let hidden = backbone.hidden_states(&Tensor::from_slice(&PROMPT).unsqueeze(0), &mask, Adapters::Off);
        let ours = backbone.logits(&hidden, Adapters::Off).to_kind(Kind::Double);
        let off = (&ours - &theirs).abs().max().double_value(&[]);
        assert!(off < TOLERANCE, "{name}: {off} of {}", theirs.abs().max().double_value(&[]));
    }
}

/// The tiny model without its chat template, two conversations, and heads trained on them for a step with `template`.
fn trained_with(template: &str) -> World {
    let world = World::new();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    fs::create_dir(world.path("tiny")).expect("a folder");
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(tiny.join(name), world.path("tiny").join(name)).expect("a file of the tiny model");
    }
    world.write("tiny/tokenizer_config.json", &json!({"bos_token": "<|bos|>", "eos_token": "<|end|>"}));
    text(&world, "own.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}");
    let talk = json!({"messages": [{"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": "Once upon a time there was a fox, and the fox was red."}]});
    world.lines("rows.jsonl", &[talk.clone(), talk]);
    text(
        &world,
        "recipe.toml",
        &format!(
            "[backbone]\npath = \"tiny\"\ndtype = \"float32\"\n[heads]\nmedusa_num_heads = 2\nmedusa_num_layers = 1\n[stage.medusa1]\n[data]\ntrain = [\"rows.jsonl\"]\n\
             max_length = 128\nchat_template = {template:?}\n[optimizer]\nlearning_rate = 1e-3\n[schedule]\nname = \"constant\"\nwarmup_steps = 0\n[train]\nmicro_batch_size = 1\noutput_dir = \"run\"\n\
             max_steps = 1\n"
        ),
    );
    world.medusa(&["train", "recipe.toml"]).assert().success();
    world
}

fn text(world: &World, name: &str, text: &str) {
    write_atomic(&world.path(name), |out| out.write_all(text.as_bytes())).expect("a file of a test");
}

/// The ids of a conversation of one turn in a template.
fn rendered(world: &World, template: &str) -> Vec<i64> {
    let folder = world.path("tiny");
    let choice = TemplateChoice::try_from(template.to_owned()).expect("a template");
    let template = ChatTemplate::choose(&choice, &folder).expect("a template").expect("one");
    let text = template.render(&[Message::new("user", "hello")], true).expect("a text");
    let tokenizer = TextTokenizer::load(&folder).expect("a tokenizer");
    tokenizer.encode(&text, false).expect("ids").into_iter().map(i64::from).collect()
}

fn prompt_of_chat(world: &World, more: &[&str]) -> (Vec<i64>, String) {
    let flags = ["chat", "--backbone", "tiny", "--max-new-tokens", "2", "--json"];
    let output =
        world.medusa(&[&flags[..], more].concat()).write_stdin("hello\n").assert().success().get_output().clone();
    let line: Value = serde_json::from_slice(&output.stdout).expect("one answer");
    (ids(&line["prompt_ids"]), String::from_utf8(output.stderr).expect("UTF-8"))
}

const FINAL: [&str; 2] = ["--heads", "run/final"];

#[test]
fn chat_and_bench_use_the_template_of_the_heads() {
    let world = trained_with("vicuna");
    let config: Value =
        serde_json::from_slice(&fs::read(world.path("run/final/config.json")).expect("a file")).expect("JSON");
    assert_eq!((&config["chat_template"], &config["architecture"]), (&json!("vicuna"), &json!("medusa")));
    assert_eq!((&config["backbone_model_type"], &config["quantization"]), (&json!("llama"), &Value::Null));

    assert_eq!(prompt_of_chat(&world, &FINAL).0, rendered(&world, "vicuna"));
    let (other, said) = prompt_of_chat(&world, &[&FINAL[..], &["--chat-template", "zephyr"]].concat());
    assert_eq!(other, rendered(&world, "zephyr"), "the flag wins");
    let notice = "--chat-template zephyr: the heads were trained with vicuna; their accuracy may differ";
    assert_eq!(said.matches(notice).count(), 1, "{said}");

    world.lines("q.jsonl", &[json!({"turns": ["hello", "and then?"]}), json!({"prompt": "hello"})]);
    let bench = ["bench", "--backbone", "tiny", "--prompts", "q.jsonl", "--repeats", "1", "--max-new-tokens", "2"];
    let line = world.json(&[&bench[..], &FINAL].concat()).remove(0);
    assert_eq!(line["plain"]["tokens"], json!(6), "two turns and a prompt: {line}");
    let generate = ["generate", "--backbone", "tiny", "--prompts", "q.jsonl", "--max-new-tokens", "2"];
    let prompt = world.json(&[&generate[..], &FINAL].concat()).remove(0)["prompt_ids"].clone();
    assert_eq!(ids(&prompt), rendered(&world, "vicuna"));
}

#[test]
fn the_template_of_the_heads_is_before_the_backbones_own() {
    let world = trained_with("vicuna");
    text(&world, "tiny/chat_template.jinja", "own: {{ messages[0].content }}");
    assert_eq!(prompt_of_chat(&world, &FINAL).0, rendered(&world, "vicuna"));
    assert_eq!(prompt_of_chat(&world, &[]).0, rendered(&world, "tokenizer"), "without heads the backbone's");
    let (own, said) = prompt_of_chat(&world, &[&FINAL[..], &["--chat-template", "tokenizer"]].concat());
    assert_eq!(own, rendered(&world, "tokenizer"));
    assert!(said.contains("--chat-template tokenizer: the heads were trained with vicuna"), "{said}");
}

#[test]
fn a_template_file_goes_with_the_heads() {
    let world = trained_with("own.jinja");
    let source = fs::read(world.path("own.jinja")).expect("a file");
    assert_eq!(fs::read(world.path("run/final/chat_template.jinja")).expect("beside the heads"), source);
    let expected = rendered(&world, &world.path("own.jinja").display().to_string());
    fs::remove_file(world.path("own.jinja")).expect("a file of a test");
    assert_eq!(prompt_of_chat(&world, &FINAL).0, expected);
    fs::remove_file(world.path("run/final/chat_template.jinja")).expect("a file of a test");
    let listed = world.complaint(&["chat", "--backbone", "tiny", "--heads", "run/final"], 1);
    assert!(
        listed.contains("run/final/chat_template.jinja is missing, and run/final/medusa.sha256 lists it"),
        "{listed}"
    );
    fs::remove_file(world.path("run/final/medusa.sha256")).expect("checksums");
    let missing = world.complaint(&["chat", "--backbone", "tiny", "--heads", "run/final"], 1);
    assert!(missing.contains("cannot read run/final/chat_template.jinja"), "{missing}");
    world.write("run/final/config.json", &json!({"chat_template": "../secret.jinja"}));
    let elsewhere = world.complaint(&["chat", "--backbone", "tiny", "--heads", "run/final"], 2);
    assert!(elsewhere.contains("chat_template: expected") && elsewhere.contains("../secret.jinja"), "{elsewhere}");
}

#[test]
fn a_conversation_without_a_template_asks_for_one() {
    let world = World::new();
    world.lines("q.jsonl", &[json!({"prompt": "a"}), json!({"turns": ["a"]})]);
    world.write("t.json", &json!([[0]]));
    let with_backbone = |verb: &[&'static str]| [&verb[..1], &["--backbone", "b"], &verb[1..]].concat();
    for verb in [
        &["generate", "--prompts", "q.jsonl"][..],
        &["bench", "--prompts", "q.jsonl", "--heads", "h"],
        &["calibrate", "--prompts", "q.jsonl", "--heads", "h", "--out", "c.json"],
        &["distill", "--prompts", "q.jsonl", "--out", "d"],
    ] {
        let error = world.complaint(&with_backbone(verb), 2);
        for fact in
            ["error: prompt 2 is a conversation, and b has no chat template", "--chat-template: \"vicuna\"", ".jinja"]
        {
            assert!(error.contains(fact), "{verb:?}: {fact}: {error}");
        }
        assert!(!world.path("d").exists(), "nothing was begun");
    }
    world.json(&with_backbone(&[
        "generate",
        "--prompts",
        "q.jsonl",
        "--max-new-tokens",
        "2",
        "--chat-template",
        "mistral",
    ]));
    world.write(
        "rows.jsonl",
        &json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
    );
    let rows = ["calibrate", "--data", "rows.jsonl", "--heads", "h", "--out", "c.json"];
    let error = world.complaint(&with_backbone(&rows), 1);
    assert!(error.contains("has no chat template") && error.contains("--chat-template on the command line"), "{error}");
    let chat = world.complaint(&["chat", "--backbone", "b"], 2);
    assert!(chat.contains("b has no chat template") && chat.contains("or none to continue raw text"), "{chat}");
}
