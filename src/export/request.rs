//! An export request: heads, layout and options.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use crate::draft::medusa::heads::layout::HeadsLayout;
use crate::dtype::Dtype;

/// An export layout, named after the program that loads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportFormat {
    /// Heads only, for FasterDecoding v0.1 and abyo-speculate
    Heads,
    /// Heads only, for text-generation-inference (its v2 layout if the heads share the backbone's lm_head)
    Tgi,
    /// Draft model for vLLM
    Vllm,
    /// Heads only, for TensorRT-LLM's convert_checkpoint.py
    #[value(name = "tensorrt-llm")]
    TensorRtLlm,
    /// Hugging Face folder of the backbone, with adapters merged and heads included (FasterDecoding v1.0)
    Merged,
    /// As merged, with NVIDIA ModelOpt's tensor names; also loaded by TensorRT-LLM
    #[value(name = "modelopt")]
    ModelOpt,
    /// PEFT adapter of a Medusa-2 run with the heads beside it, for LoRAX
    Peft,
}

impl ExportFormat {
    /// The name on the command line.
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
