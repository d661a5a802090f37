//! Products of weights in blocks of few bits, as GGUF files have them, with x rounded to 8 bits.
//!
//! Weights stay the numbers of the file. The products of a block, or of each half that has a scale of its own, are added up as whole numbers,
//! exactly; each sum then joins the output in float32, block after block. So an output has the same bits whatever the number of rows of x and
//! of threads, and whatever vectors the CPU has.
//!
//! 16 outputs are interleaved, so that the kernel reads one stream.
#![expect(unsafe_code, reason = "parts of a job write to outputs of their own")]

// O outputs, I inputs, N rows of x
use std::ops::Range;

use super::arena::{Arena, ArenaLines};
use super::lanes::{Instructions, LANES, Lanes, VectorLine, fetch, with_lanes};
use super::outputs::{Outputs, share};
use super::team::Team;
use crate::gguf::types::TensorType;

mod activations;
mod layout;

use activations::{CodedActivations, CodedInputs};
use layout::{BLOCK, BlockLayout, ScaleLayout, code_line, with_layout};

/// Lines between those that are read and those that are fetched.
const AHEAD: usize = 64;
/// Most rows of x that are multiplied together ([`Lanes::CODED_ROWS`]).
const MOST_ROWS: usize = 8;

/// Weights `[O, I]` in blocks.
#[derive(Debug)]
pub(super) struct BlockWeights {
    /// `[O / 16, units]`; what is left of a strip's last unit and of the last 16 outputs is zero.
    lines: ArenaLines,
    /// Lines of 16 outputs.
    strip_lines: usize,
    kind: &'static TensorType,
    inputs: usize,
    /// Of each output, in whole strips.
    factors_o: Vec<f32>,
}

impl BlockWeights {
    /// Copies weights `[O, I]`, given as rows of blocks.
    ///
    /// # Panics
    /// If the type has no blocks.
    pub(super) fn new(
        rows: &[u8],
        kind: &'static TensorType,
        [outputs, inputs]: [usize; 2],
        arena: &mut Arena,
    ) -> Self {
        let (strips, blocks) = (outputs.div_ceil(LANES), inputs.div_ceil(BLOCK));
        let row_bytes = inputs.div_ceil(kind.numbers) * kind.bytes;
        let strip_lines = with_layout!(kind, B => blocks.div_ceil(<B as BlockLayout>::Scales::BLOCKS) * B::LINES);
        let lines = arena.lines(strips * strip_lines, |lines| {
            with_layout!(kind, B => layout::fill::<B>(lines, strip_lines, rows, (kind, row_bytes)));
        });
        Self { lines, strip_lines, kind, inputs, factors_o: vec![1.0; strips * LANES] }
    }

    /// These weights, those of each output times its factor.
    pub(super) fn times(mut self, factors_o: impl Iterator<Item = f32>) -> Self {
        self.factors_o.iter_mut().zip(factors_o).for_each(|(factor, times)| *factor *= times);
        self
    }

    /// The first outputs of rows `x_ni` `[N, I]`, to `y`.
    pub(super) fn multiply(&self, outputs: usize, x_ni: &[f32], y: &Outputs<'_>, team: &Team) {
        let instructions = Instructions::detected().expect("a matrix was made before, so the CPU has the kernels");
        self.multiply_with(instructions, outputs, x_ni, y, team);
    }

    fn multiply_with(&self, instructions: Instructions, outputs: usize, x_ni: &[f32], y: &Outputs<'_>, team: &Team) {
        with_layout!(self.kind, B => self.multiply_in::<B>(instructions, outputs, (x_ni, y), team));
    }

