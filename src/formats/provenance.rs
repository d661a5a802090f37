//! `provenance.json` of a run and `distill.json` of a distillation: where their numbers come from.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::{self, FormatError};

const WHAT: &str = "provenance";
const OF_A_RUN: &str = "is no provenance of a run; expected what medusa-train writes";
const OF_A_DISTILLATION: &str =
    "is no JSON object; it says what the folder was begun with: without it, choose another --out";

/// A state of a repository of the Hugging Face Hub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubSnapshot {
    /// `owner/name`.
    pub id: String,
    pub commit: String,
}

/// What a key of the recipe names on the Hub, besides the backbone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubSource {
    /// `data.train`, `heads.init_from` and the like.
    pub key: String,
    /// Which state of it was taken.
    #[serde(flatten)]
    pub snapshot: HubSnapshot,
}

/// What is in `provenance.json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Provenance {
    /// `medusa-train` and its version.
    pub program: String,
    /// Of the program.
    pub git_revision: String,
    pub libtorch: String,
    /// As `--device` spells it.
    pub device: String,
    pub threads: i32,
    pub command: Vec<String>,
    /// In RFC 3339.
    pub started: String,
    /// Of a backbone from the Hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backbone: Option<HubSnapshot>,
    /// Data sets, heads and adapters from the Hub.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<HubSource>,
    /// Of a backbone: its config, and its weights where no commit says what they are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backbone_files: Vec<HashedFile>,
    /// What heads and adapters begin with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub init_from_files: Vec<HashedFile>,
    /// Data files, and those that decide which tokens come of them.
    pub data: Vec<HashedFile>,
    /// Whether rows that are not right were left out.
    #[serde(default)]
    pub skip_bad_rows: bool,
    /// What came of the rows to train and to validate on.
    #[serde(default)]
    pub rows: Vec<Value>,
}

/// A file by its content; it may lie elsewhere another time.
#[derive(Debug, Serialize, Deserialize)]
pub struct HashedFile {
    /// Where it lay.
    pub path: PathBuf,
    pub sha256: String,
}

impl Provenance {
    /// Of this version's `provenance.json`.
    ///
    /// # Errors
    /// [`FormatError`] names the file.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        error::read(path, WHAT, OF_A_RUN)
    }

    /// All that a `provenance.json` of any version says, by key.
    ///
    /// # Errors
    /// [`FormatError`] names the file.
    pub fn entries(path: &Path) -> Result<Map<String, Value>, FormatError> {
        error::read(path, WHAT, OF_A_RUN)
    }

    /// The state of the Hub that a run took its backbone from, whatever else its `provenance.json` says.
    pub fn backbone_of(path: &Path) -> Option<HubSnapshot> {
        serde_json::from_value(Self::entries(path).ok()?.remove("backbone")?).ok()
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data") + "\n"
    }
}

/// All that the conversations depend on.
#[derive(Debug, Clone, Serialize)]
pub struct DistillProvenance {
    /// This program's.
    pub program_version: &'static str,
    /// Where the backbone lay.
    pub backbone: String,
    /// Of the Hub, if the folder is a snapshot of it.
    pub backbone_revision: Option<String>,
    /// Of all that decides what it says.
    pub backbone_sha256: String,
    /// Of the template that rendered the conversations, if there is one.
    pub chat_template_sha256: Option<String>,
    /// Where the prompts lay.
    pub prompts: String,
    /// Of the prompt file's bytes.
    pub prompts_sha256: String,
    /// How many the prompt file has, for all shares together.
    pub conversations: usize,
    /// `1/1`, or a machine's share of the prompts.
    pub share: String,
    /// Of a file; the last may have fewer.
    pub conversations_per_file: usize,
    /// Where it computed: another device may round otherwise.
    pub device: String,
    /// What the backbone computed in.
    pub dtype: String,
    /// 0 is greedy.
    pub temperature: f64,
    /// 1 is all tokens.
    pub top_p: f64,
    /// Of an answer.
    pub max_new_tokens: usize,
    /// Of a conversation, as `--max-context` limits it; `null`, and absent in older folders: the backbone's own context.
    pub max_context: Option<u32>,
    /// `null`: all that the prompts have.
    pub turns: Option<usize>,
    /// Whether the backbone wrote the user's turns.
    pub self_talk: bool,
    /// Of what was drawn.
    pub seed: u64,
    /// Where the heads lay, if there were some.
    pub heads: Option<String>,
    /// Of their file.
    pub heads_sha256: Option<String>,
    /// Of the adapter beside them and of its config, if there is one: the backbone spoke with it.
    pub adapter_sha256: Option<[String; 2]>,
    /// Of the tree's file.
    pub tree_sha256: Option<String>,
}

impl DistillProvenance {
    /// All that a `distill.json` says, by key.
    ///
    /// # Errors
    /// [`FormatError`] names the file.
    pub fn entries(path: &Path) -> Result<Map<String, Value>, FormatError> {
        error::read(path, WHAT, OF_A_DISTILLATION)
    }

    /// By key, as they are in the file and in the metadata of every shard.
    pub fn as_map(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            other => unreachable!("a struct of numbers and strings becomes an object, not {other:?}"),
        }
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        format!("{:#}\n", Value::Object(self.as_map()))
    }
}
