//! `config.json` beside heads: the one of a run's `final/`, and what is read of any that trainers and servers write.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::error::{self, FormatError};
use crate::files::write_json;

const CONFIG: &str = "config.json";

/// `config.json` of `final/`, as TGI and the original code read it.
#[derive(Debug, Clone, Serialize)]
pub struct HeadsFolderConfig<'a> {
    /// The backbone that these heads belong to.
    pub base_model_name_or_path: &'a str,
    /// K.
    pub medusa_num_heads: usize,
    /// ResBlocks a head.
    pub medusa_num_layers: usize,
    /// H.
    pub hidden_size: i64,
    /// V.
    pub vocab_size: i64,
    /// The dtype that the backbone computed in.
    pub backbone_dtype: String,
    /// `nf4` or `int8`, if the backbone was quantised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
}

impl HeadsFolderConfig<'_> {
    /// Writes it into a folder that gets its name later.
    ///
    /// # Errors
    /// The disk's words.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        write_json(&folder.join(CONFIG), self)
    }
}

/// Whatever config.json lies beside a file of heads. A key of another type is as good as absent.
#[derive(Debug)]
pub struct PublishedHeadsConfig {
    pub path: PathBuf,
    value: Value,
}

impl PublishedHeadsConfig {
    /// The one beside a file of heads, if there is one.
    ///
    /// # Errors
    /// [`FormatError`] names the file.
    pub fn load_beside(heads: &Path) -> Result<Option<Self>, FormatError> {
        let path = heads.with_file_name(CONFIG);
        if !path.is_file() {
            return Ok(None);
        }
        let value =
            error::read(&path, "config of the heads", "is no JSON; expected the configuration of the heads beside it")?;
        Ok(Some(Self { path, value }))
    }

    /// The backbone that it names.
    pub fn base(&self) -> Option<&str> {
        self.value["base_model_name_or_path"].as_str()
    }

    /// The quantisation of the backbone in training, if any.
    pub fn quantization(&self) -> Option<&str> {
        self.value["quantization"].as_str()
    }

    /// vLLM's factor of all logits.
    pub fn logit_scale(&self) -> Option<f64> {
        self.value["logit_scale"].as_f64()
    }

    /// A truth value; false where there is no such key.
    pub fn says(&self, key: &str) -> bool {
        self.value[key].as_bool().unwrap_or(false)
    }

    /// The first of `keys` that is there, at the top or under ModelOpt's `medusa`, and its number.
    pub fn count(&self, keys: &[&str]) -> Option<(String, u64)> {
        let at = |key: &&str| Some(((*key).to_owned(), self.value[*key].as_u64()?));
        let under = |key: &&str| Some((format!("medusa.{key}"), self.value["medusa"][*key].as_u64()?));
        keys.iter().find_map(at).or_else(|| keys.iter().find_map(under))
    }
}
