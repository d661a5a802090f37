//! Promise: where two places state one fact, the backbone is the one that transformers computes, or it is refused with both places named.

use std::collections::BTreeMap;
use std::path::Path;

use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::weights;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use super::backbone::{assert_near, over_the_row, write};

/// Of sums in another order; logits are up to 13.
const TOLERANCE: f64 = 1e-5;
/// Folders that transformers reads, and that are refused: two programs would read them differently, or a tensor would be left out.
const REFUSED: [&str; 30] = [
    "rope_scaling of another type",
    "rope_scaling with another factor",
    "rope_scaling loses the theta of rope_parameters",
    "rope_scaling default beside rope_parameters",
    "rope_parameters by layer in Llama",
    "partial_rotary_factor in Llama",
    "partial_rotary_factor in Qwen3's rope_parameters",
    "original context of Phi-3 by default",
    "yarn is longrope in Phi-3",
    "rope_scaling beside rope_parameters in Phi-3",
    "rope_scaling changes rope_parameters of Gemma 3",
    "rope_parameters of no kind of layer in Gemma 3",
    "tied, with another lm_head",
    "tied, with an lm_head alone",
    "untied, without lm_head",
    "tied by default, with another lm_head",
    "use_sliding_window false in Mistral",
    "sliding_window in Llama",
    "layer_types beside use_sliding_window false in SmolLM3",
    "sliding_window_pattern in Gemma 2",
    "layer_types in Phi-3",
    "bidirectional Gemma 2",
    "bidirectional Gemma 3",
    "is_causal false",
    "hidden_act beside hidden_activation",
    "hidden_activation beside hidden_act",
    "attention_bias false beside biases",
    "attn_logit_softcapping in Qwen2",
    "fewer layers than tensors",
    "transformers_weights",
];

/// What scripts/fixtures/make_config_fixtures.py writes.
#[derive(Deserialize)]
struct Fixture {
    transformers: String,
    ids: Vec<i64>,
    /// Names and shapes, of several models.
    tensors: Vec<BTreeMap<String, Vec<i64>>>,
    cases: BTreeMap<String, Case>,
}

#[derive(Deserialize)]
struct Case {
    config: Value,
    generation_config: Option<Value>,
    keys: [String; 2],
    tensors: usize,
    copies: BTreeMap<String, String>,
    /// Seeds of the weights, by file.
    files: BTreeMap<String, u32>,
    /// What transformers computes, unless it fails.
    logits: Option<Vec<Vec<f64>>>,
    eos: Option<Vec<i64>>,
}

impl Fixture {
    fn open() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/configs/two_sources.json");
        serde_json::from_slice(&std::fs::read(path).expect("a fixture of the project")).expect("its keys")
    }

    fn folder(&self, case: &Case) -> TempDir {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let json = |name: &str, value: &Value| write(&folder.path().join(name), value.to_string().as_bytes());
        json("config.json", &case.config);
        case.generation_config.iter().for_each(|generation| json("generation_config.json", generation));
        for (file, &seed) in &case.files {
            let shapes = &self.tensors[case.tensors];
            let mut tensors: Vec<(String, Tensor)> =
                shapes.iter().map(|(name, shape)| (name.clone(), weight(name, shape, seed))).collect();
            let of = |name: &String| weight(name, &shapes[name], seed);
            tensors.extend(case.copies.iter().map(|(copy, name)| (copy.clone(), of(name))));
            if file != weights::MODEL_FILE {
                let weight_map: Map<String, Value> =
                    tensors.iter().map(|(name, _)| (name.clone(), file.as_str().into())).collect();
                json(weights::MODEL_INDEX, &json!({"weight_map": weight_map}));
            }
            let tensors: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
            weights::save(&folder.path().join(file), &tensors).expect("a file of a test");
        }
        folder
    }
}

