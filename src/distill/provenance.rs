//! The inputs of a distillation that `--resume` must find unchanged, and the identity of a backbone.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::DistillError;
use crate::data::tokenize;
use crate::files;
use crate::formats::provenance::DistillProvenance;
use crate::model::weights::{self, WeightsError};

/// Keys with paths and names, which may change: hashes identify the files. `too_long` is missing in folders of 0.1.0, which refused
/// such prompts; `conversations` changes with it.
/// A server may come back with another context, and a folder goes on with the one that it was begun with.
pub(super) const NOT_COMPARED: [&str; 7] =
    ["endpoint", "server_context", "backbone", "backbone_revision", "prompts", "heads", "too_long"];
/// The device on which the backbone ran.
const DEVICE: &str = "device";
/// Missing in folders of earlier versions.
const ENGINE: &str = "engine";

impl DistillProvenance {
    /// Refuses to resume a run with other inputs.
    pub(super) fn check(&self, path: &Path, begun: &Map<String, Value>) -> Result<(), DistillError> {
        let own = self.as_map();
        let is_known = |key: &str| key != ENGINE || begun.contains_key(ENGINE);
        let keys = own.iter().filter(|(key, _)| !NOT_COMPARED.contains(&key.as_str()) && is_known(key));
        for (key, got) in keys {
            let expected = begun.get(key).unwrap_or(&Value::Null);
            if !are_alike(key, expected, got) {
                let (expected, got) = (expected.to_string(), got.to_string());
                return Err(DistillError::Changed { path: path.into(), key: key.clone(), expected, got });
            }
        }
        Ok(())
    }
}

/// Whether two values of a key are of the same distillation: any GPU may go on with the work of another.
pub(super) fn are_alike(key: &str, a: &Value, b: &Value) -> bool {
    let kind = |value: &Value| value.as_str().and_then(|name| name.split(':').next()).map(str::to_owned);
    a == b || key == DEVICE && kind(a).is_some() && kind(a) == kind(b)
}

/// Files besides the weights and the tokenizer that affect the output.
const FILES: [&str; 4] = ["config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// One hash of everything in a Hugging Face folder that affects a backbone's output: config, tokenizer, template and
/// weights.
///
/// # Errors
/// A file that cannot be read.
pub fn identity(folder: &Path) -> Result<String, DistillError> {
    let failed = |source| DistillError::Io { path: folder.into(), source };
    let mut names: Vec<String> = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect())
        .map_err(failed)?;
    let tokenizer = tokenize::files_of(folder);
    names.retain(|name| FILES.contains(&name.as_str()) || tokenizer.iter().any(|path| path.ends_with(name)));
    let weights = match weights::files_of(folder) {
        Err(WeightsError::File(error)) => return Err(error.into()),
        found => found.unwrap_or_default(), // only those that are loaded; what is wrong with them is reported then
    };
    names.extend(weights.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())));
    names.sort();
    let mut all = Sha256::new();
    for name in names {
        let path = folder.join(&name);
        let sha256 = files::sha256(&path).map_err(|source: io::Error| DistillError::Io { path, source })?;
        all.update(format!("{name} {sha256}\n"));
    }
    Ok(files::hex(&all.finalize()))
}

/// The revision of a folder in the Hub's cache, `…/snapshots/REVISION`.
pub fn revision(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    let is_snapshot = folder.parent()?.file_name()? == "snapshots";
    is_snapshot.then(|| folder.file_name().map(|name| name.to_string_lossy().into_owned()))?
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn the_identity_changes_with_what_decides_and_with_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            files::write_atomic(&dir.path().join(name), |out| out.write_all(text.as_bytes())).unwrap();
            identity(dir.path()).unwrap()
        };
        let first = write("config.json", "{}");
        assert_eq!(write("README.md", "words"), first);
        assert_eq!(write("training_args.bin", "words"), first);
        let with_torch_weights = write("pytorch_model.bin", "1");
        assert_ne!(with_torch_weights, first);
        let with_weights = write("model.safetensors", "1");
        assert_ne!(with_weights, with_torch_weights);
        assert_eq!(write("pytorch_model.bin", "2"), with_weights, "nobody reads it beside the other");
        assert_ne!(write("model.safetensors", "2"), with_weights);
    }

    #[test]
    fn devices_of_a_kind_are_alike_and_nothing_else_is() {
        let of_device = |a: &str, b: &str| are_alike(DEVICE, &a.into(), &b.into());
        assert!(of_device("cuda:0", "cuda:3") && of_device("cpu", "cpu"));
        assert!(!of_device("cpu", "cuda:0") && !are_alike(DEVICE, &"cpu".into(), &Value::Null));
        assert!(!are_alike("prompts_sha256", &"a:0".into(), &"a:1".into()));
    }

    #[test]
    fn a_revision_is_the_name_of_a_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("models--a--b/snapshots/abc123");
        fs::create_dir_all(&snapshot).unwrap();
        assert_eq!(revision(&snapshot), Some("abc123".into()));
        assert_eq!(revision(dir.path()), None);
    }
}
