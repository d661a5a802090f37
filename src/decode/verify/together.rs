//! Verifies the trees of several texts at once. The oracle is [`verify`], one text after the other, which also applies the rules that are not here.

// N nodes of all trees, B texts, V vocabulary
use tch::Tensor;

use super::{Verdict, verify};
use crate::decode::sequence::Sequence;
use crate::draft::Proposal;
use crate::engine::sample::{Chosen, Sampler, next_of_each};
use crate::model::llama::most_probable;
use crate::torch::upload;
use crate::tree::accept::{Acceptance, walk_all};
use crate::tree::sparse_tree::SparseTree;

/// How a text's next tokens are chosen at the nodes of its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choosing {
    /// The most probable ones, beside those of other texts.
    Best,
    /// Drawn, beside those of other texts.
    Drawn,
    /// By [`verify`].
    Alone,
}

impl Choosing {
    /// Penalties change logits, and guesses that were drawn have another rule.
    fn of(acceptance: Acceptance, proposal: &Proposal, sequence: &Sequence) -> Self {
        let is_greedy = sequence.sampler.sampling().temperature.get() == 0.0;
        match acceptance {
            _ if !sequence.penalty.is_off() || proposal.drawn.is_some() => Self::Alone,
            Acceptance::Forced { .. } => Self::Alone,
            Acceptance::Greedy => Self::Best,
            _ if is_greedy => Self::Best,
            Acceptance::Rejection => Self::Drawn,
            Acceptance::Typical(_) | Acceptance::Nucleus => Self::Alone,
        }
    }
}

/// Decides at the nodes of each text's tree, from logits `[N, V]` after the nodes that each proposal reads, text after text; spare rows may
/// follow. Texts without a rule of their own have that of the loop.
pub(in crate::decode) fn verify_batch(
    default: Acceptance,
    proposals: &[Proposal],
    logits_nv: &Tensor,
    sequences: &mut [&mut Sequence],
) -> Vec<Verdict> {
    let reads: Vec<i64> = proposals.iter().map(|proposal| proposal.tree.read().count() as i64).collect();
    let first_of = (reads.iter()).scan(0, |end, read| {
        *end += read;
        Some(*end - read)
    });
    let (mut together, mut verdicts) = (vec![], vec![]);
    for (((proposal, sequence), &read), first) in proposals.iter().zip(sequences).zip(&reads).zip(first_of) {
        match Choosing::of(sequence.acceptance(default), proposal, sequence) {
            choosing if choosing == Choosing::Alone || proposals.len() == 1 => {
                verdicts.push(Some(verify(default, proposal, &logits_nv.narrow(0, first, read), sequence)));
            }
            choosing => {
                together.push(JointText { proposal, sampler: &mut sequence.sampler, first, choosing });
                verdicts.push(None);
            }
        }
    }
    let mut others = verify_together(logits_nv, &mut together).into_iter();
    verdicts.into_iter().filter_map(|verdict| verdict.or_else(|| others.next())).collect()
}

/// A text whose tokens are chosen beside those of others.
struct JointText<'s> {
    proposal: &'s Proposal,
    sampler: &'s mut Sampler,
    /// The row of its first node's logits.
    first: i64,
    choosing: Choosing,
}

/// The paths of the most probable tokens, as far as tokens can be chosen, and of drawn tokens. A text's numbers are drawn in the order of its
/// tokens.
fn verify_together(logits_nv: &Tensor, texts: &mut [JointText]) -> Vec<Verdict> {
    if texts.is_empty() {
        return vec![];
    }
    let proposals: Vec<&Proposal> = texts.iter().map(|text| text.proposal).collect();
    let any_best = texts.iter().any(|text| text.choosing == Choosing::Best);
    let best: Option<Vec<i64>> = any_best.then(|| Vec::try_from(most_probable(logits_nv)).expect("one axis of int64"));
    walked(&proposals, |nodes| {
        let mut drawn = draw_after(logits_nv, nodes, texts).into_iter();
        let token = |&(text, node): &(usize, usize)| match (&best, texts[text].choosing) {
            (Some(best), Choosing::Best) => best[texts[text].first.unsigned_abs() as usize + node],
            _ => drawn.next().expect("one for each text that draws"),
        };
        nodes.iter().map(token).collect()
    })
}

/// A token after each of these nodes whose text draws; there is at most one node of a text, by rising places.
fn draw_after(logits_nv: &Tensor, nodes: &[(usize, usize)], texts: &mut [JointText]) -> Vec<i64> {
    let (mut at, mut samplers): (Vec<i64>, Vec<&mut Sampler>) = (vec![], vec![]);
    for (place, text) in texts.iter_mut().enumerate().filter(|(_, text)| text.choosing == Choosing::Drawn) {
        if let Ok(reached) = nodes.binary_search_by_key(&place, |(text, _)| *text) {
            at.push(text.first + nodes[reached].1 as i64);
            samplers.push(&mut *text.sampler);
        }
    }
    if at.is_empty() {
        return vec![];
    }
    next_of_each(&logits_nv.index_select(0, &upload(&at, logits_nv.device())), &mut samplers)
}

/// The token of each node of each tree. A device is asked once.
fn tokens_of_trees(proposals: &[&Proposal]) -> Vec<Vec<i64>> {
    let all = Tensor::cat(&proposals.iter().map(|proposal| &proposal.tokens_n).collect::<Vec<_>>(), 0);
    let all: Vec<i64> = Vec::try_from(&all).expect("one axis of int64");
    let mut rest = &all[..];
    let tokens = |proposal: &&Proposal| {
        let (own, others) = rest.split_at(proposal.tokens_n.size()[0].unsigned_abs() as usize);
        rest = others;
        own[..proposal.tree.tree.len()].to_vec()
    };
    proposals.iter().map(tokens).collect()
}

fn walked(proposals: &[&Proposal], choose: impl FnMut(&[(usize, usize)]) -> Vec<i64>) -> Vec<Verdict> {
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
