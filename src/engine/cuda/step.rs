//! One step of decoding on a GPU, written once for the kernels and for their oracle.
//!
//! A step starts when the tokens of its nodes are on the device. It runs them through the backbone, decides which are accepted,
//! keeps those in the cache, and writes the tokens of the next step's nodes: the heads' guesses after the last accepted node.

// N nodes of the step
use tch::Tensor;

use super::error::CudaResult;
use super::layout::Nodes;
use super::memory::{DeviceMemory, DeviceWeights};
use super::next_tree::NextTree;
use super::ops::Ops;
use super::oracle::{Accepted, Draws, HeadInputs, HeadNorms, Places};
use super::rule::Rule;
use super::shape::Shape;
use crate::model::config::LlamaConfig;
use crate::model::llama::DenseLayer;
use crate::nvidia::launcher::ProductBuffers;

/// A step of decoding with its weights and buffers.
#[derive(Debug, Clone, Copy)]
pub struct DecodeStep<'a> {
    /// The operations' implementation.
    pub ops: &'a Ops,
    pub config: &'a LlamaConfig,
    pub weights: &'a DeviceWeights,
    /// Buffers and cache that are written.
    pub memory: &'a DeviceMemory,
    pub nodes: &'a Nodes,
}

impl DecodeStep<'_> {
    /// Runs the whole step. `next` are the nodes of the following step; the heads guess if there are several.
    ///
    /// # Errors
    /// A device error.
    pub fn run(&self, rule: Rule, next: &Nodes) -> CudaResult {
        self.layers()?;
        self.logits()?;
        self.accept(rule)?;
        let (ops, buffers) = (self.ops, &self.memory.buffers);
        ops.compact(&self.memory.cache_l2gsd, self.accepted())?;
        ops.advance(self.accepted(), &self.rows(&buffers.tokens_n), &buffers.results_rt)?;
        NextTree { ops, weights: self.weights, memory: self.memory }.fill(next)
    }

    /// Runs the backbone's layers. They write the nodes' keys and values to the cache; the output of the last layer is not yet
    /// added to the residual stream.
    ///
    /// # Errors
    /// A device error.
    pub fn layers(&self) -> CudaResult {
        let (ops, buffers, weights) = (self.ops, &self.memory.buffers, &self.weights.backbone);
        let [x_nh, normed_nh] = [&buffers.x_nh, &buffers.normed_nh].map(|buffer| self.rows(buffer));
        ops.embed(&self.rows(&buffers.tokens_n), &weights.embed_tokens_vh, &x_nh)?;
        let eps = self.config.rms_norm_eps;
        for (at, layer) in weights.layers.iter().enumerate() {
            match at {
                0 => ops.rms_norm(&x_nh, &layer.input_layernorm_h, eps, &normed_nh)?,
                _ => self.add_norm(&layer.input_layernorm_h, &normed_nh)?,
            }
            self.attention(layer, &self.memory.cache_l2gsd.select(0, at as i64))?;
            self.add_norm(&layer.post_attention_layernorm_h, &normed_nh)?;
            self.mlp(layer)?;
        }
        Ok(())
    }

    /// Adds the block's output to the residual stream and normalises the sum.
    fn add_norm(&self, weight_h: &Tensor, out_nh: &Tensor) -> CudaResult {
        let buffers = &self.memory.buffers;
        let [x_nh, delta_nh] = [&buffers.x_nh, &buffers.delta_nh].map(|buffer| self.rows(buffer));
        self.ops.add_rms_norm(&x_nh, &delta_nh, weight_h, self.config.rms_norm_eps, out_nh)
    }

    fn attention(&self, layer: &DenseLayer, kv_2gsd: &Tensor) -> CudaResult {
        let (ops, buffers) = (self.ops, &self.memory.buffers);
        let [normed_nh, qkv_nw, q_nqd] =
            [&buffers.normed_nh, &buffers.qkv_nw, &buffers.q_nqd].map(|buffer| self.rows(buffer));
        let attended_nqd = self.rows(&buffers.attended_nqd);
        ops.linear(&normed_nh, &layer.qkv_wh, &qkv_nw)?;
        ops.rope_append(&qkv_nw, self.places(), self.head_inputs(layer), &q_nqd, kv_2gsd)?;
        ops.tree_attention(&q_nqd, kv_2gsd, self.places(), self.config, &attended_nqd)?;
        let attended_nq = attended_nqd.view([self.nodes.len(), self.config.query_size()]);
        ops.linear(&attended_nq, &layer.o_hq, &self.rows(&buffers.delta_nh))
    }

    fn head_inputs<'a>(&'a self, layer: &'a DenseLayer) -> HeadInputs<'a> {
        let norms = layer.query_key_norms_d.as_ref();
        let eps = self.config.rms_norm_eps;
        HeadInputs {
            bias_w: layer.qkv_bias_w.as_ref(),
            norms: norms.map(|[query_d, key_d]| HeadNorms { query_d, key_d, eps }),
            rotations: &self.memory.rotations,
        }
    }

    fn mlp(&self, layer: &DenseLayer) -> CudaResult {
        let (ops, buffers) = (self.ops, &self.memory.buffers);
        let [normed_nh, gate_up_ni, product_ni] =
            [&buffers.normed_nh, &buffers.gate_up_ni, &buffers.product_ni].map(|buffer| self.rows(buffer));
        ops.linear(&normed_nh, &layer.gate_up_ih, &gate_up_ni)?;
        ops.silu_mul(&gate_up_ni, &product_ni)?;
        ops.linear(&product_ni, &layer.down_hi, &self.rows(&buffers.delta_nh))
    }

    /// The final norm and the LM head.
    fn logits(&self) -> CudaResult {
        let (buffers, weights) = (&self.memory.buffers, &self.weights.backbone);
        let hidden_nh = self.rows(&buffers.hidden_nh);
        self.add_norm(&weights.norm_h, &hidden_nh)?;
        self.ops.linear(&hidden_nh, &weights.lm_head_vh, &self.rows(&buffers.logits_nv))
    }

    fn accept(&self, rule: Rule) -> CudaResult {
        let (ops, buffers, nodes) = (self.ops, &self.memory.buffers, self.nodes);
        let [tokens_n, logits_nv, best_n] =
            [&buffers.tokens_n, &buffers.logits_nv, &buffers.best_n].map(|buffer| self.rows(buffer));
        match rule {
            Rule::Greedy => ops.best(&logits_nv, &best_n)?,
            Rule::Draw { temperature, top_p } => {
                let draws = Draws { temperature, top_p, uniforms_u: &self.memory.uniforms_u };
                ops.draw(&logits_nv, self.places(), draws, &best_n)?;
            }
            Rule::Typical { rule, temperature } => {
                let [log_p_n, entropy_n] = [&buffers.log_p_n, &buffers.entropy_n].map(|buffer| self.rows(buffer));
                ops.best(&logits_nv, &best_n)?;
                ops.posterior(&logits_nv, &tokens_n, nodes, temperature, [&log_p_n, &entropy_n])?;
                return ops.typical(nodes, [&log_p_n, &entropy_n], rule, &best_n, self.accepted());
            }
        }
        ops.walk(nodes, &tokens_n, &best_n, self.accepted())
    }

    fn places(&self) -> Places<'_> {
        Places { nodes: self.nodes, state: &self.memory.buffers.state }
    }

    fn accepted(&self) -> Accepted<'_> {
        Accepted { path: &self.memory.buffers.path_d, state: &self.memory.buffers.state }
    }

    /// The rows of a buffer that this step uses.
    fn rows(&self, buffer: &Tensor) -> Tensor {
        buffer.narrow(0, 0, self.nodes.len())
    }
}

