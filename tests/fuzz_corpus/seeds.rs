//! Makes the inputs that fuzzing begins with, from fixtures and from files that this program writes. scripts/fuzz --minimise keeps those that
//! reach code which no other reaches.

mod mistakes;

use std::fs;
use std::io::{Cursor, Read};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use arrow::datatypes::{Int32Type, Schema};
use arrow::ipc::CompressionType;
use arrow::ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use medusa::data::cache::TokenCache;
use medusa::data::{self, LoadSettings};
use medusa::formats::trained_prompts::TrainedPrompts;
use parquet::arrow::ArrowWriter;
use parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use parquet::file::properties::{WriterProperties, WriterVersion};
use serde_json::{Value, json};
use zip::ZipArchive;

use super::readers::checkpoint_files;
use crate::gguf::damage::damaged_files;

/// Seeds, each of a reader.
#[derive(Default)]
struct Seeds(Vec<(&'static str, Vec<u8>)>);

impl Seeds {
    fn add(&mut self, reader: &'static str, input: impl AsRef<[u8]>) {
        self.0.push((reader, input.as_ref().to_vec()));
    }

    fn all<T: AsRef<[u8]>>(&mut self, reader: &'static str, inputs: impl IntoIterator<Item = T>) {
        inputs.into_iter().for_each(|input| self.add(reader, input));
    }

    fn write(&self, folder: &Path) {
        for (number, (reader, input)) in self.0.iter().enumerate() {
            let folder = folder.join(reader);
            fs::create_dir_all(&folder).expect("a folder for seeds");
            medusa::files::write_atomic(&folder.join(format!("seed-{number:04}")), |out| {
                std::io::Write::write_all(out, input)
            })
            .expect("a seed");
        }
    }
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn bytes(path: &str) -> Vec<u8> {
    fs::read(root(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The files of a folder, by their extensions.
fn files(folder: &str, extension: &str) -> Vec<Vec<u8>> {
    let paths = fs::read_dir(root(folder)).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut paths: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a file")).collect()
}

#[test]
#[ignore = "writes into MEDUSA_FUZZ_SEEDS; MEDUSA_FUZZ_SEEDS=folder cargo test --test promises writes_the_seeds -- --ignored"]
fn writes_the_seeds() {
    let folder = PathBuf::from(std::env::var_os("MEDUSA_FUZZ_SEEDS").expect("MEDUSA_FUZZ_SEEDS, a folder"));
    let mut seeds = Seeds::default();
    formats(&mut seeds);
    runs(&mut seeds);
    weights(&mut seeds);
    peft_and_heads(&mut seeds);
    tokenizers(&mut seeds);
    text_rows(&mut seeds);
    columns(&mut seeds);
    hub(&mut seeds);
    serve(&mut seeds);
    mistakes::add(&mut seeds);
    seeds.write(&folder);
}

fn formats(seeds: &mut Seeds) {
    let head =
        |counts: [u64; 2]| json!({"counts": counts, "total": 5, "accuracy": counts.map(|count| count as f64 / 5.0)});
    let path = |path: &[usize], count: u64| json!({"path": path, "count": count});
    let base = json!({"heads": [head([3, 1]), head([2, 1])], "joint": {"total": 5, "paths": [path(&[0], 2), path(&[0, 1], 1), path(&[1], 1)]},
        "backbone": "tiny", "heads_sha256": "ab".repeat(32), "tokens": 7, "by": "me"});
    let mut with_runs = base.clone();
    with_runs["joint"]["runs"] = json!([[[0, 1], [1, 0], []], [[0]]]);
    with_runs["dynamic"] = json!({"top_k": 2, "runs": [[[[0, 0], [1]], [[1, 2]], []], [[[0]]]]});
    with_runs["exported_from"] = json!({"heads_sha256": "cd".repeat(32), "calibration_sha256": "ef".repeat(32)});
    with_runs["checksum"] = json!("sha256:00");
    seeds.all("calibration", [base.to_string(), with_runs.to_string()]);
    let wrong = [
        ("/heads", json!([])),
        ("/heads/0/total", json!(0)),
        ("/heads/0/total", json!(1_u64 << 60)),
        ("/heads/0/counts", json!([3])),
        ("/heads/0/counts", json!([5, 5])),
        ("/heads/0/accuracy", json!([0.6])),
        ("/heads/0/accuracy", json!([0.6, 0.5])),
        ("/joint/total", json!(6)),
        ("/joint/paths/0/path", json!([])),
        ("/joint/paths/0/path", json!([2])),
        ("/joint/paths/0/path", json!([0, 0])),
        ("/joint/paths/0/count", json!(9)),
        ("/joint/paths/1/count", json!(9)),
        ("/joint/runs", json!([[]])),
        ("/joint/runs", json!([[[2]]])),
        ("/joint/runs", json!([[[1], [1]]])),
        ("/dynamic/top_k", json!(0)),
        ("/dynamic/runs", json!([[]])),
        ("/dynamic/runs", json!([[[[0, 0, 0]]]])),
        ("/dynamic/runs", json!([[[[1, 0]]]])),
        ("/dynamic/runs", json!([[[[0]]]])),
        ("/heads_sha256", json!("")),
    ];
    changed(seeds, "calibration", &with_runs, &wrong);
    calibration_shares(seeds);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("prompts.hashes");
    TrainedPrompts::of(vec![1, 1 << 40, u64::MAX]).save(&path).expect("a file of ours");
    let prompts = fs::read(&path).expect("a file of ours");
    let (content, _) = prompts.split_last_chunk::<32>().expect("a hash at the end");
    seeds.all("trained_prompts", [&prompts, content, &content[..16], &content[..20]]);
    latencies(seeds);
    trees(seeds);
}

fn calibration_shares(seeds: &mut Seeds) {
    let share = json!({"share": "1/1", "heads_sha256": "ab", "backbone_fingerprint": "cd", "dtype": "float32", "device": "cpu",
        "quantization": null, "rows": 2, "rows_sha256": "ef", "top_k": 2, "dynamic_top_k": 2, "backbone": "tiny", "tokens": 9,
        "hits": [[1, 1], [0, 1]], "totals": [3, 2], "joint_total": 2, "paths": [{"path": [0], "count": 1}],
        "rows_with_ranks": [{"row": 0, "runs": [[[0, 1]]], "dynamic": [[[[0], [1]]]]}], "checksum": "sha256:00"});
    for of in ["1/1", "0-of-1", "0-of-2", "1 of 2", "1/2"] {
        let mut share = share.clone();
        share["share"] = json!(of);
        seeds.add("calibration_share", share.to_string());
        seeds.add("calibration", share.to_string());
    }
}

fn latencies(seeds: &mut Seeds) {
    let step = |nodes: usize, dynamic: bool| json!({"nodes": nodes, "depth": nodes.min(2), "step_ms": 1.5, "dynamic": dynamic});
    let latency = json!({"device": "cpu", "engine": "cpu", "engine_flag": "auto", "dtype": "float32", "quantization": "int8", "threads": 2,
        "context": 64, "backbone": "tiny", "backbone_sha256": "ab", "heads_sha256": "cd", "busy_cores": 1.5, "plain_step_ms": 1.0,
        "steps": [step(1, false), step(4, false), step(8, true)],
        "by_sequences": [{"sequences": 2, "plain_step_ms": 2.0, "steps": [step(3, false)]}], "checksum": "sha256:00"});
    seeds.all("latency", [latency.to_string(), latency.to_string().replace("1.5", "-1.5")]);
    let wrong = [
        ("/threads", json!(0)),
        ("/context", json!(0)),
        ("/busy_cores", json!(-1.0)),
        ("/busy_cores", json!(null)),
        ("/plain_step_ms", json!(0.0)),
        ("/steps", json!([])),
        ("/steps/1/nodes", json!(0)),
        ("/steps/1/nodes", json!(1)),
        ("/steps/1/depth", json!(9)),
        ("/steps/0/step_ms", json!(1e300)),
        ("/by_sequences/0/sequences", json!(1)),
        ("/by_sequences/0/plain_step_ms", json!(-2.0)),
        ("/by_sequences/0/steps", json!([])),
    ];
    changed(seeds, "latency", &latency, &wrong);
}

/// The value with each of these changes: a pointer, and what stands there instead.
fn changed(seeds: &mut Seeds, reader: &'static str, whole: &Value, changes: &[(&str, Value)]) {
    for (place, value) in changes {
        let mut other = whole.clone();
        *other.pointer_mut(place).unwrap_or_else(|| panic!("{reader} has no {place}")) = value.clone();
        seeds.add(reader, other.to_string());
    }
}

fn trees(seeds: &mut Seeds) {
    let choices = json!([[0], [1], [0, 0], [0, 1], [0, 0, 0]]);
    let limits = json!({"nodes": 4, "depth": 2, "top_k": 3});
    let fixed = json!({"nodes": 5, "expected_tokens_per_step": 2.5, "expected_tokens_per_second": 80.0, "choices": choices,
        "by_sequences": [{"sequences": 4, "choices": [[0]], "expected_tokens_per_second": 90.0}, {"sequences": 6, "choices": [],
        "expected_tokens_per_second": 91.0}, {"sequences": 8, "choices": [], "dynamic": limits, "expected_tokens_per_second": 92.0}],
        "calibration_sha256": "ab", "latency_sha256": "cd", "checksum": "sha256:00"});
    let dynamic =
        json!({"nodes": 16, "expected_tokens_per_step": 3.0, "dynamic": {"nodes": 16, "depth": 4, "top_k": 8}});
    seeds.all(
        "tree",
        [
            fixed.to_string(),
            dynamic.to_string(),
            choices.to_string(),
            "[[0], [0]]".into(),
            "[[1,2],[2]]".into(),
            "{}".into(),
        ],
    );
    let wrong = [
        ("/nodes", json!(6)),
        ("/expected_tokens_per_step", json!(9.0)),
        ("/expected_tokens_per_second", json!(0.0)),
        ("/by_sequences/0/sequences", json!(6)),
        ("/by_sequences/0/sequences", json!(1)),
        ("/by_sequences/0/choices", json!([[0, 0]])),
        ("/by_sequences/2/dynamic/nodes", json!(0)),
    ];
    changed(seeds, "tree", &fixed, &wrong);
    let wrong = [("/dynamic/depth", json!(0)), ("/dynamic/top_k", json!(100_000)), ("/dynamic/nodes", json!(15))];
    changed(seeds, "tree", &dynamic, &wrong);
    seeds.add("tree", json!({"choices": [[0]], "dynamic": limits}).to_string());
    seeds.add("tree", bytes("tests/fixtures/reference/medusa_choices.json"));
}

fn runs(seeds: &mut Seeds) {
    let train = json!({"split": "train", "step": 1, "epoch": 0.5, "tokens": 100, "loss": 2.5, "lm_loss": 1.0, "heads_loss": 1.5,
        "head_losses": [2.0, null], "head_top1": [0.5, 0.25], "lr": 1e-3, "heads_lr": 1e-3, "lambda0": 0.2, "grad_norm": 1.0,
        "tokens_per_second": 10.0, "memory_bytes": 1000});
    let validation = json!({"split": "validation", "step": 2, "epoch": null, "tokens": null, "loss": null, "lm_loss": null,
        "tokens_per_step": 2.0, "perplexity": 3.0, "stopped_early": true});
    seeds.all("metrics", [train.to_string(), format!("{train}\n{validation}\n"), format!("{validation}\n{{\"split\"")]);
    let file = json!({"path": "a.jsonl", "sha256": "ab"});
    let run = json!({"program": "0.1.0", "git_revision": "ab", "libtorch": "2.11.0", "device": "cpu", "threads": 2, "command": ["medusa-train"],
        "started": "2026-01-01T00:00:00Z", "backbone": {"id": "a/b", "commit": "ab"}, "sources": [{"key": "data.train", "id": "a/b",
        "commit": "ab"}], "backbone_files": [file], "init_from_files": [file], "hidden_states": {"files": 1, "bytes": 2, "sha256": "ab"},
        "data": [file], "recipe": "[backbone]\n", "skip_bad_rows": true, "rows": [1], "checksum": "sha256:00"});
    let distill = json!({"shard_format": 1, "program_version": "0.1.0", "backbone": "tiny", "prompts": "p.jsonl", "prompts_sha256": "ab",
        "conversations": 2, "too_long": 0, "share": "0/1", "conversations_per_file": 10, "temperature": 0.7, "top_p": 1.0,
        "max_new_tokens": 8, "self_talk": false, "seed": 1, "checksum": "sha256:00"});
    seeds.all("provenance", [run.to_string(), distill.to_string()]);
    let finished = json!({"id": 0, "index": 0, "prompt_id": "p", "category": "c", "conversations": [{"from": "human", "value": "hi"}],
        "input_ids": [1, 2], "labels": [-100, 2], "finish_reason": "eos", "refused": {"turn": 1, "why": "no"}});
    let refused = json!({"index": 0, "id": "p", "conversation": 0, "turn": 1, "why": "no"});
    seeds.all(
        "journal",
        [format!("{finished}\n{finished}\n"), format!("{refused}\n"), format!("{refused}\n{finished}")],
    );
    seeds.all("distill_folder", [format!("{distill}\0{finished}\n"), format!("{distill}\0"), distill.to_string()]);
    seeds.all("results", results());
    seeds.all("recipe", files("recipes", "toml"));
    let sum = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4b72b9807785afee48bb"; // of "a"
    seeds.all(
        "checksums",
        [
            format!("{sum}  a\n"),
            format!("{}  b\n{sum}  a\n", "0".repeat(64)),
            "x  a\n".into(),
            format!("{sum}  ../a\n"),
        ],
    );
    for (name, file) in checkpoint_files() {
        match name.as_str() {
            "state.json" => seeds.all("checkpoint", [file.clone(), [b"s", &file[..]].concat()]),
            "heads.safetensors" => seeds.add("checkpoint", [b"h", &unprefixed(&file)[..]].concat()),
            "optimizer.safetensors" => seeds.add("checkpoint", [b"o", &unprefixed(&file)[..]].concat()),
            "config.json" => seeds.add("heads_config", file),
            "medusa.sha256" => seeds.add("checkpoint", [b"c", &file[..]].concat()),
            _ => {}
        }
    }
    seeds.add("checkpoint", "{\"step\":1,\"tokens\":2,\"optimizer\":\"adamw\",\"optimizer_updates\":1,\"best\":{\"step\":1,\"by\":\"loss\",\"value\":1.0}}");
}

fn results() -> Vec<String> {
    let figures = json!({"tokens": 10, "seconds": 1.0, "tokens_per_second": 10.0, "step_ms": 100.0, "mean_log_probability": -1.0});
    let both = json!({"plain": figures, "medusa": figures, "acceleration_rate": 2.0, "overhead": 1.1, "speedup": 1.8, "identical": true});
    let mut bench = both.clone();
    bench["categories"] = json!({"math": both});
    bench["device"] = json!("cpu");
    bench["dtype"] = json!("float32");
    bench["drafter"] = json!("medusa");
    bench["tree_nodes"] = json!(10);
    bench["sweep"] = json!({"name": "nodes", "value": 3});
    let chosen = json!({"text": "a", "probability": 0.5});
    bench["first_difference"] = json!({"prompt": 1, "turn": 0, "token": 3, "plain": chosen, "drafted": chosen});
    let quantiles = json!({"median": 1.0, "p95": 2.0});
    let load = json!({"concurrency": 2, "endpoint": "http://a", "model": "m", "requests": 3, "errors": 1, "first_error": "e", "seconds": 1.0,
        "prompt_tokens": 3, "tokens": 4, "tokens_per_second": 4.0, "requests_per_second": 3.0, "tokens_per_step": 2.0,
        "ttft_ms": quantiles, "tpot_ms": quantiles, "itl_ms": null, "e2el_ms": quantiles, "identical": null});
    let mut of_process = load.clone();
    of_process["endpoint"].take();
    for (key, value) in [("drafter", "medusa"), ("device", "cpu"), ("dtype", "float32"), ("engine", "cpu")] {
        of_process[key] = json!(value);
    }
    vec![format!("{bench}\n{bench}"), load.to_string(), of_process.to_string(), String::new()]
}

/// A safetensors file without its length, header and data apart.
fn unprefixed(file: &[u8]) -> Vec<u8> {
    let (length, rest) = file.split_at(8);
    let header = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    [rest[..header].trim_ascii_end(), b"\0", &rest[header..]].concat()
}

fn header(tensors: &[(&str, &str, &[usize])]) -> String {
    let bytes = |dtype: &str| {
        dtype.trim_start_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().map_or(1, |bits| bits / 8)
    };
    let (mut at, mut parts) = (0, vec!["\"__metadata__\":{\"format\":\"pt\"}".to_owned()]);
    for (name, dtype, shape) in tensors {
        let end = at + shape.iter().product::<usize>() * bytes(dtype);
        parts.push(format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"));
        at = end;
    }
    format!("{{{}}}", parts.join(","))
}

fn weights(seeds: &mut Seeds) {
    for dtype in ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "U64"] {
        seeds.add("safetensors", header(&[("a", dtype, &[2, 3]), ("b", dtype, &[])]));
    }
    seeds.add("safetensors", header(&[("a", "F32", &[0, 3]), ("b", "F32", &[1]), ("c", "F32", &[1])]));
    seeds.add("safetensors", b"\xff\x08\0\0\0\0\0\0\0{}      ");
    for ids in ["I64", "I32"] {
        let of = [("hidden_states", "F32", &[2usize, 3, 4][..]), ("token_ids", ids, &[2]), ("loss_mask", "BOOL", &[2])];
        seeds.add("captured_states", header(&of));
        seeds.add("captured_states", header(&of).replace("F32", "BF16").replace("24,96", "24,48"));
        seeds.add("captured_states", [header(&of[1..]).as_bytes(), b"\0\x01\0\0\0\0\0\0\0\x02"].concat());
    }
    let index = |map: Value| json!({"metadata": {"total_size": 8}, "weight_map": map}).to_string();
    let maps = [
        json!({"a": "a.safetensors", "b": "b.safetensors"}),
        json!({"a": "b.safetensors"}),
        json!({"a": "../a.safetensors"}),
        json!({"a": "c.safetensors"}),
        json!({}),
    ];
    seeds.all("weights_index", maps.map(index));
    seeds.all("gguf", damaged_files().map(|file| [b"h", &file[..]].concat()));
    seeds.add("gguf", [b"\xff", &crate::gguf::llama().bytes()[..]].concat());
    seeds.all("gguf", crate::gguf::variants().iter().map(|gguf| [b"h", &gguf.header()[..]].concat()));
    for file in files("tests/fixtures/pickled", "pt") {
        seeds.add("torch_file", [b"r", &file[..]].concat());
        let Ok(mut archive) = ZipArchive::new(Cursor::new(&file)) else {
            seeds.add("pickle", &file[..file.len().min(2048)]);
            continue;
        };
        let name = archive.file_names().find(|name| name.ends_with("data.pkl")).expect("a pickle").to_owned();
        let mut pickle = Vec::new();
        archive.by_name(&name).expect("an entry").read_to_end(&mut pickle).expect("a stored entry");
        seeds.add("torch_file", [b"z", &pickle[..]].concat());
        seeds.add("pickle", pickle);
    }
    let published: Value = serde_json::from_slice(&bytes("tests/fixtures/configs/published.json")).expect("JSON");
    for config in
        published.as_object().expect("an object").values().filter_map(Value::as_object).flat_map(|of| of.values())
    {
        seeds.add("config", config.to_string());
    }
    seeds.add("config", bytes("data/tiny/backbone/config.json"));
}

fn peft_and_heads(seeds: &mut Seeds) {
    let config = bytes("tests/fixtures/peft_adapter/adapter_config.json");
    let mut small: Value = serde_json::from_slice(&config).expect("JSON");
    small["r"] = json!(2);
    let layer = "base_model.model.model.layers.0.self_attn.q_proj";
    let (a, b) = (format!("{layer}.lora_A.weight"), format!("{layer}.lora_B.weight"));
    let tensors = header(&[(&a, "F32", &[2, 8]), (&b, "F32", &[8, 2])]);
    let with_head = header(&[
        (&a, "F32", &[2, 8]),
        (&b, "F32", &[8, 2]),
        ("base_model.model.lm_head.base_layer.weight", "F32", &[16, 8]),
    ]);
    for tensors in
        [&tensors, &with_head, &tensors.replace("lora_A", "lora_X"), &tensors.replace("layers.0", "layers.9")]
    {
        seeds.add("peft", format!("{small}\0{tensors}"));
    }
    for (key, value) in
        [("use_rslora", json!(true)), ("use_dora", json!(true)), ("bias", json!("all")), ("peft_type", json!("IA3"))]
    {
        let mut changed = small.clone();
        changed[key] = value;
        seeds.add("peft", format!("{changed}\0{tensors}"));
    }
    let ours = json!({"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 8, "vocab_size": 16});
    let resblocks = [
        ("0.0.linear.weight", &[8usize, 8][..]),
        ("0.0.linear.bias", &[8]),
        ("0.1.weight", &[16, 8]),
        ("1.0.linear.weight", &[8, 8]),
        ("1.0.linear.bias", &[8]),
        ("1.1.weight", &[16, 8]),
    ];
    for prefix in ["", "medusa_head."] {
        let names: Vec<String> = resblocks.iter().map(|(name, _)| format!("{prefix}{name}")).collect();
        let tensors: Vec<(&str, &str, &[usize])> =
            names.iter().zip(&resblocks).map(|(name, (_, shape))| (name.as_str(), "F32", *shape)).collect();
        seeds.all("heads", [format!("{ours}\0{}", header(&tensors)), format!("{{}}\0{}", header(&tensors[..3]))]);
    }
    for name in ["hydra", "hydra++", "hydra_w2_bias", "hydra_truncated", "medusa_truncated", "medusa_half"] {
        let file = bytes(&format!("tests/fixtures/hydra/{name}.safetensors"));
        let mut config = json!({"medusa_num_heads": 2, "architecture": name});
        if name.starts_with("hydra++") {
            config["hydra_head_arch"] = json!("prefix-mlp");
        }
        let header_only = unprefixed(&file);
        let end = header_only.iter().position(|&byte| byte == 0).expect("a NUL");
        seeds.add("heads", [config.to_string().as_bytes(), b"\0", &header_only[..end]].concat());
    }
    for name in ["published_mlp", "published_prefix-mlp"] {
        seeds.add("heads_config", bytes(&format!("tests/fixtures/hydra/{name}/config.json")));
    }
}

fn tokenizers(seeds: &mut Seeds) {
    seeds.add("tokenizer_json", bytes("tests/fixtures/tokenizers/llama-legacy-true.json"));
    seeds.add("tokenizer_json", bytes("tests/fixtures/models/stories260K/tokenizer.json"));
    let vocab = json!({"<unk>": 0, "a": 1, "##b": 2, "\u{120}a": 3});
    let parts = [
        json!({"model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9, "vocab": vocab}}),
        json!({"model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": vocab}}),
        json!({"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": [["<unk>", 0.0], ["a", -1.0], ["<0x41>", -2.0]]}}),
        json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Replace",
            "pattern": {"Regex": "a+"}, "content": "b"}, {"type": "Prepend", "prepend": "\u{2581}"}, {"type": "Strip", "strip_left": true, "strip_right": true}]}}),
        json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "\\s+|[0-9]{1,3}"},
            "behavior": "Isolated", "invert": false}, {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}}),
        json!({"pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true}}),
        json!({"decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}),
        json!({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"<s>":
            {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}}),
        json!({"added_tokens": [{"id": 4, "content": "</s>", "single_word": false, "lstrip": true, "rstrip": false, "normalized": true, "special": true}]}),
        json!({"truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}, "padding": {"strategy":
            {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}}),
    ];
    seeds.all("tokenizer_json", parts.map(|part| part.to_string()));
    seeds.all("tokenizer_model", files("tests/fixtures/tokenizers", "model"));
    seeds.add(
        "tokenizer_model",
        (0..256u32).map(|byte| format!("{} {byte}\n", base64_of(byte as u8))).collect::<String>(),
    );
    let config = json!({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "unk_token": null, "legacy": false,
        "add_bos_token": true, "add_eos_token": true, "add_prefix_space": false, "tokenizer_class": "LlamaTokenizer",
        "additional_special_tokens": ["<x>"], "chat_template": "{{ messages[0].content }}", "added_tokens_decoder": {"0": {"content": "<unk>",
        "special": true, "lstrip": false, "rstrip": true, "normalized": false, "single_word": false}, "200": {"content": "<y>"}}});
    seeds.add("tokenizer_config", config.to_string());
    seeds.add("tokenizer_config", bytes("data/tiny/backbone/tokenizer_config.json"));
    let templates = json!([{"name": "default", "template": "{{ bos_token }}"}, {"name": "rag", "template": ""}]);
    seeds.add("tokenizer_config", json!({"chat_template": templates, "tokenizer_class": "QwenTokenizer"}).to_string());
    seeds.all("tokenizer_config", ["m{\"bos_token\": \"<s>\", \"eos_token\": null}", "a{\"<z>\": 300}", "m[]", "[]"]);
    seeds.all("chat_template", files("src/data/chat_templates", "jinja"));
    seeds.all("chat_template", TEMPLATES);
}

const TEMPLATES: [&str; 6] = [
    "{% for m in messages %}{{ m.role ~ ': ' + m['content'] | trim }}{% generation %}x{% endgeneration %}{% endfor %}",
    "{%- macro f(x, y=1) -%}{{ x | tojson(indent=2) }}{%- endmacro %}{{ f(tools) }}{% set ns = namespace(a=0) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}",
    "{{ raise_exception('no') if messages | length > 2 else strftime_now('%Y-%m-%d') }}{% break %}",
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% continue %}{% endfor %}{% endfor %}",
    "{{ 'a,b'.split(',') | join('-') }}{{ '%05d|%s' | format(3, 'x') }}{{ '{:>9}'.format(1) }}{{ messages[::-1] | map(attribute='role') | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | first | items }}{{ 'x' * 9 }}{{ range(3) | batch(2) | list }}{{ 'ab' | replace('a', 'bb') | indent(3) }}",
];

fn base64_of(byte: u8) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let [first, second] = [byte >> 2, (byte & 3) << 4].map(|at| char::from(LETTERS[usize::from(at)]));
    format!("{first}{second}==")
}

/// One row of each form.
const ROWS: [&str; 9] = [
    r#"{"text": "The cat\nsat."}"#,
    r#"{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}"#,
    r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}"#,
    r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "id": "x"}"#,
    r#"{"instruction": "a", "input": "b", "output": "c"}"#,
    r#"{"prompt": "a", "completion": "b"}"#,
    r#"{"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}"#,
    r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "content": "1", "tool_call_id": "c"}], "tools": [{"type": "function", "function": {"name": "f"}}]}"#,
    r#"{"tokens": [1, 2], "loss_mask": [0, 1], "attention_mask": [1, 1]}"#,
];

