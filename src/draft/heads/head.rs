//! One head: its input, its ResBlocks and its output layer.

// N positions, H hidden, I = H, or (k+2)·H for sequential head k (0-based), V vocabulary
use tch::Tensor;

use super::layout::HeadPart;
use crate::cpu::arena::Arena;
use crate::draft::trained::Dropout;
use crate::dtype::DraftDtype;
use crate::engine::cuda::draft::{BlockMatrices, LayerMatrices, OutputMatrix};
use crate::fused::dropout::dropout;
use crate::model::block_spec::LogitSpec;
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;

/// What a head reads at N positions.
#[derive(Debug, Clone, Copy)]
pub struct HeadInput<'t> {
    /// `[N, H]`, after the final norm, in the backbone's dtype.
    pub hidden_nh: &'t Tensor,
    /// `[N, k+1]`, int64: the tokens after each position t that sequential head k (0-based) reads, x_{t+1} to x_{t+k+1}; `None` for
    /// Medusa heads.
    pub previous_nj: Option<&'t Tensor>,
}

impl<'t> HeadInput<'t> {
    /// The input of a Medusa head.
    pub fn alone(hidden_nh: &'t Tensor) -> Self {
        Self { hidden_nh, previous_nj: None }
    }

    /// The hidden states, then the embedding of each previous token (arXiv 2402.05109, section 3): `[N, I]`. No
    /// gradient reaches the embedding.
    pub fn rows(&self, backbone: &Llama) -> Tensor {
        let Some(previous_nj) = self.previous_nj else { return self.hidden_nh.shallow_clone() };
        let embedded_ni = tch::no_grad(|| backbone.embed(previous_nj)).flatten(1, -1);
        Tensor::cat(&[self.hidden_nh, &embedded_ni.to_kind(self.hidden_nh.kind())], 1)
    }
}

/// A head.
#[derive(Debug)]
pub struct Head {
    pub(super) blocks: Vec<ResBlock>,
    /// A of W2 = B·A, `[R, H]`; `None` if W2 is one matrix.
    pub(super) down: Option<Linear>,
    /// W2, `[V, H]`, or B, `[V, R]`; `None` if the head uses the backbone's lm_head.
    pub(super) w2: Option<Linear>,
}

/// `x + SiLU(W1·x + b1)`. In the first block of a sequential head, whose input is wider than its output, a linear layer takes the place
/// of the first x.
#[derive(Debug)]
pub(super) struct ResBlock {
    pub(super) linear: Linear,
    pub(super) res_connection: Option<Linear>,
}

impl ResBlock {
    /// `[N, I]` to `[N, H]`, in `x`'s dtype.
    fn forward(&self, x_ni: &Tensor) -> Tensor {
        let y_nh = self.linear.forward(x_ni, Adapters::Off).silu();
        match &self.res_connection {
            Some(res_connection) => res_connection.forward(x_ni, Adapters::Off) + y_nh,
            None => x_ni + y_nh,
        }
    }

    fn layers(&self) -> impl Iterator<Item = &Linear> {
        [&self.linear].into_iter().chain(&self.res_connection)
    }

    fn matrices(&self) -> Option<BlockMatrices> {
        let layer = |linear: &Linear| {
            Some(LayerMatrices { weight_hi: linear.in_rows()?, bias_h: linear.bias()?.shallow_clone() })
        };
        let res_connection = match &self.res_connection {
            Some(res_connection) => Some(layer(res_connection)?),
            None => None,
        };
        Some(BlockMatrices { linear: layer(&self.linear)?, res_connection })
    }
}

