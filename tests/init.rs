//! Promise: `medusa init` writes a recipe that fits the machine and passes `--check`, never over another file, and a shell runs the commands
//! that it prints, as they are.

use std::fs;
use std::path::Path;

use medusa::data::Watch;
use medusa::data::chat_template::TemplateChoice;
use medusa::decode::own_answers::RowPrompts;
use medusa::draft::heads::layout::HeadsArchitecture;
use medusa::recipe::starter::{StarterMachine, StarterRecipe, StarterRecipeError, StarterStage};
use medusa::recipe::{Recipe, WrittenRecipe};
use medusa::torch::shared_gpus::SharedGpus;
use medusa::train::checked::CheckedRun;
use medusa::train::duration::PassTimes;
use serde_json::{Value, json};
use tch::Device;

use super::small_run::{Ended, SmallRun};

const INIT: [&str; 7] = ["init", "--backbone", "backbone", "--data", "rows.jsonl", "--out", "first.toml"];

#[test]
fn the_recipe_trains_and_its_heads_decode_by_the_next_commands() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    small.write("rows to evaluate on.jsonl", small.read("validation.jsonl"));
    let written = small
        .medusa(&[&INIT[..], &["--validation", "rows to evaluate on.jsonl", "--device", "cpu"]].concat())
        .succeeded();
    assert!(
        ["wrote first.toml: ", "planned peak", "expected: about "].iter().all(|said| written.stderr.contains(said)),
        "{}",
        written.stderr
    );
    let recipe = small.read("first.toml");
    small.write("first.toml", "");
    let again = small
        .medusa(&[&INIT[..], &["--validation", "rows to evaluate on.jsonl", "--device", "cpu"]].concat())
        .succeeded();
    assert!(again.stderr.contains("--out first.toml exists and will be replaced"), "{}", again.stderr);
    assert!(small.read("first.toml").contains("[stage.medusa1]"), "the free memory in its comment may be another");
    assert!(recipe.contains("validation = [\"rows to evaluate on.jsonl\"] # for evaluations"), "{recipe}");
    for line in
        ["path = \"backbone\"\n", "dtype = \"float32\" ", "[stage.medusa1]\n", "output_dir = \"checkpoints/first\"\n"]
    {
        assert!(recipe.contains(line), "{line} in\n{recipe}");
    }
    assert!(recipe.lines().all(|line| line.chars().count() <= 80), "{recipe}");
    assert!(written.stdout.lines().all(|line| line.len() <= 80), "{}", written.stdout);
    let unbroken = written.stdout.replace(" \\\n   ", "");
    let commands: Vec<&str> = unbroken.lines().collect();
    let verbs =
        ["medusa-train", "medusa-train", "medusa calibrate", "medusa tree", "echo", "medusa generate", "medusa bench"];
    assert_eq!(commands.len(), verbs.len());
    assert!(commands.iter().zip(verbs).all(|(command, verb)| command.starts_with(verb)), "{commands:?}");
    for command in commands.iter().filter(|command| !command.starts_with("echo")) {
        assert!(command.contains(" --device cpu"), "the plan is for the CPU: {command}");
    }
    assert!(commands[3].contains(" --latency checkpoints/first/latency.json "), "{commands:?}");
    assert!(commands[5..].iter().all(|command| command.contains(" --drafter hydra+ngram ")), "{commands:?}");
    assert!(recipe.contains("#   medusa-train first.toml --device cpu --check "), "{recipe}");
    for command in &commands {
        let ended = in_a_shell(&small, command);
        if command.contains("calibrate") {
            for said in ["checkpoints/first held 3 rows out from training", "the backbone answers 3 of their 3 prompts"]
            {
                assert!(ended.stderr.contains(said), "{}", ended.stderr);
            }
        }
    }
    assert_eq!(
        small.names("checkpoints/first/final"),
        ["config.json", "heads.safetensors", "medusa.sha256", "prompts.hashes"]
    );

    small
        .medusa(&INIT)
        .failed(2, &["--out first.toml: its run would be in checkpoints/first, which holds another run"]);
}

/// Runs a command line as a user types it.
fn in_a_shell(small: &SmallRun, command: &str) -> Ended {
    let programs = Path::new(env!("CARGO_BIN_EXE_medusa")).parent().expect("a folder").display().to_string();
    let path = std::env::var("PATH").expect("a PATH");
    let mut shell = small.program("sh", &["-c", command]);
    let ended: Ended = shell.env("PATH", format!("{programs}:{path}")).output().expect("a shell").into();
    ended.succeeded()
}

