//! The CPU engine: [`Llama::extend_several`] with the kernels of [`crate::cpu`] in float32 or bfloat16. Its oracle is libtorch.
//! Activations are float32. The rows of all sequences go through each product together; what a row computes does not depend on the others,
//! bit by bit.

// N new tokens, H hidden, W a token's states, F intermediate size, Q query heads, G key/value heads, D head size
use tch::{Device, Kind, Tensor};

use super::{Engine, RowTokens};
use crate::cpu;
use crate::cpu::attention::{SeenTokens, SequenceTokens, attend};
use crate::cpu::matrix::Matrix;
use crate::cpu::rows::{
    add, add_to_each, gelu_tanh_product, in_parts, rms_norm, rotate, rotation, silu_product, write_numbers,
};
use crate::cpu::team::Team;
use crate::cpu::{AttentionShape, Number, Plane};
use crate::model::block_spec::{Activation, HeadShape, MlpSpec, NormKind, NormPlace};
use crate::model::kv_cache::{CacheBytes, KvCache};
use crate::model::linear::Linear;
use crate::model::llama::{Llama, MergedLayer};
use crate::model::lora::Adapters;

use self::pass::{PassTokens, passes};

mod pass;

/// Tokens per pass through the layers. Weights are read once per pass.
const TOGETHER: usize = 256;

/// Why the kernels cannot run a backbone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    #[error("the backbone is not on the CPU")]
    Device,
    #[error("this CPU has no AVX2 with FMA and F16C, which the CPU kernels need")]
    Processor,
    #[error("the CPU kernels compute in float32 or bfloat16, not in float16: use --dtype bfloat16")]
    Dtype,
    /// Quantised weights, or weights that were not laid out for decoding.
    #[error("the weights are not laid out for the CPU kernels")]
    Weights,
}

/// The [`Engine`] on the CPU kernels.
#[derive(Debug)]
pub struct CpuEngine<'a> {
    backbone: &'a Llama,
    layers: Vec<KernelLayer<'a>>,
    norm_h: Vec<f32>,
    number: Number,
    team: &'static Team,
}

/// A layer's weights in the layout that the kernels read.
#[derive(Debug)]
struct KernelLayer<'a> {
    norms: KernelNorms,
    qkv: KernelLinear<'a>,
    o: KernelLinear<'a>,
    gate_up: KernelLinear<'a>,
    down: KernelLinear<'a>,
    /// Index of its kind.
    kind: usize,
}

/// The norms of a layer, by place; what they multiply with.
#[derive(Debug)]
struct KernelNorms([Option<Vec<f32>>; 6]);

#[derive(Debug)]
struct KernelLinear<'a> {
    matrix: &'a Matrix,
    bias_o: Option<Vec<f32>>,
}

impl<'a> KernelLayer<'a> {
    fn new(layer: &MergedLayer<'a>, kind: usize, norm_kind: NormKind) -> Option<Self> {
        Some(Self {
            norms: KernelNorms::new(layer, norm_kind),
            qkv: KernelLinear::new(layer.qkv)?,
            o: KernelLinear::new(layer.o)?,
            gate_up: KernelLinear::new(layer.gate_up)?,
            down: KernelLinear::new(layer.down)?,
            kind,
        })
    }
}

impl KernelNorms {
    fn new(layer: &MergedLayer, kind: NormKind) -> Self {
        let mut all = [const { None }; 6];
        for (place, weight_h) in layer.norms {
            all[place as usize] = weight_h.map(|weight_h| norm_factors(weight_h, kind));
        }
        Self(all)
    }

    fn at(&self, place: NormPlace) -> Option<&[f32]> {
        self.0[place as usize].as_deref()
    }

    /// Norms `x` in place, if there is a norm: rows as long as its weight.
    fn apply(&self, place: NormPlace, x: &mut [f32], eps: f32) {
        self.at(place).into_iter().for_each(|weight| rms_norm(x, weight, eps));
    }
}

/// What a norm multiplies with.
fn norm_factors(weight_h: &Tensor, kind: NormKind) -> Vec<f32> {
    let mut factors = numbers(weight_h);
    match kind {
        NormKind::Rms => {}
        NormKind::RmsPlusOne => factors.iter_mut().for_each(|weight| *weight += 1.0),
    }
    factors
}

