//! Selects the files of a repository that are needed: `.bin` only without safetensors, one copy of the weights, no
//! checkpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use super::HubError;
use super::id::{DataPart, Id, is_safe};
use crate::bounds::JSON_FILE_BYTES;
use crate::data::source;
use crate::files;
use crate::gguf::file;
use crate::model::config::LlamaConfig;
use crate::model::folder::COMPANIONS;
use crate::model::loading::OutputPart;

/// The purpose of a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Config, tokenizer, chat template and weights.
    Backbone,
    /// As [`Wanted::Backbone`], of the shards those with this part.
    BackboneOutput(OutputPart),
    /// A backbone without its weights, to check a recipe.
    BackboneWithoutWeights,
    /// Heads, with the adapter or the trained backbone beside them.
    Heads,
    Data(DataSplit),
}

/// The rows of a data set that a verb wants where the id names no split, recognised by file names such as `train-00000-of-00001.parquet` or `data/test.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataSplit {
    /// All files except those of another split.
    Train,
    /// `validation`, `valid`, `val`, `dev`, `eval`, or else `test`.
    Validation,
    /// The files of [`DataSplit::Validation`] if there are any, else all files: for measurements on rows that were not
    /// trained on.
    HeldOut,
    /// All files.
    Any,
}

/// A backbone's weights: the index of their shards, or the single file. The first format that exists is used.
const WEIGHTS: [[&str; 2]; 2] =
    [["model.safetensors.index.json", "model.safetensors"], ["pytorch_model.bin.index.json", "pytorch_model.bin"]];
const CONFIG: &str = "config.json";
/// Heads in the original code's format, a pickle that can run code when Python reads it. Fetched only if there are no
/// others.
const PICKLED_HEADS: &str = "medusa_lm_head.pt";
/// The quantisation of a GGUF file where an id names none, as in llama.cpp.
const QUANTIZATION: &str = "Q4_K_M";
/// The config of a data set that names none.
const DEFAULT: &str = "default";

/// The index of sharded weights, as far as it is read.
#[derive(Deserialize)]
struct WeightsIndex {
    weight_map: serde_json::Map<String, serde_json::Value>,
}

impl Wanted {
    /// The files to fetch first; [`Wanted::weights`] names the others.
    pub(super) fn choose(self, id: &Id, names: &[String]) -> Result<Vec<String>, HubError> {
        let chosen: Vec<String> = match self {
            Self::Data(split) => return data(id, names, split),
            Self::Backbone | Self::BackboneOutput(_) | Self::BackboneWithoutWeights if is_in_gguf(id, names) => {
                return gguf(id, names);
            }
            _ if id.file.is_some() || id.part.is_some() => {
                return Err(nothing(id, "heads in a folder: owner/name", vec![]));
            }
            Self::Backbone | Self::BackboneOutput(_) | Self::BackboneWithoutWeights => {
                names.iter().filter(|name| is_backbone_file(name)).cloned().collect()
            }
            Self::Heads => heads(names),
        };
        let (expected, is_there) = match self {
            Self::Heads => {
                let is_weights = |name: &String| name.ends_with(".safetensors") || name == PICKLED_HEADS;
                (
                    "heads (heads.safetensors, medusa_lm_head.safetensors or medusa_lm_head.pt)",
                    chosen.iter().any(is_weights),
                )
            }
            _ => ("config.json of a backbone", chosen.iter().any(|name| name == CONFIG)),
        };
        let holds = || names.iter().filter(|name| !name.starts_with('.')).cloned().collect();
        if is_there { Ok(chosen) } else { Err(nothing(id, expected, holds())) }
    }

