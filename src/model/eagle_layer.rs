//! The layer of EAGLE-3 drafters (arXiv 2503.01840): a decoder layer of Llama whose attention reads a feature beside the embedding of the token
//! behind it. Features of the text are made of the backbone's hidden states at its taps, those of guesses are the layer's own outputs.

// B rows, T tokens of a row, N new tokens, S cached and new tokens, H hidden, L taps, R query heads that share a key/value head
use std::cell::RefCell;
use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use crate::cpu::arena::Arena;
use crate::dtype::DraftDtype;
use crate::model::attention::{Attention, ChainKeys, RowMask};
use crate::model::block_spec::{Biases, BlockSpec, names};
use crate::model::config::{FamilyTraits, LlamaConfig};
use crate::model::decoder_layer::{DecoderLayer, LinearStore};
use crate::model::kv_cache::KvCache;
use crate::model::linear::Linear;
use crate::model::lora::Adapters;
use crate::model::mask::readable;
use crate::model::new_tokens::{CacheMask, NewTokens};
use crate::model::norm::norm;
use crate::model::rope::Ropes;
use crate::torch::{Generator, upload, wide};

/// What the names of the decoder layer's weights begin with in the files of EAGLE's authors.
const LAYER: &str = "midlayer.";
const FC: &str = "fc.weight";
const FEATURE_NORM: &str = "midlayer.hidden_norm.weight";
const NORM: &str = "norm.weight";

/// The layer of an EAGLE-3 drafter.
#[derive(Debug)]
pub struct EagleLayer {
    /// Of a Llama of this one layer.
    config: LlamaConfig,
    block: BlockSpec,
    /// Without a norm before attention, whose input is normed in two parts.
    layer: DecoderLayer,
    /// `[H, L·H]`: the taps of a token to its feature.
    fc: Linear,
    embedding_norm_h: Tensor,
    feature_norm_h: Tensor,
    /// `[H]`, the norm before the output layer.
    norm_h: Tensor,
    ropes: Ropes,
    kind: Kind,
}

/// A training-time test over whole rows: what its steps share.
#[derive(Debug)]
pub struct EagleChains<'r> {
    rows: &'r RowMask,
    keys: ChainKeys,
    steps: usize,
}

/// Tokens that are run and committed behind a row of the cache.
#[derive(Debug)]
pub struct TextRows {
    pub row: usize,
    /// In the text.
    pub positions: Vec<i64>,
}

/// Guesses that are run behind the committed tokens of a row of the cache and the guesses before them.
#[derive(Debug)]
pub struct GuessRows {
    pub row: usize,
    /// Guesses of the row that were run before.
    pub before: usize,
    /// Of each new guess: the committed tokens that it sees, and the guesses among all of the row's, itself among them.
    pub sees: Vec<(i64, Vec<usize>)>,
}

impl EagleLayer {
    /// Names and shapes of the weights for a backbone, as EAGLE's authors name them.
    pub fn tensors(backbone: &LlamaConfig, taps: usize) -> Vec<(String, Vec<i64>)> {
        let (h, block) = (backbone.hidden_size, one_llama_layer(backbone).block());
        let in_layer = |(part, mut shape): (String, Vec<i64>)| {
            if block.linears().qkv.iter().any(|linear| part == format!("{}.weight", linear.part)) {
                shape[1] = 2 * h;
            }
            (format!("{LAYER}{part}"), shape)
        };
        let before = [(FC.to_owned(), vec![h, taps as i64 * h]), (FEATURE_NORM.to_owned(), vec![h])];
        before
            .into_iter()
            .chain(block.tensors().into_iter().map(in_layer))
            .chain([(NORM.to_owned(), vec![h])])
            .collect()
    }

    /// Untrained, in float32 or float64: norms 1, the last one `norm_h`, and normal weights whose outputs have a third of the inputs' variance, as of
    /// PyTorch's linear layers.
    pub fn new(
        backbone: &LlamaConfig,
        taps: usize,
        norm_h: &Tensor,
        (kind, device): (Kind, Device),
        seed: u64,
    ) -> Self {
        let (mut generator, masters) = (Generator::seeded(seed), (wide(kind), device));
        let start = |(name, shape): (String, Vec<i64>)| match shape[..] {
            [_] if name == NORM => norm_h.to_kind(masters.0).to_device(device).copy(),
            [_, inputs] => generator.normal(&shape, masters) / (3.0 * inputs as f64).sqrt(),
            _ => Tensor::ones(shape, masters),
        };
        let tensors = Self::tensors(backbone, taps).into_iter().map(start).collect();
        Self::from_tensors(backbone, taps, (kind, device), tensors)
    }

