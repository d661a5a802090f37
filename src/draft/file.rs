//! Files of trained drafters, whatever kind they hold.

use std::fmt;

use super::error::DrafterError;
use super::trained::TrainedDrafter;
use crate::dtype::DraftDtype;
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

    /// The hidden states of a backbone that the drafter reads beside the last one.
    fn taps(&self, _backbone: &LlamaConfig) -> Taps {
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

    /// The drafter for a backbone, in the layout that decoding uses; with the CPU's kernels in `dtype`.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what is wrong with it.
    fn load(&self, backbone: &Llama, dtype: DraftDtype) -> Result<Box<dyn TrainedDrafter>, DrafterError>;
}
