//! Heads, tree and acceptance laid out for one backbone, and what a pass over the tree decides.

// N nodes of a tree, V vocabulary
use tch::{Kind, Tensor};

use super::penalty::Penalty;
use super::propose::Proposer;
use super::request::{DecodeError, Request};
use crate::draft::medusa::heads::Heads;
use crate::engine::cuda::draft::DeviceDraft;
use crate::engine::sample::{Chosen, Sampler};
use crate::model::attention::NewTokens;
use crate::model::llama::{Llama, most_probable};
use crate::tree::accept::{self, Acceptance};
use crate::tree::sparse_tree::SparseTree;

/// Heads, tree and acceptance, ready for one backbone.
#[derive(Debug)]
pub struct Medusa<'a> {
    heads: &'a Heads,
    tree: &'a SparseTree,
    acceptance: Acceptance,
    proposer: Proposer,
    /// Where the nodes stand, and whom they see.
    pub(crate) nodes: NewTokens,
    /// `[N]`: each node's parent; the root's own index for the root.
    parents_n: Tensor,
}

impl<'a> Medusa<'a> {
    /// Checks that they belong together, and lays out the tree on the backbone's device.
    ///
    /// # Errors
    /// [`DecodeError::Mismatch`], [`DecodeError::Tree`] and [`DecodeError::ForcedRate`].
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
        if let Acceptance::Forced { rate } = acceptance {
            let largest = accept::chain_of_best(tree).count();
            if !(1.0..=largest as f64).contains(&rate) {
                return Err(DecodeError::ForcedRate { rate, largest });
            }
        }
        let offsets: Vec<i64> = (0..tree.len()).map(|node| tree.depth(node) as i64).collect();
        let sees = |query, key| tree.attends(query, key);
        let nodes = NewTokens::pattern(&offsets, sees, config, backbone.kind(), backbone.device());
        let parents: Vec<i64> = (0..tree.len()).map(|node| tree.parent(node).unwrap_or(0) as i64).collect();
        let parents_n = Tensor::from_slice(&parents).to_device(backbone.device());
        Ok(Self { heads, tree, acceptance, proposer: Proposer::new(tree, backbone.device()), nodes, parents_n })
    }

    /// Heads and tree for the CUDA engine.
    pub fn on_device(&self) -> DeviceDraft<'a> {
        self.heads.on_device(self.tree)
    }

    /// Which guesses are accepted.
    pub(crate) fn acceptance(&self) -> Acceptance {
        self.acceptance
    }

    /// The tokens of all nodes (see [`Proposer::candidates`]).
    pub(crate) fn candidates(&self, root_1: &Tensor, hidden_1h: &Tensor, backbone: &Llama) -> Tensor {
        self.proposer.candidates(root_1, hidden_1h, self.heads, backbone)
    }

    /// The text's first token, of logits `[1, V]`: drawn where the acceptance draws its roots, else the most probable one, at any
    /// temperature (it is unconditionally accepted, paper section 2.3.1).
    pub(crate) fn first_root(&self, logits_1v: &Tensor, choice: &mut Choice) -> Chosen {
        let logits_1v = choice.penalty.of_text(logits_1v);
        if self.acceptance.draws() { choice.sampler.next(&logits_1v) } else { Chosen::best(&logits_1v) }
    }

    /// Decides at the nodes which path is kept, and what comes after it; of the logits, only what the decision needs crosses to the
    /// host. At temperature 0 every rule but a forced one is greedy.
    pub(crate) fn verify(&self, pass: &Pass, choice: &mut Choice) -> Verified {
        let logits_nv = match choice.penalty.is_off() {
            true => pass.logits_nv.shallow_clone(),
            false => choice.penalty.of_tree(pass.logits_nv, self.tree, &to_host::<i64>(pass.tokens_n)),
        };
        let temperature = choice.sampler.sampling().temperature.get();
        match self.acceptance {
            Acceptance::Forced { rate } => {
                let path = accept::forced(self.tree, rate, pass.step);
                self.best_after(&logits_nv, pass.tokens_n, |_, _| path)
            }
            Acceptance::Typical(rule) if temperature > 0.0 => {
                let (log_p, entropy) = self.posterior(&logits_nv, pass.tokens_n, temperature);
                let path = accept::typical(self.tree, &log_p, &entropy, rule);
                self.best_after(&logits_nv, pass.tokens_n, |_, _| path)
            }
            Acceptance::Nucleus if temperature > 0.0 => {
                let (log_p, more_probable) = self.ranks(&logits_nv, pass.tokens_n, temperature);
                let top_p = choice.sampler.sampling().top_p.get();
                let path = accept::nucleus(self.tree, &log_p, &more_probable, top_p);
                let last = path[path.len() - 1];
                let next = choice.sampler.next(&row(&logits_nv, last));
                Verified::new(path, &to_host::<i64>(pass.tokens_n), next)
            }
            Acceptance::Rejection if temperature > 0.0 => {
                let (tokens, mut drawn) = (to_host::<i64>(pass.tokens_n), None);
                let (path, _) = accept::walk(self.tree, &tokens, |node| {
                    drawn.insert(choice.sampler.next(&row(&logits_nv, node))).id
                });
                Verified::new(path, &tokens, drawn.expect("the root is asked"))
            }
            _ => self.best_after(&logits_nv, pass.tokens_n, |tokens, best| {
                accept::walk(self.tree, tokens, |node| best[node]).0
            }),
        }
    }

    /// A path, and the most probable token after it. `path` gets each node's token, and the most probable token after each node.
    fn best_after(
        &self,
        logits_nv: &Tensor,
        tokens_n: &Tensor,
        path: impl FnOnce(&[i64], &[i64]) -> Vec<usize>,
    ) -> Verified {
        let best_n = most_probable(logits_nv);
        let rows: Vec<i64> = to_host(&Tensor::cat(&[tokens_n, &best_n], 0));
        let (tokens, best) = rows.split_at(self.tree.len());
        let path = path(tokens, best);
        let last = path[path.len() - 1];
        let next = Chosen { id: best[last], id_1: best_n.narrow(0, last as i64, 1) };
        Verified::new(path, tokens, next)
    }

    /// Log-probability of each node's token after its parent, and entropy after each node.
    fn posterior(&self, logits_nv: &Tensor, tokens_n: &Tensor, temperature: f64) -> (Vec<f64>, Vec<f64>) {
        let log_p_nv = log_probabilities(logits_nv, temperature);
        let entropy_n = -(log_p_nv.exp() * &log_p_nv).sum_dim_intlist(-1, false, Kind::Double);
        let log_p_n = self.of_guesses(&log_p_nv, tokens_n);
        self.two_rows(&log_p_n, &entropy_n)
    }

    /// Log-probability of each node's token after its parent, and the probability of all tokens that are more probable there (of
    /// equals, of those with lower ids: the order in which a nucleus is filled).
    fn ranks(&self, logits_nv: &Tensor, tokens_n: &Tensor, temperature: f64) -> (Vec<f64>, Vec<f64>) {
        let log_p_nv = log_probabilities(logits_nv, temperature);
        let log_p_n = self.of_guesses(&log_p_nv, tokens_n);
        let after_parent_nv = log_p_nv.index_select(0, &self.parents_n);
        let ids_v = Tensor::arange(logits_nv.size()[1], (Kind::Int64, logits_nv.device()));
        let (guess_n1, id_n1) = (log_p_n.unsqueeze(1), tokens_n.unsqueeze(1));
        let equal_nv = after_parent_nv.eq_tensor(&guess_n1).logical_and(&ids_v.unsqueeze(0).lt_tensor(&id_n1));
        let before_nv = after_parent_nv.gt_tensor(&guess_n1).logical_or(&equal_nv);
        let more_probable_n = (after_parent_nv.exp() * before_nv).sum_dim_intlist(-1, false, Kind::Double);
        self.two_rows(&log_p_n, &more_probable_n)
    }

    /// Of `[N, V]` after each node, the value of each node's token after its parent, `[N]`.
    fn of_guesses(&self, after_nv: &Tensor, tokens_n: &Tensor) -> Tensor {
        let at_n = &self.parents_n * after_nv.size()[1] + tokens_n;
        after_nv.reshape([-1]).index_select(0, &at_n)
    }

    /// Two tensors `[N]` on the host, in one copy.
    fn two_rows(&self, a_n: &Tensor, b_n: &Tensor) -> (Vec<f64>, Vec<f64>) {
        let mut both: Vec<f64> = to_host(&Tensor::cat(&[a_n.to_kind(Kind::Double), b_n.to_kind(Kind::Double)], 0));
        let second = both.split_off(self.tree.len());
        (both, second)
    }
}

