//! The config of a backbone as the metadata of a GGUF file.

use serde_json::{Map, Value, json};
use tch::{Device, Kind};

use super::super::error::GgufExportError;
use crate::gguf::metadata::MetaValue;
use crate::model::block_spec::RopeScaling;
use crate::model::config::LlamaConfig;
use crate::model::rope::{Frequencies, Ropes};

/// Families whose architecture has another name in llama.cpp.
const RENAMED: [(&str, &str); 2] = [("mistral", "llama"), ("gemma3_text", "gemma3")];
/// Architectures that llama.cpp gives a window.
const WITH_WINDOW: [&str; 3] = ["gemma2", "gemma3", "phi3"];
/// Architectures whose window llama.cpp reads and does not use.
const WITHOUT_USE_OF_IT: &str = "phi3";
/// Fields that are compared in another way, or are not the decoder's.
const COMPARED_APART: [&str; 3] = ["model_type", "eos_token_ids", "rope_scaling"];

/// llama.cpp's name of the architecture.
pub(super) fn architecture(config: &LlamaConfig) -> &str {
    RENAMED.iter().find(|(ours, _)| *ours == config.model_type).map_or(&config.model_type, |(_, theirs)| theirs)
}

/// What llama.cpp does not do with this backbone, in words.
pub(super) fn notice(config: &LlamaConfig) -> Option<String> {
    let (window, architecture) = (config.sliding_window?, architecture(config));
    let who = match WITH_WINDOW.contains(&architecture) {
        false => "GGUF has no sliding window for this architecture: llama.cpp, and this file as a backbone,",
        true if architecture == WITHOUT_USE_OF_IT => {
            "llama.cpp does not use the sliding window of this architecture: it"
        }
        true => return None,
    };
    Some(format!("{who} may answer otherwise in texts of more than {window} tokens"))
}

/// The keys of the architecture.
pub(super) fn keys(config: &LlamaConfig) -> Vec<(String, MetaValue)> {
    let architecture = architecture(config);
    let traits = &config.family;
    let whole = |key: &str, number: i64| (format!("{architecture}.{key}"), MetaValue::Integer(number));
    let float = |key: &str, number: f64| (format!("{architecture}.{key}"), MetaValue::Float(number));
    let mut keys = vec![
        whole("vocab_size", config.vocab_size),
        whole("context_length", config.written_context()),
        whole("embedding_length", config.hidden_size),
        whole("block_count", config.num_hidden_layers as i64),
        whole("feed_forward_length", config.intermediate_size),
        whole("attention.head_count", config.num_attention_heads),
        whole("attention.head_count_kv", config.num_key_value_heads),
        whole("attention.key_length", config.head_dim),
        whole("attention.value_length", config.head_dim),
        whole("rope.dimension_count", traits.rotary_size.unwrap_or(config.head_dim)),
        float("attention.layer_norm_rms_epsilon", config.rms_norm_eps),
        float("rope.freq_base", config.rope_theta),
    ];
    let window = config.sliding_window.filter(|_| WITH_WINDOW.contains(&architecture));
    keys.extend(window.map(|window| whole("attention.sliding_window", window)));
    if architecture == "granite" {
        keys.extend([
            float("embedding_scale", traits.embedding_multiplier),
            float("residual_scale", traits.residual_multiplier),
            float("logit_scale", traits.logits.divisor),
        ]);
        keys.extend(traits.attention_scale.map(|scale| float("attention.scale", scale)));
    }
    keys.extend(traits.attention_softcap.map(|cap| float("attn_logit_softcapping", cap)));
    keys.extend(traits.logits.softcap.map(|cap| float("final_logit_softcapping", cap)));
    keys.extend(scaling(config, architecture));
    keys
}

fn scaling(config: &LlamaConfig, architecture: &str) -> Vec<(String, MetaValue)> {
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    let kind = |name: &str| (key("type"), MetaValue::Text(name.into()));
    let original = |context: i64| (key("original_context_length"), MetaValue::Integer(context));
    match config.rope_scaling {
        RopeScaling::Linear { factor } => vec![kind("linear"), (key("factor"), MetaValue::Float(factor))],
        RopeScaling::Yarn { factor, original_max_position_embeddings: context, .. } => {
            vec![kind("yarn"), (key("factor"), MetaValue::Float(factor)), original(context)]
        }
        RopeScaling::LongRope { original_max_position_embeddings: context, attention_factor, .. } => {
            vec![original(context), (key("attn_factor"), MetaValue::Float(attention_factor))]
        }
        RopeScaling::Default | RopeScaling::Dynamic { .. } | RopeScaling::Llama3 { .. } => vec![],
    }
}

