//! `[data]` of a recipe, and the settings that rows are read with.

use std::num::NonZeroUsize;
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};

use super::cache::TokenCache;
use super::chat::LossOn;
use super::chat_template::{ChatTemplate, TemplateChoice};
use super::column_names::ColumnNames;
use super::long_rows::{LongRows, RowFit};
use super::opened;
use super::report::Tokenised;
use super::tokenize::TextTokenizer;
use crate::files;
use crate::numbers::{Fraction, Positive};

/// Part of every key: raise it when the same input would give other rows, or another file.
const CACHE_FORMAT: &str = "medusa tokens 12";

/// `[data]` of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files, folders or globs: JSONL, JSON arrays, CSV or text (also in gzip or zstd), Parquet, Arrow. May be left out with `hidden_states`.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_more")]
    pub train: Vec<String>,
    /// Medusa-1: a folder or glob of hidden states that a server captured (`hs_*.safetensors`), one file for each row of `train` and
    /// `validation`. Without `train`, the rows are those of the files. Of the backbone's folder only config.json, the LM head and the final
    /// norm are read, and the embedding for sequential heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_states: Option<String>,
    /// Weights of the entries of `train`: each gives this share of the tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mix: Option<Vec<Positive>>,
    /// Files, folders or globs to evaluate on.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_more")]
    pub validation: Vec<String>,
    /// Or: this part of the rows of the training files, taken out before training with all pieces of each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_fraction: Option<Fraction>,
    /// The columns that rows are made of, where they have other names than those that are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<ColumnNames>,
    #[serde(default)]
    pub chat_template: TemplateChoice,
    /// Which tokens of conversations carry loss.
    #[serde(default)]
    pub loss_on: LossOn,
    /// Tokens a sequence.
    pub max_length: NonZeroUsize,
    /// What becomes of longer rows.
    #[serde(default)]
    pub long_rows: LongRows,
    /// At most this many rows of each entry of `train` and `validation`, for a try.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<NonZeroUsize>,
    /// Several rows share one sequence, without seeing each other.
    #[serde(default = "yes")]
    pub packing: bool,
    /// A new seeded order every epoch.
    #[serde(default = "yes")]
    pub shuffle: bool,
    /// Local files of the entries, once Hub data sets are downloaded.
    #[serde(skip)]
    pub fetched: FetchedData,
}

/// The local files of each entry of `train` and of `validation`; empty lists stand for entries as they are written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FetchedData {
    pub train: Vec<Vec<String>>,
    pub validation: Vec<Vec<String>>,
}

impl DataConfig {
    /// The files, folders and globs of each entry of `train`.
    pub fn train_entries(&self) -> Vec<&[String]> {
        entries(&self.train, &self.fetched.train)
    }

    /// The files, folders and globs of each entry of `validation`.
    pub fn validation_entries(&self) -> Vec<&[String]> {
        entries(&self.validation, &self.fetched.validation)
    }
}

/// Entries with the local files of each; as they are written where nothing was downloaded.
pub fn entries<'a>(written: &'a [String], fetched: &'a [Vec<String>]) -> Vec<&'a [String]> {
    if fetched.is_empty() {
        return written.iter().map(std::slice::from_ref).collect();
    }
    fetched.iter().map(Vec::as_slice).collect()
}

/// A list of files, or one file without brackets.
fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a list of files, folders, globs or Hub ids, such as [\"rows.jsonl\"]")]
    enum Entries {
        One(String),
        More(Vec<String>),
    }
    Ok(match Entries::deserialize(deserializer)? {
        Entries::One(entry) => vec![entry],
        Entries::More(entries) => entries,
    })
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
    /// Tokens of the longest row.
    pub max_length: NonZeroUsize,
    /// What becomes of longer rows.
    pub long_rows: LongRows,
    /// At most this many rows of each entry are read.
    pub limit: Option<NonZeroUsize>,
    /// Where tokenised files are kept, and rows are read from; `None` (a user without a home) keeps all rows in memory.
    pub cache: Option<&'a TokenCache>,
    /// The columns that rows are made of.
    pub columns: Option<&'a ColumnNames>,
    pub template: Option<&'a ChatTemplate>,
    /// Which tokens of conversations carry loss.
    pub loss_on: LossOn,
    /// Rows that are not right are left out and counted, instead of ending the run.
    pub skip_bad_rows: bool,
    /// Who hears how far reading is.
    pub watch: Watch<'a>,
}

impl LoadSettings<'_> {
    /// Rows of token ids, kept in memory, up to a length.
    pub fn new(vocab_size: usize, max_length: NonZeroUsize) -> Self {
        Self {
            tokenizer: None,
            vocab_size,
            max_length,
            long_rows: LongRows::default(),
            limit: None,
            cache: None,
            columns: None,
            template: None,
            loss_on: LossOn::default(),
            skip_bad_rows: false,
            watch: None,
        }
    }

    /// How rows are made to fit.
    pub(super) fn fit(&self) -> RowFit {
        let bos = self.tokenizer.and_then(TextTokenizer::bos_id);
        RowFit { max_length: self.max_length.get(), long_rows: self.long_rows, bos }
    }

    /// What decides a file's rows: its version (a hash of its content, or its stamp) and format, the tokenizer, what is added around a text, the vocabulary they were
    /// checked against, the columns, how a conversation is rendered, which of its tokens carry loss, where rows are cut and how, how many
    /// are read, and whether bad ones are left out.
    pub(super) fn cache_key(&self, path: &Path, version: &str) -> String {
        let LoadSettings { tokenizer, vocab_size, limit, .. } = self;
        let LoadSettings { columns, template, loss_on, skip_bad_rows, .. } = self;
        let (format, fit) = (opened::format_of_name(path), self.fit());
        let eos = tokenizer.and_then(TextTokenizer::eos_id);
        let template = template.map(|template| template.sha256());
        let tokenizer = tokenizer.map_or("no tokenizer", TextTokenizer::sha256);
        let length = format!("{fit:?}\nlimit {limit:?}");
        let text = format!("{tokenizer}\neos {eos:?}\nvocabulary {vocab_size}\n{length}");
        let rows = format!(
            "format {format:?}\ncolumns {columns:?}\ntemplate {template:?}\nloss on {loss_on:?}\nskip bad rows {skip_bad_rows}"
        );
        files::hex(&Sha256::digest(format!("{CACHE_FORMAT}\n{version}\n{text}\n{rows}")))[..32].to_owned()
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
