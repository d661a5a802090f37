//! Promise: heads can be exported to every server and imported again, bit-identical in the same dtype; files are
//! written atomically; reading a pickle runs no code.

use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use medusa::draft::error::DrafterError;
use medusa::draft::heads::import::HeadsFile;
use medusa::draft::heads::import::notices::Notice;
use medusa::draft::heads::layout::{HeadPart, HeadTensor, HeadsLayout};
use medusa::draft::heads::{Heads, HeadsShape};
use medusa::dtype::Dtype;
use medusa::export::{ExportFormat, ExportRequest};
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::weights::torch_file;
use medusa::model::weights::{Planned, WeightFiles, save, save_model};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::small_run::{Ended, SmallRun};

const V: i64 = 48;
const H: i64 = 32;
const FORMATS: [&str; 6] = ["heads", "tgi", "vllm", "tensorrt-llm", "merged", "modelopt"];

fn shape(heads: usize, layers: usize, vocab_size: i64) -> HeadsShape {
    HeadsShape {
        medusa_num_heads: heads,
        medusa_num_layers: layers,
        hidden_size: H,
        vocab_size,
        ..HeadsShape::default()
    }
}

/// Writes random heads from a seed, and a config.json as a run writes it. Heads with fewer than V outputs can guess every second token.
fn write_heads(small: &SmallRun, folder: &str, shape: HeadsShape, kind: Kind) {
    fs::create_dir_all(small.path(folder)).expect("a folder");
    let tensors = random(shape, kind);
    let mut named: Vec<_> = shape.tensors().into_iter().map(|(name, _)| name).zip(&tensors).collect();
    let map = Tensor::arange(shape.vocab_size, (Kind::Int64, Device::Cpu)) * 2;
    named.extend((0 < shape.vocab_size && shape.vocab_size < V).then_some(("token_map".to_owned(), &map)));
    save(&small.path(folder).join("heads.safetensors"), &named).expect("heads");
    let config = json!({"base_model_name_or_path": "backbone", "medusa_num_heads": shape.medusa_num_heads,
        "medusa_num_layers": shape.medusa_num_layers, "hidden_size": H, "vocab_size": V});
    small.write(&format!("{folder}/config.json"), config.to_string());
}

fn random(shape: HeadsShape, kind: Kind) -> Vec<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut number = || f64::from(rng.next_u32()) / 2f64.powi(32) - 0.5;
    let mut tensor = |size: &[i64]| {
        let numbers: Vec<f64> = (0..size.iter().product()).map(|_| number()).collect();
        Tensor::from_slice(&numbers).view(size).to_kind(kind)
    };
    shape.tensors().iter().map(|(_, size)| tensor(size)).collect()
}

fn export(small: &SmallRun, heads: &str, format: &str, out: &str, more: &[&str]) -> Ended {
    small.medusa(&[&["export", "--heads", heads, "--format", format, "--out", out], more].concat())
}

/// Like [`export`] with `--backbone backbone`, but in this process, since the layouts need many exports.
fn export_here(small: &SmallRun, heads: &str, format: &str, out: &str, dtype: Option<Dtype>) {
    let request = ExportRequest {
        heads: small.path(heads),
        backbone: Some(small.path("backbone")),
        backbone_name: None,
        format: ExportFormat::from_str(format, false).expect("a format"),
        out: small.path(out),
        dtype,
        medusa_num_heads: None,
        pickle: false,
        calibration: None,
        tree: None,
        bench: None,
    };
    medusa::export::export(&request).unwrap_or_else(|error| panic!("{heads} as {format}: {error}"));
}

/// All tensors of the heads in a folder, as stored.
fn tensors(path: &Path) -> Vec<Tensor> {
    let file = HeadsFile::open(path).unwrap_or_else(|error| panic!("{error}"));
    let read = |place| file.tensor(place, file.kind()).unwrap_or_else(|error| panic!("{error}"));
    file.shape().places().into_iter().map(read).collect()
}

fn assert_same(one: &Path, other: &Path, what: &str) {
    let (one, other) = (tensors(one), tensors(other));
    assert_eq!(one.len(), other.len(), "{what}");
    for (at, (one, other)) in one.iter().zip(&other).enumerate() {
        assert!(one.kind() == other.kind() && one.equal(other), "{what}: tensor {at} changed");
    }
}

fn json_of(small: &SmallRun, name: &str) -> Value {
    serde_json::from_str(&small.read(name)).expect("JSON")
}

#[test]
fn heads_go_through_every_layout_and_come_back_bit_for_bit() {
    let small = SmallRun::new();
    for (number, (heads, layers, kind)) in
        [(1, 1, Kind::Float), (3, 2, Kind::Float), (5, 1, Kind::BFloat16), (3, 1, Kind::Half)].into_iter().enumerate()
    {
        let name = |what: &str| format!("{what}_{number}");
        write_heads(&small, &name("h"), shape(heads, layers, V), kind);
        let dtype = [(Kind::Float, Dtype::Float32), (Kind::BFloat16, Dtype::BFloat16), (Kind::Half, Dtype::Float16)];
        let dtype = dtype.iter().find(|(of, _)| *of == kind).expect("one of three").1;
        // Each export reads the previous one, and the last step converts back to the first format.
        let mut from = name("h");
        for format in FORMATS.into_iter().chain(["heads"]) {
            let out = name(&format!("{format}_from_{}", from.replace('/', "_")));
            export_here(&small, &from, format, &out, Some(dtype));
            assert_same(&small.path(&name("h")), &small.path(&out), &out);
            assert_eq!(HeadsFile::open(&small.path(&out)).expect("heads").shape(), shape(heads, layers, V), "{out}");
            from = out;
        }
    }
}

#[test]
fn heads_that_share_the_lm_head_come_back_shared_or_with_its_copies() {
    let small = SmallRun::new();
    let lm_head = WeightFiles::open(&small.path("backbone")).expect("weights");
    let lm_head = lm_head.mapped("lm_head.weight", &[V, H]).expect("an lm_head");
    for (heads, layers) in [(1, 1), (5, 1), (3, 2)] {
        let name = format!("h_{heads}_{layers}");
        write_heads(&small, &name, shape(heads, layers, 0), Kind::Float);
        for format in FORMATS.into_iter().filter(|format| *format != "tgi" || layers == 1) {
            let out = format!("{format}_{name}");
            export_here(&small, &name, format, &out, None);
            let (file, own) = (HeadsFile::open(&small.path(&out)).expect("heads"), tensors(&small.path(&out)));
            if ["heads", "tgi", "vllm"].contains(&format) {
                assert_same(&small.path(&name), &small.path(&out), &out);
                let in_file = file.lm_head().expect("a tensor");
                assert_eq!(in_file.is_some(), format == "vllm", "{out}");
                assert!(in_file.is_none_or(|found| found.equal(&lm_head)), "{out}: vLLM's is the backbone's");
            } else {
                assert_eq!(file.shape(), shape(heads, layers, V), "{out}");
                assert!(own.iter().filter(|tensor| tensor.size() == [V, H]).all(|w2| w2.equal(&lm_head)), "{out}");
            }
        }
        let vllm = format!("vllm_{name}");
        export_here(&small, &vllm, "heads", &format!("back_{name}"), None);
        assert_same(&small.path(&name), &small.path(&format!("back_{name}")), "back from vLLM");
    }
}

