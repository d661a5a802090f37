//! How the weights of linear layers are stored: dense, or quantised to few bits. Frozen weights can be quantised (`[backbone] quantization`),
//! once while loading, and are dequantised for every product. Like bitsandbytes' loaders it is the linear layers of the decoder that are
//! quantised; embedding, norms and lm_head stay as they are.

// O outputs, I inputs
use std::fmt;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

pub mod blocks;
pub mod dense;
pub mod format;
pub mod int8;
pub mod nf4;
mod slices;
pub mod table;

use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::fused;
use crate::nvidia::launch::Launch;
use crate::torch::rehearsal;

use blocks::Blocks;
use dense::Dense;
use format::{Codes, Quantize, QuantizedFormat, StoredFormat};

/// What weights are reduced to. Recipes have [`QuantizedFormat::name`], the variant's name in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// See [`nf4`].
    Nf4,
    /// See [`int8`].
    Int8,
}

impl Quantization {
    /// All of them, those of fewest bits first.
    pub const ALL: [Self; 2] = [Self::Nf4, Self::Int8];

    /// What its format says of itself.
    pub fn format(self) -> &'static dyn QuantizedFormat {
        match self {
            Self::Nf4 => &nf4::Nf4Format,
            Self::Int8 => &int8::Int8Format,
        }
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.format().name())
    }
}

/// The format of the decoder's linear layers: `dense` unless they are quantised.
pub fn stored_format(quantization: Option<Quantization>, dense: &Dense) -> &dyn StoredFormat {
    quantization.map_or(dense, |quantization| quantization.format())
}

/// Quantises the weights of a backbone, which share its tables.
pub struct Quantizer(Quantize);

impl Quantizer {
    /// For weights on `device`.
    pub fn new(quantization: Quantization, device: Device) -> Self {
        Self(match quantization {
            Quantization::Nf4 => nf4::quantizer(device),
            Quantization::Int8 => int8::quantizer(),
        })
    }

    /// `weight_oi` is `[O, I]`, of any floating-point dtype.
    ///
    /// # Panics
    /// If the weight has another number of dimensions.
    pub fn quantize(&self, weight_oi: &Tensor) -> QuantizedWeight {
        let size = weight_oi.size().try_into().expect("a weight is [O, I]");
        QuantizedWeight { codes: self.0(weight_oi), blocks: None, size, kind: weight_oi.kind() }
    }
}

impl QuantizedWeight {
    /// Of a GGUF file, which stand for numbers of `kind` in a pass.
    pub fn from_blocks(blocks: Blocks, kind: Kind) -> Self {
        Self { size: blocks.size(), codes: Box::new(blocks.shallow_clone()), blocks: Some(blocks), kind }
    }
}

/// The weight of a linear layer. No gradient reaches it.
#[derive(Debug)]
pub struct QuantizedWeight {
    codes: Box<dyn Codes>,
    /// The same codes, if they are blocks of a GGUF file.
    blocks: Option<Blocks>,
    size: [i64; 2],
    kind: Kind,
}

impl QuantizedWeight {
    /// `[O, I]` in `kind`; computed in float32.
    pub fn dequantize(&self, kind: Kind) -> Tensor {
        tch::no_grad(|| {
            let Some(launch) = self.codes.kernel() else { return self.by_libtorch(kind) };
            match fused::kernels(self.device(), kind) {
                Some(kernels) => {
                    let weight_oi = Tensor::empty(self.size, (kind, self.device()));
                    kernels.launch(&launch(&weight_oi));
                    weight_oi
                }
                None => rehearsal::in_place_of(&["dequantize"], || self.by_libtorch(kind)),
            }
        })
    }

    /// [`QuantizedWeight::dequantize`] by libtorch's calls: the oracle of the kernels.
    pub fn by_libtorch(&self, kind: Kind) -> Tensor {
        self.codes.dequantize(self.size, kind)
    }

    /// The launch that writes the weight to `weight_oi`, if its format has a kernel.
    pub fn launch(&self, weight_oi: &Tensor) -> Option<Launch> {
        Some(self.codes.kernel()?(weight_oi))
    }

    /// Whether it is in the blocks of a GGUF file.
    pub fn is_in_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    /// This weight with the outputs of another one below its own, if both are in blocks of one type.
    pub fn above(&self, other: &Self) -> Option<Self> {
        let (blocks, others) = self.blocks.as_ref().zip(other.blocks.as_ref()).filter(|(a, b)| a.kind == b.kind)?;
        let codes_ob = Tensor::cat(&[&blocks.codes_ob, &others.codes_ob], 0);
        Some(Self::from_blocks(Blocks { kind: blocks.kind, codes_ob }, self.kind))
    }

    /// The weight for the CPU's own kernels, if these multiply its codes.
    pub fn matrix(&self, arena: &mut Arena) -> Option<Matrix> {
        self.codes.matrix(self.size, arena)
    }

    /// Bytes that it takes, without the tables that it shares.
    pub fn bytes(&self) -> usize {
        let tensor_bytes = |tensor: &&Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.codes.tensors().iter().map(tensor_bytes).sum()
    }

    /// `[O, I]` as numbers.
    pub fn size(&self) -> [i64; 2] {
        self.size
    }

    /// The dtype that it had.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        self.codes.tensors()[0].device()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_has_the_name_of_the_format() {
        for quantization in Quantization::ALL {
            assert_eq!(serde_json::to_value(quantization).unwrap(), quantization.to_string());
        }
    }

    #[test]
    fn a_format_says_the_bytes_that_its_weights_take() {
        for quantization in Quantization::ALL {
            for size in [[1, 1], [3, 67], [64, 64], [129, 256]] {
                let weight_oi = Tensor::ones(size, (Kind::Float, Device::Cpu));
                let weight = Quantizer::new(quantization, Device::Cpu).quantize(&weight_oi);
                let planned = quantization.format().bytes(size.map(i64::unsigned_abs));
                assert_eq!(weight.bytes() as u64, planned, "{quantization} {size:?}");
            }
        }
    }
}
