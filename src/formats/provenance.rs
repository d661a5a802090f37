//! `provenance.json` of a run and `distill.json` of a distillation: the origin of their results.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::{self, FormatError};
use super::run_folder::{PROVENANCE, RECIPE};
use super::sealed::{CHECKSUM, sealed};
use crate::files;

const WHAT: &str = "provenance";
const OF_A_RUN: &str = "is no provenance of a run; expected what medusa-train writes";
const OF_A_DISTILLATION: &str =
    "is no JSON object; it says what the folder was begun with: without it, choose another --out";

/// A commit of a repository on the Hugging Face Hub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubSnapshot {
    /// `owner/name`.
    pub id: String,
    pub commit: String,
}

/// A Hub repository named by a key of the recipe other than the backbone's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubSource {
    /// `data.train`, `heads.init_from` and the like.
    pub key: String,
    #[serde(flatten)]
    pub snapshot: HubSnapshot,
}

/// The contents of `provenance.json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Provenance {
    /// `medusa-train` and its version.
    pub program: String,
    /// Of medusa-train.
    pub git_revision: String,
    pub libtorch: String,
    /// As `--device` spells it.
    pub device: String,
    pub threads: i32,
    pub command: Vec<String>,
    /// RFC 3339.
    pub started: String,
    /// Only for a backbone from the Hub.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backbone: Option<HubSnapshot>,
    /// Data sets, heads and adapters from the Hub.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<HubSource>,
    /// The backbone's config, and its weights unless a commit identifies them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backbone_files: Vec<HashedFile>,
    /// Files of the initial heads and adapters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub init_from_files: Vec<HashedFile>,
    /// The files of `data.hidden_states`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_states: Option<StampedFiles>,
    /// Data files, and the files that determine their tokens.
    pub data: Vec<HashedFile>,
    /// The resolved recipe that the run was last started with: recipe.toml may have been edited since. Absent in runs of 0.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
    /// Whether malformed rows were skipped.
    #[serde(default)]
    pub skip_bad_rows: bool,
    /// Whether `data.validation_fraction` held out other rows than version 0.1.0 did, because several have the same prompt.
    #[serde(default, skip_serializing_if = "is_false")]
    pub split_by_prompt: bool,
    /// Reports of the training and the validation rows.
    #[serde(default)]
    pub rows: Vec<Value>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// A file identified by its hash; its path may change.
#[derive(Debug, Serialize, Deserialize)]
pub struct HashedFile {
    /// Path when it was hashed.
    pub path: PathBuf,
    pub sha256: String,
}

/// Files that are too large to be hashed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StampedFiles {
    pub files: usize,
    pub bytes: u64,
    /// Of their names, sizes and times of change.
    pub sha256: String,
}

/// All keys but the checksum.
fn entries(path: &Path, expected: &'static str) -> Result<Map<String, Value>, FormatError> {
    let mut entries: Map<String, Value> = error::read(path, WHAT, expected)?;
    entries.shift_remove(CHECKSUM);
    Ok(entries)
}

impl Provenance {
    /// Reads a `provenance.json` of this version.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn load(path: &Path) -> Result<Self, FormatError> {
        error::read(path, WHAT, OF_A_RUN)
    }

    /// All keys of a `provenance.json` of any version.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn entries(path: &Path) -> Result<Map<String, Value>, FormatError> {
        entries(path, OF_A_RUN)
    }

    /// The Hub snapshot of a run's backbone; other keys of its `provenance.json` may be invalid.
    pub fn backbone_of(path: &Path) -> Option<HubSnapshot> {
        serde_json::from_value(Self::entries(path).ok()?.remove("backbone")?).ok()
    }

    /// The resolved recipe that the run in a folder was last started with. Runs of 0.1.0 have it only in recipe.toml.
    pub fn recipe_of(run: &Path) -> Option<String> {
        let kept = Self::entries(&run.join(PROVENANCE)).ok().and_then(|mut keys| keys.remove("recipe"));
        match kept {
            Some(Value::String(recipe)) => Some(recipe),
            _ => files::read_text(&run.join(RECIPE)).ok(),
        }
    }

    /// `provenance.json`, pretty-printed, with a final newline.
    pub fn to_json(&self) -> String {
        sealed(&serde_json::to_string_pretty(self).expect("plain data")) + "\n"
    }
}

