//! Compares the planned memory of a run with what its device has, and looks for changes of the recipe with which it fits.

use std::num::NonZeroUsize;

use serde::Serialize;
use tch::Device;

use crate::model::stored::Quantization;
use crate::torch::optim::{OptimizerName, ZeroStage};
use crate::torch::{cuda_runtime, memory};
use crate::train::plan::{BackboneTraining, TrainPlan};

/// The memory of the device that a run computes on: of a GPU, or of the machine or its container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DeviceRoom {
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// A change of the recipe, on top of those before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemorySaving {
    /// Keys and values, as a recipe has them.
    pub keys: String,
    /// The planned peak with it.
    pub peak_bytes: u64,
}

impl DeviceRoom {
    /// The room on `device`; `None` if the system does not say.
    pub fn of(device: Device) -> Option<Self> {
        let (total_bytes, free_bytes) = match device {
            Device::Cuda(index) => cuda_runtime::memory(index).ok()?,
            _ => memory::machine()?,
        };
        Some(Self { total_bytes, free_bytes })
    }

    /// Whether a run with this planned peak fits.
    pub fn holds(&self, peak_bytes: u64) -> bool {
        memory::holds(self.free_bytes, peak_bytes)
    }
}

/// Changes of `plan`, in the order of docs/training.md, up to the first with which it fits into `room`, or all of them. `peak_of`
/// plans the memory of a changed plan; a change that saves nothing is left out.
pub fn savings(plan: &TrainPlan, room: DeviceRoom, peak_of: impl Fn(&TrainPlan) -> u64) -> Vec<MemorySaving> {
    let mut plan = plan.clone();
    let mut peak_bytes = peak_of(&plan);
    let mut found = vec![];
    for change in CHANGES {
        if room.holds(peak_bytes) {
            break;
        }
        let mut changed = plan.clone();
        let Some(keys) = change(&mut changed, &|plan| room.holds(peak_of(plan))) else { continue };
        let with_it = peak_of(&changed);
        if with_it < peak_bytes {
            (plan, peak_bytes) = (changed, with_it);
            found.push(MemorySaving { keys, peak_bytes });
        }
    }
    found
}

/// Changes a plan, and returns the keys and values; `None` if the plan has them already. The function says whether a plan fits.
type Change = fn(&mut TrainPlan, &dyn Fn(&TrainPlan) -> bool) -> Option<String>;

/// Those that `medusa init` makes, too, are in its order: see `recipe::starter`.
const CHANGES: [Change; 8] =
    [rounded, micro_batches, recomputing, shared_moments, moments, quantized, shared_lm_head, shorter_rows];

/// The changes that follow are not for float64.
fn rounded(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let before = plan.backbone.dtype;
    plan.backbone.dtype = before.by_default();
    (before != plan.backbone.dtype).then(|| format!("backbone.dtype = \"{}\"", plan.backbone.dtype))
}

/// The largest micro batch that fits, or one row; the optimizer step keeps its rows.
fn micro_batches(plan: &mut TrainPlan, fits: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let before = plan.train.micro_batch_size.get();
    let step_rows = before * plan.train.gradient_accumulation_steps.get();
    let mut keys = None;
    for rows in (1..before).rev().filter(|&rows| step_rows.is_multiple_of(rows)) {
        plan.train.micro_batch_size = NonZeroUsize::new(rows)?;
        plan.train.gradient_accumulation_steps = NonZeroUsize::new(step_rows / rows)?;
        let accumulated = step_rows / rows;
        keys = Some(format!("train.micro_batch_size = {rows} with train.gradient_accumulation_steps = {accumulated}"));
        if fits(plan) {
            break;
        }
    }
    keys
}

fn shared_moments(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let before = std::mem::replace(&mut plan.zero_stage, ZeroStage::One); // saves nothing in one process
    (before != ZeroStage::One).then(|| "optimizer.zero_stage = 1".into())
}

fn moments(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let before = std::mem::replace(&mut plan.optimizer.name, OptimizerName::AdamW8bit);
    (before != OptimizerName::AdamW8bit).then(|| "optimizer.name = \"adamw8bit\"".into())
}

