//! Promise: several processes train what one process trains. Ranks are threads here.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use medusa::data::Watch;
use medusa::data::loader::BatchShare;
use medusa::formats::metrics::{MetricsLine, MetricsSplit};
use medusa::model::weights::WeightFiles;
use medusa::recipe::Recipe;
use medusa::train::backbone_pass::{StatesCaches, StatesSource, TrainingBackbone};
use medusa::train::checked::CheckedRun;
use medusa::train::error::TrainError;
use medusa::train::plan::TrainPlan;
use medusa::train::ranks::Ranks;
use medusa::train::run::TrainRun;
use medusa::train::state::TrainState;
use medusa::train::step::{StepShare, StepWeights, train_step};
use medusa::train::targets::TargetCounts;
use medusa::train::training_loop::{RunEvent, RunOutcome};
use tch::{Device, Kind};
use tempfile::TempDir;

use crate::published::published;
use crate::thread_ranks::as_ranks;

/// Relative, for losses and gradient norms: sums over processes are rounded in another order.
const TOLERANCE: f64 = 1e-5;
/// Both in float64.
const IN_FLOAT64: f64 = 1e-9;
/// Absolute, for the final heads: of each weight, with 8-bit moments of their mean.
const HEADS_TOLERANCE: f64 = 1e-4;

/// A small run on stories260K. A step has 4 micro batches of 2 rows.
#[derive(Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) dtype: &'a str,
    /// Tables of the stage.
    pub(crate) stage: &'a str,
    pub(crate) optimizer: &'a str,
    pub(crate) learning_rate: f64,
    pub(crate) zero_stage: u8,
    pub(crate) rows: usize,
    pub(crate) steps: usize,
    /// More keys of `[train]`.
    pub(crate) train: &'a str,
}

/// What a rank saw.
struct Seen {
    lines: Vec<MetricsLine>,
    outcome: Result<RunOutcome, TrainError>,
}

/// Numbers of ranks with ZeRO stages.
pub(crate) const ALL_WORLDS: [(usize, u8); 4] = [(2, 0), (2, 1), (4, 0), (4, 1)];

pub(crate) const MEDUSA1: &str = "[stage.medusa1]";
pub(crate) const FULL: &str = "[stage.medusa2]\nmedusa_heads_coefficient = 0.2";

/// Adapters, which start from given ones.
pub(crate) fn lora(self_distillation: bool) -> String {
    let adapter = published("reference/losses/adapter_init");
    format!(
        "[stage.medusa2]\nmedusa_heads_coefficient = 0.2\nself_distillation = {self_distillation}\n\
         [stage.medusa2.lora]\nrank = 8\nalpha = 16.0\ninit_from = {adapter:?}"
    )
}

impl<'a> Run<'a> {
    pub(crate) fn new(folder: &'a TempDir, stage: &'a str) -> Self {
        Self {
            folder: folder.path(),
            dtype: "float32",
            stage,
            optimizer: "adamw",
            learning_rate: 5e-4,
            zero_stage: 0,
            rows: 21,
            steps: 3,
            train: "",
        }
    }

    /// In a folder of its own, on `world_size` ranks.
    fn train(self, name: &str, world_size: usize) -> Vec<Seen> {
        let train = |ranks: Ranks| self.train_rank(name, ranks, &|_| ());
        if world_size == 1 { vec![train(Ranks::alone())] } else { as_ranks(world_size, train) }
    }

    fn train_rank(self, name: &str, ranks: Ranks, heard: &dyn Fn(&RunEvent)) -> Seen {
        let mut lines = vec![];
        let outcome = self.outcome(name, ranks, &mut |event| {
            if let RunEvent::Stepped(line) | RunEvent::Evaluated(line) = &event {
                lines.push((*line).clone());
            }
            heard(&event);
        });
        Seen { lines, outcome }
    }

    fn outcome(self, name: &str, ranks: Ranks, report: &mut dyn FnMut(RunEvent)) -> Result<RunOutcome, TrainError> {
        let resume = self.folder.join(name).exists();
        let resume = ranks.broadcast(ranks.is_first().then_some(resume))?; // before rank 0 makes the folder
        let checked =
            ranks.first_of_machine_first(|| CheckedRun::load(self.recipe(name).plan(Device::Cpu), Watch::default()))?;
        ranks.agree(TrainRun::load(checked))?.train(ranks, resume, &INTERRUPTED_BY_NOBODY, report)
    }

