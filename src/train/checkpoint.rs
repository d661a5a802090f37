//! Checkpoints `step-000200/` and `final/`: written atomically, and resumed from the newest one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::draft::medusa::heads::{HEADS_FILE, Heads};
use crate::files::{FileError, NewFolder, failed, is_partial, remove_folder, write_json};
use crate::formats::heads_config::HeadsFolderConfig;
use crate::formats::run_folder;
use crate::model::folder::{FolderError, save_folder};
use crate::model::llama::Llama;
use crate::model::peft::{ADAPTER_FILE, PeftError, save_adapters};
use crate::model::weights::{WeightFiles, WeightsError, save};
use crate::torch::optim::OptimizerName;
use crate::torch::optim::adamw::Parameter;
use crate::train::plan::{BackboneTraining, ParameterGroup, TrainPlan};
use crate::train::state::TrainState;

const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const STATE_FILE: &str = "state.json";
/// The weights of a backbone that is trained as a whole: float32 masters.
const BACKBONE_FILE: &str = "backbone.safetensors";
/// What can go wrong with a run's folder.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk.
    #[error(transparent)]
    File(#[from] FileError),
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
        "{} was saved with optimizer.name = \"{saved}\", this run has \"{ours}\", which keeps other moments: continue with \"{saved}\", or train in another folder",
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

/// A run's checkpoints: heads, and what the plan trains of the backbone.
#[derive(Debug, Clone, Copy)]
pub struct Checkpoints<'r> {
    /// Where, and what is trained.
    pub plan: &'r TrainPlan,
    /// With its adapters, or with float32 masters where all of it is trained.
    pub backbone: &'r Llama,
}

impl<'r> Checkpoints<'r> {
    /// Writes `step-NNNNNN/` and removes older checkpoints beyond `train.keep_checkpoints`.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing half-written is left, older checkpoints stay.
    pub fn save_step(&self, state: &TrainState) -> Result<PathBuf, CheckpointError> {
        let path = self.run().join(run_folder::step_folder(state.step));
        let folder = NewFolder::create(&path).map_err(failed("create", &path))?;
        state.heads.save(folder.partial())?;
        match &self.plan.trained {
            BackboneTraining::Full => save(&folder.partial().join(BACKBONE_FILE), &self.backbone.weights())?,
            BackboneTraining::Frozen => {}
            BackboneTraining::Lora { .. } => {
                save_adapters(folder.partial(), self.backbone, self.plan.backbone_name())?;
            }
        }
        save(&folder.partial().join(OPTIMIZER_FILE), &state.optimizer.state())?;
        let saved = SavedState {
            step: state.step,
            tokens: state.tokens,
            optimizer: state.optimizer.name(),
            optimizer_updates: state.optimizer.updates(),
        };
        write_json(&folder.partial().join(STATE_FILE), &saved).map_err(failed("write", &path))?;
        folder.commit().map_err(failed("write", &path))?;
        self.remove_old()?;
        Ok(path)
    }

    /// Writes `final/`: heads and their config, and what was trained of the backbone.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing half-written is left.
    pub fn save_final(&self, heads: &Heads) -> Result<PathBuf, CheckpointError> {
        let path = self.run().join(run_folder::FINAL);
        let folder = NewFolder::create(&path).map_err(failed("create", &path))?;
        heads.save(folder.partial())?;
        match &self.plan.trained {
            BackboneTraining::Full => {
                save_folder(
                    &folder.partial().join(run_folder::BACKBONE),
                    self.backbone,
                    Path::new(&self.plan.backbone.path),
                )?;
            }
            BackboneTraining::Frozen => {}
            BackboneTraining::Lora { .. } => {
                save_adapters(folder.partial(), self.backbone, self.plan.backbone_name())?;
            }
        }
        let config = self.heads_config(heads);
        config.save(folder.partial()).map_err(failed("write", &path))?;
        folder.commit().map_err(failed("write", &path))?;
        Ok(path)
    }

