//! Writes a backbone to a Hugging Face folder: new weights beside the other files of the folder it came from.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Map, Value};
use tch::Tensor;

use crate::bounds::JSON_FILE_BYTES;
use crate::dtype::Dtype;
use crate::files::{FileError, failed, is_file, sync_folder, write_json, write_synced};
use crate::gguf;
use crate::model::llama::Llama;
use crate::model::weights::{Planned, WeightsError, save_model};

/// Why a backbone cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// A file beside the weights.
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// As Hugging Face splits weights.
pub const SHARD_BYTES: usize = 5_000_000_000;
/// Name prefixes of the files that are copied with a backbone.
pub const COMPANIONS: [&str; 9] = [
    "tokenizer",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.",
    "merges.txt",
    "chat_template",
    "generation_config.json",
    "LICENSE",
    "NOTICE",
];

/// Additions to the folder: config keys and tensors.
#[derive(Default)]
pub struct Additions<'a> {
    /// Keys of its config.json.
    pub config: Map<String, Value>,
    /// Tensors among its weights.
    pub planned: Vec<Planned>,
    /// Each of them, by its place in `planned`, when its turn comes.
    pub tensor: Option<&'a dyn Fn(usize) -> io::Result<Tensor>>,
}

/// Writes `backbone` into a new folder in the dtype that it computes in, with the config of `from`, its tokenizer, chat template,
/// generation defaults and licence. Adapters must be merged before.
///
/// # Errors
/// [`FolderError`].
pub fn save_folder(folder: &Path, backbone: &Llama, from: &Path) -> Result<(), FolderError> {
    save_folder_with(folder, backbone, from, &Additions::default())
}

/// As [`save_folder`], with additions. Tensors are made one at a time: beside `backbone` only one is in memory.
///
/// # Errors
/// [`FolderError`].
pub fn save_folder_with(
    folder: &Path,
    backbone: &Llama,
    from: &Path,
    additions: &Additions<'_>,
) -> Result<(), FolderError> {
    fs::create_dir_all(folder).map_err(failed("make", folder))?;
    for path in gguf::folder::paths(from).map_err(failed("read", from))? {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if COMPANIONS.iter().any(|begin| name.starts_with(begin)) && is_file(&gguf::folder::behind(path.clone()))? {
            let bytes = gguf::folder::read(&path).map_err(failed("read", &path))?;
            let copy = folder.join(&name);
            write_synced(&copy, |out| out.write_all(&bytes)).map_err(failed("write", &copy))?;
        }
    }
    write_config(folder, backbone, from, &additions.config)?;
    write_weights(folder, backbone, additions)?;
    Ok(sync_folder(folder).map_err(failed("write", folder))?)
}

fn write_weights(folder: &Path, backbone: &Llama, additions: &Additions<'_>) -> Result<(), WeightsError> {
    let weights = backbone.weights();
    assert_eq!(
        weights.len(),
        backbone.config.tensors().len(),
        "a backbone that was loaded for saving has every weight as numbers"
    );
    let own =
        weights.iter().map(|(name, tensor)| Planned { kind: backbone.kind(), ..Planned::of(name.clone(), tensor) });
    let planned: Vec<Planned> = own.chain(additions.planned.iter().cloned()).collect();
    save_model(folder, &planned, SHARD_BYTES, &mut |at| match weights.get(at) {
        Some((_, tensor)) => Ok(tensor.detach()),
        None => additions.tensor.expect("planned tensors can be made")(at - weights.len()),
    })
}

/// The base's config.json with what the new weights changed.
fn write_config(folder: &Path, backbone: &Llama, from: &Path, more: &Map<String, Value>) -> Result<(), FileError> {
    let path = from.join("config.json");
    let text = gguf::folder::read_at_most(&path, JSON_FILE_BYTES).map_err(failed("read", &path))?;
    let mut config: Value = serde_json::from_slice(&text).map_err(|e| failed("read", &path)(e.into()))?;
    config["tie_word_embeddings"] = backbone.config.tie_word_embeddings.into();
    let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    config[key] = Dtype::of(backbone.kind()).to_string().into();
    // Where transformers loaded the base from: perhaps a folder of another machine.
    config.as_object_mut().map(|keys| keys.remove("_name_or_path"));
    more.iter().for_each(|(key, value)| config[key] = value.clone());
    let path = folder.join("config.json");
    write_json(&path, &config).map_err(failed("write", &path))
}
