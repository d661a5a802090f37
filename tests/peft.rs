//! Promise: adapters are compatible with PEFT: PEFT's compute the same logits here, and PEFT reads those written here.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use medusa::model::adapters::attach_new;
use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::{Adapters, LoraConfig};
use medusa::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE, attach, save_adapters};
use medusa::model::peft_keys::key_use;
use medusa::model::weights::WeightFiles;
use medusa::torch::Generator;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use super::backbone::Fixture;

fn fixture(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/peft_adapter").join(file)
}

/// The base model of the adapter in tests/fixtures, and its folder.
fn base() -> (Llama, TempDir) {
    let folder = Fixture::open("llama_own_head").folder("config");
    let llama = Llama::load(folder.path(), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    (llama, folder)
}

fn input_ids() -> Tensor {
    Fixture::open("llama_own_head").input_ids()
}

fn logits(llama: &Llama, adapters: Adapters) -> Tensor {
    let ids_t = input_ids();
    let rows = RowMask::causal(ids_t.size()[0], &llama.config, Device::Cpu);
    tch::no_grad(|| llama.logits(&llama.hidden_states(&ids_t.unsqueeze(0), &rows, adapters), adapters)).squeeze_dim(0)
}

fn saved_logits(path: &Path, like: &Tensor) -> Tensor {
    let files = WeightFiles::open_file(path).expect("PEFT's logits");
    files.tensor("logits", &like.size(), Kind::Float, Device::Cpu).expect("logits")
}

fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64) {
    let largest = (got - expected).abs().max().double_value(&[]);
    assert!(largest <= tolerance, "largest difference {largest:.1e}; made by scripts/oracles/peft_oracle.py");
}

#[test]
fn an_adapter_that_peft_wrote_computes_what_it_computes_there() {
    let (mut llama, _folder) = base();
    let without = logits(&llama, Adapters::Off);
    attach(&mut llama, &fixture(""), None).expect("an adapter");
    let expected = saved_logits(&fixture("logits.safetensors"), &without);
    assert_close(&logits(&llama, Adapters::On), &expected, 1e-4);
    assert_eq!(logits(&llama, Adapters::Off), without, "the teacher is the backbone as it was");
    assert!((&expected - without).abs().max().double_value(&[]) > 0.1, "the adapter does something");
    assert_close(&logits(&llama.merged(), Adapters::Off), &expected, 1e-4);
}

/// Adapters of rank 4 with random B, and the folder with their files.
fn written() -> (Llama, TempDir, TempDir) {
    let (mut llama, base) = base();
    let config: LoraConfig = toml::from_str("rank = 4\nalpha = 12\ndropout = 0.05").expect("a table");
    attach_new(&mut llama, &config, 9);
    let mut generator = Generator::seeded(10);
    for (_, adapter) in llama.adapters() {
        tch::no_grad(|| adapter.b().shallow_clone().copy_(&(generator.normal_like(adapter.b()) * 0.2)));
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    save_adapters(folder.path(), &llama, "llama_own_head").expect("a place to write");
    (llama, folder, base)
}

#[test]
fn what_is_written_has_pefts_names_and_comes_back_bit_for_bit() {
    let (llama, folder, _base) = written();
    let names = |path: &Path| {
        let files = WeightFiles::open_file(path).expect("an adapter");
        let shape = |name: &str| (name.to_owned(), files.shape(name).expect("a shape"));
        files.names().into_iter().map(shape).collect::<Vec<_>>()
    };
    assert_eq!(names(&folder.path().join(ADAPTER_FILE)), names(&fixture(ADAPTER_FILE)));
    let json = |path: PathBuf| -> serde_json::Value {
        serde_json::from_slice(&fs::read(path).expect("a config")).expect("JSON")
    };
    let (ours, theirs) = (json(folder.path().join(ADAPTER_CONFIG)), json(fixture(ADAPTER_CONFIG)));
    for key in ["peft_type", "task_type", "r", "lora_dropout", "bias", "base_model_name_or_path"] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert_eq!(ours["lora_alpha"].as_f64(), theirs["lora_alpha"].as_f64());
    let (mut again, _folder) = base();
    attach(&mut again, folder.path(), None).expect("our own adapter");
    assert_eq!(logits(&again, Adapters::On), logits(&llama, Adapters::On));
}

/// What scripts/oracles/peft_oracle.py writes about PEFT's LoraConfig.
#[derive(Deserialize)]
struct Listing {
    /// The version.
    peft: String,
    /// Defaults by field.
    fields: BTreeMap<String, Value>,
    /// `init_lora_weights`, and the largest change of the fixture's logits when PEFT loads the adapter with it; `None` if it does not load.
    starts: Vec<(Value, Option<f64>)>,
}

fn listing() -> Listing {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/peft_keys.json");
    serde_json::from_slice(&fs::read(path).expect("a fixture")).expect("its keys")
}

#[test]
fn every_key_of_pefts_lora_config_is_known() {
    let listing = listing();
    let unknown: Vec<&String> = listing.fields.keys().filter(|key| key_use(key).is_none()).collect();
    assert!(unknown.is_empty(), "keys of PEFT {} without a row: {unknown:?}", listing.peft);
    assert!(listing.fields.len() > 40, "{:?}", listing.fields.keys());
}

/// Why the fixture's adapter is refused with these keys, if it is.
fn refused_with(keys: Value) -> Option<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::copy(fixture(ADAPTER_FILE), folder.path().join(ADAPTER_FILE)).expect("a file");
    let config = fs::read(fixture(ADAPTER_CONFIG)).expect("a file");
    let mut config: Map<String, Value> = serde_json::from_slice(&config).expect("a config");
    config.extend(keys.as_object().expect("keys").clone());
    let path = folder.path().join(ADAPTER_CONFIG);
    medusa::files::write_atomic(&path, |file| Ok(serde_json::to_writer(file, &config)?)).expect("a file");
    attach(&mut base().0, folder.path(), None).err().map(|error| error.to_string())
}

