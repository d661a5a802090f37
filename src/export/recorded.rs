//! What a run recorded about the training of its heads. Every export keeps it, so that exported heads are served as they were trained.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::error::ExportError;
use super::trained::Trained;
use crate::data::chat_template::{ChatTemplate, TemplateChoice};
use crate::draft::heads::import::{HeadsFile, folder_of};
use crate::files::{self, write_synced};
use crate::formats::heads_config::{BACKBONE_FINGERPRINT, CHAT_TEMPLATE, HEADS_CHAT_TEMPLATE, PublishedHeadsConfig};

/// The keys for config.json. Merging an adapter leaves no weights to quantise as in training, so `quantization` is left out.
pub(super) fn keys(trained: &Trained) -> Map<String, Value> {
    let mut keys = trained.file.config().map(PublishedHeadsConfig::recorded).unwrap_or_default();
    if trained.format.holds_backbone() && trained.adapter.is_some() {
        keys.remove("quantization");
    }
    if trained.format.holds_backbone() {
        keys.remove(BACKBONE_FINGERPRINT); // those of the folder may be merged, or of another dtype
    }
    if template_file(&trained.file).is_some() {
        keys.insert("chat_template".into(), file_name(trained).into());
    }
    keys
}

/// Writes the heads' template file. A backbone without a template gets the heads' template as its own.
pub(super) fn write_template(folder: &Path, trained: &Trained) -> Result<(), ExportError> {
    let file = template_file(&trained.file);
    if let Some(path) = &file {
        let text = files::read_text(path).map_err(|source| ExportError::Io { path: path.clone(), source })?;
        save(folder.join(file_name(trained)), &text)?;
    }
    if !trained.format.holds_backbone() || ChatTemplate::load(folder)?.is_some() {
        return Ok(());
    }
    let choice = template_choice(&trained.file);
    let template = choice.map(|choice| ChatTemplate::choose(&choice, folder)).transpose()?.flatten();
    template.map_or(Ok(()), |template| save(folder.join(CHAT_TEMPLATE), template.source()))
}

fn save(path: PathBuf, text: &str) -> Result<(), ExportError> {
    write_synced(&path, |out| out.write_all(text.as_bytes())).map_err(|source| ExportError::Io { path, source })
}

/// The template that was recorded with heads. A path is not followed.
pub(super) fn template_choice(heads: &HeadsFile) -> Option<TemplateChoice> {
    template_file(heads).map(TemplateChoice::File).or_else(|| {
        let choice = TemplateChoice::try_from(heads.config()?.chat_template()?.to_owned()).ok();
        choice.filter(|choice| matches!(choice, TemplateChoice::BuiltIn(_)))
    })
}

/// The recorded template's file, if it is one.
fn template_file(heads: &HeadsFile) -> Option<PathBuf> {
    let name = heads.config()?.chat_template().filter(|name| [CHAT_TEMPLATE, HEADS_CHAT_TEMPLATE].contains(name))?;
    Some(folder_of(heads.path()).join(name))
}

/// The name of that file in the export.
fn file_name(trained: &Trained) -> &'static str {
    if trained.format.holds_backbone() { HEADS_CHAT_TEMPLATE } else { CHAT_TEMPLATE }
}