#[test]
fn configs_say_what_their_loaders_read_and_nothing_that_they_stumble_on() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(3, 1, V), Kind::Float);
    write_heads(&small, "s", shape(3, 1, 0), Kind::Float);
    let config = |heads: &str, format: &str| {
        let out = format!("{format}_{heads}");
        export(&small, heads, format, &out, &[]).succeeded();
        json_of(&small, &format!("{out}/config.json"))
    };
    for (heads, version) in [("h", "1"), ("s", "2")] {
        let expected = json!({"base_model_name_or_path": "backbone", "medusa_num_heads": 3, "medusa_num_layers": 1, "version": version});
        assert_eq!(config(heads, "tgi"), expected, "TGI ignores heads whose config has `architectures`");
        let vllm = config(heads, "vllm");
        let said = ["medusa_fc_bias", "original_lm_head", "num_heads", "num_hidden_layers", "vocab_size", "model_type"];
        let expected = [json!(true), json!(heads == "s"), json!(3), json!(1), json!(V), json!("medusa")];
        assert_eq!(said.map(|key| vllm[key].clone()), expected, "biases are dropped unless it says medusa_fc_bias");
        let counts = |key: &&String| key.contains("num") && key.contains("heads");
        let keys: Vec<&String> = vllm.as_object().expect("an object").keys().filter(counts).collect();
        assert_eq!(keys, ["num_heads"], "vLLM takes each of them for the number of heads");
    }
    let backbone = json_of(&small, "backbone/config.json");
    let (merged, modelopt) = (config("h", "merged"), config("h", "modelopt"));
    assert_eq!((&merged["medusa_num_heads"], &merged["medusa_num_layers"]), (&json!(3), &json!(1)));
    assert_eq!(modelopt["medusa"], json!({"num_medusa_heads": 3, "num_medusa_layers": 1}));
    for key in ["architectures", "hidden_size", "num_attention_heads", "rope_theta"] {
        assert!(merged[key] == backbone[key] && modelopt[key] == backbone[key], "{key}");
    }
}

#[test]
fn configs_name_no_folder_of_the_machine() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(3, 1, V), Kind::Float);
    let machine = small.path("backbone").display().to_string();
    small.edit("h/config.json", "\"backbone\"", &format!("{machine:?}"));
    let printed = export(&small, "h", "tgi", "public", &[]).succeeded().stderr;
    let said = format!("config.json calls the backbone \"backbone\": the path {machine} is left out");
    assert!(printed.contains(&said), "{printed}");
    assert_eq!(json_of(&small, "public/config.json")["base_model_name_or_path"], "backbone");
    small.edit("backbone/config.json", "{", "{\"_name_or_path\": \"/home/ann/base\", ");
    let printed = export(&small, "h", "merged", "public_merged", &[]).succeeded().stderr;
    assert!(!printed.contains("config.json calls"), "{printed}");
    assert_eq!(json_of(&small, "public_merged/config.json").get("_name_or_path"), None);
}

#[test]
fn the_first_heads_alone_and_another_dtype() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(5, 2, V), Kind::Float);
    let more = ["--medusa-num-heads", "2", "--dtype", "bfloat16", "--json"];
    let ended = export(&small, "h", "vllm", "first", &more).succeeded();
    let said: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert_eq!((&said["medusa_num_heads"], &said["dtype"]), (&json!(2), &json!("bfloat16")));
    let rounding = said["difference_to_trained"]["largest"].as_f64().expect("a number");
    assert!(rounding > 0.0 && rounding < 0.1, "{rounding}");
    let expected: Vec<Tensor> = tensors(&small.path("h")).into_iter().take(10).collect();
    let got = tensors(&small.path("first"));
    assert_eq!(got.len(), expected.len());
    assert!(got.iter().zip(&expected).all(|(got, trained)| got.equal(&trained.to_kind(Kind::BFloat16))));
    export(&small, "h", "heads", "most", &["--medusa-num-heads", "6"])
        .failed(2, &["--medusa-num-heads 6", "h/heads.safetensors has only 5 heads"]);
}

#[test]
fn a_merged_folder_is_a_backbone_and_its_heads() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    export(&small, "run/final", "merged", "merged", &[]).succeeded();
    assert_eq!(
        small.names("merged"),
        ["README.md", "config.json", "medusa.sha256", "model.safetensors", "prompts.hashes", "recipe.toml"]
    );
    let found: Value =
        serde_json::from_str(&small.medusa(&["inspect", "merged", "--json"]).succeeded().stdout).expect("JSON");
    assert_eq!((&found["kind"], &found["heads"]["layout"]), (&json!("backbone"), &json!("merged")));
    assert_eq!(found["heads"]["medusa_num_heads"], 2);
    // Training can start from these heads.
    small.edit("recipe.toml", "[heads]", "[heads]\ninit_from = \"merged\"");
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"again\"");
    small.train(&[]).succeeded();
}

#[test]
fn a_backbone_that_was_trained_whole_goes_with_its_heads() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[stage.medusa1]", "[stage.medusa2]");
    small.train(&[]).succeeded();
    export(&small, "run/final", "modelopt", "out", &[]).succeeded();
    let [tuned, written] =
        ["run/final/backbone", "out"].map(|folder| WeightFiles::open(&small.path(folder)).expect("weights"));
    for name in tuned.names() {
        let read = |files: &WeightFiles| files.mapped(name, &tuned.shape(name).expect("a shape")).expect("a tensor");
        assert!(read(&tuned).equal(&read(&written)), "{name}: the trained backbone's, not the base's");
    }
    let alone = export(&small, "run/final", "heads", "alone", &[]).succeeded();
    assert!(alone.stderr.contains("trained with them (run/final/backbone)"), "{}", alone.stderr);
}

#[test]
fn heads_in_shards_are_found_by_the_index() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(3, 2, V), Kind::Float);
    export(&small, "h", "merged", "one", &[]).succeeded();
    fs::create_dir(small.path("shards")).expect("a folder");
    small.write("shards/config.json", small.bytes("one/config.json"));
    let files = WeightFiles::open(&small.path("one")).expect("weights");
    let read = |name: &str| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor");
    let planned: Vec<Planned> = files.names().into_iter().map(|name| Planned::of(name.into(), &read(name))).collect();
    save_model(&small.path("shards"), &planned, 10_000, &mut |at| Ok(read(&planned[at].name))).expect("shards");
    assert!(small.names("shards").len() > 4, "{:?}", small.names("shards"));
    assert_same(&small.path("h"), &small.path("shards"), "from shards");
    export(&small, "shards", "vllm", "vllm", &[]).succeeded();
    assert_same(&small.path("h"), &small.path("vllm"), "from shards to vLLM");
    let sha256 = |folder: &str| HeadsFile::open(&small.path(folder)).expect("heads").sha256().expect("a hash");
    assert_ne!(sha256("shards"), sha256("one"));
    assert_eq!(sha256("one"), medusa::files::sha256(&small.path("one/model.safetensors")).expect("a hash"));
}

