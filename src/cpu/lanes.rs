//! The vectors that this CPU has.

use std::iter;

mod avx2;
mod avx512;
mod vector;

use avx2::Avx2;
pub(super) use avx512::Avx512;
pub(super) use vector::{LANES, Lanes, VectorLine, bytes_in, bytes_of, fetch};

/// The instructions that the kernels use on this CPU.
#[derive(Debug, Clone, Copy)]
pub(super) enum Instructions {
    /// AVX-512 with bfloat16.
    Avx512(Avx512),
    /// AVX2 with FMA and AVX-VNNI.
    AvxVnni(Avx2<true>),
    /// AVX2 with FMA.
    Avx2(Avx2<false>),
}

impl Instructions {
    /// The fastest that this CPU has.
    pub(super) fn detected() -> Option<Self> {
        Self::all_detected().next()
    }

    /// All that this CPU has, the fastest first.
    pub(super) fn all_detected() -> impl Iterator<Item = Self> {
        let avx2 = || Avx2::detected().map(Self::AvxVnni).into_iter().chain(Avx2::detected().map(Self::Avx2));
        Avx512::detected().map(Self::Avx512).into_iter().chain(iter::once_with(avx2).flatten())
    }
}

/// Runs a kernel with the vectors of this CPU: `with_lanes!(lanes => kernel(lanes, …))`, or with those of given [`Instructions`]. Everything that
/// the kernel calls has to be inlined (`#[inline(always)]`): only then is it compiled for these instructions.
macro_rules! with_lanes {
    ($lanes:ident => $kernel:expr) => {
        with_lanes!(
            $crate::cpu::lanes::Instructions::detected()
                .expect("a matrix was made before, so the CPU has the kernels"),
            $lanes => $kernel
        )
    };
    ($instructions:expr, $lanes:ident => $kernel:expr) => {
        match $instructions {
            $crate::cpu::lanes::Instructions::Avx512($lanes) => $lanes.run(
                #[inline(always)]
                || $kernel,
            ),
            $crate::cpu::lanes::Instructions::AvxVnni($lanes) => $lanes.run(
                #[inline(always)]
                || $kernel,
            ),
            $crate::cpu::lanes::Instructions::Avx2($lanes) => $lanes.run(
                #[inline(always)]
                || $kernel,
            ),
        }
    };
}
pub(super) use with_lanes;

#[cfg(test)]
mod tests {
    use super::*;

    /// One number of each lane of what `kernel` returns, for each kind of vectors that this CPU has.
    macro_rules! by_lanes {
        ($lanes:ident => $vector:expr) => {{
            let mut found: Vec<[f32; LANES]> = vec![];
            let mut out = [0.0; LANES];
            for instructions in Instructions::all_detected() {
                with_lanes!(instructions, $lanes => $lanes.store(&mut out, $vector));
                found.push(out);
            }
            assert!(!found.is_empty());
            found
        }};
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn each_lane_is_the_sum_of_its_vector() {
        let vectors: [[f32; LANES]; LANES] =
            std::array::from_fn(|v| std::array::from_fn(|lane| (v * 100 + lane * lane) as f32));
        for sums in by_lanes!(lanes => lanes.sum_each(vectors.map(|v| lanes.load(&v)))) {
            assert_eq!(sums, vectors.map(|v| v.iter().sum::<f32>()));
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for step in -8700..8800 {
            let x = step as f32 / 100.0;
            let expected = f64::from(x).exp();
            for got in by_lanes!(lanes => lanes.exp(lanes.all(x))) {
                let off = (f64::from(got[0]) - expected).abs() / expected;
                assert!(off < 2.0 * f64::from(f32::EPSILON), "e^{x} = {}, expected {expected}", got[0]);
            }
        }
        for ends in by_lanes!(lanes => lanes.exp(lanes.load(&[f32::NEG_INFINITY, 200.0, f32::NAN, -88.0]))) {
            assert_eq!((ends[0], ends[1], ends[3]), (0.0, f32::INFINITY, 0.0), "no denormal numbers");
            assert!(ends[2].is_nan());
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn all_vectors_compute_the_same_bits() {
        let numbers = |seed: usize| -> [f32; LANES] {
            std::array::from_fn(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0)
        };
        for seed in 0..200 {
            let (a, b) = (numbers(seed), numbers(seed + 1));
            let each = by_lanes!(lanes => {
                let (a, b) = (lanes.load(&a), lanes.load(&b));
                let sums = lanes.sum_each([lanes.multiply(a, b); LANES]);
                let quotient = lanes.divide(lanes.exp(a), lanes.larger(lanes.all(0.5), b));
                lanes.multiply_add(quotient, sums, lanes.all(lanes.sum(a) + lanes.largest(b)))
            });
            assert!(each.iter().all(|v| v == &each[0]), "{each:?}");
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn parts_of_a_vector_are_read_and_written() {
        let x: [f32; LANES] = std::array::from_fn(|i| i as f32 + 1.0);
        for len in 0..=LANES {
            for loaded in by_lanes!(lanes => lanes.load(&x[..len])) {
                assert_eq!((&loaded[..len], loaded[len..].iter().all(|&x| x == 0.0)), (&x[..len], true));
            }
            for instructions in Instructions::all_detected() {
                let mut out = [-1.0; LANES + 1];
                let larger = with_lanes!(instructions, lanes => {
                    lanes.store(&mut out[..len], lanes.load(&x));
                    lanes.above(&x[..len], 4.5)
                });
                assert_eq!((&out[..len], out[len..].iter().all(|&x| x == -1.0)), (&x[..len], true));
                assert_eq!(larger, (0..len).filter(|&i| x[i] > 4.5).map(|i| 1 << i).sum::<u16>());
            }
        }
    }
}
