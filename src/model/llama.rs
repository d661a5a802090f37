//! The backbone: a Llama-family decoder (Touvron et al. 2023), one file for the family.

// B rows, T tokens of a row, N new tokens, H hidden, V vocabulary
use std::path::Path;

use tch::{Device, Kind, Tensor};

use crate::cpu;
use crate::cpu::arena::Arena;
use crate::cpu::rows::largest;
use crate::model::attention::{Attention, HeadShape, NewTokens, RowMask};
use crate::model::batch_cache::BatchCache;
use crate::model::config::{ConfigError, LlamaConfig};
use crate::model::kv_cache::KvCache;
use crate::model::linear::{Linear, LinearGroup};
use crate::model::lora::{Adapter, Adapters};
use crate::model::peft::{self, PeftError};
use crate::model::quantization::{Quantization, QuantizedWeight, Quantizer};
use crate::model::rope::{Rope, Rotation};
use crate::model::weights::{WeightFiles, WeightsError, names};
use crate::torch::bytes;

mod cpu_pass;
mod dense;

use cpu_pass::CpuPass;
pub use dense::{DenseLayer, DenseWeights};

/// What makes a folder unusable as a backbone.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its shape.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its weights.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Its adapter.
    #[error(transparent)]
    Adapter(#[from] PeftError),
}

/// What a backbone is loaded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Whole rows: every product separate, over the mapped file where dtype and device allow.
    Training,
    /// A few tokens at a time: q, k, v and gate, up merged, and laid out for the CPU's own kernels.
    Decoding,
    /// A token of each of many generations at a time: merged, and packed on the CPU by oneDNN, which is faster from some 20 rows on.
    Batches,
}

/// Whether a backbone's folder holds more than its config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HasWeights {
    /// Their headers fit the config.
    Yes,
    /// Only `config.json` was looked at.
    No,
}

/// A backbone.
#[derive(Debug)]
pub struct Llama {
    /// Its shape.
    pub config: LlamaConfig,
    /// `[V, H]`, of the file's dtype: rows are converted as they are looked up, so a mapped file is not copied.
    embed_tokens_vh: Tensor,
    layers: Vec<DecoderLayer>,
    norm_h: Tensor,
    lm_head: Linear,
    rope: Rope,
    kind: Kind,
    quantization: Option<Quantization>,
    device: Device,
    /// Where passes of few rows have kernels of their own.
    cpu_pass: Option<CpuPass>,
}

#[derive(Debug)]
struct DecoderLayer {
    input_layernorm_h: Tensor,
    attention: Attention,
    post_attention_layernorm_h: Tensor,
    gate_up: LinearGroup,
    down: Linear,
}

/// Where a backbone's tensors come from: name and shape to tensor.
type Source<'s> = dyn FnMut(&str, &[i64]) -> Result<Tensor, WeightsError> + 's;

