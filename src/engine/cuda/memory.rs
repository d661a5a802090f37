//! The engine's memory: buffers that never move, the cache, which moves where it grows, and weights that it shares with the backbone.

// L layers, G key/value heads, S room for tokens, D head size, K heads, H hidden, V vocabulary
use tch::{Device, Kind, Tensor};

use super::buffers::{Buffers, Size};
use super::draft::{DeviceDraft, HeadMatrices};
use super::layout::Rotations;
use super::plan::DevicePlan;
use super::shape::{Shape, Unfit};
use crate::model::llama::{DenseWeights, Llama};

/// What steps read and write.
#[derive(Debug)]
pub struct DeviceMemory {
    /// What a step writes.
    pub buffers: Buffers<Tensor>,
    /// `[L, 2, G, S, D]`.
    pub cache_l2gsd: Tensor,
    /// Of every position of the context.
    pub rotations: Rotations,
    /// `[U]` float64: what the token at each position is drawn with.
    pub uniforms_u: Tensor,
}

impl DeviceMemory {
    /// All of a plan.
    pub fn new(plan: &DevicePlan, shape: &Shape, device: Device) -> Self {
        let zeros = |size: &Size| Tensor::zeros(size.shape.as_slice(), (size.kind, device));
        Self {
            buffers: plan.buffers.map(zeros),
            cache_l2gsd: zeros(&plan.cache_l2gsd),
            rotations: Rotations::new(shape.config, shape.positions(), shape.kind, device),
            uniforms_u: zeros(&plan.uniforms_u),
        }
    }

    /// Room for tokens, S.
    pub fn room(&self) -> i64 {
        self.cache_l2gsd.size()[3]
    }

    /// A cache with more room; the first `tokens` stay. The old one is there until they are copied.
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
    /// Of the heads that the tree uses, if there is one.
    pub heads: Option<HeadWeights>,
}

/// Weights of K heads.
#[derive(Debug)]
pub struct HeadWeights {
    /// Of each ResBlock: W1 `[K, H, H]` and b1 `[K, H]`, copies.
    pub blocks: Vec<[Tensor; 2]>,
    /// W2 `[V, H]` of each head, shared with them; none = all go through the LM head.
    pub w2_vh: Vec<Tensor>,
}

const NOT_DENSE: &str = "are quantised, or laid out for the CPU's own kernels";

impl DeviceWeights {
    /// Those of `backbone` and of `draft`.
    ///
    /// # Errors
    /// [`Unfit::Weights`] where they are no plain matrices.
    pub fn new(backbone: &Llama, draft: Option<&DeviceDraft>) -> Result<Self, Unfit> {
        let not_dense = |what| Unfit::Weights { what, why: NOT_DENSE };
        Ok(Self {
            backbone: backbone.dense_weights().ok_or_else(|| not_dense("the backbone's weights"))?,
            heads: match draft.map(|draft| &draft.heads) {
                None => None,
                Some(None) => return Err(not_dense("the heads' weights")),
                Some(Some(heads)) => Some(HeadWeights::new(heads)),
            },
        })
    }
}

impl HeadWeights {
    fn new(all: &[HeadMatrices]) -> Self {
        let block = |layer: usize| {
            let (weights, biases): (Vec<&Tensor>, Vec<&Tensor>) =
                all.iter().map(|head| (&head.blocks[layer].0, &head.blocks[layer].1)).unzip();
            [Tensor::stack(&weights, 0), Tensor::stack(&biases, 0)]
        };
        Self {
            blocks: (0..all[0].blocks.len()).map(block).collect(),
            w2_vh: all.iter().filter_map(|head| head.w2_vh.as_ref().map(Tensor::shallow_clone)).collect(),
        }
    }
}

/// `numbers` as the device has them.
pub fn int32(numbers: &[i64]) -> Tensor {
    Tensor::from_slice(numbers).to_kind(Kind::Int)
}
