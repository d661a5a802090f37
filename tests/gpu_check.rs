//! Promise: `scripts/gpu_check` can be prepared on a machine without a GPU, reports what that machine lacks, and builds
//! its table from recorded results.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use medusa::files::write_atomic;
use serde_json::json;

use crate::program::on_the_cpu;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu_check");

fn run(script: &Path, arguments: &[&str]) -> Output {
    on_the_cpu(&mut Command::new("python3"))
        .arg(script)
        .args(arguments)
        .output()
        .expect("python3, which scripts/setup needs, too")
}

fn words(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn the_folder_to_carry_starts_elsewhere_and_says_what_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let carried = folder.path().join("carried");
    let programs = folder.path().join("programs");
    std::fs::create_dir(&programs).expect("a folder");
    // `medusa-libtorch` replaces examples/gpu_check, which handles `medusa`'s commands the same way.
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_medusa-libtorch"), programs.join("gpu_check")).expect("a link");
    let [carried_text, programs] = [&carried, &programs].map(|path| path.to_str().expect("UTF-8"));
    let prepare = ["--prepare", carried_text, "--programs", programs];
    let prepared = run(Path::new(SCRIPT), &prepare);
    assert!(prepared.status.success(), "{}", words(&prepared.stderr));
    for file in
        ["target/release/examples/gpu_check.gz", "scripts/gpu/stages.py", "data/tiny/backbone/model.safetensors"]
    {
        assert!(carried.join(file).is_file(), "{file}");
    }
    let again = run(Path::new(SCRIPT), &prepare);
    assert!(!again.status.success() && words(&again.stderr).contains("is there already"));
    // The programs look for libtorch where they were built; a pip-installed torch is only used if there is no such
    // folder.
    std::fs::create_dir(carried.join(".libtorch")).expect("a folder");
    let without_gpu = run(&carried.join("scripts/gpu_check"), &["--out", "results"]);
    let error = words(&without_gpu.stderr);
    assert_eq!(without_gpu.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: no GPU can be checked here: there is no GPU to decode on"), "{error}");
    assert!(without_gpu.stdout.is_empty() && !carried.join("results").exists());
    assert!(carried.join("target/release/examples/gpu_check").is_file(), "the program is unpacked on the first call");
    let unknown = run(Path::new(SCRIPT), &["smoke", "endurance"]);
    assert!(words(&unknown.stderr).contains("there is no stage endurance; expected smoke, engine, profile, training"));
    let unbuilt = run(Path::new(SCRIPT), &["--prepare", "x", "--programs", "/nowhere"]);
    assert!(
        words(&unbuilt.stderr).contains("build it first: cargo build --release --locked --example gpu_check"),
        "{}",
        words(&unbuilt.stderr)
    );
}

/// A folder with a `gpu_check` and a `compute-sanitizer` that print what a test needs.
fn played_programs(folder: &Path) -> PathBuf {
    let programs = folder.join("programs");
    std::fs::create_dir(&programs).expect("a folder");
    let played = r#"#!/bin/sh
case "$1 $2" in
    "doctor --json") echo '{"version": "0.1.0", "cuda": {"names": ["A GPU"], "driver": "1", "runtime": "2"}, "engine": {"cuda": true}}' ;;
    "gpu-check loops") echo '{"check": "libtorch", "tokens": 7, "same": false}'; echo "no good" >&2; exit 3 ;;
    "gpu-check steps") echo '{"check": "steps", "nodes": 1, "context": 128, "step_ms": 3.5}'; echo "half a line"; echo "going on" >&2; exec sleep 600 ;;
    "gpu-check endurance") echo '{"check": "endurance", "steps": 20000, "device_growth_bytes": 0, "host_growth_bytes": 0}' ;;
esac
"#;
    // It prints the requested lines, then the program's own output, then reports a fault.
    let sanitizer = r#"#!/bin/sh
echo '{"check": "kernels", "of": "a sanitizer"}'
echo 17
echo "========= $* caching=$PYTORCH_NO_CUDA_MEMORY_CACHING"
exit 9
"#;
    // Two steps with one launch of one kernel and two of another, in the CSV of Nsight Compute.
    let profiler = r#"#!/bin/sh
