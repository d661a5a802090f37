//! Applies an acceptance rule to the backbone's logits: which guesses of a verified tree are accepted, and the token after them. Only
//! the numbers that the decision needs are copied to the host.

// N nodes of a tree, V vocabulary
use std::num::NonZeroUsize;

use tch::{Device, Kind, Tensor};

use super::sequence::Sequence;
use crate::draft::Proposal;
use crate::engine::sample::{Chosen, Sampler, Sampling, distributions, entropies, tempered};
use crate::model::llama::{NO_TOKEN, most_probable};
use crate::tree::accept::{self, Acceptance, TypicalAcceptance};
use crate::tree::rejection::{DrawnChildren, next_token};
use crate::tree::sparse_tree::SparseTree;

pub(super) mod together;

/// The result of verifying a tree.
#[derive(Debug)]
pub(super) struct Verdict {
    /// Accepted nodes, root first.
    pub(super) path: Vec<usize>,
    /// Their tokens.
    pub(super) accepted: Vec<i64>,
    /// The token after the last accepted node.
    pub(super) next: Chosen,
}

impl Verdict {
    fn new(path: Vec<usize>, tokens: &[i64], next: Chosen) -> Self {
        Self { accepted: path.iter().map(|&node| tokens[node]).collect(), path, next }
    }
}

/// The first root, of logits `[1, V]` after the prompt: drawn where the rule draws its roots, else the most probable token, at any
/// temperature (it is unconditionally accepted, paper section 2.3.1).
pub(super) fn first_root(default: Acceptance, logits_1v: &Tensor, sequence: &mut Sequence) -> Chosen {
    let logits_1v = sequence.penalised(logits_1v);
    if sequence.acceptance(default).draws() { sequence.sampler.next(&logits_1v) } else { Chosen::best(&logits_1v) }
}

/// Decides at the tree's nodes, from logits `[N, V]` after each; those of a window may follow. At temperature 0 every rule but a
/// forced one is greedy.
pub(super) fn verify(default: Acceptance, proposal: &Proposal, logits_nv: &Tensor, sequence: &mut Sequence) -> Verdict {
    let nodes = VerifiedNodes::new(proposal, logits_nv, sequence);
    let above_0 = sequence.sampler.sampling().temperature.get() > 0.0;
    match sequence.acceptance(default) {
        Acceptance::Forced { rate } => {
            let path = accept::forced(nodes.tree(), rate, sequence.steps);
            nodes.best_after(|_, _| path)
        }
        Acceptance::Typical(rule) if above_0 => nodes.typical(rule, sequence.sampler.sampling()),
        Acceptance::Nucleus if above_0 => nodes.nucleus(&mut sequence.sampler),
        Acceptance::Rejection if above_0 => nodes.rejection(&mut sequence.sampler),
        _ => nodes.best_after(|tokens, best| accept::walk(nodes.tree(), tokens, |node| best[node]).0),
    }
}

/// The nodes of a tree without its window, with the penalties applied to their logits.
struct VerifiedNodes<'s> {
    proposal: &'s Proposal,
    tokens_n: Tensor,
    logits_nv: Tensor,
}

impl<'s> VerifiedNodes<'s> {
    fn new(proposal: &'s Proposal, logits_nv: &Tensor, sequence: &Sequence) -> Self {
        let tree = &proposal.tree.tree;
        let [tokens_n, logits_nv] = [&proposal.tokens_n, logits_nv].map(|x| x.narrow(0, 0, tree.len() as i64));
        let logits_nv = match sequence.penalty.is_off() {
            true => logits_nv,
            false => sequence.penalty.apply_to_tree(&logits_nv, tree, &to_host::<i64>(&tokens_n)),
        };
        Self { proposal, tokens_n, logits_nv }
    }

