//! The types of GGUF's tensors: plain numbers, and blocks of a few bits per weight with scales of their own (ggml's `ggml-common.h`).

use std::fmt;

use half::{bf16, f16};
use rayon::prelude::*;

use super::codes::{self, CodedBlock, TakeApart};
use super::quantize::{self, Encode};

/// Numbers of a thread's turn: a multiple of every block's.
const TURN: usize = 1 << 14;

/// How the elements of a tensor are stored: in blocks of `numbers` elements and `bytes` bytes.
#[derive(Clone, Copy)]
pub struct TensorType {
    /// ggml's name, such as `Q4_K`.
    pub name: &'static str,
    id: u32,
    /// Elements of a block.
    pub numbers: usize,
    /// Bytes of a block.
    pub bytes: usize,
    elements: Elements,
}

/// What a block has.
#[derive(Clone, Copy)]
enum Elements {
    /// One number.
    Number(fn(&[u8]) -> f32),
    Codes(CodeFormat),
}

/// How a type of blocks stores codes.
#[derive(Clone, Copy)]
pub struct CodeFormat {
    take_apart: TakeApart,
    /// The code that stands for zero, before a minimum is subtracted.
    pub center: u8,
}

impl CodeFormat {
    /// The parts of a block, to `parts`.
    pub fn take_apart(&self, block: &[u8], parts: &mut CodedBlock) {
        (self.take_apart)(block, parts);
    }
}

impl TensorType {
    /// Writes the numbers of whole blocks to `numbers`, in float32.
    ///
    /// # Panics
    /// If the lengths are not those of the same number of blocks.
    pub fn dequantize(&self, blocks: &[u8], numbers: &mut [f32]) {
        let count = blocks.len() / self.bytes;
        assert_eq!((blocks.len(), numbers.len()), (count * self.bytes, count * self.numbers), "whole blocks");
        let blocks = blocks.chunks_exact(self.bytes);
        match &self.elements {
            Elements::Number(read) => blocks.zip(numbers).for_each(|(bytes, number)| *number = read(bytes)),
            Elements::Codes(format) => {
                let mut parts = CodedBlock::default();
                for (block, numbers) in blocks.zip(numbers.chunks_exact_mut(self.numbers)) {
                    format.take_apart(block, &mut parts);
                    parts.write(format.center, numbers);
                }
            }
        }
    }

    /// How it stores codes; `None` of plain numbers.
    pub fn codes(&self) -> Option<&CodeFormat> {
        match &self.elements {
            Elements::Number(_) => None,
            Elements::Codes(format) => Some(format),
        }
    }

    /// As [`TensorType::dequantize`], on all threads.
    ///
    /// # Panics
    /// As [`TensorType::dequantize`].
    pub fn dequantize_in_parallel(&self, blocks: &[u8], numbers: &mut [f32]) {
        let bytes = TURN / self.numbers * self.bytes;
        (numbers.par_chunks_mut(TURN).zip(blocks.par_chunks(bytes)))
            .for_each(|(numbers, blocks)| self.dequantize(blocks, numbers));
    }

    /// Appends numbers as blocks, made on all threads.
    ///
    /// # Panics
    /// If they are no whole blocks, or of a type that is not [written](WRITTEN).
    pub fn encode(&self, numbers: &[f32], blocks: &mut Vec<u8>) {
        let (_, encode) = WRITTEN.iter().find(|(name, _)| *name == self.name).expect("a type that is written");
        assert_eq!(numbers.len() % self.numbers, 0, "whole blocks");
        let turn = |numbers: &[f32]| {
            let mut blocks = Vec::with_capacity(numbers.len() / self.numbers * self.bytes);
            numbers.chunks_exact(self.numbers).for_each(|numbers| encode(numbers, &mut blocks));
            blocks
        };
        numbers.par_chunks(TURN).map(turn).collect::<Vec<_>>().iter().for_each(|turn| blocks.extend(turn));
    }

    /// Whether each number is stored by itself.
    pub fn is_dense(&self) -> bool {
        self.numbers == 1
    }

    /// The number in the file.
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// By ggml's name.
    pub fn named(name: &str) -> Option<&'static Self> {
        TYPES.iter().find(|known| known.name == name)
    }

    /// By the number in the file.
    pub fn find(id: u32) -> Option<&'static Self> {
        TYPES.iter().find(|known| known.id == id)
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for TensorType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for TensorType {}

const fn dense(id: u32, name: &'static str, bytes: usize, read: fn(&[u8]) -> f32) -> TensorType {
    TensorType { name, id, numbers: 1, bytes, elements: Elements::Number(read) }
}

/// Of blocks of `[numbers, bytes]`.
const fn blocks(
    id: u32,
    name: &'static str,
    [numbers, bytes]: [usize; 2],
    center: u8,
    take_apart: TakeApart,
) -> TensorType {
    TensorType { name, id, numbers, bytes, elements: Elements::Codes(CodeFormat { take_apart, center }) }
}

/// Types that are read.
pub static TYPES: [TensorType; 15] = [
    dense(0, "F32", 4, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
    dense(1, "F16", 2, |b| f16::from_le_bytes([b[0], b[1]]).to_f32()),
    dense(30, "BF16", 2, |b| bf16::from_le_bytes([b[0], b[1]]).to_f32()),
    blocks(2, "Q4_0", [32, 18], 8, codes::q4_0),
    blocks(3, "Q4_1", [32, 20], 0, codes::q4_1),
    blocks(6, "Q5_0", [32, 22], 16, codes::q5_0),
    blocks(7, "Q5_1", [32, 24], 0, codes::q5_1),
    blocks(8, "Q8_0", [32, 34], 128, codes::q8_0),
    blocks(10, "Q2_K", [256, 84], 0, codes::q2_k),
    blocks(11, "Q3_K", [256, 110], 4, codes::q3_k),
    blocks(12, "Q4_K", [256, 144], 0, codes::q4_k),
    blocks(13, "Q5_K", [256, 176], 0, codes::q5_k),
    blocks(14, "Q6_K", [256, 210], 32, codes::q6_k),
    blocks(20, "IQ4_NL", [32, 18], 128, codes::iq4_nl),
    blocks(23, "IQ4_XS", [256, 136], 128, codes::iq4_xs),
];

/// NF4 as the CPU's kernels multiply it, with d = absmax / 127. No file has it.
pub static NF4: TensorType = blocks(u32::MAX, "NF4", [32, 18], 128, codes::nf4);

/// Types that are written.
pub const WRITTEN: [(&str, Encode); 6] = [
    ("F32", quantize::f32),
    ("F16", quantize::f16),
    ("BF16", quantize::bf16),
    ("Q8_0", quantize::q8_0),
    ("Q4_0", quantize::q4_0),
    ("Q4_K", quantize::q4_k),
];

/// Types that are not read, so that an error can name them.
const OTHERS: [(u32, &str); 19] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

/// What an error says of a type that is not read.
pub(super) fn other_name(id: u32) -> String {
    let known = OTHERS.iter().find(|(other, _)| *other == id);
    known.map_or_else(|| format!("type {id}"), |(_, name)| (*name).to_owned())
}

/// The names of all types that are read.
pub(super) fn names() -> String {
    TYPES.each_ref().map(|known| known.name).join(", ")
}