#[test]
fn inspect_says_whose_layout_a_folder_has() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(3, 2, V), Kind::BFloat16);
    for (format, layout) in [("heads", "heads"), ("vllm", "vllm"), ("tensorrt-llm", "heads")] {
        export(&small, "h", format, format, &["--backbone", "backbone"]).succeeded();
        let found: Value =
            serde_json::from_str(&small.medusa(&["inspect", format, "--json"]).succeeded().stdout).expect("JSON");
        let said = ["kind", "layout", "medusa_num_heads", "medusa_num_layers", "vocab_size", "dtypes"];
        let expected = [json!("heads"), json!(layout), json!(3), json!(2), json!(V), json!(["BF16"])];
        assert_eq!(said.map(|key| found[key].clone()), expected, "{format}");
    }
    let text = small.medusa(&["inspect", "vllm"]).succeeded().stdout;
    assert!(text.contains("vLLM's draft model") && text.contains("3 heads of 2 ResBlocks"), "{text}");
}

#[test]
fn the_card_says_what_is_known_and_nothing_else() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    export(&small, "run/final", "tgi", "bare", &[]).succeeded();
    let bare = small.read("bare/README.md");
    for part in ["---\nlibrary_name", "- speculative-decoding", "--speculate 2", "[heads]\nmedusa_num_heads = 2"] {
        assert!(bare.contains(part), "{part:?} is not in:\n{bare}");
    }
    let unknown = ["license", "base_model:", "## Speed", "## Accuracy", "## Tree"];
    assert!(!unknown.iter().any(|part| bare.contains(part)), "{bare}");
    let calibrate = [
        "calibrate",
        "--backbone",
        "backbone",
        "--heads",
        "run/final",
        "--data",
        "rows.jsonl",
        "--out",
        "run/calibration.json",
    ];
    small.medusa(&calibrate).succeeded();
    small.write("run/tree.json", "[[0], [1], [0, 0]]");
    small
        .write("bench.json", r#"{"acceleration_rate": 2.514, "overhead": 1.2, "speedup": 2.09, "device": "a device"}"#);
    export(&small, "run/final", "vllm", "full", &["--bench", "bench.json"]).succeeded();
    let full = small.read("full/README.md");
    for part in [
        "tokens per step: 2.51",
        "speedup: 2.09",
        "on a device",
        "| 2 | t + 3 |",
        "has 3 nodes",
        "\"num_speculative_tokens\": 2",
    ] {
        assert!(full.contains(part), "{part:?} is not in:\n{full}");
    }
    assert_eq!(small.bytes("full/tree.json"), small.bytes("run/tree.json"));
    export(&small, "run/final", "heads", "same", &[]).succeeded();
    let same = (small.bytes("same/calibration.json"), small.bytes("run/calibration.json"));
    assert_eq!(same.0, same.1, "of the same bytes of heads");
    // A calibration of other heads is left out; so is a tree with more levels than heads.
    write_heads(&small, "run/other", shape(1, 1, V), Kind::Float);
    let other = export(&small, "run/other", "tgi", "other", &[]).succeeded();
    assert!(other.stderr.contains("calibration.json is left out of the model card: it was measured with other heads"));
    assert!(other.stderr.contains("tree.json is left out of the model card: it needs 2 heads, and 1 are exported"));
    assert_eq!(
        small.names("other"),
        ["README.md", "config.json", "medusa.sha256", "medusa_lm_head.safetensors", "prompts.hashes", "recipe.toml"]
    );
    export(&small, "run/other", "tgi", "named", &["--calibration", "run/calibration.json"])
        .failed(1, &["run/calibration.json", "measured with other heads"]);
    let stranger = json!({"choices": [[0]], "calibration_sha256": "00".repeat(32)}).to_string();
    small.write("stranger.json", &stranger);
    export(&small, "run/final", "vllm", "strange", &["--tree", "stranger.json"])
        .failed(1, &["stranger.json", "it was chosen from another calibration"]);
    small.write("run/tree.json", &stranger);
    let without = export(&small, "run/final", "vllm", "without", &[]).succeeded();
    assert!(without.stderr.contains("tree.json is left out of the model card: it was chosen from another calibration"));
}

/// A run with a calibration and a tree for two heads.
fn calibrated() -> SmallRun {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    let (backbone, inputs) = (small.path("backbone"), "--heads run/final --data rows.jsonl --out run/calibration.json");
    let backbone = ["calibrate", "--backbone", backbone.to_str().expect("UTF-8")];
    small.medusa(&backbone.into_iter().chain(inputs.split(' ')).collect::<Vec<_>>()).succeeded();
    small.write("run/tree.json", "[[0], [1], [0, 0]]");
    small
}

#[test]
fn a_calibration_goes_with_the_exported_heads() {
    let small = calibrated();
    export(&small, "run/final", "vllm", "out", &["--dtype", "bfloat16"]).succeeded();
    let (trained, exported) = (json_of(&small, "run/calibration.json"), json_of(&small, "out/calibration.json"));
    let sha256 = |name: &str| json!(medusa::files::sha256(&small.path(name)).expect("a hash"));
    assert_eq!(exported["heads_sha256"], sha256("out/model.safetensors"));
    assert_eq!(exported["backbone"], "backbone", "without the folders of this machine");
    assert_eq!(exported["exported_from"]["heads_sha256"], trained["heads_sha256"]);
    assert_eq!(exported["exported_from"]["calibration_sha256"], sha256("run/calibration.json"));
    assert_eq!((&exported["heads"], &exported["joint"]), (&trained["heads"], &trained["joint"]));
    let step = |nodes: usize, step_ms: f64| json!({"nodes": nodes, "depth": 1, "step_ms": step_ms});
    let times = json!({"device": "cpu", "engine": "tch", "engine_flag": "auto", "dtype": "float32", "threads": 1, "context": 32, "backbone": "backbone",
        "heads_sha256": exported["heads_sha256"], "plain_step_ms": 2.0, "steps": [step(1, 2.5), step(4, 3.0)]});
    small.write("l.json", times.to_string());
    let tree = "--calibration out/calibration.json --latency l.json --backbone backbone --heads out --out t.json";
    small.medusa(&["tree"].into_iter().chain(tree.split(' ')).collect::<Vec<_>>()).succeeded();
    small.medusa(&["inspect", "out/calibration.json"]).succeeded();
    let first = trained["heads_sha256"].as_str().expect("a hash");
    assert!(small.read("out/README.md").contains(&format!("for the heads with SHA-256 {first}")));
    // A second export still names the original heads.
    export(&small, "out", "heads", "again", &[]).succeeded();
    let again = json_of(&small, "again/calibration.json");
    assert_eq!(again["heads_sha256"], sha256("again/medusa_lm_head.safetensors"));
    assert_eq!(again["exported_from"], exported["exported_from"]);
    assert!(small.read("again/README.md").contains(&format!("for the heads with SHA-256 {first}")));
}

