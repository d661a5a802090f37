//! Promise: `medusa-train --check` prints the plan and writes nothing; a run is never overwritten; Ctrl-C saves and
//! prints how to continue.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::weights;
use serde_json::Value;
use tch::{Device, Kind};
use tempfile::TempDir;

const CONFIG: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": false}"#;

/// A folder with a random backbone, rows of token ids, and a recipe.
fn workplace(max_steps: usize) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let backbone = dir.path().join("backbone");
    fs::create_dir(&backbone).expect("a folder");
    write(&backbone.join("config.json"), CONFIG);
    let config = LlamaConfig::load(&backbone).expect("a config");
    let llama = Llama::random(config, Kind::Float, Device::Cpu, 1);
    weights::save(&backbone.join("model.safetensors"), &llama.weights()).expect("weights");
    let row = |n: usize| {
        let ids: Vec<usize> = (0..12).map(|t| (n + t * t) % 32).collect();
        format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n")
    };
    write(&dir.path().join("rows.jsonl"), &(0..8).map(row).collect::<String>());
    write(&dir.path().join("r.toml"), &recipe(dir.path(), max_steps));
    dir
}

fn recipe(dir: &Path, max_steps: usize) -> String {
    format!(
        r#"[backbone]
path = {:?}
dtype = "float32"
[heads]
medusa_num_heads = 2
medusa_num_layers = 1
[stage.medusa1]
[data]
train = [{:?}]
max_length = 16
[optimizer]
learning_rate = 1e-3
[schedule]
name = "constant"
[train]
output_dir = {:?}
max_steps = {max_steps}
micro_batch_size = 2
"#,
        dir.join("backbone"),
        dir.join("rows.jsonl"),
        dir.join("out")
    )
}

fn write(path: &Path, text: &str) {
    use std::io::Write;
    fs::File::create(path).and_then(|mut file| file.write_all(text.as_bytes())).expect("a temporary file");
}

fn train(dir: &TempDir, flags: &[&str]) -> Command {
    let mut command = Command::cargo_bin("medusa-train").expect("the binary is built with the tests");
    command.env("MEDUSA_CUDA", "off").arg(dir.path().join("r.toml")).args(flags);
    command
}

fn json_lines(stdout: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(stdout).expect("UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON object a line")).collect()
}

