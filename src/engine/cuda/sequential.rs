//! The weights of sequential heads (Hydra, arXiv 2402.05109), laid out by what they multiply, with the levels of the tree that they
//! fill. The same layout for the CPU's kernels is in `draft/heads/sequential.rs`.

// K heads, d level, V vocabulary, H hidden
use tch::Tensor;

use super::draft::{BlockMatrices, HeadMatrices, LayerMatrices, outputs};
use super::layout::Nodes;
use super::levels::TreeLevel;
use crate::tree::sparse_tree::SparseTree;

/// K sequential heads and their tree.
#[derive(Debug)]
pub struct SequentialHeads {
    /// The root alone.
    pub root: Nodes,
    /// `[2KH, H]`, copied: what multiplies the hidden state in the first block of each head, in its linear layer and its residual
    /// connection.
    pub hidden_wh: Tensor,
    /// `[2KH]`, copied: their biases.
    pub bias_w: Tensor,
    /// One for each head.
    pub levels: Vec<Level>,
}

/// A level of the tree, and the head that guesses below its nodes.
#[derive(Debug)]
pub struct Level {
    pub nodes: TreeLevel,
    /// `[2(K-d)H, H]`, copied: what multiplies the embedding of a node's token in the first blocks of the heads from this one on.
    pub token_wh: Tensor,
    /// W1 `[H, H]` and b1 `[H]` of the ResBlocks after the first, shared with the head.
    pub blocks: Vec<[Tensor; 2]>,
    /// W2 `[V, H]`, shared with the head unless it was multiplied out; `None` if it is the backbone's lm_head.
    pub w2_vh: Option<Tensor>,
    /// `[V]`.
    pub output_bias_v: Option<Tensor>,
}

impl SequentialHeads {
    /// The layout of `heads`, one for each level of `tree`.
    pub(super) fn new(heads: &[HeadMatrices], tree: &SparseTree) -> Self {
        let layers: Vec<[&LayerMatrices; 2]> = heads.iter().map(|head| first_layers(&head.blocks[0])).collect();
        let biases: Vec<&Tensor> = layers.iter().flatten().map(|layer| &layer.bias_h).collect();
        let (device, outputs) = (biases[0].device(), outputs(heads));
        let level = |(at, nodes): (usize, TreeLevel)| Level {
            nodes,
            token_wh: columns(&layers[at..], 1 + at as i64),
            blocks: heads[at].blocks[1..].iter().map(|block| block_matrices(&block.linear)).collect(),
            w2_vh: outputs[at].as_ref().map(Tensor::shallow_clone),
            output_bias_v: heads[at].output_bias_v.as_ref().map(Tensor::shallow_clone),
        };
        Self {
            root: Nodes::chain(1, device),
            hidden_wh: columns(&layers, 0),
            bias_w: Tensor::cat(&biases, 0),
            levels: TreeLevel::for_tree(tree, device).into_iter().enumerate().map(level).collect(),
        }
    }
}

/// The linear layer and the residual connection of a first block.
fn first_layers(block: &BlockMatrices) -> [&LayerMatrices; 2] {
    [
        &block.linear,
        block.res_connection.as_ref().expect("the first block of a sequential head has a residual connection"),
    ]
}

fn block_matrices(layer: &LayerMatrices) -> [Tensor; 2] {
    [layer.weight_hi.contiguous(), layer.bias_h.shallow_clone()]
}

/// What multiplies the heads' `input`-th input, the hidden state being the 0th: `[2·heads·H, H]`.
fn columns(layers: &[[&LayerMatrices; 2]], input: i64) -> Tensor {
    let part = |layer: &&LayerMatrices| {
        let h = layer.weight_hi.size()[0];
        layer.weight_hi.narrow(1, input * h, h)
    };
    Tensor::cat(&layers.iter().flatten().map(part).collect::<Vec<_>>(), 0)
}
