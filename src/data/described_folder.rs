//! Folders with a file that lists their data files: saved by datasets.save_to_disk, or cloned from the Hub.

use std::io;
use std::path::{Component, Path, PathBuf};

use glob::Pattern;
use saphyr::{LoadableYamlNode, Yaml};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bounds::JSON_FILE_BYTES;
use crate::files::{self, FileError, failed};

/// Why the files of a folder are not known.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    /// A file that names the others, and is not right.
    #[error("{}: expected {expected}, got {got}", path.display())]
    Wrong { path: PathBuf, expected: &'static str, got: String },
    /// A card of several data sets.
    #[error(
        "{} describes several data sets ({}) and none as the default; name the files of one", path.display(), configs.join(", ")
    )]
    SeveralConfigs { path: PathBuf, configs: Vec<String> },
    /// A data set of splits of which none is for training.
    #[error(
        "{} has the splits {} and none named train; name the folder or the files of one", path.display(), splits.join(", ")
    )]
    NoTrainSplit { path: PathBuf, splits: Vec<String> },
    /// A file that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
}

/// What a folder says of its files.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DescribedFolder {
    /// Files, folders and globs of the training rows.
    pub(super) train: Vec<PathBuf>,
    pub(super) left_out: Option<LeftOutSplits>,
}

/// Splits of a data set that are not read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftOutSplits {
    /// The file that names them.
    pub path: PathBuf,
    pub splits: Vec<String>,
}

const TRAIN: &str = "train";
/// Bytes of the part of a data set's card that names its files.
const CONFIGS_BYTES: usize = 64 << 10;

/// `state.json` of `save_to_disk`. Beside its files lie those in which `map` keeps what it computed.
#[derive(Deserialize)]
struct DatasetState {
    #[serde(rename = "_data_files")]
    data_files: Vec<DatasetFile>,
}

#[derive(Deserialize)]
struct DatasetFile {
    filename: PathBuf,
}

/// `dataset_dict.json` of `save_to_disk`: each split is a folder.
#[derive(Deserialize)]
struct DatasetSplits {
    splits: Vec<String>,
}

/// A data set of a card.
struct CardConfig {
    name: String,
    is_default: bool,
    splits: Vec<CardSplit>,
}

struct CardSplit {
    name: String,
    patterns: Vec<String>,
}

/// The data files that a folder's own metadata lists; None without such metadata.
pub(super) fn describe(folder: &Path) -> Result<Option<DescribedFolder>, DescriptionError> {
    let path = folder.join("state.json");
    if let Some(DatasetState { data_files }) = written_by_datasets(&path, "_data_files")? {
        let files = data_files.into_iter().map(|file| inside(folder, &path, &file.filename));
        return Ok(Some(DescribedFolder { train: files.collect::<Result<_, _>>()?, left_out: None }));
    }
    let path = folder.join("dataset_dict.json");
    if let Some(DatasetSplits { splits }) = written_by_datasets(&path, "splits")? {
        let splits = splits.into_iter().map(|name| CardSplit { patterns: vec![name.clone()], name });
        return train_split(folder, &path, splits.collect()).map(Some);
    }
    let path = folder.join("README.md");
    match text(&path)?.as_deref().and_then(configs_of) {
        Some(configs) => {
            train_split(folder, &path, default_config(&path, configs_read(&path, &configs)?)?.splits).map(Some)
        }
        None => Ok(None),
    }
}

/// The configs of a data set's card.
fn configs_read(path: &Path, configs: &str) -> Result<Vec<CardConfig>, DescriptionError> {
    let wrong = |got: String| wrong(path, "a list of configs with data_files in the front matter", got);
    if configs.len() > CONFIGS_BYTES || configs.contains("- - -") {
        return Err(wrong("more than a list of files".to_owned()));
    }
    let documents = Yaml::load_from_str(configs).map_err(|error| wrong(error.to_string()))?;
    let listed = documents.first().and_then(|document| document.as_mapping_get("configs")?.as_sequence());
    let configs = listed.ok_or_else(|| wrong("something else".to_owned()))?.iter().map(config_of);
    let configs = configs.collect::<Option<Vec<_>>>();
    configs.ok_or_else(|| wrong("a config without config_name, or without data_files".to_owned()))
}

/// The lines of a card's front matter that are about configs.
fn configs_of(card: &str) -> Option<String> {
    let front = card.strip_prefix("---")?.split("\n---").next()?;
    let lines = front.lines().skip_while(|line| !line.starts_with("configs:"));
    let is_inner = |line: &str| line.starts_with([' ', '\t', '-', '#']) || line.trim().is_empty();
    let lines = lines.enumerate().take_while(|(at, line)| *at == 0 || is_inner(line));
    let block: Vec<&str> = lines.map(|(_, line)| line).collect();
    (!block.is_empty()).then(|| block.join("\n"))
}

