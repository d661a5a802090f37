//! Promise: Medusa-2 trains adapters or the whole backbone together with the heads, leaves frozen parameters unchanged,
//! resumes exactly after any interruption, and its output works with every other command.

use std::fs;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use medusa::model::attention::RowMask;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::model::lora::Adapters;
use medusa::model::peft::attach;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::small_run::SmallRun;

const SELF_DISTILLATION: &str = "[stage.medusa2]\nmedusa_scheduler = \"sine\"\nself_distillation = true\n\
    [stage.medusa2.lora]\nrank = 4\nalpha = 8\ndropout = 0.1";

fn small_run(stage: &str) -> SmallRun {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[stage.medusa1]", stage);
    small
}

fn metrics(small: &SmallRun) -> Vec<Value> {
    let text = small.read("run/metrics.jsonl");
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

fn validation(small: &SmallRun) -> Vec<Value> {
    metrics(small).into_iter().filter(|line| line["split"] == "validation").collect()
}

fn load(small: &SmallRun, folder: &str) -> Llama {
    Llama::load(&small.path(folder), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone")
}

fn logits(llama: &Llama, adapters: Adapters) -> Tensor {
    let tokens = Tensor::from_slice(&(0..24).map(|t| (t * t + 5) % 40).collect::<Vec<i64>>()).unsqueeze(0);
    let rows = RowMask::causal(24, &llama.config, Device::Cpu);
    tch::no_grad(|| llama.logits(&llama.hidden_states(&tokens, &rows, adapters), adapters))
}

#[test]
fn what_is_frozen_stays_as_it_was_and_so_does_the_teacher() {
    let small = small_run(SELF_DISTILLATION);
    let (bytes, before) = (small.bytes("backbone/model.safetensors"), logits(&load(&small, "backbone"), Adapters::Off));
    let said = small.train(&[]).succeeded().stderr;
    assert!(said.contains("validation after step 0: LM loss 0.0000, heads loss "), "{said}");
    assert!(!said.contains(" loss 0.0000 "), "no total that rises with λ0: {said}");
    assert_eq!(small.bytes("backbone/model.safetensors"), bytes);
    let mut after = load(&small, "backbone");
    attach(&mut after, &small.path("run/final"), None).expect("the run's adapter");
    assert_eq!(logits(&after, Adapters::Off), before, "the teacher's logits, bit for bit");
    assert_ne!(logits(&after, Adapters::On), before, "the adapters learnt something");
    assert_eq!(
        small.names("run/final"),
        [
            "adapter_config.json",
            "adapter_model.safetensors",
            "config.json",
            "heads.safetensors",
            "medusa.sha256",
            "prompts.hashes"
        ]
    );
    let lines = validation(&small);
    assert_eq!(lines[0]["step"], 0, "the backbone before training");
    assert!(
        lines[0]["lm_loss"].as_f64().expect("a loss") < 1e-6,
        "student and teacher are equal at first: {}",
        lines[0]
    );
    let perplexity = |line: &Value| line["perplexity"].as_f64().expect("a perplexity");
    assert!(perplexity(&lines[0]) > 30.0, "a random backbone of 48 tokens: {}", lines[0]);
    let update =
        metrics(&small).into_iter().find(|line| line["split"] == "train" && line["step"] == 13).expect("a step");
    let (rate, heads_rate) = (update["lr"].as_f64().expect("a rate"), update["heads_lr"].as_f64().expect("a rate"));
    assert!((heads_rate / rate - 4.0).abs() < 1e-12, "medusa_lr_multiplier is 4 where the recipe says nothing");
    assert!((update["lambda0"].as_f64().expect("λ0") - 0.2 * std::f64::consts::FRAC_PI_4.sin()).abs() < 1e-12);
}

/// With λ0 of its step an evaluation would be the worse, the later it is.
#[test]
fn evaluations_weight_the_heads_by_the_peak_of_a_rising_lambda0() {
    let small = small_run("[stage.medusa2]\nmedusa_heads_coefficient = 0.7\nmedusa_scheduler = \"linear\"");
    small.edit("recipe.toml", "eval_every = 6", "eval_every = 6\nkeep_best = \"loss\"");
    small.edit("recipe.toml", "learning_rate = 1e-2", "learning_rate = 1e-3");
    small.train(&[]).succeeded();
    let lines = validation(&small);
    let at_peak = |line: &Value, lambda0: f64| {
        let heads = line["head_losses"].as_array().expect("heads").iter().zip(1..);
        let heads: f64 = heads.map(|(loss, head)| 0.8f64.powi(head) * loss.as_f64().expect("a loss")).sum();
        line["lm_loss"].as_f64().expect("a loss") + lambda0 * heads
    };
    for line in &lines {
        assert!((line["loss"].as_f64().expect("a loss") - at_peak(line, 0.7)).abs() < 1e-9, "{line}");
        let heads = at_peak(line, 1.0) - line["lm_loss"].as_f64().expect("a loss");
        assert!((line["heads_loss"].as_f64().expect("a loss") - heads).abs() < 1e-9, "{line}");
    }
    let judged = &lines[1..];
    let first_best = |loss: &dyn Fn(&Value) -> f64| {
        let best = judged.iter().min_by(|a, b| loss(a).total_cmp(&loss(b))).expect("evaluations");
        best["step"].clone()
    };
    let (best, rising) = (
        first_best(&|line| at_peak(line, 0.7)),
        first_best(&|line| at_peak(line, 0.7 * line["step"].as_f64().expect("a step") / 24.0)),
    );
    assert_ne!(best, rising, "the two rules agree: one would pass for the other");
    let config: Value = serde_json::from_str(&small.read("run/best/config.json")).expect("JSON");
    assert_eq!(config["best"]["step"], best);
}

#[test]
fn killed_and_resumed_it_ends_with_the_same_bytes() {
    let whole = small_run(SELF_DISTILLATION);
    whole.train(&[]).succeeded();
    let broken = small_run(SELF_DISTILLATION);
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for _ in 0..12 {
        let mut child =
            broken.trainer(&["--resume"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        sleep(Duration::from_millis(100 + u64::from(rng.next_u32() % 700)));
        child.kill().expect("a child");
        child.wait().expect("a child");
    }
    broken.train(&["--resume"]).succeeded();
    for file in ["heads.safetensors", "adapter_model.safetensors"] {
        let name = format!("run/final/{file}");
        assert_eq!(broken.bytes(&name), whole.bytes(&name), "{file}: dropout and data are those of the unbroken run");
    }
}

#[test]
fn layers_computed_again_give_the_same_bytes() {
    let (kept, again) = (small_run(SELF_DISTILLATION), small_run(SELF_DISTILLATION));
    again.edit("recipe.toml", "epochs = 8", "epochs = 8\nrecompute = true");
    kept.train(&[]).succeeded();
    again.train(&[]).succeeded();
    for name in ["run/final/heads.safetensors", "run/final/adapter_model.safetensors"] {
        assert_eq!(kept.bytes(name), again.bytes(name), "{name}");
    }
}

#[test]
fn decoding_takes_the_adapter_beside_the_heads() {
    let small = small_run("[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.train(&[]).succeeded();
    small.write("backbone/tokenizer.json", word_tokenizer().to_string());
    small.write("prompts.jsonl", "{\"prompt_ids\": [1, 5, 9, 2, 7]}\n");
    let generate = |heads: &[&str]| {
        let flags =
            ["generate", "--backbone", "backbone", "--prompts", "prompts.jsonl", "--max-new-tokens", "20", "--json"];
        let ended = small.medusa(&[&flags, heads].concat()).succeeded();
        let line: Value = serde_json::from_str(&ended.stdout).expect("JSON");
        line["new_ids"].as_array().expect("ids").clone()
    };
    let mut merged = load(&small, "backbone");
    attach(&mut merged, &small.path("run/final"), None).expect("the run's adapter");
    let merged = merged.merged();
    let mut ids: Vec<i64> = vec![1, 5, 9, 2, 7];
    let expected: Vec<Value> = (0..20).map_while(|_| next_greedy(&merged, &mut ids)).map(Value::from).collect();
    assert_eq!(generate(&["--heads", "run/final"]), expected, "the text of the trained backbone");
    assert_ne!(generate(&[]), expected, "the text of the base");
}

#[test]
fn adapters_merge_into_a_plain_folder() {
    let small = small_run("[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.write("backbone/tokenizer.json", word_tokenizer().to_string());
    small.train(&[]).succeeded();
    let export = ["export", "--heads", "run/final", "--format", "merged", "--out", "merged"];
    assert_eq!(small.medusa(&export).succeeded().stdout, "merged\n");
    assert_eq!(
        small.names("merged"),
        [
            "README.md",
            "config.json",
            "medusa.sha256",
            "model.safetensors",
            "prompts.hashes",
            "recipe.toml",
            "tokenizer.json"
        ]
    );
    let mut adapted = load(&small, "backbone");
    attach(&mut adapted, &small.path("run/final"), None).expect("the run's adapter");
    let difference = logits(&load(&small, "merged"), Adapters::Off) - logits(&adapted, Adapters::On);
    assert!(difference.abs().max().double_value(&[]) < 1e-5);
    small.medusa(&export).failed(1, &["merged exists already"]);
    // The merged backbone takes no adapter; the run's adapter belongs to the base.
    small.write("prompts.jsonl", "{\"prompt_ids\": [1, 5]}\n");
    let generate =
        ["generate", "--backbone", "merged", "--prompts", "prompts.jsonl", "--max-new-tokens", "4", "--heads"];
    small.medusa(&[&generate[..], &["merged"]].concat()).succeeded();
    small
        .medusa(&[&generate[..], &["run/final"]].concat())
        .failed(1, &["is not the backbone's lm_head", "not to this backbone"]);
}

#[test]
fn heads_without_an_adapter_have_none_to_put_beside_them() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    let export = ["export", "--heads", "run/final", "--format", "peft", "--out", "exported"];
    small.medusa(&export).failed(2, &["run/final has no adapter (adapter_config.json)", "Medusa-2 run's final/"]);
}

/// One word for each of the 48 ids.
fn word_tokenizer() -> Value {
    let vocab: serde_json::Map<String, Value> = (0..48).map(|id| (format!("w{id}"), id.into())).collect();
    let nothing = ["truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"];
    let mut tokenizer = serde_json::json!({"version": "1.0", "added_tokens": []});
    nothing.iter().for_each(|part| tokenizer[*part] = Value::Null);
    tokenizer["model"] = serde_json::json!({"type": "WordLevel", "vocab": vocab, "unk_token": "w0"});
    tokenizer
}

/// Appends the next token, computed over the whole row; returns `None` at EOS.
fn next_greedy(llama: &Llama, ids: &mut Vec<i64>) -> Option<i64> {
    let rows = RowMask::causal(ids.len() as i64, &llama.config, Device::Cpu);
    let tokens = Tensor::from_slice(ids).unsqueeze(0);
    let hidden = tch::no_grad(|| llama.hidden_states(&tokens, &rows, Adapters::Off)).squeeze_dim(0);
    let last = llama.logits(&hidden.narrow(0, ids.len() as i64 - 1, 1), Adapters::Off);
    ids.push(last.argmax(-1, false).int64_value(&[0]));
    ids.last().copied().filter(|id| !llama.config.eos_token_ids.contains(id))
}

#[test]
fn without_adapters_the_whole_backbone_trains() {
    let small = small_run("[stage.medusa2]");
    let before = small.bytes("backbone/model.safetensors");
    small.train(&[]).succeeded();
    assert_eq!(small.bytes("backbone/model.safetensors"), before, "the base is not overwritten");
    assert_eq!(
        small.names("run/final"),
        ["backbone", "config.json", "heads.safetensors", "medusa.sha256", "prompts.hashes"]
    );
    assert_eq!(small.names("run/final/backbone"), ["config.json", "medusa.sha256", "model.safetensors"]);
    assert_learns(&small);
    let tuned = load(&small, "run/final/backbone");
    assert_ne!(logits(&tuned, Adapters::Off), logits(&load(&small, "backbone"), Adapters::Off));
    // The output is an ordinary backbone: the next stage starts from it.
    small.edit("recipe.toml", "path = \"backbone\"", "path = \"run/final/backbone\"");
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"again\"");
    small.edit("recipe.toml", "[stage.medusa2]", "[stage.medusa1]");
    small.train(&[]).succeeded();
}

#[test]
fn a_tied_backbone_trains_its_embedding_once() {
    let small = small_run("[stage.medusa2]");
    small.edit("backbone/config.json", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    let weights = small.path("backbone/model.safetensors");
    let mut tensors = Tensor::read_safetensors(&weights).expect("weights");
    tensors.retain(|(name, _)| name != "lm_head.weight");
    Tensor::write_safetensors(&tensors, &weights).expect("weights");
    small.train(&[]).succeeded();
    let tuned = load(&small, "run/final/backbone");
    assert!(tuned.config.tie_word_embeddings && tuned.weights().iter().all(|(name, _)| name != "lm_head.weight"));
    assert_learns(&small);
}

/// Asserts that the LM loss falls on the rows, which it sees eight times.
fn assert_learns(small: &SmallRun) {
    let lines: Vec<Value> = metrics(small).into_iter().filter(|line| line["split"] == "train").collect();
    let [first, last] = [&lines[0], &lines[lines.len() - 1]].map(|line| line["lm_loss"].as_f64().expect("a loss"));
    assert!(last < 0.8 * first, "LM loss {first} to {last}");
}

#[test]
fn a_run_starts_where_another_ended() {
    let small = small_run("[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.train(&[]).succeeded();
    let ended = validation(&small).pop().expect("an evaluation");
    fs::rename(small.path("run"), small.path("first")).expect("a folder");
    small.edit("recipe.toml", "alpha = 8", "alpha = 8\ninit_from = \"first/final\"");
    small.edit("recipe.toml", "medusa_num_layers = 1", "medusa_num_layers = 1\ninit_from = \"first/final\"");
    small.train(&[]).succeeded();
    let began = validation(&small).remove(0);
    for key in ["loss", "lm_loss", "perplexity", "head_losses", "head_top1"] {
        assert_eq!(began[key], ended[key], "{key}");
    }
}

#[test]
fn a_backbone_in_float16_trains_as_in_float32() {
    for lora in ["", "\n[stage.medusa2.lora]\nrank = 4\nalpha = 8"] {
        let lines = ["float32", "float16"].map(|dtype| {
            let small = small_run(&format!("[stage.medusa2]\nmedusa_heads_coefficient = 0.01{lora}"));
            small.edit("recipe.toml", "dtype = \"float32\"", &format!("dtype = {dtype:?}"));
            small.train(&[]).succeeded();
            metrics(&small)
        });
        for (in_float32, in_float16) in
            lines[0].iter().zip(&lines[1]).filter(|(line, _)| line["split"] == "train").take(4)
        {
            for key in ["loss", "grad_norm"] {
                let [expected, got] = [in_float32, in_float16].map(|line| line[key].as_f64().expect("a number"));
                assert!((got - expected).abs() < 0.01 * expected, "{key}: {in_float32}, in float16 {in_float16}");
            }
        }
    }
}

/// The mean over one target is that over two equal ones.
#[test]
fn a_step_with_a_single_target_has_its_whole_gradient() {
    let norm = |rows: usize| {
        let small =
            small_run("[stage.medusa2]\nmedusa_heads_coefficient = 0.01\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
        let row = "{\"input_ids\": [3, 5, 7, 9], \"labels\": [-100, -100, -100, 9]}\n";
        small.write("rows.jsonl", row.repeat(rows));
        small.edit("recipe.toml", "epochs = 8", "epochs = 1");
        small.edit("recipe.toml", "warmup_steps = 3", "warmup_steps = 0");
        small.train(&[]).succeeded();
        metrics(&small)[1]["grad_norm"].as_f64().expect("a number")
    };
    let (one, two) = (norm(1), norm(2));
    assert!((one - two).abs() < 1e-5 * two, "{one}, of two rows {two}");
}

#[test]
fn an_adapter_is_its_bases_in_whatever_dtype() {
    let small = small_run("[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.edit("recipe.toml", "dtype = \"float32\"", "dtype = \"bfloat16\"");
    small.train(&[]).succeeded();
    for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
        let folder = small.path("backbone");
        let mut backbone = Llama::load(&folder, kind, Device::Cpu, Purpose::Training).expect("a backbone");
        attach(&mut backbone, &small.path("run/final"), None).expect("the run's adapter");
    }
}

#[test]
fn an_adapter_of_another_shape_or_base_is_refused() {
    let small = small_run("[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.edit("recipe.toml", "rank = 4", "rank = 9223372036854775807");
    small.train(&["--check"]).failed(2, &["lora.rank = 9223372036854775807: expected at most", "largest layer"]);
    small.edit("recipe.toml", "rank = 9223372036854775807", "rank = 4");
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"next\"");
    small.edit("recipe.toml", "alpha = 8", "alpha = 8\ninit_from = \"run/final\"");
    let file = "run/final/adapter_config.json";
    let refused = |piece: &str, by: &str, facts: &[&str]| {
        small.edit("recipe.toml", piece, by);
        let ended = small.train(&[]);
        ended.failed(1, &[&["stage.medusa2.lora.init_from"], facts].concat());
        small.edit("recipe.toml", by, piece);
        assert!(!small.path("next").exists(), "nothing is written");
    };
    refused("rank = 4", "rank = 8", &[file, "its rank is 4, the recipe's is 8"]);
    refused("alpha = 8", "alpha = 16", &[file, "its alpha is 8, the recipe's is 16"]);
    let modules = "target_modules = [\"q_proj\", \"lm_head\"]\nalpha = 8";
    refused("alpha = 8", modules, &[file, "its target_modules is", "the recipe's is lm_head, q_proj"]);

    let wider = SmallRun::with_hidden_size(40);
    small.save_backbone(&load(&wider, "backbone").weights());
    small.write("backbone/config.json", wider.read("backbone/config.json"));
    refused(
        "rank = 4",
        "rank = 4 ",
        &["adapter_model.safetensors", "expected shape [48, 40], got [48, 32]", "not to this backbone"],
    );
}

#[test]
fn an_adapter_that_is_no_plain_lora_is_refused() {
    let small = small_run("[stage.medusa2]\n[stage.medusa2.lora]\nrank = 4\nalpha = 8");
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"next\"");
    small.edit("recipe.toml", "alpha = 8", "alpha = 8\ninit_from = \"run/final\"");
    let config = small.read("run/final/adapter_config.json");
    for (piece, by, fact) in [
        ("\"r\": 4", "\"r\": 4, \"use_dora\": true", "`use_dora` is true; expected false"),
        ("\"LORA\"", "\"IA3\"", "`peft_type` is \"IA3\"; expected \"LORA\""),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "`bias` is \"all\"; expected \"none\""),
    ] {
        small.edit_trusted("run/final/adapter_config.json", piece, by);
        small.train(&[]).failed(1, &["run/final/adapter_config.json", fact]);
        small.write("run/final/adapter_config.json", &config);
    }
}

#[test]
fn a_run_with_adapters_is_not_resumed_as_another() {
    let small = small_run(SELF_DISTILLATION);
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "rank = 4", "rank = 8");
    small.train(&["--resume"]).failed(1, &["holds another run", "rank = 4", "rank = 8"]);
}
