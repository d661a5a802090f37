//! A whole run: prepare everything, then steps, evaluations and checkpoints, and at the end `final/`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::data::chat_template::ChatTemplate;
use crate::data::loader::{Batch, Loader};
use crate::data::pack::PackReport;
use crate::data::tokenize::{TextTokenizer, TokenizeError};
use crate::data::{self, DataConfig, DataError, DataFile, LoadReport, LoadSettings};
use crate::files::write_atomic;
use crate::medusa::heads::{Heads, HeadsConfig, HeadsError, HeadsShape};
use crate::medusa::loss::LossConfig;
use crate::model::BackboneConfig;
use crate::model::llama::{Llama, LoadError, Purpose};
use crate::torch::optim::OptimizerConfig;
use crate::torch::{self, LIBTORCH_VERSION, TorchPanic, guard, memory};
use crate::train::TrainConfig;
use crate::train::checkpoint::{self, CheckpointError, HeadsFolderConfig};
use crate::train::hidden_states::{self, HiddenStates, HiddenStatesError, KeptStates};
use crate::train::log::{LogError, MetricsLine, RunLog, Split, UpdateLine};
use crate::train::schedule::ScheduleConfig;
use crate::train::state::TrainState;
use crate::train::step::{StepError, check_finite, evaluate, train_step};

const RECIPE: &str = "recipe.toml";
const PROVENANCE: &str = "provenance.json";

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
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizeError),
    /// The rows.
    #[error(transparent)]
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

fn in_words(shape: &HeadsShape) -> String {
    let HeadsShape { medusa_num_heads, medusa_num_layers, .. } = shape;
    let w2 = if shape.vocab_size == 0 { "the backbone's lm_head" } else { "their own output layer" };
    format!("medusa_num_heads = {medusa_num_heads}, medusa_num_layers = {medusa_num_layers} and {w2}")
}

fn with_advice(panic: &TorchPanic) -> String {
    let advice = if panic.out_of_memory { "; lower train.micro_batch_size or data.max_length" } else { "" };
    format!("{panic}{advice}")
}

/// What a recipe asks for.
#[derive(Debug, Clone)]
pub struct Job {
    /// The frozen backbone.
    pub backbone: BackboneConfig,
    /// The heads.
    pub heads: HeadsConfig,
    /// The loss.
    pub loss: LossConfig,
    /// The rows.
    pub data: DataConfig,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// The learning rate over time.
    pub schedule: ScheduleConfig,
    /// Steps, batches, folders.
    pub train: TrainConfig,
    /// The recipe with every default written out.
    pub resolved_recipe: String,
    /// Where to compute.
    pub device: Device,
}

/// Everything that a run needs, loaded and checked.
#[derive(Debug)]
pub struct Prepared {
    job: Job,
    backbone: Llama,
    train: Loader,
    validation: Option<Loader>,
    /// What was read to train on.
    pub train_report: LoadReport,
    /// What was read to validate on.
    pub validation_report: Option<LoadReport>,
    /// How the training rows became sequences.
    pub pack_report: PackReport,
    /// Optimizer steps of the whole run.
    pub total_steps: usize,
    /// The heads to train.
    pub heads_shape: HeadsShape,
}

/// What happens while a run goes on.
#[derive(Debug)]
pub enum Event<'e> {
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

