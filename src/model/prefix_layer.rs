//! The prefix layer of Hydra++ heads (arXiv 2402.05109): a decoder layer of the backbone's kind and a norm, over the backbone's hidden
//! states. Its outputs take the place of these states as the heads' input.

// B rows, T tokens of a row, N new tokens, H hidden
use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use crate::cpu::arena::Arena;
use crate::dtype::DraftDtype;
use crate::model::attention::{Attention, RowMask};
use crate::model::backward::{FEWEST_TOKENS, LARGEST_INPUT};
use crate::model::block_spec::{BlockSpec, NormKind, names};
use crate::model::config::LlamaConfig;
use crate::model::decoder_layer::{DecoderLayer, LinearStore};
use crate::model::kv_cache::KvCache;
use crate::model::linear::Linear;
use crate::model::lora::Adapters;
use crate::model::new_tokens::NewTokens;
use crate::model::norm::norm;
use crate::model::rope::Ropes;
use crate::torch::loss_scale::LossScale;
use crate::torch::{Generator, wide};

/// What names begin with, in place of the backbone's `model.`.
pub const PREFIX: &str = "prefix.";
/// Deviation of new weights, as in the configs of Llama models.
const INITIAL_DEVIATION: f64 = 0.02;

/// A prefix layer.
#[derive(Debug)]
pub struct PrefixLayer {
    /// The backbone's, with one layer.
    config: LlamaConfig,
    block: BlockSpec,
    layer: DecoderLayer,
    /// `[H]`, the norm of the outputs.
    norm_h: Tensor,
    ropes: Ropes,
    /// What it computes in; its weights may be float32 masters.
    kind: Kind,
}

/// A forward pass over whole rows that waits for the gradient of its outputs.
#[derive(Debug)]
pub struct PrefixPass<'p> {
    prefix: &'p PrefixLayer,
    input_bth: Tensor,
    output_bth: Tensor,
}

impl PrefixLayer {
    /// Names and shapes of the weights for a backbone. The names are Hugging Face's for a model of one layer, with `prefix` for `model`.
    pub fn tensors(backbone: &LlamaConfig) -> Vec<(String, Vec<i64>)> {
        let in_layer = backbone.block().tensors();
        let named = in_layer.into_iter().map(|(part, shape)| (prefixed(&names::in_layer(0, &part)), shape));
        named.chain([(prefixed(names::NORM), vec![backbone.hidden_size])]).collect()
    }

    /// Untrained, in float32 or float64, as transformers initialises a Llama model: normal weights of deviation 0.02, biases 0, norms 1.
    pub fn new(backbone: &LlamaConfig, options: (Kind, Device), seed: u64) -> Self {
        let mut generator = Generator::seeded(seed);
        let masters = (wide(options.0), options.1);
        let unit = match backbone.block().norms.kind {
            NormKind::Rms => 1.0,
            NormKind::RmsPlusOne => 0.0,
        };
        let start = |(name, shape): (String, Vec<i64>)| match shape[..] {
            [_] if name.ends_with(".bias") => Tensor::zeros(shape, masters),
            [_] => Tensor::full(shape, unit, masters),
            _ => generator.normal(&shape, masters) * INITIAL_DEVIATION,
        };
        Self::from_tensors(backbone, options, Self::tensors(backbone).into_iter().map(start).collect())
    }

    /// For a backbone, to compute in `kind` on `device`. `tensors` are in the order of [`PrefixLayer::tensors`].
    pub fn from_tensors(backbone: &LlamaConfig, (kind, device): (Kind, Device), tensors: Vec<Tensor>) -> Self {
        let config = one_layer_of(backbone);
        let block = config.block();
        let names = Self::tensors(backbone).into_iter().map(|(name, _)| name);
        let mut named: BTreeMap<String, Tensor> = names.zip(tensors).collect();
        let mut take = |name: &str| named.remove(&prefixed(name)).expect("as many tensors as the layer has");
        let layer = DecoderLayer::build(&block, 0, &LinearStore::Dense, &mut |name, _| Ok(take(name)))
            .expect("every tensor is here");
        Self { layer, norm_h: take(names::NORM), ropes: Ropes::new(&block.layers, kind, device), block, config, kind }
    }