impl Llama {
    /// Loads a Hugging Face folder to compute in `kind` on `device`.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load(folder: &Path, kind: Kind, device: Device, purpose: Purpose) -> Result<Self, LoadError> {
        Self::load_quantized(folder, kind, device, purpose, None)
    }

    /// As [`Llama::load`], with the linear layers of the decoder quantised one after the other: no more than one is in memory as it
    /// is in the file.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load_quantized(
        folder: &Path,
        kind: Kind,
        device: Device,
        purpose: Purpose,
        quantization: Option<Quantization>,
    ) -> Result<Self, LoadError> {
        let config = LlamaConfig::load(folder)?;
        let files = WeightFiles::open(folder)?;
        let embedding = files.mapped(names::EMBED_TOKENS, &[config.vocab_size, config.hidden_size])?.to_device(device);
        let mut source = |name: &str, shape: &[i64]| {
            if quantization.is_some() {
                files.release(); // what was read before is quantised by now
            }
            match name {
                names::EMBED_TOKENS => Ok(embedding.shallow_clone()),
                _ => files.tensor(name, shape, kind, device),
            }
        };
        let llama = Self::build(config, kind, device, quantization, &mut source)?.prepared_for(purpose);
        files.release();
        Ok(llama)
    }

    /// As [`Llama::load`], with the adapter of a PEFT folder in its weights.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn load_merged(
        folder: &Path,
        adapter: &Path,
        kind: Kind,
        device: Device,
        purpose: Purpose,
    ) -> Result<Self, LoadError> {
        let mut llama = Self::load(folder, kind, device, Purpose::Training)?;
        peft::attach(&mut llama, adapter, None)?;
        Ok(llama.merged().prepared_for(purpose))
    }

    /// The backbone of a folder without its numbers: every weight is one zero, seen from everywhere, so it takes no memory. Where the
    /// folder has weights, their headers are checked as loading would; no data are read.
    ///
    /// # Errors
    /// [`LoadError`] names the file and what is wrong in it.
    pub fn outline(folder: &Path) -> Result<(Self, HasWeights), LoadError> {
        let config = LlamaConfig::load(folder)?;
        let files = match WeightFiles::open(folder) {
            Err(WeightsError::NoWeights { .. }) => None,
            files => Some(files?),
        };
        let zero = Tensor::zeros([1], (Kind::Float, Device::Cpu));
        let mut source = |name: &str, shape: &[i64]| {
            files.iter().try_for_each(|files| files.check(name, shape))?;
            Ok(zero.expand(shape, false))
        };
        let outline = Self::build(config, Kind::Float, Device::Cpu, None, &mut source)?;
        Ok((outline, if files.is_some() { HasWeights::Yes } else { HasWeights::No }))
    }

    /// A backbone of seeded random weights: normal with deviation 0.02, norms 1.
    pub fn random(config: LlamaConfig, kind: Kind, device: Device, seed: u64) -> Self {
        crate::torch::seed(seed);
        let mut source = |_: &str, shape: &[i64]| {
            let options = (kind, device);
            Ok(if shape.len() == 1 { Tensor::ones(shape, options) } else { Tensor::randn(shape, options) * 0.02 })
        };
        Self::build(config, kind, device, None, &mut source).expect("this source has every tensor")
    }

    fn build(
        config: LlamaConfig,
        kind: Kind,
        device: Device,
        quantization: Option<Quantization>,
        source: &mut Source,
    ) -> Result<Self, WeightsError> {
        let (h, v) = (config.hidden_size, config.vocab_size);
        let quantizer = quantization.map(|quantization| Quantizer::new(quantization, device));
        let embed_tokens_vh = source(names::EMBED_TOKENS, &[v, h])?;
        let lm_head = match config.tie_word_embeddings {
            true => Linear::dense(embed_tokens_vh.to_kind(kind), None),
            false => linear(source, names::LM_HEAD, [v, h], false, None)?,
        };
        let layers = (0..config.num_hidden_layers).map(|i| DecoderLayer::build(&config, i, quantizer.as_ref(), source));
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            norm_h: source(names::NORM, &[h])?,
            rope: Rope::new(&config, kind, device),
            lm_head,
            embed_tokens_vh,
            config,
            kind,
            quantization,
            device,
            cpu_pass: None,
        })
    }

    /// The same backbone for a few tokens at a time: see [`Purpose::Decoding`].
    #[must_use]
    pub fn for_decoding(mut self) -> Self {
        let mut arena = Arena::default();
        self.lm_head = self.lm_head.for_few_rows(&mut arena);
        let mut prepare = |linear: Linear| linear.for_few_rows(&mut arena);
        self.layers = self.layers.into_iter().map(|layer| layer.prepared(&mut prepare)).collect();
        self.cpu_pass = CpuPass::new(&self);
        self
    }

    /// The same backbone for several generations at once: see [`Purpose::Batches`].
    #[must_use]
    pub fn for_batches(mut self) -> Self {
        self.lm_head = self.lm_head.packed();
        self.layers = self.layers.into_iter().map(|layer| layer.prepared(&mut Linear::packed)).collect();
        self
    }

    fn prepared_for(self, purpose: Purpose) -> Self {
        match purpose {
            Purpose::Training => self,
            Purpose::Decoding => self.for_decoding(),
            Purpose::Batches => self.for_batches(),
        }
    }

    /// Whole rows: `tokens_bt` `[B, T]` int64 to hidden states after the final norm, `[B, T, H]`.
    pub fn hidden_states(&self, tokens_bt: &Tensor, rows: &RowMask, adapters: Adapters) -> Tensor {
        let rotation = self.rotation(rows);
        let input = tokens_bt.shallow_clone();
        (0..self.parts()).fold(input, |x, part| self.run_part(part, &x, &rotation, rows, adapters))
    }

    /// How many parts a pass over whole rows has: the embedding, the decoder layers, the final norm.
    pub fn parts(&self) -> usize {
        self.layers.len() + 2
    }

    /// One part of a pass over whole rows; the first takes tokens `[B, T]`, the others `[B, T, H]`.
    pub(super) fn run_part(
        &self,
        part: usize,
        x: &Tensor,
        rotation: &Rotation,
        rows: &RowMask,
        adapters: Adapters,
    ) -> Tensor {
        let eps = self.config.rms_norm_eps;
        match part.checked_sub(1) {
            None => self.embed(x),
            Some(layer) if layer < self.layers.len() => {
                let layer = &self.layers[layer];
                layer.forward(x, eps, adapters, |x, a| a.over_rows(x, rotation, rows, adapters))
            }
            Some(_) => rms_norm(x, &self.norm_h, eps),
        }
    }

    pub(super) fn rotation(&self, rows: &RowMask) -> Rotation {
        rows.rotation(&self.rope)
    }

    /// New tokens behind a cache: `tokens_n` `[N]` int64 to hidden states after the final norm, `[N, H]`. Their keys and
    /// values become the cache's pending rows; commit those that stay. Adapters take no part: decoding merges them.
    pub fn extend(&self, tokens_n: &Tensor, new: &NewTokens, cache: &mut KvCache) -> Tensor {
        if let Some(pass) = &self.cpu_pass {
            return self.extend_on_cpu(pass, tokens_n, new, cache);
        }
        cache.reserve(new.len());
        let (rotation, place) = (new.rotation(&self.rope, cache), new.place(cache));
        let mut x_nh = self.embed(tokens_n);
        for (i, layer) in self.layers.iter().enumerate() {
            let attend = |x: &Tensor, a: &Attention| a.over_cache(x, &rotation, &place, cache.layer(i));
            x_nh = layer.forward(&x_nh, self.config.rms_norm_eps, Adapters::Off, attend);
        }
        rms_norm(&x_nh, &self.norm_h, self.config.rms_norm_eps)
    }

    /// One new token of each of several generations: `tokens_b` `[B]` int64, a token for each row of the cache, to logits of the
    /// next ones, `[B, V]`. The new tokens are committed. What a row computes does not depend on the other rows (bit by bit on
    /// the CPU, up to 64 rows).
    pub fn extend_batch(&self, tokens_b: &Tensor, cache: &mut BatchCache) -> Tensor {
        let step = cache.step();
        let rotation = step.rotation(&self.rope);
        let mut x_ph = self.embed(&step.with_spare_rows(tokens_b));
        for (i, layer) in self.layers.iter().enumerate() {
            let attend = |x: &Tensor, a: &Attention| a.over_batch(x, &rotation, &step, cache.layer(i));
            x_ph = layer.forward(&x_ph, self.config.rms_norm_eps, Adapters::Off, attend);
        }
        cache.commit();
        let hidden_ph = rms_norm(&x_ph, &self.norm_h, self.config.rms_norm_eps);
        self.logits(&hidden_ph, Adapters::Off).narrow(0, 0, step.rows)
    }

    /// The LM head: `[…, H]` to logits of the next token, `[…, V]`, in the backbone's dtype; from the CPU's own kernels in float32, as
    /// they sum.
    pub fn logits(&self, hidden: &Tensor, adapters: Adapters) -> Tensor {
        match self.cpu_pass {
            Some(_) => self.lm_head.forward(&hidden.to_kind(Kind::Float), adapters),
            None => self.lm_head.forward(hidden, adapters),
        }
    }

    /// Whether [`Llama::extend`] runs on the kernels of [`crate::cpu`], which have threads of their own.
    pub fn has_own_kernels(&self) -> bool {
        self.cpu_pass.is_some()
    }

    /// The LM head.
    pub fn lm_head(&self) -> &Linear {
        &self.lm_head
    }

    /// The LM head's weight `[V, H]`; for decoding it may be packed away.
    pub fn lm_head_weight(&self) -> Option<&Tensor> {
        self.lm_head.dense_weight()
    }

    /// What it computes in.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What its linear layers were reduced to.
    pub fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// Bytes of all weights; a tied lm_head counts once. For a backbone loaded or made for training.
    pub fn weight_bytes(&self) -> usize {
        let dense = self.weights().iter().map(|(_, t)| t.numel() * t.kind().elt_size_in_bytes()).sum::<usize>();
        let quantized = self.layers.iter().flat_map(DecoderLayer::linears).filter_map(Linear::quantized_weight);
        dense + quantized.map(QuantizedWeight::bytes).sum::<usize>()
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Every weight by its Hugging Face name, in file order of a Llama; a tied lm_head is left out, and what is quantised. For a backbone loaded or made
    /// for training; what is merged or packed for decoding has no such names.
    pub fn weights(&self) -> Vec<(String, &Tensor)> {
        let mut all = vec![(names::EMBED_TOKENS.to_owned(), &self.embed_tokens_vh)];
        for (i, layer) in self.layers.iter().enumerate() {
            all.extend(layer.weights().into_iter().map(|(part, t)| (names::in_layer(i, &part), t)));
        }
        all.push((names::NORM.to_owned(), &self.norm_h));
        if !self.config.tie_word_embeddings {
            all.extend(self.lm_head.dense_weight().map(|w| (format!("{}.weight", names::LM_HEAD), w)));
        }
        all
    }

    /// What is trained in a part of a pass (see [`Llama::forward_kept`]), by the name in its file: adapters by PEFT's, weights by
    /// Hugging Face's.
    pub fn trained_in(&self, part: usize) -> Vec<(String, &Tensor)> {
        let all = match part.checked_sub(1) {
            None => vec![(names::EMBED_TOKENS.to_owned(), &self.embed_tokens_vh)],
            Some(layer) if layer < self.layers.len() => self.layers[layer].tensors(layer),
            Some(_) => vec![(names::NORM.to_owned(), &self.norm_h)],
        };
        all.into_iter().filter(|(_, tensor)| tensor.requires_grad()).collect()
    }

    /// What is trained in the LM head; nothing where it is tied to a trained embedding, which is [`Llama::trained_in`] part 0.
    pub fn trained_in_lm_head(&self) -> Vec<(String, &Tensor)> {
        if let Some(adapter) = self.lm_head.adapter() {
            return peft::named(names::LM_HEAD, adapter).into_iter().filter(|(_, t)| t.requires_grad()).collect();
        }
        let own = self.lm_head.dense_weight().filter(|w| w.requires_grad() && !self.config.tie_word_embeddings);
        own.map(|weight| (format!("{}.weight", names::LM_HEAD), weight)).into_iter().collect()
    }

    /// Every adapter by the name of its layer.
    pub fn adapters(&self) -> Vec<(String, &Adapter)> {
        let mut all = vec![];
        for (i, layer) in self.layers.iter().enumerate() {
            let named = linear_names().zip(layer.linears());
            all.extend(named.filter_map(|(part, linear)| Some((names::in_layer(i, part), linear.adapter()?))));
        }
        all.extend(self.lm_head.adapter().map(|adapter| (names::LM_HEAD.to_owned(), adapter)));
        all
    }

    /// Every linear layer by its name, lm_head last.
    pub(super) fn linears_mut(&mut self) -> Vec<(String, &mut Linear)> {
        let mut all = vec![];
        for (i, layer) in self.layers.iter_mut().enumerate() {
            let attention = layer.attention.qkv.layers_mut().iter_mut().chain([&mut layer.attention.o]);
            let linears = attention.chain(layer.gate_up.layers_mut()).chain([&mut layer.down]);
            all.extend(linear_names().map(|part| names::in_layer(i, part)).zip(linears));
        }
        all.push((names::LM_HEAD.to_owned(), &mut self.lm_head));
        all
    }

    /// The same backbone with its adapters in its weights. A tied lm_head that had an adapter is tied no longer.
    #[must_use]
    pub fn merged(mut self) -> Self {
        self.config.tie_word_embeddings &= self.lm_head.adapter().is_none();
        self.linears_mut().into_iter().for_each(|(_, linear)| linear.merge());
        self
    }

    /// The same backbone with float32 weights of its own, all of them trained; it computes in `kind`.
    #[must_use]
    pub fn for_fine_tuning(mut self, kind: Kind) -> Self {
        let own = |tensor: &Tensor| tensor.to_kind(Kind::Float).copy();
        self.embed_tokens_vh = own(&self.embed_tokens_vh);
        self.norm_h = own(&self.norm_h);
        for layer in &mut self.layers {
            layer.input_layernorm_h = own(&layer.input_layernorm_h);
            layer.post_attention_layernorm_h = own(&layer.post_attention_layernorm_h);
        }
        self.linears_mut().into_iter().for_each(|(_, linear)| linear.own());
        if self.config.tie_word_embeddings {
            self.lm_head = Linear::dense(self.embed_tokens_vh.shallow_clone(), None);
        }
        self.rope = Rope::new(&self.config, kind, self.device);
        self.kind = kind;
        for (_, weight) in self.weights() {
            let _ = weight.set_requires_grad(true);
        }
        self
    }

    fn embed(&self, tokens: &Tensor) -> Tensor {
        Tensor::embedding(&self.embed_tokens_vh, tokens, -1, false, false).to_kind(self.kind)
    }
}

