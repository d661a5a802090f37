//! `--quantization` and `--chat-template`.

use std::sync::LazyLock;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use crate::data::chat_template::TemplateChoice;
use crate::model::stored::Quantization;
use crate::session::setup::{SetupOptions, TemplateOption};

/// Flags of every verb that takes heads.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Decoding")]
pub struct ServedFlags {
    /// Quantise the backbone's linear layers [default: as in the heads' training; without heads none].
    #[arg(long, value_enum, value_name = "Q")]
    pub quantization: Option<QuantizationName>,
    /// Chat template for conversations: "tokenizer" (the backbone's own), a built-in name (vicuna, zephyr, llama-2, llama-3, chatml,
    /// mistral), a .jinja file, or "none" [default: the one that the heads were trained with, else the backbone's own].
    #[arg(long, value_name = "TEMPLATE", value_parser = TemplateOption::parse)]
    pub chat_template: Option<TemplateOption>,
}

/// `--quantization`: a format, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizationName(Option<Quantization>);

/// `--chat-template` of verbs without heads.
///
/// # Errors
/// A message with the accepted values.
pub(super) fn chat_template(text: &str) -> Result<TemplateChoice, String> {
    TemplateChoice::try_from(text.to_owned())
}

impl QuantizationName {
    pub(super) fn quantization(self) -> Option<Quantization> {
        self.0
    }
}

impl ValueEnum for QuantizationName {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<QuantizationName>> =
            LazyLock::new(|| Quantization::ALL.into_iter().map(Some).chain([None]).map(QuantizationName).collect());
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let none = ("none", "The dtype of --dtype");
        let (name, help) = self.0.map_or(none, |known| (known.format().name(), known.format().help()));
        Some(PossibleValue::new(name).help(help))
    }
}

impl ServedFlags {
    /// The flags as options of a session.
    pub(super) fn options(&self) -> SetupOptions {
        SetupOptions {
            quantization: self.quantization.map(QuantizationName::quantization),
            template: self.chat_template.clone(),
        }
    }
}