impl<'a> KernelLinear<'a> {
    fn new(linear: &'a Linear) -> Option<Self> {
        Some(Self { matrix: linear.matrix()?, bias_o: linear.bias().map(numbers) })
    }

    fn multiply(&self, x: &[f32], y: &mut [f32], team: &Team) {
        self.matrix.multiply(x, y, team);
        self.bias_o.iter().for_each(|bias| add_to_each(y, bias));
    }
}

/// The gated MLP between its products.
fn gated_product(gate_up_nf: &[f32], out_nf: &mut [f32], mlp: MlpSpec, team: &Team) {
    let MlpSpec::Gated { width, activation } = mlp;
    let f = width as usize;
    in_parts(out_nf, f, team, |first, out_nf| {
        let gate_up_nf = &gate_up_nf[first * 2 * f..][..2 * out_nf.len()];
        match activation {
            Activation::Silu => silu_product(gate_up_nf, out_nf, f),
            Activation::GeluTanh => gelu_tanh_product(gate_up_nf, out_nf, f),
        }
    });
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).reshape([-1])).expect("one axis of float32")
}

impl<'a> CpuEngine<'a> {
    /// An engine for a backbone that was loaded for decoding.
    ///
    /// # Errors
    /// [`Unsupported`]: why the kernels cannot run it.
    pub fn new(backbone: &'a Llama) -> Result<Self, Unsupported> {
        let (number, layers) = kernel_layers(backbone)?;
        let norm_h = norm_factors(backbone.norm(), backbone.block().norms.kind);
        Ok(Self { backbone, layers, norm_h, number, team: Team::shared() })
    }

    /// Checks that the kernels can run a backbone.
    ///
    /// # Errors
    /// [`Unsupported`]: why they cannot.
    pub fn supports(backbone: &Llama) -> Result<(), Unsupported> {
        kernel_layers(backbone).map(drop)
    }

    /// Runs the embeddings of a pass's tokens through all layers; writes the tokens' states, `[N, W]`.
    fn run_pass(&self, cache: &mut CacheBytes, x_nh: &[f32], pass: &[PassTokens], states_nw: &mut [f32]) {
        let (block, eps) = (self.backbone.block(), self.backbone.block().norms.eps as f32);
        let mut buffers = self.buffers(x_nh.to_vec(), pass);
        self.write_tap(0, &buffers.x_nh, states_nw);
        for (index, layer) in self.layers.iter().enumerate() {
            buffers.norm_stream(layer.norms.at(NormPlace::AttentionInput), eps, self.team);
            layer.qkv.multiply(&buffers.normed_nh, &mut buffers.qkv, self.team);
            self.norm_and_rotate(layer, &mut buffers);
            pass.iter().for_each(|piece| self.write_keys_and_values(cache, index, piece, &buffers));
            self.attend(cache, (index, layer.kind), pass, &mut buffers);
            layer.o.multiply(&buffers.attended, &mut buffers.normed_nh, self.team);
            layer.norms.apply(NormPlace::AttentionOutput, &mut buffers.normed_nh, eps);
            self.add_to_stream(&mut buffers);
            buffers.norm_stream(layer.norms.at(NormPlace::MlpInput), eps, self.team);
            layer.gate_up.multiply(&buffers.normed_nh, &mut buffers.gate_up, self.team);
            gated_product(&buffers.gate_up, &mut buffers.gated_nf, block.mlp, self.team);
            layer.down.multiply(&buffers.gated_nf, &mut buffers.normed_nh, self.team);
            layer.norms.apply(NormPlace::MlpOutput, &mut buffers.normed_nh, eps);
            self.add_to_stream(&mut buffers);
            self.write_tap(index + 1, &buffers.x_nh, states_nw);
        }
        buffers.norm_stream(Some(&self.norm_h), eps, self.team);
        self.write_states(0, &buffers.normed_nh, states_nw);
    }

