//! Promise: `scripts/gpu_check` can be prepared on a machine without a GPU, reports what that machine lacks, and builds
//! its table from recorded results.
#![cfg(target_os = "linux")]

mod parts;
mod tables;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use medusa::files::write_atomic;

use crate::program::on_the_cpu;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu_check");

fn run(script: &Path, arguments: &[&str]) -> Output {
    on_the_cpu(&mut Command::new("python3"))
        .arg(script)
        .args(arguments)
        .output()
        .expect("python3, which scripts/setup needs, too")
}

/// Runs Python code that imports the script's modules.
fn python(code: &str, arguments: &[&str]) -> String {
    let modules = Path::new(SCRIPT).with_file_name("gpu");
    let mut command = Command::new("python3");
    command.args(["-c", code]).args(arguments).env("PYTHONPATH", modules).env("PYTHONDONTWRITEBYTECODE", "1");
    let ended = command.output().expect("python3");
    assert!(ended.status.success(), "{}", words(&ended.stderr));
    words(&ended.stdout)
}

fn words(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

#[test]
fn the_folder_to_carry_starts_elsewhere_and_says_what_is_missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let carried = folder.path().join("carried");
    let programs = folder.path().join("programs");
    std::fs::create_dir(&programs).expect("a folder");
    // `medusa-libtorch` replaces examples/gpu_check, which handles `medusa`'s commands the same way.
    let program = format!("#!/bin/sh\nexec '{}' \"$@\"\n", env!("CARGO_BIN_EXE_medusa-libtorch"));
    write_program(&programs.join("gpu_check"), &program);
    let [carried_text, programs] = [&carried, &programs].map(|path| path.to_str().expect("UTF-8"));
    let prepare = ["--prepare", carried_text, "--programs", programs];
    let prepared = run(Path::new(SCRIPT), &prepare);
    assert!(prepared.status.success(), "{}", words(&prepared.stderr));
    for file in
        ["target/release/examples/gpu_check.gz", "scripts/gpu/stages.py", "data/tiny/backbone/model.safetensors"]
    {
        assert!(carried.join(file).is_file(), "{file}");
    }
    let again = run(Path::new(SCRIPT), &prepare);
    assert!(!again.status.success() && words(&again.stderr).contains("is there already"));
    // The programs look for libtorch where they were built; a pip-installed torch is only used if there is no such
    // folder.
    std::fs::create_dir(carried.join(".libtorch")).expect("a folder");
    let without_gpu = run(&carried.join("scripts/gpu_check"), &["--out", "results"]);
    let error = words(&without_gpu.stderr);
    assert_eq!(without_gpu.status.code(), Some(1), "{error}");
    assert!(error.starts_with("error: no GPU can be checked here: there is no GPU to decode on"), "{error}");
    assert!(without_gpu.stdout.is_empty() && !carried.join("results").exists());
    assert!(carried.join("target/release/examples/gpu_check").is_file(), "the program is unpacked on the first call");
    let unknown = run(Path::new(SCRIPT), &["smoke", "endurance"]);
    assert!(words(&unknown.stderr).contains("there is no stage endurance; expected smoke, engine, profile, training"));
    let unbuilt = run(Path::new(SCRIPT), &["--prepare", "x", "--programs", "/nowhere"]);
    assert!(
        words(&unbuilt.stderr).contains("build it first: cargo build --release --locked --example gpu_check"),
        "{}",
        words(&unbuilt.stderr)
    );
}

fn write_program(path: &Path, text: &str) {
    write_atomic(path, |out| std::io::Write::write_all(out, text.as_bytes())).expect("a file of a test");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path, executable).expect("a file of ours");
}

/// A folder with a `gpu_check` and a `compute-sanitizer` that print what a test needs.
fn played_programs(folder: &Path) -> PathBuf {
    let programs = folder.join("programs");
    std::fs::create_dir(&programs).expect("a folder");
    let played = r#"#!/bin/sh
case "$1 $2" in
    "doctor --json") echo '{"version": "0.1.0", "cuda": {"names": ["A GPU"], "driver": "1", "runtime": "2"}, "engine": {"cuda": true}}' ;;
    "gpu-check loops") echo '{"check": "libtorch", "tokens": 7, "same": false}'; echo "no good" >&2; exit 3 ;;
    "gpu-check steps") echo '{"check": "steps", "nodes": 1, "context": 128, "step_ms": 3.5}'; echo "half a line"; echo "going on" >&2; echo $$ > "$0.steps"; exec sleep 600 ;;
    "gpu-check endurance") echo '{"check": "endurance", "steps": 20000, "device_growth_bytes": 0, "host_growth_bytes": 0}' ;;
esac
"#;
    // It prints the requested lines, then the program's own output, then reports a fault.
    let sanitizer = r#"#!/bin/sh
