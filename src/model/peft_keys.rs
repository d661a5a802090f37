//! How each key of PEFT's adapter_config.json is used. An adapter is `y + alpha/rank · x·Aᵀ·Bᵀ` with the A and B of its file: what would be
//! computed otherwise is refused, and so is a key that no row names, unless its value asks for nothing.
//!
//! `tests/peft.rs` compares the table with the fields of PEFT's `LoraConfig`.

use serde_json::{Map, Value};

use crate::key_use::{KeyUse, asks_for_nothing, find};
use KeyUse::{NoEffect, Only, Read};

const NOTHING: KeyUse = Only(&["null"]);
const OFF: KeyUse = Only(&["false", "null"]);
const EMPTY: KeyUse = Only(&["null", "{}", "[]"]);
const DESCRIPTION: KeyUse = NoEffect("a description");
const WHICH_LAYERS: KeyUse = NoEffect("the names of the file's tensors say which layers have adapters");
const START: KeyUse = NoEffect("it describes a start that `init_lora_weights` chooses");
const TRAINING: KeyUse = NoEffect("it is of training only");

/// Every field of PEFT's `LoraConfig`.
pub const KEYS: &[(&str, KeyUse)] = &[
    ("peft_type", Only(&["\"LORA\""])),
    ("r", Read),
    ("lora_alpha", Read),
    ("use_rslora", Read),
    ("base_model_name_or_path", Read),
    ("target_modules", WHICH_LAYERS),
    ("exclude_modules", WHICH_LAYERS),
    ("layers_to_transform", WHICH_LAYERS),
    ("layers_pattern", WHICH_LAYERS),
    // Others (pissa, corda, olora, loftq, lora_ga) change the weights of the base when PEFT loads the adapter.
    ("init_lora_weights", Only(&["true", "false", "\"gaussian\"", "\"orthogonal\"", "\"eva\"", "\"mica\""])),
    ("eva_config", START),
    ("corda_config", START),
    ("loftq_config", START),
    ("lora_ga_config", START),
    ("lora_dropout", TRAINING),
    ("velora_config", TRAINING),
    ("inference_mode", TRAINING),
    ("bias", Only(&["\"none\"", "null"])),
    ("fan_in_fan_out", OFF),
    ("lora_bias", OFF),
    ("use_dora", OFF),
    ("use_qalora", OFF),
    ("qalora_group_size", NoEffect("it is of `use_qalora`")),
    ("use_bdlora", OFF),
    ("ensure_weight_tying", OFF),
    ("alora_invocation_tokens", NOTHING),
    ("arrow_config", NOTHING),
    ("kasa_config", NOTHING),
    ("monteclora_config", NOTHING),
    ("layer_replication", EMPTY),
    ("modules_to_save", EMPTY),
    ("target_parameters", EMPTY),
    ("trainable_token_indices", EMPTY),
    ("rank_pattern", EMPTY),
    ("alpha_pattern", EMPTY),
    ("megatron_config", NOTHING),
    ("megatron_core", NoEffect("it is of `megatron_config`")),
    ("runtime_config", NoEffect("it selects how PEFT computes the same numbers")),
    ("task_type", DESCRIPTION),
    ("auto_mapping", DESCRIPTION),
    ("peft_version", DESCRIPTION),
    ("revision", DESCRIPTION),
];

/// How a key is used; `None` for an unknown key.
pub fn key_use(key: &str) -> Option<KeyUse> {
    find(KEYS, key)
}

/// The first key that asks for more than a plain adapter, with what was expected of it.
pub(super) fn refused(written: &Map<String, Value>) -> Option<(&str, &Value, String)> {
    written.iter().find_map(|(key, value)| {
        let expected = match key_use(key) {
            Some(key_use) => key_use.expected(value)?.join(" or "),
            None if asks_for_nothing(value) => return None,
            None => "no such key, or null".to_owned(),
        };
        Some((key.as_str(), value, expected))
    })
}
