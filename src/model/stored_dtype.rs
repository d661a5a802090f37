//! The dtype of a backbone's weights.

use std::path::Path;

use serde_json::Value;

use crate::bounds::JSON_FILE_BYTES;
use crate::dtype::Dtype;
use crate::gguf;
use crate::model::block_spec::names;
use crate::model::weights::{WeightFiles, WeightsError};

/// `dtype` or `torch_dtype` of config.json, as transformers reads it; where it says none of [`Dtype`], the dtype of the stored embedding; float32
/// for float64. `None` if the weights are not there either, or have another dtype.
///
/// # Errors
/// [`WeightsError`] for damaged weights.
pub fn stored_dtype(folder: &Path) -> Result<Option<Dtype>, WeightsError> {
    from_config(folder).map_or_else(|| from_weights(folder), |dtype| Ok(Some(dtype)))
}

fn from_config(folder: &Path) -> Option<Dtype> {
    let config: Value =
        serde_json::from_slice(&gguf::folder::read_at_most(&folder.join("config.json"), JSON_FILE_BYTES).ok()?).ok()?;
    ["dtype", "torch_dtype"].iter().find_map(|key| config[key].as_str())?.parse().ok()
}

fn from_weights(folder: &Path) -> Result<Option<Dtype>, WeightsError> {
    match WeightFiles::open(folder) {
        Ok(files) => Ok(files.kind(names::EMBED_TOKENS).map(|kind| Dtype::of(kind).by_default())),
        Err(WeightsError::NoWeights { .. } | WeightsError::MissingShard { .. }) => Ok(None), // not downloaded yet
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::files::write_atomic;

    #[test]
    fn the_config_says_it_before_the_weights_do() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            write_atomic(&folder.path().join(name), |out| out.write_all(text.as_bytes())).unwrap();
        };
        let stored = || stored_dtype(folder.path()).unwrap();
        write("config.json", "{}");
        assert_eq!(stored(), None, "neither weights nor a word about them");
        write("model.safetensors", "no weights");
        assert!(stored_dtype(folder.path()).is_err(), "damaged weights say nothing");
        let store = |kind| {
            let embedding = tch::Tensor::zeros([16, 8], (kind, tch::Device::Cpu));
            let weights = [("model.embed_tokens.weight".to_owned(), &embedding)];
            crate::model::weights::save(&folder.path().join("model.safetensors"), &weights).unwrap();
        };
        store(tch::Kind::Double);
        assert_eq!(stored(), Some(Dtype::Float32), "only a recipe asks for float64");
        store(tch::Kind::BFloat16);
        assert_eq!(stored(), Some(Dtype::BFloat16));
        for (key, written, expected) in [
            ("torch_dtype", "float16", Dtype::Float16),
            ("dtype", "float32", Dtype::Float32),
            ("dtype", "auto", Dtype::BFloat16),
        ] {
            write("config.json", &format!("{{\"{key}\": \"{written}\"}}"));
            assert_eq!(stored(), Some(expected), "{written}");
        }
    }
}
