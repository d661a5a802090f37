//! Weights `[O, I]` for products `x·Wᵀ` of few rows, which run at memory bandwidth. A row's output is bit-identical alone and in a batch.

// O outputs, I inputs, N rows of x
use super::Number;
use super::arena::Arena;
use super::dots::DotWeights;
use super::team::Team;
use super::tiles::{self, TileWeights};

/// Weights `[O, I]`.
#[derive(Debug)]
pub struct Matrix {
    layout: MatrixLayout,
    outputs: usize,
    inputs: usize,
}

/// Weights as a kernel reads them.
#[derive(Debug)]
enum MatrixLayout {
    Dots(DotWeights),
    /// bfloat16, where the CPU has AMX.
    Tiles(TileWeights),
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
        Some(Self { layout, outputs, inputs })
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
        match &self.layout {
            MatrixLayout::Dots(weights) => weights.multiply(outputs, x_ni, y_no, team),
            MatrixLayout::Tiles(weights) => weights.multiply(outputs, x_ni, y_no, team),
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
        let (team, mut arena) = (Team::new(2), Arena::default());
        for (outputs, inputs) in [(1, 1), (3, 5), (16, 64), (50, 172), (67, 33), (1030, 130)] {
            let (w, w_read) = stored(&random(outputs * inputs, 1), number);
            let matrix = Matrix { layout: layout(&w, [outputs, inputs], &mut arena), outputs, inputs };
            let x = random(ROWS * inputs, 2);
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
            for n in [2, 3, 4, 7, 11, 16, 17, 35, ROWS] {
                assert_eq!(rows(&x[..n * inputs]), one_by_one[..n * outputs], "{number:?}, {n} rows");
            }
            let some = outputs.div_ceil(2);
            let mut y = vec![f32::NAN; ROWS * some];
            matrix.multiply_first(some, &x, &mut y, &team);
            for (y, all) in y.chunks_exact(some).zip(one_by_one.chunks_exact(outputs)) {
                assert_eq!(y, &all[..some], "{number:?}, {some} of {outputs} outputs");
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