    fn recipe(&self, name: &str) -> Recipe {
        Recipe::parse(Path::new("run.toml"), &self.recipe_text(name)).expect("a recipe")
    }

    pub(crate) fn recipe_text(&self, name: &str) -> String {
        let (rows, backbone) = (published("reference/losses/rows.jsonl"), published("models/stories260K"));
        let Self { dtype, stage, optimizer, learning_rate, zero_stage, steps, train, .. } = self;
        format!(
            "[backbone]\npath = {backbone:?}\ndtype = {dtype:?}\n\
             [heads]\nmedusa_num_heads = 4\nmedusa_num_layers = 1\n\
             {stage}\n\
             [data]\ntrain = [{rows:?}]\nvalidation = [{rows:?}]\nlimit = {}\nmax_length = 512\npacking = false\nshuffle = false\n\
             [optimizer]\nname = {optimizer:?}\nlearning_rate = {learning_rate:e}\nweight_decay = 0.01\nzero_stage = {zero_stage}\n\
             [schedule]\nname = \"constant\"\n\
             [train]\noutput_dir = {:?}\nmax_steps = {steps}\nmicro_batch_size = 2\n\
             gradient_accumulation_steps = 4\nsave_every = 2\n{train}\n",
            self.rows,
            self.folder.join(name)
        )
    }

    pub(crate) fn final_heads(&self, name: &str) -> WeightFiles {
        WeightFiles::open_file(&self.folder.join(name).join("final/heads.safetensors")).expect("final heads")
    }

    fn files(&self, name: &str) -> Vec<Vec<u8>> {
        let read = |file: &str| fs::read(self.folder.join(name).join(file)).expect("a file of the run");
        ["final/heads.safetensors"].map(read).into()
    }
}

static INTERRUPTED_BY_NOBODY: AtomicBool = AtomicBool::new(false);

fn assert_close(what: &str, got: f64, expected: f64, tolerance: f64) {
    let far = (got - expected).abs() / expected.abs().max(1e-6);
    assert!(far <= tolerance, "{what}: {got}, expected {expected}: {far:.1e} apart");
}

/// Compares losses and gradient norms.
fn assert_same_line(what: &str, got: &MetricsLine, expected: &MetricsLine, tolerance: f64) {
    assert_eq!(
        (got.split, got.step, got.tokens, got.epoch),
        (expected.split, expected.step, expected.tokens, expected.epoch)
    );
    let what = format!("{what}, step {}", got.step);
    assert_close(&format!("{what}: loss"), got.loss, expected.loss, tolerance);
    let update = |line: &MetricsLine| line.update.as_ref().map(|update| update.grad_norm);
    if let (Some(got), Some(expected)) = (update(got), update(expected)) {
        assert_close(&format!("{what}: gradient norm"), got, expected, tolerance);
    }
    for (got, expected) in got.head_losses.iter().zip(&expected.head_losses) {
        let [got, expected] = [got, expected].map(|loss| loss.expect("targets"));
        assert_close(&format!("{what}: head"), got, expected, tolerance);
    }
    assert_eq!(got.perplexity.is_some(), expected.perplexity.is_some());
    if got.split == MetricsSplit::Validation {
        assert_close(&what, got.tokens_per_step.expect("rows"), expected.tokens_per_step.expect("rows"), 1e-3);
    }
}

