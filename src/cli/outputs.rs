//! Files that a verb will write: looked at before the first second of work, not after the last.

use std::path::Path;

use super::UsageError;
use crate::files;

/// Refuses a file that could not be written; `flag` is the one that names it. Folders are not made.
///
/// # Errors
/// [`UsageError`].
pub(super) fn check(flag: &str, path: &Path) -> Result<(), UsageError> {
    let folder = files::parent(path);
    let shown = path.display();
    if path.is_dir() {
        return Err(UsageError(format!("{flag} {shown} is a folder; expected a file, such as one in it")));
    }
    if !folder.is_dir() {
        return Err(UsageError(format!("{flag} {shown}: there is no folder {}; make it first", folder.display())));
    }
    let cannot = |error| UsageError(format!("{flag} {shown} cannot be written: {error}; choose another place"));
    files::check_writable(path).map_err(cannot)
}
