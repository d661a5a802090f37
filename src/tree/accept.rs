//! Which nodes of a verified tree are accepted. Pure decisions on tree nodes; no tensors here.
//!
//! The root is always accepted, since the LM head chose it. A node below it can be accepted only if its parent is.

use crate::tree::sparse_tree::SparseTree;

/// A forced acceptance rate that no step can reach.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error(
    "an acceptance rate of {rate} tokens per step cannot be forced; expected 1 to {largest}: the tree's chain of best guesses \
     has {} nodes below the root", largest - 1
)]
pub struct ForcedRateError {
    rate: f64,
    /// Length of the chain of best guesses, root included.
    largest: usize,
}

/// How guesses are accepted above temperature 0. At temperature 0 acceptance is always greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Acceptance {
    /// A guess is accepted if it is the backbone's most probable token.
    Greedy,
    /// A guess is accepted if it is probable enough (paper section 2.3.1); the root is the most probable token.
    Typical(TypicalAcceptance),
    /// A guess is accepted if it is in the nucleus after its parent: the smallest set of most probable tokens whose probability
    /// reaches top-p, at the request's temperature. The root, and so the text's first token, is drawn from the nucleus. The
    /// published code calls this nucleus sampling; it is not lossless.
    Nucleus,
    /// A guess is accepted if it equals the token that the backbone draws after its parent; a drawn token that no guess matches
    /// becomes the next root. Lossless: the text is distributed as in plain decoding, and the same seed gives the same text (see
    /// [`walk`]). Guesses that were drawn from a drafter's own distribution are accepted by
    /// [`next_token`](super::rejection::next_token) instead: lossless as well, but the same seed gives another text.
    Rejection,
    /// For benchmarks: accepts the chain of best guesses, whatever the backbone predicts, up to the length at which steps commit
    /// this many tokens on average. At no temperature is the text the backbone's.
    Forced {
        /// From 1 to the length of the chain, root included.
        rate: f64,
    },
}

impl Acceptance {
    /// [`Acceptance::Forced`] for steps with `tree`.
    ///
    /// # Errors
    /// [`ForcedRateError`] if the rate is below 1 or above the length of the tree's chain of best guesses.
    pub fn at_rate(rate: f64, tree: &SparseTree) -> Result<Self, ForcedRateError> {
        let largest = chain_of_best(tree).count();
        if (1.0..=largest as f64).contains(&rate) {
            Ok(Self::Forced { rate })
        } else {
            Err(ForcedRateError { rate, largest })
        }
    }

    /// Whether another drafter may lead to another text: the rule accepts guesses that the backbone would not have chosen.
    pub fn depends_on_guesses(self, temperature: f64) -> bool {
        match self {
            Self::Greedy | Self::Rejection => false,
            Self::Typical(_) | Self::Nucleus => temperature > 0.0,
            Self::Forced { .. } => true,
        }
    }

    /// Whether the root is drawn above temperature 0; with the other rules it is the most probable token.
    pub fn draws(self) -> bool {
        matches!(self, Self::Nucleus | Self::Rejection)
    }
}

/// A guess x is accepted if p(x) > min(ε, δ·exp(-H(p))), where p is the backbone's distribution at its parent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TypicalAcceptance {
    /// ε: more probable guesses are always accepted.
    pub posterior_threshold: f64,
    /// δ: the flatter the distribution (the higher its entropy H), the lower the threshold.
    pub posterior_alpha: f64,
}

impl TypicalAcceptance {
    /// ε as given and δ = √ε, as in the paper.
    pub fn with_threshold(posterior_threshold: f64) -> Self {
        Self { posterior_threshold, posterior_alpha: posterior_threshold.sqrt() }
    }

    /// The probability that a guess must exceed, given the entropy of the backbone's distribution (in nats).
    ///
    /// The published code computes H with log(p + 1e-5); here H is exact.
    pub fn threshold(&self, entropy: f64) -> f64 {
        self.posterior_threshold.min(self.posterior_alpha * (-entropy).exp())
    }
}

impl Default for TypicalAcceptance {
    /// ε = 0.09, δ = 0.3.
    fn default() -> Self {
        Self::with_threshold(0.09)
    }
}