    /// Writes the residual stream behind so many layers to the states, if it is tapped.
    fn write_tap(&self, layers: usize, x_nh: &[f32], states_nw: &mut [f32]) {
        let column = self.backbone.taps().column(layers, self.backbone.config.hidden_size);
        column.into_iter().for_each(|column| self.write_states(column as usize, x_nh, states_nw));
    }

    /// Writes `[N, H]` to the states from a column on.
    fn write_states(&self, column: usize, x_nh: &[f32], states_nw: &mut [f32]) {
        let (h, w) = (self.backbone.config.hidden_size as usize, self.backbone.states_width() as usize);
        let rows = states_nw.chunks_exact_mut(w).zip(x_nh.chunks_exact(h));
        rows.for_each(|(state_w, x_h)| state_w[column..column + h].copy_from_slice(x_h));
    }

    /// What attention or the MLP gave joins the residual stream.
    fn add_to_stream(&self, buffers: &mut Buffers) {
        let factor = self.backbone.block().residual_multiplier as f32;
        if factor != 1.0 {
            buffers.normed_nh.iter_mut().for_each(|x| *x *= factor);
        }
        let (h, given_nh) = (self.backbone.config.hidden_size as usize, &buffers.normed_nh);
        in_parts(&mut buffers.x_nh, h, self.team, |first, x_nh| add(x_nh, &given_nh[first * h..][..x_nh.len()]));
    }

    fn buffers(&self, x_nh: Vec<f32>, pass: &[PassTokens]) -> Buffers {
        let config = &self.backbone.config;
        let MlpSpec::Gated { width, activation: _ } = self.backbone.block().mlp;
        let rows = x_nh.len() / config.hidden_size as usize;
        let size = |size: i64| vec![0.0; rows * size as usize];
        let kinds = 0..self.backbone.block().layers.kinds().len();
        let each = || pass.iter().flat_map(|piece| piece.nodes.clone().map(move |node| (piece, node)));
        let rotations_of = |kind: usize| {
            let frequencies = self.backbone.rotary_frequencies(kind)?;
            let magnitude = frequencies.magnitude as f32;
            let position = |(piece, node): (&PassTokens, usize)| piece.len as i64 + piece.tokens.offset(node);
            Some(each().map(|token| rotation(position(token), &frequencies.each, magnitude)).collect())
        };
        let seen_of = |kind: usize| each().map(|(piece, node)| piece.tokens.seen(node, piece.len, kind)).collect();
        Buffers {
            x_nh,
            normed_nh: size(config.hidden_size),
            qkv: size(config.query_size() + 2 * config.key_value_size()),
            attended: size(config.query_size()),
            gate_up: size(2 * width),
            gated_nf: size(width),
            rotations: kinds.clone().map(rotations_of).collect(),
            seen: kinds.map(seen_of).collect(),
        }
    }

    /// Norms queries and keys, if the family does, and rotates them.
    fn norm_and_rotate(&self, layer: &KernelLayer, buffers: &mut Buffers) {
        let config = &self.backbone.config;
        let (q, kv, d) = (config.query_size() as usize, config.key_value_size() as usize, config.head_dim as usize);
        let eps = config.rms_norm_eps as f32;
        let rotations = buffers.rotations[layer.kind].as_deref();
        let width = q + 2 * kv;
        in_parts(&mut buffers.qkv, width, self.team, |first, rows| {
            for (n, qkv) in (first..).zip(rows.chunks_exact_mut(width)) {
                layer.norms.apply(NormPlace::Query, &mut qkv[..q], eps);
                layer.norms.apply(NormPlace::Key, &mut qkv[q..q + kv], eps);
                if let Some(rotations) = rotations {
                    rotate(&mut qkv[..q + kv], d, &rotations[n]);
                }
            }
        });
    }

