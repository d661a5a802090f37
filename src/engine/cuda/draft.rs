//! A drafter that the CUDA engine runs within its own step: heads as plain matrices, and the static tree that their guesses fill. No
//! token passes through the host between accepting, guessing and filling the tree.

// H hidden, I = H, or (k+2)·H in the first block of sequential head k (0-based), V vocabulary, R rank of W2
use tch::Tensor;

use crate::tree::sparse_tree::SparseTree;

/// Sizes of heads and tree: all that memory planning needs.
#[derive(Debug, Clone, Copy)]
pub struct DraftShape<'a> {
    /// A node at depth d holds a guess of head d.
    pub tree: &'a SparseTree,
    pub input: DraftInput,
    /// ResBlocks of each head.
    pub blocks: usize,
    /// How many W2 are multiplied out: one of each head if their rank is low, or one that they share.
    pub multiplied_out: usize,
    /// Whether the outputs of W2 are a part of the vocabulary.
    pub is_truncated: bool,
    /// Weights of all heads, including those that the tree does not use: they are on the device already.
    pub parameters: i64,
}

/// What the heads read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftInput {
    /// The last hidden state: Medusa heads.
    Hidden,
    /// Also the tokens on a node's path: Hydra heads.
    HiddenAndPath,
    /// The output of a prefix layer, and the tokens on a node's path: Hydra++ heads.
    PrefixAndPath,
}

/// A drafter that runs on the device.
#[derive(Debug)]
pub struct DeviceDraft<'a> {
    pub shape: DraftShape<'a>,
    /// One per level of the tree; `None` if the weights are quantised or laid out for the CPU kernels.
    pub heads: Option<Vec<HeadMatrices>>,
}

/// One head's weights as matrices.
#[derive(Debug)]
pub struct HeadMatrices {
    pub blocks: Vec<BlockMatrices>,
    pub output: OutputMatrix,
    /// `[V]`.
    pub output_bias_v: Option<Tensor>,
}

/// A ResBlock.
#[derive(Debug)]
pub struct BlockMatrices {
    pub linear: LayerMatrices,
    /// Of a sequential head's first block.
    pub res_connection: Option<LayerMatrices>,
}

/// A linear layer.
#[derive(Debug)]
pub struct LayerMatrices {
    /// `[H, I]`.
    pub weight_hi: Tensor,
    pub bias_h: Tensor,
}

/// W2.
#[derive(Debug)]
pub enum OutputMatrix {
    /// The backbone's lm_head.
    LmHead,
    /// `[V, H]`.
    Whole(Tensor),
    /// The product of B and A.
    LowRank { b_vr: Tensor, a_rh: Tensor },
    /// That of the first head.
    OfFirst,
}

/// W2 of each head as one matrix `[V, H]`, that of a low rank multiplied out; `None` for the backbone's lm_head.
pub fn outputs(heads: &[HeadMatrices]) -> Vec<Option<Tensor>> {
    let mut all: Vec<Option<Tensor>> = vec![];
    for head in heads {
        all.push(match &head.output {
            OutputMatrix::LmHead => None,
            OutputMatrix::Whole(w2_vh) => Some(w2_vh.contiguous()),
            OutputMatrix::LowRank { b_vr, a_rh } => Some(b_vr.matmul(a_rh)),
            OutputMatrix::OfFirst => all[0].as_ref().map(Tensor::shallow_clone),
        });
    }
    all
}

impl DraftShape<'_> {
    /// K, the number of heads that the tree uses.
    pub fn num_heads(&self) -> i64 {
        self.tree.max_depth() as i64
    }
}
