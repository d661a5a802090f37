//! Which nodes of a verified tree are kept. Pure decisions at tree nodes; no tensors here.
//!
//! The root is always accepted: it is the LM head's own token. Below it a node can be accepted only if its parent is.

use crate::tree::sparse_tree::SparseTree;

/// An acceptance rate that no step can reach.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error(
    "an acceptance rate of {rate} tokens a step cannot be forced; expected 1 to {largest}: the tree's chain of best guesses \
     has {} nodes below the root", largest - 1
)]
pub struct ForcedRateError {
    /// What was asked for.
    rate: f64,
    /// Tokens of the chain and the root.
    largest: usize,
}

/// How guesses are accepted at a temperature above 0. At temperature 0 it is greedy, whatever this says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Acceptance {
    /// A guess is accepted if it is the backbone's most probable token.
    Greedy,
    /// A guess is accepted if it is probable enough (paper section 2.3.1); the root is the most probable token.
    Typical(TypicalAcceptance),
    /// A guess is accepted if it lies in the nucleus after its parent: the fewest most probable tokens that together have top-p,
    /// at the request's temperature. The root, and so the text's first token, is drawn from the nucleus. (As the published code
    /// does under the name of nucleus sampling; it is not lossless.)
    Nucleus,
    /// A guess is accepted if it is the token that the backbone draws after its parent; the draw that no guess holds is the next
    /// root. Lossless: the text is distributed as plain decoding's, and with the same seed it is the same text (see [`walk`]).
    Rejection,
    /// For timing, without regard to what the backbone says: the chain of best guesses is accepted so far that a step commits this
    /// many tokens on average. The text is not the backbone's, at no temperature.
    Forced {
        /// From 1 to the tokens of the chain and the root.
        rate: f64,
    },
}

impl Acceptance {
    /// [`Acceptance::Forced`] for steps of `tree`.
    ///
    /// # Errors
    /// A rate that its chain of best guesses cannot reach.
    pub fn at_rate(rate: f64, tree: &SparseTree) -> Result<Self, ForcedRateError> {
        let largest = chain_of_best(tree).count();
        if (1.0..=largest as f64).contains(&rate) {
            Ok(Self::Forced { rate })
        } else {
            Err(ForcedRateError { rate, largest })
        }
    }

    /// Whether tokens are drawn above temperature 0; the other rules take the most probable one as root.
    pub fn draws(self) -> bool {
        matches!(self, Self::Nucleus | Self::Rejection)
    }
}

/// A guess x is accepted if p(x) > min(ε, δ·exp(-H(p))), where p is the backbone's distribution at its parent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TypicalAcceptance {
    /// ε: so probable is always enough.
    pub posterior_threshold: f64,
    /// δ: the flatter the distribution (entropy H), the less is enough.
    pub posterior_alpha: f64,
}

impl TypicalAcceptance {
    /// ε as given and δ = √ε, as the paper has it.
    pub fn with_threshold(posterior_threshold: f64) -> Self {
        Self { posterior_threshold, posterior_alpha: posterior_threshold.sqrt() }
    }

