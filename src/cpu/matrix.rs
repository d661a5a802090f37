//! Weights `[O, I]` for products `x·Wᵀ` of few rows, which run at memory bandwidth.
//!
//! Four rows of `W` are interleaved line by line, so that the kernel reads one stream. An output is a dot product of 16 running sums,
//! added up in the same order whatever the number of rows of `x`: a row's output is bit-identical alone and in a batch.
#![expect(unsafe_code, reason = "AVX-512; lengths are checked before the loops")]

// O outputs, I inputs, N rows of x
use std::arch::x86_64::*;
use std::array;
use std::ops::Range;

use super::Number;
use super::arena::{Arena, ArenaLines};
use super::lanes::{VectorLine, store, sum_each};
use super::shared::Shared;
use super::team::Team;

/// Lines of weights that a part of a job reads at least.
const LINES_OF_PART: usize = 1 << 10;
/// Two parts a thread: if one thread is slow, the other takes a part of its. The first lines of a part come late, so no more.
const PARTS_OF_THREAD: usize = 2;
/// Outputs whose rows of weights are read together.
const TOGETHER: usize = 4;
/// Rows of weights between those that are read and those that are fetched, into the second cache: nearer ones come too late.
const AHEAD: usize = TOGETHER;
/// Sums that are added up together.
const SUMS: usize = 16;
/// Rows of x that are multiplied together at most: their sums, and the weights, fill the registers.
const BLOCK_ROWS: usize = 6;

/// Weights `[O, I]`.
#[derive(Debug)]
pub struct Matrix {
    /// `[O / 4, lines of a row, 4]`; what is left of a row's last line and of the last 4 rows is zero.
    lines: ArenaLines,
    /// Of one row.
    row_lines: usize,
    number: Number,
    outputs: usize,
    inputs: usize,
}

impl Matrix {
    /// Copies weights `[O, I]`, given as bytes; `None` where the CPU cannot ([`super::available`]).
    ///
    /// # Panics
    /// If there are not O × I numbers, or the system has no memory.
    pub fn new(weights: &[u8], number: Number, [outputs, inputs]: [usize; 2], arena: &mut Arena) -> Option<Self> {
        if !super::available() {
            return None;
        }
        let row_bytes = inputs * number.bytes();
        assert_eq!(weights.len(), outputs * row_bytes, "[O, I] weights");
        let row_lines = row_bytes.div_ceil(size_of::<VectorLine>());
        let lines = arena.lines(outputs.next_multiple_of(TOGETHER) * row_lines, |lines| {
            for (o, row) in weights.chunks_exact(row_bytes).enumerate() {
                let first = o / TOGETHER * TOGETHER * row_lines + o % TOGETHER;
                for (k, line) in row.chunks(size_of::<VectorLine>()).enumerate() {
                    bytes_of(&mut lines[first + k * TOGETHER..][..1])[..line.len()].copy_from_slice(line);
                }
            }
        });
        Some(Self { lines, row_lines, number, outputs, inputs })
    }

    /// O.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// `y = x·Wᵀ`: `x_ni` `[N, I]` to `y_no` `[N, O]`. Weights of bfloat16 are multiplied by `x` rounded to bfloat16; sums are float32.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn multiply(&self, x_ni: &[f32], y_no: &mut [f32], team: &Team) {
        self.multiply_first(self.outputs, x_ni, y_no, team);
    }

    /// As [`Matrix::multiply`], of the first `outputs` outputs only: `y_no` is `[N, outputs]`.
    ///
    /// # Panics
    /// As [`Matrix::multiply`].
    pub fn multiply_first(&self, outputs: usize, x_ni: &[f32], y_no: &mut [f32], team: &Team) {
        let n = x_ni.len() / self.inputs;
        assert_eq!((x_ni.len(), y_no.len()), (n * self.inputs, n * outputs), "[N, I] and [N, O]");
        assert!(outputs <= self.outputs, "{outputs} of {} outputs", self.outputs);
        if n == 0 || outputs == 0 {
            return;
        }
        let lines = outputs.next_multiple_of(TOGETHER) * self.row_lines;
        let x = PackedActivations::new(x_ni, self);
        let y = OutputColumns { y: Shared::new(y_no), of_row: outputs };
        let parts = (lines / LINES_OF_PART).clamp(1, PARTS_OF_THREAD * team.size());
        let at_once = outputs.div_ceil(parts).next_multiple_of(SUMS);
        let part = |part: usize| {
            let range = part * at_once..outputs.min((part + 1) * at_once);
            // SAFETY: parts write to different outputs, and a matrix is made only where the CPU has what is needed.
            unsafe {
                match self.number {
                    Number::Float32 => self.outputs_of::<false>(range, &x, &y),
                    Number::BFloat16 => self.outputs_of::<true>(range, &x, &y),
                }
            }
        };
        let parts = outputs.div_ceil(at_once);
        // Below this, waiting for the others takes longer than the work.
        let worth_sharing = lines * n.div_ceil(4) >= 2 * LINES_OF_PART;
        if worth_sharing { team.run(parts, part) } else { (0..parts).for_each(part) }
    }

    /// Some outputs of all rows of x, 4 after 4: their weights stay in the first cache for all rows.
    ///
    /// # Safety
    /// Nobody else reads or writes these columns of `y`.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn outputs_of<const BF16: bool>(&self, range: Range<usize>, x: &PackedActivations, y: &OutputColumns<'_>) {
        let fetch = TOGETHER.div_ceil(x.blocks.len());
        for o in range.clone().step_by(TOGETHER) {
            let outputs = TOGETHER.min(range.end - o);
            let (w, mut fetched) = (self.four(o), 0);
            for block in &x.blocks {
                let lines = &x.lines[block.lines.clone()];
                let next = w.as_ptr_range().end.cast::<VectorLine>().wrapping_add((AHEAD + fetched) * w.len());
                let now = fetch.min(TOGETHER - fetched);
                fetched += now;
                let sums = match now {
                    4 => block_dots::<BF16, 4>(block.rows, w, lines, next),
                    2 => block_dots::<BF16, 2>(block.rows, w, lines, next),
                    1 => block_dots::<BF16, 1>(block.rows, w, lines, next),
                    _ => block_dots::<BF16, 0>(block.rows, w, lines, next),
                };
                for r in 0..block.rows {
                    // SAFETY: these columns are the caller's.
                    unsafe { y.y.write((block.first + r) * y.of_row + o, &sums[r * TOGETHER..][..outputs]) };
                }
            }
        }
    }

    /// The four rows of weights that `output` is of.
    fn four(&self, output: usize) -> &[[VectorLine; TOGETHER]] {
        let (fours, _) = self.lines.as_chunks();
        &fours[output / TOGETHER * self.row_lines..][..self.row_lines]
    }
}