    fn multiply_in<B: BlockLayout>(
        &self,
        instructions: Instructions,
        outputs: usize,
        (x_ni, y): (&[f32], &Outputs<'_>),
        team: &Team,
    ) {
        let x = self.coded::<B>(instructions, x_ni, team);
        let lines = outputs.div_ceil(LANES) * self.strip_lines;
        share([outputs, LANES], [lines, x.rows.div_ceil(4)], team, |range| {
            // SAFETY: parts write to different outputs.
            with_lanes!(instructions, lanes => unsafe { self.outputs_of::<_, B>(lanes, range.clone(), &x, y) });
        });
    }

    fn coded<B: BlockLayout>(&self, instructions: Instructions, x_ni: &[f32], team: &Team) -> CodedActivations {
        let center_of_bytes = with_lanes!(instructions, lanes => center_of_bytes(lanes));
        let center = self.kind.codes().expect("blocks").center - if B::WIDE { center_of_bytes } else { 0 };
        CodedActivations::new(instructions, (x_ni, self.inputs), (B::Scales::GROUPS, center), team)
    }

    /// Some outputs of all rows of x, 16 after 16: their weights stay in the first cache for all rows, and the next ones are fetched.
    ///
    /// # Safety
    /// Nobody else reads or writes these columns of `y`.
    #[inline(always)]
    unsafe fn outputs_of<L: Lanes, B: BlockLayout>(
        &self,
        lanes: L,
        range: Range<usize>,
        x: &CodedActivations,
        y: &Outputs<'_>,
    ) {
        let mut sums = [[0.0; LANES]; MOST_ROWS];
        for o in range.clone().step_by(LANES) {
            let strip = &self.lines[o / LANES * self.strip_lines..][..self.strip_lines];
            for (first, rows, x) in x.row_blocks() {
                strip_sums_of::<L, B>(lanes, strip, (rows, x), first == 0, &mut sums);
                let factors = lanes.load(&self.factors_o[o..o + LANES]);
                for (r, sums) in sums[..rows].iter_mut().enumerate() {
                    let times_factors = lanes.multiply(lanes.load(sums), factors);
                    lanes.store(sums, times_factors);
                    // SAFETY: the caller's promise.
                    unsafe { y.write(first + r, o, &sums[..LANES.min(range.end - o)]) };
                }
            }
        }
    }
}

fn center_of_bytes<L: Lanes>(_: L) -> u8 {
    L::CENTER_OF_BYTES
}

/// [`strip_sums`] of a number of rows.
#[inline(always)]
fn strip_sums_of<L: Lanes, B: BlockLayout>(
    lanes: L,
    strip: &[VectorLine],
    (rows, x): (usize, &[CodedInputs]),
    fetches: bool,
    out: &mut [[f32; LANES]; MOST_ROWS],
) {
    match rows {
        1 => strip_sums::<L, B, 1>(lanes, strip, x, fetches, out),
        2 => strip_sums::<L, B, 2>(lanes, strip, x, fetches, out),
        3 => strip_sums::<L, B, 3>(lanes, strip, x, fetches, out),
        4 => strip_sums::<L, B, 4>(lanes, strip, x, fetches, out),
        5 => strip_sums::<L, B, 5>(lanes, strip, x, fetches, out),
        6 => strip_sums::<L, B, 6>(lanes, strip, x, fetches, out),
        7 => strip_sums::<L, B, 7>(lanes, strip, x, fetches, out),
        _ => strip_sums::<L, B, 8>(lanes, strip, x, fetches, out),
    }
}

/// 16 outputs of `R` rows of x; `fetches` the lines that follow.
#[inline(always)]
fn strip_sums<L: Lanes, B: BlockLayout, const R: usize>(
    lanes: L,
    strip: &[VectorLine],
    x: &[CodedInputs],
    fetches: bool,
    out: &mut [[f32; LANES]; MOST_ROWS],
) {
    let mut sums = [lanes.all(0.0); R];
    let mut x_blocks = x.as_chunks::<R>().0.iter();
    for unit in strip.chunks_exact(B::LINES) {
        if fetches {
            (0..B::LINES).for_each(|line| fetch(unit.as_ptr().wrapping_add(AHEAD + line)));
        }
        let (codes, scales) = unit.split_at(B::Scales::BLOCKS * B::BITS);
        for (block, codes) in codes.chunks_exact(B::BITS).enumerate() {
            let Some(x) = x_blocks.next() else { break };
            add_block::<L, B, R>(lanes, (codes, scales), block, x, &mut sums);
        }
    }
    sums.iter().zip(out).for_each(|(sums, out)| lanes.store(out, *sums));
}

/// Adds the products of a block to `sums`.
#[inline(always)]
fn add_block<L: Lanes, B: BlockLayout, const R: usize>(
    lanes: L,
    (codes, scales): (&[VectorLine], &[VectorLine]),
    block: usize,
    x: &[CodedInputs; R],
    sums: &mut [L::Vector; R],
) {
    // Halves are literals, so that shifts of codes are by constants.
    let mut products = starts::<L, R>(lanes, x, 0);
    add_half::<L, B, R>(lanes, codes, 0, x, &mut products);
    if B::Scales::GROUPS == 2 {
        add_scaled::<L, B, R>(lanes, scales, [block, 0], (products, x), sums);
        products = starts::<L, R>(lanes, x, 1);
    }
    add_half::<L, B, R>(lanes, codes, 1, x, &mut products);
    add_scaled::<L, B, R>(lanes, scales, [block, B::Scales::GROUPS - 1], (products, x), sums);
}

/// What the sums of products of a group start with.
#[inline(always)]
fn starts<L: Lanes, const R: usize>(lanes: L, x: &[CodedInputs; R], group: usize) -> [L::Sums; R] {
    let mut starts = [lanes.integers(0); R];
    for (start, x) in starts.iter_mut().zip(x) {
        *start = lanes.integers(x.starts[group]);
    }
    starts
}

/// Adds the products of half a block.
#[inline(always)]
fn add_half<L: Lanes, B: BlockLayout, const R: usize>(
    lanes: L,
    codes: &[VectorLine],
    half: usize,
    x: &[CodedInputs; R],
    products: &mut [L::Sums; R],
) {
    add_pair::<L, B, R>(lanes, codes, 2 * half, x, products);
    add_pair::<L, B, R>(lanes, codes, 2 * half + 1, x, products);
}

/// Adds the products of two lines of codes.
#[inline(always)]
fn add_pair<L: Lanes, B: BlockLayout, const R: usize>(
    lanes: L,
    codes: &[VectorLine],
    pair: usize,
    x: &[CodedInputs; R],
    products: &mut [L::Sums; R],
) {
    let weights = [code_line::<L, B>(lanes, codes, 2 * pair), code_line::<L, B>(lanes, codes, 2 * pair + 1)];
    for (products, x) in products.iter_mut().zip(x) {
        let x = [x.quads[2 * pair], x.quads[2 * pair + 1]];
        *products = match B::WIDE {
            true => lanes.add_pair::<true>(*products, weights, x),
            false => lanes.add_pair::<false>(*products, weights, x),
        };
    }
}

/// Adds the products of a group, by its scales, to `sums`.
#[inline(always)]
fn add_scaled<L: Lanes, B: BlockLayout, const R: usize>(
    lanes: L,
    scales: &[VectorLine],
    [block, group]: [usize; 2],
    (products, x): ([L::Sums; R], &[CodedInputs; R]),
    sums: &mut [L::Vector; R],
) {
    let scales = [B::Scales::scale(lanes, scales, block, group), B::Scales::minimum(lanes, scales, block, group)];
    for ((sum, products), x) in sums.iter_mut().zip(products).zip(x) {
        *sum = add_group::<L, B>(lanes, products, scales, (x, group), *sum);
    }
}

/// Adds the products of a group, by the scales of the weights and of x, and what is subtracted from the weights.
#[inline(always)]
fn add_group<L: Lanes, B: BlockLayout>(
    lanes: L,
    products: L::Sums,
    [scale, minimum]: [L::Vector; 2],
    (x, group): (&CodedInputs, usize),
    sum: L::Vector,
) -> L::Vector {
    let sum = lanes.multiply_add(lanes.floats(products), lanes.multiply(scale, lanes.all(x.scale)), sum);
    if B::Scales::HAS_MINIMA { lanes.multiply_add(minimum, lanes.all(x.minus_sums[group]), sum) } else { sum }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::cpu::rows::WORTH_SHARING;
    use crate::gguf::types::{NF4, TYPES};

    fn types() -> impl Iterator<Item = &'static TensorType> {
        TYPES.iter().filter(|kind| kind.codes().is_some()).chain([&NF4])
    }

