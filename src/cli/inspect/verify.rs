//! `medusa inspect --verify`: compares every file of a folder with the checksum that was recorded of it, and with the files that it names.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::checked::{CheckedFile, FileState};
use super::links;
use crate::cli::{CommonFlags, print_json, print_line};
use crate::data::cache;
use crate::distill::folder as distilled;
use crate::files::checksums::{CHECKSUMS, ChecksumError, Checksums, is_list};
use crate::files::{self, failed, parent};
use crate::formats::provenance::Provenance;
use crate::formats::run_folder::{BENCH, LOAD, METRICS, PROMPTS, PROVENANCE, RECIPE, is_run};
use crate::formats::sealed::{self, Broken, SealState};
use crate::formats::trained_prompts::TrainedPrompts;
use crate::hub;
use crate::plural::counted;
use crate::train::tensorboard;

/// Checks all files at a path, several at a time, and prints a line for each.
///
/// # Errors
/// A file that is damaged or cannot be read.
pub(super) fn run(path: &Path, common: &CommonFlags) -> anyhow::Result<()> {
    let checked = verify(path)?;
    for file in &checked {
        if common.json { print_json(file)? } else { print_line(file)? }
    }
    let damaged = checked.iter().filter(|file| matches!(file.state, FileState::Damaged { .. })).count();
    anyhow::ensure!(damaged == 0, "{} of {} damaged", damaged, counted(checked.len(), "file"));
    Ok(())
}

fn verify(path: &Path) -> anyhow::Result<Vec<CheckedFile>> {
    let mut files = vec![];
    if path.is_dir() {
        collect(path, &mut files)?
    } else {
        files.push(path.to_owned())
    }
    let lists = Lists::beside(&files)?;
    let check = |file: &PathBuf| Ok(CheckedFile { state: lists.state(file)?, file: file.clone() });
    let mut checked = files.par_iter().map(check).collect::<anyhow::Result<Vec<_>>>()?;
    checked.extend(lists.missing(path));
    checked.extend(links::of(&files)?);
    Ok(checked)
}

/// All files below a folder, sorted.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let entries = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut entries: Vec<PathBuf> = entries.map_err(failed("read", folder))?;
    entries.sort();
    for entry in entries {
        if entry.is_dir() { collect(&entry, files)? } else { files.push(entry) }
    }
    Ok(())
}

/// The lists of checksums in some folders.
struct Lists {
    by_folder: HashMap<PathBuf, Checksums>,
    /// Those that cannot be read.
    damaged: HashMap<PathBuf, String>,
}

