//! The command line: every verb shows an example, errors go to stderr with one line per cause, and exit statuses are as
//! documented.

use std::panic::{AssertUnwindSafe, catch_unwind};

use assert_cmd::Command;
use clap::{Args, Command as ClapCommand, FromArgMatches};
use medusa::cli::{CommonFlags, finish};

use crate::program::medusa;

fn stdout(command: &mut Command) -> String {
    String::from_utf8(command.output().expect("it runs").stdout).expect("UTF-8")
}

fn stderr(command: &mut Command) -> String {
    String::from_utf8(command.output().expect("it runs").stderr).expect("UTF-8")
}

/// The verbs that `medusa --help` lists.
fn verbs() -> Vec<String> {
    let help = stdout(&mut medusa(&["--help"]));
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let verb =
        |line: &str| line.strip_prefix("  ")?.split(' ').next().filter(|word| !word.is_empty()).map(str::to_owned);
    lines.filter_map(verb).filter(|verb| verb != "help").collect()
}

#[test]
fn every_verb_ends_its_help_with_an_example() {
    let verbs = verbs();
    assert!(verbs.contains(&"doctor".to_owned()), "{verbs:?}");
    for verb in verbs {
        let help = stdout(medusa(&[&verb, "--help"]).env("COLUMNS", "200"));
        let of_clone = ["data/tiny", "recipes/", "tiny_"].into_iter().find(|path| help.contains(path));
        assert_eq!(of_clone, None, "a wheel does not have it: {help}");
        let (_, example) = help.rsplit_once("Example:\n").expect("an example");
        let (example, _) = example.split_once("\n\n").unwrap_or((example, ""));
        assert!(example.trim().starts_with(&format!("medusa {verb}")), "{help}");
        assert!(
            example.lines().all(|line| line.chars().count() <= 80),
            "a terminal of 80 columns breaks it: {example}"
        );
    }
}

#[test]
fn help_lists_the_flags_that_a_verb_uses() {
    for (verb, used, ignored) in [
        ("inspect", &["--json", "--quiet"][..], &["--device", "--dtype", "--seed"][..]),
        ("export", &["--dtype"], &["--device", "--seed"]),
        ("train", &["--device"], &["--dtype", "--seed"]),
        ("generate", &["--device", "--dtype", "--seed"], &[]),
    ] {
        let help = stdout(&mut medusa(&[verb, "--help"]));
        assert!(
            used.iter().all(|flag| help.contains(flag)) && !ignored.iter().any(|flag| help.contains(flag)),
            "{help}"
        );
    }
    let mut train = Command::cargo_bin("medusa-train").expect("the binary is built with the tests");
    let help = stdout(train.arg("--help"));
    let (options, common) = help.split_once("Common flags:").expect("both headings");
    assert!(options.contains("--resume") && !common.contains("--resume"), "{help}");
}

#[test]
fn a_common_flag_without_an_effect_is_said_to_have_none() {
    for (arguments, status, printed) in [
        (&["inspect", "data/tiny/backbone", "--seed", "1"][..], 0, "--seed has no effect on `medusa inspect`"),
        (&["--seed", "1", "inspect", "data/tiny/backbone"], 0, "--seed has no effect on `medusa inspect`"),
        (&["doctor", "--dtype", "float32"], 0, "--dtype has no effect on `medusa doctor`"),
        (&["train", "recipes/tiny_stage1.toml", "--seed", "1"], 2, "--seed does not apply to training: set train.seed"),
    ] {
        let mut command = medusa(arguments);
        command.assert().code(status);
        assert_eq!(stderr(&mut command).matches(printed).count(), 1, "{arguments:?}: {}", stderr(&mut command));
    }
    let mut on_cpu = medusa(&["inspect", "data/tiny/backbone", "--device", "cpu"]); // that is where it runs
    on_cpu.assert().code(0);
    assert!(!stderr(&mut on_cpu).contains("no effect"));
}