fn config_of(config: &Yaml) -> Option<CardConfig> {
    let texts = |value: &Yaml| match value.as_str() {
        Some(text) => Some(vec![text.to_owned()]),
        None => value.as_sequence()?.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
    };
    let name = config.as_mapping_get("config_name")?.as_str()?.to_owned();
    let data_files = config.as_mapping_get("data_files")?;
    let splits = match texts(data_files) {
        Some(patterns) => vec![CardSplit { name: TRAIN.to_owned(), patterns }],
        None => {
            let split = |item: &Yaml| {
                let name = item.as_mapping_get("split")?.as_str()?.to_owned();
                Some(CardSplit { name, patterns: texts(item.as_mapping_get("path")?)? })
            };
            data_files.as_sequence()?.iter().map(split).collect::<Option<_>>()?
        }
    };
    let is_default = name == "default" || config.as_mapping_get("default").and_then(Yaml::as_bool) == Some(true);
    Some(CardConfig { name, is_default, splits })
}

fn default_config(path: &Path, mut configs: Vec<CardConfig>) -> Result<CardConfig, DescriptionError> {
    let several = |configs: &[CardConfig]| {
        let configs = configs.iter().map(|config| config.name.clone()).collect();
        DescriptionError::SeveralConfigs { path: path.to_owned(), configs }
    };
    let mut defaults = (0..configs.len()).filter(|at| configs.len() == 1 || configs[*at].is_default);
    match (defaults.next(), defaults.next()) {
        (Some(at), None) => Ok(configs.swap_remove(at)),
        _ => Err(several(&configs)),
    }
}

/// The split `train`, or the only one.
fn train_split(folder: &Path, path: &Path, mut splits: Vec<CardSplit>) -> Result<DescribedFolder, DescriptionError> {
    let train = splits.iter().position(|split| split.name == TRAIN).or((splits.len() == 1).then_some(0));
    let names = |splits: &[CardSplit]| splits.iter().map(|split| split.name.clone()).collect::<Vec<_>>();
    let Some(train) = train else {
        return Err(DescriptionError::NoTrainSplit { path: path.to_owned(), splits: names(&splits) });
    };
    let train = splits.remove(train).patterns.into_iter().map(|pattern| inside(folder, path, Path::new(&pattern)));
    let left_out = LeftOutSplits { path: path.to_owned(), splits: names(&splits) };
    let left_out = (!splits.is_empty()).then_some(left_out);
    Ok(DescribedFolder { train: train.collect::<Result<_, _>>()?, left_out })
}

/// A path that a file of the folder names, which has to be within the folder.
fn inside(folder: &Path, path: &Path, named: &Path) -> Result<PathBuf, DescriptionError> {
    let parts: PathBuf = named.components().filter(|part| *part != Component::CurDir).collect();
    let is_inner = parts.components().all(|part| matches!(part, Component::Normal(_)));
    if is_inner && parts != Path::new("") {
        let as_named = folder.join(&parts);
        if as_named.exists() {
            return Ok(as_named);
        }
        let folder = Pattern::escape(&folder.to_string_lossy()); // what is no name is a glob, of which the folder's name is no part
        return Ok(Path::new(&folder).join(parts));
    }
    Err(wrong(path, "files of its own folder", format!("{:?}", named.display().to_string())))
}

/// A file of datasets.save_to_disk, which has this key; `None` for one of another program.
fn written_by_datasets<T: for<'de> Deserialize<'de>>(path: &Path, key: &str) -> Result<Option<T>, DescriptionError> {
    let Some(text) = text(path)? else { return Ok(None) };
    let expected = "JSON as datasets.save_to_disk writes it";
    let read: Value = serde_json::from_str(&text).map_err(|error| wrong(path, expected, error.to_string()))?;
    let read = read.get(key).is_some().then(|| serde_json::from_value(read));
    read.transpose().map_err(|error| wrong(path, expected, error.to_string()))
}

/// `None` for a file that does not exist, and for one that is no text.
fn text(path: &Path) -> Result<Option<String>, DescriptionError> {
    match files::read_at_most(path, JSON_FILE_BYTES) {
        Ok(text) => Ok(String::from_utf8(text).ok()),
        Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::InvalidData].contains(&error.kind()) => Ok(None),
        Err(error) => Err(failed("read", path)(error).into()),
    }
}