#[test]
fn rows_that_no_run_held_out_are_asked_for() {
    let small = SmallRun::new();
    let rows = small.read("rows.jsonl").repeat(5);
    small.write("rows.jsonl", &rows);
    small.edit("recipe.toml", "validation = [\"validation.jsonl\"]", "validation_fraction = 0.1");
    small.train(&[]).succeeded();
    let calibrate = ["calibrate", "--backbone", "backbone", "--out", "calibration.json", "--heads"];
    let measured = |heads: &str| small.medusa(&[&calibrate[..], &[heads]].concat());
    let ended = measured("run").succeeded();
    assert!(ended.stderr.contains("run held 5 rows out from training"), "{}", ended.stderr);
    small.write("rows.jsonl", rows.clone() + &rows);
    measured("run/best").failed(2, &["--heads run/best does not exist"]);
    let changed = ["the data of run changed: rows to train on: rows was 60 when it began and is 120 now", "--data"];
    measured("run/final").failed(2, &changed);
    std::fs::rename(small.path("run/final"), small.path("heads")).expect("a folder");
    measured("heads")
        .failed(2, &["heads is not in a run's folder; give held-out rows by --data, or prompts by --prompts"]);
}

#[test]
fn quotes_few_rows_and_bad_rows() {
    let small = SmallRun::new();
    small.write("rows.jsonl", small.read("rows.jsonl") + "no JSON\n");
    small.medusa(&INIT).failed(1, &["rows.jsonl", "--skip-bad-rows"]);
    let mut arguments = INIT.to_vec();
    arguments[6] = "my first.toml";
    arguments.extend(["--skip-bad-rows", "--threads", "1"]);
    let written = small.medusa(&arguments).succeeded();
    let train = "medusa-train 'my first.toml' --threads 1 --skip-bad-rows";
    let recipe = small.read("my first.toml");
    assert!(recipe.contains(&format!("#   {train}\n#\n")), "{recipe}");
    assert!(written.stdout.starts_with(&format!("{train} --check\n{train}\n")), "{}", written.stdout);
    in_a_shell(&small, &format!("{train} --check"));
    assert!(written.stdout.contains(" --data rows.jsonl --skip-bad-rows "), "{}", written.stdout);
    assert!(written.stderr.contains("too few rows to hold any out"), "{}", written.stderr);
    arguments[6] = "two\nlines.toml";
    small.medusa(&arguments).failed(2, &["--out", "control characters"]);
}

#[test]
fn heads_are_sequential_unless_a_server_shall_load_them() {
    let small = SmallRun::new();
    let recipe = |more: &[&str]| {
        let ended = small.medusa(&[&INIT[..], more].concat()).succeeded();
        assert!(ended.stderr.contains("below 200000 heads guess badly"), "{}", ended.stderr);
        small.read("first.toml")
    };
    let hydra = recipe(&["--device", "cpu"]);
    let states = "hidden_state_cache = \"checkpoints/hidden_states\" ";
    for line in ["architecture = \"hydra\" ", "medusa_num_heads = 2 ", "shared_w2 = true ", states] {
        assert!(hydra.contains(line), "{line} in\n{hydra}");
    }
    assert!(!hydra.contains("draft_vocab_size"), "the vocabulary is small: {hydra}");
    assert!(recipe(&["--drafter", "hydra++"]).contains("architecture = \"hydra++\" "));
    let medusa = recipe(&["--drafter", "medusa"]);
    assert!(!medusa.contains("architecture") && !medusa.contains("shared_w2"), "{medusa}");
    assert!(medusa.contains("medusa_num_heads = 5 "), "{medusa}");
}

#[test]
fn of_a_large_vocabulary_the_frequent_tokens_are_guessed() {
    let small = SmallRun::with_sizes(32, 10_000);
    small.medusa(&INIT).succeeded();
    let recipe = small.read("first.toml");
    assert!(recipe.contains("draft_vocab_size = 4096 "), "{recipe}");
}

