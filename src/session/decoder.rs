//! A loaded session: backbone, tokenizer, chat template and drafters.

use std::sync::Arc;

use tch::Device;

use super::drafter::loaded::LoadedDrafter;
use super::drafter::model::{self, Target};
use super::drafter::plan::DrafterPlan;
use super::error::SessionError;
use super::loading::load_backbone;
use super::reporter::{LoadContext, Reporter};
use super::setup::{ModelSetup, on_libtorch};
use crate::cpu;
use crate::data::chat_template::ChatTemplate;
use crate::data::tokenize::{TextTokenizer, narrow};
use crate::dtype::DraftDtype;
use crate::engine::cpu::{CpuEngine, Unsupported};
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::torch::memory;

/// A backbone with everything that decoding needs.
#[derive(Debug)]
pub struct Decoder {
    pub backbone: Llama,
    pub tokenizer: Arc<TextTokenizer>,
    /// The chat template, if the backbone has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// In the order of their plans.
    pub drafters: Vec<LoadedDrafter>,
}

impl Decoder {
    /// Loads everything and checks that it fits together.
    ///
    /// # Errors
    /// A missing file, or parts that do not fit.
    pub fn load(
        setup: ModelSetup,
        purpose: Purpose,
        drafters: Vec<DrafterPlan>,
        context: LoadContext,
    ) -> Result<Self, SessionError> {
        let tokenizer = Arc::new(TextTokenizer::load(&setup.backbone.folder)?);
        for model in drafters.iter().flat_map(|plan| &plan.models) {
            model::check_vocabulary(model, &tokenizer)?; // before the weights are read
        }
        let backbone = load_backbone(&setup, purpose, context)?;
        spare_threads(&backbone);
        if purpose == Purpose::Decoding {
            report_missing_kernels(&backbone, context.reporter);
        }
        report_unused_draft_dtype(&backbone, purpose, &drafters, context);
        tokenizer.check_vocabulary(usize::try_from(backbone.config.vocab_size)?)?;
        let target = Target { backbone: &backbone, tokenizer: &tokenizer, purpose };
        let load = |plan: DrafterPlan| plan.load(target, context);
        let drafters = drafters.into_iter().map(load).collect::<Result<_, _>>()?;
        memory::keep_freed_blocks();
        Ok(Self { backbone, tokenizer, template: setup.template.map(Arc::new), drafters })
    }

    /// The only drafter; `None` for plain decoding.
    pub fn drafter(&self) -> Option<&LoadedDrafter> {
        self.drafters.first()
    }

    /// Decodes new tokens to text, without special tokens.
    ///
    /// # Errors
    /// An error of the tokenizer.
    pub fn text(&self, ids: &[i64]) -> Result<String, SessionError> {
        Ok(self.tokenizer.decode(&narrow(ids), true)?)
    }
}

/// Limits libtorch to one thread if the backbone is so small that synchronization costs more than the products, or if
/// the CPU kernels use the cores. `OMP_NUM_THREADS` wins in the first case.
fn spare_threads(backbone: &Llama) {
    const WORTH_SHARING: i64 = 1 << 17; // elements of the largest weight
    let config = &backbone.config;
    let largest = config.hidden_size * config.vocab_size.max(2 * config.intermediate_size);
    let few =
        backbone.device() == Device::Cpu && largest < WORTH_SHARING && std::env::var_os("OMP_NUM_THREADS").is_none();
    if few || CpuEngine::supports(backbone).is_ok() {
        tch::set_num_threads(1);
    }
}

/// Reports a dtype of drafters that were not made for the CPU's kernels.
fn report_unused_draft_dtype(backbone: &Llama, purpose: Purpose, drafters: &[DrafterPlan], context: LoadContext) {
    let has_weights = drafters.iter().any(|plan| plan.heads.is_some() || !plan.models.is_empty());
    let has_kernels = backbone.device() == Device::Cpu && cpu::available() && purpose == Purpose::Decoding;
    if context.draft_dtype != DraftDtype::Auto && !(has_weights && has_kernels) {
        let why = if has_weights { "only the CPU kernels have one" } else { "no drafter has weights" };
        context.reporter.notice(&format_args!("--draft-dtype {} has no effect: {why}", context.draft_dtype));
    }
}

/// Reports why a backbone on the CPU is decoded with libtorch's operations.
fn report_missing_kernels(backbone: &Llama, reporter: &dyn Reporter) {
    match (CpuEngine::supports(backbone), backbone.quantization()) {
        (Ok(()) | Err(Unsupported::Device), _) => {}
        (Err(_), Some(quantization)) => reporter.notice(&on_libtorch(quantization)),
        (Err(why), None) => reporter.notice(&format_args!("decoding with libtorch's operations: {why}")),
    }
}
