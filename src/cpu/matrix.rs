//! Weights `[O, I]` for products `x·Wᵀ` of few rows, which run at memory bandwidth. A row's output is bit-identical alone and in a batch.

// O outputs, I inputs, N rows of x
use std::iter;

use super::Number;
use super::arena::Arena;
use super::blocks::BlockWeights;
use super::dots::DotWeights;
use super::outputs::Outputs;
use super::team::Team;
use super::tiles::{self, TileWeights};
use crate::gguf::types::TensorType;

/// Weights `[O, I]`.
#[derive(Debug)]
pub struct Matrix {
    first: MatrixPart,
    /// Outputs that follow, in other layouts.
    others: Vec<MatrixPart>,
    outputs: usize,
    inputs: usize,
    bytes: usize,
}

/// Some of the outputs.
#[derive(Debug)]
struct MatrixPart {
    layout: MatrixLayout,
    outputs: usize,
}

/// Weights as a kernel reads them.
#[derive(Debug)]
enum MatrixLayout {
    Dots(DotWeights),
    /// bfloat16, where the CPU has AMX.
    Tiles(TileWeights),
    Blocks(BlockWeights),
}

impl Matrix {
    /// Copies weights `[O, I]`, given as bytes; `None` where the CPU cannot ([`super::available`]).
    ///
    /// # Panics
    /// If there are not O × I numbers, or the system has no memory.
    pub fn new(weights: &[u8], number: Number, shape: [usize; 2], arena: &mut Arena) -> Option<Self> {
        let [outputs, inputs] = shape;
        assert_eq!(weights.len(), outputs * inputs * number.bytes(), "[O, I] weights");
        let layout = match number {
            _ if !super::available() => return None,
            Number::BFloat16 if tiles::available() => MatrixLayout::Tiles(TileWeights::new(weights, shape, arena)),
            _ => MatrixLayout::Dots(DotWeights::new(weights, number, shape, arena)),
        };
        Some(Self::in_one_layout(layout, shape, weights.len()))
    }

    /// Copies weights `[O, I]` in blocks, given as bytes of rows, each output's times its factor; `None` where the CPU cannot
    /// ([`super::available`]). Blocks may have more numbers than the last inputs of a row.
    ///
    /// # Panics
    /// If these are not the blocks of O rows of I numbers, or the system has no memory.
    pub fn from_blocks(
        (rows, kind): (&[u8], &'static TensorType),
        factor_of: impl Fn(usize) -> f32,
        shape: [usize; 2],
        arena: &mut Arena,
    ) -> Option<Self> {
        let [outputs, inputs] = shape;
        assert_eq!(rows.len(), outputs * inputs.div_ceil(kind.numbers) * kind.bytes, "[O, I] weights in blocks");
        super::available().then(|| {
            let weights = BlockWeights::new(rows, kind, shape, arena).times((0..outputs).map(factor_of));
            Self::in_one_layout(MatrixLayout::Blocks(weights), shape, rows.len())
        })
    }

    /// Weights `[O, I]` rounded to 8 bits with a scale for 32 of them (Q8_0); `None` where the CPU cannot.
    ///
    /// # Panics
    /// As [`Matrix::new`].
    pub fn in_8_bits(weights_oi: &[f32], shape: [usize; 2], arena: &mut Arena) -> Option<Self> {
        let [outputs, inputs] = shape;
        assert_eq!(weights_oi.len(), outputs * inputs, "[O, I] weights");
        if !super::available() {
            return None;
        }
        let kind = TensorType::named("Q8_0").expect("a type of GGUF");
        let largest = weights_oi.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
        // A power of two that brings the largest weight near 127, so that no scale is too small for float16.
        let factor = if largest.is_normal() { 2.0f32.powi(6 - largest.log2().floor() as i32) } else { 1.0 };
        let padded = inputs.next_multiple_of(kind.numbers);
        let mut numbers = vec![0.0; outputs * padded];
        for (to, weights) in numbers.chunks_exact_mut(padded).zip(weights_oi.chunks_exact(inputs)) {
            to.iter_mut().zip(weights).for_each(|(to, weight)| *to = weight * factor);
        }
        let mut rows = vec![];
        kind.encode(&numbers, &mut rows);
        Self::from_blocks((&rows, kind), |_| factor.recip(), shape, arena)
    }

    fn in_one_layout(layout: MatrixLayout, [outputs, inputs]: [usize; 2], bytes: usize) -> Self {
        Self { first: MatrixPart { layout, outputs }, others: vec![], outputs, inputs, bytes }
    }

    /// This matrix with the outputs of another one below its own.
    ///
    /// # Panics
    /// If it has other inputs.
    #[must_use]
    pub fn above(mut self, other: Self) -> Self {
        assert_eq!(self.inputs, other.inputs, "inputs");
        self.outputs += other.outputs;
        self.bytes += other.bytes;
        self.others.push(other.first);
        self.others.extend(other.others);
        self
    }

    /// O.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// I.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Of the weights that it was made from.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `y = x·Wᵀ`: `x_ni` `[N, I]` to `y_no` `[N, O]`. Weights of bfloat16 are multiplied by `x` rounded to bfloat16, those in blocks by `x` rounded to
    /// 8 bits by 32 inputs; sums are float32.
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
        if n == 0 {
            return;
        }
        let (mut y, mut done) = (Outputs::new(y_no, outputs), 0);
        for part in iter::once(&self.first).chain(&self.others) {
            let count = part.outputs.min(outputs - done);
            match &part.layout {
                _ if count == 0 => return,
                MatrixLayout::Dots(weights) => weights.multiply(count, x_ni, &y, team),
                MatrixLayout::Tiles(weights) => weights.multiply(count, x_ni, &y, team),
                MatrixLayout::Blocks(weights) => weights.multiply(count, x_ni, &y, team),
            }
            done += count;
            y = y.after(done);
        }
    }
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
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn dot_products_equal_float64_and_are_the_same_bits_in_any_number_of_rows() {
        for number in [Number::Float32, Number::BFloat16] {
            equals_float64(number, |w, shape, arena| MatrixLayout::Dots(DotWeights::new(w, number, shape, arena)));
        }
    }

