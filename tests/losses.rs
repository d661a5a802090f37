//! Training matches an independent PyTorch program on the same rows: losses and gradient norm of every step, the
//! gradients of step 0, the final heads.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use medusa::data::Watch;
use medusa::data::loader::BatchShare;
use medusa::draft::loss::Targets;
use medusa::draft::loss::fused::OutputLayer;
use medusa::draft::trained::{DrafterBatch, LevelTargets, LevelTask};
use medusa::formats::metrics::MetricsLine;
use medusa::model::attention::RowMask;
use medusa::model::lora::Adapters;
use medusa::model::weights::WeightFiles;
use medusa::recipe::Recipe;
use medusa::torch::optim::adamw::gradient_norm;
use medusa::train::checked::CheckedRun;
use medusa::train::hidden_states::hidden_states;
use medusa::train::plan::TrainPlan;
use medusa::train::ranks::Ranks;
use medusa::train::run::TrainRun;
use medusa::train::state::TrainState;
use medusa::train::training_loop::{RunEvent, RunOutcome};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::published::published;

/// A reference run: 20 steps of 8 rows in file order.
#[derive(Clone, Copy)]
struct Reference {
    name: &'static str,
    /// Relative, for losses and for gradient norms.
    tolerance: [f64; 2],
    /// Relative, for the LM loss, which is taken as at least 1 % of the total loss.
    lm_tolerance: f64,
    /// Absolute, for the final heads.
    heads_tolerance: f64,
    micro_batch_size: usize,
    recompute: bool,
}

impl Reference {
    const fn new(name: &'static str, tolerance: [f64; 2], lm_tolerance: f64) -> Self {
        Self { name, tolerance, lm_tolerance, heads_tolerance: 1e-4, micro_batch_size: 8, recompute: false }
    }

    fn stage(&self) -> String {
        let (distill, scheduler) =
            (self.name.contains("distill"), if self.name.contains("sine") { "sine" } else { "constant" });
        let adapter = published("reference/losses/adapter_init");
        match self.name {
            "medusa1" => "[stage.medusa1]".to_owned(),
            _ => format!(
                "[stage.medusa2]\nmedusa_heads_coefficient = 0.2\nmedusa_scheduler = {scheduler:?}\n\
                 self_distillation = {distill}\n\
                 [stage.medusa2.lora]\nrank = 8\nalpha = 16.0\ninit_from = {adapter:?}"
            ),
        }
    }

    fn plan(&self, output_dir: &Path) -> TrainPlan {
        let rows = published("reference/losses/rows.jsonl");
        let backbone = published("models/stories260K");
        let (micro, stage) = (self.micro_batch_size, self.stage());
        let accumulation = 8 / micro;
        let multiplier = if self.name == "medusa1" { "" } else { "medusa_lr_multiplier = 4.0\n" };
        let recompute = if self.recompute { "recompute = true\n" } else { "" };
        let recipe = format!(
            "[backbone]\npath = {backbone:?}\ndtype = \"float32\"\n\
             [heads]\nmedusa_num_heads = 4\nmedusa_num_layers = 1\n\
             {stage}\n\
             [data]\ntrain = [{rows:?}]\nmax_length = 512\npacking = false\nshuffle = false\n\
             [optimizer]\nlearning_rate = 5e-4\n{multiplier}\
             [schedule]\nname = \"constant\"\n\
             [train]\noutput_dir = {output_dir:?}\nmax_steps = 20\nmicro_batch_size = {micro}\n\
             gradient_accumulation_steps = {accumulation}\n{recompute}"
        );
        Recipe::parse(Path::new("reference.toml"), &recipe).expect("a recipe").plan(Device::Cpu)
    }

    fn run(&self, folder: &TempDir) -> TrainRun {
        let checked = CheckedRun::load(self.plan(&folder.path().join("run")), Watch::default()).expect("rows");
        TrainRun::load(checked).expect("a backbone")
    }

