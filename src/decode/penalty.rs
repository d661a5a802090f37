//! The repetition penalty (Keskar et al. 2019, arXiv 1909.05858), by Hugging Face's rule: the logit of every token that occurs in the
//! prompt or the text is divided by the penalty if it is positive, and multiplied by it if it is negative.

// N nodes of a tree, V vocabulary, M logits that are changed
use std::collections::HashSet;

use tch::{Kind, Tensor};

use crate::numbers::Positive;
use crate::tree::accept::upwards;
use crate::tree::sparse_tree::SparseTree;

/// The penalty of one text, and the tokens that it applies to.
#[derive(Debug)]
pub struct Penalty {
    by: f64,
    /// Prompt and text, each token once.
    seen: Vec<i64>,
    is_seen: HashSet<i64>,
}

impl Penalty {
    /// For a text that begins with this prompt; 1 changes nothing.
    pub fn new(by: Positive, prompt: &[i64]) -> Self {
        let mut penalty = Self { by: by.get(), seen: vec![], is_seen: HashSet::new() };
        penalty.see(prompt);
        penalty
    }

    /// Whether logits stay as they are.
    #[expect(clippy::float_cmp, reason = "1 as it was typed")]
    pub fn is_off(&self) -> bool {
        self.by == 1.0
    }

    /// Adds tokens to the text.
    pub fn see(&mut self, tokens: &[i64]) {
        if !self.is_off() {
            self.seen.extend(tokens.iter().filter(|&&token| self.is_seen.insert(token)));
        }
    }

    /// Logits after the text, `[1, V]`.
    pub fn of_text(&self, logits_1v: &Tensor) -> Tensor {
        self.changed(logits_1v, |_| vec![])
    }

    /// Logits after each node of a tree behind the text, `[N, V]`: the tokens on a node's path are penalised, too.
    /// - `tokens[n]`: the token that node `n` holds
    pub fn of_tree(&self, logits_nv: &Tensor, tree: &SparseTree, tokens: &[i64]) -> Tensor {
        self.changed(logits_nv, |node| {
            let path: HashSet<i64> = upwards(tree, node).map(|node| tokens[node]).collect();
            path.into_iter().filter(|token| !self.is_seen.contains(token)).collect()
        })
    }

    /// `more` says which tokens a row has seen beside those of the text.
    fn changed(&self, logits_nv: &Tensor, more: impl Fn(usize) -> Vec<i64>) -> Tensor {
        if self.is_off() {
            return logits_nv.shallow_clone();
        }
        let [n, v] = logits_nv.size()[..] else { panic!("[N, V], got {logits_nv:?}") };
        let places = (0..n).zip(0..).flat_map(|(row, node)| {
            let own = more(node);
            self.seen.iter().copied().chain(own).map(move |token| row * v + token).collect::<Vec<_>>()
        });
        let places_m = Tensor::from_slice(&places.collect::<Vec<_>>()).to_device(logits_nv.device());
        // 16 bits would round what is penalised to another grid than the rest.
        let kind = if logits_nv.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let flat = logits_nv.to_kind(kind).reshape([-1]);
        let was_m = flat.index_select(0, &places_m);
        let now_m = (&was_m / self.by).where_self(&was_m.gt(0.0), &(&was_m * self.by));
        flat.index_copy(0, &places_m, &now_m).view([n, v])
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn rows(logits_nv: &Tensor) -> Vec<Vec<f64>> {
        Vec::try_from(logits_nv).expect("two axes of float64")
    }

    fn penalty(by: f64, prompt: &[i64]) -> Penalty {
        Penalty::new(Positive::new(by).expect("above 0"), prompt)
    }

    #[test]
    fn seen_tokens_lose_and_a_token_that_stands_twice_loses_once() {
        let logits_1v = Tensor::from_slice(&[4.0, -4.0, 4.0, 0.0, 6.0]).unsqueeze(0);
        let mut penalty = penalty(2.0, &[0, 1, 0]);
        penalty.see(&[3, 0]);
        assert_eq!(rows(&penalty.of_text(&logits_1v)), [[2.0, -8.0, 4.0, 0.0, 6.0]]);
    }

    #[test]
    fn a_node_has_seen_its_own_path_and_no_cousin() {
        // Nodes: 0 root, 1 [0], 2 [1], 3 [0, 0].
        let tree = SparseTree::new(vec![vec![0], vec![1], vec![0, 0]]).unwrap();
        let logits_nv = Tensor::ones([4, 6], (Kind::Double, Device::Cpu));
        let penalised = rows(&penalty(2.0, &[5]).of_tree(&logits_nv, &tree, &[1, 2, 3, 1]));
        let seen = |row: &[f64]| (0..6).filter(|&id| row[id] < 1.0).collect::<Vec<_>>();
        let seen: Vec<Vec<usize>> = penalised.iter().map(|row| seen(row)).collect();
        assert_eq!(seen, [vec![1, 5], vec![1, 2, 5], vec![1, 3, 5], vec![1, 2, 5]]);
        assert!(penalised.iter().flatten().all(|&logit| (logit - 1.0).abs() < 1e-12 || (logit - 0.5).abs() < 1e-12));
    }
}
