//! Promise: where a backbone's layers lie changes no bit of a run. On a CPU several stages are on one device, and run what several GPUs would.

use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use serde_json::Value;
use tch::{Device, Kind};

use super::small_run::{Ended, SmallRun};

/// Layers of the backbone.
const LAYERS: usize = 5;

const LORA: &str = "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8\ndropout = 0.1";
const SELF_DISTILLATION: &str =
    "[stage.medusa2]\nself_distillation = true\n[stage.medusa2.lora]\nrank = 4\nalpha = 8\ndropout = 0.1";
const DIRECT: &str = "[stage.medusa2]";

/// A run that lasts three steps.
struct MappedRun {
    /// Keys of `[backbone]`.
    backbone: &'static str,
    stage: &'static str,
    /// Keys of `[heads]`.
    heads: &'static str,
    /// Keys of `[train]`.
    train: &'static str,
    is_tied: bool,
}

const MEDUSA_1: MappedRun = MappedRun { backbone: "", stage: "[stage.medusa1]", heads: "", train: "", is_tied: false };

impl MappedRun {
    fn workplace(&self, map: &str) -> SmallRun {
        let small = SmallRun::new();
        small.edit("backbone/config.json", "\"num_hidden_layers\": 1", &format!("\"num_hidden_layers\": {LAYERS}"));
        let tied = format!("\"tie_word_embeddings\": {}", self.is_tied);
        small.edit("backbone/config.json", "\"tie_word_embeddings\": false", &tied);
        let config = LlamaConfig::load(&small.path("backbone")).expect("a config");
        small.save_backbone(&Llama::random(config, Kind::Float, Device::Cpu, 7).weights());
        small.edit("recipe.toml", "[stage.medusa1]", self.stage);
        small.edit("recipe.toml", "epochs = 8", &format!("max_steps = 3\n{}", self.train));
        small.edit("recipe.toml", "eval_every", "eval_answers = 0\neval_every"); // on several stages nothing answers
        small.edit("recipe.toml", "medusa_num_layers = 1", &format!("medusa_num_layers = 1\n{}", self.heads));
        small.edit("recipe.toml", "[heads]", &format!("{}\n[heads]", self.backbone));
        small.mapped(map)
    }

    /// Trains with each map and without one; everything that is written is the same.
    fn is_the_same_on(&self, maps: &[&str]) {
        let expected = self.workplace("");
        expected.train(&[]).succeeded();
        for map in maps {
            let got = self.workplace(map);
            got.train(&[]).succeeded();
            assert_same_run(&got, &expected, map);
        }
    }
}

impl SmallRun {
    /// With this `backbone.device_map`; none if it is empty.
    fn mapped(self, map: &str) -> Self {
        if !map.is_empty() {
            self.edit("recipe.toml", "[backbone]", &format!("[backbone]\ndevice_map = {map}"));
        }
        self
    }
}

fn assert_same_run(got: &SmallRun, expected: &SmallRun, map: &str) {
    assert_eq!(numbers(got), numbers(expected), "{map}");
    for folder in ["run/final", "run/final/backbone"] {
        if !expected.path(folder).exists() {
            continue;
        }
        assert_eq!(got.names(folder), expected.names(folder), "{map}");
        for name in expected.names(folder).into_iter().filter(|name| name.ends_with(".safetensors")) {
            let name = format!("{folder}/{name}");
            assert!(got.bytes(&name) == expected.bytes(&name), "{map}: {name} differs");
        }
    }
}

/// The lines of metrics.jsonl without times and memory.
fn numbers(small: &SmallRun) -> Vec<Value> {
    let line = |line: &str| {
        let mut line: Value = serde_json::from_str(line).expect("a line of JSON");
        let keys = line.as_object_mut().expect("an object");
        for key in ["tokens_per_second", "memory_bytes"] {
            keys.remove(key);
        }
        line
    };
    let lines: Vec<Value> = small.read("run/metrics.jsonl").lines().map(line).collect();
    assert!(lines.iter().filter(|line| line["grad_norm"].as_f64() > Some(0.0)).count() == 3, "{lines:?}");
    lines
}

