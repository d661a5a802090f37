//! A whole run: loads the backbone as the plan trains it, claims the run's folder, and starts from scratch or from the
//! newest checkpoint.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::data::DataError;
use crate::data::loader::BatchShare;
use crate::data::pack::Sequences;
use crate::data::rows::TokenRow;
use crate::files::checksums::{self, CHECKSUMS};
use crate::files::{failed, remove_folder};
use crate::formats::metrics::MetricsSplit;
use crate::formats::run_folder::{BEST, FINAL};
use crate::gguf;
use crate::model::llama::Llama;
use crate::model::loading::LoadError;
use crate::model::weights::{WeightFiles, WeightsError};
use crate::torch::{guard, memory};
use crate::train::backbone_pass::{StatesCaches, StatesSource, TrainingBackbone, ValidationCache};
use crate::train::checked::{CheckedRun, check_halves};
use crate::train::checkpoint::{self, Checkpoints};
use crate::train::divergence::LossWatch;
use crate::train::error::TrainError;
use crate::train::hidden_states::{CacheSettings, CapturedSplits, StatesPlace};
use crate::train::loading;
use crate::train::log::RunLog;
use crate::train::next_tokens::NextTokens;
use crate::train::own_answers::{self, MeasuredTexts};
use crate::train::plan::BackboneTraining;
use crate::train::ranks::Ranks;
use crate::train::run_folder::{ClaimedRun, RunFolder, check_output_dir};
use crate::train::same_run;
use crate::train::state::TrainState;
use crate::train::target_rule::TargetRule;
use crate::train::token_pairs::TokenPairs;
use crate::train::training_loop::{RunEvent, RunOutcome, TrainingLoop};

/// A checked plan with its backbone.
#[derive(Debug)]
pub struct TrainRun {
    /// The part that was read before the backbone.
    pub checked: CheckedRun,
    /// Loaded as the plan trains it.
    pub backbone: Llama,
}

/// The backbone's answers to validation prompts.
#[derive(Debug, Serialize, Deserialize)]
enum OwnAnswers {
    /// `None`: evaluations use the validation rows alone.
    Rows(Option<Vec<TokenRow>>),
    Interrupted,
}

/// A run that rank 0 has claimed.
struct BegunRun<'r> {
    claimed: ClaimedRun,
    /// `None` if the run has finished.
    backbone: Option<TrainingBackbone<'r>>,
}