    /// The probability that a guess must exceed, where the backbone's distribution has this entropy (in nats).
    ///
    /// The published code computes H with log(p + 1e-5); ours is the exact entropy.
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

/// The path, root first, along which each node's token is the one chosen after its parent, and the token that was chosen after the
/// last node: the next root.
/// - `tokens[n]`: the token that node `n` holds — `choose(n)`: the token after node `n`, asked once for each node on the path, in
///   the order of the text
///
/// Where the most probable token is chosen, this is greedy acceptance. Where it is drawn, this is speculative sampling (Leviathan et
/// al. 2023, Chen et al. 2023; with several guesses a node: SpecInfer, Miao et al. 2024) for guesses that are not drawn themselves:
/// there, siblings are tried in turn, each accepted with its probability in what the ones before it left, and where none is, the
/// token is drawn from what is left. A guess is then accepted with just its probability p(x), and so is a guess that is looked up in
/// one draw from p. One draw a token, in the order of the text, is what plain decoding does: the same seed makes the same text.
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

/// The longest path, root first, of nodes that are all probable enough; of equals the one with the largest product of probabilities.
/// - `log_p[n]`: log-probability of node `n`'s token after its parent (of the root: not read)
/// - `entropy[n]`: entropy of the distribution after node `n`
pub fn typical(tree: &SparseTree, log_p: &[f64], entropy: &[f64], rule: TypicalAcceptance) -> Vec<usize> {
    longest(tree, log_p, |node, parent| log_p[node].exp() > rule.threshold(entropy[parent]))
}

/// The longest path, root first, of nodes that lie in the nucleus after their parents; of equals the one with the largest product of
/// probabilities.
/// - `log_p[n]`: log-probability of node `n`'s token after its parent (of the root: not read)
/// - `more_probable[n]`: probability of all tokens that are more probable there than node `n`'s (of the root: not read)
pub fn nucleus(tree: &SparseTree, log_p: &[f64], more_probable: &[f64], top_p: f64) -> Vec<usize> {
    longest(tree, log_p, |node, _| more_probable[node] < top_p)
}

/// Tokens of step `step` (0-based), root first along the chain of best guesses: so many that the steps up to this one have made
/// `rate` each on average, as closely as whole tokens can.
pub fn forced(tree: &SparseTree, rate: f64, step: usize) -> Vec<usize> {
    let tokens_before = |step: usize| (rate * step as f64).floor();
    let tokens = tokens_before(step + 1) - tokens_before(step);
    chain_of_best(tree).take_while(|&node| (tree.depth(node) as f64) < tokens).collect()
}

/// The root and the nodes `[0]`, `[0, 0]`, and so on.
pub fn chain_of_best(tree: &SparseTree) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(0), |&node| tree.children(node).find(|&child| tree.child_index(child) == Some(0)))
}

/// The longest path of accepted nodes below accepted nodes; of equals the likeliest.
fn longest(tree: &SparseTree, log_p: &[f64], accepts: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    // Parents come before children: one sweep finds each node's summed log-probability, or that it is not accepted.
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
    fn greedy_follows_the_backbone_as_far_as_the_guesses_do() {
        // Nodes: 0 root, 1 [0], 2 [1], 3 [0,0], 4 [1,0], 5 [1,2], 6 [1,2,0].
        let tree = tree(&[&[0], &[1], &[0, 0], &[1, 0], &[1, 2], &[1, 2, 0]]);
        let tokens = [10, 11, 12, 13, 14, 15, 16];
        let greedy = |best: [i64; 7]| walk(&tree, &tokens, |node| best[node]);
        assert_eq!(greedy([12, 0, 15, 0, 0, 16, 99]), (vec![0, 2, 5, 6], 99));
        assert_eq!(greedy([12, 13, 14, 0, 7, 16, 99]), (vec![0, 2, 4], 7));
        assert_eq!(greedy([11, 15, 0, 0, 0, 16, 0]), (vec![0, 1], 15), "a cousin's guess does not count");
        assert_eq!(greedy([99, 13, 14, 0, 0, 0, 0]), (vec![0], 99), "the root is always accepted");
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
        // With little entropy ε decides.
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

    /// Speculative sampling as it is written down for a node: siblings are tried in turn against what the ones before them left.
    /// Returns each token's probability of being the one after the node, whether a sibling holds it or it is drawn from the rest.
    fn sibling_by_sibling(p: &[f64], siblings: &[usize]) -> Vec<f64> {
        let (mut rest, mut reached, mut law) = (p.to_vec(), 1.0, vec![0.0; p.len()]);
        for &guess in siblings {
            let total = rest.iter().sum::<f64>();
            if total <= 0.0 {
                return law; // certain before
            }
            let accepted = rest[guess] / total;
            law[guess] += reached * accepted;
            reached *= 1.0 - accepted;
            rest[guess] = 0.0;
        }
        let total = rest.iter().sum::<f64>();
        law.iter().zip(&rest).map(|(law, rest)| law + if total > 0.0 { reached * rest / total } else { 0.0 }).collect()
    }

    /// Paper section 2.3.1, transcribed over whole candidates (root to leaf) and whole distributions.
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
            // The law of `walk` at a node: each token with its own probability, accepted where a sibling holds it.
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

    /// As heads' guesses do. With equal siblings, several paths hold the same text.
    fn tokens_differ_among_siblings(tree: &SparseTree, tokens: &[usize]) -> bool {
        (0..tree.len()).all(|node| {
            let children = tree.children(node);
            children.clone().all(|a| children.clone().all(|b| a == b || tokens[a] != tokens[b]))
        })
    }
}
