//! Token recycling (Luo et al. 2024, arXiv 2408.08696): for each token, the tokens that were most probable after it when the backbone last
//! computed it, in a text or as a guess, right or wrong. A tree follows these successors from the root, breadth first. Needs no training and
//! no weights; what a text has taught serves the next one, unless [`Memory`] forbids it.

// N nodes, V vocabulary
use tch::{Device, Kind, Tensor};

use super::memory::{Memory, Remembered};
use super::tree_cache::TreeCache;
use super::{CommittedTokens, Drafter, Proposal, TextSoFar, VerifiedTree};
use crate::cpu;
use crate::cpu::rows::largest;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::torch::bytes;
use crate::tree::token_tree::TokenTree;

/// Successors that are kept of a token.
const SUCCESSORS: usize = 8;
/// The published tree: how many successors each node of a level gets, for levels from the root down, in the order in which the nodes were
/// added. Nodes without a number get none.
const PUBLISHED: [&[usize]; 6] = [
    &[8],
    &[8, 4, 3, 2, 1, 1, 1, 1],
    &[8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1],
    &[5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1],
    &[3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1],
    &[2, 0, 0, 1],
];
/// Guesses of the published tree.
const NODES: usize = 80;
/// The i-th likeliest guess is assumed to become text with probability `LIKELIEST / i^FALL`: with all 80 guesses these are 2.7 tokens per step,
/// as in the paper and with stories260K (docs/decoding.md).
const LIKELIEST: f64 = 0.5;
const FALL: f64 = 1.2;
/// Prompt tokens whose successors are computed together.
const PROMPT_CHUNK: usize = 64;

/// Guesses the remembered successors of tokens.
#[derive(Debug)]
pub struct RecyclingDrafter<'a> {
    backbone: &'a Llama,
    trees: TreeCache<'a>,
    successors: Remembered<Successors>,
    nodes: usize,
}

impl<'a> RecyclingDrafter<'a> {
    /// A drafter that knows no successors yet.
    pub fn new(backbone: &'a Llama) -> Self {
        let vocabulary = usize::try_from(backbone.config.vocab_size).unwrap_or(0);
        let successors = Remembered::new(Successors::new(vocabulary));
        Self { backbone, trees: TreeCache::new(backbone), successors, nodes: NODES }
    }

    /// Largest number of guesses in a tree.
    pub const fn max_nodes() -> usize {
        NODES
    }

    /// What is assumed before any text is decoded: the probability that each guess becomes text, the likeliest first.
    pub fn assumed() -> impl Iterator<Item = f64> {
        (1..=NODES).map(|guess| LIKELIEST / (guess as f64).powf(FALL))
    }

    /// With trees of about this many guesses, from which another drafter selects; proposing more would only take time.
    #[must_use]
    pub fn with_nodes(self, nodes: usize) -> Self {
        Self { nodes: nodes.min(NODES), ..self }
    }
}

impl Drafter for RecyclingDrafter<'_> {
    fn propose(&mut self, batch: &[TextSoFar]) -> Vec<Proposal> {
        let Self { trees, successors, nodes, .. } = self;
        let mut propose = |text: &TextSoFar| {
            let (successors, root) = (successors.of(text.row), text.root.id);
            let tree = if *nodes < NODES { successors.likeliest_tree(root, *nodes) } else { successors.tree(root) };
            trees.proposal(&tree)
        };
        batch.iter().map(&mut propose).collect()
    }

    fn follows(&self) -> bool {
        true
    }

    fn remembers(&self) -> bool {
        true
    }

    fn begin_text(&mut self, row: usize, memory: Memory) {
        self.successors.begin_text(row, memory);
    }

    fn forget(&mut self) {
        self.successors.forget();
    }

    fn push_row(&mut self) {
        self.successors.push_row();
    }

    fn committed(&mut self, row: usize, tokens: &CommittedTokens) {
        for (chunk, ids) in tokens.ids.chunks(PROMPT_CHUNK).enumerate() {
            let states_nw = tokens.states_nw.narrow(0, (chunk * PROMPT_CHUNK) as i64, ids.len() as i64);
            self.successors
                .of(row)
                .learn(ids, &self.backbone.logits(&self.backbone.last_of(&states_nw), Adapters::Off));
        }
    }

    fn verified(&mut self, row: usize, verified: &VerifiedTree) {
        let all: Vec<i64> = Vec::try_from(&verified.proposal.tokens_n).expect("one axis of int64");
        let tokens: Vec<i64> = verified.proposal.tree.read().map(|node| all[node.unsigned_abs() as usize]).collect();
        self.successors.of(row).learn_tree(&tokens, verified.path, verified.logits_nv);
    }

    fn swap_remove(&mut self, row: usize) {
        self.successors.swap_remove(row);
    }

    fn drop_rows(&mut self) {
        self.successors.drop_rows();
    }
}

/// The adjacency matrix: of each token, its most probable successors.
#[derive(Debug, Clone)]
struct Successors {
    /// `[V, 8]`, best first; -1 where nothing is known.
    by_token: Vec<i32>,
    /// 8, or less in a smaller vocabulary.
    count: usize,
}