echo '==PROF== Connected'
echo '{"check": "profiled", "steps": 2}'
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
for id in 0 1; do
    echo "\"$id\",\"linear_1(float *)\",\"gpu__time_duration.sum\",\"us\",\"1,000\""
    echo "\"$id\",\"linear_1(float *)\",\"dram__bytes_read.sum\",\"Gbyte\",\"2.5\""
    echo "\"$id\",\"linear_1(float *)\",\"dram__bytes_write.sum\",\"byte\",\"0\""
done
for id in 2 3 4 5; do
    echo "\"$id\",\"norm(float *)\",\"gpu__time_duration.sum\",\"nsecond\",\"500\""
    echo "\"$id\",\"norm(float *)\",\"dram__bytes_read.sum\",\"byte\",\"0\""
    echo "\"$id\",\"norm(float *)\",\"dram__bytes_write.sum\",\"Kbyte\",\"1\""
done
"#;
    for (name, text) in [("gpu_check", played), ("compute-sanitizer", sanitizer), ("ncu", profiler)] {
        let path = programs.join(name);
        write_atomic(&path, |out| std::io::Write::write_all(out, text.as_bytes())).expect("a file of a test");
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, executable).expect("a file of ours");
    }
    programs
}

/// A folder of packages whose import fails, so that parts that need torch or transformers are left out on every
/// machine.
fn without_torch(folder: &Path) -> PathBuf {
    let none = folder.join("no_packages");
    std::fs::create_dir(&none).expect("a folder");
    for package in ["torch", "transformers"] {
        let raises =
            |out: &mut std::io::BufWriter<std::fs::File>| std::io::Write::write_all(out, b"raise ImportError\n");
        write_atomic(&none.join(format!("{package}.py")), raises).expect("a file of a test");
    }
    none
}

/// A machine with a GPU, simulated: scripts replace the programs.
struct PlayedMachine {
    folder: tempfile::TempDir,
    script: PathBuf,
    programs: PathBuf,
    none: PathBuf,
}

impl PlayedMachine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (programs, none) = (played_programs(folder.path()), without_torch(folder.path()));
        // The copy has an unused libtorch folder next to it, where the script looks for one.
        let script = folder.path().join("scripts/gpu_check");
        std::fs::create_dir_all(folder.path().join(".libtorch")).expect("a folder");
        std::fs::create_dir_all(folder.path().join("scripts/gpu")).expect("a folder");
        std::fs::copy(SCRIPT, &script).expect("a copy");
        for module in std::fs::read_dir(Path::new(SCRIPT).with_file_name("gpu")).expect("the script's modules") {
            let module = module.expect("a file").path();
            if module.is_file() {
                let name = module.file_name().expect("a name");
                std::fs::copy(&module, script.with_file_name("gpu").join(name)).expect("a copy");
            }
        }
        Self { folder, script, programs, none }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("results")
    }

    fn check(&self, stages: &[&str]) -> Output {
        let path = format!("{}:{}", self.programs.display(), std::env::var("PATH").expect("a path"));
        let mut command = Command::new("python3");
        command.arg(&self.script).args(stages).arg("--programs").arg(&self.programs).arg("--out").arg(self.out());
        command.args(["--seconds", "10"]).env("PATH", path).env("PYTHONPATH", &self.none).output().expect("python3")
    }

    /// The recorded JSON of a stage, beside which lies its table.
    fn recorded(&self, stage: &str) -> serde_json::Value {
        let files = std::fs::read_dir(self.out()).expect("results").map(|file| file.expect("a file").path());
        let end = format!("-{stage}.json");
        let json = files.into_iter().find(|path| path.to_string_lossy().ends_with(&end)).expect("JSON of each stage");
        assert!(json.with_extension("md").is_file());
        serde_json::from_str(&std::fs::read_to_string(json).expect("a file")).expect("an object")
    }
}

#[test]
fn a_part_that_fails_or_takes_too_long_costs_the_others_nothing() {
    let machine = PlayedMachine::new();
    let run = machine.check(&["engine"]);
    let said = words(&run.stderr);
    assert!(!run.status.success() && said.contains("error: failed: loops, steps;"), "{said}");
    assert!(said.contains("== loops failed; decode with --engine tch"), "{said}");
    assert!(words(&run.stdout).contains("20000 steps: device memory grew by 0.0 MiB"), "{}", words(&run.stdout));
    let parts = &machine.recorded("engine")["parts"];
    let failed = |part: &str| parts[part]["failed"].as_str().unwrap_or_else(|| panic!("{part} fails: {parts}"));
    assert!(failed("loops").contains("exit status 3: no good"), "{parts}");
    assert_eq!(parts["loops"]["lines"][0]["same"], false);
    assert!(failed("steps").starts_with("not done after"), "{parts}");
    assert!(failed("steps").ends_with("half a line: going on"), "{parts}");
    assert_eq!(parts["steps"]["lines"][0]["step_ms"], 3.5);
    assert_eq!(parts["endurance"]["failed"], serde_json::Value::Null);
    assert!(parts["transformers"]["skipped"].is_string(), "{parts}");
}

