//! x rounded to 8 bits: 32 inputs share a scale, the largest of them by 127.
#![expect(unsafe_code, reason = "parts of a job write to row blocks of their own")]

// I inputs, N rows of x
use super::layout::BLOCK;
use crate::cpu::lanes::{Instructions, Lanes, with_lanes};
use crate::cpu::rows::WORTH_SHARING;
use crate::cpu::shared::Shared;
use crate::cpu::team::Team;

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
    pub(super) fn new(
        instructions: Instructions,
        (x_ni, inputs): (&[f32], usize),
        (groups, center): (usize, u8),
        team: &Team,
    ) -> Self {
        let (rows, blocks) = (x_ni.len() / inputs, inputs.div_ceil(BLOCK));
        let most = with_lanes!(instructions, lanes => most_rows(lanes));
        let shape = Self { inputs: vec![], rows, row_blocks: rows.div_ceil(most), blocks };
        let mut coded = vec![CodedInputs::default(); rows * blocks];
        let out = Shared::new(&mut coded);
        let write = |index: usize| {
            let (first, rows) = shape.row_block(index);
            // SAFETY: row blocks do not meet.
            let places = unsafe { out.part(first * blocks, rows * blocks) };
            let x_ni = &x_ni[first * inputs..(first + rows) * inputs];
            with_lanes!(instructions, lanes => code_rows(lanes, (x_ni, inputs), (groups, center), places));
        };
        match x_ni.len() >= WORTH_SHARING {
            true => team.run(shape.row_blocks, write),
            false => (0..shape.row_blocks).for_each(write),
        }
        Self { inputs: coded, ..shape }
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

fn most_rows<L: Lanes>(_: L) -> usize {
    L::CODED_ROWS
}

/// The rows of a row block, to `[I / 32, rows]`.
#[inline(always)]
fn code_rows<L: Lanes>(
    lanes: L,
    (x_ni, inputs): (&[f32], usize),
    (groups, center): (usize, u8),
    places: &mut [CodedInputs],
) {
    let rows = x_ni.len() / inputs;
    for (r, x_i) in x_ni.chunks_exact(inputs).enumerate() {
        let (whole, rest) = x_i.as_chunks::<BLOCK>();
        for (block, x) in whole.iter().enumerate() {
            places[block * rows + r] = code(lanes, x, groups, center);
        }
        if !rest.is_empty() {
            let mut padded = [0.0; BLOCK];
            padded[..rest.len()].copy_from_slice(rest);
            places[whole.len() * rows + r] = code(lanes, &padded, groups, center);
        }
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
