//! A whole run: loads the backbone as the plan trains it, claims the run's folder, and starts from scratch or from the
//! newest checkpoint.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use tch::Kind;

use crate::data::pack::Sequences;
use crate::draft::medusa::heads::Heads;
use crate::draft::medusa::heads::token_map::TokenMap;
use crate::formats::metrics::MetricsSplit;
use crate::formats::run_folder::FINAL;
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::model::{adapters, peft};
use crate::torch::{guard, memory};
use crate::train::backbone_pass::{StatesCaches, TrainingBackbone, ValidationCache};
use crate::train::checked::CheckedRun;
use crate::train::checkpoint::{self, Checkpoints};
use crate::train::divergence::LossWatch;
use crate::train::draft_vocabulary::DraftVocabulary;
use crate::train::error::TrainError;
use crate::train::hidden_states::{CacheSettings, StatesPlace};
use crate::train::log::RunLog;
use crate::train::plan::{BackboneTraining, TrainPlan};
use crate::train::run_folder::{RunFolder, check_output_dir};
use crate::train::state::TrainState;
use crate::train::target_rule::TargetRule;
use crate::train::training_loop::{RunEvent, RunOutcome, TrainingLoop};

/// A checked plan with its backbone.
#[derive(Debug)]
pub struct TrainRun {
    /// The part that was read before the backbone.
    pub checked: CheckedRun,
    /// Loaded as the plan trains it.
    pub backbone: Llama,
}

