//! Fills trees level by level: the guesses below a node depend on its path, or only on its level. Static trees are filled as they are;
//! other trees are chosen at each step ([`GrowingTree`]).

// N nodes
use std::fmt;
use std::rc::Rc;

use tch::Tensor;

use super::tree_cache::TreeCache;
use super::{CommittedTokens, Drafter, PreparedTree, Proposal, TextSoFar, VerifiedTree};
use crate::formats::tree::DynamicTree;
use crate::model::llama::Llama;
use crate::tree::dynamic::{FrontierNode, GrowingTree, LikelyToken};
use crate::tree::rejection::DrawnChildren;
use crate::tree::sparse_tree::SparseTree;
use crate::tree::token_tree::TokenTree;

/// Guesses the next level of trees for several texts at a time.
pub trait LevelGuesser: fmt::Debug {
    /// Begins with new texts: their roots, in order, are the first frontier's parents.
    fn begin(&mut self, batch: &[TextSoFar]);

    /// The `top_k` likeliest tokens after each node of a level, best first, node after node. A node's `parent` is its parent's place in the
    /// frontier of the call before; in the first call, whose nodes are the roots, it is the text's place in the batch.
    fn guess(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<LikelyToken>;

    /// The tokens of [`LevelGuesser::guess`].
    fn guess_tokens(&mut self, frontier: &[FrontierNode], top_k: usize) -> Vec<i64> {
        self.guess(frontier, top_k).into_iter().map(|guess| guess.token).collect()
    }

    /// Whether there are guesses for the `text`-th text of the batch; without any, its root is proposed alone.
    fn guesses_for(&self, _text: usize) -> bool {
        true
    }

    /// [`Proposal::drawn`] for the `text`-th text of the batch.
    fn drawn(&self, _text: usize, _proposal: &Proposal) -> Option<Vec<DrawnChildren>> {
        None
    }

    /// As [`Drafter::follows`].
    fn follows(&self) -> bool {
        false
    }

    /// As [`Drafter::push_row`].
    fn push_row(&mut self) {}

    /// As [`Drafter::committed`].
    fn committed(&mut self, _row: usize, _tokens: &CommittedTokens) {}

    /// As [`Drafter::verified`].
    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.committed(row, &verified.accepted);
    }

    /// As [`Drafter::truncate`].
    fn truncate(&mut self, _row: usize, _tokens: usize) {}

    /// As [`Drafter::swap_remove`].
    fn swap_remove(&mut self, _row: usize) {}

    /// As [`Drafter::drop_rows`].
    fn drop_rows(&mut self) {}
}

/// A drafter that fills trees level by level.
#[derive(Debug)]
pub struct LevelDrafter<'a> {
    guesser: Box<dyn LevelGuesser + 'a>,
    filling: Filling,
    trees: TreeCache<'a>,
}

#[derive(Debug)]
enum Filling {
    Static(StaticLevels),
    Dynamic(DynamicTree),
}

/// A static tree, with the nodes of each level that have children.
#[derive(Debug)]
struct StaticLevels {
    prepared: Rc<PreparedTree>,
    levels: Vec<Vec<usize>>,
    /// The most guesses that a node of each level has.
    widths: Vec<usize>,
}

impl<'a> LevelDrafter<'a> {
    /// A drafter whose trees are chosen at each step.
    pub fn dynamic(backbone: &'a Llama, guesser: Box<dyn LevelGuesser + 'a>, limits: DynamicTree) -> Self {
        Self { guesser, filling: Filling::Dynamic(limits), trees: TreeCache::new(backbone) }
    }

    /// A drafter that fills the same tree at each step.
    pub fn for_tree(backbone: &'a Llama, guesser: Box<dyn LevelGuesser + 'a>, tree: &SparseTree) -> Self {
        let filling = Filling::Static(StaticLevels::new(tree, backbone));
        Self { guesser, filling, trees: TreeCache::new(backbone) }
    }
}

