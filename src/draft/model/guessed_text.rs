//! The tree of guesses below a text, as far as the draft model has computed it.

// V vocabulary
use tch::Tensor;

use crate::draft::TextSoFar;
use crate::draft::heads::guesses::likeliest;
use crate::engine::Engine;
use crate::engine::sample::{Sampler, distributions};
use crate::model::new_tokens::NewTokens;
use crate::tree::dynamic::LikelyToken;
use crate::tree::rejection::{Draw, DrawnChildren};
use crate::tree::sparse_tree::SparseTree;

/// How guesses are chosen above temperature 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guessing {
    /// By draws, which rejection accepts most often; the most probable tokens for a text with another rule.
    Drawn,
    /// The most probable tokens, as at temperature 0. For acceptance that does not know the draws.
    Best,
}

/// The tree of a text as far as it was computed.
#[derive(Debug)]
pub(super) struct GuessedText {
    /// Its row of the cache.
    row: usize,
    /// Whether the draft model's context has room for text and tree; otherwise nothing is computed.
    pub(super) fits: bool,
    /// Draws the guesses; `None` if they are the most probable tokens.
    pub(super) sampler: Option<Sampler>,
    /// The root, then the nodes that were run.
    nodes: Vec<GuessedNode>,
    /// The number of leading nodes that form a chain and are committed to the cache.
    committed: usize,
}

#[derive(Debug)]
struct GuessedNode {
    parent: usize,
    token: i64,
    /// The guesses below it.
    drawn: DrawnChildren,
}

/// What one text runs in a pass: a token that continues its chain, or the forest behind the chain.
pub(super) struct Part {
    pub(super) row: usize,
    pub(super) tokens: Vec<i64>,
    /// `None`: a chain.
    pub(super) forest: Option<NewTokens>,
    /// How many of the last tokens need guesses.
    pub(super) asked: usize,
}

impl GuessedText {
    pub(super) fn new(text: &TextSoFar, guessing: Guessing, fits: bool) -> Self {
        let draws = text.may_draw && text.sampling.temperature.get() > 0.0 && guessing == Guessing::Drawn;
        let sampler = draws.then(|| Sampler::for_guesses(text.sampling, text.stream, text.ids.len()));
        let root = GuessedNode { parent: 0, token: text.root.id, drawn: DrawnChildren::default() };
        Self { row: text.row, fits, sampler, nodes: vec![root], committed: 1 }
    }

    /// Adds a node below another one.
    pub(super) fn add(&mut self, parent: usize, token: i64) {
        self.nodes.push(GuessedNode { parent, token, drawn: DrawnChildren::default() });
    }

    /// The number of nodes, the root among them.
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// What runs to compute the last `asked` nodes.
    pub(super) fn part(&mut self, asked: usize, engine: &dyn Engine) -> Part {
        let (model, row) = (engine.backbone(), self.row);
        let tokens = |nodes: &[GuessedNode]| nodes.iter().map(|node| node.token).collect();
        if asked == 1 && self.committed + 1 == self.nodes.len() {
            self.committed += 1;
            return Part { row, tokens: tokens(&self.nodes[self.committed - 1..]), forest: None, asked };
        }
        let paths = self.forest();
        let offsets = paths.iter().map(|path| path.len() as i64 - 1).collect();
        let forest = NewTokens::seeing(offsets, paths, &model.config, model.kind(), model.device());
        Part { row, tokens: tokens(&self.nodes[self.committed..]), forest: Some(forest), asked }
    }

    /// Of each node behind the committed ones, the path to it, counted from there.
    fn forest(&self) -> Vec<Vec<usize>> {
        let mut paths: Vec<Vec<usize>> = vec![];
        for (at, node) in self.nodes[self.committed..].iter().enumerate() {
            let above = node.parent.checked_sub(self.committed).map_or(&[][..], |parent| &paths[parent]);
            paths.push([above, &[at]].concat());
        }
        paths
    }

    /// The guesses below a node, from logits `[1, V]`.
    pub(super) fn guess(&mut self, node: usize, logits_1v: &Tensor, count: usize) -> Vec<LikelyToken> {
        let Some(sampler) = &mut self.sampler else { return likeliest(logits_1v, count) };
        let q = distributions(logits_1v, sampler.sampling()).pop().flatten().unwrap_or_default();
        let log_p = sorted_log(&q, count);
        let drawn = DrawnChildren::draw(q, count, || sampler.uniform());
        let guess = |(draw, log_p): (&Draw, f32)| LikelyToken { token: draw.token, log_p };
        let mut guesses: Vec<LikelyToken> = drawn.guesses.iter().zip(log_p).map(guess).collect();
        self.nodes[node].drawn = drawn;
        pad(&mut guesses, count);
        guesses
    }

    /// The child of a node that holds a token, if it was run.
    fn child(&self, parent: usize, token: i64) -> Option<usize> {
        (1..self.nodes.len()).find(|&node| self.nodes[node].parent == parent && self.nodes[node].token == token)
    }

    /// The draws below each node of a proposal. All of them, so that a tree may leave some out.
    pub(super) fn drawn(&self, tree: &SparseTree, tokens: &[i64]) -> Vec<DrawnChildren> {
        let mut own = vec![Some(0)];
        for (node, &token) in tokens.iter().enumerate().skip(1) {
            let parent = tree.parent(node).and_then(|parent| own[parent]);
            own.push(parent.and_then(|parent| self.child(parent, token)));
        }
        let drawn = |node: Option<usize>| node.map(|node| self.nodes[node].drawn.clone()).unwrap_or_default();
        own.into_iter().map(drawn).collect()
    }
}

/// Logarithms of the `count` largest probabilities, largest first.
fn sorted_log(q: &[f64], count: usize) -> Vec<f32> {
    let mut sorted = q.to_vec();
    if count < sorted.len() {
        sorted.select_nth_unstable_by(count, |a, b| b.total_cmp(a));
        sorted.truncate(count);
    }
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    sorted.into_iter().map(|q| q.ln() as f32).collect()
}

/// Fills up with tokens of probability 0, where fewer than `count` could be drawn.
fn pad(guesses: &mut Vec<LikelyToken>, count: usize) {
    for token in 0.. {
        if guesses.len() == count {
            break;
        }
        if guesses.iter().all(|guess| guess.token != token) {
            guesses.push(LikelyToken { token, log_p: f32::NEG_INFINITY });
        }
    }
}