/// Divisors of the rotary frequencies, which a GGUF file has as tensors.
pub(super) fn divisors(config: &LlamaConfig) -> Vec<(&'static str, Vec<f32>)> {
    #[expect(clippy::cast_possible_truncation, reason = "as they are used")]
    let single = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
    match &config.rope_scaling {
        RopeScaling::LongRope { short_factor, long_factor, .. } => {
            vec![("rope_factors_long.weight", single(long_factor)), ("rope_factors_short.weight", single(short_factor))]
        }
        RopeScaling::Llama3 { .. } => {
            let plain = LlamaConfig { rope_scaling: RopeScaling::Default, ..config.clone() };
            let [plain, stretched] = [&plain, config].map(|config| frequencies(config).remove(0));
            let each = |frequencies: Option<Frequencies>| frequencies.map(|of| of.each).unwrap_or_default();
            vec![(
                "rope_freqs.weight",
                each(plain).iter().zip(each(stretched)).map(|(one, other)| one / other).collect(),
            )]
        }
        RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } | RopeScaling::Yarn { .. } => {
            vec![]
        }
    }
}

/// Those of each kind of layer.
fn frequencies(config: &LlamaConfig) -> Vec<Option<Frequencies>> {
    let kinds = config.layer_kinds();
    let ropes = Ropes::new(&kinds, Kind::Float, Device::Cpu);
    (0..kinds.kinds().len()).map(|kind| ropes.frequencies(kind).cloned()).collect()
}

/// Refuses a config that the file does not hold: what `read` says of it differs.
pub(super) fn check(config: &LlamaConfig, read: &LlamaConfig) -> Result<(), GgufExportError> {
    let mut ours = config.clone();
    ours.sliding_window = ours.sliding_window.filter(|_| WITH_WINDOW.contains(&architecture(config)));
    let [one, other] = [&ours, read].map(fields);
    let differs = |key: &String| !COMPARED_APART.contains(&key.as_str()) && !is_same(&one[key], &other[key]);
    if let Some(key) = one.keys().find(|key| differs(key)) {
        return Err(GgufExportError::Config { what: format!("{key} = {}", one[key]), read: other[key].to_string() });
    }
    let [context, found] = [config, read].map(LlamaConfig::written_context);
    if context != found {
        return Err(GgufExportError::Config { what: format!("context_length = {context}"), read: found.to_string() });
    }
    if let Some(end) = config.eos_token_ids.iter().find(|end| !read.eos_token_ids.contains(end)) {
        let (what, read) = (format!("eos_token_id = {end}"), format!("{:?}", read.eos_token_ids));
        return Err(GgufExportError::Config { what, read });
    }
    let [one, other] = [&ours, read].map(frequencies);
    let same_rotations =
        one.len() == other.len() && one.iter().zip(&other).all(|(one, other)| turn_alike(one.as_ref(), other.as_ref()));
    let rotations = || GgufExportError::Config {
        what: format!("rope_scaling = {}", serde_json::to_value(&config.rope_scaling).unwrap_or_default()),
        read: "other rotary frequencies".into(),
    };
    let grows = matches!(config.rope_scaling, RopeScaling::Dynamic { .. }); // beyond the context that is compared
    if same_rotations && !grows { Ok(()) } else { Err(rotations()) }
}

/// Those of the config and of its family's traits.
fn fields(config: &LlamaConfig) -> Map<String, Value> {
    let object = |value: serde_json::Result<Value>| match value {
        Ok(Value::Object(fields)) => fields,
        _ => unreachable!("a struct of numbers and texts is an object"),
    };
    let mut all = object(serde_json::to_value(config));
    all.remove("family");
    all.extend(object(serde_json::to_value(&config.family)));
    let kinds = config.layer_kinds();
    let layers = (0..config.num_hidden_layers).map(|layer| &kinds.kinds()[kinds.kind_of(layer)]);
    let layers = layers.map(|layer| json!({"window": layer.window, "rotates": layer.rotary.is_some()}));
    all.insert("layers".into(), layers.collect());
    all
}

/// Up to the rounding of divisors in float32.
fn turn_alike(one: Option<&Frequencies>, other: Option<&Frequencies>) -> bool {
    const ROUNDING: f32 = 1e-5;
    let (Some(one), Some(other)) = (one, other) else { return one.is_none() == other.is_none() };
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= ROUNDING * a.abs();
    #[expect(clippy::cast_possible_truncation, reason = "as they are used")]
    let same_magnitude = near((&(one.magnitude as f32), &(other.magnitude as f32)));
    same_magnitude && one.each.len() == other.each.len() && one.each.iter().zip(&other.each).all(near)
}

/// Whether two values are the same up to float32, in which a GGUF file has its numbers.
fn is_same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => {
            #[expect(clippy::cast_possible_truncation, reason = "as the file has it")]
            let [one, other] = [one, other].map(|number| number.as_f64().unwrap_or(f64::NAN) as f32);
            one == other
        }
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(key, value)| other.get(key).is_some_and(|other| is_same(value, other)))
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_same(one, other))
        }
        (one, other) => one == other,
    }
}