/// What one request draws and penalises.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) sampler: Sampler,
    pub(crate) penalty: Penalty,
}

impl Choice {
    pub(crate) fn new(request: &Request) -> Self {
        let sampler = Sampler::new(request.sampling, request.seed);
        Self { sampler, penalty: Penalty::new(request.repetition_penalty, request.prompt) }
    }
}

/// The backbone's pass over a filled tree.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    /// 0-based.
    pub(crate) step: usize,
    /// `[N]`: the nodes' tokens.
    pub(crate) tokens_n: &'a Tensor,
    /// `[N, V]`: logits after each node.
    pub(crate) logits_nv: &'a Tensor,
}

/// What a pass over the tree decided.
#[derive(Debug)]
pub(crate) struct Verified {
    /// Accepted nodes, root first.
    pub(crate) path: Vec<usize>,
    /// Their tokens.
    pub(crate) accepted: Vec<i64>,
    /// The token after the last accepted node.
    pub(crate) next: Chosen,
}

impl Verified {
    fn new(path: Vec<usize>, tokens: &[i64], next: Chosen) -> Self {
        Self { accepted: path.iter().map(|&node| tokens[node]).collect(), path, next }
    }
}

/// Row `node` of `[N, V]`, as `[1, V]`.
fn row(logits_nv: &Tensor, node: usize) -> Tensor {
    logits_nv.narrow(0, node as i64, 1)
}

/// As they are sampled from: in float32.
fn log_probabilities(logits_nv: &Tensor, temperature: f64) -> Tensor {
    (logits_nv.to_kind(Kind::Float) / temperature).log_softmax(-1, Kind::Float)
}

fn to_host<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
    Vec::try_from(tensor).expect("one axis, of the kind that was made")
}
