//! From numbers to a block, bit for bit as ggml's reference code and the `gguf` Python package.

use half::{bf16, f16};

/// A block of numbers, and where its bytes are appended.
pub(super) type Encode = fn(&[f32], &mut Vec<u8>);

pub(super) fn f32(numbers: &[f32], block: &mut Vec<u8>) {
    block.extend(numbers[0].to_le_bytes());
}

pub(super) fn f16(numbers: &[f32], block: &mut Vec<u8>) {
    block.extend(f16::from_f32(numbers[0]).to_le_bytes());
}

pub(super) fn bf16(numbers: &[f32], block: &mut Vec<u8>) {
    block.extend(bf16::from_f32(numbers[0]).to_le_bytes());
}

/// d, 32 signed bytes: the number is d·q. The largest one gets 127 or -127.
pub(super) fn q8_0(numbers: &[f32], block: &mut Vec<u8>) {
    let largest = numbers.iter().fold(0.0f32, |largest, number| largest.max(number.abs()));
    let d = largest / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    block.extend(f16::from_f32(d).to_le_bytes());
    #[expect(clippy::cast_possible_truncation, reason = "at most 127")]
    block.extend(numbers.iter().map(|number| (number * inverse).round() as i8 as u8));
}