impl DecoderLayer {
    fn build(
        config: &LlamaConfig,
        index: usize,
        quantizer: Option<&Quantizer>,
        source: &mut Source,
    ) -> Result<Self, WeightsError> {
        let (h, f) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.query_size(), config.key_value_size());
        let mut named = |part: &str, shape: [i64; 2], bias: bool| {
            linear(source, &names::in_layer(index, part), shape, bias, quantizer)
        };
        let qkv = names::QKV.iter().zip([q, kv, kv]).map(|(part, rows)| named(part, [rows, h], config.attention_bias));
        let qkv = LinearGroup::separate(qkv.collect::<Result<_, _>>()?);
        let o = named(names::O, [h, q], config.attention_bias)?;
        let gate_up = names::GATE_UP.iter().map(|part| named(part, [f, h], config.mlp_bias));
        let gate_up = LinearGroup::separate(gate_up.collect::<Result<_, _>>()?);
        let down = named(names::DOWN, [h, f], config.mlp_bias)?;
        Ok(Self {
            input_layernorm_h: source(&names::in_layer(index, names::INPUT_LAYERNORM), &[h])?,
            attention: Attention { qkv, o, shape: HeadShape::new(config) },
            post_attention_layernorm_h: source(&names::in_layer(index, names::POST_ATTENTION_LAYERNORM), &[h])?,
            gate_up,
            down,
        })
    }

    /// q, k, v and gate, up merged, and all products as `prepare` makes them.
    fn prepared(self, prepare: &mut impl FnMut(Linear) -> Linear) -> Self {
        let Attention { qkv, o, shape } = self.attention;
        let attention = Attention { qkv: qkv.merged(&mut *prepare), o: prepare(o), shape };
        Self { attention, gate_up: self.gate_up.merged(&mut *prepare), down: prepare(self.down), ..self }
    }

    /// The residual stream `x` (`[…, H]`) through attention, which `attend` runs, and the MLP.
    fn forward(
        &self,
        x: &Tensor,
        eps: f64,
        adapters: Adapters,
        attend: impl Fn(&Tensor, &Attention) -> Tensor,
    ) -> Tensor {
        let x = x + attend(&rms_norm(x, &self.input_layernorm_h, eps), &self.attention);
        let f = self.gate_up.outputs() / 2;
        let [gate, up] = self.gate_up.each(&rms_norm(&x, &self.post_attention_layernorm_h, eps), [f, f], adapters);
        x + self.down.forward(&(gate.silu() * up), adapters)
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let attention = self.attention.qkv.layers().iter().chain([&self.attention.o]);
        attention.chain(self.gate_up.layers()).chain([&self.down])
    }

    /// Weights and adapters of layer `index`, by the names in their files.
    fn tensors(&self, index: usize) -> Vec<(String, &Tensor)> {
        let weights = self.weights().into_iter().map(|(part, tensor)| (names::in_layer(index, &part), tensor));
        let mut all: Vec<(String, &Tensor)> = weights.collect();
        for (part, linear) in linear_names().zip(self.linears()) {
            all.extend(linear.adapter().into_iter().flat_map(|a| peft::named(&names::in_layer(index, part), a)));
        }
        all
    }

    fn weights(&self) -> Vec<(String, &Tensor)> {
        let mut all: Vec<(String, &Tensor)> = vec![];
        for (part, linear) in linear_names().zip(self.linears()) {
            all.extend(linear.dense_weight().map(|weight| (format!("{part}.weight"), weight)));
            all.extend(linear.bias().map(|bias| (format!("{part}.bias"), bias)));
        }
        all.push((names::INPUT_LAYERNORM.to_owned(), &self.input_layernorm_h));
        all.push((names::POST_ATTENTION_LAYERNORM.to_owned(), &self.post_attention_layernorm_h));
        all
    }
}

