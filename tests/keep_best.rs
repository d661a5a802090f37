//! Promise: evaluations tell the tokens per step that decoding would have; `train.keep_best` keeps the best heads in
//! `best/`, and `train.patience` stops a run that no longer gets better.

use std::fs;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use medusa::calibrate::calibrate;
use medusa::data::rows::TokenRow;
use medusa::data::store::RowStore;
use medusa::decode::identity::identity;
use medusa::draft::heads::Heads;
use medusa::formats::calibration::Calibration;
use medusa::formats::share::Share;
use medusa::formats::validation_answers::ValidationAnswers;
use medusa::model::llama::Llama;
use medusa::model::loading::Purpose;
use medusa::tree::replay::Replay;
use serde_json::Value;
use tch::{Device, Kind};

use super::published::published;
use super::small_run::SmallRun;

/// A run that evaluates after every step and keeps every checkpoint.
fn evaluated_often(keep_best: &str) -> SmallRun {
    let small = SmallRun::new();
    let often = format!("eval_every = 1\nkeep_checkpoints = 100\nkeep_best = \"{keep_best}\"");
    small.edit("recipe.toml", "eval_every = 6", &often);
    small.edit("recipe.toml", "save_every = 3", "save_every = 1");
    small
}

fn evaluations(small: &SmallRun) -> Vec<Value> {
    let text = small.read("run/metrics.jsonl");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line of JSON"));
    lines.filter(|line| line["split"] == "validation").collect()
}

fn json(small: &SmallRun, file: &str) -> Value {
    serde_json::from_str(&small.read(file)).expect("JSON")
}

/// Step and value of the first evaluation with the best value.
fn best_of(lines: &[Value], by: &str) -> (u64, f64) {
    let sign = if by == "loss" { -1.0 } else { 1.0 };
    let value = |line: &Value| line[by].as_f64().expect("a number");
    let best = lines.iter().map(|line| sign * value(line)).fold(f64::NEG_INFINITY, f64::max);
    let first = lines.iter().find(|line| sign * value(line) == best).expect("the best");
    (first["step"].as_u64().expect("a step"), value(first))
}

#[test]
fn tokens_per_step_are_those_of_calibrate_and_tree_on_the_other_half_of_the_rows() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "validation.jsonl", "rows.jsonl"); // so that guesses are often right
    small.edit("recipe.toml", "eval_every", "eval_answers = 0\neval_every");
    small.train(&[]).succeeded();
    assert_eq!(last_tokens_per_step(&small), tokens_per_step_of_halves(&small, token_rows(&small.read("rows.jsonl"))));
}

#[test]
fn tokens_per_step_are_measured_on_the_backbones_answers() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    small.edit("recipe.toml", "validation.jsonl", "rows.jsonl");
    small.train(&[]).succeeded();
    assert_eq!(last_tokens_per_step(&small), tokens_per_step_of_halves(&small, answers(&small)));
    assert_answers_are_those_of_generate(&small, &[]);
}

/// On a CPU, whose kernels decode them.
#[test]
fn answers_of_quantized_weights_are_those_of_decoding() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    small.edit("recipe.toml", "validation.jsonl", "rows.jsonl");
    small.edit("recipe.toml", "dtype = \"float32\"", "dtype = \"float32\"\nquantization = \"int8\"");
    small.train(&["--device", "cpu"]).succeeded();
    assert_answers_are_those_of_generate(&small, &["--quantization", "int8", "--device", "cpu"]);
}

fn assert_answers_are_those_of_generate(small: &SmallRun, flags: &[&str]) {
    let answers = answers(small);
    assert_eq!(answers.len(), 12, "a row has one prompt");
    for (row, answer) in token_rows(&small.read("rows.jsonl")).iter().zip(answers) {
        let prompt = answer.labels.iter().take_while(|label| **label == -100).count();
        assert_eq!(answer.input_ids[..prompt], row.input_ids[..prompt]);
        let ids: Vec<i64> = answer.input_ids[..prompt].iter().map(|id| i64::from(*id)).collect();
        let prompt = serde_json::json!({ "prompt_ids": ids }).to_string();
        small.write("prompt.jsonl", prompt);
        let decode: &[&str] =
            &["generate", "--backbone", "backbone", "--prompts", "prompt.jsonl", "--max-new-tokens", "128", "--json"];
        let said: Value =
            serde_json::from_str(&small.medusa(&[decode, flags].concat()).succeeded().stdout).expect("JSON");
        let new_ids: Vec<i64> = serde_json::from_value(said["new_ids"].clone()).expect("ids");
        let answer: Vec<i64> = answer.input_ids[ids.len()..].iter().map(|id| i64::from(*id)).collect();
        assert!(new_ids.starts_with(&answer), "{new_ids:?} {answer:?}");
        assert!(answer.len() == new_ids.len() || ids.len() + answer.len() == 40, "max_length ends an answer");
    }
}

