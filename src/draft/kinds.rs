//! The kinds of trained drafters: which of them a file holds. Apart from [`DrafterFile`], which the kinds themselves use.

use std::path::Path;

use super::eagle::file::EagleFile;
use super::error::DrafterError;
use super::file::DrafterFile;
use super::heads::import::HeadsFile;

/// A kind of trained drafter.
struct DrafterKind {
    /// Whether a folder or file holds one, by its tensors.
    holds: fn(&Path) -> bool,
    open: fn(&Path) -> Result<Box<dyn DrafterFile>, DrafterError>,
}

/// All kinds. Heads are what every other file is taken for, so that the error names their files.
const KINDS: [DrafterKind; 2] = [
    DrafterKind { holds: EagleFile::is_in, open: |path| Ok(Box::new(EagleFile::open(path)?)) },
    DrafterKind { holds: |_| true, open: |path| Ok(Box::new(HeadsFile::open(path)?)) },
];

/// Opens the trained drafter in a folder or file.
///
/// # Errors
/// [`DrafterError`] names the file and what is wrong with it.
pub fn open(path: &Path) -> Result<Box<dyn DrafterFile>, DrafterError> {
    let kind = KINDS.iter().find(|kind| (kind.holds)(path)).expect("heads are the last kind");
    (kind.open)(path)
}
