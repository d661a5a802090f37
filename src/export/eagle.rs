//! Writes EAGLE-3 drafters as servers load them: vLLM, SGLang, TensorRT-LLM and llama.cpp's converter the folder of EAGLE's authors, vLLM alone that of
//! speculators, which names the backbone itself. The folder is read back and compared before it gets its name.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tch::{Device, Tensor};

use super::error::ExportError;
use super::new_folder;
use super::trained::without_local_path;
use super::write::read_object;
use crate::draft::eagle::file::{EMBED_TOKENS, EagleFile, T2D};
use crate::draft::eagle::weights::default_taps;
use crate::draft::token_map::D2T;
use crate::dtype::Dtype;
use crate::files::{checksums, write_json, write_synced};
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::gguf;
use crate::model::block_spec::names;
use crate::model::config::{LlamaConfig, RopeScaling};
use crate::model::loading::LoadError;
use crate::model::weights::{MODEL_FILE, Planned, WeightFiles, save_each};
use crate::torch::bytes;

/// What the names of the layer's tensors begin with, in each of the two folders.
const MIDLAYER: &str = "midlayer.";
const FIRST_LAYER: &str = "layers.0.";
/// The guesses of a step that a server makes unless it is asked for others.
const SERVED_TOKENS: usize = 3;

/// A folder of an EAGLE-3 drafter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EagleFormat {
    /// Of EAGLE's authors.
    Eagle3,
    /// Of speculators.
    Speculators,
}

impl EagleFormat {
    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eagle3 => "eagle3",
            Self::Speculators => "speculators",
        }
    }

    /// Which programs load it.
    pub fn help(self) -> &'static str {
        match self {
            Self::Eagle3 => "EAGLE-3 drafter for vLLM, SGLang, TensorRT-LLM and llama.cpp's converter",
            Self::Speculators => "EAGLE-3 drafter for vLLM, with the backbone's name and embedding",
        }
    }
}

/// What is exported, and where to.
#[derive(Debug)]
pub struct EagleRequest {
    /// A trained EAGLE-3 drafter.
    pub heads: PathBuf,
    /// The backbone's folder, if it is not the one that the drafter names.
    pub backbone: Option<PathBuf>,
    /// Its Hub id, if it came from there.
    pub backbone_name: Option<String>,
    pub format: EagleFormat,
    /// The new folder.
    pub out: PathBuf,
    /// By default that of the drafter's file.
    pub dtype: Option<Dtype>,
}

/// The written files.
#[derive(Debug, serde::Serialize)]
pub struct EagleExported {
    pub tensors: usize,
    pub dtype: Dtype,
    /// Warnings for the user.
    pub notices: Vec<String>,
}

/// The backbone that is read, as a path or a name.
///
/// # Errors
/// An unreadable drafter, or no backbone.
pub fn backbone_needed(request: &EagleRequest) -> Result<PathBuf, ExportError> {
    let file = EagleFile::open(&request.heads)?;
    let named = file.written_config().and_then(PublishedHeadsConfig::base).map(PathBuf::from);
    let why = "its sizes, rotary embeddings and tokens are in config.json";
    request.backbone.clone().or(named).ok_or(ExportError::NoBackbone { format: request.format.name(), why })
}

/// Writes a folder under a temporary name, reads it back, and renames it.
///
/// # Errors
/// [`ExportError`]; nothing is left then.
pub fn export(request: &EagleRequest) -> Result<EagleExported, ExportError> {
    let folder = new_folder::claim(&request.out)?;
    let base = backbone_needed(request)?;
    let backbone = LlamaConfig::load(&base).map_err(LoadError::from)?;
    let file = EagleFile::open(&request.heads)?;
    file.check_shape(&backbone)?;
    let dtype = request.dtype.unwrap_or(Dtype::of(file.kind()).by_default());
    let drafter =
        WrittenDrafter { file, base, backbone, format: request.format, dtype, name: request.backbone_name.clone() };
    let tensors = drafter.tensors()?;
    let planned: Vec<Planned> = tensors.iter().map(|(name, tensor)| Planned::of(name.clone(), tensor)).collect();
    let path = folder.partial().join(MODEL_FILE);
    save_each(&path, &planned, &mut |at| Ok(tensors[at].1.shallow_clone()))?;
    drafter.write_config(folder.partial())?;
    drafter.write_card(folder.partial())?;
    drafter.read_back(folder.partial(), &tensors)?;
    checksums::seal(folder.partial(), &["README.md"])?;
    new_folder::commit(folder, &request.out)?;
    Ok(EagleExported { tensors: tensors.len(), dtype, notices: drafter.notices() })
}

