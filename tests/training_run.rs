//! Promise: a run's folder has the documented files, and stays valid however the process ends.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use medusa::draft::heads::import::HeadsFile;
use medusa::draft::heads::layout::{HeadPart, HeadTensor};
use medusa::model::weights::WeightFiles;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::small_run::{Ended, SmallRun};

/// Tag and step of a curve's point.
type Point = (String, i64);

/// The lines of a run's metrics.jsonl.
fn metrics(small: &SmallRun, run: &str) -> Vec<Value> {
    let text = small.read(&format!("{run}/metrics.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// Lines without the keys that depend on the machine's speed and memory.
fn numbers(lines: &[Value]) -> Vec<Value> {
    let mut lines = lines.to_vec();
    for object in lines.iter_mut().filter_map(Value::as_object_mut) {
        object.remove("tokens_per_second");
        object.remove("memory_bytes");
    }
    lines
}

/// The step numbers of a split's lines.
fn steps(lines: &[Value], split: &str) -> Vec<u64> {
    lines.iter().filter(|line| line["split"] == split).map(|line| line["step"].as_u64().expect("a step")).collect()
}

/// Path and bytes of every file below a folder.
fn snapshot(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => files.extend(snapshot(&path)),
            false => drop(files.insert(path.clone(), fs::read(&path).expect("a file"))),
        }
    }
    files
}

/// Asserts that every checkpoint of a run is complete and that no partial file is left.
fn assert_all_whole(small: &SmallRun, run: &str) {
    for name in small.names(run) {
        assert!(!name.starts_with('.'), "{name} was left behind");
        if name.starts_with("step-") {
            let files = small.names(&format!("{run}/{name}"));
            let expected = ["config.json", "heads.safetensors", "medusa.sha256", "optimizer.safetensors", "state.json"];
            assert_eq!(files, expected, "{name}");
        }
    }
}

/// The points in a run's event file, read by an independent implementation.
fn events(small: &SmallRun, run: &str) -> BTreeMap<Point, f32> {
    use tfrecord::protobuf::event::What;
    use tfrecord::protobuf::summary::value::Value::SimpleValue;
    let names = small.names(&format!("{run}/tensorboard"));
    assert_eq!(names.len(), 1, "{names:?}");
    let path = small.path(&format!("{run}/tensorboard/{}", names[0]));
    let mut points = BTreeMap::new();
    for event in tfrecord::EventIter::open(path, Default::default()).expect("an event file") {
        let event = event.expect("an event whose checksum is right");
        let Some(What::Summary(summary)) = event.what else { continue };
        for value in summary.value {
            let Some(SimpleValue(number)) = value.value else { panic!("{value:?} is no scalar") };
            let before = points.insert((value.tag, event.step), number);
            assert_eq!(before, None, "a point is there once");
        }
    }
    points
}

/// The points that TensorBoard should show for these lines.
#[expect(clippy::cast_possible_truncation, reason = "TensorBoard keeps float32")]
fn curves(lines: &[Value]) -> BTreeMap<Point, f32> {
    let mut points = BTreeMap::new();
    for line in lines {
        let (split, step) = (line["split"].as_str().expect("a split"), line["step"].as_i64().expect("a step"));
        let mut add = |tag: String, value: &Value| {
            if let Some(number) = value.as_f64() {
                points.insert((format!("{split}/{tag}"), step), number as f32);
            }
        };
        for key in
            ["loss", "heads_loss", "lr", "heads_lr", "lambda0", "grad_norm", "tokens_per_second", "tokens_per_step"]
        {
            add(key.into(), &line[key]);
        }
        for (key, tag) in [("head_losses", "loss"), ("head_top1", "top1"), ("head_top5", "top5")] {
            let heads = line[key].as_array().expect("one value a head");
            heads.iter().enumerate().for_each(|(head, value)| add(format!("head{}/{tag}", head + 1), value));
        }
    }
    points
}

#[test]
fn a_finished_run_gets_its_event_file_back() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    let written = events(&small, "run");
    fs::remove_dir_all(small.path("run/tensorboard")).expect("a folder");
    assert!(small.train(&["--resume"]).succeeded().stderr.contains("already finished"));
    assert_eq!(events(&small, "run"), written);
}

#[test]
fn the_folder_of_a_run_is_the_documented_one() {
    let small = SmallRun::new();
    let ended = small.train(&[]).succeeded();
    assert_eq!(ended.stdout, "run/final\n");
    let expected = [
        "final",
        "metrics.jsonl",
        "prompts.hashes",
        "provenance.json",
        "recipe.toml",
        "step-000018",
        "step-000021",
        "step-000024",
        "tensorboard",
        "validation_answers.json",
    ];
    assert_eq!(small.names("run"), expected, "keep_checkpoints is 3");
    assert_eq!(small.names("run/final"), ["config.json", "heads.safetensors", "medusa.sha256", "prompts.hashes"]);
    assert_all_whole(&small, "run");

    let lines = metrics(&small, "run");
    assert_eq!(steps(&lines, "train"), (1..=24).collect::<Vec<_>>());
    assert_eq!(steps(&lines, "validation"), [6, 12, 18, 24]);
    for key in "step epoch tokens loss lm_loss head_losses head_top1 head_top5 lr heads_lr lambda0 grad_norm \
                tokens_per_second memory_bytes"
        .split_whitespace()
    {
        assert!(lines[0].get(key).is_some(), "{key} is not in {}", lines[0]);
    }
    assert_eq!(events(&small, "run"), curves(&lines));
    for line in &lines {
        let tokens = line["tokens_per_step"].as_f64();
        assert_eq!(tokens.is_some_and(|tokens| (1.0..=3.0).contains(&tokens)), line["split"] == "validation", "{line}");
    }

    let provenance: Value = serde_json::from_str(&small.read("run/provenance.json")).expect("JSON");
    for key in ["program", "git_revision", "libtorch", "device", "command", "started"] {
        assert!(!provenance[key].is_null(), "{key} is not in {provenance}");
    }
    assert_eq!(provenance["data"].as_array().expect("files").len(), 2);
    let config: Value = serde_json::from_str(&small.read("run/final/config.json")).expect("JSON");
    assert_eq!((&config["medusa_num_heads"], &config["hidden_size"]), (&2.into(), &32.into()));
    // The resolved recipe resumes the same run.
    small.write("recipe.toml", small.read("run/recipe.toml"));
    let again = small.train(&["--resume"]).succeeded();
    assert!(again.stderr.contains("already finished"), "{}", again.stderr);
}