impl Successors {
    fn new(vocabulary: usize) -> Self {
        let count = SUCCESSORS.min(vocabulary);
        Self { by_token: vec![-1; vocabulary * count], count }
    }

    /// Replaces the successors of tokens by the likeliest of their logits `[N, V]`; of a token that comes twice, the last ones stay.
    fn learn(&mut self, tokens: &[i64], logits_nv: &Tensor) {
        let likeliest = likeliest(logits_nv, self.count);
        for (&token, successors) in tokens.iter().zip(likeliest.chunks_exact(self.count)) {
            self.replace(token, successors);
        }
    }

    /// As [`Successors::learn`], of a verified tree: nodes of the accepted `path` come last, and deep ones before those that are near the root.
    fn learn_tree(&mut self, tokens: &[i64], path: &[usize], logits_nv: &Tensor) {
        let likeliest = likeliest(logits_nv, self.count);
        for node in (0..tokens.len()).rev().chain(path.iter().copied()) {
            self.replace(tokens[node], &likeliest[node * self.count..][..self.count]);
        }
    }

    fn replace(&mut self, token: i64, successors: &[i64]) {
        let known = &mut self.by_token[token.unsigned_abs() as usize * self.count..][..self.count];
        known.iter_mut().zip(successors).for_each(|(to, &from)| *to = from as i32);
    }

    /// Best first; empty if none are known.
    fn of(&self, token: i64) -> impl Iterator<Item = i64> {
        let known = &self.by_token[token.unsigned_abs() as usize * self.count..][..self.count];
        known.iter().take_while(|&&successor| successor >= 0).map(|&successor| i64::from(successor))
    }

    /// The `nodes` likeliest guesses, as far as successors are known. The successor of rank r, from 0, is assumed to be right with probability
    /// 1 / (2 + r), as in [`crate::tree::merged`].
    fn likeliest_tree(&self, root: i64, nodes: usize) -> TokenTree {
        let mut tree = TokenTree::new(root);
        let mut open = vec![NextGuess { probability: 0.5, parent: 0, token: root, rank: 0 }];
        while tree.guesses() < nodes {
            let likeliest = (0..open.len()).max_by(|&a, &b| open[a].probability.total_cmp(&open[b].probability));
            let Some(NextGuess { probability, parent, token, rank }) = likeliest.map(|at| open.swap_remove(at)) else {
                break;
            };
            let Some(guess) = self.of(token).nth(rank) else { continue };
            let sibling = probability * (2 + rank) as f64 / (3 + rank) as f64;
            open.push(NextGuess { probability: sibling, parent, token, rank: rank + 1 });
            open.push(NextGuess {
                probability: probability / 2.0,
                parent: tree.add(parent, guess),
                token: guess,
                rank: 0,
            });
        }
        tree
    }

    /// The published tree, as far as successors are known.
    fn tree(&self, root: i64) -> TokenTree {
        let mut tree = TokenTree::new(root);
        let mut level = vec![Some((0, root))];
        for counts in PUBLISHED {
            let mut below = vec![];
            for (node, &count) in level.iter().zip(counts) {
                let known: Vec<i64> = node.iter().flat_map(|&(_, token)| self.of(token)).take(count).collect();
                let children = node.iter().flat_map(|&(at, _)| known.iter().map(move |&token| (at, token)));
                below.extend(children.map(|(at, token)| Some((tree.add(at, token), token))));
                below.resize(below.len() + count - known.len(), None);
            }
            level = below;
        }
        tree
    }
}

/// A guess that may come next into a tree: of a token of the tree, the successor with this rank.
struct NextGuess {
    probability: f64,
    parent: usize,
    token: i64,
    rank: usize,
}

