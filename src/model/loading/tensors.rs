//! Which tensors of a folder belong to a backbone. Whatever else lies in its files is an error: the model that was trained is not the one that
//! `config.json` describes. Only headers are read, except for an `lm_head.weight` beside a tied embedding.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::model::block_spec::names;
use crate::model::config::{LlamaConfig, QUANTIZED_NOT_READ};
use crate::model::weights::{WeightFiles, WeightsError};

/// Why the tensors of a folder are not those of its config.
#[derive(Debug, thiserror::Error)]
pub enum TensorsError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A config.json that leaves out layers of the weights.
    #[error("{}: num_hidden_layers: expected {expected} as in the weights, got {got}; restore the config.json that belongs to these weights", config.display())]
    Layers { config: PathBuf, expected: usize, got: usize },
    /// Weights of a format that is not read.
    #[error("{}: tensor {name:?}: the weights are quantised ({format}), {QUANTIZED_NOT_READ}", path.display())]
    Quantized { path: PathBuf, name: String, format: &'static str },
    /// Tensors without a place in the backbone.
    #[error("{}: tensor {name:?}{} no place in the backbone of config.json, which would be computed without {}; {advice}", path.display(), others(*more), if *more == 0 { "it" } else { "them" })]
    Unread { path: PathBuf, name: String, more: usize, advice: &'static str },
    /// The files and the config disagree on whether the LM head is tied.
    #[error("{}: `tie_word_embeddings` is {tied}, {found}, in {}; {advice}", config.display(), path.display())]
    Tied { config: PathBuf, path: PathBuf, tied: bool, found: &'static str, advice: &'static str },
}

fn others(more: usize) -> String {
    match more {
        0 => " has".to_owned(),
        1 => " and another one have".to_owned(),
        more => format!(" and {more} others have"),
    }
}

/// Buffers that old versions of transformers saved and that are computed instead, by the end of their names.
const BUFFERS: [&str; 4] = ["rotary_emb.inv_freq", ".self_attn.mask", ".masked_bias", ".position_ids"];
/// Heads that `medusa export` and other programs put among a backbone's tensors; they are loaded as heads.
const HEADS: [&str; 2] = ["medusa_head.", "medusa_heads."];
/// Quantised formats, by the ends of names that only they have.
const QUANTIZED: [(&str, &[&str]); 4] = [
    ("GPTQ or AWQ", &[".qweight", ".qzeros", ".g_idx"]),
    ("bitsandbytes", &[".weight.absmax", ".weight.quant_map", ".weight_format", ".SCB"]),
    ("compressed-tensors", &[".weight_packed", ".weight_shape", ".weight_zero_point"]),
    ("FP8", &[".weight_scale", ".weight_scale_inv", ".input_scale"]),
];

/// Checks the names of all tensors in a folder's files.
pub(super) fn check(folder: &Path, config: &LlamaConfig, files: &WeightFiles) -> Result<(), TensorsError> {
    let expected: HashSet<String> = config.tensors().into_iter().map(|(name, _)| name).collect();
    let is_known = |name: &str, file: &Path| {
        (expected.contains(name) && files.file_of(name) == Some(file))
            || (config.tie_word_embeddings && name == names::LM_HEAD_WEIGHT)
            || BUFFERS.iter().any(|end| name.ends_with(end))
            || HEADS.iter().any(|begin| name.starts_with(begin))
    };
    let unread: Vec<(&str, &Path)> = files.in_files().filter(|(name, file)| !is_known(name, file)).collect();
    for (format, ends) in QUANTIZED {
        if let Some((name, path)) = unread.iter().find(|(name, _)| ends.iter().any(|end| name.ends_with(end))) {
            return Err(TensorsError::Quantized { path: (*path).into(), name: (*name).into(), format });
        }
    }
    check_layers(folder, config, files)?;
    if let [(name, path), others @ ..] = &unread[..] {
        let advice = match name.ends_with(".bias") {
            true => "`attention_bias` and `mlp_bias` of config.json say which linear layers have biases",
            false => "do config.json and the weights belong together?",
        };
        return Err(TensorsError::Unread { path: (*path).into(), name: (*name).into(), more: others.len(), advice });
    }
    check_lm_head(folder, config, files)
}

/// With fewer layers than the weights have, the backbone would still decode, but different texts.
fn check_layers(folder: &Path, config: &LlamaConfig, files: &WeightFiles) -> Result<(), TensorsError> {
    let layer = |name: &str| name.strip_prefix("model.layers.")?.split('.').next()?.parse::<usize>().ok();
    let expected = files.names().into_iter().filter_map(layer).max().map_or(0, |last| last + 1);
    let got = config.num_hidden_layers;
    if expected <= got {
        return Ok(());
    }
    Err(TensorsError::Layers { config: folder.join("config.json"), expected, got })
}

/// transformers ties or randomly initialises whichever of the embedding and the LM head is missing; here it is an error.
fn check_lm_head(folder: &Path, config: &LlamaConfig, files: &WeightFiles) -> Result<(), TensorsError> {
    let [embedding, head] = [names::EMBED_TOKENS, names::LM_HEAD_WEIGHT].map(|name| files.file_of(name));
    let (path, found, advice) = match (config.tie_word_embeddings, embedding, head) {
        (false, Some(path), None) => (
            path,
            "and there is no lm_head.weight beside model.embed_tokens.weight",
            "set it to true if the model is tied",
        ),
        (true, None, Some(path)) => (
            path,
            "and there is lm_head.weight without model.embed_tokens.weight",
            "give the tensor the name of the embedding",
        ),
        _ => return Ok(()),
    };
    let (config, tied) = (folder.join("config.json"), config.tie_word_embeddings);
    Err(TensorsError::Tied { config, path: path.into(), tied, found, advice })
}

/// Refuses an `lm_head.weight` that is not the embedding to which config.json ties it: transformers 4 ignores it, and 5 uses it.
pub(super) fn check_tied(folder: &Path, config: &LlamaConfig, files: &WeightFiles) -> Result<(), TensorsError> {
    let (one, other) = (names::EMBED_TOKENS, names::LM_HEAD_WEIGHT);
    let Some(path) = files.file_of(other).filter(|_| config.tie_word_embeddings && files.contains(one)) else {
        return Ok(());
    };
    let shape = [config.vocab_size, config.hidden_size];
    let same = files.same_memory(one, other) || {
        let embedding_vh = files.mapped(one, &shape)?;
        embedding_vh.equal(&files.mapped(other, &shape)?.to_kind(embedding_vh.kind()))
    };
    if same {
        return Ok(());
    }
    let found = "and lm_head.weight differs from model.embed_tokens.weight";
    let advice = "set it to false to use lm_head.weight, as transformers 5 does, or remove that tensor";
    Err(TensorsError::Tied { config: folder.join("config.json"), path: path.into(), tied: true, found, advice })
}
