//! The backbone: a decoder like Llama (Touvron et al. 2023), with what its family has beyond that, and its passes over whole rows and behind caches.

// B rows, T tokens of a row, N new tokens, H hidden, W a token's states, V vocabulary
use tch::{Device, Kind, Tensor};

use crate::cpu;
use crate::cpu::arena::Arena;
use crate::cpu::rows::largest;
use crate::dtype::DraftDtype;
use crate::model::attention::{Attention, RowMask};
use crate::model::batch_step::padded;
use crate::model::block_spec::{BlockSpec, NormKind, names};
use crate::model::config::LlamaConfig;
use crate::model::decoder_layer::DecoderLayer;
use crate::model::kv_cache::{KvCache, RowCache};
use crate::model::linear::Linear;
use crate::model::logits::logits_of;
use crate::model::lora::Adapters;
use crate::model::new_tokens::{CacheMask, NewTokens};
use crate::model::norm::norm;
use crate::model::rope::{Ropes, RotationsByKind};
use crate::model::stages::{StageBorders, Stages};
use crate::model::stored::table::TokenTable;
use crate::model::stored::{Quantization, QuantizedWeight};
use crate::model::taps::{Tapped, Taps};
use crate::torch::{bytes, upload, wide};

mod dense;

pub use dense::{DenseLayer, DenseWeights, MergedLayer};

/// A backbone.
#[derive(Debug)]
pub struct Llama {
    pub config: LlamaConfig,
    pub(super) block: BlockSpec,
    pub(super) embed_tokens: TokenTable,
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm_h: Tensor,
    pub(super) lm_head: Linear,
    /// The LM head as loaded: a view of its file where there is one. It stays readable when `lm_head` is packed.
    pub(super) lm_head_table: TokenTable,
    /// Of each stage.
    pub(super) ropes: Vec<Ropes>,
    pub(super) kind: Kind,
    pub(super) quantization: Option<Quantization>,
    pub(super) stages: Stages,
    pub(super) borders: StageBorders,
    pub(super) taps: Taps,
}

impl Llama {
    /// The same backbone for a few tokens at a time: see [`crate::model::loading::Purpose::Decoding`].
    #[must_use]
    pub fn for_decoding(self) -> Self {
        let kind = self.kind;
        self.laid_out(|linear, arena| linear.for_few_rows(kind, arena))
    }

    /// As [`Llama::for_decoding`], of a draft model.
    #[must_use]
    pub fn for_guesses(self, dtype: DraftDtype) -> Self {
        self.laid_out(|linear, arena| linear.for_guesses(dtype, arena))
    }

    fn laid_out(mut self, prepare: impl Fn(Linear, &mut Arena) -> Linear) -> Self {
        let mut arena = Arena::default();
        self.lm_head = prepare(self.lm_head, &mut arena);
        let mut prepare = |linear: Linear| prepare(linear, &mut arena);
        self.layers = self.layers.into_iter().map(|layer| layer.prepared(&mut prepare)).collect();
        self
    }

    /// The same backbone for several generations at once: see [`crate::model::loading::Purpose::Batches`].
    #[must_use]
    pub fn for_batches(mut self) -> Self {
        self.lm_head = self.lm_head.packed();
        self.layers = self.layers.into_iter().map(|layer| layer.prepared(&mut Linear::packed)).collect();
        self
    }

    /// Sets the longest text, and the rotary embeddings that go with it; see [`LlamaConfig::max_position_embeddings`].
    pub fn set_context(&mut self, tokens: i64) {
        if tokens != self.config.max_position_embeddings {
            self.config.max_position_embeddings = tokens;
            self.block = self.config.block();
            self.ropes = self.stages.ropes(&self.block.layers, self.kind);
        }
    }

    /// Sets the hidden states that passes return beside the last one.
    ///
    /// # Panics
    /// If the backbone has fewer layers.
    pub fn set_taps(&mut self, taps: Taps) {
        let deepest = taps.layers().last().copied().unwrap_or(0);
        assert!(deepest <= self.config.num_hidden_layers, "tap {deepest} of {} layers", self.config.num_hidden_layers);
        self.taps = taps;
    }

    /// The hidden states that passes return beside the last one.
    pub fn taps(&self) -> &Taps {
        &self.taps
    }

    /// W, the size of a token's states.
    pub fn states_width(&self) -> i64 {
        self.taps.width(self.config.hidden_size)
    }

    /// The hidden states after the final norm, `[…, H]`, of states `[…, W]`.
    pub fn last_of(&self, states: &Tensor) -> Tensor {
        if self.taps.is_empty() { states.shallow_clone() } else { states.narrow(-1, 0, self.config.hidden_size) }
    }

