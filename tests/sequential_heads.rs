//! Promise: Hydra heads train in every stage, resume exactly, and are read and written in their authors' layout.

use std::fs;
use std::path::Path;

use medusa::draft::heads::import::HeadsFile;
use medusa::draft::heads::{HeadInput, Heads, HeadsArchitecture, HeadsConfig, HeadsShape};
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::published::published;
use super::small_run::SmallRun;

const HYDRA_PLUS_PLUS: &str = "medusa_num_heads = 3\nmedusa_num_layers = 2\narchitecture = \"hydra++\"\ndropout = 0.2";
const HYDRA: &str = "medusa_num_heads = 3\nmedusa_num_layers = 2\narchitecture = \"hydra\"\ndropout = 0.2";

/// A run of Hydra heads with packed rows, gradient accumulation and dropout.
fn hydra_run(stage: &str) -> SmallRun {
    run_of(HYDRA, stage)
}

fn run_of(heads: &str, stage: &str) -> SmallRun {
    let small = SmallRun::new();
    small.edit("recipe.toml", "medusa_num_heads = 2\nmedusa_num_layers = 1", heads);
    small.edit("recipe.toml", "[stage.medusa1]", stage);
    small.edit("recipe.toml", "warmup_steps = 3", "warmup_steps = 3\nmin_ratio = 0.25");
    small
}

fn metrics(small: &SmallRun) -> Vec<Value> {
    small.read("run/metrics.jsonl").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_resumed_run_ends_with_the_heads_of_one_that_was_not_stopped() {
    let stages = [
        "[stage.medusa1]",
        "[stage.medusa2]\n[stage.medusa2.lora]\nrank = 2\nalpha = 4.0\ndropout = 0.1",
        "[stage.medusa2]",
    ];
    let of = |heads: &'static str| stages.into_iter().map(move |stage| (heads, stage));
    for (heads, stage) in of(HYDRA).chain(of(HYDRA_PLUS_PLUS)) {
        let small = run_of(heads, stage);
        small.train(&[]).succeeded();
        let expected = small.bytes("run/final/heads.safetensors");
        for gone in ["final", "step-000021", "step-000024"] {
            fs::remove_dir_all(small.path("run").join(gone)).expect("a folder of the run");
        }
        small.train(&["--resume"]).succeeded();
        assert!(small.bytes("run/final/heads.safetensors") == expected, "{stage}");
        let lines = metrics(&small).into_iter().filter(|line| line["split"] == "train");
        let losses: Vec<f64> = lines.map(|line| line["head_losses"][2].as_f64().expect("a loss")).collect();
        assert!(losses[23] < losses[0] - 0.3, "{stage}: {losses:?}");
    }
}

#[test]
fn the_learning_rate_ends_at_the_smallest_ratio() {
    let small = hydra_run("[stage.medusa1]");
    small.train(&[]).succeeded();
    let rates: Vec<f64> = metrics(&small).iter().filter_map(|line| line["lr"].as_f64()).collect();
    let last = *rates.last().expect("a rate");
    assert!(rates.iter().skip(4).all(|&rate| rate >= 0.0025) && last < 0.0027, "{rates:?}");
}

#[test]
fn dropout_changes_training_and_not_evaluation() {
    let lines = |dropout: &str| {
        let small = hydra_run("[stage.medusa1]");
        small.edit("recipe.toml", "dropout = 0.2", dropout);
        small.edit("recipe.toml", "learning_rate = 1e-2", "learning_rate = 1e-30");
        small.edit("recipe.toml", "epochs = 8", "epochs = 2");
        small.train(&[]).succeeded();
        metrics(&small)
    };
    let (with, without) = (lines("dropout = 0.5"), lines("dropout = 0.0"));
    for (with, without) in with.iter().zip(&without) {
        let is_same = with["head_losses"] == without["head_losses"];
        assert_eq!(is_same, with["split"] == "validation", "{with} {without}");
    }
}

/// In rows of one token all hidden states are equal, and so are the losses of untrained heads that have the same targets.
#[test]
fn each_head_has_dropout_masks_of_its_own() {
    let losses = |dropout: &str| {
        let small = run_of(&format!("medusa_num_heads = 2\nmedusa_num_layers = 1\n{dropout}"), "[stage.medusa1]");
        let labels: Vec<i64> = (0..12).map(|t| if t == 10 { 5 } else { -100 }).collect();
        let row = serde_json::json!({ "input_ids": vec![5; 12], "labels": labels }).to_string();
        small.write("rows.jsonl", [row.as_str(); 4].join("\n"));
        small.edit("recipe.toml", "epochs = 8", "max_steps = 3");
        small.edit("recipe.toml", "max_length = 40", "max_length = 40\npacking = false");
        small.train(&[]).succeeded();
        let first = &metrics(&small)[0]["head_losses"];
        [0, 1].map(|head| first[head].as_f64().expect("a loss"))
    };
    let difference = |[one, other]: [f64; 2]| (one - other).abs();
    assert!(difference(losses("dropout = 0.0")) < 1e-5);
    assert!(difference(losses("dropout = 0.5")) > 1e-3);
}

/// All rows are in one micro batch, so that a step differs only in their places.
#[test]
fn packed_rows_have_the_losses_and_gradients_of_rows_alone() {
    let stages = ["[stage.medusa1]", "[stage.medusa2]"];
    for (heads, stage) in [HYDRA, HYDRA_PLUS_PLUS].into_iter().flat_map(|heads| stages.map(|stage| (heads, stage))) {
        let lines = |packing: &str| {
            let small = run_of(heads, stage);
            small.edit("recipe.toml", "dropout = 0.2", "dropout = 0.0");
            small.edit("recipe.toml", "max_length = 40", &format!("max_length = 40\n{packing}"));
            small.edit("recipe.toml", "micro_batch_size = 1", "micro_batch_size = 12");
            small.edit("recipe.toml", "gradient_accumulation_steps = 2\n", "");
            small.train(&[]).succeeded();
            metrics(&small)
        };
        let (packed, alone) = (lines("packing = true"), lines("packing = false"));
        for (packed, alone) in packed.iter().zip(&alone).take(4) {
            for key in ["loss", "grad_norm", "head_losses", "lm_loss", "tokens"] {
                assert!(is_close(&packed[key], &alone[key]), "{heads}\n{stage}\n{key}\n{packed}\n{alone}");
            }
        }
    }
}

/// Whether all numbers agree within rounding.
fn is_close(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Array(one), Value::Array(other)) => one.iter().zip(other).all(|(one, other)| is_close(one, other)),
        (Value::Number(one), Value::Number(other)) => {
            let [one, other] = [one, other].map(|number| number.as_f64().expect("a number"));
            (one - other).abs() <= 2e-5 * other.abs().max(1e-2)
        }
        _ => one == other,
    }
}

