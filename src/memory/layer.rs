//! What the decoder layers of a backbone take while they train, or pass on what other layers need for it.

// N positions of a micro batch, T positions of a row, H hidden, Q query width, G key/value width, F width of the MLP, e bytes of a number in
// the backbone's dtype
use crate::memory::F32;
use crate::memory::heap::{Tensors, allocated};
use crate::memory::weights::{in_linears, largest_linear};
use crate::memory::widths::Widths;
use crate::model::attention::CAPPED_BLOCK;
use crate::model::block_spec::{LinearSpec, NormKind, NormPlaces, NormSpec};
use crate::model::config::LlamaConfig;
use crate::model::lora::LoraConfig;
use crate::model::stored::Quantization;

/// A pass of decoder layers over a micro batch.
#[derive(Debug, Clone, Copy)]
pub struct LayerPass<'w> {
    pub config: &'w LlamaConfig,
    /// Bytes per number in the backbone's compute dtype.
    pub element: u64,
    /// Quantization of its linear layers.
    pub quantization: Option<Quantization>,
    /// Bytes of all its linear layers in the blocks of a GGUF file, if they stay there.
    pub blocks: Option<u64>,
    pub trained: TrainedLayers<'w>,
    /// Keep only the inputs of decoder layers for the backward pass.
    pub recompute: bool,
    /// Rows per micro batch.
    pub rows: u64,
    /// Tokens of the longest row.
    pub length: u64,
    /// Some row packs several texts, so attention needs a mask.
    pub masked: bool,
    /// Attention is flash attention, which has no masks.
    pub flash: bool,
    /// Training runs on the CPU, so the program shares the memory and glibc allocates it.
    pub on_host: bool,
}

/// What of the decoder layers is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TrainedLayers<'w> {
    /// Nothing.
    Frozen,
    Adapters(&'w LoraConfig),
    /// All weights.
    Whole,
}

impl<'w> TrainedLayers<'w> {
    /// The trained adapters.
    pub fn lora(self) -> Option<&'w LoraConfig> {
        if let Self::Adapters(lora) = self { Some(lora) } else { None }
    }
}