    /// The final norm over hidden states of the last decoder layer, `[…, H]` of any dtype, in the backbone's dtype.
    pub fn final_norm(&self, last_layer: &Tensor) -> Tensor {
        norm(&last_layer.to_kind(self.kind), &self.norm_h, self.block.norms)
    }

    /// What the final norm multiplies normed numbers with, `[H]`.
    pub fn final_norm_factor(&self) -> Tensor {
        match self.block.norms.kind {
            NormKind::Rms => self.norm_h.shallow_clone(),
            NormKind::RmsPlusOne => self.norm_h.to_kind(wide(self.kind)) + 1.0,
        }
    }

    /// Whole rows: `tokens_bt` `[B, T]` int64 to the tokens' states, `[B, T, W]`.
    ///
    /// # Panics
    /// For a part of a backbone ([`Llama::load_output`]).
    pub fn hidden_states(&self, tokens_bt: &Tensor, rows: &RowMask, adapters: Adapters) -> Tensor {
        assert_eq!(self.layers.len(), self.config.num_hidden_layers, "a backbone with its decoder layers");
        let rotations = self.rotations(rows);
        self.run_layers(tokens_bt, adapters, |layer, x, a| {
            let (kind, stage) = (self.block.layers.kind_of(layer), self.stages.layer_stage(layer));
            a.over_rows(x, rotations[stage].of(kind), rows.stage(stage).of(kind), adapters)
        })
    }

    /// Embedding, decoder layers and final norm: tokens `[…]` int64 to their states `[…, W]`. `attend` runs the attention of a layer.
    fn run_layers(
        &self,
        tokens: &Tensor,
        adapters: Adapters,
        attend: impl Fn(usize, &Tensor, &Attention) -> Tensor,
    ) -> Tensor {
        let (mut x, mut tapped) = (self.embed(tokens), Tapped::new(&self.taps));
        tapped.take(0, &x);
        for (index, layer) in self.layers.iter().enumerate() {
            x = self.borders.forward(&self.stages, index + 1, x);
            x = layer.forward(&x, &self.block, adapters, |x, attention| attend(index, x, attention));
            tapped.take(index + 1, &x);
        }
        tapped.with_last(self.final_norm(&x))
    }

    /// Rows of one text each, for a pass of this backbone: [`RowMask::causal`] on every stage.
    pub fn causal_rows(&self, t: i64) -> RowMask {
        RowMask::for_stages(&self.stages, |device| RowMask::causal(t, &self.config, device))
    }

    /// Rows of several texts, for a pass of this backbone: [`RowMask::packed`] on every stage.
    pub fn packed_rows(&self, segment_lengths: &[Vec<usize>], t: i64) -> RowMask {
        RowMask::for_stages(&self.stages, |device| RowMask::packed(segment_lengths, t, &self.config, device))
    }

    /// How many parts a pass over whole rows has: the embedding, the decoder layers, the final norm.
    pub fn parts(&self) -> usize {
        self.layers.len() + 2
    }

    /// One part of a pass over whole rows, on its stage's device; the first takes tokens `[B, T]`, the others `[B, T, H]`.
    pub(super) fn run_part(
        &self,
        part: usize,
        x: &Tensor,
        rotations: &[RotationsByKind],
        rows: &RowMask,
        adapters: Adapters,
    ) -> Tensor {
        match part.checked_sub(1) {
            None => self.embed(x),
            Some(layer) if layer < self.layers.len() => {
                let (kind, stage) = (self.block.layers.kind_of(layer), self.stages.layer_stage(layer));
                let (rotation, mask) = (rotations[stage].of(kind), rows.stage(stage).of(kind));
                self.layers[layer].forward(x, &self.block, adapters, |x, a| a.over_rows(x, rotation, mask, adapters))
            }
            Some(_) => self.final_norm(x),
        }
    }

    /// Those of each stage.
    pub(super) fn rotations(&self, rows: &RowMask) -> Vec<RotationsByKind> {
        self.ropes.iter().enumerate().map(|(stage, ropes)| rows.stage(stage).rotations(ropes)).collect()
    }

    /// New tokens behind row `row` of a cache: `tokens_n` `[N]` int64 to their states, `[N, W]`. Their keys and
    /// values become the row's pending tokens; commit those that stay. Adapters take no part: decoding merges them.
    pub fn extend(&self, tokens_n: &Tensor, new: &NewTokens, cache: &mut KvCache, row: usize) -> Tensor {
        self.extend_several(tokens_n, &[(row, new)], cache)
    }

