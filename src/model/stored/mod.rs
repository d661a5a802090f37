//! Frozen weights of few bits (`[backbone] quantization`): quantised once while loading, dequantised for every product. Like
//! bitsandbytes' loaders it is the linear layers of the decoder that are quantised; embedding, norms and lm_head stay as they are.

// O outputs, I inputs
use std::fmt;

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

pub mod int8;
pub mod nf4;
mod slices;

use crate::fused::{self, dequantize};
use crate::nvidia::launch::Launch;
use crate::torch::rehearsal;

use int8::Int8;
use nf4::{AbsmaxBits, Nf4};

/// What weights are reduced to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// 4 bits a weight, and 8.1 bits of absmax for every 64: see [`nf4`].
    Nf4,
    /// 8 bits a weight, and 32 for every output: see [`int8`].
    Int8,
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nf4 => "nf4",
            Self::Int8 => "int8",
        })
    }
}

/// Quantises the weights of a backbone, which share its tables.
#[derive(Debug)]
pub enum Quantizer {
    /// 4 bits, with absmax of 8.
    Nf4(nf4::Tables),
    Int8,
}

impl Quantizer {
    /// For weights on `device`.
    pub fn new(quantization: Quantization, device: Device) -> Self {
        match quantization {
            Quantization::Nf4 => Self::Nf4(nf4::Tables::new(device)),
            Quantization::Int8 => Self::Int8,
        }
    }

    /// `weight_oi` is `[O, I]`, of any floating-point dtype.
    ///
    /// # Panics
    /// If the weight has another number of dimensions.
    pub fn quantize(&self, weight_oi: &Tensor) -> QuantizedWeight {
        let codes = match self {
            Self::Nf4(tables) => Codes::Nf4(Nf4::quantize(weight_oi, tables, AbsmaxBits::Eight)),
            Self::Int8 => Codes::Int8(Int8::quantize(weight_oi)),
        };
        let size = weight_oi.size().try_into().expect("a weight is [O, I]");
        QuantizedWeight { codes, size, kind: weight_oi.kind() }
    }
}

/// The weight of a linear layer. No gradient reaches it.
#[derive(Debug)]
pub struct QuantizedWeight {
    codes: Codes,
    size: [i64; 2],
    kind: Kind,
}

#[derive(Debug)]
enum Codes {
    Nf4(Nf4),
    Int8(Int8),
}

impl QuantizedWeight {
    /// `[O, I]` in `kind`; computed in float32.
    pub fn dequantize(&self, kind: Kind) -> Tensor {
        tch::no_grad(|| match fused::kernels(self.device(), kind) {
            Some(kernels) => {
                let weight_oi = Tensor::empty(self.size, (kind, self.device()));
                kernels.launch(&self.launch(&weight_oi));
                weight_oi
            }
            None => rehearsal::in_place_of(&["dequantize"], || self.by_libtorch(kind)),
        })
    }

    /// [`QuantizedWeight::dequantize`] by libtorch's calls: the oracle of the kernels.
    pub fn by_libtorch(&self, kind: Kind) -> Tensor {
        match &self.codes {
            Codes::Nf4(codes) => codes.dequantize(self.size, kind),
            Codes::Int8(codes) => codes.dequantize(kind),
        }
    }

    /// The launch that writes the weight to `weight_oi`.
    pub fn launch(&self, weight_oi: &Tensor) -> Launch {
        match &self.codes {
            Codes::Nf4(codes) => codes.launch(weight_oi),
            Codes::Int8(codes) => dequantize::int8(&codes.codes_oi, &codes.absmax_o, weight_oi),
        }
    }

    /// Bytes that it takes, without the tables that it shares.
    pub fn bytes(&self) -> usize {
        let tensors = match &self.codes {
            Codes::Nf4(codes) => codes.tensors(),
            Codes::Int8(codes) => codes.tensors().to_vec(),
        };
        tensors.iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum()
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
        match &self.codes {
            Codes::Nf4(codes) => codes.pairs.device(),
            Codes::Int8(codes) => codes.codes_oi.device(),
        }
    }
}
