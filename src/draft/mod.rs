//! Drafters guess tokens for the backbone to verify. A drafter knows neither the engine nor the acceptance rule.
//!
//! [`heads`] are trained; [`medusa`] and [`hydra`] guess with them, [`model`] with a smaller model. What training and calibration know of a
//! drafter with weights is in [`trained`]. Without training, [`ngram`] looks up the last tokens
//! in the text so far, [`recycling`] remembers which tokens were probable after which, and [`lookahead`] runs a window of guesses beside
//! the text. [`joined`] merges the guesses of several drafters, and [`by_load`] chooses one of
//! them by the number of texts.

// N nodes of a tree, W a token's states (see [`crate::model::taps`])
use std::cell::OnceCell;
use std::fmt;
use std::rc::Rc;

use tch::{Device, Tensor};

use self::memory::Memory;
use crate::engine::sample::{Chosen, Sampling, Stream};
use crate::model::llama::Llama;
use crate::model::new_tokens::NewTokens;
use crate::tree::rejection::DrawnChildren;
use crate::tree::sparse_tree::SparseTree;

pub mod by_load;
pub mod eagle;
pub mod error;
pub mod file;
pub mod heads;
pub mod hydra;
pub mod joined;
pub mod kinds;
pub mod levels;
pub mod lookahead;
pub mod loss;
pub mod medusa;
pub mod memory;
pub mod model;
pub mod ngram;
pub mod planned;
pub mod recycling;
pub mod token_map;
pub mod trained;
pub mod tree_cache;

/// Guesses the next tokens of texts.
///
/// A text is a row of the backbone's KV cache. Every drafter is notified when a row is added, truncated or removed; one that
/// [follows](Drafter::follows) the rows is also notified of what is committed to them and what was verified.
pub trait Drafter: fmt::Debug {
    /// Proposes a tree of guesses below each text's root, for all texts of a step in one call. Their rows ascend; there may be others, whose
    /// prompts are not computed yet.
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal>;

    /// Whether the next step, of this many texts, is plain decoding. A drafter that follows the rows does not see the tokens of such steps.
    fn rests(&mut self, _texts: usize) -> bool {
        false
    }

    /// Whether [`Drafter::committed`] and [`Drafter::verified`] are called.
    fn follows(&self) -> bool {
        false
    }

    /// An empty row was added after the others.
    fn push_row(&mut self) {}

    /// Whether guesses depend on other texts than the one that is drafted for, or on how it came about.
    fn remembers(&self) -> bool {
        false
    }

    /// A text begins in a row, before its prompt; only reported to drafters that [remember](Drafter::remembers). The row is empty if
    /// only its own text may teach the guesses.
    fn begin_text(&mut self, _row: usize, _memory: Memory) {}

    /// Forgets what the texts so far have taught.
    fn forget(&mut self) {}

    /// Tokens that no proposal held were committed to a row: a piece of a prompt, or a root whose guesses gave NaN. With the default
    /// [`Drafter::verified`], also the accepted path of each step.
    fn committed(&mut self, _row: usize, _tokens: &CommittedTokens) {}

    /// A proposal for a row was verified, and its accepted path was committed.
    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        self.committed(row, &verified.accepted);
    }

    /// Only the first `tokens` tokens of a row remain.
    fn truncate(&mut self, _row: usize, _tokens: usize) {}

    /// A row was removed, and the last row took its place.
    fn swap_remove(&mut self, _row: usize) {}

    /// All rows were removed, and give back their memory. A drafter that ran out of memory in [`Drafter::push_row`] may have one row less than the
    /// backbone, or its parts may.
    fn drop_rows(&mut self) {}
}

/// Tokens that were committed to a row.
#[derive(Debug)]
pub struct CommittedTokens<'s> {
    pub ids: &'s [i64],
    /// `[N, W]`: the states of each token.
    pub states_nw: Tensor,
}

/// A proposal that the backbone has verified.
#[derive(Debug)]
pub struct VerifiedTree<'s> {
    pub proposal: &'s Proposal,
    /// `[N, V]`: the backbone's logits after each node of the tree; behind them, those of the [`Window`]'s last nodes.
    pub logits_nv: &'s Tensor,
    /// The accepted nodes, root first.
    pub path: &'s [usize],
    /// Their tokens, which were committed.
    pub accepted: CommittedTokens<'s>,
}