echo '{"check": "kernels", "of": "a sanitizer"}'
echo 17
echo "========= $* caching=$PYTORCH_NO_CUDA_MEMORY_CACHING"
exit 9
"#;
    // Two steps with one launch of one kernel and two of another, in the CSV of Nsight Compute; then launches whose bytes or time it could not
    // read.
    let profiler = r#"#!/bin/sh
echo '==PROF== Connected'
echo '{"check": "profiled", "steps": 2}'
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
for id in 0 1; do
    echo "\"$id\",\"linear_1(float *)\",\"gpu__time_duration.sum\",\"us\",\"1,000\""
    echo "\"$id\",\"linear_1(float *)\",\"dram__bytes_read.sum\",\"Gbyte\",\"2.5\""
    echo "\"$id\",\"linear_1(float *)\",\"dram__bytes_write.sum\",\"byte\",\"0\""
done
for id in 2 3 4 5; do
    echo "\"$id\",\"norm(float *)\",\"gpu__time_duration.sum\",\"nsecond\",\"500\""
    echo "\"$id\",\"norm(float *)\",\"dram__bytes_read.sum\",\"byte\",\"0\""
    echo "\"$id\",\"norm(float *)\",\"dram__bytes_write.sum\",\"Kbyte\",\"1\""
done
echo '"6","embed(float *)","gpu__time_duration.sum","us","1"'
echo '"6","embed(float *)","dram__bytes_read.sum","byte","n/a"'
echo '"7","lost(float *)","gpu__time_duration.sum","fortnight","1"'
echo '"7","lost(float *)","dram__bytes_read.sum","","n/a"'
"#;
    for (name, text) in [("gpu_check", played), ("compute-sanitizer", sanitizer), ("ncu", profiler)] {
        write_program(&programs.join(name), text);
    }
    programs
}

/// A folder of packages whose import fails, so that parts that need torch or transformers are left out on every
/// machine.
fn without_torch(folder: &Path) -> PathBuf {
    let none = folder.join("no_packages");
    std::fs::create_dir(&none).expect("a folder");
    for package in ["torch", "transformers"] {
        let raises =
            |out: &mut std::io::BufWriter<std::fs::File>| std::io::Write::write_all(out, b"raise ImportError\n");
        write_atomic(&none.join(format!("{package}.py")), raises).expect("a file of a test");
    }
    none
}

/// A machine with a GPU, simulated: scripts replace the programs.
struct PlayedMachine {
    folder: tempfile::TempDir,
    script: PathBuf,
    programs: PathBuf,
    none: PathBuf,
}