/// The matrix products of all steps of `shape`, with the buffers that they run on.
pub fn products(weights: &DeviceWeights, memory: &DeviceMemory, shape: &Shape) -> Vec<ProductBuffers> {
    let buffers = &memory.buffers;
    let attended_nq = buffers.attended_nqd.view([-1, shape.config.query_size()]);
    let each = |weight: fn(&DenseLayer) -> &Tensor| -> Vec<Tensor> {
        weights.backbone.layers.iter().map(|layer| weight(layer).shallow_clone()).collect()
    };
    let of_layers = [
        (&buffers.normed_nh, each(|layer| &layer.qkv_wh), &buffers.qkv_nw),
        (&attended_nq, each(|layer| &layer.o_hq), &buffers.delta_nh),
        (&buffers.normed_nh, each(|layer| &layer.gate_up_ih), &buffers.gate_up_ni),
        (&buffers.product_ni, each(|layer| &layer.down_hi), &buffers.delta_nh),
    ];
    let mut all = vec![];
    for rows in shape.rows_of_steps() {
        all.extend(of_layers.iter().map(|(x, weights, y)| ProductBuffers::of_rows(rows, x, weights, y)));
    }
    let lm_head = [weights.backbone.lm_head_vh.shallow_clone()];
    for rows in [1, buffers.logits_nv.size()[0]] {
        all.push(ProductBuffers::of_rows(rows, &buffers.hidden_nh, &lm_head, &buffers.logits_nv));
    }
    all.extend(weights.heads.iter().flat_map(|heads| heads.products(buffers, &lm_head[0], shape)));
    all
}
