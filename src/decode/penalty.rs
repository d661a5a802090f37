//! Penalties for tokens that occur already. The repetition penalty (Keskar et al. 2019, arXiv 1909.05858), by Hugging Face's rule: the logit
//! of every token that occurs in the prompt or the text is divided by the penalty if it is positive, and multiplied by it if it is negative.
//! Then, as in OpenAI's API and vLLM, for tokens of the text without the prompt: the frequency penalty is subtracted as often as the token
//! occurs, and the presence penalty once.

// N nodes of a tree, V vocabulary, M logits that are changed
use std::collections::BTreeMap;

use tch::Tensor;

use super::request::Request;
use crate::numbers::Finite;
use crate::torch::{upload, wide};
use crate::tree::accept::upwards;
use crate::tree::sparse_tree::SparseTree;

/// The largest penalty that is computed with: that of float32.
const LARGEST: f64 = f32::MAX as f64;

/// The penalties of one text, and the tokens that they apply to.
#[derive(Debug)]
pub struct Penalty {
    repetition: f64,
    frequency: f64,
    presence: f64,
    /// How often each token occurs in the text; 0 for one that only the prompt has.
    counts: BTreeMap<i64, u32>,
}

impl Penalty {
    /// Of a text that is asked for, before its first token.
    pub fn new(request: &Request) -> Self {
        let repetition = request.repetition_penalty.get().clamp(f32::MIN_POSITIVE.into(), LARGEST);
        let [frequency, presence] = [request.frequency_penalty, request.presence_penalty].map(Finite::get);
        let mut penalty = Self { repetition, frequency, presence, counts: BTreeMap::new() };
        if penalty.repeats() {
            penalty.counts.extend(request.prompt.iter().map(|&token| (token, 0)));
        }
        penalty
    }

    /// Whether the prompt's tokens are penalised, too.
    #[expect(clippy::float_cmp, reason = "1 as it was typed")]
    fn repeats(&self) -> bool {
        self.repetition != 1.0
    }

    /// Whether logits stay as they are.
    #[expect(clippy::float_cmp, reason = "0 as it was typed")]
    pub fn is_off(&self) -> bool {
        !self.repeats() && [self.frequency, self.presence] == [0.0; 2]
    }

    /// Adds tokens to the text.
    pub fn see(&mut self, tokens: &[i64]) {
        if !self.is_off() {
            tokens.iter().for_each(|&token| *self.counts.entry(token).or_default() += 1);
        }
    }

    /// Logits after the text and the tokens `then`, `[1, V]`.
    pub fn apply_to_text(&self, logits_1v: &Tensor, then: &[i64]) -> Tensor {
        self.changed(logits_1v, |_| then.to_vec())
    }

    /// Logits after each node of a tree behind the text, `[N, V]`: the tokens on a node's path are penalised, too.
    /// - `tokens[n]`: the token that node `n` holds
    pub fn apply_to_tree(&self, logits_nv: &Tensor, tree: &SparseTree, tokens: &[i64]) -> Tensor {
        self.changed(logits_nv, |node| upwards(tree, node).map(|node| tokens[node]).collect())
    }

