//! Promise: every key that transformers' configuration classes have, or look up, is read, refused or known to change nothing.

use std::collections::BTreeMap;
use std::path::Path;

use medusa::model::config::LlamaConfig;
use medusa::model::config::key_table::key_use;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::backbone::write;
use super::published_configs::published;
use crate::program::medusa;

/// What scripts/fixtures/make_config_fixtures.py writes.
#[derive(Deserialize)]
struct Listing {
    transformers: String,
    families: BTreeMap<String, Keys>,
}

#[derive(Deserialize)]
struct Keys {
    fields: Map<String, Value>,
    looked_up: Vec<String>,
}

#[test]
fn every_key_of_transformers_classes_is_known() {
    let listing = listing();
    let mut unknown = Vec::new();
    for (family, Keys { fields, looked_up }) in &listing.families {
        let keys = fields.keys().chain(looked_up);
        unknown.extend(keys.filter(|key| key_use(family, key).is_none()).map(|key| format!("{family}: {key}")));
    }
    assert!(unknown.is_empty(), "keys of transformers {} without a row: {unknown:?}", listing.transformers);
    assert_eq!(listing.families.len(), 10);
}

fn listing() -> Listing {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/configs/keys.json");
    serde_json::from_slice(&std::fs::read(path).expect("a fixture")).expect("its keys")
}

/// `num_key_value_heads`, `head_dim`, `rms_norm_eps`, `tie_word_embeddings`, window, soft caps and factor of scores.
#[test]
fn defaults_are_those_of_transformers_classes() {
    let (folder, heads, head_dim) = (tempfile::tempdir().expect("a temporary folder"), 32, 8);
    for (family, Keys { fields, .. }) in listing().families {
        let config = json!({"model_type": family, "hidden_size": heads * head_dim, "intermediate_size": 8, "num_hidden_layers": 8,
            "num_attention_heads": heads, "vocab_size": 8, "max_position_embeddings": 64});
        write(&folder.path().join("config.json"), config.to_string().as_bytes());
        let got = LlamaConfig::load(folder.path()).expect("a config");
        let number = |key: &str| fields.get(key).and_then(Value::as_f64);
        let or = |key: &str, default: i64| fields.get(key).and_then(Value::as_i64).unwrap_or(default);
        assert_eq!(got.num_key_value_heads, or("num_key_value_heads", heads), "{family}");
        assert_eq!(got.head_dim, or("head_dim", head_dim), "{family}");
        assert_eq!(Some(got.rms_norm_eps), number("rms_norm_eps"), "{family}");
        assert_eq!(fields["tie_word_embeddings"], got.tie_word_embeddings, "{family}");
        let is_used = fields.get("use_sliding_window").is_none_or(|used| *used == true);
        let window = number("sliding_window").filter(|_| is_used);
        assert_eq!(got.sliding_window.map(|window| window as f64), window, "{family}");
        let traits = &got.family;
        assert_eq!(traits.attention_softcap, number("attn_logit_softcapping"), "{family}");
        assert_eq!(traits.logits.softcap, number("final_logit_softcapping"), "{family}");
        let scale = number("query_pre_attn_scalar").map(|scalar| scalar.powf(-0.5)).or(number("attention_multiplier"));
        assert_eq!(traits.attention_scale, scale, "{family}");
    }
}

#[test]
fn a_key_that_nobody_knows_is_accepted_and_reported() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = json!({"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "vocab_size": 8, "max_position_embeddings": 64, "use_cache": true, "unsloth_version": "2026.1"});
    write(&folder.path().join("config.json"), config.to_string().as_bytes());
    assert!(LlamaConfig::load(folder.path()).is_ok());
    let inspected = medusa(&["inspect"]).arg(folder.path()).output().expect("it runs");
    let inspected = String::from_utf8_lossy(&inspected.stdout).into_owned();
    assert!(inspected.contains("unknown keys unsloth_version\n"), "{inspected}");
}

#[test]
fn a_key_that_nobody_knows_is_reported_by_what_loads_the_backbone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/tiny/backbone");
    for entry in std::fs::read_dir(&tiny).expect("the embedded model") {
        let path = entry.expect("a file").path();
        let mut bytes = std::fs::read(&path).expect("its bytes");
        if path.ends_with("config.json") {
            let mut config: Value = serde_json::from_slice(&bytes).expect("JSON");
            config["layer_skip_factor"] = json!(2);
            bytes = config.to_string().into_bytes();
        } else if path.ends_with("generation_config.json") {
            bytes = json!({"eos_token_id": 2, "temperature": 0.7, "repetition_penalty": 1.1}).to_string().into_bytes();
        }
        write(&folder.path().join(path.file_name().expect("a name")), &bytes);
    }
    let mut generate = medusa(&["generate", "--prompt", "hello", "--max-new-tokens", "1", "--backbone"]);
    let generated = generate.arg(folder.path()).output().expect("it runs");
    let printed = String::from_utf8_lossy(&generated.stderr).into_owned();
    assert!(generated.status.success(), "{printed}");
    assert!(
        printed.contains("generation_config.json: keys without effect here: repetition_penalty (1.1)\n"),
        "{printed}"
    );
    assert!(printed.contains("/config.json: keys without effect here: layer_skip_factor (2)\n"), "{printed}");
}

#[test]
fn every_key_of_published_configs_is_known() {
    for (name, config) in published("served") {
        let family = config["model_type"].as_str().expect("a name");
        let mut keys = config.as_object().expect("keys").keys();
        assert_eq!(keys.find(|key| key_use(family, key).is_none()), None, "{name}");
    }
}
