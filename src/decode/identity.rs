//! One hash of everything that decides what a backbone writes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::data::tokenize;
use crate::files::{self, FileError, failed};
use crate::gguf;
use crate::model::weights::{self, WeightsError};

/// Files besides the weights and the tokenizer that affect the output.
const FILES: [&str; 4] = ["config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja"];

/// One hash of everything in a Hugging Face folder that affects a backbone's output: config, tokenizer, template and weights.
///
/// # Errors
/// A file that cannot be read.
pub fn identity(folder: &Path) -> Result<String, FileError> {
    let mut paths: Vec<PathBuf> =
        FILES.iter().map(|name| folder.join(name)).chain(tokenize::files_of(folder)).collect();
    paths.retain(|path| gguf::folder::exists(path));
    let weights = match weights::files_of(folder) {
        Err(WeightsError::File(error)) => return Err(error),
        found => found.unwrap_or_default(), // only those that are loaded; what is wrong with them is reported then
    };
    paths.extend(weights);
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for path in paths.into_iter().map(gguf::folder::behind) {
        files.insert(path.file_name().unwrap_or_default().to_string_lossy().into_owned(), path);
    }
    let mut all = Sha256::new();
    for (name, path) in files {
        let sha256 = files::sha256(&path).map_err(failed("read", &path))?;
        all.update(format!("{name} {sha256}\n"));
    }
    Ok(files::hex(&all.finalize()))
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
}
