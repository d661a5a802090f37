//! Vectors of AVX2, with AVX-VNNI if the CPU has it: 16 numbers in two registers. In float32 every result has the bits that AVX-512 computes.
#![expect(unsafe_code, reason = "AVX2 with FMA, which a value of `Avx2` stands for, reads and writes slices")]
use std::arch::x86_64::*;

use half::bf16;

use super::vector::{LANES, Lanes, ROUNDING, VectorLine, bytes_of};

/// Lanes of one register.
const HALF: usize = LANES / 2;

/// AVX2 with FMA, and if `VNNI` with AVX-VNNI. A value exists only where [`Avx2::detected`] has seen it.
#[derive(Debug, Clone, Copy)]
pub(in crate::cpu) struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// If this CPU has it.
    pub(super) fn detected() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        detected.then_some(Self(()))
    }
}

/// Lanes 0 to 7, and 8 to 15.
type Pair = [__m256; 2];

/// As `halves` of AVX-512.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(a: __m256, b: __m256) -> __m256 {
    _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))
}

/// As `quarters` of AVX-512.
#[inline]
#[target_feature(enable = "avx2")]
fn quarters(a: __m256, b: __m256) -> __m256 {
    let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
    _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)))
}

/// Adds the two 128 bits of each: a's, then b's.
#[inline]
#[target_feature(enable = "avx2")]
fn blocks(a: __m256, b: __m256) -> __m256 {
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}

/// The sum of 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_of_half(v: __m256) -> f32 {
    let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    _mm_cvtss_f32(v) + _mm_cvtss_f32(_mm_movehdup_ps(v))
}

/// 2^n for whole numbers from -126 to 127.
#[inline]
#[target_feature(enable = "avx2")]
fn power_of_two(n: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
}

/// v·2^n in two steps, so that neither power is out of range.
#[inline]
#[target_feature(enable = "avx2")]
fn scaled(v: __m256, powers: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(powers);
    let first = _mm256_srai_epi32::<1>(n);
    _mm256_mul_ps(_mm256_mul_ps(v, power_of_two(first)), power_of_two(_mm256_sub_epi32(n, first)))
}

/// The bfloat16 numbers of even or of odd places in 32 bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn even_or_odd(line: __m256i, odd: bool) -> __m256 {
    let odd_places = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
    _mm256_castsi256_ps(if odd { _mm256_and_si256(line, odd_places) } else { _mm256_slli_epi32::<16>(line) })
}

/// The sums of two products each, in int16, of codes from which 128 is subtracted.
#[inline]
#[target_feature(enable = "avx2")]
fn signed_products(codes: __m256i, x: __m256i) -> __m256i {
    let weights = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights))
}

#[inline]
#[target_feature(enable = "avx2")]
fn where_at_least(x: __m256, least: f32, v: __m256) -> __m256 {
    _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(least)), v)
}

#[inline]
#[target_feature(enable = "avx2")]
fn places_above(x: __m256, least: f32) -> i32 {
    _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLE_UQ>(x, _mm256_set1_ps(least)))
}

/// 16 numbers rounded to whole ones, in bytes of words.
#[inline]
#[target_feature(enable = "avx2")]
fn rounded_words(x: Pair) -> __m256i {
    let (rounding, byte) = (_mm256_set1_ps(ROUNDING), _mm256_set1_epi32(0xff));
    let low = _mm256_and_si256(_mm256_castps_si256(_mm256_add_ps(x[0], rounding)), byte);
    let high = _mm256_and_si256(_mm256_castps_si256(_mm256_add_ps(x[1], rounding)), byte);
    _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))
}

#[inline]
#[target_feature(enable = "avx2")]
fn field(bytes: __m256i, at: u32, width: u32, to: u32) -> __m256i {
    let moved = match to.cast_signed() - at.cast_signed() {
        0 => bytes,
        left @ 1.. => _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(left)),
        right => _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(-right)),
    };
    _mm256_and_si256(moved, _mm256_set1_epi8((((1u32 << width) - 1) << to) as i8))
}

#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn add_pair_vnni(sums: __m256i, weights: [__m256i; 2], x: [i32; 2]) -> __m256i {
    let sums = _mm256_dpbusd_avx_epi32(sums, weights[0], _mm256_set1_epi32(x[0]));
    _mm256_dpbusd_avx_epi32(sums, weights[1], _mm256_set1_epi32(x[1]))
}