    /// Blocks of random bytes whose numbers are below 100, and these numbers.
    fn random_blocks(kind: &TensorType, count: usize, rng: &mut ChaCha8Rng) -> (Vec<u8>, Vec<f32>) {
        let (mut blocks, mut numbers) = (vec![], vec![]);
        while numbers.len() < count * kind.numbers {
            let block: Vec<u8> = (0..kind.bytes).map(|_| rng.random()).collect();
            let mut block_numbers = vec![0.0; kind.numbers];
            kind.dequantize(&block, &mut block_numbers);
            if block_numbers.iter().all(|number| number.abs() < 100.0) {
                blocks.extend(block);
                numbers.extend(block_numbers);
            }
        }
        (blocks, numbers)
    }

    /// x as the products see it: each 32 numbers rounded to whole multiples of their scale.
    fn rounded(x: &[f32]) -> Vec<f32> {
        let block = |x: &[f32]| {
            let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            x.iter().map(|x| (x * inverse).round_ties_even() * (largest / 127.0)).collect::<Vec<_>>()
        };
        x.chunks(BLOCK).flat_map(block).collect()
    }

    fn products(weights: &BlockWeights, instructions: Instructions, outputs: usize, x: &[f32]) -> Vec<f32> {
        products_by(&Team::new(2), weights, instructions, outputs, x)
    }

