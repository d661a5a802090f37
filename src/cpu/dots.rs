//! Products as dot products of vectors.
//!
//! Four rows of `W` are interleaved line by line, so that the kernel reads one stream. An output is a dot product of 16 running sums,
//! added up in the same order whatever the number of rows of `x`.
#![expect(unsafe_code, reason = "parts of a job write to outputs of their own")]

// O outputs, I inputs, N rows of x
use std::array;
use std::ops::Range;

use super::Number;
use super::arena::{Arena, ArenaLines};
use super::lanes::{Instructions, LANES, Lanes, VectorLine, bytes_of, fetch, with_lanes};
use super::outputs::{Outputs, share};
use super::team::Team;

/// Outputs whose rows of weights are read together.
const TOGETHER: usize = 4;
/// Rows of weights between those that are read and those that are fetched, into the second cache: nearer ones come too late.
const AHEAD: usize = TOGETHER;
/// From so many blocks of x on, a group of weights stays in the second cache while the blocks pass: reading x for each four outputs would
/// take longer than reading the weights.
const MANY_BLOCKS: usize = 8;
/// Lines of weights in such a group.
const GROUP_LINES: usize = 2 << 10;
/// Most rows of x that are multiplied together ([`Lanes::BLOCK_ROWS`]).
const BLOCK_ROWS: usize = 6;

/// Weights `[O, I]` in lines of 64 bytes.
#[derive(Debug)]
pub(super) struct DotWeights {
    /// `[O / 4, lines of a row, 4]`; what is left of a row's last line and of the last 4 rows is zero.
    lines: ArenaLines,
    row_lines: usize,
    number: Number,
    inputs: usize,
}

impl DotWeights {
    /// Copies weights `[O, I]`, given as bytes.
    pub(super) fn new(weights: &[u8], number: Number, [outputs, inputs]: [usize; 2], arena: &mut Arena) -> Self {
        let row_bytes = inputs * number.bytes();
        let row_lines = row_bytes.div_ceil(size_of::<VectorLine>());
        let lines = arena.lines(outputs.next_multiple_of(TOGETHER) * row_lines, |lines| {
            for (o, row) in weights.chunks_exact(row_bytes).enumerate() {
                let first = o / TOGETHER * TOGETHER * row_lines + o % TOGETHER;
                for (k, line) in row.chunks(size_of::<VectorLine>()).enumerate() {
                    bytes_of(&mut lines[first + k * TOGETHER..][..1])[..line.len()].copy_from_slice(line);
                }
            }
        });
        Self { lines, row_lines, number, inputs }
    }

    /// The first outputs of rows `x_ni` `[N, I]`, to `y`.
    pub(super) fn multiply(&self, outputs: usize, x_ni: &[f32], y: &Outputs<'_>, team: &Team) {
        let instructions = Instructions::detected().expect("a matrix was made before, so the CPU has the kernels");
        self.multiply_with(instructions, outputs, x_ni, y, team);
    }

    fn multiply_with(&self, instructions: Instructions, outputs: usize, x_ni: &[f32], y: &Outputs<'_>, team: &Team) {
        let lines = outputs.next_multiple_of(TOGETHER) * self.row_lines;
        let passes = (x_ni.len() / self.inputs).div_ceil(4);
        let x = with_lanes!(instructions, lanes => PackedActivations::new(lanes, x_ni, self));
        share([outputs, LANES], [lines, passes], team, |range| {
            // SAFETY: parts write to different outputs.
            with_lanes!(instructions, lanes => unsafe {
                match self.number {
                    Number::Float32 => self.outputs_of::<_, false>(lanes, range.clone(), &x, y),
                    Number::BFloat16 => self.outputs_of::<_, true>(lanes, range.clone(), &x, y),
                }
            });
        });
    }

    /// Some outputs of all rows of x.
    ///
    /// # Safety
    /// Nobody else reads or writes these columns of `y`.
    #[inline(always)]
    unsafe fn outputs_of<L: Lanes, const BF16: bool>(
        &self,
        lanes: L,
        range: Range<usize>,
        x: &PackedActivations,
        y: &Outputs<'_>,
    ) {
        if x.blocks.len() < MANY_BLOCKS {
            // SAFETY: the caller's promise.
            return unsafe { self.four_by_four::<L, BF16>(lanes, range, x, y) };
        }
        let group = (GROUP_LINES / self.row_lines / TOGETHER * TOGETHER).max(TOGETHER);
        for first in range.clone().step_by(group) {
            for block in &x.blocks {
                let x_lines = &x.lines[block.lines.clone()];
                for o in (first..range.end.min(first + group)).step_by(TOGETHER) {
                    let w = self.four(o);
                    let sums = block_dots::<L, BF16, 0>(lanes, block.rows, w, x_lines, w.as_ptr().cast());
                    // SAFETY: the caller's promise.
                    unsafe { write_block(y, block, o..range.end.min(o + TOGETHER), &sums) };
                }
            }
        }
    }