#[test]
fn kept_hidden_states_train_the_same_hydra_heads() {
    [HYDRA, HYDRA_PLUS_PLUS].into_iter().for_each(kept_hidden_states_train_the_same);
}

fn kept_hidden_states_train_the_same(heads: &str) {
    let train = |more: &str| {
        let small = run_of(heads, "[stage.medusa1]");
        small.edit("recipe.toml", "max_length = 40", "max_length = 40\npacking = false");
        small.edit("recipe.toml", "[train]", &format!("[train]\n{more}"));
        small.train(&[]).succeeded();
        small.bytes("run/final/heads.safetensors")
    };
    assert!(train("") == train("hidden_state_cache = \"states\""));
}

#[test]
fn heads_to_start_from_must_have_the_recipes_architecture() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"hydra\"");
    let heads = "medusa_num_layers = 1\narchitecture = \"hydra\"\ninit_from = \"run/final\"";
    small.edit("recipe.toml", "medusa_num_layers = 1", heads);
    small
        .train(&[])
        .failed(2, &["heads.init_from run/final", "architecture = \"hydra\"", "got architecture = \"medusa\""]);
}

#[test]
fn new_heads_are_the_lm_head() {
    let folder = published("hydra/backbone");
    let backbone = Llama::load(&folder, Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    let config: HeadsConfig = toml::from_str(HYDRA).expect("a table");
    let heads = Heads::new(&config, &backbone.lm_head_weight(), None);
    let hidden_nh = Tensor::arange(48, (Kind::Float, Device::Cpu)).cos().view([3, 16]);
    let previous_nj = Tensor::from_slice(&[5_i64, 6, 7, 8, 9, 10]).view([3, 2]);
    let input = HeadInput { hidden_nh: &hidden_nh, previous_nj: Some(&previous_nj) };
    let got = tch::no_grad(|| heads.logits(1, &input, &backbone));
    assert!(got.allclose(&backbone.logits(&hidden_nh, Adapters::Off), 1e-6, 1e-6, false));
}

/// Logits `[K, N, V]` of heads at the first positions of the fixture's text, as many as each head has previous tokens.
fn logits(heads: &Path, fixture: &str, n: i64) -> Tensor {
    let backbone =
        Llama::load(&published("hydra/backbone"), Kind::Float, Device::Cpu, Purpose::Decoding).expect("a backbone");
    let heads = Heads::load(heads, &backbone).expect("heads");
    let fixture = Tensor::read_safetensors(published(fixture).join("expected.safetensors")).expect("the fixture");
    let read = |name: &str| &fixture.iter().find(|(own, _)| own == name).expect("a tensor").1;
    let (hidden_th, ids_t) = (read("hidden_states"), read("input_ids"));
    let states_1th = heads.states_of_rows(&hidden_th.unsqueeze(0), &[vec![ids_t.numel()]]);
    let hidden_nh = states_1th.squeeze_dim(0).narrow(0, 0, n);
    let of_head = |head: usize| {
        let after: Vec<Tensor> = (1..=head as i64 + 1).map(|ahead| ids_t.narrow(0, ahead, n)).collect();
        let previous_nj = Tensor::stack(&after, 1);
        heads.logits(head, &HeadInput { hidden_nh: &hidden_nh, previous_nj: Some(&previous_nj) }, &backbone)
    };
    tch::no_grad(|| Tensor::stack(&(0..heads.num_heads()).map(of_head).collect::<Vec<_>>(), 0))
}

#[test]
fn exported_heads_are_read_back_with_the_same_logits() {
    for (fixture, architecture, verified) in [
        ("hydra/published_mlp", "mlp", "verified: 3 Hydra heads of 3 ResBlocks in float16"),
        ("hydra/published_prefix-mlp", "prefix-mlp", "verified: 3 Hydra++ heads of 3 ResBlocks in float32"),
    ] {
        let small = SmallRun::new();
        let (heads, backbone) = (published(fixture), published("hydra/backbone"));
        let (from, base) = (heads.to_str().expect("a path"), backbone.to_str().expect("a path"));
        let export = |format: &str| {
            small.medusa(&["export", "--heads", from, "--backbone", base, "--format", format, "--out", format])
        };
        let ended = export("hydra").succeeded();
        assert!(ended.stderr.contains(verified), "{}", ended.stderr);
        assert_eq!(small.names("hydra"), ["README.md", "config.json", "hydra_lm_head.pt", "medusa.sha256"]);
        export("medusa-train").succeeded();
        assert_eq!(small.names("medusa-train"), ["README.md", "config.json", "heads.safetensors", "medusa.sha256"]);
        for format in ["hydra", "medusa-train"] {
            assert!(logits(&small.path(format), fixture, 13).equal(&logits(&heads, fixture, 13)), "{format}");
        }
        let config: Value = serde_json::from_str(&small.read("hydra/config.json")).expect("JSON");
        for (key, value) in [("hydra_num_heads", 3), ("hydra_num_layers", 3), ("hidden_state_offset", 0)] {
            assert_eq!(config[key], value, "{key}");
        }
        assert_eq!((&config["hydra_head_arch"], &config["grounded_heads"]), (&architecture.into(), &true.into()));
        assert!(config["base_model_name_or_path"].is_string());
        for format in ["heads", "tgi", "vllm", "tensorrt-llm", "merged", "modelopt", "peft"] {
            let facts = if format == "peft" { "has no adapter" } else { "holds Hydra heads" };
            export(format).failed(2, &[format, facts]);
            assert!(!small.path(format).exists());
        }
    }
}

#[test]
fn heads_of_a_run_are_exported_as_hydras_own_code_loads_them() {
    let small = hydra_run("[stage.medusa1]");
    small.edit("recipe.toml", "epochs = 8", "epochs = 1");
    small.train(&[]).succeeded();
    let shape = HeadsFile::open(&small.path("run/final")).expect("heads").shape();
    assert_eq!((shape.architecture, shape.w2_bias), (HeadsArchitecture::Hydra, false));
    let config: Value = serde_json::from_str(&small.read("run/final/config.json")).expect("JSON");
    assert_eq!(config["architecture"], "hydra");
    let shown = small.medusa(&["inspect", "run/final"]).succeeded().stdout;
    assert!(shown.contains("3 Hydra heads of 2 ResBlocks"), "{shown}");
    let result = |drafter: &str, speedup: f64| {
        format!("{{\"acceleration_rate\": 2.0, \"speedup\": {speedup}, \"drafter\": \"{drafter}\"}}\n")
    };
    small.write("run/bench.json", [result("ngram", 3.0), result("hydra", 1.75)].concat());
    small.medusa(&["export", "--heads", "run/final", "--format", "hydra", "--out", "out"]).succeeded();
    assert!(small.read("out/README.md").contains("- speedup: 1.75"), "the figures of these heads");
    let (own, written) =
        [small.path("run/final"), small.path("out")].map(|path| HeadsFile::open(&path).expect("heads")).into();
    assert_eq!(written.shape(), HeadsShape { w2_bias: true, ..shape });
    for place in shape.places() {
        let read = |file: &HeadsFile| file.tensor(place, Kind::Float).expect("a tensor");
        assert!(read(&own).equal(&read(&written)), "{place:?}");
    }
    assert!(small.read("out/README.md").contains("3 Hydra heads ([arXiv 2402.05109]"));
}

#[test]
fn heads_with_all_savings_are_published_in_bfloat16() {
    let small = hydra_run("[stage.medusa1]");
    small.edit("recipe.toml", "[heads]", "[heads]\nshared_w2 = true\nw2_rank = 4\ndraft_vocab_size = 20");
    small.edit("recipe.toml", "epochs = 8", "epochs = 1");
    small.train(&[]).succeeded();
    let export = |format: &str| {
        small.medusa(&["export", "--heads", "run/final", "--format", format, "--dtype", "bfloat16", "--out", format])
    };
    export("hydra").failed(2, &["20 tokens", "use --format medusa-train"]);
    export("medusa-train").succeeded();
    let open = |folder: &str| HeadsFile::open(&small.path(folder)).expect("heads");
    let (trained, written) = (open("run/final"), open("medusa-train"));
    assert_eq!((written.shape(), written.token_map()), (trained.shape(), trained.token_map()));
    assert_eq!((written.kind(), written.shape().w2_rank, written.shape().shared_w2), (Kind::BFloat16, 4, true));
    for place in trained.shape().places() {
        let read = |file: &HeadsFile| file.tensor(place, Kind::BFloat16).expect("a tensor");
        assert!(read(&trained).equal(&read(&written)), "{place:?}");
    }
    small.write_tokenizer(48);
    small.write("prompts.jsonl", r#"{"prompt_ids": [3, 4, 5]}"#);
    let decoded = |heads: &[&str]| {
        let generate =
            ["generate", "--backbone", "backbone", "--prompts", "prompts.jsonl", "--max-new-tokens", "12", "--json"];
        let ended = small.medusa(&[&generate[..], heads].concat()).succeeded();
        serde_json::from_str::<Value>(&ended.stdout).expect("JSON")["new_ids"].clone()
    };
    assert_eq!(decoded(&["--heads", "medusa-train"]), decoded(&[]));
}

#[test]
fn blocks_that_hydras_code_shares_must_be_equal() {
    let small = hydra_run("[stage.medusa1]");
    small.edit("recipe.toml", "medusa_num_layers = 2", "medusa_num_layers = 3");
    small.edit("recipe.toml", "epochs = 8", "epochs = 1");
    small.train(&[]).succeeded();
    let export = ["export", "--heads", "run/final", "--format", "hydra", "--out", "out"];
    small.medusa(&export).failed(2, &["head 1 has 3 ResBlocks with weights of their own", "at most 2 per head"]);
}
