//! The folder of an export: claimed before anything is read, and under its name when it is whole.

use std::io;
use std::path::Path;

use super::error::ExportError;
use crate::files::{ClaimError, NewFolder, is_taken};

/// Starts the folder that will become `out`.
///
/// # Errors
/// It is there, or another process writes it.
pub(super) fn claim(out: &Path) -> Result<NewFolder, ExportError> {
    if is_taken(out) {
        return Err(ExportError::Exists { path: out.into() });
    }
    NewFolder::claim(out).map_err(|error| match error {
        ClaimError::Io(source) => ExportError::Io { path: out.into(), source },
        ClaimError::Held(holder) => ExportError::InUse { path: out.into(), holder },
    })
}

/// Gives the folder its name.
///
/// # Errors
/// The name was taken meanwhile, or the I/O error.
pub(super) fn commit(folder: NewFolder, out: &Path) -> Result<(), ExportError> {
    folder.commit_as_new().map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => ExportError::Exists { path: out.into() },
        _ => ExportError::Io { path: out.into(), source },
    })
}