fn text_rows(seeds: &mut Seeds) {
    let lines = ROWS.join("\n");
    for (number, row) in ROWS.iter().enumerate() {
        seeds.add("rows_jsonl", row);
        seeds.add("rows_json_array", format!("[{row}, {row}]"));
        seeds.add("rows_gzip", format!("{number}{row}\n"));
        seeds.add("rows_zstd", format!("{number}{row}\n"));
    }
    seeds.all("rows_jsonl", [lines.clone(), format!("\u{feff}{lines}\r\n\n{{"), "{\"text\": \"\\ud800\"}".to_owned()]);
    seeds.add("rows_json_array", "[\n]  x");
    seeds.all(
        "data_folder",
        [
            "s{\"_data_files\": [{\"filename\": \"state.json\"}]}",
            "d{\"splits\": [\"train\", \"test\"]}",
            "r---\nconfigs:\n- config_name: a\n  default: true\n  data_files:\n  - split: train\n    path: README.*\n  - split: test\n    path: [x, y]\n- config_name: b\n  data_files: \"*.md\"\n---\n",
        ],
    );
    seeds.all(
        "rows_csv",
        [
            "ctext,id\n\"The \"\"cat\"\"\nsat\",1\nx\n",
            "tinstruction\tinput\toutput\na\tb\tc\n",
            "pA document.\n\nAnother one.\u{c}\n",
            "cprompt,completion\na,b\n",
            "cmessages\n\"[{\"\"role\"\": \"\"user\"\", \"\"content\"\": \"\"a\"\"}]\"\n",
            "ctext;text\n\u{feff}a;b\n",
        ],
    );
    for prompt in [
        r#"{"prompt": "a", "id": 1, "category": "c"}"#,
        r#"{"prompt_ids": [1, 2]}"#,
        r#"{"turns": ["a", "b"], "question_id": 7}"#,
        r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
        r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]}"#,
    ] {
        seeds.all("prompts", [prompt.to_owned(), format!("[{prompt},\n{prompt}]"), format!("{prompt}\n\n{prompt}\n")]);
    }
}

