//! Verifies the trees of several texts at once. The oracle is [`verify`], one text after the other, which also applies the rules that are not here.

// N nodes of all trees, B texts, V vocabulary
use tch::Tensor;

use super::{Verdict, verify};
use crate::decode::sequence::Sequence;
use crate::draft::Proposal;
use crate::engine::sample::{Chosen, Sampler, Sampling, next_of_each};
use crate::model::llama::most_probable;
use crate::torch::upload;
use crate::tree::accept::{Acceptance, walk_all};
use crate::tree::sparse_tree::SparseTree;

/// Decides at the nodes of each text's tree, from logits `[N, V]` after the nodes that each proposal reads, text after text; spare rows may follow.
pub(in crate::decode) fn verify_all(
    acceptance: Acceptance,
    proposals: &[Proposal],
    logits_nv: &Tensor,
    sequences: &mut [&mut Sequence],
) -> Vec<Verdict> {
    let reads: Vec<i64> = proposals.iter().map(|proposal| proposal.tree.read().count() as i64).collect();
    let first_of: Vec<i64> = (reads.iter())
        .scan(0, |end, read| {
            *end += read;
            Some(*end - read)
        })
        .collect();
    let is_greedy = |sampling: Sampling| match acceptance {
        Acceptance::Forced { .. } => false,
        Acceptance::Greedy => true,
        _ => sampling.temperature.get() == 0.0,
    };
    match common_sampling(proposals, sequences) {
        Some(sampling) if is_greedy(sampling) => greedily(proposals, &first_of, logits_nv),
        Some(_) if acceptance == Acceptance::Rejection => drawn(proposals, &first_of, logits_nv, sequences),
        _ => (proposals.iter().zip(sequences).zip(first_of.iter().zip(&reads)))
            .map(|((proposal, sequence), (&first, &read))| {
                verify(acceptance, proposal, &logits_nv.narrow(0, first, read), sequence)
            })
            .collect(),
    }
}

/// How all texts choose their tokens; `None` for a single text, and where a text needs [`verify`]: penalties change logits, and guesses that were
/// drawn have another rule.
fn common_sampling(proposals: &[Proposal], sequences: &[&mut Sequence]) -> Option<Sampling> {
    let sampling = sequences.first()?.sampler.sampling();
    let is_plain = |sequence: &&mut Sequence| sequence.penalty.is_off() && sequence.sampler.sampling() == sampling;
    let plain = sequences.len() > 1 && sequences.iter().all(is_plain);
    (plain && proposals.iter().all(|proposal| proposal.drawn.is_none())).then_some(sampling)
}

/// The token of each node of each tree. A device is asked once.
fn tokens_of_trees(proposals: &[Proposal]) -> Vec<Vec<i64>> {
    let all = Tensor::cat(&proposals.iter().map(|proposal| &proposal.tokens_n).collect::<Vec<_>>(), 0);
    let all: Vec<i64> = Vec::try_from(&all).expect("one axis of int64");
    let mut rest = &all[..];
    let tokens = |proposal: &Proposal| {
        let (own, others) = rest.split_at(proposal.tokens_n.size()[0].unsigned_abs() as usize);
        rest = others;
        own[..proposal.tree.tree.len()].to_vec()
    };
    proposals.iter().map(tokens).collect()
}

/// The path of the most probable tokens, as far as tokens can be chosen.
fn greedily(proposals: &[Proposal], first_of: &[i64], logits_nv: &Tensor) -> Vec<Verdict> {
    let best: Vec<i64> = Vec::try_from(most_probable(logits_nv)).expect("one axis of int64");
    walked(proposals, |nodes| {
        nodes.iter().map(|&(text, node)| best[first_of[text].unsigned_abs() as usize + node]).collect()
    })
}

/// The path of drawn tokens. A text's numbers are drawn in the order of its tokens.
fn drawn(
    proposals: &[Proposal],
    first_of: &[i64],
    logits_nv: &Tensor,
    sequences: &mut [&mut Sequence],
) -> Vec<Verdict> {
    walked(proposals, |nodes| {
        let at: Vec<i64> = nodes.iter().map(|&(text, node)| first_of[text] + node as i64).collect();
        let logits_bv = logits_nv.index_select(0, &upload(&at, logits_nv.device()));
        let is_asked = |text: usize| nodes.binary_search_by_key(&text, |(text, _)| *text).is_ok();
        let asked = sequences.iter_mut().enumerate().filter(|(text, _)| is_asked(*text));
        let mut samplers: Vec<&mut Sampler> = asked.map(|(_, sequence)| &mut sequence.sampler).collect();
        next_of_each(&logits_bv, &mut samplers)
    })
}

fn walked(proposals: &[Proposal], choose: impl FnMut(&[(usize, usize)]) -> Vec<i64>) -> Vec<Verdict> {
    let tokens = tokens_of_trees(proposals);
    let trees: Vec<(&SparseTree, &[i64])> =
        proposals.iter().zip(&tokens).map(|(proposal, tokens)| (&proposal.tree.tree, &tokens[..])).collect();
    let walks = walk_all(&trees, choose);
    walks
        .into_iter()
        .zip(&tokens)
        .map(|((path, next), tokens)| Verdict::new(path, tokens, Chosen::on_host(next)))
        .collect()
}
