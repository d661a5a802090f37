//! How each key of tokenizer_config.json is used. The names of tokens (`bos_token`, and others that end in `_token`) are read.
//!
//! `tests/compatibility.rs` compares the table with the keys that transformers' tokenizers look up.

use std::path::Path;

use super::config::{CONFIG, read_json};
use super::error::TokenizeError;
use crate::key_use::{KeyUse, find, reported};
use KeyUse::{NoEffect, Read, Reported};

const TOKEN: &str = "_token";
const DESCRIPTION: KeyUse = NoEffect("a description");
const DECODING: KeyUse = NoEffect("texts are decoded as tokenizer.json says");
const PADDING: KeyUse = NoEffect("rows are padded and cut by their own settings");
const LOADING: KeyUse = NoEffect("it selects how transformers loads the tokenizer");
const PARTS: KeyUse = NoEffect("tokenizer.json has it");
const ANSWERS: KeyUse = NoEffect("it is for reading answers of the model");

/// Every key that transformers' tokenizers look up, and those of published tokenizers.
pub const KEYS: &[(&str, KeyUse)] = &[
    ("tokenizer_class", Read),
    ("added_tokens_decoder", Read),
    ("extra_special_tokens", Read),
    ("additional_special_tokens", Read),
    ("model_specific_special_tokens", Reported(&["null", "{}"])),
    ("chat_template", Read),
    ("add_bos_token", Read),
    ("add_eos_token", Read),
    ("add_prefix_space", Read),
    ("legacy", Read),
    ("split_special_tokens", Read),
    ("sp_model_kwargs", NoEffect("SentencePiece's sampling, which is off")),
    ("use_default_system_prompt", NoEffect("templates that transformers no longer has")),
    ("clean_up_tokenization_spaces", DECODING),
    ("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", DECODING),
    ("spaces_between_special_tokens", DECODING),
    ("errors", DECODING),
    ("model_max_length", NoEffect("the backbone's config says how long a text may be")),
    ("max_len", NoEffect("the backbone's config says how long a text may be")),
    ("model_input_names", NoEffect("the backbone reads token ids")),
    ("return_token_type_ids", NoEffect("the backbone reads token ids")),
    ("padding_side", PADDING),
    ("truncation_side", PADDING),
    ("max_length", PADDING),
    ("stride", PADDING),
    ("truncation_strategy", PADDING),
    ("pad_to_multiple_of", PADDING),
    ("pad_token_type_id", PADDING),
    ("_json_padding", PADDING),
    ("_json_truncation", PADDING),
    ("tokenizer_padding", PADDING),
    ("tokenizer_truncation", PADDING),
    ("vocab", PARTS),
    ("merges", PARTS),
    ("unk_id", PARTS),
    ("post_processor", PARTS),
    ("trim_offsets", PARTS),
    ("do_lower_case", PARTS),
    ("_spm_precompiled_charsmap", PARTS),
    ("vocab_file", LOADING),
    ("tokenizer_file", LOADING),
    ("special_tokens_map_file", LOADING),
    ("tokenizer", LOADING),
    ("tokenizer_object", LOADING),
    ("slow_tokenizer_class", LOADING),
    ("from_slow", LOADING),
    ("backend", LOADING),
    ("gguf_file", LOADING),
    ("device_map", LOADING),
    ("files_loaded", LOADING),
    ("init_inputs", LOADING),
    ("is_local", LOADING),
    ("local_files_only", LOADING),
    ("token", LOADING),
    ("repo_id", LOADING),
    ("commit_message", LOADING),
    ("save_jinja_files", LOADING),
    ("verbose", LOADING),
    ("fix_mistral_regex", NoEffect("the regular expression of tokenizer.json counts")),
    ("auto_map", NoEffect("code of a repository is never run")),
    ("processor_class", DESCRIPTION),
    ("name_or_path", DESCRIPTION),
    ("response_schema", ANSWERS),
    ("response_template", ANSWERS),
    ("chat_control_tokens", ANSWERS),
];

/// How a key is used; `None` for an unknown key.
pub fn key_use(key: &str) -> Option<KeyUse> {
    find(KEYS, key).or_else(|| key.ends_with(TOKEN).then_some(Read))
}

/// The keys of a folder's tokenizer_config.json that are unknown here, with their values.
///
/// # Errors
/// A file that cannot be read.
pub fn reported_tokenizer_keys(folder: &Path) -> Result<Vec<String>, TokenizeError> {
    let config = read_json(&folder.join(CONFIG))?.unwrap_or_default();
    Ok(config.as_object().map(|written| reported(written, key_use)).unwrap_or_default())
}
