//! A whole run: the backbone and what was checked for it, then steps, evaluations and checkpoints, and at the end `final/`.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tch::Kind;

use crate::data::DataError;
use crate::data::chat_template::TemplateChoice;
use crate::data::tokenize::TokenizeError;
use crate::draft::medusa::heads::import::HeadsFile;
use crate::draft::medusa::heads::{Heads, HeadsConfig, HeadsError, HeadsShape};
use crate::model::adapters;
use crate::model::backward::Keep;
use crate::model::llama::Llama;
use crate::model::loading::{LoadError, Purpose};
use crate::model::peft::{self, ADAPTER_CONFIG, ADAPTER_FILE, PeftError};
use crate::model::weights;
use crate::numbers::Positive;
use crate::torch::{self, TorchPanic, guard, memory};
use crate::train::checked::{Checked, Job};
use crate::train::checkpoint::{self, CheckpointError, HeadsFolderConfig, TrainedBackbone};
use crate::train::hidden_states::{HiddenStates, HiddenStatesError, KeptStates};
use crate::train::joint::Joint;
use crate::train::log::{LogError, MetricsLine, RunLog, Split, UpdateLine};
use crate::train::run_folder::{RunFolder, check_output_dir};
use crate::train::stage::Stage;
use crate::train::state::TrainState;
use crate::train::step::{Evaluated, Source, StepError, StepWeights, check_finite, evaluate, train_step};