impl LayerPass<'_> {
    /// Bytes of a number in master weights, gradients, moments and losses: see [`crate::torch::wide`].
    pub fn wide(&self) -> u64 {
        F32.max(self.element)
    }

    /// N.
    pub fn positions(&self) -> u64 {
        self.rows * self.length
    }

    /// H, Q, G, F, V.
    pub fn widths(&self) -> Widths {
        Widths::of(self.config)
    }

    /// Memory of tensors, given as (count, bytes of each), with the allocator's overhead.
    pub fn allocated(&self, tensors: impl IntoIterator<Item = (u64, u64)>) -> u64 {
        allocated(self.on_host, tensors)
    }

    /// Sizes of a layer's adapter tensors.
    pub fn adapters(&self, lora: &LoraConfig) -> Vec<u64> {
        self.config.block().linears().all().flat_map(|linear| adapter(linear, lora)).collect()
    }

    /// Tensors that autograd keeps for one decoder layer, including its input, as in
    /// `model/{decoder_layer,attention,lora}.rs`.
    pub fn kept(&self) -> Tensors {
        let (n, e, Widths { h, q, f, .. }) = (self.positions(), self.element, self.widths());
        // The residual stream before attention and before the MLP; attention's q, k, v and output; the MLP's gate,
        // SiLU(gate) and up.
        let mut kept = vec![(2, n * h * e), (4, n * q * e), (3, n * f * e)];
        kept.extend(self.kept_of_norms());
        // tanh(scores), the softmax in float32, and its cast.
        let scores = self.capped_scores();
        kept.extend(scores.iter().flat_map(|&block| [(2, block * e), (u64::from(e < F32), block * F32)]));
        match self.trained.lora() {
            Some(lora) => kept.extend(self.kept_of_adapters(lora)),
            // Inputs of the linear layers, and of the products with the norms' weights.
            None => kept.extend([(4, n * h * e), (1, n * q * e), (1, n * f * e)]),
        }
        kept.push((1, self.casts()));
        kept
    }

    /// Inputs of norms that are not kept for something else, and the float32 copies of those that are computed in it.
    fn kept_of_norms(&self) -> Tensors {
        let (n, e, Widths { h, q, g, .. }) = (self.positions(), self.element, self.widths());
        let NormSpec { kind, places, query_key, .. } = self.config.block().norms;
        let is_wide = kind == NormKind::RmsPlusOne || self.on_host || self.trained == TrainedLayers::Whole;
        let wide = u64::from(e < F32 && is_wide);
        let in_stream = if places == NormPlaces::InputsAndOutputs { [2, 4] } else { [0, 2] };
        let query_key = u64::from(query_key.is_some());
        let mut kept = vec![(in_stream[0], n * h * e), (wide * in_stream[1], n * h * F32)];
        kept.extend(
            [q, g].into_iter().flat_map(|width| [(query_key, n * width * e), (query_key * wide, n * width * F32)]),
        );
        kept
    }

    /// The scores of each block of queries of capped attention, which no fused kernel computes.
    fn capped_scores(&self) -> Vec<u64> {
        if self.config.block().heads.softcap.is_none() {
            return vec![];
        }
        let block = CAPPED_BLOCK.unsigned_abs();
        let block_scores = |from: u64| {
            let end = self.length.min(from + block);
            self.rows * self.query_heads() * (end - from) * end
        };
        (0..self.length.div_ceil(block)).map(|index| block_scores(index * block)).collect()
    }

    fn query_heads(&self) -> u64 {
        self.config.num_attention_heads.unsigned_abs()
    }

    /// Masks of capped attention, for each kind of layer.
    fn capped_masks(&self) -> u64 {
        let rows = if self.masked { self.rows } else { 1 };
        let kinds = self.config.layer_kinds().windows().len() as u64;
        self.capped_scores().iter().sum::<u64>() / (self.rows * self.query_heads()).max(1) * rows * kinds * self.element
    }

    /// Masks of packed rows and of windows that cut, for each kind of layer. Flash attention has none, and capped attention its own.
    fn masks(&self) -> u64 {
        if self.config.block().heads.softcap.is_some() || self.flash {
            return 0;
        }
        // On a GPU they are copied into rows that begin at multiples of 16 bytes.
        let copies = if self.on_host { 1 } else { 2 };
        let cuts = |window: &Option<i64>| window.is_some_and(|window| window.unsigned_abs() < self.length);
        let windows = self.config.layer_kinds().windows();
        let [rows, kinds] = if self.masked {
            [self.rows, windows.len() as u64]
        } else {
            [1, windows.iter().filter(|w| cuts(w)).count() as u64]
        };
        copies * rows * kinds * self.length * self.length * self.element
    }

    fn kept_of_adapters(&self, lora: &LoraConfig) -> Tensors {
        let (n, e) = (self.positions(), self.element);
        let drops = lora.dropout.get() > 0.0;
        let linears = self.config.block().linears();
        let mut kept = vec![];
        // Linear layers with the same input. If all of them have an adapter, they share its dropout.
        for group in linears.groups() {
            let adapted = group.iter().filter(|linear| lora.target_modules.includes(linear.part)).count() as u64;
            let inputs = group[0].size[1].unsigned_abs();
            let reads = if adapted == group.len() as u64 || !drops { adapted.min(1) } else { adapted };
            kept.push((adapted, n * lora.rank.get() as u64 * e));
            // The input after dropout, and the dropout mask: in the input's dtype on the CPU, as booleans elsewhere.
            kept.push((reads, n * inputs * e));
            kept.push((if drops { reads } else { 0 }, n * inputs * if self.on_host { e } else { 1 }));
        }
        kept
    }

    /// Whether each product dequantises its weight.
    fn dequantizes(&self) -> bool {
        self.quantization.is_some() || self.blocks.is_some()
    }

    /// Weights that a layer creates for its products and keeps for the backward pass: dequantized, or cast from master
    /// weights.
    fn casts(&self) -> u64 {
        let cast = self.element < F32;
        let is_copied = self.dequantizes() || (self.trained == TrainedLayers::Whole && cast);
        let weights = if is_copied { in_linears(self.config) } else { 0 };
        let adapters = self.trained.lora().filter(|_| cast).map_or(0, |lora| self.adapters(lora).iter().sum());
        (weights + adapters) * self.element
    }

    /// Temporaries of one layer: in a forward pass that keeps nothing, and in the backward pass.
    pub fn at_once(&self) -> u64 {
        let passing = self.passing() + self.capped_masks() + self.masks();
        let trained: u64 = match self.trained {
            TrainedLayers::Frozen => {
                let dequantised = if self.dequantizes() { largest_linear(self.config) } else { 0 };
                return passing + dequantised * self.element;
            }
            TrainedLayers::Adapters(lora) => self.adapters(lora).iter().sum(),
            TrainedLayers::Whole => in_linears(self.config),
        };
        let again = if self.recompute { self.allocated(self.kept()) } else { 0 };
        again + passing + trained * self.wide() + self.casts()
    }

    /// Temporaries of attention and of the MLP. They do not exist at the same time, but the allocator rarely finds room for one kind in what
    /// the other leaves.
    fn passing(&self) -> u64 {
        let (n, e, Widths { h, q, f, .. }) = (self.positions(), self.element, self.widths());
        let scores = self.capped_scores().into_iter().max().unwrap_or(0);
        let capped = [(3, scores * e), (u64::from(e < F32), scores * F32)];
        // A norm's input, quotients and output in float32.
        let wide_norm = if e < F32 && self.config.block().norms.kind == NormKind::RmsPlusOne { 3 } else { 0 };
        let llama = [(2, n * h * e), (3, n * q * e), (3, n * f * e)];
        self.allocated(llama.into_iter().chain(capped).chain([(wide_norm, n * h * F32)]))
    }
}

/// Sizes of A and B of a layer's adapter; empty if it has none.
pub fn adapter(LinearSpec { part, size, .. }: LinearSpec, lora: &LoraConfig) -> Vec<u64> {
    let [outputs, inputs] = size.map(|size| lora.rank.get() as u64 * size.unsigned_abs());
    if lora.target_modules.includes(part) { vec![inputs, outputs] } else { vec![] }
}
