//! The families of backbones: what their decoders have beyond Llama's, and transformers' defaults of keys that `config.json` omits.

use std::num::NonZeroUsize;
use std::path::Path;

use serde::Serialize;

use super::error::{ConfigError, above_zero, bad, two_sources};
use super::key_table::key_use;
use super::keys::{ConfigKeys, RopeByLayer, RopeByType, RopeKeys, RopeParameters};
use crate::key_use::KeyUse;
use crate::model::block_spec::{Activation, LinearStorage, LogitSpec, NormKind, NormPlaces, QueryKeyNorm};

/// What a decoder has beyond Llama's. The default is Llama's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FamilyTraits {
    pub norm_kind: NormKind,
    pub norm_places: NormPlaces,
    pub query_key_norm: Option<QueryKeyNorm>,
    pub activation: Activation,
    pub storage: LinearStorage,
    /// Rotated numbers of a head; absent = all.
    pub rotary_size: Option<i64>,
    /// Factor of the products of queries and keys; absent = 1/√D.
    pub attention_scale: Option<f64>,
    /// See [`HeadShape::softcap`](crate::model::block_spec::HeadShape::softcap).
    pub attention_softcap: Option<f64>,
    /// Factor of the embeddings.
    pub embedding_multiplier: f64,
    /// Factor of what attention and the MLP add to the residual stream.
    pub residual_multiplier: f64,
    pub logits: LogitSpec,
    /// First to last; empty where all layers slide (if there is a window) and rotate.
    pub layers: Vec<LayerTraits>,
    /// Base of the rotary frequencies of layers with a sliding window, which are not scaled; absent = as in the other layers.
    pub local_rope_theta: Option<f64>,
}

/// What may differ between layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LayerTraits {
    /// Whether it has the sliding window.
    pub slides: bool,
    /// Whether it has rotary position embeddings.
    pub rotates: bool,
}

impl Default for FamilyTraits {
    fn default() -> Self {
        Self {
            norm_kind: NormKind::Rms,
            norm_places: NormPlaces::Inputs,
            query_key_norm: None,
            activation: Activation::Silu,
            storage: LinearStorage::Separate,
            rotary_size: None,
            attention_scale: None,
            attention_softcap: None,
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            logits: LogitSpec::default(),
            layers: vec![],
            local_rope_theta: None,
        }
    }
}

/// A row of [`FAMILIES`].
#[derive(Debug)]
pub(super) struct Family {
    pub model_type: &'static str,
    /// Absent: as many as attention heads.
    pub num_key_value_heads: Option<i64>,
    /// Absent: hidden_size / num_attention_heads.
    pub head_dim: Option<i64>,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    /// q, k and v have a bias whatever `attention_bias` says.
    pub has_qkv_bias: bool,
    /// max_position_embeddings already counts `rope_scaling.factor`.
    pub context_is_scaled: bool,
    /// `rope_type`s that transformers knows for it.
    pub rope_types: &'static [&'static str],
    /// `partial_rotary_factor` is read; other families rotate all numbers of a head.
    pub rotates_parts: bool,
    /// original_max_position_embeddings where config.json has none beside `rope_scaling`.
    pub original_context: Option<f64>,
    windows: WindowRule,
    activation: Activation,
    norm_kind: NormKind,
    norm_places: NormPlaces,
    query_key_norm: Option<QueryKeyNorm>,
    storage: LinearStorage,
    scales: ScaleRule,
    /// Of attention and of the logits.
    softcaps: Option<[f64; 2]>,
    /// Base of the rotary frequencies of sliding layers, where the family has one.
    pub local_rope_theta: Option<f64>,
    /// Every so many layers, one has no position embeddings.
    no_rope_layer_interval: Option<usize>,
}

/// Which layers have a sliding window where `layer_types` does not say it.
#[derive(Debug, Clone, Copy)]
enum WindowRule {
    Never,
    /// All; the window where the key is absent.
    EveryLayer(Option<i64>),
    /// If `use_sliding_window` is set: those from `max_window_layers` on.
    FromLayer,
    /// If `use_sliding_window` is set: those without position embeddings.
    WithoutRope,
    /// All but every n-th; the window where the key is absent.
    AllButEvery(usize, i64),
}

