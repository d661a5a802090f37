//! Heads of a backbone whose rotary embeddings depend on the context are used with those of their training.

use std::num::NonZeroU32;

use medusa::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
use medusa::draft::trained::TrainedDrafter;
use medusa::dtype::DraftDtype;
use medusa::session::engine::{EngineName, EngineOptions};
use medusa::session::{SessionOptions, Silent};
use medusa::torch::DeviceChoice;

use super::*;

/// The context in training, longer than the backbone's context of pre-training.
const TRAINED: usize = 48;

/// The backbone's config.json with these rotary embeddings.
fn rope(world: &World, folder: &str, rope: &Value) {
    let config = fs::read(world.path("b/config.json")).expect("a file");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["rope_scaling"] = rope.clone();
    world.write(&format!("{folder}/config.json"), &config);
}

/// LongRoPE with a context of pre-training of `original` tokens.
fn longrope(original: usize, short: f64) -> Value {
    json!({"rope_type": "longrope", "short_factor": vec![short; 4], "long_factor": vec![7.0; 4],
        "original_max_position_embeddings": original, "attention_factor": 1.0})
}

/// A world with LongRoPE: in "b" the long factors apply above 16 tokens, in "long" always.
fn long_world() -> World {
    let world = quantised_world("nf4");
    fs::create_dir(world.path("long")).expect("a folder");
    for name in ["model.safetensors", "tokenizer.json"] {
        fs::copy(world.path("b").join(name), world.path("long").join(name)).expect("a file");
    }
    rope(&world, "long", &longrope(TRAINED, 7.0));
    rope(&world, "b", &longrope(16, 1.0));
    world.write("h/config.json", &json!({"backbone_dtype": "float32", "rope_context": TRAINED}));
    fs::create_dir(world.path("without")).expect("a folder");
    fs::copy(world.path("h/heads.safetensors"), world.path("without/heads.safetensors")).expect("a file");
    world
}

fn new_ids(world: &World, backbone: &str, heads: &str, more: &[&str]) -> (Vec<i64>, String) {
    let flags = ["generate", "--backbone", backbone, "--prompts", "p.jsonl", "--max-new-tokens", "10", "--json"];
    let flags = [&flags[..], &["--heads", heads, "--tree", "t.json"], more].concat();
    let output = world.medusa(&flags).assert().success().get_output().clone();
    let line: Value = serde_json::from_slice(&output.stdout).expect("one text");
    (ids(&line["new_ids"]), String::from_utf8(output.stderr).expect("UTF-8"))
}

#[test]
fn decoding_uses_the_rotary_embeddings_of_the_training() {
    let world = long_world();
    let (expected, _) = new_ids(&world, "long", "without", &[]);
    let (short, _) = new_ids(&world, "b", "without", &[]);
    assert_ne!(expected, short, "the factors change the text");
    let (found, said) = new_ids(&world, "b", "h", &[]);
    assert_eq!(found, expected);
    assert!(!said.contains("rotary"), "{said}");
    let notice = "--max-context 16: the heads were trained with the rotary embeddings of a context of 48 tokens";
    let (found, said) = new_ids(&world, "b", "h", &["--max-context", "16"]);
    assert_eq!((found, said.matches(notice).count()), (short, 1), "{said}");
    let (found, said) = new_ids(&world, "b", "h", &["--max-context", "20"]);
    assert_eq!((found, said.contains("rotary")), (expected, false), "as in training: {said}");
}

