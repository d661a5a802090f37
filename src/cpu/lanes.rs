//! Building blocks of the kernels: AVX-512 vectors of 64 bytes.
#![expect(unsafe_code, reason = "AVX-512 reads under a mask")]
use std::arch::x86_64::*;

/// Numbers of a vector.
pub(super) const LANES: usize = 16;

/// 64 bytes, aligned.
pub(super) type VectorLine = __m512i;

/// The sum of each vector's 16 lanes: lane i of the result is vector i's. All are added up in the same order.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn sum_each(v: [__m512; 16]) -> __m512 {
    let pairs: [__m512; 8] = std::array::from_fn(|i| halves(v[2 * i], v[2 * i + 1]));
    let fours: [__m512; 4] = std::array::from_fn(|i| quarters(pairs[2 * i], pairs[2 * i + 1]));
    let eights: [__m512; 2] = std::array::from_fn(|i| blocks(fours[2 * i], fours[2 * i + 1]));
    blocks(eights[0], eights[1])
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

/// e^x, within 2 units in the last place, NaN of NaN (a polynomial of degree 6 on half a power of two, as in Cephes).
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp(x: __m512) -> __m512 {
    let set = |x: f32| _mm512_set1_ps(x);
    // Beyond these bounds e^x is 0 or infinite anyway. `x` is the second operand: of NaN and a number, both instructions return it.
    let x = _mm512_min_ps(set(89.0), _mm512_max_ps(set(-104.0), x));
    let powers = _mm512_roundscale_ps::<0>(_mm512_mul_ps(x, set(std::f32::consts::LOG2_E)));
    let rest = _mm512_fnmadd_ps(powers, set(355.0 / 512.0), x); // ln 2 in two parts: the first product is exact
    let rest = _mm512_fnmadd_ps(powers, set(-2.121_944_4e-4), rest);
    let coefficients = [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5];
    let series = coefficients.iter().fold(_mm512_setzero_ps(), |sum, &c| _mm512_fmadd_ps(sum, rest, set(c)));
    let value = _mm512_fmadd_ps(series, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, set(1.0)));
    _mm512_scalef_ps(value, powers)
}

/// The first 16 numbers, or as many as there are, then zeros.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(x: &[f32]) -> __m512 {
    // SAFETY: only the lanes of the mask are read.
    unsafe { _mm512_maskz_loadu_ps(mask_of(x.len().min(LANES)), x.as_ptr()) }
}

/// Writes the first 16 numbers, or as many as there is room for.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store(out: &mut [f32], v: __m512) {
    // SAFETY: only the lanes of the mask are written.
    unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask_of(out.len().min(LANES)), v) }
}

/// A line of numbers rounded to bfloat16.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn bfloat16(x: &[f32; 32]) -> VectorLine {
    let (low, high) = x.split_at(16);
    // SAFETY: 16 numbers each; both types are 64 bytes, and any bytes are a line.
    unsafe {
        let (low, high) = (_mm512_loadu_ps(low.as_ptr()), _mm512_loadu_ps(high.as_ptr()));
        std::mem::transmute::<__m512bh, VectorLine>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// The bytes of lines.
pub(super) fn bytes_of(lines: &mut [VectorLine]) -> &mut [u8] {
    // SAFETY: lines are bytes without holes.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

/// The first lanes.
pub(super) fn mask_of(lanes: usize) -> u16 {
    (1u32 << lanes).wrapping_sub(1) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(v: __m512) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: the CPU has AVX-512.
        unsafe { store(&mut out, v) };
        out
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX-512 with bfloat16")]
    fn each_lane_is_the_sum_of_its_vector() {
        let vectors: [[f32; LANES]; LANES] =
            std::array::from_fn(|v| std::array::from_fn(|lane| (v * 100 + lane * lane) as f32));
        // SAFETY: the CPU has AVX-512.
        let sums = unsafe { stored(sum_each(vectors.map(|v| load(&v)))) };
        assert_eq!(sums, vectors.map(|v| v.iter().sum::<f32>()));
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX-512 with bfloat16")]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for step in -8700..8800 {
            let x = step as f32 / 100.0;
            // SAFETY: the CPU has AVX-512.
            let (got, expected) = (unsafe { stored(exp(load(&[x; LANES]))) }[0], f64::from(x).exp());
            let off = (f64::from(got) - expected).abs() / expected;
            assert!(off < 2.0 * f64::from(f32::EPSILON), "e^{x} = {got}, expected {expected}");
        }
        // SAFETY: the CPU has AVX-512.
        let ends = unsafe { stored(exp(load(&[f32::NEG_INFINITY, 200.0, f32::NAN]))) };
        assert_eq!((ends[0], ends[1]), (0.0, f32::INFINITY));
        assert!(ends[2].is_nan());
    }
}
