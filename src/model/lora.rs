//! LoRA (Hu et al. 2021): low-rank adapters on linear layers, and PEFT's files in and out.
//!
//! `y = x·Wᵀ + (alpha / rank) · dropout(x)·Aᵀ·Bᵀ`, A `[R, I]`, B `[O, R]`, as PEFT computes it. The weights stay as they are, so
//! the same backbone with [`Adapters::Off`] is the teacher of self-distillation.

// R rank, O outputs, I inputs, N rows of a product
use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::files::write_json;
use crate::model::llama::Llama;
use crate::model::weights::{WeightFiles, WeightsError, names, save};
use crate::numbers::{Fraction, Positive};
use crate::torch::{self, dropout::dropout};

/// The weights of an adapter, as PEFT names the file.
pub const ADAPTER_FILE: &str = "adapter_model.safetensors";
/// Its shape and base, as PEFT names the file.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// `[stage.medusa2.lora]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// R.
    pub rank: NonZeroUsize,
    /// The product of A and B counts alpha / rank.
    pub alpha: Positive,
    /// Part of the inputs of A that is left out at random while training; the rest is scaled up.
    #[serde(default = "no_dropout")]
    pub dropout: Fraction,
    /// Which layers: "all-linear" (lm_head included, unlike PEFT's word), or a list of names.
    #[serde(default)]
    pub target_modules: TargetModules,
    /// A PEFT adapter folder to start from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
}

fn no_dropout() -> Fraction {
    Fraction::new(0.0).expect("a constant")
}

/// Layers that an adapter can go on, by the last part of their names.
pub const MODULES: [&str; 8] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", names::LM_HEAD];

/// Which layers get an adapter.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ModulesAsWritten", into = "ModulesAsWritten")]
pub enum TargetModules {
    /// Every linear layer, lm_head included.
    #[default]
    AllLinear,
    /// These, some of [`MODULES`].
    Named(BTreeSet<String>),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"all-linear\" or a list of layer names")]
enum ModulesAsWritten {
    Word(String),
    List(Vec<String>),
}

impl TryFrom<ModulesAsWritten> for TargetModules {
    type Error = String;

    fn try_from(written: ModulesAsWritten) -> Result<Self, String> {
        let list = match written {
            ModulesAsWritten::Word(word) if word == "all-linear" => return Ok(Self::AllLinear),
            ModulesAsWritten::Word(word) => {
                return Err(format!("expected \"all-linear\" or a list of layer names, got {word:?}"));
            }
            ModulesAsWritten::List(list) => list,
        };
        if let Some(unknown) = list.iter().find(|name| !MODULES.contains(&name.as_str())) {
            return Err(format!("unknown layer {unknown:?}, expected some of {}", MODULES.join(", ")));
        }
        if list.is_empty() {
            Err("expected at least one layer name".into())
        } else {
            Ok(Self::Named(list.into_iter().collect()))
        }
    }
}

impl From<TargetModules> for ModulesAsWritten {
    fn from(modules: TargetModules) -> Self {
        match modules {
            TargetModules::AllLinear => Self::Word("all-linear".into()),
            TargetModules::Named(names) => Self::List(names.into_iter().collect()),
        }
    }
}

impl TargetModules {
    /// Whether the layer of this full name gets an adapter.
    pub fn includes(&self, layer: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Named(names) => names.contains(module_of(layer)),
        }
    }
}

/// The last part of a layer's name.
fn module_of(layer: &str) -> &str {
    layer.rsplit('.').next().unwrap_or(layer)
}

/// Whether adapters take part in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adapters {
    /// The backbone as it was loaded: the teacher.
    Off,
    /// With adapters, without dropout.
    On,
    /// With dropout, drawn from this seed: the same pass again draws the same.
    Training {
        /// Of the pass.
        seed: u64,
    },
}

/// The adapter of one linear layer.
#[derive(Debug)]
pub struct Adapter {
    a_ri: Tensor,
    b_or: Tensor,
    alpha: f64,
    dropout: f64,
    /// Its number in the backbone: what its dropout is drawn from, beside the pass.
    stream: u64,
}