#[test]
fn frozen_backbones_are_the_same_on_any_stages() {
    MEDUSA_1.is_the_same_on(&["[2, 3]", "[1, 1, 3]", "\"auto\"", "[5]"]);
    MappedRun { backbone: "quantization = \"int8\"", is_tied: true, ..MEDUSA_1 }.is_the_same_on(&["[1, 1, 3]"]);
}

/// The heads read embeddings, or run a decoder layer of their own over the hidden states.
#[test]
fn heads_that_read_more_than_hidden_states_are_the_same_on_any_stages() {
    MappedRun { heads: "architecture = \"hydra\"", ..MEDUSA_1 }.is_the_same_on(&["[2, 3]"]);
    MappedRun { heads: "architecture = \"hydra++\"", ..MEDUSA_1 }.is_the_same_on(&["[1, 1, 3]"]);
}

#[test]
fn adapters_are_the_same_on_any_stages() {
    let lora = MappedRun { stage: LORA, ..MEDUSA_1 };
    lora.is_the_same_on(&["[2, 3]", "[1, 1, 3]"]);
    MappedRun { train: "recompute = true", ..lora }.is_the_same_on(&["[1, 1, 3]"]);
    let nf4 = MappedRun { stage: LORA, backbone: "quantization = \"nf4\"", train: "recompute = true", ..MEDUSA_1 };
    nf4.is_the_same_on(&["[2, 3]"]);
}

#[test]
fn self_distillation_is_the_same_on_any_stages() {
    let distilled = MappedRun { stage: SELF_DISTILLATION, is_tied: true, ..MEDUSA_1 };
    distilled.is_the_same_on(&["[2, 3]", "[1, 1, 3]"]);
}

#[test]
fn a_backbone_that_is_trained_itself_is_the_same_on_any_stages() {
    MappedRun { stage: DIRECT, ..MEDUSA_1 }.is_the_same_on(&["[2, 3]", "[1, 1, 3]"]);
}

/// The LM head on the last stage is a copy of the embedding on the first. Its gradient crosses once a step, so that with one micro batch the
/// sums are the same; with several, they are added in another order.
#[test]
fn a_tied_embedding_learns_from_the_lm_head_on_another_stage() {
    let tied = MappedRun { stage: DIRECT, is_tied: true, ..MEDUSA_1 };
    let whole_step = |map| {
        let small = tied.workplace(map);
        small.edit("recipe.toml", "micro_batch_size = 1", "micro_batch_size = 2");
        small.edit("recipe.toml", "gradient_accumulation_steps = 2", "gradient_accumulation_steps = 1");
        small.train(&[]).succeeded();
        small
    };
    let expected = whole_step("");
    for map in ["[2, 3]", "[1, 1, 3]"] {
        assert_same_run(&whole_step(map), &expected, map);
    }
    let in_parts = tied.workplace("[2, 3]");
    in_parts.train(&[]).succeeded();
    let losses = |small: &SmallRun| numbers(small).iter().map(|line| line["loss"].as_f64().expect("a loss")).collect();
    let (expected, got): (Vec<f64>, Vec<f64>) = (losses(&tied.trained("")), losses(&in_parts));
    assert!(expected.iter().zip(&got).all(|(a, b)| (a - b).abs() < 1e-5 * a), "{expected:?}, {got:?}");
}

impl MappedRun {
    fn trained(&self, map: &str) -> SmallRun {
        let small = self.workplace(map);
        small.train(&[]).succeeded();
        small
    }
}

