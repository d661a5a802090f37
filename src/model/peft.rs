//! PEFT's adapter folders in and out: adapter_config.json and adapter_model.safetensors, with its names.

// R rank, O outputs, I inputs
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use crate::bounds::JSON_FILE_BYTES;
use crate::files::{self, FileError, failed, write_json};
use crate::json;
use crate::model::block_spec::names;
pub use crate::model::config::ADAPTER_CONFIG;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::lora::{Adapter, LoraConfig, TargetModules, module_of, modules_of};
use crate::model::peft_keys;
use crate::model::weights::{WeightFiles, WeightsError, same_up_to_rounding, save};
use crate::torch::wide;

/// The weights of an adapter, as PEFT names the file.
pub const ADAPTER_FILE: &str = "adapter_model.safetensors";

/// What makes an adapter folder unusable.
#[derive(Debug, thiserror::Error)]
pub enum PeftError {
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// `adapter_config.json` is not PEFT's.
    #[error("{}: {source}; expected a LoRA adapter as PEFT writes it", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// A kind of adapter that this program does not compute.
    #[error("{}: `{key}` is {got}; expected {expected}: only plain LoRA adapters can be used", path.display())]
    Unsupported { path: PathBuf, key: String, got: String, expected: String },
    /// The adapter is not what the recipe says.
    #[error(
        "{}: its {what} is {got}, the recipe's is {expected}; set stage.medusa2.lora to what the adapter has, or start from another",
        path.display()
    )]
    OtherThanRecipe {
        path: PathBuf,
        /// `rank`, `alpha` or `target_modules`.
        what: &'static str,
        expected: String,
        got: String,
    },
    /// The adapter was made for another backbone.
    #[error("{}: {reason}; the adapter belongs to {base:?}, not to this backbone", path.display())]
    OtherBase { path: PathBuf, reason: String, base: String },
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// `adapter_config.json`, the keys that are read or written; [`peft_keys`] decides about all.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct PeftConfig {
    peft_type: String,
    task_type: Option<String>,
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    target_modules: Value,
    bias: Option<String>,
    #[serde(default)]
    inference_mode: bool,
    #[serde(default)]
    use_rslora: bool,
}

impl PeftConfig {
    fn read(path: &Path) -> Result<Self, PeftError> {
        let text = files::read_at_most(path, JSON_FILE_BYTES).map_err(failed("read", path))?;
        let not_pefts = |source| PeftError::Json { path: path.into(), source };
        let written: Map<String, Value> = json::from_slice(&text).map_err(not_pefts)?;
        let unsupported = |(key, got, expected): (&str, &Value, String)| PeftError::Unsupported {
            path: path.into(),
            key: key.into(),
            got: got.to_string(),
            expected,
        };
        match peft_keys::refused(&written) {
            Some(refused) => Err(unsupported(refused)),
            None => {
                let config: Self = serde_json::from_value(Value::Object(written)).map_err(not_pefts)?;
                match config.r {
                    0 => Err(unsupported(("r", &json!(0), "a number above 0".into()))),
                    _ => Ok(config),
                }
            }
        }
    }

    /// What the product of A and B is multiplied by, times the rank.
    fn alpha(&self) -> f64 {
        if self.use_rslora { self.lora_alpha * (self.r as f64).sqrt() } else { self.lora_alpha }
    }
}

/// PEFT's name of a tensor of layer `layer`: `part` is `lora_A`, `lora_B` or `base_layer`.
pub(super) fn peft_name(layer: &str, part: &str) -> String {
    format!("base_model.model.{layer}.{part}.weight")
}

/// A and B of a layer's adapter, by PEFT's names.
pub(super) fn named<'a>(layer: &str, adapter: &'a Adapter) -> Vec<(String, &'a Tensor)> {
    ["lora_A", "lora_B"].map(|part| peft_name(layer, part)).into_iter().zip(adapter.parameters()).collect()
}