/// Starts training, waits and kills it with SIGKILL; returns whether it was still running.
fn killed(small: &SmallRun, wait: impl FnOnce(&mut Child)) -> bool {
    let mut child =
        small.trainer(&["--resume"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    wait(&mut child);
    let ended_before = child.try_wait().expect("a child").is_some();
    child.kill().expect("a child");
    child.wait().expect("a child");
    !ended_before
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

/// Waits until a child has opened its logs or ended.
fn wait_for_training(child: &mut Child, log: &Path, before: Option<SystemTime>) {
    let began = Instant::now();
    while modified(log) == before && child.try_wait().expect("a child").is_none() {
        assert!(began.elapsed() < Duration::from_secs(60), "no step in a minute");
        sleep(Duration::from_millis(1));
    }
}

/// Kills a run `kills` times, alternately at any time after its start and during training. A run that finishes is
/// compared with `expected` and started again.
fn kill_at_random_moments(small: &SmallRun, kills: usize, expected: &[u8]) {
    let mut random = ChaCha8Rng::seed_from_u64(20);
    let log = small.path("run/metrics.jsonl");
    let mut done = 0;
    while done < kills {
        if small.path("run/final").exists() {
            assert_eq!(small.bytes("run/final/heads.safetensors"), expected, "after {done} kills");
            fs::remove_dir_all(small.path("run")).expect("a folder to remove");
        }
        let (before, number) = (modified(&log), random.next_u64());
        let was_killed = killed(small, |child| {
            let longest = if done.is_multiple_of(2) { 900 } else { 150 };
            if longest == 150 {
                wait_for_training(child, &log, before);
            }
            sleep(Duration::from_millis(number % longest));
        });
        done += usize::from(was_killed);
    }
}

#[test]
fn killed_at_twenty_random_moments_a_run_ends_with_the_same_heads() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    fs::rename(small.path("run"), small.path("unbroken")).expect("another name");
    let expected = small.bytes("unbroken/final/heads.safetensors");
    kill_at_random_moments(&small, 20, &expected);
    small.train(&["--resume"]).succeeded();
    assert_eq!(small.bytes("run/final/heads.safetensors"), expected);
    assert_all_whole(&small, "run");
    let lines = metrics(&small, "run");
    assert_eq!(
        numbers(&lines),
        numbers(&metrics(&small, "unbroken")),
        "each step is there once, with the same numbers"
    );
    assert_eq!(events(&small, "run"), curves(&lines));
}

#[test]
#[cfg(unix)]
fn an_interrupted_run_saves_says_where_and_goes_on_to_the_same_heads() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "epochs = 8", "epochs = 60");
    small.edit("recipe.toml", "save_every = 3", "save_every = 90");
    small.train(&[]).succeeded();
    fs::rename(small.path("run"), small.path("unbroken")).expect("another name");

    let mut child = small.trainer(&[]).stderr(Stdio::piped()).spawn().expect("it starts");
    wait_for_training(&mut child, &small.path("run/metrics.jsonl"), None);
    let status = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(status.expect("kill").success());
    let ended: Ended = child.wait_with_output().expect("a child").into();
    assert_eq!(ended.status, Some(130), "{}", ended.stderr);
    let step = small.names("run").into_iter().find(|name| name.starts_with("step-")).expect("a checkpoint");
    let advice = format!("interrupted; saved run/{step}; continue with: medusa-train recipe.toml --resume\n");
    assert!(ended.stderr.ends_with(&advice), "{}", ended.stderr);
    assert_all_whole(&small, "run");

    let resumed = small.train(&["--resume"]).succeeded();
    assert!(resumed.stderr.contains(&format!("resuming from run/{step}")), "{}", resumed.stderr);
    let heads = |run: &str| small.bytes(&format!("{run}/final/heads.safetensors"));
    assert!(heads("run") == heads("unbroken"), "heads differ after {step}");
    let lines = metrics(&small, "run");
    assert_eq!(numbers(&lines), numbers(&metrics(&small, "unbroken")));
    assert_eq!(events(&small, "run"), curves(&lines));
}

#[test]
fn nothing_in_the_output_folder_is_ever_overwritten() {
    let small = SmallRun::new();
    fs::create_dir(small.path("run")).expect("a folder");
    small.write("run/notes.txt", "mine");
    small.train(&[]).failed(1, &["train.output_dir run", "is not empty", "--resume"]);
    small.train(&["--resume"]).failed(1, &["train.output_dir run", "no recipe.toml", "another folder"]);
    assert_eq!((small.names("run"), small.read("run/notes.txt")), (vec!["notes.txt".to_owned()], "mine".into()));
    fs::remove_file(small.path("run/notes.txt")).expect("a file");
    small.train(&[]).succeeded(); // an existing empty folder is accepted

    let before = snapshot(&small.path("run"));
    small.train(&[]).failed(1, &["train.output_dir run", "is not empty", "--resume"]);
    for (piece, by, difference) in [
        (
            "learning_rate = 1e-2",
            "learning_rate = 2e-2",
            "says `optimizer.learning_rate = 0.01`, this one `optimizer.learning_rate = 0.02`",
        ),
        ("save_every = 3", "save_every = 3\nseed = 1", "says `train.seed = 42`, this one `train.seed = 1`"),
        ("warmup_steps = 3\n", "", "says `schedule.warmup_steps = 3`, this one `schedule.warmup_steps = 0`"),
        ("gradient_accumulation_steps = 2", "gradient_accumulation_steps = 3", "have 2 sequences, this recipe's 3"),
        ("epochs = 8", "max_steps = 23", "24 optimizer steps, and the recipe now ends after 23"),
    ] {
        let recipe = small.read("recipe.toml");
        small.edit("recipe.toml", piece, by);
        small.train(&["--resume"]).failed(1, &["train.output_dir run", difference]);
        small.write("recipe.toml", recipe);
    }
    let rows = small.read("rows.jsonl");
    small.write("rows.jsonl", format!("{rows}{{\"input_ids\": [1, 2, 3, 4, 5]}}\n"));
    small.train(&["--resume"]).failed(1, &["train.output_dir run", "rows.jsonl changed since it began"]);
    assert_eq!(snapshot(&small.path("run")), before);
}

/// With a constant rate no step depends on how many there are.
#[test]
fn a_finished_run_goes_on_as_if_it_had_not_ended() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "\"cosine\"\nwarmup_steps = 3", "\"constant\"");
    small.edit("recipe.toml", "save_every = 3", "save_every = 100");
    small.edit("recipe.toml", "epochs = 8", "epochs = 12");
    small.train(&[]).succeeded();
    fs::rename(small.path("run"), small.path("unbroken")).expect("another name");
    small.edit("recipe.toml", "epochs = 12", "epochs = 8");
    small.train(&[]).succeeded();
    assert!(small.names("run").contains(&"step-000024".to_owned()), "the last step has a checkpoint");
    small.edit("recipe.toml", "epochs = 8", "max_steps = 36");
    let longer = small.train(&["--resume"]).succeeded();
    let said = "the recipe changed: no epochs (was 8), max_steps = 36; from here the learning rate follows its \
                schedule over 36 steps\n";
    assert!(longer.stderr.contains(said), "{}", longer.stderr);
    assert!(longer.stderr.contains("resuming from run/step-000024"), "{}", longer.stderr);
    assert!(small.bytes("run/final/heads.safetensors") == small.bytes("unbroken/final/heads.safetensors"));
    assert_eq!(numbers(&metrics(&small, "run")), numbers(&metrics(&small, "unbroken")));
    assert!(small.read("run/recipe.toml").contains("\nmax_steps = 36\n"));
    let again = small.train(&["--resume"]).succeeded();
    assert!(
        again.stderr.contains("already finished") && !again.stderr.contains("the recipe changed"),
        "{}",
        again.stderr
    );
}

