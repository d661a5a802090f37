//! The libtorch engine, for any device: the oracle of the other engines.

use tch::Tensor;

use super::{Engine, RowTokens, each_row, in_all_rows};
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::new_tokens::NewTokens;

/// The [`Engine`] on libtorch's operations.
#[derive(Debug)]
pub struct TchEngine<'a> {
    backbone: &'a Llama,
    /// Runs a step of all rows as one pass: weights and cache are read once, and a row's bits do not depend on the number of
    /// rows. With a single row, the single-row pass is faster.
    all_rows_at_once: bool,
}

impl<'a> TchEngine<'a> {
    /// For one sequence at a time.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { backbone, all_rows_at_once: false }
    }

    /// For many sequences at a time.
    pub fn for_batches(backbone: &'a Llama) -> Self {
        Self { backbone, all_rows_at_once: true }
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

    fn logits(&self, hidden_nh: &Tensor) -> Tensor {
        self.backbone.logits(hidden_nh, Adapters::Off)
    }
}
