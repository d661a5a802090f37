//! A run's folder: created once with the resolved recipe and its provenance; any other run is refused.

use std::fs;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::json;

use crate::data::cache::TokenCache;
use crate::data::captured::CapturedSet;
use crate::data::chat_template::TemplateChoice;
use crate::data::store::RowStore;
use crate::data::{DataError, DataFile, LoadReport, tokenize};
use crate::files::{
    self, FolderLock, failed, holder, in_words, lock_folder, make_folders, parent, put_back, sha256, sync_folder,
    write_atomic,
};
use crate::formats::provenance::{HashedFile, Provenance};
use crate::formats::run_folder::{BEST, FINAL, PROMPTS, PROVENANCE, RECIPE};
use crate::formats::trained_prompts::{TrainedPrompts, prompt_hash};
use crate::gguf::folder;
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::torch::LIBTORCH_VERSION;
use crate::train::checked::CheckedRun;
use crate::train::checkpoint::{self, DamagedCheckpoint};
use crate::train::error::TrainError;
use crate::train::finished::RunProgress;
use crate::train::plan::TrainPlan;
use crate::train::recipe_changes::{self, RecipeChanges};

/// A run's folder, and the facts that its recipe and provenance must match.
#[derive(Debug)]
pub struct RunFolder<'r> {
    plan: &'r TrainPlan,
    /// The devices that the run computes on.
    device_names: String,
    /// Optimizer steps that the recipe asks for.
    total_steps: usize,
    /// Reports of the training and the validation rows.
    reports: Vec<&'r LoadReport>,
    /// How validation rows were held out.
    split_by_prompt: bool,
    /// The training rows.
    rows: &'r RowStore,
    /// The tokens with which answers begin.
    answer_header: &'r [i32],
    /// The files of `data.hidden_states`.
    captured: Option<&'r CapturedSet>,
    /// The backbone's config, and its weights unless a Hub snapshot identifies them; some may be absent.
    backbone_files: Vec<PathBuf>,
    /// Files of the initial heads and adapters (`init_from`).
    init_from_files: Vec<PathBuf>,
    /// Files of tokenizer and chat template; some may be absent.
    tokenizing_files: Vec<PathBuf>,
}

/// A run's folder that no other process trains in.
#[derive(Debug)]
pub struct ClaimedRun {
    _lock: FolderLock,
    /// The recipe's changes since the run was last started, in words; empty if there are none.
    pub changes: Vec<String>,
    /// The run goes on, and the recipe changed how many steps it has.
    pub length_changed: bool,
    /// `train.log_every` of the steps so far; `None` for a new run.
    pub logged_every: Option<NonZeroUsize>,
    /// Checkpoints behind the one that the run goes on from.
    pub damaged: Vec<DamagedCheckpoint>,
}

/// What a run that goes on found in its folder.
struct FoundRun {
    changes: RecipeChanges,
    logged_every: Option<NonZeroUsize>,
    damaged: Vec<DamagedCheckpoint>,
}

impl<'r> RunFolder<'r> {
    /// The folder of a run whose rows were read.
    ///
    /// # Errors
    /// [`TrainError::InitFrom`], or the disk's own.
    pub fn new(checked: &'r CheckedRun) -> Result<Self, TrainError> {
        let plan = &checked.plan;
        Ok(Self {
            plan,
            device_names: checked.device_names(),
            total_steps: checked.total_steps,
            reports: checked.reports().collect(),
            split_by_prompt: checked.split_by_prompt,
            rows: checked.train.sequences().store(),
            answer_header: &checked.answer_header,
            captured: checked.captured.as_ref().map(|captured| captured.train.set()),
            backbone_files: backbone_files(plan)?,
            init_from_files: init_from_files(plan)?,
            tokenizing_files: tokenizing_files(plan),
        })
    }

    /// Creates the run's folder, or checks that the existing one belongs to this run, and writes down what its recipe changed. The
    /// lock keeps other processes from training in it; on NFS there is no lock (see [`lock_folder`]).
    ///
    /// # Errors
    /// [`TrainError::OutputTaken`], or an I/O error.
    pub fn claim(&self, resume: bool) -> Result<ClaimedRun, TrainError> {
        let run = self.plan.train.output_dir.as_path();
        self.is_begun(resume)?; // before anything is created
        let io = |source| TrainError::Io { path: run.into(), source };
        make_folders(run).and_then(|()| sync_folder(parent(run))).map_err(io)?;
        let lock = lock_folder(run).map_err(io)?.ok_or_else(|| in_use(run))?;
        let provenance = self.provenance()?;
        if self.is_begun(resume)? {
            let FoundRun { changes, logged_every, damaged } = self.resume(run, &provenance)?;
            let length_changed = changes.length && !run.join(FINAL).exists();
            return Ok(ClaimedRun { _lock: lock, changes: changes.keys, length_changed, logged_every, damaged });
        }
        self.fill_folder(run, &provenance).inspect_err(|_| {
            // Best effort: the first error is the one to report. A folder with a recipe.toml must have the other file.
            let remove = |name: &&str| fs::remove_file(run.join(name)).or_else(is_absent).is_err();
            let _ = [RECIPE, PROMPTS, PROVENANCE].iter().find(|name| remove(name));
            let _ = fs::remove_dir(run);
        })?;
        let (changes, damaged) = (Vec::new(), Vec::new());
        Ok(ClaimedRun { _lock: lock, changes, length_changed: false, logged_every: None, damaged })
    }