/// Hydra++ heads rotate keys as the backbone does.
#[test]
fn a_prefix_layer_has_the_rotary_embeddings_of_max_context() {
    let world = long_world();
    let (folder, config) = (world.path("b"), LlamaConfig::load(&world.path("b")).expect("a backbone"));
    let backbone = || Llama::load(&world.path("b"), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    let (architecture, vocab_size) = (HeadsArchitecture::HydraPlusPlus, config.vocab_size);
    let shape = HeadsShape {
        architecture,
        medusa_num_heads: 2,
        medusa_num_layers: 1,
        hidden_size: config.hidden_size,
        vocab_size,
        ..HeadsShape::default()
    };
    let heads = world.path("prefix");
    fs::create_dir(&heads).expect("a folder");
    Heads::random(shape, Kind::Float, Device::Cpu, 6).with_new_prefix(&backbone(), 6).save(&heads).expect("heads");
    world.write("prefix/config.json", &json!({"architecture": "hydra++"}));
    let with_context = |tokens| {
        let mut backbone = backbone();
        backbone.set_context(tokens);
        backbone
    };
    let ids: Vec<i64> = (3..17).collect();
    let logits = |heads: &dyn TrainedDrafter| heads.known_text(&with_context(16), &ids).logits(0, &[5, 12]);
    let of_context = |tokens| {
        logits(&Heads::load(&heads, &with_context(tokens)).expect("heads").for_decoding(DraftDtype::default()))
    };
    let options = SessionOptions {
        backbone: folder,
        heads: Some(heads.clone()),
        engine: EngineOptions { engine: EngineName::Tch, max_context: NonZeroU32::new(16) },
        device: DeviceChoice::Cpu,
        ..SessionOptions::default()
    };
    let decoder = options.load(&Silent).expect("they fit");
    let (loaded, _) = decoder.drafter().and_then(|drafter| drafter.heads.as_ref()).expect("heads");
    assert_eq!(decoder.backbone.config.max_position_embeddings, 16);
    assert_eq!(logits(&**loaded), of_context(16));
    assert_ne!(logits(&**loaded), of_context(64), "the factors change the states");
}

#[test]
fn exports_keep_the_context() {
    let world = long_world();
    let (expected, _) = new_ids(&world, "long", "without", &[]);
    for format in ["heads", "vllm", "merged"] {
        let flags = ["export", "--heads", "h", "--backbone", "b", "--format", format, "--out", format];
        world.medusa(&flags).assert().success();
        assert_eq!(new_ids(&world, "b", format, &[]).0, expected, "{format}");
    }
}

#[test]
fn calibrate_measures_whole_rows_with_the_rotary_embeddings_of_the_training() {
    let world = long_world();
    let row: Vec<usize> = (0..TRAINED).map(|at| 3 + at * 7 % 50).collect();
    world.write("rows.jsonl", &json!({"input_ids": row}));
    let counts = |backbone: &str, heads: &str| {
        let flags = ["calibrate", "--backbone", backbone, "--heads", heads, "--data", "rows.jsonl", "--out", "c.json"];
        world.medusa(&flags).assert().success();
        let file: Value = serde_json::from_slice(&fs::read(world.path("c.json")).expect("a file")).expect("JSON");
        fs::remove_file(world.path("c.json")).expect("a file of a test");
        (file["tokens"].clone(), file["heads"].clone())
    };
    let expected = counts("long", "without");
    assert_eq!(counts("b", "h"), expected);
    assert_ne!(counts("b", "without").1, expected.1, "the row is split");
}

#[test]
fn training_records_the_context_only_where_rotary_embeddings_depend_on_it() {
    let recorded = |scaling: &Value| {
        let world = World::new();
        rope(&world, "b", scaling);
        world.write("rows.jsonl", &json!({"input_ids": (3..35).collect::<Vec<i64>>()}));
        text(
            &world,
            "recipe.toml",
            "[backbone]\npath = \"b\"\ndtype = \"float32\"\n[heads]\nmedusa_num_heads = 2\nmedusa_num_layers = 1\n[stage.medusa1]\n[data]\n\
             train = [\"rows.jsonl\"]\nmax_length = 40\n[optimizer]\nlearning_rate = 1e-3\n[schedule]\nname = \"constant\"\nwarmup_steps = 0\n\
             [train]\nmicro_batch_size = 1\noutput_dir = \"run\"\nmax_steps = 1\n",
        );
        world.medusa(&["train", "recipe.toml"]).assert().success();
        let config = fs::read(world.path("run/final/config.json")).expect("a file");
        serde_json::from_slice::<Value>(&config).expect("JSON")["rope_context"].clone()
    };
    assert_eq!(recorded(&longrope(16, 1.0)), json!(40), "the longest row");
    assert_eq!(recorded(&json!({"rope_type": "dynamic", "factor": 2.0})), json!(64), "the context of pre-training");
    assert_eq!(recorded(&json!({"rope_type": "linear", "factor": 2.0})), Value::Null);
}

#[test]
fn a_context_that_the_backbone_does_not_have_is_refused() {
    let world = long_world();
    world.write("h/config.json", &json!({"rope_context": 65}));
    let refused = world.complaint(&["generate", "--backbone", "b", "--prompts", "p.jsonl", "--heads", "h"], 2);
    let expected = "h/config.json: rope_context: expected the context of the heads' training, from 1 to the backbone's 64 tokens, got 65";
    assert!(refused.contains(expected), "{refused}");
    // Nothing depends on the context here.
    rope(&world, "b", &Value::Null);
    new_ids(&world, "b", "h", &[]);
}
