//! How blocks lie in lines. A unit is some blocks of 32 inputs of 16 outputs: their codes, then their scales.
//!
//! A line of codes has 4 inputs of each output, 64 codes. Those of 4 bits share a line by two: of lines 2i and 2i + 1, the low and the high
//! nibbles; they may look up codes of 8 bits. The fifth bits of a block's 8 lines are one line more, bit i of a byte for line i; the upper two bits of codes of 6 bits are two lines
//! more, of four lines each.

use std::array;
use std::marker::PhantomData;

use rayon::prelude::*;

use crate::cpu::lanes::{LANES, Lanes, VectorLine, bytes_in, bytes_of};
use crate::gguf::codes::{CodedBlock, GROUP, NON_LINEAR, NORMAL_FLOAT};
use crate::gguf::types::TensorType;

/// Inputs of a block.
pub(super) const BLOCK: usize = 32;

/// A layout of codes and scales.
pub(super) trait BlockLayout {
    /// Of a stored code, and lines of a block's codes.
    const BITS: usize;
    /// The codes that the stored ones stand for.
    const BOOK: Option<&'static [u8; 16]> = None;
    /// Whether codes have 8 bits when they are multiplied.
    const WIDE: bool = Self::BITS == 8 || Self::BOOK.is_some();
    type Scales: ScaleLayout;

    /// Of a unit.
    const LINES: usize = Self::Scales::BLOCKS * Self::BITS + Self::Scales::LINES;
}

/// Where the scales of a unit are.
pub(super) trait ScaleLayout {
    /// Blocks of a unit.
    const BLOCKS: usize;
    const LINES: usize;
    /// Scales of a block.
    const GROUPS: usize;
    const HAS_MINIMA: bool;

    /// Of 16 outputs.
    fn scale<L: Lanes>(lanes: L, lines: &[VectorLine], block: usize, group: usize) -> L::Vector;

    /// What is subtracted from the numbers of 16 outputs, if there are minima.
    fn minimum<L: Lanes>(lanes: L, lines: &[VectorLine], block: usize, group: usize) -> L::Vector;

    /// Writes the scales of a block of one output, the part `part` of a block of the file.
    fn write(lines: &mut [VectorLine], block: usize, output: usize, part: usize, parts: &CodedBlock);
}

/// Codes of so many bits.
pub(super) struct CodeLayout<const BITS: usize, S>(S);

impl<const BITS: usize, S: ScaleLayout> BlockLayout for CodeLayout<BITS, S> {
    const BITS: usize = BITS;
    type Scales = S;
}

/// Codes of 4 bits that look up 16 codes of 8 bits.
pub(super) struct BookLayout<B, S>(PhantomData<(B, S)>);

/// 16 codes of 8 bits.
pub(super) trait Book {
    const CODES: &'static [u8; 16];
}

/// Of IQ4_NL and IQ4_XS.
pub(super) struct NonLinear;

impl Book for NonLinear {
    const CODES: &'static [u8; 16] = &NON_LINEAR;
}

/// Of NF4.
pub(super) struct NormalFloat;

impl Book for NormalFloat {
    const CODES: &'static [u8; 16] = &NORMAL_FLOAT;
}

impl<B: Book, S: ScaleLayout> BlockLayout for BookLayout<B, S> {
    const BITS: usize = 4;
    const BOOK: Option<&'static [u8; 16]> = Some(B::CODES);
    type Scales = S;
}

/// The layout of a type of blocks.
macro_rules! with_layout {
    ($kind:expr, $layout:ident => $body:expr) => {{
        use $crate::cpu::blocks::layout::{
            BookLayout, ByteScales, CodeLayout, HalfScales, HalvesAndMinima, NonLinear, NormalFloat,
        };
        macro_rules! with {
            ($bits:literal, $scales:ty) => {{
                type $layout = CodeLayout<$bits, $scales>;
                $body
            }};
            ($book:ident, $scales:ty) => {{
                type $layout = BookLayout<$book, $scales>;
                $body
            }};
        }
        match $kind.name {
            "Q4_0" => with!(4, HalfScales),
            "Q5_0" => with!(5, HalfScales),
            "Q8_0" => with!(8, HalfScales),
            "IQ4_NL" => with!(NonLinear, HalfScales),
            "NF4" => with!(NormalFloat, HalfScales),
            "Q4_1" => with!(4, HalvesAndMinima),
            "Q5_1" => with!(5, HalvesAndMinima),
            "Q4_K" => with!(4, ByteScales<1, true>),
            "Q5_K" => with!(5, ByteScales<1, true>),
            "Q2_K" => with!(4, ByteScales<2, true>),
            "Q3_K" => with!(4, ByteScales<2, false>),
            "Q6_K" => with!(6, ByteScales<2, false>),
            "IQ4_XS" => with!(NonLinear, ByteScales<1, false>),
            name => unreachable!("{name} has no blocks"),
        }
    }};
}
pub(super) use with_layout;

