//! `--quantization`, `--chat-template` and the default of `--max-context`: what the heads were trained with, so that what was measured is what
//! is served.

use std::fmt;
use std::path::Path;

use clap::{Args, ValueEnum};

use super::backbone::backbone_config;
use super::{CommonFlags, UsageError};
use crate::data::chat_template::{ChatTemplate, TemplateChoice, TemplateError};
use crate::draft::heads::import::{HeadsFile, folder_of};
use crate::dtype::Dtype;
use crate::formats::heads_config::{CHAT_TEMPLATE, HEADS_CHAT_TEMPLATE, PublishedHeadsConfig};
use crate::model::config::LlamaConfig;
use crate::model::device_map::DeviceMap;
use crate::model::stored::Quantization;
use crate::model::weights::WeightFiles;

/// The value of `--chat-template` for no template at all.
const NO_TEMPLATE: &str = "none";

/// Flags of every verb that takes heads.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Decoding")]
pub struct ServedFlags {
    /// Quantise the backbone's linear layers [default: as in the heads' training; without heads none].
    #[arg(long, value_enum, value_name = "Q")]
    pub quantization: Option<QuantizationName>,
    /// Chat template for conversations: "tokenizer" (the backbone's own), a built-in name (vicuna, zephyr, llama-2, llama-3, chatml,
    /// mistral), a .jinja file, or "none" [default: the one that the heads were trained with, else the backbone's own].
    #[arg(long, value_name = "TEMPLATE", value_parser = template_flag)]
    pub chat_template: Option<TemplateFlag>,
}

/// `--quantization`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantizationName {
    /// 4-bit NormalFloat with double quantisation, as in QLoRA.
    Nf4,
    /// 8 bits per weight, one scale per output.
    Int8,
    /// The dtype of --dtype.
    None,
}

/// `--chat-template`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateFlag {
    /// Conversations are refused; `chat` continues raw text.
    None,
    /// As in a recipe.
    Choice(TemplateChoice),
}

/// The weights and the template to decode with.
#[derive(Debug, Default)]
pub struct ModelOptions {
    pub quantization: Option<Quantization>,
    pub template: Option<ChatTemplate>,
    /// The context to load the backbone with; by default its own. [`ServedFlags::resolve`] gives that of the heads' training if rotary
    /// embeddings depend on it.
    pub context: Option<i64>,
    /// Over which GPUs the layers are spread, where a verb can do it.
    pub device_map: Option<DeviceMap>,
    /// Compute dtype of the heads' training, which weights in float16 are decoded in on a CPU.
    pub dtype: Option<Dtype>,
}

impl QuantizationName {
    pub(super) fn quantization(self) -> Option<Quantization> {
        match self {
            Self::Nf4 => Some(Quantization::Nf4),
            Self::Int8 => Some(Quantization::Int8),
            Self::None => None,
        }
    }
}

impl TemplateFlag {
    fn choice(&self) -> Option<&TemplateChoice> {
        match self {
            Self::None => None,
            Self::Choice(choice) => Some(choice),
        }
    }
}

impl fmt::Display for TemplateFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.choice().map_or_else(|| NO_TEMPLATE.to_owned(), |choice| choice.clone().into()))
    }
}

fn template_flag(text: &str) -> Result<TemplateFlag, String> {
    if text == NO_TEMPLATE {
        return Ok(TemplateFlag::None);
    }
    TemplateChoice::try_from(text.to_owned()).map(TemplateFlag::Choice)
}

impl ServedFlags {
    /// The flags, else what the heads were trained with, else the backbone's own template and no quantisation. Reports a flag that
    /// differs from the training of the heads.
    ///
    /// # Errors
    /// Files that cannot be read; a value in the heads' config.json that is not known here.
    pub fn resolve(&self, backbone: &Path, heads: Option<&Path>, common: &CommonFlags) -> anyhow::Result<ModelOptions> {
        let of_backbone = backbone_config(backbone)?; // first: its errors are the clearest for a folder without a backbone
        let file = heads.map(HeadsFile::open).transpose()?;
        let config = file.as_ref().and_then(HeadsFile::config);
        config.and_then(|config| other_backbone(backbone, config)).iter().for_each(|notice| common.say(notice));
        Ok(ModelOptions {
            device_map: None,
            quantization: self.quantization(config, common)?,
            template: self.template(backbone, heads.zip(config), common)?,
            context: rope_context(heads, &of_backbone)?,
            dtype: config.and_then(PublishedHeadsConfig::backbone_dtype),
        })
    }

    /// The flag, else the backbone's own.
    ///
    /// # Errors
    /// A template that cannot be read.
    pub(super) fn template_of(&self, backbone: &Path) -> Result<Option<ChatTemplate>, TemplateError> {
        let choice = self.chat_template.as_ref().map_or(Some(TemplateChoice::default()), |flag| flag.choice().cloned());
        choice.map_or(Ok(None), |choice| ChatTemplate::choose(&choice, backbone))
    }

    fn quantization(
        &self,
        config: Option<&PublishedHeadsConfig>,
        common: &CommonFlags,
    ) -> Result<Option<Quantization>, UsageError> {
        let trained = config.map_or(Ok(None), quantization_of);
        let Some(flag) = self.quantization.map(QuantizationName::quantization) else { return trained };
        let is_recorded = config.is_some_and(|config| config.is_of_a_run() || config.quantization().is_some());
        if let Ok(trained) = trained
            && trained != flag
            && is_recorded
        {
            let backbone = trained.map_or_else(|| "that was not quantised".to_owned(), |q| format!("quantised to {q}"));
            common.say(format_args!(
                "--quantization {}: the heads were trained on a backbone {backbone}; their accuracy may differ",
                shown(flag)
            ));
        }
        Ok(flag)
    }

