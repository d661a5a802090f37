//! What tokens add to the first blocks of sequential heads, on the CPU kernels: the product of a token's embedding. For a small vocabulary
//! each token's product is kept from its first use on: reading it again costs much less than reading the weights.

// N nodes, O outputs, V vocabulary
use std::cell::RefCell;

use crate::cpu::matrix::Matrix;
use crate::cpu::rows::add;
use crate::cpu::team::Team;

/// Bytes of all products that are kept, at most.
const KEPT_BYTES: usize = 128 << 20;

/// Whether the products of a vocabulary are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeptProducts {
    /// They are computed at each use.
    None,
    /// Those of all V tokens.
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
    kept: Option<RefCell<Kept>>,
}

/// Products of the tokens that were used so far.
#[derive(Debug)]
struct Kept {
    /// `[V, O]`; the system provides the memory of a product when it is written.
    products_vo: Vec<f32>,
    known_v: Vec<bool>,
}

impl TokenProducts {
    pub(super) fn new(matrix: Matrix, kept: KeptProducts) -> Self {
        let kept = match kept {
            KeptProducts::None => None,
            KeptProducts::Of(v) => {
                let (products_vo, known_v) = (vec![0.0; v * matrix.outputs()], vec![false; v]);
                Some(RefCell::new(Kept { products_vo, known_v }))
            }
        };
        Self { matrix, kept }
    }

    /// Adds the first `width` numbers of the tokens' products to `sums`, `[N, width]`. `embed` gives the embeddings of tokens, `[N, H]`.
    pub(super) fn add_to(
        &self,
        sums: &mut [f32],
        width: usize,
        tokens: &[i64],
        embed: impl FnOnce(&[i64]) -> Vec<f32>,
        team: &Team,
    ) {
        let Some(kept) = &self.kept else {
            let mut products = vec![0.0; sums.len()];
            self.matrix.multiply_first(width, &embed(tokens), &mut products, team);
            return add(sums, &products);
        };
        let mut kept = kept.borrow_mut();
        kept.learn(&self.matrix, tokens, embed, team);
        for (sums, &token) in sums.chunks_exact_mut(width).zip(tokens) {
            add(sums, &kept.products_vo[token as usize * self.matrix.outputs()..][..width]);
        }
    }
}

impl Kept {
    /// Computes the products of those tokens that are used for the first time.
    fn learn(&mut self, matrix: &Matrix, tokens: &[i64], embed: impl FnOnce(&[i64]) -> Vec<f32>, team: &Team) {
        let mut new: Vec<i64> = tokens.iter().copied().filter(|&token| !self.known_v[token as usize]).collect();
        new.sort_unstable();
        new.dedup();
        if new.is_empty() {
            return;
        }
        let mut products = vec![0.0; new.len() * matrix.outputs()];
        matrix.multiply(&embed(&new), &mut products, team);
        for (&token, product) in new.iter().zip(products.chunks_exact(matrix.outputs())) {
            self.products_vo[token as usize * matrix.outputs()..][..matrix.outputs()].copy_from_slice(product);
            self.known_v[token as usize] = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Number;
    use crate::cpu::arena::Arena;

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX-512 with bfloat16")]
    fn kept_products_are_those_of_each_use() {
        let ([outputs, inputs, vocabulary], team) = ([12, 5, 7], Team::new(1));
        let number = |at: usize| (at * 37 % 101) as f32 / 64.0;
        let weights: Vec<u8> = (0..outputs * inputs).flat_map(|at| number(at).to_ne_bytes()).collect();
        let matrix =
            || Matrix::new(&weights, Number::Float32, [outputs, inputs], &mut Arena::default()).expect("kernels");
        let embed = |tokens: &[i64]| -> Vec<f32> {
            tokens.iter().flat_map(|&token| (0..inputs).map(move |i| number(token as usize * inputs + i))).collect()
        };
        let kept = TokenProducts::new(matrix(), KeptProducts::of(&[matrix()], vocabulary));
        let computed = TokenProducts::new(matrix(), KeptProducts::None);
        assert!(kept.kept.is_some() && KeptProducts::of(&[matrix()], 1 << 30) == KeptProducts::None);
        for tokens in [&[3, 3, 1][..], &[1, 6, 3, 0], &[6]] {
            for width in [4, 12] {
                let [mut a, mut b] = [(); 2].map(|()| vec![0.5; tokens.len() * width]);
                kept.add_to(&mut a, width, tokens, embed, &team);
                computed.add_to(&mut b, width, tokens, embed, &team);
                assert_eq!(a, b, "{tokens:?}, {width} of {outputs} outputs");
            }
        }
        kept.add_to(&mut [0.0; 12], 12, &[3], |_| panic!("its product is kept"), &team);
    }
}
