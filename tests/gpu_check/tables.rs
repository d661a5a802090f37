//! The tables of recorded results.

use std::collections::BTreeSet;
use std::path::Path;

use medusa::files::write_atomic;
use serde_json::json;

use super::{SCRIPT, python, run, words};

/// Lines of every part that has a section.
fn recorded_results() -> serde_json::Value {
    let part = |lines: serde_json::Value| json!({"lines": lines, "failed": null, "seconds": 1.0});
    json!({
        "date": "2026-01-02",
        "stage": "engine",
        "command": "scripts/gpu_check engine",
        "has_old_timings": true,
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
                {"check": "products", "product": {"rows": 64, "outputs": 11008, "inputs": 4096, "normed": true, "written": "gated"}, "ways": [
                    {"way": {"tile": {"height": 64, "width": 64, "splits": 2}}, "microseconds": 40.5, "gigabytes_per_second": 2226.0},
                    {"way": {"cublas_lt": {"algorithm": 3}}, "microseconds": 50.0, "gigabytes_per_second": 1803.4}]},
                {"check": "products", "product": {"rows": 1, "outputs": 4096, "inputs": 4096, "normed": false, "written": "rounded"}, "ways": [
                    {"way": {"few": {"most": 1, "split": 4}}, "microseconds": 10.0, "gigabytes_per_second": 3355.0}]},
                {"check": "products", "product": {"rows": 1, "outputs": 64, "inputs": 64, "normed": false, "written": "rounded"}, "ways": []},
                {"check": "steps", "nodes": 64, "context": 128, "step_ms": 4.0}, {"check": "steps", "nodes": 64, "context": 1024, "step_ms": 4.5}, {"check": "steps", "nodes": 1, "context": 128, "step_ms": 3.5}])),
            "endurance": part(json!([{"check": "endurance", "steps": 20_000, "device_growth_bytes": 0, "host_growth_bytes": 1_048_576}])),
            "transformers": part(json!([{"check": "transformers", "context": 128, "step_ms": 20.0}])),
            "fused": part(json!([{"check": "fused", "operation": "gradient norm and adamw", "distance": 1.25e-7, "kernel_ms": 2.5, "libtorch_ms": 90.0, "gb_per_s": 2400.0}])),
            "layers": part(json!([{"check": "layers", "map": "cuda:0 2, cpu 3", "trained": "Backbone", "distance": 1.5e-6, "of": "norm 1", "copies": [2, 2]}])),
            "medusa1": part(json!([8000.0, 8192.0, 8192.0, 9000.0].map(|speed| {
                json!({"check": "training", "stage": "medusa1", "tokens_per_second": speed, "memory_bytes": 3u64 << 32, "device_memory_bytes": 1u64 << 34})
            }))),
            "peer": part(json!([{"check": "peer", "backbone": "PyTorch", "micro_batch_size": 4, "tokens_per_second": 4096.0, "memory_bytes": 5u64 << 32}])),
            "peer-transformers": json!({"lines": [], "failed": null, "skipped": "No module named 'transformers'", "seconds": 0}),
            "distill": part(json!([{"check": "distill", "tokens_per_second": 4100.4, "batch_size": 108, "device_memory_bytes": 1u64 << 36},
                {"check": "distill", "tokens_per_second": 700.0, "partial": true}])),
            "transformers-batch": part(json!([{"check": "transformers_batch", "texts": 64, "tokens_per_second": 1200.0, "memory_bytes": 1u64 << 35}])),
            "mask": part(json!([{"check": "mask", "offset": 0, "crashed": false}, {"check": "mask", "offset": 1, "crashed": true, "error": "misaligned address"}])),
            "train-tiny": part(json!([{"check": "tiny", "step": 3}])),
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
    let printed = run(Path::new(SCRIPT), &["--table", recorded.to_str().expect("UTF-8")]);
    let table = words(&printed.stdout);
    assert!(printed.status.success(), "{}", words(&printed.stderr));
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
        "| cuda:0 2, cpu 3 | Backbone | 1.5e-06 | norm 1 | 2 + 2 |",
        "| medusa1 | 2.00 | 8192 | 12.0 | 16.0 |",
        "| PyTorch, Medusa-1, micro batch of 4 | 4.00 | 4096 | 20.0 | - |",
        "medusa1 beside PyTorch: 2.00 times its tokens/s, with 0.60 of its memory (allocators' peaks).",
        "Not measured: peer-transformers (No module named 'transformers').",
        "| medusa distill | 108 | 4100 | - | 64.0 |",
        "| medusa distill, until it was stopped | - | 700 | - | - |",
        "| transformers | 64 | 1200 | 32.0 | - |",
        "torch's attention with a float32 mask that begins 0 to 1 elements into its row crashes at offsets 1 (misaligned address).",
        "| 1 | 4096x4096 | - | 1/4: 10.0 µs, 3355 GB/s | - | 1 |",
        "| 64 | 11008x4096 | norm, gated | 64x64/2: 40.5 µs, 2226 GB/s | algorithm 3: 50.0 µs, 1803 GB/s | 2 |",
        "target/cache had timings of an earlier run: products that are in them were not timed again.",
        "**The table of tiny could not be made**: KeyError: 'loss'",
        "| cuda | 900 | 2700 | 3.05 | 3.00 | yes |",
    ] {
        assert!(table.lines().any(|printed| printed == line), "{line}\n{table}");
    }
    let broken = run(Path::new(SCRIPT), &["--table", "/nowhere.json"]);
    assert!(words(&broken.stderr).contains("expected a file that scripts/gpu_check wrote"));
}

/// The kinds of lines that the sources print.
fn printed_kinds() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = ["examples/gpu_check", "scripts/gpu"].iter().flat_map(|folder| {
        let entries = std::fs::read_dir(root.join(folder)).expect("a folder of the repository");
        entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_file())
    });
    let kinds = files.flat_map(|path| {
        let text = std::fs::read_to_string(&path).expect("a source");
        let kinds = text.split("\"check\": \"").skip(1).filter_map(|rest| rest.split('"').next());
        kinds.map(str::to_owned).collect::<Vec<_>>()
    });
    kinds.collect()
}

#[test]
fn every_kind_of_line_has_a_table() {
    let code = "import tables; print(*tables.SECTIONS, *tables.WITHOUT_TABLE, sep='\\n')";
    let shown: BTreeSet<String> = python(code, &[]).lines().map(str::to_owned).collect();
    assert_eq!(printed_kinds(), shown);
}
