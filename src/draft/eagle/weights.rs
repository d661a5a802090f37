//! The weights of an EAGLE-3 drafter.

// N positions, H hidden, V draft vocabulary
use tch::{Device, Kind, Tensor};

use crate::cpu::arena::Arena;
use crate::draft::token_map::TokenMap;
use crate::draft::trained::Reads;
use crate::dtype::DraftDtype;
use crate::model::config::LlamaConfig;
use crate::model::eagle_layer::EagleLayer;
use crate::model::linear::Linear;
use crate::model::llama::Llama;
use crate::model::lora::Adapters;
use crate::model::taps::Taps;
use crate::torch::wide;

/// Its name in recipes and config.json.
pub const EAGLE3: &str = "eagle3";
/// The output layer's weight.
pub const LM_HEAD: &str = "lm_head.weight";
/// The weights of an EAGLE-3 drafter.
#[derive(Debug)]
pub struct Eagle {
    pub(super) layer: EagleLayer,
    /// `[V, H]`.
    pub(super) lm_head: Linear,
    pub(super) token_map: Option<TokenMap>,
    pub(super) taps: Taps,
    /// How many guesses of a chain it was trained for.
    pub(super) steps: usize,
    pub(super) hidden_size: i64,
    /// The backbone's.
    pub(super) vocab_size: i64,
}

impl Eagle {
    /// From a layer and the output layer `[V, H]`.
    pub fn new(
        layer: EagleLayer,
        lm_head_vh: Tensor,
        token_map: Option<TokenMap>,
        (taps, steps): (Taps, usize),
        backbone: &LlamaConfig,
    ) -> Self {
        let (hidden_size, vocab_size) = (backbone.hidden_size, backbone.vocab_size);
        Self { layer, lm_head: Linear::dense(lm_head_vh, None), token_map, taps, steps, hidden_size, vocab_size }
    }

    /// Untrained, in float32 or float64: the output layer is the LM head's rows of the tokens that can be guessed, and its norm the backbone's.
    pub fn untrained(backbone: &Llama, token_map: Option<TokenMap>, (taps, steps): (Taps, usize), seed: u64) -> Self {
        let options = (backbone.kind(), backbone.device());
        let norm_h = backbone.final_norm_factor();
        let layer = EagleLayer::new(&backbone.config, taps.layers().len(), &norm_h, options, seed);
        let all_vh = backbone.logit_weight();
        let rows = token_map.as_ref().map_or(all_vh.shallow_clone(), |map| all_vh.index_select(0, map.tokens_n()));
        let lm_head_vh = rows.to_kind(wide(options.0)).copy();
        Self::new(layer, lm_head_vh, token_map, (taps, steps), &backbone.config)
    }

    /// Copies the weights to float32, or float64, for training on a backbone that computes in `kind`.
    #[must_use]
    pub fn for_training(self, kind: Kind) -> Self {
        let lm_head_vh = self.lm_head_vh().to_kind(wide(kind)).copy();
        Self { layer: self.layer.for_training(kind), lm_head: Linear::dense(lm_head_vh, None), ..self }
    }

    /// Lays the weights out for guesses, with the CPU's kernels in `dtype`.
    #[must_use]
    pub fn for_decoding(self, dtype: DraftDtype) -> Self {
        let mut arena = Arena::default();
        let layer = self.layer.for_decoding(dtype, &mut arena);
        Self { layer, lm_head: self.lm_head.for_guesses(dtype, &mut arena), ..self }
    }

    /// The same drafter for chains of so many guesses.
    #[must_use]
    pub(super) fn with_steps(self, steps: usize) -> Self {
        Self { steps, ..self }
    }

    /// `[V, H]`.
    ///
    /// # Panics
    /// If it is laid out for decoding.
    pub(super) fn lm_head_vh(&self) -> &Tensor {
        self.lm_head.dense_weight().expect("weights that are not laid out for decoding")
    }

    /// Logits `[N, V]` of the layer's outputs `[N, H]`.
    pub(super) fn logits(&self, outputs_nh: &Tensor) -> Tensor {
        self.lm_head.forward(&self.layer.normed(outputs_nh), Adapters::Off)
    }

    /// The columns of the taps in the backbone's states `[…, W]`: `[…, L·H]`.
    pub(super) fn tapped(&self, states: &Tensor) -> Tensor {
        states.narrow(-1, self.hidden_size, self.hidden_size * self.taps.layers().len() as i64)
    }

    /// The device of its weights.
    pub(super) fn device(&self) -> Device {
        self.layer.norm_weight().device()
    }
}

/// What a drafter of so many steps reads of a row.
pub(super) fn reads(steps: usize) -> Reads {
    Reads { levels: steps, tokens: true, whole_rows: true }
}

/// The taps of a backbone of `layers` layers where none are chosen: those that every server assumes, the inputs of the third layer, of the one in the
/// middle and of the third from the end. `None` below 7 layers, where these are not three ascending ones.
pub fn default_taps(layers: usize) -> Option<[usize; 3]> {
    (layers >= 7).then(|| [2, layers / 2, layers - 3])
}
