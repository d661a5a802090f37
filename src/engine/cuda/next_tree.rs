//! The end of a step: the tokens of the next step's nodes, guessed by the heads after the last accepted node.

// N nodes, K heads, H hidden, V vocabulary, P guesses per head
use tch::Tensor;

use super::buffers::Buffers;
use super::error::CudaResult;
use super::layout::Nodes;
use super::levels;
use super::memory::{DeviceMemory, DeviceWeights, HeadWeights, MedusaWeights};
use super::ops::Ops;
use super::oracle::{BlockInput, ParentSums};
use super::sequential::{Level, SequentialHeads};
use super::shape::Shape;
use super::state::Slot;
use crate::nvidia::gemm::Operands;

/// Writes the tokens of the next step's nodes, after the step has chosen the next root.
#[derive(Debug, Clone, Copy)]
pub struct NextTree<'a> {
    pub ops: &'a Ops,
    pub weights: &'a DeviceWeights,
    pub memory: &'a DeviceMemory,
}

impl NextTree<'_> {
    /// Writes the tokens of `next`: the next root, and the heads' guesses if there are more nodes.
    ///
    /// # Errors
    /// A device error.
    pub fn fill(&self, next: &Nodes) -> CudaResult {
        if next.len() == 1 {
            return self.copy_guesses(next);
        }
        match self.weights.heads.as_ref().expect("several nodes hold guesses of heads") {
            HeadWeights::AtOnce(heads) => {
                self.guess_at_once(heads)?;
                self.copy_guesses(next)
            }
            HeadWeights::ByLevel(heads) => self.guess_by_level(heads, next),
        }
    }

    /// The root's token, and those that the heads have guessed for the other nodes.
    fn copy_guesses(&self, nodes: &Nodes) -> CudaResult {
        let buffers = &self.memory.buffers;
        let tokens_n = buffers.tokens_n.narrow(0, 0, nodes.len());
        self.ops.fill_tree(nodes, &buffers.guesses_rp, &buffers.state, &tokens_n)
    }

    /// Computes the guesses of Medusa heads.
    fn guess_at_once(&self, heads: &MedusaWeights) -> CudaResult {
        let (ops, buffers) = (self.ops, &self.memory.buffers);
        let (mut before_kh, mut after_kh) = (&buffers.heads_other_rh, &buffers.heads_rh);
        let last = BlockInput::Last { hidden_nh: &buffers.hidden_nh, state: &buffers.state };
        for (at, [weight_khh, bias_kh]) in heads.blocks.iter().enumerate() {
            let input = if at == 0 { last } else { BlockInput::Rows(before_kh) };
            ops.res_block(input, weight_khh, bias_kh, after_kh)?;
            (before_kh, after_kh) = (after_kh, before_kh);
        }
        let x_kh = before_kh;
        if heads.w2_vh.is_empty() {
            ops.linear(&Operands::new(x_kh, &self.weights.backbone.lm_head_vh, &buffers.head_logits_rv))?;
        }
        for (at, w2_vh) in (0..).zip(&heads.w2_vh) {
            let [x_1h, logits_1v] = [x_kh, &buffers.head_logits_rv].map(|buffer| buffer.narrow(0, at, 1));
            ops.linear(&Operands::new(&x_1h, w2_vh, &logits_1v))?;
        }
        ops.top_guesses(&buffers.head_logits_rv, None, &buffers.guesses_rp)
    }

    /// Fills the tree with the guesses of sequential heads, level by level.
    fn guess_by_level(&self, heads: &SequentialHeads, next: &Nodes) -> CudaResult {
        let (ops, buffers) = (self.ops, &self.memory.buffers);
        self.copy_guesses(&heads.root)?;
        let sums = heads.sums(&buffers.level_sums);
        let (last, hidden_1h) = (buffers.state.narrow(0, Slot::Last as i64, 1), buffers.heads_other_rh.narrow(0, 0, 1));
        ops.embed(&last, &buffers.hidden_nh, &hidden_1h)?; // copies the row of the last accepted node
        ops.linear(&Operands::new(&hidden_1h, &heads.hidden_wh, &sums[0]))?;
        for (at, (level, pair)) in heads.levels.iter().zip(sums.windows(2)).enumerate() {
            let bias_w = (at == 0).then_some(&heads.bias_w); // deeper nodes inherit it
            let inherited = ParentSums { before: &pair[0], parents_n: &level.nodes.parents_n, bias_w };
            self.first_block(level, inherited, &pair[1])?;
            self.guess_level(level, next)?;
        }
        Ok(())
    }

    /// The first block of a level's head, at the level's nodes that have children.
    fn first_block(&self, level: &Level, inherited: ParentSums, sums_nw: &Tensor) -> CudaResult {
        let (ops, buffers, rows) = (self.ops, &self.memory.buffers, level.nodes.rows());
        let embedded_nh = buffers.heads_other_rh.narrow(0, 0, rows);
        let table_vh = &self.weights.backbone.embed_tokens_vh;
        ops.embed_nodes(&buffers.tokens_n, &level.nodes.nodes_n, table_vh, &embedded_nh)?;
        ops.linear(&Operands::new(&embedded_nh, &level.token_wh, sums_nw))?;
        ops.first_block(sums_nw, inherited, &buffers.heads_rh.narrow(0, 0, rows))
    }

    /// The later blocks and the logits of a level's head; its best guesses become the tokens of the level below.
    fn guess_level(&self, level: &Level, next: &Nodes) -> CudaResult {
        let (ops, buffers, rows) = (self.ops, &self.memory.buffers, level.nodes.rows());
        let [x_nh, product_nh, logits_nv, guesses_np] =
            [&buffers.heads_rh, &buffers.level_product_rh, &buffers.head_logits_rv, &buffers.guesses_rp]
                .map(|buffer| buffer.narrow(0, 0, rows));
        for [weight_hh, bias_h] in &level.blocks {
            ops.linear(&Operands::new(&x_nh, weight_hh, &product_nh))?;
            ops.residual(&x_nh, &product_nh, bias_h)?;
        }
        let w2_vh = level.w2_vh.as_ref().unwrap_or(&self.weights.backbone.lm_head_vh);
        ops.linear(&Operands::new(&x_nh, w2_vh, &logits_nv))?;
        ops.top_guesses(&logits_nv, level.output_bias_v.as_ref(), &guesses_np)?;
        let below = |numbers: &Tensor| numbers.narrow(0, level.nodes.below, level.nodes.rows_c.size()[0]);
        ops.fill_level(&guesses_np, &level.nodes.rows_c, &below(&next.guesses_n), &below(&buffers.tokens_n))
    }
}

