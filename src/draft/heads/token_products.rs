//! What tokens add to the first blocks of sequential heads, on the CPU kernels: the product of a token's embedding. For a small vocabulary
//! the products of all tokens are kept: reading one costs much less than reading the weights.

// N nodes, O outputs, V vocabulary
use std::cell::OnceCell;

use crate::cpu::matrix::Matrix;
use crate::cpu::rows::add;
use crate::cpu::team::Team;

/// Bytes of all products that are kept, at most.
const KEPT_BYTES: usize = 128 << 20;
/// Tokens whose products are computed together.
const TOGETHER: usize = 64;

/// Whether the products of a vocabulary are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeptProducts {
    /// They are computed at each use.
    None,
    /// Those of all V tokens, from the first use on.
    Of(usize),
}

impl KeptProducts {
    /// All products are kept if they fit together.
    pub(super) fn of(matrices: &[Matrix], vocabulary: usize) -> Self {
        let numbers = vocabulary * matrices.iter().map(Matrix::outputs).sum::<usize>();
        if numbers * size_of::<f32>() <= KEPT_BYTES { Self::Of(vocabulary) } else { Self::None }
    }
}

/// Weights `[O, H]` of the embedding of one previous token, in all heads that read it.
#[derive(Debug)]
pub(super) struct TokenProducts {
    matrix: Matrix,
    kept: KeptProducts,
    /// `[V, O]`.
    products_vo: OnceCell<Vec<f32>>,
}

impl TokenProducts {
    pub(super) fn new(matrix: Matrix, kept: KeptProducts) -> Self {
        Self { matrix, kept, products_vo: OnceCell::new() }
    }

    /// Adds the first `width` numbers of the tokens' products to `sums`, `[N, width]`. `embed` gives the embeddings of tokens, `[N, H]`.
    pub(super) fn add_to(
        &self,
        sums: &mut [f32],
        width: usize,
        tokens: &[i64],
        embed: impl Fn(&[i64]) -> Vec<f32>,
        team: &Team,
    ) {
        let KeptProducts::Of(vocabulary) = self.kept else {
            let mut products = vec![0.0; sums.len()];
            self.matrix.multiply_first(width, &embed(tokens), &mut products, team);
            return add(sums, &products);
        };
        let products_vo = self.products_vo.get_or_init(|| self.products(vocabulary, embed, team));
        for (sums, &token) in sums.chunks_exact_mut(width).zip(tokens) {
            add(sums, &products_vo[token as usize * self.matrix.outputs()..][..width]);
        }
    }

    /// The products of all tokens, `[V, O]`.
    fn products(&self, vocabulary: usize, embed: impl Fn(&[i64]) -> Vec<f32>, team: &Team) -> Vec<f32> {
        let mut products_vo = vec![0.0; vocabulary * self.matrix.outputs()];
        let tokens: Vec<i64> = (0..vocabulary as i64).collect();
        let pieces = products_vo.chunks_mut(TOGETHER * self.matrix.outputs());
        tokens
            .chunks(TOGETHER)
            .zip(pieces)
            .for_each(|(tokens, products)| self.matrix.multiply(&embed(tokens), products, team));
        products_vo
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Number;
    use crate::cpu::arena::Arena;

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn kept_products_are_those_of_each_use() {
        let ([outputs, inputs, vocabulary], team) = ([12, 5, 70], Team::new(1));
        let number = |at: usize| (at * 37 % 101) as f32 / 64.0;
        let weights: Vec<u8> = (0..outputs * inputs).flat_map(|at| number(at).to_ne_bytes()).collect();
        let matrix =
            || Matrix::new(&weights, Number::Float32, [outputs, inputs], &mut Arena::default()).expect("kernels");
        let embed = |tokens: &[i64]| -> Vec<f32> {
            tokens.iter().flat_map(|&token| (0..inputs).map(move |i| number(token as usize * inputs + i))).collect()
        };
        let kept = TokenProducts::new(matrix(), KeptProducts::of(&[matrix()], vocabulary));
        let computed = TokenProducts::new(matrix(), KeptProducts::None);
        assert!(
            kept.kept == KeptProducts::Of(vocabulary) && KeptProducts::of(&[matrix()], 1 << 30) == KeptProducts::None
        );
        for tokens in [&[3, 3, 1][..], &[1, 66, 3, 0], &[69]] {
            for width in [4, 12] {
                let [mut a, mut b] = [(); 2].map(|()| vec![0.5; tokens.len() * width]);
                kept.add_to(&mut a, width, tokens, embed, &team);
                computed.add_to(&mut b, width, tokens, embed, &team);
                assert_eq!(a, b, "{tokens:?}, {width} of {outputs} outputs");
            }
        }
        kept.add_to(&mut [0.0; 12], 12, &[3], |_| panic!("all products are kept"), &team);
    }
}
