//! Drafters before their weights: what a recipe asks for, and what the config of a backbone makes of it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::DrafterError;
use super::trained::{Reads, TrainedDrafter};
use crate::memory::layer::LayerPass;
use crate::model::config::LlamaConfig;
use crate::model::llama::Llama;
use crate::model::taps::Taps;

/// A drafter to train, as a recipe asks for it.
pub trait DrafterConfig: fmt::Debug + Send + Sync {
    fn reads(&self) -> Reads;

    /// The trained drafter to start from: a folder or a file.
    fn init_from(&self) -> Option<&Path>;

    /// How many tokens it can guess; `None` for all.
    fn draft_vocab_size(&self) -> Option<usize>;

    /// The fraction of inputs that training drops.
    fn dropout(&self) -> f64;

    /// The untrained drafter for a backbone.
    fn for_backbone(&self, backbone: &LlamaConfig) -> Arc<dyn PlannedDrafter>;

    /// The drafter for a backbone; one to start from must fit it, and have the recipe's shape. Reads no tensor data.
    ///
    /// # Errors
    /// [`DrafterError`]: a file that is wrong, or has another shape.
    fn checked(&self, backbone: &LlamaConfig) -> Result<Arc<dyn PlannedDrafter>, DrafterError>;

    /// Opens the drafter to start from.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what is wrong with it.
    fn start(&self) -> Result<Option<DrafterStart>, DrafterError>;

    /// The same drafter with the LM head as its output layer, and the key of the recipe that says so; `None` if that cannot be, or is so.
    fn with_shared_lm_head(&self) -> Option<(Arc<dyn DrafterConfig>, &'static str)>;
}

/// The trained drafter that training starts from.
#[derive(Debug)]
pub struct DrafterStart {
    /// Where other files of its run are.
    pub folder: PathBuf,
    /// Those that determine it.
    pub files: Vec<PathBuf>,
    /// The tokens that it can guess; `None` for all.
    pub token_map: Option<Vec<i64>>,
}

/// A drafter whose shape is known, for one backbone.
pub trait PlannedDrafter: fmt::Debug + Send + Sync {
    fn reads(&self) -> Reads;

    /// The hidden states that it reads beside the last one.
    fn taps(&self) -> Taps {
        Taps::default()
    }

    /// Its shape in words, as `--check` prints it.
    fn title(&self) -> String;

    /// Its shape, as `--check --json` prints it.
    fn shape(&self) -> serde_json::Value;

    /// The drafter with untrained weights, which `seed` determines, or with those that it starts from, in the dtype of training. `tokens` are
    /// those that an untrained one can guess.
    ///
    /// # Errors
    /// [`DrafterError`] names the file and what is wrong with it.
    fn build(
        &self,
        backbone: &Llama,
        tokens: Option<&[i64]>,
        seed: u64,
    ) -> Result<Box<dyn TrainedDrafter>, DrafterError>;

    /// The size of each trained tensor.
    fn tensors(&self, backbone: &LlamaConfig) -> Vec<u64>;

    /// A decoder layer of its own that is trained over the rows of a micro batch, if it has one.
    fn layer<'w>(&self, pass: &LayerPass<'w>) -> Option<LayerPass<'w>>;

    /// Bytes of the largest tensors of one level's loss that exist at the same time.
    fn loss_bytes(&self, pass: &LayerPass, teachers: Teachers) -> u64;

    /// As [`PlannedDrafter::loss_bytes`], of the LM head's own loss.
    fn lm_head_loss_bytes(&self, pass: &LayerPass, teachers: Teachers) -> u64;
}

/// Who teaches beside the labels.
#[derive(Debug, Clone, Copy, Default)]
pub struct Teachers {
    /// The LM head teaches the drafter.
    pub for_drafter: bool,
    /// The backbone without its adapters teaches the one with them.
    pub for_backbone: bool,
}