/// Batches with the columns of rows.
fn batches() -> Vec<RecordBatch> {
    let text: ArrayRef = Arc::new(StringArray::from(vec![Some("The cat"), None, Some("sat \u{e9}")]));
    let ids: ArrayRef = Arc::new(arrow::array::ListArray::from_iter_primitive::<Int32Type, _, _>([
        Some(vec![Some(1), Some(2)]),
        Some(vec![]),
        Some(vec![Some(3)]),
    ]));
    let messages = lists_of_structs();
    let one = |name: &str, column: &ArrayRef| RecordBatch::try_from_iter([(name, column.clone())]).expect("a batch");
    let mut batches = vec![one("text", &text), one("input_ids", &ids)];
    batches.push(RecordBatch::try_from_iter([("input_ids", ids.clone()), ("labels", ids)]).expect("a batch"));
    batches.push(one("prompt", &text));
    batches.extend(messages);
    batches.extend(texts_of_all_types(&text));
    batches.extend(columns_of_ids());
    batches.extend(structs_of_lists());
    batches
}

fn named(columns: &[(&str, &ArrayRef)]) -> RecordBatch {
    RecordBatch::try_from_iter(columns.iter().map(|(name, column)| (*name, (*column).clone()))).expect("a batch")
}

/// Texts in all types of Arrow, in the columns of all forms of rows, and where no text is read.
fn texts_of_all_types(text: &ArrayRef) -> Vec<RecordBatch> {
    use arrow::datatypes::DataType;
    let as_type = |to: DataType| arrow::compute::cast(text, &to).expect("a cast of texts");
    let dictionary = as_type(DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8)));
    let numbers: ArrayRef = Arc::new(arrow::array::Int64Array::from(vec![1, 2, 3]));
    let mut batches = vec![
        named(&[("instruction", text), ("input", text), ("output", text)]),
        named(&[("prompt", text), ("completion", text)]),
        named(&[("prompt", text), ("completion", &numbers)]),
        named(&[("other", text)]),
        named(&[("text", &numbers)]),
        named(&[("messages", text)]),
        named(&[("text", &dictionary)]),
    ];
    for to in [DataType::LargeUtf8, DataType::Utf8View, DataType::Binary] {
        batches.push(named(&[("text", &as_type(to))]));
    }
    batches
}

