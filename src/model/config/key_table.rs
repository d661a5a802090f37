//! How each key of config.json is used, by family. transformers silently keeps keys that a family does not use; here a key that
//! changes numbers in one of the families, or in transformers' code for all of them, is read, or refused where it would change something.
//!
//! `tests/config_keys.rs` compares the table with the configuration classes of transformers.

use std::path::Path;

use serde_json::{Map, Value};

use super::error::{ConfigError, bad};
use crate::key_use::KeyUse;

use KeyUse::{NoEffect, Only, Read};

/// The families, or none of them for those that no earlier row of the key names.
pub type Families = &'static [&'static str];

const OTHERS: Families = &[];
const GEMMA: Families = &["gemma2", "gemma3_text"];
const GEMMA_3: Families = &["gemma3_text"];
const GRANITE: Families = &["granite"];
const PHI_3: Families = &["phi3"];
const QWEN: Families = &["qwen2", "qwen3"];
const SMOLLM_3: Families = &["smollm3"];
const WITH_LAYER_TYPES: Families = &["mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3"];
const WITH_USE_OF_WINDOW: Families = &["qwen2", "qwen3", "smollm3"];
const WITHOUT_WINDOW: Families = &["llama", "granite", "olmo2"];
const WITHOUT_ATTENTION_BIAS: Families = &["mistral", "qwen2", "phi3"];
const WITH_MLP_BIAS: Families = &["llama", "granite", "smollm3"];

const NOTHING: KeyUse = Only(&["null"]);
const OFF: KeyUse = Only(&["null", "false"]);
const BIASES: KeyUse =
    NoEffect("the family decides it; a bias that is missing or left over among the tensors is an error");
const DESCRIPTION: KeyUse = NoEffect("a description");
const OUTPUTS: KeyUse = NoEffect("it selects what transformers' forward pass returns");
const CLASSIFIER: KeyUse = NoEffect("labels of a classifier; the tensors of one are refused");
const DROPOUT: KeyUse = NoEffect("dropout is not applied to a backbone");
const TOKENIZER: KeyUse = NoEffect("the tokenizer's files say which tokens begin and pad a text");
const OF_HEADS: KeyUse = NoEffect("it describes heads in the same folder");
const SPEED: KeyUse = NoEffect("it selects how transformers computes the same numbers");
const CLASS: KeyUse = NoEffect("transformers has it in the class and does not read it from config.json");

