//! The dtype of a backbone's weights.

use std::path::Path;

use serde_json::Value;

use crate::dtype::Dtype;
use crate::model::block_spec::names;
use crate::model::config::LlamaConfig;
use crate::model::weights::WeightFiles;

/// `dtype` or `torch_dtype` of config.json, as transformers reads it; without them the dtype of the stored embedding; without weights
/// float32. Other floating-point numbers than those of [`Dtype`] count as float32.
pub fn stored_dtype(folder: &Path, config: &LlamaConfig) -> Dtype {
    of_config(folder).or_else(|| of_weights(folder, config)).unwrap_or(Dtype::Float32)
}

fn of_config(folder: &Path) -> Option<Dtype> {
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).ok()?).ok()?;
    let written = ["dtype", "torch_dtype"].iter().find_map(|key| config[key].as_str())?;
    Some(written.parse().unwrap_or(Dtype::Float32))
}

fn of_weights(folder: &Path, config: &LlamaConfig) -> Option<Dtype> {
    let files = WeightFiles::open(folder).ok()?;
    let embedding = files.mapped(names::EMBED_TOKENS, &[config.vocab_size, config.hidden_size]).ok()?;
    Some(Dtype::of(embedding.kind()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::files::write_atomic;

    #[test]
    fn the_config_says_it_before_the_weights_do() {
        let folder = tempfile::tempdir().unwrap();
        let config = r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu"}"#;
        let write = |text: &str| {
            write_atomic(&folder.path().join("config.json"), |out| out.write_all(text.as_bytes())).unwrap();
        };
        write(config);
        let parsed = LlamaConfig::load(folder.path()).unwrap();
        assert_eq!(stored_dtype(folder.path(), &parsed), Dtype::Float32, "neither weights nor a word about them");
        for (key, written, expected) in [
            ("torch_dtype", "float16", Dtype::Float16),
            ("dtype", "bfloat16", Dtype::BFloat16),
            ("dtype", "float64", Dtype::Float32),
        ] {
            write(&config.replacen('{', &format!("{{\"{key}\": \"{written}\", "), 1));
            assert_eq!(stored_dtype(folder.path(), &parsed), expected);
        }
        let embedding = tch::Tensor::zeros([16, 8], (tch::Kind::BFloat16, tch::Device::Cpu));
        let path = folder.path().join("model.safetensors");
        crate::model::weights::save(&path, &[("model.embed_tokens.weight".to_owned(), &embedding)]).unwrap();
        write(config);
        assert_eq!(stored_dtype(folder.path(), &parsed), Dtype::BFloat16);
    }
}