    /// The index of sharded weights, which names the shards; where there is a single file, that is loaded.
    pub(super) fn index(self, names: &[String]) -> Option<&'static str> {
        let [index, single] = self.weight_files(names)?;
        (has(names, index) && !has(names, single)).then_some(index)
    }

    fn has_weights(self) -> bool {
        matches!(self, Self::Backbone | Self::BackboneOutput(_))
    }

    /// The tensors whose shards are needed; empty: all. The config must be in `folder`, else all are needed.
    fn tensors(self, folder: &Path) -> Vec<&'static str> {
        match (self, LlamaConfig::load(folder)) {
            (Self::BackboneOutput(part), Ok(config)) => part.tensors(&config),
            _ => vec![],
        }
    }

    /// Index and single file of the format that is used.
    fn weight_files(self, names: &[String]) -> Option<[&'static str; 2]> {
        let is_there = |files: &[&str; 2]| files.iter().any(|file| has(names, file));
        WEIGHTS.into_iter().filter(|_| self.has_weights()).find(is_there)
    }

    /// A backbone's weights: the index and its shards, or the single file. The index must be in `folder` by now.
    pub(super) fn weights(self, id: &Id, folder: &Path, names: &[String]) -> Result<Vec<String>, HubError> {
        if !self.has_weights() || is_in_gguf(id, names) {
            return Ok(Vec::new()); // a GGUF file has all
        }
        if let Some(index) = self.index(names) {
            return shards(id, folder, index, names, &self.tensors(folder));
        }
        if let Some([_, single]) = self.weight_files(names) {
            return Ok(vec![single.into()]);
        }
        let other = |name: &&String| [".bin", ".pth", ".pt"].iter().any(|end| name.ends_with(end));
        match names.iter().find(other) {
            Some(found) => Err(HubError::NoReadableWeights { id: id.to_string(), found: found.clone() }),
            None => Err(HubError::NoFile { id: id.to_string(), file: WEIGHTS[0][1].into(), holds: names.to_vec() }),
        }
    }
}

fn has(names: &[String], file: &str) -> bool {
    names.iter().any(|name| name == file)
}

fn nothing(id: &Id, expected: impl Into<String>, holds: Vec<String>) -> HubError {
    HubError::NothingWanted { id: id.to_string(), expected: expected.into(), holds }
}

/// Whether a backbone is a GGUF file: the id names one, or the repository has no other weights.
fn is_in_gguf(id: &Id, names: &[String]) -> bool {
    let has_weights = WEIGHTS.iter().flatten().any(|file| has(names, file));
    id.file.is_some() || id.part.is_some() || !has_weights && names.iter().any(|name| file::is_model(name))
}

/// The GGUF file, with all its shards, that an id names; where it names none, the only one, or that of [`QUANTIZATION`].
fn gguf(id: &Id, names: &[String]) -> Result<Vec<String>, HubError> {
    let mut models: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
    for name in names.iter().filter(|name| file::is_model(name)) {
        let (model, _) = file::model_and_shard(name).expect("a GGUF file");
        models.entry(model).or_default().push(name);
    }
    let quantization = id.part.as_ref().and_then(|part| part.config.as_deref());
    let expected = match (&id.file, quantization) {
        (Some(file), _) => {
            models.retain(|_, files| files.contains(&file));
            format!("GGUF file {file}")
        }
        (None, None) if models.len() == 1 => String::new(),
        (None, quantization) => {
            models.retain(|model, _| ends_with_word(model, quantization.unwrap_or(QUANTIZATION)));
            let default = if quantization.is_none() { " (the default)" } else { "" };
            format!(
                "GGUF file of one model in {}{default}; name a file instead: {}/FILE.gguf",
                quantization.unwrap_or(QUANTIZATION),
                id.repo
            )
        }
    };
    match models.len() {
        1 => Ok(models.into_values().flatten().cloned().collect()),
        _ => Err(nothing(id, expected, names.iter().filter(|name| file::is_model(name)).cloned().collect())),
    }
}

/// Whether a name's last word is this one, in any case: `a-Q4_0` ends with `q4_0`, and `a-IQ4_0` does not.
fn ends_with_word(name: &str, word: &str) -> bool {
    let (name, word) = (name.to_ascii_lowercase(), word.to_ascii_lowercase());
    name.strip_suffix(&word).is_some_and(|begin| !begin.ends_with(|c: char| c.is_ascii_alphanumeric()))
}

