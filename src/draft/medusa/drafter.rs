//! Medusa heads as a drafter: a static tree filled with each head's best guesses.

// B texts, N nodes, H hidden size, M guesses per head
use std::rc::Rc;

use tch::{Device, Tensor};

use crate::draft::error::DraftError;
use crate::draft::heads::Heads;
use crate::draft::{Drafter, PreparedTree, Proposal, TextSoFar};
use crate::engine::cuda::draft::DeviceDraft;
use crate::model::llama::Llama;
use crate::tree::sparse_tree::SparseTree;

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
    /// Index of each node's token in `[root, head 1's guesses, head 2's guesses, …]`.
    tree_indices: Rc<[usize]>,
    /// The same on the device, `[N]`.
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
        let indices = tree_indices(tree, width);
        let on_device: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        Ok(Self {
            backbone,
            heads,
            tree,
            prepared: Rc::new(PreparedTree::new(tree.clone(), backbone)),
            num_heads: tree.max_depth(),
            width,
            tree_indices: indices.into(),
            tree_indices_n: Rc::new(Tensor::from_slice(&on_device).to_device(backbone.device())),
        })
    }

    /// Heads and tree for an engine that drafts on the device.
    pub fn on_device(&self) -> DeviceDraft<'a> {
        self.heads.matrices_for(self.tree)
    }

    /// The tree that the heads fill.
    pub fn tree(&self) -> &'a SparseTree {
        self.tree
    }
}

impl Drafter for MedusaDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        let hidden: Vec<Tensor> = batch.iter().map(|text| self.backbone.last_of(text.state_1w)).collect();
        let hidden_bh = if let [one] = &hidden[..] { one.shallow_clone() } else { Tensor::cat(&hidden, 0) };
        let guesses_bg = self.heads.guesses(self.num_heads, self.width, &hidden_bh, self.backbone);
        let tokens: Vec<Tensor> = match guesses_bg.device() {
            Device::Cpu => self.filled(batch, &Vec::try_from(guesses_bg.reshape([-1])).expect("one axis of int64")),
            device => (batch.iter().zip(0..))
                .map(|(text, row)| {
                    let all = Tensor::cat(&[&text.root.on_device(device), &guesses_bg.select(0, row)], 0);
                    all.index_select(0, &self.tree_indices_n)
                })
                .collect(),
        };
        let proposal = |tokens_n| Proposal { tree: self.prepared.clone(), tokens_n, drawn: None };
        tokens.into_iter().map(proposal).collect()
    }
}

impl MedusaDrafter<'_> {
    /// The tree of each text on the host, where a tensor's operation takes longer than the tree; `guesses` are `[B, G]`.
    fn filled(&self, batch: &[TextSoFar], guesses: &[i64]) -> Vec<Tensor> {
        let node_tokens = |(text, guesses): (&TextSoFar, &[i64])| {
            let token = |&index: &usize| index.checked_sub(1).map_or(text.root.id, |guess| guesses[guess]);
            Tensor::from_slice(&self.tree_indices.iter().map(token).collect::<Vec<_>>())
        };
        batch.iter().zip(guesses.chunks_exact(self.num_heads * self.width)).map(node_tokens).collect()
    }
}

/// Index of each node's token in the root followed by `width` guesses per head.
fn tree_indices(tree: &SparseTree, width: usize) -> Vec<usize> {
    let index = |node| tree.child_index(node).map_or(0, |child| 1 + (tree.depth(node) - 1) * width + child);
    (0..tree.len()).map(index).collect()
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
