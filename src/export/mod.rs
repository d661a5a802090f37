//! What a run trained, in the layouts that others load. Here: adapters merged into a plain Hugging Face folder.

// T tokens, V vocabulary
use std::fs;
use std::path::{Path, PathBuf};

use tch::{Device, Kind, Tensor};

use crate::files::NewFolder;
use crate::medusa::heads::{Heads, HeadsError};
use crate::model::attention::RowMask;
use crate::model::folder::{FolderError, save_folder};
use crate::model::llama::{Llama, LoadError, Purpose};
use crate::model::lora::Adapters;
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
    /// The base or its adapter.
    #[error(transparent)]
    Backbone(#[from] LoadError),
    /// The heads.
    #[error(transparent)]
    Heads(#[from] HeadsError),
    /// A weights file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The new folder.
    #[error(transparent)]
    Folder(#[from] FolderError),
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
        "{}: read back, its logits differ from those of base and adapter by {difference:.1e}, expected none; nothing was kept: is the \
         disk sound?", path.display()
    )]
    Differs {
        /// The folder.
        path: PathBuf,
        /// The largest.
        difference: f64,
    },
}

/// Writes `out`: the backbone in `base`, computing in `kind`, with the adapter beside `heads` merged into its weights, everything else
/// that `base` holds, and the heads. Read back and compared on fixed tokens before the folder gets its name. Memory: the weights twice.
///
/// # Errors
/// [`ExportError`]; nothing is left then.
pub fn merged(base: &Path, heads: &Path, kind: Kind, out: &Path) -> Result<(), ExportError> {
    if out.exists() {
        return Err(ExportError::Exists { path: out.into() });
    }
    let io = |source| ExportError::Io { path: out.into(), source };
    let backbone = Llama::load_merged(base, heads, kind, Device::Cpu, Purpose::Training)?;
    let folder = NewFolder::create(out).map_err(io)?;
    save_folder(folder.partial(), &backbone, base)?;
    Heads::load(heads, &backbone)?.save(folder.partial())?;
    let written = Llama::load(folder.partial(), kind, Device::Cpu, Purpose::Training)?;
    check_equal(&backbone, &written, out)?;
    folder.commit().map_err(io)
}

/// The heads of a run's `final/` name the backbone that they were trained on.
pub fn base_of(heads: &Path) -> Option<PathBuf> {
    let config: serde_json::Value = serde_json::from_slice(&fs::read(heads.join("config.json")).ok()?).ok()?;
    Some(config["base_model_name_or_path"].as_str()?.into())
}

/// The weights are the same numbers, so the logits are.
fn check_equal(expected: &Llama, got: &Llama, path: &Path) -> Result<(), ExportError> {
    let difference = (logits(expected) - logits(got)).abs().max().double_value(&[]);
    if difference == 0.0 { Ok(()) } else { Err(ExportError::Differs { path: path.into(), difference }) }
}

/// `[T, V]`, float32, of a few tokens.
fn logits(llama: &Llama) -> Tensor {
    let tokens: Vec<i64> = (0..8).map(|t| (t * t * 31 + 1) % llama.config.vocab_size).collect();
    let rows = RowMask::causal(8, &llama.config, llama.device());
    let hidden = || llama.hidden_states(&Tensor::from_slice(&tokens).unsqueeze(0), &rows, Adapters::Off);
    tch::no_grad(|| llama.logits(&hidden(), Adapters::Off)).to_kind(Kind::Float)
}
