//! A drafter as the CUDA engine runs it inside its own step: heads of ResBlocks on the last hidden state, as plain matrices, and the
//! static tree that their guesses fill. No token visits the host between accepting, guessing and filling.

// H hidden, V vocabulary
use tch::Tensor;

use crate::tree::sparse_tree::SparseTree;

/// Heads and tree on paper: all that planning memory needs.
#[derive(Debug, Clone, Copy)]
pub struct DraftShape<'a> {
    /// Node at depth d holds a guess of head d.
    pub tree: &'a SparseTree,
    /// ResBlocks of each head.
    pub blocks: usize,
    /// Weights of all heads, those that the tree does not use among them: they are on the device already.
    pub parameters: i64,
}

/// A drafter whose guesses are made on the device.
#[derive(Debug)]
pub struct DeviceDraft<'a> {
    /// Sizes and tree.
    pub shape: DraftShape<'a>,
    /// One for each level of the tree; `None` where the weights are quantised, or laid out for the CPU's own kernels.
    pub heads: Option<Vec<HeadMatrices>>,
}

/// One head's weights as matrices.
#[derive(Debug)]
pub struct HeadMatrices {
    /// W1 `[H, H]` and b1 `[H]` of each ResBlock.
    pub blocks: Vec<(Tensor, Tensor)>,
    /// W2 `[V, H]`; absent = the backbone's lm_head.
    pub w2_vh: Option<Tensor>,
}