/// Where the outputs go.
struct OutputColumns<'y> {
    y: Shared<'y, f32>,
    /// Outputs of a row.
    of_row: usize,
}

/// [`dots`] of a block of `rows` rows of x.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn block_dots<const BF16: bool, const FETCH: usize>(
    rows: usize,
    w: &[[VectorLine; TOGETHER]],
    x: &[VectorLine],
    next: *const VectorLine,
) -> BlockSums {
    match rows {
        1 => dots::<BF16, FETCH, 1>(w, x, next),
        2 => dots::<BF16, FETCH, 2>(w, x, next),
        3 => dots::<BF16, FETCH, 3>(w, x, next),
        4 => dots::<BF16, FETCH, 4>(w, x, next),
        5 => dots::<BF16, FETCH, 5>(w, x, next),
        _ => dots::<BF16, FETCH, 6>(w, x, next),
    }
}

/// `[R, 4]` in the first places.
type BlockSums = [f32; TOGETHER * BLOCK_ROWS];

/// Products of `R` rows of x with 4 rows of weights. For each line of these, `FETCH` lines of the `next` are fetched: all blocks of x
/// together fetch the next 4 rows, so that memory is never idle.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dots<const BF16: bool, const FETCH: usize, const R: usize>(
    w: &[[VectorLine; TOGETHER]],
    x: &[VectorLine],
    next: *const VectorLine,
) -> BlockSums {
    let mut sums = [[_mm512_setzero_ps(); TOGETHER]; R];
    let (x, _) = x.as_chunks::<R>();
    for (k, (w_t, x_r)) in w.iter().zip(x).enumerate() {
        for line in 0..FETCH {
            _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(k * FETCH + line).cast());
        }
        for r in 0..R {
            for t in 0..TOGETHER {
                sums[r][t] = add_product::<BF16>(sums[r][t], w_t[t], x_r[r]);
            }
        }
    }
    let mut out = [0.0; TOGETHER * BLOCK_ROWS];
    for (sums, out) in sums.chunks(SUMS / TOGETHER).zip(out.chunks_mut(SUMS)) {
        let sum = |at: usize| sums.get(at / TOGETHER).map_or(_mm512_setzero_ps(), |of_row| of_row[at % TOGETHER]);
        store(out, sum_each(array::from_fn(sum)));
    }
    out
}

