//! The engine's memory: buffers that never move, the cache, which moves when it grows, and weights shared with the backbone.

// L layers, G key/value heads, S room for tokens, D head size, K heads, H hidden, V vocabulary
use tch::{Device, Kind, Tensor};

use super::buffers::Buffers;
use super::draft::{DeviceDraft, DraftInput, HeadMatrices, LayerMatrices, outputs};
use super::layout::Rotations;
use super::plan::DevicePlan;
use super::sequential::SequentialHeads;
use super::shape::{Shape, UnsupportedModel};
use crate::memory::size::Size;
use crate::model::llama::{DenseWeights, Llama};

/// The tensors that steps read and write, except for weights.
#[derive(Debug)]
pub struct DeviceMemory {
    pub buffers: Buffers<Tensor>,
    /// `[L, 2, G, S, D]`.
    pub cache_l2gsd: Tensor,
    /// Tables for every position of the context.
    pub rotations: Rotations,
    /// `[U]` float64: the random number that draws the token at each position.
    pub uniforms_u: Tensor,
}

impl DeviceMemory {
    /// Allocates everything in a plan.
    pub fn new(plan: &DevicePlan, shape: &Shape, device: Device) -> Self {
        let zeros = |size: &Size| Tensor::zeros(size.shape.as_slice(), (size.kind, device));
        Self {
            buffers: plan.buffers.map(zeros),
            cache_l2gsd: zeros(&plan.cache_l2gsd),
            rotations: Rotations::new(shape.config, shape.positions(), shape.kind, device),
            uniforms_u: zeros(&plan.uniforms_u),
        }
    }

    /// S, the number of tokens that the cache has room for.
    pub fn room(&self) -> i64 {
        self.cache_l2gsd.size()[3]
    }

    /// Grows the cache and keeps its first `tokens`. Both caches exist until the copy is done.
    pub fn grow(&mut self, room: i64, tokens: i64) {
        let mut size = self.cache_l2gsd.size();
        size[3] = room;
        let grown = Tensor::zeros(size, (self.cache_l2gsd.kind(), self.cache_l2gsd.device()));
        grown.narrow(3, 0, tokens).copy_(&self.cache_l2gsd.narrow(3, 0, tokens));
        self.cache_l2gsd = grown;
    }
}

/// Weights of the backbone and of those heads that the tree uses.
#[derive(Debug)]
pub struct DeviceWeights {
    /// Shared with the backbone.
    pub backbone: DenseWeights,
    /// Those of the heads that the tree uses; `None` without a drafter.
    pub heads: Option<HeadWeights>,
}

/// Weights of K heads, and how they guess.
#[derive(Debug)]
pub enum HeadWeights {
    /// All heads at once: Medusa heads.
    AtOnce(MedusaWeights),
    /// Head after head: Hydra heads.
    ByLevel(SequentialHeads),
}

/// Weights of K Medusa heads.
#[derive(Debug)]
pub struct MedusaWeights {
    /// W1 `[K, H, H]` and b1 `[K, H]` of each ResBlock, copied.
    pub blocks: Vec<[Tensor; 2]>,
    /// W2 `[V, H]` of each head, shared with it unless it was multiplied out; empty if all heads use the LM head.
    pub w2_vh: Vec<Tensor>,
}

const NOT_DENSE: &str = "are quantised, or laid out for the CPU's own kernels";

impl DeviceWeights {
    /// The weights of `backbone` and `draft`.
    ///
    /// # Errors
    /// [`UnsupportedModel::Weights`] if they are not plain matrices.
    pub fn new(backbone: &Llama, draft: Option<&DeviceDraft>) -> Result<Self, UnsupportedModel> {
        let not_dense = |what| UnsupportedModel::Weights { what, why: NOT_DENSE };
        Ok(Self {
            backbone: backbone.dense_weights().ok_or_else(|| not_dense("the backbone's weights"))?,
            heads: draft
                .map(|draft| HeadWeights::new(draft)?.ok_or_else(|| not_dense("the heads' weights")))
                .transpose()?,
        })
    }
}

impl HeadWeights {
    /// `None` if the weights are not plain matrices.
    fn new(draft: &DeviceDraft) -> Result<Option<Self>, UnsupportedModel> {
        let Some(heads) = &draft.heads else { return Ok(None) };
        Ok(Some(match draft.shape.input {
            DraftInput::Hidden => Self::AtOnce(MedusaWeights::new(heads)?),
            DraftInput::HiddenAndPath => Self::ByLevel(SequentialHeads::new(heads, draft.shape.tree)),
            DraftInput::PrefixAndPath => return Err(UnsupportedModel::Prefix),
        }))
    }
}

impl MedusaWeights {
    fn new(all: &[HeadMatrices]) -> Result<Self, UnsupportedModel> {
        if all.iter().any(|head| head.output_bias_v.is_some()) {
            return Err(UnsupportedModel::Weights {
                what: "the heads' W2",
                why: "has a bias, which its kernels add for Hydra heads only",
            });
        }
        let block = |layer: usize| {
            let layers: Vec<&LayerMatrices> = all.iter().map(|head| &head.blocks[layer].linear).collect();
            let stack = |part: fn(&LayerMatrices) -> &Tensor| {
                Tensor::stack(&layers.iter().map(|layer| part(layer)).collect::<Vec<_>>(), 0)
            };
            [stack(|layer| &layer.weight_hi), stack(|layer| &layer.bias_h)]
        };
        Ok(Self {
            blocks: (0..all[0].blocks.len()).map(block).collect(),
            w2_vh: outputs(all).into_iter().flatten().collect(),
        })
    }
}

/// `numbers` as an int32 tensor, as the device reads them.
pub fn int32(numbers: &[i64]) -> Tensor {
    Tensor::from_slice(numbers).to_kind(Kind::Int)
}
