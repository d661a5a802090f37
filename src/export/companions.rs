//! What a run's folder has about its heads, for the model card: recipe, calibration, tree, bench.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::trained::Trained;
use super::{ExportError, Request, write};
use crate::medusa::heads::import::folder_of;
use crate::medusa::tree_file::TreeFile;

const CALIBRATION: &str = "calibration.json";
const TREE: &str = "tree.json";
const BENCH: &str = "bench.json";
const RECIPE: &str = "recipe.toml";
/// A run's folder has both; another recipe.toml beside heads may be any run's.
const OF_A_RUN: [&str; 2] = [RECIPE, "provenance.json"];

/// Files beside the heads, read.
pub(super) struct Companions {
    pub(super) recipe: Option<Found<String>>,
    pub(super) calibration: Option<Found<Calibration>>,
    pub(super) tree: Option<Found<TreeFile>>,
    pub(super) bench: Option<Found<Value>>,
    /// Of files that were left out.
    pub(super) notices: Vec<String>,
}

/// What the card says of a calibration.json; rooms of a layer do not import each other.
#[derive(Deserialize)]
pub(super) struct Calibration {
    pub(super) heads: Vec<HeadAccuracy>,
    heads_sha256: String,
    pub(super) tokens: u64,
}

/// How often guess 1, 2, … of a head is right.
#[derive(Deserialize)]
pub(super) struct HeadAccuracy {
    pub(super) accuracy: Vec<f64>,
}

/// A file and what it says.
pub(super) struct Found<T> {
    path: PathBuf,
    pub(super) content: T,
}

/// Why a file is not about these heads.
type Wrong = String;

impl Companions {
    /// Looks beside the heads, in the run's folder above them, and where `request` says. A file that was named must be about these
    /// heads; one that was found and is not is left out.
    pub(super) fn find(request: &Request, trained: &Trained) -> Result<Self, ExportError> {
        let beside = folder_of(&request.heads);
        let places = [Some(beside.to_owned()), run_above(beside)];
        let mut notices = vec![];
        let sha256 = trained.file.sha256()?;
        let calibration = |path: &Path| {
            let calibration: Calibration = json(path)?;
            let is_theirs = calibration.heads_sha256 == sha256;
            is_theirs.then_some(calibration).ok_or_else(|| "it was measured with other heads".to_owned())
        };
        let tree = |path: &Path| {
            let file = TreeFile::load(path).map_err(|error| error.to_string())?;
            let (depth, heads) = (file.tree.max_depth(), trained.shape.medusa_num_heads);
            if depth <= heads { Ok(file) } else { Err(format!("it needs {depth} heads, and {heads} are exported")) }
        };
        let exported = beside.join(RECIPE); // heads that were exported before have theirs beside them
        let recipe = places[1].as_ref().map(|run| run.join(RECIPE)).or(exported.is_file().then_some(exported));
        Ok(Self {
            calibration: look(request.calibration.as_deref(), &places, CALIBRATION, &calibration, &mut notices)?,
            tree: look(request.tree.as_deref(), &places, TREE, &tree, &mut notices)?,
            bench: look(request.bench.as_deref(), &places, BENCH, &bench, &mut notices)?,
            recipe: recipe.and_then(|path| Some(Found { content: fs::read_to_string(&path).ok()?, path })),
            notices,
        })
    }

    /// Copies into a folder what others can use: not the bench, whose figures are in the card.
    pub(super) fn write(&self, folder: &Path) -> Result<(), ExportError> {
        let files = [
            (self.recipe.as_ref().map(|found| &found.path), RECIPE),
            (self.calibration.as_ref().map(|found| &found.path), CALIBRATION),
            (self.tree.as_ref().map(|found| &found.path), TREE),
        ];
        files.into_iter().try_for_each(|(path, name)| path.map_or(Ok(()), |path| write::copy(path, &folder.join(name))))
    }
}

fn look<T>(
    named: Option<&Path>,
    places: &[Option<PathBuf>],
    name: &str,
    read: &dyn Fn(&Path) -> Result<T, Wrong>,
    notices: &mut Vec<String>,
) -> Result<Option<Found<T>>, ExportError> {
    if let Some(path) = named {
        let content = read(path).map_err(|why| ExportError::Companion { path: path.into(), why })?;
        return Ok(Some(Found { path: path.into(), content }));
    }
    let found = places.iter().flatten().map(|place| place.join(name)).find(|path| path.is_file());
    let Some(path) = found else { return Ok(None) };
    match read(&path) {
        Ok(content) => Ok(Some(Found { path, content })),
        Err(why) => {
            notices.push(format!("{} is left out of the model card: {why}", path.display()));
            Ok(None)
        }
    }
}

fn json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, Wrong> {
    let text = fs::read(path).map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}

/// What `medusa bench --json` printed.
fn bench(path: &Path) -> Result<Value, Wrong> {
    let value: Value = json(path)?;
    let is_bench = value["acceleration_rate"].is_number() && value["speedup"].is_number();
    is_bench
        .then_some(value)
        .ok_or_else(|| "no acceleration_rate and speedup in it, as `medusa bench --json` prints".into())
}

/// The run's folder, if `folder` is its `final/` or a checkpoint.
fn run_above(folder: &Path) -> Option<PathBuf> {
    let folder = fs::canonicalize(folder).ok()?;
    let above = folder.parent()?;
    OF_A_RUN.iter().all(|name| above.join(name).is_file()).then(|| above.to_owned())
}
