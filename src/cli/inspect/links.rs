//! Hashes by which one file names another: a calibration its heads, a tree its calibration.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::checked::{CheckedFile, FileState};
use crate::draft::eagle::file::EagleFile;
use crate::draft::heads::HEADS_FILE;
use crate::draft::heads::import::HeadsFile;
use crate::files::checksums::Checksums;
use crate::files::{failed, parent, sha256};
use crate::formats::calibration::Calibration;
use crate::formats::latency::Latency;
use crate::formats::run_folder::{BEST, CALIBRATION, FINAL, LATENCY, TREE, is_finished_at, step_of};
use crate::formats::tree::TreeFile;

/// Compares the hashes in the calibrations, trees and latencies among `files` with the files beside them. One that cannot be read has been
/// reported already.
pub(super) fn of(files: &[PathBuf]) -> anyhow::Result<Vec<CheckedFile>> {
    let mut checked = vec![];
    for file in files {
        let folder = parent(file);
        if file.ends_with(TREE)
            && let Ok(tree) = TreeFile::load(file)
        {
            for (expected, source) in [(&tree.calibration_sha256, CALIBRATION), (&tree.latency_sha256, LATENCY)] {
                let source = folder.join(source);
                if let Some(expected) = expected.as_ref().filter(|_| source.is_file()) {
                    let got = sha256(&source).map_err(failed("read", &source))?;
                    // An exported calibration says of which one it is a copy.
                    let exported = Calibration::load(&source).ok().and_then(|file| file.exported_from);
                    let copied_from = exported.map(|from| from.calibration_sha256);
                    checked.push(link(
                        file,
                        expected,
                        &[Some(got), copied_from].into_iter().flatten().collect::<Vec<_>>(),
                        &source,
                    ));
                }
            }
        } else if file.ends_with(CALIBRATION)
            && let Ok(calibration) = Calibration::load(file)
        {
            checked.extend(heads_link(file, &calibration.heads_sha256)?);
        } else if file.ends_with(LATENCY)
            && let Ok(Latency { heads_sha256: Some(heads), .. }) = Latency::load(file)
        {
            checked.extend(heads_link(file, &heads)?);
        }
    }
    Ok(checked)
}

/// Whether a calibration names other heads than those beside it, by their recorded checksums. One that cannot be read was reported already.
pub(super) fn is_of_other_heads(calibration: &Path) -> bool {
    let Ok(named) = Calibration::load(calibration).map(|calibration| calibration.heads_sha256) else { return false };
    let places = places_of_heads(parent(calibration)).unwrap_or_default();
    let lists = places.iter().filter_map(|place| Checksums::read(place).ok().flatten());
    let recorded: Vec<String> = lists.filter_map(|list| list.expected(HEADS_FILE).map(str::to_owned)).collect();
    !recorded.is_empty() && !recorded.contains(&named)
}

/// `None` if there are no heads beside it.
fn heads_link(file: &Path, expected: &str) -> anyhow::Result<Option<CheckedFile>> {
    let places = places_of_heads(parent(file)).map_err(failed("read", parent(file)))?;
    let mut sums = vec![];
    for place in &places {
        match EagleFile::is_in(place) {
            true => sums.push(EagleFile::open(place)?.sha256()?),
            false => sums.extend(HeadsFile::open(place).ok().map(|heads| heads.sha256()).transpose()?),
        }
    }
    Ok((!sums.is_empty()).then(|| link(file, expected, &sums, &places[0])))
}

/// Folders of a run, or of heads, in which heads may be.
fn places_of_heads(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut places = vec![folder.join(FINAL), folder.join(BEST), folder.to_owned()];
    let entries = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    places.extend(entries.filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        step_of(&name).is_some() || is_finished_at(&name)
    }));
    Ok(places)
}

/// Whether one of several files is the one that is named; else the first is reported.
fn link(file: &Path, expected: &str, got: &[String], to: &Path) -> CheckedFile {
    let got = got.iter().find(|got| *got == expected).or(got.first()).map_or("", String::as_str);
    CheckedFile {
        file: PathBuf::from(format!("{} → {}", file.display(), to.display())),
        state: FileState::compared(expected, got),
    }
}