/// Products of codes up to 63 are added in int16, where four fit. Two products of a code up to 255 do not, so bytes are signed here, and the sign
/// goes to x.
#[inline]
#[target_feature(enable = "avx2")]
fn add_pair<const WIDE: bool>(sums: __m256i, weights: [__m256i; 2], x: [i32; 2]) -> __m256i {
    let (x, ones) = ([_mm256_set1_epi32(x[0]), _mm256_set1_epi32(x[1])], _mm256_set1_epi16(1));
    if WIDE {
        let sums = _mm256_add_epi32(sums, _mm256_madd_epi16(signed_products(weights[0], x[0]), ones));
        return _mm256_add_epi32(sums, _mm256_madd_epi16(signed_products(weights[1], x[1]), ones));
    }
    let products = _mm256_add_epi16(_mm256_maddubs_epi16(weights[0], x[0]), _mm256_maddubs_epi16(weights[1], x[1]));
    _mm256_add_epi32(sums, _mm256_madd_epi16(products, ones))
}

// SAFETY of all blocks: `self` says that the CPU has the instructions. No closure passes vectors through functions of `core`: these are compiled
// without the instructions, so each intrinsic would be a call. What else a block needs stands beside it.
impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type Vector = Pair;
    const BLOCK_ROWS: usize = 3;

    #[inline(always)]
    fn run<R>(self, kernel: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with<R>(kernel: impl FnOnce() -> R) -> R {
            kernel()
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn with_vnni<R>(kernel: impl FnOnce() -> R) -> R {
            kernel()
        }
        // SAFETY: see above.
        unsafe { if VNNI { with_vnni(kernel) } else { with(kernel) } }
    }

    #[inline(always)]
    fn all(self, x: f32) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn load(self, x: &[f32]) -> Pair {
        if let Some(x) = x.first_chunk::<LANES>() {
            // SAFETY: 16 numbers.
            return unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[HALF..].as_ptr())] };
        }
        let mut padded = [0.0; LANES];
        padded[..x.len()].copy_from_slice(x);
        self.load(&padded)
    }

    #[inline(always)]
    fn store(self, out: &mut [f32], v: Pair) {
        if let Some(out) = out.first_chunk_mut::<LANES>() {
            // SAFETY: room for 16 numbers.
            unsafe {
                _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
                _mm256_storeu_ps(out[HALF..].as_mut_ptr(), v[1]);
            }
            return;
        }
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes, v);
        out.copy_from_slice(&lanes[..out.len()]);
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn subtract(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn multiply(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn divide(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn multiply_add(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn where_at_least(self, x: Pair, least: f32, v: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [where_at_least(x[0], least, v[0]), where_at_least(x[1], least, v[1])] }
    }

    #[inline(always)]
    fn larger(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn smaller(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn rounded(self, v: Pair) -> Pair {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: see above.
        unsafe { [_mm256_round_ps::<NEAREST>(v[0]), _mm256_round_ps::<NEAREST>(v[1])] }
    }

    #[inline(always)]
    fn times_power_of_two(self, v: Pair, powers: Pair) -> Pair {
        // SAFETY: see above.
        unsafe { [scaled(v[0], powers[0]), scaled(v[1], powers[1])] }
    }

    #[inline(always)]
    fn sum(self, v: Pair) -> f32 {
        // SAFETY: see above.
        unsafe { sum_of_half(_mm256_add_ps(v[0], v[1])) }
    }

    #[inline(always)]
    fn largest(self, v: Pair) -> f32 {
        let mut numbers = [0.0; LANES];
        self.store(&mut numbers, v);
        numbers.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    fn sum_each(self, v: [Pair; LANES]) -> Pair {
        // SAFETY: see above.
        unsafe {
            let (mut pairs, mut fours, mut sums) = ([self.all(0.0); 8], [self.all(0.0); 4], self.all(0.0));
            for (i, pair) in pairs.iter_mut().enumerate() {
                let [a, b] = [v[2 * i], v[2 * i + 1]];
                *pair = [halves(a[0], b[0]), halves(a[1], b[1])];
            }
            for (i, four) in fours.iter_mut().enumerate() {
                let [a, b] = [pairs[2 * i], pairs[2 * i + 1]];
                *four = [quarters(a[0], b[0]), quarters(a[1], b[1])];
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                let [a, b] = [fours[2 * i], fours[2 * i + 1]];
                *sum = _mm256_add_ps(blocks(a[0], b[0]), blocks(a[1], b[1]));
            }
            sums
        }
    }

    #[inline(always)]
    fn above(self, x: &[f32], least: f32) -> u16 {
        // SAFETY: see above.
        let larger = unsafe {
            let [low, high] = self.load(x);
            (places_above(high, least) << HALF | places_above(low, least)) as u16
        };
        larger & (1u32 << x.len().min(LANES)).wrapping_sub(1) as u16
    }

    /// # Safety
    /// The numbers are in the plane.
    #[inline(always)]
    unsafe fn step_at<const BF16: bool>(self, plane: &[u8], at: usize, count: usize) -> [Pair; 2] {
        let size = if BF16 { 2 } else { 4 };
        if count < 2 * LANES {
            let mut padded = [0; 2 * LANES * 4];
            padded[..count * size].copy_from_slice(&plane[at * size..][..count * size]);
            // SAFETY: 32 numbers.
            return unsafe { self.step_at::<BF16>(&padded, 0, 2 * LANES) };
        }
        // SAFETY: the caller promises that 32 numbers are in the plane.
        unsafe {
            let first = plane.as_ptr().add(at * size);
            if BF16 {
                let (low, high) = (_mm256_loadu_si256(first.cast()), _mm256_loadu_si256(first.add(32).cast()));
                let odd = _mm256_set1_epi32(0xffff_0000u32.cast_signed());
                let even = [_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high)];
                let odd = [_mm256_and_si256(low, odd), _mm256_and_si256(high, odd)];
                return [
                    [_mm256_castsi256_ps(even[0]), _mm256_castsi256_ps(even[1])],
                    [_mm256_castsi256_ps(odd[0]), _mm256_castsi256_ps(odd[1])],
                ];
            }
            let eighth = first.cast::<f32>();
            [
                [_mm256_loadu_ps(eighth), _mm256_loadu_ps(eighth.add(HALF))],
                [_mm256_loadu_ps(eighth.add(2 * HALF)), _mm256_loadu_ps(eighth.add(3 * HALF))],
            ]
        }
    }

    #[inline(always)]
    fn add_products<const BF16: bool, const R: usize, const T: usize>(
        self,
        sums: &mut [[Pair; T]; R],
        w: &[VectorLine],
        x: &[VectorLine],
    ) {
        for half in 0..2 {
            for odd in 0..if BF16 { 2 } else { 1 } {
                let mut halves = [self.all(0.0)[0]; T];
                for (half_line, w) in halves.iter_mut().zip(w) {
                    // SAFETY: see above.
                    *half_line = if BF16 { unsafe { even_or_odd(bits(w)[half], odd == 1) } } else { floats(w)[half] };
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = floats(&x[if BF16 { 2 * r + odd } else { r }])[half];
                    for (sum, w) in sums.iter_mut().zip(halves) {
                        // SAFETY: see above.
                        sum[half] = unsafe { _mm256_fmadd_ps(w, x, sum[half]) };
                    }
                }
            }
        }
    }

    /// The numbers of even places, then those of odd places, as float32: so a row is taken apart once, not for each output.
    const BFLOAT16_X_LINES: usize = 2;

    #[inline(always)]
    fn write_bfloat16_x(self, x: &[f32; 32], lines: &mut [VectorLine]) {
        for (odd, line) in lines.iter_mut().enumerate() {
            let (numbers, _) = bytes_of(std::slice::from_mut(line)).as_chunks_mut::<4>();
            let selected = x.iter().skip(odd).step_by(2);
            numbers.iter_mut().zip(selected).for_each(|(to, &x)| *to = bf16::from_f32(x).to_f32().to_ne_bytes());
        }
    }

    const QUERIES: usize = 2;
    const CODED_ROWS: usize = 3;
    const CENTER_OF_BYTES: u8 = if VNNI { 0 } else { 128 };
    type Codes = [__m256i; 2];
    type Sums = [__m256i; 2];

    /// As whole numbers without a sign: of these NaN is the largest.
    #[inline(always)]
    fn largest_magnitude(self, x: &[f32; 32]) -> f32 {
        // SAFETY: 8 numbers each.
        unsafe {
            let mut eight = _mm256_set1_epi32(0);
            for x in x.as_chunks::<HALF>().0 {
                let bits = _mm256_loadu_si256(x.as_ptr().cast());
                eight = _mm256_max_epu32(eight, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fff_ffff)));
            }
            let four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
            f32::from_bits(_mm_cvtsi128_si32(one).cast_unsigned())
        }
    }

    #[inline(always)]
    fn write_rounded(self, x: &[f32; 32], factor: f32, quads: &mut [i32; 8]) -> [i32; 2] {
        let (low, high) = x.split_at(LANES);
        let [low, high] =
            [self.multiply(self.load(low), self.all(factor)), self.multiply(self.load(high), self.all(factor))];
        // SAFETY: 32 bytes.
        unsafe {
            let bytes = _mm256_packus_epi16(rounded_words(low), rounded_words(high));
            let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes);
            _mm256_storeu_si256(quads.as_mut_ptr().cast(), bytes);
            sums_of_halves(bytes)
        }
    }

    #[inline(always)]
    fn codes(self, line: &VectorLine) -> [__m256i; 2] {
        *bits(line)
    }

    #[inline(always)]
    fn field(self, bytes: [__m256i; 2], at: u32, width: u32, to: u32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [field(bytes[0], at, width, to), field(bytes[1], at, width, to)] }
    }

    #[inline(always)]
    fn looked_up(self, book: &[u8; 16], places: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: 16 bytes.
        unsafe {
            let book = _mm256_broadcastsi128_si256(_mm_loadu_si128(book.as_ptr().cast()));
            [_mm256_shuffle_epi8(book, places[0]), _mm256_shuffle_epi8(book, places[1])]
        }
    }

    #[inline(always)]
    fn either(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn integers(self, x: i32) -> [__m256i; 2] {
        // SAFETY: see above.
        unsafe { [_mm256_set1_epi32(x); 2] }
    }

    #[inline(always)]
    fn add_pair<const WIDE: bool>(
        self,
        mut sums: [__m256i; 2],
        weights: [[__m256i; 2]; 2],
        x: [i32; 2],
    ) -> [__m256i; 2] {
        for (h, sums) in sums.iter_mut().enumerate() {
            let weights = [weights[0][h], weights[1][h]];
            // SAFETY: see above.
            *sums =
                unsafe { if VNNI { add_pair_vnni(*sums, weights, x) } else { add_pair::<WIDE>(*sums, weights, x) } };
        }
        sums
    }

    #[inline(always)]
    fn floats(self, sums: [__m256i; 2]) -> Pair {
        // SAFETY: see above.
        unsafe { [_mm256_cvtepi32_ps(sums[0]), _mm256_cvtepi32_ps(sums[1])] }
    }

    #[inline(always)]
    fn float16(self, bytes: &[u8; 32]) -> Pair {
        let (low, high) = bytes.split_at(16);
        // SAFETY: 16 bytes each.
        unsafe {
            let (low, high) = (_mm_loadu_si128(low.as_ptr().cast()), _mm_loadu_si128(high.as_ptr().cast()));
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    fn signed(self, bytes: &[u8; 16]) -> Pair {
        let (low, high) = bytes.split_at(8);
        // SAFETY: 8 bytes each.
        unsafe {
            let (low, high) = (_mm_loadl_epi64(low.as_ptr().cast()), _mm_loadl_epi64(high.as_ptr().cast()));
            self.floats([_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)])
        }
    }
}

/// The sums of the first and the last 16 signed bytes.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn sums_of_halves(bytes: __m256i) -> [i32; 2] {
    let words = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    let fours = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
    let twos = _mm256_hadd_epi32(fours, fours);
    let sums = _mm256_hadd_epi32(twos, twos);
    [_mm256_extract_epi32::<0>(sums), _mm256_extract_epi32::<4>(sums)]
}

#[inline(always)]
fn floats(line: &VectorLine) -> &Pair {
    // SAFETY: a line is 64 aligned bytes, and any bytes are numbers.
    unsafe { &*line.0.as_ptr().cast() }
}

#[inline(always)]
fn bits(line: &VectorLine) -> &[__m256i; 2] {
    // SAFETY: a line is 64 aligned bytes.
    unsafe { &*line.0.as_ptr().cast() }
}
