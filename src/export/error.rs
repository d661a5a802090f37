//! Errors of exports.

use std::io;
use std::path::PathBuf;

use crate::draft::medusa::heads::{HeadsError, HeadsShape};
use crate::dtype::Dtype;
use crate::model::folder::FolderError;
use crate::model::loading::LoadError;
use crate::model::peft::{ADAPTER_CONFIG, PeftError};
use crate::model::torch_file::TorchFileError;
use crate::model::weights::WeightsError;

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
    #[error("--format {format} needs the backbone ({why}), and these heads do not name it: give --backbone FOLDER")]
    NoBackbone {
        /// The format.
        format: &'static str,
        /// What of it.
        why: &'static str,
    },
    /// More heads are asked for than there are.
    #[error("--medusa-num-heads {asked}: {} has only {there} heads", path.display())]
    TooManyHeads {
        /// The heads.
        path: PathBuf,
        /// As asked.
        asked: usize,
        /// In the file.
        there: usize,
    },
    /// TGI's version 2 has one ResBlock; LoRAX reads heads as TGI does.
    #[error("--format {format}: {} has {layers} ResBlocks per head and shares the backbone's lm_head; text-generation-inference and LoRAX load such heads only with one ResBlock: use --format tensorrt-llm, which gives each head a copy of the lm_head", path.display())]
    TgiLayers {
        /// `tgi` or `peft`.
        format: &'static str,
        /// The heads.
        path: PathBuf,
        /// ResBlocks.
        layers: usize,
    },
    /// No adapter to put beside the heads.
    #[error("--format peft: {} has no adapter ({ADAPTER_CONFIG}); give a Medusa-2 run's final/, or use --format tgi, which LoRAX also loads", path.display())]
    NoAdapter {
        /// The heads' folder.
        path: PathBuf,
    },
    /// Nobody looks for a pickled file there.
    #[error("--pickle needs --format heads or tensorrt-llm; {format} is read from safetensors")]
    Pickle {
        /// The format.
        format: &'static str,
    },
    /// A file for the model card that is not about these heads.
    #[error("{}: {why}; drop the flag, or give the file of these heads", path.display())]
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
        source: io::Error,
    },
    /// What was written is not what was meant.
    #[error(
        "{}: read back, {what} is not bit for bit what was trained; nothing was kept: check the disk", path.display()
    )]
    Differs {
        /// The folder.
        path: PathBuf,
        /// A tensor, a file, or what config.json says.
        what: String,
    },
    /// Numbers beyond a dtype, or none to begin with.
    #[error(
        "{what} in {dtype} produces NaN or infinity; nothing was kept: use another --dtype (float16 overflows above 65504), or train again"
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
