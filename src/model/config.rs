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
            mlp: MlpSpec { width: self.intermediate_size, activation: traits.activation },
            biases: self.biases,
            storage: traits.storage,
            residual_multiplier: traits.residual_multiplier,
        }
    }

    /// The kinds of its layers.
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
        let of_layer = self.block().tensors();
        for layer in 0..self.num_hidden_layers {
            all.extend(of_layer.iter().map(|(part, shape)| (names::in_layer(layer, part), shape.clone())));
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
            biases: Biases::default(),
            family: FamilyTraits::default(),
            eos_token_ids: vec![],
        }
    }

    /// Llama 2 7B.
    pub(crate) fn llama_2_7b() -> Self {
        Self {
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            vocab_size: 32000,
            max_position_embeddings: 4096,
            eos_token_ids: vec![2],
            ..Self::tiny()
        }
    }
}

#[cfg(test)]
impl LlamaConfig {
    /// [`LlamaConfig::tiny`], and a backbone with what each family has beyond it.
    pub(crate) fn tiny_of_each_family() -> Vec<Self> {
        use crate::model::block_spec::{Activation, LinearStorage, LogitSpec, NormKind, NormPlaces, QueryKeyNorm};
        let of =
            |model_type: &str, family: FamilyTraits| Self { model_type: model_type.into(), family, ..Self::tiny() };
        let layer = |slides, rotates| LayerTraits { slides, rotates };
        let qwen3 = FamilyTraits { query_key_norm: Some(QueryKeyNorm::EachHead), ..FamilyTraits::default() };
        let gemma = FamilyTraits {
            norm_kind: NormKind::RmsPlusOne,
            norm_places: NormPlaces::InputsAndOutputs,
            activation: Activation::GeluTanh,
            attention_scale: Some(0.3),
            attention_softcap: Some(1.5),
            embedding_multiplier: 32f64.sqrt(),
            logits: LogitSpec { divisor: 1.0, softcap: Some(2.0) },
            layers: vec![layer(true, true), layer(false, true)],
            local_rope_theta: Some(100.0),
            ..qwen3.clone()
        };
        let phi = FamilyTraits { storage: LinearStorage::Fused, rotary_size: Some(4), ..FamilyTraits::default() };
        let granite = FamilyTraits {
            attention_scale: Some(0.2),
            embedding_multiplier: 3.0,
            residual_multiplier: 0.5,
            logits: LogitSpec { divisor: 4.0, softcap: None },
            ..FamilyTraits::default()
        };
        let olmo = FamilyTraits {
            norm_places: NormPlaces::Outputs,
            query_key_norm: Some(QueryKeyNorm::AllHeads),
            ..FamilyTraits::default()
        };
        let smollm = FamilyTraits { layers: vec![layer(true, false), layer(true, true)], ..FamilyTraits::default() };
        let qwen2 = Self { biases: Biases { qkv: true, o: false, mlp: false }, ..of("qwen2", FamilyTraits::default()) };
        vec![
            Self::tiny(),
            qwen2,
            of("qwen3", qwen3),
            Self { sliding_window: Some(5), ..of("gemma3_text", gemma) },
            of("phi3", phi),
            of("granite", granite),
            of("olmo2", olmo),
            of("smollm3", smollm),
        ]
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::Error;
    use serde::de::{Error as _, Visitor};
    use serde::{Deserialize, Deserializer};

    use super::key_table::key_use;
    use super::*;
    use crate::key_use::KeyUse;

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

    fn gemma2(more: &str) -> String {
        llama(more).replace("\"llama\"", "\"gemma2\"")
    }

    fn granite(more: &str) -> String {
        llama(more).replace("\"llama\"", "\"granite\"")
    }

    #[test]
    fn null_key_value_heads_are_as_many_as_heads() {
        let mistral = |more: &str| load(&llama(more).replace("\"llama\"", "\"mistral\""), None).unwrap();
        assert_eq!(mistral(r#","num_key_value_heads":null"#).num_key_value_heads, 8);
        assert_eq!(mistral(r#","num_key_value_heads":2"#).num_key_value_heads, 2);
    }

    #[test]
    fn smollm3_slides_where_there_is_no_rotary_embedding() {
        let config = llama(r#","use_sliding_window":true,"sliding_window":5,"num_hidden_layers":4"#)
            .replace("\"num_hidden_layers\":2,", "")
            .replace("\"llama\"", "\"smollm3\"");
        let config = load(&config, None).unwrap();
        let kinds = config.layer_kinds();
        let of = |layer| kinds.kinds()[kinds.of_layer(layer)].clone();
        assert_eq!((of(0).window, of(0).rotary.is_some()), (None, true));
        assert_eq!((of(3).window, of(3).rotary.is_some()), (Some(5), false));
    }

    #[test]
    fn what_cannot_be_run_is_named() {
        let refused = [
            (llama(r#","rope_scaling":{"type":"xpos","factor":2.0}"#), "rope_scaling"),
            (llama(r#","rope_scaling":{"type":"linear","factor":0.0}"#), "factor"),
            (llama(r#","rope_scaling":{"factor":2.0}"#), "rope_type"),
            (llama(r#","rope_theta":-1.0"#), "rope_theta"),
            (llama(r#","rms_norm_eps":-1.0"#), "rms_norm_eps"),
            (granite(r#","logits_scaling":0.0"#), "logits_scaling"),
            (gemma2(r#","final_logit_softcapping":0.0"#), "final_logit_softcapping"),
            (gemma2(r#","query_pre_attn_scalar":-1.0"#), "query_pre_attn_scalar"),
            (
                gemma2(r#","rope_parameters":{"full_attention":{"rope_type":"linear","factor":"8"}}"#),
                "invalid type: string",
            ),
            (gemma2(r#","rope_parameters":{"sliding_attention":{"rope_type":"default"}}"#), "full_attention"),
            (llama(r#","num_key_value_heads":3"#), "num_key_value_heads"),
            (llama(r#","hidden_act":"gelu""#), "hidden_act"),
            (llama(r#","head_dim":0"#), "head_dim"),
            (llama("").replace("\"llama\"", "\"gpt2\""), "model_type"),
            (llama("").replace("\"llama\"", "\"mixtral\""), "mixture-of-experts"),
            (r#"{"model_type":"falcon","n_embed":8}"#.to_owned(), "another kind of decoder block"),
            (llama("").replace("\"llama\"", "\"gemma3\""), "vision"),
            (llama("").replace("\"llama\"", "\"word2vec\""), "one of llama, mistral"),
        ];
        for (config, key) in refused {
            let error = load(&config, None).unwrap_err().to_string();
            assert!(error.contains("config.json") && error.contains(key), "{error}");
        }
    }

    /// Takes the names of a struct's fields.
    struct FieldNames<'n>(&'n mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for FieldNames<'_> {
        type Error = Error;

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Error> {
            *self.0 = fields;
            Err(Error::custom("no values"))
        }

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            unreachable!("a struct is read")
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct
            seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    #[test]
    fn what_the_table_says_is_read_is_read() {
        let mut fields: &[&str] = &[];
        ConfigKeys::deserialize(FieldNames(&mut fields)).unwrap_err();
        let families = family::names();
        let is_read = |key: &str| families.iter().any(|family| key_use(family, key) == Some(KeyUse::Read));
        for key in key_table::keys() {
            assert_eq!(is_read(key), fields.contains(&key) || key == "model_type", "{key}");
        }
        assert!(fields.iter().all(|key| is_read(key)), "{fields:?}");
    }
}
