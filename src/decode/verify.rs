//! Applies an acceptance rule to the backbone's logits: which guesses of a verified tree are accepted, and the token after them. Only
//! the numbers that the decision needs are copied to the host.

// N nodes of a tree, V vocabulary
use tch::{Kind, Tensor};

use super::sequence::Sequence;
use crate::draft::{PreparedTree, Proposal};
use crate::engine::sample::{Chosen, Sampler, distributions, entropies, tempered};
use crate::model::llama::{NO_TOKEN, most_probable};
use crate::tree::accept::{self, Acceptance};
use crate::tree::rejection::{DrawnChildren, next_token};

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
pub(super) fn first_root(acceptance: Acceptance, logits_1v: &Tensor, sequence: &mut Sequence) -> Chosen {
    let logits_1v = sequence.penalty.of_text(logits_1v);
    if acceptance.draws() { sequence.sampler.next(&logits_1v) } else { Chosen::best(&logits_1v) }
}

/// Decides at the tree's nodes, from logits `[N, V]` after each; those of a window may follow. At temperature 0 every rule but a
/// forced one is greedy.
pub(super) fn verify(
    acceptance: Acceptance,
    proposal: &Proposal,
    logits_nv: &Tensor,
    sequence: &mut Sequence,
) -> Verdict {
    let (prepared, tree) = (&*proposal.tree, &proposal.tree.tree);
    let [tokens_n, logits_nv] = [&proposal.tokens_n, logits_nv].map(|of_all| of_all.narrow(0, 0, tree.len() as i64));
    let (tokens_n, logits_nv) = (&tokens_n, &logits_nv);
    let logits_nv = match sequence.penalty.is_off() {
        true => logits_nv.shallow_clone(),
        false => sequence.penalty.of_tree(logits_nv, tree, &to_host::<i64>(tokens_n)),
    };
    let temperature = sequence.sampler.sampling().temperature.get();
    match acceptance {
        Acceptance::Forced { rate } => {
            let path = accept::forced(tree, rate, sequence.steps);
            best_after(&logits_nv, tokens_n, |_, _| path)
        }
        Acceptance::Typical(rule) if temperature > 0.0 => {
            let (log_p, entropy) = posterior(prepared, &logits_nv, tokens_n, temperature);
            let path = accept::typical(tree, &log_p, &entropy, rule);
            best_after(&logits_nv, tokens_n, |_, _| path)
        }
        Acceptance::Nucleus if temperature > 0.0 => {
            let (log_p, more_probable) = ranks(prepared, &logits_nv, tokens_n, temperature);
            let path = accept::nucleus(tree, &log_p, &more_probable, sequence.sampler.sampling().top_p.get());
            let next = sequence.sampler.next(&row(&logits_nv, path[path.len() - 1]));
            Verdict::new(path, &to_host::<i64>(tokens_n), next)
        }
        Acceptance::Rejection if temperature > 0.0 => {
            let (tokens, mut drawn) = (to_host::<i64>(tokens_n), None);
            let mut choose = |node| {
                let (logits_1v, sampler) = (row(&logits_nv, node), &mut sequence.sampler);
                match proposal.drawn.as_ref().map(|drawn| &drawn[node]).filter(|drawn| !drawn.guesses.is_empty()) {
                    Some(guesses) => after_drawn(guesses, &logits_1v, sampler),
                    None => sampler.next(&logits_1v),
                }
            };
            let (path, _) = accept::walk(tree, &tokens, |node| drawn.insert(choose(node)).id);
            Verdict::new(path, &tokens, drawn.expect("the root is asked"))
        }
        _ => best_after(&logits_nv, tokens_n, |tokens, best| accept::walk(tree, tokens, |node| best[node]).0),
    }
}

/// The token after a node whose guesses were drawn, of logits `[1, V]`.
fn after_drawn(guesses: &DrawnChildren, logits_1v: &Tensor, sampler: &mut Sampler) -> Chosen {
    let p = distributions(logits_1v, sampler.sampling()).pop().flatten();
    let token = p.and_then(|p| next_token(p, guesses, || sampler.uniform()));
    Chosen::on_host(token.unwrap_or(NO_TOKEN))
}