#[test]
fn the_schedule_of_a_longer_run_spans_all_its_steps() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "epochs = 8", "epochs = 16");
    small.train(&["--resume"]).succeeded();
    let lines = metrics(&small, "run");
    assert_eq!(steps(&lines, "train"), (1..=48).collect::<Vec<_>>());
    let rate = |step: u64| {
        let line = lines.iter().find(|line| line["split"] == "train" && line["step"] == step).expect("a step");
        line["lr"].as_f64().expect("a rate")
    };
    let cosine =
        |step: f64, total: f64| 1e-2 * 0.5 * (1.0 + (std::f64::consts::PI * (step - 3.0) / (total - 3.0)).cos());
    for (step, total) in [(24, 24.0), (25, 48.0), (48, 48.0)] {
        assert!((rate(step) - cosine(step as f64 - 1.0, total)).abs() < 1e-12, "step {step}: {}", rate(step));
    }
}

/// As runs of earlier versions, which saved no checkpoint at their end.
#[test]
fn a_finished_run_without_its_last_checkpoint_keeps_its_heads() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    fs::remove_dir_all(small.path("run/step-000024")).expect("a checkpoint");
    let before = snapshot(&small.path("run"));
    small.edit("recipe.toml", "epochs = 8", "epochs = 9");
    let facts = ["train.output_dir run", "without a checkpoint of its last step", "heads.init_from = \"run/final\""];
    small.train(&["--resume"]).failed(1, &facts);
    assert_eq!(snapshot(&small.path("run")), before);
}

#[test]
fn the_split_of_a_batch_and_intervals_change_on_the_way() {
    let small = SmallRun::new();
    let expected = run_to_go_on(&small);
    small.write("expected.safetensors", &expected);
    let whole = metrics(&small, "run");
    small.edit("recipe.toml", "micro_batch_size = 1\ngradient_accumulation_steps = 2", "micro_batch_size = 2");
    small.edit("recipe.toml", "save_every = 3\neval_every = 6", "save_every = 4\nlog_every = 2\nkeep_checkpoints = 5");
    let resumed = small.train(&["--resume"]).succeeded();
    let said = "the recipe changed: no eval_every (was 6), gradient_accumulation_steps = 1 (was 2), keep_checkpoints = 5 (was 3), \
                log_every = 2 (was 1), micro_batch_size = 2 (was 1), save_every = 4 (was 3)\n";
    assert!(resumed.stderr.contains(said), "{}", resumed.stderr);
    let heads = |file: &str| WeightFiles::open_file(&small.path(file)).expect("heads");
    let [old, new] = ["expected.safetensors", "run/final/heads.safetensors"].map(heads);
    for name in old.names() {
        let [old, new] = [&old, &new]
            .map(|file| file.stored(name, &file.shape(name).expect("a shape"), tch::Device::Cpu).expect("a tensor"));
        assert!(new.allclose(&old, 1e-4, 1e-5, false), "{name}");
    }
    let lines = metrics(&small, "run");
    assert_eq!(steps(&lines, "train"), (1..=18).chain([20, 22, 24]).collect::<Vec<_>>());
    assert_eq!(steps(&lines, "validation"), [6, 12, 18, 24]);
    let last = |lines: &[Value]| lines.last().expect("lines")["loss"].as_f64().expect("a loss");
    assert!((last(&lines) - last(&whole)).abs() < 1e-5, "{} and {}", last(&lines), last(&whole));
    assert!(small.names("run").contains(&"step-000020".to_owned()));
}

#[test]
fn a_folder_that_was_moved_is_resumed_with_its_own_recipe() {
    let small = SmallRun::new();
    let expected = run_to_go_on(&small);
    fs::create_dir(small.path("old")).expect("a folder");
    fs::rename(small.path("run"), small.path("old/moved")).expect("another place");
    let resume = |recipe: &str| {
        let trainer = env!("CARGO_BIN_EXE_medusa-train");
        Ended::from(small.program(trainer, &[recipe, "--resume"]).output().expect("it starts"))
    };
    resume("old/moved/recipe.toml").succeeded();
    assert!(small.bytes("old/moved/final/heads.safetensors") == expected);
    assert!(!small.path("run").exists(), "the place where it was stays free");
    assert!(small.read("old/moved/recipe.toml").contains("\noutput_dir = \"old/moved\"\n"));
    fs::rename(small.path("old/moved"), small.path("again")).expect("another place");
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"again\"");
    let finished = resume("recipe.toml").succeeded();
    assert!(finished.stderr.contains("already finished"), "{}", finished.stderr);
}

/// As runs of 0.1.0, whose provenance.json has no recipe.
fn remove_kept_recipe(small: &SmallRun, run: &str) {
    let file = format!("{run}/provenance.json");
    let mut provenance: Value = serde_json::from_str(&small.read(&file)).expect("JSON");
    provenance.as_object_mut().and_then(|keys| keys.remove("recipe")).expect("the recipe");
    provenance.as_object_mut().and_then(|keys| keys.remove("checksum")).expect("a checksum");
    small.write(&file, provenance.to_string());
}

/// `medusa-train run/recipe.toml --resume`.
fn resume_by_its_own_recipe(small: &SmallRun) -> Ended {
    let trainer = env!("CARGO_BIN_EXE_medusa-train");
    small.program(trainer, &["run/recipe.toml", "--resume"]).output().expect("it starts").into()
}

#[test]
fn an_edit_of_a_runs_own_recipe_is_compared_with_what_it_was_started_with() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    small.edit("run/recipe.toml", "learning_rate = 0.01", "learning_rate = 0.02");
    let refused = resume_by_its_own_recipe(&small);
    refused.failed(1, &["says `optimizer.learning_rate = 0.01`, this one `optimizer.learning_rate = 0.02`"]);
    small.edit("run/recipe.toml", "learning_rate = 0.02", "learning_rate = 0.01");
    small.edit("run/recipe.toml", "epochs = 8", "epochs = 9");
    let longer = resume_by_its_own_recipe(&small).succeeded();
    assert!(longer.stderr.contains("the recipe changed: epochs = 9 (was 8); from here"), "{}", longer.stderr);
    assert_eq!(steps(&metrics(&small, "run"), "train").last(), Some(&27));
    let again = resume_by_its_own_recipe(&small).succeeded();
    assert!(again.stderr.contains("already finished") && !again.stderr.contains("changed"), "{}", again.stderr);
    // A run of 0.1.0 cannot tell what changed, only that it has fewer steps than its recipe asks for.
    remove_kept_recipe(&small, "run");
    small.edit("run/recipe.toml", "epochs = 9", "epochs = 10");
    resume_by_its_own_recipe(&small).succeeded();
    assert_eq!(steps(&metrics(&small, "run"), "train").last(), Some(&30));
}

/// As on another device, where the default dtype is another one.
#[test]
fn what_a_recipe_leaves_out_has_the_value_of_the_run_to_resume() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "dtype = \"float32\"", "dtype = \"bfloat16\"");
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "dtype = \"bfloat16\"\n", ""); // the weights are float32
    let again = small.train(&["--resume"]).succeeded();
    assert!(again.stderr.contains("already finished") && !again.stderr.contains("changed"), "{}", again.stderr);
    assert!(small.read("run/recipe.toml").contains("\ndtype = \"bfloat16\"\n"));
    small.edit("recipe.toml", "path = \"backbone\"", "path = \"backbone\"\ndtype = \"float32\"");
    let facts = ["says `backbone.dtype = \"bfloat16\"`, this one `backbone.dtype = \"float32\"`"];
    small.train(&["--resume"]).failed(1, &facts);
}