#[test]
fn a_path_that_does_not_exist_is_status_2_whichever_flag_names_it() {
    const PROMPTS: &str = "data/tiny/prompts.jsonl";
    let there = "Cargo.toml";
    for (arguments, flag) in [
        (&["generate", "--backbone", "none", "--prompt", "x"][..], "--backbone: cannot read none/config.json"),
        (&["generate", "--backbone", there, "--heads", "none", "--prompt", "x"], "--heads none does not exist"),
        (&["generate", "--backbone", there, "--prompts", "none"], "--prompts none does not exist"),
        (&["chat", "--backbone", there, "--heads", there, "--tree", "none"], "--tree none does not exist"),
        (&["chat", "--backbone", there, "--drafter", "model:./none"], "--drafter ./none does not exist"),
        (&["bench", "--backbone", "none", "--drafter", "ngram", "--prompts", PROMPTS], "--backbone: cannot read none"),
        (
            &["distill", "--backbone", "none", "--prompts", PROMPTS, "--out", "o"],
            "--backbone: cannot read none/config.json",
        ),
        (&["calibrate", "--backbone", there, "--heads", "none", "--data", there, "--out", "o"], "--heads none"),
        (&["tree", "--calibration", "none", "--nodes", "3"], "--calibration none does not exist"),
        (&["data", "none.jsonl", "--backbone", there], "error: data file none.jsonl does not exist"),
        (
            &["init", "--data", "none.jsonl", "--backbone", "data/tiny/backbone"],
            "--data: data file none.jsonl does not",
        ),
        (
            &["calibrate", "--backbone", there, "--heads", there, "--data", "none.jsonl", "--out", "o"],
            "--data: data file none.jsonl does not exist",
        ),
        (&["data", there, "--backbone", "none"], "--backbone: cannot read none/config.json"),
        (&["export", "--heads", "none", "--format", "vllm", "--out", "o"], "--heads none does not exist"),
        (&["inspect", "none"], "none does not exist"),
        (&["train", "none.toml"], "none.toml"),
        (&["generate", "--backbone", there, "--heads", "-", "--prompt", "x"], "--heads - does not exist"),
    ] {
        let mut command = medusa(arguments);
        let printed = stderr(&mut command);
        assert!(printed.contains(flag), "{arguments:?}: {printed}");
        command.assert().code(2);
    }
}

#[test]
fn numbers_that_cannot_be_are_refused_in_words() {
    for (arguments, printed) in [
        (&["tree", "--calibration", "x", "--nodes", "0"][..], "expected a whole number above 0"),
        (&["generate", "--backbone", "x", "--prompt", "x", "--temperature", "1e-39"], "or at least 1.2e-38, got 1e-39"),
        (&["generate", "--backbone", "x", "--prompt", "x", "--temperature", "warm"], "expected a number"),
    ] {
        let mut command = medusa(arguments);
        command.assert().code(2);
        let said = stderr(&mut command);
        assert!(said.contains(printed), "{arguments:?}: {said}");
    }
}

#[test]
fn doctor_prints_one_json_object_and_nothing_else() {
    let output = medusa(&["doctor", "--json"]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["libtorch"]["built_for"], "2.11.0");
    assert_eq!(output.stdout.iter().filter(|&&byte| byte == b'\n').count(), 1);
}

#[test]
fn a_wrong_command_line_is_status_2() {
    for arguments in [&["nonsense"][..], &["doctor", "--dtype", "int4"], &["inspect"], &["inspect", "/no/such/path"]] {
        medusa(arguments).assert().code(2);
    }
}

#[test]
fn a_file_of_no_known_kind_is_status_1() {
    let mut command = medusa(&["inspect", "Cargo.toml"]);
    command.assert().code(1);
    assert_eq!(
        stderr(&mut command),
        "error: Cargo.toml is of no known kind; expected .safetensors, .pt, .bin, .gguf or .json\n"
    );
}

#[test]
#[cfg(unix)]
fn a_device_that_is_not_there_is_reported_by_doctor() {
    let mut command = medusa(&["doctor", "--device", "cuda:0"]);
    command.env("MEDUSA_CUDA", "off").assert().success();
    let printed = stdout(&mut command);
    assert!(printed.contains("cuda:0 cannot be used: CPU only (switched off by MEDUSA_CUDA)"), "{printed}");
    assert!(!printed.contains("medusa doctor"), "its advice would be itself: {printed}");
}