    fn steps(&self) -> Vec<serde_json::Value> {
        let path = published(&format!("reference/losses/{}_losses.json", self.name));
        let text = fs::read_to_string(path).expect("the reference");
        let reference: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        reference["steps"].as_array().expect("steps").clone()
    }

    fn file(&self, what: &str) -> WeightFiles {
        let path = published(&format!("reference/losses/{}_{what}.safetensors", self.name));
        WeightFiles::open_file(&path).expect("the reference")
    }
}

const MEDUSA1: Reference = Reference::new("medusa1", [1e-5, 1e-5], 0.0);
const MEDUSA2: Reference = Reference::new("medusa2", [1e-5, 1e-5], 1e-5);
/// Run in float64, the reference program itself differs by up to 2.1e-4 in the LM loss.
const DISTILL: Reference = Reference::new("medusa2_distill", [1e-4, 2e-4], 2.5e-4);
/// λ0 starts at 0, so the first gradients are rounding noise, which AdamW scales to the usual step size: run in
/// float64, the reference program itself differs by up to 4e-3 in the LM loss and 3e-3 in the final heads.
const DISTILL_SINE: Reference =
    Reference { heads_tolerance: 5e-3, ..Reference::new("medusa2_distill_sine", [2e-3, 2e-2], 5e-3) };

fn assert_close(what: &str, got: f64, expected: f64, relative: f64) {
    let error = (got - expected).abs() / expected.abs();
    assert!(
        error <= relative,
        "{what}: got {got}, PyTorch has {expected}: relative error {error:.2e} > {relative:.0e}"
    );
}

fn assert_tensors_close(name: &str, got: &Tensor, expected: &Tensor, tolerance: f64) {
    let difference = (got - expected).abs();
    let worst = difference.max().double_value(&[]);
    let at = difference.argmax(None, false).int64_value(&[]);
    assert!(worst <= tolerance, "{name}: largest difference {worst:.2e} at flat index {at} > {tolerance:.0e}");
}

/// Compares a step's losses, gradient norm and λ0.
fn check_step(reference: &Reference, line: &MetricsLine, expected: &serde_json::Value) {
    let number = |key: &str| expected[key].as_f64().expect("a number");
    let (step, [tolerance, norm_tolerance]) = (line.step - 1, reference.tolerance);
    let update = line.update.as_ref().expect("a training line");
    let is_noise = number("grad_norm") < 1e-6; // sine: λ0 = 0 at step 0, where student and teacher are equal
    if !is_noise {
        assert_close(&format!("step {step}, loss"), line.loss, number("loss"), tolerance);
        assert_close(&format!("step {step}, gradient norm"), update.grad_norm, number("grad_norm"), norm_tolerance);
    } else {
        assert!(line.loss.abs() < 1e-6 && update.grad_norm < 1e-5, "step {step}: {line:?}");
    }
    if let Some(lm_loss) = line.lm_loss {
        let size = number("lm_loss").max(0.01 * number("loss")).max(1e-6);
        let error = (lm_loss - number("lm_loss")).abs() / size;
        assert!(error <= reference.lm_tolerance, "step {step}, LM loss: got {lm_loss}, PyTorch has {expected}");
        assert_eq!(update.lambda0, number("lambda0"), "step {step}, λ0");
    }
    for (head, expected) in expected["head_losses"].as_array().expect("heads").iter().enumerate() {
        let got = line.head_losses[head].expect("every head has targets");
        assert_close(&format!("step {step}, head {}", head + 1), got, expected.as_f64().expect("a loss"), tolerance);
    }
}

