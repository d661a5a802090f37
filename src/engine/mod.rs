//! Engines: who runs the backbone over new tokens behind a cache. An engine commits nothing: its caller says which tokens stay there.
//!
//! [`tch`] computes with libtorch on any device and is the oracle of the others; [`cpu`] has kernels of its own for few
//! rows; [`cuda`] runs whole steps on the device, and so is no [`Engine`].

// N new tokens of all sequences, H hidden, V vocabulary
use std::fmt;

use ::tch::Tensor;

use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::new_tokens::NewTokens;

pub mod cpu;
pub mod cuda;
pub mod fastest;
pub mod prefix;
pub mod sample;
pub mod tch;

/// Runs a backbone over new tokens of several sequences, each a row of a cache.
pub trait Engine: fmt::Debug {
    /// As `--engine` spells it.
    fn name(&self) -> &'static str;

    /// What it runs.
    fn backbone(&self) -> &Llama;

    /// Runs each sequence's new tokens behind its row of the cache; they become the row's pending tokens. `tokens_n` `[N]`, int64, has
    /// them sequence after sequence. Returns the hidden states after the final norm, `[N, H]`; spare rows may follow, which mean
    /// nothing.
    fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor;

    /// Runs one new token behind every row of the cache, in their order: `tokens_b` `[B]`, `token` how each lies. What comes back is as
    /// of [`Engine::extend`].
    fn extend_all(&self, cache: &mut KvCache, tokens_b: &Tensor, token: &NewTokens) -> Tensor {
        let batch = in_all_rows(cache, token);
        self.extend(cache, tokens_b, &batch)
    }

    /// The LM head: hidden states `[N, H]` to logits `[N, V]`.
    fn logits(&self, hidden_nh: &Tensor) -> Tensor;
}

/// How one sequence's new tokens lie.
#[derive(Debug, Clone, Copy)]
pub struct RowTokens<'s> {
    /// The sequence's row of the cache.
    pub row: usize,
    /// Where the tokens stand behind it, and which of each other they see.
    pub nodes: &'s NewTokens,
}

/// The same in every row.
fn in_all_rows<'s>(cache: &KvCache, nodes: &'s NewTokens) -> Vec<RowTokens<'s>> {
    (0..cache.rows()).map(|row| RowTokens { row, nodes }).collect()
}

/// Each sequence with its part of `tokens_n`.
fn each_row<'s>(tokens_n: &Tensor, batch: &[RowTokens<'s>]) -> Vec<(RowTokens<'s>, Tensor)> {
    let mut end = 0;
    let part = |row: &RowTokens<'s>| {
        end += row.nodes.len();
        (*row, tokens_n.narrow(0, end - row.nodes.len(), row.nodes.len()))
    };
    batch.iter().map(part).collect()
}