    fn products_by(
        team: &Team,
        weights: &BlockWeights,
        instructions: Instructions,
        outputs: usize,
        x: &[f32],
    ) -> Vec<f32> {
        let mut y = vec![f32::NAN; x.len() / weights.inputs * outputs];
        weights.multiply_with(instructions, outputs, x, &Outputs::new(&mut y, outputs), team);
        y
    }

    /// Enough weights for a part for each of eight threads, which are more than many machines have cores.
    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn eight_threads_give_the_bits_of_one() {
        let (kind, [outputs, inputs]) = (TensorType::named("Q8_0").expect("a type"), [1100, 17 * BLOCK]);
        let (bytes, _) = random_blocks(kind, outputs * inputs / kind.numbers, &mut ChaCha8Rng::seed_from_u64(5));
        assert!(bytes.len() > 8 * 64 * 1024);
        let weights = BlockWeights::new(&bytes, kind, [outputs, inputs], &mut Arena::default());
        let x: Vec<f32> = (0..3 * inputs).map(|at| (at % 97) as f32 / 50.0 - 1.0).collect();
        for instructions in Instructions::all_detected() {
            let [one, eight] =
                [1, 8].map(|threads| products_by(&Team::new(threads), &weights, instructions, outputs, &x));
            assert!(one == eight);
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn products_of_every_type_are_those_of_its_numbers_and_the_same_bits_in_any_rows_and_vectors() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        for kind in types() {
            for (outputs, blocks) in [(1, 1), (19, 3), (70, 2)] {
                let (inputs, rows) = (blocks * kind.numbers, 21);
                let (bytes, numbers) = random_blocks(kind, outputs * blocks, &mut rng);
                let weights = BlockWeights::new(&bytes, kind, [outputs, inputs], &mut Arena::default());
                let x: Vec<f32> = (0..rows * inputs).map(|_| rng.random::<f32>() - 0.5).collect();
                let each: Vec<Vec<f32>> = Instructions::all_detected()
                    .map(|instructions| products(&weights, instructions, outputs, &x))
                    .collect();
                assert!(each.iter().all(|y| y == &each[0]), "{kind:?} with all vectors");
                let exact = rounded(&x);
                for (x, y) in exact.chunks(inputs).zip(each[0].chunks(outputs)) {
                    for (w, &y) in numbers.chunks(inputs).zip(y) {
                        let terms = || w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                        let (expected, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                        assert!((f64::from(y) - expected).abs() <= 2e-6 * size + 1e-6, "{kind:?}: {y}, {expected}");
                    }
                }
                let fastest = Instructions::detected().unwrap();
                let some = outputs.div_ceil(2);
                for n in [1, 2, 3, 5, 8, 9, 17] {
                    let y = products(&weights, fastest, some, &x[..n * inputs]);
                    let all = each[0].chunks(outputs).take(n).flat_map(|y| &y[..some]);
                    assert!(y.iter().eq(all), "{kind:?}, {n} rows");
                }
            }
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn rows_that_threads_share_get_the_bits_that_each_gets_alone() {
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let kind = TensorType::named("Q8_0").unwrap();
        let ([outputs, inputs], rows) = ([5, 17 * BLOCK], 37);
        assert!(rows * inputs >= WORTH_SHARING && inputs < WORTH_SHARING);
        let (bytes, _) = random_blocks(kind, outputs * inputs / BLOCK, &mut rng);
        let weights = BlockWeights::new(&bytes, kind, [outputs, inputs], &mut Arena::default());
        let x: Vec<f32> = (0..rows * inputs).map(|_| rng.random::<f32>() - 0.5).collect();
        for instructions in Instructions::all_detected() {
            let each = x.chunks(inputs).flat_map(|x| products(&weights, instructions, outputs, x));
            assert!(each.eq(products(&weights, instructions, outputs, &x)), "{instructions:?}");
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn what_is_not_finite_in_x_is_not_finite_in_every_output() {
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        for kind in types() {
            let (bytes, _) = random_blocks(kind, 5, &mut rng);
            let weights = BlockWeights::new(&bytes, kind, [5, kind.numbers], &mut Arena::default());
            for not_finite in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vec![0.5; 2 * kind.numbers];
                x[kind.numbers - 3] = not_finite;
                for instructions in Instructions::all_detected() {
                    let y = products(&weights, instructions, 5, &x);
                    assert!(y[..5].iter().all(|y| !y.is_finite()), "{kind:?}, {not_finite}: {y:?}");
                    assert!(y[5..].iter().all(|y| y.is_finite()), "{kind:?}, {not_finite}: {y:?}");
                }
            }
        }
    }
}
