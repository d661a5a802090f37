//! What a vector of 16 numbers can do, and lines of 64 bytes.
#![expect(unsafe_code, reason = "lines are bytes without holes")]

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// Numbers of a vector.
pub(in crate::cpu) const LANES: usize = 16;

/// 64 bytes, aligned.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct VectorLine(pub(in crate::cpu) [u8; 64]);

impl VectorLine {
    pub(in crate::cpu) const ZERO: Self = Self([0; 64]);
}

/// 1.5 · 2^23: adding it leaves a small number, rounded to a whole one, in the lowest bits.
pub(in crate::cpu) const ROUNDING: f32 = 12_582_912.0;

/// Vectors of 16 float32 numbers. Whoever has a value of such a type may use its instructions.
pub(in crate::cpu) trait Lanes: Copy {
    /// 16 numbers.
    type Vector: Copy;

    /// Rows of x whose sums, with the weights, fill the registers ([`crate::cpu::dots`]).
    const BLOCK_ROWS: usize;

    /// Queries whose products with a key fill the registers ([`crate::cpu::attention`]).
    const QUERIES: usize;

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

    /// `count` numbers of a plane from number `at` on, up to 32, as float32; then zeros. Those of bfloat16 are in turn in the first and in the second
    /// vector.
    ///
    /// # Safety
    /// The numbers are in the plane.
    unsafe fn step_at<const BF16: bool>(self, plane: &[u8], at: usize, count: usize) -> [Self::Vector; 2];

    /// Adds the products of `R` rows of x and `T` rows of weights, a line of each row of weights, to `sums`. In bfloat16 a lane has two neighbours:
    /// the product of the first is added, then that of the second.
    fn add_products<const BF16: bool, const R: usize, const T: usize>(
        self,
        sums: &mut [[Self::Vector; T]; R],
        w: &[VectorLine],
        x: &[VectorLine],
    );

    /// Lines of a row of x for a line of bfloat16 weights.
    const BFLOAT16_X_LINES: usize;

    /// Numbers of x, rounded to bfloat16, as [`Lanes::add_products`] reads them: [`Lanes::BFLOAT16_X_LINES`] lines.
    fn write_bfloat16_x(self, x: &[f32; 32], lines: &mut [VectorLine]);

    /// Rows of x whose sums fill the registers with codes of weights ([`crate::cpu::blocks`]).
    const CODED_ROWS: usize;

    /// 64 codes of 8 bits: 4 inputs of each of 16 outputs.
    type Codes: Copy;

    /// 16 sums in int32.
    type Sums: Copy;

    /// The largest magnitude of 32 numbers; NaN if one of them is.
    fn largest_magnitude(self, x: &[f32; 32]) -> f32;

    /// Writes 32 numbers times `factor`, rounded to whole numbers from -127 to 127 (halves to even), four bytes each; returns the sums of the first
    /// and the last 16.
    fn write_rounded(self, x: &[f32; 32], factor: f32, quads: &mut [i32; 8]) -> [i32; 2];

    /// The codes of a line.
    fn codes(self, line: &VectorLine) -> Self::Codes;

    /// The field of `width` bits at bit `at` of each byte, as bits from `to` on.
    fn field(self, bytes: Self::Codes, at: u32, width: u32, to: u32) -> Self::Codes;

    /// The codes of a book of 16 at these places.
    fn looked_up(self, book: &[u8; 16], places: Self::Codes) -> Self::Codes;

    /// a | b.
    fn either(self, a: Self::Codes, b: Self::Codes) -> Self::Codes;

    /// The same whole number in all lanes.
    fn integers(self, x: i32) -> Self::Sums;

    /// What [`Lanes::add_pair`] subtracts from codes of 8 bits.
    const CENTER_OF_BYTES: u8;

    /// Adds the products of two times 4 inputs: unsigned codes of weights, of up to 6 bits or (`WIDE`) 8, by four signed bytes of x each.
    fn add_pair<const WIDE: bool>(self, sums: Self::Sums, weights: [Self::Codes; 2], x: [i32; 2]) -> Self::Sums;

    /// As float32.
    fn floats(self, sums: Self::Sums) -> Self::Vector;

    /// 16 numbers in float16.
    fn float16(self, bytes: &[u8; 32]) -> Self::Vector;

    /// 16 signed bytes.
    fn signed(self, bytes: &[u8; 16]) -> Self::Vector;

    /// `c·tanh(x / c) = c·(1 - 2 / (1 + e^(2x/c)))`.
    #[inline(always)]
    fn capped(self, x: Self::Vector, c: f32) -> Self::Vector {
        let (one, two) = (self.all(1.0), self.all(2.0));
        let exponential = self.exp(self.multiply(x, self.all(2.0 / c)));
        let tanh = self.subtract(one, self.divide(two, self.add(one, exponential)));
        self.multiply(tanh, self.all(c))
    }

    /// `v` where x is at least `least` or NaN, else 0.
    fn where_at_least(self, x: Self::Vector, least: f32, v: Self::Vector) -> Self::Vector;

    /// e^x, within 2 units in the last place, NaN of NaN; 0 where it is below the smallest normal number, since smaller ones take the CPU a hundred
    /// times as long (a polynomial of degree 6 on half a power of two, as in Cephes).
    #[inline(always)]
    fn exp(self, x: Self::Vector) -> Self::Vector {
        const LEAST: f32 = -87.33;
        // Above 89, e^x is infinite. `x` is the second operand, so that NaN stays.
        let given = x;
        let x = self.smaller(self.all(89.0), self.larger(self.all(LEAST), x));
        let powers = self.rounded(self.multiply(x, self.all(std::f32::consts::LOG2_E)));
        let minus = self.subtract(self.all(0.0), powers);
        let rest = self.multiply_add(minus, self.all(355.0 / 512.0), x); // ln 2 in two parts: the first product is exact
        let rest = self.multiply_add(minus, self.all(-2.121_944_4e-4), rest);
        let mut series = self.all(1.987_569_1e-4);
        for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
            series = self.multiply_add(series, rest, self.all(coefficient));
        }
        let value = self.multiply_add(series, self.multiply(rest, rest), self.add(rest, self.all(1.0)));
        self.where_at_least(given, LEAST, self.times_power_of_two(value, powers))
    }
}

/// Fetches the line at an address, which need not be one's own, into the second cache.
#[inline(always)]
pub(in crate::cpu) fn fetch(line: *const VectorLine) {
    // SAFETY: any address may be fetched; nothing is read.
    #[allow(unused_unsafe, reason = "safe in newer versions of Rust than the oldest that builds this")]
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
}

/// The bytes of lines.
pub(in crate::cpu) fn bytes_of(lines: &mut [VectorLine]) -> &mut [u8] {
    // SAFETY: lines are bytes without holes.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

/// The bytes of lines, to be read.
#[inline(always)]
pub(in crate::cpu) fn bytes_in(lines: &[VectorLine]) -> &[u8] {
    // SAFETY: lines are bytes without holes.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines)) }
}