/// A line of numbers rounded to bfloat16.
#[target_feature(enable = "avx512f,avx512bf16")]
fn bfloat16(x: &[f32; 32]) -> VectorLine {
    let (low, high) = x.split_at(16);
    // SAFETY: 16 numbers each; both types are 64 bytes, and any bytes are a line.
    unsafe {
        let (low, high) = (_mm512_loadu_ps(low.as_ptr()), _mm512_loadu_ps(high.as_ptr()));
        std::mem::transmute::<__m512bh, VectorLine>(_mm512_cvtne2ps_pbh(high, low))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn add_product<const BF16: bool>(sum: __m512, a: VectorLine, b: VectorLine) -> __m512 {
    if !BF16 {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
    // SAFETY: both are 64 bytes, and any bytes are bfloat16 numbers.
    let [a, b] = [a, b].map(|line| unsafe { std::mem::transmute::<VectorLine, __m512bh>(line) });
    _mm512_dpbf16_ps(sum, a, b)
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
    fn new(x_ni: &[f32], matrix: &Matrix) -> Self {
        let rows = x_ni.len() / matrix.inputs;
        // SAFETY: zeros are a line.
        let zero: VectorLine = unsafe { std::mem::zeroed() };
        let mut packed = Self { lines: vec![zero; rows * matrix.row_lines], blocks: vec![] };
        let blocks = rows.div_ceil(BLOCK_ROWS);
        let mut first = 0;
        for block in 0..blocks {
            let rows = rows / blocks + usize::from(block < rows % blocks);
            let block = Block { first, rows, lines: first * matrix.row_lines..(first + rows) * matrix.row_lines };
            packed.fill(&block, &x_ni[first * matrix.inputs..(first + rows) * matrix.inputs], matrix);
            packed.blocks.push(block);
            first += rows;
        }
        packed
    }

    fn fill(&mut self, block: &Block, x_ri: &[f32], matrix: &Matrix) {
        let numbers = size_of::<VectorLine>() / matrix.number.bytes();
        let lines = &mut self.lines[block.lines.clone()];
        for (r, x_i) in x_ri.chunks_exact(matrix.inputs).enumerate() {
            for (k, x) in x_i.chunks(numbers).enumerate() {
                let line = &mut lines[k * block.rows + r];
                match (matrix.number, x.first_chunk::<32>()) {
                    // SAFETY: there is a matrix, so the CPU has what this needs.
                    (Number::BFloat16, Some(x)) => *line = unsafe { bfloat16(x) },
                    _ => matrix.number.write(x, bytes_of(std::slice::from_mut(line))),
                }
            }
        }
    }
}

fn bytes_of(lines: &mut [VectorLine]) -> &mut [u8] {
    // SAFETY: lines are bytes without holes.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// The product in float64, of numbers as they are stored.
    fn oracle(w: &[f64], x: &[f64], inputs: usize) -> Vec<f64> {
        let dot = |x_i: &[f64], w_i: &[f64]| x_i.iter().zip(w_i).map(|(x, w)| x * w).sum::<f64>();
        x.chunks_exact(inputs).flat_map(|x_i| w.chunks_exact(inputs).map(move |w_i| dot(x_i, w_i))).collect()
    }

    fn random(count: usize, seed: u64) -> Vec<f32> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        (0..count).map(|_| rng.random::<f32>() - 0.5).collect()
    }

    fn stored(x: &[f32], number: Number) -> (Vec<u8>, Vec<f64>) {
        let mut bytes = vec![0; x.len() * number.bytes()];
        number.write(x, &mut bytes);
        let read = |bytes: &[u8]| match number {
            Number::Float32 => f64::from(f32::from_ne_bytes(bytes.try_into().expect("4 bytes"))),
            Number::BFloat16 => f64::from(half::bf16::from_ne_bytes(bytes.try_into().expect("2 bytes"))),
        };
        let numbers = bytes.chunks_exact(number.bytes()).map(read).collect();
        (bytes, numbers)
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX-512 with bfloat16")]
    fn products_equal_float64_and_are_the_same_bits_in_any_number_of_rows() {
        let (team, mut arena) = (Team::new(2), Arena::default());
        for number in [Number::Float32, Number::BFloat16] {
            for (outputs, inputs) in [(1, 1), (3, 5), (16, 64), (50, 172), (67, 33), (1030, 130)] {
                let (w, w_read) = stored(&random(outputs * inputs, 1), number);
                let matrix = Matrix::new(&w, number, [outputs, inputs], &mut arena).expect("a CPU with the kernels");
                let x = random(11 * inputs, 2);
                let expected = oracle(&w_read, &stored(&x, number).1, inputs);
                let rows = |x: &[f32]| {
                    let mut y = vec![f32::NAN; x.len() / inputs * outputs];
                    matrix.multiply(x, &mut y, &team);
                    y
                };
                let one_by_one: Vec<f32> = x.chunks_exact(inputs).flat_map(rows).collect();
                for (y, expected) in one_by_one.iter().zip(&expected) {
                    assert!((f64::from(*y) - expected).abs() < 1e-5, "{number:?} {outputs}x{inputs}: {y}, {expected}");
                }
                for n in [2, 3, 4, 7, 11] {
                    assert_eq!(rows(&x[..n * inputs]), one_by_one[..n * outputs], "{number:?}, {n} rows");
                }
                let some = outputs.div_ceil(2);
                let mut y = vec![f32::NAN; 11 * some];
                matrix.multiply_first(some, &x, &mut y, &team);
                for (y, all) in y.chunks_exact(some).zip(one_by_one.chunks_exact(outputs)) {
                    assert_eq!(y, &all[..some], "{number:?}, {some} of {outputs} outputs");
                }
            }
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX-512 with bfloat16")]
    #[should_panic(expected = "[N, I] and [N, O]")]
    fn lengths_are_checked() {
        let matrix = Matrix::new(&[0; 4 * 6], Number::Float32, [2, 3], &mut Arena::default());
        matrix.expect("a CPU with the kernels").multiply(&[0.0; 6], &mut [0.0; 2], &Team::new(1));
    }
}
