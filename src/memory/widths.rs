//! How wide a backbone's tensors are.

use crate::model::block_spec::MlpSpec;
use crate::model::config::LlamaConfig;

/// Numbers of a token in each of a backbone's tensors.
#[derive(Debug, Clone, Copy)]
pub struct Widths {
    /// The residual stream.
    pub h: u64,
    /// Queries of all heads.
    pub q: u64,
    /// Keys of all heads, and their values.
    pub g: u64,
    /// The MLP's gate, up and their product.
    pub f: u64,
    /// Logits.
    pub v: u64,
}

impl Widths {
    /// Of a backbone.
    pub fn of(config: &LlamaConfig) -> Self {
        let MlpSpec::Gated { width, activation: _ } = config.block().mlp;
        let widths = [config.hidden_size, config.query_size(), config.key_value_size(), width, config.vocab_size];
        let [h, q, g, f, v] = widths.map(i64::unsigned_abs);
        Self { h, q, g, f, v }
    }

    /// Numbers of a token that exist at the same time in a pass that keeps nothing: residual stream and norm before and after, queries, keys, values
    /// and their rotation, gate, up, and their product.
    pub fn passing(self) -> u64 {
        4 * self.h + 3 * (self.q + 2 * self.g) + 4 * self.f
    }
}
