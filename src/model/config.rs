//! Parses Hugging Face's `config.json` into the shape of a backbone, with all checks.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use crate::model::block_spec::RopeScaling;
use crate::model::block_spec::{
    Activation, Biases, BlockSpec, HeadShape, LinearSpec, MlpSpec, NormKind, NormPlaces, NormSpec, RotarySpec, Windows,
    names,
};

/// Why a config cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No such file, or it cannot be read.
    #[error("cannot read {}: {source}; a backbone is a folder in Hugging Face layout with config.json", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// Not JSON, or a key of another type.
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A value that this program cannot work with.
    #[error("{}: `{key}`: expected {expected}, got {got}", path.display())]
    Value { path: PathBuf, key: &'static str, expected: String, got: String },
}

/// The shape of a Llama-family backbone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LlamaConfig {
    /// `llama` or `mistral`.
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
    /// The longest context.
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
    /// q, k, v and o have a bias.
    pub attention_bias: bool,
    /// gate, up and down have a bias.
    pub mlp_bias: bool,
    /// Beginning of sequence.
    pub bos_token_id: Option<i64>,
    /// End-of-sequence tokens: any of them ends a text.
    pub eos_token_ids: Vec<i64>,
}

/// `config.json` as written. Keys that change no number here are ignored, as transformers does.
#[derive(Debug, Deserialize)]
struct ConfigKeys {
    model_type: Option<String>,
    hidden_size: i64,
    intermediate_size: i64,
    num_hidden_layers: usize,
    num_attention_heads: i64,
    num_key_value_heads: Option<i64>,
    head_dim: Option<i64>,
    vocab_size: i64,
    max_position_embeddings: i64,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeKeys>,
    /// transformers 5 puts theta and scaling together.
    rope_parameters: Option<RopeKeys>,
    sliding_window: Option<i64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    bos_token_id: Option<i64>,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Debug, Default, Deserialize)]
struct RopeKeys {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

/// `generation_config.json`; its EOS list is the one that generation obeys.
#[derive(Debug, Default, Deserialize)]
struct GenerationKeys {
    eos_token_id: Option<OneOrMany>,
}

impl LlamaConfig {
    /// Reads `config.json`, and `generation_config.json` where there is one.
    ///
    /// # Errors
    /// [`ConfigError`] names the file, the key, the expected value and the one found.
    pub fn load(folder: &Path) -> Result<Self, ConfigError> {
        let path = folder.join("config.json");
        let written: ConfigKeys = read_json(&path)?;
        let generation_path = folder.join("generation_config.json");
        let generation: GenerationKeys =
            if generation_path.exists() { read_json(&generation_path)? } else { GenerationKeys::default() };
        let mut config = resolve(&path, written)?;
        if let Some(eos) = generation.eos_token_id {
            config.eos_token_ids = eos.into_vec();
        }
        config.check(&path)?;
        Ok(config)
    }

    /// Its decoder block.
    pub fn block(&self) -> BlockSpec {
        let (hidden_size, d) = (self.hidden_size, self.head_dim);
        BlockSpec {
            hidden_size,
            norms: NormSpec { kind: NormKind::Rms, eps: self.rms_norm_eps, places: NormPlaces::Inputs },
            heads: HeadShape {
                q: self.num_attention_heads,
                g: self.num_key_value_heads,
                d,
                query_pre_attn_scalar: d as f64,
            },
            rotary: RotarySpec { size: d, theta: self.rope_theta, scaling: self.rope_scaling },
            windows: Windows::EveryLayer(self.sliding_window),
            mlp: MlpSpec { width: self.intermediate_size, activation: Activation::Silu },
            biases: Biases { qkv: self.attention_bias, o: self.attention_bias, mlp: self.mlp_bias },
        }
    }

    /// Width of the query projection, Q·D.
    pub fn query_size(&self) -> i64 {
        self.block().heads.query_size()
    }

    /// Width of the key and of the value projection, G·D.
    pub fn key_value_size(&self) -> i64 {
        self.block().heads.key_value_size()
    }

    /// The LM head's layer.
    pub fn lm_head(&self) -> LinearSpec {
        LinearSpec { part: names::LM_HEAD, size: [self.vocab_size, self.hidden_size], bias: false }
    }

