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
pub mod ggml;
pub mod int8;
pub mod nf4;
mod slices;
pub mod table;

use crate::cpu;
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::fused;
use crate::model::block_spec::{BlockSpec, LinearSpec};
use crate::nvidia::launch::Launch;
use crate::torch::rehearsal;

use blocks::Blocks;
use dense::Dense;
use format::{Codes, Quantize, QuantizedFormat, StoredFormat};
use ggml::BlockFormat;

/// What weights are reduced to. Recipes have [`QuantizedFormat::name`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// See [`nf4`].
    Nf4,
    /// See [`int8`].
    Int8,
    /// See [`ggml`], also of the next ones.
    #[serde(rename = "q8_0")]
    Q8,
    #[serde(rename = "q4_0")]
    Q4,
    #[serde(rename = "q4_k")]
    Q4K,
}

/// Why weights cannot be quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuantizationError {
    #[error("{0} weights are for a CPU: quantise to nf4 or int8 on this device")]
    Device(Quantization),
    #[error(
        "{quantization} has blocks of {numbers} weights of a row, but {part} has rows of {inputs}: quantise to {}",
        if inputs % 32 == 0 { "q8_0 or q4_0" } else { "nf4 or int8" }
    )]
    Row { quantization: Quantization, numbers: i64, part: &'static str, inputs: i64 },
}

impl Quantization {
    /// All of them, those of fewest bits first.
    pub const ALL: [Self; 5] = [Self::Nf4, Self::Q4, Self::Q4K, Self::Int8, Self::Q8];

    /// What its format says of itself.
    pub fn format(self) -> &'static dyn QuantizedFormat {
        match self {
            Self::Nf4 => &nf4::Nf4Format,
            Self::Int8 => &int8::Int8Format,
            Self::Q8 | Self::Q4 | Self::Q4K => self.blocks().expect("in blocks"),
        }
    }

    /// Its format, if it is one of blocks.
    fn blocks(self) -> Option<&'static BlockFormat> {
        match self {
            Self::Nf4 | Self::Int8 => None,
            Self::Q8 => Some(&ggml::Q8_0),
            Self::Q4 => Some(&ggml::Q4_0),
            Self::Q4K => Some(&ggml::Q4_K),
        }
    }

    /// Checks that the linear layers of a block can be quantised, on these devices.
    ///
    /// # Errors
    /// [`QuantizationError`] says what does not fit.
    pub fn check(self, block: &BlockSpec, mut devices: impl Iterator<Item = Device>) -> Result<(), QuantizationError> {
        let Some(format) = self.blocks() else { return Ok(()) };
        if devices.any(|device| device != Device::Cpu) {
            return Err(QuantizationError::Device(self));
        }
        let (linears, numbers) = (block.linears(), format.kind().numbers as i64);
        match linears.all().find(|linear| linear.size[1] % numbers != 0) {
            None => Ok(()),
            Some(LinearSpec { part, size: [_, inputs], .. }) => {
                Err(QuantizationError::Row { quantization: self, numbers, part, inputs })
            }
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
pub enum Quantizer {
    Codes(Quantize),
    Blocks(&'static BlockFormat),
}

impl Quantizer {
    /// For weights on `device`.
    pub fn new(quantization: Quantization, device: Device) -> Self {
        match quantization.blocks() {
            Some(format) => Self::Blocks(format),
            None if quantization == Quantization::Nf4 => Self::Codes(nf4::quantizer(device)),
            None => Self::Codes(int8::quantizer()),
        }
    }

    /// `weight_oi` is `[O, I]`, of any floating-point dtype.
    ///
    /// # Panics
    /// If the weight has another number of dimensions, or its rows are not whole blocks ([`Quantization::check`]).
    pub fn quantize(&self, weight_oi: &Tensor) -> QuantizedWeight {
        let size = weight_oi.size().try_into().expect("a weight is [O, I]");
        match self {
            Self::Codes(quantize) => {
                QuantizedWeight { codes: quantize(weight_oi), blocks: None, size, kind: weight_oi.kind() }
            }
            Self::Blocks(format) => QuantizedWeight::from_blocks(format.quantize(weight_oi), weight_oi.kind()),
        }
    }
}

impl QuantizedWeight {
    /// Of blocks, which stand for numbers of `kind` in a pass.
    pub fn from_blocks(blocks: Blocks, kind: Kind) -> Self {
        Self { size: blocks.size(), codes: Box::new(blocks.shallow_clone()), blocks: Some(blocks), kind }
    }
}

/// The weight of a linear layer. No gradient reaches it.
#[derive(Debug)]
pub struct QuantizedWeight {
    codes: Box<dyn Codes>,
    /// The same codes, if they are blocks of GGUF.
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

    /// Whether it is in the blocks of GGUF.
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
        if cpu::available() { self.codes.matrix(self.size, arena) } else { None }
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
    use crate::cpu::team::Team;
    use crate::torch::{Generator, bytes};

    #[test]
    fn a_recipe_has_the_name_of_the_format() {
        for quantization in Quantization::ALL {
            assert_eq!(serde_json::to_value(quantization).unwrap(), quantization.to_string());
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn products_on_the_cpus_kernels_are_nearly_those_of_the_numbers() {
        let mut generator = Generator::seeded(2);
        for quantization in Quantization::ALL {
            // Rows of 70 are no whole blocks.
            for size in [[5, 70], [40, 96], [19, 512]] {
                let weight_oi = generator.normal(&size, (Kind::Float, Device::Cpu)) * 0.02;
                if quantization.blocks().is_some_and(|blocks| size[1] % blocks.kind().numbers as i64 != 0) {
                    continue;
                }
                let weight = Quantizer::new(quantization, Device::Cpu).quantize(&weight_oi);
                let matrix = weight.matrix(&mut Arena::default()).expect("on the CPU");
                let x_ni = generator.normal(&[7, size[1]], (Kind::Float, Device::Cpu));
                let expected = x_ni.linear(&weight.dequantize(Kind::Float), None::<&Tensor>);
                let mut y_no = vec![0.0; 7 * matrix.outputs()];
                matrix.multiply(bytes::numbers(&x_ni), &mut y_no, Team::shared());
                let error = (Tensor::from_slice(&y_no).view_as(&expected) - &expected).norm() / expected.norm();
                assert!(error.double_value(&[]) < 0.01, "{quantization} {size:?}: {error}");
            }
        }
    }

    #[test]
    fn a_format_says_the_bytes_that_its_weights_take() {
        for quantization in Quantization::ALL {
            for size in [[1, 1], [3, 67], [64, 64], [129, 256]] {
                if quantization.blocks().is_some_and(|blocks| size[1] % blocks.kind().numbers as i64 != 0) {
                    continue;
                }
                let weight_oi = Tensor::ones(size, (Kind::Float, Device::Cpu));
                let weight = Quantizer::new(quantization, Device::Cpu).quantize(&weight_oi);
                let planned = quantization.format().bytes(size.map(i64::unsigned_abs));
                assert_eq!(weight.bytes() as u64, planned, "{quantization} {size:?}");
            }
        }
    }
}