#[test]
fn adapters_rows_to_evaluate_on_and_json() {
    let small = SmallRun::new();
    let rows = small.read("rows.jsonl").repeat(5);
    small.write("many rows.jsonl", rows);
    let mut arguments = INIT.to_vec();
    arguments[4] = "many rows.jsonl";
    arguments.extend(["--stage", "medusa2", "--json"]);
    let written: Value = serde_json::from_str(&small.medusa(&arguments).succeeded().stdout).expect("JSON");
    assert!(written["peak_bytes"].as_u64() > Some(0) && written["steps"].as_u64() >= Some(150), "{written}");
    let next = |at: usize| written["next"][at].as_str().expect("a command").to_owned();
    assert_eq!((&*next(0), &*next(1)), ("medusa-train first_heads.toml", "medusa-train first.toml --check"));
    assert!(!next(3).contains("--data"), "{}", next(3));
    assert!(small.read("first_heads.toml").contains("[stage.medusa1]"), "heads are trained first");
    let recipe = small.read("first.toml");
    for line in ["[stage.medusa2.lora]\n", "validation_fraction = 0.1 ", "eval_every = ", "medusa_lr_multiplier = 4.0 "]
    {
        assert!(recipe.contains(line), "{line} in\n{recipe}");
    }
    assert!(recipe.contains("[heads]\ninit_from = \"checkpoints/first_heads/final\" "), "{recipe}");
    assert!(!recipe.contains("self_distillation"), "nobody says that the backbone wrote the rows: {recipe}");
    for file in ["first_heads.toml", "first.toml"] {
        small.edit(file, "epochs = ", "max_steps = 1 # ");
    }
    let train = env!("CARGO_BIN_EXE_medusa-train");
    for file in ["first_heads.toml", "first.toml"] {
        let ended: Ended = small.program(train, &[file]).output().expect("it starts").into();
        ended.succeeded();
    }
}

#[test]
fn rows_that_the_backbone_wrote_are_distilled_from() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    let prompts: String = (0..30).map(|id| format!("{{\"prompt_ids\": [3, {id}]}}\n")).collect();
    small.write("prompts.jsonl", prompts);
    let distill =
        ["distill", "--backbone", "backbone", "--prompts", "prompts.jsonl", "--out", "own", "--max-new-tokens", "8"];
    small.medusa(&distill).succeeded();
    let mut arguments = INIT.to_vec();
    arguments[4] = "own/*.parquet";
    arguments.extend(["--stage", "medusa2"]);
    let written = small.medusa(&arguments).succeeded();
    assert!(written.stderr.contains("this backbone wrote the rows"), "{}", written.stderr);
    let recipe = small.read("first.toml");
    for line in ["self_distillation = true ", "learning_rate = 0.0001 "] {
        assert!(recipe.contains(line), "{line} in\n{recipe}");
    }
}

#[test]
fn columns_of_other_names_are_read_by_the_flag_that_the_error_shows() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    let rows = |form: fn(String, String) -> String| -> String {
        (0..30).map(|row| form(format!("w{row} w2 w3"), format!("w4 w5 w6 w7 w8 w9 w{row}")) + "\n").collect()
    };
    small.write("qa.csv", format!("question,answer\n{}", rows(|asked, said| format!("{asked},{said}"))));
    small.write("qa.jsonl", rows(|question, answer| json!({"question": question, "answer": answer}).to_string()));
    let mut arguments = INIT.to_vec();
    for (file, more) in
        [("qa.csv", &[][..]), ("qa.csv", &["--skip-bad-rows"]), ("qa.jsonl", &[]), ("qa.jsonl", &["--skip-bad-rows"])]
    {
        arguments[4] = file;
        let refused = small.medusa(&[&arguments[..], more].concat());
        assert!(!refused.stderr.contains("skips and counts"), "{file} {more:?}: {}", refused.stderr);
        refused.failed(
            1,
            &["\"question\", \"answer\"; name the columns to read: --columns prompt=question,completion=answer (raw text) or "],
        );
    }
    small.medusa(&[&arguments[..], &["--columns", "prompt=question,completion=answer"]].concat()).succeeded();
    let recipe = small.read("first.toml");
    assert!(recipe.contains("\ncolumns = { prompt = \"question\", completion = \"answer\" }\n"), "{recipe}");
    let train = env!("CARGO_BIN_EXE_medusa-train");
    let checked: Ended = small.program(train, &["first.toml", "--check"]).output().expect("it starts").into();
    checked.succeeded();

    small.write("prompts.jsonl", "{\"prompt\": \"w1\", \"category\": \"a\"}\n");
    arguments[4] = "prompts.jsonl";
    arguments[6] = "second.toml";
    small.medusa(&arguments).failed(1, &["these are prompts without answers: `medusa distill --prompts`"]);
}

