//! How a backbone is loaded and prompted: by what the caller chooses, else as the heads were trained, so that what was measured is what is
//! served.

use std::fmt;
use std::path::Path;
use std::rc::Rc;

use super::error::{SessionError, UsageError};
use super::opened::{OpenedBackbone, OpenedHeads};
use super::reporter::Reporter;
use crate::data::chat_template::{ChatTemplate, TemplateChoice, TemplateError};
use crate::dtype::Dtype;
use crate::formats::heads_config::{CHAT_TEMPLATE, HEADS_CHAT_TEMPLATE, PublishedHeadsConfig};
use crate::model::device_map::DeviceMap;
use crate::model::stored::Quantization;
use crate::model::weights::WeightFiles;

/// The name of [`TemplateOption::None`].
const NO_TEMPLATE: &str = "none";

/// The chat template of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateOption {
    /// Conversations are refused; `chat` continues raw text.
    None,
    /// As in a recipe.
    Choice(TemplateChoice),
}

impl TemplateOption {
    /// Parses "none", or what a recipe accepts.
    ///
    /// # Errors
    /// A message with the accepted values.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == NO_TEMPLATE {
            return Ok(Self::None);
        }
        TemplateChoice::try_from(text.to_owned()).map(Self::Choice)
    }

    fn choice(&self) -> Option<&TemplateChoice> {
        match self {
            Self::None => None,
            Self::Choice(choice) => Some(choice),
        }
    }
}

impl fmt::Display for TemplateOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.choice().map_or_else(|| NO_TEMPLATE.to_owned(), |choice| choice.clone().into()))
    }
}

/// What the caller chooses; each `None` stands for what the heads were trained with, else for the backbone's own template and no quantisation.
#[derive(Debug, Clone, Default)]
pub struct SetupOptions {
    pub quantization: Option<Option<Quantization>>,
    pub template: Option<TemplateOption>,
}

/// A backbone that can be loaded, with everything that decides how.
#[derive(Debug)]
pub struct ModelSetup {
    pub backbone: OpenedBackbone,
    /// The heads whose training decides; an adapter beside them is merged into the backbone.
    pub heads: Option<Rc<OpenedHeads>>,
    pub quantization: Option<Quantization>,
    pub template: Option<ChatTemplate>,
    /// The context to load the backbone with; by default its own. [`SetupOptions::resolve`] gives that of the heads' training if rotary
    /// embeddings depend on it.
    pub context: Option<i64>,
    /// Over which GPUs the layers are spread, where a verb can do it.
    pub device_map: Option<DeviceMap>,
    /// Compute dtype of the heads' training, which weights in float16 are decoded in on a CPU.
    pub trained_dtype: Option<Dtype>,
}

impl SetupOptions {
    /// Compares the options with the training of the heads, and reports where they differ.
    ///
    /// # Errors
    /// Files that cannot be read; a value in the heads' config.json that is not known here.
    pub fn resolve(
        &self,
        backbone: OpenedBackbone,
        heads: Option<Rc<OpenedHeads>>,
        reporter: &dyn Reporter,
    ) -> Result<ModelSetup, SessionError> {
        let config = heads.as_deref().and_then(|heads| heads.file.config());
        if let Some(notice) = config.and_then(|config| other_backbone(&backbone.folder, config)) {
            reporter.notice(&notice);
        }
        let quantization = self.quantization(config, reporter)?;
        let template = self.template(&backbone.folder, heads.as_deref().zip(config), reporter)?;
        let context = config.map_or(Ok(None), |config| rope_context(config, &backbone))?;
        let trained_dtype = config.and_then(PublishedHeadsConfig::backbone_dtype);
        Ok(ModelSetup { quantization, template, context, trained_dtype, heads, ..ModelSetup::new(backbone) })
    }

    /// The template of a backbone without heads.
    ///
    /// # Errors
    /// A template that cannot be read.
    pub fn template_of(&self, backbone: &Path) -> Result<Option<ChatTemplate>, TemplateError> {
        let choice = self.template.as_ref().map_or(Some(TemplateChoice::default()), |option| option.choice().cloned());
        choice.map_or(Ok(None), |choice| ChatTemplate::choose(&choice, backbone))
    }

