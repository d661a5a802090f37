//! The keys of `config.json` and `generation_config.json` that are read.

use std::num::NonZeroUsize;
use std::path::Path;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::error::ConfigError;
use crate::bounds::JSON_FILE_BYTES;
use crate::gguf::folder;
use crate::json;

/// The architecture that `config.json` names.
#[derive(Debug, Deserialize)]
pub(super) struct ModelType {
    pub model_type: Option<String>,
    /// The other keys, read or not.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// The keys of `config.json` that [`key_table`](super::key_table) says are read, as written.
#[derive(Debug, Deserialize)]
pub(super) struct ConfigKeys {
    pub hidden_size: i64,
    pub intermediate_size: i64,
    pub num_hidden_layers: usize,
    pub num_attention_heads: i64,
    #[serde(default, deserialize_with = "written")]
    pub num_key_value_heads: Written<i64>,
    pub head_dim: Option<i64>,
    pub vocab_size: i64,
    pub max_position_embeddings: i64,
    pub original_max_position_embeddings: Option<f64>,
    pub rms_norm_eps: Option<f64>,
    pub rope_theta: Option<f64>,
    pub rope_local_base_freq: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    pub rope_scaling: Option<RopeKeys>,
    /// transformers 5 puts theta and scaling together.
    pub rope_parameters: Option<RopeByLayer>,
    #[serde(default, deserialize_with = "written")]
    pub sliding_window: Written<i64>,
    pub use_sliding_window: Option<bool>,
    pub max_window_layers: Option<usize>,
    pub sliding_window_pattern: Option<NonZeroUsize>,
    pub layer_types: Option<Vec<String>>,
    /// SmolLM3: 1 where a layer has rotary embeddings, 0 where it has none.
    pub no_rope_layers: Option<Vec<u8>>,
    pub no_rope_layer_interval: Option<NonZeroUsize>,
    pub tie_word_embeddings: Option<bool>,
    pub attention_bias: Option<bool>,
    pub mlp_bias: Option<bool>,
    pub hidden_act: Option<String>,
    /// Gemma's name of `hidden_act`.
    pub hidden_activation: Option<String>,
    pub query_pre_attn_scalar: Option<f64>,
    #[serde(default, deserialize_with = "written")]
    pub attn_logit_softcapping: Written<f64>,
    #[serde(default, deserialize_with = "written")]
    pub final_logit_softcapping: Written<f64>,
    pub attention_multiplier: Option<f64>,
    pub embedding_multiplier: Option<f64>,
    pub residual_multiplier: Option<f64>,
    pub logits_scaling: Option<f64>,
    pub dtype: Option<String>,
    /// transformers 4's name of `dtype`.
    pub torch_dtype: Option<String>,
    pub quantization_config: Option<Map<String, Value>>,
    /// Another name of `quantization_config`, of compressed-tensors.
    pub compression_config: Option<Map<String, Value>>,
    pub eos_token_id: Option<OneOrMany>,
}

/// A key that may be absent (`None`), null (`Some(None)`) or have a value: transformers' default holds only where it is absent.
pub(super) type Written<T> = Option<Option<T>>;

fn written<'de, T: Deserialize<'de>, D: Deserializer<'de>>(value: D) -> Result<Written<T>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// `rope_scaling` or `rope_parameters`. Files that transformers has saved again have both `type` and `rope_type`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(expecting = "an object", deny_unknown_fields)]
pub(super) struct RopeKeys {
    pub rope_type: Option<String>,
    #[serde(rename = "type")]
    pub old_type: Option<String>,
    pub rope_theta: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    pub factor: Option<f64>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub original_max_position_embeddings: Option<f64>,
    pub attention_factor: Option<f64>,
    pub beta_fast: Option<f64>,
    pub beta_slow: Option<f64>,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    pub truncate: Option<bool>,
    pub short_factor: Option<Vec<f64>>,
    pub long_factor: Option<Vec<f64>>,
    /// Of YaRN's own repositories, whose models are always fine-tuned.
    #[serde(rename = "finetuned")]
    _finetuned: Option<IgnoredAny>,
}

impl RopeKeys {
    /// The kind of scaling.
    pub(super) fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.old_type.as_deref())
    }
}

/// `rope_parameters`: for all layers, or by the type of layer.
#[derive(Debug, Clone)]
pub(super) enum RopeByLayer {
    ByType(Box<RopeByType>),
    All(Box<RopeKeys>),
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RopeByType {
    pub full_attention: Option<RopeKeys>,
    pub sliding_attention: Option<RopeKeys>,
}

/// `rope_parameters` as a family has it.
#[derive(Debug, Default)]
pub(super) struct RopeParameters<'c> {
    /// Of layers without a window, and of all where the family has one kind of rotary embeddings.
    pub full: Option<&'c RopeKeys>,
    pub sliding: Option<&'c RopeKeys>,
}

impl<'de> Deserialize<'de> for RopeByLayer {
    /// By its keys, so that a wrong value in one spelling is not taken for the other.
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(value)?;
        let is_by_type = ["full_attention", "sliding_attention"].iter().any(|key| value.get(key).is_some());
        let read = match is_by_type {
            true => serde_json::from_value(value).map(Self::ByType),
            false => serde_json::from_value(value).map(Self::All),
        };
        read.map_err(|error| serde::de::Error::custom(format!("rope_parameters: {error}")))
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a token's id, or a list of them")]
pub(super) enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

impl OneOrMany {
    pub(super) fn into_vec(self) -> Vec<i64> {
        match self {
            OneOrMany::One(id) => vec![id],
            OneOrMany::Many(ids) => ids,
        }
    }
}

/// `generation_config.json`; its EOS list is the one that generation obeys.
#[derive(Debug, Default, Deserialize)]
pub(super) struct GenerationKeys {
    pub eos_token_id: Option<OneOrMany>,
}

pub(super) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    parse_json(path, &read(path)?)
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, ConfigError> {
    folder::read_at_most(path, JSON_FILE_BYTES).map_err(|source| ConfigError::Read { path: path.into(), source })
}

pub(super) fn parse_json<T: serde::de::DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, ConfigError> {
    json::from_slice(text).map_err(|source| ConfigError::Json { path: path.into(), source })
}
