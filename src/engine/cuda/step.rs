//! One step of decoding on a GPU, written once for the kernels and for their oracle.
//!
//! A step starts when the tokens of its nodes are on the device. It runs them through the backbone, decides which are accepted,
//! keeps those in the cache, and writes the tokens of the next step's nodes: the heads' guesses after the last accepted node.

// N nodes of the step
use tch::Tensor;

use super::error::CudaResult;
use super::layer_products::LayerProducts;
use super::layout::Nodes;
use super::memory::{DeviceMemory, DeviceWeights};
use super::next_tree::NextTree;
use super::ops::Ops;
use super::oracle::{Accepted, Draws, HeadInputs, HeadNorms, StepPositions};
use super::rule::Rule;
use super::shape::Shape;
use crate::model::config::LlamaConfig;
use crate::model::llama::DenseLayer;
use crate::nvidia::gemm::Operands;

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

    /// Runs the backbone's layers. They write the nodes' keys and values to the cache, and add their outputs to the residual stream.
    ///
    /// # Errors
    /// A device error.
    pub fn layers(&self) -> CudaResult {
        let (buffers, weights) = (&self.memory.buffers, &self.weights.backbone);
        self.ops.embed(&self.rows(&buffers.tokens_n), &weights.embed_tokens_vh, &self.rows(&buffers.x_nh))?;
        for (at, layer) in weights.layers.iter().enumerate() {
            let products = self.products();
            self.ops.linear(&products.qkv(layer))?;
            self.attention(layer, &self.memory.cache_l2gsd.select(0, at as i64))?;
            self.ops.linear(&products.o(layer))?;
            self.ops.linear(&products.gate_up(layer))?;
            self.ops.linear(&products.down(layer))?;
        }
        Ok(())
    }

    fn products(&self) -> LayerProducts<'_> {
        LayerProducts { config: self.config, memory: self.memory, rows: self.nodes.len() }
    }

    fn attention(&self, layer: &DenseLayer, kv_2gsd: &Tensor) -> CudaResult {
        let buffers = &self.memory.buffers;
        let [qkv_nw, attended_nqd] = [&buffers.qkv_nw, &buffers.attended_nqd].map(|buffer| self.rows(buffer));
        let inputs = self.head_inputs(layer, &qkv_nw);
        self.ops.attention(inputs, self.places(), kv_2gsd, self.config, &attended_nqd)
    }

    fn head_inputs<'a>(&'a self, layer: &'a DenseLayer, qkv_nw: &'a Tensor) -> HeadInputs<'a> {
        let norms = layer.query_key_norms_d.as_ref();
        let eps = self.config.rms_norm_eps;
        HeadInputs {
            qkv_nw,
            bias_w: layer.qkv_bias_w.as_ref(),
            norms: norms.map(|[query_d, key_d]| HeadNorms { query_d, key_d, eps }),
            rotations: &self.memory.rotations,
        }
    }

    /// The final norm and the LM head.
    fn logits(&self) -> CudaResult {
        let (buffers, weights) = (&self.memory.buffers, &self.weights.backbone);
        let [x_nh, hidden_nh] = [&buffers.x_nh, &buffers.hidden_nh].map(|buffer| self.rows(buffer));
        self.ops.rms_norm(&x_nh, &weights.norm_h, self.config.rms_norm_eps, &hidden_nh)?;
        self.ops.linear(&Operands::new(&hidden_nh, &weights.lm_head_vh, &self.rows(&buffers.logits_nv)))
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

    fn places(&self) -> StepPositions<'_> {
        StepPositions { nodes: self.nodes, state: &self.memory.buffers.state }
    }

    fn accepted(&self) -> Accepted<'_> {
        Accepted { path: &self.memory.buffers.path_d, state: &self.memory.buffers.state }
    }

    /// The rows of a buffer that this step uses.
    fn rows(&self, buffer: &Tensor) -> Tensor {
        buffer.narrow(0, 0, self.nodes.len())
    }
}

/// The matrix products of all steps of `shape`, each with several weights.
pub fn products(weights: &DeviceWeights, memory: &DeviceMemory, shape: &Shape) -> Vec<Vec<Operands>> {
    let (buffers, backbone) = (&memory.buffers, &weights.backbone);
    let mut all = vec![];
    for rows in shape.rows_of_steps() {
        let products = LayerProducts { config: shape.config, memory, rows };
        let by_layer = |of: fn(&LayerProducts, &DenseLayer) -> Operands| {
            backbone.layers.iter().map(|layer| of(&products, layer)).collect()
        };
        all.extend(LayerProducts::ALL.map(by_layer));
    }
    for rows in [1, buffers.logits_nv.size()[0]] {
        let [hidden_nh, logits_nv] = [&buffers.hidden_nh, &buffers.logits_nv].map(|buffer| buffer.narrow(0, 0, rows));
        all.push(vec![Operands::new(&hidden_nh, &backbone.lm_head_vh, &logits_nv)]);
    }
    all.extend(weights.heads.iter().flat_map(|heads| heads.products(buffers, &backbone.lm_head_vh, shape)));
    all
}
