//! From numbers to a block. All but Q4_K bit for bit as ggml's reference code and the `gguf` Python package, which has no Q4_K.

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

/// d, 16 bytes of two codes each: the number is d·(q - 8). The one of the largest magnitude gets code 0.
pub(super) fn q4_0(numbers: &[f32], block: &mut Vec<u8>) {
    let largest =
        numbers.iter().fold(0.0f32, |largest, &number| if number.abs() > largest.abs() { number } else { largest });
    let d = largest / -8.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    block.extend(f16::from_f32(d).to_le_bytes());
    let code = |number: f32| ((number * inverse + 8.5) as u8).min(15);
    let (first, second) = numbers.split_at(16);
    block.extend(first.iter().zip(second).map(|(&first, &second)| code(first) | code(second) << 4));
}

/// d, dmin, 8 scales and minima of 6 bits, 128 bytes of two codes each: the number is d·scale·q - dmin·minimum.
pub(super) fn q4_k(numbers: &[f32], block: &mut Vec<u8>) {
    let groups = numbers.as_chunks::<32>().0;
    let found: Vec<[f32; 2]> = groups.iter().map(fitted).collect();
    let largest = [0, 1].map(|part| found.iter().fold(0.0f32, |largest, found| largest.max(found[part])));
    let [d, dmin] = largest.map(|largest| f16::from_f32(largest / 63.0));
    block.extend([d.to_le_bytes(), dmin.to_le_bytes()].concat());
    let in_6_bits = |part: usize| {
        let inverse = if largest[part] > 0.0 { 63.0 / largest[part] } else { 0.0 };
        found.iter().map(|found| (found[part] * inverse).round() as u8).collect::<Vec<_>>()
    };
    let (scales, minima) = (in_6_bits(0), in_6_bits(1));
    let upper = |at: usize| [&scales, &minima].map(|all| all[at] | all[at + 4] >> 4 << 6);
    block.extend((0..4).map(|at| upper(at)[0]));
    block.extend((0..4).map(|at| upper(at)[1]));
    block.extend((4..8).map(|at| scales[at] & 15 | (minima[at] & 15) << 4));
    let code = |group: usize, number: f32| {
        let (scale, minimum) = (d.to_f32() * f32::from(scales[group]), dmin.to_f32() * f32::from(minima[group]));
        if scale > 0.0 { ((number + minimum) / scale).round().clamp(0.0, 15.0) as u8 } else { 0 }
    };
    for (pair, groups) in groups.chunks_exact(2).enumerate() {
        let codes = groups[0].iter().zip(&groups[1]);
        block.extend(codes.map(|(&low, &high)| code(2 * pair, low) | code(2 * pair + 1, high) << 4));
    }
}

/// Scale and minimum, neither negative, with which codes from 0 to 15 come nearest to the numbers: of some ranges of codes, each with the scale and the
/// minimum of least squares. Large numbers count more.
fn fitted(numbers: &[f32; 32]) -> [f32; 2] {
    const RANGES: i32 = 20;
    let (low, high) = numbers.iter().fold((0.0f32, 0.0f32), |(low, high), &x| (low.min(x), high.max(x)));
    if low == high {
        return [0.0; 2];
    }
    let size = (numbers.iter().map(|x| x * x).sum::<f32>() / 32.0).sqrt();
    let weight = |x: f32| size + x.abs();
    let error = |[scale, minimum]: [f32; 2]| {
        let off = |x: f32| scale * ((x + minimum) / scale).round().clamp(0.0, 15.0) - minimum - x;
        numbers.iter().map(|&x| weight(x) * off(x) * off(x)).sum::<f32>()
    };
    let fit = |range: i32| {
        let inverse = (14.0 + 0.1 * range as f32) / (high - low);
        let [mut w, mut q, mut qq, mut x, mut qx] = [0.0f32; 5];
        for &number in numbers {
            let (weight, code) = (weight(number), ((number - low) * inverse).round().clamp(0.0, 15.0));
            (w, q, qq) = (w + weight, q + weight * code, qq + weight * code * code);
            (x, qx) = (x + weight * number, qx + weight * code * number);
        }
        let determinant = w * qq - q * q;
        let [scale, minimum] = [(w * qx - x * q) / determinant, (q * qx - qq * x) / determinant];
        if minimum >= 0.0 { [scale, minimum] } else { [qx / qq, 0.0] }
    };
    let whole = [(high - low) / 15.0, -low];
    let fits = (0..=RANGES).map(fit).filter(|[scale, minimum]| *scale > 0.0 && minimum.is_finite());
    fits.chain([whole]).min_by(|a, b| error(*a).total_cmp(&error(*b))).expect("at least one")
}