#[test]
fn a_run_that_lost_its_checkpoints_does_not_start_over() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    for name in small.names("run").iter().filter(|name| *name == "final" || name.starts_with("step-")) {
        fs::remove_dir_all(small.path(&format!("run/{name}"))).expect("a folder");
    }
    let before = snapshot(&small.path("run"));
    let facts = ["train.output_dir run", "a run of 24 steps", "none of its checkpoints (step-*) is left"];
    small.train(&["--resume"]).failed(1, &facts);
    assert_eq!(snapshot(&small.path("run")), before);
    // Killed before the first checkpoint.
    let first: Vec<String> = small.read("run/metrics.jsonl").lines().take(2).map(str::to_owned).collect();
    small.write("run/metrics.jsonl", first.join("\n") + "\n");
    let restarted = small.train(&["--resume"]).succeeded();
    assert!(restarted.stderr.contains("no checkpoint yet: starting from step 0"), "{}", restarted.stderr);
}

#[test]
fn moved_data_are_written_into_the_runs_recipe() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    fs::rename(small.path("rows.jsonl"), small.path("moved.jsonl")).expect("another name");
    small.edit("recipe.toml", "rows.jsonl", "moved.jsonl");
    small.train(&["--resume"]).succeeded();
    assert!(small.read("run/recipe.toml").contains("\ntrain = [\"moved.jsonl\"]\n"));
    resume_by_its_own_recipe(&small).succeeded();
}

#[test]
fn a_longer_run_keeps_the_heads_of_its_first_end_until_the_second() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    let first = small.bytes("run/final/heads.safetensors");
    small.edit("recipe.toml", "epochs = 8", "epochs = 100000");
    let mut child = small.trainer(&["--resume", "--quiet"]).spawn().expect("it starts");
    let log = small.path("run/metrics.jsonl");
    wait_for_training(&mut child, &log, modified(&log));
    child.kill().expect("a child");
    child.wait().expect("a child");
    assert!(small.bytes("run/final-000024/heads.safetensors") == first && !small.path("run/final").exists());
    small.medusa(&["inspect", "run/final-000024"]).succeeded();
    let steps = steps(&metrics(&small, "run"), "train").len().div_ceil(3) + 1;
    small.edit("recipe.toml", "epochs = 100000", &format!("epochs = {steps}"));
    small.train(&["--resume"]).succeeded();
    assert!(small.path("run/final").exists() && !small.path("run/final-000024").exists());
}

#[test]
fn a_run_begun_before_some_keys_existed_is_resumed_with_their_defaults() {
    let small = SmallRun::new();
    let expected = run_to_go_on(&small);
    let recipe = small.read("run/recipe.toml");
    let later = ["architecture", "dropout", "shared_w2", "targets", "on_unlabelled", "min_ratio"];
    for key in later {
        assert!(recipe.contains(&format!("\n{key} = ")), "{key} is not in\n{recipe}");
    }
    let is_old = |line: &&str| later.iter().all(|key| !line.starts_with(&format!("{key} = ")));
    let old = recipe.lines().filter(is_old).collect::<Vec<_>>().join("\n");
    small.write("run/recipe.toml", &old);
    remove_kept_recipe(&small, "run");
    small.edit("recipe.toml", "warmup_steps = 3", "warmup_steps = 3\nmin_ratio = 0.5");
    small
        .train(&["--resume"])
        .failed(1, &["holds another run", "`schedule.min_ratio = 0.0`, this one `schedule.min_ratio = 0.5`"]);
    small.edit("recipe.toml", "min_ratio = 0.5\n", "");
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == expected);
    assert_eq!(small.read("run/recipe.toml"), old, "the record of the run stays as it was");
}

#[test]
fn heads_to_start_from_are_those_of_the_first_start() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    fs::rename(small.path("run"), small.path("first")).expect("another name");
    small.edit("recipe.toml", "[heads]", "[heads]\ninit_from = \"first/final\"");
    small.train(&[]).succeeded();
    let heads = "first/final/heads.safetensors";
    let mut other = small.bytes(heads);
    *other.last_mut().expect("weights") ^= 1;
    small.write(heads, other);
    small.train(&["--resume"]).failed(1, &[heads, "was changed after it was written"]);
    small.forget_checksums("first/final");
    small.train(&["--resume"]).failed(1, &["train.output_dir run", "began with other heads", heads]);
}

#[test]
fn a_run_is_gone_on_with_by_what_its_files_hold_wherever_they_lie() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    fs::rename(small.path("rows.jsonl"), small.path("moved.jsonl")).expect("another name");
    small.edit("recipe.toml", "rows.jsonl", "moved.jsonl");
    let again = small.train(&["--resume"]).succeeded();
    assert!(again.stderr.contains("already finished"), "{}", again.stderr);
    let weights = small.bytes("backbone/model.safetensors");
    let mut other = weights.clone();
    *other.last_mut().expect("weights") ^= 1;
    small.write("backbone/model.safetensors", other);
    small.train(&["--resume"]).failed(1, &["another backbone: backbone/model.safetensors changed since it began"]);
    small.write("backbone/model.safetensors", weights);
    let config = small.read("backbone/config.json");
    small.write("backbone/config.json", config.replace("1e4", "2e4"));
    small.train(&["--resume"]).failed(1, &["another backbone: backbone/config.json changed since it began"]);
    small.write("backbone/config.json", config);
    let provenance = small.read("run/provenance.json");
    let tokens = serde_json::from_str::<Value>(&provenance).expect("JSON")["rows"][0]["tokens"].to_string();
    small.edit_trusted("run/provenance.json", &format!("\"tokens\": {tokens}"), "\"tokens\": 7");
    let facts =
        ["train.output_dir run", "other rows to train on", &format!("tokens was 7 when it began and is {tokens}")];
    small.train(&["--resume"]).failed(1, &facts);
}

#[test]
#[cfg(unix)]
fn two_processes_never_train_in_one_folder() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "epochs = 8", "epochs = 100000");
    let mut first = small.trainer(&["--quiet"]).spawn().expect("it starts");
    wait_for_training(&mut first, &small.path("run/metrics.jsonl"), None);
    for arguments in [&["--resume"][..], &[]] {
        small.train(arguments).failed(1, &["train.output_dir run is in use", "by another training process"]);
    }
    assert!(first.try_wait().expect("a child").is_none(), "the first one goes on");
    first.kill().expect("a child");
    first.wait().expect("a child");
    let mut third = small.trainer(&["--resume", "--quiet"]).spawn().expect("it starts");
    wait_for_training(&mut third, &small.path("run/metrics.jsonl"), modified(&small.path("run/metrics.jsonl")));
    assert!(third.try_wait().expect("a child").is_none(), "a process that was killed holds nothing");
    third.kill().expect("a child");
    third.wait().expect("a child");
}

/// Trains and deletes the last two checkpoints, so that the run resumes from step 18; returns the final heads.
fn run_to_go_on(small: &SmallRun) -> Vec<u8> {
    small.train(&[]).succeeded();
    let heads = small.bytes("run/final/heads.safetensors");
    for later in ["final", "step-000021", "step-000024"] {
        fs::remove_dir_all(small.path(&format!("run/{later}"))).expect("a folder to remove");
    }
    heads
}