    /// As [`Llama::extend`] for several rows, whose tokens follow one another: the weights are read once, and each row has its own attention.
    pub fn extend_several(&self, tokens_n: &Tensor, rows: &[(usize, &NewTokens)], cache: &mut KvCache) -> Tensor {
        self.extend_padded(tokens_n, rows, cache, 0)
    }

    /// As [`Llama::extend_several`], with products of at least `fewest` rows: returns `[P, W]`, the last rows spare.
    pub fn extend_padded(
        &self,
        tokens_n: &Tensor,
        rows: &[(usize, &NewTokens)],
        cache: &mut KvCache,
        fewest: i64,
    ) -> Tensor {
        rows.iter().for_each(|(row, new)| cache.reserve_tokens(*row, new.len()));
        let tokens_n = padded(tokens_n, fewest);
        let mut positions: Vec<f32> = rows.iter().flat_map(|(row, new)| new.positions(cache.len(*row))).collect();
        positions.resize(tokens_n.size()[0].unsigned_abs() as usize, 0.0);
        let rotations = self.only_ropes().at(&upload(&positions, self.device()));
        let masks: Vec<Vec<CacheMask>> = rows.iter().map(|(row, new)| new.behind(cache.len(*row))).collect();
        self.run_layers(&tokens_n, Adapters::Off, |layer, x, a| {
            let kind = self.block.layers.kind_of(layer);
            let caches: Vec<(&CacheMask, &RowCache)> =
                masks.iter().zip(rows).map(|(masks, (row, _))| (&masks[kind], cache.row(layer, *row))).collect();
            a.over_cache(x, rotations.of(kind), &caches)
        })
    }

    /// One new token behind each row of the cache: `tokens_b` `[B]` int64 to their states, `[P, W]`, the first B
    /// of them the rows', the others spare. The new tokens are pending. What a row computes does not depend on the other rows (bit by
    /// bit on the CPU, up to 64 rows).
    pub fn extend_rows(&self, tokens_b: &Tensor, cache: &mut KvCache) -> Tensor {
        let step = cache.step();
        let rotations = step.rotations(self.only_ropes());
        self.run_layers(&step.with_spare_rows(tokens_b), Adapters::Off, |layer, x, a| {
            let kind = self.block.layers.kind_of(layer);
            a.over_batch(x, rotations.of(kind), (&step, kind), cache.layer(layer))
        })
    }

    /// The LM head: `[…, H]` to logits of the next token, `[…, V]`, in the dtype of the hidden states.
    pub fn logits(&self, hidden: &Tensor, adapters: Adapters) -> Tensor {
        logits_of(self.lm_head.forward(hidden, adapters), self.config.family.logits)
    }

    pub fn lm_head(&self) -> &Linear {
        &self.lm_head
    }

    /// The LM head's weight `[V, H]`; of a backbone made for decoding, as it is in the file, on the CPU; of blocks, a copy.
    pub fn lm_head_weight(&self) -> Tensor {
        self.lm_head.dense_weight().map_or_else(|| self.lm_head_table.numbers(self.kind), Tensor::shallow_clone)
    }

    /// `[V, H]`: the weight whose products are the logits before they are capped, if they are. It is the LM head's but for Granite, which
    /// divides the products.
    pub fn logit_weight(&self) -> Tensor {
        match self.config.family.logits.divisor {
            1.0 => self.lm_head_weight(),
            divisor => self.lm_head_weight() / divisor,
        }
    }

