//! `[data]` of a recipe, and the settings that rows are read with.

use std::num::NonZeroUsize;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::cache::TokenCache;
use super::chat::LossOn;
use super::chat_template::{ChatTemplate, TemplateChoice};
use super::report::Tokenised;
use super::tokenize::TextTokenizer;
use crate::files;
use crate::numbers::Fraction;

/// Part of every key: raise it when the same input would give other rows, or another file.
const CACHE_FORMAT: &str = "medusa tokens 5";

/// `[data]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files or globs: JSONL or JSON arrays (also in gzip or zstd), Parquet, Arrow.
    pub train: Vec<String>,
    /// Files or globs to evaluate on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validation: Vec<String>,
    /// Or: this part of the training rows, taken out before training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<Fraction>,
    /// What renders conversations.
    #[serde(default)]
    pub chat_template: TemplateChoice,
    /// Which tokens of conversations carry loss.
    #[serde(default)]
    pub loss_on: LossOn,
    /// Tokens a sequence.
    pub max_length: NonZeroUsize,
    /// Several rows share one sequence, without seeing each other.
    #[serde(default = "yes")]
    pub packing: bool,
    /// A new seeded order every epoch.
    #[serde(default = "yes")]
    pub shuffle: bool,
}

fn yes() -> bool {
    true
}

/// Settings for reading rows.
#[derive(Clone, Copy)]
pub struct LoadSettings<'a> {
    /// The backbone's; rows of `text` and conversations need it.
    pub tokenizer: Option<&'a TextTokenizer>,
    /// The backbone's; ids are checked against it.
    pub vocab_size: usize,
    /// Longer rows are cut.
    pub max_length: NonZeroUsize,
    /// Where tokenised files are kept, and rows are read from; `None` (a user without a home) keeps all rows in memory.
    pub cache: Option<&'a TokenCache>,
    /// What renders conversations.
    pub template: Option<&'a ChatTemplate>,
    /// Which tokens of conversations carry loss.
    pub loss_on: LossOn,
    /// Rows that are not right are left out and counted, instead of ending the run.
    pub skip_bad_rows: bool,
    /// Who hears how far reading is.
    pub watch: Watch<'a>,
}

impl LoadSettings<'_> {
    /// What decides a file's rows: its content, the tokenizer, what is added around a text, the vocabulary they were
    /// checked against, how a conversation is rendered, which of its tokens carry loss, where rows are cut, and whether bad
    /// ones are left out.
    pub(super) fn cache_key(&self, file_sha256: &str) -> String {
        let LoadSettings { tokenizer, vocab_size, max_length, template, loss_on, skip_bad_rows, .. } = self;
        let (eos, template) = (tokenizer.and_then(TextTokenizer::eos_id), template.map(|template| template.sha256()));
        let tokenizer = tokenizer.map_or("no tokenizer", TextTokenizer::sha256);
        let text = format!("{tokenizer}\neos {eos:?}\nvocabulary {vocab_size}\nlength {max_length}");
        let rows = format!("template {template:?}\nloss on {loss_on:?}\nskip bad rows {skip_bad_rows}");
        files::hex(&Sha256::digest(format!("{CACHE_FORMAT}\n{file_sha256}\n{text}\n{rows}")))[..32].to_owned()
    }
}

/// Progress of reading.
#[derive(Debug, Clone, Copy)]
pub struct ReadProgress<'a> {
    pub path: &'a Path,
    /// Of its bytes so many are read.
    pub read: u64,
    /// All of its bytes.
    pub bytes: u64,
    /// What it took.
    pub tokenised: Tokenised,
}

/// Progress callback, called after each portion.
pub type Watch<'a> = Option<&'a (dyn Fn(ReadProgress) + Sync)>;
