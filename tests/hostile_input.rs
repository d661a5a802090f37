//! Promise: what stands in the way of a command (a pipe where a file is expected, a name with a terminal's commands in it, a limit of the
//! system, a folder that goes, a terminal that closes) ends it at once with one error that says so, and nothing is lost or left half-written.
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use medusa::draft::heads::{Heads, HeadsArchitecture, HeadsShape};
use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use tch::{Device, Kind};

use super::small_run::{Ended, SmallRun};

/// A run with all inputs of decoding.
fn with_everything() -> SmallRun {
    let small = SmallRun::new();
    small.write_tokenizer(48);
    fs::create_dir(small.path("heads")).expect("a folder");
    let shape = HeadsShape {
        architecture: HeadsArchitecture::Medusa,
        medusa_num_heads: 2,
        medusa_num_layers: 1,
        hidden_size: 32,
        vocab_size: 48,
        ..HeadsShape::default()
    };
    Heads::random(shape, Kind::Float, Device::Cpu, 1).save(&small.path("heads")).expect("heads");
    small.write("tree.json", "[[0], [1], [0, 0]]");
    small.write("prompts.jsonl", r#"{"prompt_ids": [1, 2, 3]}"#);
    small
}

fn pipe(path: &Path) {
    let _ = fs::remove_file(path);
    mknodat(CWD, path, FileType::Fifo, 0o600.into(), 0).expect("a pipe");
}

/// Its end, or a panic after a minute: then it waits for the other end of a pipe.
fn ended(command: &mut Command) -> Ended {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let began = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if began.elapsed() > Duration::from_secs(60) {
            child.kill().expect("a child");
            panic!("it still runs: {command:?}");
        }
        sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output").into()
}

fn medusa(small: &SmallRun, arguments: &str) -> Ended {
    let arguments: Vec<&str> = arguments.split(' ').collect();
    ended(&mut small.program(env!("CARGO_BIN_EXE_medusa"), &arguments))
}

#[test]
fn a_pipe_or_device_in_the_place_of_a_file_is_refused_at_once() {
    const GENERATE: &str =
        "generate --backbone backbone --heads heads --tree tree.json --prompts prompts.jsonl --max-new-tokens 2";
    let mut wrong = vec![];
    for (name, command, status) in [
        ("recipe.toml", "train recipe.toml --check", 2),
        ("rows.jsonl", "train recipe.toml --check", 2),
        ("backbone/config.json", "train recipe.toml --check", 2),
        ("backbone/model.safetensors", "train recipe.toml", 1),
        ("backbone/tokenizer.json", "train recipe.toml --check", 1),
        ("rows.jsonl", "data rows.jsonl --backbone backbone", 2),
        ("backbone/config.json", GENERATE, 2),
        ("backbone/model.safetensors", GENERATE, 1),
        ("backbone/tokenizer.json", GENERATE, 1),
        ("backbone/tokenizer_config.json", GENERATE, 1),
        ("heads/heads.safetensors", GENERATE, 1),
        ("heads/config.json", GENERATE, 1),
        ("tree.json", GENERATE, 2),
        ("prompts.jsonl", GENERATE, 2),
        ("tree.json", "inspect tree.json", 1),
        ("heads/heads.safetensors", "inspect heads", 1),
    ] {
        let small = with_everything();
        pipe(&small.path(name));
        let refused = medusa(&small, command);
        let says_so = refused.stderr.contains(name.trim_start_matches("backbone/"))
            && refused.stderr.contains("it is a pipe; expected a regular file");
        if refused.status != Some(status) || !says_so {
            wrong.push(format!("{name}, {command}: {refused:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let small = with_everything();
    for (command, status) in [
        ("train /dev/zero --check", 2),
        ("data /dev/zero --backbone backbone", 2),
        ("inspect /dev/zero", 1),
        ("generate --backbone backbone --prompts /dev/zero", 2),
        ("generate --backbone backbone --heads /dev/zero --prompts prompts.jsonl", 2),
    ] {
        medusa(&small, command).failed(status, &["/dev/zero", "it is a device; expected a regular file"]);
    }
}

/// The shell gives a pipe for `--api-key-file <(pass show key)`.
#[test]
fn a_key_may_come_from_a_pipe() {
    let small = with_everything();
    let serve = format!(
        "exec {} bench --endpoint http://127.0.0.1:9/v1 --model m --prompts prompts.jsonl --api-key-file <(echo key)",
        env!("CARGO_BIN_EXE_medusa")
    );
    let printed = ended(&mut small.program("bash", &["-c", &serve]));
    assert!(!printed.stderr.contains("pipe"), "{printed:?}");
}

#[test]
fn names_and_keys_give_a_terminal_no_commands() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "[backbone]", "\"\\u001b[31mred\\u0007\" = 1\n[backbone]");
    small.train(&["--check"]).failed(2, &["unknown key `␛[31mred␇`"]);
    assert!(!small.train(&["--check"]).stderr.contains('\x1b'));
    let printed = medusa(&small, "inspect \x1b[31mred");
    printed.failed(2, &["␛[31mred does not exist"]);
    assert!(!printed.stderr.contains('\x1b'), "{printed:?}");
}

#[test]
fn a_name_that_is_not_utf_8_is_reported() {
    let small = SmallRun::new();
    let name = std::ffi::OsStr::from_bytes(b"rows\xff.jsonl");
    fs::create_dir(small.path("rows")).expect("a folder");
    fs::copy(small.path("rows.jsonl"), small.path("rows").join(name)).expect("a copy");
    small.edit("recipe.toml", "[\"rows.jsonl\"]", "[\"rows\"]");
    small.train(&["--check"]).failed(2, &["data.train", "rows\\xFF.jsonl", "not UTF-8"]);
    for verb in ["inspect", "export", "train", "data"] {
        let mut command = small.program(env!("CARGO_BIN_EXE_medusa"), &[verb]);
        let printed = ended(command.arg(name));
        printed.failed(2, &["rows\\xFF.jsonl", "is not UTF-8"]);
    }
}

#[test]
fn a_folder_that_cannot_be_made_is_reported_before_the_training() {
    for (folder, expected) in [
        (&"x".repeat(300)[..], "names of at most 255 bytes"),
        ("", "the name of a folder"),
        ("rows.jsonl", "a folder, but this is a file"),
        ("rows.jsonl/run", "a folder, but rows.jsonl above it is a file"),
    ] {
        let small = SmallRun::new();
        small.edit("recipe.toml", "output_dir = \"run\"", &format!("output_dir = {folder:?}"));
        let facts = [&format!("train.output_dir = {folder:?}: expected {expected}")[..], "line 18"];
        small.train(&["--check"]).failed(2, &facts);
    }
}

#[test]
fn more_heads_than_could_be_planned_are_reported_before_their_memory() {
    for (key, count) in [("layers", "2147483648"), ("layers", "1000000"), ("heads", "1000000")] {
        let small = SmallRun::new();
        let (key, before) = (format!("medusa_num_{key}"), if key == "layers" { 1 } else { 2 });
        small.edit("recipe.toml", &format!("{key} = {before}"), &format!("{key} = {count}"));
        small.train(&["--check"]).failed(2, &[&format!("heads.{key} = {count}: expected at most 128")]);
    }
}

#[test]
fn more_threads_than_any_machine_has_are_reported() {
    let small = with_everything();
    for (variable, command) in [
        ("OMP_NUM_THREADS", "train recipe.toml --check"),
        ("RAYON_NUM_THREADS", "data rows.jsonl --backbone backbone"),
        ("MKL_NUM_THREADS", "generate --backbone backbone --prompts prompts.jsonl"),
    ] {
        let arguments: Vec<&str> = command.split(' ').collect();
        let mut command = small.program(env!("CARGO_BIN_EXE_medusa"), &arguments);
        let printed = ended(command.env(variable, "100000"));
        printed.failed(2, &[&format!("{variable}=100000: expected at most 1024 threads")]);
    }
}

/// `ulimit -f` ends a process at its first byte too many, unless the process ignores the signal.
#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_leaves_nothing_half_written() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    let limited = |blocks: u32, command: &str| {
        let line = format!("ulimit -f {blocks}; exec {} {command}", env!("CARGO_BIN_EXE_medusa"));
        ended(&mut small.program("bash", &["-c", &line]))
    };
    let before = small.names(".");
    limited(1, "export --heads run/final --format tgi --out exported").failed(1, &["exported", "File too large"]);
    assert_eq!(small.names("."), before);
    small.edit("recipe.toml", "output_dir = \"run\"", "output_dir = \"limited\"");
    limited(8, "train recipe.toml").failed(1, &["limited", "File too large"]);
    assert!(small.names("limited").iter().all(|name| !name.starts_with("step-") && !name.ends_with(".partial")));
}

/// A training of many steps that was started, once it has saved its first checkpoint.
fn amid_training(small: &SmallRun, wrap: &[&str]) -> Child {
    small.edit("recipe.toml", "epochs = 8", "epochs = 100000");
    let trainer = [env!("CARGO_BIN_EXE_medusa-train"), "recipe.toml"];
    let all = [wrap, &trainer].concat();
    let mut command = small.program(all[0], &all[1..]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    while !small.path("run/step-000003").is_dir() {
        assert!(child.try_wait().expect("a child").is_none(), "it has ended");
        sleep(Duration::from_millis(5));
    }
    child
}

fn end_of(child: Child) -> Ended {
    child.wait_with_output().expect("its output").into()
}

/// A handler's frame on a thread that is within a product of oneDNN would damage the heap.
#[test]
#[cfg(target_os = "linux")]
fn signals_come_on_a_thread_that_computes_nothing() {
    let small = SmallRun::new();
    let mut child = amid_training(&small, &[]);
    let tasks =
        fs::read_dir(format!("/proc/{}/task", child.id())).expect("Linux").map(|task| task.expect("a task").path());
    let takes_sigterm = |task: &PathBuf| {
        let status = fs::read_to_string(task.join("status")).expect("a thread that goes on");
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a mask").trim();
        u64::from_str_radix(blocked, 16).expect("a mask") >> (Signal::TERM.as_raw() - 1) & 1 == 0
    };
    let names: Vec<String> =
        tasks.filter(takes_sigterm).map(|task| fs::read_to_string(task.join("comm")).expect("a name")).collect();
    child.kill().and_then(|()| child.wait()).expect("a child");
    assert_eq!(names, ["signals\n"]);
}

#[test]
fn the_end_of_a_terminal_saves_a_checkpoint() {
    let small = SmallRun::new();
    // The tests themselves may run under nohup.
    let child = amid_training(&small, &["env", "--default-signal=HUP"]);
    kill_process(Pid::from_child(&child), Signal::HUP).expect("a child");
    let printed = end_of(child);
    assert_eq!(printed.status, Some(130), "{printed:?}");
    let steps: Vec<String> = small.names("run").into_iter().filter(|name| name.starts_with("step-")).collect();
    let newest = steps.last().expect("a checkpoint");
    assert!(printed.stderr.contains(newest) && printed.stderr.contains("--resume"), "{}", printed.stderr);
}

#[test]
fn nohup_lets_a_training_outlive_its_terminal() {
    let small = SmallRun::new();
    let child = amid_training(&small, &["nohup"]);
    kill_process(Pid::from_child(&child), Signal::HUP).expect("a child");
    let before = small.names("run");
    let began = Instant::now();
    while small.names("run") == before {
        assert!(began.elapsed() < Duration::from_secs(60), "it saves nothing more");
        sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::TERM).expect("a child");
    assert_eq!(end_of(child).status, Some(130));
}

#[test]
fn a_run_whose_folder_goes_ends_and_makes_no_other_one() {
    for moves in [false, true] {
        let (small, printed) = run_that_loses("run", moves);
        printed.failed(1, &["run was removed, moved or replaced while the run wrote to it"]);
        assert!(!small.path("run").exists());
    }
}

#[test]
fn a_run_whose_log_goes_ends() {
    for log in ["run/metrics.jsonl", "run/tensorboard"] {
        let (_, printed) = run_that_loses(log, false);
        printed.failed(1, &[log, " was removed, moved or replaced while the run wrote to it"]);
    }
}

/// What a run says from which a file or folder is taken away, or only renamed.
fn run_that_loses(name: &str, moves: bool) -> (SmallRun, Ended) {
    let small = SmallRun::new();
    let child = amid_training(&small, &[]);
    let away = small.path("away");
    fs::rename(small.path(name), &away).expect("another name");
    if !moves {
        let _ = if away.is_dir() { fs::remove_dir_all(away) } else { fs::remove_file(away) }; // it may write there meanwhile
    }
    (small, end_of(child))
}

#[test]
fn a_run_that_resumes_without_its_log_says_which_steps_it_lacks() {
    let small = SmallRun::new();
    small.train(&[]).succeeded();
    let resume = || {
        fs::remove_dir_all(small.path("run/final")).expect("a finished run");
        small.train(&["--resume"]).succeeded().stderr
    };
    let warning = "warning: run/metrics.jsonl has no lines of steps ";
    let whole = resume();
    assert!(!whole.contains(warning), "{whole}");
    let lines = small.read("run/metrics.jsonl");
    let first: String = lines.split_inclusive('\n').take(2).collect();
    small.write("run/metrics.jsonl", &first);
    let cut = resume();
    assert!(cut.contains(&format!("{warning}3 to ")), "{cut}");
    fs::remove_file(small.path("run/metrics.jsonl")).expect("a log");
    let removed = resume();
    assert!(removed.contains(&format!("{warning}1 to ")), "{removed}");
}

/// The checkpoint of step 21 is ten steps behind the last line.
#[test]
fn a_run_that_resumes_with_a_smaller_log_every_lacks_no_lines() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "eval_every = 6", "log_every = 11");
    small.train(&[]).succeeded();
    for later in ["run/step-000024", "run/final"] {
        fs::remove_dir_all(small.path(later)).expect("what a run that was killed had not written");
    }
    small.edit("recipe.toml", "log_every = 11", "log_every = 1");
    let resumed = small.train(&["--resume"]).succeeded().stderr;
    assert!(resumed.contains("log_every = 1 (was 11)") && !resumed.contains("has no lines of steps"), "{resumed}");
}