#[test]
fn the_first_heads_alone_have_nothing_of_the_others() {
    let small = calibrated();
    small.write("run/bench.json", r#"{"acceleration_rate": 2.5, "speedup": 2.1}"#);
    let ended = export(&small, "run/final", "tgi", "first", &["--medusa-num-heads", "1"]).succeeded();
    let left_out = [
        "tree.json is left out of the model card: it needs 2 heads, and 1 are exported",
        "bench.json is left out of the model card: its figures are of all 2 heads, and 1 are exported",
    ];
    assert!(left_out.iter().all(|words| ended.stderr.contains(words)), "{}", ended.stderr);
    assert_eq!(
        small.names("first"),
        [
            "README.md",
            "calibration.json",
            "config.json",
            "medusa.sha256",
            "medusa_lm_head.safetensors",
            "prompts.hashes",
            "recipe.toml"
        ]
    );
    let card = small.read("first/README.md");
    assert!(card.contains("| 1 | t + 2 |") && !card.contains("| 2 | t + 3 |") && !card.contains("## Speed"), "{card}");
    let (whole, first) = (json_of(&small, "run/calibration.json"), json_of(&small, "first/calibration.json"));
    assert_eq!(first["heads"], json!([whole["heads"][0]]));
    assert!(whole.to_string().contains("\"path\":[0,"), "a path of both heads: {}", whole["joint"]["paths"]);
    let paths = first["joint"]["paths"].as_array().expect("paths");
    assert!(!paths.is_empty() && paths.iter().all(|path| path["path"].as_array().is_some_and(|path| path.len() == 1)));
    let runs = first["joint"]["runs"].as_array().expect("runs").iter().flat_map(|run| run.as_array().expect("a run"));
    assert!(runs.into_iter().all(|ranks| ranks.as_array().is_some_and(|ranks| ranks.len() <= 1)));
    let tree = |name: &str, kind: &[&str]| {
        let flags = ["tree", "--calibration", "first/calibration.json", "--nodes", "2", "--out", name];
        small.medusa(&[&flags[..], kind].concat()).succeeded()
    };
    tree("t.json", &[]);
    export(&small, "first", "heads", "with_tree", &["--tree", "t.json"]).succeeded();
    tree("d.json", &["--dynamic"]);
    export(&small, "first", "heads", "no tree", &["--tree", "d.json"])
        .failed(1, &["d.json: it is chosen at each step, and only format medusa-train has such trees"]);
    export(&small, "first", "medusa-train", "own", &["--tree", "d.json"]).succeeded();
    assert_eq!(small.bytes("own/tree.json"), small.bytes("d.json"));
    let card = small.read("own/README.md");
    assert!(
        card.contains(" --tree FOLDER/tree.json ") && card.contains("tree.json has 2 nodes, chosen at each step, and "),
        "{card}"
    );
    export(&small, "run/final", "tgi", "named", &["--medusa-num-heads", "1", "--tree", "run/tree.json"])
        .failed(1, &["run/tree.json: it needs 2 heads, and 1 are exported"]);
    assert!(!small.path("named").exists());
}

#[test]
fn a_sweeps_bench_gives_its_fastest_result_and_what_cannot_be_read_is_reported() {
    let small = calibrated();
    let line = |nodes: u32, speedup: f64| {
        format!(
            "{{\"acceleration_rate\": 2.0, \"overhead\": 1.1, \"speedup\": {speedup}, \"sweep\": {{\"name\": \"nodes\", \"value\": {nodes}}}}}\n"
        )
    };
    small.write("sweep.json", [line(4, 1.5), line(16, 1.75), line(64, 0.9)].concat());
    export(&small, "run/final", "heads", "out", &["--bench", "sweep.json"]).succeeded();
    let card = small.read("out/README.md");
    for part in ["speedup: 1.75", "before export; the fastest of 3 results of a sweep, with nodes = 16.\n"] {
        assert!(card.contains(part), "{part:?} is not in:\n{card}");
    }
    small.write("none.json", "");
    export(&small, "run/final", "heads", "none", &["--bench", "none.json"])
        .failed(1, &["none.json: it is empty; expected what `medusa bench --json` prints"]);
    small.write("other.json", "{\"speedup\": 2.0}");
    export(&small, "run/final", "heads", "none", &["--bench", "other.json"])
        .failed(1, &["other.json: missing field `acceleration_rate`", "expected what `medusa bench --json` prints"]);
    small.write("run/bench.json", r#"{"acceleration_rate": 2.5, "speedup": 2.1, "forced_acceptance_rate": 2.5}"#);
    let words = "bench.json is left out of the model card: its acceptance was forced to 2.5 tokens per step";
    assert!(export(&small, "run/final", "heads", "forced", &[]).succeeded().stderr.contains(words));
    assert!(!small.read("forced/README.md").contains("## Speed"));
    export(&small, "run/final", "heads", "none", &["--bench", "run/bench.json"])
        .failed(1, &["run/bench.json: its acceptance was forced to 2.5 tokens per step"]);
    small.write("run/bench.json", r#"{"acceleration_rate": 1.5, "speedup": 1.4, "drafter": "ngram"}"#);
    let words = "bench.json is left out of the model card: its figures are of --drafter ngram, not of these heads";
    assert!(export(&small, "run/final", "heads", "ngram", &[]).succeeded().stderr.contains(words));
    assert!(!small.read("ngram/README.md").contains("## Speed"));
    small.write("medusa.json", r#"{"acceleration_rate": 1.5, "speedup": 1.4, "drafter": "medusa"}"#);
    export(&small, "run/final", "heads", "medusa", &["--bench", "medusa.json"]).succeeded();
    small.write("medusa.json", r#"{"acceleration_rate": 1.5, "speedup": 1.4, "drafter": "hydra"}"#);
    export(&small, "run/final", "heads", "none", &["--bench", "medusa.json"])
        .failed(1, &["medusa.json: its figures are of --drafter hydra, not of these heads"]);
    fs::remove_file(small.path("run/bench.json")).expect("a file");
    // A recipe that cannot be read is left out with a message.
    small.write("run/recipe.toml", b"\xff\xfe");
    let ended = export(&small, "run/final", "heads", "recipe", &[]).succeeded();
    assert!(ended.stderr.contains("recipe.toml is left out of the model card: it is text in UTF-16"));
    assert!(!small.path("recipe/recipe.toml").exists());
}

#[test]
fn of_two_exports_to_one_folder_one_is_refused() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(5, 2, V), Kind::Float);
    let start = |format| {
        let arguments = ["export", "--heads", "h", "--format", format, "--out", "out"];
        let mut command = small.program(env!("CARGO_BIN_EXE_medusa"), &arguments);
        command.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null()).spawn().expect("it starts")
    };
    let both = ["merged", "merged"].map(start).map(|program| Ended::from(program.wait_with_output().expect("it ends")));
    let refused: Vec<_> = both.iter().filter(|ended| ended.status != Some(0)).collect();
    assert_eq!(refused.len(), 1, "{both:?}");
    let while_it_writes = refused[0].stderr.contains("out is being written by another process");
    refused[0].failed(1, &[if while_it_writes { "choose another folder" } else { "out exists already" }]);
    assert_same(&small.path("h"), &small.path("out"), "the other's");
    assert!(!small.names(".").iter().any(|name| name.ends_with(".partial")), "{:?}", small.names("."));
}

#[test]
fn the_lm_head_of_a_damaged_vllm_file_is_an_error() {
    let small = SmallRun::new();
    write_heads(&small, "s", shape(2, 1, 0), Kind::Float);
    export(&small, "s", "vllm", "v", &[]).succeeded();
    small.forget_checksums("v");
    let blocks = tensors(&small.path("s"));
    for (size, got) in [(&[][..], "[]"), (&[V], "[48]"), (&[V, 16], "[48, 16]"), (&[1, V, H], "[1, 48, 32]")] {
        let lm_head = Tensor::zeros(size, (Kind::Float, Device::Cpu));
        let names = shape(2, 1, 0)
            .tensors()
            .into_iter()
            .map(|(name, _)| format!("blocks.{}", name.replace(".0.linear", ".layers.0")));
        let all: Vec<_> = names.chain(["lm_head.weight".to_owned()]).zip(blocks.iter().chain([&lm_head])).collect();
        save(&small.path("v/model.safetensors"), &all).expect("weights");
        for format in ["merged", "vllm", "heads"] {
            let facts = ["v/model.safetensors: tensor \"lm_head.weight\": expected [vocabulary, 32]", got];
            export(&small, "v", format, "out", &["--backbone", "backbone"]).failed(1, &facts);
        }
    }
}

/// Heads, format, further flags, exit status, substrings of the error.
type Refused<'a> = (&'a str, &'a str, &'a [&'a str], i32, &'a [&'a str]);

#[test]
fn what_cannot_be_exported_leaves_nothing() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(3, 1, V), Kind::Float);
    write_heads(&small, "deep", shape(3, 2, 0), Kind::Float);
    write_heads(&small, "alone", shape(3, 1, 0), Kind::Float);
    fs::remove_file(small.path("alone/config.json")).expect("a file");
    small.write("taken/x", b"");
    fs::create_dir_all(small.path("empty")).expect("a folder");
    let before = small.names(".");
    let cases: [Refused; 10] = [
        (
            "alone",
            "tgi",
            &[],
            2,
            &["--format tgi needs the backbone", "base_model_name_or_path", "give --backbone FOLDER"],
        ),
        ("empty", "heads", &[], 1, &["empty holds no heads; expected heads.safetensors", "medusa_lm_head.pt"]),
        ("h", "peft", &[], 2, &["--format peft", "h has no adapter (adapter_config.json)"]),
        ("deep", "tgi", &[], 2, &["deep has 2 ResBlocks per head", "only with one ResBlock"]),
        ("alone", "merged", &[], 2, &["--format merged needs the backbone", "give --backbone FOLDER"]),
        ("alone", "vllm", &[], 2, &["--format vllm needs the backbone (its lm_head", "give --backbone FOLDER"]),
        ("h", "vllm", &["--pickle"], 2, &["--pickle needs --format heads, tensorrt-llm or hydra"]),
        ("h", "merged", &["--backbone", "nowhere"], 1, &["nowhere"]),
        (
            "backbone",
            "heads",
            &[],
            1,
            &["backbone/model.safetensors: tensor", "does not belong to Medusa or Hydra heads"],
        ),
        ("rows.jsonl", "heads", &[], 1, &["rows.jsonl: not a whole safetensors file"]),
    ];
    for (heads, format, more, status, facts) in cases {
        export(&small, heads, format, "out", more).failed(status, facts);
        assert_eq!(small.names("."), before, "{heads} as {format}");
    }
    let big = shape(1, 1, V)
        .tensors()
        .into_iter()
        .map(|(name, size)| (name, Tensor::full(size.as_slice(), 1e6, (Kind::Float, Device::Cpu))));
    let big: Vec<_> = big.collect();
    save(
        &small.path("h/heads.safetensors"),
        &big.iter().map(|(name, tensor)| (name.clone(), tensor)).collect::<Vec<_>>(),
    )
    .expect("heads");
    export(&small, "h", "heads", "out", &["--dtype", "float16"])
        .failed(1, &["head 1 in float16 produces NaN or infinity"]);
    write_heads(&small, "h", HeadsShape { hidden_size: 16, ..shape(3, 1, V) }, Kind::Float);
    export(&small, "h", "tgi", "out", &[]).failed(1, &["h/heads.safetensors: hidden size: expected 32, got 16"]);
    assert_eq!(small.names("."), before);
    export(&small, "h", "heads", "taken", &[]).failed(1, &["taken exists already"]);
}

#[test]
fn an_empty_folder_is_as_good_as_a_new_one() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(1, 1, V), Kind::Float);
    fs::create_dir(small.path("empty")).expect("a folder");
    export(&small, "h", "heads", "empty", &[]).succeeded();
    assert!(small.names("empty").contains(&"README.md".to_owned()));
}