impl Adapter {
    /// As PEFT begins: A uniform within ±1/√I, B zero, so the layer is as it was. Draws from libtorch's generator.
    fn new([o, i]: [i64; 2], (kind, device): (Kind, Device), config: &LoraConfig, stream: u64) -> Self {
        let (r, options) = (config.rank.get() as i64, (master_kind(kind), device));
        let bound = (i as f64).sqrt().recip();
        let a_ri = Tensor::empty([r, i], options).uniform_(-bound, bound);
        let b_or = Tensor::zeros([o, r], options);
        Self { a_ri, b_or, alpha: config.alpha.get(), dropout: config.dropout.get(), stream }.trained()
    }

    fn trained(self) -> Self {
        for tensor in self.parameters() {
            let _ = tensor.set_requires_grad(true);
        }
        self
    }

    /// A and B, as they are trained.
    pub fn parameters(&self) -> [&Tensor; 2] {
        [&self.a_ri, &self.b_or]
    }

    /// B `[O, R]`.
    pub fn b(&self) -> &Tensor {
        &self.b_or
    }

    /// `(alpha / rank) · dropout(x)·Aᵀ`: `[…, I]` to `[…, R]`, in `x`'s dtype.
    pub fn down(&self, x: &Tensor, adapters: Adapters) -> Tensor {
        self.dropped(x, adapters).linear::<Tensor>(&(&self.a_ri * self.scale()).to_kind(x.kind()), None)
    }

    /// What A sees of `x`.
    fn dropped(&self, x: &Tensor, adapters: Adapters) -> Tensor {
        match adapters {
            Adapters::Training { seed } if self.dropout > 0.0 => dropout(x, self.dropout, seed, self.stream),
            _ => x.shallow_clone(),
        }
    }

    fn scale(&self) -> f64 {
        self.alpha / self.a_ri.size()[0] as f64
    }

    /// Adds `down` `[N, R]` through B to `base_no` `[N, O]`, in its place.
    pub(super) fn add_to(&self, mut base_no: Tensor, down_nr: &Tensor) -> Tensor {
        base_no.addmm_(down_nr, &self.b_or.to_kind(down_nr.kind()).tr())
    }

    /// `W + (alpha / rank)·B·A` in the dtype of `weight_oi`; computed in float32 or better.
    pub(super) fn merged(&self, weight_oi: &Tensor) -> Tensor {
        let kind = master_kind(weight_oi.kind());
        tch::no_grad(|| {
            let delta_oi = self.b_or.to_kind(kind).matmul(&(self.a_ri.to_kind(kind) * self.scale()));
            (weight_oi.to_kind(kind) + delta_oi).to_kind(weight_oi.kind())
        })
    }
}

/// What layers that read the same input multiply with their B's: one product with all their A's. They share their dropout, drawn
/// for the first of them, where PEFT draws for each: a deviation that no layer can tell by itself.
pub(super) fn down_together(adapters: &[&Adapter], x: &Tensor, mode: Adapters) -> Vec<Tensor> {
    let all_ri =
        Tensor::cat(&adapters.iter().map(|adapter| &adapter.a_ri).collect::<Vec<_>>(), 0) * adapters[0].scale();
    let down = adapters[0].dropped(x, mode).linear::<Tensor>(&all_ri.to_kind(x.kind()), None);
    down.split(adapters[0].a_ri.size()[0], -1)
}

/// Of what is trained: float32, or float64 where the backbone is.
fn master_kind(weight: Kind) -> Kind {
    if weight == Kind::Double { Kind::Double } else { Kind::Float }
}