impl TrainRun {
    /// Loads the backbone.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn load(checked: CheckedRun) -> Result<Self, TrainError> {
        let backbone = guard("loading the backbone", || loading::backbone(&checked, None))??;
        Ok(Self { checked, backbone })
    }

    /// Trains to the end, or until `interrupted` is set in one of the processes. With `resume` it continues from the newest checkpoint in the
    /// output folder, if there is one; without, the folder must be absent or empty. Rank 0 alone touches the folder.
    ///
    /// # Errors
    /// [`TrainError`]; earlier checkpoints stay.
    pub fn train(
        &self,
        ranks: Ranks,
        resume: bool,
        interrupted: &AtomicBool,
        emit: &mut dyn FnMut(RunEvent),
    ) -> Result<RunOutcome, TrainError> {
        same_run::check_micro_batches(&self.checked.plan.train, ranks.world_size())?;
        let same = same_run::check(&self.checked, ranks, emit);
        ranks.agree(same)?;
        let begun = ranks.is_first().then(|| self.begin(ranks, resume, emit)).transpose();
        let begun = ranks.agree_after_long_work(begun)?;
        let goes_on = ranks.broadcast(begun.as_ref().map(|begun| begun.backbone.is_some()))?;
        if !goes_on {
            return Ok(RunOutcome::FinishedBefore(self.checked.plan.train.output_dir.join(FINAL)));
        }
        let (claimed, backbone) = match begun {
            Some(BegunRun { claimed, backbone }) => (Some(claimed), backbone),
            None => (None, None),
        };
        let backbone = backbone.map_or_else(|| self.training_backbone(ranks, emit), Ok);
        let backbone = ranks.agree_after_long_work(backbone)?;
        let logged_every = claimed.as_ref().and_then(|claimed| claimed.logged_every);
        let texts = ranks.is_first().then(|| self.own_answers(interrupted, emit)).transpose();
        let texts = ranks.agree_after_long_work(texts)?;
        let OwnAnswers::Rows(answers) = ranks.broadcast(texts)? else { return Ok(RunOutcome::InterruptedBefore) };
        let answers = answers.and_then(|rows| own_answers::loader(rows, &self.checked.plan));
        check_halves(&self.checked.plan, answers.as_ref(), "validation answer")?;
        let training = self.started(ranks, backbone, logged_every, emit)?;
        TrainingLoop { answers, ..training }.run(interrupted)
    }

    /// What rank 0 does first: claims the run's folder.
    fn begin(&self, ranks: Ranks, resume: bool, emit: &mut dyn FnMut(RunEvent)) -> Result<BegunRun<'_>, TrainError> {
        let run = self.checked.plan.train.output_dir.as_path();
        let finished = run.join(FINAL);
        check_output_dir(run, resume)?;
        self.verify_sources()?;
        let folder = RunFolder::new(&self.checked)?;
        emit(RunEvent::Hashing { bytes: folder.bytes_to_hash() });
        // Claim an existing run's folder first: a run that may not be resumed must not create a hidden-state cache.
        // Otherwise lock the cache before creating the run folder.
        let begun = if checkpoint::holds_a_run(run)? { Some(folder.claim(resume)?) } else { None };
        let backbone = if finished.exists() { None } else { Some(self.training_backbone(ranks, emit)?) };
        let claimed = begun.map_or_else(|| folder.claim(resume), Ok)?;
        claimed.damaged.iter().for_each(|damaged| emit(RunEvent::Damaged(damaged)));
        if finished.exists() {
            checksums::verify(&finished)?;
            RunLog::restore_events(run)?;
        }
        if !claimed.changes.is_empty() {
            let total_steps = claimed.length_changed.then_some(self.checked.total_steps);
            let is_joint = !self.checked.plan.trained.is_frozen();
            emit(RunEvent::RecipeChanged { keys: &claimed.changes, total_steps, is_joint });
        }
        let backbone = backbone.filter(|_| !finished.exists());
        if backbone.is_some() && resume && checkpoint::newest_step(run)?.is_none() {
            emit(RunEvent::NoCheckpoint);
        }
        Ok(BegunRun { claimed, backbone })
    }

    /// What evaluations measure tokens per step on, besides the validation rows.
    fn own_answers(&self, interrupted: &AtomicBool, emit: &mut dyn FnMut(RunEvent)) -> Result<OwnAnswers, TrainError> {
        let Some(most) = MeasuredTexts::of(&self.checked)?.and_then(MeasuredTexts::answers) else {
            return Ok(OwnAnswers::Rows(None));
        };
        let rows = own_answers::kept_or_made(&self.checked, &self.backbone, most, &mut |done, prompts| {
            emit(RunEvent::Answering { done, prompts });
            if interrupted.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(rows.map_or(OwnAnswers::Interrupted, |rows| OwnAnswers::Rows(Some(rows))))
    }

    /// What the run starts from must be as it was written, where there are checksums.
    fn verify_sources(&self) -> Result<(), TrainError> {
        let plan = &self.checked.plan;
        let backbone = gguf::folder::on_disk(Path::new(&plan.backbone.path));
        let start = plan.drafter.start()?.map(|start| start.folder);
        let folders = [Some(backbone), start.as_deref(), plan.trained.adapter_to_start_from().map(PathBuf::as_path)];
        Ok(folders.into_iter().flatten().try_for_each(|folder| checksums::verify(folder).map(drop))?)
    }

    /// The loop at step 0, or at the newest checkpoint; `logged_every` is that of the steps before it.
    fn started<'r, 't>(
        &'r self,
        ranks: Ranks<'r>,
        backbone: TrainingBackbone<'r>,
        logged_every: Option<NonZeroUsize>,
        emit: &'t mut dyn FnMut(RunEvent),
    ) -> Result<TrainingLoop<'r, 't>, TrainError> {
        let plan = &self.checked.plan;
        let state = guard("making the heads", || self.first_state(ranks));
        let mut state = ranks.agree(state.map_err(TrainError::from).flatten())?;
        let fingerprint = ranks.is_first().then(|| self.fingerprint()).transpose();
        let fingerprint = ranks.agree(fingerprint.map_err(TrainError::from))?.flatten();
        let template = self.checked.template.as_ref();
        let checkpoints = Checkpoints { plan, backbone: &self.backbone, template, fingerprint };
        if let Some(checkpoint) = checkpoints.restore_newest(&mut state, ranks)? {
            let is_verified = checkpoint.join(CHECKSUMS).exists();
            emit(RunEvent::Resumed { checkpoint: &checkpoint, is_verified });
        }
        state.take_values_of_first(ranks)?;
        memory::keep_freed_blocks();
        let log = ranks.is_first().then(|| open_log(&plan.train.output_dir, state.step)).transpose();
        let log = ranks.agree(log)?;
        let logged_every = logged_every.unwrap_or(plan.train.log_every);
        if let Some((steps, log)) = log.as_ref().and_then(|log| Some((log.gap(state.step, logged_every)?, log))) {
            emit(RunEvent::LogLacks { path: log.path(), steps });
        }
        let watch = LossWatch::default();
        Ok(TrainingLoop {
            checked: &self.checked,
            ranks,
            backbone,
            checkpoints,
            state,
            answers: None,
            log,
            watch,
            emit,
        })
    }

    /// That of the backbone's files, read before the first step: a folder that is removed later is no reason to lose a checkpoint. `None` where
    /// only some of the weights are there, or have one.
    fn fingerprint(&self) -> Result<Option<String>, LoadError> {
        let plan = &self.checked.plan;
        if plan.trained == BackboneTraining::Full {
            return Ok(None);
        }
        match WeightFiles::open(Path::new(&plan.backbone.path)).and_then(|files| files.fingerprint()) {
            Err(error @ WeightsError::File(_)) => Err(error.into()),
            fingerprint => Ok(fingerprint.ok()),
        }
    }

    fn training_backbone(
        &self,
        ranks: Ranks,
        emit: &mut dyn FnMut(RunEvent),
    ) -> Result<TrainingBackbone<'_>, TrainError> {
        let plan = &self.checked.plan;
        if let Some(captured) = &self.checked.captured {
            if let Some(next_tokens) = guard("reading hidden states", || self.next_tokens(captured))?? {
                emit(RunEvent::CapturedStates(next_tokens));
            }
            return Ok(TrainingBackbone::new(&self.backbone, plan, StatesSource::Captured(captured.clone())));
        }
        let caches = match &plan.train.hidden_state_cache {
            Some(folder) if ranks.is_alone() => self.caches(folder, emit)?,
            Some(folder) => self.complete_caches(folder, emit)?,
            None => StatesCaches::default(),
        };
        if let Some(kept) = &caches.train {
            emit(RunEvent::HiddenStates {
                path: kept.path(),
                filled: kept.filled(),
                rows: kept.rows(),
                are_verified: kept.has_checksums(),
            });
        }
        Ok(TrainingBackbone::new(&self.backbone, plan, StatesSource::Backbone(caches.into())))
    }

    /// The LM head on the hidden states of the first training rows.
    fn next_tokens(&self, captured: &CapturedSplits) -> Result<Option<NextTokens>, TrainError> {
        let Self { checked, backbone } = self;
        let rule = TargetRule::new(&checked.plan.loss, checked.drafter.reads());
        let reader = captured.train.reader(rule, backbone);
        let batches = checked.batches(0, BatchShare::WHOLE)?;
        let vocab_size = usize::try_from(backbone.config.vocab_size).expect("a checked config");
        let pairs = TokenPairs::of(checked.train.sequences().iter(), vocab_size).map_err(DataError::from)?;
        Ok(NextTokens::of(backbone, &reader, &batches[0], &pairs)?)
    }

    /// The caches that several processes use: those with the states of all rows, which they only read.
    fn complete_caches(&self, folder: &Path, emit: &mut dyn FnMut(RunEvent)) -> Result<StatesCaches<'_>, TrainError> {
        let CheckedRun { train, validation, .. } = &self.checked;
        let place = self.states_place(folder, train.sequences())?;
        let path = place.path().to_owned();
        let Some(kept) = place.open_if_complete(&self.backbone)? else {
            emit(RunEvent::CacheIncomplete(&path));
            return Ok(StatesCaches::default());
        };
        let places = validation.as_ref().map(|rows| self.states_place(folder, rows.sequences())).transpose()?;
        let validation = match places {
            Some(place) if place.path() == path => ValidationCache::OfTrain,
            Some(place) => place.open_if_complete(&self.backbone)?.map_or(ValidationCache::Off, ValidationCache::Own),
            None => ValidationCache::Off,
        };
        Ok(StatesCaches { train: Some(kept), validation })
    }

    /// The caches of the rows' hidden states, as far as the disk has space for them.
    fn caches(&self, folder: &Path, emit: &mut dyn FnMut(RunEvent)) -> Result<StatesCaches<'_>, TrainError> {
        let CheckedRun { train, validation, .. } = &self.checked;
        let mut opened = |place: StatesPlace, split, other_bytes| match place.open(&self.backbone, other_bytes) {
            Ok(kept) => Ok(Some(kept)),
            Err(why) if why.is_full_disk() => {
                emit(RunEvent::CacheLacks(split, &why));
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
        let CheckedRun { plan, drafter, .. } = &self.checked;
        let rule = TargetRule::new(&plan.loss, drafter.reads());
        let trained = self.checked.memory().whole().groups.into_iter().filter(|group| group.trained);
        let reserved_bytes = trained.map(|group| group.weight_bytes + group.optimizer_bytes).sum();
        let backbone_folder = Path::new(&plan.backbone.path);
        let settings = CacheSettings { folder, backbone_folder, rule, reserved_bytes };
        Ok(StatesPlace::new(&settings, &self.backbone, rows)?)
    }

    fn first_state(&self, ranks: Ranks) -> Result<TrainState, TrainError> {
        let plan = &self.checked.plan;
        let Self { backbone, .. } = self;
        let tokens = self.checked.draft_vocabulary.as_ref().map(|vocabulary| &vocabulary.tokens[..]);
        let drafter = self.checked.drafter.build(backbone, tokens, plan.train.seed)?;
        Ok(TrainState::for_rank(drafter, &self.backbone, plan, ranks))
    }
}

/// The run's log after `step`. A run from step 0 removes the `best/` of the killed one before the log loses its lines: without them, `best/`
/// would say that checkpoints are missing.
fn open_log(run: &Path, step: usize) -> Result<RunLog, TrainError> {
    let best = run.join(BEST);
    if step == 0 && best.exists() {
        remove_folder(&best).map_err(failed("remove", &best))?;
    }
    Ok(RunLog::open(run, step)?)
}
