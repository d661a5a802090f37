//! From a block of a quantised tensor to its numbers, in float32 and with the order of operations of ggml's reference code, so that the results
//! are equal bit for bit.

use half::{bf16, f16};

/// A block, and the numbers that it stands for.
pub(super) type Dequantize = fn(&[u8], &mut [f32]);

/// The 16 values of IQ4_NL and IQ4_XS.
const NON_LINEAR: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The low and the high nibble of a byte.
fn nibbles(byte: u8) -> [u8; 2] {
    [byte & 15, byte >> 4]
}

/// 16 bytes of nibbles: the low ones are the first half of the block, the high ones the second.
fn halves(bytes: &[u8], numbers: &mut [f32], number: impl Fn(u8, usize) -> f32) {
    let (low, high) = numbers.split_at_mut(bytes.len());
    for (at, &byte) in bytes.iter().enumerate() {
        let [first, second] = nibbles(byte);
        low[at] = number(first, at);
        high[at] = number(second, at + bytes.len());
    }
}

pub(super) fn f32(block: &[u8], numbers: &mut [f32]) {
    numbers[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
}

pub(super) fn f16(block: &[u8], numbers: &mut [f32]) {
    numbers[0] = half(block, 0);
}

pub(super) fn bf16(block: &[u8], numbers: &mut [f32]) {
    numbers[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32();
}

/// d, 16 bytes of nibbles: d·(q − 8).
pub(super) fn q4_0(block: &[u8], numbers: &mut [f32]) {
    let d = half(block, 0);
    halves(&block[2..], numbers, |q, _| d * (f32::from(q) - 8.0));
}

/// d, m, 16 bytes of nibbles: d·q + m.
pub(super) fn q4_1(block: &[u8], numbers: &mut [f32]) {
    let [d, m] = [half(block, 0), half(block, 2)];
    halves(&block[4..], numbers, |q, _| d * f32::from(q) + m);
}

/// A nibble with the fifth bit of its number, from the 32 bits at `block[at..]`.
fn with_fifth_bit(block: &[u8], at: usize) -> impl Fn(u8, usize) -> u8 {
    let bits = u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    move |q, number| q | (((bits >> number) & 1) as u8 * 16)
}

/// d, the fifth bits, 16 bytes of nibbles: d·(q − 16).
pub(super) fn q5_0(block: &[u8], numbers: &mut [f32]) {
    let (d, five_bits) = (half(block, 0), with_fifth_bit(block, 2));
    halves(&block[6..], numbers, |q, at| d * (f32::from(five_bits(q, at)) - 16.0));
}

/// d, m, the fifth bits, 16 bytes of nibbles: d·q + m.
pub(super) fn q5_1(block: &[u8], numbers: &mut [f32]) {
    let ([d, m], five_bits) = ([half(block, 0), half(block, 2)], with_fifth_bit(block, 4));
    halves(&block[8..], numbers, |q, at| d * f32::from(five_bits(q, at)) + m);
}

/// d, 32 bytes: d·q.
pub(super) fn q8_0(block: &[u8], numbers: &mut [f32]) {
    let d = half(block, 0);
    for (number, &q) in numbers.iter_mut().zip(&block[2..]) {
        *number = d * f32::from(q.cast_signed());
    }
}

/// 16 scales and minima of 4 bits each, 64 bytes of 2 bits, d, dmin: d·scale·q − dmin·min.
pub(super) fn q2_k(block: &[u8], numbers: &mut [f32]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let [d, dmin] = [half(block, 80), half(block, 82)];
    for (group, numbers) in numbers.chunks_exact_mut(16).enumerate() {
        let [scale, min] = nibbles(scales[group]).map(f32::from);
        let (scale, min) = (d * scale, dmin * min);
        for (number, q) in numbers.iter_mut().zip(two_bits(quants, group)) {
            *number = scale * f32::from(q) - min;
        }
    }
}

/// The 2-bit numbers of a group of 16: each 128 numbers take 32 bytes, and the bits of a byte belong to four groups of 32.
fn two_bits(quants: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let shift = 2 * (group % 8 / 2);
    quants[32 * (group / 8) + 16 * (group % 2)..][..16].iter().map(move |byte| (byte >> shift) & 3)
}

/// The third bits in 32 bytes, 64 bytes of 2 bits, 16 scales of 6 bits in 12 bytes, d: d·(scale − 32)·(q − 4).
pub(super) fn q3_k(block: &[u8], numbers: &mut [f32]) {
    let (high, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half(block, 108);
    for (group, numbers) in numbers.chunks_exact_mut(16).enumerate() {
        let low = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
        let upper = (scales[8 + group % 4] >> (2 * (group / 4))) & 3;
        let scale = d * (f32::from(low | (upper << 4)) - 32.0);
        let third = high[16 * (group % 2)..][..16].iter().map(|byte| (byte >> (group / 2)) & 1);
        for ((number, q), third) in numbers.iter_mut().zip(two_bits(quants, group)).zip(third) {
            *number = scale * (f32::from(q | (third << 2)) - 4.0);
        }
    }
}

/// The eight scales and minima of 6 bits each that Q4_K and Q5_K store in 12 bytes.
fn scale_and_min(scales: &[u8], group: usize) -> [f32; 2] {
    let [scale, min] = match group {
        0..4 => [scales[group] & 63, scales[group + 4] & 63],
        _ => {
            let [scale, min] = nibbles(scales[group + 4]);
            [scale | (scales[group - 4] >> 6 << 4), min | (scales[group] >> 6 << 4)]
        }
    };
    [f32::from(scale), f32::from(min)]
}

/// The nibbles of a group of 32: two groups share 32 bytes.
fn four_bits(quants: &[u8], group: usize) -> impl Iterator<Item = u8> {
    quants[32 * (group / 2)..][..32].iter().map(move |&byte| nibbles(byte)[group % 2])
}

/// d, dmin, 8 scales and minima, 128 bytes of nibbles: d·scale·q − dmin·min.
pub(super) fn q4_k(block: &[u8], numbers: &mut [f32]) {
    let [d, dmin] = [half(block, 0), half(block, 2)];
    for (group, numbers) in numbers.chunks_exact_mut(32).enumerate() {
        let [scale, min] = scale_and_min(&block[4..16], group);
        let (scale, min) = (d * scale, dmin * min);
        for (number, q) in numbers.iter_mut().zip(four_bits(&block[16..], group)) {
            *number = scale * f32::from(q) - min;
        }
    }
}

/// As Q4_K, with the fifth bits in 32 bytes before the nibbles.
pub(super) fn q5_k(block: &[u8], numbers: &mut [f32]) {
    let [d, dmin] = [half(block, 0), half(block, 2)];
    let high = &block[16..48];
    for (group, numbers) in numbers.chunks_exact_mut(32).enumerate() {
        let [scale, min] = scale_and_min(&block[4..16], group);
        let (scale, min) = (d * scale, dmin * min);
        for ((number, q), high) in numbers.iter_mut().zip(four_bits(&block[48..], group)).zip(high) {
            *number = scale * f32::from(q | (((high >> group) & 1) << 4)) - min;
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of 2 high bits, 16 scales of 8 bits, d: d·scale·(q − 32).
pub(super) fn q6_k(block: &[u8], numbers: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half(block, 208);
    for (at, number) in numbers.iter_mut().enumerate() {
        let (part, row, column) = (at / 128, at % 128 / 32, at % 32);
        let nibble = nibbles(low[64 * part + 32 * (row % 2) + column])[row / 2];
        let upper = (high[32 * part + column] >> (2 * row)) & 3;
        let scale = d * f32::from(scales[at / 16].cast_signed());
        *number = scale * (f32::from(nibble | (upper << 4)) - 32.0);
    }
}

/// d, 16 bytes of nibbles that look up [`NON_LINEAR`].
pub(super) fn iq4_nl(block: &[u8], numbers: &mut [f32]) {
    let d = half(block, 0);
    halves(&block[2..], numbers, |q, _| d * f32::from(NON_LINEAR[usize::from(q)]));
}

/// d, 8 scales of 6 bits (the upper 2 in 2 bytes, the lower 4 in 4), 128 bytes of nibbles that look up [`NON_LINEAR`]: d·(scale − 32)·value.
pub(super) fn iq4_xs(block: &[u8], numbers: &mut [f32]) {
    let (d, upper) = (half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (group, numbers) in numbers.chunks_exact_mut(32).enumerate() {
        let low = nibbles(block[4 + group / 2])[group % 2];
        let high = ((upper >> (2 * group)) & 3) as u8;
        let scale = d * (f32::from(low | (high << 4)) - 32.0);
        halves(&block[8 + 16 * group..][..16], numbers, |q, _| scale * f32::from(NON_LINEAR[usize::from(q)]));
    }
}
