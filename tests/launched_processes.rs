//! Promise: `--nproc` and torchrun's variables start processes that train together, and whatever happens to one of them, all end with a word.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use medusa::model::weights::WeightFiles;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::small_run::{Ended, SmallRun};

/// Relative for losses, absolute for final heads: sums over processes are rounded in another order.
const IN_FLOAT32: [f64; 2] = [1e-5, 1e-4];
const IN_FLOAT64: [f64; 2] = [1e-9; 2];
/// The longest time from the end of one process to that of the others.
const LONGEST_END: Duration = Duration::from_secs(30);

/// Variables of torchrun for one of two processes on this machine.
fn torchrun(rank: usize, port: u16) -> Vec<(&'static str, String)> {
    let numbers = [("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)];
    let numbers = numbers.map(|(name, value)| (name, value.to_string()));
    numbers.into_iter().chain([("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", port.to_string())]).collect()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

fn started(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

/// The end of a process, which must come in time.
pub(crate) fn ended(mut child: Child) -> Ended {
    let began = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        assert!(began.elapsed() < LONGEST_END, "still running");
        thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().expect("a child").into()
}

/// The processes that `parent` started.
#[cfg(target_os = "linux")]
fn started_by(parent: &Child) -> Vec<Pid> {
    let list = format!("/proc/{0}/task/{0}/children", parent.id());
    let list = std::fs::read_to_string(list).expect("a running process");
    let pid = |id: &str| Pid::from_raw(id.parse().expect("a process id")).expect("not 0");
    list.split_whitespace().map(pid).collect()
}

/// Both processes of a run in these folders, as torchrun starts them.
pub(crate) fn both(folders: [&SmallRun; 2], arguments: &[&str]) -> [Child; 2] {
    let port = free_port();
    [0, 1].map(|rank| {
        let mut command = folders[rank].trainer(arguments);
        command.envs(torchrun(rank, port));
        started(command)
    })
}

/// Both processes of a run that is long enough to be disturbed, after the first checkpoint.
fn long_run(small: &SmallRun, arguments: &[&str]) -> [Child; 2] {
    small.edit("recipe.toml", "epochs = 8", "epochs = 4000");
    let children = both([small, small], arguments);
    wait_for_checkpoint(small);
    children
}

fn wait_for_checkpoint(small: &SmallRun) {
    let began = Instant::now();
    while !small.path("run/step-000003").exists() {
        assert!(began.elapsed() < LONGEST_END, "no checkpoint");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Every logged loss and gradient norm.
fn numbers(small: &SmallRun) -> Vec<f64> {
    let lines = small.read("run/metrics.jsonl");
    let line = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let of_line = |line: Value| ["loss", "grad_norm", "tokens_per_step"].map(|key| line[key].as_f64());
    lines.lines().map(line).flat_map(of_line).flatten().collect()
}

fn assert_same(got: &SmallRun, expected: &SmallRun, [of_losses, of_heads]: [f64; 2]) {
    let (numbers, expected_numbers) = (numbers(got), numbers(expected));
    assert_eq!(numbers.len(), expected_numbers.len());
    for (number, expected) in numbers.iter().zip(&expected_numbers) {
        assert!((number - expected).abs() <= of_losses * expected.abs(), "{number} is not {expected}");
    }
    let heads = |run: &SmallRun| WeightFiles::open_file(&run.path("run/final/heads.safetensors")).expect("heads");
    let (heads, expected_heads) = (heads(got), heads(expected));
    for name in expected_heads.names() {
        let shape = expected_heads.shape(name).expect("a shape");
        let of = |heads: &WeightFiles| heads.mapped(name, &shape).expect("a tensor");
        let off = (of(&heads) - of(&expected_heads)).abs().max().double_value(&[]);
        assert!(off < of_heads, "{name}: {off}");
    }
}

#[test]
fn two_processes_train_what_one_trains() {
    let alone = SmallRun::new();
    alone.train(&[]).succeeded();
    let by_nproc = SmallRun::new();
    let program = env!("CARGO_BIN_EXE_medusa-train");
    let mut command = by_nproc.program(program, &["--nproc", "2", "--", "recipe.toml"]);
    let end = Ended::from(command.output().expect("the program starts")).succeeded();
    assert_eq!(end.stdout.trim(), "run/final", "only rank 0 prints the result: {end:?}");
    assert_same(&by_nproc, &alone, IN_FLOAT32);
    let by_torchrun = SmallRun::new();
    both([&by_torchrun, &by_torchrun], &[])
        .map(ended)
        .iter()
        .for_each(|end| assert_eq!(end.status, Some(0), "{end:?}"));
    assert_same(&by_torchrun, &by_nproc, IN_FLOAT32);
}

/// ZeRO-1, by gloo.
#[test]
fn two_processes_train_in_float64_what_one_trains_to_1e_9() {
    let [alone, shared] = [&[][..], &["--nproc", "2"]].map(|arguments| {
        let small = SmallRun::new();
        small.edit("recipe.toml", "float32", "float64");
        small.edit("recipe.toml", "learning_rate", "zero_stage = 1\nlearning_rate");
        small.train(arguments).succeeded();
        small
    });
    assert_same(&shared, &alone, IN_FLOAT64);
}

#[test]
fn a_killed_process_ends_the_others() {
    let small = SmallRun::new();
    let [first, mut second] = long_run(&small, &[]);
    second.kill().expect("a child");
    second.wait().expect("a child");
    ended(first).failed(1, &["rank 0: another process ended during", "--resume"]);
}

#[test]
fn a_process_that_hangs_is_given_up() {
    let small = SmallRun::new();
    let [first, second] = long_run(&small, &["--process-timeout", "2"]);
    let hung = Pid::from_child(&second);
    kill_process(hung, Signal::STOP).expect("a child");
    ended(first).failed(1, &["rank 0: no answer from another process during", "for 2 s", "--process-timeout"]);
    kill_process(hung, Signal::CONT).expect("a child");
    // By its own clock, the connection broke after the time was over.
    ended(second).failed(1, &["rank 1: ", "another process", "during"]);
}

#[test]
fn processes_of_different_runs_are_distinguished() {
    let [first, second] = [SmallRun::new(), SmallRun::new()];
    second.edit("recipe.toml", "learning_rate = 1e-2", "learning_rate = 2e-2");
    let differs = "rank 1 differs from rank 0 in `optimizer.learning_rate` of the recipe: it has 0.02, rank 0 has 0.01";
    for (rank, end) in both([&first, &second], &[]).map(ended).iter().enumerate() {
        end.failed(1, &[&format!("rank {rank}: {differs}")]);
    }
    assert!(!first.path("run").exists(), "nothing was written");
}

#[test]
fn a_mistake_that_only_rank_0_finds_ends_all_at_once_in_its_words() {
    let [first, second] = [SmallRun::new(), SmallRun::new()];
    first.edit("recipe.toml", "epochs = 8", "epochs = 8\nepoch = 9");
    let [own, other] = both([&first, &second], &[]).map(ended);
    own.failed(2, &["rank 0: recipe.toml", "unknown key `epoch`"]);
    other.failed(1, &["rank 1: rank 0 failed: recipe.toml"]);
    let first = SmallRun::new();
    std::fs::create_dir(first.path("run")).expect("a folder");
    first.write("run/notes.txt", "not a run");
    let [own, other] = both([&first, &second], &[]).map(ended);
    own.failed(1, &["rank 0: train.output_dir run"]);
    other.failed(1, &["rank 1: rank 0 failed: train.output_dir run"]);
}

#[test]
fn mistakes_of_the_start_are_reported() {
    let small = SmallRun::new();
    let with = |variables: &[(&str, &str)], arguments: &[&str]| {
        let mut command = small.trainer(arguments);
        command.envs(variables.iter().copied());
        Ended::from(command.output().expect("the program starts"))
    };
    with(&[("RANK", "0")], &[]).failed(2, &["RANK is set, but WORLD_SIZE is not"]);
    let world = [("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    with(&world, &[]).failed(2, &["RANK is 2, but WORLD_SIZE is 2"]);
    with(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")], &["--nproc", "2"])
        .failed(2, &["--nproc starts processes by itself"]);
    let too_many = with(&[], &["--nproc", "3"]);
    assert_eq!(too_many.status, Some(2), "{too_many:?}");
    let errors: Vec<&str> = too_many.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 3, "each rank says why it ends: {errors:?}");
    let why = "3 processes share the micro batches of an optimizer step";
    assert!(errors.iter().any(|error| error.starts_with(&format!("error: rank 0: {why}"))), "{errors:?}");
    assert!(
        errors.iter().any(|error| error.starts_with(&format!("error: rank 2: rank 0 failed: {why}"))),
        "{errors:?}"
    );
    let taken = TcpListener::bind("0.0.0.0:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let world = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)];
    with(&world, &[]).failed(1, &[&format!("port {port} of this machine is taken")]);
    let free = free_port().to_string();
    let world = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &free)];
    with(&world, &["--process-timeout", "2"]).failed(1, &["only 1 of 2 processes came within 2 s; missing: rank 1"]);
    assert!(!small.path("run").exists(), "nothing was written");
}

#[test]
fn an_interrupt_saves_once_and_no_process_stays() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "epochs = 8", "epochs = 4000");
    let parent = started(small.trainer(&["--nproc", "2"]));
    wait_for_checkpoint(&small);
    kill_process(Pid::from_child(&parent), Signal::TERM).expect("a child");
    let end = ended(parent);
    assert_eq!(end.status, Some(130), "{end:?}");
    assert_eq!(end.stderr.matches("interrupted; saved").count(), 1, "{}", end.stderr);
}

/// As service managers do: they signal every process of a service, and the parent passes its signal on.
#[cfg(target_os = "linux")]
#[test]
fn a_signal_to_every_process_is_one_interrupt() {
    let small = SmallRun::new();
    small.edit("recipe.toml", "epochs = 8", "epochs = 4000");
    let parent = started(small.trainer(&["--nproc", "2"]));
    wait_for_checkpoint(&small);
    let workers = started_by(&parent);
    assert_eq!(workers.len(), 2);
    let signal = |pid, signal| kill_process(pid, signal).expect("a process of the run");
    signal(workers[1], Signal::STOP); // so that the other one cannot save before all signals have come
    [workers[0], workers[1], Pid::from_child(&parent)].into_iter().for_each(|pid| signal(pid, Signal::TERM));
    thread::sleep(Duration::from_millis(300));
    signal(workers[1], Signal::CONT);
    let end = ended(parent);
    assert_eq!(end.status, Some(130), "{end:?}");
    assert_eq!(end.stderr.matches("interrupted; saved").count(), 1, "{}", end.stderr);
}