    /// To compute in `kind` on `device`. `tensors` are in the order of [`EagleLayer::tensors`].
    pub fn from_tensors(
        backbone: &LlamaConfig,
        taps: usize,
        (kind, device): (Kind, Device),
        tensors: Vec<Tensor>,
    ) -> Self {
        let config = one_llama_layer(backbone);
        let block = config.block();
        let named = Self::tensors(backbone, taps).into_iter().map(|(name, _)| name);
        let mut named: BTreeMap<String, Tensor> = named.zip(tensors).collect();
        let mut take = |name: &str| named.remove(name).expect("as many tensors as the layer has");
        let mut layer = DecoderLayer::build(&block, 0, &LinearStore::Dense, &mut |name, _| Ok(take(&layer_name(name))))
            .expect("every tensor is here");
        let embedding_norm_h = layer.norms.attention_input.take().expect("Llama has a norm before attention");
        Self {
            fc: Linear::dense(take(FC), None),
            feature_norm_h: take(FEATURE_NORM),
            norm_h: take(NORM),
            ropes: Ropes::new(&block.layers, kind, device),
            embedding_norm_h,
            layer,
            block,
            config,
            kind,
        }
    }

    /// Every weight with its name, in the order of [`EagleLayer::tensors`]. Not of a layer made for decoding.
    pub fn parameters(&self) -> Vec<(String, &Tensor)> {
        let in_layer = self.layer.weights(&self.block, 0).into_iter();
        let mut by_name: BTreeMap<String, &Tensor> =
            in_layer.map(|(name, weight)| (layer_name(&name), weight)).collect();
        by_name.insert(FC.to_owned(), self.fc.dense_weight().expect("a layer that is not made for decoding"));
        by_name.insert(FEATURE_NORM.to_owned(), &self.feature_norm_h);
        let before_mlp = self.layer.norms.mlp_input.as_ref().expect("Llama has a norm before the MLP");
        for (part, weight) in names::NORMS.into_iter().zip([&self.embedding_norm_h, before_mlp]) {
            by_name.insert(format!("{LAYER}{part}"), weight);
        }
        by_name.insert(NORM.to_owned(), &self.norm_h);
        let order = Self::tensors(&self.config, self.taps()).into_iter();
        order.map(|(name, _)| by_name.remove_entry(&name).expect("every weight has a name")).collect()
    }

    /// Of a Llama with this layer alone.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// L.
    pub fn taps(&self) -> usize {
        let [_, inputs] = self.fc.shape().0;
        (inputs / self.config.hidden_size) as usize
    }

    /// Copies the weights to float32, or float64, for training; it computes in `kind`.
    #[must_use]
    pub fn for_training(self, kind: Kind) -> Self {
        let own = |(_, tensor): (String, &Tensor)| tensor.to_kind(wide(kind)).copy();
        let tensors = self.parameters().into_iter().map(own).collect();
        Self::from_tensors(&self.config, self.taps(), (kind, self.norm_h.device()), tensors)
    }

    /// Lays the weights out for a few tokens at a time, like those of heads: see [`Linear::for_guesses`].
    #[must_use]
    pub fn for_decoding(self, dtype: DraftDtype, arena: &mut Arena) -> Self {
        let mut prepare = |linear: Linear| linear.for_guesses(dtype, arena);
        Self { layer: self.layer.prepared(&mut prepare), fc: prepare(self.fc), ..self }
    }

    /// The weight of the norm before the output layer, `[H]`.
    pub fn norm_weight(&self) -> &Tensor {
        &self.norm_h
    }

    /// What the output layer reads of outputs `[…, H]`.
    pub fn normed(&self, output: &Tensor) -> Tensor {
        norm(output, &self.norm_h, self.block.norms)
    }

    /// The features of tokens: their hidden states at all taps, `[…, L·H]`, to `[…, H]`.
    pub fn features(&self, taps: &Tensor) -> Tensor {
        self.fc.forward(&taps.to_kind(self.kind), Adapters::Off)
    }

    /// Which tokens of whole rows attend to which; see [`RowMask::packed`].
    pub fn mask(&self, segment_lengths: &[Vec<usize>], t: i64) -> RowMask {
        RowMask::packed(segment_lengths, t, &self.config, self.norm_h.device())
    }

    /// The next step of a training-time test. From the embeddings of the tokens that follow and from features, or in later steps the outputs of the
    /// step before, all `[B, T, H]`. With autograd.
    pub fn step(&self, embedded_bth: &Tensor, features_bth: &Tensor, chains: &mut EagleChains) -> Tensor {
        let stage = chains.rows.stage(0);
        let rotations = stage.rotations_behind(chains.steps, &self.ropes);
        let keys = RefCell::new(&mut chains.keys);
        let attend = |x: &Tensor, a: &Attention| a.over_chains(x, rotations.of(0), stage.of(0), &mut keys.borrow_mut());
        let output_bth = self.through(embedded_bth, features_bth, attend);
        chains.steps += 1;
        output_bth
    }

    /// An empty cache without rows.
    pub fn cache(&self) -> KvCache {
        KvCache::new(&self.config, self.kind, self.norm_h.device())
    }

