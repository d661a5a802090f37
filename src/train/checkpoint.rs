//! Checkpoints `step-000200/`, `best/` and `final/`: written atomically; a run resumes from the newest `step-*/`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::data::chat_template::{ChatTemplate, TemplateChoice};
use crate::draft::token_map::TokenMap;
use crate::draft::trained::TrainedDrafter;
use crate::files::checksums::{self, ChecksumError};
use crate::files::{self, FileError, NewFolder, failed, is_partial, remove_folder, write_json, write_synced};
use crate::formats::FormatError;
use crate::formats::best::BestEvaluation;
use crate::formats::heads_config::{CHAT_TEMPLATE, HeadsFolderConfig};
use crate::formats::run_folder;
use crate::formats::trained_prompts::TrainedPrompts;
use crate::model::folder::{FolderError, save_folder};
use crate::model::llama::Llama;
use crate::model::peft::{ADAPTER_FILE, PeftError, save_adapters};
use crate::model::weights::{Planned, WeightFiles, WeightsError, save, save_each};
use crate::torch::optim::OptimizerName;
use crate::torch::optim::adamw::{Parameter, StateTensor};
use crate::train::patience::BestSoFar;
use crate::train::plan::{BackboneTraining, ParameterGroup, TrainPlan};
use crate::train::ranks::{Ranks, RanksError};
use crate::train::state::{SavedMoment, TrainState};

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
    /// The hashes of the run's prompts.
    #[error(transparent)]
    Prompts(#[from] FormatError),
    #[error(transparent)]
    Adapter(#[from] PeftError),
    #[error(transparent)]
    Backbone(#[from] FolderError),
    /// Another process of the run.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// A file that is not as it was written.
    #[error(transparent)]
    Checksum(#[from] ChecksumError),
    /// No checkpoint of the run is as it was written.
    #[error("no checkpoint of {} is whole, so the run cannot go on from there: {newest}", run.display())]
    NoneWhole { run: PathBuf, newest: Box<ChecksumError> },
    /// An invalid `state.json`.
    #[error("{}: {source}", path.display())]
    State { path: PathBuf, source: serde_json::Error },
    /// The checkpoint has the state of another optimizer.
    #[error(
        "{} was saved with optimizer.name = \"{saved}\", this run has \"{ours}\", which keeps other moments: continue with \"{saved}\", or train in another folder",
        path.display()
    )]
    Optimizer {
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
        let text = files::read(&path).map_err(failed("read", &path))?;
        serde_json::from_slice(&text).map_err(|source| CheckpointError::State { path, source })
    }
}

/// Writes and reads a run's checkpoints: the drafter, and the trained part of the backbone.
#[derive(Debug)]
pub struct Checkpoints<'r> {
    pub plan: &'r TrainPlan,
    /// With its adapters, or with master weights if it is fully trained.
    pub backbone: &'r Llama,
    /// What rendered the conversations; the heads remember it.
    pub template: Option<&'r ChatTemplate>,
    /// Of a backbone that is not trained itself.
    pub fingerprint: Option<String>,
}

impl<'r> Checkpoints<'r> {
    /// Writes `step-NNNNNN/` and removes older checkpoints beyond `train.keep_checkpoints`. Rank 0 writes; where the processes share the
    /// optimizer's state, the others send it theirs.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing half-written is left, and older checkpoints stay.
    pub fn save_step(&self, state: &TrainState, ranks: Ranks) -> Result<PathBuf, CheckpointError> {
        let path = self.run().join(run_folder::step_folder(state.step));
        let mut moments = GatheredMoments::of(state, ranks);
        let written = if ranks.is_first() { self.write_step(&path, state, &mut moments) } else { Ok(()) };
        moments.send_rest()?; // also if the disk is full: the other processes wait for rank 0
        written?;
        Ok(path)
    }