#[test]
fn answers_are_made_once_and_kept() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    let (answers, heads) = (small.bytes(ANSWERS), small.bytes("run/final/heads.safetensors"));
    let last = last_tokens_per_step(&small);
    fs::remove_dir_all(small.path("run/final")).expect("the finished heads");
    fs::remove_dir_all(small.path("run/step-000024")).expect("a checkpoint");
    fs::remove_file(small.path(ANSWERS)).expect("the answers");
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes(ANSWERS) == answers && small.bytes("run/final/heads.safetensors") == heads);
    assert_eq!(last_tokens_per_step(&small), last);

    fs::remove_dir_all(small.path("run/final")).expect("the finished heads");
    fs::remove_dir_all(small.path("run/step-000024")).expect("a checkpoint");
    small.write(ANSWERS, r#"{"rows":[{"input_ids":[1,2,48],"labels":[-100,2,48]}]}"#);
    small.train(&["--resume"]).failed(1, &[ANSWERS, "row 1", "token id 48", "remove the file"]);
    small.write(ANSWERS, r#"{"rows":[{"input_ids":[1,2,3],"labels":[-100,2]}]}"#);
    small.train(&["--resume"]).failed(1, &[ANSWERS, "3 tokens and 2 labels"]);
    small.write(ANSWERS, "{\"rows\":");
    small.train(&["--resume"]).failed(1, &[ANSWERS, "remove the file"]);
}

#[test]
fn rows_that_the_backbone_wrote_are_not_answered_again() {
    let small = SmallRun::new();
    fs::create_dir(small.path("own")).expect("a folder");
    fs::rename(small.path("validation.jsonl"), small.path("own/validation.jsonl")).expect("the rows");
    small.edit("recipe.toml", "validation.jsonl", "own/validation.jsonl");
    let of =
        |backbone: &str| small.write("own/distill.json", serde_json::json!({"backbone_sha256": backbone}).to_string());
    let check = || small.train(&["--check"]).succeeded().stdout;
    of("that of another");
    assert!(check().contains("on the backbone's answers to at most 40 validation prompts"), "{}", check());
    of(&identity(&small.path("backbone")).expect("files"));
    assert!(check().contains("on the validation rows (which this backbone wrote)"), "{}", check());
    small.train(&[]).succeeded();
    assert!(!small.path(ANSWERS).exists() && last_tokens_per_step(&small) >= 1.0);
    small.edit("recipe.toml", "eval_every", "eval_answers = 2\neval_every");
    assert!(check().contains("answers to at most 2 validation prompts"), "{}", check());
}

#[test]
fn answers_need_prompts() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "validation = [\"validation.jsonl\"]\n", "");
    small.edit("recipe.toml", "eval_every = 6", "eval_answers = 6");
    small.train(&["--check"]).failed(2, &["train.eval_answers", "data.validation or data.validation_fraction"]);
}

const ANSWERS: &str = "run/validation_answers.json";

fn last_tokens_per_step(small: &SmallRun) -> f64 {
    evaluations(small).last().expect("an evaluation")["tokens_per_step"].as_f64().expect("a number")
}

fn token_rows(text: &str) -> Vec<TokenRow> {
    text.lines().map(|line| serde_json::from_str(line).expect("a row")).collect()
}

fn answers(small: &SmallRun) -> Vec<TokenRow> {
    ValidationAnswers::load(&small.path(ANSWERS)).expect("the answers").rows
}

/// By `calibrate` and `tree`, of the finished heads.
fn tokens_per_step_of_halves(small: &SmallRun, rows: Vec<TokenRow>) -> f64 {
    let llama = Llama::load(&small.path("backbone"), Kind::Float, Device::Cpu, Purpose::Training).expect("a backbone");
    let heads = Heads::load(&small.path("run/final"), &llama).expect("the trained heads");
    let (even, odd): (Vec<_>, Vec<_>) = rows.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
    let calibrated = |half: Vec<(usize, TokenRow)>| -> Calibration {
        let rows = RowStore::in_memory(half.into_iter().map(|(_, row)| row));
        let counts = calibrate(&llama, &heads, &rows, 10, Share::WHOLE, |_| ()).expect("a calibration").counts;
        counts.sign(String::new(), String::new()).expect("targets for every head")
    };
    let (even, odd) = (calibrated(even), calibrated(odd));
    let judged = |tree_of: &Calibration, texts: &Calibration| {
        Replay::new(&tree_of.best_tree(63, 2).expect("a tree").tree, &texts.joint.runs)
    };
    let (a, b) = (judged(&even, &odd), judged(&odd, &even));
    let expected = (a.tokens + b.tokens) as f64 / (a.steps + b.steps) as f64;
    assert!(expected > 1.1, "no guess was right: nothing is tested ({expected})");
    expected
}

