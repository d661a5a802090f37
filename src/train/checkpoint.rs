//! Checkpoints `step-000200/`, `best/` and `final/`: written atomically; a run resumes from the newest `step-*/`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::data::chat_template::{ChatTemplate, TemplateChoice};
use crate::draft::medusa::heads::token_map::TokenMap;
use crate::draft::medusa::heads::{HEADS_FILE, Heads};
use crate::files::{FileError, NewFolder, failed, is_partial, remove_folder, write_json, write_synced};
use crate::formats::best::BestEvaluation;
use crate::formats::heads_config::{CHAT_TEMPLATE, HeadsFolderConfig};
use crate::formats::run_folder;
use crate::model::folder::{FolderError, save_folder};
use crate::model::llama::Llama;
use crate::model::peft::{ADAPTER_FILE, PeftError, save_adapters};
use crate::model::weights::{WeightFiles, WeightsError, save};
use crate::torch::optim::OptimizerName;
use crate::torch::optim::adamw::Parameter;
use crate::train::patience::BestSoFar;
use crate::train::plan::{BackboneTraining, ParameterGroup, TrainPlan};
use crate::train::state::TrainState;

const OPTIMIZER_FILE: &str = "optimizer.safetensors";
const STATE_FILE: &str = "state.json";
/// Float32 master weights of a fully trained backbone.
const BACKBONE_FILE: &str = "backbone.safetensors";
/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Adapter(#[from] PeftError),
    #[error(transparent)]
    Backbone(#[from] FolderError),
    /// An invalid `state.json`.
    #[error("{}: {source}", path.display())]
    State { path: PathBuf, source: serde_json::Error },
    /// The checkpoint has the state of another optimizer.
    #[error(
        "{} was saved with optimizer.name = \"{saved}\", this run has \"{ours}\", which keeps other moments: continue with \"{saved}\", or train in another folder",
        path.display()
    )]
    Optimizer {
        /// The checkpoint.
        path: PathBuf,
        saved: OptimizerName,
        /// The recipe's optimizer.
        ours: OptimizerName,
    },
}

/// `state.json`: the run's progress.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedState {
    step: usize,
    tokens: u64,
    /// Absent in checkpoints written when there was only one optimizer.
    #[serde(default)]
    optimizer: OptimizerName,
    optimizer_updates: i32,
    /// Absent without `train.keep_best`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<BestSoFar>,
}

impl SavedState {
    fn read(checkpoint: &Path) -> Result<Self, CheckpointError> {
        let path = checkpoint.join(STATE_FILE);
        let text = fs::read(&path).map_err(failed("read", &path))?;
        serde_json::from_slice(&text).map_err(|source| CheckpointError::State { path, source })
    }
}

/// Writes and reads a run's checkpoints: heads, and the trained part of the backbone.
#[derive(Debug, Clone, Copy)]
pub struct Checkpoints<'r> {
    pub plan: &'r TrainPlan,
    /// With its adapters, or with float32 master weights if it is fully trained.
    pub backbone: &'r Llama,
    /// What rendered the conversations; the heads remember it.
    pub template: Option<&'r ChatTemplate>,
}