/// Names of a layer's linears in the order of [`DecoderLayer::linears`].
fn linear_names() -> impl Iterator<Item = &'static str> {
    names::QKV.into_iter().chain([names::O]).chain(names::GATE_UP).chain([names::DOWN])
}

fn linear(
    source: &mut Source,
    name: &str,
    shape: [i64; 2],
    has_bias: bool,
    quantizer: Option<&Quantizer>,
) -> Result<Linear, WeightsError> {
    let weight = source(&format!("{name}.weight"), &shape)?;
    let bias = has_bias.then(|| source(&format!("{name}.bias"), &shape[..1])).transpose()?;
    Ok(match quantizer {
        Some(quantizer) => Linear::quantized(quantizer.quantize(&weight), bias),
        None => Linear::dense(weight, bias),
    })
}

/// The most probable token of each row of logits `[N, V]`, `[N]` int64.
pub fn most_probable(logits_nv: &Tensor) -> Tensor {
    let plain = logits_nv.device() == Device::Cpu && logits_nv.kind() == Kind::Float && logits_nv.is_contiguous();
    match logits_nv.size()[..] {
        [_, v] if plain && cpu::available() => {
            let rows = bytes::numbers(logits_nv).chunks_exact(v.unsigned_abs() as usize);
            Tensor::from_slice(&rows.map(|logits_v| largest(logits_v, 1)[0] as i64).collect::<Vec<_>>())
        }
        _ => logits_nv.argmax(-1, false),
    }
}

/// x / rms(x) · weight over the last axis; statistics in float32, as transformers computes them.
fn rms_norm(x: &Tensor, weight_h: &Tensor, eps: f64) -> Tensor {
    if weight_h.kind() == x.kind() {
        return x.rms_norm(weight_h.size(), Some(weight_h), eps);
    }
    x.rms_norm(weight_h.size(), Some(weight_h.to_kind(x.kind())), eps)
}

#[cfg(test)]
mod tests;