/// Lists of token ids in all types, with nulls, of other lengths, and of texts.
fn columns_of_ids() -> Vec<RecordBatch> {
    use arrow::array::{FixedSizeListArray, LargeListArray, ListArray};
    use arrow::datatypes::{Int64Type, UInt8Type};
    let ids = || [Some(vec![Some(1), Some(2)]), Some(vec![Some(3), Some(4)])];
    let wide: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(
        ids().map(|ids| ids.map(|ids| ids.into_iter().map(|id| id.map(i64::from)).collect::<Vec<_>>())),
    ));
    let large: ArrayRef = Arc::new(LargeListArray::from_iter_primitive::<Int32Type, _, _>(ids()));
    let fixed: ArrayRef = Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(ids(), 2));
    let mask: ArrayRef = Arc::new(ListArray::from_iter_primitive::<UInt8Type, _, _>([
        Some(vec![Some(0), Some(1)]),
        Some(vec![Some(1)]),
    ]));
    let nulls: ArrayRef =
        Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1), None]), None]));
    let long: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1); 200])]));
    let mut texts = arrow::array::ListBuilder::new(arrow::array::StringBuilder::new());
    texts.append_value([Some("a"), Some("b")]);
    let texts: ArrayRef = Arc::new(texts.finish());
    let mut batches =
        vec![named(&[("input_ids", &wide), ("loss_mask", &mask)]), named(&[("input_ids", &wide), ("labels", &mask)])];
    batches.extend([&large, &fixed, &nulls, &long, &texts].map(|column| named(&[("input_ids", column)])));
    batches
}