#[test]
#[cfg(unix)]
fn a_link_to_nothing_has_the_name_from_the_start() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(1, 1, V), Kind::Float);
    std::os::unix::fs::symlink("nothing", small.path("link")).expect("a link");
    export(&small, "h", "heads", "link", &[]).failed(1, &["link exists already"]);
}

/// Rewrites a weights file with the first number of one tensor changed.
fn spoil(small: &SmallRun, name: &str, tensor: &str, number: f64) {
    let path = small.path(name);
    let files = WeightFiles::open_file(&path).expect("weights");
    let read = |name: &str| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor").copy();
    let tensors: Vec<(String, Tensor)> = files.names().into_iter().map(|name| (name.into(), read(name))).collect();
    let spoilt = tensors.iter().find(|(name, _)| name.contains(tensor)).expect("the tensor");
    let _ = spoilt.1.view(-1).get(0).fill_(number);
    save(&path, &tensors.iter().map(|(name, tensor)| (name.clone(), tensor)).collect::<Vec<_>>()).expect("weights");
}

#[test]
fn numbers_that_are_none_are_refused_also_where_they_are_only_copied() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[stage.medusa1]", "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.train(&[]).succeeded();
    write_heads(&small, "s", shape(2, 1, 0), Kind::Float);
    spoil(&small, "run/final/adapter_model.safetensors", "lora_B", f64::NAN);
    small.forget_checksums("run/final");
    let refused = |facts: &[&str]| {
        for format in ["peft", "merged"] {
            export(&small, "run/final", format, "out", &[]).failed(1, facts);
        }
    };
    refused(&["run/final/adapter_model.safetensors", "lora_B.weight\": expected finite numbers, got NaN at [0, 0]"]);
    spoil(&small, "run/final/adapter_model.safetensors", "lora_B", 0.0);
    spoil(&small, "backbone/model.safetensors", "model.norm", 3e38);
    refused(&["the backbone, with what was trained of it, in float32 produces NaN or infinity"]);
    spoil(&small, "backbone/model.safetensors", "lm_head", 70_000.0);
    export(&small, "s", "vllm", "out", &["--dtype", "float16"])
        .failed(1, &["the backbone's lm_head in float16 produces NaN or infinity"]);
    export(&small, "s", "vllm", "out", &["--dtype", "bfloat16"]).succeeded();
}

#[test]
#[cfg(unix)]
fn a_file_that_cannot_be_written_leaves_nothing() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(5, 1, V), Kind::Float);
    let script = "trap '' XFSZ; ulimit -f 30; exec \"$1\" export --heads h --format heads --out out/heads";
    let mut limited = small.program("bash", &["-c", script, "bash", env!("CARGO_BIN_EXE_medusa")]);
    fs::create_dir(small.path("out")).expect("a folder");
    Ended::from(limited.output().expect("bash"))
        .failed(1, &["cannot write out/.heads.partial/medusa_lm_head.safetensors", "File too large"]);
    assert!(small.names("out").is_empty());
}

fn pickled(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pickled").join(name)
}

