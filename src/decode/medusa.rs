//! Heads, tree and acceptance laid out for one backbone, and what a pass over the tree decides.

// N nodes of a tree, V vocabulary
use tch::{Kind, Tensor};

use super::accept::{self, Acceptance};
use super::propose::Proposer;
use super::request::DecodeError;
use crate::medusa::heads::Heads;
use crate::medusa::tree::SparseTree;
use crate::model::attention::NewTokens;
use crate::model::llama::Llama;

/// Heads, tree and acceptance, ready for one backbone.
#[derive(Debug)]
pub struct Medusa<'a> {
    heads: &'a Heads,
    tree: &'a SparseTree,
    acceptance: Acceptance,
    proposer: Proposer,
    /// Where the nodes stand, and whom they see.
    pub(super) nodes: NewTokens,
    /// `[N]`: each node's parent; the root's own index for the root.
    parents_n: Tensor,
}

impl<'a> Medusa<'a> {
    /// Checks that they belong together, and lays out the tree on the backbone's device.
    ///
    /// # Errors
    /// [`DecodeError::Mismatch`] and [`DecodeError::Tree`].
    pub fn new(
        backbone: &Llama,
        heads: &'a Heads,
        tree: &'a SparseTree,
        acceptance: Acceptance,
    ) -> Result<Self, DecodeError> {
        let config = &backbone.config;
        let sizes = [
            ("hidden size", heads.hidden_size(), config.hidden_size),
            ("vocabulary", heads.vocab_size(), config.vocab_size),
        ];
        if let Some(&(what, heads, backbone)) = sizes.iter().find(|(_, heads, backbone)| heads != backbone) {
            return Err(DecodeError::Mismatch { what, heads, backbone });
        }
        tree.check_fits(heads.num_heads(), usize::try_from(config.vocab_size).unwrap_or(0))?;
        let offsets: Vec<i64> = (0..tree.len()).map(|node| tree.depth(node) as i64).collect();
        let sees = |query, key| tree.attends(query, key);
        let nodes = NewTokens::pattern(&offsets, sees, config, backbone.kind(), backbone.device());
        let parents: Vec<i64> = (0..tree.len()).map(|node| tree.parent(node).unwrap_or(0) as i64).collect();
        let parents_n = Tensor::from_slice(&parents).to_device(backbone.device());
        Ok(Self { heads, tree, acceptance, proposer: Proposer::new(tree, backbone.device()), nodes, parents_n })
    }

    /// The tokens of all nodes (see [`Proposer::candidates`]).
    pub(super) fn candidates(&self, root_1: &Tensor, hidden_1h: &Tensor, backbone: &Llama) -> Tensor {
        self.proposer.candidates(root_1, hidden_1h, self.heads, backbone)
    }

    /// Decides at the nodes; all that the decision needs crosses to the host in one copy.
    pub(super) fn verify(&self, logits_nv: &Tensor, tokens_n: &Tensor, temperature: f64) -> Verified {
        let best_n = logits_nv.argmax(-1, false);
        let nodes = self.tree.len();
        let (path, tokens, best) = match self.acceptance {
            Acceptance::Typical(rule) if temperature > 0.0 => {
                let (log_p_n, entropy_n) = posterior(logits_nv, tokens_n, &self.parents_n, temperature);
                let rows = [tokens_n.to_kind(Kind::Double), best_n.to_kind(Kind::Double), log_p_n, entropy_n];
                let rows: Vec<f64> = to_host(&Tensor::cat(&rows, 0));
                let path = accept::typical(self.tree, &rows[2 * nodes..3 * nodes], &rows[3 * nodes..], rule);
                let (tokens, best) = rows[..2 * nodes].split_at(nodes);
                (path, as_ids(tokens), as_ids(best))
            }
            _ => {
                let rows: Vec<i64> = to_host(&Tensor::cat(&[tokens_n, &best_n], 0));
                let (tokens, best) = rows.split_at(nodes);
                (accept::greedy(self.tree, tokens, best), tokens.to_vec(), best.to_vec())
            }
        };
        let accepted: Vec<i64> = path.iter().map(|&node| tokens[node]).collect();
        let next_root = best[path[path.len() - 1]];
        Verified { path, accepted, best_n, next_root }
    }
}

/// What a pass over the tree decided.
pub(super) struct Verified {
    /// Accepted nodes, root first.
    pub(super) path: Vec<usize>,
    /// Their tokens.
    pub(super) accepted: Vec<i64>,
    /// `[N]`: the most probable token after each node.
    pub(super) best_n: Tensor,
    /// The one after the last accepted node.
    pub(super) next_root: i64,
}

/// Log-probability of each node's token after its parent, and entropy after each node, both `[N]`, float64.
fn posterior(logits_nv: &Tensor, tokens_n: &Tensor, parents_n: &Tensor, temperature: f64) -> (Tensor, Tensor) {
    let log_p_nv = (logits_nv.to_kind(Kind::Float) / temperature).log_softmax(-1, Kind::Float);
    let entropy_n = -(log_p_nv.exp() * &log_p_nv).sum_dim_intlist(-1, false, Kind::Double);
    let at_n = parents_n * log_p_nv.size()[1] + tokens_n;
    (log_p_nv.view([-1]).index_select(0, &at_n).to_kind(Kind::Double), entropy_n)
}

fn to_host<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
    Vec::try_from(tensor).expect("one axis, of the kind that was made")
}

/// Token ids that crossed to the host as float64, which holds them exactly.
#[expect(clippy::cast_possible_truncation, reason = "integers below 2^53")]
fn as_ids(row: &[f64]) -> Vec<i64> {
    row.iter().map(|&id| id as i64).collect()
}
