//! A run's folder: created once with the resolved recipe and its provenance; refuses any other run.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::json;
use toml::Table;

use crate::data::cache::TokenCache;
use crate::data::chat_template::TemplateChoice;
use crate::data::{DataFile, LoadReport};
use crate::draft::medusa::heads::import::HeadsFile;
use crate::files::{FolderLock, failed, lock_folder, sha256, write_atomic};
use crate::formats::provenance::{HashedFile, Provenance};
use crate::formats::run_folder::{PROVENANCE, RECIPE};
use crate::model::peft::{ADAPTER_CONFIG, ADAPTER_FILE};
use crate::model::weights;
use crate::torch::{self, LIBTORCH_VERSION};
use crate::train::checked::CheckedRun;
use crate::train::checkpoint;
use crate::train::error::TrainError;
use crate::train::plan::TrainPlan;

/// A run's folder, and what it must say.
#[derive(Debug)]
pub struct RunFolder<'r> {
    plan: &'r TrainPlan,
    /// What was read to train and to validate on.
    reports: [Option<&'r LoadReport>; 2],
    /// The backbone's config, and its weights where no snapshot says what they are; some may be absent.
    backbone_files: Vec<PathBuf>,
    /// Files that heads and adapters begin with (`init_from`).
    init_from_files: Vec<PathBuf>,
    /// Files of tokenizer and chat template; some may be absent.
    tokenizing_files: Vec<PathBuf>,
}

impl<'r> RunFolder<'r> {
    /// Of a run whose rows were read.
    ///
    /// # Errors
    /// [`TrainError::InitFrom`].
    pub fn new(checked: &'r CheckedRun) -> Result<Self, TrainError> {
        let plan = &checked.plan;
        Ok(Self {
            plan,
            reports: [Some(&checked.train_report), checked.validation_report.as_ref()],
            backbone_files: backbone_files(plan),
            init_from_files: init_from_files(plan)?,
            tokenizing_files: tokenizing_files(plan),
        })
    }

    /// Makes the run's folder, or checks that the one there is this run's. No other process may train in it as long as what comes
    /// back lives; on NFS and Windows nobody watches over that (see [`lock_folder`]).
    ///
    /// # Errors
    /// [`TrainError::OutputTaken`], or the disk's.
    pub fn claim(&self, resume: bool) -> Result<FolderLock, TrainError> {
        let run = self.plan.train.output_dir.as_path();
        self.is_begun(resume)?; // before anything is made
        let io = |source| TrainError::Io { path: run.into(), source };
        fs::create_dir_all(run).map_err(io)?;
        let lock = lock_folder(run).map_err(io)?.ok_or_else(|| in_use(run))?;
        let provenance = self.provenance()?;
        if self.is_begun(resume)? {
            self.check_same_run(run, &provenance)?;
            checkpoint::remove_partial(run)?;
            return Ok(lock);
        }
        self.fill_folder(run, &provenance).inspect_err(|_| {
            let _ = fs::remove_file(run.join(PROVENANCE)); // best effort: the error that led here is the one to report
            let _ = fs::remove_dir(run);
        })?;
        Ok(lock)
    }

    /// Size of the weights' files that [`RunFolder::claim`] reads: those that no earlier run did.
    pub fn bytes_to_hash(&self) -> u64 {
        let cache = TokenCache::of_user();
        let is_new = |path: &&PathBuf| cache.as_ref().is_none_or(|cache| !cache.knows(path));
        let files = self.backbone_files.iter().chain(&self.init_from_files).filter(is_new);
        files.filter_map(|path| Some(path.metadata().ok()?.len())).sum()
    }

