//! The backbone by libtorch's operations, on any device: the oracle of the other engines.

use tch::Tensor;

use super::{Engine, RowTokens, each_row, in_all_rows};
use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::new_tokens::NewTokens;

/// See [`Engine`].
#[derive(Debug)]
pub struct TchEngine<'a> {
    backbone: &'a Llama,
    reads: Reads,
}

/// How attention reads the cache in a step of all rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// Sequence after sequence: fastest for one.
    EachRow,
    /// All rows together: weights and cache are read once a step, and a row's bits do not depend on how many rows there are.
    AllRows,
}

impl<'a> TchEngine<'a> {
    /// For one sequence at a time.
    pub fn new(backbone: &'a Llama) -> Self {
        Self { backbone, reads: Reads::EachRow }
    }

    /// For many sequences at a time.
    pub fn for_batches(backbone: &'a Llama) -> Self {
        Self { reads: Reads::AllRows, ..Self::new(backbone) }
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
        match self.reads {
            Reads::AllRows => self.backbone.extend_rows(tokens_b, cache),
            Reads::EachRow => {
                let batch = in_all_rows(cache, token);
                self.extend(cache, tokens_b, &batch)
            }
        }
    }

    fn logits(&self, hidden_nh: &Tensor) -> Tensor {
        self.backbone.logits(hidden_nh, Adapters::Off)
    }
}