#[test]
fn pickled_heads_are_the_numbers_that_torch_saved() {
    let expected = tensors(&pickled("expected.safetensors"));
    let kinds = [("float32", Kind::Float), ("bfloat16", Kind::BFloat16), ("float16", Kind::Half)];
    for (dtype, kind) in kinds {
        for container in ["zip", "legacy"] {
            let path = pickled(&format!("{container}_{dtype}.pt"));
            let file = HeadsFile::open(&path).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((file.layout(), file.kind()), (HeadsLayout::Heads, kind));
            let got = tensors(&path);
            assert_eq!(got.len(), 6);
            for (got, expected) in got.iter().zip(&expected) {
                assert!(got.to_kind(Kind::Float).equal(expected), "{container} {dtype}");
            }
        }
    }
    for views in ["strided.pt", "parameters.pt"] {
        assert_same(&pickled(views), &pickled("expected.safetensors"), views);
    }
}

#[test]
fn tied_resblocks_are_reported_and_get_weights_of_their_own() {
    let tied = HeadsFile::open(&pickled("tied.pt")).expect("heads");
    assert_eq!(
        tied.shape(),
        HeadsShape {
            medusa_num_heads: 2,
            medusa_num_layers: 2,
            hidden_size: 4,
            vocab_size: 6,
            ..HeadsShape::default()
        }
    );
    let is_tied = |notices: &[Notice]| matches!(notices, [Notice::Tied { heads, .. }] if heads == &[1, 2]);
    assert!(is_tied(&tied.notices().expect("notices")));
    let backbone = LlamaConfig::load(&crate::published::published("models/stories260K")).expect("a config");
    let backbone = LlamaConfig { vocab_size: 6, hidden_size: 4, ..backbone };
    let heads = Heads::load_for(&pickled("tied.pt"), &backbone, Kind::Float, Device::Cpu).expect("heads");
    let w1 = |at: usize| heads.parameters()[at].1.shallow_clone();
    assert!(w1(0).equal(&w1(2)) && w1(0).data_ptr() != w1(2).data_ptr());
    // safetensors cannot show sharing; equal bits are detected instead.
    let folder = tempfile::tempdir().expect("a folder");
    heads.save(folder.path()).expect("heads");
    assert!(is_tied(&HeadsFile::open(folder.path()).expect("heads").notices().expect("notices")));
    // Untrained blocks are all zero, but not tied.
    let lm_head = Tensor::ones([6, 4], (Kind::Float, Device::Cpu));
    let config: medusa::draft::heads::HeadsConfig =
        toml::from_str("medusa_num_heads = 2\nmedusa_num_layers = 2").expect("a table");
    Heads::new(&config, &lm_head, None).save(folder.path()).expect("heads");
    assert_eq!(HeadsFile::open(folder.path()).expect("heads").notices().expect("notices"), []);
}

#[test]
fn code_in_a_pickle_is_refused_and_not_run() {
    let small = SmallRun::new();
    for name in ["calls_system.pt", "calls_system_legacy.pt"] {
        small.write(name, fs::read(pickled(name)).expect("a fixture"));
        for verb in [&["inspect", name][..], &["export", "--heads", name, "--format", "heads", "--out", "out"]] {
            let facts = [name, "wants to call `posix.system`", "it was not run"];
            small.medusa(verb).failed(1, &facts);
        }
        assert!(!small.path("it_was_run").exists() && !small.path("out").exists());
    }
    small.write("module.pt", fs::read(pickled("whole_module.pt")).expect("a fixture"));
    small.medusa(&["inspect", "module.pt"]).failed(1, &["module.pt", "torch.nn.modules.container.ModuleList"]);
}

#[test]
fn a_cut_or_changed_pickle_is_one_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cut.pt");
    let write =
        |bytes: &[u8]| medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, bytes)).expect("a file");
    for name in ["zip_float32.pt", "legacy_float32.pt"] {
        let whole = fs::read(pickled(name)).expect("a fixture");
        for length in (0..whole.len()).step_by(7).filter(|&length| length > 0) {
            write(&whole[..length]);
            assert!(HeadsFile::open(&path).is_err(), "{name} cut to {length} bytes");
        }
        for at in (0..whole.len()).step_by(5) {
            let mut changed = whole.clone();
            changed[at] ^= 0x55;
            write(&changed);
            let _ = HeadsFile::open(&path).map(|file| file.check_alone()); // any answer except a panic
        }
    }
}

#[test]
fn a_written_pickle_is_read_and_loads_into_every_layout() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(3, 2, V), Kind::Half);
    for format in ["heads", "tensorrt-llm"] {
        export(&small, "h", format, &format!("{format}_pt"), &["--pickle"]).succeeded();
        assert_eq!(
            small.names(&format!("{format}_pt")),
            ["README.md", "config.json", "medusa.sha256", "medusa_lm_head.pt"]
        );
        assert_same(&small.path("h"), &small.path(&format!("{format}_pt")), format);
    }
    export(&small, "heads_pt", "vllm", "vllm", &[]).succeeded();
    assert_same(&small.path("h"), &small.path("vllm"), "from the pickle to vLLM");
}

#[test]
fn counts_come_from_tensors_and_the_config_is_corrected_aloud() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(5, 1, V), Kind::Float);
    small.edit("h/config.json", "\"medusa_num_heads\":5", "\"medusa_num_heads\":2");
    let ended = export(&small, "h", "tgi", "out", &[]).succeeded();
    assert!(
        ended.stderr.contains("h/config.json says medusa_num_heads = 2, but the file holds 5: 5 are used"),
        "{}",
        ended.stderr
    );
    assert_eq!(json_of(&small, "out/config.json")["medusa_num_heads"], 5);
}

/// vLLM files written by others: without biases, with a truncated vocabulary, with the original prefix.
#[test]
fn files_of_vllm_are_read_as_vllm_means_them() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(2, 1, V), Kind::Float);
    export(&small, "h", "vllm", "v", &[]).succeeded();
    let rewrite = |folder: &str, keep: &dyn Fn(&str) -> Option<String>, config: &[(&str, Value)]| {
        fs::create_dir_all(small.path(folder)).expect("a folder");
        let files = WeightFiles::open(&small.path("v")).expect("weights");
        let read = |name: &str| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor");
        let kept: Vec<(String, Tensor)> =
            files.names().into_iter().filter_map(|name| Some((keep(name)?, read(name)))).collect();
        let named: Vec<_> = kept.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        save(&small.path(folder).join("model.safetensors"), &named).expect("weights");
        let mut of_folder = json_of(&small, "v/config.json");
        config.iter().for_each(|(key, value)| of_folder[*key] = value.clone());
        small.write(&format!("{folder}/config.json"), of_folder.to_string());
    };
    let no_bias = |name: &str| (!name.ends_with("bias")).then(|| name.to_owned());
    rewrite("no_bias", &no_bias, &[("medusa_fc_bias", json!(false))]);
    let file = HeadsFile::open(&small.path("no_bias")).expect("heads");
    assert!(matches!(&file.notices().expect("notices")[..], [Notice::NoBias { .. }]));
    let heads = tensors(&small.path("no_bias"));
    assert!(
        heads.len() == 6
            && heads.iter().filter(|t| t.dim() == 1).all(|bias| bias.count_nonzero(None).int64_value(&[]) == 0)
    );
    rewrite("lost_bias", &no_bias, &[]);
    small
        .medusa(&["export", "--heads", "lost_bias", "--format", "heads", "--out", "out"])
        .failed(1, &["no tensor \"blocks.0.layers.0.bias\""]);
    let no_block = |name: &str| no_bias(name).filter(|name| name != "blocks.1.layers.0.weight");
    rewrite("lost_block", &no_block, &[("medusa_fc_bias", json!(false))]);
    small
        .medusa(&["export", "--heads", "lost_block", "--format", "heads", "--out", "out"])
        .failed(1, &["no tensor \"blocks.1.layers.0.weight\""]);
    rewrite("dropped", &|name| Some(name.to_owned()), &[("medusa_fc_bias", json!(false))]);
    assert!(matches!(
        &HeadsFile::open(&small.path("dropped")).expect("heads").notices().expect("notices")[..],
        [Notice::DroppedBias { .. }]
    ));
    rewrite("prefixed", &|name| Some(format!("medusa_heads.{name}")), &[]);
    assert_same(&small.path("h"), &small.path("prefixed"), "vLLM's prefix");
    rewrite("scaled", &|name| Some(name.to_owned()), &[("logit_scale", json!(0.5))]);
    small
        .medusa(&["export", "--heads", "scaled", "--format", "heads", "--out", "out"])
        .failed(1, &["scaled/config.json: logit_scale is 0.5", "1.0"]);
    let map = |name: &str| Some(if name == "lm_heads.1.weight" { "token_map" } else { name }.to_owned());
    rewrite("truncated", &map, &[]);
    small
        .medusa(&["export", "--heads", "truncated", "--format", "heads", "--out", "out"])
        .failed(1, &["token_map", "I64"]);
}