/// The columns of shards: 3 has `tools` and `chat_template_kwargs`; 2 has `index` and the prompt's own `id`. `null`, as in folders of 0.1.0, has the index as `id`.
pub const SHARD_FORMAT: u32 = 3;

/// Everything that determines the conversations.
#[derive(Debug, Clone, Serialize)]
pub struct DistillProvenance {
    /// [`SHARD_FORMAT`]: all shards of a folder have the same columns.
    pub shard_format: u32,
    /// Version of medusa-train.
    pub program_version: &'static str,
    /// The model's name on the server that answered; `null`, and absent in older folders: the backbone did.
    pub model: Option<String>,
    /// The server's address, up to `/v1`, without a path that may be a key.
    pub endpoint: Option<String>,
    /// The server's longest conversation when the folder was begun (`max_model_len`), where it reports it.
    pub server_context: Option<u64>,
    /// Path or Hub id; `null` only with a server: then the conversations have no tokens.
    pub backbone: Option<String>,
    /// Commit, if the folder is a snapshot in the Hub's cache.
    pub backbone_revision: Option<String>,
    /// Hash of everything that affects the backbone's output; `null` with a server.
    pub backbone_sha256: Option<String>,
    /// Hash of the backbone's tokenizer, where a server answered.
    pub tokenizer_sha256: Option<String>,
    /// Hash of the chat template, if there is one.
    pub chat_template_sha256: Option<String>,
    /// Path or Hub id.
    pub prompts: String,
    pub prompts_sha256: String,
    /// Number of prompts in the prompt file, for all shares together.
    pub conversations: usize,
    /// Prompts that are skipped because they do not fit the context.
    pub too_long: usize,
    /// `1/1`, or a machine's share of the prompts.
    pub share: String,
    /// The last file may have fewer.
    pub conversations_per_file: usize,
    /// Recorded because another device may round differently; `null` with a server.
    pub device: Option<String>,
    /// Compute dtype of the backbone; `null` with a server.
    pub dtype: Option<String>,
    /// `nf4` or `int8`; `null`, and absent in older folders: not quantised.
    pub quantization: Option<String>,
    /// 0 is greedy.
    pub temperature: f64,
    /// 1 is all tokens.
    pub top_p: f64,
    /// Per answer.
    pub max_new_tokens: usize,
    /// Maximum number of tokens of a conversation (`--max-context`; with a server also the backbone's own context). `null`, or absent in older
    /// folders: the backbone's own context.
    pub max_context: Option<u32>,
    /// `null`: all turns of the prompts.
    pub turns: Option<usize>,
    /// Whether the backbone wrote the user's turns.
    pub self_talk: bool,
    /// Seed of sampling.
    pub seed: u64,
    /// Path of the heads, if there were any.
    pub heads: Option<String>,
    pub heads_sha256: Option<String>,
    /// Hashes of the adapter in the heads' folder and of its config, if the backbone used one.
    pub adapter_sha256: Option<[String; 2]>,
    pub tree_sha256: Option<String>,
    /// The rule that accepts the heads' guesses above temperature 0; absent in older folders, whose rule was typical acceptance.
    pub acceptance: Option<&'static str>,
    /// As `--engine` spells it: another one rounds differently. Absent in older folders, `null` with a server. The last key, because the
    /// engine follows from others and a resumed run names the first key that has changed.
    pub engine: Option<String>,
}

impl DistillProvenance {
    /// All keys of a `distill.json`.
    ///
    /// # Errors
    /// [`FormatError`], with the path.
    pub fn entries(path: &Path) -> Result<Map<String, Value>, FormatError> {
        entries(path, OF_A_DISTILLATION)
    }

    /// The keys as in the file and in the metadata of every shard.
    pub fn as_map(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(map)) => map,
            other => unreachable!("a struct of numbers and strings becomes an object, not {other:?}"),
        }
    }

    /// `distill.json`, pretty-printed, with a final newline.
    pub fn to_json(&self) -> String {
        sealed(&format!("{:#}", Value::Object(self.as_map()))) + "\n"
    }
}