/// The adapters of a PEFT folder, which must be what `config` says, where a recipe says something.
///
/// # Errors
/// [`PeftError`] names the file and what does not fit.
pub fn attach(backbone: &mut Llama, folder: &Path, config: Option<&LoraConfig>) -> Result<(), PeftError> {
    let reader = PeftFolder::open(folder, config.map(|config| (config, &backbone.config)))?;
    reader.check_shape_of_lm_head(backbone)?;
    reader.compare_lm_head(backbone)?;
    reader.attach(backbone)
}

/// As [`attach`], to a backbone without numbers ([`Llama::outline`]): an lm_head that the adapter holds is not compared.
///
/// # Errors
/// As [`attach`].
pub fn check(outline: &mut Llama, folder: &Path, config: &LoraConfig) -> Result<(), PeftError> {
    let reader = PeftFolder::open(folder, Some((config, &outline.config)))?;
    reader.check_shape_of_lm_head(outline)?;
    reader.attach(outline)
}

fn check_against_recipe(
    path: &Path,
    peft: &PeftConfig,
    files: &WeightFiles,
    (config, backbone): (&LoraConfig, &LlamaConfig),
) -> Result<(), PeftError> {
    let adapted: BTreeSet<String> = layers_of(files).iter().map(|layer| module_of(layer).to_owned()).collect();
    let wanted = match &config.target_modules {
        TargetModules::AllLinear => modules_of(backbone).into_iter().map(str::to_owned).collect(),
        TargetModules::Named(names) => names.clone(),
    };
    let listed = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(", ");
    let facts = [
        ("rank", config.rank.to_string(), peft.r.to_string()),
        ("alpha", config.alpha.get().to_string(), peft.alpha().to_string()),
        ("target_modules", listed(&wanted), listed(&adapted)),
    ];
    match facts.into_iter().find(|(_, expected, got)| expected != got) {
        Some((what, expected, got)) => Err(PeftError::OtherThanRecipe { path: path.into(), what, expected, got }),
        None => Ok(()),
    }
}

