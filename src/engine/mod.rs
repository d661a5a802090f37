//! Engines run the backbone over new tokens that follow a KV cache. The caller commits the tokens that stay in the cache.
//!
//! [`tch`] runs libtorch on any device and is the oracle of the others; [`cpu`] has its own kernels for matrix products with few
//! rows; [`cuda`] runs whole decoding steps on the device and therefore does not implement [`Engine`].

// N new tokens of all sequences, W a token's states (see [`crate::model::taps`]), V vocabulary
use std::fmt;

use ::tch::Tensor;

use crate::model::kv_cache::KvCache;
use crate::model::llama::Llama;
use crate::model::new_tokens::NewTokens;

pub mod cpu;
pub mod cuda;
mod draw;
pub mod dtype;
pub mod fastest;
pub mod prefill;
pub mod prefix;
pub mod prefix_cache;
pub mod sample;
pub mod tch;

/// Runs a backbone over new tokens of several sequences, each a row of a cache.
pub trait Engine: fmt::Debug {
    /// The engine's name, as in `--engine`.
    fn name(&self) -> &'static str;

    /// The backbone that the engine runs.
    fn backbone(&self) -> &Llama;

    /// Runs each sequence's new tokens after its row of the cache; they become the row's pending tokens. `tokens_n` `[N]`, int64,
    /// holds them sequence after sequence. Returns the tokens' states, `[N, W]`; padding rows may follow.
    fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor;

    /// Runs one new token after each of these rows of the cache, which ascend: `tokens_b` `[B]`; `token` holds the position and mask of
    /// each. Returns states as [`Engine::extend`] does.
    fn extend_each(&self, cache: &mut KvCache, tokens_b: &Tensor, rows: &[usize], token: &NewTokens) -> Tensor {
        let batch: Vec<RowTokens> = rows.iter().map(|&row| RowTokens { row, nodes: token }).collect();
        self.extend(cache, tokens_b, &batch)
    }

    /// Whether a token's bits are the same in any pass, whatever else is computed there.
    fn same_bits_in_any_pass(&self) -> bool {
        false
    }

    /// How many prompts run together.
    fn prompt_pass(&self) -> PromptPass {
        PromptPass::OfOne
    }

    /// The LM head: states `[N, W]` to logits `[N, V]`.
    fn logits(&self, states_nw: &Tensor) -> Tensor;
}

/// What a pass over prompts may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptPass {
    /// One prompt, or a piece of it.
    OfOne,
    /// Several prompts, of so many tokens in all; a longer one has passes of its own.
    OfSeveral {
        /// At least one.
        tokens: usize,
    },
}

/// Row, positions and mask of one sequence's new tokens.
#[derive(Debug, Clone, Copy)]
pub struct RowTokens<'s> {
    /// The sequence's row of the cache.
    pub row: usize,
    /// Their position offsets, and which of them attend to which.
    pub nodes: &'s NewTokens,
}

/// Each sequence with its slice of `tokens_n`.
fn each_row<'s>(tokens_n: &Tensor, batch: &[RowTokens<'s>]) -> Vec<(RowTokens<'s>, Tensor)> {
    let mut end = 0;
    let part = |row: &RowTokens<'s>| {
        end += row.nodes.len();
        (*row, tokens_n.narrow(0, end - row.nodes.len(), row.nodes.len()))
    };
    batch.iter().map(part).collect()
}
