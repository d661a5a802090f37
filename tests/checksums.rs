//! Promise: one changed byte of a file that a later command trusts is noticed, and the error says which file, what was expected and what to do.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use medusa::draft::heads::import::HeadsFile;
use medusa::files::checksums::CHECKSUMS;
use medusa::files::{Claim, NewFolder, write_synced};
use medusa::formats::tree::DYNAMIC_TOP_K;
use medusa::tree::guess_tree::GuessTree;
use serde_json::{Deserializer, Value};

use crate::decoding::World;
use crate::distill;
use crate::small_run::SmallRun;

/// All files below a folder, sorted.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let mut files: Vec<PathBuf> =
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect();
    files.sort();
    files
}

/// Changes a bit of the byte in the middle of a file; done twice, the file is as before.
fn change(path: &Path) {
    let mut bytes = fs::read(path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    write_synced(path, |out| out.write_all(&bytes)).expect("a file that can be written");
}

/// What `inspect --verify --json` says of the files of a folder that are not right: name and state.
fn not_right(root: &Path, folder: &str) -> Vec<(String, String)> {
    let verify = ["inspect", "--verify", folder, "--json"];
    let output = Command::new(env!("CARGO_BIN_EXE_medusa")).args(verify).current_dir(root).output().expect("it starts");
    let lines: Vec<Value> =
        Deserializer::from_slice(&output.stdout).into_iter::<Value>().map(|line| line.expect("JSON")).collect();
    let text = |line: &Value, key: &str| line[key].as_str().expect("a text").to_owned();
    let all: Vec<_> = lines.iter().map(|line| (text(line, "file"), text(line, "state"))).collect();
    let is_damaged = all.iter().any(|(_, state)| state == "damaged");
    assert_eq!(output.status.code(), Some(i32::from(is_damaged)), "{}", String::from_utf8_lossy(&output.stderr));
    all.into_iter().filter(|(_, state)| state != "ok").collect()
}

/// Changes one file after the other; every change is noticed but those of the files `uncovered`, which are told to be so.
fn every_changed_file_is_noticed(root: &Path, folder: &str, uncovered: &[&str]) {
    let before = not_right(root, folder);
    let unrecorded: Vec<String> = uncovered.iter().map(|name| format!("{folder}/{name}")).collect();
    assert_eq!(before.iter().map(|(file, _)| file.clone()).collect::<Vec<_>>(), unrecorded);
    assert!(before.iter().all(|(_, state)| state == "unrecorded"), "{before:?}");
    for path in files(&root.join(folder)).into_iter().filter(|path| !is_empty(path)) {
        let name = path.strip_prefix(root).expect("a file of the folder").display().to_string();
        change(&path);
        let damaged = not_right(root, folder).iter().any(|(_, state)| state == "damaged");
        assert_eq!(damaged, !unrecorded.contains(&name), "{name}");
        change(&path);
    }
    assert_eq!(not_right(root, folder), before);
}

fn is_empty(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.len() == 0)
}

fn finished_run() -> SmallRun {
    let run = SmallRun::new();
    run.edit("recipe.toml", "eval_every = 6", "eval_every = 6\nkeep_best = \"loss\"\nkeep_checkpoints = 2");
    run.train(&[]).succeeded();
    run
}

#[test]
fn every_file_of_a_run_and_of_an_export_is_verified_but_what_grows_and_what_people_edit() {
    let run = finished_run();
    let measure = ["calibrate", "--backbone", "backbone", "--heads", "run", "--data", "validation.jsonl"];
    run.medusa(&[&measure[..], &["--out", "run/calibration.json"]].concat()).succeeded();
    run.medusa(&["tree", "--calibration", "run/calibration.json", "--nodes", "3", "--out", "run/tree.json"])
        .succeeded();
    every_changed_file_is_noticed(run.root(), "run", &["metrics.jsonl"]);
    run.medusa(&["export", "--heads", "run", "--format", "vllm", "--backbone", "backbone", "--out", "out"]).succeeded();
    every_changed_file_is_noticed(run.root(), "out", &["README.md"]);
    run.medusa(&[
        "calibrate",
        "--backbone",
        "backbone",
        "--heads",
        "run/best",
        "--data",
        "rows.jsonl",
        "--out",
        "other.json",
    ])
    .succeeded();
    fs::rename(run.path("other.json"), run.path("run/calibration.json")).expect("a file");
    let tree = not_right(run.root(), "run");
    assert!(tree.iter().any(|(file, state)| file.contains("tree.json → ") && state == "damaged"), "{tree:?}");
}