/// The tokens per step that `medusa bench` measures on `prompts` with the tree of a calibration on `others`.
fn benched(small: &SmallRun, backbone: &str, others: &str, prompts: &str) -> f64 {
    let models = ["--backbone", backbone, "--heads", "run/final", "--max-new-tokens", "160"];
    small.medusa(&[&["calibrate", "--prompts", others, "--out", "c.json"][..], &models].concat()).succeeded();
    small.medusa(&["tree", "--calibration", "c.json", "--nodes", "63", "--out", "t.json"]).succeeded();
    let bench = ["bench", "--tree", "t.json", "--prompts", prompts, "--repeats", "1", "--json"];
    let line = small.medusa(&[&bench[..], &models].concat()).succeeded().stdout;
    serde_json::from_str::<Value>(&line).expect("JSON")["acceleration_rate"].as_f64().expect("a number")
}

#[test]
#[ignore = "trains heads and decodes 64 texts, 14 minutes in a dev build on a busy machine: cargo test --release --test promises -- --ignored tokens_per_step_are_those_of_bench"]
fn tokens_per_step_are_those_of_bench_on_the_backbones_own_texts() {
    let small = SmallRun::new();
    let backbone = published("models/stories260K").display().to_string();
    let text = fs::read_to_string(published("data/stories_eval.jsonl")).expect("rows");
    let rows: Vec<&str> = text.lines().collect();
    small.write("train.jsonl", rows[..136].join("\n"));
    let prompt = |row: &&str| {
        let row: Value = serde_json::from_str(row).expect("a row");
        serde_json::json!({"prompt_ids": row["input_ids"].as_array().expect("ids")[..16]}).to_string()
    };
    let prompts: Vec<String> = rows[136..].iter().map(prompt).collect();
    let half = |first: usize| prompts.iter().skip(first).step_by(2).cloned().collect::<Vec<_>>().join("\n");
    small.write("prompts.jsonl", prompts.join("\n"));
    small.write("even.jsonl", half(0));
    small.write("odd.jsonl", half(1));
    let distill = ["--prompts", "prompts.jsonl", "--out", "own", "--temperature", "0", "--max-new-tokens", "160"];
    small.medusa(&[&["distill", "--backbone", &backbone][..], &distill].concat()).succeeded();
    for (piece, by) in [
        ("path = \"backbone\"", format!("path = {backbone:?}").as_str()),
        ("medusa_num_heads = 2", "medusa_num_heads = 4"),
        ("rows.jsonl", "train.jsonl"),
        ("validation.jsonl", "own/*.parquet"),
        ("max_length = 40", "max_length = 256"),
        ("learning_rate = 1e-2", "learning_rate = 2e-3"),
        ("micro_batch_size = 1", "micro_batch_size = 4"),
        ("eval_every = 6\n", ""),
    ] {
        small.edit("recipe.toml", piece, by);
    }
    small.train(&[]).succeeded();
    let printed = evaluations(&small).last().expect("an evaluation")["tokens_per_step"].as_f64().expect("a number");
    let halves = [("even.jsonl", "odd.jsonl"), ("odd.jsonl", "even.jsonl")];
    let measured =
        halves.map(|(others, prompts)| benched(&small, &backbone, others, prompts)).iter().sum::<f64>() / 2.0;
    assert!(measured > 1.5, "the heads learnt nothing: {measured}");
    assert!((printed / measured - 1.0).abs() < 0.05, "validation: {printed:.3} tokens per step, bench: {measured:.3}");
}