/// Compares what all ranks saw, and the final heads, with a run of one process.
fn assert_same_run(run: &Run, [alone, shared]: [(&str, &[Seen]); 2], tolerances: [f64; 2]) {
    let (expected, (name, ranks)) = (&alone.1[0], shared);
    for (rank, seen) in ranks.iter().enumerate() {
        let what = format!("{name} of {} {}, rank {rank}", run.optimizer, run.stage);
        assert!(matches!(seen.outcome, Ok(RunOutcome::Finished(_))), "{what}: {:?}", seen.outcome);
        assert_eq!(seen.lines.len(), expected.lines.len(), "{what}");
        for (got, one) in seen.lines.iter().zip(&expected.lines) {
            assert_same_line(&what, got, one, tolerances[0]);
        }
    }
    let (got, expected) = (run.final_heads(name), run.final_heads(alone.0));
    assert_eq!(got.names(), expected.names());
    for name in expected.names() {
        let shape = expected.shape(name).expect("a shape");
        let read = |files: &WeightFiles| files.tensor(name, &shape, Kind::Double, Device::Cpu).expect("a tensor");
        let far = (read(&got) - read(&expected)).abs();
        // The last bits of a gradient can decide the 8-bit code of a small second moment, and with it whole updates of single weights.
        let far = if run.optimizer == "adamw" { far.max() } else { far.mean(Kind::Double) }.double_value(&[]);
        assert!(far <= tolerances[1], "{} of {} {}: {name} is {far:.1e} away", shared.0, run.optimizer, run.stage);
    }
}

/// Trains on one process, then on each number of ranks with each ZeRO stage.
fn assert_all_the_same(run: Run, worlds: &[(usize, u8)], tolerances: [f64; 2]) {
    let alone = run.train("alone", 1);
    for &(world_size, zero_stage) in worlds {
        let (run, name) = (Run { zero_stage, ..run }, format!("{world_size}-{zero_stage}"));
        let shared = run.train(&name, world_size);
        assert_same_run(&run, [("alone", &alone), (&name, &shared)], tolerances);
    }
}

#[test]
fn ranks_in_float64_train_what_one_process_trains_to_1e_9() {
    let distilled = lora(true);
    for (stage, world) in [(distilled.as_str(), (2, 1)), (FULL, (2, 0))] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let run = Run { dtype: "float64", rows: 13, steps: 2, ..Run::new(&folder, stage) };
        assert_all_the_same(run, &[world], [IN_FLOAT64; 2]);
        let kinds = |files: &WeightFiles| files.names().iter().map(|name| files.kind(name)).collect::<Vec<_>>();
        let kinds = kinds(&run.final_heads("alone"));
        assert!(kinds.iter().all(|kind| *kind == Some(Kind::Double)), "{kinds:?}");
    }
}

#[test]
fn a_run_in_float64_is_resumed_bit_for_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run { dtype: "float64", zero_stage: 1, rows: 16, steps: 4, ..Run::new(&folder, MEDUSA1) };
    run.train("straight", 2);
    Run { steps: 2, ..run }.train("resumed", 2);
    run.train("resumed", 2);
    assert!(run.files("resumed") == run.files("straight"));
    let moments = folder.path().join("resumed/step-000004/optimizer.safetensors");
    let moments = WeightFiles::open_file(&moments).expect("moments");
    assert!(moments.names().iter().all(|name| moments.kind(name) == Some(Kind::Double)));
}

/// Three steps of 21 rows: the last one has 3 micro batches, so that one of four ranks has none.
#[test]
fn ranks_train_what_one_process_trains_also_with_a_short_last_step() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run { optimizer: "adamw8bit", ..Run::new(&folder, MEDUSA1) };
    assert_all_the_same(run, &[(2, 1), (4, 0)], [TOLERANCE, HEADS_TOLERANCE]);
    // The masks of dropout are those of the step's micro batches, whichever rank has them.
    let (folder, stage) = (tempfile::tempdir().expect("a temporary folder"), lora(false) + "\ndropout = 0.1");
    assert_all_the_same(Run::new(&folder, &stage), &[(4, 1)], [TOLERANCE, HEADS_TOLERANCE]);
}

/// The best step so far, as rank 0 tells it, and how the run ended.
fn best_and_end(run: Run, name: &str, ranks: Ranks) -> (Vec<usize>, RunOutcome) {
    let mut best = vec![];
    let outcome = run.outcome(name, ranks, &mut |event| {
        if let RunEvent::Best(of, _) = event {
            best.push(of.step);
        }
    });
    (best, outcome.expect("a run that stops early"))
}

