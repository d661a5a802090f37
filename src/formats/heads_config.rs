//! `config.json` of heads: the one in a run's `final/`, and the keys read from those of other trainers and servers.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::best::BestEvaluation;
use super::error::{self, FormatError};
use super::run_folder::BEST;
use crate::dtype::Dtype;
use crate::files::{is_file, write_json};

const CONFIG: &str = "config.json";

/// A template file that the heads were trained with, beside them.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// As [`CHAT_TEMPLATE`], in an exported folder that also holds the backbone, whose own template has that name.
pub const HEADS_CHAT_TEMPLATE: &str = "heads_chat_template.jinja";

/// The key of an exported config.json that holds [`PublishedHeadsConfig::recorded`]. Servers read some of these names at the top level:
/// TensorRT-LLM takes a config with `architecture` and `dtype` for a checkpoint of its own.
pub const TRAINING: &str = "medusa_train";

/// The key of an exported config.json that says that the lm_head of a vLLM file is the heads' own, not the backbone's.
pub const SHARED_W2: &str = "shared_w2";

/// The key with the fingerprint of the backbone that the heads were trained on.
pub const BACKBONE_FINGERPRINT: &str = "backbone_fingerprint";

/// The key with the taps of an EAGLE-3 drafter, as vLLM reads it: a layer's number is that of its input.
const TAPS: &str = "eagle_aux_hidden_state_layer_ids";

/// The keys of [`HeadsFolderConfig`] that describe the training, not the tensors.
const RECORDED: [&str; 9] = [
    "architecture",
    "backbone_model_type",
    "backbone_dtype",
    BACKBONE_FINGERPRINT,
    "quantization",
    "chat_template",
    "rope_context",
    TAPS,
    "best",
];

/// `config.json` of `final/`, as TGI and the original code read it.
#[derive(Debug, Clone, Serialize)]
pub struct HeadsFolderConfig<'a> {
    pub base_model_name_or_path: &'a str,
    pub medusa_num_heads: usize,
    /// ResBlocks per head.
    pub medusa_num_layers: usize,
    pub hidden_size: i64,
    pub vocab_size: i64,
    /// What the heads are, as `heads.architecture` of a recipe names it.
    pub architecture: &'static str,
    /// `model_type` of the backbone's config.json. A `model_type` here would be the heads' own to programs that read both.
    pub backbone_model_type: &'a str,
    /// Compute dtype of the backbone in training.
    pub backbone_dtype: String,
    /// Of the frozen weights, by which heads notice another backbone of the same shape. Absent if the whole backbone was trained: then it is
    /// beside the heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backbone_fingerprint: Option<String>,
    /// `nf4` or `int8`, if the backbone was quantized.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// `data.chat_template` of the recipe; [`CHAT_TEMPLATE`] for a file, which is copied there. Absent without a template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// The context in training, in tokens, if the backbone's rotary embeddings depend on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_context: Option<i64>,
    /// The layers of the backbone whose inputs an EAGLE-3 drafter reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    /// Only in `best/`: the evaluation that it was kept for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<BestEvaluation>,
}

impl HeadsFolderConfig<'_> {
    /// Writes config.json into a folder that is renamed later.
    ///
    /// # Errors
    /// An I/O error.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        write_json(&folder.join(CONFIG), self)
    }
}

/// The config.json in a heads file's folder, from any program. A key with another type counts as absent.
#[derive(Debug)]
pub struct PublishedHeadsConfig {
    pub path: PathBuf,
    value: Value,
}