    fn quantization(
        &self,
        config: Option<&PublishedHeadsConfig>,
        reporter: &dyn Reporter,
    ) -> Result<Option<Quantization>, UsageError> {
        let trained = config.map_or(Ok(None), quantization_of);
        let Some(chosen) = self.quantization else { return trained };
        let is_recorded = config.is_some_and(|config| config.is_of_a_run() || config.quantization().is_some());
        if let Ok(trained) = trained
            && trained != chosen
            && is_recorded
        {
            let backbone = trained.map_or_else(|| "that was not quantised".to_owned(), |q| format!("quantised to {q}"));
            reporter.notice(&format_args!(
                "--quantization {}: the heads were trained on a backbone {backbone}; their accuracy may differ",
                quantization_name(chosen)
            ));
        }
        Ok(chosen)
    }

    fn template(
        &self,
        backbone: &Path,
        heads: Option<(&OpenedHeads, &PublishedHeadsConfig)>,
        reporter: &dyn Reporter,
    ) -> Result<Option<ChatTemplate>, SessionError> {
        let choose = |choice: &TemplateChoice| ChatTemplate::choose(choice, backbone);
        let recorded = heads.map_or(Ok(None), |(heads, config)| template_of(heads, config));
        let Some(chosen) = &self.template else {
            return Ok(choose(&recorded?.unwrap_or_default())?);
        };
        let template = chosen.choice().map_or(Ok(None), choose)?;
        let trained = recorded.ok().flatten().and_then(|choice| Some((choose(&choice).ok()??, choice)));
        if let Some((trained, choice)) = trained
            && template.as_ref().is_none_or(|template| template.sha256() != trained.sha256())
        {
            reporter.notice(&format_args!(
                "--chat-template {chosen}: the heads were trained with {}; their accuracy may differ",
                String::from(choice)
            ));
        }
        Ok(template)
    }
}

impl ModelSetup {
    /// A backbone as it is: without heads, quantisation and template.
    pub fn new(backbone: OpenedBackbone) -> Self {
        Self {
            backbone,
            heads: None,
            quantization: None,
            template: None,
            context: None,
            device_map: None,
            trained_dtype: None,
        }
    }

    /// Refuses conversations without a template; `are_conversations` says of each prompt whether it is one.
    ///
    /// # Errors
    /// [`UsageError`] lists the values of `--chat-template`.
    pub fn check_template(&self, mut are_conversations: impl Iterator<Item = bool>) -> Result<(), UsageError> {
        match are_conversations.position(|is_conversation| is_conversation) {
            Some(at) if self.template.is_none() => Err(UsageError(format!(
                "prompt {} is a conversation, and {}",
                at + 1,
                needs_template(&self.backbone.folder)
            ))),
            _ => Ok(()),
        }
    }
}

/// What to do about a backbone without a template.
pub fn needs_template(backbone: &Path) -> String {
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
    let known = Quantization::ALL.into_iter().find(|known| known.to_string() == name);
    known.map(Some).ok_or_else(|| {
        UsageError(format!(
            "{}: quantization: expected {}, got {name:?}; choose the weights to decode with by --quantization",
            config.path.display(),
            Quantization::ALL.map(|known| format!("{:?}", known.format().name())).join(" or ")
        ))
    })
}

/// The context that the heads were trained with, if the backbone's rotary embeddings depend on it.
///
/// # Errors
/// [`UsageError`] for a context that the backbone does not have.
fn rope_context(config: &PublishedHeadsConfig, backbone: &OpenedBackbone) -> Result<Option<i64>, UsageError> {
    if !backbone.config.rotary_depends_on_context() {
        return Ok(None);
    }
    let longest = backbone.config.largest_context();
    match config.rope_context() {
        Some(tokens) if tokens < 1 || tokens > longest => Err(UsageError(format!(
            "{}: rope_context: expected the context of the heads' training, from 1 to the backbone's {longest} tokens, got {tokens}; give the \
             backbone that the heads were trained on",
            config.path.display()
        ))),
        tokens => Ok(tokens),
    }
}

/// The recorded template. A file is the one beside the heads, whatever its name was in training.
fn template_of(heads: &OpenedHeads, config: &PublishedHeadsConfig) -> Result<Option<TemplateChoice>, UsageError> {
    let Some(name) = config.chat_template() else { return Ok(None) };
    if [CHAT_TEMPLATE, HEADS_CHAT_TEMPLATE].contains(&name) {
        return Ok(Some(TemplateChoice::File(heads.folder().join(name))));
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
pub fn on_libtorch(quantization: Quantization) -> String {
    format!("{quantization} weights decode on libtorch, which dequantises a layer's weights for each product")
}

/// As `--quantization` spells it.
pub fn quantization_name(quantization: Option<Quantization>) -> String {
    quantization.map_or_else(|| "none".to_owned(), |quantization| quantization.to_string())
}