    /// What its config says about a decoder block.
    pub fn block(&self) -> &BlockSpec {
        &self.block
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

    /// Where its hidden states come out, and where its LM head is: the last stage's device.
    pub fn device(&self) -> Device {
        self.stages.last()
    }

    /// Which layers lie on which device.
    pub fn stages(&self) -> &Stages {
        &self.stages
    }

    /// Hidden states, and their gradients, that were copied from stage to stage.
    pub fn borders(&self) -> &StageBorders {
        &self.borders
    }

    /// The rotary embeddings of a backbone that decodes.
    ///
    /// # Panics
    /// For several stages: caches are on one device.
    pub(super) fn only_ropes(&self) -> &Ropes {
        let [ropes] = &self.ropes[..] else { panic!("a backbone of {} stages does not decode", self.ropes.len()) };
        ropes
    }

    /// Every weight by its Hugging Face name, in file order of a Llama; a tied lm_head and quantised weights are left out.
    ///
    /// # Panics
    /// For a backbone made for decoding: merged and packed weights have no such names.
    pub fn weights(&self) -> Vec<(String, &Tensor)> {
        let mut all = vec![(names::EMBED_TOKENS.to_owned(), self.embed_tokens.dense())];
        for (i, layer) in self.layers.iter().enumerate() {
            all.extend(layer.weights(&self.block, i));
        }
        all.push((names::NORM.to_owned(), &self.norm_h));
        if !self.config.tie_word_embeddings {
            all.push((names::LM_HEAD_WEIGHT.to_owned(), self.lm_head.unpacked().expect("lm_head is not quantised")));
        }
        all
    }

    /// Token ids to embeddings `[…, H]`, in the backbone's dtype, on the device of the ids: heads on the last stage embed tokens, too.
    pub fn embed(&self, tokens: &Tensor) -> Tensor {
        let on_first = tokens.to_device(self.stages.first());
        let x = self.embed_tokens.rows(&on_first, self.kind).to_device(tokens.device());
        match self.embedding_factor() {
            1.0 => x,
            factor => x * factor,
        }
    }

    /// What embeddings are multiplied with, rounded to their dtype as transformers does.
    fn embedding_factor(&self) -> f64 {
        match self.config.family.embedding_multiplier {
            1.0 => 1.0,
            factor => Tensor::from(factor).to_kind(self.kind).double_value(&[]),
        }
    }

    /// As [`Llama::embed`], as float32 numbers `[N, H]`, which those of blocks are before they are rounded to the backbone's dtype. Calls libtorch only
    /// where the embedding is not as the CPU's own kernels read it.
    pub fn embed_numbers(&self, tokens: &[i64]) -> Vec<f32> {
        let table_vh = match &self.embed_tokens {
            TokenTable::Dense(table_vh) => table_vh,
            TokenTable::Blocks(blocks) => {
                let factor = self.embedding_factor() as f32;
                return blocks.rows(tokens).into_iter().map(|x| x * factor).collect();
            }
        };
        let is_plain = self.embedding_factor() == 1.0 && table_vh.kind() == self.kind;
        if table_vh.device() == Device::Cpu && is_plain && table_vh.is_contiguous() {
            match self.kind {
                Kind::Float => return rows_of(bytes::raw(table_vh), tokens, table_vh.size()[1], f32::from_ne_bytes),
                Kind::BFloat16 => {
                    let number = |number| half::bf16::from_ne_bytes(number).to_f32();
                    return rows_of(bytes::raw(table_vh), tokens, table_vh.size()[1], number);
                }
                _ => {}
            }
        }
        let embedded_nh = self.embed(&Tensor::from_slice(tokens).to_device(self.stages.first()));
        Vec::try_from(embedded_nh.to_kind(Kind::Float).reshape([-1])).expect("one axis of float32")
    }
}

/// Rows of a matrix with `columns` columns, of numbers of `SIZE` bytes.
fn rows_of<const SIZE: usize>(
    matrix: &[u8],
    rows: &[i64],
    columns: i64,
    number: impl Fn([u8; SIZE]) -> f32,
) -> Vec<f32> {
    let bytes = columns.unsigned_abs() as usize * SIZE;
    let row = |&row: &i64| matrix[row.unsigned_abs() as usize * bytes..][..bytes].as_chunks().0;
    rows.iter().flat_map(row).map(|bytes| number(*bytes)).collect()
}

/// In the place of a token where none can be chosen: one of the logits is NaN, or the largest is infinite. CUDA kernels write the same.
pub const NO_TOKEN: i64 = -1;

/// The most probable token of each row of logits `[N, V]`, or [`NO_TOKEN`]: `[N]` int64.
pub fn most_probable(logits_nv: &Tensor) -> Tensor {
    let plain = logits_nv.device() == Device::Cpu && logits_nv.kind() == Kind::Float && logits_nv.is_contiguous();
    match logits_nv.size()[..] {
        [_, v] if plain && cpu::available() => {
            let rows = bytes::numbers(logits_nv).chunks_exact(v.unsigned_abs() as usize);
            let best = |logits_v: &[f32]| {
                let at = largest(logits_v, 1)[0];
                if logits_v[at].is_finite() { at as i64 } else { NO_TOKEN }
            };
            Tensor::from_slice(&rows.map(best).collect::<Vec<_>>())
        }
        _ => {
            let (largest_n, best_n) = logits_nv.max_dim(-1, false); // the first NaN, if there is one
            best_n.masked_fill(&(largest_n * 0.0).isnan(), NO_TOKEN)
        }
    }
}

#[cfg(test)]
mod tests;
