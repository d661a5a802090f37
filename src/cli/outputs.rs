//! Output files are checked before the work, not after it.

use std::path::Path;

use super::{CommonFlags, UsageError};
use crate::files;

/// Rejects a file that cannot be written, and says so if one will be replaced; `flag` names it. Folders are not created.
///
/// # Errors
/// [`UsageError`].
pub(super) fn check(flag: &str, path: &Path, common: &CommonFlags) -> Result<(), UsageError> {
    let folder = files::parent(path);
    let shown = path.display();
    if path.is_dir() {
        return Err(UsageError(format!("{flag} {shown} is a folder; expected a file")));
    }
    if !folder.is_dir() {
        return Err(UsageError(format!("{flag} {shown}: there is no folder {}; create it first", folder.display())));
    }
    let cannot = |error| UsageError(format!("{flag} {shown} cannot be written: {error}"));
    files::check_writable(path).map_err(cannot)?;
    if path.exists() {
        common.say(format_args!("{flag} {shown} exists and will be replaced"));
    }
    Ok(())
}