/// Where the factors of embeddings, scores, residuals and logits come from.
#[derive(Debug, Clone, Copy)]
enum ScaleRule {
    Llama,
    /// Embeddings times √H; `query_pre_attn_scalar`.
    Gemma,
    /// Four multipliers of `config.json`.
    Granite,
}

const LLAMA: Family = Family {
    model_type: "llama",
    num_key_value_heads: None,
    head_dim: None,
    rms_norm_eps: 1e-6,
    rope_theta: 10_000.0,
    tie_word_embeddings: false,
    has_qkv_bias: false,
    context_is_scaled: false,
    rope_types: &["default", "linear", "dynamic", "llama3", "yarn", "longrope"],
    rotates_parts: false,
    original_context: None,
    windows: WindowRule::Never,
    activation: Activation::Silu,
    norm_kind: NormKind::Rms,
    norm_places: NormPlaces::Inputs,
    query_key_norm: None,
    storage: LinearStorage::Separate,
    scales: ScaleRule::Llama,
    softcaps: None,
    local_rope_theta: None,
    no_rope_layer_interval: None,
};

const GEMMA2: Family = Family {
    model_type: "gemma2",
    num_key_value_heads: Some(4),
    head_dim: Some(256),
    tie_word_embeddings: true,
    windows: WindowRule::AllButEvery(2, 4096),
    activation: Activation::GeluTanh,
    norm_kind: NormKind::RmsPlusOne,
    norm_places: NormPlaces::InputsAndOutputs,
    scales: ScaleRule::Gemma,
    softcaps: Some([50.0, 30.0]),
    ..LLAMA
};

/// Fine-tunes keep the `model_type` of their base model: Vicuna, Yi and TinyLlama are `llama`, Zephyr is `mistral`, DeepSeek's distilled models
/// are `llama` and `qwen2`, Phi-4 is `phi3`.
const FAMILIES: [Family; 10] = [
    LLAMA,
    Family {
        model_type: "mistral",
        num_key_value_heads: Some(8),
        windows: WindowRule::EveryLayer(Some(4096)),
        ..LLAMA
    },
    Family {
        model_type: "qwen2",
        num_key_value_heads: Some(32),
        has_qkv_bias: true,
        windows: WindowRule::FromLayer,
        ..LLAMA
    },
    Family {
        model_type: "qwen3",
        num_key_value_heads: Some(32),
        head_dim: Some(128),
        windows: WindowRule::FromLayer,
        query_key_norm: Some(QueryKeyNorm::EachHead),
        ..LLAMA
    },
    GEMMA2,
    Family {
        model_type: "gemma3_text",
        rope_theta: 1_000_000.0,
        context_is_scaled: true,
        windows: WindowRule::AllButEvery(6, 4096),
        query_key_norm: Some(QueryKeyNorm::EachHead),
        softcaps: None,
        local_rope_theta: Some(10_000.0),
        ..GEMMA2
    },
    Family {
        model_type: "phi3",
        rms_norm_eps: 1e-5,
        rope_types: &["default", "longrope", "su"],
        rotates_parts: true,
        original_context: Some(4096.0),
        windows: WindowRule::EveryLayer(None),
        storage: LinearStorage::Fused,
        ..LLAMA
    },
    Family { model_type: "granite", scales: ScaleRule::Granite, ..LLAMA },
    Family {
        model_type: "olmo2",
        rms_norm_eps: 1e-5,
        norm_places: NormPlaces::Outputs,
        query_key_norm: Some(QueryKeyNorm::AllHeads),
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        num_key_value_heads: Some(4),
        rope_theta: 2_000_000.0,
        tie_word_embeddings: true,
        windows: WindowRule::WithoutRope,
        no_rope_layer_interval: Some(4),
        ..LLAMA
    },
];