impl TrainRun {
    /// Loads the backbone.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn load(checked: CheckedRun) -> Result<Self, TrainError> {
        let backbone = guard("loading the backbone", || load_backbone(&checked.plan))??;
        Ok(Self { checked, backbone })
    }

    /// Trains to the end, or until `interrupted` is set. With `resume` it continues from the newest checkpoint in the
    /// output folder, if there is one; without, the folder must be absent or empty.
    ///
    /// # Errors
    /// [`TrainError`]; earlier checkpoints stay.
    pub fn train(
        &self,
        resume: bool,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(RunEvent),
    ) -> Result<RunOutcome, TrainError> {
        let run = self.checked.plan.train.output_dir.as_path();
        let finished = run.join(FINAL);
        check_output_dir(run, resume)?;
        let folder = RunFolder::new(&self.checked)?;
        tell(RunEvent::Hashing { bytes: folder.bytes_to_hash() });
        // Claim an existing run's folder first: a run that may not be resumed must not create a hidden-state cache.
        // Otherwise lock the cache before creating the run folder.
        let begun = if checkpoint::holds_a_run(run)? { Some(folder.claim(resume)?) } else { None };
        let backbone = if finished.exists() { None } else { Some(self.training_backbone(tell)?) };
        let claimed = begun.map_or_else(|| folder.claim(resume), Ok)?;
        if !claimed.changes.is_empty() {
            let total_steps = claimed.length_changed.then_some(self.checked.total_steps);
            let is_joint = !self.checked.plan.trained.is_frozen();
            tell(RunEvent::RecipeChanged { keys: &claimed.changes, total_steps, is_joint });
        }
        let Some(backbone) = backbone.filter(|_| !finished.exists()) else {
            return Ok(RunOutcome::FinishedBefore(finished));
        };
        if resume && checkpoint::newest_step(run)?.is_none() {
            tell(RunEvent::NoCheckpoint);
        }
        self.started(backbone, tell)?.run(interrupted)
    }

    /// The loop at step 0, or at the newest checkpoint.
    fn started<'r, 't>(
        &'r self,
        backbone: TrainingBackbone<'r>,
        tell: &'t mut dyn FnMut(RunEvent),
    ) -> Result<TrainingLoop<'r, 't>, TrainError> {
        let plan = &self.checked.plan;
        let mut state = guard("making the heads", || self.first_state())??;
        let checkpoints = Checkpoints { plan, backbone: &self.backbone, template: self.checked.template.as_ref() };
        if let Some(checkpoint) = checkpoints.newest()? {
            checkpoints.restore(&checkpoint, &mut state)?;
            tell(RunEvent::Resumed(&checkpoint));
        }
        memory::keep_freed_blocks();
        let log = RunLog::open(&plan.train.output_dir, state.step)?;
        let watch = LossWatch::default();
        Ok(TrainingLoop { checked: &self.checked, backbone, checkpoints, state, log, watch, tell })
    }

    fn training_backbone(&self, tell: &mut dyn FnMut(RunEvent)) -> Result<TrainingBackbone<'_>, TrainError> {
        let plan = &self.checked.plan;
        let caches = match &plan.train.hidden_state_cache {
            Some(folder) => self.caches(folder, tell)?,
            None => StatesCaches::default(),
        };
        if let Some(kept) = &caches.train {
            tell(RunEvent::HiddenStates { path: kept.path(), filled: kept.filled(), rows: kept.rows() });
        }
        Ok(TrainingBackbone::new(&self.backbone, plan, caches))
    }

    /// The caches of the rows' hidden states, as far as the disk has space for them.
    fn caches(&self, folder: &Path, tell: &mut dyn FnMut(RunEvent)) -> Result<StatesCaches<'_>, TrainError> {
        let CheckedRun { train, validation, .. } = &self.checked;
        let mut opened = |place: StatesPlace, split, other_bytes| match place.open(&self.backbone, other_bytes) {
            Ok(kept) => Ok(Some(kept)),
            Err(why) if why.is_full_disk() => {
                tell(RunEvent::CacheFull(split, &why));
                Ok(None)
            }
            Err(error) => Err(error),
        };
        let Some(kept) = opened(self.states_place(folder, train.sequences())?, MetricsSplit::Train, 0)? else {
            return Ok(StatesCaches::default());
        };
        let validation = match validation {
            None => ValidationCache::Off,
            Some(rows) => {
                let place = self.states_place(folder, rows.sequences())?;
                if place.path() == kept.path() {
                    ValidationCache::OfTrain
                } else {
                    let own = opened(place, MetricsSplit::Validation, kept.missing_bytes())?;
                    own.map_or(ValidationCache::Off, ValidationCache::Own)
                }
            }
        };
        Ok(StatesCaches { train: Some(kept), validation })
    }

    /// Where the hidden states of some rows are cached.
    fn states_place(&self, folder: &Path, rows: &Sequences) -> Result<StatesPlace, TrainError> {
        let CheckedRun { plan, heads_shape, .. } = &self.checked;
        let rule = TargetRule::new(&plan.loss, *heads_shape);
        let trained = self.checked.memory().groups.into_iter().filter(|group| group.trained);
        let reserved_bytes = trained.map(|group| group.weight_bytes + group.optimizer_bytes).sum();
        let backbone_folder = Path::new(&plan.backbone.path);
        let settings = CacheSettings { folder, backbone_folder, rule, reserved_bytes };
        Ok(StatesPlace::new(&settings, &self.backbone, rows)?)
    }

    fn first_state(&self) -> Result<TrainState, TrainError> {
        let plan = &self.checked.plan;
        let Self { backbone, .. } = self;
        let heads = match &plan.heads.init_from {
            None => {
                let map = |vocabulary: &DraftVocabulary| TokenMap::new(vocabulary.tokens.clone(), backbone.device());
                let map = self.checked.draft_vocabulary.as_ref().map(map);
                Heads::new(&plan.heads, &backbone.logit_weight(), map).with_new_prefix(backbone, plan.train.seed)
            }
            Some(path) => {
                let heads = Heads::load_for(path, &backbone.config, Kind::Float, backbone.device())?;
                heads.for_training(backbone.kind())
            }
        };
        Ok(TrainState::new(heads, &self.backbone, plan))
    }
}

/// Loads the backbone as the plan trains it.
fn load_backbone(plan: &TrainPlan) -> Result<Llama, TrainError> {
    let (folder, kind) = (Path::new(&plan.backbone.path), plan.backbone.dtype.kind());
    let quantization = plan.backbone.quantization;
    let load = |kind| -> Result<Llama, TrainError> {
        let mut backbone = Llama::load_quantized(folder, kind, plan.device, Purpose::Training, quantization)?;
        let longest_row = i64::try_from(plan.data.max_length.get()).unwrap_or(i64::MAX);
        backbone.set_context(longest_row.max(backbone.config.max_position_embeddings));
        Ok(backbone)
    };
    match &plan.trained {
        BackboneTraining::Frozen => Ok(load(kind)?),
        BackboneTraining::Full => Ok(load(Kind::Float)?.for_fine_tuning(kind)),
        BackboneTraining::Lora { lora, .. } => {
            let mut backbone = load(kind)?;
            match &lora.init_from {
                None => adapters::attach_new(&mut backbone, lora, plan.train.seed),
                Some(adapter) => peft::attach(&mut backbone, adapter, Some(lora))?,
            }
            Ok(backbone)
        }
    }
}
