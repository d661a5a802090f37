//! What is exported, in which layout, and how.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use crate::draft::medusa::heads::layout::HeadsLayout;
use crate::dtype::Dtype;

/// A layout, by who loads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportFormat {
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

impl ExportFormat {
    /// As it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            ExportFormat::Heads => "heads",
            ExportFormat::Tgi => "tgi",
            ExportFormat::Vllm => "vllm",
            ExportFormat::TensorRtLlm => "tensorrt-llm",
            ExportFormat::Merged => "merged",
            ExportFormat::ModelOpt => "modelopt",
            ExportFormat::Peft => "peft",
        }
    }

    /// Whose names its heads have.
    pub(super) fn layout(self) -> HeadsLayout {
        match self {
            ExportFormat::Heads | ExportFormat::Tgi | ExportFormat::TensorRtLlm | ExportFormat::Peft => {
                HeadsLayout::Heads
            }
            ExportFormat::Vllm => HeadsLayout::Vllm,
            ExportFormat::Merged => HeadsLayout::Merged,
            ExportFormat::ModelOpt => HeadsLayout::ModelOpt,
        }
    }

    /// Whether the backbone's weights are in the folder.
    pub(super) fn holds_backbone(self) -> bool {
        matches!(self, ExportFormat::Merged | ExportFormat::ModelOpt)
    }

    /// Whether those who load it take heads that share the backbone's lm_head. The others need a W2 in every head.
    pub(super) fn knows_shared_lm_head(self) -> bool {
        matches!(self, ExportFormat::Heads | ExportFormat::Tgi | ExportFormat::Vllm | ExportFormat::Peft)
    }

    /// Whether a pickled file is looked for.
    pub(super) fn takes_pickle(self) -> bool {
        matches!(self, ExportFormat::Heads | ExportFormat::TensorRtLlm)
    }
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
    pub format: ExportFormat,
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
