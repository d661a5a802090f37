//! Blocks of quantised tensors taken apart. Their numbers are computed in float32 and with the order of operations of ggml's reference code, so
//! that they are equal bit for bit.

use half::f16;

/// Most numbers of a block.
pub const LARGEST_BLOCK: usize = 256;
/// Numbers that share a scale and a minimum, at least: in types with larger groups, neighbouring groups have the same.
pub const GROUP: usize = 16;

/// From the bytes of a block to its parts.
pub(super) type TakeApart = fn(&[u8], &mut CodedBlock);

/// A block of up to 256 numbers: a number is `(d·scale)·(code − center) − dmin·minimum`, with the scale and the minimum of its group. The center
/// belongs to the type.
#[derive(Debug, Clone)]
pub struct CodedBlock {
    pub d: f16,
    pub dmin: f16,
    pub scales: [i8; LARGEST_BLOCK / GROUP],
    pub minima: [i8; LARGEST_BLOCK / GROUP],
    pub codes: [u8; LARGEST_BLOCK],
}

impl Default for CodedBlock {
    /// Of a type without scales and minima.
    fn default() -> Self {
        Self { d: f16::ZERO, dmin: f16::ZERO, scales: [1; _], minima: [0; _], codes: [0; _] }
    }
}

impl CodedBlock {
    /// Writes as many of its numbers as there is room for.
    pub(super) fn write(&self, center: u8, numbers: &mut [f32]) {
        let (d, dmin, center) = (self.d.to_f32(), self.dmin.to_f32(), f32::from(center));
        let groups = numbers.chunks_mut(GROUP).zip(self.codes.chunks(GROUP)).zip(self.scales.iter().zip(&self.minima));
        for ((numbers, codes), (&scale, &minimum)) in groups {
            let (scale, minimum) = (d * f32::from(scale), dmin * f32::from(minimum));
            for (number, &code) in numbers.iter_mut().zip(codes) {
                *number = scale * (f32::from(code) - center) - minimum;
            }
        }
    }
}

/// The 16 values of IQ4_NL and IQ4_XS, plus 128.
pub const NON_LINEAR: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// The 16 values of NF4 by 127, rounded, plus 128.
pub const NORMAL_FLOAT: [u8; 16] = [1, 40, 61, 78, 92, 105, 116, 128, 138, 148, 159, 171, 184, 199, 220, 255];

fn half(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

/// The low and the high nibble of a byte.
fn nibbles(byte: u8) -> [u8; 2] {
    [byte & 15, byte >> 4]
}

/// 16 bytes of nibbles: the low ones are the first half of 32 codes, the high ones the second.
fn halves(bytes: &[u8], codes: &mut [u8], code: impl Fn(u8, usize) -> u8) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for (at, &byte) in bytes.iter().enumerate() {
        let [first, second] = nibbles(byte);
        low[at] = code(first, at);
        high[at] = code(second, at + bytes.len());
    }
}

/// A nibble with the fifth bit of its number, from the 32 bits at `block[at..]`.
fn with_fifth_bit(block: &[u8], at: usize) -> impl Fn(u8, usize) -> u8 {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    move |q, number| q | (((bits >> number) & 1) as u8 * 16)
}

/// m, which is added.
fn add_minimum(block: &[u8], at: usize, parts: &mut CodedBlock) {
    (parts.dmin, parts.minima) = (-half(block, at), [1; 16]);
}

/// d, 16 bytes of nibbles.
pub(super) fn q4_0(block: &[u8], parts: &mut CodedBlock) {
    parts.d = half(block, 0);
    halves(&block[2..18], &mut parts.codes[..32], |q, _| q);
}

/// d, m, 16 bytes of nibbles.
pub(super) fn q4_1(block: &[u8], parts: &mut CodedBlock) {
    parts.d = half(block, 0);
    add_minimum(block, 2, parts);
    halves(&block[4..20], &mut parts.codes[..32], |q, _| q);
}

/// d, the fifth bits, 16 bytes of nibbles.
pub(super) fn q5_0(block: &[u8], parts: &mut CodedBlock) {
    parts.d = half(block, 0);
    halves(&block[6..22], &mut parts.codes[..32], with_fifth_bit(block, 2));
}

/// d, m, the fifth bits, 16 bytes of nibbles.
pub(super) fn q5_1(block: &[u8], parts: &mut CodedBlock) {
    parts.d = half(block, 0);
    add_minimum(block, 2, parts);
    halves(&block[8..24], &mut parts.codes[..32], with_fifth_bit(block, 4));
}

/// d, 32 signed bytes.
pub(super) fn q8_0(block: &[u8], parts: &mut CodedBlock) {
    parts.d = half(block, 0);
    parts.codes.iter_mut().zip(&block[2..34]).for_each(|(code, byte)| *code = byte ^ 128);
}

/// 16 scales and minima of 4 bits each, 64 bytes of 2 bits, d, dmin.
pub(super) fn q2_k(block: &[u8], parts: &mut CodedBlock) {
    (parts.d, parts.dmin) = (half(block, 80), half(block, 82));
    for (group, codes) in parts.codes.chunks_exact_mut(GROUP).enumerate() {
        [parts.scales[group], parts.minima[group]] = nibbles(block[group]).map(u8::cast_signed);
        codes.iter_mut().zip(two_bits(&block[16..80], group)).for_each(|(code, bits)| *code = bits);
    }
}

/// The 2-bit codes of a group of 16: each 128 codes take 32 bytes, and the bits of a byte belong to four groups of 32.
fn two_bits(bytes: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let shift = 2 * (group % 8 / 2);
    bytes[32 * (group / 8) + 16 * (group % 2)..][..16].iter().map(move |byte| (byte >> shift) & 3)
}