    #[test]
    #[cfg_attr(not(tiles), ignore = "needs AMX with bfloat16")]
    fn products_on_tiles_equal_float64_and_are_the_same_bits_in_any_number_of_rows() {
        assert!(tiles::available());
        equals_float64(Number::BFloat16, |w, shape, arena| MatrixLayout::Tiles(TileWeights::new(w, shape, arena)));
    }

    /// Enough for groups of weights with all instructions (`MANY_BLOCKS` in dots.rs).
    const ROWS: usize = 61;

    fn equals_float64(number: Number, layout: impl Fn(&[u8], [usize; 2], &mut Arena) -> MatrixLayout) {
        let (teams, mut arena) = ([Team::new(2), Team::new(8)], Arena::default());
        for (outputs, inputs) in [(1, 1), (3, 5), (16, 64), (50, 172), (67, 33), (70, 600), (1030, 130)] {
            let (w, w_read) = stored(&random(outputs * inputs, 1), number);
            let matrix = Matrix::in_one_layout(layout(&w, [outputs, inputs], &mut arena), [outputs, inputs], w.len());
            let x = random(ROWS * inputs, 2);
            let expected = oracle(&w_read, &stored(&x, number).1, inputs);
            let product = |x: &[f32], team: &Team| {
                let mut y = vec![f32::NAN; x.len() / inputs * outputs];
                matrix.multiply(x, &mut y, team);
                y
            };
            let one_by_one: Vec<f32> = x.chunks_exact(inputs).flat_map(|x| product(x, &teams[0])).collect();
            for (y, expected) in one_by_one.iter().zip(&expected) {
                assert!((f64::from(*y) - expected).abs() < 1e-5, "{number:?} {outputs}x{inputs}: {y}, {expected}");
            }
            for (n, team) in
                [2, 3, 4, 7, 11, 16, 17, 35, ROWS].into_iter().flat_map(|n| teams.iter().map(move |t| (n, t)))
            {
                assert_eq!(product(&x[..n * inputs], team), one_by_one[..n * outputs], "{number:?}, {n} rows");
            }
            let some = outputs.div_ceil(2);
            let mut y = vec![f32::NAN; ROWS * some];
            matrix.multiply_first(some, &x, &mut y, &teams[1]);
            for (y, all) in y.chunks_exact(some).zip(one_by_one.chunks_exact(outputs)) {
                assert_eq!(y, &all[..some], "{number:?}, {some} of {outputs} outputs");
            }
        }
    }

