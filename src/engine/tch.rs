//! The libtorch engine, for any device: the oracle of the other engines.

use std::num::NonZeroUsize;

use tch::{Device, Tensor};

use super::{Engine, PromptPass, RowTokens, each_row};
use crate::model::batch_step::{FEWEST_ROWS, MOST_ROWS, padded};
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::new_tokens::NewTokens;
use crate::torch::upload;

/// Tokens in a pass over several prompts: many more than the few hundred from which on products are bound by arithmetic (computed, not
/// measured), and few enough that their activations are small beside the weights.
const TOKENS_OF_A_PASS: usize = 4096;

/// The [`Engine`] on libtorch's operations.
#[derive(Debug)]
pub struct TchEngine<'a> {
    backbone: &'a Llama,
    rows: RowsOfPass,
    prompts: PromptPass,
}

/// How the rows of several sequences run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowsOfPass {
    /// One sequence after the other: the oracle of the other two, and the fastest for a single sequence.
    Single,
    /// Together, and what a row computes does not depend on the others, bit by bit: on the CPU, where products of [`FEWEST_ROWS`] to
    /// [`MOST_ROWS`] rows give each row the same bits, all have so many. A sequence with more new tokens has a pass of its own.
    Few,
    /// All together.
    All,
}

impl<'a> TchEngine<'a> {
    /// For one sequence at a time.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { backbone, rows: RowsOfPass::Single, prompts: PromptPass::OfOne }
    }

    /// For many sequences at a time. On a GPU one pass runs several prompts. On a CPU each prompt has its own: the bits of its keys and values
    /// depend on the number of tokens in a pass.
    pub fn for_batches(backbone: &'a Llama) -> Self {
        match backbone.device() {
            Device::Cpu => Self { backbone, rows: RowsOfPass::Few, prompts: PromptPass::OfOne },
            _ => Self { backbone, rows: RowsOfPass::All, prompts: PromptPass::OfSeveral { tokens: TOKENS_OF_A_PASS } },
        }
    }

    /// As [`TchEngine::for_batches`], with passes over several prompts of at most `tokens` tokens in all.
    #[must_use]
    pub fn with_prompts_together(self, tokens: NonZeroUsize) -> Self {
        Self { rows: RowsOfPass::All, prompts: PromptPass::OfSeveral { tokens: tokens.get() }, ..self }
    }

    /// The rows of sequences that run together, in passes of few rows.
    fn extend_few(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor {
        let mut end = 0;
        let run = |pass: &[RowTokens]| {
            let n = pass.iter().map(|at| at.nodes.len()).sum();
            end += n;
            let tokens_n = tokens_n.narrow(0, end - n, n);
            self.backbone.extend_padded(&tokens_n, &rows_of(pass), cache, FEWEST_ROWS).narrow(0, 0, n)
        };
        let states: Vec<Tensor> = passes_of_few(batch).into_iter().map(run).collect();
        if let [one] = &states[..] { one.shallow_clone() } else { Tensor::cat(&states, 0) }
    }
}

impl Engine for TchEngine<'_> {
    fn name(&self) -> &'static str {
        "tch"
    }

    fn backbone(&self) -> &Llama {
        self.backbone
    }

    fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor {
        match (self.rows, batch) {
            (RowsOfPass::Few, _) => return self.extend_few(cache, tokens_n, batch),
            (RowsOfPass::All, _) => return self.backbone.extend_several(tokens_n, &rows_of(batch), cache),
            (RowsOfPass::Single, [one]) => return self.backbone.extend(tokens_n, one.nodes, cache, one.row),
            (RowsOfPass::Single, _) => {}
        }
        let rows = each_row(tokens_n, batch);
        let mut run = |(at, tokens): &(RowTokens, Tensor)| self.backbone.extend(tokens, at.nodes, cache, at.row);
        Tensor::cat(&rows.iter().map(&mut run).collect::<Vec<_>>(), 0)
    }

    /// What is computed for the other rows is dropped.
    fn extend_each(&self, cache: &mut KvCache, tokens_b: &Tensor, rows: &[usize], token: &NewTokens) -> Tensor {
        if self.rows == RowsOfPass::Single {
            let batch: Vec<RowTokens> = rows.iter().map(|&row| RowTokens { row, nodes: token }).collect();
            return self.extend(cache, tokens_b, &batch);
        }
        if rows.len() == cache.rows() {
            return self.backbone.extend_rows(tokens_b, cache);
        }
        let rows_b = upload(&rows.iter().map(|&row| row as i64).collect::<Vec<_>>(), tokens_b.device());
        let all_tokens = Tensor::zeros([cache.rows() as i64], (tokens_b.kind(), tokens_b.device()));
        self.backbone.extend_rows(&all_tokens.index_copy(0, &rows_b, tokens_b), cache).index_select(0, &rows_b)
    }

    fn prompt_pass(&self) -> PromptPass {
        self.prompts
    }

    fn logits(&self, states_nw: &Tensor) -> Tensor {
        let hidden_nh = self.backbone.last_of(states_nw);
        let logits = |hidden_nh: &Tensor| self.backbone.logits(hidden_nh, Adapters::Off);
        if self.rows != RowsOfPass::Few {
            return logits(&hidden_nh);
        }
        let few = |part_nh: Tensor| logits(&padded(&part_nh, FEWEST_ROWS)).narrow(0, 0, part_nh.size()[0]);
        Tensor::cat(&hidden_nh.split(MOST_ROWS, 0).into_iter().map(few).collect::<Vec<_>>(), 0)
    }
}