    /// Writes the keys and values of a piece to its row of the cache.
    fn write_keys_and_values(&self, cache: &mut CacheBytes, layer: usize, piece: &PassTokens, buffers: &Buffers) {
        let config = &self.backbone.config;
        let (q, kv, d) = (config.query_size() as usize, config.key_value_size() as usize, config.head_dim as usize);
        let (room, at) = (cache.room(), piece.len + piece.nodes.start);
        let qkv = &buffers.qkv[piece.at.start * (q + 2 * kv)..piece.at.end * (q + 2 * kv)];
        for (bytes, first) in cache.planes_mut(layer, piece.row).into_iter().zip([q, q + kv]) {
            for (n, qkv) in qkv.chunks_exact(q + 2 * kv).enumerate() {
                for (group, head_d) in qkv[first..first + kv].chunks_exact(d).enumerate() {
                    let from = (group * room + at + n) * d * self.number.bytes();
                    write_numbers(self.number, head_d, &mut bytes[from..from + d * self.number.bytes()]);
                }
            }
        }
    }

    /// Each token attends to its own sequence.
    fn attend(&self, cache: &CacheBytes, (layer, kind): (usize, usize), pass: &[PassTokens], buffers: &mut Buffers) {
        let config = &self.backbone.config;
        let (q, kv, d) = (config.query_size() as usize, config.key_value_size() as usize, config.head_dim as usize);
        let HeadShape { scale, softcap, .. } = self.backbone.block().heads;
        let plane = |bytes| Plane { bytes, number: self.number, room: cache.room(), head_size: d };
        let heads = AttentionShape {
            queries: q / d,
            groups: kv / d,
            scale: scale as f32,
            softcap: softcap.map(|cap| cap as f32),
        };
        let sequence = |piece: &PassTokens| SequenceTokens {
            planes: cache.planes(layer, piece.row).map(plane),
            seen: &buffers.seen[kind][piece.at.clone()],
        };
        let sequences: Vec<SequenceTokens> = pass.iter().map(sequence).collect();
        attend((&buffers.qkv[..], q + 2 * kv), &sequences, heads, &mut buffers.attended, self.team);
    }
}

impl Engine for CpuEngine<'_> {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn backbone(&self) -> &Llama {
        self.backbone
    }

    fn extend(&self, cache: &mut KvCache, tokens_n: &Tensor, batch: &[RowTokens]) -> Tensor {
        batch.iter().for_each(|at| cache.reserve_tokens(at.row, at.nodes.len()));
        let tokens: Vec<i64> = Vec::try_from(tokens_n).expect("one axis of int64");
        let x_nh = self.backbone.embed_numbers(&tokens);
        let (h, w) = (self.backbone.config.hidden_size as usize, self.backbone.states_width() as usize);
        let mut states_nw = vec![0.0; tokens.len() * w];
        let (passes, mut cache) = (passes(cache, batch, TOGETHER), cache.bytes_mut());
        let parts = x_nh.chunks(TOGETHER * h).zip(states_nw.chunks_mut(TOGETHER * w));
        for (pass, (x_nh, states_nw)) in passes.iter().zip(parts) {
            self.run_pass(&mut cache, x_nh, pass, states_nw);
        }
        let states_nw = Tensor::from_slice(&states_nw).view([-1, w as i64]);
        if self.number == Number::Float32 { states_nw } else { states_nw.to_kind(self.backbone.kind()) }
    }

    fn same_bits_in_any_pass(&self) -> bool {
        true
    }

    /// Computes in float32, like the kernels.
    fn logits(&self, states_nw: &Tensor) -> Tensor {
        self.backbone.logits(&self.backbone.last_of(states_nw).to_kind(Kind::Float), Adapters::Off)
    }
}

fn kernel_layers(backbone: &Llama) -> Result<(Number, Vec<KernelLayer<'_>>), Unsupported> {
    let number = match backbone.kind() {
        _ if backbone.device() != Device::Cpu => return Err(Unsupported::Device),
        _ if !cpu::available() => return Err(Unsupported::Processor),
        Kind::Float => Number::Float32,
        Kind::BFloat16 => Number::BFloat16,
        _ => return Err(Unsupported::Dtype),
    };
    backbone.lm_head().matrix().ok_or(Unsupported::Weights)?;
    let (kinds, norm_kind) = (&backbone.block().layers, backbone.block().norms.kind);
    let layers = backbone.merged_layers().ok_or(Unsupported::Weights)?.into_iter().enumerate();
    let layers = layers.map(|(index, layer)| KernelLayer::new(&layer, kinds.kind_of(index), norm_kind));
    let layers = layers.collect::<Option<_>>();
    Ok((number, layers.ok_or(Unsupported::Weights)?))
}