/// A drafter as it is written.
struct WrittenDrafter {
    file: EagleFile,
    base: PathBuf,
    backbone: LlamaConfig,
    format: EagleFormat,
    dtype: Dtype,
    /// The backbone's Hub id.
    name: Option<String>,
}

impl WrittenDrafter {
    /// All tensors, by the names of the format.
    fn tensors(&self) -> Result<Vec<(String, Tensor)>, ExportError> {
        let kind = self.dtype.kind();
        let mut tensors = vec![];
        for (name, size) in self.file.expected(&self.backbone) {
            let tensor = self.file.finite(&name, &size, kind)?;
            let name = match self.format {
                EagleFormat::Eagle3 => name,
                EagleFormat::Speculators => name.replacen(MIDLAYER, FIRST_LAYER, 1),
            };
            tensors.push((name, tensor));
        }
        if self.format == EagleFormat::Speculators {
            let files = WeightFiles::open(&self.base)?;
            let size = [self.backbone.vocab_size, self.backbone.hidden_size];
            tensors.push((EMBED_TOKENS.to_owned(), files.tensor(names::EMBED_TOKENS, &size, kind, Device::Cpu)?));
        }
        if let Some(tokens) = self.file.tokens() {
            let d2t: Vec<i64> = tokens.iter().zip(0..).map(|(token, output)| token - output).collect();
            let t2d: Vec<bool> =
                (0..self.backbone.vocab_size).map(|token| tokens.binary_search(&token).is_ok()).collect();
            tensors.push((D2T.to_owned(), Tensor::from_slice(&d2t)));
            tensors.push((T2D.to_owned(), Tensor::from_slice(&t2d)));
        }
        Ok(tensors)
    }

    fn write_config(&self, folder: &Path) -> Result<(), ExportError> {
        let config = match self.format {
            EagleFormat::Eagle3 => self.config()?,
            EagleFormat::Speculators => self.speculators_config()?,
        };
        let path = folder.join("config.json");
        write_json(&path, &config).map_err(|source| ExportError::Io { path, source })
    }

    /// The config of a Llama of one layer, with what all servers read of it.
    fn config(&self) -> Result<Map<String, Value>, ExportError> {
        let LlamaConfig { vocab_size, .. } = self.backbone;
        let mut config = self.llama_config()?;
        let draft_vocab_size = self.file.tokens().map_or(vocab_size, |tokens| tokens.len() as i64);
        config.insert("architectures".to_owned(), json!(["LlamaForCausalLMEagle3"]));
        config.insert("draft_vocab_size".to_owned(), json!(draft_vocab_size));
        let taps = self.file.own_taps(&self.backbone);
        let is_default = default_taps(self.backbone.num_hidden_layers).is_some_and(|default| default == taps.layers());
        if !is_default {
            // vLLM reads the first, which counts layers before their inputs; SGLang the other, which counts them behind.
            let behind: Vec<i64> = taps.layers().iter().map(|&layer| layer as i64 - 1).collect();
            config.insert("eagle_aux_hidden_state_layer_ids".to_owned(), json!(taps.layers()));
            if self.taps_embedding() {
                return Ok(config);
            }
            config.insert(
                "eagle_config".to_owned(),
                json!({"eagle_aux_hidden_state_layer_ids": behind, "use_aux_hidden_state": true}),
            );
        }
        Ok(config)
    }

    /// Whether it reads the embedding, which SGLang and TensorRT-LLM have no number for.
    fn taps_embedding(&self) -> bool {
        self.file.own_taps(&self.backbone).layers().first() == Some(&0)
    }

