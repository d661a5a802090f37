//! Parses Hugging Face's `config.json` into the shape of a backbone, with all checks.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::bounds::{BACKBONE_HEADS, BACKBONE_LAYERS, BACKBONE_SIZE};
use crate::files::is_file;
use crate::key_use::reported;
pub use crate::model::block_spec::{Biases, RopeScaling};
use crate::model::block_spec::{
    BlockSpec, HeadShape, LayerKind, LayerKinds, LinearSpec, MlpSpec, NormSpec, RotarySpec, names,
};

mod error;
mod family;
pub mod generation_keys;
pub mod key_table;
mod keys;
mod rotary;

pub use error::ConfigError;

/// An adapter's shape and base, as PEFT names the file.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(super) use error::QUANTIZED_NOT_READ;
use error::{bad, within};
use family::Family;
pub use family::{FamilyTraits, LayerTraits};
use keys::{ConfigKeys, GenerationKeys, ModelType, OneOrMany, parse_json, read, read_json};

/// The shape of a backbone: a Llama, and what its family has beyond that.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LlamaConfig {
    /// The family's name in transformers.
    pub model_type: String,
    /// H.
    pub hidden_size: i64,
    /// Width of the MLP.
    pub intermediate_size: i64,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Q, the query heads.
    pub num_attention_heads: i64,
    /// G, the key/value heads; divides Q.
    pub num_key_value_heads: i64,
    /// D: hidden_size / Q unless the config sets it.
    pub head_dim: i64,
    /// V.
    pub vocab_size: i64,
    /// The longest text, in tokens. Rotary embeddings whose frequencies depend on the context (`longrope`, `dynamic`) are those of this context.
    pub max_position_embeddings: i64,
    /// Added to the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the frequencies for longer contexts.
    pub rope_scaling: RopeScaling,
    /// A token sees this many tokens, itself included; absent = all before it.
    pub sliding_window: Option<i64>,
    /// lm_head is the embedding.
    pub tie_word_embeddings: bool,
    /// Which linear layers have a bias.
    pub biases: Biases,
    /// What the family's decoder has beyond Llama's.
    pub family: FamilyTraits,
    /// End-of-sequence tokens: any of them ends a text.
    pub eos_token_ids: Vec<i64>,
}

impl LlamaConfig {
    /// Reads `config.json`, and `generation_config.json` where there is one.
    ///
    /// # Errors
    /// [`ConfigError`] names the file, the key, the expected value and the one found.
    pub fn load(folder: &Path) -> Result<Self, ConfigError> {
        Self::load_reporting(folder).map(|(config, _)| config)
    }

    /// As [`LlamaConfig::load`], with the keys of `config.json` that are unknown here and ask for something, and their values.
    ///
    /// # Errors
    /// As [`LlamaConfig::load`].
    pub fn load_reporting(folder: &Path) -> Result<(Self, Vec<String>), ConfigError> {
        let path = folder.join("config.json");
        let text = read(&path)?;
        let ModelType { model_type, others } = parse_json(&path, &text)?;
        let family = family::find(&path, model_type.as_deref())?; // other architectures have other keys
        key_table::check(&path, family.model_type, &others)?;
        let written: ConfigKeys = parse_json(&path, &text)?;
        let generation_path = folder.join("generation_config.json");
        let has_generation = is_file(&generation_path)?;
        let generation: GenerationKeys =
            if has_generation { read_json(&generation_path)? } else { GenerationKeys::default() };
        let adapter = folder.join(ADAPTER_CONFIG);
        if is_file(&adapter)? {
            return Err(ConfigError::Adapter { path: adapter });
        }
        let layers = i64::try_from(written.num_hidden_layers).unwrap_or(i64::MAX);
        if layers > BACKBONE_LAYERS {
            return Err(bad(&path, "num_hidden_layers", format!("at most {BACKBONE_LAYERS}"), layers)); // before each gets its traits
        }
        check_format(&path, &written)?;
        let mut config = resolve(&path, family, written)?;
        config.check(&path)?;
        match generation.eos_token_id {
            None => config.check_eos(&path)?,
            Some(eos) => {
                config.eos_token_ids = eos.into_vec();
                config.check_eos(&generation_path)?;
            }
        }
        let key_use = |key: &str| key_table::key_use(model_type.as_deref().unwrap_or_default(), key);
        Ok((config, reported(&others, key_use)))
    }

