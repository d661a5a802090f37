//! Output files are checked before the work, not after it, and no other process writes them meanwhile.

use std::path::Path;

use super::{CommonFlags, UsageError};
use crate::files::{Claim, ClaimError};

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

/// The folder of a bare file name is the working directory.
fn in_words(folder: &Path) -> &Path {
    if folder.as_os_str().is_empty() { Path::new(".") } else { folder }
}