/// Walks from the root along children that hold the token chosen after their parent. Returns the path, root first, and the token
/// chosen after its last node: the next root.
/// - `tokens[n]`: the token of node `n`
/// - `choose(n)`: the token after node `n`, called once for each node on the path, in text order
///
/// If the most probable token is chosen, this is greedy acceptance. If the token is drawn, it is speculative sampling (Leviathan
/// et al. 2023, Chen et al. 2023; with several guesses per node: SpecInfer, Miao et al. 2024) for guesses that are not drawn
/// themselves. That method tries siblings in turn: each is accepted with its probability in the distribution that remains after
/// the siblings before it, and if none is, the token is drawn from the remainder. A guess x is thus accepted with probability
/// p(x), exactly as if one token were drawn from p and looked up among the guesses. Plain decoding also draws one token per
/// position, in text order, so the same seed gives the same text.
pub fn walk(tree: &SparseTree, tokens: &[i64], mut choose: impl FnMut(usize) -> i64) -> (Vec<usize>, i64) {
    let (mut path, mut at) = (vec![0], 0);
    loop {
        let chosen = choose(at);
        match tree.children(at).find(|&child| tokens[child] == chosen) {
            Some(child) => {
                path.push(child);
                at = child;
            }
            None => return (path, chosen),
        }
    }
}

/// As [`walk`] through several trees at once, each with its tokens: `choose` gets the nodes that are reached, each with its tree's place, by rising
/// places, and returns the token after each.
pub fn walk_all(
    trees: &[(&SparseTree, &[i64])],
    mut choose: impl FnMut(&[(usize, usize)]) -> Vec<i64>,
) -> Vec<(Vec<usize>, i64)> {
    let mut walks: Vec<(Vec<usize>, i64)> = vec![(vec![0], 0); trees.len()];
    let mut reached: Vec<(usize, usize)> = (0..trees.len()).map(|place| (place, 0)).collect();
    while !reached.is_empty() {
        let chosen = choose(&reached);
        let below = |(&(place, node), &token): (&(usize, usize), &i64)| {
            let (tree, tokens) = trees[place];
            let (path, next) = &mut walks[place];
            let child = tree.children(node).find(|&child| tokens[child] == token);
            path.extend(child);
            *next = token;
            child.map(|child| (place, child))
        };
        reached = reached.iter().zip(&chosen).filter_map(below).collect();
    }
    walks
}

/// The longest path, root first, of nodes that are all probable enough; ties go to the largest product of probabilities.
/// - `log_p[n]`: log-probability of node `n`'s token after its parent (not read for the root)
/// - `entropy[n]`: entropy of the distribution after node `n`
pub fn typical(tree: &SparseTree, log_p: &[f64], entropy: &[f64], rule: TypicalAcceptance) -> Vec<usize> {
    longest(tree, log_p, |node, parent| log_p[node].exp() > rule.threshold(entropy[parent]))
}

/// The longest path, root first, of nodes that are in the nucleus after their parents; ties go to the largest product of
/// probabilities.
/// - `log_p[n]`: log-probability of node `n`'s token after its parent (not read for the root)
/// - `more_probable[n]`: total probability of the tokens that are more probable after its parent than node `n`'s (not read for
///   the root)
pub fn nucleus(tree: &SparseTree, log_p: &[f64], more_probable: &[f64], top_p: f64) -> Vec<usize> {
    longest(tree, log_p, |node, _| more_probable[node] < top_p)
}

/// The path of step `step` (0-based), root first along the chain of best guesses. Its length keeps the mean over all steps so far
/// as close to `rate` as whole tokens allow.
pub fn forced(tree: &SparseTree, rate: f64, step: usize) -> Vec<usize> {
    let tokens_before = |step: usize| (rate * step as f64).floor();
    let tokens = tokens_before(step + 1) - tokens_before(step);
    chain_of_best(tree).take_while(|&node| (tree.depth(node) as f64) < tokens).collect()
}

/// The root and the nodes `[0]`, `[0, 0]`, and so on.
pub fn chain_of_best(tree: &SparseTree) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(0), |&node| tree.children(node).find(|&child| tree.child_index(child) == Some(0)))
}

/// The longest path of accepted nodes; ties go to the likeliest.
fn longest(tree: &SparseTree, log_p: &[f64], accepts: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    // Parents come before children: one pass computes each node's summed log-probability, or `None` if the node is not accepted.
    let mut summed = vec![Some(0.0)];
    for (node, &log_p) in log_p.iter().enumerate().skip(1) {
        let reached = tree.parent(node).filter(|&parent| accepts(node, parent)).and_then(|parent| summed[parent]);
        summed.push(reached.map(|sum| sum + log_p));
    }
    let accepted = summed.iter().enumerate().filter_map(|(node, sum)| sum.map(|sum| (node, sum)));
    let longest_then_likeliest = |a: &(usize, f64), b: &(usize, f64)| {
        let depth = tree.depth(a.0).cmp(&tree.depth(b.0));
        depth.then_with(|| a.1.total_cmp(&b.1)).then_with(|| b.0.cmp(&a.0))
    };
    path_to(tree, accepted.max_by(longest_then_likeliest).map_or(0, |(node, _)| node))
}