/// `provenance.json`: where a run's numbers come from.
#[derive(Debug, Serialize, Deserialize)]
struct Provenance {
    program: String,
    git_revision: String,
    libtorch: String,
    device: String,
    threads: i32,
    command: Vec<String>,
    started: String,
    data: Vec<HashedFile>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct HashedFile {
    path: PathBuf,
    sha256: String,
}

impl Prepared {
    /// Loads backbone and rows and checks them against each other; writes nothing.
    ///
    /// # Errors
    /// [`TrainError`].
    pub fn load(job: Job) -> Result<Self, TrainError> {
        let folder = Path::new(&job.backbone.path);
        let kind = job.backbone.dtype.kind();
        let backbone = guard("loading the backbone", || Llama::load(folder, kind, job.device, Purpose::Training))??;
        let tokenizer = load_tokenizer(folder, backbone.config.vocab_size)?;
        let rows = load_rows(&job, tokenizer.as_ref(), backbone.config.vocab_size)?;
        let (sequences, pack_report) = data::sequences(rows.train, &job.data);
        let train = loader(sequences, &job, job.data.shuffle.then_some(job.train.seed));
        check_targets(&train, job.heads.medusa_num_heads.get())?;
        let validation = rows.validation.map(|rows| loader(data::sequences(rows, &job.data).0, &job, None));
        let epochs = job.train.epochs.map(|epochs| epochs.get() * train.steps_per_epoch());
        let total_steps = job.train.max_steps.map(|steps| steps.get()).or(epochs).unwrap_or(0);
        let warmup_steps = job.schedule.warmup_steps;
        if warmup_steps > total_steps {
            return Err(TrainError::WarmupTooLong { warmup_steps, total_steps });
        }
        let heads_shape = shape_of(&job.heads, &backbone);
        heads_to_start_from(&job.heads, heads_shape, &backbone)?; // what is wrong with them is told before anything is written
        let (train_report, validation_report) = (rows.train_report, rows.validation_report);
        Ok(Self {
            job,
            backbone,
            train,
            validation,
            train_report,
            validation_report,
            pack_report,
            total_steps,
            heads_shape,
        })
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
        let run = self.job.train.output_dir.as_path();
        let finished = run.join(checkpoint::FINAL);
        self.claim_folder(run, resume)?;
        if finished.exists() {
            return Ok(Outcome::FinishedBefore(finished));
        }
        torch::seed(self.job.train.seed);
        let mut state = guard("making the heads", || self.first_state())??;
        if let Some(checkpoint) = checkpoint::newest(run)? {
            checkpoint::restore(&checkpoint, &mut state)?;
            tell(Event::Resumed(&checkpoint));
        }
        let mut hidden_states = self.hidden_states(tell)?;
        memory::keep_freed_blocks();
        let mut log = RunLog::open(run, state.step)?;
        while state.step < self.total_steps {
            let line = self.step(&mut state, &mut hidden_states)?;
            self.after_step(&state, &line, &mut log, tell)?;
            let saves = state.step.is_multiple_of(self.job.train.save_every.get());
            let stop = interrupted.load(Ordering::Relaxed) && state.step < self.total_steps;
            if saves || stop {
                check_finite(&state)?;
                hidden_states.commit()?;
                log.sync()?;
                let saved = checkpoint::save_step(run, &state, self.job.train.keep_checkpoints)?;
                tell(Event::Saved(&saved));
                if stop {
                    return Ok(Outcome::Interrupted(saved));
                }
            }
        }
        check_finite(&state)?;
        hidden_states.commit()?;
        log.sync()?;
        Ok(Outcome::Finished(checkpoint::save_final(run, &state.heads, &self.heads_config())?))
    }

    /// Where the run writes.
    pub fn output_dir(&self) -> &Path {
        &self.job.train.output_dir
    }

    /// The frozen backbone.
    pub fn backbone(&self) -> &Llama {
        &self.backbone
    }

    /// Sequences to train on and to validate on.
    pub fn sequence_counts(&self) -> (usize, usize) {
        (self.train.sequences().len(), self.validation.as_ref().map_or(0, |rows| rows.sequences().len()))
    }

    /// Bytes on disk that `train.hidden_state_cache` takes, where the recipe has it.
    pub fn hidden_state_bytes(&self) -> Option<u64> {
        let num_heads = self.heads_shape.medusa_num_heads;
        let bytes = || hidden_states::file_bytes(self.train.sequences(), num_heads, &self.backbone);
        self.job.train.hidden_state_cache.as_ref().map(|_| bytes())
    }

    /// The micro batches of an optimizer step, counted from 0.
    pub fn batches(&self, step: usize) -> Vec<Batch> {
        self.train.step(step)
    }

    /// Optimizer steps of one pass over the training rows.
    pub fn steps_per_epoch(&self) -> usize {
        self.train.steps_per_epoch()
    }