/// As the script's `weight`.
fn weight(name: &str, shape: &[i64], seed: u32) -> Tensor {
    let start = name.bytes().fold(2_166_136_261 ^ seed, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    let value = |index: u32| {
        let x = start.wrapping_add(index.wrapping_mul(2_654_435_761));
        let x = (x ^ (x >> 16)).wrapping_mul(0x045d_9f3b);
        (((x ^ (x >> 16)) >> 24) as f32 - 127.5) / 256.0
    };
    let numbers = u32::try_from(shape.iter().product::<i64>()).expect("a small tensor");
    let values: Vec<f32> = (0..numbers).map(value).collect();
    let values = Tensor::from_slice(&values).view(shape);
    if shape.len() == 2 { values } else { values / 2 + 1 }
}

#[test]
fn two_sources_of_one_fact_are_read_as_transformers_reads_them_or_refused() {
    let _no_grad = tch::no_grad_guard();
    let fixture = Fixture::open();
    let origin = format!("scripts/fixtures/make_config_fixtures.py, transformers {}", fixture.transformers);
    let mut refused = Vec::new();
    for (name, case) in &fixture.cases {
        let folder = fixture.folder(case);
        let loaded = Llama::load(folder.path(), Kind::Float, Device::Cpu, Purpose::Training);
        let mut llama = match (loaded, &case.logits) {
            (Ok(llama), Some(_)) => llama,
            (Ok(_), None) => panic!("{name}: transformers fails"),
            (Err(error), logits) => {
                let error = error.to_string();
                assert!(case.keys.iter().all(|key| error.contains(key)), "{name}: {:?} in {error}", case.keys);
                refused.extend(logits.is_some().then_some(name.as_str()));
                continue;
            }
        };
        llama.set_context(fixture.ids.len() as i64);
        let (_, logits) = over_the_row(&llama, &Tensor::from_slice(&fixture.ids));
        let expected = case.logits.as_ref().expect("matched above");
        let rows = expected.len() as i64;
        let expected = Tensor::from_slice2(expected);
        let last = logits.narrow(0, logits.size()[0] - rows, rows);
        assert_near(name, &last, &expected, TOLERANCE, &origin);
        assert_eq!(Some(&llama.config.eos_token_ids), case.eos.as_ref(), "{name}");
    }
    let mut expected = REFUSED;
    expected.sort_unstable();
    assert_eq!(refused, expected, "what is refused though transformers reads it");
}

#[test]
fn what_is_wrong_with_one_source_is_refused_too() {
    let fixture = Fixture::open();
    let case = &fixture.cases["generation_config beside config"];
    let folder = fixture.folder(case);
    let refusal = |file: &str, key: &str, value: Value| {
        let path = folder.path().join(file);
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        json[key] = value;
        let folder = tempfile::tempdir().expect("a temporary folder");
        write(&folder.path().join("config.json"), case.config.to_string().as_bytes());
        write(&folder.path().join(file), json.to_string().as_bytes());
        LlamaConfig::load(folder.path()).expect_err(key).to_string()
    };
    for (file, key, value, words) in [
        ("generation_config.json", "eos_token_id", json!([4, 19]), "ids below vocab_size = 19, got 19"),
        ("config.json", "eos_token_id", json!(-1), "ids below vocab_size = 19, got -1"),
        ("config.json", "torch_dtype", json!("int3"), "one of bfloat16, float16, half, float32"),
        ("config.json", "quantization_config", json!({"quant_method": "awq"}), "quantised (awq), which is not read"),
        ("config.json", "no_rope_layers", json!([0, 1]), "null beside `model_type` llama"),
    ] {
        let error = refusal(file, key, value);
        assert!([file, key, words].iter().all(|part| error.contains(part)), "{error}");
    }
}

/// The refusal of a plain Llama with these tensors beside its own.
fn with_tensors(more: &[(&str, &[i64])]) -> Result<Llama, String> {
    let mut fixture = Fixture::open();
    let plain = &fixture.cases["untied, without lm_head"];
    let (config, tensors) = (json!({"tie_word_embeddings": true}), plain.tensors);
    let more = more.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec()));
    fixture.tensors[tensors].extend(more);
    let plain = fixture.cases.get_mut("untied, without lm_head").expect("a case");
    plain.config["tie_word_embeddings"] = config["tie_word_embeddings"].clone();
    let folder = fixture.folder(&fixture.cases["untied, without lm_head"]);
    let outlined = Llama::outline(folder.path()).map(drop).map_err(|error| error.to_string());
    let loaded = Llama::load(folder.path(), Kind::Float, Device::Cpu, Purpose::Training);
    let loaded = loaded.map_err(|error| error.to_string());
    assert_eq!(loaded.as_ref().err(), outlined.as_ref().err(), "a check without data finds the same");
    loaded
}

#[test]
fn a_tensor_that_nothing_reads_is_an_error_unless_it_is_known_to_be_harmless() {
    let harmless: &[(&str, &[i64])] = &[
        ("model.layers.0.self_attn.rotary_emb.inv_freq", &[8]),
        ("model.layers.1.self_attn.masked_bias", &[1]),
        ("medusa_head.0.0.linear.weight", &[32, 32]),
    ];
    with_tensors(harmless).expect("a backbone");
    for (name, expected) in [
        ("score.weight", "\"score.weight\" has no place in the backbone of config.json"),
        ("vision_tower.patch.weight", "do config.json and the weights belong together?"),
        ("model.layers.0.self_attn.q_proj.bias", "`attention_bias` and `mlp_bias`"),
        ("model.layers.0.mlp.up_proj.qweight", "quantised (GPTQ or AWQ), which is not read"),
        ("model.layers.0.mlp.up_proj.weight_scale", "quantised (FP8), which is not read"),
    ] {
        let error = with_tensors(&[(name, &[4])]).expect_err(name);
        let parts = ["model.safetensors", name, expected];
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let several = with_tensors(&[("a", &[1]), ("b", &[1]), ("c", &[1])]).expect_err("three tensors");
    assert!(several.contains("tensor \"a\" and 2 others have no place"), "{several}");
}

#[test]
fn an_adapter_beside_the_weights_is_refused() {
    let fixture = Fixture::open();
    let folder = fixture.folder(&fixture.cases["untied, without lm_head"]);
    let adapter = folder.path().join("adapter_config.json");
    medusa::files::write_atomic(&adapter, |out| std::io::Write::write_all(out, b"{}")).expect("a file");
    let error = Llama::outline(folder.path()).map(drop).expect_err("an adapter").to_string();
    assert!(error.contains("adapter_config.json: transformers applies an adapter"), "{error}");
}
