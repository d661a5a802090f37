//! NF4: 4 bits a weight, quantiles of a normal distribution scaled by the absmax of 64 weights, and that absmax in 8 bits ("double
//! quantisation"): QLoRA (Dettmers et al. 2023, arXiv 2305.14314), section 3, code for code as bitsandbytes 0.50 computes it.

// n weights, C blocks of 64
use half::f16;
use tch::{Device, Kind, Tensor};

use super::format::{Codes, DequantizeKernel, Quantize, QuantizedFormat, StoredFormat};
use super::slices::{ranges, slice};
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::fused::dequantize::{self, Absmax};
use crate::gguf::types::NF4;
use crate::torch::bytes;
use crate::torch::optim::blockwise::{Blockwise, DynamicMap};

/// Weights that share an absmax.
pub const BLOCK: i64 = 64;

/// 4 bits a number, and 8.1 bits of absmax for every 64.
#[derive(Debug)]
pub struct Nf4Format;

impl StoredFormat for Nf4Format {
    fn bits(&self) -> u64 {
        4
    }

    fn bytes(&self, [outputs, inputs]: [u64; 2]) -> u64 {
        let block = BLOCK.unsigned_abs();
        let blocks = (outputs * inputs).div_ceil(block);
        blocks * (block / 2) + Blockwise::bytes(blocks) + 4
    }
}

impl QuantizedFormat for Nf4Format {
    fn name(&self) -> &'static str {
        "nf4"
    }

    fn help(&self) -> &'static str {
        "4-bit NormalFloat with double quantisation, as in QLoRA"
    }
}

/// Quantises weights on `device`, which share its tables.
pub(super) fn quantizer(device: Device) -> Quantize {
    let tables = Tables::new(device);
    Box::new(move |weight_oi| Box::new(Nf4::quantize(weight_oi, &tables, AbsmaxBits::Eight)))
}

/// The data type, from the paper's appendix E.
pub const CODE: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// What the weights of a backbone look up.
#[derive(Debug)]
pub struct Tables {
    /// `[15]`: the means of neighbouring codes. A weight between two bounds has the code between them; one on a bound, the lower.
    bounds: Tensor,
    /// `[256]`, int64: each the two float32 that a byte stands for, so that one look-up gives both.
    pairs: Tensor,
    /// Of the absmax.
    map: DynamicMap,
}

impl Tables {
    /// For weights on `device`.
    pub fn new(device: Device) -> Self {
        let bounds: Vec<f32> = CODE.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        let pairs: Vec<f32> = CODE.iter().flat_map(|&high| CODE.iter().flat_map(move |&low| [high, low])).collect();
        Self {
            bounds: Tensor::from_slice(&bounds).to_device(device),
            pairs: Tensor::from_slice(&pairs).view_dtype(Kind::Int64).to_device(device),
            map: DynamicMap::signed(device),
        }
    }
}

/// What the absmax of a block is kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbsmaxBits {
    /// 8, blockwise, of its difference to the mean: bitsandbytes' `compress_statistics`.
    Eight,
    ThirtyTwo,
}

/// A quantised tensor, flattened.
#[derive(Debug)]
pub struct Nf4 {
    /// `[C, 32]`, uint8: two codes each, the first in the high nibble.
    pub pairs: Tensor,
    pub scales: BlockScales,
    /// `[256]`, int64: the two float32 that each byte stands for.
    pub table: Tensor,
}

/// The absmax of each block.
#[derive(Debug)]
pub enum BlockScales {
    /// `[C]`, float32.
    Float32(Tensor),
    /// Their differences to their mean, quantised once more.
    EightBit {
        /// `[C]`.
        differences: Blockwise,
        /// A float32 scalar.
        mean: Tensor,
    },
}

impl Nf4 {
    /// Of a weight of any floating-point dtype and shape; what its last block lacks is 0.
    pub fn quantize(weight: &Tensor, tables: &Tables, bits: AbsmaxBits) -> Self {
        let device = weight.device();
        let (weight, n) = (weight.reshape(-1), weight.numel() as i64);
        let blocks = (n + BLOCK - 1) / BLOCK;
        let pairs = Tensor::empty([blocks, BLOCK / 2], (Kind::Uint8, device));
        let absmax = Tensor::empty([blocks], (Kind::Float, device));
        for (start, length) in ranges(n, slice(device)) {
            let (slice_codes, most) = quantize_blocks(&weight.narrow(0, start, length).to_kind(Kind::Float), tables);
            pairs.narrow(0, start / BLOCK, most.size()[0]).copy_(&slice_codes);
            absmax.narrow(0, start / BLOCK, most.size()[0]).copy_(&most);
        }
        let scales = match bits {
            AbsmaxBits::ThirtyTwo => BlockScales::Float32(absmax),
            AbsmaxBits::Eight => {
                let mean = absmax.mean(Kind::Float);
                BlockScales::EightBit { differences: Blockwise::quantize(&(absmax - &mean), &tables.map), mean }
            }
        };
        Self { pairs, scales, table: tables.pairs.shallow_clone() }
    }

    /// `[C]`, float32.
    pub fn absmax(&self) -> Tensor {
        match &self.scales {
            BlockScales::Float32(absmax) => absmax.shallow_clone(),
            BlockScales::EightBit { differences, mean } => differences.dequantize() + mean,
        }
    }
}

impl Codes for Nf4 {
    fn tensors(&self) -> Vec<&Tensor> {
        match &self.scales {
            BlockScales::Float32(absmax) => vec![&self.pairs, absmax],
            BlockScales::EightBit { differences, mean } => {
                vec![&self.pairs, &differences.codes, &differences.absmax, mean]
            }
        }
    }