#[test]
fn a_start_that_changes_the_base_is_refused() {
    let starts = listing().starts;
    for (start, change) in &starts {
        let refused = refused_with(json!({"init_lora_weights": start}));
        let changes_nothing = change.is_some_and(|change| change < 1e-4);
        let fact = format!("`init_lora_weights` is {start}; expected true or false or");
        assert!(refused.as_ref().map_or(changes_nothing, |why| why.contains(&fact)), "{start}: {refused:?}");
    }
    assert!(starts.iter().filter(|(_, change)| change.is_none_or(|change| change > 1.0)).count() >= 5, "{starts:?}");
}

#[test]
fn what_asks_for_more_than_a_plain_adapter_is_refused() {
    for (key, value) in [
        ("alora_invocation_tokens", json!([5])),
        ("use_dora", json!(true)),
        ("lora_bias", json!(true)),
        ("rank_pattern", json!({"q_proj": 2})),
        ("trainable_token_indices", json!([1])),
        ("modules_to_save", json!(["embed_tokens"])),
        ("kasa_config", json!({"rank": 2})),
        ("r", json!(0)),
        ("a_key_of_a_later_peft", json!("on")),
    ] {
        let refused = refused_with(json!({key: value}));
        let fact = format!("adapter_config.json: `{key}` is {value}; expected ");
        assert!(refused.as_ref().is_some_and(|why| why.contains(&fact)), "{key}: {refused:?}");
    }
    for nothing in [json!(null), json!(false), json!({}), json!([])] {
        assert_eq!(refused_with(json!({"a_key_of_a_later_peft": nothing, "modules_to_save": null})), None, "{nothing}");
    }
}

#[test]
#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with torch, transformers and peft")]
fn peft_itself_reads_what_is_written() {
    let (llama, folder, base) = written();
    let ids: Vec<i64> = Vec::try_from(&input_ids()).expect("ids");
    let (ids_file, out) = (folder.path().join("ids.json"), folder.path().join("logits.safetensors"));
    medusa::files::write_atomic(&ids_file, |file| Ok(serde_json::to_writer(file, &ids)?)).expect("a file");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracles/peft_oracle.py");
    let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
    let mut command = std::process::Command::new(python);
    command.args([script, "logits"]).args([base.path(), folder.path(), &ids_file, &out]);
    let ended = command.output().expect("Python starts");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let got = logits(&llama, Adapters::On);
    assert_close(&got, &saved_logits(&out, &got), 1e-4);
}
