//! The first blocks of sequential heads for the CPU kernels. A first block reads the hidden state and the embedding of each previous token
//! side by side, so its product is a sum over what it reads. Here the weights of all heads are laid out by what they read: one product
//! gives what the hidden state adds to every head, and one product a level what a node's token adds to all later heads
//! ([`TokenProducts`]). A node inherits the sums of its parent instead of multiplying its whole path again.

// N nodes, K heads, H hidden
use tch::{Kind, Tensor};

use super::head::Head;
use super::token_products::{KeptProducts, TokenProducts};
use crate::cpu::arena::Arena;
use crate::cpu::matrix::Matrix;
use crate::cpu::rows::{add_silu, add_to_each};
use crate::cpu::team::Team;
use crate::dtype::DraftDtype;
use crate::model::linear::Linear;
use crate::model::stored::dense::draft_matrix;
use crate::torch::bytes;
use crate::tree::dynamic::FrontierNode;

/// The weights of all first blocks. The outputs of a head are those of its linear layer, then those of its residual connection.
#[derive(Debug)]
pub(crate) struct SequentialLayout {
    /// `[2·K·H, H]`: what multiplies the hidden state.
    hidden_matrix: Matrix,
    /// What multiplies the embedding of each previous token, for the heads that read it: of token i, `[2·(K-i)·H, H]`.
    token_products: Vec<TokenProducts>,
    /// `[2·K·H]`.
    biases: Vec<f32>,
    hidden_size: usize,
}

/// What the first blocks of the heads from one on have summed up so far at N nodes.
#[derive(Debug, Default)]
pub(crate) struct FirstBlockSums {
    /// `[N, heads, 2·H]`.
    values: Vec<f32>,
    /// Numbers of a node.
    width: usize,
    /// How many of these the next head has used.
    used: usize,
}

impl SequentialLayout {
    /// `None` if the heads are not sequential, or the CPU lacks the kernels. `vocab_size` is the backbone's.
    pub(super) fn new(heads: &[Head], vocab_size: i64, dtype: DraftDtype, arena: &mut Arena) -> Option<Self> {
        let hidden_size = heads.first()?.blocks[0].res_connection.as_ref()?.dense_weight()?.size()[0];
        let part = |input: usize| {
            let readers = &heads[input.saturating_sub(1)..];
            let columns =
                |layer: &Linear| Some(layer.dense_weight()?.narrow(1, input as i64 * hidden_size, hidden_size));
            let columns_oh = readers.iter().flat_map(first_layers).map(|layer| columns(layer?));
            let weight_oi = Tensor::cat(&columns_oh.collect::<Option<Vec<_>>>()?, 0);
            Some(weight_oi)
        };
        let mut matrix = |input: usize| draft_matrix(&part(input)?, dtype, arena);
        let hidden_matrix = matrix(0)?;
        let token_matrices: Vec<Matrix> = (1..=heads.len()).map(matrix).collect::<Option<_>>()?;
        let kept = KeptProducts::of(&token_matrices, vocab_size.unsigned_abs() as usize);
        let token_products = token_matrices.into_iter().map(|matrix| TokenProducts::new(matrix, kept)).collect();
        let zeros = || Tensor::zeros([hidden_size], (Kind::Float, tch::Device::Cpu));
        let biases = heads
            .iter()
            .flat_map(first_layers)
            .map(|layer| layer?.bias().map_or_else(zeros, Tensor::shallow_clone).into());
        let biases = numbers(&Tensor::cat(&biases.collect::<Option<Vec<Tensor>>>()?, 0));
        Some(Self { hidden_matrix, token_products, biases, hidden_size: hidden_size.unsigned_abs() as usize })
    }

    /// What the hidden states `[N, H]` add to the first `heads` heads.
    pub(crate) fn begin(&self, hidden_nh: &[f32], heads: usize, team: &Team) -> FirstBlockSums {
        let width = 2 * heads * self.hidden_size;
        let mut values = vec![0.0; hidden_nh.len() / self.hidden_size * width];
        self.hidden_matrix.multiply_first(width, hidden_nh, &mut values, team);
        add_to_each(&mut values, &self.biases[..width]);
        FirstBlockSums { values, width, used: 0 }
    }

    /// The sums of the next level's nodes: those of each node's parent, and what its token adds. `level` counts from 0: the roots; `embed`
    /// gives the embeddings of tokens, `[N, H]`.
    pub(crate) fn grow(
        &self,
        level: usize,
        sums: &FirstBlockSums,
        nodes: &[FrontierNode],
        embed: impl Fn(&[i64]) -> Vec<f32>,
        team: &Team,
    ) -> FirstBlockSums {
        let width = sums.width - sums.used;
        let mut values = Vec::with_capacity(nodes.len() * width);
        for node in nodes {
            values
                .extend_from_slice(&sums.values[node.parent * sums.width + sums.used..(node.parent + 1) * sums.width]);
        }
        let tokens: Vec<i64> = nodes.iter().map(|node| node.token).collect();
        self.token_products[level].add_to(&mut values, width, &tokens, embed, team);
        FirstBlockSums { values, width, used: 2 * self.hidden_size }
    }

    /// The first block's output for the next head at each node, `[N, H]`.
    pub(crate) fn output(&self, sums: &FirstBlockSums) -> Vec<f32> {
        let node_output = |sums: &[f32]| {
            let (linear_h, residual_h) = sums[..2 * self.hidden_size].split_at(self.hidden_size);
            let mut x_h = residual_h.to_vec();
            add_silu(&mut x_h, linear_h);
            x_h
        };
        sums.values.chunks_exact(sums.width).flat_map(node_output).collect()
    }
}

/// The linear layer and the residual connection of the first block.
fn first_layers(head: &Head) -> [Option<&Linear>; 2] {
    [Some(&head.blocks[0].linear), head.blocks[0].res_connection.as_ref()]
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    bytes::numbers(&tensor.to_kind(Kind::Float).contiguous()).to_vec()
}