fn is_backbone_file(name: &str) -> bool {
    !name.contains('/') && (name == CONFIG || COMPANIONS.iter().any(|begin| name.starts_with(begin)))
}

fn shards(id: &Id, folder: &Path, index: &str, names: &[String], tensors: &[&str]) -> Result<Vec<String>, HubError> {
    let path = folder.join(index);
    let bytes = files::read_at_most(&path, JSON_FILE_BYTES).map_err(HubError::io("read", &path))?;
    let read: WeightsIndex =
        serde_json::from_slice(&bytes).map_err(|error| HubError::io("read", &path)(error.into()))?;
    let is_needed = |tensor: &String| tensors.is_empty() || tensors.contains(&tensor.as_str());
    let files = read.weight_map.iter().filter(|(tensor, _)| is_needed(tensor));
    let files: BTreeSet<String> = files.filter_map(|(_, file)| file.as_str().map(str::to_owned)).collect();
    if let Some(name) = files.iter().find(|file| !is_safe(file)) {
        return Err(HubError::UnsafeName { repo: id.to_string(), name: name.clone() });
    }
    match files.iter().find(|file| !names.contains(file)) {
        Some(file) => Err(HubError::NoFile { id: id.to_string(), file: file.clone(), holds: names.to_vec() }),
        None => Ok([index.to_owned()].into_iter().chain(files).collect()),
    }
}

/// Heads in the layout of a run or an export: the folder's own files, and the backbone trained with them.
fn heads(names: &[String]) -> Vec<String> {
    let is_near = |name: &str| !name.contains('/') || name.starts_with("backbone/");
    let is_kind = |name: &str| {
        [".json", ".safetensors", ".jinja", ".model", ".txt", ".hashes"].iter().any(|end| name.ends_with(end))
    };
    let has_safetensors = names.iter().any(|name| is_near(name) && name.ends_with(".safetensors"));
    let chosen = |name: &&String| is_near(name) && is_kind(name) || *name == PICKLED_HEADS && !has_safetensors;
    names.iter().filter(chosen).cloned().collect()
}

fn data(id: &Id, names: &[String], split: DataSplit) -> Result<Vec<String>, HubError> {
    let part_files = one_format(match &id.part {
        Some(part) => choose_part(id, part, names)?,
        None => names.iter().filter(|name| is_rows(name)).collect(),
    });
    let rows = || part_files.iter().copied();
    let holds = || rows().cloned().collect::<Vec<_>>();
    let named = |split: &[&str]| rows().filter(|name| source::has_word(name, split)).cloned().collect::<Vec<_>>();
    let validation =
        || Some(named(&source::VALIDATION)).filter(|found| !found.is_empty()).unwrap_or_else(|| named(&source::TEST));
    let chosen: Vec<String> = match &id.file {
        Some(file) => named_files(file, names),
        None => match split {
            _ if id.part.as_ref().is_some_and(|part| part.split.is_some()) => holds(),
            DataSplit::Any => holds(),
            DataSplit::Train => rows().filter(|name| !source::is_held_out(name)).cloned().collect(),
            DataSplit::Validation => validation(),
            DataSplit::HeldOut => Some(validation()).filter(|found| !found.is_empty()).unwrap_or_else(holds),
        },
    };
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let repo = Id { file: None, part: None, ..id.clone() }.to_string();
    let all = || names.iter().filter(|name| is_rows(name)).cloned().collect();
    Err(match (&id.file, &id.part) {
        (Some(file), _) => HubError::NoFile { id: repo, file: file.clone(), holds: all() },
        (None, Some(part)) if part.split.is_some() || holds().is_empty() => {
            HubError::NothingWanted { id: repo, expected: words(part), holds: all() }
        }
        (None, _) => HubError::NothingWanted { id: repo, expected: format!("data files {split}"), holds: all() },
    })
}

fn is_rows(name: &str) -> bool {
    !name.starts_with('.') && source::is_data(name)
}

