//! Output files are checked before the work, not after it, and no other process writes them meanwhile.

use std::path::{Path, PathBuf};
use std::slice;

use super::{CommonFlags, UsageError};
use crate::data::source;
use crate::files::checksums::CHECKSUMS;
use crate::files::{Claim, ClaimError, parent};
use crate::formats::run_folder::{METRICS, PROVENANCE, RECIPE, is_run};
use crate::model::folder::COMPANIONS;

/// Claims a file that will be written. Rejects one that cannot be, or that another process writes, and says so if one will be replaced; `flag`
/// names it. Missing folders are made when it is written.
///
/// # Errors
/// [`UsageError`], or who else writes the file.
pub(super) fn claim(flag: &str, path: &Path, common: &CommonFlags) -> anyhow::Result<Claim> {
    let shown = path.display();
    if path.is_dir() {
        return Err(UsageError(format!("{flag} {shown} is a folder; expected a file")).into());
    }
    if path.exists() && is_of_a_folder(path) {
        return Err(UsageError(format!(
            "{flag} {shown} would replace a file of a model or a run; choose another name"
        ))
        .into());
    }
    let cannot = |why: String| UsageError(format!("{flag} {shown} cannot be written: {why}"));
    let existing = path.ancestors().skip(1).map(in_words).find(|folder| folder.exists());
    let folder = existing.ok_or_else(|| cannot("it has no parent folder".into()))?;
    if !folder.is_dir() {
        return Err(cannot(format!("{} is not a folder", folder.display())).into());
    }
    let name = path.file_name().unwrap_or(path.as_os_str());
    let claim = Claim::of(&folder.join(name)).map_err(|error| match error {
        ClaimError::Io(error) => cannot(error.to_string()).into(),
        held @ ClaimError::Held(_) => {
            anyhow::anyhow!("{flag} {shown} {held}: wait for it to end, or choose another file")
        }
    })?;
    if path.exists() {
        common.say(format_args!("{flag} {shown} exists and will be replaced"));
    }
    Ok(claim)
}

/// Refuses an output that is a file of data.
///
/// # Errors
/// [`UsageError`].
pub(super) fn check_is_no_data(flag: &str, output: &Path, data: &[String]) -> Result<(), UsageError> {
    let files = |entry| source::find(slice::from_ref(entry)).unwrap_or_default().files; // reading the data reports what is missing
    match data.iter().flat_map(files).any(|file| location(&file) == location(output)) {
        true => Err(would_replace(flag, output, "the data")),
        false => Ok(()),
    }
}

pub(super) fn would_replace(flag: &str, output: &Path, input: &str) -> UsageError {
    UsageError(format!("{flag} {} would replace {input}; choose another file", output.display()))
}

/// Equal for two paths of one file, which need not exist yet.
pub(super) fn location(path: &Path) -> PathBuf {
    let in_its_folder = || Some(parent(path).canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(in_its_folder).unwrap_or_else(|| path.to_owned())
}

/// Whether a file has a name that no output has: that of weights, or of another file that makes a folder a model or a run.
fn is_of_a_folder(path: &Path) -> bool {
    const NAMES: [&str; 5] = ["config.json", CHECKSUMS, PROVENANCE, METRICS, "adapter_config.json"];
    const WEIGHTS: [&str; 5] = ["safetensors", "bin", "pt", "model", "hidden_states"];
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_weights = path.extension().is_some_and(|end| WEIGHTS.iter().any(|weights| end == *weights));
    is_weights
        || NAMES.contains(&&*name)
        || name.ends_with(".index.json")
        || COMPANIONS.iter().any(|begin| name.starts_with(begin))
        || name == RECIPE && is_run(parent(path))
}

/// The folder of a bare file name is the working directory.
fn in_words(folder: &Path) -> &Path {
    if folder.as_os_str().is_empty() { Path::new(".") } else { folder }
}