    /// Code · absmax in float32, then rounded.
    fn dequantize(&self, size: [i64; 2], kind: Kind) -> Tensor {
        let (device, absmax) = (self.pairs.device(), self.absmax());
        let weight = Tensor::empty([self.pairs.numel() as i64 * 2], (kind, device));
        for (start, length) in ranges(self.pairs.size()[0], slice(device) / BLOCK) {
            let pairs = self.pairs.narrow(0, start, length).view(-1).to_kind(Kind::Int);
            let mut blocks = self.table.index_select(0, &pairs).view_dtype(Kind::Float).view([length, BLOCK]);
            let _ = blocks.g_mul_(&absmax.narrow(0, start, length).unsqueeze(1));
            weight.narrow(0, start * BLOCK, length * BLOCK).copy_(&blocks.view(-1));
        }
        weight.narrow(0, 0, size[0] * size[1]).view(size)
    }

    /// Values by 127 rounded to whole numbers, within 0.4 % of the absmax; the absmax in float16. In 8 bits where a row is no whole number of halves
    /// of blocks, of which each has one absmax.
    fn matrix(&self, size_oi: [i64; 2], arena: &mut Arena) -> Option<Matrix> {
        let shape = size_oi.map(|size| size.unsigned_abs() as usize);
        if self.pairs.device() != Device::Cpu {
            return None;
        }
        if !shape[1].is_multiple_of(NF4.numbers) {
            return Matrix::in_8_bits(bytes::numbers(&self.dequantize(size_oi, Kind::Float)), shape, arena);
        }
        let (absmax, pairs) = (self.absmax(), bytes::raw(&self.pairs));
        let absmax = bytes::numbers(&absmax);
        let largest = absmax.iter().fold(0.0f32, |largest, absmax| largest.max(*absmax));
        // So that no scale is too small for float16.
        let factor = if largest.is_normal() { 127.0 / largest } else { 1.0 };
        let halves = shape[0] * shape[1] / NF4.numbers;
        let mut blocks = Vec::with_capacity(halves * NF4.bytes);
        for (half, pairs) in pairs.as_chunks::<{ BLOCK as usize / 4 }>().0.iter().take(halves).enumerate() {
            blocks.extend(f16::from_f32(absmax[half / 2] * factor / 127.0).to_le_bytes());
            blocks.extend(pairs);
        }
        Matrix::from_blocks((&blocks, &NF4), |_| factor.recip(), shape, arena)
    }

    fn kernel(&self) -> Option<DequantizeKernel<'_>> {
        let absmax = match &self.scales {
            BlockScales::Float32(absmax) => Absmax::Float32(absmax),
            BlockScales::EightBit { differences, mean } => Absmax::EightBit { differences, mean },
        };
        Some(Box::new(move |weight_oi| dequantize::nf4(&self.pairs, &self.table, absmax, weight_oi)))
    }
}

/// `[n]` float32 to `[C, 32]` pairs and `[C]` absmax.
fn quantize_blocks(weight: &Tensor, tables: &Tables) -> (Tensor, Tensor) {
    let lacks = -(weight.numel() as i64) & (BLOCK - 1);
    let blocks = weight.constant_pad_nd([0, lacks]).view([-1, BLOCK]);
    let absmax = blocks.abs().amax([-1], false);
    // In a block of zeros 0 by 0 would be NaN.
    let scaled = blocks * absmax.clamp_min(1e-38).reciprocal().unsqueeze(1);
    let codes = scaled.bucketize(&tables.bounds, true, false).to_kind(Kind::Uint8).view([-1, BLOCK / 2, 2]);
    (codes.select(2, 0) * 16 + codes.select(2, 1), absmax)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::Generator;

    #[test]
    fn a_last_block_that_is_not_full_and_a_block_of_zeros_keep_their_values() {
        // 64 zeros, then codes themselves times 3: exact
        let mut values = vec![0f32; 64];
        values.extend(CODE.iter().cycle().take(70).map(|code| code * 3.0));
        let weight = Tensor::from_slice(&values).view([2, 67]);
        let nf4 = Nf4::quantize(&weight, &Tables::new(Device::Cpu), AbsmaxBits::ThirtyTwo);
        assert_eq!(nf4.pairs.size(), [3, 32]);
        assert_eq!(nf4.dequantize([2, 67], Kind::Float), weight);
    }

    #[test]
    fn slices_make_no_difference() {
        let n = 2 * super::super::slices::SLICE_ON_CPU + 640;
        let weight = Generator::seeded(3).normal(&[8, n / 8], (Kind::Float, Device::Cpu));
        let tables = Tables::new(Device::Cpu);
        let nf4 = Nf4::quantize(&weight, &tables, AbsmaxBits::Eight);
        let (pairs, absmax) = quantize_blocks(&weight.view(-1), &tables);
        assert_eq!(nf4.pairs, pairs);
        let table = Tensor::from_slice(&CODE);
        let codes = Tensor::stack(&[pairs.divide_scalar_mode(16, "floor"), pairs.remainder(16)], -1).view(-1);
        let plain = table.index_select(0, &codes.to_kind(Kind::Int)).view([-1, BLOCK]) * nf4.absmax().unsqueeze(1);
        assert_eq!(nf4.dequantize([8, n / 8], Kind::Float), plain.view([8, n / 8]));
        assert!((nf4.absmax() - absmax).abs().max().double_value(&[]) < 0.02);
    }
}