/// The product of the first `rows` rows of x, with each of several weights.
fn row_operands(rows: i64, x: &Tensor, weights_mk: &[Tensor], y: &Tensor) -> Vec<Operands> {
    let [x_nk, y_nm] = [x, y].map(|buffer| buffer.narrow(0, 0, rows));
    weights_mk.iter().map(|w_mk| Operands::new(&x_nk, w_mk, &y_nm)).collect()
}

impl HeadWeights {
    /// The heads' matrix products, with the buffers that they run on.
    pub(super) fn products(&self, buffers: &Buffers<Tensor>, lm_head_vh: &Tensor, shape: &Shape) -> Vec<Vec<Operands>> {
        match self {
            Self::AtOnce(heads) if heads.w2_vh.is_empty() => {
                let lm_head = [lm_head_vh.shallow_clone()];
                vec![row_operands(shape.guessing_rows(), &buffers.heads_rh, &lm_head, &buffers.head_logits_rv)]
            }
            Self::AtOnce(heads) => vec![row_operands(1, &buffers.heads_rh, &heads.w2_vh, &buffers.head_logits_rv)],
            Self::ByLevel(heads) => heads.products(buffers, lm_head_vh),
        }
    }
}

impl SequentialHeads {
    /// The sums of the hidden state and of each level, as parts of their buffer.
    fn sums(&self, level_sums: &Tensor) -> Vec<Tensor> {
        let level_sizes = self.levels.iter().map(|level| [level.nodes.rows(), level.token_wh.size()[0]]);
        let sizes: Vec<[i64; 2]> = [[1, self.hidden_wh.size()[0]]].into_iter().chain(level_sizes).collect();
        levels::matrices(level_sums, &sizes)
    }

    fn products(&self, buffers: &Buffers<Tensor>, lm_head_vh: &Tensor) -> Vec<Vec<Operands>> {
        let sums = self.sums(&buffers.level_sums);
        let one = |weight: &Tensor| [weight.shallow_clone()];
        let hidden = row_operands(1, &buffers.heads_other_rh, &one(&self.hidden_wh), &sums[0]);
        let level_rows = |(level, sums_nw): (&Level, &Tensor)| {
            let rows = level.nodes.rows();
            let token_rows = row_operands(rows, &buffers.heads_other_rh, &one(&level.token_wh), sums_nw);
            let blocks = level.blocks.iter().map(|[weight_hh, _]| {
                row_operands(rows, &buffers.heads_rh, &one(weight_hh), &buffers.level_product_rh)
            });
            let w2 = one(level.w2_vh.as_ref().unwrap_or(lm_head_vh));
            let output = row_operands(rows, &buffers.heads_rh, &w2, &buffers.head_logits_rv);
            [token_rows, output].into_iter().chain(blocks).collect::<Vec<_>>()
        };
        [hidden].into_iter().chain(self.levels.iter().zip(&sums[1..]).flat_map(level_rows)).collect()
    }
}

#[cfg(test)]
mod tests;
