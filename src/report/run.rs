//! Reads a run's folder: the files of training, and later measurements.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::ReportError;
use super::metrics::Metrics;
use super::recipe_text::RecipeText;
use crate::draft::heads::HEADS_FILE;
use crate::files::{self, FileError, failed};
use crate::formats::bench::{self, BenchResult};
use crate::formats::best::BestEvaluation;
use crate::formats::calibration::Calibration;
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::formats::latency::Latency;
use crate::formats::load::{self, LoadResult};
use crate::formats::provenance::Provenance;
use crate::formats::run_folder::{
    BENCH, CALIBRATION, FINAL, LATENCY, LOAD, METRICS, PROVENANCE, RECIPE, TREE, missing_for_a_run,
};
use crate::formats::tree::TreeFile;
use crate::tree::guess_tree::GuessTree;

/// A run, finished or not.
#[derive(Debug)]
pub struct Run {
    pub(super) path: PathBuf,
    pub(super) recipe: RecipeText,
    pub(super) provenance: Map<String, Value>,
    pub(super) metrics: Metrics,
    pub(super) finished: bool,
    /// The evaluation that `best/` was kept for.
    pub(super) best: Option<BestEvaluation>,
    pub(super) calibration: Option<Calibration>,
    pub(super) tree: Option<(GuessTree, TreeFile)>,
    pub(super) latency: Option<Latency>,
    pub(super) bench: Vec<BenchResult>,
    pub(super) load: Vec<LoadResult>,
    /// Which of the measurements were made with other files than those in the folder.
    pub(super) mismatches: Vec<&'static str>,
}

fn check_is_run(path: &Path) -> Result<(), ReportError> {
    let why = match missing_for_a_run(path) {
        None => return Ok(()),
        Some(file) if path.is_dir() => format!("it has no {file}"),
        Some(_) => if path.exists() { "it is a file" } else { "it does not exist" }.into(),
    };
    Err(ReportError::NotARun { path: path.to_owned(), why })
}

impl Run {
    /// Reads the folder of a run; what is made after the first step may be missing.
    ///
    /// # Errors
    /// [`ReportError`]: not a run folder, or an invalid file in it.
    pub fn read(path: &Path) -> Result<Self, ReportError> {
        check_is_run(path)?;
        let there = |name: &str| Some(path.join(name)).filter(|file| file.is_file());
        let recipe = path.join(RECIPE);
        let recipe = files::read_text(&recipe).map_err(failed("read", &recipe))?;
        let mut run = Self {
            path: path.to_owned(),
            recipe: RecipeText::new(&recipe),
            provenance: Provenance::entries(&path.join(PROVENANCE))?,
            metrics: Metrics::read(&path.join(METRICS))?,
            best: PublishedHeadsConfig::best_of_run(path),
            finished: path.join(FINAL).join(HEADS_FILE).is_file(),
            calibration: there(CALIBRATION).map(|file| Calibration::load(&file)).transpose()?,
            tree: there(TREE).map(|file| GuessTree::load(&file)).transpose()?,
            latency: there(LATENCY).map(|file| Latency::load(&file)).transpose()?,
            bench: there(BENCH).map_or(Ok(vec![]), |file| bench::load(&file))?,
            load: there(LOAD).map_or(Ok(vec![]), |file| load::load(&file))?,
            mismatches: vec![],
        };
        run.mismatches = run.find_mismatches()?;
        Ok(run)
    }

    fn find_mismatches(&self) -> Result<Vec<&'static str>, FileError> {
        let differs = |recorded: Option<&String>, name: &str| {
            let path = self.path.join(name);
            let Some(recorded) = recorded.filter(|_| path.is_file()) else { return Ok(false) };
            Ok::<_, FileError>(*recorded != files::sha256(&path).map_err(failed("read", &path))?)
        };
        let tree = self.tree.as_ref().map(|(_, file)| file);
        let heads = [
            self.calibration.as_ref().map(|calibration| &calibration.heads_sha256),
            self.latency.as_ref().and_then(|latency| latency.heads_sha256.as_ref()),
        ];
        let other_heads = matches!(heads, [Some(one), Some(other)] if one != other);
        let found = [
            (
                differs(tree.and_then(|tree| tree.calibration_sha256.as_ref()), CALIBRATION)?,
                "tree.json was searched with another calibration than calibration.json",
            ),
            (
                differs(tree.and_then(|tree| tree.latency_sha256.as_ref()), LATENCY)?,
                "tree.json was chosen by other step times than those of latency.json",
            ),
            (other_heads, "calibration.json and latency.json were measured with different heads"),
        ];
        Ok(found.into_iter().filter_map(|(holds, note)| holds.then_some(note)).collect())
    }

    /// The bench result that stands for the run: of a sweep of tree sizes, the one with the size of tree.json.
    pub(super) fn headline(&self) -> Option<&BenchResult> {
        let nodes = self.tree.as_ref().map(|(tree, _)| tree.nodes());
        let same = self.bench.iter().find(|result| result.is_of_heads() && Some(result.tree_nodes) == nodes);
        same.or_else(|| BenchResult::headline(&self.bench))
    }

    /// Caveats for the reader, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let run = self.path.display();
        let torn =
            "the last line of metrics.jsonl is incomplete and is skipped: the run is still writing it, or was killed";
        let open = format!("{run} has no final/{HEADS_FILE}: the run is still going, or was stopped");
        let empty = format!("{run} has no logged steps yet");
        let notes = [
            (self.metrics.torn, format!("{run}: {torn}")),
            (!self.finished, open),
            (self.metrics.last_step() == 0, empty),
        ];
        let notes = notes.into_iter().filter_map(|(holds, note)| holds.then_some(note));
        let caveat = self.latency.as_ref().and_then(Latency::caveat);
        let caveat = caveat.map(|caveat| format!("{run}/{LATENCY}: {caveat}"));
        notes.chain(self.mismatches.iter().map(|note| format!("{run}: {note}"))).chain(caveat).collect()
    }

    /// The folder's name; for `.` and the like, that of the full path.
    pub(super) fn short_name(&self) -> String {
        let own = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let in_full = || self.path.canonicalize().ok().and_then(|path| own(&path));
        own(&self.path).or_else(in_full).unwrap_or_else(|| self.path.display().to_string())
    }

    /// The stage, from the recipe's tables.
    pub(super) fn stage(&self) -> &'static str {
        let has = |table: &str| self.recipe.keys().iter().any(|(key, _)| key == table);
        match (has("stage.medusa2"), has("stage.medusa2.lora")) {
            (false, _) => "Medusa-1: heads on a frozen backbone",
            (true, true) => "Medusa-2: heads and backbone together, by LoRA",
            (true, false) => "Medusa-2: heads and the whole backbone together",
        }
    }
}