#[test]
#[cfg(unix)]
fn a_file_that_cannot_be_written_ends_the_run_with_one_error_and_leaves_all_others_whole() {
    let small = SmallRun::new();
    let heads = run_to_go_on(&small);
    let checkpoint = snapshot(&small.path("run/step-000018"));
    let script = "trap '' XFSZ; ulimit -f \"$1\"; exec \"$2\" recipe.toml --resume";
    let trainer = env!("CARGO_BIN_EXE_medusa-train");
    for (kib, file) in [("4", "run/metrics.jsonl"), ("30", "step-000021.partial/optimizer.safetensors")] {
        let log = small.bytes("run/metrics.jsonl");
        let mut limited = small.program("bash", &["-c", script, "bash", kib, trainer]);
        Ended::from(limited.output().expect("bash")).failed(1, &[file, "File too large"]);
        assert_all_whole(&small, "run");
        assert_eq!(snapshot(&small.path("run/step-000018")), checkpoint);
        assert!(!small.path("run/step-000021").exists());
        assert!(file != "run/metrics.jsonl" || small.bytes(file) == log, "the log is replaced as a whole");
    }
    small.train(&["--resume"]).succeeded();
    assert!(small.bytes("run/final/heads.safetensors") == heads);
    assert_eq!(steps(&metrics(&small, "run"), "train"), (1..=24).collect::<Vec<_>>());
}

/// Trains on a disk of `$1` KiB, then again after enlarging it; writes the output and files of both runs next to it.
#[cfg(target_os = "linux")]
const ON_A_SMALL_DISK: &str = r#"
mkdir -p disk full grown
mount -t tmpfs -o size="$1"k none disk
"$2" recipe.toml >full/stdout 2>full/stderr; echo $? >full/status
cp -r disk/run full/run 2>/dev/null
mount -o remount,size=8m disk
"$2" recipe.toml --resume >grown/stdout 2>grown/stderr; echo $? >grown/status
cp -r disk/run grown/run
"#;

#[test]
#[cfg(target_os = "linux")]
#[ignore = "mounts a file system in a namespace of its own; where that is allowed, scripts/test runs it"]
fn a_full_disk_ends_the_run_with_one_error_and_no_half_checkpoint() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"disk/run\"");
    let expected = small.bytes("run/final/heads.safetensors");
    // The disk is full while the folder is created, in the first checkpoint, or in a later one.
    for kib in ["4", "60", "140", "220"] {
        let trainer = env!("CARGO_BIN_EXE_medusa-train");
        let unshare = ["--map-root-user", "--mount", "bash", "-c", ON_A_SMALL_DISK, "bash", kib, trainer];
        let said: Ended = small.program("unshare", &unshare).output().expect("unshare").into();
        assert_eq!(said.stderr, "", "the script itself");
        let full = ended(&small, "full");
        full.failed(1, &["disk/run", "No space left on device"]);
        if small.path("full/run").exists() {
            assert_all_whole(&small, "full/run");
        }
        ended(&small, "grown").succeeded();
        assert!(small.bytes("grown/run/final/heads.safetensors") == expected, "{kib} KiB");
        assert_all_whole(&small, "grown/run");
        assert_eq!(steps(&metrics(&small, "grown/run"), "train"), (1..=24).collect::<Vec<_>>());
        for folder in ["full", "grown", "disk"] {
            fs::remove_dir_all(small.path(folder)).expect("a folder to remove");
        }
    }
}

/// Trains with a cache of hidden states on a disk of `$1` KiB.
#[cfg(target_os = "linux")]
const WITH_A_SMALL_CACHE: &str = r#"
mkdir -p states
mount -t tmpfs -o size="$1"k none states
exec "$2" recipe.toml
"#;

#[test]
#[cfg(target_os = "linux")]
#[ignore = "mounts a file system in a namespace of its own; where that is allowed, scripts/test runs it"]
fn a_full_disk_turns_the_cache_of_hidden_states_off_and_the_run_goes_on() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "max_length = 40", "max_length = 40\npacking = false");
    small.train(&[]).succeeded();
    let expected = small.bytes("run/final/heads.safetensors");
    keep_hidden_states(&small);
    for kib in ["16", "4096"] {
        fs::remove_dir_all(small.path("run")).expect("a folder to remove");
        let trainer = env!("CARGO_BIN_EXE_medusa-train");
        let unshare = ["--map-root-user", "--mount", "bash", "-c", WITH_A_SMALL_CACHE, "bash", kib, trainer];
        let said = Ended::from(small.program("unshare", &unshare).output().expect("unshare")).succeeded();
        let is_reported = said.stderr.contains("warning: train.hidden_state_cache: states has 0.0 MiB free");
        assert_eq!(is_reported, kib == "16", "{}", said.stderr);
        assert!(small.bytes("run/final/heads.safetensors") == expected, "{kib} KiB");
    }
}

#[cfg(target_os = "linux")]
fn ended(small: &SmallRun, folder: &str) -> Ended {
    let read = |name: &str| small.read(&format!("{folder}/{name}"));
    Ended { status: read("status").trim().parse().ok(), stdout: read("stdout"), stderr: read("stderr") }
}

#[test]
fn a_loss_that_is_no_number_stops_the_run_before_the_update() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "learning_rate = 1e-2", "learning_rate = 1e30");
    small.edit("recipe.toml", "warmup_steps = 3", "warmup_steps = 0");
    small.edit("recipe.toml", "save_every = 3", "save_every = 1");
    small.train(&[]).failed(1, &["step 2: the loss is ", "the update was skipped", "rows [", "learning_rate"]);
    assert_eq!(small.names("run").iter().filter(|name| name.starts_with("step-")).count(), 1);
    assert_all_whole(&small, "run");
    assert!(!small.path("run/final").exists());
    assert_eq!(steps(&metrics(&small, "run"), "train"), [1]);
    // Training resumes from the checkpoint with the same result.
    small.train(&["--resume"]).failed(1, &["step 2: the loss is "]);
}

#[test]
fn a_loss_that_float16_cannot_hold_says_so() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "dtype = \"float32\"", "dtype = \"float16\"");
    change_weight(&small, "model.norm.weight", |norm| norm * 6e4); // finite; what it scales is not
    small.train(&[]).failed(1, &["answers to validation prompts", "backbone.dtype = \"bfloat16\"", "65504"]);
    small.edit("recipe.toml", "eval_every", "eval_answers = 0\neval_every");
    fs::remove_dir_all(small.path("run")).expect("the run");
    small.train(&[]).failed(1, &["step 1: the loss is NaN", "backbone.dtype = \"bfloat16\"", "65504"]);
}

/// Writes the backbone with one weight changed.
fn change_weight(small: &SmallRun, name: &str, change: impl FnOnce(&Tensor) -> Tensor) {
    let folder = small.path("backbone");
    let config = medusa::model::config::LlamaConfig::load(&folder).expect("a config");
    let backbone = medusa::model::llama::Llama::random(config, Kind::Float, tch::Device::Cpu, 7);
    let mut weights: Vec<(String, Tensor)> = backbone.weights().into_iter().map(|(n, t)| (n, t.copy())).collect();
    let (_, weight) = weights.iter_mut().find(|(other, _)| other == name).expect("a weight");
    *weight = change(weight);
    small.save_backbone(&weights.iter().map(|(name, tensor)| (name.clone(), tensor)).collect::<Vec<_>>());
}

