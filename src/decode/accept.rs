//! Which nodes of a verified tree are kept. Pure decisions at tree nodes; no tensors here.
//!
//! The root is always accepted: it is the LM head's own token. Below it a node can be accepted only if its parent is.

use crate::medusa::tree::SparseTree;

/// How guesses are accepted at a temperature above 0. At temperature 0 it is greedy, whatever this says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Acceptance {
    /// A guess is accepted if it is the backbone's most probable token.
    Greedy,
    /// A guess is accepted if it is probable enough (paper section 2.3.1).
    Typical(TypicalAcceptance),
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

/// The path, root first, along which each node's token is the backbone's most probable one after its parent.
/// - `tokens[n]`: the token that node `n` holds — `best[n]`: the most probable token after node `n`
pub fn greedy(tree: &SparseTree, tokens: &[i64], best: &[i64]) -> Vec<usize> {
    let mut path = vec![0];
    let mut at = 0;
    while let Some(next) = tree.children(at).find(|&child| tokens[child] == best[at]) {
        path.push(next);
        at = next;
    }
    path
}

/// The longest path, root first, of nodes that are all probable enough; of equals the one with the largest product of probabilities.
/// - `log_p[n]`: log-probability of node `n`'s token after its parent (of the root: not read)
/// - `entropy[n]`: entropy of the distribution after node `n`
pub fn typical(tree: &SparseTree, log_p: &[f64], entropy: &[f64], rule: TypicalAcceptance) -> Vec<usize> {
    // Parents come before children: one sweep finds each node's summed log-probability, or that it is not accepted.
    let mut summed = vec![Some(0.0)];
    for (node, &log_p) in log_p.iter().enumerate().skip(1) {
        let reached = tree.parent(node).and_then(|parent| Some((summed[parent]?, entropy[parent])));
        let accepted = reached.filter(|&(_, entropy)| log_p.exp() > rule.threshold(entropy));
        summed.push(accepted.map(|(sum, _)| sum + log_p));
    }
    let accepted = summed.iter().enumerate().filter_map(|(node, sum)| sum.map(|sum| (node, sum)));
    let longest_then_likeliest = |a: &(usize, f64), b: &(usize, f64)| {
        let depth = tree.depth(a.0).cmp(&tree.depth(b.0));
        depth.then_with(|| a.1.total_cmp(&b.1)).then_with(|| b.0.cmp(&a.0))
    };
    path_to(tree, accepted.max_by(longest_then_likeliest).map_or(0, |(node, _)| node))
}

fn path_to(tree: &SparseTree, node: usize) -> Vec<usize> {
    let mut path: Vec<usize> = std::iter::successors(Some(node), |&node| tree.parent(node)).collect();
    path.reverse();
    path
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::medusa::tree::strategy::trees;

    fn tree(choices: &[&[usize]]) -> SparseTree {
        SparseTree::new(choices.iter().map(|c| c.to_vec()).collect()).unwrap()
    }

    #[test]
    fn greedy_follows_the_backbone_as_far_as_the_guesses_do() {
        // Nodes: 0 root, 1 [0], 2 [1], 3 [0,0], 4 [1,0], 5 [1,2], 6 [1,2,0].
        let tree = tree(&[&[0], &[1], &[0, 0], &[1, 0], &[1, 2], &[1, 2, 0]]);
        let tokens = [10, 11, 12, 13, 14, 15, 16];
        assert_eq!(greedy(&tree, &tokens, &[12, 0, 15, 0, 0, 16, 99]), [0, 2, 5, 6]);
        assert_eq!(greedy(&tree, &tokens, &[12, 13, 14, 0, 0, 16, 99]), [0, 2, 4]);
        assert_eq!(greedy(&tree, &tokens, &[11, 15, 0, 0, 0, 16, 0]), [0, 1], "a cousin's guess does not count");
        assert_eq!(greedy(&tree, &tokens, &[99, 13, 14, 0, 0, 0, 0]), [0], "the root is always accepted");
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
        fn greedy_is_typical_of_a_backbone_without_doubt(tree in trees(24, 4, 4), draws in proptest::collection::vec((0i64..4, 0i64..4), 25)) {
            let (tokens, best): (Vec<i64>, Vec<i64>) = draws[..tree.len()].iter().copied().unzip();
            let log_p: Vec<f64> = (0..tree.len()).map(|n| match tree.parent(n) {
                Some(parent) if tokens[n] != best[parent] => f64::NEG_INFINITY,
                _ => 0.0,
            }).collect();
            let certain = typical(&tree, &log_p, &vec![0.0; tree.len()], TypicalAcceptance::default());
            let greedy = greedy(&tree, &tokens, &best);
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
