//! Files of EAGLE-3 drafters: those of a run, and of EAGLE's authors, which SGLang, vLLM and TensorRT-LLM load (`midlayer.…` or `layers.0.…`).

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::weights::{EAGLE3, Eagle, LM_HEAD, default_taps};
use crate::draft::error::DrafterError;
use crate::draft::file::DrafterFile;
use crate::draft::heads::HEADS_FILE;
use crate::draft::token_map::{D2T, TokenMap};
use crate::draft::trained::TrainedDrafter;
use crate::dtype::DraftDtype;
use crate::files::{failed, sha256};
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::model::config::{LlamaConfig, RopeScaling};
use crate::model::eagle_layer::EagleLayer;
use crate::model::llama::Llama;
use crate::model::taps::Taps;
use crate::model::weights::{MODEL_FILE, WeightFiles};

/// Of each token, whether it can be guessed; [`D2T`] says the same.
pub const T2D: &str = "t2d";
/// The backbone's embedding, which is not the drafter's.
pub const EMBED_TOKENS: &str = "embed_tokens.weight";
/// The tensor that no other drafter has.
const OF_EAGLE: &str = "fc.weight";
/// Steps of a chain, where a file does not say how many it was trained for: what EAGLE's authors train.
const PUBLISHED_STEPS: usize = 7;
/// Variants of the layer that are not computed here, by the key of config.json that asks for them.
const VARIANTS: [&str; 4] = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"];

/// A file of an EAGLE-3 drafter, whose header was read.
#[derive(Debug)]
pub struct EagleFile {
    path: PathBuf,
    tensors: WeightFiles,
    config: Option<PublishedHeadsConfig>,
    tokens: Option<Vec<i64>>,
}

impl EagleFile {
    /// Whether a folder or file holds such a drafter.
    pub fn is_in(path: &Path) -> bool {
        let file = locate(path);
        file.is_file() && WeightFiles::open_file(&file).is_ok_and(|tensors| tensors.contains(OF_EAGLE))
    }