    /// Every weight with its name, in the order of [`PrefixLayer::tensors`]. Not of a layer made for decoding.
    pub fn parameters(&self) -> Vec<(String, &Tensor)> {
        let in_layer = self.layer.weights(&self.block, 0).into_iter();
        in_layer.chain([(names::NORM.to_owned(), &self.norm_h)]).map(|(name, t)| (prefixed(&name), t)).collect()
    }

    /// Copies the weights to float32, or float64, for training; it computes in `kind`.
    #[must_use]
    pub fn for_training(self, kind: Kind) -> Self {
        let own = |(_, tensor): (String, &Tensor)| tensor.to_kind(wide(kind)).copy();
        let tensors = self.parameters().into_iter().map(own).collect();
        Self::from_tensors(&self.config, (kind, self.norm_h.device()), tensors)
    }

    /// Lays the weights out for a few tokens at a time, like those of heads: see [`Linear::for_guesses`].
    #[must_use]
    pub fn for_decoding(self, dtype: DraftDtype, arena: &mut Arena) -> Self {
        let mut prepare = |linear: Linear| linear.for_guesses(dtype, arena);
        Self { layer: self.layer.prepared(&mut prepare), ..self }
    }

    /// Which tokens of whole rows attend to which; see [`RowMask::packed`].
    pub fn mask(&self, segment_lengths: &[Vec<usize>], t: i64) -> RowMask {
        RowMask::packed(segment_lengths, t, &self.config, self.norm_h.device())
    }

    /// An empty cache without rows.
    pub fn cache(&self) -> KvCache {
        KvCache::new(&self.config, self.kind, self.norm_h.device())
    }

    /// Whole rows: the backbone's hidden states after its final norm to the heads' inputs, both `[B, T, H]`.
    pub fn over_rows(&self, hidden_bth: &Tensor, rows: &RowMask) -> Tensor {
        let rotations = rows.stage(0).rotations(&self.ropes);
        let attend = |x: &Tensor, a: &Attention| a.over_rows(x, rotations.of(0), rows.stage(0).of(0), Adapters::Off);
        let x_bth = self.layer.forward(&hidden_bth.to_kind(self.kind), &self.block, Adapters::Off, attend);
        norm(&x_bth, &self.norm_h, self.block.norms)
    }

    /// The hidden states of further tokens of a row of the cache, which are committed: `[N, H]` to the same shape.
    pub fn extend(&self, hidden_nh: &Tensor, cache: &mut KvCache, row: usize) -> Tensor {
        let n = hidden_nh.size()[0];
        let new = NewTokens::chain(n, &self.config, self.kind, self.norm_h.device());
        cache.reserve_tokens(row, n);
        let len = cache.len(row);
        let (rotations, masks) = (new.rotations(&self.ropes, len), new.behind(len));
        let attend = |x: &Tensor, a: &Attention| a.over_cache(x, rotations.of(0), &[(&masks[0], cache.row(0, row))]);
        let x_nh = self.layer.forward(&hidden_nh.to_kind(self.kind), &self.block, Adapters::Off, attend);
        cache.commit(row, n);
        norm(&x_nh, &self.norm_h, self.block.norms)
    }

    /// As [`PrefixLayer::over_rows`], with what the backward pass needs. `reaches_backbone`: whether the gradient of the hidden states is
    /// wanted.
    pub fn forward_kept(&self, hidden_bth: &Tensor, rows: &RowMask, reaches_backbone: bool) -> PrefixPass<'_> {
        let input_bth = hidden_bth.detach().set_requires_grad(reaches_backbone);
        let output_bth = self.over_rows(&input_bth, rows);
        PrefixPass { prefix: self, input_bth, output_bth }
    }
}

