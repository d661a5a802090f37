//! Files of trained drafters, whatever kind they hold.

use std::fmt;
use std::path::Path;

use super::error::DrafterError;
use super::heads::import::HeadsFile;
use super::trained::TrainedDrafter;
use crate::formats::heads_config::PublishedHeadsConfig;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::taps::Taps;

/// A file of a trained drafter, whose header was read.
pub trait DrafterFile: fmt::Debug {
    /// The name of its kind, as in `heads.architecture` of a recipe.
    fn architecture(&self) -> &'static str;

    /// config.json beside it.
    fn config(&self) -> Option<&PublishedHeadsConfig>;

    /// Number of weights.
    fn num_parameters(&self) -> u64;

    /// The hidden states that the drafter reads beside the last one.
    fn taps(&self) -> Taps {
        Taps::default()
    }

    /// Checks that the drafter fits a backbone. Reads no tensor data.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what does not fit.
    fn check(&self, backbone: &LlamaConfig) -> Result<(), DrafterError>;

    /// Hash of the files that determine the drafter.
    ///
    /// # Errors
    /// [`DrafterError`] if one cannot be read.
    fn sha256(&self) -> Result<String, DrafterError>;

    /// What is odd about the file, but for the quantisation of its backbone.
    ///
    /// # Errors
    /// [`DrafterError`] names the tensor that is wrong.
    fn oddities(&self) -> Result<Vec<String>, DrafterError>;

    /// The drafter for a backbone, in the dtype and layout that decoding uses.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what is wrong with it.
    fn load(&self, backbone: &Llama) -> Result<Box<dyn TrainedDrafter>, DrafterError>;
}

/// A kind of trained drafter.
struct DrafterKind {
    /// Whether a folder or file holds one, by the names of files.
    holds: fn(&Path) -> bool,
    open: fn(&Path) -> Result<Box<dyn DrafterFile>, DrafterError>,
}

/// All kinds. Heads are what every other file is taken for, so that the error names their files.
const KINDS: [DrafterKind; 1] = [DrafterKind { holds: |_| true, open: |path| Ok(Box::new(HeadsFile::open(path)?)) }];

/// Opens the trained drafter in a folder or file.
///
/// # Errors
/// [`DrafterError`] names the file and what is wrong with it.
pub fn open(path: &Path) -> Result<Box<dyn DrafterFile>, DrafterError> {
    let kind = KINDS.iter().find(|kind| (kind.holds)(path)).expect("heads are the last kind");
    (kind.open)(path)
}