/// Conversations as structs of lists, with and without calls and tools.
fn structs_of_lists() -> Vec<RecordBatch> {
    use arrow::array::{Array, ListBuilder, StringBuilder, StructArray};
    use arrow::datatypes::Field;
    let list = |items: &[Option<&str>]| -> ArrayRef {
        let mut lists = ListBuilder::new(StringBuilder::new());
        lists.append_value(items.iter().copied());
        Arc::new(lists.finish())
    };
    let messages = |parts: &[(&str, ArrayRef)]| -> ArrayRef {
        let part = |(name, column): &(&str, ArrayRef)| {
            (Arc::new(Field::new(*name, column.data_type().clone(), true)), column.clone())
        };
        Arc::new(StructArray::from(parts.iter().map(part).collect::<Vec<_>>()))
    };
    let (roles, contents) = (list(&[Some("user"), Some("assistant")]), list(&[Some("hi"), None]));
    let calls = list(&[None, Some("[{\"name\": \"f\"}]")]);
    let tools: ArrayRef = Arc::new(StringArray::from(vec!["[{\"name\": \"f\"}]"]));
    let whole = messages(&[("role", roles.clone()), ("content", contents.clone()), ("tool_calls", calls)]);
    let plain = messages(&[("from", roles.clone()), ("value", list(&[Some("a"), Some("b")]))]);
    let short = messages(&[("role", roles.clone()), ("content", list(&[Some("a")]))]);
    let without_role = messages(&[("role", list(&[None, Some("assistant")])), ("content", contents)]);
    let few_calls =
        messages(&[("role", roles), ("content", list(&[Some("a"), Some("b")])), ("tool_calls", list(&[None]))]);
    let mut batches = [&whole, &short, &without_role, &few_calls].map(|column| named(&[("messages", column)])).to_vec();
    batches.push(named(&[("conversations", &plain)]));
    batches.push(named(&[("messages", &whole), ("tools", &tools)]));
    batches.push(named(&[("messages", &whole), ("tools", &whole)]));
    batches.push(named(&[("prompt", &plain), ("completion", &plain)]));
    batches.push(named(&[("prompt", &tools), ("completion", &plain)]));
    batches
}