fn wrong(path: &Path, expected: &'static str, got: String) -> DescriptionError {
    DescriptionError::Wrong { path: path.to_owned(), expected, got }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::source;
    use super::*;

    struct Folder(tempfile::TempDir);

    #[expect(clippy::disallowed_methods, reason = "files of a test")]
    impl Folder {
        fn new(files: &[(&str, &str)]) -> Self {
            let folder = Self(tempfile::tempdir().unwrap());
            for (name, text) in files {
                let path = folder.0.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            folder
        }

        fn found(&self) -> Result<String, String> {
            let folder = self.0.path().display().to_string();
            let inner = |path: &Path| path.display().to_string().replace(&format!("{folder}/"), "");
            let found = source::find(std::slice::from_ref(&folder));
            let found = found.map_err(|error| error.to_string().replace(&folder, "DIR"))?;
            let files = found.files.iter().map(|path| inner(path)).collect::<Vec<_>>().join(" ");
            let left_out = found.splits_left_out.iter().map(|left| format!(" without {}", left.splits.join(" ")));
            Ok(files + &left_out.collect::<String>())
        }
    }

    #[test]
    fn a_saved_data_set_is_the_files_that_its_state_names() {
        let state = r#"{"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0f"}"#;
        let saved = [("data-00000-of-00001.arrow", "x"), ("cache-0f.arrow", "x"), ("dataset_info.json", "{}")];
        let folder = Folder::new(&[&saved[..], &[("state.json", state)]].concat());
        assert_eq!(folder.found().unwrap(), "data-00000-of-00001.arrow");
        let splits = ("dataset_dict.json", r#"{"splits": ["test", "train"]}"#);
        let dict = Folder::new(&[
            splits,
            ("train/state.json", state),
            ("train/data-00000-of-00001.arrow", "x"),
            ("test/a.arrow", "x"),
        ]);
        assert_eq!(dict.found().unwrap(), "train/data-00000-of-00001.arrow without test");
        let others = Folder::new(&[("dataset_dict.json", r#"{"splits": ["easy", "hard"]}"#)]);
        assert_eq!(
            others.found().unwrap_err(),
            "DIR/dataset_dict.json has the splits easy, hard and none named train; name the folder or the files of one"
        );
        let missing = Folder::new(&[("state.json", state)]).found().unwrap_err();
        assert_eq!(missing, "data file DIR/data-00000-of-00001.arrow does not exist");
        let outside = Folder::new(&[("state.json", r#"{"_data_files": [{"filename": "../x.arrow"}]}"#)]);
        assert_eq!(
            outside.found().unwrap_err(),
            "DIR/state.json: expected files of its own folder, got \"../x.arrow\""
        );
    }

    #[test]
    fn files_of_other_programs_name_no_data() {
        for (name, text) in [("state.json", r#"{"step": 3}"#), ("dataset_dict.json", r#"{"train": []}"#)] {
            assert_eq!(Folder::new(&[(name, text), ("rows.jsonl", "{}")]).found().unwrap(), "rows.jsonl");
        }
        for readme in ["<html></html>", "---\n\u{0}"] {
            assert_eq!(Folder::new(&[("README.md", readme), ("rows.jsonl", "{}")]).found().unwrap(), "rows.jsonl");
        }
    }

    #[test]
    fn a_folder_may_be_named_as_a_glob() {
        let card = "---\nconfigs:\n- config_name: a\n  data_files: \"data/*\"\n---\n";
        let folder = Folder::new(&[("run[1]/README.md", card), ("run[1]/data/a.jsonl", "{}")]);
        let found = source::find(&[folder.0.path().join("run[1]").display().to_string()]).unwrap();
        assert_eq!(found.files, [folder.0.path().join("run[1]/data/a.jsonl")]);
    }

    #[test]
    fn a_cards_configs_say_which_files_are_data() {
        let card =
            |configs: &str| format!("---\nlicense: mit\nconfigs:\n{configs}\ntags: [a]\n---\n# Title\nconfigs: none\n");
        let files = [("data/train-0.parquet", "x"), ("data/test-0.parquet", "x"), ("old.jsonl", "{}")];
        let found = |configs: &str| {
            let card = card(configs);
            Folder::new(&[&files[..], &[("README.md", card.as_str())]].concat()).found()
        };
        let splits = "- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n  - split: test\n    path: [data/test-*]";
        assert_eq!(found(splits).unwrap(), "data/train-0.parquet without test");
        assert_eq!(found("- config_name: a\n  data_files: old.jsonl").unwrap(), "old.jsonl");
        assert_eq!(
            found("- config_name: a\n  data_files:\n    - old.jsonl\n    - \"data/*\"").unwrap(),
            "old.jsonl data/test-0.parquet data/train-0.parquet"
        );
        let two = "- config_name: a\n  data_files: old.jsonl\n- config_name: b\n  data_files: data/*\n";
        assert_eq!(
            found(two).unwrap_err(),
            "DIR/README.md describes several data sets (a, b) and none as the default; name the files of one"
        );
        assert_eq!(found(&format!("{two}  default: true")).unwrap(), "data/test-0.parquet data/train-0.parquet");
        let without = "DIR/README.md: expected a list of configs with data_files in the front matter, got a config without config_name, or without data_files";
        assert_eq!(found("- config_name: a\n  data_dir: data").unwrap_err(), without);
        assert!(
            found("- config_name: a\n  data_files: none-*.jsonl")
                .unwrap_err()
                .ends_with("none-*.jsonl\" matches no file")
        );
        assert!(
            found("- config_name: a\n  data_files: /etc/passwd")
                .unwrap_err()
                .contains("expected files of its own folder")
        );
        assert!(found("- config_name: [a\n").unwrap_err().starts_with("DIR/README.md: expected a list of configs"));
        let plain = Folder::new(&[("README.md", "---\nlicense: mit\n---\nconfigs:\n- none"), ("old.jsonl", "{}")]);
        assert_eq!(plain.found().unwrap(), "old.jsonl");
    }
}