/// Of Parquet, Arrow and JSON, of CSV, and of text, the first that is there: repositories have copies of their rows as CSV, and notes.
fn one_format(names: Vec<&String>) -> Vec<&String> {
    let (texts, rows): (Vec<&String>, Vec<_>) = names.into_iter().partition(|name| source::is_text(name));
    let (tables, objects): (Vec<&String>, Vec<_>) = rows.into_iter().partition(|name| source::is_csv(name));
    [objects, tables, texts].into_iter().find(|found| !found.is_empty()).unwrap_or_default()
}

/// The files of a config and a split, as the Hub lays them out: `config/split-00000-of-00001.parquet`, `config/split/0000.parquet`,
/// `data/split-…`.
fn choose_part<'n>(id: &Id, part: &DataPart, names: &'n [String]) -> Result<Vec<&'n String>, HubError> {
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    let is_split = |split: &String, name: &str| name.split(|c: char| !is_letter(c)).any(|word| word == split);
    let in_split = |name: &&String| is_rows(name) && part.split.as_ref().is_none_or(|split| is_split(split, name));
    let split_files: Vec<&String> = names.iter().filter(in_split).collect();
    let in_folder = |config: &str| -> Vec<&String> {
        split_files.iter().copied().filter(|name| folders(name).any(|folder| folder == config)).collect()
    };
    match &part.config {
        Some(config) if config != DEFAULT => Ok(in_folder(config)),
        config => match in_folder(DEFAULT) {
            found if found.is_empty() => without_config(id, part, config.is_some(), split_files),
            found => Ok(found),
        },
    }
}

/// The config `default` where no folder has its name: the files in no config's folder. Where a split was asked for alone and there are
/// none, those of the only config.
fn without_config<'n>(
    id: &Id,
    part: &DataPart,
    is_named: bool,
    split_files: Vec<&'n String>,
) -> Result<Vec<&'n String>, HubError> {
    let config = |name: &&String| config_of(name, part.split.as_deref()).map(str::to_owned);
    let configs: BTreeSet<String> = split_files.iter().filter_map(config).collect();
    let outside: Vec<&String> = split_files.iter().copied().filter(|name| config(name).is_none()).collect();
    match (&part.split, configs.len()) {
        _ if is_named || !outside.is_empty() => Ok(outside),
        (Some(split), 2..) => {
            let (id, split) = (Id { part: None, ..id.clone() }.to_string(), split.clone());
            Err(HubError::SeveralConfigs { id, split, configs: configs.into_iter().collect() })
        }
        _ => Ok(split_files),
    }
}

/// The first folder that is neither `data` nor named after a split.
fn config_of<'n>(name: &'n str, split: Option<&str>) -> Option<&'n str> {
    let words = || source::VALIDATION.into_iter().chain(source::TEST).chain(["train"]).chain(split);
    let is_split = |folder: &str| words().any(|word| word == folder);
    folders(name).find(|folder| *folder != "data" && !is_split(folder))
}

fn folders(name: &str) -> impl Iterator<Item = &str> {
    let (folders, _) = name.rsplit_once('/').unwrap_or_default();
    folders.split('/').filter(|folder| !folder.is_empty())
}

fn words(part: &DataPart) -> String {
    let config = part.config.iter().map(|config| format!("config {config:?} (a folder of that name)"));
    let split = part.split.iter().map(|split| format!("split {split:?} (a word of the file's path)"));
    let both: Vec<String> = config.chain(split).collect();
    format!(
        "data files of {}; name files instead (owner/name/file), or try owner/name@refs/convert/parquet{part}, where the Hub keeps its own copy",
        both.join(" and ")
    )
}

/// The files of a name, of a glob, or of a folder (data files of one format).
fn named_files(file: &str, names: &[String]) -> Vec<String> {
    let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
    let pattern = glob::Pattern::new(file).ok();
    let matches =
        |name: &&String| *name == file || pattern.as_ref().is_some_and(|pattern| pattern.matches_with(name, options));
    let is_inside = |name: &&String| name.strip_prefix(file).is_some_and(|rest| rest.starts_with('/')) && is_rows(name);
    let mut found: Vec<&String> = names.iter().filter(matches).collect();
    if found.is_empty() {
        found = one_format(names.iter().filter(is_inside).collect());
    }
    found.into_iter().cloned().collect()
}

