//! Building blocks of the kernels: vectors of 16 numbers, and lines of 64 bytes.
#![expect(unsafe_code, reason = "lines are bytes without holes")]

mod avx2;
mod avx512;

pub(crate) use avx2::Avx2;
pub(crate) use avx512::Avx512;

/// Numbers of a vector.
pub(super) const LANES: usize = 16;

/// 64 bytes, aligned.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct VectorLine([u8; 64]);

impl VectorLine {
    pub(super) const ZERO: Self = Self([0; 64]);
}

/// The instructions that the kernels use on this CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Instructions {
    /// AVX-512 with bfloat16.
    Avx512(Avx512),
    /// AVX2 with FMA.
    Avx2(Avx2),
}

impl Instructions {
    /// The fastest that this CPU has.
    pub(crate) fn detected() -> Option<Self> {
        Avx512::detected().map(Self::Avx512).or_else(|| Avx2::detected().map(Self::Avx2))
    }
}

/// Runs a kernel with the vectors of this CPU: `with_lanes!(lanes => kernel(lanes, …))`. Everything that the kernel calls has to be inlined
/// (`#[inline(always)]`): only then is it compiled for these instructions.
macro_rules! with_lanes {
    ($lanes:ident => $kernel:expr) => {
        match $crate::cpu::lanes::Instructions::detected()
            .expect("a matrix was made before, so the CPU has the kernels")
        {
            $crate::cpu::lanes::Instructions::Avx512($lanes) => $lanes.run(
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

/// Vectors of 16 float32 numbers. Whoever has a value of such a type may use its instructions.
pub(super) trait Lanes: Copy {
    /// 16 numbers.
    type Vector: Copy;

    /// Rows of x whose sums, with the weights, fill the registers ([`super::dots`]).
    const BLOCK_ROWS: usize;

    /// Runs a kernel compiled for these instructions.
    fn run<R>(self, kernel: impl FnOnce() -> R) -> R;

    /// The same number in all lanes.
    fn all(self, x: f32) -> Self::Vector;

    /// The first 16 numbers, or as many as there are, then zeros.
    fn load(self, x: &[f32]) -> Self::Vector;

    /// Writes the first 16 numbers, or as many as there is room for.
    fn store(self, out: &mut [f32], v: Self::Vector);

    /// a + b.
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// a - b.
    fn subtract(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// a · b.
    fn multiply(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// a / b.
    fn divide(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// a · b + c, rounded once.
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;

    /// The larger of each two; `b` if one of them is NaN.
    fn larger(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// The smaller of each two; `b` if one of them is NaN.
    fn smaller(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// To whole numbers.
    fn rounded(self, v: Self::Vector) -> Self::Vector;

    /// v · 2^powers, for whole numbers from -150 to 128.
    fn times_power_of_two(self, v: Self::Vector, powers: Self::Vector) -> Self::Vector;

    /// The sum of the lanes.
    fn sum(self, v: Self::Vector) -> f32;

    /// The largest of the lanes.
    fn largest(self, v: Self::Vector) -> f32;

    /// The sum of each vector's lanes: lane i of the result is vector i's. All are added up in the same order.
    fn sum_each(self, v: [Self::Vector; LANES]) -> Self::Vector;

    /// Which of up to 16 numbers are larger than `least`, or NaN: bit i is number i.
    fn above(self, x: &[f32], least: f32) -> u16;

    /// `count` numbers of a plane from number `at` on, as float32; then zeros.
    ///
    /// # Safety
    /// The numbers are in the plane.
    unsafe fn numbers_at<const BF16: bool>(self, plane: &[u8], at: usize, count: usize) -> Self::Vector;

    /// `sum` and the products of two lines of float32 numbers, or of bfloat16 numbers, of which two neighbours are added in a lane.
    fn add_product<const BF16: bool>(self, sum: Self::Vector, a: &VectorLine, b: &VectorLine) -> Self::Vector;

    /// A line of numbers rounded to bfloat16.
    fn bfloat16(self, x: &[f32; 32]) -> VectorLine;

    /// e^x, within 2 units in the last place, NaN of NaN (a polynomial of degree 6 on half a power of two, as in Cephes).
    #[inline(always)]
    fn exp(self, x: Self::Vector) -> Self::Vector {
        // Beyond these bounds e^x is 0 or infinite anyway. `x` is the second operand, so that NaN stays.
        let x = self.smaller(self.all(89.0), self.larger(self.all(-104.0), x));
        let powers = self.rounded(self.multiply(x, self.all(std::f32::consts::LOG2_E)));
        let minus = self.subtract(self.all(0.0), powers);
        let rest = self.multiply_add(minus, self.all(355.0 / 512.0), x); // ln 2 in two parts: the first product is exact
        let rest = self.multiply_add(minus, self.all(-2.121_944_4e-4), rest);
        let mut series = self.all(1.987_569_1e-4);
        for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
            series = self.multiply_add(series, rest, self.all(coefficient));
        }
        let value = self.multiply_add(series, self.multiply(rest, rest), self.add(rest, self.all(1.0)));
        self.times_power_of_two(value, powers)
    }
}

/// The bytes of lines.
pub(super) fn bytes_of(lines: &mut [VectorLine]) -> &mut [u8] {
    // SAFETY: lines are bytes without holes.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One number of each lane of what `kernel` returns, for each kind of vectors that this CPU has.
    macro_rules! of_each {
        ($lanes:ident => $vector:expr) => {{
            let mut found: Vec<[f32; LANES]> = vec![];
            let mut out = [0.0; LANES];
            if let Some($lanes) = Avx512::detected() {
                $lanes.run(|| $lanes.store(&mut out, $vector));
                found.push(out);
            }
            if let Some($lanes) = Avx2::detected() {
                $lanes.run(|| $lanes.store(&mut out, $vector));
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
        for sums in of_each!(lanes => lanes.sum_each(vectors.map(|v| lanes.load(&v)))) {
            assert_eq!(sums, vectors.map(|v| v.iter().sum::<f32>()));
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for step in -8700..8800 {
            let x = step as f32 / 100.0;
            let expected = f64::from(x).exp();
            for got in of_each!(lanes => lanes.exp(lanes.all(x))) {
                let off = (f64::from(got[0]) - expected).abs() / expected;
                assert!(off < 2.0 * f64::from(f32::EPSILON), "e^{x} = {}, expected {expected}", got[0]);
            }
        }
        for ends in of_each!(lanes => lanes.exp(lanes.load(&[f32::NEG_INFINITY, 200.0, f32::NAN]))) {
            assert_eq!((ends[0], ends[1]), (0.0, f32::INFINITY));
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
            let each = of_each!(lanes => {
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
            for whole in of_each!(lanes => lanes.load(&x[..len])) {
                assert_eq!((&whole[..len], whole[len..].iter().all(|&x| x == 0.0)), (&x[..len], true));
            }
            for lanes in
                Avx512::detected().map(Instructions::Avx512).into_iter().chain(Avx2::detected().map(Instructions::Avx2))
            {
                let mut out = [-1.0; LANES + 1];
                let larger = match lanes {
                    Instructions::Avx512(lanes) => lanes.run(|| {
                        lanes.store(&mut out[..len], lanes.load(&x));
                        lanes.above(&x[..len], 4.5)
                    }),
                    Instructions::Avx2(lanes) => lanes.run(|| {
                        lanes.store(&mut out[..len], lanes.load(&x));
                        lanes.above(&x[..len], 4.5)
                    }),
                };
                assert_eq!((&out[..len], out[len..].iter().all(|&x| x == -1.0)), (&x[..len], true));
                assert_eq!(larger, (0..len).filter(|&i| x[i] > 4.5).map(|i| 1 << i).sum::<u16>());
            }
        }
    }
}