/// What README.md's first command decodes with.
#[test]
fn the_heads_that_come_with_the_program_are_whole_and_small() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/smollm2");
    let (heads, tree) = (HeadsFile::open(&folder).expect("heads"), GuessTree::load(&folder.join("tree.json")));
    let (shape, size) = (heads.shape(), heads.path().metadata().expect("a file").len());
    assert_eq!((shape.medusa_num_heads, shape.reads().tokens, shape.parameters()), (2, true, 4_610_304));
    assert!(size < 10_000_000, "{size}");
    tree.expect("a tree").0.check_fits(shape.medusa_num_heads, DYNAMIC_TOP_K).expect("a tree for these heads");
    let unrecorded = not_right(folder.parent().expect("data/"), "smollm2");
    assert_eq!(unrecorded, [("smollm2/README.md".to_owned(), "unrecorded".to_owned())]);
}

#[test]
fn resuming_goes_back_to_the_newest_whole_checkpoint_with_a_warning_and_the_same_end() {
    let run = finished_run();
    let heads = run.bytes("run/final/heads.safetensors");
    for file in ["optimizer.safetensors", "state.json"] {
        fs::remove_dir_all(run.path("run/final")).expect("a finished run");
        change(&run.path(&format!("run/step-000024/{file}")));
        let resumed = run.train(&["--resume"]).succeeded();
        let warning = format!("run/step-000024/{file} was changed after it was written: expected sha256 ");
        assert!(
            resumed.stderr.contains(&warning) && resumed.stderr.contains("resuming from run/step-000021"),
            "{}",
            resumed.stderr
        );
        assert!(resumed.stderr.contains("its folder is now run/step-000024.damaged"), "{}", resumed.stderr);
        assert_eq!(run.bytes("run/final/heads.safetensors"), heads);
    }
    fs::remove_dir_all(run.path("run/final")).expect("a finished run");
    change(&run.path("run/step-000024/heads.safetensors"));
    change(&run.path("run/step-000021/state.json"));
    let facts =
        ["no checkpoint of run is whole", "run/step-000024/heads.safetensors was changed", "expected sha256", "got"];
    run.train(&["--resume"]).failed(1, &facts);
    assert_eq!(run.names("run").iter().filter(|name| name.starts_with("step-0")).count(), 3, "all stays as it was");
    fs::remove_file(run.path("run/step-000024").join(CHECKSUMS)).expect("a list");
    change(&run.path("run/step-000024/heads.safetensors"));
    let resumed = run.train(&["--resume"]).succeeded();
    assert!(resumed.stderr.contains("which has no checksums (written by an earlier version)"), "{}", resumed.stderr);
    assert_eq!(run.bytes("run/final/heads.safetensors"), heads);
}

#[test]
fn changed_heads_and_what_was_measured_of_them_are_refused_by_every_command_that_takes_them() {
    let run = finished_run();
    let calibrate =
        ["calibrate", "--backbone", "backbone", "--heads", "run", "--data", "validation.jsonl", "--out", "c.json"];
    run.medusa(&calibrate).succeeded();
    change(&run.path("c.json"));
    run.medusa(&["tree", "--calibration", "c.json", "--nodes", "3"])
        .failed(1, &["c.json", "was changed after it was written", "remove its key"]);
    change(&run.path("run/final/heads.safetensors"));
    let facts = ["run/final/heads.safetensors was changed after it was written: expected sha256", "put back a copy"];
    run.medusa(&calibrate).failed(1, &facts);
    run.medusa(&["export", "--heads", "run", "--format", "vllm", "--out", "e"]).failed(1, &facts);
    run.write("p.jsonl", "{\"prompt_ids\": [1, 2, 3]}\n");
    run.medusa(&["generate", "--backbone", "backbone", "--heads", "run", "--prompts", "p.jsonl"]).failed(1, &facts);
    run.train(&["--resume"]).failed(1, &facts);
}

#[test]
fn a_calibration_of_other_heads_is_not_shown_as_the_runs() {
    let run = finished_run();
    let calibrate = ["calibrate", "--backbone", "backbone", "--heads", "run", "--data", "validation.jsonl"];
    run.medusa(&[&calibrate[..], &["--out", "run/calibration.json"]].concat()).succeeded();
    let words = "was measured with other heads than this run's";
    let own = run.medusa(&["inspect", "run"]).succeeded().stdout;
    assert!(!own.contains(words), "{own}");
    let calibration: Value = serde_json::from_str(&run.read("run/calibration.json")).expect("JSON");
    let heads = calibration["heads_sha256"].as_str().expect("a hash");
    run.edit_trusted("run/calibration.json", heads, &"0".repeat(64));
    let foreign = run.medusa(&["inspect", "run"]).succeeded().stdout;
    assert!(foreign.contains(words), "{foreign}");
}