fn rows_of<'s>(batch: &[RowTokens<'s>]) -> Vec<(usize, &'s NewTokens)> {
    batch.iter().map(|at| (at.row, at.nodes)).collect()
}

/// Whole sequences of at most [`MOST_ROWS`] new tokens in all, or a longer one alone.
fn passes_of_few<'b, 's>(batch: &'b [RowTokens<'s>]) -> Vec<&'b [RowTokens<'s>]> {
    let (mut passes, mut first, mut rows) = (vec![], 0, 0);
    for (at, tokens) in batch.iter().map(|at| at.nodes.len()).enumerate() {
        if rows > 0 && rows + tokens > MOST_ROWS {
            passes.push(&batch[first..at]);
            (first, rows) = (at, 0);
        }
        rows += tokens;
    }
    passes.push(&batch[first..]);
    passes
}

#[cfg(test)]
mod tests {
    use tch::Kind;

    use super::*;
    use crate::model::config::LlamaConfig;
    use crate::torch::Generator;

    /// Behind rows of 40, 3, 300, … tokens, new tokens in each: a tree of 5, a chain of 20, a single one, a chain of 70, and so on. Returns the
    /// logits after each of the rows `of`.
    fn logits(engine: &TchEngine, oracle: &TchEngine, of: &[usize]) -> Vec<Tensor> {
        let llama = engine.backbone;
        let (config, kind) = (&llama.config, llama.kind());
        let chain = |n: i64| NewTokens::chain(n, config, kind, Device::Cpu);
        let sees = |query: usize, key: usize| key == query || key == 0 || (query, key) == (4, 2);
        let nodes =
            [NewTokens::pattern(&[0, 1, 1, 1, 2], sees, config, kind, Device::Cpu), chain(20), chain(1), chain(70)];
        let mut cache = KvCache::new(config, kind, Device::Cpu);
        for (row, &text) in of.iter().enumerate() {
            let len = [40, 3, 300, 7, 1][text % 5];
            cache.push();
            let prompt = Generator::seeded(text as u64).integers(50, &[len]);
            let _ = oracle.extend(&mut cache, &prompt, &[RowTokens { row, nodes: &chain(len) }]);
            cache.commit(row, len);
        }
        let batch: Vec<RowTokens> =
            of.iter().enumerate().map(|(row, text)| RowTokens { row, nodes: &nodes[text % 4] }).collect();
        let new = |at: (&RowTokens, &usize)| Generator::seeded(100 + *at.1 as u64).integers(50, &[at.0.nodes.len()]);
        let tokens_n = Tensor::cat(&batch.iter().zip(of).map(new).collect::<Vec<_>>(), 0);
        let logits_nv = engine.logits(&engine.extend(&mut cache, &tokens_n, &batch));
        let lengths: Vec<i64> = batch.iter().map(|at| at.nodes.len()).collect();
        logits_nv.narrow(0, 0, lengths.iter().sum()).split_with_sizes(&lengths[..], 0)
    }

    fn wide(kind: Kind) -> Llama {
        tch::set_num_threads(1);
        let config =
            LlamaConfig { hidden_size: 128, head_dim: 32, max_position_embeddings: 600, ..LlamaConfig::tiny() };
        Llama::random(config, kind, Device::Cpu, 8)
    }

    #[test]
    fn sequences_together_are_those_one_after_the_other() {
        for config in LlamaConfig::tiny_of_each_family() {
            tch::set_num_threads(1);
            let config = LlamaConfig { max_position_embeddings: 600, ..config };
            let llama = Llama::random(config, Kind::Double, Device::Cpu, 8);
            let (oracle, few) = (TchEngine::new(&llama), TchEngine::for_batches(&llama));
            let all = TchEngine::for_batches(&llama).with_prompts_together(NonZeroUsize::MIN);
            let texts: Vec<usize> = (0..9).collect();
            let expected = logits(&oracle, &oracle, &texts);
            for engine in [few, all] {
                for (text, (got, expected)) in logits(&engine, &oracle, &texts).iter().zip(&expected).enumerate() {
                    let off = (got - expected).abs().max().double_value(&[]);
                    assert!(off < 1e-10, "{engine:?}, text {text}: {off}");
                }
            }
        }
    }

    #[test]
    fn a_sequences_bits_do_not_depend_on_the_others() {
        let llama = wide(Kind::Float).for_batches();
        let (oracle, engine) = (TchEngine::new(&llama), TchEngine::for_batches(&llama));
        for text in 0..4 {
            let alone = logits(&engine, &oracle, &[text]).remove(0);
            for others in [&[1, 2][..], &[2, 2, 2, 2, 2], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]] {
                for at in [0, others.len() / 2, others.len()] {
                    let texts = [&others[..at], &[text], &others[at..]].concat();
                    assert_eq!(logits(&engine, &oracle, &texts)[at], alone, "text {text} among {texts:?}");
                }
            }
        }
    }
}
