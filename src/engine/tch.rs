//! The libtorch engine, for any device: the oracle of the other engines.

use std::num::NonZeroUsize;

use tch::{Device, Tensor};

use super::{Engine, PromptPass, RowTokens, each_row, in_all_rows};
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::new_tokens::NewTokens;

/// Tokens in a pass over several prompts: many more than the few hundred from which on products are bound by arithmetic, and few enough
/// that their activations are small beside the weights.
const TOKENS_OF_A_PASS: usize = 4096;

/// The [`Engine`] on libtorch's operations.
#[derive(Debug)]
pub struct TchEngine<'a> {
    backbone: &'a Llama,
    /// Runs a step of all rows as one pass: weights and cache are read once, and a row's bits do not depend on the number of
    /// rows. With a single row, the single-row pass is faster.
    all_rows_at_once: bool,
    prompts: PromptPass,
}

impl<'a> TchEngine<'a> {
    /// For one sequence at a time.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { backbone, all_rows_at_once: false, prompts: PromptPass::OfOne }
    }

    /// For many sequences at a time. On a GPU one pass runs several prompts. On a CPU each prompt has its own: the bits of its keys and values
    /// depend on the number of tokens in a pass.
    pub fn for_batches(backbone: &'a Llama) -> Self {
        let on_cpu = backbone.device() == Device::Cpu;
        let prompts = if on_cpu { PromptPass::OfOne } else { PromptPass::OfSeveral { tokens: TOKENS_OF_A_PASS } };
        Self { backbone, all_rows_at_once: true, prompts }
    }

    /// As [`TchEngine::for_batches`], with passes over several prompts of at most `tokens` tokens in all.
    #[must_use]
    pub fn with_prompts_together(self, tokens: NonZeroUsize) -> Self {
        Self { prompts: PromptPass::OfSeveral { tokens: tokens.get() }, ..self }
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
        if let [RowTokens { row, nodes }] = *batch {
            return self.backbone.extend(tokens_n, nodes, cache, row);
        }
        if self.prompts != PromptPass::OfOne {
            let rows: Vec<(usize, &NewTokens)> = batch.iter().map(|of_row| (of_row.row, of_row.nodes)).collect();
            return self.backbone.extend_several(tokens_n, &rows, cache);
        }
        let rows = each_row(tokens_n, batch);
        let mut run = |(at, tokens): &(RowTokens, Tensor)| self.backbone.extend(tokens, at.nodes, cache, at.row);
        Tensor::cat(&rows.iter().map(&mut run).collect::<Vec<_>>(), 0)
    }

    fn extend_all(&self, cache: &mut KvCache, tokens_b: &Tensor, token: &NewTokens) -> Tensor {
        if self.all_rows_at_once {
            return self.backbone.extend_rows(tokens_b, cache);
        }
        let batch = in_all_rows(cache, token);
        self.extend(cache, tokens_b, &batch)
    }

    fn prompt_pass(&self) -> PromptPass {
        self.prompts
    }

    fn logits(&self, hidden_nh: &Tensor) -> Tensor {
        self.backbone.logits(hidden_nh, Adapters::Off)
    }
}