#[test]
fn a_tensor_without_a_place_is_refused_and_a_single_head_shares_no_w2() {
    let small = SmallRun::new();
    let of_three = HeadsShape { shared_w2: true, ..shape(3, 1, V) };
    let tensors: Vec<_> =
        of_three.tensors().into_iter().map(|(name, _)| name).zip(random(of_three, Kind::Float)).collect();
    let write = |folder: &str, rename: &dyn Fn(&str) -> Option<&'static str>| {
        fs::create_dir_all(small.path(folder)).expect("a folder");
        let named: Vec<_> =
            tensors.iter().filter_map(|(name, tensor)| Some((rename(name)?.to_owned(), tensor))).collect();
        save(&small.path(folder).join("heads.safetensors"), &named).expect("heads");
        HeadsFile::open(&small.path(folder))
    };
    let one = |name: &str| ["0.0.linear.weight", "0.0.linear.bias", "w2.weight"].into_iter().find(|kept| *kept == name);
    assert_eq!(write("one", &one).expect("heads").shape(), shape(1, 1, V));
    let behind = write("behind", &|name| one(name).map(|name| if name == "w2.weight" { "0.3.weight" } else { name }));
    let error = behind.expect_err("no third layer").to_string();
    assert!(error.contains("tensor \"0.3.weight\" does not belong to Medusa or Hydra heads"), "{error}");
}

/// Files of vLLM with a token map: W2 may have a row for each token of the map, or for every token.
#[test]
fn token_maps_of_vllm_are_read_as_vllm_means_them() {
    let small = SmallRun::new();
    write_heads(&small, "h", shape(2, 1, V), Kind::Float);
    export(&small, "h", "vllm", "v", &[]).succeeded();
    let files = WeightFiles::open(&small.path("v")).expect("weights");
    let read = |name: &str| files.mapped(name, &files.shape(name).expect("a shape")).expect("a tensor");
    let rows_n = Tensor::from_slice(&[3_i64, 7, 40]);
    let write = |folder: &str, map: &[i64], one_w2: bool, all_rows: bool| {
        fs::create_dir_all(small.path(folder)).expect("a folder");
        let mut kept: Vec<(String, Tensor)> = vec![("token_map".into(), Tensor::from_slice(map))];
        for name in files.names() {
            let is_w2 = name.starts_with("lm_heads");
            if name == "lm_heads.1.weight" && one_w2 {
                continue;
            }
            let tensor = if is_w2 && !all_rows { read(name).index_select(0, &rows_n) } else { read(name) };
            kept.push((name.to_owned(), tensor));
        }
        let named: Vec<_> = kept.iter().map(|(name, tensor)| (name.clone(), tensor)).collect();
        save(&small.path(folder).join("model.safetensors"), &named).expect("weights");
        let mut config = json_of(&small, "v/config.json");
        config["original_lm_head"] = json!(one_w2);
        config["truncated_vocab_size"] = json!(map.len());
        small.write(&format!("{folder}/config.json"), config.to_string());
    };
    for (one_w2, all_rows) in [(false, false), (false, true), (true, false), (true, true)] {
        let folder = format!("t_{one_w2}_{all_rows}");
        write(&folder, &[3, 7, 40], one_w2, all_rows);
        let file = HeadsFile::open(&small.path(&folder)).expect("heads");
        let expected = HeadsShape { shared_w2: one_w2, ..shape(2, 1, 3) };
        assert_eq!((file.shape(), file.token_map()), (expected, Some(&[3, 7, 40][..])), "{folder}");
        let w2 = HeadTensor { head: 1, layer: 1, part: HeadPart::W2 };
        let from = if one_w2 { "lm_heads.0.weight" } else { "lm_heads.1.weight" };
        assert_eq!(file.tensor(w2, Kind::Float).expect("W2"), read(from).index_select(0, &rows_n), "{folder}");
        only_whole_projections_need_their_backbone(&small, &file, all_rows);
        export(&small, &folder, "vllm", &format!("{folder}_again"), &[]).succeeded();
        assert_same(&small.path(&folder), &small.path(&format!("{folder}_again")), &folder);
    }
    for (map, error) in [
        (&[3, 7, 7][..], "token_map holds token 7 twice"),
        (&[-1, 7, 40], "token_map holds token -1"),
        (&[3, 7, 40, 41], "token_map has 4 tokens, and the output layers have 3 rows"),
        (&[3, 7, 48], "token_map holds token 48, and the backbone has 48"),
        (&[], "token_map is empty"),
    ] {
        write("bad", map, false, false);
        small
            .medusa(&[
                "calibrate",
                "--backbone",
                "backbone",
                "--heads",
                "bad",
                "--data",
                "rows.jsonl",
                "--out",
                "c.json",
            ])
            .failed(1, &["bad/model.safetensors", error]);
    }
}

/// A backbone that lacks one token, none of the map's.
fn only_whole_projections_need_their_backbone(small: &SmallRun, file: &HeadsFile, are_whole: bool) {
    let backbone = LlamaConfig::load(&small.path("backbone")).expect("a config");
    file.check(&backbone).expect("its backbone");
    let smaller = LlamaConfig { vocab_size: V - 1, ..backbone };
    let error = file.check(&smaller).err().map(|error| error.to_string());
    let is_refused = error.as_ref().is_some_and(|error| error.contains("vocabulary: expected 47, got 48"));
    assert_eq!((error.is_some(), is_refused), (are_whole, are_whole), "{error:?}");
}

