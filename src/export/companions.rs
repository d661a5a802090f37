//! The files of a run that accompany exported heads: recipe, hashes of the trained prompts, calibration, tree and bench.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::error::ExportError;
use super::request::ExportRequest;
use super::trained::{Trained, without_local_path};
use super::write;
use crate::draft::heads::import::{HeadsFile, folder_of};
use crate::files::{self, is_file, sha256, write_synced};
use crate::formats::FormatError;
use crate::formats::bench::{self, BenchHeadline};
use crate::formats::calibration::Calibration;
use crate::formats::run_folder::{self, BENCH, CALIBRATION, PROMPTS, RECIPE, TREE};
use crate::formats::trained_prompts::TrainedPrompts;
use crate::formats::tree::TreeFile;
use crate::tree::guess_tree::GuessTree;

/// Files found for the heads, parsed.
pub(super) struct Companions {
    pub(super) recipe: Option<Companion<String>>,
    pub(super) calibration: Option<Companion<Calibration>>,
    pub(super) tree: Option<Companion<TreeFile>>,
    pub(super) bench: Option<Companion<CardBench>>,
    prompts: Option<TrainedPrompts>,
    /// Reasons why files were left out.
    pub(super) notices: Vec<String>,
}

/// Speed figures for the model card.
pub(super) struct CardBench {
    pub(super) fastest: BenchHeadline,
    /// Number of results in the file.
    pub(super) results: usize,
}

/// A file and its content.
pub(super) struct Companion<T> {
    path: PathBuf,
    pub(super) content: T,
}

/// Why a file does not belong to these heads.
type NotTheirs = String;

impl Companions {
    /// Looks in the heads' folder, in the run's folder above it, and at the paths in `request`. A file named in
    /// `request` must belong to these heads; a found file that does not is left out with a notice.
    pub(super) fn find(request: &ExportRequest, trained: &Trained) -> Result<Self, ExportError> {
        let beside = folder_of(&request.heads);
        let places = [Some(beside.to_owned()), run_folder::above(beside)];
        let mut notices = vec![];
        let heads_sha256 = trained.file.sha256()?;
        let (heads, there) = (trained.shape.medusa_num_heads, trained.file.shape().medusa_num_heads);
        let calibration = |path: &Path| {
            let calibration = Calibration::load(path).map_err(cause)?;
            let is_theirs = calibration.heads_sha256 == heads_sha256;
            is_theirs.then_some(calibration).ok_or_else(|| "it was measured with other heads".to_owned())
        };
        let calibration = look(request.calibration.as_deref(), &places, CALIBRATION, &calibration, &mut notices)?;
        let tree = |path: &Path| {
            let (tree, file) = GuessTree::load(path).map_err(|error| error.to_string())?;
            if tree.as_static().is_none() && !trained.format.own {
                return Err("it is chosen at each step, and only format medusa-train has such trees".to_owned());
            }
            let depth = tree.depth();
            if depth > heads {
                return Err(format!("it needs {depth} heads, and {heads} are exported"));
            }
            let is_theirs = calibration.as_ref().map_or(Ok(true), |calibration| is_chosen_from(&file, calibration));
            is_theirs?.then_some(file).ok_or_else(|| "it was chosen from another calibration".to_owned())
        };
        let architecture = trained.shape.architecture.name();
        let bench = |path: &Path| match bench(path, architecture)? {
            _ if heads < there => Err(format!("its figures are of all {there} heads, and {heads} are exported")),
            CardBench { fastest: BenchHeadline { drafter: Some(drafter), .. }, .. } if drafter != architecture => {
                Err(format!("its figures are of --drafter {drafter}, not of these heads"))
            }
            CardBench { fastest: BenchHeadline { forced_acceptance_rate: Some(rate), .. }, .. } => {
                Err(format!("its acceptance was forced to {rate} tokens per step, which is not what these heads reach"))
            }
            bench => Ok(bench),
        };
        let recipe =
            |path: &Path| files::read_text(path).map(|text| published(&text)).map_err(|error| error.to_string());
        let exported = beside.join(RECIPE); // heads exported earlier have it in their folder
        let exported = is_file(&exported)?.then_some(exported);
        let run = places[1].as_ref().map(|run| run.join(RECIPE)).or(exported);
        Ok(Self {
            tree: look(request.tree.as_deref(), &places, TREE, &tree, &mut notices)?,
            bench: look(request.bench.as_deref(), &places, BENCH, &bench, &mut notices)?,
            recipe: run.and_then(|path| found(path, &recipe, &mut notices)),
            prompts: TrainedPrompts::for_heads(beside)?,
            calibration,
            notices,
        })
    }

    /// Copies the files that other programs can use into a folder. The bench results are in the card.
    pub(super) fn write(&self, folder: &Path, trained: &Trained) -> Result<(), ExportError> {
        if let Some(recipe) = &self.recipe {
            let path = folder.join(RECIPE);
            write_synced(&path, |out| out.write_all(recipe.content.as_bytes()))
                .map_err(|source| ExportError::Io { path, source })?;
        }
        self.prompts.as_ref().map_or(Ok(()), |prompts| prompts.save(&folder.join(PROMPTS)))?;
        self.tree.as_ref().map_or(Ok(()), |found| write::copy(&found.path, &folder.join(TREE)))?;
        self.calibration.as_ref().map_or(Ok(()), |found| write_calibration(found, folder, trained))
    }
}