/// A path, as far as tokens can be chosen, and the most probable token after it. `path` gets each node's token, and the most probable
/// token after each node.
fn best_after(logits_nv: &Tensor, tokens_n: &Tensor, path: impl FnOnce(&[i64], &[i64]) -> Vec<usize>) -> Verdict {
    let best_n = most_probable(logits_nv);
    let rows: Vec<i64> = to_host(&Tensor::cat(&[tokens_n, &best_n], 0));
    let (tokens, best) = rows.split_at(rows.len() / 2);
    let mut path = path(tokens, best);
    if let Some(stuck) = path.iter().position(|&node| best[node] == NO_TOKEN) {
        path.truncate(stuck + 1);
    }
    let last = path[path.len() - 1];
    let next = Chosen::in_both(best[last], best_n.narrow(0, last as i64, 1));
    Verdict::new(path, tokens, next)
}

/// Log-probability of each node's token after its parent, and entropy after each node.
fn posterior(prepared: &PreparedTree, logits_nv: &Tensor, tokens_n: &Tensor, temperature: f64) -> (Vec<f64>, Vec<f64>) {
    let log_p_nv = log_probabilities(logits_nv, temperature);
    two_rows(&of_guesses(prepared, &log_p_nv, tokens_n), &entropies(&log_p_nv))
}

/// Log-probability of each node's token after its parent, and the probability of all tokens that are more probable there (of
/// equals, of those with lower ids: the order in which a nucleus is filled).
fn ranks(prepared: &PreparedTree, logits_nv: &Tensor, tokens_n: &Tensor, temperature: f64) -> (Vec<f64>, Vec<f64>) {
    let log_p_nv = log_probabilities(logits_nv, temperature);
    let log_p_n = of_guesses(prepared, &log_p_nv, tokens_n);
    let after_parent_nv = log_p_nv.index_select(0, prepared.parents_n());
    let ids_v = Tensor::arange(logits_nv.size()[1], (Kind::Int64, logits_nv.device()));
    let (guess_n1, id_n1) = (log_p_n.unsqueeze(1), tokens_n.unsqueeze(1));
    let equal_nv = after_parent_nv.eq_tensor(&guess_n1).logical_and(&ids_v.unsqueeze(0).lt_tensor(&id_n1));
    let before_nv = after_parent_nv.gt_tensor(&guess_n1).logical_or(&equal_nv);
    let more_probable_n = (after_parent_nv.exp() * before_nv).sum_dim_intlist(-1, false, Kind::Double);
    two_rows(&log_p_n, &more_probable_n)
}

/// Of `[N, V]` after each node, the value of each node's token after its parent, `[N]`.
fn of_guesses(prepared: &PreparedTree, after_nv: &Tensor, tokens_n: &Tensor) -> Tensor {
    let at_n = prepared.parents_n() * after_nv.size()[1] + tokens_n;
    after_nv.reshape([-1]).index_select(0, &at_n)
}

/// Two tensors `[N]` on the host, in one copy.
fn two_rows(a_n: &Tensor, b_n: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let mut both: Vec<f64> = to_host(&Tensor::cat(&[a_n.to_kind(Kind::Double), b_n.to_kind(Kind::Double)], 0));
    let second = both.split_off(both.len() / 2);
    (both, second)
}

/// Row `node` of `[N, V]`, as `[1, V]`.
fn row(logits_nv: &Tensor, node: usize) -> Tensor {
    logits_nv.narrow(0, node as i64, 1)
}

/// As they are sampled from: in float32.
fn log_probabilities(logits_nv: &Tensor, temperature: f64) -> Tensor {
    tempered(logits_nv, temperature).log_softmax(-1, Kind::Float)
}

fn to_host<T: tch::kind::Element + Copy>(tensor: &Tensor) -> Vec<T> {
    Vec::try_from(tensor).expect("one axis, of the kind that was made")
}
