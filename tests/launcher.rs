//! Promise: what needs no libtorch answers at once: `medusa` and `medusa-train` are not linked to it. For the other
//! commands they become `medusa-libtorch`, which finds libtorch where pip installed it.
#![cfg(target_os = "linux")]

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const MEDUSA: &str = env!("CARGO_BIN_EXE_medusa");
const MEDUSA_TRAIN: &str = env!("CARGO_BIN_EXE_medusa-train");

/// The libraries that the loader would load for a program.
fn libraries(program: &str) -> String {
    let output = Command::new(program).env("LD_TRACE_LOADED_OBJECTS", "1").output().expect("the loader answers");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
#[cfg_attr(
    not(all(target_arch = "x86_64", target_env = "gnu")),
    ignore = "rustc's own linker, which drops libraries that no reachable function needs, is the default only there"
)]
fn the_launchers_are_not_linked_to_libtorch() {
    for program in [MEDUSA, MEDUSA_TRAIN] {
        let found = libraries(program);
        assert!(found.contains("libc.so.6 => /"), "{found}");
        assert!(
            !found.contains("torch") && !found.contains("libc10") && !found.contains("libgomp"),
            "a function of {program} reaches tch; docs/architecture.md, \"How the programs start\", tells how to find it:\n{found}"
        );
    }
    let found = libraries(env!("CARGO_BIN_EXE_medusa-libtorch"));
    assert!(found.contains("libtorch_cpu.so => /"), "{found}");
}

/// An environment with the two launchers and no `medusa-libtorch`.
struct Prefix(TempDir);

impl Prefix {
    fn new() -> Self {
        let prefix = Self(tempfile::tempdir().expect("a folder"));
        for (program, name) in [(MEDUSA, "medusa"), (MEDUSA_TRAIN, "medusa-train")] {
            std::fs::create_dir_all(prefix.path("bin")).expect("a folder");
            std::fs::copy(program, prefix.path("bin").join(name)).expect("a copy");
        }
        prefix
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        medusa::files::write_atomic(&path, |out| out.write_all(text.as_bytes())).expect("a file");
        path
    }

    /// A `medusa-libtorch` that prints its environment and arguments.
    fn add_program(&self) {
        let script = "#!/bin/sh\necho \"$LD_LIBRARY_PATH\"\necho \"$@\"\n\
            echo \"${OMP_NUM_THREADS-unset} ${GOMP_SPINCOUNT-unset} ${OMP_WAIT_POLICY-unset}\"\nexit 7\n";
        let path = self.write("bin/medusa-libtorch", script);
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
    }

    /// A torch as pip installs it; returns the folder of its libraries.
    fn add_torch(&self, packages: &str, version: &str) -> PathBuf {
        self.write(&format!("{packages}/torch/version.py"), &format!("__version__ = '{version}'\n"));
        self.write(&format!("{packages}/torch/lib/libtorch_cpu.so"), "");
        self.path(packages).join("torch/lib")
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.path("bin").join(program));
        command.args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).env("LD_LIBRARY_PATH", "/of/the/user");
        command.env("MEDUSA_CACHE", self.path("cache")).output().expect("it starts")
    }
}