/// Also refused when loading for decoding, where the backbone's lm_head is packed.
#[test]
fn heads_with_the_lm_head_of_another_backbone_are_refused() {
    let small = SmallRun::new();
    write_heads(&small, "s", shape(2, 1, 0), Kind::Float);
    export(&small, "s", "vllm", "vs", &[]).succeeded();
    let loaded_for_decoding = || {
        [Purpose::Decoding, Purpose::Batches].map(|purpose| {
            let llama = Llama::load(&small.path("backbone"), Kind::BFloat16, Device::Cpu, purpose).expect("a backbone");
            Heads::load(&small.path("vs"), &llama).err()
        })
    };
    assert!(loaded_for_decoding().iter().all(Option::is_none));
    let other = random(shape(1, 1, V), Kind::Float);
    let mut named: Vec<_> = shape(2, 1, 0)
        .tensors()
        .into_iter()
        .map(|(name, _)| name.replace(".0.linear", ".layers.0"))
        .map(|name| format!("blocks.{name}"))
        .collect();
    named.push("lm_head.weight".into());
    let blocks = tensors(&small.path("s"));
    let all: Vec<_> = named.into_iter().zip(blocks.iter().chain([&other[2]])).collect();
    save(&small.path("vs/model.safetensors"), &all).expect("weights");
    small.forget_checksums("vs");
    export(&small, "vs", "merged", "out", &["--backbone", "backbone"])
        .failed(1, &["vs/model.safetensors: tensor \"lm_head.weight\" is not the backbone's lm_head"]);
    for error in loaded_for_decoding() {
        assert!(matches!(error, Some(DrafterError::OtherLmHead { .. })), "{error:?}");
    }
}

#[test]
fn an_adapter_goes_with_its_heads() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[stage.medusa1]", "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.train(&[]).succeeded();
    export(&small, "run/final", "peft", "peft", &[]).succeeded();
    let files = [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "medusa.sha256",
        "medusa_lm_head.safetensors",
        "prompts.hashes",
        "recipe.toml",
    ];
    assert_eq!(small.names("peft"), files);
    assert_same(&small.path("run/final"), &small.path("peft"), "heads beside the adapter");
    assert_eq!(small.bytes("peft/adapter_model.safetensors"), small.bytes("run/final/adapter_model.safetensors"));
    assert_eq!(json_of(&small, "peft/config.json")["version"], 1.0);
    assert_eq!(json_of(&small, "peft/adapter_config.json"), json_of(&small, "run/final/adapter_config.json"));
    small.edit_trusted("run/final/adapter_config.json", "\"backbone\"", "\"/home/ann/backbone\"");
    export(&small, "run/final", "peft", "public", &["--backbone", "backbone"]).succeeded();
    assert_eq!(json_of(&small, "public/adapter_config.json"), json_of(&small, "peft/adapter_config.json"));
    let alone = export(&small, "run/final", "tgi", "tgi", &[]).succeeded();
    assert!(alone.stderr.contains("these heads belong to the backbone that was trained with them"), "{}", alone.stderr);
    assert!(small.read("tgi/README.md").contains("trained together with their backbone"));
    export(&small, "run/final", "merged", "merged", &[]).succeeded();
    export(&small, "run/final/heads.safetensors", "merged", "of_file", &[]).succeeded();
    assert!(
        small.bytes("of_file/model.safetensors") == small.bytes("merged/model.safetensors"),
        "the adapter beside a file"
    );
}

/// Each consumer's loading rules, reimplemented in Python: see scripts/oracles/read_exports.py.
#[test]
#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with numpy and safetensors")]
fn readers_of_another_hand_find_the_same_numbers() {
    let small = SmallRun::new();
    write_heads(&small, "own", shape(3, 1, V), Kind::Float);
    write_heads(&small, "two_layers", shape(5, 2, V), Kind::Float);
    write_heads(&small, "shared", shape(3, 1, 0), Kind::Float);
    write_heads(&small, "one_w2", HeadsShape { shared_w2: true, ..shape(3, 1, V) }, Kind::Float);
    write_heads(&small, "truncated", shape(3, 1, 20), Kind::Float);
    write_heads(&small, "both", HeadsShape { shared_w2: true, ..shape(3, 1, 20) }, Kind::Float);
    let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracles/read_exports.py");
    for heads in ["own", "two_layers", "shared", "one_w2", "truncated", "both"] {
        let formats = if ["truncated", "both"].contains(&heads) { &["vllm"][..] } else { &FORMATS };
        for (dtype, name) in [(Dtype::Float32, "float32"), (Dtype::BFloat16, "bfloat16"), (Dtype::Float16, "float16")] {
            let out = |format: &str| format!("{format}_{heads}_{name}");
            let folders: Vec<String> = formats
                .iter()
                .map(|format| {
                    export_here(&small, heads, format, &out(format), Some(dtype));
                    format!("{format}={}", out(format))
                })
                .collect();
            let trained = format!("{heads}/heads.safetensors");
            let mut arguments = vec![script, trained.as_str(), "backbone", name];
            arguments.extend(folders.iter().map(String::as_str));
            let ended = Ended::from(small.program(&python, &arguments).output().expect("Python starts")).succeeded();
            assert_eq!(
                ended.stdout.lines().filter(|line| line.starts_with("ok ")).count(),
                formats.len(),
                "{}",
                ended.stdout
            );
        }
    }
}

/// Like [`readers_of_another_hand_find_the_same_numbers`], for heads with an adapter.
#[test]
#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with numpy and safetensors")]
fn a_reader_of_another_hand_finds_heads_beside_an_adapter() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[stage.medusa1]", "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.train(&[]).succeeded();
    export(&small, "run/final", "peft", "peft", &["--dtype", "bfloat16"]).succeeded();
    let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracles/read_exports.py");
    let arguments = [script, "run/final/heads.safetensors", "backbone", "bfloat16", "peft=peft"];
    let ended = Ended::from(small.program(&python, &arguments).output().expect("Python starts")).succeeded();
    assert_eq!(ended.stdout, "ok peft: 2 heads of 1 ResBlock(s), 6 tensors of bfloat16, logits equal\n");
}

/// Checks this test's pickle writer against PyTorch's reader.
#[test]
#[cfg_attr(not(python), ignore = "needs MEDUSA_PYTHON: a Python with torch")]
fn torch_loads_a_written_pickle_with_weights_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("heads.pt");
    let tensor = Tensor::from_slice2(&[[1.5f32, 2.0], [3.0, -4.0]]);
    let tensors = [tensor.tr(), tensor.to_kind(Kind::BFloat16)];
    let planned = [Planned::of("0.1.weight".into(), &tensors[0]), Planned::of("b".into(), &tensors[1])];
    torch_file::save(&path, &planned, &mut |at| Ok(tensors[at].shallow_clone())).expect("a file");
    let script = "import sys, torch; s = torch.load(sys.argv[1], weights_only=True); \
                  print(list(s), s['0.1.weight'].tolist(), s['b'].dtype, s['b'].float().tolist())";
    let python = std::env::var("MEDUSA_PYTHON").expect("set, says build.rs");
    let ended: Ended =
        std::process::Command::new(python).args(["-c", script]).arg(&path).output().expect("Python starts").into();
    let expected = "['0.1.weight', 'b'] [[1.5, 3.0], [2.0, -4.0]] torch.bfloat16 [[1.5, 2.0], [3.0, -4.0]]\n";
    assert_eq!(ended.succeeded().stdout, expected);
}