/// Every key that transformers' classes of the families have or look up, and some of published repositories.
const KEYS: &[(&str, Families, KeyUse)] = &[
    // Sizes.
    ("model_type", OTHERS, Read),
    ("vocab_size", OTHERS, Read),
    ("hidden_size", OTHERS, Read),
    ("intermediate_size", OTHERS, Read),
    ("num_hidden_layers", OTHERS, Read),
    ("num_attention_heads", OTHERS, Read),
    ("num_key_value_heads", OTHERS, Read),
    ("head_dim", OTHERS, Read),
    ("max_position_embeddings", OTHERS, Read),
    ("rms_norm_eps", OTHERS, Read),
    // Rotary embeddings.
    ("rope_parameters", OTHERS, Read),
    ("rope_scaling", OTHERS, Read),
    ("rope_theta", OTHERS, Read),
    ("original_max_position_embeddings", OTHERS, Read),
    ("partial_rotary_factor", PHI_3, Read),
    ("partial_rotary_factor", OTHERS, Only(&["null", "1", "1.0"])),
    ("rope_local_base_freq", GEMMA_3, Read),
    ("rope_local_base_freq", OTHERS, NOTHING),
    ("no_rope_layers", SMOLLM_3, Read),
    ("no_rope_layers", OTHERS, NOTHING),
    ("no_rope_layer_interval", SMOLLM_3, Read),
    ("no_rope_layer_interval", OTHERS, NOTHING),
    ("rope_interleaved", OTHERS, OFF),
    ("use_mrope", OTHERS, OFF),
    // Which tokens are attended to.
    ("layer_types", WITH_LAYER_TYPES, Read),
    ("layer_types", PHI_3, NOTHING),
    ("layer_types", OTHERS, Read), // full_attention everywhere
    ("sliding_window", WITHOUT_WINDOW, NOTHING),
    ("sliding_window", OTHERS, Read),
    ("use_sliding_window", WITH_USE_OF_WINDOW, Read),
    ("use_sliding_window", WITHOUT_WINDOW, OFF),
    ("use_sliding_window", OTHERS, Only(&["null", "true"])),
    ("max_window_layers", QWEN, Read),
    ("max_window_layers", OTHERS, NoEffect("it is used only with use_sliding_window of Qwen")),
    ("sliding_window_pattern", GEMMA_3, Read),
    ("sliding_window_pattern", &["gemma2"], Only(&["null", "2"])),
    ("sliding_window_pattern", OTHERS, NOTHING),
    ("_sliding_window_pattern", OTHERS, NoEffect("transformers writes it and does not read it")),
    ("attention_chunk_size", OTHERS, NOTHING),
    ("is_causal", OTHERS, Only(&["null", "true"])),
    ("use_bidirectional_attention", OTHERS, OFF),
    ("kv_sharing_modes", OTHERS, NOTHING),
    // What is computed.
    ("tie_word_embeddings", OTHERS, Read),
    ("hidden_act", OTHERS, Read),
    ("hidden_activation", OTHERS, Read),
    ("attention_bias", WITHOUT_ATTENTION_BIAS, BIASES),
    ("attention_bias", OTHERS, Read),
    ("mlp_bias", WITH_MLP_BIAS, Read),
    ("mlp_bias", OTHERS, BIASES),
    ("lm_head_bias", OTHERS, BIASES),
    ("query_pre_attn_scalar", GEMMA, Read),
    ("query_pre_attn_scalar", OTHERS, NOTHING),
    ("attn_logit_softcapping", GEMMA, Read),
    ("attn_logit_softcapping", OTHERS, NOTHING),
    ("final_logit_softcapping", GEMMA, Read),
    ("final_logit_softcapping", OTHERS, NOTHING),
    ("embedding_multiplier", GRANITE, Read),
    ("embedding_multiplier", OTHERS, Only(&["null", "1", "1.0"])),
    ("attention_multiplier", GRANITE, Read),
    ("attention_multiplier", OTHERS, NOTHING),
    ("residual_multiplier", GRANITE, Read),
    ("residual_multiplier", OTHERS, Only(&["null", "1", "1.0"])),
    ("logits_scaling", GRANITE, Read),
    ("logits_scaling", OTHERS, Only(&["null", "1", "1.0"])),
    ("per_layer_config", OTHERS, Only(&["null", "{}"])),
    ("is_encoder_decoder", OTHERS, OFF),
    ("text_config", OTHERS, NOTHING),
    ("vision_config", OTHERS, NOTHING),
    ("number_of_conv_states", OTHERS, NoEffect("no family has convolutions")),
    ("chunk_size_feed_forward", OTHERS, NoEffect("no family's MLP is computed in chunks")),
    ("pretraining_tp", OTHERS, NoEffect("transformers 5 does not read it")),
    ("interpolate_factor", PHI_3, Only(&["null", "1"])),
    ("full_attn_mod", PHI_3, Only(&["null", "1"])),
    // The weights.
    ("dtype", OTHERS, Read),
    ("torch_dtype", OTHERS, Read),
    ("quantization_config", OTHERS, Read), // refused with what to do
    ("compression_config", OTHERS, Read),
    ("transformers_weights", OTHERS, NOTHING),
    ("extra_files", OTHERS, Only(&["null", "[]"])),
    ("initializer_range", OTHERS, NoEffect("every weight is read")),
    // Texts.
    ("eos_token_id", OTHERS, Read),
    ("bos_token_id", OTHERS, TOKENIZER),
    ("pad_token_id", OTHERS, TOKENIZER),
    ("image_token_id", OTHERS, NoEffect("no family here sees images")),
    ("mm_tokens_per_image", OTHERS, NoEffect("no family here sees images")),
    ("token_type_ids", OTHERS, NoEffect("an argument of a forward pass")),
    // Training.
    ("attention_dropout", OTHERS, DROPOUT),
    ("embd_pdrop", OTHERS, DROPOUT),
    ("resid_pdrop", OTHERS, DROPOUT),
    // What transformers returns, and how it computes.
    ("output_hidden_states", OTHERS, OUTPUTS),
    ("output_attentions", OTHERS, OUTPUTS),
    ("return_dict", OTHERS, OUTPUTS),
    ("use_cache", OTHERS, SPEED),
    ("cache_implementation", OTHERS, SPEED),
    ("attn_implementation", OTHERS, SPEED),
    ("experts_implementation", OTHERS, SPEED),
    ("distributed_config", OTHERS, SPEED),
    ("fusion_config", OTHERS, SPEED),
    ("allow_is_causal_skip", OTHERS, SPEED),
    ("default_theta", OTHERS, CLASS),
    ("architectures", OTHERS, DESCRIPTION),
    ("is_llama_config", OTHERS, DESCRIPTION),
    ("_name_or_path", OTHERS, DESCRIPTION),
    ("auto_map", OTHERS, NoEffect("code of a repository is never run")),
    ("medusa", OTHERS, OF_HEADS),
    ("medusa_num_heads", OTHERS, OF_HEADS),
    ("medusa_num_layers", OTHERS, OF_HEADS),
    ("name_or_path", OTHERS, DESCRIPTION),
    ("transformers_version", OTHERS, DESCRIPTION),
    ("id2label", OTHERS, CLASSIFIER),
    ("label2id", OTHERS, CLASSIFIER),
    ("num_labels", OTHERS, CLASSIFIER),
    ("problem_type", OTHERS, CLASSIFIER),
];

/// Every known key, once for each of its rows.
#[cfg(test)]
pub(super) fn keys() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|(key, ..)| *key)
}

/// The rows of the table: key, families (none: all others), use.
pub fn rows() -> &'static [(&'static str, Families, KeyUse)] {
    KEYS
}

/// How a family uses a key; `None` for an unknown key.
pub fn key_use(model_type: &str, key: &str) -> Option<KeyUse> {
    row(model_type, key).map(|(_, key_use)| key_use)
}

fn row(model_type: &str, key: &str) -> Option<(&'static str, KeyUse)> {
    let applies = |families: Families| families.is_empty() || families.contains(&model_type);
    KEYS.iter().find(|(name, families, _)| *name == key && applies(families)).map(|&(name, _, key_use)| (name, key_use))
}

/// Refuses values that would change something which the family does not compute here. Unknown keys are left to programs that know them.
pub(super) fn check(path: &Path, model_type: &str, written: &Map<String, Value>) -> Result<(), ConfigError> {
    for (key, value) in written {
        let Some((key, key_use)) = row(model_type, key) else { continue };
        if let Some(values) = key_use.expected(value) {
            let expected = format!("{} beside `model_type` {model_type}, or no such key", values.join(" or "));
            return Err(bad(path, key, expected, value.to_string()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_the_other_families_is_the_last_of_its_key() {
        for (at, (key, families, _)) in KEYS.iter().enumerate() {
            let later = KEYS[at + 1..].iter().any(|(other, ..)| other == key);
            assert!(!(families.is_empty() && later), "{key}: the rows after {families:?} are never reached");
        }
    }
}