#[test]
fn a_file_that_cannot_be_written_is_reported_before_any_work() {
    let work = ["calibrate", "--backbone", "nowhere", "--heads", "nowhere", "--data", "nowhere", "--out"];
    let tree = ["tree", "--calibration", "nowhere", "--nodes", "3", "--out"];
    let nodes = ["bench", "--backbone", "nowhere", "--heads", "nowhere", "--prompts", "nowhere", "--csv"];
    let page = ["report", "nowhere", "--out"];
    for command in [&work[..], &tree, &nodes, &page] {
        let flag = command[command.len() - 1];
        let refused = |path: &str| {
            let mut command = medusa(&[command, &[path]].concat());
            command.assert().code(2);
            stderr(&mut command)
        };
        assert!(
            refused("Cargo.toml/x")
                .contains(&format!("{flag} Cargo.toml/x cannot be written: Cargo.toml is not a folder"))
        );
        assert!(refused("src").contains(&format!("{flag} src is a folder")));
        if cfg!(target_os = "linux") {
            assert!(refused("/proc/x").contains(&format!("{flag} /proc/x cannot be written")));
        }
    }
}

#[test]
fn an_output_never_replaces_an_input_or_another_output() {
    let dir = tempfile::tempdir().expect("a folder");
    let [a, b] = ["a.json", "sub/../b.json"].map(|name| dir.path().join(name).display().to_string());
    std::fs::create_dir(dir.path().join("sub")).expect("a folder");
    medusa::files::write_atomic(a.as_ref(), |out| std::io::Write::write_all(out, b"{}")).expect("a file of a test");
    let link = dir.path().join("link.json").display().to_string();
    std::os::unix::fs::symlink(&a, &link).expect("a link");
    let folder = dir.path().display().to_string();
    let weights = dir.path().join("sub/model.safetensors").display().to_string();
    medusa::files::write_atomic(weights.as_ref(), |_| Ok(())).expect("a file of a test");
    let same = dir.path().join("b.json").display().to_string();
    let bench = ["bench", "--backbone", "x", "--heads", "x", "--sweep", "nodes=2", "--prompts"];
    for (arguments, printed) in [
        ([&bench[..], &[&a, "--csv", &b, "--svg", &same]].concat(), "--csv and --svg name the same file"),
        ([&bench[..], &[&a, "--csv", &link]].concat(), "would replace --prompts; choose another file"),
        (vec!["tree", "--calibration", &a, "--nodes", "2", "--out", &a], "would replace --calibration"),
        (
            vec!["calibrate", "--backbone", "x", "--heads", "x", "--data", "y", &a, "--out", &link],
            "would replace the data",
        ),
        (vec!["tree", "--calibration", "x.json", "--latency", &a, "--out", &link], "would replace --latency"),
        (vec!["init", "--backbone", "x", "--data", "y", &link, "--out", &a], "would replace the data"),
        (vec!["init", "--backbone", "x", "--data", &folder, "--out", &a], "would replace the data"),
        (vec!["report", "x", "--out", &weights], "would replace a file of a model or a run"),
        (
            vec!["tree", "--calibration", &a, "--nodes", "2", "--out", "/dev/null"],
            "it is a device; expected a regular file",
        ),
    ] {
        let mut command = medusa(&arguments);
        command.assert().code(2);
        let said = stderr(&mut command);
        assert!(said.contains(printed) && !said.contains("will be replaced"), "{arguments:?}: {said}");
    }
    assert_eq!(std::fs::read(&a).expect("it is there"), b"{}");
}

/// Runs in a separate process, where the verb panics. A panic that leaves `main` is status 101, but 101 is also the status of a failed
/// test, so the process has one of its own.
#[test]
fn a_bug_unwinds_out_of_main_with_its_line_and_backtrace() {
    const CHILD: &str = "MEDUSA_TEST_VERB_PANICS";
    const UNWOUND: i32 = 77;
    if std::env::var_os(CHILD).is_some() {
        let matches = CommonFlags::augment_args(ClapCommand::new("medusa")).get_matches_from(["medusa"]);
        let common = CommonFlags::from_arg_matches(&matches).unwrap();
        let rows: Vec<u8> = vec![];
        let verb = || {
            assert_eq!(rows[rows.len()], 0);
            Ok(())
        };
        let ended = catch_unwind(AssertUnwindSafe(|| finish(&common, verb)));
        std::process::exit(if ended.is_err() { UNWOUND } else { 0 });
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "command_line::a_bug_unwinds_out_of_main_with_its_line_and_backtrace", "--nocapture"]);
    let printed = stderr(child.env(CHILD, "1").env("RUST_BACKTRACE", "1"));
    child.assert().code(UNWOUND);
    for part in ["panicked at tests/command_line.rs:", "the len is 0 but the index is 0", "stack backtrace:"] {
        assert!(printed.contains(part), "{printed}");
    }
    assert!(!printed.contains("error: "), "{printed}");
}
