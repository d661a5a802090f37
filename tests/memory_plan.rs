//! The peak memory that `--check` predicts is within 15 % of the run's; `--check` needs no weights.

#![cfg(target_os = "linux")] // reads the peak from /proc
#![expect(clippy::print_stdout, reason = "the table for docs/scaling.md; shown with --nocapture")]

use std::collections::BTreeMap;
use std::fs;
use std::process::{Child, Stdio};
use std::time::Duration;

use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use serde_json::{Map, Value, json};
use tch::{Device, Kind};

use super::small_run::SmallRun;

/// Family and sizes of a backbone, length of its four rows, and heads, stage and optimizer of a two-step run.
struct Size {
    /// Keys of config.json beside [`Size::config`]'s, or instead of them.
    family: &'static str,
    /// Keys of `[backbone]`.
    backbone: &'static str,
    heads: usize,
    /// More keys of `[heads]`.
    of_heads: &'static str,
    hidden: usize,
    layers: usize,
    vocab: usize,
    length: usize,
    stage: &'static str,
    optimizer: &'static str,
}

const LLAMA: Size = Size {
    family: "{}",
    backbone: "dtype = \"float32\"",
    heads: 4,
    of_heads: "",
    hidden: 512,
    layers: 1,
    vocab: 12_000,
    length: 64,
    stage: "[stage.medusa1]",
    optimizer: "adamw",
};

impl Size {
    fn config(&self) -> Value {
        let Self { hidden, layers, vocab, .. } = self;
        let mut config = json!({"model_type": "llama", "hidden_size": hidden, "intermediate_size": 11 * hidden / 4, "num_hidden_layers": layers,
            "num_attention_heads": 4, "vocab_size": vocab, "max_position_embeddings": 1024, "tie_word_embeddings": false});
        let family: Map<String, Value> = serde_json::from_str(self.family).expect("JSON");
        config.as_object_mut().expect("an object").extend(family);
        config
    }