    /// Bytes of the weight files that [`RunFolder::claim`] hashes; hashes of earlier runs are cached.
    pub fn bytes_to_hash(&self) -> u64 {
        let cache = TokenCache::for_user();
        let is_new = |path: &&PathBuf| cache.as_ref().is_none_or(|cache| !cache.knows(path));
        let files = self.backbone_files.iter().chain(&self.init_from_files).filter(is_new);
        files.filter_map(|path| Some(path.metadata().ok()?.len())).sum()
    }

    /// Whether there is a run to resume; an error if the folder holds anything else.
    fn is_begun(&self, resume: bool) -> Result<bool, TrainError> {
        let run = self.plan.train.output_dir.as_path();
        if !checkpoint::holds_a_run(run)? {
            return Ok(false);
        }
        if !resume {
            check_empty(run)?;
        }
        if run.join(RECIPE).exists() {
            return Ok(true);
        }
        if !checkpoint::holds_only(run, &[PROVENANCE, PROMPTS])? {
            let why = "holds files but no recipe.toml, so there is no run to resume: choose another folder";
            return Err(TrainError::OutputTaken { path: run.into(), why: why.into() });
        } // otherwise interrupted before its last file: nothing was trained yet
        Ok(false)
    }

    fn fill_folder(&self, run: &Path, provenance: &Provenance) -> Result<(), TrainError> {
        checkpoint::remove_partial(run)?;
        write(run, PROVENANCE, &provenance.to_json())?;
        self.save_prompts(run)?;
        // Written last: a folder with a recipe.toml has everything that a resumed run checks.
        write(run, RECIPE, &self.plan.resolved_recipe)
    }

    /// The prompts of the training rows, and those of the heads that the run starts from. Reads all rows.
    fn save_prompts(&self, run: &Path) -> Result<(), TrainError> {
        let hashes = self
            .rows
            .iter()
            .map(|row| Ok(prompt_hash(row?.prompt(self.answer_header))))
            .collect::<Result<_, DataError>>()?;
        let start = self.plan.drafter.start()?;
        let before = start.map(|start| TrainedPrompts::for_heads(&start.folder)).transpose()?.flatten();
        Ok(TrainedPrompts::of(hashes).with(before.unwrap_or_default()).save(&run.join(PROMPTS))?)
    }

    /// What the recipe changed, which is written down, and which checkpoints are damaged; an error if the recipe makes it another run.
    fn resume(&self, run: &Path, now: &Provenance) -> Result<FoundRun, TrainError> {
        let another = |why| TrainError::OutputTaken { path: run.into(), why };
        let recipe = run.join(RECIPE);
        let written = files::read_text(&recipe).map_err(failed("read", &recipe))?;
        let mut begun = Provenance::load(&run.join(PROVENANCE))?;
        let before = self.resolved(begun.recipe.as_ref().unwrap_or(&written));
        let changes = RecipeChanges::between(&before, &self.plan.resolved_recipe).map_err(|difference| {
            another(format!("holds another run: {difference}; use that recipe, or another folder"))
        })?;
        begun.difference(now).map_or(Ok(()), |why| Err(another(why)))?;
        let best = run.join(BEST);
        put_back(&best).map_err(failed("restore", &best))?;
        checkpoint::remove_partial(run)?;
        let damaged = if run.join(FINAL).exists() { vec![] } else { checkpoint::set_damaged_aside(run)? };
        let saved_every = recipe_changes::save_every(&before).unwrap_or(self.plan.train.save_every);
        RunProgress::read(self.plan, self.total_steps)?
            .reopen(changes.length || changes.patience, saved_every.get())?;
        if !files::is_file(&run.join(PROMPTS))? {
            self.save_prompts(run)?; // a run of an earlier version
        }
        if self.resolved(&written) != self.plan.resolved_recipe {
            write(run, RECIPE, &self.plan.resolved_recipe)?;
        }
        if begun.recipe != now.recipe {
            begun.recipe.clone_from(&now.recipe);
            write(run, PROVENANCE, &begun.to_json())?;
        }
        Ok(FoundRun { changes, logged_every: recipe_changes::log_every(&before), damaged })
    }

    /// A run's recipe with all keys of this version: a version without some of them trained as their defaults do.
    fn resolved(&self, recipe: &str) -> String {
        (self.plan.resolve)(recipe).unwrap_or_else(|| recipe.to_owned())
    }

