//! The name of a file of hidden states: a hash of all that decides them.

use std::fs;
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

use sha2::{Digest, Sha256};

use crate::data::cache::CacheError;
use crate::data::pack::Sequences;
use crate::files::hex;
use crate::model::llama::Llama;
use crate::model::weights;
use crate::torch::LIBTORCH_VERSION;

/// Part of every key: raise it when the same input would give another file.
const FORMAT: &str = "medusa hidden states 1";

/// Everything that decides a hidden state but the tokens.
pub(super) fn identity(folder: &Path, backbone: &Llama) -> io::Result<Vec<u8>> {
    let weights = weights::files_of(folder).map_err(io::Error::other)?;
    let on = if backbone.device().is_cuda() { "cuda" } else { "cpu" };
    let mut facts = format!("{FORMAT}\nlibtorch {LIBTORCH_VERSION} on {on}\n{:?}\n", backbone.kind());
    facts.extend(backbone.quantization().map(|quantization| format!("{quantization}\n")));
    for path in weights {
        let metadata = fs::metadata(&path)?;
        let modified = metadata.modified()?.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        facts += &format!("{:?} {} bytes, {modified}\n", path.file_name(), metadata.len());
    }
    Ok([facts.into_bytes(), fs::read(folder.join("config.json"))?].concat())
}

/// The name of the file for a backbone and these sequences.
pub(super) fn key(identity: &[u8], sequences: &Sequences, num_heads: usize) -> Result<String, CacheError> {
    let mut hasher = Sha256::new();
    hasher.update((identity.len() as u64).to_le_bytes());
    hasher.update(identity);
    hasher.update((num_heads as u64).to_le_bytes());
    for sequence in sequences.iter() {
        let sequence = sequence?;
        hasher.update((sequence.segment_lengths.len() as u64).to_le_bytes());
        sequence.segment_lengths.iter().for_each(|&length| hasher.update((length as u64).to_le_bytes()));
        let tokens = sequence.input_ids.iter().chain(&sequence.labels);
        hasher.update(tokens.flat_map(|token| token.to_le_bytes()).collect::<Vec<_>>());
    }
    Ok(hex(&hasher.finalize()))
}