fn check_run(reference: &Reference) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = reference.run(&folder);
    let mut lines: Vec<MetricsLine> = vec![];
    let mut report = |event: RunEvent| {
        if let RunEvent::Stepped(line) = event {
            lines.push(line.clone());
        }
    };
    let outcome = run.train(Ranks::alone(), false, &AtomicBool::new(false), &mut report).expect("20 steps");
    let steps = reference.steps();
    assert_eq!(lines.len(), steps.len());
    lines.iter().zip(&steps).for_each(|(line, expected)| check_step(reference, line, expected));
    let RunOutcome::Finished(heads) = outcome else { panic!("finished, got {outcome:?}") };
    let got = WeightFiles::open_file(&heads.join("heads.safetensors")).expect("our heads");
    let expected = reference.file("heads_final");
    assert_eq!(got.names(), expected.names());
    for name in expected.names() {
        let shape = expected.shape(name).expect("a shape");
        let read = |files: &WeightFiles| files.tensor(name, &shape, Kind::Float, Device::Cpu).expect("a tensor");
        assert_tensors_close(name, &read(&got), &read(&expected), reference.heads_tolerance);
    }
}

/// Eight rows per micro batch, then two, then with recomputed layers.
fn check_all_ways(reference: Reference) {
    check_run(&reference);
    check_run(&Reference { micro_batch_size: 2, ..reference });
    check_run(&Reference { recompute: true, ..reference });
}

#[test]
fn twenty_steps_of_medusa1_equal_pytorch() {
    check_run(&MEDUSA1);
    check_run(&Reference { micro_batch_size: 2, ..MEDUSA1 });
}

#[test]
fn twenty_steps_of_medusa2_equal_pytorch() {
    check_all_ways(MEDUSA2);
}

#[test]
fn twenty_steps_of_self_distillation_equal_pytorch() {
    check_all_ways(DISTILL);
}

#[test]
fn twenty_steps_of_self_distillation_with_a_sine_equal_pytorch() {
    check_all_ways(DISTILL_SINE);
}

#[test]
fn gradients_of_step_zero_equal_pytorch() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let plan = MEDUSA1.plan(&folder.path().join("run"));
    let run = MEDUSA1.run(&folder);
    let (backbone, loss) = (&run.backbone, &plan.loss);
    let drafter = run.checked.drafter.build(backbone, None, 0).expect("untrained heads");
    let state = TrainState::new(drafter, backbone, &plan);
    let batch = &run.checked.batches(0, BatchShare::WHOLE).expect("rows")[0];
    let t = batch.length as i64;
    let rows = RowMask::packed(&batch.segment_lengths, t, &backbone.config, Device::Cpu);
    let tokens_bt = Tensor::from_slice(&batch.input_ids).view([batch.rows as i64, t]);
    let hidden_nh = hidden_states(backbone, &(tokens_bt, rows), Adapters::Off);
    let task = |level: usize| {
        let targets = batch.targets(level + 2);
        let scale = loss.weight(level) / targets.positions.len() as f64;
        let [positions_m, tokens_m] = [&targets.positions, &targets.tokens].map(|list| Tensor::from_slice(list));
        LevelTask { targets: LevelTargets::Labels(Targets { positions_m, tokens_m, previous_mj: None }), scale }
    };
    let of_drafter = DrafterBatch {
        rows: batch,
        backbone,
        lm_head: OutputLayer::lm_head(backbone, Adapters::Off),
        states_nw: &hidden_nh,
        hidden_nh: &hidden_nh,
        dropout: None,
        levels: (0..4).map(task).collect(),
    };
    let _ = state.drafter.losses(&of_drafter, Some(&state.drafter_gradients(None)));
    let reference = MEDUSA1.file("grads_step0");
    let parameters = || state.parameters.iter().map(|p| &p.parameter);
    let in_reference: Vec<_> = parameters().filter(|p| reference.contains(&p.name)).collect();
    // The reference stores gradients clipped to a norm of 1.
    let clip = 1.0 / (gradient_norm(parameters()) + 1e-6);
    assert_eq!(in_reference.len(), 8, "the reference holds the gradients of W1 and W2 of four heads");
    for parameter in in_reference {
        let expected =
            reference.tensor(&parameter.name, &parameter.value.size(), Kind::Float, Device::Cpu).expect("a tensor");
        let largest = expected.abs().max().double_value(&[]);
        assert_tensors_close(&parameter.name, &(&parameter.gradient * clip), &expected, 1e-5 * largest);
    }
}