#[test]
fn check_shows_the_plan_and_writes_nothing() {
    let dir = workplace(3);
    let output = train(&dir, &["--check", "--json", "--quiet"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    let plan = json_lines(&output.stdout).remove(0);
    let parameters = 2 * (16 * 16 + 16 + 32 * 16);
    assert_eq!(
        (&plan["steps"], &plan["heads_parameters"], &plan["heads_bytes"]),
        (&3.into(), &parameters.into(), &(16 * parameters).into())
    );
    assert!(!dir.path().join("out").exists());
    let defaults: Vec<&str> = plan["defaults"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for key in ["train.seed", "optimizer.eps", "schedule.min_ratio", "data.packing"] {
        assert!(defaults.contains(&key), "{key} in {defaults:?}");
    }
    assert!(!defaults.contains(&"data.max_length") && plan["recipe"]["data"]["max_length"] == 16, "{defaults:?}");
}

#[test]
fn check_prints_the_plan_and_then_the_defaults_of_the_shortest_recipe_and_it_trains() {
    let dir = workplace(3);
    let [backbone, rows] = ["backbone", "rows.jsonl"].map(|name| dir.path().join(name));
    write(
        &dir.path().join("r.toml"),
        &format!("[backbone]\npath = {backbone:?}\n[stage.medusa1]\n[data]\ntrain = [{rows:?}]\n"),
    );
    let output = train(&dir, &["--check"]).current_dir(dir.path()).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (plan, defaults) = said.split_once("\n\ndefaults of keys that ").expect("the defaults follow");
    assert!(plan.starts_with("output ") && plan.contains("\nmemory ") && plan.contains("\npeak "), "{said}");
    let of_table = |table: &str| {
        let line = defaults.lines().find_map(|line| line.strip_prefix("  ")?.strip_prefix(table));
        line.unwrap_or_else(|| panic!("{table} in\n{said}")).trim_start()
    };
    assert_eq!(of_table("backbone "), "dtype = \"float32\"", "a key of the file is no default");
    assert!(of_table("heads ").starts_with("medusa_num_heads = 5, medusa_num_layers = 1, "), "{said}");
    assert!(of_table("schedule ").contains("warmup_ratio = 0.1 (schedule.name is not set), min_ratio"), "{said}");
    let of_train = "gradient_accumulation_steps = 8 (train.micro_batch_size is not set), ";
    assert!(
        of_table("train ").starts_with("output_dir = \"checkpoints/r\", epochs = 2, micro_batch_size = 1, "),
        "{said}"
    );
    assert!(of_table("train ").contains(of_train), "{said}");
    assert!(defaults.lines().count() < 10, "a line for each table: {said}");
    train(&dir, &[]).current_dir(dir.path()).assert().success();
    assert!(dir.path().join("checkpoints/r/final/heads.safetensors").exists());
}

#[test]
fn mistakes_and_missing_files_are_reported_at_once() {
    let dir = workplace(3);
    let wrong = recipe(dir.path(), 3)
        .replace("rows.jsonl", "none.jsonl")
        .replace("float32", "float")
        .replace("constant", "const");
    write(&dir.path().join("r.toml"), &wrong);
    let output = train(&dir, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("error: 3 mistakes in "), "{said}");
    let at = |fact: &str| said.find(fact).unwrap_or_else(|| panic!("{fact} in {said}"));
    let places = [
        at("line 3, column 9: backbone.dtype"),
        at("none.jsonl does not exist"),
        at("line 14, column 8: schedule.name"),
    ];
    assert!(places.is_sorted(), "{said}");
}

#[test]
fn a_run_is_reported_step_by_step_and_never_overwritten() {
    let dir = workplace(3);
    let output = train(&dir, &["--json", "--quiet"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = json_lines(&output.stdout);
    assert_eq!(lines.iter().filter(|line| line["split"] == "train").count(), 3);
    assert_eq!(lines.last().unwrap()["final"], dir.path().join("out/final").to_str().unwrap());

    let heads = fs::read(dir.path().join("out/final/heads.safetensors")).unwrap();
    let again = train(&dir, &[]).output().unwrap();
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("is not empty: continue with --resume"));
    train(&dir, &["--resume"]).assert().success();
    assert_eq!(fs::read(dir.path().join("out/final/heads.safetensors")).unwrap(), heads);
}

#[test]
fn check_says_first_that_the_folder_holds_a_run_and_whether_it_has_finished() {
    let dir = workplace(3);
    let check = |flags: &[&str]| {
        let output = train(&dir, &[&["--check"], flags].concat()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(check(&[]).starts_with("output "));
    train(&dir, &[]).assert().success();
    let finished = "this run is already finished (step 3 of 3): raise train.max_steps and continue with --resume, or choose \
                    another train.output_dir\n";
    for flags in [&[][..], &["--resume"]] {
        assert!(check(flags).starts_with(&format!("{finished}output ")), "{}", check(flags));
    }
    let resumed = train(&dir, &["--resume"]).output().unwrap();
    assert!(String::from_utf8_lossy(&resumed.stderr).starts_with(finished));
    write(&dir.path().join("r.toml"), &recipe(dir.path(), 4));
    assert!(check(&["--resume"]).starts_with("output "), "it goes on");
    let taken = check(&[]);
    assert!(
        taken.starts_with("warning      train.output_dir ") && taken.contains("is not empty: continue with --resume")
    );
}

#[test]
fn validation_rows_that_are_trained_on_and_a_rate_of_0_are_warned_of() {
    let dir = workplace(1);
    let rows = fs::read_to_string(dir.path().join("rows.jsonl")).unwrap();
    let validation = dir.path().join("validation.jsonl");
    write(&validation, &format!("{}\n{{\"input_ids\": [1, 2, 3], \"own\": 1}}\n", rows.lines().next().unwrap()));
    let check = |recipe: &str| {
        write(&dir.path().join("r.toml"), recipe);
        String::from_utf8(train(&dir, &["--check"]).output().unwrap().stdout).unwrap()
    };
    let recipe = recipe(dir.path(), 1).replace("[data]\n", &format!("[data]\nvalidation = [{validation:?}]\n"));
    let text = check(&recipe);
    let trained_on = "warning      1 of 2 validation rows ask what a training row asks";
    assert!(
        text.contains(trained_on) && text.contains("\nvalidation   ") && text.contains("not read: `own`"),
        "{text}"
    );
    let warm_up = recipe.replace("name = \"constant\"", "name = \"cosine\"\nwarmup_steps = 1");
    assert!(check(&warm_up).contains("warning      the learning rate of the only step is 0"), "{}", check(&warm_up));
}

#[test]
fn a_run_that_diverges_is_warned_of_once() {
    let said = |rate: &str| {
        let dir = workplace(40);
        write(
            &dir.path().join("r.toml"),
            &recipe(dir.path(), 40).replace("learning_rate = 1e-3", &format!("learning_rate = {rate}")),
        );
        let output = train(&dir, &[]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stderr).unwrap()
    };
    let diverged = said("30.0");
    let warnings: Vec<&str> =
        diverged.lines().filter(|line| line.starts_with("warning: the loss rose from ")).collect();
    assert_eq!(warnings.len(), 1, "{diverged}");
    assert!(warnings[0].contains("lower optimizer.learning_rate, now 30, or use a longer warm-up"), "{diverged}");
    assert!(!said("1e-3").contains("warning"));
}

#[test]
fn what_the_recipe_decides_is_no_flag() {
    let dir = workplace(3);
    for flags in [["--seed", "1"], ["--dtype", "float32"]] {
        train(&dir, &flags).assert().code(2);
    }
    write(&dir.path().join("r.toml"), &recipe(dir.path(), 3).replace("micro_batch_size", "micro_batch"));
    let output = train(&dir, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("line 18, column 1: unknown key `micro_batch`"));
}

#[test]
#[cfg(unix)]
fn ctrl_c_saves_and_says_how_to_go_on() {
    let dir = workplace(1_000_000);
    let out = dir.path().join("out");
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("medusa-train"))
        .arg(dir.path().join("r.toml"))
        .env("MEDUSA_CUDA", "off")
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none()
        && fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().is_empty()
    {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let checkpoint = newest_checkpoint(&out);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains(&format!("interrupted; saved {}; continue with: medusa-train", checkpoint.display())),
        "{said}"
    );
}

/// While it tokenises rows: the cache has a file of its own by then.
#[test]
#[cfg(unix)]
fn a_signal_before_the_first_step_is_answered_with_a_word() {
    let dir = workplace(1);
    let row = format!("{{\"input_ids\": {:?}}}\n", [7; 16]);
    write(&dir.path().join("rows.jsonl"), &row.repeat(200_000));
    for signal in ["-TERM", "-INT"] {
        let cache = dir.path().join(signal);
        let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("medusa-train"))
            .arg(dir.path().join("r.toml"))
            .env("MEDUSA_CUDA", "off")
            .env("XDG_CACHE_HOME", &cache)
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        while !cache.exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        std::process::Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(130) && said.ends_with("interrupted before the first step\n"), "{said}");
    }
}

fn newest_checkpoint(run: &Path) -> PathBuf {
    let entries = fs::read_dir(run).expect("a run").flatten().map(|entry| entry.path());
    let is_step = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    entries.filter(is_step).max().expect("a checkpoint")
}