    /// Whether there is a run to go on with; an error where there is something else.
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
        if !checkpoint::holds_only(run, PROVENANCE)? {
            let why = "holds files but no recipe.toml, so there is no run to resume: choose another folder";
            return Err(TrainError::OutputTaken { path: run.into(), why: why.into() });
        } // else interrupted between the two files: nothing was trained yet
        Ok(false)
    }

    fn fill_folder(&self, run: &Path, provenance: &Provenance) -> Result<(), TrainError> {
        let write = |name: &str, text: &str| {
            let path = run.join(name);
            write_atomic(&path, |out| out.write_all(text.as_bytes())).map_err(|source| TrainError::Io { path, source })
        };
        checkpoint::remove_partial(run)?;
        write(PROVENANCE, &provenance.to_json())?;
        // Last: a folder with a recipe.toml has everything that a resumed run checks.
        write(RECIPE, &self.plan.resolved_recipe)
    }

    fn check_same_run(&self, run: &Path, now: &Provenance) -> Result<(), TrainError> {
        let another = |why| Err(TrainError::OutputTaken { path: run.into(), why });
        let recipe = run.join(RECIPE);
        let before = fs::read_to_string(&recipe).map_err(failed("read", &recipe))?;
        if let Some(difference) = difference(&before, &self.plan.resolved_recipe) {
            return another(format!("holds another run: {difference}; use that recipe, or another folder"));
        }
        Provenance::load(&run.join(PROVENANCE))?.difference(now).map_or(Ok(()), another)
    }

    fn provenance(&self) -> Result<Provenance, TrainError> {
        Ok(Provenance {
            program: format!("medusa-train {}", env!("CARGO_PKG_VERSION")),
            git_revision: env!("MEDUSA_GIT_REVISION").into(),
            libtorch: LIBTORCH_VERSION.into(),
            device: torch::device_name(self.plan.device),
            threads: tch::get_num_threads(),
            command: std::env::args().collect(),
            started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            backbone: self.plan.snapshot.clone(),
            sources: self.plan.sources.clone(),
            backbone_files: hashed(&self.backbone_files)?,
            init_from_files: hashed(&self.init_from_files)?,
            data: self.data_files()?,
            skip_bad_rows: self.plan.skip_bad_rows,
            rows: self.reports.into_iter().flatten().map(|report| json!(report)).collect(),
        })
    }

    /// Data files, and those that decide which tokens come of them.
    fn data_files(&self) -> Result<Vec<HashedFile>, TrainError> {
        let data = self.reports.into_iter().flatten().flat_map(|report| &report.files);
        let data = data.map(|DataFile { path, sha256, .. }| HashedFile { path: path.clone(), sha256: sha256.clone() });
        Ok(data.chain(hashed(&self.tokenizing_files)?).collect())
    }
}

/// Of a snapshot the commit says which weights.
fn backbone_files(plan: &TrainPlan) -> Vec<PathBuf> {
    let folder = Path::new(&plan.backbone.path);
    let weights = match plan.snapshot {
        None => weights::files_of(folder).unwrap_or_default(), // they were loaded from there: there is no error to tell
        Some(_) => Vec::new(),
    };
    ["config.json", "special_tokens_map.json"].map(|name| folder.join(name)).into_iter().chain(weights).collect()
}

fn init_from_files(plan: &TrainPlan) -> Result<Vec<PathBuf>, TrainError> {
    let heads = plan.heads.init_from.as_deref().map(HeadsFile::open).transpose()?;
    let adapter = plan
        .trained
        .adapter_to_start_from()
        .map(|adapter| [ADAPTER_FILE, ADAPTER_CONFIG].map(|name| adapter.join(name)));
    Ok(heads.map(|heads| heads.files()).into_iter().flatten().chain(adapter.into_iter().flatten()).collect())
}

fn tokenizing_files(plan: &TrainPlan) -> Vec<PathBuf> {
    let names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
    let own = names.map(|name| Path::new(&plan.backbone.path).join(name));
    let given = if let TemplateChoice::File(path) = &plan.data.chat_template { Some(path.clone()) } else { None };
    own.into_iter().chain(given).collect()
}

/// Files by their content, those that are there.
fn hashed(paths: &[PathBuf]) -> Result<Vec<HashedFile>, TrainError> {
    let cache = TokenCache::of_user();
    let sum = |path: &Path| cache.as_ref().map_or_else(|| sha256(path), |cache| cache.sha256_of(path));
    let file = |path: &PathBuf| match sum(path) {
        Ok(sha256) => Some(Ok(HashedFile { path: path.clone(), sha256 })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => Some(Err(TrainError::Io { path: path.clone(), source })),
    };
    paths.iter().filter_map(file).collect()
}

/// A recipe without the places of its data: files may move, their hashes say what they are.
fn without_places(recipe: &str) -> String {
    let Ok(mut table) = recipe.parse::<Table>() else { return recipe.to_owned() };
    if let Some(data) = table.get_mut("data").and_then(toml::Value::as_table_mut) {
        data.retain(|key, _| key != "train" && key != "validation");
    }
    table.to_string()
}

/// What two recipes say differently, for people; `None` for equal ones.
fn difference(before: &str, now: &str) -> Option<String> {
    let (before, now) = (without_places(before), without_places(now));
    let (before, now) = (before.as_str(), now.as_str());
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

/// Refuses an output folder that holds anything, or in which another process trains now; looks at nothing else, so it can be asked before
/// the first expensive second.
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
    let why = "is in use by another training process; wait for it to finish, or choose another folder";
    TrainError::OutputTaken { path: run.into(), why: why.into() }
}
