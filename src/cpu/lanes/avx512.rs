//! Vectors of AVX-512: 16 numbers in one register.
#![expect(unsafe_code, reason = "AVX-512, which a value of `Avx512` stands for, reads and writes under masks")]
use std::arch::x86_64::*;

use super::avx2::sums_of_halves;
use super::vector::{LANES, Lanes, ROUNDING, VectorLine};

/// AVX-512 with bfloat16 and VNNI. A value exists only where [`Avx512::detected`] has seen it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Avx512(());

impl Avx512 {
    /// If this CPU has it.
    pub(super) fn detected() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512vnni");
        detected.then_some(Self(()))
    }
}

/// The first lanes.
fn mask_of(lanes: usize) -> u16 {
    (1u32 << lanes).wrapping_sub(1) as u16
}

/// In each 128 bits: `[a0 + a2, b0 + b2, a1 + a3, b1 + b3]`.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
}

/// In each 128 bits: the sums of a's two vectors, then b's.
#[inline]
#[target_feature(enable = "avx512f")]
fn quarters(a: __m512, b: __m512) -> __m512 {
    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
    _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
}

/// Adds neighbouring 128 bits: a's, then b's.
#[inline]
#[target_feature(enable = "avx512f")]
fn blocks(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
}

// SAFETY of all blocks: `self` says that the CPU has the instructions. What else a block needs stands beside it.
impl Lanes for Avx512 {
    type Vector = __m512;
    const BLOCK_ROWS: usize = 6;

    #[inline(always)]
    fn run<R>(self, kernel: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
        fn with<R>(kernel: impl FnOnce() -> R) -> R {
            kernel()
        }
        // SAFETY: see above.
        unsafe { with(kernel) }
    }

    #[inline(always)]
    fn all(self, x: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> __m512 {
        // SAFETY: only the lanes of the mask are read.
        unsafe { _mm512_maskz_loadu_ps(mask_of(x.len().min(LANES)), x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, out: &mut [f32], v: __m512) {
        // SAFETY: only the lanes of the mask are written.
        unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask_of(out.len().min(LANES)), v) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn subtract(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn multiply(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn divide(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn multiply_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn where_at_least(self, x: __m512, least: f32, v: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(least)), v) }
    }

    #[inline(always)]
    fn larger(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn smaller(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn rounded(self, v: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_roundscale_ps::<0>(v) }
    }

    #[inline(always)]
    fn times_power_of_two(self, v: __m512, powers: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_scalef_ps(v, powers) }
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(v) }
    }

    #[inline(always)]
    fn largest(self, v: __m512) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(v) }
    }