/// float16 scales, of two blocks in a line.
pub(super) struct HalfScales;

impl ScaleLayout for HalfScales {
    const BLOCKS: usize = 2;
    const LINES: usize = 1;
    const GROUPS: usize = 1;
    const HAS_MINIMA: bool = false;

    #[inline(always)]
    fn scale<L: Lanes>(lanes: L, lines: &[VectorLine], block: usize, _: usize) -> L::Vector {
        lanes.float16(bytes_at(lines, 32 * block))
    }

    #[inline(always)]
    fn minimum<L: Lanes>(lanes: L, _: &[VectorLine], _: usize, _: usize) -> L::Vector {
        lanes.all(0.0)
    }

    fn write(lines: &mut [VectorLine], block: usize, output: usize, _: usize, parts: &CodedBlock) {
        put(lines, 32 * block + 2 * output, &parts.d.to_le_bytes());
    }
}

/// float16 scales and minima of a block, a line.
pub(super) struct HalvesAndMinima;

impl ScaleLayout for HalvesAndMinima {
    const BLOCKS: usize = 1;
    const LINES: usize = 1;
    const GROUPS: usize = 1;
    const HAS_MINIMA: bool = true;

    #[inline(always)]
    fn scale<L: Lanes>(lanes: L, lines: &[VectorLine], _: usize, _: usize) -> L::Vector {
        lanes.float16(bytes_at(lines, 0))
    }

    #[inline(always)]
    fn minimum<L: Lanes>(lanes: L, lines: &[VectorLine], _: usize, _: usize) -> L::Vector {
        lanes.float16(bytes_at(lines, 32))
    }

    fn write(lines: &mut [VectorLine], _: usize, output: usize, _: usize, parts: &CodedBlock) {
        put(lines, 2 * output, &parts.d.to_le_bytes());
        put(lines, 32 + 2 * output, &parts.dmin.to_le_bytes());
    }
}

/// Scales, and minima if there are, of a byte each for 32 or 16 inputs, block after block; then d and dmin of the 256 inputs in float16.
pub(super) struct ByteScales<const GROUPS: usize, const MINIMA: bool>;

impl<const GROUPS: usize, const MINIMA: bool> ByteScales<GROUPS, MINIMA> {
    /// Bytes of a block's scales and minima.
    const BYTES: usize = LANES * GROUPS * if MINIMA { 2 } else { 1 };

    #[inline(always)]
    fn both(lines: &[VectorLine]) -> &[VectorLine] {
        &lines[Self::LINES - 1..Self::LINES]
    }
}

impl<const GROUPS: usize, const MINIMA: bool> ScaleLayout for ByteScales<GROUPS, MINIMA> {
    const BLOCKS: usize = 8;
    const LINES: usize = 8 * Self::BYTES / size_of::<VectorLine>() + 1;
    const GROUPS: usize = GROUPS;
    const HAS_MINIMA: bool = MINIMA;

    #[inline(always)]
    fn scale<L: Lanes>(lanes: L, lines: &[VectorLine], block: usize, group: usize) -> L::Vector {
        let scale = lanes.signed(bytes_at(lines, block * Self::BYTES + LANES * group));
        lanes.multiply(lanes.float16(bytes_at(Self::both(lines), 0)), scale)
    }

    #[inline(always)]
    fn minimum<L: Lanes>(lanes: L, lines: &[VectorLine], block: usize, group: usize) -> L::Vector {
        if !MINIMA {
            return lanes.all(0.0);
        }
        let minimum = lanes.signed(bytes_at(lines, block * Self::BYTES + LANES * (GROUPS + group)));
        lanes.multiply(lanes.float16(bytes_at(Self::both(lines), 32)), minimum)
    }

