//! The planned memory of each stage and of each device, and the stages that share it most evenly.

use std::num::NonZeroUsize;
use std::ops::Range;

use tch::Device;

use super::plan::MemoryPlan;
use super::weights::StageShape;
use crate::model::stages::Stages;

/// A run's planned memory by stage; there is at least one.
#[derive(Debug, Clone)]
pub struct StageMemory {
    pub stages: Vec<PlannedStage>,
}

/// A stage and its memory.
#[derive(Debug, Clone)]
pub struct PlannedStage {
    pub device: Device,
    /// Counted from 0.
    pub layers: Range<usize>,
    pub plan: MemoryPlan,
}

impl StageMemory {
    /// Of a backbone with so many layers; `plan` plans a stage.
    pub fn of(stages: &Stages, layers: usize, plan: impl Fn(StageShape) -> MemoryPlan) -> Self {
        let layers: Vec<Range<usize>> = (0..stages.len()).map(|stage| stages.layers(stage, layers)).collect();
        let shapes = StageShape::all(&layers.iter().map(ExactSizeIterator::len).collect::<Vec<_>>());
        let planned = stages.devices().zip(layers).zip(shapes);
        let planned = planned.map(|((device, layers), shape)| PlannedStage { device, layers, plan: plan(shape) });
        Self { stages: planned.collect() }
    }

    pub fn devices(&self) -> Vec<(Device, MemoryPlan)> {
        let mut devices: Vec<(Device, MemoryPlan)> = vec![];
        for PlannedStage { device, plan, .. } in &self.stages {
            match devices.iter_mut().find(|(other, _)| other == device) {
                Some((_, on_device)) => *on_device = on_device.clone().with(plan.clone()),
                None => devices.push((*device, plan.clone())),
            }
        }
        devices
    }

    /// The memory of all devices together.
    ///
    /// # Panics
    /// Never: there is a stage.
    pub fn whole(&self) -> MemoryPlan {
        self.devices().into_iter().map(|(_, plan)| plan).reduce(MemoryPlan::beside).expect("a stage")
    }

    /// The planned peak on a device.
    pub fn peak_on(&self, device: Device) -> u64 {
        self.devices().iter().find(|(other, _)| *other == device).map_or(0, |(_, plan)| plan.peak_bytes())
    }
}

/// Numbers of layers for at most so many stages, so that the fullest takes as little memory as possible. `peak` plans a stage; it rises with
/// the layers.
pub fn balanced(layers: usize, stages: usize, peak: impl Fn(StageShape) -> u64) -> Vec<NonZeroUsize> {
    let mut counts = vec![1; stages.clamp(1, layers.max(1))];
    for _ in counts.len()..layers {
        let with_one_more = |at: usize| {
            let shape = StageShape::all(&counts)[at];
            peak(StageShape { layers: shape.layers + 1, ..shape })
        };
        let emptiest = (0..counts.len()).min_by_key(|&at| with_one_more(at)).unwrap_or(0);
        counts[emptiest] += 1;
    }
    counts.into_iter().filter_map(NonZeroUsize::new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten bytes a layer, beside the embedding's and the heads'.
    fn peak(embedding: u64, heads: u64) -> impl Fn(StageShape) -> u64 {
        move |StageShape { layers, is_first, is_last }| {
            10 * layers as u64 + if is_first { embedding } else { 0 } + if is_last { heads } else { 0 }
        }
    }

    fn counts(layers: usize, stages: usize, peak: impl Fn(StageShape) -> u64) -> Vec<usize> {
        balanced(layers, stages, peak).into_iter().map(NonZeroUsize::get).collect()
    }

    #[test]
    fn the_fullest_stage_has_as_little_as_possible() {
        assert_eq!(counts(8, 2, peak(0, 0)), [4, 4]);
        assert_eq!(counts(8, 2, peak(0, 40)), [6, 2]);
        assert_eq!(counts(9, 3, peak(10, 50)), [4, 4, 1], "the last one is full with its heads");
        assert_eq!(counts(3, 8, peak(5, 5)), [1, 1, 1], "no stage without a layer");
        assert_eq!(counts(5, 1, peak(5, 5)), [5]);
    }

    #[test]
    fn no_other_split_is_better() {
        for (embedding, heads) in [(0, 35), (12, 80), (31, 7)] {
            let peak = peak(embedding, heads);
            let fullest = |counts: &[usize]| StageShape::all(counts).into_iter().map(&peak).max();
            let splits = (1..10).flat_map(|first| (1..10).map(move |second| (first, second)));
            let splits = splits.filter(|(first, second)| first + second < 11);
            let best = splits.map(|(first, second)| fullest(&[first, second, 11 - first - second])).min();
            assert_eq!(fullest(&counts(11, 3, &peak)), best.flatten());
        }
    }
}
