//! A backbone from a Hugging Face folder: config, weights, forward pass. It knows nothing of Medusa heads.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::model::device_map::DeviceMap;
use crate::model::stored::Quantization;

pub mod adapters;
pub mod attention;
pub mod backward;
pub mod batch_step;
pub mod block_spec;
pub mod config;
mod decoder_layer;
pub mod device_map;
pub mod eagle_layer;
pub mod folder;
pub mod kv_cache;
pub mod linear;
pub mod llama;
pub mod loading;
pub mod logits;
pub mod lora;
mod mask;
pub mod new_tokens;
mod norm;
pub mod peft;
pub mod peft_keys;
pub mod prefix_layer;
pub mod rope;
pub mod stages;
pub mod stored;
pub mod stored_dtype;
pub mod taps;
mod trained;
pub mod weights;

/// `[backbone]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackboneConfig {
    /// A folder in Hugging Face layout.
    pub path: String,
    /// The dtype that the backbone computes in.
    pub dtype: Dtype,
    /// Which of its layers lie on which GPU; absent: all on one device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_map: Option<DeviceMap>,
    /// Quantisation of its linear layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
}