    /// What this process would record of the run.
    pub(super) fn provenance(&self) -> Result<Provenance, TrainError> {
        Ok(Provenance {
            program: format!("medusa-train {}", env!("CARGO_PKG_VERSION")),
            git_revision: env!("MEDUSA_GIT_REVISION").into(),
            libtorch: LIBTORCH_VERSION.into(),
            device: self.device_names.clone(),
            threads: tch::get_num_threads(),
            command: std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect(),
            started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            backbone: self.plan.snapshot.clone(),
            sources: self.plan.sources.clone(),
            backbone_files: hashed(&self.backbone_files)?,
            init_from_files: hashed(&self.init_from_files)?,
            hidden_states: self.captured.map(CapturedSet::stamp),
            data: self.data_files()?,
            recipe: Some(self.plan.resolved_recipe.clone()),
            skip_bad_rows: self.plan.skip_bad_rows,
            split_by_prompt: self.split_by_prompt,
            rows: self.reports.iter().map(|report| json!(report)).collect(),
        })
    }

    /// Data files, and the files that determine their tokens.
    fn data_files(&self) -> Result<Vec<HashedFile>, TrainError> {
        let data = self.reports.iter().flat_map(|report| &report.files);
        // With data.limit there is no hash; the tokens that were read are compared.
        let hashed_file =
            |DataFile { path, sha256, .. }: &DataFile| Some(HashedFile { path: path.clone(), sha256: sha256.clone()? });
        let data = data.filter_map(hashed_file);
        Ok(data.chain(hashed(&self.tokenizing_files)?).collect())
    }
}

fn is_absent(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn write(run: &Path, name: &str, text: &str) -> Result<(), TrainError> {
    let path = run.join(name);
    write_atomic(&path, |out| out.write_all(text.as_bytes())).map_err(|source| TrainError::Io { path, source })
}

/// A snapshot's commit identifies the weights, so they are not hashed.
fn backbone_files(plan: &TrainPlan) -> Result<Vec<PathBuf>, TrainError> {
    let folder = Path::new(&plan.backbone.path);
    let weights = if plan.snapshot.is_none() { plan.weight_files()? } else { Vec::new() };
    Ok(behind(["config.json", "special_tokens_map.json"].map(|name| folder.join(name)).into_iter().chain(weights)))
}

fn init_from_files(plan: &TrainPlan) -> Result<Vec<PathBuf>, TrainError> {
    let drafter = plan.drafter.start()?;
    let adapter = plan
        .trained
        .adapter_to_start_from()
        .map(|adapter| [ADAPTER_FILE, ADAPTER_CONFIG].map(|name| adapter.join(name)));
    Ok(drafter.map(|drafter| drafter.files).into_iter().flatten().chain(adapter.into_iter().flatten()).collect())
}

fn tokenizing_files(plan: &TrainPlan) -> Vec<PathBuf> {
    let backbone = Path::new(&plan.backbone.path);
    let own = tokenize::files_of(backbone).into_iter().chain([backbone.join("chat_template.jinja")]);
    let given = if let TemplateChoice::File(path) = &plan.data.chat_template { Some(path.clone()) } else { None };
    behind(own.chain(given))
}

/// The files that are read for these paths, each once.
fn behind(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = vec![];
    for path in paths.map(folder::behind) {
        if !files.contains(&path) {
            files.push(path);
        }
    }
    files
}

/// Hashes the files that exist.
fn hashed(paths: &[PathBuf]) -> Result<Vec<HashedFile>, TrainError> {
    let cache = TokenCache::for_user();
    let sum = |path: &Path| cache.as_ref().map_or_else(|| sha256(path), |cache| cache.sha256_of(path));
    let file = |path: &PathBuf| match sum(path) {
        Ok(sha256) => Some(Ok(HashedFile { path: path.clone(), sha256 })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => Some(Err(TrainError::Io { path: path.clone(), source })),
    };
    paths.iter().filter_map(file).collect()
}

/// Refuses an output folder that is not empty or in which another process trains now. Checks nothing else, so that it
/// can run before anything expensive.
///
/// # Errors
/// [`TrainError::OutputTaken`].
pub fn check_output_dir(run: &Path, resume: bool) -> Result<(), TrainError> {
    if run.is_dir() && lock_folder(run).is_ok_and(|lock| lock.is_none()) {
        return Err(in_use(run));
    }
    if resume { Ok(()) } else { check_empty(run) }
}

fn check_empty(run: &Path) -> Result<(), TrainError> {
    if !checkpoint::holds_a_run(run)? {
        return Ok(());
    }
    let why = "is not empty: continue with --resume, or choose another folder (nothing is ever overwritten)";
    Err(TrainError::OutputTaken { path: run.into(), why: why.into() })
}

fn in_use(run: &Path) -> TrainError {
    let holder = in_words(holder(run));
    let why = format!("is in use by another training process{holder}; wait for it to finish, or choose another folder");
    TrainError::OutputTaken { path: run.into(), why }
}