#[test]
fn a_loss_that_is_no_number_stops_the_first_step() {
    let small = SmallRun::new();
    change_weight(&small, "model.norm.weight", |norm| norm * 3e38); // finite; what it scales is not
    small.train(&[]).failed(1, &["answers to validation prompts: its logits are NaN or infinite; check its weights"]);
    small.edit("recipe.toml", "eval_every", "eval_answers = 0\neval_every");
    fs::remove_dir_all(small.path("run")).expect("the run");
    small.train(&[]).failed(1, &["step 1: the loss is NaN", "rows [", "check the weights"]);
    assert_eq!(
        small.names("run"),
        ["metrics.jsonl", "prompts.hashes", "provenance.json", "recipe.toml", "tensorboard"]
    );
}

#[test]
fn a_validation_loss_that_is_no_number_stops_the_run_and_is_not_written_down() {
    let small = SmallRun::new();
    small.write("validation.jsonl", r#"{"input_ids": [1, 2, 3, 47, 5, 6, 7, 8]}"#);
    change_weight(&small, "model.embed_tokens.weight", |embedding| {
        let embedding = embedding.to_kind(Kind::Double);
        let _ = embedding.get(47).fill_(1e300); // infinite in float32; no training row has this token
        embedding
    });
    small.train(&[]).failed(1, &["after step 6 the loss on the validation rows is NaN"]);
    assert_eq!(steps(&metrics(&small, "run"), "validation"), [0_u64; 0]);
    small.train(&["--resume"]).failed(1, &["after step 6 the loss on the validation rows is NaN"]);
}

#[test]
fn a_step_without_a_target_for_a_head_trains_and_writes_null() {
    for (dtype, heads) in [
        ("float32", "architecture = \"medusa\""),
        ("float16", "architecture = \"medusa\""),
        ("float32", "architecture = \"hydra\"\ndropout = 0.1"),
        ("float32", "architecture = \"hydra++\"\n[loss]\ntargets = \"backbone\""),
    ] {
        step_without_a_target(dtype, heads);
    }
}

fn step_without_a_target(dtype: &str, heads: &str) {
    let small = SmallRun::new();
    small.edit("recipe.toml", "dtype = \"float32\"", &format!("dtype = {dtype:?}"));
    small.edit("recipe.toml", "medusa_num_layers = 1", &format!("medusa_num_layers = 1\n{heads}"));
    let (short, long) = (r#"{"input_ids": [1, 2, 3]}"#, r#"{"input_ids": [4, 5, 6, 7, 8]}"#);
    let silent = r#"{"input_ids": [4, 5, 6, 7], "labels": [-100, -100, -100, -100]}"#;
    small.write("rows.jsonl", [short, long, silent, short].join("\n"));
    small.write("validation.jsonl", [long, short].join("\n")); // each alone in its batch
    small.edit("recipe.toml", "max_length = 40", "max_length = 40\npacking = false\nshuffle = false");
    small.edit("recipe.toml", "gradient_accumulation_steps = 2", "gradient_accumulation_steps = 1");
    small.train(&[]).succeeded();
    for (at, line) in metrics(&small, "run").iter().filter(|line| line["split"] == "train").enumerate() {
        let present: Vec<bool> =
            line["head_losses"].as_array().expect("heads").iter().map(|loss| loss.is_number()).collect();
        assert_eq!(present, [[true, false], [true, true], [false, false], [true, false]][at % 4], "{line}");
        assert!(line["loss"].is_number() && line["grad_norm"].is_number(), "{line}");
        assert_eq!(line["head_top1"][1].is_null(), line["head_losses"][1].is_null(), "{line}");
    }
}

#[test]
fn a_head_that_never_has_a_target_is_refused() {
    let small = SmallRun::new();
    small.write("rows.jsonl", "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [4, 5, 6]}\n");
    small
        .train(&[])
        .failed(1, &["head 2 has no target in the training data", "the token 3 positions ahead", "fewer heads"]);
    assert!(!small.path("run").exists());
}

/// Makes the recipe keep hidden states in `states/`.
fn keep_hidden_states(small: &SmallRun) {
    small.edit("recipe.toml", "save_every = 3", "save_every = 3\nhidden_state_cache = \"states\"");
}

#[test]
fn kept_hidden_states_train_the_same_heads_and_serve_the_next_run() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "max_length = 40", "max_length = 40\npacking = false"); // else other neighbours change the last bits
    small.train(&[]).succeeded();
    let expected = small.bytes("run/final/heads.safetensors");
    fs::remove_dir_all(small.path("run")).expect("a folder to remove");
    keep_hidden_states(&small);

    let plan: Value = serde_json::from_str(&small.train(&["--check", "--json"]).succeeded().stdout).expect("JSON");
    assert!(!small.path("states").exists(), "--check writes nothing");
    let first = small.train(&[]).succeeded();
    let names = small.names("states");
    let line = |name: &String| format!("hidden states of 0 of 12 rows are cached in states/{name}");
    let name = names.iter().find(|name| first.stderr.contains(&line(name)));
    let file = format!("states/{}", name.unwrap_or_else(|| panic!("{names:?}: {}", first.stderr)));
    let bytes: usize = names.iter().map(|name| small.bytes(&format!("states/{name}")).len()).sum();
    assert_eq!(
        (names.len(), &plan["hidden_state_cache_bytes"]),
        (2, &Value::from(bytes)),
        "training and validation rows"
    );
    let evaluations = |small: &SmallRun| {
        let mut lines = metrics(small, "run");
        lines.retain(|line| line["split"] == "validation");
        lines
    };
    let evaluated = evaluations(&small);
    assert!(small.bytes("run/final/heads.safetensors") == expected, "with the states kept the heads differ");

    let kept = small.bytes(&file);
    fs::remove_dir_all(small.path("run")).expect("a folder to remove");
    let second = small.train(&[]).succeeded();
    assert!(second.stderr.contains("hidden states of 12 of 12 rows"), "{}", second.stderr);
    assert!(small.bytes("run/final/heads.safetensors") == expected, "with the states of another run the heads differ");
    assert_eq!(evaluations(&small), evaluated);
    assert!(small.bytes(&file) == kept);
    small.write(&file, &kept[1..]);
    fs::remove_dir_all(small.path("run")).expect("a folder to remove");
    small.train(&[]).failed(1, &["train.hidden_state_cache", &file, "expected", "remove it"]);
    assert!(!small.path("run").exists(), "a run that could not begin leaves nothing behind");
}

#[test]
fn validation_rows_that_are_the_training_rows_share_their_hidden_states() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "max_length = 40", "max_length = 40\npacking = false");
    small.edit("recipe.toml", "validation.jsonl", "rows.jsonl");
    small.train(&[]).succeeded();
    let heads = || small.bytes("run/final/heads.safetensors");
    let (expected, losses) = (heads(), metrics(&small, "run"));
    keep_hidden_states(&small);
    for found in ["0 of 12 rows", "12 of 12 rows"] {
        fs::remove_dir_all(small.path("run")).expect("a folder to remove");
        let ended = small.train(&[]).succeeded();
        assert!(ended.stderr.contains(&format!("hidden states of {found}")), "{}", ended.stderr);
        assert_eq!(small.names("states").len(), 1);
        assert!(heads() == expected, "{found}");
        assert_eq!(numbers(&metrics(&small, "run")), numbers(&losses), "{found}");
    }
    small.edit("recipe.toml", "epochs = 8", "epochs = 9");
    let resumed = small.train(&["--resume"]).succeeded();
    assert!(resumed.stderr.contains("hidden states of 12 of 12 rows"), "{}", resumed.stderr);
}

