//! Promise: an EAGLE-3 drafter trains, resumes exactly, decodes without changing a text, and is exported as servers load it.

use std::fs;

use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::small_run::SmallRun;

const EAGLE: &str = "architecture = \"eagle3\"\nttt_steps = 3\ntap_layers = [0, 1]\ndraft_vocab_size = 30";

fn run_with(heads: &str) -> SmallRun {
    let small = SmallRun::new();
    small.edit("recipe.toml", "medusa_num_heads = 2\nmedusa_num_layers = 1", heads);
    small
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

#[test]
fn a_resumed_run_ends_with_the_drafter_of_one_that_was_not_stopped() {
    let small = run_with(EAGLE);
    small.edit("recipe.toml", "epochs = 8", "hidden_state_cache = \"states\"\nepochs = 8");
    small.train(&[]).succeeded();
    let expected = small.bytes("run/final/heads.safetensors");
    for gone in ["final", "step-000021", "step-000024"] {
        fs::remove_dir_all(small.path("run").join(gone)).expect("a folder of the run");
    }
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == expected);
    let lines = small.read("run/metrics.jsonl");
    let losses: Vec<f64> = lines
        .lines()
        .map(json_of)
        .filter(|line| line["split"] == "train")
        .map(|line| line["head_losses"][2].as_f64().expect("a loss"))
        .collect();
    assert!(losses[23] < losses[0], "{losses:?}");
    let again = run_with(&format!("{EAGLE}\ninit_from = {:?}", small.path("run/final")));
    small.forget_checksums("run/final");
    small.edit("run/final/config.json", "\"architecture\"", "\"quantization\": \"nf4\", \"architecture\"");
    let started = again.train(&[]).succeeded();
    assert!(started.stderr.contains("were trained on a backbone quantised to nf4"), "{}", started.stderr);
}

#[test]
fn texts_are_those_of_plain_decoding_and_exports_are_read_as_the_drafter() {
    let small = run_with(EAGLE);
    small.write_tokenizer(48);
    small.train(&[]).succeeded();
    let inspected = small.medusa(&["inspect", "run/final"]).succeeded().stdout;
    assert!(inspected.contains("eagle3, trained for chains of 3 guesses on layers [0, 1], 30 tokens"), "{inspected}");
    assert!(small.medusa(&["inspect", "run"]).succeeded().stdout.contains("eagle3"));
    small.write("prompts.jsonl", "{\"prompt_ids\": [3, 9, 27, 1, 4]}\n{\"prompt_ids\": [5, 6]}\n");
    let calibrate = [
        "calibrate",
        "--backbone",
        "backbone",
        "--heads",
        "run/final",
        "--data",
        "validation.jsonl",
        "--out",
        "c.json",
    ];
    small.medusa(&calibrate).succeeded();
    small.medusa(&["tree", "--calibration", "c.json", "--nodes", "6", "--out", "t.json"]).succeeded();
    for (format, layer) in [("eagle3", "midlayer."), ("speculators", "layers.0.")] {
        small.medusa(&["export", "--heads", "run/final", "--format", format, "--out", format]).succeeded();
        let config = json_of(&small.read(&format!("{format}/config.json")));
        assert_eq!(
            (&config["draft_vocab_size"], &config["eagle_aux_hidden_state_layer_ids"]),
            (&30.into(), &serde_json::json!([0, 1]))
        );
        let found = small.medusa(&["inspect", &format!("{format}/model.safetensors"), "--json"]).succeeded();
        assert_eq!(json_of(&found.stdout)["draft_vocab_size"], 30);
        let bytes = small.bytes(&format!("{format}/model.safetensors"));
        assert!(String::from_utf8_lossy(&bytes[..4096]).contains(&format!("{layer}self_attn.q_proj.weight")));
    }
    let bench = |heads: &str, tree: &str, drafter: &str| {
        let flags =
            ["bench", "--backbone", "backbone", "--heads", heads, "--tree", tree, "--drafter", drafter, "--json"];
        let more = ["--prompts", "prompts.jsonl", "--max-new-tokens", "20", "--repeats", "1"];
        let result = json_of(&small.medusa(&[&flags[..], &more].concat()).succeeded().stdout);
        assert_eq!(result["identical"], true, "{heads}, {tree}, {drafter}");
        result["acceleration_rate"].as_f64().expect("a number")
    };
    let rate = bench("run/final", "t.json", "eagle3");
    assert!(rate > 1.0, "{rate}");
    assert_eq!([bench("eagle3", "t.json", "eagle3"), bench("speculators", "t.json", "eagle3")], [rate; 2]);
    assert!(bench("run/final", "dynamic:7", "eagle3") > 1.0);
    bench("run/final", "t.json", "eagle3+ngram");
}

#[test]
fn what_a_recipe_says_wrongly_is_an_error() {
    let cases = [
        ("architecture = \"eagle3\"", "heads.tap_layers"),
        ("architecture = \"eagle3\"\ntap_layers = [1, 0]", "ascending layers up to 1"),
        ("architecture = \"eagle3\"\ntap_layers = [0, 2]", "ascending layers up to 1"),
        ("architecture = \"eagle3\"\ntap_layers = [0, 1]\nmedusa_num_heads = 3", "heads.medusa_num_heads"),
        ("ttt_steps = 3", "heads.architecture = \"eagle3\""),
    ];
    for (heads, fact) in cases {
        let small = run_with(heads);
        small.train(&["--check"]).failed(2, &[fact]);
    }
    let small = run_with(EAGLE);
    small.edit("recipe.toml", "[stage.medusa1]", "[stage.medusa2]");
    assert_ne!(small.train(&["--check"]).status, Some(0));
}

/// A layer that differs from the backbone's where no tensor shows it, and tensors of another layer.
#[test]
fn a_drafter_of_another_program_is_read_or_refused_by_name() {
    let small = run_with(EAGLE);
    small.write_tokenizer(48);
    small.train(&[]).succeeded();
    small.medusa(&["export", "--heads", "run/final", "--format", "eagle3", "--out", "e"]).succeeded();
    small.forget_checksums("e");
    let generate = || {
        let flags = ["--backbone", "backbone", "--heads", "e", "--prompt", "w1 w2", "--max-new-tokens", "4"];
        small.medusa(&[&["generate"][..], &flags].concat())
    };
    generate().succeeded();
    for (key, own, other) in [
        ("rope_theta", "10000.0", "500000.0"),
        ("rms_norm_eps", "0.00001", "0.000001"),
        ("hidden_act", "\"silu\"", "\"gelu\""),
        ("use_cache", "true", "true,\n  \"norm_before_residual\": true"),
        ("use_cache", "true", "true,\n  \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0}"),
    ] {
        let config = small.read("e/config.json");
        small.edit("e/config.json", &format!("\"{key}\": {own}"), &format!("\"{key}\": {other}"));
        let named = if key == "use_cache" { other.split('"').nth(1).expect("a key") } else { key };
        generate().failed(1, &["e/config.json", named]);
        small.write("e/config.json", config);
    }
    let path = small.path("e/model.safetensors");
    let mut tensors = Tensor::read_safetensors(&path).expect("tensors");
    tensors.push(("layers.1.self_attn.q_proj.weight".to_owned(), Tensor::zeros([4, 4], (Kind::Float, Device::Cpu))));
    Tensor::write_safetensors(&tensors, &path).expect("a file");
    generate().failed(1, &["layers.1.self_attn.q_proj.weight", "does not belong to an EAGLE-3 drafter"]);
}
