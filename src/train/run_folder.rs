//! The folder of a run: made once, with the recipe as resolved and where its numbers come from; refused to any other run.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::Device;

use crate::data::{DataFile, LoadReport};
use crate::files::{sha256, write_atomic};
use crate::torch::{self, LIBTORCH_VERSION};
use crate::train::checkpoint;
use crate::train::run::TrainError;

const RECIPE: &str = "recipe.toml";
const PROVENANCE: &str = "provenance.json";

/// A run's folder, and what it must say.
#[derive(Debug)]
pub struct RunFolder<'r> {
    /// Where.
    pub path: &'r Path,
    /// The recipe with every default written out.
    pub resolved_recipe: &'r str,
    /// Where the backbone came from, if the Hub has it.
    pub snapshot: Option<&'r Snapshot>,
    /// Where it computes.
    pub device: Device,
    /// Whether rows that are not right were left out: a resumed run must see the same rows.
    pub skip_bad_rows: bool,
    /// Files of tokenizer and chat template; some may be absent.
    pub tokenizing: Vec<PathBuf>,
    /// What was read to train and to validate on.
    pub reports: [Option<&'r LoadReport>; 2],
}

/// A state of a repository of the Hugging Face Hub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// `owner/name`.
    pub id: String,
    /// The commit's hash.
    pub commit: String,
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
    /// Of a backbone from the Hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    backbone: Option<Snapshot>,
    data: Vec<HashedFile>,
    #[serde(default)]
    skip_bad_rows: bool,
    /// What came of the rows to train and to validate on.
    #[serde(default)]
    rows: Vec<serde_json::Value>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct HashedFile {
    path: PathBuf,
    sha256: String,
}

impl RunFolder<'_> {
    /// Makes the run's folder, or checks that the one there is this run's.
    ///
    /// # Errors
    /// [`TrainError::OutputTaken`], or the disk's.
    pub fn claim(&self, resume: bool) -> Result<(), TrainError> {
        let run = self.path;
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
        write(RECIPE, self.resolved_recipe)
    }

    fn check_same_run(&self, run: &Path) -> Result<(), String> {
        let read = |name: &str| {
            fs::read_to_string(run.join(name)).map_err(|e| format!("holds a run whose {name} cannot be read: {e}"))
        };
        if let Some(difference) = difference(&read(RECIPE)?, self.resolved_recipe) {
            return Err(format!("holds another run: {difference}; use that recipe, or another folder"));
        }
        let before: Provenance = serde_json::from_str(&read(PROVENANCE)?)
            .map_err(|e| format!("holds a run whose provenance.json is broken: {e}"))?;
        if let (Some(before), Some(now)) = (&before.backbone, self.snapshot)
            && before != now
        {
            let (id, commit, now) = (&before.id, &before.commit, &now.commit);
            return Err(format!(
                "holds a run on {id} at commit {commit}, and that is {now} by now; resume it with HF_HUB_OFFLINE=1, or train in another \
                 folder (backbone.path = \"{id}@{commit}\" stays at that commit)"
            ));
        }
        if before.skip_bad_rows != self.skip_bad_rows {
            let with = if before.skip_bad_rows { "with" } else { "without" };
            return Err(format!(
                "holds a run that began {with} --skip-bad-rows; a resumed run must see the same rows: resume it {with} the flag"
            ));
        }
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
            device: torch::device_name(self.device),
            threads: tch::get_num_threads(),
            command: std::env::args().collect(),
            started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            backbone: self.snapshot.cloned(),
            data: self.data_files(),
            skip_bad_rows: self.skip_bad_rows,
            rows: self.reports.into_iter().flatten().map(|report| json!(report)).collect(),
        }
    }

    /// Data files, and those that decide which tokens come of them.
    fn data_files(&self) -> Vec<HashedFile> {
        let data = self.reports.into_iter().flatten().flat_map(|report| &report.files);
        let data = data.map(|DataFile { path, sha256, .. }| HashedFile { path: path.clone(), sha256: sha256.clone() });
        // One that cannot be read was not read either.
        let hashed = |path: &PathBuf| Some(HashedFile { path: path.clone(), sha256: sha256(path).ok()? });
        data.chain(self.tokenizing.iter().filter_map(hashed)).collect()
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