/// Conversations.
fn lists_of_structs() -> Vec<RecordBatch> {
    use arrow::array::{Array, ListArray, StructArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::{DataType, Field};
    let of = |keys: [&str; 2], column: &str| {
        let [first, second] =
            [["user", "assistant"], ["hi", "yo"]].map(|texts| Arc::new(StringArray::from(texts.to_vec())) as ArrayRef);
        let fields = [keys[0], keys[1]].map(|key| Arc::new(Field::new(key, DataType::Utf8, true)));
        let structs = StructArray::new(fields.to_vec().into(), vec![first, second], None);
        let item = Arc::new(Field::new("item", structs.data_type().clone(), true));
        let list = ListArray::new(item, OffsetBuffer::from_lengths([2]), Arc::new(structs), None);
        RecordBatch::try_from_iter([(column, Arc::new(list) as ArrayRef)]).expect("a batch")
    };
    vec![of(["role", "content"], "messages"), of(["from", "value"], "conversations")]
}

/// Without `start` bytes before and `magic` behind the footer's length, which becomes two bytes.
pub(super) fn unfooted(file: &[u8], start: usize, magic: usize) -> Vec<u8> {
    let end = file.len() - magic - 4;
    [&file[start..end], &file[end..end + 2]].concat()
}

fn columns(seeds: &mut Seeds) {
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::LZ4_RAW,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::BROTLI(BrotliLevel::default()),
    ];
    for (number, batch) in batches().iter().enumerate() {
        let schema: Arc<Schema> = batch.schema();
        let version = if number % 2 == 0 { WriterVersion::PARQUET_1_0 } else { WriterVersion::PARQUET_2_0 };
        let properties = WriterProperties::builder()
            .set_compression(codecs[number % codecs.len()])
            .set_writer_version(version)
            .set_dictionary_enabled(number % 3 != 0)
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), schema.clone(), Some(properties)).expect("a writer");
        writer.write(batch).expect("a batch");
        seeds.add("rows_parquet", unfooted(&writer.into_inner().expect("a file"), 4, 4));
        for codec in [None, Some(CompressionType::ZSTD), Some(CompressionType::LZ4_FRAME)] {
            let options = IpcWriteOptions::default().try_with_compression(codec).expect("options");
            let mut writer = FileWriter::try_new_with_options(Vec::new(), &schema, options).expect("a writer");
            writer.write(batch).and_then(|()| writer.finish()).expect("a file");
            seeds.add("rows_arrow", [b"f", &unfooted(&writer.into_inner().expect("a file"), 8, 6)[..]].concat());
        }
        let mut writer = StreamWriter::try_new(Vec::new(), &schema).expect("a writer");
        writer.write(batch).and_then(|()| writer.finish()).expect("a stream");
        seeds.add("rows_arrow", [b"s", &writer.into_inner().expect("a stream")[4..]].concat());
    }
    for rows in [1, 3] {
        seeds.add("token_cache", token_cache(rows));
    }
    seeds.add("token_cache", format!("{} {:08x}", "0".repeat(64), crc32fast::hash("0".repeat(64).as_bytes())));
}