#[test]
fn best_has_the_heads_of_the_best_evaluation_by_either_figure() {
    let mut steps = vec![];
    for by in ["loss", "tokens_per_step"] {
        let small = evaluated_often(by);
        let said = small.train(&[]).succeeded().stderr;
        let (step, value) = best_of(&evaluations(&small), by);
        assert_eq!(small.names("run/best"), small.names("run/final"));
        let best = &json(&small, "run/best/config.json")["best"];
        assert_eq!((&best["step"], &best["by"], &best["value"]), (&step.into(), &by.into(), &value.into()));
        let heads = |folder: &str| small.bytes(&format!("run/{folder}/heads.safetensors"));
        assert!(heads("best") == heads(&format!("step-{step:06}")), "best/ has other heads than step {step}");
        assert!(
            said.contains("the best heads are in run/best: ") && said.contains(&format!("after step {step}")),
            "{said}"
        );
        assert!(json(&small, "run/final/config.json").get("best").is_none());
        steps.push(step);
    }
    assert_ne!(steps[0], steps[1], "loss and tokens per step agree: one rule would pass for the other");
}

#[test]
fn a_run_without_patience_left_stops_and_resumes_to_the_same_end() {
    let small = evaluated_often("loss");
    small.edit("recipe.toml", "eval_every = 1", "eval_every = 1\npatience = 3");
    small.edit("recipe.toml", "learning_rate = 1e-2", "learning_rate = 0.2"); // soon worse
    let ended = small.train(&[]).succeeded();
    assert_eq!(ended.stdout, "run/final\n");
    let lines = evaluations(&small);
    let (best, _) = best_of(&lines, "loss");
    let last = best + 3;
    assert!(
        last < 24 && lines.len() as u64 == last,
        "stopped after evaluation {} of 24, {last} is expected",
        lines.len()
    );
    let early: Vec<bool> = lines.iter().map(|line| line["stopped_early"] == true).collect();
    assert!(early.ends_with(&[false, true]) && early.iter().filter(|early| **early).count() == 1, "{early:?}");
    let stopped = format!("stopped early after step {last}: no better loss in 3 evaluations");
    assert!(ended.stderr.contains(&stopped), "{}", ended.stderr);
    let inspected = small.medusa(&["inspect", "run"]).succeeded().stdout;
    assert!(inspected.contains("(finished: stopped early by train.patience)"), "{inspected}");
    assert!(small.train(&["--resume"]).succeeded().stderr.contains("already finished"));

    let files = ["final/heads.safetensors", "best/heads.safetensors", "best/config.json"];
    let bytes = || files.map(|file| small.bytes(&format!("run/{file}")));
    let unbroken = bytes();
    // Killed before final/ was written: after the last checkpoint, and before the last two.
    for lost in [0, 2] {
        fs::remove_dir_all(small.path("run/final")).expect("a folder");
        (last - lost + 1..=last).for_each(|step| {
            fs::remove_dir_all(small.path(&format!("run/step-{step:06}"))).expect("a checkpoint");
        });
        let resumed = small.train(&["--resume"]).succeeded();
        assert!(resumed.stderr.contains(&stopped), "{}", resumed.stderr);
        assert!(bytes() == unbroken, "{lost} checkpoints lost");
        assert_eq!(evaluations(&small).len() as u64, last);
    }
}

#[test]
fn a_run_without_patience_left_does_not_pretend_to_go_on() {
    let small = evaluated_often("loss");
    small.edit("recipe.toml", "eval_every = 1", "eval_every = 1\npatience = 3");
    small.edit("recipe.toml", "learning_rate = 1e-2", "learning_rate = 0.2"); // soon worse
    small.train(&[]).succeeded();
    let heads = small.bytes("run/final/heads.safetensors");
    let last = evaluations(&small).len();
    small.edit("recipe.toml", "epochs = 8", "epochs = 16");
    let facts = ["train.output_dir run", "patience is used up", "last 3 evaluations", "raise or remove train.patience"];
    small.train(&["--resume"]).failed(1, &facts);
    assert!(small.bytes("run/final/heads.safetensors") == heads);
    small.edit("recipe.toml", "epochs = 16", "epochs = 8");
    small.edit("recipe.toml", "patience = 3", "patience = 4");
    let longer = small.train(&["--resume"]).succeeded();
    assert!(longer.stderr.contains("the recipe changed: patience = 4 (was 3)\n"), "{}", longer.stderr);
    assert!(evaluations(&small).len() > last);
}

#[test]
fn a_lost_best_folder_is_written_again_by_the_next_evaluation() {
    let small = evaluated_often("tokens_per_step");
    small.train(&[]).succeeded();
    for gone in ["run/final", "run/best"] {
        fs::remove_dir_all(small.path(gone)).expect("a folder");
    }
    (22..=24).for_each(|step| fs::remove_dir_all(small.path(&format!("run/step-{step:06}"))).expect("a checkpoint"));
    small.train(&["--resume"]).succeeded();
    let (step, _) = best_of(&evaluations(&small)[21..], "tokens_per_step");
    assert_eq!(json(&small, "run/best/config.json")["best"]["step"], step);
}

