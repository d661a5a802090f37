//! Fills a tree's nodes with tokens: the root's, and the heads' best guesses.

use tch::{Device, Tensor};

use crate::draft::medusa::heads::Heads;
use crate::model::llama::Llama;
use crate::tree::sparse_tree::SparseTree;

/// What turns the heads' guesses into a tree's tokens.
#[derive(Debug)]
pub struct Proposer {
    /// Heads that the tree uses: its depth.
    num_heads: usize,
    /// Guesses taken of each head: the tree's widest level.
    width: usize,
    /// For each node, where its token lies in `[root, head 1's guesses, head 2's guesses, …]`.
    tree_indices_n: Tensor,
}

impl Proposer {
    /// For one tree, on one device.
    pub fn new(tree: &SparseTree, device: Device) -> Self {
        let width = tree.widths().into_iter().max().unwrap_or(0);
        let tree_indices_n = Tensor::from_slice(&tree_indices(tree, width)).to_device(device);
        Self { num_heads: tree.max_depth(), width, tree_indices_n }
    }

    /// The tokens of all nodes, node 0 first.
    /// - `root_1`: `[1]`, the LM head's token — `hidden_1h`: `[1, H]`, the hidden state it was predicted from
    /// - returns `[N]`, int64
    pub fn candidates(&self, root_1: &Tensor, hidden_1h: &Tensor, heads: &Heads, backbone: &Llama) -> Tensor {
        let guesses = heads.guesses(self.num_heads, self.width, hidden_1h, backbone);
        Tensor::cat(&[root_1, &guesses], 0).index_select(0, &self.tree_indices_n)
    }
}

/// Where each node's token lies in the root followed by `width` guesses a head.
fn tree_indices(tree: &SparseTree, width: usize) -> Vec<i64> {
    let guess = |node| tree.child_index(node).map_or(0, |child| 1 + (tree.depth(node) - 1) * width + child);
    (0..tree.len()).map(|node| guess(node) as i64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_points_at_its_heads_guess() {
        let tree = SparseTree::new(vec![vec![0], vec![2], vec![0, 1], vec![0, 1, 0]]).unwrap();
        assert_eq!(tree_indices(&tree, 3), [0, 1, 3, 3 + 2, 3 + 3 + 1]);
    }
}