    /// Further tokens of rows of the cache, row after row, which are committed: embeddings of the tokens behind them and features, `[N, H]`, to the same
    /// shape.
    pub fn extend(&self, [embedded_nh, features_nh]: [&Tensor; 2], texts: &[TextRows], cache: &mut KvCache) -> Tensor {
        let positions: Vec<i64> = texts.iter().flat_map(|text| text.positions.iter().copied()).collect();
        let mask = |text: &TextRows| {
            let n = text.positions.len() as i64;
            cache.reserve_tokens(text.row, n);
            let new = NewTokens::chain(n, &self.config, self.kind, self.norm_h.device());
            new.behind(cache.len(text.row)).swap_remove(0)
        };
        let masks: Vec<CacheMask> = texts.iter().map(mask).collect();
        let output_nh =
            self.behind([embedded_nh, features_nh], &positions, &masks, texts.iter().map(|text| text.row), cache);
        texts.iter().for_each(|text| cache.commit(text.row, text.positions.len() as i64));
        output_nh
    }

    /// Guesses behind rows of the cache, row after row, which are not committed: as [`EagleLayer::extend`], with the outputs of the nodes above them as
    /// features.
    pub fn guess(&self, inputs: [&Tensor; 2], positions: &[i64], guesses: &[GuessRows], cache: &mut KvCache) -> Tensor {
        for rows in guesses {
            cache.reserve_tokens(rows.row, (rows.before + rows.sees.len()) as i64);
        }
        let masks: Vec<CacheMask> = guesses.iter().map(|rows| self.mask_of(rows, cache.len(rows.row))).collect();
        self.behind(inputs, positions, &masks, guesses.iter().map(|rows| rows.row), cache)
    }

    /// New tokens behind these rows of the cache, each with its mask.
    fn behind(
        &self,
        [embedded_nh, features_nh]: [&Tensor; 2],
        positions: &[i64],
        masks: &[CacheMask],
        rows: impl Iterator<Item = usize>,
        cache: &KvCache,
    ) -> Tensor {
        let behind: Vec<_> = masks.iter().zip(rows).map(|(mask, row)| (mask, cache.row(0, row))).collect();
        let positions: Vec<f32> = positions.iter().map(|&position| position as f32).collect();
        let rotations = self.ropes.at(&upload(&positions, self.norm_h.device()));
        self.through(embedded_nh, features_nh, |x, a| a.over_cache(x, rotations.of(0), &behind))
    }

    /// `[…, H]` from embeddings and features of the same shape.
    fn through(&self, embedded: &Tensor, features: &Tensor, attend: impl Fn(&Tensor, &Attention) -> Tensor) -> Tensor {
        let spec = self.block.norms;
        let (embedded, features) = (embedded.to_kind(self.kind), features.to_kind(self.kind));
        let both = [norm(&embedded, &self.embedding_norm_h, spec), norm(&features, &self.feature_norm_h, spec)];
        let both = Tensor::cat(&both, -1);
        self.layer.forward(&features, &self.block, Adapters::Off, |_, attention| attend(&both, attention))
    }

    /// What new guesses see behind `len` committed tokens.
    fn mask_of(&self, rows: &GuessRows, len: i64) -> CacheMask {
        let (new, before) = (rows.sees.len(), rows.before as i64);
        let width = len as usize + rows.before + new;
        let mut values = vec![f32::NEG_INFINITY; new * width];
        for ((committed, guesses), row) in rows.sees.iter().zip(values.chunks_exact_mut(width)) {
            row[..*committed as usize].fill(0.0);
            guesses.iter().for_each(|&guess| row[len as usize + guess] = 0.0);
        }
        let repeats = self.config.num_attention_heads / self.config.num_key_value_heads;
        let mask_ns = upload(&values, self.norm_h.device()).to_kind(self.kind).view([new as i64, width as i64]);
        let mask_ns = readable(&mask_ns.repeat([repeats, 1]));
        CacheMask { len: len + before, new: new as i64, first_causal: false, mask_ns: Some(mask_ns) }
    }
}

impl<'r> EagleChains<'r> {
    /// Before the first step, over rows with this mask.
    pub fn new(rows: &'r RowMask) -> Self {
        Self { rows, keys: ChainKeys::default(), steps: 0 }
    }
}

/// The config of a Llama of one layer, with the sizes and the rotary embeddings of a backbone.
fn one_llama_layer(backbone: &LlamaConfig) -> LlamaConfig {
    LlamaConfig {
        model_type: "llama".to_owned(),
        num_hidden_layers: 1,
        sliding_window: None,
        biases: Biases::default(),
        family: FamilyTraits::default(),
        ..backbone.clone()
    }
}

/// `midlayer.…` for `model.layers.0.…`.
fn layer_name(name: &str) -> String {
    name.replacen("model.layers.0.", LAYER, 1)
}