    fn speculators_config(&self) -> Result<Map<String, Value>, ExportError> {
        let mut layer = self.llama_config()?;
        layer.insert("architectures".to_owned(), json!(["LlamaForCausalLM"]));
        let draft_vocab_size = self.file.tokens().map_or(self.backbone.vocab_size, |tokens| tokens.len() as i64);
        let verifier = self.backbone_architecture()?;
        let config = json!({
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "draft_vocab_size": draft_vocab_size,
            "norm_before_residual": false,
            "norm_before_fc": false,
            "fc_norm": false,
            "norm_output": false,
            "embed_requires_grad": false,
            "target_hidden_size": null,
            "eagle_aux_hidden_state_layer_ids": self.file.own_taps(&self.backbone).layers(),
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{
                    "proposal_type": "greedy", "speculative_tokens": SERVED_TOKENS, "verifier_accept_k": 1, "accept_tolerance": 0.0,
                }],
                "verifier": {"name_or_path": self.public_name(), "architectures": verifier},
            },
            "torch_dtype": self.dtype.to_string(),
            "tie_word_embeddings": false,
        });
        let Value::Object(config) = config else { unreachable!("it was written as an object") };
        Ok(config)
    }

    fn llama_config(&self) -> Result<Map<String, Value>, ExportError> {
        let own = self.own_config()?;
        let config = &self.backbone;
        let written = json!({
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "rms_norm_eps": config.rms_norm_eps,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.written_context(),
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": false,
            "attention_bias": false,
            "mlp_bias": false,
            "bos_token_id": own.get("bos_token_id"),
            "eos_token_id": config.eos_token_ids.first(),
            "pad_token_id": own.get("pad_token_id"),
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "use_cache": true,
            "torch_dtype": self.dtype.to_string(),
        });
        let Value::Object(mut written) = written else { unreachable!("it was written as an object") };
        if config.rope_scaling != RopeScaling::Default {
            written.insert("rope_scaling".to_owned(), json!(config.rope_scaling));
        }
        Ok(written)
    }

    fn own_config(&self) -> Result<Map<String, Value>, ExportError> {
        read_object(&gguf::folder::behind(self.base.join("config.json")))
    }

    /// `architectures` of the backbone's config.json.
    fn backbone_architecture(&self) -> Result<Value, ExportError> {
        Ok(self.own_config()?.get("architectures").cloned().unwrap_or_else(|| json!([])))
    }

    /// The backbone's Hub id, or the name of its folder.
    fn public_name(&self) -> String {
        self.name.clone().unwrap_or_else(|| without_local_path(&self.base.to_string_lossy()))
    }

    fn write_card(&self, folder: &Path) -> Result<(), ExportError> {
        let path = folder.join("README.md");
        let text = self.card();
        write_synced(&path, |out| out.write_all(text.as_bytes())).map_err(|source| ExportError::Io { path, source })
    }

    fn card(&self) -> String {
        let name = self.public_name();
        let base_model = self.name.as_ref().map_or_else(String::new, |id| format!("base_model: {id}\n"));
        let served = match self.format {
            EagleFormat::Eagle3 => format!(
                "vllm serve {name} --speculative-config '{{\"method\": \"eagle3\", \"model\": \"FOLDER\", \"num_speculative_tokens\": {SERVED_TOKENS}}}'\n\
                 python -m sglang.launch_server --model-path {name} --speculative-algorithm EAGLE3 --speculative-draft-model-path FOLDER\n\
                 python convert_hf_to_gguf.py FOLDER --target-model-dir {name}    # llama.cpp; then llama-server --spec-type draft-eagle3 -md FILE\n"
            ),
            EagleFormat::Speculators => "vllm serve FOLDER\n".to_owned(),
        };
        format!(
            "---\n{base_model}tags: [eagle3, speculative-decoding]\n---\n\n# EAGLE-3 drafter for {name}\n\nTrained with medusa-train on the hidden states \
             before layers {:?}, for chains of {} guesses. FOLDER is this folder:\n\n```sh\n{served}```\n",
            self.file.own_taps(&self.backbone).layers(),
            self.file.steps(),
        )
    }

    /// Compares every tensor bit for bit, and opens the drafter as any other.
    fn read_back(&self, folder: &Path, tensors: &[(String, Tensor)]) -> Result<(), ExportError> {
        let differs = |what: &str| ExportError::Differs { path: folder.into(), what: what.to_owned() };
        let path = folder.join(MODEL_FILE);
        let unreadable = |error| ExportError::Io { path: path.clone(), source: io::Error::other(error) };
        let mut read: BTreeMap<String, Tensor> =
            Tensor::read_safetensors(&path).map_err(unreadable)?.into_iter().collect();
        for (name, own) in tensors {
            let is_same = |written: Tensor| {
                written.kind() == own.kind()
                    && written.size() == own.size()
                    && bytes::raw(&written) == bytes::raw(&own.contiguous())
            };
            if !read.remove(name).is_some_and(is_same) {
                return Err(differs(name));
            }
        }
        if let Some(name) = read.keys().next() {
            return Err(differs(name));
        }
        let written = EagleFile::open(folder)?;
        written.check_shape(&self.backbone)?;
        match written.own_taps(&self.backbone) == self.file.own_taps(&self.backbone)
            && written.tokens() == self.file.tokens()
        {
            true => Ok(()),
            false => Err(differs("the list of tapped layers, or of tokens")),
        }
    }

    fn notices(&self) -> Vec<String> {
        let own_name = self.name.is_none().then(|| {
            format!("the model card calls the backbone {:?}; put its Hub id there before you push", self.public_name())
        });
        let taps = self.file.own_taps(&self.backbone);
        let three =
            (taps.layers().len() != 3).then(|| "llama.cpp loads drafters of exactly three tapped layers".to_owned());
        let embedding = self
            .taps_embedding()
            .then(|| "SGLang and TensorRT-LLM load no drafter that reads the embedding (layer 0)".to_owned());
        own_name.into_iter().chain(three).chain(embedding).collect()
    }
}