    fn write(lines: &mut [VectorLine], block: usize, output: usize, part: usize, parts: &CodedBlock) {
        for group in 0..GROUPS {
            let (at, from) = (block * Self::BYTES + LANES * group + output, part * BLOCK / GROUP + group);
            put(lines, at, &parts.scales[from].to_le_bytes());
            if MINIMA {
                put(lines, at + LANES * GROUPS, &parts.minima[from].to_le_bytes());
            }
        }
        let both = 64 * (Self::LINES - 1) + 2 * output;
        put(lines, both, &parts.d.to_le_bytes());
        put(lines, both + 32, &parts.dmin.to_le_bytes());
    }
}

#[inline(always)]
fn bytes_at<const N: usize>(lines: &[VectorLine], at: usize) -> &[u8; N] {
    bytes_in(lines)[at..].first_chunk().expect("within the lines")
}

fn put(lines: &mut [VectorLine], at: usize, bytes: &[u8]) {
    bytes_of(lines)[at..][..bytes.len()].copy_from_slice(bytes);
}

/// Lays out rows of a type of blocks, in parallel.
pub(super) fn fill<B: BlockLayout>(
    lines: &mut [VectorLine],
    strip_lines: usize,
    rows: &[u8],
    (kind, row_bytes): (&TensorType, usize),
) {
    let format = kind.codes().expect("a type with blocks");
    let stored = stored_codes::<B>();
    lines.par_chunks_mut(strip_lines).zip(rows.par_chunks(LANES * row_bytes)).for_each(|(strip, rows)| {
        let mut parts = CodedBlock::default();
        for (output, row) in rows.chunks_exact(row_bytes).enumerate() {
            for (at, block) in row.chunks_exact(kind.bytes).enumerate() {
                format.take_apart(block, &mut parts);
                let each = parts.codes[..kind.numbers].as_chunks::<BLOCK>().0.iter().enumerate();
                for (part, codes) in each {
                    let block = at * (kind.numbers / BLOCK) + part;
                    let (unit, block) = (block / B::Scales::BLOCKS, block % B::Scales::BLOCKS);
                    let (all, scales) = strip[unit * B::LINES..][..B::LINES].split_at_mut(B::Scales::BLOCKS * B::BITS);
                    let lines = bytes_of(&mut all[block * B::BITS..][..B::BITS]);
                    write_codes::<B>(lines, output, codes.map(|code| stored[usize::from(code)]));
                    B::Scales::write(scales, block, output, part, &parts);
                }
            }
        }
    });
}

/// By code, how it is stored.
fn stored_codes<B: BlockLayout>() -> [u8; 256] {
    let mut stored = array::from_fn(|code| code as u8);
    for (at, code) in B::BOOK.into_iter().flatten().enumerate() {
        stored[usize::from(*code)] = at as u8;
    }
    stored
}

/// The stored codes of a block of one output.
fn write_codes<B: BlockLayout>(lines: &mut [u8], output: usize, codes: [u8; BLOCK]) {
    for (input, code) in codes.into_iter().enumerate() {
        let (quad, byte) = (input / 4, 4 * output + input % 4);
        if B::BITS == 8 {
            lines[64 * quad + byte] = code;
            continue;
        }
        lines[64 * (quad / 2) + byte] |= (code & 15) << (4 * (quad % 2));
        match B::BITS {
            5 => lines[64 * 4 + byte] |= (code >> 4) << quad,
            6 => lines[64 * (4 + quad / 4) + byte] |= (code >> 4) << (2 * (quad % 4)),
            _ => {}
        }
    }
}

/// The codes of a line of a block, apart from each other.
#[inline(always)]
pub(super) fn code_line<L: Lanes, B: BlockLayout>(lanes: L, lines: &[VectorLine], line: usize) -> L::Codes {
    if B::BITS == 8 {
        return lanes.codes(&lines[line]);
    }
    let (at, low) = (line as u32, lanes.field(lanes.codes(&lines[line / 2]), 4 * (line as u32 % 2), 4, 0));
    match B::BITS {
        5 => lanes.either(low, lanes.field(lanes.codes(&lines[4]), at, 1, 4)),
        6 => lanes.either(low, lanes.field(lanes.codes(&lines[4 + line / 4]), 2 * (at % 4), 2, 4)),
        _ => match B::BOOK {
            Some(book) => lanes.looked_up(book, low),
            None => low,
        },
    }
}
