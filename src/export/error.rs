//! Errors of exports.

use std::io;
use std::path::PathBuf;

use crate::data::chat_template::TemplateError;
use crate::data::tokenize::TokenizeError;
use crate::draft::error::DrafterError;
use crate::draft::heads::HeadsShape;
use crate::dtype::Dtype;
use crate::files::{FileError, in_words};
use crate::formats::FormatError;
use crate::model::folder::FolderError;
use crate::model::loading::LoadError;
use crate::model::peft::{ADAPTER_CONFIG, PeftError};
use crate::model::weights::WeightsError;
use crate::model::weights::torch_file::TorchFileError;

/// Why a backbone is no GGUF file.
#[derive(Debug, thiserror::Error)]
pub enum GgufExportError {
    #[error("llama.cpp has no {what}: a GGUF file reads back as {read}; export it in another format")]
    Config { what: String, read: String },
    #[error("tensor {name}: llama.cpp has no such tensor in {architecture}")]
    Tensor { name: String, architecture: String },
    #[error(transparent)]
    Tokenizer(#[from] TokenizeError),
    #[error("{} has no tokenizer, and llama.cpp loads no file without one: put the model's tokenizer.json or tokenizer.model there", folder.display())]
    NoTokenizer { folder: PathBuf },
}

/// Why nothing was exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The output folder exists.
    #[error("{} exists already; choose another folder (nothing is ever overwritten)", path.display())]
    Exists { path: PathBuf },
    /// Another export to the same folder.
    #[error("{} is being written by another process{}; choose another folder", path.display(), in_words(*holder))]
    InUse { path: PathBuf, holder: Option<u32> },
    /// The backbone is needed and unknown.
    #[error("--format {format} needs the backbone ({why}), and these heads do not name it: give --backbone FOLDER")]
    NoBackbone {
        format: &'static str,
        /// Why the backbone is needed.
        why: &'static str,
    },
    #[error("--medusa-num-heads {asked}: {} has only {there} heads", path.display())]
    TooManyHeads {
        /// Path of the heads.
        path: PathBuf,
        asked: usize,
        /// Heads in the file.
        there: usize,
    },
    /// TGI's version 2 has one ResBlock; LoRAX reads heads as TGI does.
    #[error("--format {format}: {} has {layers} ResBlocks per head and shares the backbone's lm_head; text-generation-inference and LoRAX load such heads only with one ResBlock: use --format tensorrt-llm, which gives each head a copy of the lm_head", path.display())]
    TgiLayers {
        /// `tgi` or `peft`.
        format: &'static str,
        /// Path of the heads.
        path: PathBuf,
        layers: usize,
    },
    /// `--format peft` without an adapter.
    #[error("--format peft: {} has no adapter ({ADAPTER_CONFIG}); give a Medusa-2 run's final/, or use --format tgi, which LoRAX also loads", path.display())]
    NoAdapter {
        /// The heads' folder.
        path: PathBuf,
    },
    /// Hydra heads in a format of Medusa heads.
    #[error("--format {format}: {} holds {what}, which the programs that read this format cannot load; use --format hydra", path.display())]
    HydraHeads {
        format: &'static str,
        /// Path of the heads.
        path: PathBuf,
        /// Hydra heads, or a bias of W2.
        what: &'static str,
    },
    /// A truncated vocabulary in a format of heads with a whole one.
    #[error("--format {format}: {} holds heads with a truncated vocabulary of {size} tokens, and the programs that read this format load heads for the whole vocabulary; {advice}", path.display())]
    TruncatedVocabulary {
        format: &'static str,
        /// Path of the heads.
        path: PathBuf,
        /// Tokens of the vocabulary.
        size: usize,
        advice: &'static str,
    },
    /// Published Hydra heads use one ResBlock several times.
    #[error("--format hydra: {}: head {head} has {layers} ResBlocks with weights of their own; zankner/Hydra loads one set of weights for all ResBlocks of H inputs: train with at most {} per head", path.display(), most)]
    HydraLayers {
        /// Path of the heads.
        path: PathBuf,
        /// 1-based.
        head: usize,
        layers: usize,
        /// The most ResBlocks that can differ.
        most: usize,
    },
    /// No program reads a pickled file in this format.
    #[error("--pickle needs --format heads, tensorrt-llm or hydra; {format} is read from safetensors")]
    Pickle { format: &'static str },
    /// A file for the model card that does not belong to these heads.
    #[error("{}: {why}; drop the flag, or give the file of these heads", path.display())]
    Companion { path: PathBuf, why: String },
    /// The backbone or its adapter.
    #[error(transparent)]
    Backbone(#[from] LoadError),
    /// The chat template of the backbone, or the one that the heads were trained with.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The adapter alone.
    #[error(transparent)]
    Adapter(#[from] PeftError),
    #[error(transparent)]
    Prompts(#[from] FormatError),
    #[error(transparent)]
    Gguf(#[from] GgufExportError),
    #[error(transparent)]
    Heads(#[from] DrafterError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Torch(#[from] TorchFileError),
    /// A file that cannot be read, or the list of checksums.
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The model card's template.
    #[error("the model card cannot be written: {0}")]
    Card(#[from] minijinja::Error),
    #[error("cannot write {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The written file differs from the trained weights.
    #[error(
        "{}: read back, {what} is not bit for bit what was trained; nothing was kept: check the disk", path.display()
    )]
    Differs {
        path: PathBuf,
        /// A tensor, a file, or what config.json says.
        what: String,
    },
    /// Numbers overflow the dtype, or were not finite before.
    #[error(
        "{what} in {dtype} produces NaN or infinity; nothing was kept: use another --dtype (float16 overflows above 65504), or train again"
    )]
    NotFinite {
        /// A head or the backbone.
        what: String,
        dtype: Dtype,
    },
    /// The written heads have another shape.
    #[error("{}: read back, it holds {got:?}, expected {expected:?}; nothing was kept", path.display())]
    OtherShape { path: PathBuf, expected: HeadsShape, got: HeadsShape },
}
