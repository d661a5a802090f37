//! Why a session cannot be opened or decode.

use std::num::TryFromIntError;
use std::path::PathBuf;

use crate::data::chat_template::TemplateError;
use crate::data::tokenize::{TokenizeError, VocabularyMismatch};
use crate::decode::error::DecodeError;
use crate::draft::error::DraftError;
use crate::draft::error::DrafterError;
use crate::engine::cpu::Unsupported;
use crate::engine::cuda::error::CudaError;
use crate::files::FileError;
use crate::model::config::ConfigError;
use crate::model::loading::LoadError;
use crate::model::weights::WeightsError;
use crate::torch::DeviceUnavailable;
use crate::torch::cuda_runtime::CudaRuntimeError;
use crate::tree::sparse_tree::{TreeError, TreeFileError};

/// What was asked for cannot be done; the text names the flag or the file, and what to give instead. The command line ends with status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Why a session cannot be opened, or its engine or drafter cannot decode.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error(transparent)]
    Usage(#[from] UsageError),
    #[error(transparent)]
    Device(#[from] DeviceUnavailable),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Heads(#[from] DrafterError),
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error(transparent)]
    TreeFile(#[from] TreeFileError),
    #[error(transparent)]
    Draft(#[from] DraftError),
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Size(#[from] TryFromIntError),
    /// A draft model without a tokenizer.
    #[error("{} cannot draft for this backbone", folder.display())]
    DraftTokenizer { folder: PathBuf, source: Box<TokenizeError> },
    /// A draft model with another vocabulary.
    #[error("{} cannot draft for this backbone", folder.display())]
    DraftVocabulary { folder: PathBuf, source: Box<VocabularyMismatch> },
    #[error("--engine cpu cannot decode this")]
    CpuEngine(#[source] Unsupported),
    #[error("--engine cuda cannot decode this")]
    CudaEngine(#[source] CudaError),
    /// A GPU that does not report its free memory.
    #[error("{what} depends on the free memory; set {flag}")]
    FreeMemory { what: &'static str, flag: &'static str, source: CudaRuntimeError },
    #[error(transparent)]
    Memory(#[from] CudaRuntimeError),
    #[error("cannot measure step times")]
    StepTimes(#[source] Box<SessionError>),
}

impl SessionError {
    /// Whether the command line or the heads ask for something impossible.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Usage(_) => true,
            Self::Template(error) => error.is_no_template(),
            _ => false,
        }
    }
}
