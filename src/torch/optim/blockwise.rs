//! 8-bit dynamic blockwise quantization (Dettmers et al. 2021, arXiv 2110.02861): one byte per element, one absmax per
//! block.
//!
//! Codes equal those of bitsandbytes 0.50 on the CPU, which rounds a value to the nearest of 65,536 evenly spaced
//! points and looks up that point's nearest code (its CUDA kernels search for the code nearest to the value itself). A
//! value below 1.5e-5 of its block's absmax therefore keeps only its sign. A 0 becomes such a value too, which keeps a
//! small second moment in a block of larger ones from vanishing in Adam's denominator.

// n elements, C blocks of 256
use tch::{Device, Kind, Tensor};

/// Elements that share an absmax.
pub const BLOCK: i64 = 256;
/// Last index of the evenly spaced points in [-1, 1] whose nearest codes are tabulated.
const GRID: u16 = u16::MAX;

/// 256 ascending numbers in [-1, 1], indexed by codes.
#[derive(Debug)]
pub struct DynamicMap {
    /// `[256]`, float32.
    pub codes: Tensor,
    /// `[65536]`, uint8: the code nearest to each point of the grid.
    pub nearest: Tensor,
}

impl DynamicMap {
    /// A map for signed numbers.
    pub fn signed(device: Device) -> Self {
        let magnitudes = magnitudes(|decade| 1 << decade);
        let codes = magnitudes.iter().flat_map(|&magnitude| [magnitude, -magnitude]);
        Self::new(codes.collect(), device)
    }

    /// A map for numbers of at least 0: without a sign bit, its steps are half as wide.
    pub fn unsigned(device: Device) -> Self {
        Self::new(magnitudes(|decade| 2 << decade), device)
    }

    fn new(mut codes: Vec<f32>, device: Device) -> Self {
        codes.extend([0.0, 1.0]);
        codes.sort_by(f32::total_cmp);
        let nearest = nearest_on_grid(&codes);
        let on_device = |tensor: Tensor| tensor.to_device(device);
        Self { codes: on_device(Tensor::from_slice(&codes)), nearest: on_device(Tensor::from_slice(&nearest)) }
    }

    /// A shallow copy of the map.
    #[must_use]
    pub fn shallow_clone(&self) -> Self {
        Self { codes: self.codes.shallow_clone(), nearest: self.nearest.shallow_clone() }
    }

    /// `[n]` codes and `[C]` absmax of `values` (float32, any shape).
    fn quantize(&self, values: &Tensor) -> (Tensor, Tensor) {
        let n = values.numel() as i64;
        let blocks = in_blocks(&values.view(-1));
        let absmax = blocks.abs().amax([-1], false);
        // 0 times infinity would be NaN; in a block of zeros every code means 0.
        let inverse = absmax.clamp_min(f64::from(f32::MIN_POSITIVE)).reciprocal();
        let steps = f64::from(GRID) / 2.0; // from -1 to 0
        let mut scaled = blocks * inverse.unsqueeze(1);
        let _ = scaled.g_add_scalar_(1.0).g_mul_scalar_(steps).g_add_scalar_(0.5);
        let codes = self.nearest.index_select(0, &scaled.to_kind(Kind::Int).view(-1).narrow(0, 0, n));
        (codes, absmax)
    }

    /// `[n]`, float32.
    fn dequantize(&self, codes: &Tensor, absmax: &Tensor) -> Tensor {
        let values = self.codes.index_select(0, &codes.to_kind(Kind::Int));
        let mut blocks = in_blocks(&values);
        let _ = blocks.g_mul_(&absmax.unsqueeze(1));
        blocks.view(-1).narrow(0, 0, values.numel() as i64)
    }
}

/// `[n]` to `[C, 256]`; pads the last block with 0.
fn in_blocks(values: &Tensor) -> Tensor {
    match values.numel() as i64 % BLOCK {
        0 => values.view([-1, BLOCK]),
        rest => values.constant_pad_nd([0, BLOCK - rest]).view([-1, BLOCK]),
    }
}

/// The paper's dynamic data type without 0 and 1: seven decades from 1e-6 to 1, the `i`-th with `fractions(i)` numbers,
/// which are the means of evenly spaced bounds.
fn magnitudes(fractions: impl Fn(i32) -> i64) -> Vec<f32> {
    const DECADES: i32 = 7;
    let mut all = vec![];
    for decade in 0..DECADES {
        let bounds = Tensor::linspace(0.1, 1.0, fractions(decade) + 1, (Kind::Float, Device::Cpu));
        let bounds = Vec::<f32>::try_from(bounds).expect("a vector of float32");
        let scale = 10f64.powi(decade + 1 - DECADES) as f32;
        all.extend(bounds.windows(2).map(|pair| scale * ((pair[0] + pair[1]) / 2.0)));
    }
    all
}

/// The code nearest to each of the 65,536 points; if two are equally near, the lower one.
fn nearest_on_grid(codes: &[f32]) -> Vec<u8> {
    let midpoints: Vec<f32> = codes.windows(2).map(|pair| 0.5 * (pair[0] + pair[1])).collect();
    let point = |i: u16| -1.0 + 2.0 * f32::from(i) / f32::from(GRID);
    let nearest = |i: u16| midpoints.partition_point(|&midpoint| midpoint < point(i));
    (0..=GRID).map(|i| u8::try_from(nearest(i)).expect("255 midpoints")).collect()
}