    /// The keys of a folder's `config.json` that are unknown here. They are left to programs that know them, as in transformers.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn unknown_keys(folder: &Path) -> Result<Vec<String>, ConfigError> {
        let ModelType { model_type, others } = read_json(&folder.join("config.json"))?;
        let is_unknown = |key: &String| key_table::key_use(model_type.as_deref().unwrap_or_default(), key).is_none();
        Ok(others.into_iter().map(|(key, _)| key).filter(is_unknown).collect())
    }

    /// The keys of a folder's `generation_config.json` that are unknown here, or ask for something that is not done, with their values.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn reported_generation_keys(folder: &Path) -> Result<Vec<String>, ConfigError> {
        let path = folder.join("generation_config.json");
        let written = if is_file(&path)? { read_json(&path)? } else { Map::new() };
        Ok(reported(&written, generation_keys::key_use))
    }

    /// The context as config.json has it: what a linear scaling stretches, unless the family counts that, and the longest one of `longrope`.
    pub fn written_context(&self) -> i64 {
        match self.rope_scaling {
            #[expect(clippy::cast_possible_truncation, reason = "tokens of a context")]
            RopeScaling::Linear { factor } if !family::counts_scaling(&self.model_type) => {
                (self.max_position_embeddings as f64 / factor).round() as i64
            }
            RopeScaling::LongRope { .. } => self.largest_context(),
            _ => self.max_position_embeddings,
        }
    }

    /// The longest context that the rotary embeddings allow.
    pub fn largest_context(&self) -> i64 {
        match self.rope_scaling {
            #[expect(clippy::cast_possible_truncation, reason = "tokens of a context")]
            RopeScaling::Dynamic { factor, original_max_position_embeddings } => {
                self.max_position_embeddings.max((original_max_position_embeddings as f64 * factor) as i64)
            }
            RopeScaling::LongRope { longest, .. } => self.max_position_embeddings.max(longest),
            RopeScaling::Default
            | RopeScaling::Linear { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::Yarn { .. } => self.max_position_embeddings,
        }
    }

    /// Whether the rotary embeddings are the same in contexts of these lengths.
    pub fn same_rotary_embeddings(&self, [one, other]: [i64; 2]) -> bool {
        match self.rope_scaling {
            RopeScaling::Dynamic { original_max_position_embeddings: original, .. } => {
                one.max(original) == other.max(original)
            }
            RopeScaling::LongRope { original_max_position_embeddings: original, .. } => {
                (one > original) == (other > original)
            }
            RopeScaling::Default
            | RopeScaling::Linear { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::Yarn { .. } => true,
        }
    }

    /// Whether the rotary embeddings depend on the context (`dynamic`, `longrope`).
    pub fn rotary_depends_on_context(&self) -> bool {
        !self.same_rotary_embeddings([1, i64::MAX])
    }

    /// Its decoder block.
    pub fn block(&self) -> BlockSpec {
        let traits = &self.family;
        BlockSpec {
            hidden_size: self.hidden_size,
            norms: NormSpec {
                kind: traits.norm_kind,
                eps: self.rms_norm_eps,
                places: traits.norm_places,
                query_key: traits.query_key_norm,
            },
            heads: HeadShape {
                q: self.num_attention_heads,
                g: self.num_key_value_heads,
                d: self.head_dim,
                scale: traits.attention_scale.unwrap_or((self.head_dim as f64).powf(-0.5)),
                softcap: traits.attention_softcap,
            },
            layers: self.layer_kinds(),
            mlp: MlpSpec::Gated { width: self.intermediate_size, activation: traits.activation },
            biases: self.biases,
            storage: traits.storage,
            residual_multiplier: traits.residual_multiplier,
        }
    }

    pub fn layer_kinds(&self) -> LayerKinds {
        LayerKinds::new((0..self.num_hidden_layers).map(|layer| self.layer_kind(layer)))
    }

    fn layer_kind(&self, layer: usize) -> LayerKind {
        let alike = LayerTraits { slides: true, rotates: true };
        let LayerTraits { slides, rotates } = self.family.layers.get(layer).copied().unwrap_or(alike);
        let window = self.sliding_window.filter(|_| slides);
        let (theta, scaling) = match self.family.local_rope_theta {
            Some(theta) if slides => (theta, RopeScaling::Default),
            _ => (self.rope_theta, self.rope_scaling.clone()),
        };
        let size = self.family.rotary_size.unwrap_or(self.head_dim);
        let rotary = RotarySpec { size, theta, scaling, context: self.max_position_embeddings };
        LayerKind { window, rotary: rotates.then_some(rotary) }
    }

    /// Width of the query projection, Q·D.
    pub fn query_size(&self) -> i64 {
        self.num_attention_heads * self.head_dim
    }

    /// Width of the key and of the value projection, G·D.
    pub fn key_value_size(&self) -> i64 {
        self.num_key_value_heads * self.head_dim
    }

    /// The LM head's layer.
    pub fn lm_head(&self) -> LinearSpec {
        LinearSpec { part: names::LM_HEAD, size: [self.vocab_size, self.hidden_size], bias: false }
    }

    /// Names and shapes of all weights, in the order of a file.
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        let (v, h) = (self.vocab_size, self.hidden_size);
        let mut all = vec![(names::EMBED_TOKENS.to_owned(), vec![v, h])];
        let in_layer = self.block().tensors();
        for layer in 0..self.num_hidden_layers {
            all.extend(in_layer.iter().map(|(part, shape)| (names::in_layer(layer, part), shape.clone())));
        }
        all.push((names::NORM.to_owned(), vec![h]));
        if !self.tie_word_embeddings {
            all.push((names::LM_HEAD_WEIGHT.to_owned(), vec![v, h]));
        }
        all
    }

    /// Number of weights; a tied lm_head counts once.
    pub fn parameters(&self) -> i64 {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum()
    }

    fn check_eos(&self, path: &Path) -> Result<(), ConfigError> {
        match self.eos_token_ids.iter().find(|id| !(0..self.vocab_size).contains(id)) {
            None => Ok(()),
            Some(id) => Err(bad(path, "eos_token_id", format!("ids below vocab_size = {}", self.vocab_size), id)),
        }
    }

    fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let numbers = [
            ("hidden_size", self.hidden_size, BACKBONE_SIZE),
            ("intermediate_size", self.intermediate_size, BACKBONE_SIZE),
            ("num_hidden_layers", i64::try_from(self.num_hidden_layers).unwrap_or(i64::MAX), BACKBONE_LAYERS),
            ("num_attention_heads", self.num_attention_heads, BACKBONE_HEADS),
            ("num_key_value_heads", self.num_key_value_heads, BACKBONE_HEADS),
            ("head_dim", self.head_dim, BACKBONE_HEADS),
            ("vocab_size", self.vocab_size, BACKBONE_SIZE),
            ("max_position_embeddings", self.max_position_embeddings, i64::MAX),
            ("sliding_window", self.sliding_window.unwrap_or(1), i64::MAX),
        ];
        for (key, value, most) in numbers {
            if value < 1 {
                return Err(bad(path, key, "a number above 0", value));
            }
            if value > most {
                return Err(bad(path, key, format!("at most {most}"), value));
            }
        }
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            let expected = format!("a divisor of num_attention_heads = {}", self.num_attention_heads);
            return Err(bad(path, "num_key_value_heads", expected, self.num_key_value_heads));
        }
        within(path, "rms_norm_eps", self.rms_norm_eps, 0.0..=1.0)?;
        if self.head_dim % 2 != 0 {
            return Err(bad(path, "head_dim", "an even number (rotary embeddings turn pairs)", self.head_dim));
        }
        Ok(())
    }
}

