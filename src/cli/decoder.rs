//! Loads a backbone with its tokenizer and drafters, and decodes conversations turn by turn.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use tch::Device;

use super::CommonFlags;
use super::drafter::loaded::LoadedDrafter;
use super::drafter::model::{self, Target};
use super::drafter::plan::DrafterPlan;
use super::loading::load_backbone;
use super::served::{self, ModelOptions};
use crate::data::chat_template::{ChatTemplate, TemplateChoice};
use crate::data::conversation::{ChatInput, Message};
use crate::data::prompts::{self, PromptInput};
use crate::data::tokenize::{TextTokenizer, narrow, wide};
use crate::engine::cpu::{CpuEngine, Unsupported};
use crate::model::llama::Llama;
use crate::model::loading::Purpose;
use crate::torch::memory;

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

/// `--chat-template`.
///
/// # Errors
/// A message with the accepted values.
pub fn chat_template(text: &str) -> Result<TemplateChoice, String> {
    TemplateChoice::try_from(text.to_owned())
}

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
    /// Loads everything and checks that it fits together. An adapter in the folder of `heads` is merged into the backbone.
    ///
    /// # Errors
    /// A missing file, or parts that do not fit.
    pub fn load(
        purpose: Purpose,
        folder: &Path,
        heads: Option<&Path>,
        drafters: Vec<DrafterPlan>,
        served: ModelOptions,
        common: &CommonFlags,
    ) -> anyhow::Result<Self> {
        let tokenizer = Arc::new(TextTokenizer::load(folder)?);
        for model in drafters.iter().flat_map(|plan| &plan.models) {
            model::check_vocabulary(model, &tokenizer)?; // before the weights are read
        }
        let backbone = load_backbone(folder, heads, &served, common, purpose)?;
        spare_threads(&backbone);
        if let (Purpose::Decoding, Err(why)) = (purpose, CpuEngine::supports(&backbone))
            && why != Unsupported::Device
        {
            match backbone.quantization() {
                Some(quantization) => common.say(served::on_libtorch(quantization)),
                None => common.say(format_args!("decoding with libtorch's operations: {why}")),
            }
        }
        tokenizer.check_vocabulary(usize::try_from(backbone.config.vocab_size)?)?;
        let target = Target { backbone: &backbone, tokenizer: &tokenizer, purpose };
        let load = |plan: DrafterPlan| plan.load(target, common);
        let drafters = drafters.into_iter().map(load).collect::<anyhow::Result<_>>()?;
        memory::keep_freed_blocks();
        Ok(Self { backbone, tokenizer, template: served.template.map(Arc::new), drafters })
    }

    /// The only drafter; `None` for plain decoding.
    pub fn drafter(&self) -> Option<&LoadedDrafter> {
        self.drafters.first()
    }

    /// Calls `answer` with each 0-based turn of a prompt and its tokens, which include the previous turns and answers.
    ///
    /// # Errors
    /// Errors of the template, the tokenizer or `answer`, with the turn.
    pub fn each_turn(
        &self,
        input: &PromptInput,
        mut answer: impl FnMut(u64, &[i64]) -> anyhow::Result<String>,
    ) -> anyhow::Result<()> {
        let PromptInput::Turns { opening, user } = input else {
            let ids = prompts::to_ids(input, &self.tokenizer, self.template.as_deref())?;
            return answer(0, &wide(&ids)).map(drop);
        };
        let mut chat = ChatInput::clone(opening);
        for (at, turn) in user.iter().enumerate() {
            let context = || format!("turn {}", at + 1);
            chat.messages.push(Message::new("user", turn));
            let ids = prompts::chat_ids(&chat, &self.tokenizer, self.template.as_deref()).with_context(context)?;
            let said = answer(at as u64, &wide(&ids)).with_context(context)?;
            chat.messages.push(Message::new("assistant", said));
        }
        Ok(())
    }

    /// Decodes new tokens to text, without special tokens.
    ///
    /// # Errors
    /// An error of the tokenizer.
    pub fn text(&self, ids: &[i64]) -> anyhow::Result<String> {
        Ok(self.tokenizer.decode(&narrow(ids), true)?)
    }
}