/// Activations of one pass.
struct Buffers {
    x_nh: Vec<f32>,
    normed_nh: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    gate_up: Vec<f32>,
    gated_nf: Vec<f32>,
    /// By kind of layer and token: the rotation by its position.
    rotations: Vec<Option<Vec<Vec<f32>>>>,
    /// By kind of layer and token: the tokens that it attends to.
    seen: Vec<Vec<SeenTokens>>,
}

impl Buffers {
    /// The residual stream after a norm, if there is one, as the next product reads it.
    fn norm_stream(&mut self, weight_h: Option<&[f32]>, eps: f32, team: &Team) {
        let Some(weight_h) = weight_h else { return self.normed_nh.copy_from_slice(&self.x_nh) };
        in_parts(&mut self.normed_nh, weight_h.len(), team, |first, normed_nh| {
            normed_nh.copy_from_slice(&self.x_nh[first * weight_h.len()..][..normed_nh.len()]);
            rms_norm(normed_nh, weight_h, eps);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tch::TchEngine;
    use crate::model::config::{Biases, LlamaConfig};
    use crate::model::new_tokens::NewTokens;
    use crate::model::taps::Taps;
    use crate::torch::Generator;

    fn config(sliding_window: Option<i64>) -> LlamaConfig {
        LlamaConfig { sliding_window, ..LlamaConfig::tiny() }
    }

    /// Runs a prompt, then a tree of which one path is kept, then one more token. Returns all states, `[rows, W]`.
    fn decode_a_little(engine: &dyn Engine) -> Tensor {
        let (config, kind) = (engine.backbone().config.clone(), engine.backbone().kind());
        let mut cache = KvCache::with_one_row(&config, kind, Device::Cpu);
        let row = 0;
        let tokens = Tensor::from_slice(&(0..90).map(|i| i * 7 % 50).collect::<Vec<i64>>());
        let chain = |n: i64| NewTokens::chain(n, &config, kind, Device::Cpu);
        let prompt = engine.extend(&mut cache, &tokens, &[RowTokens { row, nodes: &chain(90) }]);
        cache.commit(row, 90);
        let parents = [None, Some(0), Some(0), Some(2), Some(3)];
        let ancestor = |query: usize, key: usize| std::iter::successors(Some(query), |&n| parents[n]).any(|n| n == key);
        let new = NewTokens::pattern(&[0, 1, 1, 2, 3], ancestor, &config, kind, Device::Cpu);
        let tree = engine.extend(&mut cache, &tokens.narrow(0, 3, 5), &[RowTokens { row, nodes: &new }]);
        cache.commit_path(row, &[0, 2, 3, 4]);
        let last = engine.extend(&mut cache, &tokens.narrow(0, 0, 1), &[RowTokens { row, nodes: &chain(1) }]);
        Tensor::cat(&[prompt, tree, last], 0)
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn a_pass_with_own_kernels_equals_libtorchs() {
        for (kind, tolerance) in [(Kind::Float, 1e-4), (Kind::BFloat16, 0.1)] {
            let wider = [(None, true, 8), (Some(6), false, 20), (None, false, 40)].map(|(window, bias, head_dim)| {
                LlamaConfig { biases: Biases { qkv: bias, o: bias, mlp: false }, head_dim, ..config(window) }
            });
            for config in LlamaConfig::tiny_of_each_family().into_iter().chain(wider) {
                let long = LlamaConfig { max_position_embeddings: 256, ..config };
                // 1 + weight of these norms is 2: so much larger are the numbers.
                let doubled = long.family.norm_kind == NormKind::RmsPlusOne;
                let tolerance = if doubled { 2.0 * tolerance } else { tolerance };
                let llama = || {
                    let mut llama = Llama::random(long.clone(), kind, Device::Cpu, 5);
                    llama.set_taps(Taps::new([0, 1]));
                    llama
                };
                let (oracle, ours) = (llama().for_batches(), llama().for_decoding());
                let oracle = decode_a_little(&TchEngine::new(&oracle)).to_kind(Kind::Double);
                let ours = decode_a_little(&CpuEngine::new(&ours).expect("kernels"));
                let off = (ours.to_kind(Kind::Double) - oracle).abs().max().double_value(&[]);
                assert!(off < tolerance, "{kind:?}, {long:?}: {off}");
            }
        }
    }

    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn a_token_gives_the_same_bits_alone_and_in_any_tree() {
        [Kind::Float, Kind::BFloat16].into_iter().for_each(same_bits_in_any_chunks);
    }

    fn same_bits_in_any_chunks(kind: Kind) {
        let llama = Llama::random(config(Some(9)), kind, Device::Cpu, 6).for_decoding();
        let tokens = Generator::seeded(7).integers(50, &[40]);
        let by_chunks = |chunk: i64| {
            let engine = CpuEngine::new(&llama).expect("kernels");
            let mut cache = KvCache::with_one_row(&llama.config, kind, Device::Cpu);
            let pieces = tokens.split(chunk, 0);
            let logits = pieces.iter().map(|piece| {
                let new = NewTokens::chain(piece.size()[0], &llama.config, kind, Device::Cpu);
                let hidden = engine.extend(&mut cache, piece, &[RowTokens { row: 0, nodes: &new }]);
                cache.commit(0, new.len());
                engine.logits(&hidden)
            });
            Tensor::cat(&logits.collect::<Vec<_>>(), 0)
        };
        let one_by_one = by_chunks(1);
        for chunk in [2, 3, 5, 7, 16, 40] {
            assert_eq!(by_chunks(chunk), one_by_one, "{kind:?}, {chunk} at a time");
        }
    }

    /// A tree of 5 nodes, a chain of 70 tokens and a single token behind rows of other lengths.
    #[test]
    #[cfg_attr(not(kernels), ignore = "needs AVX2 with FMA")]
    fn sequences_of_one_pass_give_the_same_bits_as_one_after_the_other() {
        for (kind, window) in [(Kind::Float, None), (Kind::Float, Some(9)), (Kind::BFloat16, None)] {
            let config = LlamaConfig { max_position_embeddings: 600, ..config(window) };
            let llama = Llama::random(config, kind, Device::Cpu, 8).for_decoding();
            let chain = |n: i64| NewTokens::chain(n, &llama.config, kind, Device::Cpu);
            let sees = |query: usize, key: usize| key == query || key == 0 || (query, key) == (4, 2);
            let tree = NewTokens::pattern(&[0, 1, 1, 1, 2], sees, &llama.config, kind, Device::Cpu);
            let (long, one) = (chain(70), chain(1));
            let batch: Vec<RowTokens> =
                [(2, &tree), (0, &long), (3, &one), (1, &tree)].map(|(row, nodes)| RowTokens { row, nodes }).to_vec();
            let tokens_n = Generator::seeded(9).integers(50, &[81]);
            let hidden_and_cache = |together: bool| {
                let engine = CpuEngine::new(&llama).expect("kernels");
                let mut cache = KvCache::new(&llama.config, kind, Device::Cpu);
                for (row, len) in [3, 300, 17, 1].into_iter().enumerate() {
                    cache.push();
                    let prompt = Generator::seeded(row as u64).integers(50, &[len]);
                    let _ = engine.extend(&mut cache, &prompt, &[RowTokens { row, nodes: &chain(len) }]);
                    cache.commit(row, len);
                }
                let parts = if together { vec![&batch[..]] } else { batch.chunks(1).collect() };
                let mut end = 0;
                let hidden: Vec<Tensor> = (parts.into_iter())
                    .map(|part| {
                        let n = part.iter().map(|at| at.nodes.len()).sum::<i64>();
                        end += n;
                        engine.extend(&mut cache, &tokens_n.narrow(0, end - n, n), part)
                    })
                    .collect();
                batch.iter().for_each(|at| cache.commit(at.row, at.nodes.len()));
                (Tensor::cat(&hidden, 0), (0..4).map(|row| cache.committed(row)).collect::<Vec<_>>())
            };
            assert_eq!(hidden_and_cache(true), hidden_and_cache(false), "{kind:?}, window {window:?}");
        }
    }
}
