//! Blocks of ggml that weights are quantised to while loading, for the CPU's own kernels: 32 weights, or 256 of Q4_K, in the formats of GGUF files.

// O outputs, I inputs
use tch::{Kind, Tensor};

use super::blocks::Blocks;
use super::format::{QuantizedFormat, StoredFormat};
use crate::gguf::types::TensorType;
use crate::torch::bytes;

/// A type of blocks as a format.
#[derive(Debug)]
pub struct BlockFormat {
    /// ggml's name.
    ggml: &'static str,
    name: &'static str,
    help: &'static str,
}

/// 8 bits a weight.
pub static Q8_0: BlockFormat =
    BlockFormat { ggml: "Q8_0", name: "q8_0", help: "8.5 bits per weight, one scale per 32; CPU only" };
/// 4 bits a weight.
pub static Q4_0: BlockFormat =
    BlockFormat { ggml: "Q4_0", name: "q4_0", help: "4.5 bits per weight, one scale per 32; CPU only" };
/// 4 bits a weight with minima.
pub static Q4_K: BlockFormat = BlockFormat {
    ggml: "Q4_K",
    name: "q4_k",
    help: "4.5 bits per weight, a scale and a minimum per 32, more exact than q4_0; rows of a multiple of 256; CPU only",
};

impl BlockFormat {
    /// The type of its blocks, of which a row has whole ones.
    pub(super) fn kind(&self) -> &'static TensorType {
        TensorType::named(self.ggml).expect("a type of GGUF")
    }

    /// The blocks of `weight_oi` `[O, I]`, of any floating-point dtype, on the CPU.
    pub(super) fn quantize(&self, weight_oi: &Tensor) -> Blocks {
        let kind = self.kind();
        let numbers = weight_oi.to_kind(Kind::Float).contiguous();
        let mut blocks = vec![];
        kind.encode(bytes::numbers(&numbers), &mut blocks);
        let row = blocks.len() as i64 / weight_oi.size()[0];
        Blocks { kind, codes_ob: Tensor::from_slice(&blocks).view([-1, row]) }
    }
}

impl StoredFormat for BlockFormat {
    fn bits(&self) -> u64 {
        StoredFormat::bits(self.kind())
    }

    fn bytes(&self, size_oi: [u64; 2]) -> u64 {
        StoredFormat::bytes(self.kind(), size_oi)
    }
}

impl QuantizedFormat for BlockFormat {
    fn name(&self) -> &'static str {
        self.name
    }

    fn help(&self) -> &'static str {
        self.help
    }
}
