//! The inputs of a distillation that `--resume` must find unchanged.

use std::path::Path;

use serde_json::{Map, Value};

use super::DistillError;
use crate::formats::provenance::DistillProvenance;

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

/// The revision of a folder in the Hub's cache, `…/snapshots/REVISION`.
pub fn revision(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    let is_snapshot = folder.parent()?.file_name()? == "snapshots";
    is_snapshot.then(|| folder.file_name().map(|name| name.to_string_lossy().into_owned()))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_a_kind_are_alike_and_nothing_else_is() {
        let same_device = |a: &str, b: &str| are_alike(DEVICE, &a.into(), &b.into());
        assert!(same_device("cuda:0", "cuda:3") && same_device("cpu", "cpu"));
        assert!(!same_device("cpu", "cuda:0") && !are_alike(DEVICE, &"cpu".into(), &Value::Null));
        assert!(!are_alike("prompts_sha256", &"a:0".into(), &"a:1".into()));
    }

    #[test]
    fn a_revision_is_the_name_of_a_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = dir.path().join("models--a--b/snapshots/abc123");
        std::fs::create_dir_all(&snapshot).unwrap();
        assert_eq!(revision(&snapshot), Some("abc123".into()));
        assert_eq!(revision(dir.path()), None);
    }
}