    /// Where steps get hidden states from, as the recipe says.
    fn hidden_states(&self, tell: &mut dyn FnMut(Event)) -> Result<HiddenStates<'_>, TrainError> {
        let Some(folder) = &self.job.train.hidden_state_cache else {
            return Ok(HiddenStates::Computed(&self.backbone));
        };
        let (from, num_heads) = (Path::new(&self.job.backbone.path), self.heads_shape.medusa_num_heads);
        let kept = KeptStates::open(folder, &self.backbone, from, self.train.sequences(), num_heads)?;
        let sequences = self.train.sequences().len();
        tell(Event::HiddenStates { path: kept.path(), filled: kept.filled(), sequences });
        Ok(HiddenStates::Kept(kept))
    }

    fn step(&self, state: &mut TrainState, hidden_states: &mut HiddenStates) -> Result<MetricsLine, TrainError> {
        let began = Instant::now();
        let batches = self.train.step(state.step);
        let rate = self.job.optimizer.learning_rate.get() * self.job.schedule.factor(state.step, self.total_steps);
        let max_norm = self.job.optimizer.max_grad_norm.get();
        let work = format!("training step {}", state.step + 1);
        let outcome = guard(&work, || train_step(hidden_states, state, &batches, &self.job.loss, rate, max_norm))??;
        let mut line =
            MetricsLine::new(Split::Train, state.step, self.epoch(state.step), state.tokens, &outcome.metrics);
        line.update = Some(UpdateLine {
            lr: rate,
            heads_lr: rate,
            lambda0: 1.0,
            grad_norm: outcome.grad_norm,
            tokens_per_second: outcome.metrics.tokens as f64 / began.elapsed().as_secs_f64(),
            memory_bytes: memory::process().map(|memory| memory.resident_bytes),
        });
        Ok(line)
    }

    fn after_step(
        &self,
        state: &TrainState,
        line: &MetricsLine,
        log: &mut RunLog,
        tell: &mut dyn FnMut(Event),
    ) -> Result<(), TrainError> {
        let last = state.step == self.total_steps;
        if last || state.step.is_multiple_of(self.job.train.log_every.get()) {
            log.append(line)?;
        }
        tell(Event::Stepped(line));
        let due = self.job.train.eval_every.is_some_and(|every| state.step.is_multiple_of(every.get()));
        if let Some(validation) = self.validation.as_ref().filter(|_| due || last) {
            let batches: Vec<Batch> = validation.eval_batches().collect();
            let metrics = guard("the evaluation", || evaluate(&self.backbone, &state.heads, &batches, &self.job.loss))?;
            if !metrics.loss.is_finite() {
                return Err(StepError::EvaluationNotFinite { step: state.step, value: metrics.loss }.into());
            }
            let line =
                MetricsLine::new(Split::Validation, state.step, self.epoch(state.step), metrics.tokens, &metrics);
            log.append(&line)?;
            tell(Event::Evaluated(&line));
        }
        Ok(())
    }

    fn epoch(&self, step: usize) -> f64 {
        step as f64 / self.train.steps_per_epoch() as f64
    }

    fn first_state(&self) -> Result<TrainState, TrainError> {
        let heads = match heads_to_start_from(&self.job.heads, self.heads_shape, &self.backbone)? {
            None => Heads::new(&self.job.heads, self.backbone.lm_head_weight().expect("loaded for training")),
            Some(heads) => heads.for_training(),
        };
        Ok(TrainState::new(heads, self.job.optimizer.clone()))
    }

