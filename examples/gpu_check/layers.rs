//! Trains backbones whose layers lie on a GPU and on the CPU, or on two GPUs, and compares them with the same backbone on one device. This needs
//! several devices, so no test on a CPU replaces it.

use std::num::NonZeroUsize;

use medusa::cli::print_json;
use medusa::fused::optim::{first_not_finite, gradient_norm, step};
use medusa::model::adapters::attach_new;
use medusa::model::backward::Keep;
use medusa::model::config::LlamaConfig;
use medusa::model::llama::Llama;
use medusa::model::lora::{Adapters, LoraConfig, TargetModules};
use medusa::model::stages::Stages;
use medusa::numbers::{Fraction, Positive};
use medusa::torch::optim::adamw::{AdamW, Parameter};
use medusa::torch::optim::{AdamWConfig, OptimizerName};
use medusa::torch::{Accelerator, accelerator, device_name};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::random::config;

const LAYERS: usize = 5;
/// Of every row; the second holds two texts.
const LENGTH: usize = 200;
/// The largest distance from the numbers of one device, relative to their norm: sums in float32 are in another order, and AdamW's first updates
/// have the size of the learning rate where a gradient's sign is rounded otherwise.
const FARTHEST: f64 = 0.01;

/// Devices with numbers of layers.
type Map = Vec<(Device, usize)>;

/// What is trained.
#[derive(Debug, Clone, Copy)]
enum TrainedPart {
    Adapters(OptimizerName, Keep),
    Backbone,
}

/// Numbers of two steps.
struct Outcome {
    /// By name, on the CPU.
    numbers: Vec<(String, Tensor)>,
    copies: [u64; 2],
    is_finite: bool,
}

/// Runs every map.
///
/// # Errors
/// Maps whose numbers are too far from those of one device.
pub(crate) fn on_several_devices(on: Device) -> anyhow::Result<()> {
    tch::with_grad(|| check(&maps(on), &config(64, 2, None, LAYERS)))
}

/// With the CPU as the second and as the first device, and over all GPUs where there are several.
fn maps(on: Device) -> Vec<Map> {
    let mut maps = vec![vec![(on, 2), (Device::Cpu, 3)], vec![(Device::Cpu, 1), (on, 1), (Device::Cpu, 3)]];
    if let Accelerator::Cuda { devices } = *accelerator::open()
        && devices > 1
    {
        let gpus = devices.min(LAYERS);
        maps.push((0..gpus).map(|at| (Device::Cuda(at), if at == 0 { LAYERS + 1 - gpus } else { 1 })).collect());
    }
    maps
}

fn check(maps: &[Map], config: &LlamaConfig) -> anyhow::Result<()> {
    let mut wrong = vec![];
    let parts = [
        TrainedPart::Adapters(OptimizerName::AdamW, Keep::Everything),
        TrainedPart::Adapters(OptimizerName::AdamW8bit, Keep::Inputs),
        TrainedPart::Backbone,
    ];
    for (map, part) in maps.iter().flat_map(|map| parts.map(|part| (map, part))) {
        let one = trained(&vec![(map[0].0, LAYERS)], part, config);
        let several = trained(map, part, config);
        let distances = one.numbers.iter().zip(&several.numbers).map(|((name, a), (_, b))| (distance(b, a), name));
        let (distance, name) = distances.max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are numbers");
        let words: Vec<String> = map.iter().map(|(device, n)| format!("{} {n}", device_name(*device))).collect();
        let what = format!("{} of {part:?}", words.join(", "));
        print_json(&json!({"check": "layers", "map": words.join(", "), "trained": format!("{part:?}"),
            "distance": distance.min(f64::MAX), "of": name, "copies": several.copies}))?;
        let borders = 2 * (map.len() as u64 - 1);
        // Two steps; frozen embeddings have no gradient, but the first layer's adapters do, behind every border.
        if distance.is_nan() || distance > FARTHEST || several.copies != [borders; 2] || !several.is_finite {
            wrong.push(what);
        }
    }
    anyhow::ensure!(wrong.is_empty(), "not as on one device: {wrong:?}");
    Ok(())
}

/// The distance relative to the expected norm; NaN stays.
fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    (got - expected).norm().double_value(&[]) / expected.norm().double_value(&[]).max(f64::MIN_POSITIVE)
}