/// What architectures have that no row of [`FAMILIES`] describes, by the beginning of their `model_type`; the first match counts.
const MISSING: [(&str, &[&str]); 4] = [
    (
        "mixture-of-experts layers",
        &[
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "deepseek",
            "gpt_oss",
            "granitemoe",
            "phimoe",
            "olmoe",
            "dbrx",
            "llama4",
            "minimax",
            "glm4_moe",
            "jetmoe",
            "arctic",
            "kimi",
            "ernie4_5_moe",
        ],
    ),
    (
        "state-space or linear attention layers",
        &[
            "mamba",
            "jamba",
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "qwen3_next",
            "qwen3_5",
            "recurrent_gemma",
            "nemotron_h",
            "zamba",
            "rwkv",
            "lfm2",
            "granitemoehybrid",
        ],
    ),
    (
        "a vision or audio encoder",
        &[
            "gemma3n",
            "gemma3",
            "paligemma",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen2_5_omni",
            "qwen3_vl",
            "mllama",
            "llava",
            "idefics",
            "smolvlm",
            "phi3_v",
            "phi4_multimodal",
            "mistral3",
            "pixtral",
            "internvl",
            "qwen2_audio",
        ],
    ),
    (
        "another kind of decoder block",
        &[
            "gpt2",
            "gpt_neox",
            "gptj",
            "falcon",
            "bloom",
            "mpt",
            "opt",
            "phi",
            "starcoder2",
            "stablelm",
            "cohere",
            "t5",
            "bert",
            "olmo",
            "gemma",
        ],
    ),
];

/// Every family's `model_type`.
pub(super) fn names() -> [&'static str; FAMILIES.len()] {
    FAMILIES.map(|family| family.model_type)
}

/// Whether a family's max_position_embeddings counts the factor of its scaling.
pub(super) fn counts_scaling(model_type: &str) -> bool {
    FAMILIES.iter().any(|family| family.model_type == model_type && family.context_is_scaled)
}

/// The row for a `model_type`.
pub(super) fn find(path: &Path, model_type: Option<&str>) -> Result<&'static Family, ConfigError> {
    let got = model_type.unwrap_or("nothing");
    if let Some(family) = FAMILIES.iter().find(|family| family.model_type == got) {
        return Ok(family);
    }
    let supported = names().join(", ");
    let starts = |(_, names): &&(&str, &[&str])| names.iter().any(|name| got.starts_with(name));
    match MISSING.iter().find(starts) {
        Some((missing, _)) => Err(ConfigError::Family { path: path.into(), got: got.into(), missing, supported }),
        None => Err(bad(path, "model_type", format!("one of {supported}"), got)),
    }
}

