//! x rounded to 8 bits: 32 inputs share a scale, the largest of them by 127.

// I inputs, N rows of x
use super::layout::BLOCK;
use crate::cpu::lanes::Lanes;

/// 32 inputs of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CodedInputs {
    /// Codes, four signed bytes each.
    pub(super) quads: [i32; BLOCK / 4],
    pub(super) scale: f32,
    /// By group of inputs: what the sum of products with codes starts with, minus center · sum of codes.
    pub(super) starts: [i32; 2],
    /// By group of inputs: minus scale · sum of codes.
    pub(super) minus_sums: [f32; 2],
}

/// Rows of x, in as few row blocks as possible, of nearly equal numbers of rows.
pub(super) struct CodedActivations {
    /// By row block: `[I / 32, rows of the row block]`.
    inputs: Vec<CodedInputs>,
    pub(super) rows: usize,
    row_blocks: usize,
    /// I / 32.
    blocks: usize,
}

impl CodedActivations {
    /// Of `x_ni` `[N, I]`, for weights with so many `groups` in a block and such a `center`.
    #[inline(always)]
    pub(super) fn new<L: Lanes>(lanes: L, (x_ni, inputs): (&[f32], usize), (groups, center): (usize, u8)) -> Self {
        let (rows, blocks) = (x_ni.len() / inputs, inputs.div_ceil(BLOCK));
        let row_blocks = rows.div_ceil(L::CODED_ROWS);
        let mut coded = Self { inputs: vec![CodedInputs::default(); rows * blocks], rows, row_blocks, blocks };
        for index in 0..row_blocks {
            let (first, rows) = coded.row_block(index);
            for (r, x_i) in x_ni[first * inputs..(first + rows) * inputs].chunks_exact(inputs).enumerate() {
                let places = coded.inputs[first * blocks..].iter_mut().skip(r).step_by(rows);
                let (whole, rest) = x_i.as_chunks::<BLOCK>();
                for (x, place) in whole.iter().zip(places) {
                    *place = code(lanes, x, groups, center);
                }
                if !rest.is_empty() {
                    let mut padded = [0.0; BLOCK];
                    padded[..rest.len()].copy_from_slice(rest);
                    coded.inputs[first * blocks + (blocks - 1) * rows + r] = code(lanes, &padded, groups, center);
                }
            }
        }
        coded
    }

    /// First row and number of rows of a row block.
    fn row_block(&self, index: usize) -> (usize, usize) {
        let (rows, more) = (self.rows / self.row_blocks, self.rows % self.row_blocks);
        (index * rows + index.min(more), rows + usize::from(index < more))
    }

    /// The row blocks: first row, number of rows, and their inputs.
    pub(super) fn row_blocks(&self) -> impl Iterator<Item = (usize, usize, &[CodedInputs])> {
        (0..self.row_blocks).map(|index| {
            let (first, rows) = self.row_block(index);
            (first, rows, &self.inputs[first * self.blocks..][..rows * self.blocks])
        })
    }
}

/// Of a NaN or an infinity, the scale is NaN or infinite, and so becomes every output.
#[inline(always)]
fn code<L: Lanes>(lanes: L, x: &[f32; BLOCK], groups: usize, center: u8) -> CodedInputs {
    let largest = lanes.largest_magnitude(x);
    let scale = largest / 127.0;
    let mut quads = [0; BLOCK / 4];
    let [first, second] = lanes.write_rounded(x, if largest > 0.0 { 127.0 / largest } else { 0.0 }, &mut quads);
    let sums = if groups == 1 { [first + second, 0] } else { [first, second] };
    let [starts, minus_sums] = [-i32::from(center), -1].map(|factor| sums.map(|sum| factor * sum));
    CodedInputs { quads, scale, starts, minus_sums: minus_sums.map(|sum| scale * sum as f32) }
}