    fn tree(&self) -> &'s SparseTree {
        &self.proposal.tree.tree
    }

    fn typical(&self, rule: TypicalAcceptance, sampling: Sampling) -> Verdict {
        let (log_p, entropy) = self.posterior(sampling.temperature.get());
        let path = accept::typical(self.tree(), &log_p, &entropy, rule);
        self.best_after(|_, _| path)
    }

    fn nucleus(&self, sampler: &mut Sampler) -> Verdict {
        let Sampling { temperature, top_k, top_p } = sampler.sampling();
        let (log_p, more_probable) = self.ranks(temperature.get(), top_k);
        let path = accept::nucleus(self.tree(), &log_p, &more_probable, top_p.get());
        let next = sampler.next(&row(&self.logits_nv, path[path.len() - 1]));
        Verdict::new(path, &to_host::<i64>(&self.tokens_n), next)
    }

    fn rejection(&self, sampler: &mut Sampler) -> Verdict {
        let (tokens, mut drawn) = (to_host::<i64>(&self.tokens_n), None);
        let guesses_below = |node: usize| {
            let guesses = self.proposal.drawn.as_ref().map(|drawn| &drawn[node]);
            guesses.filter(|drawn| !drawn.guesses.is_empty())
        };
        let mut choose = |node| match guesses_below(node) {
            Some(guesses) => after_drawn(guesses, &row(&self.logits_nv, node), sampler),
            None => sampler.next(&row(&self.logits_nv, node)),
        };
        let (path, _) = accept::walk(self.tree(), &tokens, |node| drawn.insert(choose(node)).id);
        Verdict::new(path, &tokens, drawn.expect("the root is asked"))
    }

    /// A path, as far as tokens can be chosen, and the most probable token after it. `path` gets each node's token, and the most
    /// probable token after each node.
    fn best_after(&self, path: impl FnOnce(&[i64], &[i64]) -> Vec<usize>) -> Verdict {
        let best_n = most_probable(&self.logits_nv);
        let [tokens, best] = both_to_host([&self.tokens_n, &best_n]);
        let mut path = path(&tokens, &best);
        if let Some(stuck) = path.iter().position(|&node| best[node] == NO_TOKEN) {
            path.truncate(stuck + 1);
        }
        let last = path[path.len() - 1];
        let next = Chosen::in_both(best[last], best_n.narrow(0, last as i64, 1));
        Verdict::new(path, &tokens, next)
    }

    /// Log-probability of each node's token after its parent, and entropy after each node.
    fn posterior(&self, temperature: f64) -> (Vec<f64>, Vec<f64>) {
        let log_p_nv = log_probabilities(&self.logits_nv, temperature);
        in_float64(&self.guess_values(&log_p_nv), &entropies(&log_p_nv))
    }

    /// Log-probability of each node's token after its parent, and the probability of all tokens that are more probable there (of
    /// equals, of those with lower ids: the order in which a nucleus is filled). With top-k it is a part of the probability that is kept, and
    /// 1 for a token that is not kept.
    fn ranks(&self, temperature: f64, top_k: Option<NonZeroUsize>) -> (Vec<f64>, Vec<f64>) {
        let log_p_nv = log_probabilities(&self.logits_nv, temperature);
        let log_p_n = self.guess_values(&log_p_nv);
        let after_parent_nv = log_p_nv.index_select(0, self.proposal.tree.parents_n());
        let ids_v = Tensor::arange(log_p_nv.size()[1], (Kind::Int64, log_p_nv.device()));
        let (guess_n1, id_n1) = (log_p_n.unsqueeze(1), self.tokens_n.unsqueeze(1));
        let equal_nv = after_parent_nv.eq_tensor(&guess_n1).logical_and(&ids_v.unsqueeze(0).lt_tensor(&id_n1));
        let before_nv = after_parent_nv.gt_tensor(&guess_n1).logical_or(&equal_nv);
        let p_nv = after_parent_nv.exp();
        let more_probable_n = (&p_nv * &before_nv).sum_dim_intlist(-1, false, Kind::Double);
        let more_probable_n = match top_k.map(|top_k| (top_k.get() as i64).min(p_nv.size()[1])) {
            None => more_probable_n,
            Some(top_k) => {
                let (largest_nk, _) = p_nv.topk(top_k, -1, true, false);
                let is_left_out_n = before_nv.sum_dim_intlist(-1, false, Kind::Int64).ge(top_k);
                let kept_n = largest_nk.sum_dim_intlist(-1, false, Kind::Double);
                (more_probable_n / kept_n).masked_fill(&is_left_out_n, 1.0)
            }
        };
        in_float64(&log_p_n, &more_probable_n)
    }

    /// Of `[N, V]` after each node, the value of each node's token after its parent, `[N]`.
    fn guess_values(&self, after_nv: &Tensor) -> Tensor {
        let at_n = self.proposal.tree.parents_n() * after_nv.size()[1] + &self.tokens_n;
        after_nv.reshape([-1]).index_select(0, &at_n)
    }
}