#[test]
fn sanitizers_and_the_profiler_run_the_program() {
    let machine = PlayedMachine::new();
    let run = machine.check(&["sanitizers", "profile"]);
    let said = words(&run.stderr);
    assert!(said.contains("error: failed: memcheck, racecheck, synccheck;"), "{said}");
    let parts = &machine.recorded("sanitizers")["parts"];
    for (tool, ends) in [("memcheck", "gpu_check gpu-check brief caching=1"), ("racecheck", "gpu-check brief caching=")]
    {
        let why = parts[tool]["failed"].as_str().expect("it fails");
        assert!(why.starts_with("exit status 9: 17\n=========") && why.ends_with(ends), "{why}");
    }
    let memcheck = parts["memcheck"]["failed"].as_str().expect("it fails");
    assert!(memcheck.contains("--tool memcheck --report-api-errors no --error-exitcode 9"), "{memcheck}");
    let printed = words(&run.stdout);
    assert!(printed.contains("| linear_1 | 1.0 | 1000.0 | 99.9 % | 2500 |"), "{printed}");
    assert!(printed.contains("| norm | 2.0 | 1.0 | 0.1 % | 2 |"), "{printed}");
}

/// Lines of every part that has a section.
fn recorded_results() -> serde_json::Value {
    let part = |lines: serde_json::Value| json!({"lines": lines, "failed": null, "seconds": 1.0});
    json!({
        "date": "2026-01-02",
        "stage": "engine",
        "command": "scripts/gpu_check engine",
        "doctor": {"version": "0.1.0", "cuda": {"names": ["A GPU"], "driver": "580.1", "runtime": "13.0"}},
        "parts": {
            "kernels": part(json!([{"check": "kernels", "family": "llama", "dtype": "BFloat16", "head_dim": 128, "groups": 8, "nodes": 64, "context": 700,
                "acceptance": "Typical(TypicalAcceptance { })", "distances": {"embed": 0.0, "linear 64x64": 0.001, "res_block": 0.0021,
                "tree_attention": 0.0042}}])),
            "loops": part(json!([{"check": "libtorch", "dtype": "Float", "tokens": 128, "same": true},
                {"check": "loops", "family": "qwen2", "dtype": "Half", "head_dim": 64, "groups": 2, "prompt": 40, "tokens": 128,
                    "alone": {"same": 128, "margin": null}, "plain": {"same": 128, "margin": null}, "medusa": {"same": 90, "margin": 0.0625}}])),
            "hydra": part(json!([{"check": "kernels", "heads": "hydra", "family": "llama", "dtype": "Half", "head_dim": 128, "groups": 1, "nodes": 2, "context": 1,
                    "acceptance": "Greedy", "distances": {"first_block": 0.0012}},
                {"check": "hydra_texts", "family": "llama", "dtype": "Half", "head_dim": 128, "groups": 1, "nodes": 2, "tokens": 128,
                    "hydra": {"same": 128, "margin": null}, "steps": 90, "libtorch_steps": 91},
                {"check": "hydra_steps", "nodes": 64, "heads": 5, "context": 128, "steps": 80, "step_ms": 4.25}])),
            "steps": part(json!([{"check": "copy", "gigabytes_per_second": 4000.0, "read_gigabytes_per_second": 4500.0},
                {"check": "steps", "nodes": 64, "context": 128, "step_ms": 4.0}, {"check": "steps", "nodes": 64, "context": 1024, "step_ms": 4.5}, {"check": "steps", "nodes": 1, "context": 128, "step_ms": 3.5}])),
            "endurance": part(json!([{"check": "endurance", "steps": 20_000, "device_growth_bytes": 0, "host_growth_bytes": 1_048_576}])),
            "transformers": part(json!([{"check": "transformers", "context": 128, "step_ms": 20.0}])),
            "fused": part(json!([{"check": "fused", "operation": "gradient norm and adamw", "distance": 1.25e-7, "kernel_ms": 2.5, "libtorch_ms": 90.0, "gb_per_s": 2400.0}])),
            "medusa1": part(json!([{"check": "training", "stage": "medusa1", "tokens_per_second": 8192.0, "memory_bytes": 3u64 << 32, "device_memory_bytes": 1u64 << 34}])),
            "peer": part(json!([{"check": "peer", "micro_batch_size": 4, "tokens_per_second": 4096.0, "memory_bytes": 5u64 << 32}])),
            "distill": part(json!([{"check": "distill", "tokens_per_second": 4100.4}])),
            "transformers-batch": part(json!([{"check": "transformers_batch", "texts": 64, "tokens_per_second": 1200.0, "peak_bytes": 1u64 << 35}])),
            "mask": part(json!([{"check": "mask", "offset": 0, "crashed": false}, {"check": "mask", "offset": 1, "crashed": true}])),
            "bench": part(json!([{"check": "bench", "engine": "cuda", "plain": {"tokens_per_second": 900.0}, "medusa": {"tokens_per_second": 2700.0},
                "acceleration_rate": 3.05, "speedup": 3.0, "identical": true}])),
            "medusa2": json!({"lines": [], "failed": "not done after 9 s", "seconds": 9.0}),
            "memcheck": json!({"lines": [], "failed": null, "skipped": "there is no compute-sanitizer", "seconds": 0})
        }
    })
}