    fn write_step(
        &self,
        path: &Path,
        state: &TrainState,
        moments: &mut GatheredMoments,
    ) -> Result<(), CheckpointError> {
        let folder = NewFolder::create(path).map_err(failed("create", path))?;
        state.drafter.save(folder.partial())?;
        self.save_config(folder.partial(), &*state.drafter, None)?;
        match &self.plan.trained {
            BackboneTraining::Full => save(&folder.partial().join(BACKBONE_FILE), &self.backbone.weights())?,
            BackboneTraining::Frozen => {}
            BackboneTraining::Lora { .. } => {
                save_adapters(folder.partial(), self.backbone, self.plan.backbone_name())?;
            }
        }
        moments.save(&folder.partial().join(OPTIMIZER_FILE))?;
        let saved = SavedState {
            step: state.step,
            tokens: state.tokens,
            optimizer: state.optimizer.name(),
            optimizer_updates: state.optimizer.updates(),
            best: state.best,
        };
        write_json(&folder.partial().join(STATE_FILE), &saved).map_err(failed("write", path))?;
        checksums::seal(folder.partial(), &[])?;
        folder.commit().map_err(failed("write", path))?;
        Ok(self.remove_old()?)
    }

    /// `final/`, whether it is there or not.
    pub fn final_folder(&self) -> PathBuf {
        self.run().join(run_folder::FINAL)
    }