/// The `count` most probable tokens of each row of logits `[N, V]`, best first, row after row.
fn likeliest(logits_nv: &Tensor, count: usize) -> Vec<i64> {
    let plain = logits_nv.device() == Device::Cpu && logits_nv.kind() == Kind::Float && logits_nv.is_contiguous();
    match logits_nv.size()[..] {
        [_, v] if plain && cpu::available() => {
            let rows = bytes::numbers(logits_nv).chunks_exact(v.unsigned_abs() as usize);
            rows.flat_map(|logits_v| largest(logits_v, count)).map(|token| token as i64).collect()
        }
        _ => {
            let (_, tokens_nk) = logits_nv.topk(count as i64, -1, true, true);
            Vec::try_from(tokens_nk.reshape([-1])).expect("one axis of int64")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::token_tree::LevelNodes;

    /// Logits of rows whose likeliest tokens are these, best first.
    fn logits(vocabulary: usize, best: &[[i64; 2]]) -> Tensor {
        let row = |best: &[i64; 2]| {
            let mut row = vec![0f32; vocabulary];
            best.iter().zip([9.0, 8.0]).for_each(|(&token, logit)| row[token as usize] = logit);
            row
        };
        let rows: Vec<f32> = best.iter().flat_map(row).collect();
        Tensor::from_slice(&rows).view([best.len() as i64, vocabulary as i64])
    }

    fn first_two(successors: &Successors, token: i64) -> Vec<i64> {
        successors.of(token).take(2).collect()
    }

    #[test]
    fn the_published_tree_has_its_nodes_on_six_levels() {
        let mut successors = Successors::new(100);
        // Of token t: 8t, 8t + 1, … modulo 100.
        (0..100)
            .for_each(|token| successors.replace(token, &(0..8).map(|k| (8 * token + k) % 100).collect::<Vec<_>>()));
        let LevelNodes { parents, tokens } = successors.tree(3).by_level();
        assert_eq!((parents.len(), &tokens[..9]), (NODES, &[3, 24, 25, 26, 27, 28, 29, 30, 31][..]));
        let mut depths = vec![0usize];
        parents.iter().for_each(|&parent| depths.push(depths[parent] + 1));
        let nodes_at = |depth| depths.iter().filter(|&&at| at == depth).count();
        assert_eq!([1, 2, 3, 4, 5, 6, 7].map(nodes_at), [8, 21, 25, 15, 8, 3, 0], "as in the paper's figure");
        for (node, &parent) in (1..).zip(&parents) {
            let first = 8 * tokens[parent] % 100;
            assert!((0..8).any(|k| tokens[node] == (first + k) % 100), "node {node} is a successor of its parent");
        }
    }

    #[test]
    fn a_small_tree_has_the_likeliest_guesses() {
        let mut successors = Successors::new(100);
        (0..100)
            .for_each(|token| successors.replace(token, &(0..8).map(|k| (8 * token + k) % 100).collect::<Vec<_>>()));
        // Probabilities: 24: 1/2; 25: 1/3; 26, and 92 below 24: 1/4; 93 below 24, and 0 below 25: 1/6.
        let LevelNodes { parents, tokens } = successors.likeliest_tree(3, 4).by_level();
        assert_eq!((&parents[..], &tokens[..]), (&[0, 0, 0, 1][..], &[3, 24, 25, 26, 92][..]));
        let paths = |nodes| successors.likeliest_tree(3, nodes).guesses();
        assert_eq!([0, 1, 30].map(paths), [0, 1, 30]);
        assert_eq!(Successors::new(20).likeliest_tree(3, 5).guesses(), 0, "nothing is known");
    }

    #[test]
    fn nothing_is_guessed_after_unknown_tokens() {
        let mut successors = Successors::new(20);
        assert_eq!(successors.tree(15).guesses(), 0);
        successors.replace(15, &[7, 6, 0, 1, 2, 3, 4, 5]);
        let LevelNodes { parents, tokens } = successors.tree(15).by_level();
        assert_eq!((parents, &tokens[..3]), (vec![0; SUCCESSORS], &[15, 7, 6][..]));
        successors.replace(6, &[10, 11, 12, 13, 14, 15, 16, 17]);
        let LevelNodes { parents, tokens } = successors.tree(15).by_level();
        assert_eq!((&parents[SUCCESSORS..], &tokens[1 + SUCCESSORS..]), (&[2; 4][..], &[10, 11, 12, 13][..]));
    }

    #[test]
    fn the_accepted_path_counts_before_rejected_guesses_and_near_nodes_before_deep_ones() {
        let mut successors = Successors::new(20);
        // Nodes: root 1, its guesses 2 and 3, below 2 again 3, and 1 below that.
        let (tokens, best) = ([1, 2, 3, 3, 1], [[2, 10], [3, 11], [4, 12], [5, 13], [6, 14]]);
        successors.learn_tree(&tokens, &[0, 1, 3], &logits(20, &best));
        assert_eq!([1, 2, 3].map(|token| first_two(&successors, token)), [[2, 10], [3, 11], [5, 13]]);
        successors.learn_tree(&tokens, &[0], &logits(20, &best));
        assert_eq!(first_two(&successors, 3), [4, 12]);
        assert!(first_two(&successors, 4).is_empty());
    }

    #[test]
    fn a_token_keeps_the_successors_of_its_last_place() {
        let mut successors = Successors::new(20);
        successors.learn(&[4, 9, 4], &logits(20, &[[1, 2], [3, 5], [6, 7]]));
        assert_eq!([4, 9].map(|token| first_two(&successors, token)), [[6, 7], [3, 5]]);
    }

    #[test]
    fn a_vocabulary_may_be_smaller_than_the_list() {
        let mut successors = Successors::new(3);
        successors.learn(&[0, 1, 2], &logits(3, &[[1, 2], [2, 0], [0, 1]]));
        assert_eq!(successors.of(1).collect::<Vec<_>>(), [2, 0, 1]);
        assert!(successors.tree(0).guesses() > 10);
    }

    #[test]
    fn kernels_and_libtorch_agree_on_the_likeliest_tokens() {
        let logits_nv = crate::torch::Generator::seeded(3).normal(&[5, 300], (Kind::Float, Device::Cpu));
        assert_eq!(likeliest(&logits_nv, 8), likeliest(&logits_nv.to_kind(Kind::Double), 8));
    }
}