    /// Reads the header of the file in a folder, or of a file itself.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, DrafterError> {
        let path = locate(path);
        let tensors = WeightFiles::open_file(&path)?;
        let config = PublishedHeadsConfig::load_beside(&path)?;
        let file = Self { tokens: tokens_of(&path, &tensors)?, path, tensors, config };
        file.refuse_variants()?;
        Ok(file)
    }

    /// The tokens that it can guess; `None` for all.
    pub fn tokens(&self) -> Option<&[i64]> {
        self.tokens.as_deref()
    }

    /// The files that determine the drafter.
    pub fn files(&self) -> Vec<PathBuf> {
        vec![self.path.clone()]
    }

    /// The taps that it was trained on: those of its config.json, or the default ones.
    pub fn own_taps(&self, backbone: &LlamaConfig) -> Taps {
        let written = self.config.as_ref().and_then(PublishedHeadsConfig::tap_layers);
        let default = || default_taps(backbone.num_hidden_layers).map_or_else(Vec::new, Vec::from);
        Taps::new(written.unwrap_or_else(default))
    }

    /// Checks every tensor against a backbone.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is missing, wrong or unknown.
    pub fn check_shape(&self, backbone: &LlamaConfig) -> Result<(), DrafterError> {
        let expected: Vec<(String, Vec<i64>)> =
            self.expected(backbone).into_iter().map(|(name, size)| (self.name(&name), size)).collect();
        let others = [D2T, T2D, EMBED_TOKENS];
        let is_known = |name: &&str| others.contains(name) || expected.iter().any(|(known, _)| known == *name);
        if let Some(name) = self.tensors.names().into_iter().find(|name| !is_known(name)) {
            return Err(DrafterError::EagleTensor { path: self.path.clone(), name: name.to_owned() });
        }
        for (name, size) in &expected {
            self.tensors.check(name, size)?;
        }
        self.refuse_other_layer(backbone)?;
        if let Some(&token) = self.tokens.iter().flatten().find(|&&token| token >= backbone.vocab_size) {
            return Err(self.bad_map(format!("holds token {token}, and the backbone has {}", backbone.vocab_size)));
        }
        Ok(())
    }

    /// The drafter, in `kind` on `device`.
    ///
    /// # Errors
    /// As [`EagleFile::check_shape`]; numbers that are not finite.
    pub fn read(&self, backbone: &LlamaConfig, options: (Kind, Device)) -> Result<Eagle, DrafterError> {
        self.check_shape(backbone)?;
        let read = |(name, size): (String, Vec<i64>)| -> Result<Tensor, DrafterError> {
            Ok(self.finite(&name, &size, options.0)?.to_device(options.1))
        };
        let mut tensors = self.expected(backbone).into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let lm_head_vh = tensors.pop().expect("the output layer is the last");
        let taps = self.own_taps(backbone);
        let layer = EagleLayer::from_tensors(backbone, taps.layers().len(), options, tensors);
        let token_map = self.tokens.clone().map(|tokens| TokenMap::new(tokens, options.1));
        Ok(Eagle::new(layer, lm_head_vh, token_map, (taps, self.steps()), backbone))
    }

    /// Number of weights.
    pub fn num_parameters(&self) -> u64 {
        let numel =
            |name: &&str| self.tensors.shape(name).map_or(0, |size| size.iter().product::<i64>().unsigned_abs());
        let is_weight =
            |name: &&str| self.tensors.kind(name).is_some_and(|kind| kind != Kind::Int64 && kind != Kind::Bool);
        self.tensors.names().iter().filter(|name| is_weight(name)).map(numel).sum()
    }

    /// Hash of the file.
    ///
    /// # Errors
    /// [`DrafterError`] if it cannot be read.
    pub fn sha256(&self) -> Result<String, DrafterError> {
        Ok(sha256(&self.path).map_err(failed("read", &self.path))?)
    }

    /// A tensor by its name in a run's file, of finite numbers in `kind`.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is missing or wrong.
    pub fn finite(&self, name: &str, size: &[i64], kind: Kind) -> Result<Tensor, DrafterError> {
        let name = self.name(name);
        Ok(self.tensors.finite(&name, self.tensors.mapped(&name, size)?.to_kind(kind))?)
    }

    /// The dtype of its weights.
    pub fn kind(&self) -> Kind {
        self.tensors.kind(LM_HEAD).unwrap_or(Kind::Float)
    }

    /// The config.json beside it.
    pub fn written_config(&self) -> Option<&PublishedHeadsConfig> {
        self.config.as_ref()
    }

    /// Names in a run's file, and shapes, of all tensors but the maps of tokens; the output layer is the last.
    pub fn expected(&self, backbone: &LlamaConfig) -> Vec<(String, Vec<i64>)> {
        let outputs = self.tokens.as_ref().map_or(backbone.vocab_size, |tokens| tokens.len() as i64);
        let in_layer = EagleLayer::tensors(backbone, self.own_taps(backbone).layers().len());
        in_layer.into_iter().chain([(LM_HEAD.to_owned(), vec![outputs, backbone.hidden_size])]).collect()
    }

    /// The name in this file of a tensor.
    fn name(&self, ours: &str) -> String {
        match ours.strip_prefix("midlayer.") {
            Some(part) if !self.tensors.contains(ours) => format!("layers.0.{part}"),
            _ => ours.to_owned(),
        }
    }

    /// How many guesses of a chain it was trained for; of other programs' files, as many as EAGLE's authors train.
    pub fn steps(&self) -> usize {
        self.config.as_ref().and_then(PublishedHeadsConfig::levels).unwrap_or(PUBLISHED_STEPS)
    }

    fn refuse_variants(&self) -> Result<(), DrafterError> {
        let Some(config) = &self.config else { return Ok(()) };
        let asks = |key: &&&str| config.says(key);
        match VARIANTS.iter().find(asks) {
            Some(key) => Err(DrafterError::Unsupported {
                path: config.path.clone(),
                key: (*key).to_owned(),
                got: "true".to_owned(),
                expected: "false, or no such key: this variant of EAGLE-3 is not computed here",
            }),
            None => Ok(()),
        }
    }

    /// The layer of other programs' files may differ from the backbone's in what no tensor shows.
    fn refuse_other_layer(&self, backbone: &LlamaConfig) -> Result<(), DrafterError> {
        let Some(config) = &self.config else { return Ok(()) };
        let expected = [
            ("num_attention_heads", json!(backbone.num_attention_heads)),
            ("num_key_value_heads", json!(backbone.num_key_value_heads)),
            ("head_dim", json!(backbone.head_dim)),
            ("rms_norm_eps", json!(backbone.rms_norm_eps)),
            ("rope_theta", json!(backbone.rope_theta)),
            ("hidden_act", json!("silu")),
        ];
        let differs = |(key, expected): &(&str, Value)| {
            let got = config.layer_key(key)?;
            let is_same = got.as_f64().map_or(got == expected, |got| expected.as_f64() == Some(got));
            (!is_same).then(|| ((*key).to_owned(), got.to_string()))
        };
        let scaling = match &backbone.rope_scaling {
            RopeScaling::Default => None,
            scaling => Some(json!(scaling)),
        };
        let other_scaling = || {
            let got = config.layer_key("rope_scaling");
            let is_llama = config.layer_key("rope_theta").is_some(); // a layer of its own, not the config of a run
            (is_llama && got != scaling.as_ref())
                .then(|| ("rope_scaling".to_owned(), got.map_or("none".to_owned(), Value::to_string)))
        };
        match expected.iter().find_map(differs).or_else(other_scaling) {
            Some((key, got)) => Err(DrafterError::Unsupported {
                path: config.path.clone(),
                key,
                got,
                expected: "the backbone's own: a drafter whose layer has another is not computed here",
            }),
            None => Ok(()),
        }
    }

    fn bad_map(&self, what: String) -> DrafterError {
        DrafterError::TokenMap { path: self.path.clone(), what }
    }
}

