//! Promise: a backbone loaded from `torch.save` files computes the same as from safetensors, and no code in such files
//! is run.

use std::fs;
use std::path::{Path, PathBuf};

use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::weights::torch_file;
use medusa::model::weights::{Planned, WeightFiles};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use super::small_run::SmallRun;

use crate::program::medusa;

const SHARDS: [&str; 3] =
    ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];

/// A file written by scripts/fixtures/make_torch_backbone.py.
fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/torch_backbone").join(name)
}

/// A folder with the fixture's config and these of its files, renamed.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (from, to) in [&[("config.json", "config.json")], files].concat() {
        fs::copy(fixture(from), folder.path().join(to)).expect("a fixture");
    }
    folder
}

fn logits(folder: &TempDir) -> Tensor {
    let llama = Llama::load(folder.path(), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    let tokens_bt = Tensor::from_slice(&[1i64, 7, 39, 2, 7, 11]).view([1, 6]);
    let rows = RowMask::causal(6, &llama.config, Device::Cpu);
    tch::no_grad(|| llama.logits(&llama.hidden_states(&tokens_bt, &rows, Adapters::Off), Adapters::Off))
}

fn refusal(folder: &TempDir) -> String {
    let loaded = Llama::load(folder.path(), Kind::Float, Device::Cpu, Purpose::Training);
    loaded.expect_err("these weights cannot be used").to_string()
}

#[test]
fn torch_files_compute_the_same_bits_as_safetensors() {
    let expected = logits(&folder(&[("model.safetensors", "model.safetensors")]));
    let shards = SHARDS.map(|name| (name, name));
    for files in [
        &[("pytorch_model.bin", "pytorch_model.bin")][..],
        &[("legacy.bin", "pytorch_model.bin")],
        &shards,
        // With safetensors present, a `.bin` file that would be refused is not read.
        &[("model.safetensors", "model.safetensors"), ("calls_code.bin", "pytorch_model.bin")],
    ] {
        assert!(logits(&folder(files)) == expected, "{files:?}");
    }
}

#[test]
fn a_backbones_file_is_listed_and_what_is_missing_of_one_is_said() {
    let inspect = |path: &Path| {
        let ended = medusa(&["inspect"]).arg(path).output().expect("it runs");
        String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned()
    };
    let listed = inspect(&fixture("pytorch_model.bin"));
    assert!(listed.contains("model.layers.0.self_attn.mask") && listed.contains("BOOL"), "{listed}");
    assert!(listed.contains("lm_head.weight") && listed.contains("BF16  [40, 16]"), "{listed}");
    let [index, first, second] = SHARDS;
    let missing = inspect(folder(&[(index, index), (first, first)]).path());
    assert!(missing.contains(second) && missing.contains("is missing"), "{missing}");
}

#[test]
fn a_file_that_calls_code_is_refused_and_the_code_is_not_run() {
    let spoilt = folder(&[("calls_code.bin", "pytorch_model.bin")]);
    let error = refusal(&spoilt);
    assert!(error.contains("pytorch_model.bin: it wants to call `posix.system`"), "{error}");
    assert!(!Path::new("it_was_run").exists());
}

#[test]
fn a_missing_shard_and_a_damaged_file_are_named() {
    let [index, first, second] = SHARDS;
    let error = refusal(&folder(&[(index, index), (first, first)]));
    assert!(error.contains(second) && error.contains("1 of 2 shards are there"), "{error}");
    let cut = folder(&[]);
    let whole = fs::read(fixture("pytorch_model.bin")).expect("a fixture");
    let write = |bytes: &[u8]| {
        let path = cut.path().join("pytorch_model.bin");
        medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, bytes)).expect("a file");
    };
    write(&whole[..whole.len() - 100]);
    let error = refusal(&cut);
    assert!(error.contains("pytorch_model.bin: not a whole file of torch.save"), "{error}");
}

#[test]
fn a_run_on_torch_files_is_planned_and_trained_as_on_safetensors() {
    let small = SmallRun::new();
    let plan = |small: &SmallRun| small.train(&["--check"]).succeeded().stdout;
    let expected = plan(&small);
    small.train(&[]).succeeded();
    let heads = small.bytes("run/final/heads.safetensors");
    fs::remove_dir_all(small.path("run")).expect("a folder to remove");

    let files = WeightFiles::open(&small.path("backbone")).expect("weights");
    let tensor = |name: &str| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor");
    let names: Vec<String> = files.names().into_iter().map(str::to_owned).collect();
    let planned: Vec<Planned> = names.iter().map(|name| Planned::of(name.clone(), &tensor(name))).collect();
    let path = small.path("backbone/pytorch_model.bin");
    torch_file::save(&path, &planned, &mut |at| Ok(tensor(&names[at]))).expect("a file");
    fs::remove_file(small.path("backbone/model.safetensors")).expect("a file to remove");
    assert_eq!(plan(&small), expected);
    let found: serde_json::Value =
        serde_json::from_str(&small.medusa(&["inspect", "backbone", "--json"]).succeeded().stdout).expect("JSON");
    assert_eq!(found["weights_bytes"], small.bytes("backbone/pytorch_model.bin").len());
    small.train(&[]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == heads);
    small.edit("backbone/config.json", "\"intermediate_size\": 48", "\"intermediate_size\": 40");
    small.train(&["--check"]).failed(1, &["pytorch_model.bin", "gate_proj.weight", "[40, 32]", "[48, 32]"]);
}
