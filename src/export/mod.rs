//! What a run trained, in the layouts that others load. Every folder is written under another name, read back by the way that any heads
//! are read, compared with what was trained tensor by tensor, run on fixed hidden states, and only then gets its name.
//!
//! Memory: heads pass one tensor after the other. `merged` and `modelopt` map the backbone and copy it through; with adapters, or in
//! another dtype than its own, the backbone is in memory once (33 billion weights in bfloat16: 66 GB; without adapters: one tensor).
//! `peft` tries its adapter on the backbone before anything is written, and lets go of both.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use tch::{Device, Kind};

use crate::draft::medusa::heads::import::{HeadsFile, Notice, folder_of};
use crate::draft::medusa::heads::layout::HeadsLayout;
use crate::draft::medusa::heads::{HeadsError, HeadsShape};
use crate::files::NewFolder;
use crate::formats::run_folder;
use crate::model::block_spec::names;
use crate::model::folder::FolderError;
use crate::model::llama::Llama;
use crate::model::loading::{LoadError, Purpose};
use crate::model::peft::{ADAPTER_CONFIG, PeftError};
use crate::model::torch_file::TorchFileError;
use crate::model::weights::{WeightFiles, WeightsError};
use crate::torch::Dtype;

mod card;
mod check;
mod companions;
mod finite;
mod trained;
mod write;

use check::Difference;
use companions::Companions;
use trained::Trained;

/// A layout, by who loads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Heads alone, as FasterDecoding v0.1 and abyo-speculate load them
    Heads,
    /// Heads alone, as text-generation-inference loads them; its version 2 where heads share the backbone's lm_head
    Tgi,
    /// vLLM's draft model
    Vllm,
    /// Heads alone, as TensorRT-LLM's convert_checkpoint.py loads them
    #[value(name = "tensorrt-llm")]
    TensorRtLlm,
    /// One Hugging Face folder: the backbone, adapters merged, with the heads in its weights (FasterDecoding v1.0)
    Merged,
    /// The same with NVIDIA ModelOpt's names, which TensorRT-LLM loads, too
    #[value(name = "modelopt")]
    ModelOpt,
    /// A Medusa-2 run's adapter as PEFT has it with the heads beside it, as LoRAX serves them
    Peft,
}

impl Format {
    /// As it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Format::Heads => "heads",
            Format::Tgi => "tgi",
            Format::Vllm => "vllm",
            Format::TensorRtLlm => "tensorrt-llm",
            Format::Merged => "merged",
            Format::ModelOpt => "modelopt",
            Format::Peft => "peft",
        }
    }

    /// Whose names its heads have.
    fn layout(self) -> HeadsLayout {
        match self {
            Format::Heads | Format::Tgi | Format::TensorRtLlm | Format::Peft => HeadsLayout::Heads,
            Format::Vllm => HeadsLayout::Vllm,
            Format::Merged => HeadsLayout::Merged,
            Format::ModelOpt => HeadsLayout::ModelOpt,
        }
    }

    /// Whether the backbone's weights are in the folder.
    fn holds_backbone(self) -> bool {
        matches!(self, Format::Merged | Format::ModelOpt)
    }

    /// Whether those who load it take heads that share the backbone's lm_head. The others need a W2 in every head.
    fn knows_shared_lm_head(self) -> bool {
        matches!(self, Format::Heads | Format::Tgi | Format::Vllm | Format::Peft)
    }

    /// Whether a pickled file is looked for.
    fn takes_pickle(self) -> bool {
        matches!(self, Format::Heads | Format::TensorRtLlm)
    }
}

