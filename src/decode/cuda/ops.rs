//! Who computes a step: the kernels on a GPU, or their oracle on tensors of any device. Both write into the same buffers.

// The letters are those of `oracle`
use tch::{Device, Tensor};

use super::engine::EngineError;
use super::layout::{Nodes, Rotations};
use super::oracle::{self, Accepted, BlockInput, Draws, Places};
use crate::decode::accept::TypicalAcceptance;
use crate::model::config::LlamaConfig;

/// The operations of a step.
#[derive(Debug)]
pub enum Ops {
    /// Slowly and obviously, where the buffers are.
    Oracle,
}

/// Calls the oracle's function, or the kernel of the same name.
macro_rules! call {
    ($self:ident, $name:ident($($argument:expr),*)) => {
        match $self {
            Ops::Oracle => {
                oracle::$name($($argument),*);
                Ok(())
            }
        }
    };
}

type Done = Result<(), EngineError>;

impl Ops {
    /// Memory of the device that is free; `None` where nobody counts it.
    pub fn free_bytes(&self) -> Option<u64> {
        match self {
            Ops::Oracle => None,
        }
    }

    pub(super) fn embed(&self, tokens_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) -> Done {
        call!(self, embed(tokens_n, table_vh, x_nh))
    }

    pub(super) fn rms_norm(&self, x_nh: &Tensor, weight_h: &Tensor, eps: f64, y_nh: &Tensor) -> Done {
        call!(self, rms_norm(x_nh, weight_h, eps, y_nh))
    }

    pub(super) fn add_rms_norm(
        &self,
        x_nh: &Tensor,
        delta_nh: &Tensor,
        weight_h: &Tensor,
        eps: f64,
        y_nh: &Tensor,
    ) -> Done {
        call!(self, add_rms_norm(x_nh, delta_nh, weight_h, eps, y_nh))
    }

    pub(super) fn linear(&self, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Done {
        call!(self, linear(x_nk, w_mk, None, y_nm))
    }

    pub(super) fn rope_append(
        &self,
        qkv_nw: &Tensor,
        places: Places,
        rotations: &Rotations,
        q_nqd: &Tensor,
        kv_2gsd: &Tensor,
    ) -> Done {
        call!(self, rope_append(qkv_nw, None, places, rotations, q_nqd, kv_2gsd))
    }

    pub(super) fn tree_attention(
        &self,
        q_nqd: &Tensor,
        kv_2gsd: &Tensor,
        places: Places,
        config: &LlamaConfig,
        attended_nqd: &Tensor,
    ) -> Done {
        let scale = (config.head_dim as f64).powf(-0.5);
        call!(self, tree_attention(q_nqd, kv_2gsd, places, scale, config.sliding_window, attended_nqd))
    }

    pub(super) fn silu_mul(&self, gate_up_ni: &Tensor, product_ni: &Tensor) -> Done {
        call!(self, silu_mul(gate_up_ni, product_ni))
    }

    pub(super) fn res_block(&self, x: BlockInput, w_khh: &Tensor, b_kh: &Tensor, y_kh: &Tensor) -> Done {
        call!(self, res_block(x, w_khh, b_kh, y_kh))
    }

    pub(super) fn top_guesses(&self, logits_kv: &Tensor, ids_kp: &Tensor) -> Done {
        call!(self, top_guesses(logits_kv, ids_kp))
    }

    pub(super) fn best(&self, logits_nv: &Tensor, best_n: &Tensor) -> Done {
        call!(self, best(logits_nv, best_n))
    }

    pub(super) fn posterior(
        &self,
        logits_nv: &Tensor,
        tokens_n: &Tensor,
        nodes: &Nodes,
        temperature: f64,
        [log_p_n, entropy_n]: [&Tensor; 2],
    ) -> Done {
        call!(self, posterior(logits_nv, tokens_n, nodes, temperature, log_p_n, entropy_n))
    }

    pub(super) fn draw(&self, logits_nv: &Tensor, places: Places, draws: Draws, drawn_n: &Tensor) -> Done {
        call!(self, draw(logits_nv, places, draws, drawn_n))
    }

    pub(super) fn walk(&self, nodes: &Nodes, tokens_n: &Tensor, chosen_n: &Tensor, accepted: Accepted) -> Done {
        call!(self, walk(nodes, tokens_n, chosen_n, accepted))
    }

    pub(super) fn typical(
        &self,
        nodes: &Nodes,
        posterior: [&Tensor; 2],
        rule: TypicalAcceptance,
        best_n: &Tensor,
        accepted: Accepted,
    ) -> Done {
        call!(self, typical(nodes, posterior, rule, best_n, accepted))
    }

    pub(super) fn compact(&self, cache_l2gsd: &Tensor, accepted: Accepted) -> Done {
        call!(self, compact(cache_l2gsd, accepted))
    }

    pub(super) fn advance(&self, accepted: Accepted, tokens_n: &Tensor, results_rt: &Tensor) -> Done {
        call!(self, advance(accepted, tokens_n, results_rt))
    }

    pub(super) fn fill_tree(&self, nodes: &Nodes, guesses_kp: &Tensor, state: &Tensor, tokens_n: &Tensor) -> Done {
        call!(self, fill_tree(nodes, guesses_kp, state, tokens_n))
    }

    /// A buffer gets what the host has: the same shape and dtype, on the CPU.
    pub(super) fn upload(&self, to: &Tensor, from: &Tensor) -> Done {
        match self {
            Ops::Oracle => to.shallow_clone().copy_(from),
        };
        Ok(())
    }

    /// A buffer on the host, when all that was asked for before is done.
    pub(super) fn download(&self, from: &Tensor) -> Result<Tensor, EngineError> {
        match self {
            Ops::Oracle => Ok(from.to_device(Device::Cpu)),
        }
    }
}