#[test]
fn what_was_recorded_becomes_a_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let recorded = folder.path().join("recorded.json");
    write_atomic(&recorded, |out| Ok(serde_json::to_writer(out, &recorded_results())?)).expect("a file of a test");
    let told = run(Path::new(SCRIPT), &["--table", recorded.to_str().expect("UTF-8")]);
    let table = words(&told.stdout);
    assert!(told.status.success(), "{}", words(&told.stderr));
    for line in [
        "# A GPU, 2026-01-02, engine",
        "**medusa2 failed**: not done after 9 s",
        "memcheck was skipped: there is no compute-sanitizer",
        "| llama, BFloat16, D 128, G 8 | 64 | 700 | Typical | tree_attention 4.2e-03, res_block 2.1e-03, linear 64x64 1.0e-03 |",
        "In float32, libtorch's loop makes the same text of 128 tokens with a tree and without.",
        "| qwen2 | Half | 64 | 2 | 40 | 128 | 128 | 128 | 90, then 0.062 |",
        "| llama, Half, D 128, G 1, Hydra heads | 2 | 1 | Greedy | first_block 1.2e-03 |",
        "| llama | Half | 2 | 128 | 128 | 90 | 91 |",
        "A step of 64 nodes of Llama 2 7B's shape with 5 Hydra heads takes 4.25 ms behind 128 tokens.",
        "A copy moves 4000 GB/s, read and written, and a sum reads 4500 GB/s: at these speeds 13.5 GB of weights take 3.37 and 3.00 ms.",
        "Were 3.47 tokens of each step of 64 nodes accepted, as the paper's are (random heads guess nothing, and a step takes the same time): \
         868 tokens/s behind 128, 17.4 times transformers.",
        "| nodes | context 128 | context 1024 |",
        "| 1 | 3.50 | - |",
        "| 64 | 4.00 | 4.50 |",
        "| transformers, 1 | 20.00 | - |",
        "20000 steps: device memory grew by 0.0 MiB, the host's by 1.0 MiB.",
        "| gradient norm and adamw | 1.2e-07 | 2.50 | 90.00 | 2400 |",
        "| medusa1 | 2.00 | 8192 | 12.0 | 16.0 |",
        "| PyTorch, Medusa-1, micro batch of 4 | 4.00 | 4096 | 20.0 | - |",
        "| medusa distill | 4100 | - |",
        "| transformers, 64 texts at once | 1200 | 32.0 |",
        "torch's attention with a float32 mask that begins 0 to 1 elements into its row crashes at offsets 1.",
        "| cuda | 900 | 2700 | 3.05 | 3.00 | yes |",
    ] {
        assert!(table.lines().any(|told| told == line), "{line}\n{table}");
    }
    let broken = run(Path::new(SCRIPT), &["--table", "/nowhere.json"]);
    assert!(words(&broken.stderr).contains("expected a file that scripts/gpu_check wrote"));
}