/// Why a run ended early, or did not begin.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The backbone.
    #[error(transparent)]
    Backbone(#[from] LoadError),
    /// The heads to start from.
    #[error("heads.init_from: {0}")]
    InitFrom(#[from] HeadsError),
    /// The heads to start from have another shape than the recipe's.
    #[error("heads.init_from {}: expected {}, as in the recipe, got {}", path.display(), in_words(expected), in_words(got))]
    InitShape {
        /// The folder.
        path: PathBuf,
        /// The recipe's.
        expected: HeadsShape,
        /// The folder's.
        got: HeadsShape,
    },
    /// The adapter to start from.
    #[error("stage.medusa2.lora.init_from: {0}")]
    Adapter(#[from] PeftError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizeError),
    /// The rows.
    #[error("{_0}{}", skipping(_0))]
    Data(#[from] DataError),
    /// Rows from which a head can learn nothing.
    #[error(
        "head {head} has no target in the training data: it predicts the token {ahead} further on, and no sequence has a label there; use longer rows, rows with more labels, or fewer heads"
    )]
    NoTargetForHead {
        /// 1-based.
        head: usize,
        /// How far ahead it predicts.
        ahead: usize,
    },
    /// The learning rate would never reach its peak.
    #[error(
        "schedule.warmup_steps = {warmup_steps}, but the run has only {total_steps} optimizer steps; lower it, or train for more epochs"
    )]
    WarmupTooLong {
        /// The recipe's.
        warmup_steps: usize,
        /// All steps of the run.
        total_steps: usize,
    },
    /// More steps than can be counted.
    #[error(
        "train.epochs = {epochs} of {steps_per_epoch} optimizer steps each are more than can be counted; lower train.epochs, or raise \
         train.gradient_accumulation_steps"
    )]
    TooManySteps {
        /// The recipe's.
        epochs: usize,
        /// Of the rows, in the recipe's batches.
        steps_per_epoch: usize,
    },
    /// The output folder belongs to something else.
    #[error("train.output_dir {} {why}", path.display())]
    OutputTaken {
        /// The folder.
        path: PathBuf,
        /// What is there, and what to do.
        why: String,
    },
    /// A checkpoint or a final folder.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// metrics.jsonl or the event files.
    #[error(transparent)]
    Log(#[from] LogError),
    /// A file of the run's folder.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Kept hidden states.
    #[error(transparent)]
    HiddenStates(#[from] HiddenStatesError),
    /// A step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// libtorch.
    #[error("{}", with_advice(_0))]
    Torch(#[from] TorchPanic),
}

impl TrainError {
    /// Whether it is the recipe that has to change: its numbers do not go together with each other, or with what it names.
    pub fn is_of_the_recipe(&self) -> bool {
        match self {
            Self::InitShape { .. } | Self::WarmupTooLong { .. } | Self::TooManySteps { .. } => true,
            Self::Data(DataError::Template(error)) => error.is_no_template(),
            _ => false,
        }
    }
}

fn in_words(shape: &HeadsShape) -> String {
    let HeadsShape { medusa_num_heads, medusa_num_layers, .. } = shape;
    let w2 = if shape.vocab_size == 0 { "the backbone's lm_head" } else { "their own output layer" };
    format!("medusa_num_heads = {medusa_num_heads}, medusa_num_layers = {medusa_num_layers} and {w2}")
}

/// What can be done about a row that is not right, besides setting it right.
fn skipping(error: &DataError) -> &'static str {
    match error {
        DataError::Row(row) if row.problem.kind().is_some() => "; --skip-bad-rows leaves out and counts such rows",
        _ => "",
    }
}

fn with_advice(panic: &TorchPanic) -> String {
    let advice = if panic.out_of_memory { "; lower train.micro_batch_size or data.max_length" } else { "" };
    format!("{panic}{advice}")
}

/// Everything that a run needs.
#[derive(Debug)]
pub struct Prepared {
    checked: Checked,
    backbone: Llama,
}

/// What happens while a run goes on.
#[derive(Debug)]
pub enum Event<'e> {
    /// So many bytes of weights that no commit names are read to know them again.
    Hashing {
        /// Of the files that were not read so before.
        bytes: u64,
    },
    /// The run goes on from this checkpoint.
    Resumed(&'e Path),
    /// Hidden states are kept in this file, for so many of the training sequences already.
    HiddenStates {
        /// The file.
        path: &'e Path,
        /// Sequences that need no backbone.
        filled: usize,
        /// All sequences.
        sequences: usize,
    },
    /// An optimizer step was made.
    Stepped(&'e MetricsLine),
    /// The validation rows were evaluated.
    Evaluated(&'e MetricsLine),
    /// A checkpoint was written.
    Saved(&'e Path),
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done; the finished heads.
    Finished(PathBuf),
    /// They were done before this run began.
    FinishedBefore(PathBuf),
    /// Stopped from outside; the checkpoint to go on from.
    Interrupted(PathBuf),
}

impl Checked {
    /// Loads the backbone.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn with_backbone(self) -> Result<Prepared, TrainError> {
        let backbone = guard("loading the backbone", || load_backbone(&self.job))??;
        Ok(Prepared { checked: self, backbone })
    }
}

impl Prepared {
    /// [`Checked::load`], then [`Checked::with_backbone`].
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn load(job: Job) -> Result<Self, TrainError> {
        Checked::load(job)?.with_backbone()
    }

    /// What was checked before the backbone was loaded.
    pub fn checked(&self) -> &Checked {
        &self.checked
    }

    /// Trains to the end, or until `interrupted` is set. With `resume` it goes on from the newest checkpoint in the output
    /// folder, if there is one; without, the folder must be absent or empty.
    ///
    /// # Errors
    /// [`TrainError`]; checkpoints written before stay.
    pub fn train(
        &self,
        resume: bool,
        interrupted: &AtomicBool,
        tell: &mut dyn FnMut(Event),
    ) -> Result<Outcome, TrainError> {
        let run = self.checked.job.train.output_dir.as_path();
        let finished = run.join(checkpoint::FINAL);
        check_output_dir(run, resume)?;
        let folder = self.folder()?;
        tell(Event::Hashing { bytes: folder.bytes_to_hash() });
        // A run that is not to be resumed makes no file of hidden states; hidden states that another run fills make no run's folder.
        let begun = if checkpoint::holds_a_run(run)? { Some(folder.claim(resume)?) } else { None };
        let source = if finished.exists() { None } else { Some(self.source(tell)?) };
        let _mine = begun.map_or_else(|| folder.claim(resume), Ok)?;
        let Some(mut source) = source.filter(|_| !finished.exists()) else {
            return Ok(Outcome::FinishedBefore(finished));
        };
        torch::seed(self.checked.job.train.seed);
        let mut state = guard("making the heads", || self.first_state())??;
        if let Some(checkpoint) = checkpoint::newest(run)? {
            checkpoint::restore(&checkpoint, &mut state, &self.trained())?;
            tell(Event::Resumed(&checkpoint));
        }
        memory::keep_freed_blocks();
        let mut log = RunLog::open(run, state.step)?;
        if state.step == 0 && matches!(source, Source::Joint(_)) {
            self.evaluate(&state, &mut log, tell)?; // the backbone before training: what its perplexity is compared with
        }
        while state.step < self.checked.total_steps {
            let line = self.step(&mut state, &mut source)?;
            self.after_step(&state, &line, &mut log, tell)?;
            let saves = state.step.is_multiple_of(self.checked.job.train.save_every.get());
            let stop = interrupted.load(Ordering::Relaxed) && state.step < self.checked.total_steps;
            if saves || stop {
                check_finite(&state)?;
                source.commit()?;
                log.sync()?;
                let saved =
                    checkpoint::save_step(run, &state, &self.trained(), self.checked.job.train.keep_checkpoints)?;
                tell(Event::Saved(&saved));
                if stop {
                    return Ok(Outcome::Interrupted(saved));
                }
            }
        }
        check_finite(&state)?;
        source.commit()?;
        log.sync()?;
        Ok(Outcome::Finished(checkpoint::save_final(run, &state.heads, &self.heads_config(), &self.trained())?))
    }

    /// The frozen backbone.
    pub fn backbone(&self) -> &Llama {
        &self.backbone
    }

    fn tokenizing_files(&self) -> Vec<PathBuf> {
        let names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
        let own = names.map(|name| Path::new(&self.checked.job.backbone.path).join(name));
        let given = if let TemplateChoice::File(path) = &self.checked.job.data.chat_template {
            Some(path.clone())
        } else {
            None
        };
        own.into_iter().chain(given).collect()
    }

    /// Of a snapshot the commit says which weights.
    fn backbone_files(&self) -> Vec<PathBuf> {
        let folder = Path::new(&self.checked.job.backbone.path);
        let weights = match self.checked.job.snapshot {
            None => weights::files_of(folder).unwrap_or_default(), // they were loaded from there: there is no error to tell
            Some(_) => Vec::new(),
        };
        ["config.json", "special_tokens_map.json"].map(|name| folder.join(name)).into_iter().chain(weights).collect()
    }

    /// What heads and adapters begin with.
    fn init_from_files(&self) -> Result<Vec<PathBuf>, TrainError> {
        let heads = self.checked.job.heads.init_from.as_deref().map(HeadsFile::open).transpose()?;
        let mut files = heads.map(|heads| heads.files()).unwrap_or_default();
        if let Stage::Medusa2(config) = &self.checked.job.stage
            && let Some(adapter) = config.lora.as_ref().and_then(|lora| lora.init_from.as_ref())
        {
            files.extend([ADAPTER_FILE, ADAPTER_CONFIG].map(|name| adapter.join(name)));
        }
        Ok(files)
    }

    fn folder(&self) -> Result<RunFolder<'_>, TrainError> {
        Ok(RunFolder {
            path: &self.checked.job.train.output_dir,
            resolved_recipe: &self.checked.job.resolved_recipe,
            snapshot: self.checked.job.snapshot.as_ref(),
            sources: &self.checked.job.sources,
            backbone_files: self.backbone_files(),
            init_from_files: self.init_from_files()?,
            device: self.checked.job.device,
            skip_bad_rows: self.checked.job.skip_bad_rows,
            tokenizing: self.tokenizing_files(),
            reports: [Some(&self.checked.train_report), self.checked.validation_report.as_ref()],
        })
    }

    /// Where steps get hidden states from, as the recipe says.
    fn source(&self, tell: &mut dyn FnMut(Event)) -> Result<Source<'_>, TrainError> {
        if let Some(joint) = self.joint() {
            return Ok(Source::Joint(joint));
        }
        let Some(folder) = &self.checked.job.train.hidden_state_cache else {
            return Ok(Source::Frozen(HiddenStates::Computed(&self.backbone)));
        };
        let (from, num_heads) = (Path::new(&self.checked.job.backbone.path), self.checked.heads_shape.medusa_num_heads);
        let kept = KeptStates::open(folder, &self.backbone, from, self.checked.train.sequences(), num_heads)?;
        let sequences = self.checked.train.sequences().len();
        tell(Event::HiddenStates { path: kept.path(), filled: kept.filled(), sequences });
        Ok(Source::Frozen(HiddenStates::Kept(kept)))
    }

    /// How Medusa-2 trains the backbone.
    fn joint(&self) -> Option<Joint<'_>> {
        let Stage::Medusa2(config) = &self.checked.job.stage else { return None };
        let keep = if self.checked.job.train.recompute { Keep::Inputs } else { Keep::Everything };
        Some(Joint { backbone: &self.backbone, config, keep, seed: self.checked.job.train.seed })
    }

    /// What of the backbone a checkpoint holds.
    fn trained(&self) -> TrainedBackbone<'_> {
        let (backbone, from) = (&self.backbone, Path::new(&self.checked.job.backbone.path));
        match &self.checked.job.stage {
            Stage::Medusa1(_) => TrainedBackbone::Frozen,
            Stage::Medusa2(config) if config.lora.is_some() => {
                TrainedBackbone::Adapters { backbone, from: Path::new(self.checked.job.backbone_name()) }
            }
            Stage::Medusa2(_) => TrainedBackbone::Weights { backbone, from },
        }
    }

    fn step(&self, state: &mut TrainState, source: &mut Source) -> Result<MetricsLine, TrainError> {
        let began = Instant::now();
        let batches = self.checked.batches(state.step)?;
        let rate = self.checked.job.optimizer.learning_rate.get()
            * self.checked.job.schedule.factor(state.step, self.checked.total_steps);
        let lambda0 = self.lambda0(state.step);
        let max_grad_norm = self.checked.job.optimizer.max_grad_norm.get();
        let weights = StepWeights { loss: &self.checked.job.loss, lambda0, rate, max_grad_norm };
        let work = format!("training step {}", state.step + 1);
        let outcome = guard(&work, || train_step(source, state, &batches, &weights))??;
        let mut line =
            MetricsLine::new(Split::Train, state.step, self.epoch(state.step), state.tokens, &outcome.metrics);
        line.update = Some(UpdateLine {
            lr: rate,
            heads_lr: rate * self.heads_rate(),
            lambda0,
            grad_norm: outcome.grad_norm,
            tokens_per_second: outcome.metrics.tokens as f64 / began.elapsed().as_secs_f64(),
            memory_bytes: memory::process().map(|memory| memory.resident_bytes),
        });
        Ok(line)
    }

    /// λ0 of the update made after `step` finished ones; 1 in Medusa-1.
    fn lambda0(&self, step: usize) -> f64 {
        match &self.checked.job.stage {
            Stage::Medusa1(_) => 1.0,
            Stage::Medusa2(config) => config.lambda0(step, self.checked.total_steps),
        }
    }

    /// The heads' learning rate ÷ the optimizer's.
    fn heads_rate(&self) -> f64 {
        self.checked.job.optimizer.medusa_lr_multiplier.map_or(1.0, Positive::get)
    }

    fn after_step(
        &self,
        state: &TrainState,
        line: &MetricsLine,
        log: &mut RunLog,
        tell: &mut dyn FnMut(Event),
    ) -> Result<(), TrainError> {
        let last = state.step == self.checked.total_steps;
        if last || state.step.is_multiple_of(self.checked.job.train.log_every.get()) {
            log.append(line)?;
        }
        tell(Event::Stepped(line));
        let due = self.checked.job.train.eval_every.is_some_and(|every| state.step.is_multiple_of(every.get()));
        if due || last { self.evaluate(state, log, tell) } else { Ok(()) }
    }

    /// On the validation rows, if there are some.
    fn evaluate(&self, state: &TrainState, log: &mut RunLog, tell: &mut dyn FnMut(Event)) -> Result<(), TrainError> {
        let Some(validation) = &self.checked.validation else { return Ok(()) };
        let batches = validation.eval_batches().map(|batch| batch.map_err(DataError::from));
        let lambda0 = self.lambda0(state.step);
        let what = self.joint().map_or(Evaluated::Frozen(&self.backbone), |joint| Evaluated::Joint(joint, lambda0));
        let metrics = guard("the evaluation", || evaluate(what, &state.heads, batches, &self.checked.job.loss))??;
        if !metrics.loss.is_finite() {
            return Err(StepError::EvaluationNotFinite { step: state.step, value: metrics.loss }.into());
        }
        let line = MetricsLine::new(Split::Validation, state.step, self.epoch(state.step), metrics.tokens, &metrics);
        log.append(&line)?;
        tell(Event::Evaluated(&line));
        Ok(())
    }

    fn epoch(&self, step: usize) -> f64 {
        step as f64 / self.checked.train.steps_per_epoch() as f64
    }

    fn first_state(&self) -> Result<TrainState, TrainError> {
        let heads = match heads_to_start_from(&self.checked.job.heads, &self.backbone)? {
            None => Heads::new(&self.checked.job.heads, self.backbone.lm_head_weight().expect("loaded for training")),
            Some(heads) => heads.for_training(),
        };
        let optimizer = self.checked.job.optimizer.clone();
        Ok(match self.checked.job.stage {
            Stage::Medusa1(_) => TrainState::new(heads, optimizer),
            Stage::Medusa2(_) => TrainState::joint(heads, self.heads_rate(), &self.backbone, optimizer),
        })
    }

    fn heads_config(&self) -> HeadsFolderConfig<'_> {
        HeadsFolderConfig {
            base_model_name_or_path: self.checked.job.backbone_name(),
            medusa_num_heads: self.checked.heads_shape.medusa_num_heads,
            medusa_num_layers: self.checked.heads_shape.medusa_num_layers,
            hidden_size: self.backbone.config.hidden_size,
            vocab_size: self.backbone.config.vocab_size,
        }
    }
}

