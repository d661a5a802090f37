//! Training equals an independent PyTorch program on the same rows: every step's losses and gradient norm, the gradients of
//! step 0, the final heads.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use medusa::medusa::fused_loss::head_loss;
use medusa::medusa::heads::HeadsConfig;
use medusa::medusa::loss::{LossConfig, Targets};
use medusa::model::weights::WeightFiles;
use medusa::torch::optim::adamw::gradient_norm;
use medusa::train::hidden_states::BatchStates;
use medusa::train::log::MetricsLine;
use medusa::train::run::{Event, Job, Outcome, Prepared};
use medusa::train::state::TrainState;
use tch::{Device, Kind, Tensor};

fn shared(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared").join(path)
}

fn parse<T: serde::de::DeserializeOwned>(toml: &str) -> T {
    toml::from_str(toml).expect("a section of a recipe")
}

/// The reference's run: 20 steps of 8 rows in file order.
fn job(output_dir: &Path, micro_batch_size: usize, accumulation: usize) -> Job {
    let rows = shared("reference/losses/rows.jsonl");
    let backbone = shared("models/stories260K");
    Job {
        backbone: parse(&format!("path = {backbone:?}\ndtype = \"float32\"")),
        heads: parse("medusa_num_heads = 4\nmedusa_num_layers = 1"),
        loss: LossConfig::default(),
        data: parse(&format!("train = [{rows:?}]\nmax_length = 512\npacking = false\nshuffle = false")),
        optimizer: parse("learning_rate = 5e-4"),
        schedule: parse("name = \"constant\""),
        train: parse(&format!(
            "output_dir = {output_dir:?}\nmax_steps = 20\nmicro_batch_size = {micro_batch_size}\ngradient_accumulation_steps = {accumulation}"
        )),
        resolved_recipe: "the reference".into(),
        device: Device::Cpu,
    }
}

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

fn reference_losses() -> serde_json::Value {
    let text = fs::read_to_string(shared("reference/losses/medusa1_losses.json")).expect("the reference");
    serde_json::from_str(&text).expect("JSON")
}

fn check_run(micro_batch_size: usize, accumulation: usize) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = folder.path().join("run");
    let prepared = Prepared::load(job(&run, micro_batch_size, accumulation)).expect("a run");
    let mut lines: Vec<MetricsLine> = vec![];
    let mut tell = |event: Event| {
        if let Event::Stepped(line) = event {
            lines.push(line.clone());
        }
    };
    let outcome = prepared.train(false, &AtomicBool::new(false), &mut tell).expect("20 steps");
    let reference = reference_losses();
    let steps = reference["steps"].as_array().expect("steps");
    assert_eq!(lines.len(), steps.len());
    for (line, expected) in lines.iter().zip(steps) {
        let number = |key: &str| expected[key].as_f64().expect("a number");
        let step = line.step - 1;
        assert_close(&format!("step {step}, loss"), line.loss, number("loss"), 1e-5);
        let norm = line.update.as_ref().expect("a training line").grad_norm;
        assert_close(&format!("step {step}, gradient norm"), norm, number("grad_norm"), 1e-5);
        for (head, expected) in expected["head_losses"].as_array().expect("heads").iter().enumerate() {
            let got = line.head_losses[head].expect("every head has targets");
            assert_close(&format!("step {step}, head {}", head + 1), got, expected.as_f64().expect("a loss"), 1e-5);
        }
    }
    let Outcome::Finished(heads) = outcome else { panic!("finished, got {outcome:?}") };
    let got = WeightFiles::open_file(&heads.join("heads.safetensors")).expect("our heads");
    let expected =
        WeightFiles::open_file(&shared("reference/losses/medusa1_heads_final.safetensors")).expect("the reference");
    assert_eq!(got.names(), expected.names());
    for name in expected.names() {
        let shape = expected.shape(name).expect("a shape");
        let read = |files: &WeightFiles| files.tensor(name, &shape, Kind::Float, Device::Cpu).expect("a tensor");
        assert_tensors_close(name, &read(&got), &read(&expected), 1e-4);
    }
}

#[test]
#[cfg_attr(not(shared), ignore = "needs ../shared")]
fn twenty_steps_of_medusa1_equal_pytorch() {
    check_run(8, 1);
}

#[test]
#[cfg_attr(not(shared), ignore = "needs ../shared")]
fn micro_batches_of_two_equal_one_of_eight() {
    check_run(2, 4);
}

#[test]
#[cfg_attr(not(shared), ignore = "needs ../shared")]
fn gradients_of_step_zero_equal_pytorch() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let job = job(&folder.path().join("run"), 8, 1);
    let (config, loss, optimizer): (HeadsConfig, _, _) = (job.heads.clone(), job.loss.clone(), job.optimizer.clone());
    let prepared = Prepared::load(job).expect("a run");
    let backbone = prepared.backbone();
    let lm_head = backbone.lm_head_weight().expect("a plain lm_head");
    let state = TrainState::new(medusa::medusa::heads::Heads::new(&config, lm_head), optimizer);
    let batch = &prepared.batches(0)[0];
    let hidden_nh = BatchStates::computed(backbone, batch).hidden_nh;
    for head in 0..4 {
        let targets = batch.targets(head + 2);
        let scale = loss.weight(head) / targets.positions.len() as f64;
        let targets = Targets {
            positions_m: Tensor::from_slice(&targets.positions),
            tokens_m: Tensor::from_slice(&targets.tokens),
        };
        let medusa_head = state.heads.head(head);
        let w2 = medusa_head.w2().expect("own W2");
        head_loss(medusa_head, w2, &hidden_nh, &targets, Some((&state.gradients_of(head), scale)));
    }
    let reference =
        WeightFiles::open_file(&shared("reference/losses/medusa1_grads_step0.safetensors")).expect("the reference");
    let in_reference: Vec<_> = state.parameters.iter().filter(|p| reference.contains(&p.name)).collect();
    // The reference holds gradients after clipping to a norm of 1.
    let clip = 1.0 / (gradient_norm(&state.parameters) + 1e-6);
    assert_eq!(in_reference.len(), 8, "the reference holds the gradients of W1 and W2 of four heads");
    for parameter in in_reference {
        let expected =
            reference.tensor(&parameter.name, &parameter.value.size(), Kind::Float, Device::Cpu).expect("a tensor");
        let largest = expected.abs().max().double_value(&[]);
        assert_tensors_close(&parameter.name, &(&parameter.gradient * clip), &expected, 1e-5 * largest);
    }
}