impl std::fmt::Display for DataSplit {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(match self {
            Self::Train => "to train on",
            Self::Validation => {
                "to validate on (validation, valid, val, dev, eval or test in their names); name one: owner/name/file"
            }
            Self::Any | Self::HeldOut => "of a kind that is read",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::id;

    fn names(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    fn id() -> Id {
        id::model("no-such-owner/name").unwrap()
    }

    fn data_of(file: Option<&str>, all: &str, split: DataSplit) -> Result<String, HubError> {
        let id = Id { file: file.map(str::to_owned), ..id() };
        Wanted::Data(split).choose(&id, &names(all)).map(|chosen| chosen.join(" "))
    }

    #[test]
    fn a_backbone_is_config_tokenizer_and_one_copy_of_the_weights() {
        let all = names(
            "README.md config.json consolidated.safetensors model-1.safetensors model.safetensors.index.json pytorch_model.bin tokenizer.json tokenizer.model original/config.json",
        );
        let chosen = Wanted::Backbone.choose(&id(), &all).unwrap();
        assert_eq!(chosen.join(" "), "config.json tokenizer.json tokenizer.model");
        let folder = tempfile::tempdir().unwrap();
        let write = |text: &str| {
            let path = folder.path().join(WEIGHTS[0][0]);
            crate::files::write_atomic(&path, |out| std::io::Write::write_all(out, text.as_bytes())).unwrap();
        };
        write(
            r#"{"weight_map": {"a": "model-1.safetensors", "b": "consolidated.safetensors", "c": "model-1.safetensors"}}"#,
        );
        let weights = Wanted::Backbone.weights(&id(), folder.path(), &all).unwrap();
        assert_eq!(weights.join(" "), "model.safetensors.index.json consolidated.safetensors model-1.safetensors");
        let path = folder.path().join(CONFIG);
        let config = r#"{"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "vocab_size": 8, "max_position_embeddings": 16, "tie_word_embeddings": false}"#;
        crate::files::write_atomic(&path, |out| std::io::Write::write_all(out, config.as_bytes())).unwrap();
        write(
            r#"{"weight_map": {"model.norm.weight": "model-1.safetensors", "model.layers.0": "consolidated.safetensors"}}"#,
        );
        let output = Wanted::BackboneOutput(OutputPart::NormAndLmHead).weights(&id(), folder.path(), &all).unwrap();
        assert_eq!(output.join(" "), "model.safetensors.index.json model-1.safetensors", "without decoder layers");
        write(r#"{"weight_map": {"a": "../../x.safetensors"}}"#);
        assert!(matches!(Wanted::Backbone.weights(&id(), folder.path(), &all), Err(HubError::UnsafeName { .. })));
        let chosen = |text| Wanted::Backbone.weights(&id(), folder.path(), &names(text));
        assert_eq!(chosen("config.json model.safetensors pytorch_model.bin").unwrap(), ["model.safetensors"]);
        let both = "config.json model.safetensors model-1.safetensors model.safetensors.index.json";
        assert_eq!(chosen(both).unwrap(), ["model.safetensors"], "as transformers");
        assert_eq!(chosen("config.json pytorch_model.bin training_args.bin").unwrap(), ["pytorch_model.bin"]);
        assert_eq!(chosen("config.json model.gguf").unwrap(), [""; 0], "it was chosen with the config");
        assert!(Wanted::BackboneWithoutWeights.weights(&id(), folder.path(), &all).unwrap().is_empty());
    }

    #[test]
    fn a_gguf_file_is_chosen_by_name_or_quantisation_where_there_is_nothing_else() {
        let chosen = |place: &str, all: &str| {
            let id = id::model(place).unwrap();
            Wanted::Backbone.choose(&id, &names(all)).map(|chosen| chosen.join(" ")).map_err(|error| error.to_string())
        };
        let all = "README.md config.json m-IQ4_K_M.gguf m-Q4_K_M-00001-of-00002.gguf m-Q4_K_M-00002-of-00002.gguf m-Q8_0.gguf mmproj-f16.gguf";
        let shards = "m-Q4_K_M-00001-of-00002.gguf m-Q4_K_M-00002-of-00002.gguf";
        assert_eq!(chosen("no-such-owner/name", all).unwrap(), shards);
        assert_eq!(chosen("no-such-owner/name:q8_0", all).unwrap(), "m-Q8_0.gguf");
        assert_eq!(chosen("no-such-owner/name/m-Q8_0.gguf", all).unwrap(), "m-Q8_0.gguf");
        assert_eq!(chosen("no-such-owner/name", "q/a.gguf mmproj.gguf").unwrap(), "q/a.gguf", "the only one");
        let error = chosen("no-such-owner/name:Q6_K", all).unwrap_err();
        assert!(error.contains("GGUF file of one model in Q6_K") && error.contains("m-Q8_0.gguf"), "{error}");
        assert!(chosen("no-such-owner/name/x.gguf", all).unwrap_err().contains("GGUF file x.gguf"));
        assert!(
            chosen("no-such-owner/name", "a-Q8_0.gguf a-Q6_K.gguf").unwrap_err().contains("in Q4_K_M (the default)")
        );
        let with_folder = "config.json model.safetensors m-Q4_K_M.gguf";
        assert_eq!(chosen("no-such-owner/name", with_folder).unwrap(), "config.json");
        assert_eq!(chosen("no-such-owner/name:Q4_K_M", with_folder).unwrap(), "m-Q4_K_M.gguf");
        assert!(Wanted::Heads.choose(&id::model("no-such-owner/name:Q4_0").unwrap(), &names(all)).is_err());
    }

    #[test]
    fn heads_are_what_lies_beside_them_and_no_checkpoint() {
        let all = names(
            "README.md adapter_config.json backbone/model.safetensors config.json heads.safetensors medusa_lm_head.pt step-000001/heads.safetensors",
        );
        let chosen = Wanted::Heads.choose(&id(), &all).unwrap();
        assert_eq!(chosen.join(" "), "adapter_config.json backbone/model.safetensors config.json heads.safetensors");
        let original = Wanted::Heads.choose(&id(), &names("config.json medusa_lm_head.pt")).unwrap();
        assert_eq!(original.join(" "), "config.json medusa_lm_head.pt");
        assert!(Wanted::Heads.choose(&id(), &names("config.json")).is_err());
    }

    #[test]
    fn a_data_sets_splits_are_kept_apart() {
        let all = "README.md data/test-0.parquet data/train-0.parquet data/train-1.parquet data/validation-0.parquet dataset_infos.json";
        assert_eq!(data_of(None, all, DataSplit::Train).unwrap(), "data/train-0.parquet data/train-1.parquet");
        assert_eq!(data_of(None, all, DataSplit::Validation).unwrap(), "data/validation-0.parquet");
        assert_eq!(data_of(None, "a.jsonl a_test.jsonl.zst", DataSplit::Validation).unwrap(), "a_test.jsonl.zst");
        assert_eq!(data_of(None, "latest.jsonl", DataSplit::Train).unwrap(), "latest.jsonl");
        assert_eq!(data_of(None, all, DataSplit::Any).unwrap().split(' ').count(), 4);
        assert_eq!(data_of(None, all, DataSplit::HeldOut).unwrap(), "data/validation-0.parquet");
        assert_eq!(data_of(None, "train.jsonl more.jsonl", DataSplit::HeldOut).unwrap(), "train.jsonl more.jsonl");
        assert_eq!(
            data_of(Some("data/train-*"), all, DataSplit::Any).unwrap(),
            "data/train-0.parquet data/train-1.parquet"
        );
        assert_eq!(data_of(Some("data"), all, DataSplit::Any).unwrap().split(' ').count(), 4);
        let copies = "LICENSE.txt en/LICENSE.txt en/notes.txt en/rows.csv en/rows.jsonl.gz requirements.txt rows.csv";
        assert_eq!(data_of(None, copies, DataSplit::Any).unwrap(), "en/rows.jsonl.gz");
        assert_eq!(data_of(Some("en"), copies, DataSplit::Any).unwrap(), "en/rows.jsonl.gz");
        assert_eq!(data_of(Some("en/rows.csv"), copies, DataSplit::Any).unwrap(), "en/rows.csv");
        assert_eq!(data_of(None, "a.txt.gz b.TSV.zst README.txt", DataSplit::Train).unwrap(), "b.TSV.zst");
        assert_eq!(data_of(None, "a.txt.gz b.txt README.txt", DataSplit::Train).unwrap(), "a.txt.gz b.txt");
        assert!(matches!(data_of(Some("data/nothing"), all, DataSplit::Any), Err(HubError::NoFile { .. })));
        assert!(matches!(data_of(None, "train.jsonl", DataSplit::Validation), Err(HubError::NothingWanted { .. })));
    }

    #[test]
    fn config_and_split_are_folders_and_words() {
        let chosen = |part: &str, all: &str, split: DataSplit| {
            let id = id::data(&format!("no-such-owner/name:{part}")).unwrap();
            Wanted::Data(split).choose(&id, &names(all)).map(|chosen| chosen.join(" ")).map_err(|e| e.to_string())
        };
        let gsm = "README.md LICENSE.txt main/train-00000-of-00001.parquet main/test-00000-of-00001.parquet socratic/train-00000-of-00001.parquet";
        assert_eq!(chosen("main", gsm, DataSplit::Train).unwrap(), "main/train-00000-of-00001.parquet");
        assert_eq!(chosen("main:test", gsm, DataSplit::Train).unwrap(), "main/test-00000-of-00001.parquet");
        assert_eq!(chosen("main", gsm, DataSplit::HeldOut).unwrap(), "main/test-00000-of-00001.parquet");
        let chat = "data/train_gen-0.parquet data/train_sft-0.parquet data/test_sft-0.parquet";
        assert_eq!(chosen(":train_sft", chat, DataSplit::Any).unwrap(), "data/train_sft-0.parquet");
        assert_eq!(chosen("default:train_sft", chat, DataSplit::Any).unwrap(), "data/train_sft-0.parquet");
        assert_eq!(
            chosen("en:train", "en/c4-train.00000.json.gz fr/c4-train.0.json.gz", DataSplit::Train).unwrap(),
            "en/c4-train.00000.json.gz"
        );
        assert_eq!(
            chosen("en:test", "en/test/0000.parquet en/train/0000.parquet", DataSplit::Train).unwrap(),
            "en/test/0000.parquet"
        );
        let error = chosen(":train", gsm, DataSplit::Train).unwrap_err();
        let expected = "no-such-owner/name has several configs with data files of split \"train\": main, socratic; name one, such as \
                        no-such-owner/name:main:train";
        assert_eq!(error, expected);
        assert_eq!(
            chosen(":test", gsm, DataSplit::Train).unwrap(),
            "main/test-00000-of-00001.parquet",
            "the only config"
        );
        assert!(chosen("default:train", gsm, DataSplit::Train).unwrap_err().contains("no data files of config"));
        let folder = "default/train/0.parquet my_default_x/train/0.parquet";
        assert_eq!(chosen(":train", folder, DataSplit::Train).unwrap(), "default/train/0.parquet");
        assert_eq!(chosen("default", folder, DataSplit::Train).unwrap(), "default/train/0.parquet");
        assert_eq!(
            chosen(":train", "data/train/0.parquet x/train/0.parquet", DataSplit::Train).unwrap(),
            "data/train/0.parquet"
        );
        let error = chosen("xx:train", gsm, DataSplit::Train).unwrap_err();
        assert!(
            error.contains("no data files of config \"xx\" (a folder of that name) and split \"train\""),
            "{error}"
        );
        assert!(error.contains("refs/convert/parquet:xx:train") && error.contains("socratic/train"), "{error}");
    }
}
