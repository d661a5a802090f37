//! `--quantization` and `--chat-template`.

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

/// `--chat-template` of verbs without heads.
///
/// # Errors
/// A message with the accepted values.
pub(super) fn chat_template(text: &str) -> Result<TemplateChoice, String> {
    TemplateChoice::try_from(text.to_owned())
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

impl ServedFlags {
    /// The flags as options of a session.
    pub(super) fn options(&self) -> SetupOptions {
        SetupOptions {
            quantization: self.quantization.map(QuantizationName::quantization),
            template: self.chat_template.clone(),
        }
    }
}
