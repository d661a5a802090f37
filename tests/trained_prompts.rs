//! Promise: heads remember the prompts that they were trained on, and whatever measures them says how many it meets again.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use medusa::data::chat_template::{ChatTemplate, TemplateChoice};
use medusa::data::prompts::{self, answer_header};
use medusa::data::tokenize::TextTokenizer;
use medusa::data::{self, LoadSettings};
use medusa::formats::trained_prompts::{TrainedPrompts, prompt_hash};
use serde_json::{Value, json};

use crate::small_run::{Ended, SmallRun};

/// What was trained, and what its prompts are.
struct TinyTokens {
    tokenizer: TextTokenizer,
    template: ChatTemplate,
}

impl TinyTokens {
    fn new() -> Self {
        let folder = Self::path("backbone");
        let template =
            ChatTemplate::choose(&TemplateChoice::Tokenizer, &folder).expect("a template file").expect("a template");
        Self { tokenizer: TextTokenizer::load(&folder).expect("a tokenizer"), template }
    }

    fn path(name: &str) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data/tiny").join(name)
    }

    /// What a run on a file would keep.
    fn trained_on(&self, path: PathBuf) -> TrainedPrompts {
        let settings = LoadSettings {
            tokenizer: Some(&self.tokenizer),
            template: Some(&self.template),
            ..LoadSettings::new(self.tokenizer.vocab_size(), NonZeroUsize::new(512).expect("not 0"))
        };
        let (rows, _) = data::load(&[path.to_string_lossy().into_owned()], &settings).expect("rows");
        let header = answer_header(Some(&self.tokenizer), Some(&self.template));
        TrainedPrompts::of(rows.iter().map(|row| prompt_hash(row.expect("a row").prompt(&header))).collect())
    }

    /// How many prompts of a file are among them, and how many there are.
    fn met(&self, trained: &TrainedPrompts, path: PathBuf) -> (usize, usize) {
        let all = prompts::read(&path).expect("prompts");
        let ids = |prompt: &prompts::Prompt| prompts::to_ids(&prompt.input, &self.tokenizer, Some(&self.template));
        (all.iter().filter(|prompt| trained.have(&ids(prompt).expect("tokens"))).count(), all.len())
    }
}

#[test]
fn rows_of_every_form_have_the_prompt_that_a_template_renders() {
    let (tiny, dir) = (TinyTokens::new(), tempfile::tempdir().unwrap());
    let path = dir.path().join("rows.jsonl");
    let write = |lines: &[Value]| {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        medusa::files::write_atomic(&path, |out| std::io::Write::write_all(out, text.as_bytes())).unwrap();
        path.clone()
    };
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let turns = [message("user", "How many is 2 + 2?"), message("assistant", "4."), message("user", "Sure?")];
    let asked = json!({"messages": [turns[0]]});
    let others = [json!({"messages": [message("user", "How many is 2 + 3?")]}), json!({"prompt": "How many"})];
    for row in [
        json!({"messages": [turns[0], turns[1], turns[2], message("assistant", "Yes.")]}),
        json!({"messages": turns[..2]}),
        json!({"text": "<|user|>How many is 2 + 2?<|end|><|assistant|>4.<|end|>"}),
    ] {
        let trained = tiny.trained_on(write(std::slice::from_ref(&row)));
        assert_eq!(tiny.met(&trained, write(std::slice::from_ref(&asked))), (1, 1), "{row}");
        assert_eq!(tiny.met(&trained, write(&[json!({"messages": turns})])), (1, 1), "{row}: the first turn");
        assert_eq!(tiny.met(&trained, write(&others)), (0, 2), "{row}");
    }
}

#[test]
fn the_questions_of_the_embedded_model_are_in_no_training_row() {
    let tiny = TinyTokens::new();
    let trained = ["train.jsonl", "seeds.jsonl"].map(|name| tiny.trained_on(TinyTokens::path(name)));
    for trained in trained {
        assert!(tiny.met(&trained, TinyTokens::path("seeds.jsonl")).0 >= 1490, "the seeds are what was trained on");
        assert_eq!(tiny.met(&trained, TinyTokens::path("questions.jsonl")), (0, 161));
        assert_eq!(tiny.met(&trained, TinyTokens::path("prompts.jsonl")), (0, 40));
    }
    let read = |name: &str| prompts::read(&TinyTokens::path(name)).unwrap();
    let measured = read("prompts.jsonl");
    let is_new = |prompt: &prompts::Prompt| measured.iter().all(|other| other.input != prompt.input);
    assert!(read("questions.jsonl").iter().all(is_new), "the tree is chosen on other questions than it is measured on");
}

/// A run on four rows, and files of two prompts that it was trained on among three.
fn trained() -> SmallRun {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    let row = |question: [i64; 3]| {
        let ids: Vec<i64> = question.into_iter().chain(20..32).collect();
        let labels: Vec<i64> = ids.iter().enumerate().map(|(at, id)| if at < 3 { -100 } else { *id }).collect();
        json!({"input_ids": ids, "labels": labels}).to_string() + "\n"
    };
    let questions = [[3, 4, 5], [3, 4, 6], [3, 4, 7], [3, 4, 8]];
    small.write("rows.jsonl", questions.map(row).concat());
    small.write("new.jsonl", [[9, 4, 5], [3, 4, 9]].map(row).concat());
    small.write("mixed.jsonl", [[3, 4, 5], [3, 4, 9]].map(row).concat());
    let prompt = |ids: [i64; 3]| json!({"prompt_ids": ids}).to_string() + "\n";
    small.write("prompts.jsonl", [[3, 4, 5], [3, 4, 6], [3, 4, 9]].map(prompt).concat());
    small.train(&[]).succeeded();
    small
}