impl<'r> Checkpoints<'r> {
    /// Writes `step-NNNNNN/` and removes older checkpoints beyond `train.keep_checkpoints`.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing half-written is left, and older checkpoints stay.
    pub fn save_step(&self, state: &TrainState) -> Result<PathBuf, CheckpointError> {
        let path = self.run().join(run_folder::step_folder(state.step));
        let folder = NewFolder::create(&path).map_err(failed("create", &path))?;
        state.heads.save(folder.partial())?;
        self.save_config(folder.partial(), &state.heads, None)?;
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
            best: state.best,
        };
        write_json(&folder.partial().join(STATE_FILE), &saved).map_err(failed("write", &path))?;
        folder.commit().map_err(failed("write", &path))?;
        self.remove_old()?;
        Ok(path)
    }

    /// Writes `final/`: heads, their config, and the trained part of the backbone. Removes the heads of an earlier end.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing half-written is left.
    pub fn save_final(&self, heads: &Heads) -> Result<PathBuf, CheckpointError> {
        let path = self.save_heads(run_folder::FINAL, heads, None)?;
        let earlier = |path: &PathBuf| file_name(path).is_some_and(run_folder::is_finished_at);
        for earlier in entries(self.run())?.into_iter().filter(earlier) {
            remove_folder(&earlier).map_err(failed("remove", &earlier))?;
        }
        Ok(path)
    }

    /// Writes `best/` with the same files as `final/`, in place of the last one.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing half-written is left.
    pub fn save_best(&self, heads: &Heads, best: BestEvaluation) -> Result<PathBuf, CheckpointError> {
        self.save_heads(run_folder::BEST, heads, Some(best))
    }

    fn save_heads(&self, name: &str, heads: &Heads, best: Option<BestEvaluation>) -> Result<PathBuf, CheckpointError> {
        let path = self.run().join(name);
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
        self.save_config(folder.partial(), heads, best)?;
        folder.commit().map_err(failed("write", &path))?;
        Ok(path)
    }

    /// The newest checkpoint; a folder with a checkpoint's name is always complete.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn newest(&self) -> Result<Option<PathBuf>, FileError> {
        Ok(steps(self.run())?.pop().map(|(_, path)| path))
    }

    /// Restores parameters, optimizer state and step from a checkpoint into `state`.
    ///
    /// # Errors
    /// [`CheckpointError`] if a file is damaged or has another shape or another optimizer.
    pub fn restore(&self, checkpoint: &Path, state: &mut TrainState) -> Result<(), CheckpointError> {
        let saved = SavedState::read(checkpoint)?;
        let ours = state.optimizer.name();
        if saved.optimizer != ours {
            return Err(CheckpointError::Optimizer { path: checkpoint.into(), saved: saved.optimizer, ours });
        }
        let heads = checkpoint.join(HEADS_FILE);
        restore_parameters(&heads, state.parameters_of(ParameterGroup::is_of_heads))?;
        if let Some(tokens) = TokenMap::in_file(&WeightFiles::open_file(&heads)?)? {
            state.heads.set_token_map(TokenMap::new(tokens, self.backbone.device()));
        }
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
        // Killed between removing the last best/ and renaming the new one, or removed by hand: the next evaluation is the best.
        state.best = saved.best.filter(|_| self.run().join(run_folder::BEST).is_dir());
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

    fn heads_config(&self, heads: &Heads, best: Option<BestEvaluation>) -> HeadsFolderConfig<'r> {
        let shape = heads.shape();
        HeadsFolderConfig {
            base_model_name_or_path: self.plan.backbone_name(),
            medusa_num_heads: shape.medusa_num_heads,
            medusa_num_layers: shape.medusa_num_layers,
            hidden_size: self.backbone.config.hidden_size,
            vocab_size: self.backbone.config.vocab_size,
            architecture: shape.architecture.name(),
            backbone_model_type: &self.backbone.config.model_type,
            backbone_dtype: self.plan.backbone.dtype.to_string(),
            backbone_fingerprint: self.fingerprint(),
            quantization: self.plan.backbone.quantization.map(|quantization| quantization.to_string()),
            chat_template: self.template.map(|_| match &self.plan.data.chat_template {
                TemplateChoice::File(_) => CHAT_TEMPLATE.to_owned(),
                choice => choice.clone().into(),
            }),
            rope_context: Some(self.backbone.config.max_position_embeddings)
                .filter(|_| self.backbone.config.rotary_depends_on_context()),
            best,
        }
    }

    fn fingerprint(&self) -> Option<String> {
        let frozen = (self.plan.trained != BackboneTraining::Full).then(|| Path::new(&self.plan.backbone.path));
        WeightFiles::open(frozen?).and_then(|files| files.fingerprint()).ok() // a folder that was removed since is no reason to lose a checkpoint
    }

    /// config.json beside heads, and the user's template file as it was when the run began: its path may not lead to it later.
    fn save_config(&self, folder: &Path, heads: &Heads, best: Option<BestEvaluation>) -> Result<(), FileError> {
        if let (TemplateChoice::File(_), Some(template)) = (&self.plan.data.chat_template, self.template) {
            let path = folder.join(CHAT_TEMPLATE);
            write_synced(&path, |out| out.write_all(template.source().as_bytes())).map_err(failed("write", &path))?;
        }
        self.heads_config(heads, best).save(folder).map_err(failed("write", folder))
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

/// Removes the leftovers of interrupted writes.
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

/// Whether a folder holds anything besides leftovers of interrupted writes.
///
/// # Errors
/// [`FileError`].
pub fn holds_a_run(run: &Path) -> Result<bool, FileError> {
    Ok(run.exists() && entries(run)?.iter().any(|path| !file_name(path).is_some_and(is_partial)))
}

/// Whether a folder holds only `name`, besides leftovers of interrupted writes.
///
/// # Errors
/// [`FileError`].
pub fn holds_only(run: &Path, name: &str) -> Result<bool, FileError> {
    let mut names = entries(run)?.into_iter().filter(|path| !file_name(path).is_some_and(is_partial));
    Ok(names.next().is_some_and(|path| file_name(&path) == Some(name)) && names.next().is_none())
}

/// The step of the newest checkpoint.
///
/// # Errors
/// [`FileError`].
pub fn newest_step(run: &Path) -> Result<Option<usize>, FileError> {
    Ok(steps(run)?.pop().map(|(step, _)| step))
}

/// The best evaluation up to the newest checkpoint.
///
/// # Errors
/// [`CheckpointError`].
pub fn newest_best(run: &Path) -> Result<Option<BestSoFar>, CheckpointError> {
    let newest = steps(run)?.pop();
    Ok(newest.map(|(_, path)| SavedState::read(&path)).transpose()?.and_then(|saved| saved.best))
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