/// The backbone as the stage trains it.
fn load_backbone(job: &Job) -> Result<Llama, TrainError> {
    let (folder, kind) = (Path::new(&job.backbone.path), job.backbone.dtype.kind());
    let quantization = job.backbone.quantization;
    let load = |kind| Llama::load_quantized(folder, kind, job.device, Purpose::Training, quantization);
    let Stage::Medusa2(config) = &job.stage else { return Ok(load(kind)?) };
    let Some(lora) = &config.lora else { return Ok(load(Kind::Float)?.for_fine_tuning(kind)) };
    let mut backbone = load(kind)?;
    match &lora.init_from {
        None => adapters::attach_new(&mut backbone, lora, job.train.seed),
        Some(adapter) => peft::attach(&mut backbone, adapter, Some(lora))?,
    }
    Ok(backbone)
}

/// `heads.init_from`, in float32: a backbone of fewer bits says nothing about the heads.
fn heads_to_start_from(heads: &HeadsConfig, backbone: &Llama) -> Result<Option<Heads>, TrainError> {
    let Some(path) = &heads.init_from else { return Ok(None) };
    let size = [backbone.config.vocab_size, backbone.config.hidden_size];
    Ok(Some(Heads::load_for(path, size, Kind::Float, backbone.device())?))
}