const HEADS: [&str; 4] = ["--backbone", "backbone", "--heads", "run/final"];

fn first_line(ended: &Ended) -> &str {
    ended.stderr.lines().next().unwrap_or_default()
}

#[test]
fn measurements_on_trained_prompts_say_so_first_and_strict_refuses_them() {
    let small = trained();
    let calibrate = |more: &[&str]| small.medusa(&[&["calibrate"], &HEADS[..], &["--top-k", "3"], more].concat());
    let bench = |more: &[&str]| small.medusa(&[&["bench"], &HEADS[..], &["--prompts", "prompts.jsonl"], more].concat());
    let two = "2 of 3 prompts were trained on by run/final: the figures below are too good";
    let ended = calibrate(&["--prompts", "prompts.jsonl", "--max-new-tokens", "12", "--out", "c.json"]).succeeded();
    assert!(first_line(&ended).starts_with(two), "{}", ended.stderr);
    let calibration: Value = serde_json::from_str(&small.read("c.json")).unwrap();
    assert_eq!(calibration["prompts"], json!({"count": 3, "trained_on": 2}));
    let ended = calibrate(&["--data", "mixed.jsonl", "--out", "rows.json"]).succeeded();
    assert!(first_line(&ended).starts_with("1 of 2 prompts were trained on"), "{}", ended.stderr);
    let ended = calibrate(&["--data", "new.jsonl", "--out", "new.json", "--strict"]).succeeded();
    assert!(!ended.stderr.contains("trained on"), "{}", ended.stderr);
    calibrate(&["--data", "mixed.jsonl", "--out", "x.json", "--strict"]).failed(1, &["1 of 2 prompts", "--strict"]);
    assert!(!small.path("x.json").exists());

    let tree = |more: &[&str]| small.medusa(&[&["tree", "--calibration", "c.json", "--nodes", "3"], more].concat());
    let ended = tree(&["--out", "t.json"]).succeeded();
    assert!(
        first_line(&ended).starts_with("2 of 3 prompts were trained on by the calibrated heads"),
        "{}",
        ended.stderr
    );
    tree(&["--strict"]).failed(1, &["2 of 3 prompts"]);

    let ended = bench(&["--max-new-tokens", "4", "--repeats", "1", "--json"]).succeeded();
    assert!(first_line(&ended).starts_with(two), "{}", ended.stderr);
    let result: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(result["prompts"], json!({"count": 3, "trained_on": 2}));
    bench(&["--strict"]).failed(1, &["2 of 3 prompts were trained on by run/final"]);

    let distill = ["distill", "--prompts", "prompts.jsonl", "--max-new-tokens", "4", "--out"];
    let distill = |more: &[&str]| small.medusa(&[&distill[..], more, &HEADS[..]].concat());
    let ended = distill(&["answers"]).succeeded();
    assert!(first_line(&ended).starts_with(two), "{}", ended.stderr);
    distill(&["others", "--strict"]).failed(1, &["2 of 3 prompts"]);
}

#[test]
fn shares_of_a_calibration_count_the_prompts_of_all_rows() {
    let small = trained();
    let calibrate = |more: &[&str]| small.medusa(&[&["calibrate"], more].concat()).succeeded();
    let share = |share: &str, out: &str| {
        calibrate(&[&HEADS[..], &["--data", "mixed.jsonl", "--shard", share, "--out", out]].concat())
    };
    share("1/2", "1.json");
    share("2/2", "2.json");
    let merged = calibrate(&["--merge", "1.json", "2.json", "--out", "merged.json"]);
    assert!(first_line(&merged).starts_with("1 of 2 prompts"), "{}", merged.stderr);
    calibrate(&[&HEADS[..], &["--data", "mixed.jsonl", "--out", "whole.json"]].concat());
    assert_eq!(small.read("merged.json"), small.read("whole.json"));
}

#[test]
fn what_was_trained_on_goes_with_the_heads_and_is_handed_on() {
    let small = trained();
    let prompts = |folder: &str| TrainedPrompts::for_heads(&small.path(folder)).unwrap().expect("prompts");
    assert_eq!(prompts("run").len(), 4);
    let export = ["export", "--heads", "run", "--format", "heads", "--out", "exported"];
    small.medusa(&export).succeeded();
    for folder in ["run/final", "exported"] {
        assert_eq!(prompts(folder), prompts("run"), "{folder}");
    }
    let checkpoint = small.names("run").into_iter().find(|name| name.starts_with("step-")).expect("a checkpoint");
    assert_eq!(prompts(&format!("run/{checkpoint}")), prompts("run"), "a checkpoint has those of its run");

    small.edit("recipe.toml", "medusa_num_heads = 2", "init_from = \"exported\"\nmedusa_num_heads = 2");
    small.edit("recipe.toml", "\"run\"", "\"second\"");
    small.edit("recipe.toml", "\"rows.jsonl\"", "\"new.jsonl\"");
    small.train(&[]).succeeded();
    assert_eq!(prompts("second/final").len(), 6, "those of the heads that it began with, too");

    std::fs::remove_file(small.path("second/prompts.hashes")).unwrap();
    small.train(&["--resume"]).succeeded();
    assert_eq!(prompts("second").len(), 6, "a run of an earlier version");
}