    /// The newest checkpoint; a folder of this name is always whole.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn newest(&self) -> Result<Option<PathBuf>, FileError> {
        Ok(steps(self.run())?.pop().map(|(_, path)| path))
    }

    /// Puts a checkpoint's parameters, optimizer state and step into `state`.
    ///
    /// # Errors
    /// [`CheckpointError`], where a file is damaged, of another shape or of another optimizer.
    pub fn restore(&self, checkpoint: &Path, state: &mut TrainState) -> Result<(), CheckpointError> {
        let path = checkpoint.join(STATE_FILE);
        let text = fs::read(&path).map_err(failed("read", &path))?;
        let saved: SavedState =
            serde_json::from_slice(&text).map_err(|source| CheckpointError::State { path, source })?;
        let ours = state.optimizer.name();
        if saved.optimizer != ours {
            return Err(CheckpointError::Optimizer { path: checkpoint.into(), saved: saved.optimizer, ours });
        }
        restore_parameters(&checkpoint.join(HEADS_FILE), state.parameters_of(ParameterGroup::is_of_heads))?;
        let of_backbone = match &self.plan.trained {
            BackboneTraining::Frozen => None,
            BackboneTraining::Lora { .. } => Some(ADAPTER_FILE),
            BackboneTraining::Full => Some(BACKBONE_FILE),
        };
        if let Some(file) = of_backbone {
            restore_parameters(&checkpoint.join(file), state.parameters_of(ParameterGroup::is_of_backbone))?;
        }
        let moments = WeightFiles::open_file(&checkpoint.join(OPTIMIZER_FILE))?;
        state.optimizer.restore(saved.optimizer_updates, |name, shape, kind| moments.mapped_as(name, shape, kind))?;
        moments.release();
        state.step = saved.step;
        state.tokens = saved.tokens;
        Ok(())
    }

    fn run(&self) -> &'r Path {
        &self.plan.train.output_dir
    }

    fn remove_old(&self) -> Result<(), FileError> {
        let mut steps = steps(self.run())?;
        steps.truncate(steps.len().saturating_sub(self.plan.train.keep_checkpoints.get()));
        let remove = |(_, old): (usize, PathBuf)| remove_folder(&old).map_err(failed("remove", &old));
        steps.into_iter().try_for_each(remove)
    }

    fn heads_config(&self, heads: &Heads) -> HeadsFolderConfig<'r> {
        let shape = heads.shape();
        HeadsFolderConfig {
            base_model_name_or_path: self.plan.backbone_name(),
            medusa_num_heads: shape.medusa_num_heads,
            medusa_num_layers: shape.medusa_num_layers,
            hidden_size: self.backbone.config.hidden_size,
            vocab_size: self.backbone.config.vocab_size,
            backbone_dtype: self.plan.backbone.dtype.to_string(),
            quantization: self.plan.backbone.quantization.map(|quantization| quantization.to_string()),
        }
    }
}

fn restore_parameters<'p>(file: &Path, parameters: impl Iterator<Item = &'p Parameter>) -> Result<(), CheckpointError> {
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
/// [`FileError`].
pub fn remove_partial(run: &Path) -> Result<(), FileError> {
    for entry in entries(run)?.into_iter().filter(|path| file_name(path).is_some_and(is_partial)) {
        let removed = if entry.is_dir() { fs::remove_dir_all(&entry) } else { fs::remove_file(&entry) };
        removed.map_err(failed("remove", &entry))?;
    }
    Ok(())
}

/// Whether a folder holds anything but leftovers of interrupted writes.
///
/// # Errors
/// [`FileError`].
pub fn holds_a_run(run: &Path) -> Result<bool, FileError> {
    Ok(run.exists() && entries(run)?.iter().any(|path| !file_name(path).is_some_and(is_partial)))
}

/// Whether a folder holds `name` and, besides leftovers of interrupted writes, nothing else.
///
/// # Errors
/// [`FileError`].
pub fn holds_only(run: &Path, name: &str) -> Result<bool, FileError> {
    let mut names = entries(run)?.into_iter().filter(|path| !file_name(path).is_some_and(is_partial));
    Ok(names.next().is_some_and(|path| file_name(&path) == Some(name)) && names.next().is_none())
}

/// Checkpoints of a run by step, oldest first.
fn steps(run: &Path) -> Result<Vec<(usize, PathBuf)>, FileError> {
    let step = |path: PathBuf| Some((run_folder::step_of(file_name(&path)?)?, path));
    let mut steps: Vec<(usize, PathBuf)> = entries(run)?.into_iter().filter_map(step).collect();
    steps.sort();
    Ok(steps)
}

fn entries(run: &Path) -> Result<Vec<PathBuf>, FileError> {
    let read = || fs::read_dir(run)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>();
    read().map_err(failed("read", run))
}

fn file_name(path: &Path) -> Option<&str> {
    path.file_name().and_then(|name| name.to_str())
}
