//! New tokens behind a cache on a CPU with AVX-512, in float32 or bfloat16: the pass of [`Llama::extend`] with the kernels of
//! [`crate::cpu`] instead of libtorch's operations, which is its oracle. Between products everything is float32.

// N new tokens, H hidden, F intermediate size, Q query heads, G key/value heads, D head size
use tch::{Kind, Tensor};

use super::{DecoderLayer, Llama};
use crate::cpu::Number;
use crate::cpu::attention::{AttentionShape, Plane, SeenTokens, attend};
use crate::cpu::matrix::Matrix;
use crate::cpu::rows::{add, add_to_each, rms_norm, rotate, rotation, silu_product};
use crate::cpu::team::Team;
use crate::model::attention::NewTokens;
use crate::model::block_spec::{Activation, MlpSpec, NormKind, NormPlaces, NormSpec};
use crate::model::kv_cache::KvCache;
use crate::model::linear::Linear;

/// Tokens that go through the layers together: what they need beside the weights stays in the second cache.
const TOGETHER: usize = 64;

/// What the kernels read beside the matrices.
#[derive(Debug)]
pub(in crate::model) struct CpuPass {
    /// Before attention and before the MLP, of each layer, `[H]`.
    norms: Vec<[Vec<f32>; 2]>,
    norm_h: Vec<f32>,
    /// Biases of qkv, o, gate and up, down, of each layer.
    biases: Vec<[Option<Vec<f32>>; 4]>,
    number: Number,
    team: &'static Team,
}

impl CpuPass {
    /// `None` where a layer is not packed for the kernels.
    pub(super) fn new(llama: &Llama) -> Option<Self> {
        let number = match llama.kind {
            Kind::Float => Number::Float32,
            Kind::BFloat16 => Number::BFloat16,
            _ => return None,
        };
        llama.lm_head.matrix()?;
        llama.layers.iter().try_for_each(|layer| matrices(layer).map(drop))?;
        let norms = llama.layers.iter().map(|layer| layer.norms_h.each_ref().map(numbers));
        let biases = |layer: &DecoderLayer| linears(layer).map(|linear| linear.and_then(Linear::bias).map(numbers));
        Some(Self {
            norms: norms.collect(),
            norm_h: numbers(&llama.norm_h),
            biases: llama.layers.iter().map(biases).collect(),
            number,
            team: Team::of_process(),
        })
    }
}

/// qkv, o, gate and up, down.
fn linears(layer: &DecoderLayer) -> [Option<&Linear>; 4] {
    [layer.attention.qkv.merged_layer(), Some(&layer.attention.o), layer.gate_up.merged_layer(), Some(&layer.down)]
}

fn matrices(layer: &DecoderLayer) -> Option<[&Matrix; 4]> {
    let [qkv, o, gate_up, down] = linears(layer).map(|linear| linear.and_then(Linear::matrix));
    Some([qkv?, o?, gate_up?, down?])
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).reshape([-1])).expect("one axis of float32")
}

/// Buffers of a pass.
struct Rows {
    x_nh: Vec<f32>,
    normed_nh: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    gate_up: Vec<f32>,
    gated_nf: Vec<f32>,
    /// Where each token stands, and what it sees.
    rotations: Vec<Vec<f32>>,
    seen: Vec<SeenTokens>,
}

impl Llama {
    /// See [`Llama::extend`].
    pub(super) fn extend_on_cpu(
        &self,
        pass: &CpuPass,
        tokens_n: &Tensor,
        new: &NewTokens,
        cache: &mut KvCache,
    ) -> Tensor {
        cache.reserve(new.len());
        let (n, h) = (new.len(), self.config.hidden_size);
        let mut x_nh = numbers(&self.embed(tokens_n));
        for (chunk, x_nh) in x_nh.chunks_mut(TOGETHER * h as usize).enumerate() {
            self.run_rows(pass, chunk * TOGETHER, x_nh, new, cache);
        }
        Tensor::from_slice(&x_nh).view([n, h]).to_kind(self.kind)
    }