const FLAGS: [&str; 4] = ["--max-new-tokens", "10", "--batch-size", "8"];

/// A shard and a journal, as a kill leaves them.
fn killed_distillation() -> World {
    let world = distill::world();
    world.lines("p.jsonl", &distill::prompts(640));
    let (was_running, ..) = distill::end_after(&world, &FLAGS, 270, |child| child.kill().expect("a child"));
    assert!(was_running && world.path("out/shard-00000.parquet").exists());
    world
}

#[test]
fn every_file_of_a_distilled_folder_is_verified_and_a_changed_shard_is_neither_resumed_nor_trained_on() {
    let world = killed_distillation();
    let left = [".distill.json.partial"]; // by the killed process
    every_changed_file_is_noticed(&world.path(""), "out", &left);
    let shard = world.path("out/shard-00000.parquet");
    change(&shard);
    let facts = ["out/shard-00000.parquet was changed after it was written: expected sha256", "--resume makes it anew"];
    let resume = [&distill::DISTILL[..], &FLAGS, &["--resume"]].concat();
    let error = world.complaint(&resume, 1);
    assert!(facts.iter().all(|fact| error.contains(fact)), "{error}");
    let error = world.complaint(&["data", "out/shard-00000.parquet", "--backbone", "b"], 1);
    assert!(error.contains(facts[0]), "{error}");
    fs::remove_file(&shard).expect("a shard");
    distill::distill(&world, "out", &[&FLAGS[..], &["--resume"]].concat());
    distill::distill(&world, "unbroken", &FLAGS);
    assert!(
        distill::contents(&world.path("out")) == distill::contents(&world.path("unbroken")),
        "the same files, byte by byte"
    );
    assert_eq!(not_right(&world.path(""), "out"), []);
    for shard in ["shard-00001.parquet", "shard-00000.parquet"] {
        fs::remove_file(world.path("out").join(shard)).expect("a shard");
        let missing = (format!("out/{shard}"), "damaged".to_owned());
        assert!(not_right(&world.path(""), "out").contains(&missing), "{shard}");
    }
}

#[test]
#[cfg(target_os = "linux")] // which tells who holds a lock
fn a_share_of_a_folder_has_one_process_and_what_a_killed_one_held_is_taken_over() {
    let world = killed_distillation();
    let resume = [&FLAGS[..], &["--resume"]].concat();
    let mut holder = distill::start(&world, &resume);
    let partial = world.path("out/.distill.json.partial");
    while medusa::files::holder(&partial) != Some(holder.id()) {
        assert_eq!(holder.try_wait().expect("a child"), None, "it runs");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let stopped = |signal: &str| Command::new("kill").args([signal, &holder.id().to_string()]).status().expect("kill");
    assert!(stopped("-STOP").success());
    let facts =
        ["out: share 1/1 is in use by another process", &format!("(process {})", holder.id()), "choose another --out"];
    for arguments in [&resume[..], &FLAGS] {
        let error = world.complaint(&[&distill::DISTILL[..], arguments].concat(), 1);
        assert!(facts.iter().all(|fact| error.contains(fact)), "{error}");
    }
    holder.kill().expect("a child");
    holder.wait().expect("a child");
    distill::distill(&world, "out", &resume);
    assert_eq!(distill::rows(&world.path("out")).len(), 640);
    assert!(!partial.exists());
}

#[test]
#[cfg(target_os = "linux")] // which tells who holds a lock
fn an_output_that_another_process_writes_is_refused_before_the_work() {
    let run = finished_run();
    let calibrate =
        ["calibrate", "--backbone", "backbone", "--heads", "run", "--data", "validation.jsonl", "--out", "c.json"];
    let me = format!("(process {})", std::process::id());
    let claim = Claim::of(&run.path("c.json")).expect("a new file");
    run.medusa(&calibrate).failed(1, &["--out c.json is in use by another process", &me, "choose another file"]);
    drop(claim);
    run.medusa(&calibrate).succeeded();
    let claim = NewFolder::claim(&run.path("e")).expect("a new folder");
    let export = ["export", "--heads", "run", "--format", "vllm", "--backbone", "backbone", "--out", "e"];
    run.medusa(&export).failed(1, &["e is being written by another process", &me]);
    drop(claim);
    run.medusa(&export).succeeded();
}
