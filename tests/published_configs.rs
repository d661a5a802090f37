//! Promise: the `config.json` of published repositories is read as transformers reads it and passes `--check`, and what cannot be run
//! is refused in words that name what is missing.

use std::path::Path;

use medusa::model::block_spec::LayerKind;
use medusa::model::config::LlamaConfig;
use medusa::model::rope::Ropes;
use serde_json::{Map, Value};
use tch::{Device, Kind};

use super::small_run::SmallRun;

/// A file of tests/fixtures/configs.
fn fixture(name: &str) -> Map<String, Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/configs").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("a JSON object")
}

/// The configs of repositories, `served` or `refused`.
pub(crate) fn published(group: &str) -> Map<String, Value> {
    fixture("published.json")[group].as_object().expect("repositories").clone()
}

/// What a config is read as, with its repository's name for failures.
fn read(small: &SmallRun, name: &str, config: &Value) -> LlamaConfig {
    small.write("backbone/config.json", config.to_string());
    LlamaConfig::load(&small.path("backbone")).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn sizes_and_windows_are_those_of_transformers() {
    let (small, parameters) = (SmallRun::new(), fixture("parameters.json"));
    for (name, config) in published("served") {
        let (got, expected) = (read(&small, &name, &config), &parameters[&name]);
        assert_eq!(expected["parameters"], got.parameters(), "{name}");
        assert_eq!(expected["head_dim"], got.head_dim, "{name}");
        assert_eq!(expected["tied"], got.tie_word_embeddings, "{name}");
        let layers = got.layer_kinds();
        let window = |layer| layers.windows()[layers.kind_of(layer)].map_or(Value::Null, Value::from);
        let windows: Vec<Value> = (0..got.num_hidden_layers).map(window).collect();
        assert_eq!(expected["windows"], Value::from(windows), "{name}");
    }
}

/// The first, middle and last of the frequencies, which are float32 there and here.
fn assert_frequencies(name: &str, kind: &str, expected: &Value, got: &[f32]) {
    let picked = [got[0], got[got.len() / 2], got[got.len() - 1]];
    for (expected, got) in expected.as_array().expect("a list").iter().map(number).zip(picked.map(f64::from)) {
        assert!((got / expected - 1.0).abs() < 1e-5, "{name}, {kind}: {got} instead of {expected}");
    }
}

#[test]
fn rotary_embeddings_are_those_of_transformers() {
    let (small, parameters) = (SmallRun::new(), fixture("parameters.json"));
    for (name, config) in published("served") {
        let layers = read(&small, &name, &config).layer_kinds();
        let ropes = Ropes::new(&layers, Kind::Float, Device::Cpu);
        let rope = parameters[&name]["rope"].as_object().expect("kinds of layers");
        for (kind, expected) in rope {
            // Only where there are two kinds of frequencies do layers with a window have those of their own.
            let is_meant =
                |layer: &LayerKind| rope.len() == 1 || layer.window.is_some() == (kind == "sliding_attention");
            let mut indices = (0..layers.kinds().len()).filter(|&index| is_meant(&layers.kinds()[index]));
            let got = indices.find_map(|index| ropes.frequencies(index)).expect("layers that rotate");
            assert_eq!(expected["size"], 2 * got.each.len(), "{name}, {kind}");
            assert!((number(&expected["factor"]) - got.magnitude).abs() < 1e-9, "{name}, {kind}: {}", got.magnitude);
            assert_frequencies(&name, kind, &expected["frequencies"], &got.each);
        }
    }
}

#[test]
fn a_run_on_each_passes_check_with_its_number_of_parameters() {
    let (small, parameters) = (SmallRun::new(), fixture("parameters.json"));
    std::fs::remove_file(small.path("backbone/model.safetensors")).expect("weights to remove");
    for (name, config) in published("served") {
        small.write("backbone/config.json", config.to_string());
        let plan = small.train(&["--check", "--json"]);
        assert_eq!(plan.status, Some(0), "{name}: {}", plan.stderr);
        let plan: Value = serde_json::from_str(&plan.stdout).expect("JSON");
        assert_eq!(plan["backbone_parameters"], parameters[&name]["parameters"], "{name}");
    }
}

#[test]
fn what_cannot_be_run_is_refused_by_what_is_missing() {
    let small = SmallRun::new();
    let (experts, encoder) = ("mixture-of-experts layers", "a vision or audio encoder");
    let (state, block) = ("state-space or linear attention layers", "another kind of decoder block");
    let missing = [
        ("mistralai/Mixtral-8x7B-v0.1", experts),
        ("Qwen/Qwen3-30B-A3B", experts),
        ("deepseek-ai/DeepSeek-V3", experts),
        ("openai/gpt-oss-20b", experts),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", experts),
        ("google/gemma-3-4b-it", encoder),
        ("Qwen/Qwen2.5-VL-7B-Instruct", encoder),
        ("meta-llama/Llama-3.2-11B-Vision", encoder),
        ("state-spaces/mamba-2.8b-hf", state),
        ("ai21labs/Jamba-v0.1", state),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", state),
        ("openai-community/gpt2", block),
        ("tiiuae/falcon-7b", block),
    ];
    let refused = published("refused");
    assert_eq!(refused.len(), missing.len());
    for (name, missing) in missing {
        small.write("backbone/config.json", refused[name].to_string());
        let family = refused[name]["model_type"].as_str().expect("a name");
        small.train(&["--check"]).failed(2, &["backbone/config.json", family, missing, "supported: llama, mistral"]);
    }
}