/// Why nothing was exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// There is something already.
    #[error("{} exists already; choose another folder (nothing is ever overwritten)", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The backbone is needed and unknown.
    #[error("--format {format} needs the backbone ({why}), and these heads do not say theirs: give --backbone FOLDER")]
    NoBackbone {
        /// The format.
        format: &'static str,
        /// What of it.
        why: &'static str,
    },
    /// More heads are asked for than there are.
    #[error("--medusa-num-heads {asked}: {} holds {there}; ask for at most so many", path.display())]
    TooManyHeads {
        /// The heads.
        path: PathBuf,
        /// As asked.
        asked: usize,
        /// In the file.
        there: usize,
    },
    /// TGI's version 2 has one ResBlock; LoRAX reads heads as TGI does.
    #[error("--format {format}: {} has {layers} ResBlocks a head and shares the backbone's lm_head; text-generation-inference and LoRAX load such heads with one ResBlock only: use --format tensorrt-llm's files (each head gets a copy of the lm_head)", path.display())]
    TgiLayers {
        /// `tgi` or `peft`.
        format: &'static str,
        /// The heads.
        path: PathBuf,
        /// ResBlocks.
        layers: usize,
    },
    /// No adapter to put beside the heads.
    #[error("--format peft: {} has no {ADAPTER_CONFIG}, so no adapter to put beside the heads; give a Medusa-2 run's final/, or use --format tgi, which LoRAX loads, too", path.display())]
    NoAdapter {
        /// The heads' folder.
        path: PathBuf,
    },
    /// Nobody looks for a pickled file there.
    #[error("--pickle goes with --format heads and tensorrt-llm; what loads {format} reads safetensors")]
    Pickle {
        /// The format.
        format: &'static str,
    },
    /// A file for the model card that is not about these heads.
    #[error("{}: {why}; leave the flag out, or give the one of these heads", path.display())]
    Companion {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The base or its adapter.
    #[error(transparent)]
    Backbone(#[from] LoadError),
    /// The adapter alone.
    #[error(transparent)]
    Adapter(#[from] PeftError),
    /// The heads.
    #[error(transparent)]
    Heads(#[from] HeadsError),
    /// A weights file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A pickled file.
    #[error(transparent)]
    Torch(#[from] TorchFileError),
    /// The new folder.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The model card's template.
    #[error("the model card cannot be written: {0}")]
    Card(#[from] minijinja::Error),
    /// The disk.
    #[error("cannot write {}: {source}", path.display())]
    Io {
        /// The folder.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// What was written is not what was meant.
    #[error(
        "{}: read back, {what} is not bit for bit what was trained; nothing was kept: is the disk sound?", path.display()
    )]
    Differs {
        /// The folder.
        path: PathBuf,
        /// A tensor, a file, or what config.json says.
        what: String,
    },
    /// Numbers beyond a dtype, or none to begin with.
    #[error(
        "{what} in {dtype} computes numbers that are not finite; nothing was kept: give another --dtype (float16 ends at 65504), or train again"
    )]
    NotFinite {
        /// A head or the backbone.
        what: String,
        /// As exported.
        dtype: Dtype,
    },
    /// What was written has another shape than was meant.
    #[error("{}: read back, it holds {got:?}, expected {expected:?}; nothing was kept", path.display())]
    OtherShape {
        /// The folder.
        path: PathBuf,
        /// As meant.
        expected: HeadsShape,
        /// As read.
        got: HeadsShape,
    },
}

/// What is exported, and how.
#[derive(Debug)]
pub struct ExportRequest {
    /// Trained heads, in any layout.
    pub heads: PathBuf,
    /// Their backbone's folder, where it is not the one that they name.
    pub backbone: Option<PathBuf>,
    /// Its id on the Hub, where `backbone` came from there.
    pub backbone_name: Option<String>,
    /// Who shall load it.
    pub format: Format,
    /// The new folder.
    pub out: PathBuf,
    /// The dtype of what is written, where it is not the heads' own (the backbone's, where that is in the folder).
    pub dtype: Option<Dtype>,
    /// The first so many heads.
    pub medusa_num_heads: Option<NonZeroUsize>,
    /// `medusa_lm_head.pt` in place of safetensors.
    pub pickle: bool,
    /// For the model card, where they do not lie beside the heads.
    pub calibration: Option<PathBuf>,
    /// As `calibration`.
    pub tree: Option<PathBuf>,
    /// As `calibration`.
    pub bench: Option<PathBuf>,
}

/// What was written and how it was checked.
#[derive(Debug, serde::Serialize)]
pub struct Exported {
    /// Heads, layers and sizes as they were read back.
    #[serde(flatten)]
    pub shape: HeadsShape,
    /// Of the tensors.
    pub dtype: Dtype,
    /// What the heads computed, read back: bit for bit what the trained heads compute in this dtype, and so far from what they compute
    /// as they were trained.
    pub difference_to_trained: Difference,
    /// Names in the folder.
    pub files: Vec<String>,
    /// What the user should know.
    pub notices: Vec<String>,
}

/// Writes `request.out`, reads it back, compares, and gives it its name.
///
/// # Errors
/// [`ExportError`]; nothing is left then.
pub fn export(request: &ExportRequest) -> Result<Exported, ExportError> {
    if fs::symlink_metadata(&request.out).is_ok() {
        return Err(ExportError::Exists { path: request.out.clone() });
    }
    let mut trained = Trained::open(request)?;
    let companions = Companions::find(request, &trained)?;
    let mut notices = notices(request, &trained)?;
    notices.extend(companions.notices.iter().cloned());
    let io = |source| ExportError::Io { path: request.out.clone(), source };
    let folder = NewFolder::create(&request.out).map_err(io)?;
    write::write(folder.partial(), &mut trained)?;
    let difference = check::read_back(folder.partial(), &trained)?;
    companions.write(folder.partial(), &trained)?;
    card::write(folder.partial(), &trained, &companions)?;
    let files = file_names(folder.partial()).map_err(io)?;
    folder.commit_as_new().map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => ExportError::Exists { path: request.out.clone() },
        _ => io(source),
    })?;
    Ok(Exported {
        shape: trained.written_shape(),
        dtype: trained.dtype,
        difference_to_trained: difference,
        files,
        notices,
    })
}