impl PrefixPass<'_> {
    /// The heads' inputs, `[B, T, H]`, without autograd.
    pub fn output(&self) -> Tensor {
        self.output_bth.detach()
    }

    /// Adds the weights' gradients to `gradients`, in the order of [`PrefixLayer::parameters`], given that of the output: `doutput_bth`,
    /// as [`wide`]. Returns the gradient of the hidden states, `[B, T, H]`, if it is wanted.
    pub fn backward(self, doutput_bth: &Tensor, gradients: &[&Tensor]) -> Option<Tensor> {
        let tokens = doutput_bth.size()[0] * doutput_bth.size()[1];
        let y = &self.output_bth;
        let scale =
            LossScale::for_sums(y.kind(), &[doutput_bth], FEWEST_TOKENS.max(tokens), &Tensor::from(LARGEST_INPUT));
        let weights = self.prefix.parameters();
        let mut inputs: Vec<&Tensor> = weights.iter().map(|(_, weight)| *weight).collect();
        inputs.extend(self.input_bth.requires_grad().then_some(&self.input_bth));
        let sum = (y * scale.cast(doutput_bth)).sum(wide(y.kind()));
        let mut by_input = Tensor::run_backward(&[sum], &inputs, false, false);
        let to_hidden = self.input_bth.requires_grad().then(|| by_input.pop().expect("one for each input"));
        for (sum, gradient) in gradients.iter().zip(by_input) {
            let _ = sum.shallow_clone().g_add_(&scale.undo(gradient).to_kind(sum.kind()));
        }
        to_hidden.map(|gradient| scale.undo(gradient))
    }
}

/// The config of a model of one layer. It is of the backbone's most general kind: without a window and with rotary embeddings, where a
/// layer of the backbone is.
fn one_layer_of(backbone: &LlamaConfig) -> LlamaConfig {
    let kinds = backbone.layer_kinds();
    let rank = |&layer: &usize| {
        let kind = &kinds.kinds()[kinds.kind_of(layer)];
        (kind.window.is_some(), kind.rotary.is_none())
    };
    let layer = (0..backbone.num_hidden_layers).min_by_key(rank).expect("a backbone has layers");
    let mut config = LlamaConfig { num_hidden_layers: 1, ..backbone.clone() };
    config.family.layers = backbone.family.layers.get(layer).copied().into_iter().collect();
    config
}