impl DrafterFile for EagleFile {
    fn architecture(&self) -> &'static str {
        EAGLE3
    }

    fn config(&self) -> Option<&PublishedHeadsConfig> {
        self.config.as_ref()
    }

    fn num_parameters(&self) -> u64 {
        Self::num_parameters(self)
    }

    fn taps(&self, backbone: &LlamaConfig) -> Taps {
        self.own_taps(backbone)
    }

    fn check(&self, backbone: &LlamaConfig) -> Result<(), DrafterError> {
        self.check_shape(backbone)
    }

    fn sha256(&self) -> Result<String, DrafterError> {
        Self::sha256(self)
    }

    fn oddities(&self) -> Result<Vec<String>, DrafterError> {
        Ok(vec![])
    }

    fn load(&self, backbone: &Llama, dtype: DraftDtype) -> Result<Box<dyn TrainedDrafter>, DrafterError> {
        let eagle = self.read(&backbone.config, (backbone.kind(), backbone.device()))?;
        Ok(Box::new(eagle.for_decoding(dtype)))
    }
}

/// The file in a folder: a run's, or a published one.
fn locate(path: &Path) -> PathBuf {
    let candidates = [HEADS_FILE, MODEL_FILE].map(|name| path.join(name));
    if path.is_dir() {
        candidates.iter().find(|file| file.is_file()).unwrap_or(&candidates[0]).clone()
    } else {
        path.to_owned()
    }
}

/// The ascending tokens of a reduced vocabulary.
fn tokens_of(path: &Path, tensors: &WeightFiles) -> Result<Option<Vec<i64>>, DrafterError> {
    let Some(tokens) = TokenMap::in_file(tensors)? else { return Ok(None) };
    let bad = |what: String| Err(DrafterError::TokenMap { path: path.to_owned(), what });
    match tokens.first() {
        None => bad("d2t is empty".into()),
        Some(&first) if first < 0 => bad(format!("d2t holds token {first}")),
        _ if !tokens.windows(2).all(|pair| pair[0] < pair[1]) => bad("d2t does not ascend".into()),
        _ => Ok(Some(tokens)),
    }
}