/// A text to draft for.
#[derive(Debug, Clone, Copy)]
pub struct TextSoFar<'s> {
    /// Its row of the backbone's KV cache.
    pub row: usize,
    /// Prompt and new tokens. The last one is the root: the backbone has chosen it but not run it yet.
    pub ids: &'s [i64],
    pub root: &'s Chosen,
    /// `[1, W]`: the states that the root was chosen from.
    pub state_1w: &'s Tensor,
    /// How the backbone's tokens are chosen.
    pub sampling: Sampling,
    /// Selects the text's random numbers.
    pub stream: Stream,
    /// Whether the rule that verifies the guesses accounts for [`Proposal::drawn`]; other rules accept most of the most probable guesses.
    pub may_draw: bool,
}

/// A tree filled with tokens, to be verified in one pass.
#[derive(Debug)]
pub struct Proposal {
    /// The tree's shape; a drafter that always proposes the same one prepares it once.
    pub tree: Rc<PreparedTree>,
    /// `[N]`, int64, on the backbone's device: each node's token, the root's first; behind them, those of the [`Window`].
    pub tokens_n: Tensor,
    /// For guesses that were drawn at random: those below each node, with the distributions that they were drawn from.
    /// [`Acceptance::Rejection`](crate::tree::accept::Acceptance::Rejection) needs them.
    pub drawn: Option<Vec<DrawnChildren>>,
}

impl Proposal {
    /// The number of nodes that may be accepted: the tree's without its root.
    pub fn guesses(&self) -> usize {
        self.tree.tree.len() - 1
    }
}

/// Nodes that are computed in the same pass as a tree and are never accepted. The drafter learns from their logits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// Each node's position, counted from the root's.
    pub offsets: Vec<i64>,
    /// Of each node, the nodes of the window that it sees, itself among them. The root is always seen.
    pub sees: Vec<Vec<usize>>,
    /// The number of last nodes whose logits are computed.
    pub read: usize,
}

/// A tree prepared for one backbone.
#[derive(Debug)]
pub struct PreparedTree {
    pub tree: SparseTree,
    pub window: Option<Rc<Window>>,
    /// Position offsets and attention mask of the tree's nodes, then of the window's.
    pub nodes: NewTokens,
    device: Device,
    parents_n: OnceCell<Tensor>,
}

impl PreparedTree {
    /// Prepares a tree on the backbone's device.
    pub fn new(tree: SparseTree, backbone: &Llama) -> Self {
        Self::with_window(tree, None, backbone)
    }

    /// Prepares a tree and the window behind it.
    pub fn with_window(tree: SparseTree, window: Option<Rc<Window>>, backbone: &Llama) -> Self {
        let mut offsets: Vec<i64> = (0..tree.len()).map(|node| tree.depth(node) as i64).collect();
        let mut seen: Vec<Vec<usize>> = Vec::with_capacity(tree.len());
        for node in 0..tree.len() {
            let path = tree.parent(node).map_or(&[][..], |parent| &seen[parent]);
            seen.push([path, &[node]].concat());
        }
        if let Some(window) = &window {
            offsets.extend(&window.offsets);
            let after_root = window.sees.iter().map(|seen| seen.iter().map(|&node| tree.len() + node));
            seen.extend(after_root.map(|seen| [0].into_iter().chain(seen).collect::<Vec<usize>>()));
        }
        let device = backbone.device();
        let nodes = NewTokens::seeing(offsets, seen, &backbone.config, backbone.kind(), device);
        Self { tree, window, nodes, device, parents_n: OnceCell::new() }
    }

    /// The nodes whose logits are computed: those of the tree, and the window's last ones.
    pub fn read(&self) -> impl Iterator<Item = i64> {
        let (all, window) = (self.nodes.len(), self.window.as_ref().map_or(0, |window| window.read as i64));
        (0..self.tree.len() as i64).chain(all - window..all)
    }

    /// `[N]`: the parent of each node of the tree; 0 for the root.
    pub fn parents_n(&self) -> &Tensor {
        self.parents_n.get_or_init(|| {
            let parent = |node| self.tree.parent(node).unwrap_or(0) as i64;
            Tensor::from_slice(&(0..self.tree.len()).map(parent).collect::<Vec<_>>()).to_device(self.device)
        })
    }

    /// The backbone's.
    pub fn device(&self) -> Device {
        self.device
    }
}