impl Family {
    /// `rope_parameters`, which families with a rotary base for sliding layers have by kind of layer.
    pub(super) fn rope_parameters<'c>(
        &self,
        path: &Path,
        written: &'c ConfigKeys,
    ) -> Result<RopeParameters<'c>, ConfigError> {
        let (expected, got) = match (&written.rope_parameters, self.local_rope_theta) {
            (None, _) => return Ok(RopeParameters::default()),
            (Some(RopeByLayer::All(all)), None) => {
                let full = Some(&**all).filter(|all| **all != RopeKeys::default());
                return Ok(RopeParameters { full, sliding: None });
            }
            (Some(RopeByLayer::ByType(by_type)), Some(_)) => {
                let RopeByType { full_attention, sliding_attention } = &**by_type;
                return Ok(RopeParameters { full: full_attention.as_ref(), sliding: sliding_attention.as_ref() });
            }
            (Some(RopeByLayer::All(_)), Some(_)) => ("full_attention and sliding_attention", "keys for all layers"),
            (Some(RopeByLayer::ByType(_)), None) => ("keys for all layers", "full_attention or sliding_attention"),
        };
        Err(bad(path, "rope_parameters", format!("{expected} beside `model_type` {}", self.model_type), got))
    }

    /// Refuses a partial_rotary_factor, which transformers ignores or fails on for this family.
    pub(super) fn refuse_partial_rotary(&self, path: &Path, ropes: [&RopeKeys; 2]) -> Result<(), ConfigError> {
        match ropes.iter().find_map(|rope| rope.partial_rotary_factor.filter(|part| *part != 1.0)) {
            None => Ok(()),
            Some(part) => {
                let expected = format!("1 beside `model_type` {}, or no such key", self.model_type);
                Err(bad(path, "partial_rotary_factor", expected, part))
            }
        }
    }

    /// Whether the family has biases where this key is set.
    pub(super) fn has_biases(&self, key: &str, written: Option<bool>) -> bool {
        written == Some(true) && key_use(self.model_type, key) == Some(KeyUse::Read)
    }

    /// The sliding window of the layers that have one.
    pub(super) fn sliding_window(&self, path: &Path, written: &ConfigKeys) -> Result<Option<i64>, ConfigError> {
        let if_used = |window: Option<i64>| window.filter(|_| written.use_sliding_window == Some(true));
        Ok(match self.windows {
            WindowRule::Never => None,
            WindowRule::EveryLayer(default) => written.sliding_window.unwrap_or(default),
            WindowRule::AllButEvery(_, default) => match written.sliding_window {
                Some(None) => {
                    let expected = format!("a number beside `model_type` {}", self.model_type);
                    return Err(bad(path, "sliding_window", expected, "null"));
                }
                window => Some(window.flatten().unwrap_or(default)),
            },
            WindowRule::FromLayer => if_used(written.sliding_window.unwrap_or(Some(4096))),
            WindowRule::WithoutRope => if_used(written.sliding_window.flatten()),
        })
    }

    /// What the family and the config say of the decoder, but for its rotary embeddings' sizes.
    pub(super) fn traits(&self, path: &Path, written: &ConfigKeys) -> Result<FamilyTraits, ConfigError> {
        let mut traits = FamilyTraits {
            norm_kind: self.norm_kind,
            norm_places: self.norm_places,
            query_key_norm: self.query_key_norm,
            activation: self.activation(path, written)?,
            storage: self.storage,
            layers: self.layers(path, written)?,
            ..FamilyTraits::default()
        };
        if matches!(self.scales, ScaleRule::Gemma) {
            let [attention, logits] = self.softcaps.map_or([None; 2], |caps| caps.map(Some));
            traits.attention_softcap = written.attn_logit_softcapping.unwrap_or(attention);
            traits.logits.softcap = written.final_logit_softcapping.unwrap_or(logits);
        }
        self.scale(path, written, &mut traits)?;
        let caps =
            [("attn_logit_softcapping", traits.attention_softcap), ("final_logit_softcapping", traits.logits.softcap)];
        for (key, cap) in caps {
            cap.map(|cap| above_zero(path, key, cap)).transpose()?;
        }
        Ok(traits)
    }

    fn scale(&self, path: &Path, written: &ConfigKeys, traits: &mut FamilyTraits) -> Result<(), ConfigError> {
        let positive = |key, value: Option<f64>, default| above_zero(path, key, value.unwrap_or(default));
        match self.scales {
            ScaleRule::Llama => {}
            ScaleRule::Gemma => {
                let scalar = positive("query_pre_attn_scalar", written.query_pre_attn_scalar, 256.0)?;
                traits.embedding_multiplier = (written.hidden_size as f64).sqrt();
                traits.attention_scale = Some(scalar.powf(-0.5));
            }
            ScaleRule::Granite => {
                traits.embedding_multiplier = positive("embedding_multiplier", written.embedding_multiplier, 1.0)?;
                traits.residual_multiplier = positive("residual_multiplier", written.residual_multiplier, 1.0)?;
                traits.attention_scale = Some(positive("attention_multiplier", written.attention_multiplier, 1.0)?);
                traits.logits.divisor = positive("logits_scaling", written.logits_scaling, 1.0)?;
            }
        }
        Ok(())
    }

    /// Of the family's own key; the other families' key must not contradict it.
    fn activation(&self, path: &Path, written: &ConfigKeys) -> Result<Activation, ConfigError> {
        let (act, activation) = (
            ("hidden_act", written.hidden_act.as_deref()),
            ("hidden_activation", written.hidden_activation.as_deref()),
        );
        let [(key, name), (other_key, other)] =
            if matches!(self.scales, ScaleRule::Gemma) { [activation, act] } else { [act, activation] };
        let known = |name: &str| match name {
            "silu" | "swish" => Some(Activation::Silu),
            "gelu_pytorch_tanh" => Some(Activation::GeluTanh),
            _ => None,
        };
        let read = |name: &str| known(name).ok_or_else(|| bad(path, key, "silu or gelu_pytorch_tanh", name));
        let activation = name.map_or(Ok(self.activation), read)?;
        match other.filter(|other| known(other) != Some(activation)) {
            None => Ok(activation),
            Some(other) => {
                let reason = format!("{} reads {key}, and {other_key} is {other}", self.model_type);
                Err(two_sources(path, ["hidden_act", "hidden_activation"], reason))
            }
        }
    }

    fn layers(&self, path: &Path, written: &ConfigKeys) -> Result<Vec<LayerTraits>, ConfigError> {
        let count = written.num_hidden_layers;
        let types = written.layer_types.as_deref().map(|types| slides(path, types, count)).transpose()?;
        if types.as_ref().is_some_and(|types| types.contains(&true)) {
            self.check_window(path, written)?;
        }
        if let Some(rotates) = written.no_rope_layers.as_ref().filter(|rotates| rotates.len() < count) {
            let got = format!("{} entries", rotates.len());
            return Err(bad(path, "no_rope_layers", format!("{count} entries, one per layer"), got));
        }
        let rotates = |layer: usize| match (&written.no_rope_layers, self.no_rope_layer_interval) {
            (_, None) => true,
            (Some(rotates), Some(_)) => rotates[layer] != 0,
            (None, Some(default)) => {
                !(layer + 1).is_multiple_of(written.no_rope_layer_interval.map_or(default, NonZeroUsize::get))
            }
        };
        let slides = |layer: usize| match (&types, self.windows) {
            (Some(slides), _) => slides[layer],
            (None, WindowRule::Never | WindowRule::EveryLayer(_)) => true,
            (None, WindowRule::FromLayer) => layer >= written.max_window_layers.unwrap_or(28),
            (None, WindowRule::WithoutRope) => !rotates(layer),
            (None, WindowRule::AllButEvery(n, _)) => {
                !(layer + 1).is_multiple_of(written.sliding_window_pattern.map_or(n, NonZeroUsize::get))
            }
        };
        let all = (0..count).map(|layer| LayerTraits { slides: slides(layer), rotates: rotates(layer) });
        let alike = all.clone().all(|layer| layer == LayerTraits { slides: true, rotates: true });
        Ok(if alike { vec![] } else { all.collect() })
    }

    /// `layer_types` with sliding layers needs a window.
    fn check_window(&self, path: &Path, written: &ConfigKeys) -> Result<(), ConfigError> {
        if matches!(self.windows, WindowRule::Never) {
            let expected = format!("full_attention in every layer beside `model_type` {}", self.model_type);
            return Err(bad(path, "layer_types", expected, "sliding_attention"));
        }
        if self.sliding_window(path, written)?.is_some() {
            return Ok(());
        }
        let is_unused = written.use_sliding_window != Some(true)
            && key_use(self.model_type, "use_sliding_window") == Some(KeyUse::Read);
        let (key, reason) = match is_unused {
            true => ("use_sliding_window", "there are sliding layers, and no window is used"),
            false => ("sliding_window", "there are sliding layers, and no window"),
        };
        Err(two_sources(path, ["layer_types", key], reason))
    }
}

/// `layer_types`: whether each layer has the sliding window.
fn slides(path: &Path, types: &[String], count: usize) -> Result<Vec<bool>, ConfigError> {
    if types.len() != count {
        return Err(bad(path, "layer_types", format!("{count} entries, one per layer"), types.len()));
    }
    let slides = |name: &String| match name.as_str() {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(bad(path, "layer_types", "full_attention or sliding_attention", other)),
    };
    types.iter().map(slides).collect()
}