/// A quantized tensor, flattened.
#[derive(Debug)]
pub struct Blockwise {
    /// What the codes mean.
    pub map: DynamicMap,
    /// `[n]`, uint8.
    pub codes: Tensor,
    /// `[C]`, float32.
    pub absmax: Tensor,
}

impl Blockwise {
    /// Bytes of so many numbers.
    pub fn bytes(numbers: u64) -> u64 {
        numbers + 4 * numbers.div_ceil(BLOCK.unsigned_abs())
    }

    /// `n` zeros.
    pub fn zeros(n: i64, map: &DynamicMap) -> Self {
        let zeros = |size: i64, kind| Tensor::zeros([size], (kind, map.codes.device()));
        let (codes, absmax) = (zeros(n, Kind::Uint8), zeros((n + BLOCK - 1) / BLOCK, Kind::Float));
        Self { map: map.shallow_clone(), codes, absmax }
    }

    /// Quantizes `values`, contiguous float32 of any shape.
    pub fn quantize(values: &Tensor, map: &DynamicMap) -> Self {
        let (codes, absmax) = map.quantize(values);
        Self { map: map.shallow_clone(), codes, absmax }
    }

    /// Replaces the values by as many others.
    pub fn store(&mut self, values: &Tensor) {
        let (codes, absmax) = self.map.quantize(values);
        self.codes.copy_(&codes);
        self.absmax.copy_(&absmax);
    }

    /// `[n]`, float32.
    pub fn dequantize(&self) -> Tensor {
        self.map.dequantize(&self.codes, &self.absmax)
    }

    /// Views of `size` elements each, the last one possibly shorter; `size` is a multiple of [`BLOCK`].
    pub fn split(&self, size: i64) -> Vec<Self> {
        let pieces = self.codes.split(size, 0).into_iter().zip(self.absmax.split(size / BLOCK, 0));
        pieces.map(|(codes, absmax)| Self { map: self.map.shallow_clone(), codes, absmax }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::torch::Generator;

    /// Quantizes one number at a time.
    fn by_hand(values: &[f32], codes: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let absmax: Vec<f32> =
            values.chunks(256).map(|block| block.iter().fold(0f32, |most, x| most.max(x.abs()))).collect();
        let code = |(i, x): (usize, &f32)| {
            let scaled = x * (1.0 / absmax[i / 256].max(f32::MIN_POSITIVE));
            let point = -1.0 + 2.0 * ((scaled + 1.0) * 32767.5 + 0.5).floor() / 65535.0;
            let distance = |code: &&f32| (f64::from(point) - f64::from(**code)).abs();
            let nearest = codes.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("256 codes");
            codes.iter().position(|code| code == nearest).expect("one of them") as u8
        };
        (values.iter().enumerate().map(code).collect(), absmax)
    }

    #[test]
    fn codes_equal_those_of_a_plain_loop_also_in_a_last_block_that_is_not_full() {
        for (map, signed) in [(DynamicMap::signed(Device::Cpu), true), (DynamicMap::unsigned(Device::Cpu), false)] {
            let values = Generator::seeded(1).normal(&[1000], (Kind::Float, Device::Cpu)).pow_tensor_scalar(3);
            let values = if signed { values } else { values.square() };
            let _ = values.narrow(0, 256, 256).zero_(); // a block of zeros
            let quantized = Blockwise::quantize(&values, &map);
            let codes = Vec::<f32>::try_from(&map.codes).expect("a vector");
            let (expected, absmax) = by_hand(&Vec::<f32>::try_from(&values).expect("a vector"), &codes);
            assert_eq!(Vec::<u8>::try_from(&quantized.codes).expect("a vector"), expected);
            assert_eq!(Vec::<f32>::try_from(&quantized.absmax).expect("a vector"), absmax);
            let dequantized = Vec::<f32>::try_from(quantized.dequantize()).expect("a vector");
            let by_hand = expected.iter().enumerate().map(|(i, &code)| codes[usize::from(code)] * absmax[i / 256]);
            assert_eq!(dequantized, by_hand.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_code_is_the_code_of_what_it_stands_for() {
        let map = DynamicMap::signed(Device::Cpu);
        // Values closer to 0 than a step of the grid share a code.
        let values = map.codes.where_self(&map.codes.abs().ge(1e-4), &Tensor::from(1f32));
        let quantized = Blockwise::quantize(&values, &map);
        assert_eq!(quantized.dequantize(), values);
    }

    #[test]
    fn pieces_are_views() {
        let mut whole = Blockwise::zeros(600, &DynamicMap::signed(Device::Cpu));
        for mut piece in whole.split(512) {
            piece.store(&piece.dequantize().ones_like());
        }
        assert_eq!(whole.dequantize(), Tensor::ones([600], (Kind::Float, Device::Cpu)));
        whole.store(&Tensor::zeros([600], (Kind::Float, Device::Cpu)));
        assert_eq!(whole.dequantize().abs().max().double_value(&[]), 0.0);
    }
}
