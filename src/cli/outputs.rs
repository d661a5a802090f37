//! Output files are checked before the work, not after it.

use std::path::Path;

use super::{CommonFlags, UsageError};
use crate::files;

/// Rejects a file that cannot be written, and says so if one will be replaced; `flag` names it. Missing folders are made when it is
/// written.
///
/// # Errors
/// [`UsageError`].
pub(super) fn check(flag: &str, path: &Path, common: &CommonFlags) -> Result<(), UsageError> {
    let shown = path.display();
    if path.is_dir() {
        return Err(UsageError(format!("{flag} {shown} is a folder; expected a file")));
    }
    let cannot = |why: String| UsageError(format!("{flag} {shown} cannot be written: {why}"));
    let existing = path.ancestors().skip(1).map(in_words).find(|folder| folder.exists());
    let folder = existing.ok_or_else(|| cannot("it has no parent folder".into()))?;
    if !folder.is_dir() {
        return Err(cannot(format!("{} is not a folder", folder.display())));
    }
    let name = path.file_name().unwrap_or(path.as_os_str());
    files::check_writable(&folder.join(name)).map_err(|error| cannot(error.to_string()))?;
    if path.exists() {
        common.say(format_args!("{flag} {shown} exists and will be replaced"));
    }
    Ok(())
}

/// The folder of a bare file name is the working directory.
fn in_words(folder: &Path) -> &Path {
    if folder.as_os_str().is_empty() { Path::new(".") } else { folder }
}