/// The formats of weights that `config.json` may name.
fn check_format(path: &Path, written: &ConfigKeys) -> Result<(), ConfigError> {
    let formats =
        [("quantization_config", &written.quantization_config), ("compression_config", &written.compression_config)];
    for (key, format) in formats {
        if let Some(format) = format {
            let method =
                format.get("quant_method").and_then(Value::as_str).unwrap_or("by a method that it does not name");
            return Err(ConfigError::Quantized { path: path.into(), key, method: method.into() });
        }
    }
    for (key, name) in [("dtype", &written.dtype), ("torch_dtype", &written.torch_dtype)] {
        if let Some(name) = name.as_deref().filter(|name| !DTYPES.contains(name)) {
            return Err(bad(path, key, format!("one of {}", DTYPES.join(", ")), name));
        }
    }
    Ok(())
}

/// torch's names of the dtypes of weights, and `auto` of hand-written files.
const DTYPES: [&str; 8] = ["bfloat16", "float16", "half", "float32", "float", "float64", "double", "auto"];

fn resolve(path: &Path, family: &Family, written: ConfigKeys) -> Result<LlamaConfig, ConfigError> {
    let heads = written.num_attention_heads;
    let head_dim = written.head_dim.or(family.head_dim).unwrap_or(written.hidden_size / heads.max(1));
    let rotary = rotary::resolve(path, &written, family, head_dim)?;
    Ok(LlamaConfig {
        model_type: family.model_type.into(),
        hidden_size: written.hidden_size,
        intermediate_size: written.intermediate_size,
        num_hidden_layers: written.num_hidden_layers,
        num_attention_heads: heads,
        num_key_value_heads: written.num_key_value_heads.unwrap_or(family.num_key_value_heads).unwrap_or(heads),
        head_dim,
        vocab_size: written.vocab_size,
        max_position_embeddings: rotary.context,
        rms_norm_eps: written.rms_norm_eps.unwrap_or(family.rms_norm_eps),
        rope_theta: rotary.theta,
        rope_scaling: rotary.scaling,
        sliding_window: family.sliding_window(path, &written)?,
        tie_word_embeddings: written.tie_word_embeddings.unwrap_or(family.tie_word_embeddings),
        biases: biases(family, &written),
        family: FamilyTraits {
            rotary_size: rotary.size,
            local_rope_theta: rotary.local_theta,
            ..family.traits(path, &written)?
        },
        eos_token_ids: written.eos_token_id.map(OneOrMany::into_vec).unwrap_or_default(),
    })
}

fn biases(family: &Family, written: &ConfigKeys) -> Biases {
    let attention = family.has_biases("attention_bias", written.attention_bias);
    match family.has_qkv_bias {
        true => Biases { qkv: true, o: false, mlp: false },
        false => Biases { qkv: attention, o: attention, mlp: family.has_biases("mlp_bias", written.mlp_bias) },
    }
}

#[cfg(test)]
mod tests;