    fn template(
        &self,
        backbone: &Path,
        heads: Option<(&Path, &PublishedHeadsConfig)>,
        common: &CommonFlags,
    ) -> anyhow::Result<Option<ChatTemplate>> {
        let choose = |choice: &TemplateChoice| ChatTemplate::choose(choice, backbone);
        let recorded = heads.map_or(Ok(None), |(heads, config)| template_of(heads, config));
        let Some(flag) = &self.chat_template else {
            return Ok(choose(&recorded?.unwrap_or_default())?);
        };
        let template = flag.choice().map_or(Ok(None), choose)?;
        let trained = recorded.ok().flatten().and_then(|choice| Some((choose(&choice).ok()??, choice)));
        if let Some((trained, choice)) = trained
            && template.as_ref().is_none_or(|template| template.sha256() != trained.sha256())
        {
            common.say(format_args!(
                "--chat-template {flag}: the heads were trained with {}; their accuracy may differ",
                String::from(choice)
            ));
        }
        Ok(template)
    }
}

impl ModelOptions {
    /// Refuses conversations without a template; `are_conversations` says of each prompt whether it is one.
    ///
    /// # Errors
    /// [`UsageError`] lists the values of `--chat-template`.
    pub fn check_template(
        &self,
        mut are_conversations: impl Iterator<Item = bool>,
        backbone: &Path,
    ) -> Result<(), UsageError> {
        match are_conversations.position(|is_conversation| is_conversation) {
            Some(at) if self.template.is_none() => {
                Err(UsageError(format!("prompt {} is a conversation, and {}", at + 1, needs_template(backbone))))
            }
            _ => Ok(()),
        }
    }
}

/// What to do about a backbone without a template.
pub(super) fn needs_template(backbone: &Path) -> String {
    format!(
        "{} has no chat template; choose one with --chat-template: {} or a .jinja file",
        backbone.display(),
        TemplateChoice::built_in_names()
    )
}

/// A notice if the heads were trained on other weights. Files that cannot be read are reported where they are loaded.
fn other_backbone(folder: &Path, config: &PublishedHeadsConfig) -> Option<String> {
    let here = WeightFiles::open(folder).and_then(|files| files.fingerprint()).ok()?;
    let name = config.base().unwrap_or("a backbone without a name");
    let is_other = config.backbone_fingerprint()? != here;
    is_other.then(|| {
        let folder = folder.display();
        format!("the heads were trained on {name}, and {folder} has other weights: their guesses may be much worse")
    })
}

/// The recorded quantisation of a backbone in training.
fn quantization_of(config: &PublishedHeadsConfig) -> Result<Option<Quantization>, UsageError> {
    let Some(name) = config.quantization() else { return Ok(None) };
    let known = [Quantization::Nf4, Quantization::Int8].into_iter().find(|known| known.to_string() == name);
    known.map(Some).ok_or_else(|| {
        UsageError(format!(
            "{}: quantization: expected \"nf4\" or \"int8\", got {name:?}; choose the weights to decode with by --quantization",
            config.path.display()
        ))
    })
}

/// The context that the heads were trained with, if the backbone's rotary embeddings depend on it.
///
/// # Errors
/// Heads that cannot be read, or were trained with a context that the backbone does not have.
pub fn rope_context(heads: Option<&Path>, backbone: &LlamaConfig) -> anyhow::Result<Option<i64>> {
    let heads = heads.filter(|_| backbone.rotary_depends_on_context()).map(HeadsFile::open).transpose()?;
    let Some(config) = heads.as_ref().and_then(HeadsFile::config) else { return Ok(None) };
    let longest = backbone.largest_context();
    match config.rope_context() {
        Some(tokens) if tokens < 1 || tokens > longest => Err(UsageError(format!(
            "{}: rope_context: expected the context of the heads' training, from 1 to the backbone's {longest} tokens, got {tokens}; give the \
             backbone that the heads were trained on",
            config.path.display()
        ))
        .into()),
        tokens => Ok(tokens),
    }
}

/// The recorded template. A file is the one beside the heads, whatever its name was in training.
fn template_of(heads: &Path, config: &PublishedHeadsConfig) -> Result<Option<TemplateChoice>, UsageError> {
    let Some(name) = config.chat_template() else { return Ok(None) };
    if [CHAT_TEMPLATE, HEADS_CHAT_TEMPLATE].contains(&name) {
        return Ok(Some(TemplateChoice::File(folder_of(heads).join(name))));
    }
    match TemplateChoice::try_from(name.to_owned()) {
        Ok(choice @ (TemplateChoice::Tokenizer | TemplateChoice::BuiltIn(_))) => Ok(Some(choice)),
        _ => Err(UsageError(format!(
            "{}: chat_template: expected \"tokenizer\", {}, or {CHAT_TEMPLATE:?} for the file beside it, got {name:?}; choose one with \
             --chat-template",
            config.path.display(),
            TemplateChoice::built_in_names()
        ))),
    }
}

/// Why only libtorch's engine decodes quantised weights.
pub(super) fn on_libtorch(quantization: Quantization) -> String {
    format!("{quantization} weights decode on libtorch, which dequantises a layer's weights for each product")
}

/// As `--quantization` spells it.
pub(super) fn shown(quantization: Option<Quantization>) -> String {
    quantization.map_or_else(|| "none".to_owned(), |quantization| quantization.to_string())
}