/// The file that the cache of tokens holds of some rows.
pub(super) fn token_cache(rows: usize) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("rows.jsonl");
    let lines: String = (1..=rows).map(|row| format!("{{\"input_ids\": {:?}}}\n", vec![row; 3 * row])).collect();
    medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, lines.as_bytes())).expect("a file");
    let cache = TokenCache::new(dir.path().join("cache"));
    let settings =
        LoadSettings { cache: Some(&cache), ..LoadSettings::new(16, NonZeroUsize::new(4).expect("4 is not 0")) };
    data::load(&[path.display().to_string()], &settings).expect("rows");
    let mut files =
        fs::read_dir(dir.path().join("cache")).expect("the cache").map(|entry| entry.expect("an entry").path());
    let file = files.find(|path| path.extension().is_some_and(|extension| extension == "arrow")).expect("a file");
    unfooted(&fs::read(file).expect("a file"), 8, 6)
}

fn hub(seeds: &mut Seeds) {
    let commit = "0".repeat(40);
    let head = format!("200\n\n{{\"sha\": \"{commit}\", \"private\": true}}");
    let file = |path: &str| json!({"type": "file", "path": path, "size": 3, "oid": "1".repeat(40)});
    let large = json!({"type": "file", "path": "model.safetensors", "size": 3, "oid": "1".repeat(40), "lfs": {"oid": "2".repeat(64), "size": 3}});
    let list = json!([file("config.json"), file("tokenizer.json"), large, file("heads.safetensors"), {"type": "directory", "path": "d", "oid": ""}]);
    let data = json!([
        file("data/train-00000.parquet"),
        file("data/test.jsonl"),
        file("part/x.jsonl"),
        file("config/split-0.csv"),
        file("README.md")
    ]);
    seeds.add("hub", format!("m{head}\0200\n\n{list}"));
    for form in ["d", "t", "c", "h"] {
        seeds.add("hub", format!("{form}{head}\0200\n\n{data}"));
    }
    seeds.all(
        "hub",
        [
            format!(
                "m307\nLocation: /other\n\n\0{head}\0200\nLink: </next?a=1>; rel=\"next\"\n\n{data}\0200\n\n{list}"
            ),
            format!("m302\nLocation: http://elsewhere.test/\n\n\0{head}\0301\n\n"),
            "m401\n\n{\"error\": \"Repository Not Found\"}".to_owned(),
            "m403\nX-Error-Code: GatedRepo\nX-Error-Message: ask\n\n".to_owned(),
            "m404\nX-Error-Code: RevisionNotFound\n\n".to_owned(),
            "m429\nRetry-After: 1000\n\n".to_owned(),
            "m503\nRateLimit: \"api\";r=0;t=400\n\nbusy".to_owned(),
            format!("m{head}\0200\n\n{}", json!([file("../x")])),
            format!(
                "o!\0{}\0{}\0{{\"model_type\": \"llama\"}}",
                json!(["data/train.jsonl", "config/a.csv"]),
                json!({"weight_map": {"a": "a.safetensors"}})
            ),
            "omain\0[]\0{}".to_owned(),
        ],
    );
}

