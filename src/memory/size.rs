//! Shape and dtype of a tensor that will be allocated.

// L layers, G key/value heads, S room for tokens, D head size
use tch::Kind;

use crate::model::config::LlamaConfig;

/// Shape and dtype of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Size {
    pub shape: Vec<i64>,
    pub kind: Kind,
}

impl Size {
    /// From a shape and a dtype.
    pub fn new<const M: usize>(shape: [i64; M], kind: Kind) -> Self {
        Self { shape: shape.to_vec(), kind }
    }

    /// `[L, 2, G, S, D]`: keys and values of a text with room for so many tokens.
    pub fn for_cache(config: &LlamaConfig, tokens: i64, kind: Kind) -> Self {
        let layers = config.num_hidden_layers.cast_signed() as i64;
        Self::new([layers, 2, config.num_key_value_heads, tokens, config.head_dim], kind)
    }

    /// Size in memory.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<i64>().unsigned_abs() * self.kind.elt_size_in_bytes() as u64
    }
}