    /// Tokens from number `first` on: embeddings to hidden states after the final norm, in place.
    fn run_rows(&self, pass: &CpuPass, first: usize, x_nh: &mut [f32], new: &NewTokens, cache: &mut KvCache) {
        let n = x_nh.len() / self.config.hidden_size as usize;
        let mut rows = self.rows(x_nh.to_vec(), first..first + n, new, cache);
        for (index, layer) in self.layers.iter().enumerate() {
            let Some([qkv, o, gate_up, down]) = matrices(layer) else { unreachable!("checked by CpuPass::new") };
            let ([before_attention, before_mlp], biases) = (&pass.norms[index], &pass.biases[index]);
            let multiply = |matrix: &Matrix, bias: usize, x: &[f32], y: &mut [f32]| {
                matrix.multiply(x, y, pass.team);
                biases[bias].iter().for_each(|bias| add_to_each(y, bias));
            };
            let NormSpec { kind: NormKind::Rms, eps, places: NormPlaces::Inputs } = self.block.norms;
            let eps = eps as f32;
            rms_norm(&rows.x_nh, before_attention, eps, &mut rows.normed_nh);
            multiply(qkv, 0, &rows.normed_nh, &mut rows.qkv);
            self.attend(pass, index, cache.len() as usize + first, &mut rows, cache);
            multiply(o, 1, &rows.attended, &mut rows.normed_nh);
            add(&mut rows.x_nh, &rows.normed_nh);
            rms_norm(&rows.x_nh, before_mlp, eps, &mut rows.normed_nh);
            multiply(gate_up, 2, &rows.normed_nh, &mut rows.gate_up);
            let MlpSpec { width, activation: Activation::Silu } = self.block.mlp;
            silu_product(&rows.gate_up, &mut rows.gated_nf, width as usize);
            multiply(down, 3, &rows.gated_nf, &mut rows.normed_nh);
            add(&mut rows.x_nh, &rows.normed_nh);
        }
        rms_norm(&rows.x_nh, &pass.norm_h, self.block.norms.eps as f32, x_nh);
    }

    fn rows(&self, x_nh: Vec<f32>, range: std::ops::Range<usize>, new: &NewTokens, cache: &KvCache) -> Rows {
        let size = |size: i64| vec![0.0; range.len() * size as usize];
        let config = &self.config;
        let rotation_at = |n: usize| rotation(cache.len() + new.offset(n), self.rope.frequencies());
        Rows {
            x_nh,
            normed_nh: size(config.hidden_size),
            qkv: size(config.query_size() + 2 * config.key_value_size()),
            attended: size(config.query_size()),
            gate_up: size(2 * config.intermediate_size),
            gated_nf: size(config.intermediate_size),
            rotations: range.clone().map(rotation_at).collect(),
            seen: range.clone().map(|n| new.seen(n, cache.len() as usize)).collect(),
        }
    }

    /// Rotates queries and keys, writes keys and values to the cache from token `at` on, and attends.
    fn attend(&self, pass: &CpuPass, layer: usize, at: usize, rows: &mut Rows, cache: &mut KvCache) {
        let config = &self.config;
        let (q, kv, d) = (config.query_size() as usize, config.key_value_size() as usize, config.head_dim as usize);
        for (qkv, rotation) in rows.qkv.chunks_exact_mut(q + 2 * kv).zip(&rows.rotations) {
            rotate(&mut qkv[..q + kv], rotation);
        }
        let room = cache.room();
        let planes = cache.planes_mut(layer);
        for (bytes, first) in planes.into_iter().zip([q, q + kv]) {
            for (n, qkv) in rows.qkv.chunks_exact(q + 2 * kv).enumerate() {
                for (group, head_d) in qkv[first..first + kv].chunks_exact(d).enumerate() {
                    let from = (group * room + at + n) * d * pass.number.bytes();
                    pass.number.write(head_d, &mut bytes[from..from + d * pass.number.bytes()]);
                }
            }
        }
        let plane = |bytes| Plane { bytes, number: pass.number, room, head_size: d };
        let heads = AttentionShape {
            queries: q / d,
            groups: kv / d,
            scale: (self.block.heads.query_pre_attn_scalar as f32).sqrt().recip(),
        };
        let queries = (&rows.qkv[..], q + 2 * kv);
        attend(queries, cache.planes(layer).map(plane), &rows.seen, heads, &mut rows.attended, pass.team);
    }
}