/// Whether a tree names this calibration, or the one that it is an exported copy of; a tree that was written by hand names none.
fn is_chosen_from(tree: &TreeFile, calibration: &Companion<Calibration>) -> Result<bool, NotTheirs> {
    let Some(named) = &tree.calibration_sha256 else { return Ok(true) };
    let sha256 = sha256(&calibration.path).map_err(|error| error.to_string())?;
    let copied_from = calibration.content.exported_from.as_ref().map(|from| &from.calibration_sha256);
    Ok(*named == sha256 || copied_from == Some(named))
}

/// A recipe for other people: paths that only this machine has are cut to their last part.
fn published(recipe: &str) -> String {
    let part = |(at, text): (usize, &str)| if at % 2 == 1 { without_local_path(text) } else { text.to_owned() };
    let line = |line: &str| line.split('"').enumerate().map(part).collect::<Vec<_>>().join("\"");
    recipe.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// Writes the calibration for the exported heads: with their hash, and cut to the first K heads. `exported_from`
/// records the measured heads and the original file. If the exported heads are the measured file itself, the
/// calibration is copied unchanged.
fn write_calibration(found: &Companion<Calibration>, folder: &Path, trained: &Trained) -> Result<(), ExportError> {
    let (path, mut calibration) = (&found.path, found.content.clone());
    let (own_sha256, to) = (HeadsFile::open(folder)?.sha256()?, folder.join(CALIBRATION));
    if calibration.heads_sha256 == own_sha256 {
        return write::copy(path, &to);
    }
    let wrong = |error: io::Error| ExportError::Companion { path: path.into(), why: error.to_string() };
    calibration.backbone = without_local_path(&calibration.backbone);
    calibration.export_to(own_sha256, sha256(path).map_err(wrong)?);
    calibration.keep_first(trained.shape.medusa_num_heads);
    write_synced(&to, |out| out.write_all(calibration.to_json().as_bytes()))
        .map_err(|source| ExportError::Io { path: to.clone(), source })
}

fn look<T>(
    named: Option<&Path>,
    places: &[Option<PathBuf>],
    name: &str,
    read: &dyn Fn(&Path) -> Result<T, NotTheirs>,
    notices: &mut Vec<String>,
) -> Result<Option<Companion<T>>, ExportError> {
    if let Some(path) = named {
        let content = read(path).map_err(|why| ExportError::Companion { path: path.into(), why })?;
        return Ok(Some(Companion { path: path.into(), content }));
    }
    for path in places.iter().flatten().map(|place| place.join(name)) {
        if is_file(&path)? {
            return Ok(found(path, read, notices));
        }
    }
    Ok(None)
}

/// Reads a file that the user did not name; if it does not fit, adds a notice and leaves it out.
fn found<T>(
    path: PathBuf,
    read: &dyn Fn(&Path) -> Result<T, NotTheirs>,
    notices: &mut Vec<String>,
) -> Option<Companion<T>> {
    match read(&path) {
        Ok(content) => Some(Companion { path, content }),
        Err(why) => {
            notices.push(format!("{} is left out of the model card: {why}", path.display()));
            None
        }
    }
}

/// The cause of an unreadable file; the notice itself names the file.
fn cause(error: FormatError) -> NotTheirs {
    std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string)
}

/// The output of `medusa bench --json`: one result, or one per line for a sweep or several drafters. Of the results of these heads the
/// fastest is used.
fn bench(path: &Path, architecture: &str) -> Result<CardBench, NotTheirs> {
    let expected = "expected what `medusa bench --json` prints, with or without --sweep: one object a line";
    let mut all: Vec<BenchHeadline> = bench::load(path).map_err(|error| format!("{}; {expected}", cause(error)))?;
    let is_other = |bench: &BenchHeadline| bench.drafter.as_ref().is_some_and(|drafter| drafter != architecture);
    if !all.iter().all(is_other) {
        all.retain(|bench| !is_other(bench)); // of several drafters, these heads
    }
    let results = all.len();
    let fastest = all.into_iter().max_by(|a, b| a.speedup.total_cmp(&b.speedup));
    fastest.map(|fastest| CardBench { fastest, results }).ok_or_else(|| format!("it is empty; {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_published_recipe_names_no_folder_of_the_machine() {
        let recipe = "path = \"/home/ann/models/base\" # \"x\"\ntrain = [\"../chats/a.jsonl\", \"owner/name\", \"data/b.jsonl\"]\n";
        let expected = "path = \"base\" # \"x\"\ntrain = [\"a.jsonl\", \"owner/name\", \"data/b.jsonl\"]\n";
        assert_eq!(published(recipe), expected);
    }
}