    fn heads_config(&self) -> HeadsFolderConfig<'_> {
        HeadsFolderConfig {
            base_model_name_or_path: &self.job.backbone.path,
            medusa_num_heads: self.heads_shape.medusa_num_heads,
            medusa_num_layers: self.heads_shape.medusa_num_layers,
            hidden_size: self.backbone.config.hidden_size,
            vocab_size: self.backbone.config.vocab_size,
        }
    }

    /// Makes the run's folder, or checks that the one there is this run's.
    fn claim_folder(&self, run: &Path, resume: bool) -> Result<(), TrainError> {
        let taken = |why: String| TrainError::OutputTaken { path: run.into(), why };
        if checkpoint::holds_a_run(run)? {
            if !resume {
                return check_output_dir(run);
            }
            if run.join(RECIPE).exists() {
                self.check_same_run(run).map_err(taken)?;
                return Ok(checkpoint::remove_partial(run)?);
            }
            if !checkpoint::holds_only(run, PROVENANCE)? {
                let why = "holds files but no recipe.toml, so no run to resume: choose another folder";
                return Err(taken(why.into()));
            } // else interrupted between the two files: nothing was trained yet
        }
        let io = |source| TrainError::Io { path: run.into(), source };
        fs::create_dir_all(run).map_err(io)?;
        self.fill_folder(run).inspect_err(|_| {
            let _ = fs::remove_file(run.join(PROVENANCE)); // best effort: the error that led here is the one to report
            let _ = fs::remove_dir(run);
        })
    }

    fn fill_folder(&self, run: &Path) -> Result<(), TrainError> {
        let write = |name: &str, text: &str| {
            let path = run.join(name);
            write_atomic(&path, |out| out.write_all(text.as_bytes())).map_err(|source| TrainError::Io { path, source })
        };
        checkpoint::remove_partial(run)?;
        write(PROVENANCE, &(serde_json::to_string_pretty(&self.provenance()).expect("plain data") + "\n"))?;
        // Last: a folder with a recipe.toml has everything that a resumed run checks.
        write(RECIPE, &self.job.resolved_recipe)
    }

    fn check_same_run(&self, run: &Path) -> Result<(), String> {
        let read = |name: &str| {
            fs::read_to_string(run.join(name)).map_err(|e| format!("holds a run whose {name} cannot be read: {e}"))
        };
        if let Some(difference) = difference(&read(RECIPE)?, &self.job.resolved_recipe) {
            return Err(format!("holds another run: {difference}; use that recipe, or another folder"));
        }
        let before: Provenance = serde_json::from_str(&read(PROVENANCE)?)
            .map_err(|e| format!("holds a run whose provenance.json is broken: {e}"))?;
        let now = self.data_files();
        let changed = |one: &[HashedFile], other: &[HashedFile]| {
            one.iter().find(|file| !other.contains(file)).map(|file| file.path.display().to_string())
        };
        match changed(&before.data, &now).or_else(|| changed(&now, &before.data)) {
            None if before.data == now => Ok(()),
            file => Err(format!(
                "holds a run on other data: {} changed since it began; a resumed run must see the same rows",
                file.as_deref().unwrap_or("the order of the files")
            )),
        }
    }

    fn provenance(&self) -> Provenance {
        Provenance {
            program: format!("medusa-train {}", env!("CARGO_PKG_VERSION")),
            git_revision: env!("MEDUSA_GIT_REVISION").into(),
            libtorch: LIBTORCH_VERSION.into(),
            device: torch::device_name(self.job.device),
            threads: tch::get_num_threads(),
            command: std::env::args().collect(),
            started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            data: self.data_files(),
        }
    }

    fn data_files(&self) -> Vec<HashedFile> {
        let reports = [Some(&self.train_report), self.validation_report.as_ref()];
        let files = reports.into_iter().flatten().flat_map(|report| &report.files);
        files.map(|DataFile { path, sha256, .. }| HashedFile { path: path.clone(), sha256: sha256.clone() }).collect()
    }
}

/// What two recipes say differently, for people; `None` for equal ones.
fn difference(before: &str, now: &str) -> Option<String> {
    let only_in = |one: &str, other: &str| {
        let line = one.lines().find(|line| !other.lines().any(|l| l == *line));
        line.map(str::to_owned)
    };
    match (only_in(before, now), only_in(now, before)) {
        _ if before == now => None,
        (Some(old), Some(new)) => Some(format!("its recipe.toml says `{old}`, this recipe `{new}`")),
        (Some(old), None) => Some(format!("its recipe.toml says `{old}`, this recipe does not")),
        (None, Some(new)) => Some(format!("this recipe says `{new}`, its recipe.toml does not")),
        (None, None) => Some("its recipe.toml has the same lines in other tables".into()),
    }
}