#[test]
fn weights_in_float16_are_trained_in_float32_on_a_cpu() {
    let small = SmallRun::new();
    small.edit("backbone/config.json", "{", "{\"torch_dtype\": \"float16\", ");
    let written = small.medusa(&[&INIT[..], &["--device", "cpu"]].concat()).succeeded();
    let why = "the weights are float16, slow on a CPU";
    assert!(written.stderr.contains(&format!("\ndtype = \"float32\": {why}\n")), "{}", written.stderr);
    let recipe = small.read("first.toml");
    assert!(recipe.contains(&format!("dtype = \"float32\"                   # {why}\n")), "{recipe}");
    assert!(recipe.lines().all(|line| line.chars().count() <= 80), "{recipe}");
}

#[test]
fn what_is_not_there_is_named_by_its_flag() {
    let small = SmallRun::new();
    for (at, by, facts) in [
        (2, "./none", ["--backbone", "./none"]),
        (4, "none.jsonl", ["--data", "none.jsonl"]),
        (8, "none.jsonl", ["--validation", "none.jsonl"]),
        (10, "none.jinja", ["--chat-template none.jinja", "does not exist"]),
        (6, "rows.jsonl/first.toml", ["--out rows.jsonl/first.toml", "rows.jsonl is not a folder"]),
    ] {
        let more = ["--validation", "validation.jsonl", "--chat-template", "tokenizer"];
        let mut arguments = [&INIT[..], &more].concat();
        arguments[at] = by;
        small.medusa(&arguments).failed(2, &facts);
        assert!(!small.path("first.toml").exists());
    }
}