    fn recipe(&self) -> String {
        let Self { backbone, heads, of_heads, length, stage, optimizer, .. } = self;
        format!(
            r#"[backbone]
path = "backbone"
{backbone}
[heads]
medusa_num_heads = {heads}
medusa_num_layers = 1
{of_heads}
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

fn peak_of_a_run(small: &SmallRun) -> u64 {
    let mut child = small.trainer(&["--quiet"]).stdout(Stdio::null()).spawn().expect("the program starts");
    let pid = child.id();
    peaks_until_the_end(&mut child, || vec![pid])[&pid]
}

/// Peak resident bytes of processes according to the kernel (VmHWM), which never fall; read until `child` ends.
fn peaks_until_the_end(child: &mut Child, pids: impl Fn() -> Vec<u32>) -> BTreeMap<u32, u64> {
    let mut peaks = BTreeMap::new();
    let ended = loop {
        for pid in pids() {
            let peak: &mut u64 = peaks.entry(pid).or_default();
            *peak = peak_now(pid).unwrap_or(0).max(*peak);
        }
        if let Some(ended) = child.try_wait().expect("a child") {
            break ended;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    assert!(ended.success());
    peaks
}

fn peak_now(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next());
    Some(1024 * kib?.parse::<u64>().ok()?)
}

/// The processes that a process started.
fn children(pid: u32) -> Vec<u32> {
    let listed = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_whitespace().map(|pid| pid.parse().expect("a process id")).collect()
}

const ADAPTERS: &str = "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 16\nalpha = 16.0\ndropout = 0.05";

/// The peak differs between CPUs: of sequential heads it is 0.88 of the plan on an AMD EPYC.
fn check(size: &Size) {
    let (planned, measured) = size.planned_and_measured();
    let ratio = planned as f64 / measured as f64;
    assert!((0.85..=1.2).contains(&ratio), "planned {planned} bytes, measured {measured}: {ratio:.3}");
}

/// Models whose memory is mostly the program's, and rows of 8 to 1,024 tokens.
#[test]
fn the_planned_peak_of_a_small_model_and_unequal_rows_is_not_below_the_runs() {
    for hidden in [64, 256] {
        let size = Size { heads: 2, hidden, layers: 2, vocab: 2000, length: 1024, ..LLAMA };
        let small = size.workplace(true);
        let row = |row: usize| {
            let length = [1024, 8, 50, 20, 700, 120, 300][row % 7];
            let ids: Vec<usize> = (0..length).map(|t| (row * 97 + t * t) % 2000).collect();
            json!({ "input_ids": ids, "labels": ids }).to_string() + "\n"
        };
        small.write("rows.jsonl", (0..40).map(row).collect::<String>());
        small.edit("recipe.toml", "max_steps = 2", "max_steps = 10");
        let plan: Value = serde_json::from_str(&small.train(&["--check", "--json"]).succeeded().stdout).expect("JSON");
        let (planned, measured) = (plan["peak_bytes"].as_u64().expect("bytes"), peak_of_a_run(&small));
        let ratio = planned as f64 / measured as f64;
        assert!((1.0..1.6).contains(&ratio), "hidden {hidden}: planned {planned}, measured {measured}: {ratio:.3}");
    }
}

/// gloo gathers the new values of all parameters in a buffer of its own, as large as the gradients'.
#[test]
fn the_plan_of_shared_moments_has_the_buffer_that_gathers_the_values() {
    let small = LLAMA.workplace(false);
    small.edit("recipe.toml", "micro_batch_size = 4", "micro_batch_size = 2\ngradient_accumulation_steps = 2");
    let plan = |processes: &str| {
        let plan = small.train(&["--check", "--json", "--nproc", processes]).succeeded().stdout;
        serde_json::from_str::<Value>(&plan).expect("JSON")["memory"].take()
    };
    let working = |plan: &Value| plan["working_bytes"].as_u64().expect("bytes");
    let [alone, whole] = [plan("1"), plan("2")];
    small.edit("recipe.toml", "learning_rate", "zero_stage = 1\nlearning_rate");
    let [alone_of_one, shared] = [plan("1"), plan("2")];
    assert_eq!((working(&alone), &alone), (working(&whole), &alone_of_one));
    let groups = shared["groups"].as_array().expect("groups");
    let gradients: u64 = groups.iter().map(|group| group["gradient_bytes"].as_u64().expect("bytes")).sum();
    assert_eq!((gradients >> 20, working(&shared)), (97, working(&whole) + gradients));
}

/// What `--check --nproc` plans for a process of this run, and the measured peak of each process. All save checkpoints.
fn planned_and_measured_of_processes(size: &Size, processes: usize, zero_stage: u8) -> (u64, Vec<u64>) {
    let small = size.workplace(true);
    small.edit("recipe.toml", "micro_batch_size = 4", "micro_batch_size = 1\ngradient_accumulation_steps = 4");
    small.edit("recipe.toml", "learning_rate", &format!("zero_stage = {zero_stage}\nlearning_rate"));
    let processes = processes.to_string();
    let plan = small.train(&["--check", "--json", "--nproc", &processes]).succeeded().stdout;
    let plan: Value = serde_json::from_str(&plan).expect("JSON");
    let mut starter = small.trainer(&["--nproc", &processes, "--threads", "1"]);
    let mut starter = starter.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the program starts");
    let pid = starter.id();
    let measured = peaks_until_the_end(&mut starter, || children(pid));
    (plan["peak_bytes"].as_u64().expect("bytes"), measured.into_values().collect())
}

/// Prints the rows of the table in docs/scaling.md.
#[test]
#[ignore = "12 runs, three minutes: cargo test --test promises memory_plan::the_planned_peak_of_each -- --ignored --nocapture"]
fn the_planned_peak_of_each_process_is_the_processs() {
    let mebibytes = |bytes: &u64| format!("{}", bytes >> 20);
    let mut off = vec![];
    for (name, size) in [
        ("Medusa-1", LLAMA),
        ("Medusa-1, adamw8bit", Size { optimizer: "adamw8bit", ..LLAMA }),
        ("Medusa-2, LoRA", Size { hidden: 512, layers: 4, vocab: 8000, length: 256, stage: ADAPTERS, ..LLAMA }),
        ("Medusa-2, whole backbone", Size { layers: 4, heads: 2, vocab: 8000, stage: "[stage.medusa2]", ..LLAMA }),
    ] {
        for (processes, zero_stage) in [(2, 0), (2, 1), (4, 1)] {
            let (planned, measured) = planned_and_measured_of_processes(&size, processes, zero_stage);
            let each: Vec<String> = measured.iter().map(mebibytes).collect();
            println!("| {name} | {processes} | {zero_stage} | {} | {} |", mebibytes(&planned), each.join(", "));
            assert_eq!(measured.len(), processes, "{each:?}");
            let ratio = planned as f64 / *measured.iter().max().expect("processes") as f64;
            if !(0.85..=1.15).contains(&ratio) {
                off.push(format!(
                    "{name}, {processes} processes, zero_stage = {zero_stage}: {ratio:.3} of the largest"
                ));
            }
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}

#[test]
fn the_planned_peak_of_adapters_and_their_activations_is_the_runs() {
    check(&Size { hidden: 256, layers: 4, vocab: 8000, length: 512, stage: ADAPTERS, ..LLAMA });
}

#[test]
fn the_planned_peak_of_heads_is_the_runs() {
    check(&LLAMA);
}

#[test]
fn the_planned_peak_of_a_whole_backbone_in_float64_is_the_runs() {
    let backbone = "dtype = \"float64\"";
    check(&Size { backbone, stage: "[stage.medusa2]", heads: 2, vocab: 6000, length: 128, ..LLAMA });
}

#[test]
fn the_planned_peak_of_sequential_heads_is_the_runs() {
    let of_heads = "architecture = \"hydra\"\ndropout = 0.2";
    check(&Size { of_heads, hidden: 768, vocab: 4000, length: 256, stage: ADAPTERS, ..LLAMA });
}

/// Most of the memory is the embedding, which is also the LM head.
#[test]
fn the_planned_peak_of_heads_of_low_rank_has_no_second_lm_head() {
    let family = r#"{"tie_word_embeddings": true}"#;
    check(&Size { family, heads: 1, of_heads: "w2_rank = 8", vocab: 96_000, length: 16, ..LLAMA });
}

/// The weights' file is mapped, and rows of the embedding that no text reads are planned but never loaded: the first
/// backbone is tied, so that few are.
#[test]
fn the_planned_peak_of_heads_with_a_truncated_vocabulary_is_the_runs() {
    let tied = r#"{"tie_word_embeddings": true}"#;
    check(&Size { family: tied, of_heads: "draft_vocab_size = 12000", vocab: 24_000, ..LLAMA });
    let of_heads = "draft_vocab_size = 10000\nshared_w2 = true";
    let soft = "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 16\nalpha = 16.0\n[loss]\ntargets = \"backbone\"";
    check(&Size { of_heads, vocab: 20_000, hidden: 768, length: 128, stage: soft, ..LLAMA });
}

/// Most of the working memory is the LM head's own loss: its weight in bfloat16, and that weight's gradient.
#[test]
fn the_planned_peak_of_a_whole_backbone_that_teaches_a_truncated_vocabulary_is_the_runs() {
    let (family, of_heads) = (r#"{"tie_word_embeddings": true}"#, "draft_vocab_size = 20000\nw2_rank = 8");
    let stage = "[stage.medusa2]\n[loss]\ntargets = \"backbone\"";
    let backbone = "dtype = \"bfloat16\"";
    check(&Size { family, backbone, of_heads, stage, heads: 1, vocab: 48_000, length: 16, ..LLAMA });
}

/// The file of a backbone in float32, from which the trained weights are copied, is in memory no longer.
#[test]
fn the_planned_peak_of_a_whole_backbone_in_float32_is_the_runs() {
    check(&Size { layers: 4, heads: 2, vocab: 8000, stage: "[stage.medusa2]", ..LLAMA });
}

#[test]
fn the_planned_peak_with_moments_of_8_bits_is_the_runs() {
    check(&Size { optimizer: "adamw8bit", ..LLAMA });
}

/// Capped attention and a window that cuts. Heads are small and many, so that most of the memory is scores, whose tensors are too large for the
/// heap: its holes vary.
const GEMMA_2: &str = r#"{"model_type": "gemma2", "num_attention_heads": 128, "num_key_value_heads": 64, "head_dim": 8,
"query_pre_attn_scalar": 8, "sliding_window": 64, "tie_word_embeddings": true}"#;

#[test]
fn the_planned_peak_of_heads_of_gemma_2_has_the_scores_of_attention() {
    check(&Size { family: GEMMA_2, hidden: 256, layers: 2, vocab: 2000, length: 256, ..LLAMA });
}

/// Without capped attention and with a small MLP, so that most of what a layer keeps is its norms' inputs.
const GEMMA_2_NORMS: &str = r#"{"model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
"query_pre_attn_scalar": 32, "attn_logit_softcapping": null, "intermediate_size": 256, "tie_word_embeddings": true}"#;

#[test]
fn the_planned_peak_of_adapters_of_gemma_2_has_the_norms_in_float32() {
    check(&Size {
        family: GEMMA_2_NORMS,
        backbone: "dtype = \"bfloat16\"",
        heads: 1,
        hidden: 1024,
        layers: 8,
        vocab: 200,
        length: 256,
        stage: ADAPTERS,
        ..LLAMA
    });
}

/// One linear layer for gate and up, here most of a decoder layer.
const PHI_3: &str = r#"{"model_type": "phi3", "intermediate_size": 16384, "pad_token_id": 0}"#;

#[test]
fn the_planned_peak_of_heads_of_phi_3_on_nf4_weights_has_its_largest_linear_layer() {
    check(&Size {
        family: PHI_3,
        backbone: "dtype = \"float32\"\nquantization = \"nf4\"",
        heads: 1,
        hidden: 1024,
        vocab: 1000,
        length: 16,
        ..LLAMA
    });
}

/// oneDNN keeps a compiled product for each number of rows, and the heap's holes grow with each new size of a tensor.
#[test]
fn memory_stays_where_the_number_of_targets_varies() {
    let size = Size { backbone: "dtype = \"bfloat16\"", hidden: 192, vocab: 1536, length: 128, ..LLAMA };
    let small = size.workplace(true);
    let row = |row: usize| {
        let ids: Vec<usize> = (0..128).map(|t| (row * 97 + t * t) % 1536).collect();
        let labels = ids.iter().enumerate().map(|(t, &id)| if t < row * 37 % 64 { -100 } else { id as i64 });
        json!({ "input_ids": ids, "labels": labels.collect::<Vec<_>>() }).to_string() + "\n"
    };
    small.write("rows.jsonl", (0..160).map(row).collect::<String>());
    small.edit("recipe.toml", "max_steps = 2", "max_steps = 40");
    small.train(&["--quiet"]).succeeded();
    let metrics = small.read("run/metrics.jsonl");
    let memory =
        metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["memory_bytes"].as_u64());
    let memory: Vec<u64> = memory.map(|bytes| bytes.expect("resident bytes") >> 20).collect();
    assert_eq!(memory.len(), 40);
    assert!(memory[39] < memory[4] + 64, "MiB after each step: {memory:?}");
}

#[test]
fn check_needs_no_weights_and_says_so() {
    let size = Size { hidden: 64, layers: 2, vocab: 500, stage: ADAPTERS, ..LLAMA };
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
    let size = Size { hidden: 64, vocab: 500, stage: ADAPTERS, ..LLAMA };
    let small = size.workplace(false);
    let recipe = size.recipe().replace(ADAPTERS, &distills);
    for (quantization, warned) in [("", false), ("quantization = \"nf4\"\n", true)] {
        let text = recipe.replace("[heads]", &format!("{quantization}[heads]")) + "recompute = true\n";
        small.write("recipe.toml", text);
        let plan = small.train(&["--check"]).succeeded().stdout;
        assert_eq!(plan.contains("the teacher of self-distillation is the quantised backbone"), warned, "{plan}");
    }
}

/// More than a test machine has memory for, in every dtype.
const SEVENTY_BILLION: &str = r#"{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
"num_key_value_heads": 8, "vocab_size": 32000}"#;

#[test]
fn check_says_what_to_lower_if_the_plan_exceeds_the_memory() {
    let size = Size { family: SEVENTY_BILLION, stage: ADAPTERS, ..LLAMA };
    let small = size.workplace(false);
    let plan: Value = serde_json::from_str(&small.train(&["--check", "--json"]).succeeded().stdout).expect("JSON");
    let bytes = |of: &Value| of.as_u64().expect("bytes");
    let (peak, free) = (bytes(&plan["peak_bytes"]), bytes(&plan["device_memory"]["free_bytes"]));
    assert!(peak > 260 << 30, "{peak}");
    let savings = plan["memory_savings"].as_array().expect("changes");
    let peaks: Vec<u64> = [peak].into_iter().chain(savings.iter().map(|saving| bytes(&saving["peak_bytes"]))).collect();
    assert!(peaks.is_sorted_by(|before, after| before > after), "each change saves memory: {peaks:?}");
    let keys: Vec<&str> = savings.iter().map(|saving| saving["keys"].as_str().expect("keys")).collect();
    let all = [
        "train.micro_batch_size = 1 with train.gradient_accumulation_steps = 4",
        "train.recompute = true",
        "optimizer.name = \"adamw8bit\"",
        "backbone.quantization = \"nf4\"",
        "heads.shared_lm_head = true",
        "data.max_length = 16",
    ];
    assert!(all.starts_with(&keys) && keys.len() >= 4, "{keys:?}");
    assert!(keys.len() == all.len() || peaks.last().is_some_and(|last| *last <= free), "{peaks:?}, {free} free");
    let text = small.train(&["--check"]).succeeded().stdout;
    let warning = text.lines().find(|line| line.starts_with("warning ")).expect("a warning");
    let [gib, nf4] = [peak, peaks[4]].map(|bytes| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)));
    for part in [format!("the planned peak is {gib}, and cpu has "), format!("backbone.quantization = \"nf4\" ({nf4})")]
    {
        assert!(warning.contains(&part), "{part:?} is not in {warning:?}");
    }
}

#[test]
fn a_plan_that_fits_is_not_warned_of() {
    let size = Size { hidden: 64, vocab: 500, ..LLAMA };
    let small = size.workplace(false);
    let plan: Value = serde_json::from_str(&small.train(&["--check", "--json"]).succeeded().stdout).expect("JSON");
    assert_eq!((&plan["warnings"], &plan["memory_savings"]), (&json!([]), &Value::Null));
    assert!(plan["device_memory"]["total_bytes"].as_u64() >= plan["device_memory"]["free_bytes"].as_u64());
}