    /// Names and shapes of all weights, in the order of a file.
    pub fn tensors(&self) -> Vec<(String, Vec<i64>)> {
        let (v, h) = (self.vocab_size, self.hidden_size);
        let mut all = vec![(names::EMBED_TOKENS.to_owned(), vec![v, h])];
        for layer in 0..self.num_hidden_layers {
            let tensors = self.block().tensors().into_iter();
            all.extend(tensors.map(|(part, shape)| (names::in_layer(layer, &part), shape)));
        }
        all.push((names::NORM.to_owned(), vec![h]));
        if !self.tie_word_embeddings {
            all.push((format!("{}.weight", names::LM_HEAD), vec![v, h]));
        }
        all
    }

    /// Number of weights; a tied lm_head counts once.
    pub fn parameters(&self) -> i64 {
        self.tensors().iter().map(|(_, shape)| shape.iter().product::<i64>()).sum()
    }

    fn check(&self, path: &Path) -> Result<(), ConfigError> {
        let positive = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers.cast_signed() as i64),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        for (key, value) in positive {
            if value < 1 {
                return Err(bad(path, key, "a number above 0", value));
            }
        }
        if self.num_attention_heads % self.num_key_value_heads != 0 {
            let expected = format!("a divisor of num_attention_heads = {}", self.num_attention_heads);
            return Err(bad(path, "num_key_value_heads", expected, self.num_key_value_heads));
        }
        if self.head_dim % 2 != 0 {
            return Err(bad(path, "head_dim", "an even number (rotary embeddings turn pairs)", self.head_dim));
        }
        Ok(())
    }
}

impl OneOrMany {
    fn into_vec(self) -> Vec<i64> {
        match self {
            OneOrMany::One(id) => vec![id],
            OneOrMany::Many(ids) => ids,
        }
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
    serde_json::from_str(&text).map_err(|source| ConfigError::Json { path: path.into(), source })
}

fn bad(path: &Path, key: &'static str, expected: impl ToString, got: impl ToString) -> ConfigError {
    ConfigError::Value { path: path.into(), key, expected: expected.to_string(), got: got.to_string() }
}

fn resolve(path: &Path, written: ConfigKeys) -> Result<LlamaConfig, ConfigError> {
    let family = family(path, &written)?;
    if let Some(act) = written.hidden_act.as_deref().filter(|act| !matches!(*act, "silu" | "swish")) {
        return Err(bad(path, "hidden_act", "silu", act));
    }
    let (rope_theta, rope_scaling) = resolve_rope(path, &written)?;
    Ok(LlamaConfig {
        model_type: family.model_type.into(),
        hidden_size: written.hidden_size,
        intermediate_size: written.intermediate_size,
        num_hidden_layers: written.num_hidden_layers,
        num_attention_heads: written.num_attention_heads,
        num_key_value_heads: written
            .num_key_value_heads
            .unwrap_or(family.num_key_value_heads.unwrap_or(written.num_attention_heads)),
        head_dim: written.head_dim.unwrap_or(written.hidden_size / written.num_attention_heads.max(1)),
        vocab_size: written.vocab_size,
        max_position_embeddings: written.max_position_embeddings,
        rms_norm_eps: written.rms_norm_eps.unwrap_or(1e-6),
        rope_theta,
        rope_scaling,
        sliding_window: if family.has_sliding_window { written.sliding_window } else { None },
        tie_word_embeddings: written.tie_word_embeddings.unwrap_or(false),
        attention_bias: written.attention_bias.unwrap_or(false),
        mlp_bias: written.mlp_bias.unwrap_or(false),
        bos_token_id: written.bos_token_id,
        eos_token_ids: written.eos_token_id.map(OneOrMany::into_vec).unwrap_or_default(),
    })
}

/// A row of [`FAMILIES`]: transformers' defaults for a `model_type` whose config.json omits them.
struct Family {
    model_type: &'static str,
    has_sliding_window: bool,
    num_key_value_heads: Option<i64>,
}

/// Vicuna, Zephyr and most fine-tunes keep the `model_type` of their base model.
const FAMILIES: [Family; 2] = [
    Family { model_type: "llama", has_sliding_window: false, num_key_value_heads: None },
    Family { model_type: "mistral", has_sliding_window: true, num_key_value_heads: Some(8) },
];

fn family(path: &Path, written: &ConfigKeys) -> Result<&'static Family, ConfigError> {
    let got = written.model_type.as_deref().unwrap_or("nothing");
    let known = FAMILIES.map(|f| format!("{:?}", f.model_type)).join(" or ");
    FAMILIES.iter().find(|f| f.model_type == got).ok_or_else(|| bad(path, "model_type", known, got))
}