/// A node, its parent, and so on up to the root.
pub fn upwards(tree: &SparseTree, node: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(node), |&node| tree.parent(node))
}

fn path_to(tree: &SparseTree, node: usize) -> Vec<usize> {
    let mut path: Vec<usize> = upwards(tree, node).collect();
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::tree::sparse_tree::strategy::trees;

    fn tree(choices: &[&[usize]]) -> SparseTree {
        SparseTree::new(choices.iter().map(|c| c.to_vec()).collect()).unwrap()
    }

    #[test]
    fn only_rules_that_accept_what_the_backbone_would_not_choose_depend_on_guesses() {
        let typical = Acceptance::Typical(TypicalAcceptance::default());
        let forced = Acceptance::Forced { rate: 2.0 };
        for (rule, expected) in [
            (Acceptance::Greedy, [false, false]),
            (Acceptance::Rejection, [false, false]),
            (typical, [false, true]),
            (Acceptance::Nucleus, [false, true]),
            (forced, [true, true]),
        ] {
            assert_eq!([0.0, 0.7].map(|temperature| rule.depends_on_guesses(temperature)), expected, "{rule:?}");
        }
    }

    #[test]
    fn greedy_follows_the_backbone_as_far_as_the_guesses_do() {
        // Nodes: 0 root, 1 [0], 2 [1], 3 [0,0], 4 [1,0], 5 [1,2], 6 [1,2,0].
        let tree = tree(&[&[0], &[1], &[0, 0], &[1, 0], &[1, 2], &[1, 2, 0]]);
        let tokens = [10, 11, 12, 13, 14, 15, 16];
        let greedy = |best: [i64; 7]| walk(&tree, &tokens, |node| best[node]);
        assert_eq!(greedy([12, 0, 15, 0, 0, 16, 99]), (vec![0, 2, 5, 6], 99));
        assert_eq!(greedy([12, 13, 14, 0, 7, 16, 99]), (vec![0, 2, 4], 7));
        assert_eq!(greedy([11, 15, 0, 0, 0, 16, 0]), (vec![0, 1], 15), "a cousin's guess does not count");
        assert_eq!(greedy([99, 13, 14, 0, 0, 0, 0]), (vec![0], 99), "the root is always accepted");
        let bests = [[12, 0, 15, 0, 0, 16, 99], [99, 13, 14, 0, 0, 0, 0], [11, 15, 0, 0, 0, 16, 0]];
        let together = walk_all(&[(&tree, &tokens[..]); 3], |nodes| {
            assert!(nodes.is_sorted(), "one after the other: {nodes:?}");
            nodes.iter().map(|&(place, node)| bests[place][node]).collect()
        });
        assert_eq!(together, bests.map(greedy));
    }

    #[test]
    fn typical_prefers_length_then_probability() {
        let tree = tree(&[&[0], &[1], &[0, 0], &[1, 0]]);
        let rule = TypicalAcceptance::default();
        let log = |p: [f64; 5]| p.map(f64::ln);
        let flat = [3.0; 5]; // δ·exp(-3) = 0.0149 < ε
        assert_eq!(typical(&tree, &log([1.0, 0.9, 0.1, 0.01, 0.5]), &flat, rule), [0, 2, 4], "longer");
        assert_eq!(typical(&tree, &log([1.0, 0.6, 0.3, 0.2, 0.5]), &flat, rule), [0, 2, 4], "0.15 > 0.12");
        assert_eq!(typical(&tree, &log([1.0, 0.01, 0.01, 0.9, 0.9]), &flat, rule), [0], "no child without its parent");
        // At low entropy ε decides.
        assert_eq!(typical(&tree, &log([1.0, 0.08, 0.01, 0.9, 0.9]), &[0.1; 5], rule), [0]);
        assert_eq!(typical(&tree, &log([1.0, 0.10, 0.01, 0.01, 0.9]), &[0.1; 5], rule), [0, 1]);
    }

    #[test]
    fn the_nucleus_is_asked_at_every_parent() {
        let tree = tree(&[&[0], &[1], &[0, 0], &[1, 0]]);
        let log = |p: [f64; 5]| p.map(f64::ln);
        let p = log([1.0, 0.6, 0.3, 0.2, 0.5]);
        assert_eq!(nucleus(&tree, &p, &[9.0, 0.0, 0.6, 0.7, 0.4], 0.8), [0, 2, 4], "0.3 · 0.5 > 0.6 · 0.2");
        assert_eq!(nucleus(&tree, &p, &[9.0, 0.0, 0.6, 0.7, 0.4], 0.5), [0, 1]);
        assert_eq!(
            nucleus(&tree, &p, &[9.0, 0.0, 0.6, 0.7, 0.4], 0.6),
            [0, 1],
            "what has top-p without it is the nucleus"
        );
        assert_eq!(nucleus(&tree, &p, &[9.0, 0.9, 0.9, 0.0, 0.0], 0.8), [0], "no child without its parent");
    }

    #[test]
    fn forced_steps_have_their_rate_on_average() {
        let tree = tree(&[&[0], &[1], &[0, 0], &[0, 1], &[0, 0, 0], &[1, 0]]);
        assert_eq!(chain_of_best(&tree).map(|node| tree.path(node).to_vec()).last(), Some(vec![0, 0, 0]));
        for rate in [1.0, 1.3, 2.5, 3.0, 3.98, 4.0] {
            let lengths: Vec<usize> = (0..100).map(|step| forced(&tree, rate, step).len()).collect();
            let near = |length: &usize| *length as f64 >= rate.floor() && *length as f64 <= rate.ceil();
            assert!(lengths.iter().all(near), "{rate}: {lengths:?}");
            let mean = lengths.iter().sum::<usize>() as f64 / 100.0;
            assert!((mean - rate).abs() <= 0.01 + 1e-9, "{rate}: {mean}");
        }
        assert_eq!(forced(&tree, 4.0, 7), [0, 1, 3, 6]);
    }

    /// Speculative sampling as published, at one node: siblings are tried in turn against the distribution that remains. Returns
    /// each token's probability of following the node, whether a sibling holds it or it is drawn from the remainder.
    fn sibling_by_sibling(p: &[f64], siblings: &[usize]) -> Vec<f64> {
        let (mut rest, mut reached, mut law) = (p.to_vec(), 1.0, vec![0.0; p.len()]);
        for &guess in siblings {
            let total = rest.iter().sum::<f64>();
            if total <= 0.0 {
                return law; // an earlier sibling was certain
            }
            let accepted = rest[guess] / total;
            law[guess] += reached * accepted;
            reached *= 1.0 - accepted;
            rest[guess] = 0.0;
        }
        let total = rest.iter().sum::<f64>();
        law.iter().zip(&rest).map(|(law, rest)| law + if total > 0.0 { reached * rest / total } else { 0.0 }).collect()
    }

    /// Paper section 2.3.1, transcribed for whole candidates (root to leaf) and whole distributions.
    fn transcription(tree: &SparseTree, tokens: &[usize], p: &[Vec<f64>], rule: TypicalAcceptance) -> Vec<usize> {
        let entropy = |p: &[f64]| -p.iter().map(|&x| if x > 0.0 { x * x.ln() } else { 0.0 }).sum::<f64>();
        let leaves = (0..tree.len()).filter(|&node| tree.children(node).is_empty());
        let mut best: (Vec<usize>, f64) = (vec![0], 0.0);
        for leaf in leaves {
            let candidate = path_to(tree, leaf);
            let (mut kept, mut sum) = (vec![0], 0.0);
            for pair in candidate.windows(2) {
                let distribution = &p[pair[0]];
                let (probability, epsilon) = (distribution[tokens[pair[1]]], rule.posterior_threshold);
                if probability <= epsilon.min(rule.posterior_alpha * (-entropy(distribution)).exp()) {
                    break;
                }
                kept.push(pair[1]);
                sum += probability.ln();
            }
            if kept.len() > best.0.len() || (kept.len() == best.0.len() && sum > best.1 + 1e-12) {
                best = (kept, sum);
            }
        }
        best.0
    }

    const VOCABULARY: usize = 6;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        #[test]
        fn typical_is_the_formula_of_the_paper(
            tree in trees(24, 4, 4),
            draws in proptest::collection::vec((any::<Index>(), proptest::array::uniform6(0.01f64..1.0), 0.5f64..8.0), 25),
            epsilon in 0.01f64..0.6,
            delta in 0.01f64..1.0,
        ) {
            let nodes = tree.len();
            let distributions: Vec<Vec<f64>> = draws[..nodes].iter().map(|(_, weights, sharpness)| {
                let powers = weights.map(|w| w.powf(*sharpness));
                powers.iter().map(|x| x / powers.iter().sum::<f64>()).collect()
            }).collect();
            let tokens: Vec<usize> = draws[..nodes].iter().map(|(token, ..)| token.index(VOCABULARY)).collect();
            let rule = TypicalAcceptance { posterior_threshold: epsilon, posterior_alpha: delta };
            let log_p: Vec<f64> = (0..nodes).map(|n| tree.parent(n).map_or(0.0, |p| distributions[p][tokens[n]].ln())).collect();
            let entropy: Vec<f64> = distributions.iter().map(|p| -p.iter().map(|x| x * x.ln()).sum::<f64>()).collect();
            let ours = typical(&tree, &log_p, &entropy, rule);
            let papers = transcription(&tree, &tokens, &distributions, rule);
            let sum = |path: &[usize]| path.iter().map(|&n| log_p[n]).sum::<f64>();
            prop_assert_eq!(ours.len(), papers.len());
            prop_assert!((sum(&ours) - sum(&papers)).abs() < 1e-9);
            if tokens_differ_among_siblings(&tree, &tokens) {
                prop_assert_eq!(ours, papers);
            }
        }

        #[test]
        fn one_draw_has_the_law_of_siblings_tried_in_turn(
            weights in proptest::array::uniform6(0.0f64..1.0),
            zeros in proptest::array::uniform6(any::<bool>()),
            siblings in proptest::sample::subsequence(vec![0usize, 1, 2, 3, 4, 5], 1..=6).prop_shuffle(),
        ) {
            let weights: Vec<f64> = weights.iter().zip(zeros).map(|(w, zero)| if zero { 0.0 } else { *w }).collect();
            let total: f64 = weights.iter().sum();
            prop_assume!(total > 0.0);
            let p: Vec<f64> = weights.iter().map(|w| w / total).collect();
            let tree = SparseTree::new((0..siblings.len()).map(|guess| vec![guess]).collect()).unwrap();
            let tokens: Vec<i64> = [0].into_iter().chain(siblings.iter().map(|&token| token as i64)).collect();
            // The distribution of `walk` at a node: each token has its own probability and is accepted if a sibling holds it.
            for (token, expected) in sibling_by_sibling(&p, &siblings).into_iter().enumerate() {
                prop_assert!((p[token] - expected).abs() < 1e-12, "{token}: {} {expected}", p[token]);
                let mut choices = [token as i64, 77].into_iter();
                let (path, next) = walk(&tree, &tokens, |_| choices.next().expect("one for each node of the path"));
                match siblings.iter().position(|&guess| guess == token) {
                    Some(guess) => prop_assert_eq!((path, next), (vec![0, guess + 1], 77)),
                    None => prop_assert_eq!((path, next), (vec![0], token as i64)),
                }
            }
        }

        #[test]
        fn greedy_is_typical_of_a_backbone_without_doubt(tree in trees(24, 4, 4), draws in proptest::collection::vec((0i64..4, 0i64..4), 25)) {
            let (tokens, best): (Vec<i64>, Vec<i64>) = draws[..tree.len()].iter().copied().unzip();
            let log_p: Vec<f64> = (0..tree.len()).map(|n| match tree.parent(n) {
                Some(parent) if tokens[n] != best[parent] => f64::NEG_INFINITY,
                _ => 0.0,
            }).collect();
            let certain = typical(&tree, &log_p, &vec![0.0; tree.len()], TypicalAcceptance::default());
            let (greedy, _) = walk(&tree, &tokens, |node| best[node]);
            if tokens_differ_among_siblings(&tree, &tokens.iter().map(|&t| t as usize).collect::<Vec<_>>()) {
                prop_assert_eq!(greedy, certain);
            }
        }
    }

    /// Always true of heads' guesses. With equal siblings, several paths hold the same text.
    fn tokens_differ_among_siblings(tree: &SparseTree, tokens: &[usize]) -> bool {
        (0..tree.len()).all(|node| {
            let children = tree.children(node);
            children.clone().all(|a| children.clone().all(|b| a == b || tokens[a] != tokens[b]))
        })
    }
}