    /// `more` says which tokens follow the text before a row.
    fn changed(&self, logits_nv: &Tensor, more: impl Fn(usize) -> Vec<i64>) -> Tensor {
        if self.is_off() {
            return logits_nv.shallow_clone();
        }
        let [n, v] = logits_nv.size()[..] else { panic!("[N, V], got {logits_nv:?}") };
        let (mut places, mut less) = (vec![], vec![]);
        for (row, node) in (0..n).zip(0..) {
            let mut own: BTreeMap<i64, u32> = BTreeMap::new();
            more(node).into_iter().for_each(|token| *own.entry(token).or_default() += 1);
            let mut add = |token: i64, count: u32| {
                places.push(row * v + token);
                let sum = self.frequency * f64::from(count) + if count > 0 { self.presence } else { 0.0 };
                less.push(sum.clamp(-LARGEST, LARGEST));
            };
            for (&token, &count) in &self.counts {
                add(token, count + own.remove(&token).unwrap_or(0));
            }
            own.into_iter().for_each(|(token, count)| add(token, count));
        }
        // 16 bits would round what is penalised to another grid than the rest.
        let kind = wide(logits_nv.kind());
        let (places_m, less_m) = (upload(&places, logits_nv.device()), upload(&less, logits_nv.device()).to_kind(kind));
        let flat = logits_nv.to_kind(kind).reshape([-1]);
        let was_m = flat.index_select(0, &places_m);
        let repeated_m = (&was_m / self.repetition).where_self(&was_m.gt(0.0), &(&was_m * self.repetition));
        // What is finite stays so, and what is not shows that the backbone failed.
        let changed_m = (repeated_m - less_m).clamp(-LARGEST, LARGEST).where_self(&was_m.isfinite(), &was_m);
        flat.index_copy(0, &places_m, &changed_m).view([n, v])
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::numbers::Positive;

    fn rows(logits_nv: &Tensor) -> Vec<Vec<f64>> {
        Vec::try_from(logits_nv).expect("two axes of float64")
    }

    fn penalty(repetition: f64, frequency: f64, presence: f64, prompt: &[i64]) -> Penalty {
        let repetition_penalty = Positive::new(repetition).expect("above 0");
        let [frequency_penalty, presence_penalty] = [frequency, presence].map(|by| Finite::new(by).expect("finite"));
        Penalty::new(&Request { repetition_penalty, frequency_penalty, presence_penalty, ..Request::greedy(prompt, 1) })
    }

    #[test]
    fn seen_tokens_lose_and_a_token_that_stands_twice_loses_once() {
        let logits_1v = Tensor::from_slice(&[4.0, -4.0, 4.0, 0.0, 6.0]).unsqueeze(0);
        let mut penalty = penalty(2.0, 0.0, 0.0, &[0, 1, 0]);
        penalty.see(&[3]);
        assert_eq!(rows(&penalty.apply_to_text(&logits_1v, &[0])), [[2.0, -8.0, 4.0, 0.0, 6.0]]);
    }

    #[test]
    fn frequency_counts_and_presence_does_not_and_neither_sees_the_prompt() {
        let logits_1v = Tensor::from_slice(&[4.0, -4.0, 4.0, 0.0, 6.0]).unsqueeze(0);
        let mut both = penalty(1.0, 0.5, 0.25, &[2, 4]);
        assert!(!both.is_off());
        both.see(&[0, 1, 0]);
        assert_eq!(rows(&both.apply_to_text(&logits_1v, &[0, 3])), [[2.25, -4.75, 4.0, -0.75, 6.0]]);
        let mut after_repetition = penalty(2.0, -0.5, 0.0, &[4]);
        after_repetition.see(&[0]);
        assert_eq!(rows(&after_repetition.apply_to_text(&logits_1v, &[1])), [[2.5, -7.5, 4.0, 0.0, 3.0]]);
    }

    /// The most probable token must stay one: a text that no token can follow would fail.
    #[test]
    fn no_penalty_makes_a_logit_infinite() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
            let logits_1v = Tensor::from_slice(&[4.0, -4.0, 0.0, 1.0]).unsqueeze(0).to_kind(kind);
            for (repetition, frequency) in [
                (1e-320, 0.0),
                (1e-39, 0.0),
                (1e39, 0.0),
                (f64::MAX, 0.0),
                (1.0, f64::MAX),
                (1.0, f64::MIN),
                (3.0, 1e38),
            ] {
                let mut penalty = penalty(repetition, frequency, 0.0, &[]);
                penalty.see(&[0, 0, 1, 2]);
                let penalised = penalty.apply_to_text(&logits_1v, &[]).to_kind(Kind::Double);
                assert!(
                    rows(&penalised)[0].iter().all(|logit| logit.is_finite()),
                    "{kind:?}, {repetition}, {frequency}"
                );
            }
        }
    }

    #[test]
    fn a_logit_that_is_not_finite_stays_so() {
        let logits_1v = Tensor::from_slice(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]).unsqueeze(0);
        let mut all = penalty(2.0, 1.0, 1.0, &[]);
        all.see(&[0, 1, 2]);
        let [nan, largest, least] = rows(&all.apply_to_text(&logits_1v, &[]))[0][..] else { panic!("three logits") };
        assert!(nan.is_nan() && [largest, least] == [f64::INFINITY, f64::NEG_INFINITY]);
    }

    #[test]
    fn a_node_has_seen_its_own_path_and_no_cousin() {
        // Nodes: 0 root, 1 [0], 2 [1], 3 [0, 0].
        let tree = SparseTree::new(vec![vec![0], vec![1], vec![0, 0]]).unwrap();
        let logits_nv = Tensor::ones([4, 6], (Kind::Double, Device::Cpu));
        let penalised = rows(&penalty(2.0, 0.0, 0.0, &[5]).apply_to_tree(&logits_nv, &tree, &[1, 2, 3, 1]));
        let seen = |row: &[f64]| (0..6).filter(|&id| row[id] < 1.0).collect::<Vec<_>>();
        let seen: Vec<Vec<usize>> = penalised.iter().map(|row| seen(row)).collect();
        assert_eq!(seen, [vec![1, 5], vec![1, 2, 5], vec![1, 3, 5], vec![1, 2, 5]]);
        assert!(penalised.iter().flatten().all(|&logit| (logit - 1.0).abs() < 1e-12 || (logit - 0.5).abs() < 1e-12));
        let mut counted = penalty(1.0, 0.5, 0.0, &[5]);
        counted.see(&[2]);
        let counted = rows(&counted.apply_to_tree(&logits_nv, &tree, &[1, 2, 3, 1]));
        assert_eq!(counted[2], [1.0, 0.5, 0.5, 0.5, 1.0, 1.0]);
        assert_eq!(
            counted[3],
            [1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
            "1 is the root and the last node, 2 stands in the text and on the path"
        );
    }
}
