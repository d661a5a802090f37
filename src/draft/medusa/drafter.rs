//! Medusa heads as a drafter: a static tree filled with each head's best guesses.

// B texts, N nodes, H hidden size, M guesses per head
use std::rc::Rc;

use tch::{Device, Tensor};

use super::heads::{Heads, HeadsMismatch};
use crate::draft::{Drafter, PreparedTree, Proposal, TextSoFar};
use crate::engine::cuda::draft::DeviceDraft;
use crate::model::llama::Llama;
use crate::tree::sparse_tree::{SparseTree, TreeError};

/// Heads or a tree that do not fit the backbone.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// Heads of another backbone.
    #[error(transparent)]
    Heads(#[from] HeadsMismatch),
    /// A tree that needs more heads or guesses than there are.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// Heads and their tree, prepared for one backbone.
#[derive(Debug, Clone)]
pub struct MedusaDrafter<'a> {
    backbone: &'a Llama,
    heads: &'a Heads,
    tree: &'a SparseTree,
    prepared: Rc<PreparedTree>,
    /// Heads that the tree uses: its depth.
    num_heads: usize,
    /// M, the most guesses that the tree takes from one head.
    width: usize,
    /// `[N]`: index of each node's token in `[root, head 1's guesses, head 2's guesses, …]`.
    tree_indices_n: Rc<Tensor>,
}

impl<'a> MedusaDrafter<'a> {
    /// Checks that heads and tree fit the backbone, and prepares the tree on its device.
    ///
    /// # Errors
    /// [`DraftError`] names what does not fit.
    ///
    /// # Panics
    /// If the heads are sequential.
    pub fn new(backbone: &'a Llama, heads: &'a Heads, tree: &'a SparseTree) -> Result<Self, DraftError> {
        let config = &backbone.config;
        assert!(!heads.architecture().is_sequential(), "sequential heads fill trees level by level");
        heads.check_backbone(config)?;
        tree.check_fits(heads.num_heads(), heads.draft_vocab_size())?;
        let width = tree.widths().into_iter().max().unwrap_or(0);
        Ok(Self {
            backbone,
            heads,
            tree,
            prepared: Rc::new(PreparedTree::new(tree.clone(), backbone)),
            num_heads: tree.max_depth(),
            width,
            tree_indices_n: Rc::new(tree_indices(tree, width, backbone.device())),
        })
    }

    /// Heads and tree for an engine that drafts on the device.
    pub fn on_device(&self) -> DeviceDraft<'a> {
        self.heads.on_device(self.tree)
    }

    /// The tree that the heads fill.
    pub fn tree(&self) -> &'a SparseTree {
        self.tree
    }
}

impl Drafter for MedusaDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        let hidden: Vec<&Tensor> = batch.iter().map(|text| text.hidden_1h).collect();
        let hidden_bh = if let [one] = hidden[..] { one.shallow_clone() } else { Tensor::cat(&hidden, 0) };
        let guesses_bg = self.heads.guesses(self.num_heads, self.width, &hidden_bh, self.backbone);
        let fill = |(text, row): (&TextSoFar, i64)| {
            let tokens = Tensor::cat(&[&text.root.on_device(guesses_bg.device()), &guesses_bg.select(0, row)], 0);
            Proposal {
                tree: self.prepared.clone(),
                tokens_n: tokens.index_select(0, &self.tree_indices_n),
                drawn: None,
            }
        };
        batch.iter().zip(0..).map(fill).collect()
    }
}

/// Index of each node's token in the root followed by `width` guesses per head.
fn tree_indices(tree: &SparseTree, width: usize, device: Device) -> Tensor {
    let guess = |node| tree.child_index(node).map_or(0, |child| 1 + (tree.depth(node) - 1) * width + child);
    Tensor::from_slice(&(0..tree.len()).map(|node| guess(node) as i64).collect::<Vec<_>>()).to_device(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_points_at_its_heads_guess() {
        let tree = SparseTree::new(vec![vec![0], vec![2], vec![0, 1], vec![0, 1, 0]]).unwrap();
        let indices = Vec::<i64>::try_from(tree_indices(&tree, 3, Device::Cpu)).unwrap();
        assert_eq!(indices, [0, 1, 3, 3 + 2, 3 + 3 + 1]);
    }
}