/// In Medusa-1 with a cache of the hidden states, whose file also has the teacher's positions.
#[test]
fn soft_targets_on_unlabelled_positions_train_the_same_heads_from_kept_hidden_states() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "max_length = 40", "max_length = 40\npacking = false");
    small.edit("recipe.toml", "[data]", "[loss]\ntargets = \"backbone\"\non_unlabelled = true\n[data]");
    small.train(&[]).succeeded();
    let expected = small.bytes("run/final/heads.safetensors");
    keep_hidden_states(&small);
    for _ in 0..2 {
        fs::remove_dir_all(small.path("run")).expect("a folder to remove");
        small.train(&[]).succeeded();
        assert!(small.bytes("run/final/heads.safetensors") == expected, "with the states kept the heads differ");
    }
}

#[test]
fn heads_of_low_rank_are_trained_inspected_and_exported_at_full_rank() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[stage.medusa1]", "w2_rank = 3\n[stage.medusa1]");
    small.train(&[]).succeeded();
    let printed = small.medusa(&["inspect", "run/final"]).succeeded();
    assert!(printed.stdout.contains("by rank 3"), "{}", printed.stdout);
    small.medusa(&["export", "--heads", "run/final", "--format", "tgi", "--out", "out"]).succeeded();
    let [own, written] = ["run/final", "out"].map(|folder| HeadsFile::open(&small.path(folder)).expect("heads"));
    for head in 0..2 {
        let of =
            |file: &HeadsFile, part| file.tensor(HeadTensor { head, layer: 1, part }, Kind::Float).expect("a tensor");
        let product_vh = of(&own, HeadPart::W2).matmul(&of(&own, HeadPart::W2Down));
        assert!(of(&written, HeadPart::W2).allclose(&product_vh, 1e-6, 1e-7, false), "head {head}");
    }
    let exported = small.medusa(&["inspect", "out"]).succeeded();
    assert!(!exported.stdout.contains("rank") && exported.stdout.contains("hidden size"), "{}", exported.stdout);
    small.edit("recipe.toml", "w2_rank = 3", "w2_rank = 3\nshared_lm_head = true");
    small.train(&["--check"]).failed(2, &["heads.w2_rank = 3", "heads have no W2"]);
    small.edit("recipe.toml", "w2_rank = 3\nshared_lm_head = true", "w2_rank = 4096");
    small.train(&["--check"]).failed(2, &["heads.w2_rank = 4096: expected less than", "hidden size"]);
}

#[test]
fn heads_with_one_w2_are_trained_resumed_inspected_and_exported() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[stage.medusa1]", "shared_w2 = true\n[stage.medusa1]");
    small.train(&[]).succeeded();
    let printed = small.medusa(&["inspect", "run/final"]).succeeded();
    assert!(printed.stdout.contains("one W2 for all heads"), "{}", printed.stdout);
    let names = |file: &str| WeightFiles::open_file(&small.path(file)).expect("heads").names().len();
    assert_eq!(names("run/final/heads.safetensors"), 2 * 2 + 1, "W1 and b1 of each head, and one W2");
    for format in ["tgi", "vllm"] {
        small.medusa(&["export", "--heads", "run/final", "--format", format, "--out", format]).succeeded();
    }
    let copied = small.medusa(&["inspect", "tgi"]).succeeded();
    assert!(!copied.stdout.contains("one W2"), "{}", copied.stdout);
    let shared = small.medusa(&["inspect", "vllm"]).succeeded();
    assert!(shared.stdout.contains("one W2 for all heads"), "{}", shared.stdout);
    assert_eq!(names("vllm/model.safetensors"), 2 * 2 + 1);
    let whole = small.bytes("run/final/heads.safetensors");
    for later in ["final", "step-000021", "step-000024"] {
        fs::remove_dir_all(small.path(&format!("run/{later}"))).expect("a folder to remove");
    }
    small.train(&["--resume"]).succeeded();
    assert!(whole == small.bytes("run/final/heads.safetensors"), "a resumed run has other heads");
    small.edit("recipe.toml", "shared_w2 = true", "shared_w2 = true\nshared_lm_head = true");
    small.train(&["--check"]).failed(2, &["heads.shared_w2 = true", "heads have no W2"]);
}

/// A list of token ids of each row of a file.
fn token_rows(small: &SmallRun, name: &str, key: &str) -> Vec<Vec<i64>> {
    let ids = |row: &str| serde_json::from_str::<Value>(row).expect("a row")[key].clone();
    small.read(name).lines().map(|row| serde_json::from_value(ids(row)).expect("token ids")).collect()
}

/// The 24 tokens of a file's map.
fn token_map(small: &SmallRun, file: &str) -> Vec<i64> {
    let files = WeightFiles::open_file(&small.path(file)).expect("heads");
    let tokens = files.mapped_as("token_map", &[24], Kind::Int64).expect("a token map");
    Vec::try_from(tokens).expect("int64")
}

#[test]
fn a_truncated_vocabulary_is_counted_kept_resumed_and_exported_to_vllm() {
    let small = SmallRun::new();
    small.edit(
        "recipe.toml",
        "[stage.medusa1]",
        "draft_vocab_size = 24\nshared_w2 = true\nw2_rank = 5\n[stage.medusa1]",
    );
    let printed = small.train(&["--check"]).succeeded();
    assert!(printed.stdout.contains("24 of 48 tokens, "), "{}", printed.stdout);
    small.train(&[]).succeeded();
    let mut counts = vec![0_usize; 48];
    let labels = token_rows(&small, "rows.jsonl", "labels").concat();
    labels.iter().filter(|&&label| label >= 0).for_each(|&label| counts[label as usize] += 1);
    let mut expected: Vec<usize> = (0..48).collect();
    expected.sort_by_key(|&token| (std::cmp::Reverse(counts[token]), token));
    expected.truncate(24);
    expected.sort_unstable();
    let map = |file: &str| token_map(&small, file);
    assert_eq!(map("run/final/heads.safetensors"), expected.iter().map(|&token| token as i64).collect::<Vec<_>>());
    let inspected = small.medusa(&["inspect", "run/final"]).succeeded();
    assert!(inspected.stdout.contains("truncated vocabulary 24 by rank 5, one W2"), "{}", inspected.stdout);
    // Decoding and calibration.
    let own = ["--backbone", "backbone", "--heads", "run/final"];
    small.medusa(&[&["calibrate"][..], &own, &["--data", "validation.jsonl", "--out", "c.json"]].concat()).succeeded();
    small
        .medusa(
            &[&["calibrate"][..], &own, &["--data", "validation.jsonl", "--top-k", "25", "--out", "d.json"]].concat(),
        )
        .failed(1, &["top-k is 25; expected 1 to 24"]);
    // A resumed run keeps the map of its checkpoint.
    let whole = small.bytes("run/final/heads.safetensors");
    for later in ["final", "step-000021", "step-000024"] {
        fs::remove_dir_all(small.path(&format!("run/{later}"))).expect("a folder to remove");
    }
    small.train(&["--resume"]).succeeded();
    assert!(whole == small.bytes("run/final/heads.safetensors"), "a resumed run has other heads");
    truncated_heads_go_to_vllm(&small);
    heads_to_start_from_keep_their_tokens(&small);
}

