//! The peak memory that `--check` predicts is within 15 % of the run's; `--check` needs no weights.

#![cfg(target_os = "linux")] // reads the peak from /proc

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use serde_json::{Value, json};
use tch::{Device, Kind};

use super::small_run::SmallRun;

/// Sizes of a backbone, length of its four rows, and stage and optimizer of a two-step run.
struct Size {
    hidden: usize,
    layers: usize,
    vocab: usize,
    length: usize,
    stage: &'static str,
    optimizer: &'static str,
}

impl Size {
    fn config(&self) -> Value {
        let Self { hidden, layers, vocab, .. } = self;
        json!({"model_type": "llama", "hidden_size": hidden, "intermediate_size": 11 * hidden / 4, "num_hidden_layers": layers,
            "num_attention_heads": 4, "vocab_size": vocab, "max_position_embeddings": 1024, "tie_word_embeddings": false})
    }

    fn recipe(&self) -> String {
        let Self { length, stage, optimizer, .. } = self;
        format!(
            r#"[backbone]
path = "backbone"
dtype = "float32"
[heads]
medusa_num_heads = 4
medusa_num_layers = 1
{stage}
[data]
train = ["rows.jsonl"]
max_length = {length}
packing = false
[optimizer]
name = "{optimizer}"
learning_rate = 1e-3
[schedule]
name = "constant"
[train]
output_dir = "run"
max_steps = 2
micro_batch_size = 4
"#
        )
    }

    /// A folder to run in, with or without weights.
    fn workplace(&self, weights: bool) -> SmallRun {
        let small = SmallRun::new();
        small.write("backbone/config.json", self.config().to_string());
        fs::remove_file(small.path("backbone/model.safetensors")).expect("it was there");
        if weights {
            let config = LlamaConfig::load(&small.path("backbone")).expect("a config");
            small.save_backbone(&Llama::random(config, Kind::Float, Device::Cpu, 3).weights());
        }
        let row = |row: usize| {
            let ids: Vec<usize> = (0..self.length).map(|t| (row * 97 + t * t) % self.vocab).collect();
            json!({ "input_ids": ids, "labels": ids }).to_string() + "\n"
        };
        small.write("rows.jsonl", (0..4).map(row).collect::<String>());
        small.write("recipe.toml", self.recipe());
        small
    }

    fn planned_and_measured(&self) -> (u64, u64) {
        let small = self.workplace(true);
        let plan: Value = serde_json::from_str(&small.train(&["--check", "--json"]).succeeded().stdout).expect("JSON");
        (plan["peak_bytes"].as_u64().expect("bytes"), peak_of_a_run(&small))
    }
}

/// Peak resident bytes according to the kernel (VmHWM), which never falls; read until the process ends.
fn peak_of_a_run(small: &SmallRun) -> u64 {
    let mut child = small.trainer(&["--quiet"]).stdout(Stdio::null()).spawn().expect("the program starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    let ended = loop {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let kib =
            text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse::<u64>().ok());
        peak = kib.unwrap_or(peak).max(peak);
        if let Some(ended) = child.try_wait().expect("a child") {
            break ended;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    assert!(ended.success());
    1024 * peak
}

const ADAPTERS: &str = "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 16\nalpha = 16.0\ndropout = 0.05";

fn check(size: &Size) {
    let (planned, measured) = size.planned_and_measured();
    let ratio = planned as f64 / measured as f64;
    assert!((0.85..=1.15).contains(&ratio), "planned {planned} bytes, measured {measured}: {ratio:.3}");
}

#[test]
fn the_planned_peak_of_adapters_and_their_activations_is_the_runs() {
    check(&Size { hidden: 256, layers: 4, vocab: 8000, length: 512, stage: ADAPTERS, optimizer: "adamw" });
}

#[test]
fn the_planned_peak_of_heads_is_the_runs() {
    check(&Size { hidden: 512, layers: 1, vocab: 12_000, length: 64, stage: "[stage.medusa1]", optimizer: "adamw" });
}

#[test]
fn the_planned_peak_with_moments_of_8_bits_is_the_runs() {
    check(&Size {
        hidden: 512,
        layers: 1,
        vocab: 12_000,
        length: 64,
        stage: "[stage.medusa1]",
        optimizer: "adamw8bit",
    });
}

#[test]
fn check_needs_no_weights_and_says_so() {
    let size = Size { hidden: 64, layers: 2, vocab: 500, length: 64, stage: ADAPTERS, optimizer: "adamw" };
    let plan = |weights| size.workplace(weights).train(&["--check"]).succeeded().stdout;
    let (without, with) = (plan(false), plan(true));
    let line = "weights      not in the folder; only config.json was checked\n";
    assert!(without.contains(line), "{without}");
    assert_eq!(without.replace(line, ""), with);
    let refused = size.workplace(false).train(&[]);
    refused.failed(1, &["backbone has neither model.safetensors nor"]);
}

#[test]
fn check_compares_headers_with_the_config() {
    let small = SmallRun::new();
    small.edit("backbone/config.json", "\"intermediate_size\": 48", "\"intermediate_size\": 40");
    small.train(&["--check"]).failed(1, &["model.safetensors", "gate_proj.weight", "[40, 32]", "[48, 32]"]);
}

#[test]
fn a_quantised_teacher_is_warned_of() {
    let distills = ADAPTERS.replace("[stage.medusa2]\n", "[stage.medusa2]\nself_distillation = true\n");
    let size = Size { hidden: 64, layers: 1, vocab: 500, length: 64, stage: ADAPTERS, optimizer: "adamw" };
    let small = size.workplace(false);
    let recipe = size.recipe().replace(ADAPTERS, &distills);
    for (quantization, warned) in [("", false), ("quantization = \"nf4\"\n", true)] {
        let text = recipe.replace("[heads]", &format!("{quantization}[heads]")) + "recompute = true\n";
        small.write("recipe.toml", text);
        let plan = small.train(&["--check"]).succeeded().stdout;
        assert_eq!(plan.contains("the teacher of self-distillation is the quantised backbone"), warned, "{plan}");
    }
}