#[test]
fn ranks_keep_the_same_best_heads_and_stop_early_after_the_same_step() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let train = "eval_every = 1\nkeep_best = \"loss\"\npatience = 2";
    let run = Run { train, learning_rate: 0.3, rows: 16, steps: 12, ..Run::new(&folder, MEDUSA1) }; // soon worse
    let stopped = |name: &str, outcome: &RunOutcome| match outcome {
        RunOutcome::StoppedEarly { step, so_far, .. } => (*step, so_far.best.step),
        other => panic!("{name}: {other:?}"),
    };
    let (best, outcome) = best_and_end(run, "alone", Ranks::alone());
    let expected = stopped("alone", &outcome);
    assert!(expected == (expected.1 + 2, *best.last().expect("a best step")) && expected.0 < 12, "{expected:?}");
    let seen = as_ranks(3, |ranks| best_and_end(run, "three", ranks));
    assert_eq!(seen[0].0, best);
    for (rank, (best, outcome)) in seen.iter().enumerate() {
        assert_eq!(stopped("three", outcome), expected, "rank {rank}");
        assert!(rank == 0 || best.is_empty(), "rank {rank} keeps heads");
    }
    assert!(folder.path().join("three/best/heads.safetensors").exists());
}

#[test]
fn ranks_read_only_a_whole_cache_of_hidden_states() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = format!("hidden_state_cache = {:?}", folder.path().join("states"));
    let run = Run { train: &cache, rows: 16, ..Run::new(&folder, MEDUSA1) };
    let of_cache = |name: &str, ranks: Ranks| {
        let printed = RefCell::new(vec![]);
        let seen = run.train_rank(name, ranks, &|event| match event {
            RunEvent::CacheIncomplete(_) => printed.borrow_mut().push(None),
            RunEvent::HiddenStates { filled, rows, .. } => printed.borrow_mut().push(Some((*filled, *rows))),
            _ => (),
        });
        (seen, printed.into_inner())
    };
    let as_two = |name: &str| {
        let (seen, printed): (Vec<Seen>, Vec<_>) = as_ranks(2, |ranks| of_cache(name, ranks)).into_iter().unzip();
        (seen, printed)
    };
    let (computed, printed) = as_two("computed");
    assert_eq!(printed, [[None], [None]]);
    let (alone, printed) = of_cache("alone", Ranks::alone());
    assert_eq!(printed, [Some((0, 16))], "the ranks have written none");
    let (read, printed) = as_two("read");
    assert_eq!(printed, [[Some((16, 16))]; 2]);
    for (name, ranks) in [("computed", &computed), ("read", &read)] {
        assert_same_run(&run, [("alone", std::slice::from_ref(&alone)), (name, ranks)], [TOLERANCE, HEADS_TOLERANCE]);
    }
}

#[test]
fn a_run_is_resumed_by_another_number_of_ranks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run { optimizer: "adamw8bit", zero_stage: 1, rows: 32, steps: 4, ..Run::new(&folder, MEDUSA1) };
    let straight = run.train("straight", 2);
    let begun = Run { steps: 2, ..run };
    for (name, world_size, zero_stage) in [("two", 2, 1), ("four", 4, 1), ("whole", 2, 0), ("one", 1, 1)] {
        begun.train(name, 2);
        let resumed = Run { zero_stage, ..run }.train(name, world_size);
        assert!(resumed.iter().all(|seen| matches!(seen.outcome, Ok(RunOutcome::Finished(_)))), "{name}");
        let last = |seen: &[Seen]| seen[0].lines.last().cloned().expect("lines");
        assert_same_line(name, &last(&resumed), &last(&straight), TOLERANCE);
    }
    assert!(run.files("two") == run.files("straight"), "the same bits on the same number of ranks");
}

