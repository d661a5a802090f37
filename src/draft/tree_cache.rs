//! Prepared trees by their shape, for drafters whose tree differs from step to step.

use std::collections::HashMap;
use std::rc::Rc;

use super::{PreparedTree, Proposal, Window};
use crate::model::llama::Llama;
use crate::torch::upload;
use crate::tree::sparse_tree::SparseTree;
use crate::tree::token_tree::{LevelNodes, TokenTree};

/// Nodes of all trees that are kept. On libtorch, each has a row of a mask over the context: 0.5 MB for 32k tokens and 8 query heads per
/// group in 16 bits.
const KEPT_NODES: usize = 512;

/// Prepares trees for one backbone and keeps the last ones.
#[derive(Debug)]
pub struct TreeCache<'a> {
    backbone: &'a Llama,
    /// By the nodes' parents.
    trees: HashMap<Vec<usize>, Rc<PreparedTree>>,
    /// Nodes of all of them.
    nodes: usize,
    /// The window behind all of them.
    window: Option<Rc<Window>>,
}

/// The tokens of a window's nodes.
#[derive(Debug)]
pub struct WindowTokens {
    pub window: Rc<Window>,
    pub tokens: Vec<i64>,
}

impl<'a> TreeCache<'a> {
    /// An empty cache.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { backbone, trees: HashMap::new(), nodes: 0, window: None }
    }

    /// A proposal of these tokens.
    pub fn proposal(&mut self, tree: &TokenTree) -> Proposal {
        self.with_window(tree, None)
    }

    /// A proposal of these tokens, with a window behind the tree. Trees with another window are forgotten.
    pub fn with_window(&mut self, tree: &TokenTree, window: Option<WindowTokens>) -> Proposal {
        let LevelNodes { parents, mut tokens } = tree.by_level();
        let (window, behind) = window.map(|WindowTokens { window, tokens }| (window, tokens)).unzip();
        tokens.extend(behind.into_iter().flatten());
        if self.window != window {
            self.clear();
            self.window = window;
        }
        let tokens_n = upload(&tokens, self.backbone.device());
        Proposal { tree: self.prepared(parents), tokens_n, drawn: None }
    }

    /// The tree of nodes with these parents, as [`SparseTree::from_parents`] takes them.
    fn prepared(&mut self, parents: Vec<usize>) -> Rc<PreparedTree> {
        if let Some(tree) = self.trees.get(&parents) {
            return tree.clone();
        }
        if self.nodes > KEPT_NODES {
            self.clear();
        }
        let tree = SparseTree::from_parents(&parents);
        let tree = Rc::new(PreparedTree::with_window(tree, self.window.clone(), self.backbone));
        self.nodes += tree.nodes.len().unsigned_abs() as usize;
        self.trees.insert(parents, tree.clone());
        tree
    }

    fn clear(&mut self) {
        self.trees.clear();
        self.nodes = 0;
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::model::config::LlamaConfig;

    #[test]
    fn a_shape_is_prepared_once_and_old_ones_make_room() {
        let backbone = Llama::random(LlamaConfig::tiny(), Kind::Float, Device::Cpu, 1);
        let mut cache = TreeCache::new(&backbone);
        let chain = |length: usize, token: i64| {
            let mut tree = TokenTree::new(token);
            (0..length).for_each(|node| _ = tree.add(node, token));
            tree
        };
        let (one, other) = (cache.proposal(&chain(3, 7)), cache.proposal(&chain(3, 8)));
        assert!(Rc::ptr_eq(&one.tree, &other.tree));
        assert_eq!(Vec::<i64>::try_from(&other.tokens_n).unwrap(), [8; 4]);
        (1..60).for_each(|length| _ = cache.proposal(&chain(length, 7)));
        assert!(
            cache.nodes <= KEPT_NODES + 60
                && cache.nodes == cache.trees.values().map(|tree| tree.tree.len()).sum::<usize>()
        );
    }
}
