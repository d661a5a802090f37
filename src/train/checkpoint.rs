//! Checkpoints: `step-000200/` and `final/`, whole or absent, and going on from the newest whole one.

use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::draft::medusa::heads::{HEADS_FILE, Heads};
use crate::files::{NewFolder, is_partial, remove_folder, write_json};
use crate::model::folder::{FolderError, save_folder};
use crate::model::llama::Llama;
use crate::model::peft::{ADAPTER_FILE, PeftError, save_adapters};
use crate::model::weights::{WeightFiles, WeightsError, save};
use crate::torch::optim::OptimizerName;
use crate::torch::optim::adamw::Parameter;
use crate::train::state::TrainState;

const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const STATE_FILE: &str = "state.json";
/// The weights of a backbone that is trained as a whole: float32 masters.
const BACKBONE_FILE: &str = "backbone.safetensors";
/// In `final/`: that backbone as a Hugging Face folder.
pub const BACKBONE_FOLDER: &str = "backbone";
/// The folder of finished heads.
pub const FINAL: &str = "final";

/// What can go wrong with a run's folder.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A weights file.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// An adapter's files.
    #[error(transparent)]
    Adapter(#[from] PeftError),
    /// A backbone's folder.
    #[error(transparent)]
    Backbone(#[from] FolderError),
    /// `state.json` of a checkpoint.
    #[error("{}: {source}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The state of another optimizer.
    #[error(
        "{} was saved with optimizer.name = \"{saved}\", this run has \"{ours}\", which keeps other moments: go on with \"{saved}\", or begin in another folder",
        path.display()
    )]
    Optimizer {
        /// The checkpoint.
        path: PathBuf,
        /// Its optimizer.
        saved: OptimizerName,
        /// The recipe's.
        ours: OptimizerName,
    },
}

/// `state.json`: where the run stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedState {
    step: usize,
    tokens: u64,
    /// Absent in checkpoints from before there was more than one.
    #[serde(default)]
    optimizer: OptimizerName,
    optimizer_updates: i32,
}

/// `config.json` of `final/`, as TGI and the original code read it.
#[derive(Debug, Clone, Serialize)]
pub struct HeadsFolderConfig<'a> {
    /// The backbone that these heads belong to.
    pub base_model_name_or_path: &'a str,
    /// K.
    pub medusa_num_heads: usize,
    /// ResBlocks a head.
    pub medusa_num_layers: usize,
    /// H.
    pub hidden_size: i64,
    /// V.
    pub vocab_size: i64,
}

/// What of the backbone is trained, and so saved with the heads.
#[derive(Debug, Clone, Copy)]
pub enum TrainedBackbone<'b> {
    /// Nothing.
    Frozen,
    /// Its adapters, in PEFT's layout.
    Adapters {
        /// With the adapters.
        backbone: &'b Llama,
        /// Where it was loaded from: a folder, or an id of the Hub.
        from: &'b Path,
    },
    /// All its weights.
    Weights {
        /// Float32 masters.
        backbone: &'b Llama,
        /// Where it was loaded from.
        from: &'b Path,
    },
}

impl TrainedBackbone<'_> {
    /// The file that holds the parameters in a checkpoint.
    fn file(&self) -> Option<&'static str> {
        match self {
            Self::Frozen => None,
            Self::Adapters { .. } => Some(ADAPTER_FILE),
            Self::Weights { .. } => Some(BACKBONE_FILE),
        }
    }

    fn save_step(&self, folder: &Path) -> Result<(), CheckpointError> {
        match self {
            Self::Frozen => Ok(()),
            Self::Adapters { backbone, from } => Ok(save_adapters(folder, backbone, &from.to_string_lossy())?),
            Self::Weights { backbone, .. } => Ok(save(&folder.join(BACKBONE_FILE), &backbone.weights())?),
        }
    }

    fn save_final(&self, folder: &Path) -> Result<(), CheckpointError> {
        match self {
            Self::Frozen | Self::Adapters { .. } => self.save_step(folder),
            Self::Weights { backbone, from } => Ok(save_folder(&folder.join(BACKBONE_FOLDER), backbone, from)?),
        }
    }
}

/// Writes `step-NNNNNN/` and removes older checkpoints beyond `keep`.
///
/// # Errors
/// [`CheckpointError`]; nothing half-written is left, older checkpoints stay.
pub fn save_step(
    run: &Path,
    state: &TrainState,
    backbone: &TrainedBackbone,
    keep: NonZeroUsize,
) -> Result<PathBuf, CheckpointError> {
    let path = run.join(format!("step-{:06}", state.step));
    let folder = NewFolder::create(&path).map_err(|e| io_error("create", &path, e))?;
    state.heads.save(folder.partial())?;
    backbone.save_step(folder.partial())?;
    save(&folder.partial().join(OPTIMIZER_FILE), &state.optimizer.state())?;
    let saved = SavedState {
        step: state.step,
        tokens: state.tokens,
        optimizer: state.optimizer.name(),
        optimizer_updates: state.optimizer.updates(),
    };
    write_json(&folder.partial().join(STATE_FILE), &saved).map_err(|e| io_error("write", &path, e))?;
    folder.commit().map_err(|e| io_error("write", &path, e))?;
    let mut steps = steps(run)?;
    steps.truncate(steps.len().saturating_sub(keep.get()));
    for (_, old) in steps {
        remove_folder(&old).map_err(|e| io_error("remove", &old, e))?;
    }
    Ok(path)
}

