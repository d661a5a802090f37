//! The files of a command that several parts of it read, opened and checked once: the backbone's config.json, and trained heads.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::drafter::spec::{DrafterName, DrafterSpec};
use super::error::{SessionError, UsageError};
use super::reporter::{LoadContext, Reporter};
use crate::data::tokenize::config_keys::reported_tokenizer_keys;
use crate::draft::error::DrafterError;
use crate::draft::file::DrafterFile;
use crate::draft::heads::import::folder_of;
use crate::draft::kinds;
use crate::draft::trained::TrainedDrafter;
use crate::files::{FileError, is_file};
use crate::formats::run_folder;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::peft::ADAPTER_CONFIG;

/// A backbone's folder, whose config.json was read and checked.
#[derive(Debug, Clone)]
pub struct OpenedBackbone {
    pub folder: PathBuf,
    pub config: LlamaConfig,
    /// Keys of config.json without effect here.
    reported_keys: Vec<String>,
}

impl OpenedBackbone {
    /// Reads the config.
    ///
    /// # Errors
    /// [`UsageError`], as for the backbone of a recipe: there is no such folder, or it holds no backbone that this program runs.
    pub fn open(folder: &Path) -> Result<Self, UsageError> {
        let (config, reported_keys) = LlamaConfig::load_reporting(folder).map_err(|error| {
            let flag = if folder.exists() { "" } else { "--backbone: " };
            UsageError(format!("{flag}{error}"))
        })?;
        Ok(Self { folder: folder.to_owned(), config, reported_keys })
    }

    /// Reports the keys of a backbone's files that are unknown here, or ask for something that is not done: other programs may compute another text.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn report_keys_without_effect(&self, reporter: &dyn Reporter) -> Result<(), SessionError> {
        let files = [
            ("config.json", &self.reported_keys),
            ("generation_config.json", &LlamaConfig::reported_generation_keys(&self.folder)?),
            ("tokenizer_config.json", &reported_tokenizer_keys(&self.folder)?),
        ];
        for (file, keys) in files.iter().filter(|(_, keys)| !keys.is_empty()) {
            let (path, keys) = (self.folder.join(file), keys.join(", "));
            reporter.notice(&format_args!("{}: keys without effect here: {keys}", path.display()));
        }
        Ok(())
    }
}

/// A trained drafter's file, such as heads in any layout, and the path that named it: the file, or a folder that holds it.
#[derive(Debug)]
pub struct OpenedHeads {
    pub path: PathBuf,
    pub file: Box<dyn DrafterFile>,
}

impl OpenedHeads {
    /// Finds the file and reads its header.
    ///
    /// # Errors
    /// As [`kinds::open`].
    pub fn open(path: &Path) -> Result<Rc<Self>, DrafterError> {
        Ok(Rc::new(Self { path: path.to_owned(), file: kinds::open(path)? }))
    }

    /// The folder that holds the file and other outputs of the training.
    pub fn folder(&self) -> &Path {
        folder_of(&self.path)
    }

    /// The folder, if it holds an adapter of the backbone.
    ///
    /// # Errors
    /// A folder that cannot be looked into.
    pub fn adapter(&self) -> Result<Option<&Path>, FileError> {
        let folder = self.folder();
        Ok(is_file(&folder.join(ADAPTER_CONFIG))?.then_some(folder))
    }

    /// A file of the training: in the heads' folder, else in the folder of their run.
    pub fn beside(&self, name: &str) -> Option<PathBuf> {
        let places = [Some(self.folder().to_owned()), run_folder::above(self.folder())];
        places.into_iter().flatten().map(|place| place.join(name)).find(|path| path.is_file())
    }

    /// The drafter that the heads were trained for.
    ///
    /// # Errors
    /// [`UsageError`] for an architecture that is unknown here.
    pub fn drafter(&self) -> Result<DrafterSpec, UsageError> {
        let config = self.file.config();
        let recorded = config.and_then(|config| config.architecture());
        let architecture = recorded.unwrap_or(self.file.architecture());
        DrafterName::from_architecture(architecture).map(DrafterSpec::of).ok_or_else(|| {
            let path = config.map_or(&self.path, |config| &config.path);
            let known = "\"medusa\", \"hydra\", \"hydra++\" or \"eagle3\"";
            UsageError(format!("{}: architecture: expected {known}, got {architecture:?}", path.display()))
        })
    }

    /// Reads the weights, in the dtype and layout that decoding uses, and reports what is odd about the file. Another quantisation is reported where the backbone's is chosen.
    ///
    /// # Errors
    /// An invalid file, or heads that do not fit the backbone.
    pub fn load(&self, backbone: &Llama, context: LoadContext) -> Result<Box<dyn TrainedDrafter>, DrafterError> {
        self.file.oddities()?.iter().for_each(|oddity| context.reporter.notice(oddity));
        self.file.load(backbone, context.draft_dtype)
    }
}