/// Two steps of a backbone on a map: hidden states, gradients, their norm and the updated parameters.
fn trained(map: &Map, part: TrainedPart, config: &LlamaConfig) -> Outcome {
    let stages = map.iter().map(|&(device, layers)| (device, NonZeroUsize::new(layers).expect("layers")));
    let mut llama = Llama::random_on(config.clone(), Kind::Float, Stages::new(stages), 3);
    let (optimizer, keep) = match part {
        TrainedPart::Adapters(optimizer, keep) => {
            attach_new(&mut llama, &lora(), 4);
            (optimizer, keep)
        }
        TrainedPart::Backbone => {
            llama = llama.for_fine_tuning(Kind::Float);
            (OptimizerName::AdamW, Keep::Everything)
        }
    };
    let mut all: Vec<Parameter> = (0..llama.parts())
        .flat_map(|part| llama.trained_in(part))
        .map(|(name, value)| Parameter::new(name, value))
        .collect();
    let config = AdamWConfig { name: optimizer, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
    let mut adamw = AdamW::new(config, &all);
    let mut numbers = vec![];
    for seed in 0..2 {
        let hidden = backward(&llama, &all, keep, seed);
        let norm = gradient_norm(&all.iter().collect::<Vec<_>>());
        numbers.extend([(format!("hidden states {seed}"), hidden), (format!("norm {seed}"), norm)]);
        numbers.extend(all.iter().map(|p| (format!("gradient {seed} of {}", p.name), p.gradient.copy())));
        step(&mut adamw, &mut all.iter_mut().collect::<Vec<_>>(), 1e-3, 0.5);
    }
    let is_finite = first_not_finite(&all.iter().collect::<Vec<_>>()).is_none();
    numbers.extend(all.iter().map(|p| (p.name.clone(), p.value.detach())));
    let on_host = |(name, tensor): (String, Tensor)| (name, tensor.to_device(Device::Cpu).to_kind(Kind::Double));
    let numbers = numbers.into_iter().map(on_host).collect();
    Outcome { numbers, copies: llama.borders().copies(), is_finite }
}

/// Adds the gradients of two packed rows; returns their hidden states.
fn backward(llama: &Llama, all: &[Parameter], keep: Keep, seed: u64) -> Tensor {
    let ids: Vec<i64> = (0..2 * LENGTH as i64).map(|t| (t * t * 7 + t) % llama.config.vocab_size).collect();
    let tokens_bt = Tensor::from_slice(&ids).view([2, -1]).to_device(llama.stages().first());
    let rows = llama.packed_rows(&[vec![LENGTH], vec![LENGTH / 2, LENGTH / 2 - 3]], LENGTH as i64);
    let (hidden_bth, tape) = llama.forward_kept(&tokens_bt, rows, Adapters::Training { seed }, keep);
    let options = (Kind::Float, hidden_bth.device());
    let dhidden_bth = Tensor::arange(hidden_bth.numel() as i64, options).sin().view_as(&hidden_bth);
    let mut gradients = all.iter().map(|parameter| &parameter.gradient);
    let parts = (0..llama.parts()).map(|part| gradients.by_ref().take(llama.trained_in(part).len()).collect());
    tape.backward(&dhidden_bth, &parts.collect::<Vec<_>>());
    hidden_bth
}

fn lora() -> LoraConfig {
    LoraConfig {
        rank: NonZeroUsize::new(8).expect("a constant"),
        alpha: Positive::new(16.0).expect("a constant"),
        dropout: Fraction::new(0.1).expect("a constant"),
        target_modules: TargetModules::AllLinear,
        init_from: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_one_cpu_every_map_is_the_same() {
        let small = LlamaConfig { intermediate_size: 64, vocab_size: 64, ..config(8, 2, None, LAYERS) };
        check(&[vec![(Device::Cpu, 2), (Device::Cpu, 3)], vec![(Device::Cpu, 1); LAYERS]], &small).unwrap();
    }

    #[test]
    fn other_numbers_are_far() {
        let [a, b] = [[1.0, 2.0], [1.0, f64::NAN]].map(|numbers| Tensor::from_slice(&numbers));
        assert_eq!(distance(&a, &a), 0.0);
        assert!(distance(&(&a * 1.02), &a) > FARTHEST && distance(&b, &a).is_nan());
    }
}
