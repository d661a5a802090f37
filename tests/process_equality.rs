//! Promise: the processes that `--nproc` starts train what one process trains, whatever is trained.
#![expect(clippy::print_stderr, reason = "how far the runs are apart is read with --nocapture")]

use std::io::Write as _;
use std::process::Command;

use medusa::files::write_atomic;
use medusa::formats::metrics::{MetricsFile, MetricsLine, MetricsSplit};
use medusa::model::weights::WeightFiles;
use tch::{Device, Kind};

use super::several_processes::{ALL_WORLDS, FULL, MEDUSA1, Run, lora};
use super::small_run::Ended;

/// Relative for losses and gradient norms, and absolute for the final heads.
const TOLERANCES: [f64; 3] = [1e-5, 1e-5, 1e-4];
/// The first gradients of the adapters are rounding noise.
const OF_DISTILLATION: [f64; 3] = [1e-3, 1e-3, 1e-3];
const IN_FLOAT64: [f64; 3] = [1e-9, 1e-9, 1e-9];

/// Trains with `medusa-train`, in a folder of its own.
fn train(run: &Run, name: &str, nproc: usize) {
    let recipe = run.folder.join(format!("{name}.toml"));
    write_atomic(&recipe, |out| out.write_all(run.recipe_text(name).as_bytes())).expect("a recipe");
    let mut command = Command::new(env!("CARGO_BIN_EXE_medusa-train"));
    command.arg(recipe).args(["--nproc", &nproc.to_string()]).current_dir(run.folder);
    command.envs([("OMP_NUM_THREADS", "1"), ("MEDUSA_CUDA", "off"), ("MEDUSA_CACHE", "token_cache")]);
    Ended::from(command.output().expect("the program starts")).succeeded();
}

/// `f64::max` passes over a NaN.
fn finite(distance: f64) -> f64 {
    assert!(distance.is_finite(), "{distance}");
    distance
}

/// How far two numbers of each line of metrics.jsonl are apart at most.
fn apart(lines: [&[MetricsLine]; 2], number: impl Fn(&MetricsLine) -> Option<f64>) -> f64 {
    let [got, expected] = lines;
    assert_eq!(got.len(), expected.len());
    let far = |(got, expected): (&MetricsLine, &MetricsLine)| match (number(got), number(expected)) {
        (None, None) => 0.0,
        (Some(got), Some(expected)) => finite((got - expected).abs() / expected.abs()),
        only_one => panic!("step {}: {only_one:?}", expected.step),
    };
    got.iter().zip(expected).map(far).fold(0.0, f64::max)
}

fn heads_apart(files: [&WeightFiles; 2]) -> f64 {
    assert_eq!(files[0].names(), files[1].names());
    let of = |name: &str| {
        let shape = files[1].shape(name).expect("a shape");
        let [got, expected] = files.map(|file| file.tensor(name, &shape, Kind::Double, Device::Cpu).expect("a tensor"));
        finite((got - expected).abs().max().double_value(&[]))
    };
    files[0].names().into_iter().map(of).fold(0.0, f64::max)
}

/// How far a run of several processes is from one of one: its losses, its gradient norms and its final heads.
fn distances(run: &Run, names: [&str; 2]) -> [f64; 3] {
    let lines = names.map(|name| {
        let path = run.folder.join(name).join("metrics.jsonl");
        let lines = MetricsFile::read(&path).expect("the losses").lines;
        lines.into_iter().map(|(_, line)| line).collect::<Vec<MetricsLine>>()
    });
    let of_training = lines[1].iter().filter(|line| line.split == MetricsSplit::Train).count();
    assert_eq!(of_training, run.steps);
    let lines = [&lines[0][..], &lines[1][..]];
    let heads = names.map(|name| run.final_heads(name));
    let norms = apart(lines, |line| line.update.as_ref().map(|update| update.grad_norm));
    [apart(lines, |line| Some(line.loss)), norms, heads_apart([&heads[0], &heads[1]])]
}

/// Trains each stage with one process, and with 2 and 4, `zero_stage` 0 and 1.
fn assert_same(dtype: &str, of_stages: [f64; 3], of_distillation: [f64; 3]) {
    let [plain, distilled] = [lora(false), lora(true)];
    for (what, stage, tolerances) in [
        ("Medusa-1", MEDUSA1, of_stages),
        ("Medusa-2 with LoRA", &plain, of_stages),
        ("self-distillation", &distilled, of_distillation),
        ("fine-tuning of the backbone", FULL, of_stages),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let run = Run { dtype, rows: 160, steps: 20, ..Run::new(&folder, stage) };
        train(&run, "alone", 1);
        for (nproc, zero_stage) in ALL_WORLDS {
            let name = format!("{nproc}-{zero_stage}");
            train(&Run { zero_stage, ..run }, &name, nproc);
            let far = distances(&run, [&name, "alone"]);
            let [losses, norms, heads] = far;
            eprintln!("| {what} | {nproc} | {zero_stage} | {losses:.1e} | {norms:.1e} | {heads:.1e} |");
            let is_near = far.iter().zip(tolerances).all(|(far, tolerance)| *far <= tolerance);
            assert!(is_near, "{what}, {nproc} processes, zero_stage = {zero_stage}: {far:?}, expected {tolerances:?}");
        }
    }
}

#[test]
#[ignore = "20 runs of 20 steps, several minutes: cargo test --test promises process_equality -- --ignored --nocapture"]
fn twenty_steps_of_processes_are_those_of_one() {
    assert_same("float32", TOLERANCES, OF_DISTILLATION);
}

#[test]
#[ignore = "20 runs of 20 steps, several minutes: cargo test --test promises process_equality -- --ignored --nocapture"]
fn twenty_steps_of_processes_are_those_of_one_in_float64() {
    assert_same("float64", IN_FLOAT64, IN_FLOAT64);
}
