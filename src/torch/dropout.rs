//! Dropout (Srivastava et al. 2014) with a mask that depends only on the seed and the stream: a layer recomputed for its backward pass, or a
//! resumed run, drops the same inputs.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tch::{Device, Tensor};

use super::Generator;

/// Sets a fraction `p` of `x` to 0 and scales the rest by 1/(1 - p). Each `stream` of a seed has its own mask.
///
/// On the CPU the mask is drawn here, with `p` rounded to a multiple of 2⁻¹⁶: libtorch draws one number at a time, which took a tenth of a
/// training step of a small model.
pub fn dropout(x: &Tensor, p: f64, seed: u64, stream: u64) -> Tensor {
    if x.device() == Device::Cpu {
        return x * mask(x, p, seed, stream);
    }
    Generator::seeded(seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15)).dropout(x, p)
}

/// A mask of 0 or 1/(1 - p), with `x`'s size and dtype.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "p is below 1: 2^16 p fits, and float32 is enough"
)]
fn mask(x: &Tensor, p: f64, seed: u64, stream: u64) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let mut drawn = vec![0; 2 * x.numel()];
    rng.fill_bytes(&mut drawn);
    let (threshold, kept) = ((p * 65_536.0).round() as u32, (1.0 / (1.0 - p)) as f32);
    let values = drawn.as_chunks::<2>().0.iter().map(|&bytes| {
        let left_out = u32::from(u16::from_le_bytes(bytes)) < threshold;
        if left_out { 0.0 } else { kept }
    });
    Tensor::from_slice(&values.collect::<Vec<f32>>()).to_kind(x.kind()).view(x.size().as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn a_part_is_left_out_and_the_mean_stays() {
        let x = Tensor::ones([200, 500], (Kind::Float, Device::Cpu));
        let y = dropout(&x, 0.3, 1, 2);
        let zeros = y.eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
        assert!((zeros - 0.3).abs() < 0.01, "{zeros}");
        assert!((y.mean(Kind::Double).double_value(&[]) - 1.0).abs() < 0.01);
    }

    #[test]
    fn the_same_numbers_draw_the_same_and_others_do_not() {
        let x = Tensor::ones([64, 9], (Kind::Float, Device::Cpu));
        assert_eq!(dropout(&x, 0.5, 1, 2), dropout(&x, 0.5, 1, 2));
        assert_ne!(dropout(&x, 0.5, 1, 2), dropout(&x, 0.5, 1, 3));
        assert_ne!(dropout(&x, 0.5, 1, 2), dropout(&x, 0.5, 2, 2));
    }
}
