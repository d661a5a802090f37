//! Who computes a step: the kernels on a GPU, or their oracle on tensors of any device. Both write into the same buffers. Or both, one
//! beside the other.

// The letters are those of `oracle`
use std::fmt;

use tch::{Device, Tensor};

use super::beside::Beside;
use super::error::CudaError;
use super::graph::Key;
use super::launcher::{Between, Launcher, Needed};
use super::launches;
use super::layout::{Nodes, Rotations};
use super::oracle::{self, Accepted, BlockInput, Draws, Places};
use super::plan::Shape;
use crate::model::block_spec::{BlockSpec, Windows};
use crate::model::config::LlamaConfig;
use crate::nvidia::gemm::{Product, Way};
use crate::nvidia::kernels::Launch;
use crate::tree::accept::TypicalAcceptance;

/// The operations of a step.
#[derive(Debug)]
pub enum Ops {
    /// Slowly and obviously, where the buffers are.
    Oracle,
    /// With kernels, on the GPU where the buffers are.
    Cuda(Box<Launcher>),
    /// With the launches of the same kernels, which somebody else runs, on buffers of the host.
    Host(Host),
    /// With kernels, each compared with its oracle on the same inputs.
    Beside(Box<Beside>),
}

/// See [`Ops::Host`].
pub struct Host {
    between: Between,
    launch: Box<dyn Fn(&Launch)>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}

/// Calls the oracle's function, or launches the kernel of the same name, or both; they write some of their arguments.
macro_rules! call {
    ($self:ident, $name:ident($($argument:expr),*) writes $written:expr) => {
        match $self {
            Ops::Oracle => {
                oracle::$name($($argument),*);
                Ok(())
            }
            Ops::Beside(beside) => beside.compare(stringify!($name), &$written, |ops| ops.$name($($argument),*)),
            _ => $self.launch(&launches::$name($($argument),*)),
        }
    };
}

type Done = Result<(), CudaError>;

impl Ops {
    /// `launch` runs the launches of such a backbone and drafter.
    pub fn on_host(shape: &Shape, launch: impl Fn(&Launch) + 'static) -> Self {
        let between = Between::new(shape, Device::Cpu);
        Self::Host(Host { between, launch: Box::new(launch) })
    }

    fn launch(&self, launch: &Launch) -> Done {
        match self {
            Ops::Oracle | Ops::Beside(_) => unreachable!("they have no launches of their own"),
            Ops::Cuda(launcher) => launcher.launch(launch),
            Ops::Host(host) => {
                (host.launch)(launch);
                Ok(())
            }
        }
    }

    fn between(&self) -> &Between {
        match self {
            Ops::Oracle | Ops::Beside(_) => unreachable!("they need nothing else"),
            Ops::Cuda(launcher) => launcher.between(),
            Ops::Host(host) => &host.between,
        }
    }

    /// Where it computes.
    pub fn name(&self) -> &str {
        match self {
            Ops::Oracle => "the kernels' oracle",
            Ops::Cuda(launcher) => &launcher.gpu().name,
            Ops::Host(_) => "the host",
            Ops::Beside(beside) => beside.kernels().name(),
        }
    }

    /// Memory of the device that is free; `None` where nobody counts it.
    pub(super) fn free_bytes(&self) -> Result<Option<u64>, CudaError> {
        match self {
            Ops::Oracle | Ops::Host(_) => Ok(None),
            Ops::Cuda(launcher) => Ok(Some(launcher.gpu().free_bytes()?)),
            Ops::Beside(beside) => beside.kernels().free_bytes(),
        }
    }

    /// The buffers are new: they are whole, and their products are computed in the fastest way.
    pub(super) fn prepare(&mut self, products: impl FnOnce() -> Vec<Needed>) -> Done {
        match self {
            Ops::Oracle | Ops::Host(_) => Ok(()),
            Ops::Cuda(launcher) => launcher.time(&products()),
            Ops::Beside(beside) => beside.kernels_mut().prepare(products),
        }
    }

    /// Buffers have moved.
    pub(super) fn moved(&self) {
        match self {
            Ops::Oracle | Ops::Host(_) => {}
            Ops::Cuda(launcher) => launcher.moved(),
            Ops::Beside(beside) => beside.kernels().moved(),
        }
    }

