//! Exports trained heads in the layouts of other programs. A folder is written under a temporary name, read back by the
//! normal loader, compared tensor by tensor with the trained heads, run on fixed hidden states, and only then renamed.
//!
//! Memory: heads are streamed tensor by tensor. `merged` and `modelopt` copy a memory-mapped backbone one tensor at a
//! time; with adapters, or in another dtype, they load the whole backbone (33 billion weights in bfloat16: 66 GB).
//! `peft` loads the backbone to test its adapter before anything is written, and frees both.

use std::fs;
use std::path::{Path, PathBuf};

use crate::draft::heads::HeadsShape;
use crate::draft::heads::import::notices::Notice;
use crate::dtype::Dtype;
use crate::files::checksums;

mod card;
mod check;
mod companions;
pub mod eagle;
mod error;
mod finite;
mod format;
pub mod gguf;
mod new_folder;
mod recorded;
mod request;
mod trained;
mod write;

pub use error::ExportError;
pub use format::{ExportFormat, FormatSpec};
pub use request::ExportRequest;

use check::RoundingDifference;
use companions::Companions;
use format::FolderContents;
use trained::Trained;

/// The written files and the result of the check.
#[derive(Debug, serde::Serialize)]
pub struct Exported {
    /// Heads, layers and sizes as read back.
    #[serde(flatten)]
    pub shape: HeadsShape,
    /// Dtype of the tensors.
    pub dtype: Dtype,
    /// Difference between the outputs of the exported heads (read back and bit for bit equal to the trained heads in
    /// this dtype) and those of the trained heads in their own dtype.
    pub difference_to_trained: RoundingDifference,
    /// Names in the folder.
    pub files: Vec<String>,
    /// Warnings for the user.
    pub notices: Vec<String>,
}

/// Writes an export under a temporary name, reads it back, compares it, and renames it to `request.out`.
///
/// # Errors
/// [`ExportError`]; nothing is left then.
pub fn export(request: &ExportRequest) -> Result<Exported, ExportError> {
    let folder = new_folder::claim(&request.out)?;
    let mut trained = Trained::open(request)?;
    let companions = Companions::find(request, &trained)?;
    let mut notices = notices(request, &trained)?;
    notices.extend(companions.notices.iter().cloned());
    write::write(folder.partial(), &mut trained)?;
    let difference = check::read_back(folder.partial(), &trained)?;
    companions.write(folder.partial(), &trained)?;
    card::write(folder.partial(), &trained, &companions)?;
    checksums::seal(folder.partial(), &[card::FILE])?;
    let files = file_names(folder.partial()).map_err(|source| ExportError::Io { path: request.out.clone(), source })?;
    new_folder::commit(folder, &request.out)?;
    Ok(Exported {
        shape: trained.written_shape(),
        dtype: trained.dtype,
        difference_to_trained: difference,
        files,
        notices,
    })
}

/// Warnings for the user before the folder is served.
fn notices(request: &ExportRequest, trained: &Trained) -> Result<Vec<String>, ExportError> {
    let mut notices: Vec<String> = trained.file.notices()?.iter().map(Notice::to_string).collect();
    if request.format.contents == FolderContents::Heads
        && let Some(own) = trained.tuned_backbone()
    {
        notices.push(format!(
            "these heads belong to the backbone that was trained with them ({own}); serve them with it, or use --format merged"
        ));
    }
    if trained.copies_lm_head() {
        notices.push(format!(
            "these heads share the backbone's lm_head, which --format {} does not support: each of the {} heads gets a copy",
            request.format.name,
            trained.shape.medusa_num_heads
        ));
    }
    if let (None, Some(base)) = (&trained.base_model, trained.base_name()) {
        let name = trained.public_base_name().filter(|name| *name != base && !request.format.holds_backbone());
        if let Some(name) = name {
            notices.push(format!(
                "config.json calls the backbone {name:?}: the path {base} is left out, because only this machine has it; programs that load \
                 the backbone by this name need its path there"
            ));
        }
        notices.push(format!(
            "the model card has no base_model, because the backbone ({base}) is not known to be on the Hub; if it is, add `base_model: OWNER/NAME` \
             at the top of README.md before pushing"
        ));
    }
    let path = request.out.to_string_lossy().to_lowercase();
    let mistaken = request.format.mistaken_paths.filter(|paths| paths.parts.iter().any(|part| path.contains(part)));
    notices.extend(mistaken.map(|paths| paths.notice.to_owned()));
    Ok(notices)
}

/// The backbone that an export reads, as a path or a name; `None` if the heads suffice.
///
/// # Errors
/// Unreadable heads, or an invalid request.
pub fn backbone_needed(request: &ExportRequest) -> Result<Option<PathBuf>, ExportError> {
    let trained = Trained::outline(request)?;
    Ok(trained.base.clone().filter(|_| trained.use_of_backbone().is_some()))
}

fn file_names(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}