/// What makes an adapter folder unusable.
#[derive(Debug, thiserror::Error)]
pub enum LoraError {
    /// A file that cannot be read or written.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// `adapter_config.json` is not PEFT's.
    #[error("{}: {source}; expected a LoRA adapter as PEFT writes it", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A kind of adapter that this program does not compute.
    #[error("{}: `{key}` is {got}; expected {expected}: only plain LoRA adapters can be used", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What stands there.
        got: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// The adapter is not what the recipe says.
    #[error(
        "{}: its {what} is {got}, the recipe's is {expected}; set stage.medusa2.lora to what the adapter has, or start from another",
        path.display()
    )]
    OtherThanRecipe {
        /// The file.
        path: PathBuf,
        /// `rank`, `alpha` or `target_modules`.
        what: &'static str,
        /// The recipe's.
        expected: String,
        /// The adapter's.
        got: String,
    },
    /// The adapter was made for another backbone.
    #[error("{}: {reason}; the adapter belongs to {base:?}, not to this backbone", path.display())]
    OtherBase {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
        /// As its config says.
        base: String,
    },
    /// The weights file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// `adapter_config.json`, the keys that decide what an adapter computes; PEFT's others are left to their defaults.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct PeftConfig {
    peft_type: String,
    #[serde(default)]
    task_type: Option<String>,
    #[serde(default)]
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    target_modules: serde_json::Value,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    inference_mode: bool,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    lora_bias: bool,
    #[serde(default)]
    use_qalora: bool,
    #[serde(default)]
    layer_replication: Option<serde_json::Value>,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
    #[serde(default)]
    rank_pattern: serde_json::Map<String, serde_json::Value>,
    #[serde(default)]
    alpha_pattern: serde_json::Map<String, serde_json::Value>,
}

impl PeftConfig {
    fn read(path: &Path) -> Result<Self, LoraError> {
        let text = fs::read(path).map_err(|source| LoraError::Io { doing: "read", path: path.into(), source })?;
        let config: Self =
            serde_json::from_slice(&text).map_err(|source| LoraError::Json { path: path.into(), source })?;
        config.check(path).map(|()| config)
    }

    /// Refuses what would be computed otherwise than `y + alpha/rank · x·Aᵀ·Bᵀ`.
    fn check(&self, path: &Path) -> Result<(), LoraError> {
        let patterns = [&self.rank_pattern, &self.alpha_pattern].iter().any(|pattern| !pattern.is_empty());
        let bias = self.bias.clone().unwrap_or_else(|| "none".into());
        let facts = [
            ("peft_type", self.peft_type.clone(), self.peft_type == "LORA", "\"LORA\""),
            ("r", self.r.to_string(), self.r > 0, "a number above 0"),
            ("bias", bias.clone(), bias == "none", "\"none\""),
            ("fan_in_fan_out", self.fan_in_fan_out.to_string(), !self.fan_in_fan_out, "false"),
            ("use_dora", self.use_dora.to_string(), !self.use_dora, "false"),
            ("lora_bias", self.lora_bias.to_string(), !self.lora_bias, "false"),
            ("use_qalora", self.use_qalora.to_string(), !self.use_qalora, "false"),
            ("layer_replication", format!("{:?}", self.layer_replication), self.layer_replication.is_none(), "null"),
            (
                "modules_to_save",
                format!("{:?}", self.modules_to_save),
                self.modules_to_save.as_ref().is_none_or(Vec::is_empty),
                "null",
            ),
            ("rank_pattern, alpha_pattern", "not empty".into(), !patterns, "one rank and one alpha for all layers"),
        ];
        match facts.into_iter().find(|(_, _, right, _)| !right) {
            Some((key, got, _, expected)) => Err(LoraError::Unsupported { path: path.into(), key, got, expected }),
            None => Ok(()),
        }
    }

    /// What the product of A and B is multiplied by, times the rank.
    fn alpha(&self) -> f64 {
        if self.use_rslora { self.lora_alpha * (self.r as f64).sqrt() } else { self.lora_alpha }
    }

