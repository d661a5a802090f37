//! Weights that a verb reads are verified before the work, where there are checksums beside them.

use super::downloads::HubArgument;
use crate::files::checksums::{self, ChecksumError};
use crate::files::parent;
use crate::hub::Wanted;

/// Verifies the folders of heads, backbones and draft models, each once.
///
/// # Errors
/// [`ChecksumError`] about the first file that is not as it was written.
pub(super) fn verify(places: Vec<HubArgument<'_>>) -> Result<(), ChecksumError> {
    let mut folders = Vec::new();
    for place in &places {
        if let HubArgument::Model(path, wanted) = place
            && !matches!(wanted, Wanted::BackboneWithoutWeights)
        {
            let folder = if path.is_dir() { path.as_path() } else { parent(path) };
            if folder.is_dir() && !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders.into_iter().try_for_each(|folder| checksums::verify(folder).map(drop))
}
