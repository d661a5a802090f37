//! What to load, in one place.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use super::decoder::Decoder;
use super::drafter::plan::{DrafterPlan, deciding_heads};
use super::drafter::spec::DrafterSpec;
use super::engine::EngineOptions;
use super::error::SessionError;
use super::opened::OpenedBackbone;
use super::reporter::{LoadContext, Reporter};
use super::setup::SetupOptions;
use crate::decode::DecodeLoop;
use crate::decode::request::Request;
use crate::dtype::{DraftDtype, Dtype};
use crate::torch::DeviceChoice;
use crate::tree::accept::Acceptance;

/// A backbone with or without a drafter. [`Default`] values are those of the command line.
#[derive(Debug, Clone, Default)]
pub struct SessionOptions {
    /// A folder in Hugging Face layout.
    pub backbone: PathBuf,
    /// Trained heads: a folder or a file.
    pub heads: Option<PathBuf>,
    /// By default the drafter that the heads were trained for.
    pub drafter: Option<DrafterSpec>,
    /// A tree file, or `dynamic:N`; by default the tree.json beside heads with a path of their own, else a chain.
    pub tree: Option<PathBuf>,
    /// Guesses of a draft model's chain.
    pub draft_tokens: Option<NonZeroUsize>,
    pub setup: SetupOptions,
    pub engine: EngineOptions,
    pub device: DeviceChoice,
    /// By default that of the backbone's weights; on a CPU never float16.
    pub dtype: Option<Dtype>,
    /// Of drafters, on the CPU's kernels.
    pub draft_dtype: DraftDtype,
}

impl SessionOptions {
    /// Opens the files, checks that they fit together, and loads the weights.
    ///
    /// # Errors
    /// [`SessionError`] names the file, or the option and what it conflicts with.
    pub fn load(&self, reporter: &dyn Reporter) -> Result<Decoder, SessionError> {
        let plan = DrafterPlan::new(self.drafter.as_ref(), self.heads.as_deref(), self.tree.as_deref())?;
        let plan = plan.map(|plan| plan.with_draft_tokens(self.draft_tokens)).transpose()?;
        let backbone = OpenedBackbone::open(&self.backbone)?;
        let setup = self.setup.resolve(backbone, deciding_heads(plan.as_ref(), self.heads.as_deref())?, reporter)?;
        self.engine.load(setup, plan.into_iter().collect(), self.context(reporter))
    }

    /// A loop that decodes requests like `request`, with the drafter if there is one.
    ///
    /// # Errors
    /// The reason why the engine cannot decode this.
    pub fn decode_loop<'a>(
        &self,
        decoder: &'a Decoder,
        acceptance: Acceptance,
        request: &Request,
        reporter: &dyn Reporter,
    ) -> Result<Box<dyn DecodeLoop + 'a>, SessionError> {
        self.engine.decode_loop(decoder, acceptance, request, self.context(reporter))
    }

    fn context<'r>(&self, reporter: &'r dyn Reporter) -> LoadContext<'r> {
        LoadContext { device: self.device, dtype: self.dtype, draft_dtype: self.draft_dtype, reporter }
    }
}
