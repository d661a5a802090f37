//! Masks of dropout (Srivastava et al. 2014) that depend only on the seed and the stream: a layer recomputed for its backward pass, or a
//! resumed run, drops the same inputs.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::Tensor;

/// Where the bits of a mask come from: ChaCha with 8 rounds, 16 bits for each number, in order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskStream {
    pub key: [u32; 8],
    pub stream: u64,
    /// Bits below it set a number to 0.
    pub threshold: i32,
    /// The mask of the others.
    pub kept: f32,
}

impl MaskStream {
    /// Of a fraction `p`, rounded to a multiple of 2⁻¹⁶.
    #[expect(clippy::cast_possible_truncation, reason = "p is below 1: 2^16 p fits, and float32 is enough")]
    pub fn new(p: f64, seed: u64, stream: u64) -> Self {
        let bytes = ChaCha8Rng::seed_from_u64(seed).get_seed();
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[4 * at + byte]));
        let (threshold, kept) = ((p * 65_536.0).round() as i32, (1.0 / (1.0 - p)) as f32);
        Self { key: std::array::from_fn(word), stream, threshold, kept }
    }
}

/// A mask of 0 or 1/(1 - p), with `x`'s size, dtype and device. Each `stream` of a seed has its own mask.
///
/// It is drawn here and not by libtorch, which draws one number at a time: that took a tenth of a training step of a small model.
pub fn mask(x: &Tensor, p: f64, seed: u64, stream: u64) -> Tensor {
    let MaskStream { threshold, kept, .. } = MaskStream::new(p, seed, stream);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let mut drawn = vec![0; 2 * x.numel()];
    rng.fill_bytes(&mut drawn);
    let values = drawn.as_chunks::<2>().0.iter().map(|&bytes| {
        let left_out = i32::from(u16::from_le_bytes(bytes)) < threshold;
        if left_out { 0.0 } else { kept }
    });
    let mask = Tensor::from_slice(&values.collect::<Vec<f32>>()).to_kind(x.kind()).view(x.size().as_slice());
    mask.to_device(x.device())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn a_part_is_left_out_and_the_mean_stays() {
        let x = Tensor::ones([200, 500], (Kind::Float, Device::Cpu));
        let y = mask(&x, 0.3, 1, 2);
        let zeros = y.eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        assert!((zeros - 0.3).abs() < 0.01, "{zeros}");
        assert!((y.mean(Kind::Double).double_value(&[]) - 1.0).abs() < 0.01);
    }

    #[test]
    fn the_same_numbers_draw_the_same_and_others_do_not() {
        let x = Tensor::ones([64, 9], (Kind::Float, Device::Cpu));
        assert_eq!(mask(&x, 0.5, 1, 2), mask(&x, 0.5, 1, 2));
        assert_ne!(mask(&x, 0.5, 1, 2), mask(&x, 0.5, 1, 3));
        assert_ne!(mask(&x, 0.5, 1, 2), mask(&x, 0.5, 2, 2));
    }
}
