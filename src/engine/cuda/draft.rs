//! A drafter that the CUDA engine runs within its own step: heads of ResBlocks on the last hidden state, as plain matrices, and
//! the static tree that their guesses fill. No token passes through the host between accepting, guessing and filling the tree.

// H hidden, V vocabulary
use tch::Tensor;

use crate::tree::sparse_tree::SparseTree;

/// Sizes of heads and tree: all that memory planning needs.
#[derive(Debug, Clone, Copy)]
pub struct DraftShape<'a> {
    /// A node at depth d holds a guess of head d.
    pub tree: &'a SparseTree,
    /// ResBlocks of each head.
    pub blocks: usize,
    /// Weights of all heads, including those that the tree does not use: they are on the device already.
    pub parameters: i64,
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
    /// W1 `[H, H]` and b1 `[H]` of each ResBlock.
    pub blocks: Vec<(Tensor, Tensor)>,
    /// W2 `[V, H]`; `None` if the head uses the backbone's lm_head.
    pub w2_vh: Option<Tensor>,
}
