//! What can be wrong with a `config.json`.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use crate::files::FileError;

/// What is wrong with quantised weights, as the end of an error's text.
pub(in crate::model) const QUANTIZED_NOT_READ: &str = "which is not read; take the same model in bfloat16, \
    float16 or float32, and quantise it while loading with `quantization` of [backbone] (nf4 or int8) where memory is short";

/// Why a config cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(transparent)]
    File(#[from] FileError),
    /// No such file, or it cannot be read.
    #[error("cannot read {}: {source}; a backbone is a folder in Hugging Face layout with config.json", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// Not JSON, or a key of another type.
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A value that this program cannot work with.
    #[error("{}: `{key}`: expected {expected}, got {got}", path.display())]
    Value { path: PathBuf, key: &'static str, expected: String, got: String },
    /// Two keys that contradict each other.
    #[error("{}: `{}` and `{}` contradict each other: {reason}; keep the one that is right", path.display(), keys[0], keys[1])]
    TwoSources { path: PathBuf, keys: [&'static str; 2], reason: String },
    /// Weights in a format that is not read.
    #[error("{}: `{key}`: the weights are quantised ({method}), {QUANTIZED_NOT_READ}", path.display())]
    Quantized { path: PathBuf, key: &'static str, method: String },
    /// PEFT's adapter in a backbone's folder.
    #[error(
        "{}: transformers applies an adapter that lies beside a backbone's weights, and this program does not; merge it into the weights \
         (PEFT's merge_and_unload), or move it out of the folder", path.display()
    )]
    Adapter { path: PathBuf },
    /// A known architecture that needs layers which this program does not have.
    #[error("{}: `model_type`: {got} is not supported: it has {missing}; supported: {supported}", path.display())]
    Family { path: PathBuf, got: String, missing: &'static str, supported: String },
}

pub(super) fn bad(path: &Path, key: &'static str, expected: impl ToString, got: impl ToString) -> ConfigError {
    ConfigError::Value { path: path.into(), key, expected: expected.to_string(), got: got.to_string() }
}

pub(super) fn two_sources(path: &Path, keys: [&'static str; 2], reason: impl ToString) -> ConfigError {
    ConfigError::TwoSources { path: path.into(), keys, reason: reason.to_string() }
}

pub(super) fn above_zero(path: &Path, key: &'static str, value: f64) -> Result<f64, ConfigError> {
    within(path, key, value, 1e-30..=1e30)
}

/// Refuses a number with which logits are not finite, or the same for every token.
pub(super) fn within(
    path: &Path,
    key: &'static str,
    value: f64,
    range: RangeInclusive<f64>,
) -> Result<f64, ConfigError> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(bad(path, key, format!("a number from {} to {}", range.start(), range.end()), value))
}