/// The token after a node whose guesses were drawn, of logits `[1, V]`.
fn after_drawn(guesses: &DrawnChildren, logits_1v: &Tensor, sampler: &mut Sampler) -> Chosen {
    let p = distributions(logits_1v, sampler.sampling()).pop().flatten();
    let token = p.and_then(|p| next_token(p, guesses, || sampler.uniform()));
    Chosen::on_host(token.unwrap_or(NO_TOKEN))
}

fn in_float64(a_n: &Tensor, b_n: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let [a_n, b_n] = [a_n, b_n].map(|x_n| x_n.to_kind(Kind::Double));
    both_to_host([&a_n, &b_n]).into()
}

/// Row `node` of `[N, V]`, as `[1, V]`.
fn row(logits_nv: &Tensor, node: usize) -> Tensor {
    logits_nv.narrow(0, node as i64, 1)
}

/// As they are sampled from: in float32.
fn log_probabilities(logits_nv: &Tensor, temperature: f64) -> Tensor {
    tempered(logits_nv, temperature).log_softmax(-1, Kind::Float)
}

/// Two tensors of one length; a device is asked once.
fn both_to_host<T: tch::kind::Element + Copy>(both_n: [&Tensor; 2]) -> [Vec<T>; 2] {
    if both_n[0].device() == Device::Cpu {
        return both_n.map(to_host);
    }
    let mut first: Vec<T> = to_host(&Tensor::cat(&both_n, 0));
    let second = first.split_off(first.len() / 2);
    [first, second]
}

fn to_host<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
    Vec::try_from(tensor).expect("one axis, of the kind that was made")
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::decode::generate::tests::{VOCABULARY, backbone, config};
    use crate::draft::PreparedTree;
    use crate::numbers::{NonNegative, Probability};

    /// Guesses are judged in tensors, tokens are drawn on the host: both must cut equal probabilities at the same token.
    #[test]
    fn the_guesses_in_the_nucleus_are_the_tokens_that_can_be_drawn_also_among_equals() {
        let llama = backbone(config(2, None, vec![]), 1);
        let tree = SparseTree::cartesian(&[VOCABULARY as usize]).unwrap();
        let tokens: Vec<i64> = [0].into_iter().chain(0..VOCABULARY).collect(); // every token is a guess after the root
        let tokens_n = Tensor::from_slice(&tokens);
        let proposal =
            Proposal { tree: Rc::new(PreparedTree::new(tree, &llama)), tokens_n: tokens_n.copy(), drawn: None };
        let logits_1v = Tensor::from_slice(&[3f32, 1.0, 3.0, 1.0, 2.0, 3.0, 1.0, 0.0, 2.0, 1.0, 3.0, 0.0]).unsqueeze(0);
        let logits_nv = logits_1v.repeat([tokens.len() as i64, 1]);
        let nodes = VerifiedNodes { proposal: &proposal, tokens_n, logits_nv };
        let mut kept_counts = std::collections::BTreeSet::new();
        for (top_k, top_p) in (0..=13).flat_map(|top_k| [0.31, 0.53, 0.81, 1.0].map(|top_p| (top_k, top_p))) {
            let unlimited = Sampling::with_temperature(NonNegative::new(1.0).unwrap());
            let (top_k, top_p) = (NonZeroUsize::new(top_k), Probability::new(top_p).unwrap());
            let p = distributions(&logits_1v, Sampling { top_k, top_p, ..unlimited }).remove(0).unwrap();
            let (_, more_probable) = nodes.ranks(1.0, top_k);
            let accepted: Vec<bool> = more_probable[1..].iter().map(|before| *before < top_p.get()).collect();
            let drawn: Vec<bool> = p.iter().map(|p| *p > 0.0).collect();
            assert_eq!(accepted, drawn, "top-k {top_k:?}, top-p {top_p:?}: {more_probable:?}");
            kept_counts.insert(drawn.iter().filter(|kept| **kept).count());
        }
        assert!(kept_counts.len() > 8, "{kept_counts:?}");
    }
}