    /// Runs a step, from its record where there is one.
    pub(super) fn replayed(&self, key: Key, step: impl FnOnce() -> Done) -> Done {
        match self {
            Ops::Oracle | Ops::Host(_) | Ops::Beside(_) => step(),
            Ops::Cuda(launcher) => launcher.replayed(key, step),
        }
    }

    pub(super) fn embed(&self, tokens_n: &Tensor, table_vh: &Tensor, x_nh: &Tensor) -> Done {
        call!(self, embed(tokens_n, table_vh, x_nh) writes [x_nh])
    }

    pub(super) fn rms_norm(&self, x_nh: &Tensor, weight_h: &Tensor, eps: f64, y_nh: &Tensor) -> Done {
        call!(self, rms_norm(x_nh, weight_h, eps, y_nh) writes [y_nh])
    }

    pub(super) fn add_rms_norm(
        &self,
        x_nh: &Tensor,
        delta_nh: &Tensor,
        weight_h: &Tensor,
        eps: f64,
        y_nh: &Tensor,
    ) -> Done {
        call!(self, add_rms_norm(x_nh, delta_nh, weight_h, eps, y_nh) writes [x_nh, y_nh])
    }

    pub(super) fn linear(&self, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Done {
        match self {
            Ops::Oracle => {
                oracle::linear(x_nk, w_mk, y_nm);
                Ok(())
            }
            Ops::Cuda(launcher) => launcher.linear(x_nk, w_mk, y_nm),
            Ops::Host(_) => self.linear_by(Way::untimed(Product::of(x_nk, w_mk, y_nm)), x_nk, w_mk, y_nm),
            Ops::Beside(beside) => beside.linear(x_nk, w_mk, y_nm),
        }
    }

    /// The ways of a product that there are.
    pub(super) fn ways(&self, product: Product) -> Result<Vec<Way>, CudaError> {
        match self {
            Ops::Cuda(launcher) => launcher.ways(product),
            _ => Ok(product.own_ways()),
        }
    }

    /// As [`Ops::linear`], by one of the ways.
    pub(super) fn linear_by(&self, way: Way, x_nk: &Tensor, w_mk: &Tensor, y_nm: &Tensor) -> Done {
        match self {
            Ops::Oracle | Ops::Beside(_) => self.linear(x_nk, w_mk, y_nm),
            Ops::Cuda(launcher) => launcher.linear_by(way, x_nk, w_mk, y_nm),
            Ops::Host(_) => self.launch(&launches::linear(way, x_nk, w_mk, y_nm)),
        }
    }

    pub(super) fn rope_append(
        &self,
        qkv_nw: &Tensor,
        places: Places,
        rotations: &Rotations,
        q_nqd: &Tensor,
        kv_2gsd: &Tensor,
    ) -> Done {
        call!(self, rope_append(qkv_nw, places, rotations, q_nqd, kv_2gsd) writes [q_nqd, kv_2gsd])
    }

    pub(super) fn tree_attention(
        &self,
        q_nqd: &Tensor,
        kv_2gsd: &Tensor,
        places: Places,
        config: &LlamaConfig,
        attended_nqd: &Tensor,
    ) -> Done {
        let BlockSpec { heads, windows: Windows::EveryLayer(window), .. } = config.block();
        let scale = heads.scale();
        match self {
            Ops::Oracle => {
                oracle::tree_attention(q_nqd, kv_2gsd, places, scale, window, attended_nqd);
                Ok(())
            }
            Ops::Beside(beside) => beside.compare("tree_attention", &[attended_nqd], |ops| {
                ops.tree_attention(q_nqd, kv_2gsd, places, config, attended_nqd)
            }),
            _ => {
                let parts = self.between().parts(places.nodes.len());
                let both = launches::tree_attention(q_nqd, kv_2gsd, places, (scale, window), parts, attended_nqd);
                both.iter().try_for_each(|launch| self.launch(launch))
            }
        }
    }

    pub(super) fn silu_mul(&self, gate_up_ni: &Tensor, product_ni: &Tensor) -> Done {
        call!(self, silu_mul(gate_up_ni, product_ni) writes [product_ni])
    }

    pub(super) fn res_block(&self, x: BlockInput, w_khh: &Tensor, b_kh: &Tensor, y_kh: &Tensor) -> Done {
        call!(self, res_block(x, w_khh, b_kh, y_kh) writes [y_kh])
    }

    pub(super) fn top_guesses(&self, logits_kv: &Tensor, ids_kp: &Tensor) -> Done {
        match self {
            Ops::Oracle => {
                oracle::top_guesses(logits_kv, ids_kp);
                Ok(())
            }
            Ops::Beside(beside) => beside.compare("top_guesses", &[ids_kp], |ops| ops.top_guesses(logits_kv, ids_kp)),
            _ => {
                let both = launches::top_guesses(logits_kv, self.between().guess_parts(), ids_kp);
                both.iter().try_for_each(|launch| self.launch(launch))
            }
        }
    }

    pub(super) fn best(&self, logits_nv: &Tensor, best_n: &Tensor) -> Done {
        call!(self, best(logits_nv, best_n) writes [best_n])
    }

    pub(super) fn posterior(
        &self,
        logits_nv: &Tensor,
        tokens_n: &Tensor,
        nodes: &Nodes,
        temperature: f64,
        [log_p_n, entropy_n]: [&Tensor; 2],
    ) -> Done {
        match self {
            Ops::Oracle => {
                oracle::posterior(logits_nv, tokens_n, nodes, temperature, log_p_n, entropy_n);
                Ok(())
            }
            Ops::Beside(beside) => beside.compare("posterior", &[log_p_n, entropy_n], |ops| {
                ops.posterior(logits_nv, tokens_n, nodes, temperature, [log_p_n, entropy_n])
            }),
            _ => {
                let numbers = [log_p_n, entropy_n];
                self.launch(&launches::posterior(logits_nv, tokens_n, nodes, temperature, numbers))
            }
        }
    }

    pub(super) fn draw(&self, logits_nv: &Tensor, places: Places, draws: Draws, drawn_n: &Tensor) -> Done {
        call!(self, draw(logits_nv, places, draws, drawn_n) writes [drawn_n])
    }

    pub(super) fn walk(&self, nodes: &Nodes, tokens_n: &Tensor, chosen_n: &Tensor, accepted: Accepted) -> Done {
        call!(self, walk(nodes, tokens_n, chosen_n, accepted) writes [accepted.path, accepted.state])
    }

    pub(super) fn typical(
        &self,
        nodes: &Nodes,
        posterior: [&Tensor; 2],
        rule: TypicalAcceptance,
        best_n: &Tensor,
        accepted: Accepted,
    ) -> Done {
        call!(self, typical(nodes, posterior, rule, best_n, accepted) writes [accepted.path, accepted.state])
    }

    pub(super) fn compact(&self, cache_l2gsd: &Tensor, accepted: Accepted) -> Done {
        call!(self, compact(cache_l2gsd, accepted) writes [cache_l2gsd])
    }

    pub(super) fn advance(&self, accepted: Accepted, tokens_n: &Tensor, results_rt: &Tensor) -> Done {
        call!(self, advance(accepted, tokens_n, results_rt) writes [accepted.state, results_rt])
    }

    pub(super) fn fill_tree(&self, nodes: &Nodes, guesses_kp: &Tensor, state: &Tensor, tokens_n: &Tensor) -> Done {
        call!(self, fill_tree(nodes, guesses_kp, state, tokens_n) writes [tokens_n])
    }

    /// A buffer gets what the host has: the same shape and dtype, on the CPU.
    pub(super) fn upload(&self, to: &Tensor, from: &Tensor) -> Done {
        match self {
            Ops::Oracle | Ops::Host(_) => {
                to.shallow_clone().copy_(from);
                Ok(())
            }
            Ops::Cuda(launcher) => Ok(launcher.gpu().upload(to, from)?),
            Ops::Beside(beside) => beside.kernels().upload(to, from),
        }
    }

    /// Until all that was asked for is done, by libtorch and by kernels.
    pub(super) fn wait(&self) -> Done {
        if let Ops::Cuda(launcher) = self {
            launcher.gpu().wait_for_torch();
            launcher.gpu().wait()?;
        }
        Ok(())
    }

    /// A buffer on the host, when all that was asked for before is done.
    pub(super) fn download(&self, from: &Tensor) -> Result<Tensor, CudaError> {
        match self {
            Ops::Oracle | Ops::Host(_) => Ok(from.to_device(Device::Cpu)),
            Ops::Cuda(launcher) => Ok(launcher.gpu().download(from)?),
            Ops::Beside(beside) => beside.kernels().download(from),
        }
    }
}
