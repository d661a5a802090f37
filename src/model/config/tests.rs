//! Which `config.json` is read, and what is refused.

mod backbones;

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
    let kind = |layer| kinds.kinds()[kinds.kind_of(layer)].clone();
    assert_eq!((kind(0).window, kind(0).rotary.is_some()), (None, true));
    assert_eq!((kind(3).window, kind(3).rotary.is_some()), (Some(5), false));
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