/// With ever less memory the recipes save ever more, until none fits.
#[test]
fn less_memory_makes_smaller_runs() {
    let small = SmallRun::with_hidden_size(128);
    let rows: String = (0..400).map(|row| format!("{{\"input_ids\": {:?}}}\n", vec![row % 40; 60])).collect();
    small.write("rows.jsonl", rows);
    let inside = |name: &str| small.path(name).display().to_string();
    let first = StarterRecipe {
        backbone: inside("backbone"),
        data: vec![inside("rows.jsonl")],
        validation: vec![],
        columns: None,
        chat_template: TemplateChoice::default(),
        stage: StarterStage::Medusa2,
        self_distillation: false,
        heads: HeadsArchitecture::Hydra,
        train_command: "medusa-train first.toml".into(),
    };
    let file = Path::new("first.toml");
    let written = WrittenRecipe::parse(file, first.shortest(Device::Cpu)).expect("a recipe");
    let loaded = written.fetch(Device::Cpu, SharedGpus::alone(Device::Cpu), &|_| ()).expect("local files");
    let checked = CheckedRun::load(loaded.plan(Device::Cpu), Watch::default()).expect("rows");
    let fitted = |free: Option<u64>| {
        let machine = StarterMachine { device: Device::Cpu, name: "cpu".into(), free_bytes: free };
        first.fitted(file, &loaded.recipe, &checked, &machine)
    };
    let unlimited = fitted(None).expect("a recipe");
    assert!(unlimited.text.contains("free memory: unknown"), "{}", unlimited.text);
    let (mut peaks, mut texts) = (vec![unlimited.peak_bytes], vec![unlimited.text]);
    let too_large = loop {
        match fitted(Some(10 * (peaks[peaks.len() - 1] - 1) / 9)) {
            Ok(smaller) => {
                peaks.push(smaller.peak_bytes);
                texts.push(smaller.text);
            }
            Err(error) => break error,
        }
    };
    assert!(peaks.is_sorted_by(|one, next| one > next), "{peaks:?}");
    let saving = |what: &str| texts.iter().position(|text| text.contains(what)).unwrap_or_else(|| panic!("{what}"));
    assert!(saving("micro_batch_size = 2 ") < saving("micro_batch_size = 1 "));
    assert!(saving("recompute = true") <= saving("adamw8bit"));
    for text in &texts {
        Recipe::parse(file, text).unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(matches!(too_large, StarterRecipeError::TooLarge { .. }), "{too_large}");
    assert!(too_large.to_string().contains("or --stage medusa1"), "{too_large}");
}

#[test]
fn the_expected_time_of_a_run_is_that_of_its_parts() {
    let small = SmallRun::new();
    let run = |changed: &[(&str, &str)]| {
        let mut recipe = small.read("recipe.toml");
        for (from, to) in [
            ("\"backbone\"", "backbone"),
            ("\"rows.jsonl\"", "rows.jsonl"),
            ("\"validation.jsonl\"", "validation.jsonl"),
        ] {
            recipe = recipe.replace(from, &format!("{:?}", small.path(to)));
        }
        recipe = changed.iter().fold(recipe, |recipe, (from, to)| recipe.replace(from, to));
        let written = WrittenRecipe::parse(Path::new("recipe.toml"), recipe).expect("a recipe");
        let loaded = written.fetch(Device::Cpu, SharedGpus::alone(Device::Cpu), &|_| ()).expect("local files");
        CheckedRun::load(loaded.plan(Device::Cpu), Watch::default()).expect("rows")
    };
    // The only layer takes 2, and all else 1.
    let seconds = |run: &CheckedRun, times: fn(f64) -> PassTimes| run.seconds_at([3.0, 5.0].map(times)).expect("rows");
    let training = |run| seconds(run, |training| PassTimes { training, ..PassTimes::default() });
    let evaluation = |run| seconds(run, |evaluation| PassTimes { evaluation, ..PassTimes::default() });
    let frozen = run(&[]);
    let tokens = 8.0 * frozen.train_report.counts.tokens as f64;
    assert_eq!(frozen.tokens() as f64, tokens);
    assert_eq!(training(&frozen), 3.0 * tokens);
    let cached = run(&[("epochs = 8", "epochs = 8\nhidden_state_cache = \"states\"")]);
    assert_eq!(training(&cached), tokens + 2.0 * tokens / 8.0, "one epoch needs the backbone");

    let held_out = frozen.held_out().expect("validation rows");
    let rows: usize = held_out.iter().map(|row| row.expect("a row").input_ids.len()).sum();
    let prompts = RowPrompts::of(held_out, 40.try_into().expect("not 0")).expect("rows").chosen;
    // A prompt and its answer have at most `data.max_length` tokens.
    let answered = 40.0 * prompts.len() as f64;
    let (rows, count) = (rows as f64, prompts.len() as f64);
    assert_eq!(evaluation(&frozen), 4.0 * 3.0 * (rows + answered), "one every 6 of 24 steps");
    assert_eq!(evaluation(&cached), 4.0 * (rows + answered) + 2.0 * (rows + 4.0 * answered), "answers are not cached");
    let unanswered = run(&[("eval_every = 6", "eval_every = 7\neval_answers = 0")]);
    assert_eq!(evaluation(&unanswered), 4.0 * 3.0 * rows, "after steps 7, 14, 21 and 24");
    let joint = run(&[("[stage.medusa1]", "[stage.medusa2]\n[stage.medusa2.lora]"), ("eval_every = 6", "")]);
    assert_eq!(evaluation(&joint), 2.0 * 3.0 * (rows + answered), "before the first step and after the last");

    let prompt_seconds = |run| seconds(run, |prompts| PassTimes { prompts, ..PassTimes::default() });
    let answer_seconds = |run| seconds(run, |answers| PassTimes { answers, ..PassTimes::default() });
    let shortest = prompts.iter().map(|(_, prompt)| prompt.len()).min().expect("prompts");
    let steps = count * (40 - shortest - 1) as f64;
    assert_eq!((prompt_seconds(&frozen), answer_seconds(&frozen)), (3.0 * count, 3.0 * steps), "one at a time");
    assert_eq!((prompt_seconds(&unanswered), answer_seconds(&unanswered)), (0.0, 0.0));
}

#[test]
fn a_backbone_without_weights_has_no_expected_time() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    small.edit("backbone/config.json", "{", "{\"torch_dtype\": \"float32\", ");
    std::fs::remove_file(small.path("backbone/model.safetensors")).expect("weights");
    let written = small.medusa(&[&INIT[..], &["--json"]].concat()).succeeded();
    let written: Value = serde_json::from_str(&written.stdout).expect("JSON");
    assert_eq!(written["expected_seconds"], Value::Null);
}

/// Also where the rows are tokens, such as its own answers.
#[test]
fn the_first_prompt_of_a_chat_model_is_a_message() {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    let printed = |small: &SmallRun| {
        let ended = small.medusa(&INIT).succeeded();
        fs::remove_file(small.path("first.toml")).expect("the recipe");
        ended.stdout + &ended.stderr
    };
    assert!(printed(&small).contains("{\"prompt\": "));
    small.write("backbone/chat_template.jinja", "{% for message in messages %}{{ message.content }} w1 {% endfor %}");
    assert!(printed(&small).contains("{\"messages\": "));
}
