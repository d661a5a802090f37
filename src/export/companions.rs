//! The files of a run that accompany exported heads: recipe, calibration, tree and bench.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::ExportError;
use super::request::ExportRequest;
use super::trained::Trained;
use super::write;
use crate::draft::medusa::heads::import::{HeadsFile, folder_of};
use crate::files::{sha256, write_synced};
use crate::formats::FormatError;
use crate::formats::bench::{self, BenchHeadline};
use crate::formats::calibration::Calibration;
use crate::formats::run_folder::{self, BENCH, CALIBRATION, RECIPE, TREE};
use crate::formats::tree::TreeFile;
use crate::tree::sparse_tree::SparseTree;

/// Files beside the heads, read.
pub(super) struct Companions {
    pub(super) recipe: Option<Companion<String>>,
    pub(super) calibration: Option<Companion<Calibration>>,
    pub(super) tree: Option<Companion<(SparseTree, TreeFile)>>,
    pub(super) bench: Option<Companion<CardBench>>,
    /// Of files that were left out.
    pub(super) notices: Vec<String>,
}

/// What the card says of the speed.
pub(super) struct CardBench {
    pub(super) fastest: BenchHeadline,
    /// How many results were in its file.
    pub(super) results: usize,
}

/// A file beside heads, and what it says.
pub(super) struct Companion<T> {
    path: PathBuf,
    pub(super) content: T,
}

/// Why a file is not about these heads.
type NotTheirs = String;

impl Companions {
    /// Looks beside the heads, in the run's folder above them, and where `request` says. A file that was named must be about these
    /// heads; one that was found and is not is left out.
    pub(super) fn find(request: &ExportRequest, trained: &Trained) -> Result<Self, ExportError> {
        let beside = folder_of(&request.heads);
        let places = [Some(beside.to_owned()), run_folder::above(beside)];
        let mut notices = vec![];
        let of_heads = trained.file.sha256()?;
        let (heads, there) = (trained.shape.medusa_num_heads, trained.file.shape().medusa_num_heads);
        let calibration = |path: &Path| {
            let calibration = Calibration::load(path).map_err(cause)?;
            let is_theirs = calibration.heads_sha256 == of_heads;
            is_theirs.then_some(calibration).ok_or_else(|| "it was measured with other heads".to_owned())
        };
        let tree = |path: &Path| {
            let found = SparseTree::load(path).map_err(|error| error.to_string())?;
            let depth = found.0.max_depth();
            if depth <= heads { Ok(found) } else { Err(format!("it needs {depth} heads, and {heads} are exported")) }
        };
        let bench = |path: &Path| match bench(path)? {
            _ if heads < there => Err(format!("its figures are of all {there} heads, and {heads} are exported")),
            CardBench { fastest: BenchHeadline { drafter: Some(drafter), .. }, .. } if drafter != "medusa" => {
                Err(format!("its figures are of --drafter {drafter}, not of these heads"))
            }
            CardBench { fastest: BenchHeadline { forced_acceptance_rate: Some(rate), .. }, .. } => {
                Err(format!("its acceptance was forced to {rate} tokens a step, which is not what these heads reach"))
            }
            bench => Ok(bench),
        };
        let recipe = |path: &Path| fs::read_to_string(path).map_err(|error| error.to_string());
        let exported = beside.join(RECIPE); // heads that were exported before have theirs beside them
        let run = places[1].as_ref().map(|run| run.join(RECIPE)).or(exported.is_file().then_some(exported));
        Ok(Self {
            calibration: look(request.calibration.as_deref(), &places, CALIBRATION, &calibration, &mut notices)?,
            tree: look(request.tree.as_deref(), &places, TREE, &tree, &mut notices)?,
            bench: look(request.bench.as_deref(), &places, BENCH, &bench, &mut notices)?,
            recipe: run.and_then(|path| found(path, &recipe, &mut notices)),
            notices,
        })
    }

    /// Copies into a folder what others can use: not the bench, whose figures are in the card.
    pub(super) fn write(&self, folder: &Path, trained: &Trained) -> Result<(), ExportError> {
        let files = [
            (self.recipe.as_ref().map(|found| &found.path), RECIPE),
            (self.tree.as_ref().map(|found| &found.path), TREE),
        ];
        let copy =
            |(path, name): (Option<&PathBuf>, &str)| path.map_or(Ok(()), |path| write::copy(path, &folder.join(name)));
        files.into_iter().try_for_each(copy)?;
        self.calibration.as_ref().map_or(Ok(()), |found| write_calibration(found, folder, trained))
    }
}

/// The calibration as one of the heads in `folder`: with their hash, and of the first K heads alone. `exported_from` says which heads were
/// measured, and which file said so. Where the heads are the measured file itself, so is this.
fn write_calibration(found: &Companion<Calibration>, folder: &Path, trained: &Trained) -> Result<(), ExportError> {
    let (path, mut calibration) = (&found.path, found.content.clone());
    let (of_these, to) = (HeadsFile::open(folder)?.sha256()?, folder.join(CALIBRATION));
    if calibration.heads_sha256 == of_these {
        return write::copy(path, &to);
    }
    let wrong = |error: io::Error| ExportError::Companion { path: path.into(), why: error.to_string() };
    calibration.export_to(of_these, sha256(path).map_err(wrong)?);
    calibration.keep_first(trained.shape.medusa_num_heads);
    write_synced(&to, |out| calibration.write_to(out)).map_err(|source| ExportError::Io { path: to.clone(), source })
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
    let path = places.iter().flatten().map(|place| place.join(name)).find(|path| path.is_file());
    Ok(path.and_then(|path| found(path, read, notices)))
}

/// A file that nobody named: left out aloud where it is not right.
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

/// What lies behind a calibration that cannot be read: the notice names the file itself.
fn cause(error: FormatError) -> NotTheirs {
    std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string)
}

/// What `medusa bench --json` printed: a result, or of a sweep a result a line, of which the fastest is taken.
fn bench(path: &Path) -> Result<CardBench, NotTheirs> {
    let expected = "expected what `medusa bench --json` prints, with or without --sweep: one object a line";
    let all: Vec<BenchHeadline> = bench::load(path).map_err(|error| format!("{}; {expected}", cause(error)))?;
    let results = all.len();
    let fastest = all.into_iter().max_by(|a, b| a.speedup.total_cmp(&b.speedup));
    fastest.map(|fastest| CardBench { fastest, results }).ok_or_else(|| format!("it is empty; {expected}"))
}
