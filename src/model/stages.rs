//! Which layers of a backbone lie on which device. A stage is a run of layers on one device: the embedding is on the first stage, the final
//! norm and the LM head are on the last one. Hidden states and their gradients go from stage to stage through [`StageBorders`] and by no other way.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::{Device, Kind, Tensor};

use crate::model::block_spec::LayerKinds;
use crate::model::rope::Ropes;

/// The stages of a backbone, first to last; at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stages(Vec<StageStart>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StageStart {
    device: Device,
    first_layer: usize,
}

impl Stages {
    /// All layers on one device.
    pub fn one(device: Device) -> Self {
        Self(vec![StageStart { device, first_layer: 0 }])
    }

    /// So many layers on each device.
    ///
    /// # Panics
    /// If there is no stage.
    pub fn new(stages: impl IntoIterator<Item = (Device, NonZeroUsize)>) -> Self {
        let mut first_layer = 0;
        let stages = stages.into_iter().map(|(device, layers)| {
            first_layer += layers.get();
            StageStart { device, first_layer: first_layer - layers.get() }
        });
        let stages: Vec<StageStart> = stages.collect();
        assert!(!stages.is_empty(), "a backbone has a stage");
        Self(stages)
    }

    /// How many there are.
    #[expect(clippy::len_without_is_empty, reason = "there is at least one")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The device of each stage; several stages may have the same one.
    pub fn devices(&self) -> impl Iterator<Item = Device> {
        self.0.iter().map(|stage| stage.device)
    }

    /// The device of a stage.
    pub fn device(&self, stage: usize) -> Device {
        self.0[stage].device
    }

    /// The embedding's device.
    pub fn first(&self) -> Device {
        self.0[0].device
    }

    /// The device of the final norm, the LM head and what reads the hidden states.
    pub fn last(&self) -> Device {
        self.0[self.0.len() - 1].device
    }

    /// The stage of a decoder layer.
    pub fn layer_stage(&self, layer: usize) -> usize {
        self.0.partition_point(|stage| stage.first_layer <= layer) - 1
    }

    /// The layers of a stage, of a backbone with so many.
    pub fn layers(&self, stage: usize, all: usize) -> Range<usize> {
        let end = self.0.get(stage + 1).map_or(all, |next| next.first_layer);
        self.0[stage].first_layer..end
    }

    /// The stage of a part of a pass (see [`crate::model::llama::Llama::parts`]): of the embedding, of a layer, or of the final norm.
    fn part_stage(&self, part: usize) -> usize {
        self.layer_stage(part.saturating_sub(1))
    }

    /// The stages before and after the border in front of a part; `None` where the part before it is on the same stage.
    fn border_before(&self, part: usize) -> Option<[usize; 2]> {
        let sides = [part.saturating_sub(1), part].map(|part| self.part_stage(part));
        (sides[0] != sides[1]).then_some(sides)
    }

    /// Rotary embeddings on the device of each stage.
    pub(super) fn ropes(&self, layers: &LayerKinds, kind: Kind) -> Vec<Ropes> {
        self.devices().map(|device| Ropes::new(layers, kind, device)).collect()
    }
}

/// The only way from one stage to another, which counts its copies. Stages on one device have copies, too, so that a machine with one device
/// runs what several do.
#[derive(Debug, Default)]
pub struct StageBorders {
    forward: AtomicU64,
    backward: AtomicU64,
}

impl StageBorders {
    /// The input of a part on the part's device.
    pub(super) fn forward(&self, stages: &Stages, part: usize, x: Tensor) -> Tensor {
        let Some([_, after]) = stages.border_before(part) else { return x };
        self.forward.fetch_add(1, Ordering::Relaxed);
        copied(&x, stages.device(after))
    }

    /// The gradient of a part's input on the device of the part before it.
    pub(super) fn backward(&self, stages: &Stages, part: usize, dx: Tensor) -> Tensor {
        let Some([before, _]) = stages.border_before(part) else { return dx };
        self.backward.fetch_add(1, Ordering::Relaxed);
        copied(&dx, stages.device(before))
    }

    /// Copies so far: of hidden states, and of their gradients.
    pub fn copies(&self) -> [u64; 2] {
        [&self.forward, &self.backward].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Between GPUs the host does not wait: libtorch orders the copy behind the work of both. A copy to the host is waited for.
fn copied(x: &Tensor, device: Device) -> Tensor {
    let waits = !(x.device().is_cuda() && device.is_cuda());
    x.to_device_(device, x.kind(), !waits, true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(counts: &[usize]) -> Stages {
        Stages::new(counts.iter().enumerate().map(|(at, &n)| (Device::Cuda(at), NonZeroUsize::new(n).unwrap())))
    }

    #[test]
    fn layers_follow_one_another_over_the_stages() {
        let stages = stages(&[1, 1, 3]);
        assert_eq!((0..5).map(|layer| stages.layer_stage(layer)).collect::<Vec<_>>(), [0, 1, 2, 2, 2]);
        assert_eq!((0..3).map(|stage| stages.layers(stage, 5)).collect::<Vec<_>>(), [0..1, 1..2, 2..5]);
        assert_eq!((stages.first(), stages.last()), (Device::Cuda(0), Device::Cuda(2)));
        assert_eq!(Stages::one(Device::Cpu).layers(0, 7), 0..7);
    }

    #[test]
    fn the_embedding_is_on_the_first_stage_and_the_final_norm_on_the_last() {
        let stages = stages(&[2, 3]);
        assert_eq!((0..7).map(|part| stages.part_stage(part)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1, 1]);
        assert_eq!((0..7).filter(|&part| stages.border_before(part).is_some()).collect::<Vec<_>>(), [3]);
    }
}