fn recomputing(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let before = std::mem::replace(&mut plan.train.recompute, !plan.trained.is_frozen());
    (plan.train.recompute && !before).then(|| "train.recompute = true".into())
}

fn quantized(plan: &mut TrainPlan, fits: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let fewest_bits = Quantization::ALL[0];
    if plan.trained == BackboneTraining::Full || plan.backbone.quantization == Some(fewest_bits) {
        return None;
    }
    plan.backbone.quantization = Some(fewest_bits);
    let key = format!("backbone.quantization = \"{fewest_bits}\"");
    // With adapters a recipe needs both.
    Some(recomputing(plan, fits).map_or(key.clone(), |recompute| format!("{key} with {recompute}")))
}

fn shared_lm_head(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let (drafter, keys) = plan.drafter.with_shared_lm_head()?;
    plan.drafter = drafter;
    Some(keys.into())
}

/// The longest halved rows that fit, down to a quarter.
fn shorter_rows(plan: &mut TrainPlan, fits: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    for _ in 0..2 {
        plan.data.max_length = NonZeroUsize::new(plan.data.max_length.get() / 2)?;
        if fits(plan) {
            break;
        }
    }
    Some(format!("data.max_length = {}", plan.data.max_length))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::dtype::Dtype;
    use crate::recipe::Recipe;

    fn plan(stage: &str, train: &str) -> TrainPlan {
        let text = format!(
            "[backbone]\npath = \"b\"\n[stage.{stage}]\n[data]\ntrain = [\"rows.jsonl\"]\n[train]\noutput_dir = \"run\"\n{train}\n"
        );
        Recipe::parse(Path::new("recipe.toml"), &text).expect("a recipe").plan(Device::Cpu)
    }

    #[test]
    fn smaller_micro_batches_keep_the_rows_of_a_step() {
        for (micro, accumulation, most, expected) in [
            (5, 1, 4, Some([1, 5])),
            (12, 1, 7, Some([6, 2])),
            (12, 1, 3, Some([3, 4])),
            (6, 5, 5, Some([5, 6])),
            (1, 8, 0, None),
        ] {
            let train = format!("micro_batch_size = {micro}\ngradient_accumulation_steps = {accumulation}");
            let mut plan = plan("medusa1", &train);
            let keys = micro_batches(&mut plan, &|plan| plan.train.micro_batch_size.get() <= most);
            let words = |[rows, steps]: [usize; 2]| {
                format!("train.micro_batch_size = {rows} with train.gradient_accumulation_steps = {steps}")
            };
            assert_eq!(keys, expected.map(words), "{micro} x {accumulation}");
            let TrainPlan { train, .. } = plan;
            assert_eq!(train.micro_batch_size.get() * train.gradient_accumulation_steps.get(), micro * accumulation);
        }
    }

    #[test]
    fn a_quantised_backbone_with_adapters_recomputes_and_says_so() {
        let nf4 = "backbone.quantization = \"nf4\"";
        let with_both = format!("{nf4} with train.recompute = true");
        for (stage, train, expected) in
            [("medusa1", "", nf4), ("medusa2.lora", "", &with_both), ("medusa2.lora", "recompute = true", nf4)]
        {
            assert_eq!(quantized(&mut plan(stage, train), &|_| true).as_deref(), Some(expected), "{stage} {train}");
        }
    }

    /// The others are not for float64.
    #[test]
    fn float64_is_given_up_first() {
        let mut float64 = plan("medusa1", "");
        float64.backbone.dtype = Dtype::Float64;
        let room = DeviceRoom { total_bytes: 2000, free_bytes: 1000 };
        let peak_of = |plan: &TrainPlan| {
            500 * plan.backbone.dtype.bytes() as u64 + u64::from(plan.optimizer.name == OptimizerName::AdamW)
        };
        let keys: Vec<String> = savings(&float64, room, peak_of).into_iter().map(|saving| saving.keys).collect();
        assert_eq!(keys, ["backbone.dtype = \"float32\"", "optimizer.name = \"adamw8bit\""]);
    }

    #[test]
    fn a_tenth_of_the_free_memory_is_spare() {
        let room = DeviceRoom { total_bytes: 2000, free_bytes: 1000 };
        assert!(room.holds(900) && !room.holds(901));
    }
}