/// Refuses an output folder that holds anything; looks at nothing else, so it can be asked before the first expensive second.
///
/// # Errors
/// [`TrainError::OutputTaken`].
pub fn check_output_dir(run: &Path) -> Result<(), TrainError> {
    if !checkpoint::holds_a_run(run)? {
        return Ok(());
    }
    let why = "is not empty: go on with --resume, or choose another folder (nothing is ever overwritten)";
    Err(TrainError::OutputTaken { path: run.into(), why: why.into() })
}

fn shape_of(heads: &HeadsConfig, backbone: &Llama) -> HeadsShape {
    HeadsShape {
        medusa_num_heads: heads.medusa_num_heads.get(),
        medusa_num_layers: heads.medusa_num_layers.get(),
        hidden_size: backbone.config.hidden_size,
        vocab_size: if heads.shared_lm_head { 0 } else { backbone.config.vocab_size },
    }
}

/// `heads.init_from`, in float32: a backbone of fewer bits says nothing about the heads.
fn heads_to_start_from(
    config: &HeadsConfig,
    expected: HeadsShape,
    backbone: &Llama,
) -> Result<Option<Heads>, TrainError> {
    let Some(path) = &config.init_from else { return Ok(None) };
    let size = [backbone.config.vocab_size, backbone.config.hidden_size];
    let heads = Heads::load_for(path, size, Kind::Float, backbone.device())?;
    let got = heads.shape();
    if got == expected { Ok(Some(heads)) } else { Err(TrainError::InitShape { path: path.into(), expected, got }) }
}

/// Rows of tokens need no tokenizer, so a folder without one is no error here.
fn load_tokenizer(folder: &Path, vocab_size: i64) -> Result<Option<TextTokenizer>, TrainError> {
    if !folder.join("tokenizer.json").exists() {
        return Ok(None);
    }
    let tokenizer = TextTokenizer::load(folder)?;
    tokenizer.check_vocabulary(usize::try_from(vocab_size).expect("a checked config"))?;
    Ok(Some(tokenizer))
}

struct Rows {
    train: Vec<data::rows::TokenRow>,
    train_report: LoadReport,
    validation: Option<Vec<data::rows::TokenRow>>,
    validation_report: Option<LoadReport>,
}

fn load_rows(job: &Job, tokenizer: Option<&TextTokenizer>, vocab_size: i64) -> Result<Rows, TrainError> {
    let cache = data::cache::TokenCache::of_user();
    let vocab_size = usize::try_from(vocab_size).expect("a checked config");
    let template = ChatTemplate::choose(&job.data.chat_template, Path::new(&job.backbone.path));
    let template = template.map_err(DataError::from)?;
    let settings = LoadSettings {
        tokenizer,
        vocab_size,
        max_length: job.data.max_length,
        cache: cache.as_ref(),
        template: template.as_ref(),
        loss_on: job.data.loss_on,
    };
    let (train, train_report) = data::load(&job.data.train, &settings)?;
    if !job.data.validation.is_empty() {
        let (validation, report) = data::load(&job.data.validation, &settings)?;
        return Ok(Rows { train, train_report, validation: Some(validation), validation_report: Some(report) });
    }
    let Some(fraction) = job.data.validation_fraction else {
        return Ok(Rows { train, train_report, validation: None, validation_report: None });
    };
    let (train, validation) = data::split_validation(train, fraction, job.train.seed)?;
    Ok(Rows { train, train_report, validation: Some(validation), validation_report: None })
}

fn loader(sequences: Vec<data::pack::Sequence>, job: &Job, shuffle: Option<u64>) -> Loader {
    let (micro, accumulation) = (job.train.micro_batch_size.get(), job.train.gradient_accumulation_steps.get());
    Loader::new(sequences, micro, accumulation, shuffle)
}

fn check_targets(train: &Loader, num_heads: usize) -> Result<(), TrainError> {
    let has_target = |ahead: usize| train.eval_batches().any(|batch| !batch.targets(ahead).positions.is_empty());
    match (1..=num_heads).find(|head| !has_target(head + 1)) {
        Some(head) => Err(TrainError::NoTargetForHead { head, ahead: head + 1 }),
        None => Ok(()),
    }
}
