//! Kernels of a decoding step on a CPU with AVX2 or AVX-512: slices in, slices out, no tensors.

pub mod team;

#[cfg(not(target_arch = "x86_64"))]
mod absent;
#[cfg(not(target_arch = "x86_64"))]
pub use absent::{arena, matrix};
#[cfg(not(target_arch = "x86_64"))]
pub(crate) use absent::{attention, rows};

#[cfg(target_arch = "x86_64")]
pub mod arena;
#[cfg(target_arch = "x86_64")]
pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod blocks;
#[cfg(target_arch = "x86_64")]
mod dots;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
pub mod matrix;
#[cfg(target_arch = "x86_64")]
mod outputs;
#[cfg(target_arch = "x86_64")]
pub(crate) mod rows;
#[cfg(target_arch = "x86_64")]
mod shared;
#[cfg(target_arch = "x86_64")]
pub mod tiles;

/// How numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    /// 4 bytes.
    Float32,
    /// 2 bytes.
    BFloat16,
}

impl Number {
    /// Of one number.
    pub fn bytes(self) -> usize {
        match self {
            Number::Float32 => 4,
            Number::BFloat16 => 2,
        }
    }

    /// Writes float32 numbers as these, as many as both have.
    #[inline(always)]
    pub fn write(self, x: &[f32], bytes: &mut [u8]) {
        match self {
            Number::Float32 => {
                for (to, x) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(x) {
                    *to = x.to_ne_bytes();
                }
            }
            Number::BFloat16 => {
                for (to, x) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(x) {
                    *to = bfloat16(*x).to_ne_bytes();
                }
            }
        }
    }
}

/// The bits of the nearest bfloat16, of two the even one; without a branch, so that the compiler makes vectors of a loop.
#[inline(always)]
fn bfloat16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    (if x.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

/// One layer's keys or values, `[G, S, D]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plane<'c> {
    /// As the cache stores them.
    pub(crate) bytes: &'c [u8],
    pub(crate) number: Number,
    /// S.
    pub(crate) room: usize,
    /// D.
    pub(crate) head_size: usize,
}

/// Shapes of an attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionShape {
    /// Q.
    pub(crate) queries: usize,
    /// G.
    pub(crate) groups: usize,
    /// Factor of the scores.
    pub(crate) scale: f32,
    /// c: scaled scores s become c·tanh(s / c).
    pub(crate) softcap: Option<f32>,
}

/// Whether this CPU has what the kernels are written for.
#[cfg(target_arch = "x86_64")]
pub fn available() -> bool {
    lanes::Instructions::detected().is_some()
}

/// Whether this CPU has what the kernels are written for.
#[cfg(not(target_arch = "x86_64"))]
pub fn available() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::bfloat16;

    #[test]
    fn numbers_are_rounded_as_the_half_crate_rounds_them() {
        let near = |high: u32| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(high << 16 | low));
        for x in (0..1 << 16).flat_map(near) {
            assert_eq!(bfloat16(x), bf16::from_f32(x).to_bits(), "{:#x}", x.to_bits());
        }
    }
}