fn serve(seeds: &mut Seeds) {
    let chat =
        json!({"model": "tiny", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]});
    let with = |more: Value| {
        let mut all = chat.clone();
        all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        all.to_string()
    };
    let chats = [
        chat.to_string(),
        with(
            json!({"stream": true, "stream_options": {"include_usage": true}, "n": 2, "stop": ["a", "b"], "seed": 1, "temperature": 0.5}),
        ),
        with(
            json!({"logprobs": true, "top_logprobs": 2, "top_p": 0.9, "top_k": 5, "max_tokens": 3, "logit_bias": {}, "user": "u"}),
        ),
        with(
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": null,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}], "tools": [{"type": "function"}]}),
        ),
        with(
            json!({"acceptance": "typical", "repetition_penalty": 1.1, "frequency_penalty": 1, "presence_penalty": -1, "return_token_ids": true}),
        ),
        with(
            json!({"response_format": {"type": "json_object"}, "functions": [], "max_completion_tokens": 4, "model": "other"}),
        ),
    ];
    let completion = |prompt: Value| {
        json!({"model": "tiny", "prompt": prompt, "max_tokens": 4, "echo": true, "logprobs": 1, "best_of": 1, "suffix": null}).to_string()
    };
    let completions = [json!("a"), json!(["a", "b"]), json!([1, 2]), json!([[1], [2, 3]]), json!([])].map(completion);
    for (form, bodies) in [("c", &chats[..]), ("t", &completions[..])] {
        for body in bodies {
            seeds.all("serve_request", [format!("{form}{body}")]);
            seeds.all("serve_http", [format!("{form}{body}")]);
        }
    }
    seeds.add("serve_request", "t{\"model\":\"tiny\",\"prompt\":\"a\",\"stream\":true}");
    let get = |path: &str, more: &str| format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n");
    let key = "authorization: Bearer key\r\n";
    for path in
        ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/models/%ff", "/nowhere", "/v1/completions"]
    {
        seeds.all("serve_http", [get(path, key), get(path, "") + &get(path, key)]);
    }
    let body = format!("{:x}\r\n{chat}\r\n0\r\n\r\n", chat.to_string().len());
    let post = "POST /v1/chat/completions HTTP/1.1\r\nhost: a.test:80\r\nauthorization: bearer key\r\nexpect: 100-continue\r\n";
    seeds.all(
        "serve_http",
        [
            format!("{post}content-type: application/json; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n{body}"),
            format!("{post}content-type: text/plain\r\ncontent-length: 2\r\n\r\n{{}}"),
            format!("{post}content-type: application/json\r\ncontent-length: 999999999\r\n\r\n{{}}"),
            "OPTIONS / HTTP/1.0\r\nhost: evil.test\r\n\r\n".to_owned(),
            get("http://localhost/health", "connection: close\r\n"),
        ],
    );
}
