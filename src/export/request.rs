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
    /// hydra_lm_head.pt for zankner/Hydra: the only format that can hold Hydra heads
    Hydra,
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
            ExportFormat::Hydra => "hydra",
        }
    }

    /// The layout of its tensor names.
    pub(super) fn layout(self) -> HeadsLayout {
        match self {
            ExportFormat::Heads | ExportFormat::Tgi | ExportFormat::TensorRtLlm | ExportFormat::Peft => {
                HeadsLayout::Heads
            }
            ExportFormat::Vllm => HeadsLayout::Vllm,
            ExportFormat::Merged => HeadsLayout::Merged,
            ExportFormat::ModelOpt => HeadsLayout::ModelOpt,
            ExportFormat::Hydra => HeadsLayout::Hydra,
        }
    }

    /// Whether its loaders know heads that read earlier tokens, and a bias of W2.
    pub(super) fn knows_hydra(self) -> bool {
        self == ExportFormat::Hydra
    }

    /// Whether the folder includes the backbone's weights.
    pub(super) fn holds_backbone(self) -> bool {
        matches!(self, ExportFormat::Merged | ExportFormat::ModelOpt)
    }

    /// Whether its loaders support heads that share the backbone's lm_head. The others need a W2 in every head.
    pub(super) fn knows_shared_lm_head(self) -> bool {
        matches!(self, ExportFormat::Heads | ExportFormat::Tgi | ExportFormat::Vllm | ExportFormat::Peft)
    }

    /// Whether its loaders read a pickled file.
    pub(super) fn takes_pickle(self) -> bool {
        matches!(self, ExportFormat::Heads | ExportFormat::TensorRtLlm | ExportFormat::Hydra)
    }
}

/// What `medusa export` reads and where it writes.
#[derive(Debug)]
pub struct ExportRequest {
    /// Trained heads, in any layout.
    pub heads: PathBuf,
    /// Folder of the backbone, if it is not the one that the heads name.
    pub backbone: Option<PathBuf>,
    /// Hub id of `backbone`, if it came from there.
    pub backbone_name: Option<String>,
    pub format: ExportFormat,
    /// The new folder.
    pub out: PathBuf,
    /// Dtype of the written tensors; by default the heads' own, or the backbone's if the folder includes it.
    pub dtype: Option<Dtype>,
    /// Exports only the first heads.
    pub medusa_num_heads: Option<NonZeroUsize>,
    /// Writes `medusa_lm_head.pt` instead of safetensors.
    pub pickle: bool,
    /// For the model card, if it is not in the heads' folder.
    pub calibration: Option<PathBuf>,
    /// As `calibration`.
    pub tree: Option<PathBuf>,
    /// As `calibration`.
    pub bench: Option<PathBuf>,
}