fn words(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn commands_that_need_no_libtorch_run_in_the_launcher() {
    let prefix = Prefix::new();
    let calibration = r#"{"heads": [{"counts": [50, 25], "total": 100, "accuracy": [0.5, 0.25]}],
        "joint": {"total": 0, "paths": []}, "backbone": "b", "heads_sha256": "00", "tokens": 500}"#;
    let calibration = prefix.write("calibration.json", calibration).display().to_string();
    let rows = prefix.write("rows.jsonl", "{\"input_ids\": [1, 2, 3]}\n").display().to_string();
    let prompts = prefix.write("prompts.jsonl", "{\"prompt\": \"a\"}\n").display().to_string();
    for (arguments, status, printed) in [
        (&["--help"][..], 0, "Usage: medusa [OPTIONS] <COMMAND>"),
        (&["--version"], 0, concat!("medusa ", env!("CARGO_PKG_VERSION"))),
        (&["generate", "--help"], 0, "Usage: medusa generate"),
        (&["tree", "--calibration", &calibration, "--nodes", "2"], 0, "\"choices\""),
        (&["inspect", &calibration], 0, "replayable"),
        (&["inspect", "data/tiny/backbone"], 0, "vocabulary"),
        (&["inspect", "tests/fixtures/hydra/medusa_truncated.safetensors"], 0, "24 tensors"),
        (&["inspect", "tests/fixtures/pickled/tied.pt"], 0, "MiB"),
        (&["data", &rows, "--backbone", "data/tiny/backbone"], 0, "rows.jsonl: 1 row"),
        (
            &["bench", "--endpoint", "http://127.0.0.1:1", "--prompts", &prompts],
            1,
            "no answer from http://127.0.0.1:1/v1",
        ),
        (&["report", "data"], 2, "data is not a run folder"),
        (&["generate", "--seed", "x"], 2, "invalid value 'x' for '--seed <N>'"),
        (&["nonsense"], 2, "unrecognized subcommand 'nonsense'"),
        (&["inspect", "/no/such/path"], 2, "/no/such/path does not exist"),
    ] {
        let output = prefix.run("medusa", arguments);
        let text = words(&output.stdout) + &words(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
        assert!(text.contains(printed), "{arguments:?}: {text}");
    }
    assert_eq!(prefix.run("medusa-train", &["--help"]).status.code(), Some(0));
    assert_eq!(prefix.run("medusa-train", &["--no-such-flag"]).status.code(), Some(2));
}

#[test]
fn without_medusa_libtorch_the_other_commands_say_what_is_missing() {
    let prefix = Prefix::new();
    for (program, arguments) in [("medusa", &["doctor"][..]), ("medusa-train", &["recipe.toml"])] {
        let output = prefix.run(program, arguments);
        let error = words(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        let bin = prefix.path("bin").canonicalize().expect("it is there");
        let start = format!("error: {} has no medusa-libtorch, which {program} starts for this command", bin.display());
        assert!(error.starts_with(&start), "{error}");
    }
}

/// First lines of what `medusa-libtorch` prints: `LD_LIBRARY_PATH` and its arguments.
fn started(prefix: &Prefix, program: &str, arguments: &[&str]) -> [String; 2] {
    let output = prefix.run(program, arguments);
    assert_eq!(output.status.code(), Some(7), "{}", words(&output.stderr));
    let text = words(&output.stdout);
    let mut lines = text.lines().map(str::to_owned);
    [(); 2].map(|()| lines.next().expect("two lines"))
}

#[test]
fn the_torch_of_the_python_environment_comes_first() {
    let prefix = Prefix::new();
    prefix.add_program();
    let arguments = ["generate", "--backbone", "b", "--prompt", "two words"];
    let typed = arguments.join(" ");
    assert_eq!(started(&prefix, "medusa", &arguments), ["/of/the/user", &typed], "no torch there");
    prefix.add_torch("lib/python3.10/site-packages", "2.10.0");
    assert_eq!(started(&prefix, "medusa", &arguments), ["/of/the/user", &typed], "another version");
    let torch = prefix.add_torch("lib/python3.13/site-packages", "2.11.0+cu130");
    let first = format!("{}:/of/the/user", canonical(&torch).display());
    assert_eq!(started(&prefix, "medusa", &arguments), [first.as_str(), &typed]);
    assert_eq!(started(&prefix, "medusa-train", &["r.toml", "--check"]), [first.as_str(), "r.toml --check"]);
    let link = prefix.path("medusa-train-elsewhere");
    std::os::unix::fs::symlink(prefix.path("bin/medusa-train"), &link).expect("a link, as pipx makes");
    let output = Command::new(link).arg("r.toml").env_remove("LD_LIBRARY_PATH").output().expect("it starts");
    let printed = words(&output.stdout);
    assert!(printed.starts_with(&format!("{}\nr.toml\n", canonical(&torch).display())), "{printed}");
}

fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().expect("it is there")
}

#[test]
fn threads_wait_only_briefly_unless_the_user_says_otherwise() {
    let prefix = Prefix::new();
    prefix.add_program();
    prefix.add_torch("lib/python3.13/site-packages", "2.11.0");
    let threads = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(prefix.path("bin/medusa"));
        for name in ["OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"] {
            command.env_remove(name);
        }
        let output = command.arg("doctor").args(arguments).envs(variables.iter().copied()).output().expect("it starts");
        words(&output.stdout).lines().nth(2).expect("three lines").to_owned()
    };
    assert_eq!(threads(&[], &[]), "unset 10000 unset");
    assert_eq!(threads(&["--threads", "3"], &[("OMP_NUM_THREADS", "5")]), "3 10000 unset");
    assert_eq!(threads(&[], &[("OMP_NUM_THREADS", "5"), ("GOMP_SPINCOUNT", "7")]), "5 7 unset");
    assert_eq!(threads(&[], &[("OMP_WAIT_POLICY", "active")]), "unset unset active");
}