    /// Writes `final/`: heads, their config, and the trained part of the backbone. Removes the heads of an earlier end.
    ///
    /// # Errors
    /// [`CheckpointError`]; nothing half-written is left.
    pub fn save_final(&self, drafter: &dyn TrainedDrafter) -> Result<PathBuf, CheckpointError> {
        self.remove_old()?; // also those that a killed process left
        let path = self.save_drafter(run_folder::FINAL, drafter, None)?;
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
    pub fn save_best(&self, drafter: &dyn TrainedDrafter, best: BestEvaluation) -> Result<PathBuf, CheckpointError> {
        self.save_drafter(run_folder::BEST, drafter, Some(best))
    }

    fn save_drafter(
        &self,
        name: &str,
        drafter: &dyn TrainedDrafter,
        best: Option<BestEvaluation>,
    ) -> Result<PathBuf, CheckpointError> {
        let path = self.run().join(name);
        let folder = NewFolder::create(&path).map_err(failed("create", &path))?;
        drafter.save(folder.partial())?;
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
        self.save_config(folder.partial(), drafter, best)?;
        TrainedPrompts::load(&self.run().join(run_folder::PROMPTS))?
            .save(&folder.partial().join(run_folder::PROMPTS))?;
        checksums::seal(folder.partial(), &[])?;
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

    /// Restores parameters, optimizer state and step into `state` from the newest checkpoint, which is returned; `None` if there is none. Rank
    /// 0 reads and sends the others what they keep.
    ///
    /// # Errors
    /// [`CheckpointError`] if a file is damaged or has another shape or another optimizer, or of another process.
    pub fn restore_newest(&self, state: &mut TrainState, ranks: Ranks) -> Result<Option<PathBuf>, CheckpointError> {
        let newest = ranks.is_first().then(|| self.newest()).transpose();
        let newest = ranks.agree(newest.map_err(CheckpointError::from))?;
        let newest = ranks.broadcast(newest)?;
        if let Some(checkpoint) = &newest {
            self.restore(checkpoint, state, ranks)?;
        }
        Ok(newest)
    }

    fn restore(&self, checkpoint: &Path, state: &mut TrainState, ranks: Ranks) -> Result<(), CheckpointError> {
        let read = ranks.is_first().then(|| self.restore_weights(checkpoint, state)).transpose();
        let read = ranks.broadcast(ranks.agree(read)?)?;
        if let Some(tokens) = read.token_map {
            state.drafter.set_token_map(TokenMap::new(tokens, self.backbone.device()));
        }
        let file = ranks.is_first().then(|| WeightFiles::open_file(&checkpoint.join(OPTIMIZER_FILE)));
        let file = ranks.agree(file.transpose().map_err(CheckpointError::from))?;
        for moment in state.moments() {
            restore_moment(file.as_ref(), state, &moment, ranks)?;
        }
        if let Some(file) = file {
            file.release();
        }
        state.optimizer.set_updates(read.saved.optimizer_updates);
        state.copy_embedding();
        (state.step, state.tokens, state.best) = (read.saved.step, read.saved.tokens, read.saved.best);
        Ok(())
    }

    /// Restores the parameters; returns what else a checkpoint says, without the moments.
    fn restore_weights(&self, checkpoint: &Path, state: &TrainState) -> Result<ReadCheckpoint, CheckpointError> {
        let mut saved = SavedState::read(checkpoint)?;
        let ours = state.optimizer.name();
        if saved.optimizer != ours {
            return Err(CheckpointError::Optimizer { path: checkpoint.into(), saved: saved.optimizer, ours });
        }
        let file = checkpoint.join(state.drafter.file_name());
        restore_parameters(&file, state.parameters_of(ParameterGroup::is_of_drafter))?;
        let token_map = TokenMap::in_file(&WeightFiles::open_file(&file)?)?;
        let backbone_file = match &self.plan.trained {
            BackboneTraining::Frozen => None,
            BackboneTraining::Lora { .. } => Some(ADAPTER_FILE),
            BackboneTraining::Full => Some(BACKBONE_FILE),
        };
        if let Some(file) = backbone_file {
            restore_parameters(&checkpoint.join(file), state.parameters_of(ParameterGroup::is_of_backbone))?;
        }
        // Killed between removing the last best/ and renaming the new one, or removed by hand: the next evaluation is the best.
        saved.best = saved.best.filter(|_| self.run().join(run_folder::BEST).is_dir());
        Ok(ReadCheckpoint { saved, token_map })
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

    fn drafter_config(&self, drafter: &dyn TrainedDrafter, best: Option<BestEvaluation>) -> HeadsFolderConfig<'r> {
        let (architecture, layers) = drafter.described();
        HeadsFolderConfig {
            base_model_name_or_path: self.plan.backbone_name(),
            medusa_num_heads: drafter.reads().levels,
            medusa_num_layers: layers,
            hidden_size: self.backbone.config.hidden_size,
            vocab_size: self.backbone.config.vocab_size,
            architecture,
            backbone_model_type: &self.backbone.config.model_type,
            backbone_dtype: self.plan.backbone.dtype.to_string(),
            backbone_fingerprint: self.fingerprint.clone(),
            quantization: self.plan.backbone.quantization.map(|quantization| quantization.to_string()),
            chat_template: self.template.map(|_| match &self.plan.data.chat_template {
                TemplateChoice::File(_) => CHAT_TEMPLATE.to_owned(),
                choice => choice.clone().into(),
            }),
            rope_context: Some(self.backbone.config.max_position_embeddings)
                .filter(|_| self.backbone.config.rotary_depends_on_context()),
            eagle_aux_hidden_state_layer_ids: Some(self.backbone.taps().layers().to_vec())
                .filter(|taps| !taps.is_empty()),
            best,
        }
    }

    /// config.json beside heads, and the user's template file as it was when the run began: its path may not lead to it later.
    fn save_config(
        &self,
        folder: &Path,
        drafter: &dyn TrainedDrafter,
        best: Option<BestEvaluation>,
    ) -> Result<(), FileError> {
        if let (TemplateChoice::File(_), Some(template)) = (&self.plan.data.chat_template, self.template) {
            let path = folder.join(CHAT_TEMPLATE);
            write_synced(&path, |out| out.write_all(template.source().as_bytes())).map_err(failed("write", &path))?;
        }
        self.drafter_config(drafter, best).save(folder).map_err(failed("write", folder))
    }
}

/// What rank 0 reads of a checkpoint, besides tensors.
#[derive(Debug, Serialize, Deserialize)]
struct ReadCheckpoint {
    saved: SavedState,
    token_map: Option<Vec<i64>>,
}

/// The optimizer's state of whole parameters, on rank 0 one tensor at a time.
struct GatheredMoments<'s> {
    state: &'s TrainState,
    ranks: Ranks<'s>,
    moments: Vec<SavedMoment>,
    /// How many of them were gathered.
    gathered: usize,
}

impl<'s> GatheredMoments<'s> {
    fn of(state: &'s TrainState, ranks: Ranks<'s>) -> Self {
        Self { state, ranks, moments: state.moments(), gathered: 0 }
    }

    fn next(&mut self) -> Result<Tensor, RanksError> {
        self.gathered += 1;
        self.state.moment(&self.moments[self.gathered - 1], self.ranks)
    }