#[test]
fn each_rank_keeps_the_moments_and_sends_the_bytes_that_are_planned() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run { zero_stage: 1, ..Run::new(&folder, MEDUSA1) };
    let parameters = 4 * (64 * 64 + 64 + 512 * 64);
    let float64 = ("float64", 8, 2, 1, 3);
    let float32 =
        [(1, 1, 3), (2, 1, 3), (4, 1, 3), (4, 0, 2)].map(|(world, zero, rounds)| ("float32", 4, world, zero, rounds));
    for (dtype, element, world_size, zero_stage, rounds) in float32.into_iter().chain([float64]) {
        let recipe = Run { dtype, zero_stage, ..run }.recipe("run");
        let moments = as_ranks(world_size, |ranks| {
            let plan = TrainPlan { world_size, ..recipe.plan(Device::Cpu) };
            let loaded =
                TrainRun::load(CheckedRun::load(plan.clone(), Watch::default()).expect("rows")).expect("a backbone");
            let memory = loaded.checked.memory().whole();
            let sent = rounds * element * parameters * (world_size as u64 - 1) / world_size as u64;
            assert_eq!((memory.world_size, memory.sent_bytes), (world_size, sent));
            let drafter = loaded.checked.drafter.build(&loaded.backbone, None, 0).expect("untrained heads");
            let kept = TrainState::for_rank(drafter, &loaded.backbone, &plan, ranks).optimizer.state_bytes() as f64;
            let planned: u64 = memory.groups.iter().map(|group| group.optimizer_bytes).sum();
            assert!(
                (kept / planned as f64 - 1.0).abs() < 0.02,
                "rank {} keeps {kept}, planned {planned}",
                ranks.rank()
            );
            kept
        });
        let whole = (2 * element * parameters) as f64 * if zero_stage == 0 { world_size as f64 } else { 1.0 };
        assert_eq!(moments.iter().sum::<f64>(), whole, "{world_size} ranks, stage {zero_stage}");
    }
}

#[test]
fn an_interrupt_of_one_rank_stops_all_after_the_same_step() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run { rows: 16, steps: 50, ..Run::new(&folder, MEDUSA1) };
    let seen = as_ranks(2, |ranks| {
        let stop = AtomicBool::new(false);
        let mut steps = 0;
        let checked = CheckedRun::load(run.recipe("run").plan(Device::Cpu), Watch::default()).expect("rows");
        let loaded = TrainRun::load(checked).expect("a backbone");
        let outcome = loaded.train(ranks, false, &stop, &mut |event| {
            if let RunEvent::Stepped(line) = event {
                steps = line.step;
                stop.store(ranks.rank() == 1 && line.step == 3, Ordering::Relaxed);
            }
        });
        (steps, outcome.expect("an interrupted run"))
    });
    let saved = RunOutcome::Interrupted(folder.path().join("run/step-000003"));
    assert_eq!(seen, [(3, saved.clone()), (3, saved)]);
}

#[test]
fn ranks_with_different_recipes_stop_before_anything_is_written() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run::new(&folder, MEDUSA1);
    let other = Run { optimizer: "adamw8bit", ..run };
    let seen = as_ranks(2, |ranks| if ranks.is_first() { run } else { other }.train_rank("run", ranks, &|_| ()));
    for seen in seen {
        let error = seen.outcome.expect_err("two runs").to_string();
        let expected = "rank 1 differs from rank 0 in `optimizer.name` of the recipe: it has \"adamw8bit\", rank 0 has \"adamw\"; start";
        assert!(error.starts_with(expected), "{error}");
    }
    assert!(!folder.path().join("run").exists());
}

#[test]
fn a_rank_without_a_micro_batch_in_any_step_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run::new(&folder, MEDUSA1);
    for seen in run.train("run", 5) {
        let error = seen.outcome.expect_err("4 micro batches for 5 ranks");
        assert!(error.is_of_the_recipe());
        let facts = [
            "5 processes",
            "gradient_accumulation_steps = 4",
            "micro_batch_size = 1",
            "steps = 8, which are the same 8 rows",
        ];
        facts.iter().for_each(|fact| assert!(error.to_string().contains(fact), "{fact} is not in: {error}"));
    }
}

