//! Promise: `scripts/gpu_check` can be prepared on a machine without a GPU, says what is missing there, and makes its table from what
//! was recorded.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use medusa::files::write_atomic;
use serde_json::json;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu_check");

fn run(script: &Path, arguments: &[&str]) -> Output {
    Command::new("python3").arg(script).args(arguments).output().expect("python3, which scripts/setup needs, too")
}

fn words(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn the_folder_to_carry_starts_elsewhere_and_says_what_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let carried = folder.path().join("carried");
    let programs = PathBuf::from(env!("CARGO_BIN_EXE_medusa"));
    let programs = programs.parent().expect("a folder of programs").to_str().expect("UTF-8");
    let prepare = ["--prepare", carried.to_str().expect("UTF-8"), "--programs", programs];
    let prepared = run(Path::new(SCRIPT), &prepare);
    assert!(prepared.status.success(), "{}", words(&prepared.stderr));
    for file in ["target/release/medusa", "target/release/medusa-train", "data/tiny/backbone/tokenizer.json"] {
        assert!(carried.join(file).is_file(), "{file}");
    }
    let again = run(Path::new(SCRIPT), &prepare);
    assert!(!again.status.success() && words(&again.stderr).contains("is there already"));
    // The programs find libtorch where they were built; a torch of pip is looked for only where there is no such folder.
    std::fs::create_dir(carried.join(".libtorch")).expect("a folder");
    let without_gpu = run(&carried.join("scripts/gpu_check"), &["--out", "results"]);
    let error = words(&without_gpu.stderr);
    assert_eq!(without_gpu.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: no GPU can be checked here: there is no GPU to decode on"), "{error}");
    assert!(without_gpu.stdout.is_empty() && !carried.join("results").exists());
    let unbuilt = run(Path::new(SCRIPT), &["--prepare", "x", "--programs", "/nowhere"]);
    assert!(words(&unbuilt.stderr).contains("build them first: cargo build --release"), "{}", words(&unbuilt.stderr));
}

#[test]
fn what_was_recorded_becomes_a_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let recorded = folder.path().join("recorded.json");
    let part = |lines: serde_json::Value| json!({"lines": lines, "failed": null, "seconds": 1.0});
    let results = json!({
        "date": "2026-01-02",
        "doctor": {"version": "0.1.0", "cuda": {"names": ["A GPU"], "driver": "580.1", "runtime": "13.0"}},
        "parts": {
            "kernels": part(json!([{"check": "kernels", "dtype": "BFloat16", "head_dim": 128, "groups": 8, "nodes": 64, "context": 700,
                "same_text": true, "differences": {"x_nh": 0.001, "state": 0.0, "q_nqd": 0.0021, "logits_nv": 0.0042}}])),
            "texts": part(json!([{"check": "texts", "dtype": "Half", "head_dim": 64, "groups": 2, "prompt": 40, "tokens": 128,
                "same_plain": 128, "same_medusa": 90}])),
            "steps": part(json!([{"check": "copy", "gigabytes_per_second": 4000.0},
                {"check": "steps", "nodes": 64, "context": 1024, "step_ms": 4.5}, {"check": "steps", "nodes": 1, "context": 128, "step_ms": 3.5}])),
            "endurance": part(json!([{"check": "endurance", "steps": 20_000, "device_growth_bytes": 0, "host_growth_bytes": 1_048_576}])),
            "transformers": part(json!([{"check": "transformers", "context": 128, "step_ms": 20.0}])),
            "medusa1": part(json!([{"check": "training", "stage": "medusa1", "tokens_per_second": 8192.0, "memory_bytes": 1u64 << 34}])),
            "medusa2": json!({"lines": [], "failed": "not done after 9 s", "seconds": 9.0})
        }
    });
    write_atomic(&recorded, |out| Ok(serde_json::to_writer(out, &results)?)).expect("a file of a test");
    let told = run(Path::new(SCRIPT), &["--table", recorded.to_str().expect("UTF-8")]);
    let table = words(&told.stdout);
    assert!(told.status.success(), "{}", words(&told.stderr));
    for line in [
        "# A GPU, 2026-01-02",
        "**medusa2 failed**: not done after 9 s",
        "| BFloat16, D 128, G 8 | 64 | 700 | yes | logits_nv 4.2e-03, q_nqd 2.1e-03, x_nh 1.0e-03 |",
        "| Half | 64 | 2 | 40 | 128 | 128 | 90 |",
        "A copy moves 4000 GB/s, read and written: at that speed 13.5 GB of weights, read once, take 3.37 ms.",
        "| nodes | context 128 | context 1024 |",
        "| 1 | 3.50 | - |",
        "| 64 | - | 4.50 |",
        "| transformers, 1 | 20.00 | - |",
        "20000 steps: device memory grew by 0.0 MiB, the host's by 1.0 MiB.",
        "| medusa1 | 0.50 | 8192 | 16.0 |",
    ] {
        assert!(table.lines().any(|told| told == line), "{line}\n{table}");
    }
    let broken = run(Path::new(SCRIPT), &["--table", "/nowhere.json"]);
    assert!(words(&broken.stderr).contains("expected a file that scripts/gpu_check wrote"));
}
