//! How each key of generation_config.json is used. transformers and vLLM take their defaults of sampling from this file; here what is asked for counts
//! (flags, fields of a request). What would change the text of greedy decoding too is reported.
//!
//! `tests/compatibility.rs` compares the table with transformers' `GenerationConfig`.

use crate::key_use::{KeyUse, find};
use KeyUse::{NoEffect, Read, Reported};

const OFF: KeyUse = Reported(&["null", "false"]);
const NOTHING: KeyUse = Reported(&["null", "[]", "{}"]);
const ZERO: KeyUse = Reported(&["null", "0"]);
const ONE: KeyUse = Reported(&["null", "1", "1.0"]);
const SAMPLING: KeyUse = NoEffect("flags and requests say how tokens are drawn");
const LENGTH: KeyUse = NoEffect("flags and requests limit the length");
const TOKENS: KeyUse = NoEffect("the tokenizer's files and the template say which tokens begin and pad a text");
const SPEED: KeyUse = NoEffect("it selects how transformers computes the same text");
const OUTPUTS: KeyUse = NoEffect("it selects what transformers returns");
const SEQUENCE_TO_SEQUENCE: KeyUse = NoEffect("it is for models with an encoder");
const ASSISTED: KeyUse = NoEffect("it is of transformers' own speculative decoding");

/// Every key of transformers' `GenerationConfig`.
pub const KEYS: &[(&str, KeyUse)] = &[
    ("eos_token_id", Read),
    ("bos_token_id", TOKENS),
    ("pad_token_id", TOKENS),
    ("do_sample", SAMPLING),
    ("temperature", SAMPLING),
    ("top_k", SAMPLING),
    ("top_p", SAMPLING),
    ("min_p", SAMPLING),
    ("top_h", SAMPLING),
    ("typical_p", SAMPLING),
    ("epsilon_cutoff", SAMPLING),
    ("eta_cutoff", SAMPLING),
    ("num_return_sequences", SAMPLING),
    ("max_length", LENGTH),
    ("max_new_tokens", LENGTH),
    ("max_time", LENGTH),
    ("repetition_penalty", ONE),
    ("no_repeat_ngram_size", ZERO),
    ("min_length", ZERO),
    ("min_new_tokens", ZERO),
    ("stop_strings", NOTHING),
    ("bad_words_ids", NOTHING),
    ("suppress_tokens", NOTHING),
    ("begin_suppress_tokens", NOTHING),
    ("forced_bos_token_id", NOTHING),
    ("forced_eos_token_id", NOTHING),
    ("sequence_bias", NOTHING),
    ("exponential_decay_length_penalty", NOTHING),
    ("force_words_ids", NOTHING),
    ("constraints", NOTHING),
    ("guidance_scale", ONE),
    ("watermarking_config", NOTHING),
    ("penalty_alpha", Reported(&["null", "0", "0.0"])),
    ("dola_layers", NOTHING),
    ("token_healing", OFF),
    ("num_beams", ONE),
    ("num_beam_groups", ONE),
    ("diversity_penalty", NoEffect("it is of beams")),
    ("length_penalty", NoEffect("it is of beams")),
    ("early_stopping", NoEffect("it is of beams")),
    ("renormalize_logits", NoEffect("it orders the same tokens")),
    ("remove_invalid_values", NoEffect("logits that are no numbers are an error")),
    ("decoder_start_token_id", SEQUENCE_TO_SEQUENCE),
    ("encoder_repetition_penalty", SEQUENCE_TO_SEQUENCE),
    ("encoder_no_repeat_ngram_size", SEQUENCE_TO_SEQUENCE),
    ("use_cache", SPEED),
    ("cache_implementation", SPEED),
    ("cache_config", SPEED),
    ("max_cache_len", SPEED),
    ("low_memory", SPEED),
    ("compile_config", SPEED),
    ("disable_compile", SPEED),
    ("continuous_batching_config", SPEED),
    ("prefill_chunk_size", SPEED),
    ("is_assistant", ASSISTED),
    ("num_assistant_tokens", ASSISTED),
    ("num_assistant_tokens_schedule", ASSISTED),
    ("assistant_confidence_threshold", ASSISTED),
    ("assistant_early_exit", ASSISTED),
    ("assistant_ensemble_weight", ASSISTED),
    ("assistant_lookbehind", ASSISTED),
    ("target_lookbehind", ASSISTED),
    ("prompt_lookup_num_tokens", ASSISTED),
    ("max_matching_ngram_size", ASSISTED),
    ("speculation_type", ASSISTED),
    ("use_mtp", ASSISTED),
    ("output_attentions", OUTPUTS),
    ("output_hidden_states", OUTPUTS),
    ("output_logits", OUTPUTS),
    ("output_scores", OUTPUTS),
    ("return_dict_in_generate", OUTPUTS),
    ("transformers_version", NoEffect("a description")),
    ("_from_model_config", NoEffect("a description")),
];

/// How a key is used; `None` for an unknown key.
pub fn key_use(key: &str) -> Option<KeyUse> {
    find(KEYS, key)
}
