//! Compares the planned memory of a run with what its device has, and looks for changes of the recipe with which it fits.

use std::num::NonZeroUsize;

use serde::Serialize;
use tch::Device;

use crate::model::quantization::Quantization;
use crate::torch::optim::OptimizerName;
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

    /// Whether a run with this peak fits.
    pub fn holds(&self, peak_bytes: u64) -> bool {
        peak_bytes <= self.free_bytes
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

const CHANGES: [Change; 6] = [micro_batches, moments, recomputing, quantized, shared_lm_head, shorter_rows];

/// The largest micro batch that fits, or one row; the optimizer step keeps its rows.
fn micro_batches(plan: &mut TrainPlan, fits: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let train = plan.train.clone();
    let before = train.micro_batch_size.get();
    let mut rows = before;
    while rows > 1 && (rows == before || !fits(plan)) {
        rows /= 2;
        plan.train.micro_batch_size = NonZeroUsize::new(rows)?;
    }
    let accumulated = (before * train.gradient_accumulation_steps.get()).div_ceil(rows);
    plan.train.gradient_accumulation_steps = NonZeroUsize::new(accumulated)?;
    let keys = format!("train.micro_batch_size = {rows} with train.gradient_accumulation_steps = {accumulated}");
    (rows < before).then_some(keys)
}

fn moments(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let before = std::mem::replace(&mut plan.optimizer.name, OptimizerName::AdamW8bit);
    (before != OptimizerName::AdamW8bit).then(|| "optimizer.name = \"adamw8bit\"".into())
}

fn recomputing(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let before = std::mem::replace(&mut plan.train.recompute, !plan.trained.is_frozen());
    (plan.train.recompute && !before).then(|| "train.recompute = true".into())
}

fn quantized(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    if plan.trained == BackboneTraining::Full || plan.backbone.quantization == Some(Quantization::Nf4) {
        return None;
    }
    plan.backbone.quantization = Some(Quantization::Nf4);
    plan.train.recompute = !plan.trained.is_frozen(); // a recipe needs both
    Some("backbone.quantization = \"nf4\"".into())
}

fn shared_lm_head(plan: &mut TrainPlan, _: &dyn Fn(&TrainPlan) -> bool) -> Option<String> {
    let heads = &mut plan.heads;
    if heads.shared_lm_head || heads.init_from.is_some() || heads.draft_vocab_size.is_some() || heads.w2_rank.is_some()
    {
        return None;
    }
    heads.shared_lm_head = true;
    heads.shared_w2 = false;
    Some("heads.shared_lm_head = true".into())
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