impl PublishedHeadsConfig {
    /// Reads the config.json in the folder of a heads file, if there is one.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load_beside(heads: &Path) -> Result<Option<Self>, FormatError> {
        let path = heads.with_file_name(CONFIG);
        if !is_file(&path)? {
            return Ok(None);
        }
        let value =
            error::read(&path, "config of the heads", "is no JSON; expected the configuration of the heads beside it")?;
        Ok(Some(Self { path, value }))
    }

    /// The backbone's name.
    pub fn base(&self) -> Option<&str> {
        self.value["base_model_name_or_path"].as_str()
    }

    /// What the heads are, as `heads.architecture` of a recipe names it.
    pub fn architecture(&self) -> Option<&str> {
        self.at("architecture")?.as_str()
    }

    /// Fingerprint of the backbone in training.
    pub fn backbone_fingerprint(&self) -> Option<&str> {
        self.at(BACKBONE_FINGERPRINT)?.as_str()
    }

    /// Compute dtype of the backbone in training.
    pub fn backbone_dtype(&self) -> Option<Dtype> {
        Dtype::deserialize(self.at("backbone_dtype")?).ok()
    }

    /// Quantization of the backbone in training, if any.
    pub fn quantization(&self) -> Option<&str> {
        self.at("quantization")?.as_str()
    }

    /// The chat template in training: a name of the recipe's, or [`CHAT_TEMPLATE`].
    pub fn chat_template(&self) -> Option<&str> {
        self.at("chat_template")?.as_str()
    }

    /// The context in training, if the backbone's rotary embeddings depend on it.
    pub fn rope_context(&self) -> Option<i64> {
        self.at("rope_context")?.as_i64()
    }

    /// The layers whose inputs an EAGLE-3 drafter reads.
    pub fn tap_layers(&self) -> Option<Vec<usize>> {
        Vec::deserialize(self.at(TAPS)?).ok()
    }

    /// How many guesses of a chain a drafter was trained for.
    pub fn levels(&self) -> Option<usize> {
        usize::try_from(self.at("medusa_num_heads")?.as_u64()?).ok()
    }

    /// The evaluation that the `best/` of the run in `run` was kept for; `None` if there is no such folder.
    pub fn best_of_run(run: &Path) -> Option<BestEvaluation> {
        Self::load_beside(&run.join(BEST).join(CONFIG)).ok()??.best()
    }

    /// The evaluation that a run's `best/` was kept for.
    pub fn best(&self) -> Option<BestEvaluation> {
        BestEvaluation::deserialize(self.at("best")?).ok()
    }

    /// Whether a run wrote it, which records every setting: what is absent was not set.
    pub fn is_of_a_run(&self) -> bool {
        self.at("backbone_dtype").is_some_and(Value::is_string)
    }

    /// What a run recorded about the training of the heads; empty if they come from another program.
    pub fn recorded(&self) -> Map<String, Value> {
        RECORDED.into_iter().filter_map(|key| Some((key.to_owned(), self.at(key)?.clone()))).collect()
    }

    /// A key that describes the training: at the top level in a run's `final/`, under [`TRAINING`] in an export.
    fn at(&self, key: &str) -> Option<&Value> {
        self.value.get(TRAINING).unwrap_or(&self.value).get(key)
    }

    /// V of the backbone.
    pub fn vocab_size(&self) -> Option<i64> {
        self.value["vocab_size"].as_i64()
    }

    /// vLLM's factor on all logits.
    pub fn logit_scale(&self) -> Option<f64> {
        self.value["logit_scale"].as_f64()
    }

    /// A key that describes the layer of an EAGLE-3 drafter: at the top level, or under speculators' `transformer_layer_config`.
    pub fn layer_key(&self, key: &str) -> Option<&Value> {
        let layer = self.value.get("transformer_layer_config").unwrap_or(&self.value);
        layer.get(key).filter(|value| !value.is_null())
    }

    /// A Boolean key; false if absent.
    pub fn says(&self, key: &str) -> bool {
        self.value[key].as_bool().unwrap_or(false)
    }

    /// Name and value of the first of `keys` that exists at the top level or under ModelOpt's `medusa`.
    pub fn count(&self, keys: &[&str]) -> Option<(String, u64)> {
        let at = |key: &&str| Some(((*key).to_owned(), self.value[*key].as_u64()?));
        let under = |key: &&str| Some((format!("medusa.{key}"), self.value["medusa"][*key].as_u64()?));
        keys.iter().find_map(at).or_else(|| keys.iter().find_map(under))
    }
}