#[test]
fn killed_while_best_is_written_it_is_whole_or_absent() {
    let small = evaluated_often("loss");
    small.train(&[]).succeeded();
    let files = ["final/heads.safetensors", "best/heads.safetensors", "best/config.json", "step-000024/state.json"];
    let bytes = || files.map(|file| small.bytes(&format!("run/{file}")));
    let unbroken = bytes();
    fs::remove_dir_all(small.path("run")).expect("a folder");
    for kill in 0..8 {
        let mut child =
            small.trainer(&["--resume"]).stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
        let newest = small.path(&format!("run/step-{:06}", 2 + 2 * kill));
        while !newest.exists() && child.try_wait().expect("a child").is_none() {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(3 * kill));
        child.kill().expect("a child");
        child.wait().expect("a child");
        if small.path("run/best").exists() {
            assert_eq!(
                small.names("run/best"),
                ["config.json", "heads.safetensors", "medusa.sha256", "prompts.hashes"]
            );
            small.medusa(&["inspect", "run/best"]).succeeded();
        }
    }
    small.train(&["--resume"]).succeeded();
    assert!(bytes() == unbroken);
    assert!(small.names("run").iter().all(|name| !name.starts_with('.')), "{:?}", small.names("run"));
}

#[test]
fn two_kills_before_the_first_checkpoint_leave_a_run_that_starts_again() {
    let small = evaluated_often("loss");
    small.train(&[]).succeeded();
    let heads = small.bytes("run/final/heads.safetensors");
    // As after a kill between the evaluation of step 1 and its checkpoint.
    small.names("run").iter().filter(|name| name.starts_with("step-") || *name == "final").for_each(|name| {
        fs::remove_dir_all(small.path(&format!("run/{name}"))).expect("a folder");
    });
    let metrics = small.read("run/metrics.jsonl");
    let of_step_1: Vec<&str> = metrics.split_inclusive('\n').filter(|line| line.contains("\"step\":1,")).collect();
    assert!(of_step_1.len() > 1, "no training and validation lines of step 1 in {metrics}");
    small.write("run/metrics.jsonl", of_step_1.concat());

    let mut child =
        small.trainer(&["--resume"]).stderr(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
    while small.read("run/metrics.jsonl") == of_step_1.concat() && child.try_wait().expect("a child").is_none() {
        sleep(Duration::from_micros(100));
    }
    child.kill().expect("a child");
    child.wait().expect("a child");
    let is_left_alone = small.read("run/metrics.jsonl").is_empty() && small.path("run/best").exists();
    assert!(!is_left_alone, "the log was emptied before best/ was removed");
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == heads);
}

#[test]
fn what_best_holds_is_read_as_final_is() {
    let small = evaluated_often("tokens_per_step");
    small.train(&[]).succeeded();
    let best = json(&small, "run/best/config.json")["best"].clone();
    let found = |path: &str| small.medusa(&["inspect", path, "--json"]).succeeded().stdout;
    let found = |path: &str| serde_json::from_str::<Value>(&found(path)).expect("JSON");
    assert_eq!((&found("run")["best"], &found("run/best")["best"]), (&best, &best));
    assert!(found("run/final").get("best").is_none());
    let page = small.medusa(&["report", "run", "--out", "page.html"]).succeeded();
    assert!(small.read("page.html").contains("tokens per step after step"), "{}", page.stderr);
    let heads = ["--backbone", "backbone", "--heads", "run/best"];
    small.medusa(&[&["calibrate", "--data", "rows.jsonl", "--out", "c.json"][..], &heads].concat()).succeeded();
    small.medusa(&["export", "--heads", "run/best", "--format", "tgi", "--out", "exported"]).succeeded();
    assert_eq!(json(&small, "exported/config.json")["medusa_train"]["best"], best);
}

#[test]
fn one_validation_row_has_no_other_half() {
    let small = evaluated_often("tokens_per_step");
    let first = small.read("validation.jsonl").lines().next().expect("a row").to_owned();
    small.write("validation.jsonl", first);
    small.train(&["--check"]).failed(2, &["train.keep_best = \"tokens_per_step\"", "1 validation row", "add rows"]);
    small.edit("recipe.toml", "keep_best = \"tokens_per_step\"", "keep_best = \"loss\"");
    small.train(&[]).succeeded();
    assert!(evaluations(&small).iter().all(|line| line.get("tokens_per_step").is_none()));
}