fn resolve_rope(path: &Path, written: &ConfigKeys) -> Result<(f64, RopeScaling), ConfigError> {
    let rope = written.rope_parameters.as_ref().or(written.rope_scaling.as_ref());
    let theta = rope.and_then(|r| r.rope_theta).or(written.rope_theta).unwrap_or(10_000.0);
    let Some(rope) = rope else { return Ok((theta, RopeScaling::Default)) };
    let need = |key: &'static str, value: Option<f64>| {
        value.ok_or_else(|| bad(path, key, "a number in rope_scaling", "nothing"))
    };
    let scaling = match rope.rope_type.as_deref() {
        None | Some("default") => RopeScaling::Default,
        Some("linear") => RopeScaling::Linear { factor: need("factor", rope.factor)? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: need("factor", rope.factor)?,
            low_freq_factor: need("low_freq_factor", rope.low_freq_factor)?,
            high_freq_factor: need("high_freq_factor", rope.high_freq_factor)?,
            original_max_position_embeddings: need(
                "original_max_position_embeddings",
                rope.original_max_position_embeddings,
            )?,
        },
        Some(other) => return Err(bad(path, "rope_scaling", "rope_type default, linear or llama3", other)),
    };
    Ok((theta, scaling))
}

#[cfg(test)]
impl LlamaConfig {
    /// A backbone small enough for float64 tests: grouped heads, a head size that is no power of two, its own lm_head.
    pub(crate) fn tiny() -> Self {
        Self {
            model_type: "llama".into(),
            hidden_size: 32,
            intermediate_size: 48,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 6,
            vocab_size: 50,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            sliding_window: None,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            bos_token_id: None,
            eos_token_ids: vec![],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(config: &str, generation: Option<&str>) -> Result<LlamaConfig, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            crate::files::write_atomic(&dir.path().join(name), |out| std::io::Write::write_all(out, text.as_bytes()))
                .unwrap();
        };
        write("config.json", config);
        if let Some(generation) = generation {
            write("generation_config.json", generation);
        }
        LlamaConfig::load(dir.path())
    }

    fn llama(more: &str) -> String {
        format!(
            r#"{{"model_type":"llama","hidden_size":64,"intermediate_size":172,"num_hidden_layers":2,"num_attention_heads":8,
            "vocab_size":512,"max_position_embeddings":512{more}}}"#
        )
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let config = load(&llama(r#","eos_token_id":2"#), None).unwrap();
        assert_eq!((config.num_key_value_heads, config.head_dim, config.rope_theta), (8, 8, 10_000.0));
        assert_eq!((config.eos_token_ids, config.tie_word_embeddings), (vec![2], false));
    }

    #[test]
    fn the_eos_list_of_generation_config_wins() {
        let config = load(&llama(r#","eos_token_id":2"#), Some(r#"{"eos_token_id":[1,2]}"#)).unwrap();
        assert_eq!(config.eos_token_ids, [1, 2]);
    }

    #[test]
    fn both_spellings_of_rope_are_read() {
        let scaling = r#"{"rope_type":"llama3","rope_theta":500000.0,"factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}"#;
        let old = load(&llama(&format!(r#","rope_theta":500000.0,"rope_scaling":{scaling}"#)), None).unwrap();
        let new = load(&llama(&format!(r#","rope_parameters":{scaling}"#)), None).unwrap();
        assert_eq!(old, new);
        assert!(matches!(new.rope_scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
    }

    #[test]
    fn what_cannot_be_run_is_named() {
        let refused = [
            (llama(r#","rope_scaling":{"type":"yarn","factor":2.0}"#), "rope_scaling"),
            (llama(r#","num_key_value_heads":3"#), "num_key_value_heads"),
            (llama(r#","hidden_act":"gelu""#), "hidden_act"),
            (llama(r#","head_dim":0"#), "head_dim"),
            (llama("").replace("\"llama\"", "\"gpt2\""), "model_type"),
        ];
        for (config, key) in refused {
            let error = load(&config, None).unwrap_err().to_string();
            assert!(error.contains("config.json") && error.contains(key), "{error}");
        }
    }
}
