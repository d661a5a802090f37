//! The four matrix products of a layer: which buffers they read and write, and what is fused into them.

// N rows, H hidden, Q query heads, D head size, I width of the MLP
use tch::Tensor;

use super::memory::DeviceMemory;
use crate::model::config::LlamaConfig;
use crate::model::llama::DenseLayer;
use crate::nvidia::gemm::{Ending, InputNorm, Operands};

/// The products of a step with `rows` rows.
#[derive(Debug, Clone, Copy)]
pub struct LayerProducts<'a> {
    pub config: &'a LlamaConfig,
    pub memory: &'a DeviceMemory,
    pub rows: i64,
}

impl LayerProducts<'_> {
    /// All of them, in their order.
    pub const ALL: [fn(&LayerProducts, &DenseLayer) -> Operands; 4] = [
        |products, layer| products.qkv(layer),
        |products, layer| products.o(layer),
        |products, layer| products.gate_up(layer),
        |products, layer| products.down(layer),
    ];

    /// Queries, keys and values of the normed residual stream.
    pub fn qkv(&self, layer: &DenseLayer) -> Operands {
        let qkv_nw = self.first(&self.memory.buffers.qkv_nw);
        let norm = Some(self.norm(&layer.input_layernorm_h));
        Operands { norm, ..Operands::new(&self.residual_stream(), &layer.qkv_wh, &qkv_nw) }
    }

    /// Adds attention's output to the residual stream.
    pub fn o(&self, layer: &DenseLayer) -> Operands {
        let attended_nqd = self.first(&self.memory.buffers.attended_nqd);
        let attended_nq = attended_nqd.view([self.rows, self.config.query_size()]);
        let ending = Ending::Added;
        Operands { ending, ..Operands::new(&attended_nq, &layer.o_hq, &self.residual_stream()) }
    }

    /// SiLU(gate) · up of the normed residual stream.
    pub fn gate_up(&self, layer: &DenseLayer) -> Operands {
        let buffers = &self.memory.buffers;
        let norm = Some(self.norm(&layer.post_attention_layernorm_h));
        let ending = Ending::Gated { sums_nm: self.first(&buffers.gate_up_ni) };
        let product_ni = self.first(&buffers.product_ni);
        Operands { norm, ending, ..Operands::new(&self.residual_stream(), &layer.gate_up_ih, &product_ni) }
    }

    /// Adds the MLP's output to the residual stream.
    pub fn down(&self, layer: &DenseLayer) -> Operands {
        let product_ni = self.first(&self.memory.buffers.product_ni);
        let ending = Ending::Added;
        Operands { ending, ..Operands::new(&product_ni, &layer.down_hi, &self.residual_stream()) }
    }

    fn norm(&self, weight_h: &Tensor) -> InputNorm {
        let normed_nk = self.first(&self.memory.buffers.normed_nh);
        InputNorm { weight_k: weight_h.shallow_clone(), eps: self.config.rms_norm_eps, normed_nk }
    }

    /// `[N, H]`.
    fn residual_stream(&self) -> Tensor {
        self.first(&self.memory.buffers.x_nh)
    }

    /// The rows of a buffer that the step uses.
    fn first(&self, buffer: &Tensor) -> Tensor {
        buffer.narrow(0, 0, self.rows)
    }
}