/// Writes `final/`: heads and their config, and what was trained of the backbone.
///
/// # Errors
/// [`CheckpointError`]; nothing half-written is left.
pub fn save_final(
    run: &Path,
    heads: &Heads,
    config: &HeadsFolderConfig,
    backbone: &TrainedBackbone,
) -> Result<PathBuf, CheckpointError> {
    let path = run.join(FINAL);
    let folder = NewFolder::create(&path).map_err(|e| io_error("create", &path, e))?;
    heads.save(folder.partial())?;
    backbone.save_final(folder.partial())?;
    write_json(&folder.partial().join("config.json"), config).map_err(|e| io_error("write", &path, e))?;
    folder.commit().map_err(|e| io_error("write", &path, e))?;
    Ok(path)
}

/// The newest checkpoint of a run; a folder of this name is always whole.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn newest(run: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    Ok(steps(run)?.pop().map(|(_, path)| path))
}

/// Puts a checkpoint's parameters, optimizer state and step into `state`.
///
/// # Errors
/// [`CheckpointError`], where a file is damaged, of another shape or of another optimizer.
pub fn restore(checkpoint: &Path, state: &mut TrainState, backbone: &TrainedBackbone) -> Result<(), CheckpointError> {
    let path = checkpoint.join(STATE_FILE);
    let text = fs::read(&path).map_err(|e| io_error("read", &path, e))?;
    let saved: SavedState = serde_json::from_slice(&text).map_err(|source| CheckpointError::State { path, source })?;
    let ours = state.optimizer.name();
    if saved.optimizer != ours {
        return Err(CheckpointError::Optimizer { path: checkpoint.into(), saved: saved.optimizer, ours });
    }
    let (of_heads, of_backbone) = state.by_owner();
    restore_parameters(&checkpoint.join(HEADS_FILE), of_heads)?;
    if let Some(file) = backbone.file() {
        restore_parameters(&checkpoint.join(file), of_backbone)?;
    }
    let moments = WeightFiles::open_file(&checkpoint.join(OPTIMIZER_FILE))?;
    state.optimizer.restore(saved.optimizer_updates, |name, shape, kind| moments.mapped_as(name, shape, kind))?;
    moments.release();
    state.step = saved.step;
    state.tokens = saved.tokens;
    Ok(())
}

fn restore_parameters(file: &Path, parameters: &[Parameter]) -> Result<(), CheckpointError> {
    let saved = WeightFiles::open_file(file)?;
    for parameter in parameters {
        let value = saved.tensor(&parameter.name, &parameter.value.size(), Kind::Float, Device::Cpu)?;
        tch::no_grad(|| parameter.value.shallow_clone().copy_(&value));
    }
    saved.release();
    Ok(())
}

/// Removes what an interrupted write left behind.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn remove_partial(run: &Path) -> Result<(), CheckpointError> {
    for entry in entries(run)?.into_iter().filter(|path| file_name(path).is_some_and(is_partial)) {
        let removed = if entry.is_dir() { fs::remove_dir_all(&entry) } else { fs::remove_file(&entry) };
        removed.map_err(|e| io_error("remove", &entry, e))?;
    }
    Ok(())
}

/// Whether a folder holds anything but leftovers of interrupted writes.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn holds_a_run(run: &Path) -> Result<bool, CheckpointError> {
    Ok(run.exists() && entries(run)?.iter().any(|path| !file_name(path).is_some_and(is_partial)))
}

/// Whether a folder holds `name` and, besides leftovers of interrupted writes, nothing else.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn holds_only(run: &Path, name: &str) -> Result<bool, CheckpointError> {
    let mut names = entries(run)?.into_iter().filter(|path| !file_name(path).is_some_and(is_partial));
    Ok(names.next().is_some_and(|path| file_name(&path) == Some(name)) && names.next().is_none())
}

/// Checkpoints of a run by step, oldest first.
fn steps(run: &Path) -> Result<Vec<(usize, PathBuf)>, CheckpointError> {
    let step = |path: PathBuf| Some((file_name(&path)?.strip_prefix("step-")?.parse().ok()?, path));
    let mut steps: Vec<(usize, PathBuf)> = entries(run)?.into_iter().filter_map(step).collect();
    steps.sort();
    Ok(steps)
}

fn entries(run: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let read = || fs::read_dir(run)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    read().map_err(|e| io_error("read", run, e))
}

fn file_name(path: &Path) -> Option<&str> {
    path.file_name().and_then(|name| name.to_str())
}

fn io_error(doing: &'static str, path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io { doing, path: path.into(), source }
}