    #[inline(always)]
    fn sum_each(self, v: [__m512; LANES]) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let (mut pairs, mut fours) = ([self.all(0.0); 8], [self.all(0.0); 4]);
            for (i, pair) in pairs.iter_mut().enumerate() {
                *pair = halves(v[2 * i], v[2 * i + 1]);
            }
            for (i, four) in fours.iter_mut().enumerate() {
                *four = quarters(pairs[2 * i], pairs[2 * i + 1]);
            }
            blocks(blocks(fours[0], fours[1]), blocks(fours[2], fours[3]))
        }
    }

    #[inline(always)]
    fn above(self, x: &[f32], least: f32) -> u16 {
        let mask = mask_of(x.len().min(LANES));
        // SAFETY: see above.
        unsafe { _mm512_mask_cmp_ps_mask::<_CMP_NLE_UQ>(mask, self.load(x), _mm512_set1_ps(least)) }
    }

    /// # Safety
    /// The numbers are in the plane.
    #[inline(always)]
    unsafe fn step_at<const BF16: bool>(self, plane: &[u8], at: usize, count: usize) -> [__m512; 2] {
        let mask = (1u64 << count).wrapping_sub(1) as u32;
        // SAFETY: only the lanes of the mask are read, and the caller promises that they are in the plane.
        unsafe {
            if BF16 {
                let first = plane.as_ptr().cast::<i16>().add(at);
                // A load under a mask takes one instruction more.
                let bits = if count == 32 { _mm512_loadu_epi16(first) } else { _mm512_maskz_loadu_epi16(mask, first) };
                let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000u32.cast_signed()));
                return [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)), _mm512_castsi512_ps(odd)];
            }
            let first = plane.as_ptr().cast::<f32>().add(at);
            if count == 32 {
                return [_mm512_loadu_ps(first), _mm512_loadu_ps(first.add(LANES))];
            }
            let second = _mm512_maskz_loadu_ps((mask >> LANES) as u16, first.wrapping_add(LANES));
            [_mm512_maskz_loadu_ps(mask as u16, first), second]
        }
    }

    #[inline(always)]
    fn add_products<const BF16: bool, const R: usize, const T: usize>(
        self,
        sums: &mut [[__m512; T]; R],
        w: &[VectorLine],
        x: &[VectorLine],
    ) {
        for (sums, x) in sums.iter_mut().zip(x) {
            for (sum, w) in sums.iter_mut().zip(w) {
                *sum = self.add_product::<BF16>(*sum, w, x);
            }
        }
    }

    const BFLOAT16_X_LINES: usize = 1;

    #[inline(always)]
    fn write_bfloat16_x(self, x: &[f32; 32], lines: &mut [VectorLine]) {
        lines[0] = self.bfloat16(x);
    }

    const QUERIES: usize = 6;
    const CODED_ROWS: usize = 8;
    const CENTER_OF_BYTES: u8 = 0;
    type Codes = __m512i;
    type Sums = __m512i;

    /// As whole numbers without a sign: of these NaN is the largest.
    #[inline(always)]
    fn largest_magnitude(self, x: &[f32; 32]) -> f32 {
        // SAFETY: 16 numbers each.
        unsafe {
            let [low, high] = [_mm512_loadu_si512(x.as_ptr().cast()), _mm512_loadu_si512(x[LANES..].as_ptr().cast())];
            let magnitude = _mm512_set1_epi32(0x7fff_ffff);
            let largest = _mm512_max_epu32(_mm512_and_si512(low, magnitude), _mm512_and_si512(high, magnitude));
            f32::from_bits(_mm512_reduce_max_epu32(largest))
        }
    }

    #[inline(always)]
    fn write_rounded(self, x: &[f32; 32], factor: f32, quads: &mut [i32; 8]) -> [i32; 2] {
        let half = |x: &[f32]| {
            let rounded = self.add(self.multiply(self.load(x), self.all(factor)), self.all(ROUNDING));
            // SAFETY: see above.
            unsafe { _mm512_cvtepi32_epi8(_mm512_castps_si512(rounded)) }
        };
        // SAFETY: 32 bytes.
        unsafe {
            let bytes = _mm256_set_m128i(half(&x[16..]), half(&x[..16]));
            _mm256_storeu_si256(quads.as_mut_ptr().cast(), bytes);
            sums_of_halves(bytes)
        }
    }

    #[inline(always)]
    fn codes(self, line: &VectorLine) -> __m512i {
        // SAFETY: a line is 64 aligned bytes.
        unsafe { _mm512_load_si512(line.0.as_ptr().cast()) }
    }

    #[inline(always)]
    fn field(self, bytes: __m512i, at: u32, width: u32, to: u32) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let moved = match to.cast_signed() - at.cast_signed() {
                0 => bytes,
                left @ 1.. => _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(left)),
                right => _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(-right)),
            };
            _mm512_and_si512(moved, _mm512_set1_epi8((((1u32 << width) - 1) << to) as i8))
        }
    }

    #[inline(always)]
    fn looked_up(self, book: &[u8; 16], places: __m512i) -> __m512i {
        // SAFETY: 16 bytes.
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(book.as_ptr().cast())), places) }
    }

    #[inline(always)]
    fn either(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn integers(self, x: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(x) }
    }

    #[inline(always)]
    fn add_pair<const WIDE: bool>(self, sums: __m512i, weights: [__m512i; 2], x: [i32; 2]) -> __m512i {
        // SAFETY: see above.
        unsafe {
            let sums = _mm512_dpbusd_epi32(sums, weights[0], _mm512_set1_epi32(x[0]));
            _mm512_dpbusd_epi32(sums, weights[1], _mm512_set1_epi32(x[1]))
        }
    }

    #[inline(always)]
    fn floats(self, sums: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(sums) }
    }

    #[inline(always)]
    fn float16(self, bytes: &[u8; 32]) -> __m512 {
        // SAFETY: 32 bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    fn signed(self, bytes: &[u8; 16]) -> __m512 {
        // SAFETY: 16 bytes.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
    }
}

impl Avx512 {
    #[inline(always)]
    fn add_product<const BF16: bool>(self, sum: __m512, a: &VectorLine, b: &VectorLine) -> __m512 {
        // SAFETY: a line is 64 aligned bytes, and any bytes are numbers.
        unsafe {
            let [a, b] = [_mm512_load_si512(a.0.as_ptr().cast()), _mm512_load_si512(b.0.as_ptr().cast())];
            if !BF16 {
                return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
            }
            let [a, b] = std::mem::transmute::<[__m512i; 2], [__m512bh; 2]>([a, b]);
            _mm512_dpbf16_ps(sum, a, b)
        }
    }

    /// A line of numbers rounded to bfloat16.
    #[inline(always)]
    fn bfloat16(self, x: &[f32; 32]) -> VectorLine {
        let (low, high) = x.split_at(LANES);
        // SAFETY: 16 numbers each; both types are 64 bytes, and any bytes are a line.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(low.as_ptr()), _mm512_loadu_ps(high.as_ptr()));
            std::mem::transmute::<__m512bh, VectorLine>(_mm512_cvtne2ps_pbh(high, low))
        }
    }
}