    /// Some outputs of few rows of x, 4 after 4: their weights stay in the first cache for all rows, and the next ones are fetched.
    ///
    /// # Safety
    /// Nobody else reads or writes these columns of `y`.
    #[inline(always)]
    unsafe fn four_by_four<L: Lanes, const BF16: bool>(
        &self,
        lanes: L,
        range: Range<usize>,
        x: &PackedActivations,
        y: &Outputs<'_>,
    ) {
        let fetch = TOGETHER.div_ceil(x.blocks.len());
        for o in range.clone().step_by(TOGETHER) {
            let (w, mut fetched) = (self.four(o), 0);
            for block in &x.blocks {
                let lines = &x.lines[block.lines.clone()];
                let next = w.as_ptr_range().end.cast::<VectorLine>().wrapping_add((AHEAD + fetched) * w.len());
                let now = fetch.min(TOGETHER - fetched);
                fetched += now;
                let sums = match now {
                    4 => block_dots::<L, BF16, 4>(lanes, block.rows, w, lines, next),
                    2 => block_dots::<L, BF16, 2>(lanes, block.rows, w, lines, next),
                    1 => block_dots::<L, BF16, 1>(lanes, block.rows, w, lines, next),
                    _ => block_dots::<L, BF16, 0>(lanes, block.rows, w, lines, next),
                };
                // SAFETY: the caller's promise.
                unsafe { write_block(y, block, o..range.end.min(o + TOGETHER), &sums) };
            }
        }
    }

    /// The four rows of weights that `output` is of.
    fn four(&self, output: usize) -> &[[VectorLine; TOGETHER]] {
        let (fours, _) = self.lines.as_chunks();
        &fours[output / TOGETHER * self.row_lines..][..self.row_lines]
    }
}

/// Writes up to 4 outputs of a block of x.
///
/// # Safety
/// Nobody else reads or writes these columns of `y`.
#[inline(always)]
unsafe fn write_block(y: &Outputs<'_>, block: &Block, outputs: Range<usize>, sums: &BlockSums) {
    for r in 0..block.rows {
        // SAFETY: the caller's promise.
        unsafe { y.write(block.first + r, outputs.start, &sums[r * TOGETHER..][..outputs.len()]) };
    }
}

/// [`dots`] of a block of `rows` rows of x. With few registers, more than one row is multiplied with two rows of weights at a time.
#[inline(always)]
fn block_dots<L: Lanes, const BF16: bool, const FETCH: usize>(
    lanes: L,
    rows: usize,
    w: &[[VectorLine; TOGETHER]],
    x: &[VectorLine],
    next: *const VectorLine,
) -> BlockSums {
    if L::BLOCK_ROWS < BLOCK_ROWS {
        return match rows {
            1 => dots::<L, BF16, FETCH, 1, 4>(lanes, w, x, next),
            2 => dots::<L, BF16, FETCH, 2, 2>(lanes, w, x, next),
            _ => dots::<L, BF16, FETCH, 3, 2>(lanes, w, x, next),
        };
    }
    match rows {
        1 => dots::<L, BF16, FETCH, 1, 4>(lanes, w, x, next),
        2 => dots::<L, BF16, FETCH, 2, 4>(lanes, w, x, next),
        3 => dots::<L, BF16, FETCH, 3, 4>(lanes, w, x, next),
        4 => dots::<L, BF16, FETCH, 4, 4>(lanes, w, x, next),
        5 => dots::<L, BF16, FETCH, 5, 4>(lanes, w, x, next),
        _ => dots::<L, BF16, FETCH, 6, 4>(lanes, w, x, next),
    }
}

/// `[R, 4]` in the first places.
type BlockSums = [f32; TOGETHER * BLOCK_ROWS];

