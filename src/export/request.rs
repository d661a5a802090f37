//! An export request: heads, format and options.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use super::format::ExportFormat;
use crate::dtype::Dtype;

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