#[test]
fn a_folder_that_rank_0_loses_ends_all() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run { zero_stage: 1, rows: 16, steps: 4, ..Run::new(&folder, MEDUSA1) };
    let path = folder.path().join("run");
    let seen = as_ranks(2, |ranks| {
        run.train_rank("run", ranks, &|event| {
            if let (true, RunEvent::Stepped(MetricsLine { step: 1, .. })) = (ranks.is_first(), event) {
                fs::remove_dir_all(&path).expect("the run's folder");
                fs::File::create(&path).expect("a file in its place");
            }
        })
    });
    let errors: Vec<String> = seen.into_iter().map(|seen| seen.outcome.expect_err("no folder").to_string()).collect();
    let own = format!("{} was removed, moved or replaced while the run wrote to it", path.display());
    assert!(errors[0].starts_with(&own), "{}", errors[0]);
    assert!(errors[1].starts_with(&format!("rank 0 failed: {own}")), "{}", errors[1]);
}

#[test]
fn numbers_that_are_not_finite_are_reported_with_the_rows_of_all_ranks() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = Run { learning_rate: 1e30, rows: 16, ..Run::new(&folder, MEDUSA1) };
    let errors = run.train("run", 2).into_iter().map(|seen| seen.outcome.expect_err("no numbers").to_string());
    for error in errors {
        assert!(error.starts_with("step 2: the loss is "), "{error}");
        assert!(error.contains("rows [8, 9, 10, 11, 12, 13, 14, 15] of the training data"), "{error}");
    }
}

/// The error of a step whose update fails on rank 1 alone, on each of two ranks.
fn errors_of_a_failed_update(run: &Run) -> Vec<String> {
    let recipe = run.recipe("run");
    as_ranks(2, |ranks| {
        let loaded = TrainRun::load(CheckedRun::load(recipe.plan(Device::Cpu), Watch::default()).expect("rows"));
        let TrainRun { checked, backbone } = loaded.expect("a backbone");
        let drafter = checked.drafter.build(&backbone, None, 0).expect("untrained heads");
        let mut state = TrainState::for_rank(drafter, &backbone, &checked.plan, ranks);
        let states = StatesSource::Backbone(Box::new(StatesCaches::default()));
        let mut training = TrainingBackbone::new(&backbone, &checked.plan, states);
        let maker = training.batch_maker(&*state.drafter, MetricsSplit::Train);
        let make = |share| checked.batches(0, share).expect("rows").into_iter().map(|batch| maker.make(batch));
        let mut counts = TargetCounts::new(state.drafter.reads().levels);
        make(BatchShare::WHOLE).for_each(|batch| counts.add(&batch.batch, &batch.targets));
        if ranks.rank() == 1 {
            let _ = state.optimizer.state()[0].shallow_clone().resize_([1]); // no moment of any parameter
        }
        let batches: Vec<_> = make(ranks.share()).collect();
        let share = StepShare { batches: &batches, counts: &counts, ranks };
        let weights = StepWeights { loss: &checked.plan.loss, lambda0: 1.0, rate: 1e-3, max_grad_norm: 1.0 };
        train_step(&mut training, &mut state, share, &weights).expect_err("no update").to_string()
    })
}

#[test]
fn an_update_that_fails_on_one_rank_ends_all_with_its_words() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for zero_stage in [0, 1] {
        let errors = errors_of_a_failed_update(&Run { zero_stage, ..Run::new(&folder, MEDUSA1) });
        assert!(errors[1].starts_with("training step 1 failed: "), "{errors:?}");
        assert_eq!(errors[0], format!("rank 1 failed: {}", errors[1]));
    }
}

#[test]
#[ignore = "40 runs of 20 steps, two minutes: cargo test --test promises several_processes::twenty -- --ignored"]
fn twenty_steps_are_those_of_one_process() {
    let [plain, distilled] = [lora(false), lora(true)];
    let kinds = [
        (MEDUSA1, [TOLERANCE, HEADS_TOLERANCE]),
        (plain.as_str(), [TOLERANCE, HEADS_TOLERANCE]),
        (FULL, [TOLERANCE, HEADS_TOLERANCE]),
        (distilled.as_str(), [2e-4, 1e-3]),
    ];
    for (stage, tolerances) in kinds {
        for (optimizer, tolerance) in [("adamw", tolerances[0]), ("adamw8bit", tolerances[0].max(1e-4))] {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let run = Run { optimizer, rows: 160, steps: 20, ..Run::new(&folder, stage) };
            assert_all_the_same(run, &ALL_WORLDS, [tolerance, tolerances[1]]);
        }
    }
}