    fn base(&self) -> String {
        self.base_model_name_or_path.clone().unwrap_or_else(|| "(no name)".into())
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

/// New adapters on the layers that `config` names, drawn from `seed`.
pub fn attach_new(backbone: &mut Llama, config: &LoraConfig, seed: u64) {
    torch::seed(seed);
    for (stream, (name, linear)) in (0..).zip(backbone.linears_mut()) {
        if let (Some(size), Some(options)) = (linear.size(), linear.options())
            && config.target_modules.includes(&name)
        {
            linear.adapt(Adapter::new(size, options, config, stream));
        }
    }
}

/// The adapters of a PEFT folder, which must be what `config` says, where a recipe says something.
///
/// # Errors
/// [`LoraError`] names the file and what does not fit.
pub fn attach(backbone: &mut Llama, folder: &Path, config: Option<&LoraConfig>) -> Result<(), LoraError> {
    let reader = Reader::open(folder, config)?;
    reader.check_shape_of_lm_head(backbone)?;
    reader.compare_lm_head(backbone)?;
    reader.attach(backbone)
}

/// As [`attach`], to a backbone without numbers ([`Llama::outline`]): an lm_head that the adapter holds is not compared.
///
/// # Errors
/// As [`attach`].
pub fn check(outline: &mut Llama, folder: &Path, config: &LoraConfig) -> Result<(), LoraError> {
    let reader = Reader::open(folder, Some(config))?;
    reader.check_shape_of_lm_head(outline)?;
    reader.attach(outline)
}

fn check_against_recipe(
    path: &Path,
    peft: &PeftConfig,
    files: &WeightFiles,
    config: &LoraConfig,
) -> Result<(), LoraError> {
    let modules: BTreeSet<String> = layers_of(files).iter().map(|layer| module_of(layer).to_owned()).collect();
    let wanted = match &config.target_modules {
        TargetModules::AllLinear => MODULES.map(str::to_owned).into(),
        TargetModules::Named(names) => names.clone(),
    };
    let listed = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(", ");
    let facts = [
        ("rank", config.rank.to_string(), peft.r.to_string()),
        ("alpha", config.alpha.get().to_string(), peft.alpha().to_string()),
        ("target_modules", listed(&wanted), listed(&modules)),
    ];
    match facts.into_iter().find(|(_, expected, got)| expected != got) {
        Some((what, expected, got)) => Err(LoraError::OtherThanRecipe { path: path.into(), what, expected, got }),
        None => Ok(()),
    }
}

/// Layers that a file holds an A for.
fn layers_of(files: &WeightFiles) -> BTreeSet<String> {
    let layer = |name: &str| Some(name.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight")?.to_owned());
    files.names().into_iter().filter_map(layer).collect()
}

struct Reader {
    path: PathBuf,
    peft: PeftConfig,
    files: WeightFiles,
    dropout: f64,
}

impl Reader {
    fn open(folder: &Path, config: Option<&LoraConfig>) -> Result<Self, LoraError> {
        let config_path = folder.join(ADAPTER_CONFIG);
        let peft = PeftConfig::read(&config_path)?;
        let files = WeightFiles::open_file(&folder.join(ADAPTER_FILE))?;
        if let Some(config) = config {
            check_against_recipe(&config_path, &peft, &files, config)?;
        }
        let dropout = config.map_or(0.0, |config| config.dropout.get());
        Ok(Self { path: folder.join(ADAPTER_FILE), peft, files, dropout })
    }

    fn attach(&self, backbone: &mut Llama) -> Result<(), LoraError> {
        let mut read = BTreeSet::new();
        let device = backbone.device();
        for (stream, (name, linear)) in (0..).zip(backbone.linears_mut()) {
            let Some(size) = linear.size().filter(|_| self.has(&name)) else { continue };
            let [a_ri, b_or] = self.tensors(&name, size, device)?;
            let (alpha, dropout) = (self.peft.alpha(), self.dropout);
            linear.adapt(Adapter { a_ri, b_or, alpha, dropout, stream }.trained());
            read.insert(name);
        }
        self.check_all_were_read(&read)
    }

    fn has(&self, layer: &str) -> bool {
        self.files.contains(&peft_name(layer, "lora_A"))
    }

    /// A `[R, I]` and B `[O, R]` of a layer.
    fn tensors(&self, layer: &str, [o, i]: [i64; 2], device: Device) -> Result<[Tensor; 2], LoraError> {
        let r = self.peft.r as i64;
        let tensor = |part: &str, expected: [i64; 2]| {
            let name = peft_name(layer, part);
            let got = self.files.shape(&name)?;
            if got != expected {
                return Err(self.other_base(format!("tensor {name:?}: expected shape {expected:?}, got {got:?}")));
            }
            // A copy: it will be trained, and a view of a file must not be written.
            Ok(self.files.tensor(&name, &expected, Kind::Float, device)?.copy())
        };
        Ok([tensor("lora_A", [r, i])?, tensor("lora_B", [o, r])?])
    }

    /// PEFT saves lm_head with its adapter; another one than the backbone's means another base. The backbone's, where the adapter
    /// holds one, and the latter's name.
    fn lm_head<'b>(&self, backbone: &'b Llama) -> Option<(&'b Tensor, String)> {
        let name = peft_name(names::LM_HEAD, "base_layer");
        let own = backbone.lm_head_weight().filter(|_| self.files.contains(&name))?;
        Some((own, name))
    }

    fn check_shape_of_lm_head(&self, backbone: &Llama) -> Result<(), LoraError> {
        let Some((own, name)) = self.lm_head(backbone) else { return Ok(()) };
        let (expected, got) = (own.size(), self.files.shape(&name)?);
        if got == expected {
            return Ok(());
        }
        Err(self.other_base(format!("tensor {name:?}: expected shape {expected:?}, got {got:?}")))
    }

    fn compare_lm_head(&self, backbone: &Llama) -> Result<(), LoraError> {
        let Some((own, name)) = self.lm_head(backbone) else { return Ok(()) };
        // The adapter's may have been rounded to another dtype, and so may ours: bfloat16 keeps 8 bits.
        let float = |tensor: &Tensor| tensor.to_kind(Kind::Float);
        let theirs = self.files.tensor(&name, &own.size(), Kind::Float, own.device())?;
        if theirs.allclose(&float(own), 0.01, 1e-6, false) {
            return Ok(());
        }
        Err(self.other_base(format!("tensor {name:?} is not the backbone's lm_head")))
    }

    fn check_all_were_read(&self, read: &BTreeSet<String>) -> Result<(), LoraError> {
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

    fn other_base(&self, reason: String) -> LoraError {
        LoraError::OtherBase { path: self.path.clone(), reason, base: self.peft.base() }
    }
}

/// Writes the adapters of `backbone` into `folder` as PEFT does; lm_head's own weight goes with its adapter.
///
/// # Errors
/// [`LoraError`].
pub fn save_adapters(folder: &Path, backbone: &Llama, base: &str) -> Result<(), LoraError> {
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
        target_modules: serde_json::json!(modules),
        bias: Some("none".into()),
        fan_in_fan_out: false,
        inference_mode: true,
        use_rslora: false,
        use_dora: false,
        lora_bias: false,
        use_qalora: false,
        layer_replication: None,
        modules_to_save: None,
        rank_pattern: serde_json::Map::new(),
        alpha_pattern: serde_json::Map::new(),
    };
    let mut tensors: Vec<(String, &Tensor)> = vec![];
    if let Some(weight) = backbone.lm_head().adapter().and_then(|_| backbone.lm_head_weight()) {
        tensors.push((peft_name(names::LM_HEAD, "base_layer"), weight));
    }
    tensors.extend(adapters.iter().flat_map(|(layer, adapter)| named(layer, adapter)));
    let path = folder.join(ADAPTER_CONFIG);
    write_json(&path, &config).map_err(|source| LoraError::Io { doing: "write", path, source })?;
    Ok(save(&folder.join(ADAPTER_FILE), &tensors)?)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::model::attention::RowMask;
    use crate::model::backward::Keep;
    use crate::model::config::LlamaConfig;

    fn adapted(dropout: f64, kind: Kind) -> Llama {
        let mut llama = Llama::random(LlamaConfig::tiny(), kind, Device::Cpu, 0);
        let dropout = Fraction::new(dropout).unwrap();
        let (rank, alpha) = (NonZeroUsize::new(3).unwrap(), Positive::new(8.0).unwrap());
        let config = LoraConfig { rank, alpha, dropout, target_modules: TargetModules::AllLinear, init_from: None };
        attach_new(&mut llama, &config, 1);
        for (_, adapter) in llama.adapters() {
            let _ = tch::no_grad(|| adapter.b_or.shallow_clone().normal_(0.0, 0.3));
        }
        llama
    }

    fn tokens() -> Tensor {
        Tensor::from_slice(&(0..22).map(|t| (t * t * 7 + 3) % 50).collect::<Vec<i64>>()).view([2, 11])
    }

    fn gradients(llama: &Llama, keep: Keep, adapters: Adapters) -> (Tensor, Vec<Vec<Tensor>>) {
        let rows = RowMask::causal(11, &llama.config, Device::Cpu);
        let (hidden, tape) = llama.forward_kept(&tokens(), rows, adapters, keep);
        let dhidden = Tensor::arange(hidden.numel() as i64, (hidden.kind(), Device::Cpu)).sin().view_as(&hidden);
        let zeros = |part| llama.trained_in(part).iter().map(|(_, t)| t.detach().zeros_like()).collect();
        let sums: Vec<Vec<Tensor>> = (0..llama.parts()).map(zeros).collect();
        tape.backward(&dhidden, &sums.iter().map(|part| part.iter().collect()).collect::<Vec<_>>());
        ((&hidden * dhidden).sum(Kind::Double), sums)
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let llama = adapted(0.0, Kind::Double);
        let (_, sums) = gradients(&llama, Keep::Everything, Adapters::On);
        for (part, sums) in sums.iter().enumerate() {
            for ((name, tensor), gradient) in llama.trained_in(part).iter().zip(sums) {
                let mut at = tensor.detach().view([-1]).narrow(0, tensor.numel() as i64 / 2, 1);
                let loss = |llama: &Llama| gradients(llama, Keep::Everything, Adapters::On).0.double_value(&[]);
                let _ = at.g_add_scalar_(1e-5);
                let above = loss(&llama);
                let _ = at.g_add_scalar_(-2e-5);
                let below = loss(&llama);
                let _ = at.g_add_scalar_(1e-5);
                let (expected, got) =
                    ((above - below) / 2e-5, gradient.view([-1]).double_value(&[tensor.numel() as i64 / 2]));
                assert!(
                    (expected - got).abs() < 1e-6 * expected.abs().max(1.0),
                    "{name}: {got}, differences say {expected}"
                );
            }
        }
        assert_eq!(sums.iter().map(Vec::len).collect::<Vec<_>>(), [0, 14, 14, 0]);
    }

    #[test]
    fn recomputing_changes_no_bit_even_with_dropout() {
        let llama = adapted(0.3, Kind::Float);
        let of = |keep, seed| gradients(&llama, keep, Adapters::Training { seed });
        let (kept, recomputed) = (of(Keep::Everything, 5), of(Keep::Inputs, 5));
        assert_eq!(kept, recomputed);
        assert_ne!(kept.0, of(Keep::Everything, 6).0, "another seed drops other inputs");
    }

    #[test]
    fn merged_weights_compute_what_adapters_do() {
        let llama = adapted(0.0, Kind::Double);
        let rows = RowMask::causal(11, &llama.config, Device::Cpu);
        let logits = |llama: &Llama, adapters| llama.logits(&llama.hidden_states(&tokens(), &rows, adapters), adapters);
        let (off, on) = (logits(&llama, Adapters::Off), logits(&llama, Adapters::On));
        let difference = |a: &Tensor, b: &Tensor| (a - b).abs().max().double_value(&[]);
        assert!(difference(&off, &on) > 1e-2, "the adapters do something");
        assert!(difference(&logits(&llama.merged(), Adapters::Off), &on) < 1e-12);
    }

    #[test]
    fn target_modules_are_a_word_or_known_names() {
        let read = |text: &str| serde_json::from_str::<TargetModules>(text);
        assert_eq!(read("\"all-linear\"").unwrap(), TargetModules::AllLinear);
        let some = read("[\"q_proj\", \"lm_head\"]").unwrap();
        assert!(some.includes("model.layers.3.self_attn.q_proj") && some.includes("lm_head"));
        assert!(!some.includes("model.layers.3.self_attn.k_proj"));
        assert!(read("[\"query\"]").unwrap_err().to_string().contains("expected some of q_proj"));
        assert!(read("\"all\"").unwrap_err().to_string().contains("all-linear"));
        assert!(read("[]").is_err());
    }
}