/// What the user should know before the folder is served.
fn notices(request: &ExportRequest, trained: &Trained) -> Result<Vec<String>, ExportError> {
    let mut notices: Vec<String> = trained.file.notices()?.iter().map(Notice::to_string).collect();
    let alone = !request.format.holds_backbone() && request.format != Format::Peft;
    if alone && let Some(own) = trained.tuned_backbone() {
        notices.push(format!(
            "these heads belong to the backbone that was trained with them ({own}); serve them with that one, or use --format merged"
        ));
    }
    if trained.copies_lm_head() {
        notices.push(format!(
            "these heads share the backbone's lm_head; {} knows no such heads, so each of the {} has a copy of it",
            request.format.name(),
            trained.shape.medusa_num_heads
        ));
    }
    if let (None, Some(base)) = (&trained.base_model, trained.base_name()) {
        notices.push(format!(
            "the model card names no base_model: nothing says that the backbone ({base}) came from the Hub. If it is there, add \
             `base_model: OWNER/NAME` at the top of README.md before it is pushed"
        ));
    }
    let path = request.out.to_string_lossy().to_lowercase();
    if request.format == Format::Vllm && ["eagle", "dflash"].iter().any(|other| path.contains(other)) {
        notices
            .push("vLLM takes a folder with \"eagle\" or \"dflash\" in its path for another drafter: rename it".into());
    }
    Ok(notices)
}

/// The backbone that an export writes or tries something of, by path or by name; `None` where the heads alone are enough.
///
/// # Errors
/// Heads that cannot be read, and a request that cannot be.
pub fn backbone_needed(request: &ExportRequest) -> Result<Option<PathBuf>, ExportError> {
    let trained = Trained::outline(request)?;
    Ok(trained.use_of_backbone().and_then(|_| base_of(request, &trained.file)))
}

/// The heads of a run's `final/` name the backbone that they were trained on; where it was trained whole, it lies beside them.
fn base_of(request: &ExportRequest, file: &HeadsFile) -> Option<PathBuf> {
    let tuned = Some(folder_of(&request.heads).join(run_folder::BACKBONE)).filter(|folder| folder.is_dir());
    request.backbone.clone().or(tuned).or_else(|| file.base().map(PathBuf::from))
}

/// The dtype of a backbone's weights.
fn own_kind(base: &Path) -> Result<Kind, ExportError> {
    let files = WeightFiles::open(base)?;
    Ok(files.kind(names::EMBED_TOKENS).unwrap_or(Kind::Float))
}

/// The backbone as the heads know it: with the adapter beside them in its weights.
fn load_backbone(base: &Path, adapter: Option<&Path>, kind: Kind) -> Result<Llama, ExportError> {
    Ok(match adapter {
        Some(adapter) => Llama::load_merged(base, adapter, kind, Device::Cpu, Purpose::Training)?,
        None => Llama::load(base, kind, Device::Cpu, Purpose::Training)?,
    })
}

/// What is written: float64 has no consumer.
fn dtype_for(kind: Kind) -> Dtype {
    match kind {
        Kind::BFloat16 => Dtype::BFloat16,
        Kind::Half => Dtype::Float16,
        _ => Dtype::Float32,
    }
}

fn file_names(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