/// Products of `R` rows of x with 4 rows of weights, `T` of them at a time. For each line of these, a line of `FETCH` parts of the `next` is
/// fetched, each part as long as a row: all blocks of x together fetch the next 4 rows, so that memory is never idle. Parts side by side come
/// sooner than one after another.
#[inline(always)]
fn dots<L: Lanes, const BF16: bool, const FETCH: usize, const R: usize, const T: usize>(
    lanes: L,
    w: &[[VectorLine; TOGETHER]],
    x: &[VectorLine],
    next: *const VectorLine,
) -> BlockSums {
    let mut all = [[lanes.all(0.0); TOGETHER]; R];
    for first in (0..TOGETHER).step_by(T) {
        let mut sums = [[lanes.all(0.0); T]; R];
        for (k, (w_t, x_r)) in w.iter().zip(x.chunks_exact(R * x_lines::<L>(BF16))).enumerate() {
            for part in 0..if first == 0 { FETCH } else { 0 } {
                fetch(next.wrapping_add(part * w.len() + k));
            }
            lanes.add_products::<BF16, R, T>(&mut sums, &w_t[first..first + T], x_r);
        }
        for (all, sums) in all.iter_mut().zip(sums) {
            all[first..][..T].copy_from_slice(&sums);
        }
    }
    let mut out = [0.0; TOGETHER * BLOCK_ROWS];
    for (sums, out) in all.chunks(LANES / TOGETHER).zip(out.chunks_mut(LANES)) {
        let sum = |at: usize| sums.get(at / TOGETHER).map_or(lanes.all(0.0), |row| row[at % TOGETHER]);
        lanes.store(out, lanes.sum_each(array::from_fn(sum)));
    }
    out
}

/// Rows of x as the kernel reads them: in as few blocks as possible, of nearly equal numbers of rows; a block's rows line by line.
struct PackedActivations {
    lines: Vec<VectorLine>,
    blocks: Vec<Block>,
}

struct Block {
    /// The first of its rows.
    first: usize,
    rows: usize,
    lines: Range<usize>,
}

impl PackedActivations {
    #[inline(always)]
    fn new<L: Lanes>(lanes: L, x_ni: &[f32], weights: &DotWeights) -> Self {
        let rows = x_ni.len() / weights.inputs;
        let row_lines = weights.row_lines * x_lines::<L>(weights.number == Number::BFloat16);
        let mut packed = Self { lines: vec![VectorLine::ZERO; rows * row_lines], blocks: vec![] };
        let blocks = rows.div_ceil(L::BLOCK_ROWS);
        let mut first = 0;
        for block in 0..blocks {
            let rows = rows / blocks + usize::from(block < rows % blocks);
            let block = Block { first, rows, lines: first * row_lines..(first + rows) * row_lines };
            packed.fill(lanes, &block, &x_ni[first * weights.inputs..(first + rows) * weights.inputs], weights);
            packed.blocks.push(block);
            first += rows;
        }
        packed
    }

    #[inline(always)]
    fn fill<L: Lanes>(&mut self, lanes: L, block: &Block, x_ri: &[f32], weights: &DotWeights) {
        let is_bfloat16 = weights.number == Number::BFloat16;
        let numbers = size_of::<VectorLine>() / weights.number.bytes();
        for (r, x_i) in x_ri.chunks_exact(weights.inputs).enumerate() {
            let lines = self.lines[block.lines.clone()].chunks_exact_mut(x_lines::<L>(is_bfloat16));
            for (x, line) in x_i.chunks(numbers).zip(lines.skip(r).step_by(block.rows)) {
                match (is_bfloat16, x.first_chunk()) {
                    (false, _) => weights.number.write(x, &mut bytes_of(line)[..size_of_val(x)]),
                    (true, Some(x)) => lanes.write_bfloat16_x(x, line),
                    (true, None) => {
                        let mut padded = [0.0; 32];
                        padded[..x.len()].copy_from_slice(x);
                        lanes.write_bfloat16_x(&padded, line);
                    }
                }
            }
        }
    }
}

/// Lines of a row of x for a line of weights.
#[inline(always)]
const fn x_lines<L: Lanes>(is_bfloat16: bool) -> usize {
    if is_bfloat16 { L::BFLOAT16_X_LINES } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In float32 to the bit. In bfloat16 AVX-512 adds two products before it rounds, and what is nearly 0 is 0.
    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn all_vectors_compute_the_same_products() {
        let [outputs, inputs, rows] = [70, 147, 40];
        let number_at = |i: usize| ((i * 7919 + 13) % 2003) as f32 / 2000.0 - 0.5;
        let x: Vec<f32> = (0..rows * inputs).map(|i| number_at(i * 31)).collect();
        let w: Vec<f32> = (0..outputs * inputs).map(number_at).collect();
        for (number, limit) in [(Number::Float32, 0.0), (Number::BFloat16, 1e-5)] {
            let mut bytes = vec![0; w.len() * number.bytes()];
            number.write(&w, &mut bytes);
            let weights = DotWeights::new(&bytes, number, [outputs, inputs], &mut Arena::default());
            let each: Vec<Vec<f32>> = Instructions::all_detected()
                .map(|instructions| {
                    let mut y = vec![f32::NAN; rows * outputs];
                    weights.multiply_with(instructions, outputs, &x, &Outputs::new(&mut y, outputs), &Team::new(2));
                    y
                })
                .collect();
            for (a, b) in each.iter().flat_map(|other| other.iter().zip(&each[0])) {
                assert!((a - b).abs() <= limit, "{number:?}: {a}, {b}");
            }
        }
    }
}