impl Lists {
    fn beside(files: &[PathBuf]) -> Result<Self, ChecksumError> {
        let mut lists = Self { by_folder: HashMap::new(), damaged: HashMap::new() };
        let mut folders: Vec<&Path> = files.iter().map(|file| parent(file)).collect();
        folders.dedup();
        for folder in folders {
            match Checksums::read(folder) {
                Ok(list) => lists.by_folder.extend(list.map(|list| (folder.to_owned(), list))),
                Err(ChecksumError::File(error)) => return Err(error.into()),
                Err(ChecksumError::Line { path, line }) => {
                    lists.damaged.insert(path, format!("line {line} is no line of checksums"));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(lists)
    }

    fn state(&self, file: &Path) -> anyhow::Result<FileState> {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        if let Some(how) = self.damaged.get(file) {
            return Ok(FileState::damaged(how));
        }
        let (folder, listed_as) = match is_list(file) {
            false => (parent(file), name.to_string()),
            true => (
                parent(parent(file)),
                format!("{}/{name}", parent(file).file_name().unwrap_or_default().to_string_lossy()),
            ),
        };
        let expected = self.by_folder.get(folder).and_then(|list| list.expected(&listed_as));
        match expected {
            Some(expected) => Ok(FileState::compared(expected, &files::sha256(file).map_err(failed("read", file))?)),
            None if is_list(file) => Ok(FileState::Ok), // each of its lines is compared with a file
            None => kind_state(file, &name),
        }
    }

    /// Files that a list below `path` names and that are not there. A distillation writes a checksum before the shard.
    fn missing(&self, path: &Path) -> Vec<CheckedFile> {
        let missing = |(folder, list): (&PathBuf, &Checksums)| {
            let names = list.names().filter(|name| !folder.join(name).exists());
            let names = names.filter(|name| !distilled::is_next_shard(folder, name));
            let state = || FileState::damaged(format_args!("it is missing, and {CHECKSUMS} lists it"));
            names.map(|name| CheckedFile { file: folder.join(name), state: state() }).collect::<Vec<_>>()
        };
        let mut missing: Vec<_> = self.by_folder.iter().flat_map(missing).collect();
        missing.retain(|file| file.file.starts_with(path));
        missing.sort_by(|one, other| one.file.cmp(&other.file));
        missing
    }
}

/// A file that no list names: many kinds have checksums of their own.
fn kind_state(file: &Path, name: &str) -> anyhow::Result<FileState> {
    let because = |why| Ok(FileState::Unrecorded { why: Some(why) });
    let begins = |start: &str| name.starts_with(start);
    if let Some((expected, got)) = hub::hashes_of_blob(file).map_err(failed("read", file))? {
        return Ok(FileState::compared(&expected, &got));
    }
    match (name, file.extension().and_then(|extension| extension.to_str())) {
        (RECIPE, _) if is_run(parent(file)) => recipe(file),
        (PROMPTS, _) => Ok(FileState::of(TrainedPrompts::load(file).map(drop))),
        (METRICS, _) => because("it grows with each step; only plots and the number of steps come from it"),
        (BENCH | LOAD, _) => because("your shell wrote it"),
        ("README.md", _) => because("people edit it"),
        (_, Some("hidden_states")) => because("a run checks each row when it reads it"),
        (_, Some("jsonl")) if begins("journal") => Ok(FileState::of(distilled::check_journal(file))),
        (_, Some("jsonl")) if begins("refused") => Ok(FileState::of(distilled::check_refused(file))),
        (_, Some("arrow" | "sha256")) => {
            Ok(cache::check_file(file).map_or(FileState::Unrecorded { why: None }, FileState::of))
        }
        _ if begins("events.out.tfevents") => Ok(FileState::of(tensorboard::check(file)?)),
        (_, Some("json")) => sealed_json(file),
        _ if files::is_partial(name) => because("an interrupted write left it; nothing reads it"),
        _ => Ok(FileState::Unrecorded { why: None }),
    }
}

fn sealed_json(file: &Path) -> anyhow::Result<FileState> {
    let bytes = files::read(file).map_err(failed("read", file))?;
    let Ok(text) = String::from_utf8(bytes) else { return Ok(FileState::damaged("it is no text")) };
    let state = match sealed::check(&text) {
        Err(Broken { expected, got }) => FileState::compared(&expected, &got),
        Ok(SealState::Right) => FileState::Ok,
        Ok(SealState::None) => FileState::Unrecorded { why: None },
    };
    let is_json = serde_json::from_str::<serde::de::IgnoredAny>(&text);
    Ok(if let (FileState::Unrecorded { .. }, Err(error)) = (&state, is_json) {
        FileState::damaged(error)
    } else {
        state
    })
}

/// A run's recipe.toml is also in its provenance.
fn recipe(file: &Path) -> anyhow::Result<FileState> {
    let text = files::read(file).map_err(failed("read", file))?;
    let kept = Provenance::entries(&file.with_file_name(PROVENANCE)).ok().and_then(|mut keys| keys.remove("recipe"));
    Ok(match kept.as_ref().and_then(serde_json::Value::as_str) {
        None => FileState::Unrecorded { why: None },
        Some(kept) if kept.as_bytes() == text => FileState::Ok,
        Some(_) => FileState::damaged(format_args!(
            "it is not the recipe in {PROVENANCE}, with which the run was last started"
        )),
    })
}