/// Also where the LM head is a copy of the embedding, which a checkpoint does not have.
#[test]
fn a_run_goes_on_with_other_stages() {
    let tied = MappedRun { stage: DIRECT, is_tied: true, ..MEDUSA_1 };
    let finished = |small: SmallRun| {
        small.edit("recipe.toml", "gradient_accumulation_steps = 2", "gradient_accumulation_steps = 1");
        small.train(&[]).succeeded();
        small.edit("recipe.toml", "max_steps = 3", "max_steps = 5");
        small
    };
    let expected = finished(tied.workplace(""));
    expected.train(&["--resume"]).succeeded();
    let moved = finished(tied.workplace("[1, 1, 3]"));
    moved.edit("recipe.toml", "[1, 1, 3]", "[4, 1]");
    let said = moved.train(&["--resume"]).succeeded().stderr;
    assert!(said.contains("backbone.device_map = [4, 1] (was [1, 1, 3])"), "{said}");
    for name in ["run/final/heads.safetensors", "run/final/backbone/model.safetensors"] {
        assert!(moved.bytes(name) == expected.bytes(name), "{name} differs");
    }
}

#[test]
fn the_plan_shows_what_each_stage_takes() {
    let adapted = MappedRun { stage: LORA, ..MEDUSA_1 };
    let plan = |map: &str| -> Value {
        let Ended { stdout, .. } = adapted.workplace(map).train(&["--check", "--json"]).succeeded();
        serde_json::from_str(&stdout).expect("JSON")
    };
    let (whole, mapped) = (plan(""), plan("[2, 3]"));
    assert!(whole["stages"].is_null());
    let stages = mapped["stages"].as_array().expect("stages");
    let layers: Vec<&Value> = stages.iter().map(|stage| &stage["layers"]).collect();
    assert_eq!(serde_json::json!(layers), serde_json::json!([[1, 2], [3, 5]]));
    for key in ["groups", "activation_bytes"] {
        assert_eq!(mapped["memory"][key], whole["memory"][key], "{key}: the stages have all of it between them");
    }
    let bytes = |value: &Value| value["peak_bytes"].as_u64().expect("bytes");
    assert!(bytes(&mapped) < bytes(&stages[0]) + bytes(&stages[1]), "temporaries of a device are there once");
    assert!(bytes(&stages[1]) > bytes(&stages[0]), "the last one has the heads");
    let text = adapted.workplace("[2, 3]").train(&["--check"]).succeeded().stdout;
    for line in ["  layers 1 to 2 on cpu ", "  layers 3 to 5 on cpu "] {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn calibration_is_the_same_on_any_stages() {
    let small = MappedRun { stage: LORA, heads: "architecture = \"hydra\"", ..MEDUSA_1 }.trained("[2, 3]");
    let calibrate = |out: &str, map: &[&str]| {
        let flags =
            ["calibrate", "--backbone", "backbone", "--heads", "run/final", "--data", "validation.jsonl", "--out", out];
        small.medusa(&[&flags, map].concat())
    };
    calibrate("one.json", &[]).succeeded();
    for map in ["1,1,3", "2,3", "auto"] {
        calibrate("several.json", &["--device-map", map]).succeeded();
        assert_eq!(small.read("several.json"), small.read("one.json"), "{map}");
    }
    let expected = "--device-map [2, 2]: expected counts that add up to 5, the backbone's layers; these add up to 4";
    calibrate("x.json", &["--device-map", "2,2"]).failed(2, &[expected]);
    calibrate("x.json", &["--device-map", "2;3"]).failed(2, &["expected auto or layer counts, such as 40,40"]);
}

#[test]
fn mistakes_in_a_map_have_a_place() {
    let refused = |map: &str, facts: &[&str]| {
        let place = "recipe.toml: line 2, column 14: backbone.device_map";
        MEDUSA_1.workplace(map).train(&["--check"]).failed(2, &[&[place], facts].concat());
    };
    refused("[2, 2]", &["= [2, 2]: expected counts that add up to 5, the backbone's layers; these add up to 4"]);
    refused("[2, 0, 3]", &["expected at least one layer for each GPU, got 0"]);
    refused("\"gpu\"", &["expected \"auto\" or a list of layer counts, such as [40, 40], got \"gpu\""]);
    refused("[2.5, 2.5]", &["expected \"auto\" or a list of layer counts"]);
}