impl Drafter for LevelDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        self.guesser.begin(batch);
        let roots: Vec<i64> = batch.iter().map(|text| text.root.id).collect();
        let Self { guesser, filling, trees } = self;
        let mut proposals: Vec<Proposal> = match filling {
            Filling::Static(tree) => tree.fill(&mut **guesser, &roots),
            Filling::Dynamic(limits) => {
                grow(&mut **guesser, &roots, *limits).iter().map(|tree| trees.proposal(&tree.chosen())).collect()
            }
        };
        for (text, proposal) in proposals.iter_mut().enumerate() {
            match guesser.guesses_for(text) {
                true => proposal.drawn = guesser.drawn(text, proposal),
                false => *proposal = trees.proposal(&TokenTree::new(roots[text])),
            }
        }
        proposals
    }

    fn follows(&self) -> bool {
        self.guesser.follows()
    }

    fn push_row(&mut self) {
        self.guesser.push_row();
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        self.guesser.committed(row, tokens);
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.guesser.verified(row, verified);
    }

    fn truncate(&mut self, row: usize, tokens: usize) {
        self.guesser.truncate(row, tokens);
    }

    fn swap_remove(&mut self, row: usize) {
        self.guesser.swap_remove(row);
    }

    fn drop_rows(&mut self) {
        self.guesser.drop_rows();
    }
}

/// Chooses a tree below the root of each text that the guesser has begun with.
pub fn grow(guesser: &mut dyn LevelGuesser, roots: &[i64], limits: DynamicTree) -> Vec<GrowingTree> {
    let mut trees: Vec<GrowingTree> = roots.iter().map(|&root| GrowingTree::new(root, limits)).collect();
    let top_k = limits.top_k.min(limits.nodes); // the guesses behind them are no nodes of the tree
    let mut firsts: Vec<usize> = (0..roots.len()).collect(); // of each text, its first node in the frontier before
    loop {
        let mut frontier = vec![];
        for (tree, first) in trees.iter().zip(&mut firsts) {
            let before = std::mem::replace(first, frontier.len());
            frontier.extend(tree.frontier().map(|node| FrontierNode { parent: before + node.parent, ..node }));
        }
        if frontier.is_empty() {
            return trees;
        }
        let guesses = guesser.guess(&frontier, top_k);
        let mut rest = &guesses[..];
        for tree in &mut trees {
            let (own, others) = rest.split_at(tree.frontier().len() * top_k);
            tree.grow(own);
            rest = others;
        }
    }
}

impl StaticLevels {
    fn new(tree: &SparseTree, backbone: &Llama) -> Self {
        let levels = (0..tree.max_depth()).map(|depth| tree.inner_nodes(depth)).collect();
        Self { levels, widths: tree.widths(), prepared: Rc::new(PreparedTree::new(tree.clone(), backbone)) }
    }

    fn fill(&self, guesser: &mut dyn LevelGuesser, roots: &[i64]) -> Vec<Proposal> {
        let tree = &self.prepared.tree;
        let mut tokens: Vec<Vec<i64>> = roots.iter().map(|&root| vec![root; tree.len()]).collect();
        for (level, (nodes, &width)) in self.levels.iter().zip(&self.widths).enumerate() {
            let guesses = guesser.guess_tokens(&self.frontier(level, &tokens), width);
            for (tokens, guesses) in tokens.iter_mut().zip(guesses.chunks_exact(nodes.len() * width)) {
                for (&node, guesses) in nodes.iter().zip(guesses.chunks_exact(width)) {
                    let guess = |child| guesses[tree.child_index(child).unwrap_or(0)];
                    tree.children(node).for_each(|child| tokens[child] = guess(child));
                }
            }
        }
        let device = self.prepared.device();
        let proposal = |tokens: &Vec<i64>| Proposal {
            tree: self.prepared.clone(),
            tokens_n: Tensor::from_slice(tokens).to_device(device),
            drawn: None,
        };
        tokens.iter().map(proposal).collect()
    }

    /// The nodes of a level that have children, text after text.
    fn frontier(&self, level: usize, tokens: &[Vec<i64>]) -> Vec<FrontierNode> {
        let parent_of = |text: usize, node: usize| match self.prepared.tree.parent(node) {
            Some(parent) => {
                let before = &self.levels[level - 1];
                text * before.len() + before.binary_search(&parent).expect("a parent has children")
            }
            None => text,
        };
        let frontier = |(text, tokens): (usize, &Vec<i64>)| {
            let node = |&node: &usize| FrontierNode { parent: parent_of(text, node), token: tokens[node] };
            self.levels[level].iter().map(node).collect::<Vec<_>>()
        };
        tokens.iter().enumerate().flat_map(frontier).collect()
    }
}