const MEDUSA_LIBTORCH: &str = env!("CARGO_BIN_EXE_medusa-libtorch");

/// Runs a line of sh, whose `$0` is the program.
fn shell(line: &str, program: &str) -> Output {
    Command::new("sh").args(["-c", line, program]).env_remove("OMP_NUM_THREADS").output().expect("sh starts")
}

#[test]
fn a_medusa_libtorch_of_another_build_is_refused() {
    let other = shell("MEDUSA_LAUNCHER=\"$$ 0.0.9-0123\" exec \"$0\" --version", MEDUSA_LIBTORCH);
    let error = words(&other.stderr);
    assert_eq!(other.status.code(), Some(1), "{error}");
    assert!(
        error.starts_with("error: medusa-libtorch is of the build ") && error.contains(" of 0.0.9-0123: "),
        "{error}"
    );
    let inherited = shell("MEDUSA_LAUNCHER='1 0.0.9-0123' exec \"$0\" --version", MEDUSA_LIBTORCH);
    assert_eq!(inherited.status.code(), Some(0), "{}", words(&inherited.stderr));
}

#[test]
fn a_launcher_under_the_name_of_medusa_libtorch_does_not_start_itself_for_ever() {
    let prefix = Prefix::new();
    let program = prefix.path("bin/medusa-libtorch");
    std::fs::copy(MEDUSA, program).expect("a copy");
    let output = prefix.run("medusa", &["doctor"]);
    let error = words(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("is not the program that is linked to libtorch but medusa itself"), "{error}");
}

#[test]
fn threads_reach_libtorch_in_both_programs() {
    for program in [MEDUSA, MEDUSA_LIBTORCH] {
        let output = shell("MKL_NUM_THREADS=1 exec \"$0\" --threads 3 doctor --json", program);
        assert_eq!(output.status.code(), Some(0), "{}", words(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(report["cpu"]["threads"], 3, "{program}");
    }
}

#[test]
fn medusa_libtorch_started_directly_has_the_environment_of_the_launcher() {
    let mut command = Command::new(MEDUSA_LIBTORCH);
    for name in ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"] {
        command.env_remove(name);
    }
    // It reads its stdin before anything else.
    command.args(["--threads", "3", "generate", "--backbone", "data/tiny/backbone", "--prompts", "-"]);
    let mut program = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let environment = format!("/proc/{}/environ", program.id());
    let is_set = |variable: &str| {
        let variables = std::fs::read(&environment).expect("it waits for its stdin");
        variables.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !(is_set("GOMP_SPINCOUNT=10000") && is_set("OMP_NUM_THREADS=3")) {
        assert!(Instant::now() < deadline, "it does not start again");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(program.stdin.take());
    assert_eq!(program.wait().expect("it ends").code(), Some(1), "stdin holds no prompt");
}

#[test]
fn threads_that_the_system_refuses_are_an_error() {
    let rows = "--threads 2 data data/tiny/train.jsonl --backbone data/tiny/backbone";
    // Stacks of 128 TiB: more than the address space.
    let output = shell(&format!("RUST_MIN_STACK=140737488355328 exec \"$0\" {rows}"), MEDUSA);
    let error = words(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: cannot start 2 threads; use a smaller --threads"), "{error}");
    let rows = rows.trim_start_matches("--threads 2 ");
    let output = shell(&format!("RUST_MIN_STACK=140737488355328 exec \"$0\" {rows}"), MEDUSA);
    let error = words(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: cannot start threads; use a smaller --threads"), "{error}");
}