/// The third bits in 32 bytes, 64 bytes of 2 bits, 16 scales plus 32 of 6 bits in 12 bytes, d.
pub(super) fn q3_k(block: &[u8], parts: &mut CodedBlock) {
    let (high, low, scales) = (&block[..32], &block[32..96], &block[96..108]);
    parts.d = half(block, 108);
    for (group, codes) in parts.codes.chunks_exact_mut(GROUP).enumerate() {
        let lower = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
        let upper = (scales[8 + group % 4] >> (2 * (group / 4))) & 3;
        parts.scales[group] = (lower | (upper << 4)).cast_signed() - 32;
        let third = high[16 * (group % 2)..][..16].iter().map(|byte| (byte >> (group / 2)) & 1);
        codes
            .iter_mut()
            .zip(two_bits(low, group).zip(third))
            .for_each(|(code, (low, third))| *code = low | (third << 2));
    }
}

/// The eight scales and minima of 6 bits each that Q4_K and Q5_K store in 12 bytes.
fn scale_and_minimum(scales: &[u8], group: usize) -> [i8; 2] {
    let both = match group {
        0..4 => [scales[group] & 63, scales[group + 4] & 63],
        _ => {
            let [scale, minimum] = nibbles(scales[group + 4]);
            [scale | (scales[group - 4] >> 6 << 4), minimum | (scales[group] >> 6 << 4)]
        }
    };
    both.map(u8::cast_signed)
}

/// d, dmin, 8 scales and minima.
fn eight_scales(block: &[u8], parts: &mut CodedBlock) {
    (parts.d, parts.dmin) = (half(block, 0), half(block, 2));
    for group in 0..LARGEST_BLOCK / GROUP {
        [parts.scales[group], parts.minima[group]] = scale_and_minimum(&block[4..16], group / 2);
    }
}

/// The nibbles of a group of 32: two groups share 32 bytes.
fn four_bits(bytes: &[u8], group: usize) -> impl Iterator<Item = u8> {
    bytes[32 * (group / 2)..][..32].iter().map(move |&byte| nibbles(byte)[group % 2])
}

/// d, dmin, 8 scales and minima, 128 bytes of nibbles.
pub(super) fn q4_k(block: &[u8], parts: &mut CodedBlock) {
    eight_scales(block, parts);
    for (group, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
        codes.iter_mut().zip(four_bits(&block[16..144], group)).for_each(|(code, bits)| *code = bits);
    }
}

/// As Q4_K, with the fifth bits in 32 bytes before the nibbles.
pub(super) fn q5_k(block: &[u8], parts: &mut CodedBlock) {
    eight_scales(block, parts);
    for (group, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
        let fifth = block[16..48].iter().map(|byte| ((byte >> group) & 1) << 4);
        let bits = four_bits(&block[48..176], group).zip(fifth);
        codes.iter_mut().zip(bits).for_each(|(code, (low, fifth))| *code = low | fifth);
    }
}

/// 128 bytes of low nibbles, 64 bytes of 2 high bits, 16 scales of 8 bits, d.
pub(super) fn q6_k(block: &[u8], parts: &mut CodedBlock) {
    let (low, high) = (&block[..128], &block[128..192]);
    parts.scales.iter_mut().zip(&block[192..208]).for_each(|(scale, byte)| *scale = byte.cast_signed());
    parts.d = half(block, 208);
    for (at, code) in parts.codes.iter_mut().enumerate() {
        let (part, row, column) = (at / 128, at % 128 / 32, at % 32);
        let nibble = nibbles(low[64 * part + 32 * (row % 2) + column])[row / 2];
        let upper = (high[32 * part + column] >> (2 * row)) & 3;
        *code = nibble | (upper << 4);
    }
}

/// d, 16 bytes of nibbles that look up [`NON_LINEAR`].
pub(super) fn iq4_nl(block: &[u8], parts: &mut CodedBlock) {
    parts.d = half(block, 0);
    halves(&block[2..18], &mut parts.codes[..32], |q, _| NON_LINEAR[usize::from(q)]);
}

/// d, 16 bytes of neighbouring codes, the first in the high nibble, that look up [`NORMAL_FLOAT`].
pub(super) fn nf4(block: &[u8], parts: &mut CodedBlock) {
    parts.d = half(block, 0);
    for (codes, &byte) in parts.codes[..32].as_chunks_mut::<2>().0.iter_mut().zip(&block[2..18]) {
        let [second, first] = nibbles(byte);
        *codes = [first, second].map(|q| NORMAL_FLOAT[usize::from(q)]);
    }
}

/// d, 8 scales plus 32 of 6 bits (the upper 2 in 2 bytes, the lower 4 in 4), 128 bytes of nibbles that look up [`NON_LINEAR`].
pub(super) fn iq4_xs(block: &[u8], parts: &mut CodedBlock) {
    let upper = u16::from_le_bytes([block[2], block[3]]);
    parts.d = half(block, 0);
    for (group, codes) in parts.codes.chunks_exact_mut(32).enumerate() {
        let low = nibbles(block[4 + group / 2])[group % 2];
        let high = ((upper >> (2 * group)) & 3) as u8;
        let scale = (low | (high << 4)).cast_signed() - 32;
        parts.scales[2 * group..2 * group + 2].fill(scale);
        halves(&block[8 + 16 * group..][..16], codes, |q, _| NON_LINEAR[usize::from(q)]);
    }
}