impl PlayedMachine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (programs, none) = (played_programs(folder.path()), without_torch(folder.path()));
        // The copy has an unused libtorch folder next to it, where the script looks for one.
        let script = folder.path().join("scripts/gpu_check");
        std::fs::create_dir_all(folder.path().join(".libtorch")).expect("a folder");
        std::fs::create_dir_all(folder.path().join("scripts/gpu")).expect("a folder");
        std::fs::copy(SCRIPT, &script).expect("a copy");
        for module in std::fs::read_dir(Path::new(SCRIPT).with_file_name("gpu")).expect("the script's modules") {
            let module = module.expect("a file").path();
            if module.is_file() {
                let name = module.file_name().expect("a name");
                std::fs::copy(&module, script.with_file_name("gpu").join(name)).expect("a copy");
            }
        }
        Self { folder, script, programs, none }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("results")
    }

    fn check(&self, stages: &[&str]) -> Output {
        self.command(stages, "12").output().expect("python3")
    }

    fn command(&self, stages: &[&str], seconds: &str) -> Command {
        let path = format!("{}:{}", self.programs.display(), std::env::var("PATH").expect("a path"));
        let mut command = Command::new("python3");
        command.arg(&self.script).args(stages).arg("--programs").arg(&self.programs).arg("--out").arg(self.out());
        command.args(["--seconds", seconds]).env("PATH", path).env("PYTHONPATH", &self.none);
        command.env("TMPDIR", self.folder.path());
        command
    }

    /// Starts the stage `engine`, which stays in its part `steps`; returns the process of that part, too.
    fn in_steps(&self) -> (Child, u32) {
        let mut child = self.command(&["engine"], "600").stdout(Stdio::null()).spawn().expect("python3");
        let (file, began) = (self.programs.join("gpu_check.steps"), Instant::now());
        loop {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            if let Some(steps) = text.strip_suffix('\n').and_then(|pid| pid.parse().ok()) {
                return (child, steps);
            }
            assert!(child.try_wait().expect("a child").is_none() && began.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The recorded JSON of a stage, beside which lies its table.
    fn recorded(&self, stage: &str) -> serde_json::Value {
        let files = std::fs::read_dir(self.out()).expect("results").map(|file| file.expect("a file").path());
        let end = format!("-{stage}.json");
        let json = files.into_iter().find(|path| path.to_string_lossy().ends_with(&end)).expect("JSON of each stage");
        assert!(json.with_extension("md").is_file());
        serde_json::from_str(&std::fs::read_to_string(json).expect("a file")).expect("an object")
    }
}

#[test]
fn a_part_that_fails_or_takes_too_long_costs_the_others_nothing() {
    let machine = PlayedMachine::new();
    let run = machine.check(&["engine"]);
    let said = words(&run.stderr);
    assert!(!run.status.success() && said.contains("error: failed: loops, steps;"), "{said}");
    assert!(said.contains("== loops failed; decode with --engine tch"), "{said}");
    assert!(words(&run.stdout).contains("20000 steps: device memory grew by 0.0 MiB"), "{}", words(&run.stdout));
    let parts = &machine.recorded("engine")["parts"];
    let failed = |part: &str| parts[part]["failed"].as_str().unwrap_or_else(|| panic!("{part} fails: {parts}"));
    assert!(failed("loops").contains("exit status 3: no good"), "{parts}");
    assert_eq!(parts["loops"]["lines"][0]["same"], false);
    assert!(failed("steps").starts_with("not done after"), "{parts}");
    assert!(failed("steps").ends_with("half a line: going on"), "{parts}");
    assert_eq!(parts["steps"]["lines"][0]["step_ms"], 3.5);
    assert_eq!(parts["endurance"]["failed"], serde_json::Value::Null);
    assert!(parts["transformers"]["skipped"].is_string(), "{parts}");
    let recorded = |end: &str| {
        let files = std::fs::read_dir(machine.out()).expect("results").map(|file| file.expect("a file").file_name());
        files.filter(|name| name.to_string_lossy().ends_with(end)).count()
    };
    assert_eq!(machine.recorded("engine")["environment"]["TORCH_CUDNN_SDPA_DEPRIORITIZED"], "1");
    std::thread::sleep(Duration::from_secs(1)); // the second is in the files' names
    machine.check(&["sanitizers"]);
    machine.check(&["sanitizers"]);
    assert!(recorded("engine.json") == 1 && recorded("sanitizers.json") >= 1, "no run replaces another's files");
}

#[test]
fn a_script_that_is_terminated_leaves_nothing_behind() {
    let machine = PlayedMachine::new();
    let (mut child, steps) = machine.in_steps();
    let is_running = || std::fs::read(format!("/proc/{steps}/cmdline")).is_ok_and(|line| !line.is_empty());
    assert!(is_running());
    assert!(Command::new("kill").arg(child.id().to_string()).status().expect("kill").success());
    assert_eq!(child.wait().expect("a child").code(), Some(128 + 15));
    assert!(!is_running(), "the part goes on");
    let left =
        std::fs::read_dir(machine.folder.path()).expect("a folder").map(|file| file.expect("a file").file_name());
    let scratch: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with("gpu-check-")).collect();
    assert!(scratch.is_empty(), "{scratch:?}");
    assert_eq!(machine.recorded("engine")["parts"]["loops"]["lines"][0]["same"], false, "what was done is kept");
}

#[test]
fn a_folder_for_results_that_cannot_be_made_is_reported_before_anything_runs() {
    let machine = PlayedMachine::new();
    write_atomic(&machine.out(), |out| std::io::Write::write_all(out, b"a file")).expect("a file of a test");
    let said = machine.check(&["engine"]);
    let error = words(&said.stderr);
    assert!(!said.status.success() && error.contains("cannot be written to"), "{error}");
    assert!(!error.contains("== engine"), "{error}");
}

#[test]
fn sanitizers_and_the_profiler_run_the_program() {
    let machine = PlayedMachine::new();
    let run = machine.check(&["sanitizers", "profile"]);
    let said = words(&run.stderr);
    assert!(said.contains("error: failed: memcheck, racecheck, synccheck;"), "{said}");
    let recorded = machine.recorded("sanitizers");
    assert!(!recorded.to_string().contains("/gpu_check gpu-check"), "a folder of this machine is in {recorded}");
    let parts = &recorded["parts"];
    for (tool, ends) in [("memcheck", "gpu_check gpu-check brief caching=1"), ("racecheck", "gpu-check brief caching=")]
    {
        let why = parts[tool]["failed"].as_str().expect("it fails");
        assert!(why.starts_with("exit status 9: 17\n=========") && why.ends_with(ends), "{why}");
    }
    let memcheck = parts["memcheck"]["failed"].as_str().expect("it fails");
    assert!(memcheck.contains("--tool memcheck --report-api-errors no --error-exitcode 9"), "{memcheck}");
    let printed = words(&run.stdout);
    assert!(printed.contains("| linear_1 | 1.0 | 1000.0 | 99.9 % | 2500 |"), "{printed}");
    assert!(printed.contains("| embed | 0.5 | 0.5 | 0.0 % | - |") && !printed.contains("| lost"), "{printed}");
    assert!(printed.contains("| norm | 2.0 | 1.0 | 0.1 % | 2 |"), "{printed}");
}