/// Layers that a file holds an A for.
fn layers_of(files: &WeightFiles) -> BTreeSet<String> {
    let layer = |name: &str| Some(name.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight")?.to_owned());
    files.names().into_iter().filter_map(layer).collect()
}

struct PeftFolder {
    path: PathBuf,
    peft: PeftConfig,
    files: WeightFiles,
    dropout: f64,
}

impl PeftFolder {
    fn open(folder: &Path, config: Option<(&LoraConfig, &LlamaConfig)>) -> Result<Self, PeftError> {
        let config_path = folder.join(ADAPTER_CONFIG);
        let peft = PeftConfig::read(&config_path)?;
        let files = WeightFiles::open_file(&folder.join(ADAPTER_FILE))?;
        if let Some(config) = config {
            check_against_recipe(&config_path, &peft, &files, config)?;
        }
        let dropout = config.map_or(0.0, |(config, _)| config.dropout.get());
        Ok(Self { path: folder.join(ADAPTER_FILE), peft, files, dropout })
    }

    fn attach(&self, backbone: &mut Llama) -> Result<(), PeftError> {
        let mut read = BTreeSet::new();
        for (stream, (name, linear)) in (0..).zip(backbone.linears_mut()) {
            if !self.files.contains(&peft_name(&name, "lora_A")) {
                continue;
            }
            let (size, (kind, device)) = linear.shape();
            let [a_ri, b_or] = self.tensors(&name, size, (wide(kind), device))?;
            let (alpha, dropout) = (self.peft.alpha(), self.dropout);
            linear.adapt(Adapter { a_ri, b_or, alpha, dropout, stream }.trained());
            read.insert(name);
        }
        self.check_all_were_read(&read)
    }

    /// A `[R, I]` and B `[O, R]` of a layer.
    fn tensors(&self, layer: &str, [o, i]: [i64; 2], (kind, device): (Kind, Device)) -> Result<[Tensor; 2], PeftError> {
        let r = self.peft.r as i64;
        let tensor = |part: &str, expected: [i64; 2]| {
            let name = peft_name(layer, part);
            self.check_shape(&name, &expected)?;
            // A copy: it will be trained, and a view of a file must not be written.
            Ok::<_, PeftError>(self.files.tensor(&name, &expected, kind, device)?.copy())
        };
        Ok([tensor("lora_A", [r, i])?, tensor("lora_B", [o, r])?])
    }

    /// PEFT saves lm_head with its adapter; another one than the backbone's means another base. The backbone's, where the adapter
    /// holds one, and the latter's name.
    fn lm_head(&self, backbone: &Llama) -> Option<(Tensor, String)> {
        let name = peft_name(names::LM_HEAD, "base_layer");
        self.files.contains(&name).then(|| (backbone.lm_head_weight(), name))
    }

    fn check_shape_of_lm_head(&self, backbone: &Llama) -> Result<(), PeftError> {
        self.lm_head(backbone).map_or(Ok(()), |(own, name)| self.check_shape(&name, &own.size()))
    }

    fn check_shape(&self, name: &str, expected: &[i64]) -> Result<(), PeftError> {
        let got = self.files.shape(name)?;
        if got == expected {
            return Ok(());
        }
        Err(self.other_base(format!("tensor {name:?}: expected shape {expected:?}, got {got:?}")))
    }

    fn compare_lm_head(&self, backbone: &Llama) -> Result<(), PeftError> {
        let Some((own, name)) = self.lm_head(backbone) else { return Ok(()) };
        if same_up_to_rounding(&self.files.mapped(&name, &own.size())?, &own) {
            return Ok(());
        }
        Err(self.other_base(format!("tensor {name:?} is not the backbone's lm_head")))
    }

    fn check_all_were_read(&self, read: &BTreeSet<String>) -> Result<(), PeftError> {
        let in_file = layers_of(&self.files);
        if in_file.is_empty() {
            return Err(self.other_base("no tensor named base_model.model.….lora_A.weight".into()));
        }
        if let Some(layer) = in_file.difference(read).next() {
            return Err(self.other_base(format!("the backbone has no layer {layer:?}")));
        }
        let parts = |layer: &String| ["lora_A", "lora_B"].map(|part| peft_name(layer, part));
        let known: BTreeSet<String> =
            read.iter().flat_map(parts).chain([peft_name(names::LM_HEAD, "base_layer")]).collect();
        match self.files.names().into_iter().find(|name| !known.contains(*name)) {
            Some(name) => Err(self.other_base(format!("tensor {name:?} is none of a plain LoRA adapter"))),
            None => Ok(()),
        }
    }

    fn other_base(&self, reason: String) -> PeftError {
        let base = self.peft.base_model_name_or_path.clone().unwrap_or_else(|| "(no name)".into());
        PeftError::OtherBase { path: self.path.clone(), reason, base }
    }
}

/// Writes the adapters of `backbone` into `folder` as PEFT does; lm_head's own weight goes with its adapter.
///
/// # Errors
/// [`PeftError`].
pub fn save_adapters(folder: &Path, backbone: &Llama, base: &str) -> Result<(), PeftError> {
    let adapters = backbone.adapters();
    let Some((_, first)) = adapters.first() else { return Ok(()) };
    let modules: BTreeSet<&str> = adapters.iter().map(|(layer, _)| module_of(layer)).collect();
    let config = PeftConfig {
        peft_type: "LORA".into(),
        task_type: Some("CAUSAL_LM".into()),
        base_model_name_or_path: Some(base.into()),
        r: usize::try_from(first.a_ri.size()[0]).expect("a rank is above 0"),
        lora_alpha: first.alpha,
        lora_dropout: first.dropout,
        target_modules: json!(modules),
        bias: Some("none".into()),
        inference_mode: true,
        ..PeftConfig::default()
    };
    let lm_head = backbone.lm_head().adapter().map(|_| backbone.lm_head_weight());
    let named_lm_head = lm_head.iter().map(|weight| (peft_name(names::LM_HEAD, "base_layer"), weight));
    let mut tensors: Vec<(String, &Tensor)> = named_lm_head.collect();
    tensors.extend(adapters.iter().flat_map(|(layer, adapter)| named(layer, adapter)));
    let path = folder.join(ADAPTER_CONFIG);
    write_json(&path, &config).map_err(failed("write", &path))?;
    Ok(save(&folder.join(ADAPTER_FILE), &tensors)?)
}