    fn save(&mut self, path: &Path) -> Result<(), WeightsError> {
        let plan = |SavedMoment { tensor: StateTensor { name, shape, kind, .. }, .. }: &SavedMoment| Planned {
            name: name.clone(),
            shape: shape.clone(),
            kind: *kind,
        };
        let planned: Vec<Planned> = self.moments.iter().map(plan).collect();
        save_each(path, &planned, &mut |_| self.next().map_err(io::Error::other))
    }

    /// Takes part in gathering the tensors that were not written here.
    fn send_rest(&mut self) -> Result<(), RanksError> {
        while self.state.is_shared() && self.gathered < self.moments.len() {
            drop(self.next()?);
        }
        Ok(())
    }
}

/// Restores a moment from rank 0's file.
fn restore_moment(
    file: Option<&WeightFiles>,
    state: &mut TrainState,
    moment: &SavedMoment,
    ranks: Ranks,
) -> Result<(), CheckpointError> {
    let StateTensor { name, shape, kind, .. } = &moment.tensor;
    let read = file.map(|file| file.mapped_as(name, shape, *kind)).transpose();
    let read = ranks.agree(read.map_err(CheckpointError::from))?;
    let values = ranks.tensor_of_first(read, shape, *kind)?;
    state.restore_moment(moment, &values);
    Ok(())
}

fn restore_parameters<'p>(file: &Path, parameters: impl Iterator<Item = &'p Parameter>) -> Result<(), CheckpointError> {
    let saved = WeightFiles::open_file(file)?;
    for parameter in parameters {
        let value = saved.tensor(&parameter.name, &parameter.value.size(), parameter.value.kind(), Device::Cpu)?;
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

/// Whether a folder holds nothing but `names`, besides leftovers of interrupted writes.
///
/// # Errors
/// [`FileError`].
pub fn holds_only(run: &Path, names: &[&str]) -> Result<bool, FileError> {
    let is_known = |path: &PathBuf| file_name(path).is_some_and(|name| is_partial(name) || names.contains(&name));
    Ok(entries(run)?.iter().all(is_known))
}

/// The step of the newest checkpoint.
///
/// # Errors
/// [`FileError`].
pub fn newest_step(run: &Path) -> Result<Option<usize>, FileError> {
    Ok(steps(run)?.pop().map(|(step, _)| step))
}

/// A checkpoint that is not as it was written.
#[derive(Debug)]
pub struct DamagedCheckpoint {
    /// Where it is now.
    pub moved_to: PathBuf,
    pub why: ChecksumError,
}

/// Verifies the newest checkpoint. If it is damaged, goes back to the newest that is whole, and gives the damaged ones names that no run
/// resumes from; checkpoints of earlier versions have no checksums and count as whole.
///
/// # Errors
/// [`CheckpointError::NoneWhole`], which leaves all as it is, or an error of the disk.
pub fn set_damaged_aside(run: &Path) -> Result<Vec<DamagedCheckpoint>, CheckpointError> {
    let mut damaged: Vec<(PathBuf, ChecksumError)> = vec![];
    for (_, path) in steps(run)?.into_iter().rev() {
        match checksums::verify(&path) {
            Ok(_) => return damaged.into_iter().map(|(path, why)| set_aside(&path, why)).collect(),
            Err(error @ ChecksumError::File(_)) => return Err(error.into()),
            Err(why) => damaged.push((path, why)),
        }
    }
    match damaged.into_iter().next() {
        None => Ok(vec![]),
        Some((_, newest)) => Err(CheckpointError::NoneWhole { run: run.into(), newest: newest.into() }),
    }
}

fn set_aside(path: &Path, why: ChecksumError) -> Result<DamagedCheckpoint, CheckpointError> {
    let moved_to = path.with_file_name(run_folder::damaged(file_name(path).unwrap_or_default()));
    if moved_to.exists() {
        remove_folder(&moved_to).map_err(failed("remove", &moved_to))?;
    }
    fs::rename(path, &moved_to).map_err(failed("rename", path))?;
    Ok(DamagedCheckpoint { moved_to, why })
}

/// Verifies the newest checkpoint, if there is one.
///
/// # Errors
/// [`CheckpointError::Checksum`].
pub fn verify_newest(run: &Path) -> Result<(), CheckpointError> {
    let newest = steps(run)?.pop();
    newest.map_or(Ok(()), |(_, path)| Ok(checksums::verify(&path).map(drop)?))
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
