//! Weights with a row per token: the token embedding, and the LM head as its file has it.

// V vocabulary, H hidden
use tch::{Device, Kind, Tensor};

use super::blocks::Blocks;
use super::format::Codes;

/// `[V, H]`.
#[derive(Debug)]
pub enum TokenTable {
    /// Of the file's dtype: rows are converted as they are looked up, so a mapped file is not copied.
    Dense(Tensor),
    /// Of a backbone made for decoding; on the CPU.
    Blocks(Blocks),
}

impl TokenTable {
    /// The weight.
    ///
    /// # Panics
    /// If it was left in blocks for decoding.
    pub fn dense(&self) -> &Tensor {
        match self {
            Self::Dense(table_vh) => table_vh,
            Self::Blocks(_) => panic!("weights were left in blocks for decoding; load the backbone for training"),
        }
    }

    /// The weight; of blocks, a copy in `kind`.
    pub fn numbers(&self, kind: Kind) -> Tensor {
        match self {
            Self::Dense(table_vh) => table_vh.shallow_clone(),
            Self::Blocks(blocks) => blocks.dequantize(blocks.size(), kind),
        }
    }

    /// The rows of token ids `[…]`, `[…, H]` in `kind`.
    pub fn rows(&self, tokens: &Tensor, kind: Kind) -> Tensor {
        match self {
            Self::Dense(table_vh) => Tensor::embedding(table_vh, tokens, -1, false, false).to_kind(kind),
            Self::Blocks(blocks) => {
                let ids: Vec<i64> =
                    Vec::try_from(tokens.to_device(Device::Cpu).reshape([-1])).expect("one axis of ids");
                let size = [&tokens.size()[..], &blocks.size()[1..]].concat();
                Tensor::from_slice(&blocks.rows(&ids)).view(&*size).to_kind(kind)
            }
        }
    }
}
