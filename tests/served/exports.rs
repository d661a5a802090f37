//! Exported heads are served as those in `final/` are.

use std::fs;

use medusa::model::adapters::attach_new;
use medusa::model::lora::LoraConfig;
use medusa::model::peft::save_adapters;

use super::*;

const ALONE: [&str; 4] = ["heads", "tgi", "vllm", "tensorrt-llm"];
const WITH_BACKBONE: [&str; 2] = ["merged", "modelopt"];

fn export(world: &World, heads: &str, backbone: &str, format: &str) {
    let flags = ["export", "--heads", heads, "--backbone", backbone, "--format", format, "--out", format];
    world.medusa(&flags).assert().success();
}

fn json_of(world: &World, name: &str) -> Value {
    serde_json::from_slice(&fs::read(world.path(name)).expect("a file")).expect("JSON")
}

/// The ids of a chat's prompt in each export, and in an export of it.
fn prompts_of_exports(world: &World) -> Vec<(&'static str, Vec<i64>)> {
    let prompt = |format: &'static str| {
        export(world, "run/final", "tiny", format);
        let backbone = if WITH_BACKBONE.contains(&format) { format } else { "tiny" };
        let flags = ["chat", "--backbone", backbone, "--heads", format, "--max-new-tokens", "2", "--json"];
        let output = world.medusa(&flags).write_stdin("hello\n").assert().success().get_output().clone();
        let line: Value = serde_json::from_slice(&output.stdout).expect("one answer");
        (format, ids(&line["prompt_ids"]))
    };
    ALONE.into_iter().chain(WITH_BACKBONE).map(prompt).collect()
}

fn assert_all_are(prompts: &[(&str, Vec<i64>)], expected: &[i64]) {
    for (format, prompt) in prompts {
        assert_eq!(prompt, expected, "{format}");
    }
}

#[test]
fn exports_keep_a_built_in_template_and_give_it_to_a_backbone_without_one() {
    let world = trained_with("vicuna");
    assert_all_are(&prompts_of_exports(&world), &rendered(&world, "vicuna"));
    let own = ChatTemplate::load(&world.path("merged")).expect("a template").expect("one");
    let vicuna = TemplateChoice::try_from("vicuna".to_owned()).expect("a name");
    let vicuna = ChatTemplate::choose(&vicuna, &world.path("tiny")).expect("a template").expect("one");
    assert_eq!(own.sha256(), vicuna.sha256());
    for format in ALONE {
        assert_eq!(json_of(&world, &format!("{format}/config.json"))["medusa_train"]["chat_template"], "vicuna");
        assert!(!world.path(format).join("chat_template.jinja").exists(), "{format}");
    }
}

#[test]
fn exports_keep_a_template_file_beside_the_backbones_own() {
    let world = trained_with("own.jinja");
    let expected = rendered(&world, &world.path("own.jinja").display().to_string());
    let of_tiny = "own: {{ messages[0].content }}";
    text(&world, "tiny/chat_template.jinja", of_tiny);
    assert_all_are(&prompts_of_exports(&world), &expected);
    for format in WITH_BACKBONE {
        let own = fs::read_to_string(world.path(format).join("chat_template.jinja")).expect("a file");
        assert_eq!(own, of_tiny, "{format}: the backbone keeps its template");
    }
    // An export of an export.
    for from in ["tgi", "merged"] {
        let out = format!("from_{from}");
        let flags = ["export", "--heads", from, "--backbone", "tiny", "--format", "heads", "--out", &out];
        world.medusa(&flags).assert().success();
        assert_eq!(prompt_of_chat(&world, &["--heads", &out]).0, expected, "{out}");
    }
}

#[test]
fn exports_keep_the_quantisation() {
    let world = quantised_world("nf4");
    let expected = greedy(&world, Some(Quantization::Nf4));
    assert_ne!(expected, greedy(&world, None));
    for format in ALONE.into_iter().chain(WITH_BACKBONE) {
        export(&world, "h", "b", format);
        let found = generated(&world, &["--heads", format, "--tree", "t.json"]);
        assert_eq!(ids(&found["new_ids"]), expected, "{format}");
    }
    let flags = ["generate", "--backbone", "b", "--prompts", "p.jsonl", "--heads", "vllm", "--quantization", "none"];
    let said = stderr(&world, &flags);
    assert!(said.contains("--quantization none: the heads were trained on a backbone quantised to nf4"), "{said}");
}

#[test]
fn an_exported_adapter_is_served_on_the_quantised_backbone_and_merged_on_dense_weights() {
    let world = quantised_world("nf4");
    let mut backbone = Llama::load(&world.path("b"), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    let lora: LoraConfig = toml::from_str("rank = 2\nalpha = 4").expect("a LoRA");
    attach_new(&mut backbone, &lora, 9);
    save_adapters(&world.path("h"), &backbone, "b").expect("a place to write");
    export(&world, "h", "b", "peft");
    let new_ids = |heads: &str| generated(&world, &["--heads", heads, "--tree", "t.json"])["new_ids"].clone();
    let expected = new_ids("h");
    assert_ne!(ids(&expected), greedy(&world, None), "the quantised weights are used");
    assert_eq!(new_ids("peft"), expected);
    export(&world, "h", "b", "merged");
    let recorded = json_of(&world, "merged/config.json")["medusa_train"].clone();
    assert_eq!(recorded, json!({"backbone_dtype": "float32"}));
}

#[test]
fn no_key_of_the_training_is_where_servers_read() {
    let world = trained_with("vicuna");
    for format in ALONE.into_iter().chain(WITH_BACKBONE) {
        export(&world, "run/final", "tiny", format);
        let config = json_of(&world, &format!("{format}/config.json"));
        for key in ["architecture", "quantization", "chat_template", "backbone_dtype", "backbone_model_type"] {
            assert_eq!(config[key], Value::Null, "{format}: {key}");
        }
        assert_eq!(config["medusa_train"]["architecture"], "medusa", "{format}");
    }
}