    #[test]
    #[cfg_attr(not(tiles), ignore = "needs AMX with bfloat16")]
    fn a_product_on_tiles_forgets_the_numbers_of_the_one_before() {
        let (team, mut arena, [outputs, inputs]) = (Team::new(2), Arena::default(), [50, 172]);
        let (w, _) = stored(&random(outputs * inputs, 1), Number::BFloat16);
        let matrix = Matrix::new(&w, Number::BFloat16, [outputs, inputs], &mut arena).unwrap();
        let product = |x: &[f32]| {
            let mut y = vec![f32::NAN; x.len() / inputs * outputs];
            matrix.multiply(x, &mut y, &team);
            y
        };
        assert!(product(&vec![f32::NAN; 48 * inputs]).iter().all(|y| y.is_nan()));
        assert!(product(&random(19 * inputs, 2)).iter().all(|y| y.is_finite()));
    }

    /// Inputs that are no multiple of a block's, too.
    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn weights_rounded_to_8_bits_give_products_within_a_percent() {
        for (outputs, inputs, size) in [(3, 5, 1.0), (50, 172, 1e-9), (70, 576, 1e9)] {
            let w: Vec<f32> = random(outputs * inputs, 1).into_iter().map(|w| w * size).collect();
            let x = random(4 * inputs, 2);
            let matrix = Matrix::in_8_bits(&w, [outputs, inputs], &mut Arena::default()).unwrap();
            let mut y = vec![f32::NAN; 4 * outputs];
            matrix.multiply(&x, &mut y, &Team::new(2));
            let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
            let expected = oracle(&wide(&w), &wide(&x), inputs);
            let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
            let off = squares(&mut y.iter().zip(&expected).map(|(y, expected)| f64::from(*y) - expected));
            assert!(off < 1e-4 * squares(&mut expected.iter().copied()), "{outputs}x{inputs}: {off}");
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn outputs_of_stacked_matrices_are_those_of_each() {
        let (team, mut arena, [inputs, rows]) = (Team::new(2), Arena::default(), [96, 5]);
        let x = random(rows * inputs, 3);
        let mut matrix = |outputs: usize, number: Option<Number>| match number {
            Some(number) => {
                Matrix::new(&stored(&random(outputs * inputs, 4), number).0, number, [outputs, inputs], &mut arena)
            }
            None => {
                let (kind, blocks) = (TensorType::named("Q8_0").unwrap(), outputs * inputs / 32);
                Matrix::from_blocks((&[0x21; 34].repeat(blocks), kind), |_| 1.0, [outputs, inputs], &mut arena)
            }
        };
        let mut all = || [(7, None), (33, Some(Number::Float32)), (20, None)].map(|(o, n)| matrix(o, n).unwrap());
        let product = |matrix: &Matrix, outputs: usize| {
            let mut y = vec![f32::NAN; rows * outputs];
            matrix.multiply_first(outputs, &x, &mut y, &team);
            y
        };
        let each = all().map(|matrix| product(&matrix, matrix.outputs()));
        let stacked = all().into_iter().reduce(Matrix::above).unwrap();
        for outputs in [60, 41, 40, 5] {
            let y = product(&stacked, outputs);
            for (row, y) in y.chunks_exact(outputs).enumerate() {
                let parts = each.iter().flat_map(|y| &y[row * y.len() / rows..(row + 1) * y.len() / rows]);
                assert!(y.iter().eq(parts.take(outputs)), "{outputs} outputs, row {row}");
            }
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    #[should_panic(expected = "[N, I] and [N, O]")]
    fn lengths_are_checked() {
        let matrix = Matrix::new(&[0; 4 * 6], Number::Float32, [2, 3], &mut Arena::default());
        matrix.expect("a CPU with the kernels").multiply(&[0.0; 6], &mut [0.0; 2], &Team::new(1));
    }
}