impl Head {
    /// Builds a head from its tensors, in the order of [`super::HeadsShape::tensors`].
    pub(super) fn of(parts: &[&'static [HeadPart]], mut next: impl FnMut() -> Tensor) -> Self {
        let (output, blocks) = parts.split_last().expect("an output layer after the ResBlocks");
        let mut layer = |has_bias: bool| {
            let weight = next();
            Linear::dense(weight, has_bias.then(&mut next))
        };
        let blocks = blocks.iter().map(|parts| ResBlock {
            linear: layer(parts.contains(&HeadPart::B1)),
            res_connection: parts.contains(&HeadPart::Res).then(|| layer(parts.contains(&HeadPart::ResBias))),
        });
        let blocks = blocks.collect();
        let down = output.contains(&HeadPart::W2Down).then(|| layer(false));
        let w2 = output.contains(&HeadPart::W2).then(|| layer(output.contains(&HeadPart::W2Bias)));
        Self { blocks, down, w2 }
    }

    /// Applies the ResBlocks to `[N, I]` ([`HeadInput::rows`]): the input of the output layer, `[N, H]`, or `[N, R]` of a low-rank one.
    /// Computes in `x`'s dtype.
    pub fn hidden(&self, x_ni: &Tensor) -> Tensor {
        self.hidden_with(x_ni, None)
    }

    /// As [`Head::hidden`], with dropout on the input of every ResBlock and of the output layer, as in the published code of Hydra++.
    pub fn hidden_with(&self, x_ni: &Tensor, drop: Option<Dropout>) -> Tensor {
        let through = |x: Tensor, layer: u64| {
            drop.map_or_else(|| x.shallow_clone(), |Dropout { p, seed }| dropout(&x, p, seed, layer))
        };
        let last = self.blocks.len() as u64;
        let blocks = self.blocks.iter().zip(0..);
        let y_nh = blocks.fold(x_ni.shallow_clone(), |x, (block, layer)| block.forward(&through(x, layer)));
        self.through_down(through(y_nh, last))
    }

    /// Applies the ResBlocks alone: `[N, I]` to `[N, H]`.
    pub(super) fn residual(&self, x_ni: &Tensor) -> Tensor {
        self.blocks.iter().fold(x_ni.shallow_clone(), |x, block| block.forward(&x))
    }

    /// Applies A of a low-rank W2: `[N, H]` to `[N, R]`.
    pub(super) fn through_down(&self, y_nh: Tensor) -> Tensor {
        self.down.as_ref().map_or(y_nh.shallow_clone(), |down| down.forward(&y_nh, Adapters::Off))
    }

    /// W2 `[V, H]`, or B `[V, R]` of a low-rank one; `None` if the head uses the backbone's lm_head or W2 is packed.
    pub fn w2(&self) -> Option<&Tensor> {
        self.w2.as_ref().and_then(Linear::dense_weight)
    }

    /// The bias of W2, `[V]`.
    pub fn w2_bias(&self) -> Option<&Tensor> {
        self.w2.as_ref().and_then(Linear::bias)
    }

    /// How the products of the output layer become logits: as the LM head's do. An own W2 starts as the LM head's weight, divided already.
    pub fn logit_spec(&self, backbone: &Llama) -> LogitSpec {
        let spec = backbone.config.family.logits;
        if self.w2.is_some() { spec.for_divided_weight() } else { spec }
    }

    /// Weights and biases of every block, block after block, and A of a low-rank W2: all before [`Head::w2`], in the order of
    /// [`super::HeadsShape::tensors`].
    pub fn block_parameters(&self) -> Vec<&Tensor> {
        self.blocks.iter().flat_map(ResBlock::layers).chain(&self.down).flat_map(tensors_of).collect()
    }

    /// Weights and biases of every block alone.
    pub(super) fn res_block_parameters(&self) -> impl Iterator<Item = &Tensor> {
        self.blocks.iter().flat_map(ResBlock::layers).flat_map(tensors_of)
    }

    /// A of a low-rank W2, W2 or B, and its bias.
    pub(super) fn output_parameters(&self) -> impl Iterator<Item = &Tensor> {
        self.down.iter().chain(&self.w2).flat_map(tensors_of)
    }

    /// All weights and biases, in the order of [`super::HeadsShape::tensors`] of this head alone.
    pub fn parameters(&self) -> Vec<&Tensor> {
        self.res_block_parameters().chain(self.output_parameters()).collect()
    }

    /// Without the output layer, which is that of another head.
    #[must_use]
    pub(super) fn without_output(self) -> Self {
        Self { down: None, w2: None, ..self }
    }

    /// Packs every layer for decoding; a sequential head's first block stays as it is where it has a layout of its own.
    pub(super) fn packed(self, has_layout: bool, dtype: DraftDtype, arena: &mut Arena) -> Self {
        let mut pack = |linear: Linear| linear.for_guesses(dtype, arena);
        let block = |block: ResBlock| match block.res_connection {
            Some(_) if has_layout => block,
            res_connection => ResBlock { linear: pack(block.linear), res_connection: res_connection.map(&mut pack) },
        };
        let blocks = self.blocks.into_iter().map(block).collect();
        Self { blocks, down: self.down.map(&mut pack), w2: self.w2.map(pack) }
    }

    /// Views of the ResBlocks' weights; `None` if they are quantised or laid out for the CPU kernels.
    pub(super) fn block_matrices(&self) -> Option<Vec<BlockMatrices>> {
        self.blocks.iter().map(ResBlock::matrices).collect()
    }

    /// A view of W2; `None` if it is quantised or laid out for the CPU kernels.
    pub(super) fn output_matrix(&self) -> Option<OutputMatrix> {
        Some(match (&self.down, &self.w2) {
            (_, None) => OutputMatrix::LmHead,
            (None, Some(w2)) => OutputMatrix::Whole(w2.in_rows()?),
            (Some(down), Some(w2)) => OutputMatrix::LowRank { b_vr: w2.in_rows()?, a_rh: down.in_rows()? },
        })
    }
}

fn tensors_of(linear: &Linear) -> impl Iterator<Item = &Tensor> {
    linear.dense_weight().into_iter().chain(linear.bias())
}