fn truncated_heads_go_to_vllm(small: &SmallRun) {
    let map = |file: &str| token_map(small, file);
    let export = |format: &str| small.medusa(&["export", "--heads", "run/final", "--format", format, "--out", format]);
    for format in ["heads", "tgi", "tensorrt-llm", "merged", "hydra"] {
        export(format).failed(2, &["a truncated vocabulary of 24 tokens", "use --format vllm"]);
    }
    export("vllm").succeeded();
    assert_eq!(map("vllm/model.safetensors"), map("run/final/heads.safetensors"));
    let config: Value = serde_json::from_str(&small.read("vllm/config.json")).expect("JSON");
    assert_eq!((&config["vocab_size"], &config["truncated_vocab_size"]), (&48.into(), &24.into()));
    assert!(
        small.read("vllm/README.md").contains("vocabulary 24 of 48 tokens, the most frequent of the training data")
    );
    let found = small.medusa(&["inspect", "vllm"]).succeeded();
    assert!(found.stdout.contains("truncated vocabulary 24, one W2"), "{}", found.stdout);
}

/// Training from heads keeps their map, though other tokens are frequent now.
fn heads_to_start_from_keep_their_tokens(small: &SmallRun) {
    let map = |file: &str| token_map(small, file);
    let reversed = token_rows(small, "rows.jsonl", "input_ids")
        .into_iter()
        .map(|row| row.iter().map(|token| 47 - token).collect());
    let reversed = reversed.map(|row: Vec<i64>| format!("{{\"input_ids\": {row:?}}}\n")).collect::<String>();
    small.write("rows.jsonl", reversed);
    small.edit("recipe.toml", "w2_rank = 5", "w2_rank = 5\ninit_from = \"run/final\"");
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"again\"");
    small.train(&[]).succeeded();
    assert_eq!(map("again/final/heads.safetensors"), map("run/final/heads.safetensors"));
    small.edit("recipe.toml", "draft_vocab_size = 24", "draft_vocab_size = 48");
    small
        .train(&["--check"])
        .failed(2, &["heads.draft_vocab_size = 48: expected less than 48, the backbone's vocabulary"]);
    small.edit("recipe.toml", "draft_vocab_size = 48", "draft_vocab_size = 25");
    small.train(&["--check"]).failed(2, &["one output layer of 25 tokens and rank 5 for all heads", "of 24 tokens"]);
}

/// With one token to guess, every accuracy is the frequency of that token among the labels, also in the calibration.
#[test]
fn labels_outside_of_a_truncated_vocabulary_are_misses() {
    for targets in ["", "[loss]\ntargets = \"backbone\"\n"] {
        let small = SmallRun::new();
        let one = format!("draft_vocab_size = 1\n[stage.medusa1]\n{targets}");
        small.edit("recipe.toml", "[stage.medusa1]\n", &one);
        let token = |row: i64, t: i64| if (t + row) % 4 == 0 { 9 } else { (t * 7 + row * 5) % 40 };
        let row = |row: i64| format!("{{\"input_ids\": {:?}}}\n", (0..30).map(|t| token(row, t)).collect::<Vec<_>>());
        small.write("rows.jsonl", (0..12).map(row).collect::<String>());
        small.write("validation.jsonl", (12..15).map(row).collect::<String>());
        small.train(&[]).succeeded();
        let files = WeightFiles::open_file(&small.path("run/final/heads.safetensors")).expect("heads");
        let token = files.mapped_as("token_map", &[1], Kind::Int64).expect("a token map").int64_value(&[0]);
        let rows = token_rows(&small, "validation.jsonl", "input_ids");
        let labels = |head: usize| rows.iter().flat_map(move |row| &row[head + 2..]);
        let hits = |head: usize| labels(head).filter(|&&label| label == token).count();
        let expected: Vec<f64> = (0..2).map(|head| hits(head) as f64 / labels(head).count() as f64).collect();
        assert!(expected.iter().all(|&fraction| fraction > 0.0 && fraction < 0.5), "{expected:?} tests nothing");
        let lines = metrics(&small, "run");
        let last = lines.iter().rfind(|line| line["split"] == "validation").expect("an evaluation");
        for key in ["head_top1", "head_top5"] {
            assert_eq!(last[key], serde_json::json!(expected), "{key}, {targets}");
        }
        let own = ["--backbone", "backbone", "--heads", "run/final", "--data", "validation.jsonl", "--top-k", "1"];
        small.medusa(&[&["calibrate"][..], &own, &["--out", "c.json"]].concat()).succeeded();
        let calibration: Value = serde_json::from_str(&small.read("c.json")).expect("JSON");
        for head in 0..2 {
            assert_eq!(calibration["heads"][head]["counts"], serde_json::json!([hits(head)]));
            assert_eq!(calibration["heads"][head]["total"], labels(head).count());
        }
    }
}

#[test]
fn a_resume_that_is_refused_makes_no_hidden_states() {
    let small = SmallRun::new();
    keep_hidden_states(&small);
    small.train(&[]).succeeded();
    fs::remove_dir_all(small.path("run/final")).expect("a folder to remove");
    let kept = small.names("states");
    small.edit("recipe.toml", "max_length = 40", "max_length = 39");
    small.train(&["--resume"]).failed(1, &["holds another run", "max_length = 40", "max_length = 39"]);
    assert_eq!(small.names("states"), kept);
}

#[test]
fn kept_hidden_states_survive_being_killed() {
    for (batches, shuffle) in
        [("micro_batch_size = 2\ngradient_accumulation_steps = 1", "true"), ("micro_batch_size = 2", "false")]
    {
        let small = SmallRun::new();
        small.edit("recipe.toml", "micro_batch_size = 1\ngradient_accumulation_steps = 2", batches);
        small.edit("recipe.toml", "max_length = 40", &format!("max_length = 40\nshuffle = {shuffle}"));
        keep_hidden_states(&small);
        small.train(&[]).succeeded();
        let expected = small.bytes("run/final/heads.safetensors");
        for folder in ["run", "states"] {
            fs::remove_dir_all(small.path(folder)).expect("a folder to remove");
        }
        kill_at_random_moments(&small, 4, &expected);
        small.train(&["--resume"]).succeeded();
        assert!(small.bytes("run/final/heads.safetensors") == expected, "shuffle = {shuffle}");
        assert_eq!(small.names("states").len(), 2, "training and validation rows");
    }
}

#[test]
#[cfg(unix)]
fn hidden_states_that_find_no_room_say_how_much_they_need() {
    let small = SmallRun::new();
    keep_hidden_states(&small);
    let script = "trap '' XFSZ; ulimit -f 8; exec \"$1\" recipe.toml";
    let mut limited = small.program("bash", &["-c", script, "bash", env!("CARGO_BIN_EXE_medusa-train")]);
    let facts =
        ["warning: train.hidden_state_cache", "states/", "File too large", "the cache needs", "free some space"];
    let ended = Ended::from(limited.output().expect("bash"));
    let warning = ended.stderr.lines().find(|line| line.contains(facts[0])).unwrap_or_default();
    assert!(facts.iter().all(|fact| warning.contains(fact)), "{}", ended.stderr);
    assert_eq!(small.names("states"), [""; 0]);
    // The run goes on, up to a checkpoint that the limit does not let it write either.
    assert!(ended.stderr.contains("step-000003.partial/heads.safetensors: File too large"), "{}", ended.stderr);
    small.train(&["--resume"]).succeeded();
}