/// `prefix.layers.0.…` for `model.layers.0.…`.
fn prefixed(name: &str) -> String {
    name.replacen("model.", PREFIX, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: i64 = 19;

    fn layers() -> Vec<(LlamaConfig, PrefixLayer)> {
        let random = |(seed, config): (u64, LlamaConfig)| {
            let options = (Kind::Double, Device::Cpu);
            let prefix = PrefixLayer::new(&config, options, seed);
            let own = |(_, tensor): (String, &Tensor)| tensor.to_kind(Kind::Double) * 3.0;
            let tensors = prefix.parameters().into_iter().map(own).collect();
            let prefix = PrefixLayer::from_tensors(&config, options, tensors);
            (config, prefix)
        };
        let windowed = LlamaConfig { sliding_window: Some(5), ..LlamaConfig::tiny() };
        (0..).zip(LlamaConfig::tiny_of_each_family().into_iter().chain([windowed])).map(random).collect()
    }

    fn hidden(rows: i64) -> Tensor {
        Generator::seeded(7).normal(&[rows, T, 32], (Kind::Double, Device::Cpu))
    }

    fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
        (a - b).abs().max().double_value(&[])
    }

    #[test]
    fn the_table_of_weights_is_that_of_the_layer() {
        for (config, prefix) in layers() {
            let has = prefix.parameters().into_iter().map(|(name, tensor)| (name, tensor.size()));
            assert_eq!(has.collect::<Vec<_>>(), PrefixLayer::tensors(&config), "{}", config.model_type);
        }
    }

    #[test]
    fn extending_a_cache_equals_whole_rows() {
        for (config, prefix) in layers() {
            let hidden_1th = hidden(1);
            let whole = prefix.over_rows(&hidden_1th, &prefix.mask(&[vec![T as usize]], T)).squeeze_dim(0);
            for chunk in [1, 4, T] {
                let mut cache = prefix.cache();
                cache.push();
                for piece in hidden_1th.squeeze_dim(0).split(chunk, 0) {
                    let at = cache.len(0);
                    let got = prefix.extend(&piece, &mut cache, 0);
                    let difference = largest_difference(&got, &whole.narrow(0, at, piece.size()[0]));
                    assert!(difference < 1e-10, "{}, chunks of {chunk}: {difference}", config.model_type);
                }
            }
        }
    }

    #[test]
    fn packed_texts_do_not_see_each_other() {
        for (config, prefix) in layers() {
            let hidden_1th = hidden(1);
            let packed = prefix.over_rows(&hidden_1th, &prefix.mask(&[vec![8, 9]], T));
            for (from, length) in [(0, 8), (8, 9)] {
                let alone = prefix.mask(&[vec![length as usize]], length);
                let expected = prefix.over_rows(&hidden_1th.narrow(1, from, length), &alone);
                let difference = largest_difference(&packed.narrow(1, from, length), &expected);
                assert!(difference < 1e-10, "{}: {difference}", config.model_type);
            }
        }
    }

    /// Gemma's layers alternate, so that the first one has a window.
    #[test]
    fn the_layer_sees_all_tokens_where_some_layer_of_the_backbone_does() {
        let windows = |config: &LlamaConfig| config.layer_kinds().windows();
        let windowed = |config: &LlamaConfig| LlamaConfig { sliding_window: Some(4), ..config.clone() };
        let all: Vec<_> = LlamaConfig::tiny_of_each_family().iter().map(windowed).collect();
        let mixed: Vec<_> = all.iter().filter(|config| windows(config).contains(&None)).collect();
        assert!(!mixed.is_empty() && mixed.len() < all.len());
        mixed.iter().for_each(|config| assert_eq!(windows(&one_layer_of(config)), [None], "{}", config.model_type));
        assert_eq!(windows(&one_layer_of(&windowed(&LlamaConfig::tiny()))), [Some(4)]);
    }

    #[test]
    fn gradients_equal_autograd() {
        for (config, prefix) in layers() {
            let (hidden_bth, rows) = (hidden(2), prefix.mask(&[vec![11, 6], vec![T as usize]], T));
            let dy = Generator::seeded(8).normal(&[2, T, 32], (Kind::Double, Device::Cpu));
            let weights: Vec<Tensor> =
                prefix.parameters().into_iter().map(|(_, weight)| weight.set_requires_grad(true)).collect();
            let gradients: Vec<Tensor> = weights.iter().map(|weight| weight.detach().zeros_like()).collect();
            let pass = prefix.forward_kept(&hidden_bth, &rows, true);
            assert!(!pass.output().requires_grad());
            let to_hidden = pass.backward(&dy, &gradients.iter().collect::<Vec<_>>()).expect("it is wanted");
            let input = hidden_bth.set_requires_grad(true);
            (prefix.over_rows(&input, &rows) * &dy).sum(Kind::Double).backward();
            assert!(largest_difference(&to_hidden, &input.grad()) < 1e-10, "{}", config.model_type);
            for ((name, _), (weight, gradient)) in prefix.parameters().iter().zip(weights.iter().zip(&gradients)) {
                let difference = largest_difference(gradient, &weight.grad());
                assert!(difference < 1e-10, "{}, {name}: {difference}", config.model_type);
                assert!(gradient.abs().max().double_value(&[]) > 0.0, "{}, {name}", config.model_type);
            }
        }
    }
}
